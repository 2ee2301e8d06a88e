"""Domains of our own making: small worlds in which the right answer is known, so that a model learns to read the
question. The same state is asked different things, options come with and without what they mean, are few or many, and
may all be wrong but "other"; statements come as they are and turned round.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.decider.rows import Row, choice, noul, one_hot, score

Meanings = dict[str, dict[str, Any]]
"""Name → {"means": what it stands for, "texts": what is said of it}."""
_WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
TOPICS: Meanings = _WORDS["topics"]
INTENTS: Meanings = _WORDS["intents"]
FEELINGS: Meanings = _WORDS["feelings"]
OPENINGS: list[str] = _WORDS["openings"]
CLOSINGS: list[str] = _WORDS["closings"]
DEADLINES: list[list[str]] = _WORDS["deadlines"]
DEADLINE_SCALES: list[list[str]] = _WORDS["deadline_scales"]
ERRANDS: list[str] = _WORDS["errands"]
FIELDS: dict[str, list[str]] = _WORDS["fields"]
ENTITIES: list[str] = _WORDS["entities"]
ATTRIBUTES: dict[str, list[str]] = _WORDS["attributes"]

Maker = Callable[[random.Random], Row]


def generated_domains(count: int) -> dict[str, list[Row]]:
    """`count` rows of each, equal ones among them."""
    makers: dict[str, Maker] = {
        "topics": topic_row,
        "intents": intent_row,
        "feelings": feeling_row,
        "deadlines": deadline_row,
        "records": record_row,
        "facts": fact_row,
    }
    return {name: [maker(random.Random(f"{name}:{at}")) for at in range(count)] for name, maker in makers.items()}


def topic_row(rng: random.Random) -> Row:
    names = rng.sample(list(TOPICS), 2 if rng.random() < 0.3 else 1)
    phrases = [rng.choice(TOPICS[name]["texts"]) for name in names]
    if len(phrases) == 2:  # the second one is an aside
        state = f"{_sentence(rng, phrases[0])}. {phrases[0].capitalize()}. Apart from that, {phrases[1]}."
        asked = "What is this mainly about?"
    else:
        state, asked = (
            f"{_sentence(rng, phrases[0])}.",
            rng.choice(["What is this about?", "Pick the topic.", "Topic?"]),
        )
    return _meaning_row(rng, "topics", state, names[0], TOPICS, asked, "Is this about {}?", avoid=names)


def intent_row(rng: random.Random) -> Row:
    name = rng.choice(list(INTENTS))
    said = rng.choice(INTENTS[name]["texts"])
    polite = rng.choice(["", "", "hi, ", "hello, ", "please: ", "um, ", "hey there, "])
    end = rng.choice(["", "", "?", "!", ", thanks", " please", ", if you can"])
    asked = rng.choice(["What does the user want?", "Which intent is it?", "Route this request."])
    if rng.random() < 0.2:  # the options are other things that people say
        others = rng.sample([one for one in INTENTS if one != name], rng.randint(1, 3))
        same = rng.choice([one for one in INTENTS[name]["texts"] if one != said])
        options = _shuffled(rng, [same, *(rng.choice(INTENTS[one]["texts"]) for one in others)])
        question = choice("Which of these asks for the same?", dict.fromkeys(options))
        return Row("intents", f"{polite}{said}{end}", question, one_hot(options.index(same), len(options)))
    return _meaning_row(rng, "intents", f"{polite}{said}{end}", name, INTENTS, asked, "Does the user want this: {}?")


def feeling_row(rng: random.Random) -> Row:
    name = rng.choice(list(FEELINGS))
    state = f"{_sentence(rng, rng.choice(FEELINGS[name]['texts']))}."
    asked = rng.choice(["What does the writer feel?", "Which feeling is it?", "Mood of the text?"])
    return _meaning_row(rng, "feelings", state, name, FEELINGS, asked, "Does the writer feel {}?")


def _meaning_row(
    rng: random.Random,
    domain: str,
    state: str,
    name: str,
    meanings: Meanings,
    asked: str,
    statement: str,
    avoid: list[str] | None = None,
) -> Row:
    """A choice among names, described or not, or a yes-or-no question about one of them."""
    wrong = [one for one in meanings if one not in (avoid or [name])]
    if rng.random() < 0.35:
        holds = rng.random() < 0.5
        about = name if holds else rng.choice(wrong)
        said = statement.format(about.replace("_", " ") if rng.random() < 0.5 else meanings[about]["means"])
        return Row(domain, state, noul(said), one_hot(int(holds), 2))
    others = rng.sample(wrong, rng.randint(1, min(7, len(wrong))))
    options = _shuffled(rng, [name, *others])
    is_described = rng.random() < 0.5
    described = {one: meanings[one]["means"] if is_described else None for one in options}
    if rng.random() < 0.15:  # none of them but "other"
        del described[name]
        described["other"] = "none of these" if is_described else None
        name = "other"
    return Row(domain, state, choice(asked, described), one_hot(list(described).index(name), len(described)))


def deadline_row(rng: random.Random) -> Row:
    level = rng.randrange(4)
    parts = [rng.choice(ERRANDS), rng.choice(DEADLINES[level])]
    if rng.random() < 0.3:
        parts.reverse()
    state, kind = " ".join(parts), rng.random()
    if kind < 0.5:
        asked = rng.choice(["How urgent is this?", "How much time pressure is there?", "How soon must it be done?"])
        return Row("deadlines", state, score(asked, rng.choice(DEADLINE_SCALES)), one_hot(level, 4))
    if kind < 0.75:
        return Row("deadlines", state, noul("Must it be done today or at once?"), one_hot(int(level == 3), 2))
    return Row("deadlines", state, noul("Can this wait?"), one_hot(int(level <= 1), 2))


def record_row(rng: random.Random) -> Row:
    fields = rng.sample(list(FIELDS), rng.randint(3, 5))
    record = {field: rng.choice(FIELDS[field]) for field in fields}
    state: object = record if rng.random() < 0.6 else ", ".join(f"{name}: {value}" for name, value in record.items())
    field, kind = rng.choice(fields), rng.random()
    if kind < 0.3:
        asked = rng.choice([f"What is the {field}?", f"Which {field} does the record have?", f"The {field}:"])
        options = _shuffled(rng, FIELDS[field])
        return Row(
            "records", state, choice(asked, dict.fromkeys(options)), one_hot(options.index(record[field]), len(options))
        )
    if kind < 0.5:
        value, holds = _maybe(rng, record[field], FIELDS[field])
        asked = rng.choice([f"Is the {field} {value}?", f"The {field} is {value}.", f"Does it have {field} {value}?"])
        return Row("records", state, noul(asked), one_hot(int(holds), 2))
    if kind < 0.65:
        value, holds = _maybe(rng, record[field], FIELDS[field])
        asked = rng.choice([f"Is the {field} something other than {value}?", f"Is the {field} not {value}?"])
        return Row("records", state, noul(asked), one_hot(int(not holds), 2))
    if kind < 0.85:
        first, second = rng.sample(fields, 2)
        (one, one_holds), (two, two_holds) = (_maybe(rng, record[name], FIELDS[name], 0.7) for name in (first, second))
        asked = f"Is the {first} {one} and the {second} {two}?"
        return Row("records", state, noul(asked), one_hot(int(one_holds and two_holds), 2))
    levels = FIELDS["priority"] if rng.random() < 0.5 else FIELDS["size"]
    name = "priority" if len(levels) == 4 else "size"
    at = rng.randrange(len(levels))
    return Row(
        "records", {**record, name: levels[at]}, score(f"How high is the {name}?", levels), one_hot(at, len(levels))
    )


def fact_row(rng: random.Random) -> Row:
    """Who has what: the one that is asked for is among others like it."""
    people, names = rng.sample(ENTITIES, rng.randint(2, 4)), rng.sample(list(ATTRIBUTES), rng.randint(1, 2))
    facts = {who: {name: rng.choice(ATTRIBUTES[name]) for name in names} for who in people}
    sentences = [f"{who}'s {name} is {value}." for who, known in facts.items() for name, value in known.items()]
    state: object = facts if rng.random() < 0.4 else " ".join(_shuffled(rng, sentences))
    who, name = rng.choice(people), rng.choice(names)
    if rng.random() < 0.5:
        options = _shuffled(rng, ATTRIBUTES[name])
        at = options.index(facts[who][name])
        return Row(
            "facts", state, choice(f"What is {who}'s {name}?", dict.fromkeys(options)), one_hot(at, len(options))
        )
    others = [known[name] for known in facts.values()]
    value, holds = _maybe(rng, facts[who][name], others if len(set(others)) > 1 else ATTRIBUTES[name])
    return Row("facts", state, noul(f"Is {who}'s {name} {value}?"), one_hot(int(holds), 2))


def _maybe(rng: random.Random, true: str, values: list[str], share: float = 0.5) -> tuple[str, bool]:
    """The true value or another one, and which it is."""
    if rng.random() < share:
        return true, True
    return rng.choice([value for value in values if value != true]), False


def _sentence(rng: random.Random, phrase: str) -> str:
    return f"{rng.choice(OPENINGS)}{phrase}{rng.choice(CLOSINGS)}"


def _shuffled(rng: random.Random, items: list[str]) -> list[str]:
    return rng.sample(items, len(items))
