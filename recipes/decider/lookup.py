"""Rows that ask for what a text or a record says of one of several: who has what, in many words and shapes, so that a
model learns to look it up. Names and values come from long lists and are drawn anew for each row, which leaves nothing
to remember. Trained on, never judged by.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from recipes.decider.rows import Row, choice, noul, one_hot, score

DOMAIN = "lookup"
_LISTS = json.loads(Path(__file__).with_name("lookup.json").read_text(encoding="utf-8"))
NAMES: dict[str, list[str]] = _LISTS["names"]
"""Of things that have attributes, by their kind."""
VALUES: dict[str, list[str]] = _LISTS["values"]
"""Attribute → what it can be."""
SENTENCES: dict[str, list[list[str]]] = _LISTS["sentences"]
"""Attribute → [sentence, question] that speak of it in words of their own; of people alone."""
SCALES: dict[str, list[str]] = _LISTS["scales"]
"""Attribute → its levels, the lowest first."""
_PLAIN = [
    "{who}'s {name} is {value}.",
    "The {name} of {who} is {value}.",
    "{who} has the {name} {value}.",
    "{name} of {who}: {value}.",
    "For {who}, the {name} is {value}.",
    "{value} is the {name} of {who}.",
]
_ASKED = ["What is {who}'s {name}?", "What is the {name} of {who}?", "Which {name} does {who} have?", "{who}: {name}?"]
Facts = dict[str, dict[str, str]]


def lookup_row(rng: random.Random) -> Row:
    kind = rng.choice(list(NAMES))
    people = rng.sample(NAMES[kind], rng.choice([1, 2, 2, 3, 3, 4, 5]))
    names = rng.sample(list(VALUES), rng.choice([1, 1, 2, 2, 3] if len(people) > 2 else [1, 2, 3, 4]))
    facts: Facts = {who: {name: rng.choice(VALUES[name]) for name in names} for who in people}
    state, asked_of = _state(rng, facts, is_of_people=kind == "person")
    form = rng.random()
    if form < 0.45:
        return _value_row(rng, state, facts, asked_of)
    if form < 0.55 and len(people) > 1:
        return _holder_row(rng, state, facts)
    if form < 0.62:
        return _scale_row(rng)
    return _statement_row(rng, state, facts, asked_of)


def _state(rng: random.Random, facts: Facts, *, is_of_people: bool) -> tuple[Any, dict[str, str]]:
    """The facts in some shape; and of attributes that it told in words of their own, how to ask for them."""
    shape, asked_of = rng.random(), {}
    if shape < 0.15:
        return {who: dict(known) for who, known in facts.items()}, {}
    if shape < 0.3:
        label = rng.choice(["name", "id", "who", "item"])
        return [{label: who, **known} for who, known in facts.items()], {}
    if shape < 0.4:
        lines = (
            f"{who}: {', '.join(f'{name} {value}' for name, value in known.items())}" for who, known in facts.items()
        )
        return rng.choice(["\n", "; "]).join(lines), {}
    if shape < 0.5 and len(facts) == 1:
        (known,) = facts.values()
        return dict(known), {}
    forms = {}
    for name in next(iter(facts.values())):
        if is_of_people and name in SENTENCES and rng.random() < 0.5:
            forms[name], asked_of[name] = rng.choice(SENTENCES[name])
        else:
            forms[name] = rng.choice(_PLAIN)
    sentences = [
        forms[name].format(who=who, name=name, value=value)
        for who, known in facts.items()
        for name, value in known.items()
    ]
    return " ".join(rng.sample(sentences, len(sentences))), asked_of


def _value_row(rng: random.Random, state: Any, facts: Facts, asked_of: dict[str, str]) -> Row:
    """Which value: those of the others are among the options, and sometimes the right one is not."""
    who, name = rng.choice(list(facts)), rng.choice(list(next(iter(facts.values()))))
    right, told = facts[who][name], list(dict.fromkeys(known[name] for known in facts.values()))
    asked = asked_of[name].format(who=who) if name in asked_of else rng.choice(_ASKED).format(who=who, name=name)
    untold = [value for value in VALUES[name] if value not in told]
    options = [right, *(one for one in told if one != right), *rng.sample(untold, rng.randint(1, min(6, len(untold))))]
    options = options[: rng.randint(2, 9)]
    if rng.random() < 0.12:
        missing = rng.choice(["other", "none of these", "something else"])
        if rng.random() < 0.5:
            right, options = missing, [missing, *untold[: len(options)]]
        else:
            options.append(missing)
    shown = rng.sample(options, len(options))
    return Row(DOMAIN, state, choice(asked, dict.fromkeys(shown)), one_hot(shown.index(right), len(shown)))


def _holder_row(rng: random.Random, state: Any, facts: Facts) -> Row:
    """Who has it: a value that one of them alone has."""
    name = rng.choice(list(next(iter(facts.values()))))
    values = [known[name] for known in facts.values()]
    alone = [who for who, known in facts.items() if values.count(known[name]) == 1]
    shown = rng.sample(list(facts), len(facts))
    if not alone:
        return _statement_row(rng, state, facts, {})
    right = rng.choice(alone)
    asked = rng.choice(["Who has the {0} {1}?", "Whose {0} is {1}?", "Which of them has {1} as {0}?"])
    question = choice(asked.format(name, facts[right][name]), dict.fromkeys(shown))
    return Row(DOMAIN, state, question, one_hot(shown.index(right), len(shown)))


def _statement_row(rng: random.Random, state: Any, facts: Facts, asked_of: dict[str, str]) -> Row:
    """Whether it is so; a wrong value is often another one's."""
    who, name = rng.choice(list(facts)), rng.choice(list(next(iter(facts.values()))))
    right = facts[who][name]
    of_others = [known[name] for known in facts.values() if known[name] != right]
    holds, form = rng.random() < 0.5, rng.random()
    wrong = rng.choice(of_others) if of_others and rng.random() < 0.7 else _another(rng, VALUES[name], right)
    said = right if holds else wrong
    if form < 0.5:
        asked = rng.choice(
            ["Is {w}'s {n} {v}?", "{w}'s {n} is {v}.", "Does {w} have {v} as {n}?", "Is the {n} of {w} {v}?"]
        )
    elif form < 0.7:
        asked, holds = (
            rng.choice(["Is {w}'s {n} not {v}?", "{w}'s {n} is not {v}.", "Is {w}'s {n} something other than {v}?"]),
            not holds,
        )
    elif form < 0.85 and len(facts) > 1:
        other = _another(rng, list(facts), who)
        holds = facts[other][name] == right
        asked = rng.choice(["Do {w} and {o} have the same {n}?", "Have {w} and {o} the same {n}?"]).replace(
            "{o}", other
        )
    else:
        second = rng.choice(list(facts[who]))
        true = rng.random() < 0.7
        also = facts[who][second] if true or second == name else _another(rng, VALUES[second], facts[who][second])
        holds = holds and also == facts[who][second]
        asked = f"Is {{w}}'s {{n}} {{v}} and {{w}}'s {second} {also}?"
    return Row(DOMAIN, state, noul(asked.format(w=who, n=name, v=said)), one_hot(int(holds), 2))


def _scale_row(rng: random.Random) -> Row:
    """How much of one attribute of one of some."""
    name = rng.choice(list(SCALES))
    levels = SCALES[name]
    people = rng.sample(NAMES["thing"], rng.choice([1, 1, 2, 3]))
    facts = {who: {name: rng.choice(levels)} for who in people}
    state, _ = _state(rng, facts, is_of_people=False)
    who = rng.choice(people)
    asked = f"How high is the {name}?" if len(people) == 1 else f"How high is the {name} of {who}?"
    return Row(DOMAIN, state, score(asked, levels), one_hot(levels.index(facts[who][name]), len(levels)))


def _another(rng: random.Random, values: list[str], but: str) -> str:
    return rng.choice([value for value in values if value != but])
