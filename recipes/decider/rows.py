"""One labelled question: what the recipe trains on and is judged by, as a line of JSON. Owns how rows are split."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heedful.decide.question import Question, questions_from_json

TRAIN, VALIDATION, TEST, HELD_OUT = "train", "validation", "test", "held_out"
HELD_OUT_WHOLE = ("guardrail_intent", "product_reviews", "bbc_news")
"""Domains chosen before any model was trained, to be judged on alone."""
_VALIDATION_PERCENT, _TEST_PERCENT = 10, 15


@dataclass(frozen=True)
class Row:
    domain: str
    state: Any
    question: dict[str, Any]
    """As the contract writes it: type, instructions, criteria."""
    target: tuple[float, ...]
    """What each label should get, in the order of `Question.labels`; sums to 1."""
    group: str = ""
    """Rows of one group are alike (made from one template): the bootstrap draws groups. "": a row for itself."""

    def __post_init__(self) -> None:
        labels = self.typed().labels
        assert len(self.target) == len(labels), (self.target, labels)
        assert abs(sum(self.target) - 1) < 1e-6, self.target

    def typed(self) -> Question:
        return questions_from_json({"q": self.question})[0]

    @property
    def label(self) -> int:
        return max(range(len(self.target)), key=self.target.__getitem__)

    @property
    def key(self) -> str:
        """The same for equal rows, in every run."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def choice(instructions: str | None, options: Mapping[str, str | None]) -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "criteria": dict(options)}


def score(instructions: str | None, levels: list[str]) -> dict[str, Any]:
    return {"type": "score", "instructions": instructions, "criteria": levels}


def noul(instructions: str, true: str | None = None, false: str | None = None) -> dict[str, Any]:
    sides = {name: text for name, text in (("true", true), ("false", false)) if text is not None}
    return {"type": "noul", "instructions": instructions, "criteria": sides or None}


def one_hot(index: int, count: int) -> tuple[float, ...]:
    assert 0 <= index < count, (index, count)
    return tuple(float(at == index) for at in range(count))


def split_of(state: Any) -> str:
    """By the state's text alone, its numbers, case and spacing aside: states that differ in an order number only are
    never on both sides.
    """
    text = state if isinstance(state, str) else json.dumps(state, sort_keys=True, ensure_ascii=False)
    plain = re.sub(r"\s+", " ", re.sub(r"\d+", "0", text.lower())).strip()
    share = int(hashlib.sha256(plain.encode()).hexdigest()[:8], 16) % 100
    if share < _TEST_PERCENT:
        return TEST
    return VALIDATION if share < _TEST_PERCENT + _VALIDATION_PERCENT else TRAIN


def is_taught(domain: str, state: Any) -> bool:
    """Whether the state's rows are trained on: these ask in several wordings, all others in one."""
    return domain not in HELD_OUT_WHOLE and split_of(state) == TRAIN


def take(rows: Iterable[Row], count: int) -> list[Row]:
    """At most `count` different ones, the same in every run, in an order that tells nothing."""
    return [row for _, row in sorted({row.key: row for row in rows}.items())][:count]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(asdict(row), ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Row(**{**data, "target": tuple(data["target"])}) for data in map(json.loads, lines)]
