"""Rows out of WordNet: which word a definition is of, which subject or kind it belongs to, what a word means in a
sentence. Tens of thousands of texts and options, so that a model learns to compare an option with a state and cannot
learn the options by heart. Trained on, never judged by.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recipes.decider.rows import Row, choice, noul, one_hot

DOMAIN = "dictionary"
LONGEST_GLOSS = 160
FEWEST_OF_SUBJECT = 14
_KINDS = {
    4: ("activity", "something that people do"),
    5: ("animal", "a living creature"),
    6: ("object", "a thing made by people"),
    7: ("quality", "a property of someone or something"),
    8: ("body part", "a part of a body"),
    9: ("idea", "knowledge, thought or belief"),
    10: ("communication", "words, signs and messages"),
    11: ("event", "something that happens"),
    12: ("feeling", "an emotion"),
    13: ("food", "something to eat or drink"),
    14: ("group", "people or things taken together"),
    15: ("place", "somewhere on a map"),
    18: ("person", "a human being"),
    19: ("natural phenomenon", "weather, forces and the like"),
    20: ("plant", "a tree, flower or herb"),
    21: ("possession", "money and what is owned"),
    22: ("process", "how something comes about by itself"),
    23: ("amount", "how many or how much"),
    25: ("shape", "a form in space"),
    26: ("state", "how someone or something is"),
    27: ("substance", "a material"),
    28: ("time", "a moment or a period"),
}
"""WordNet's file of nouns → its name and what it stands for, in our words."""


@dataclass(frozen=True)
class Sense:
    words: tuple[str, ...]
    gloss: str
    examples: tuple[str, ...]
    part: str
    """Of speech, and WordNet's file: senses of one part are of a kind."""
    kind: int
    subject: str
    """"" where WordNet names none."""


@dataclass(frozen=True)
class Dictionary:
    senses: list[Sense]
    by_part: Mapping[str, list[Sense]]
    by_subject: Mapping[str, list[Sense]]
    subjects: Mapping[str, str]
    """Subject → what it is."""
    with_examples: list[Sense]


def dictionary_rows(files: Mapping[str, bytes], count: int) -> Iterator[Row]:
    """`files`: WordNet's data.noun, data.verb and data.adj."""
    known = read_dictionary(files)
    makers = [word_row, word_row, subject_row, subject_row, kind_row, meaning_row]
    for at in range(count):
        rng = random.Random(f"{DOMAIN}:{at}")
        yield rng.choice(makers)(rng, known)


def read_dictionary(files: Mapping[str, bytes]) -> Dictionary:
    lines = {
        (name.rpartition(".")[2], line.split(" ", 1)[0]): line
        for name, data in sorted(files.items())
        for line in data.decode("latin-1").splitlines()
        if not line.startswith(" ")
    }
    letters = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}
    senses, by_part, by_subject = [], defaultdict(list), defaultdict(list)
    subjects: dict[str, str] = {}
    for (part, _), line in lines.items():
        fields = line.partition(" | ")[0].split()
        gloss, examples = _gloss(line)
        subject = ""
        if ";c" in fields:
            at = fields.index(";c")
            head = lines.get((letters[fields[at + 2]], fields[at + 1]))
            if head is not None:
                subject = _plain(head.split()[4])
                subjects.setdefault(subject, _gloss(head)[0])
        if not 15 <= len(gloss) <= LONGEST_GLOSS:
            continue
        words = tuple(_plain(word) for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2])
        sense = Sense(words, gloss, examples, f"{part}.{fields[1]}", int(fields[1]) if part == "noun" else 0, subject)
        senses.append(sense)
        by_part[sense.part].append(sense)
        if subject:
            by_subject[subject].append(sense)
    large = {name: some for name, some in by_subject.items() if len(some) >= FEWEST_OF_SUBJECT}
    with_examples = [
        one for one in senses if any(re.search(rf"\b{re.escape(one.words[0])}\b", e) for e in one.examples)
    ]
    return Dictionary(senses, by_part, large, subjects, with_examples)


def _plain(word: str) -> str:
    return re.sub(r"\(\w+\)$", "", word).replace("_", " ")


def _gloss(line: str) -> tuple[str, tuple[str, ...]]:
    """The definition, and the sentences that it is followed by in quotation marks."""
    text = line.partition(" | ")[2].strip()
    definition = text.split('; "')[0].split(";")[0].strip()
    return re.sub(r"^\([^)]*\)\s*", "", definition), tuple(re.findall(r'"([^"]{15,160})"', text))


def word_row(rng: random.Random, known: Dictionary) -> Row:
    """Definition → word."""
    sense = rng.choice(known.senses)
    word = rng.choice(sense.words)
    others = _others(rng, known, sense, rng.randint(1, 8))
    if rng.random() < 0.25:
        holds = rng.random() < 0.5
        said = word if holds else rng.choice(others[0].words)
        form = rng.choice(['Is "{}" meant?', "Does this define {}?", "This describes {}.", "Is this about {}?"])
        return Row(DOMAIN, sense.gloss, noul(form.format(said)), one_hot(int(holds), 2))
    names = [word, *(rng.choice(one.words) for one in others)]
    asked = rng.choice(["Which word is defined?", "What is this?", "What is meant?", "Pick what fits the text.", None])
    return _choice_row(rng, sense.gloss, asked, names, [None] * len(names))


def meaning_row(rng: random.Random, known: Dictionary) -> Row:
    """A sentence, and what a word in it means."""
    sense = rng.choice(known.with_examples)
    sentence = rng.choice([one for one in sense.examples if sense.words[0] in one] or list(sense.examples))
    others = _others(rng, known, sense, rng.randint(1, 4))
    asked = f'What does "{sense.words[0]}" mean here?'
    if rng.random() < 0.25:
        holds = rng.random() < 0.5
        said = f'Does "{sense.words[0]}" mean this here: {(sense if holds else others[0]).gloss}?'
        return Row(DOMAIN, sentence, noul(said), one_hot(int(holds), 2))
    return _choice_row(rng, sentence, asked, [sense.gloss, *(one.gloss for one in others)], None)


def subject_row(rng: random.Random, known: Dictionary) -> Row:
    """One to three texts of a subject → the subject, among others or, where it is not there, "other"."""
    subject = rng.choice(list(known.by_subject))
    some = rng.sample(known.by_subject[subject], rng.choice([1, 2, 2, 3]))
    state = " ".join(f"{_said(rng, one)}." for one in some)
    wrong = rng.sample([one for one in known.by_subject if one != subject], rng.randint(1, 7))
    if rng.random() < 0.3:
        holds = rng.random() < 0.5
        said = subject if holds else wrong[0]
        form = rng.choice(
            ["Is this about {}?", "Does it belong to {}?", "The text is on {}.", "Is it something else than {}?"]
        )
        right = holds != form.startswith("Is it something else")
        said = known.subjects[said] if rng.random() < 0.3 else said
        return Row(DOMAIN, state, noul(form.format(said)), one_hot(int(right), 2))
    names = [subject, *wrong]
    described: list[str | None] = [known.subjects.get(name) for name in names]
    if rng.random() < 0.15:
        names[0], described[0] = rng.choice(["other", "something else", "none of these"]), "none of the others"
    if rng.random() < 0.5:
        described = [None] * len(names)
    asked = rng.choice(
        ["What is this about?", "Which field is it from?", "Sort this text.", "Subject?", "Pick one.", None]
    )
    return _choice_row(rng, state, asked, names, described)


def _said(rng: random.Random, sense: Sense) -> str:
    if sense.examples and rng.random() < 0.4:
        return rng.choice(sense.examples)
    return f"{sense.words[0]}: {sense.gloss}" if rng.random() < 0.6 else sense.gloss


def kind_row(rng: random.Random, known: Dictionary) -> Row:
    """A noun → whether it is an animal, a place, a feeling…"""
    kind = rng.choice(list(_KINDS))
    sense = rng.choice(known.by_part[f"noun.{kind:02d}"])
    state = rng.choice([sense.words[0], f"{sense.words[0]}: {sense.gloss}", sense.gloss])
    wrong = rng.sample([one for one in _KINDS if one != kind], rng.randint(1, 7))
    if rng.random() < 0.25:
        holds = rng.random() < 0.5
        said = rng.choice(_KINDS[kind if holds else wrong[0]])
        return Row(
            DOMAIN, state, noul(rng.choice(["Is it this: {}?", "It is: {}."]).format(said)), one_hot(int(holds), 2)
        )
    is_described = rng.random() < 0.5
    names = [_KINDS[one][0] for one in (kind, *wrong)]
    texts = [_KINDS[one][1] if is_described else None for one in (kind, *wrong)]
    return _choice_row(rng, state, rng.choice(["What kind of thing is this?", "What is it?", "Kind?"]), names, texts)


def _others(rng: random.Random, known: Dictionary, sense: Sense, count: int) -> list[Sense]:
    """Wrong answers, in half of the cases of the same kind; none shares a word with the right one."""
    pool = known.by_part[sense.part] if rng.random() < 0.5 else known.senses
    found: list[Sense] = []
    while len(found) < count:
        one = rng.choice(pool)
        if not set(one.words) & set(sense.words):
            found.append(one)
    return found


def _choice_row(
    rng: random.Random, state: str, asked: str | None, names: list[str], described: list[str | None] | None
) -> Row:
    """The first name is the right one; the same name is not shown twice."""
    meanings = dict(zip(names, described or [None] * len(names), strict=True))
    shown = rng.sample(list(meanings), len(meanings))
    if len(shown) == 1:
        return Row(DOMAIN, state, noul(f"Is it this: {names[0]}?"), one_hot(1, 2))
    return Row(
        DOMAIN,
        state,
        choice(asked, {name: meanings[name] for name in shown}),
        one_hot(shown.index(names[0]), len(shown)),
    )
