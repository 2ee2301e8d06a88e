"""Rows about messages to an assistant: what is wanted, whether it is harmless, what is to be done. The messages are
made of templates of our own, or are out of packages; classes, actions and their wordings vary. Trained on, never
judged by.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.decider.rows import Row, choice, noul, one_hot, score

DOMAIN = "guard"
_WORDS = json.loads(Path(__file__).with_name("guard.json").read_text(encoding="utf-8"))
CLASSES: dict[str, dict[str, Any]] = _WORDS["classes"]
"""Class → its group, names and meanings in several words, and templates of messages."""
SLOTS: dict[str, list[str]] = _WORDS["slots"]
_ACTIONS: list[dict[str, dict[str, str]]] = _WORDS["actions"]
"""Options with what they stand for, and of each group the right one."""
_STATEMENTS: list[dict[str, list[str]]] = _WORDS["statements"]
_LEVELS: list[list[str]] = _WORDS["levels"]
_LEVEL_OF = {"safe": 0, "care": 1, "harm": 2}
_LONGEST_FOUND = 300


def guard_row(rng: random.Random, found: Mapping[str, Sequence[str]]) -> Row:
    """`found`: class → messages of other origin, taken in a third of the cases."""
    name = rng.choice(list(CLASSES))
    message = _message(rng, name)
    if name in found and rng.random() < 0.5:
        message = rng.choice(found[name])[:_LONGEST_FOUND]
    state, group, form = _boxed(rng, message), CLASSES[name]["group"], rng.random()
    if form < 0.3:
        return _class_row(rng, state, name)
    if form < 0.4:
        said = rng.random() < 0.5
        about = name if said else rng.choice(_apart(name))
        meaning = rng.choice(CLASSES[about]["means"] + CLASSES[about]["names"])
        asked = rng.choice(["Is it this: {}?", "The message is of this kind: {}.", "Does this fit: {}?"])
        return Row(DOMAIN, state, noul(asked.format(meaning)), one_hot(int(said), 2))
    if form < 0.65:
        actions = rng.choice([one for one in _ACTIONS if group in one["of"]] or [None])
        if actions is not None:
            return _action_row(rng, state, actions["options"], actions["of"][group])
    elif form < 0.72 and group in _LEVEL_OF:
        return Row(
            DOMAIN, state, score(rng.choice(_WORDS["levels_asked"]), rng.choice(_LEVELS)), one_hot(_LEVEL_OF[group], 3)
        )
    fitting = [one for one in _STATEMENTS if group in one["true"] or (group in one["false"] and rng.random() < 0.5)]
    if not fitting:
        return _class_row(rng, state, name)
    one = rng.choice(fitting)
    return Row(DOMAIN, state, noul(rng.choice(one["asked"])), one_hot(int(group in one["true"]), 2))


def _message(rng: random.Random, name: str) -> str:
    text = rng.choice(CLASSES[name]["texts"])
    for _ in range(2):
        text = re.sub(r"\{(\w+)\}", lambda slot: rng.choice(SLOTS[slot[1]]), text)
    if rng.random() < 0.2:
        text = f"{rng.choice(['Hello. ', 'Please: ', 'Hey, ', 'One question. ', 'I need help. '])}{text}"
    if rng.random() < 0.2:
        text = (
            f"{text} {rng.choice(['Thanks!', 'It is urgent.', 'Be brief.', 'Answer in one sentence.', 'Just do it.'])}"
        )
    return text.lower() if rng.random() < 0.15 else text.strip()


def _boxed(rng: random.Random, message: str) -> Any:
    """As it is, or in a record as services log it."""
    kind = rng.random()
    if kind < 0.45:
        return message
    if kind < 0.75:
        return {rng.choice(_WORDS["boxes"]): message}
    if kind < 0.88:
        return {"channel": rng.choice(["web", "app", "email", "api"]), rng.choice(_WORDS["boxes"]): message}
    return [{"role": "user", "content": message}]


def _apart(name: str) -> list[str]:
    """Classes that are not near to it: of another group."""
    return [one for one in CLASSES if CLASSES[one]["group"] != CLASSES[name]["group"]]


def _class_row(rng: random.Random, state: Any, name: str) -> Row:
    others = rng.sample([one for one in CLASSES if one != name], rng.randint(1, 7))
    is_described = rng.random() < 0.5
    shown = rng.sample([name, *others], len(others) + 1)
    options = {
        rng.choice(CLASSES[one]["names"]): rng.choice(CLASSES[one]["means"]) if is_described else None for one in shown
    }
    return Row(DOMAIN, state, choice(_asked(rng, "class"), options), one_hot(shown.index(name), len(shown)))


def _action_row(rng: random.Random, state: Any, options: dict[str, str], right: str) -> Row:
    others = [one for one in options if one != right]
    names = [right, *rng.sample(others, rng.randint(1, len(others)))]
    shown = rng.sample(names, len(names))
    is_described = rng.random() < 0.65
    question = choice(_asked(rng, "action"), {one: options[one] if is_described else None for one in shown})
    return Row(DOMAIN, state, question, one_hot(shown.index(right), len(shown)))


def _asked(rng: random.Random, kind: str) -> str | None:
    return None if rng.random() < 0.1 else rng.choice(_WORDS["asked"][kind])  # type: ignore[no-any-return]
