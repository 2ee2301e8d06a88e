"""Rows with known answers: what calibration learns from. One JSON object a line:

    {"state": "Charged twice", "questions": {"team": {…}, "rude": {…}}, "expected": {"team": "billing", "rude": false}}

A choice is labelled by an option's name, a noul by true or false, a score by a level's index or text; any of them by
shares that sum to 1 ({"billing": 0.8, "returns": 0.2}), a noul also by the share of yes. Labels stand under "expected",
"gold" or "label", of the row or of a question; a row with one question can do without the name. A question without a
label is passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

from heedful.decide.calibrate import Label
from heedful.decide.question import Choice, Noul, Question, Score, State, check_state, json_text, questions_from_json
from heedful.errors import BadParameter

LABEL_KEYS = ("expected", "gold", "label")
MOST_SHARE_ERROR = 1e-3
"""How far from 1 shares may sum; they are scaled to it."""


@dataclass(frozen=True)
class LabelledState:
    """A state, and those questions about it whose answers are known."""

    state: State
    questions: tuple[Question, ...]
    labels: tuple[Label, ...]
    """One a question."""


def labelled_from_json(row: Any) -> LabelledState:
    """Raises BadParameter."""
    if not isinstance(row, Mapping):
        raise BadParameter("row", "must be a JSON object")
    check_state(row.get("state"))
    questions = questions_from_json(row.get("questions"))
    labels = _labels(row, questions)
    known = [question for question in questions if question.name in labels]
    if not known:
        raise BadParameter("expected", "there is a label for none of the questions", f"Give {' or '.join(LABEL_KEYS)}.")
    return LabelledState(
        row["state"], tuple(known), tuple(label_of(question, labels[question.name]) for question in known)
    )


def is_held_out(state: State, fraction: float) -> bool:
    """Whether a row is for checking and not for fitting: by its state alone, so that rows of one state stay together
    and every run holds out the same."""
    digest = hashlib.sha256(json_text(state).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def label_of(question: Question, value: Any) -> Label:
    """The label that a JSON value is for this question. Raises BadParameter."""
    if isinstance(value, Mapping):
        return _shares(question, value)
    if isinstance(question, Noul):
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, int | float) and 0 <= value <= 1:
            return (1.0 - value, float(value))
        raise _wrong(question, value, "true, false, or the share of yes")
    if isinstance(question, Choice):
        if isinstance(value, str) and value in question.labels:
            return question.labels.index(value)
        raise _wrong(question, value, "the name of an option")
    assert isinstance(question, Score), question
    if value in question.levels:
        return question.levels.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(question.levels):
        return value
    if isinstance(value, str) and value in question.labels:
        return question.labels.index(value)
    raise _wrong(question, value, "the index or the text of a level")


def _labels(row: Mapping[str, Any], questions: tuple[Question, ...]) -> dict[str, Any]:
    """Question → its label as it stands in the row."""
    names = [question.name for question in questions]
    found = {name: row["questions"][name][key] for name in names for key in LABEL_KEYS if key in row["questions"][name]}
    for key in LABEL_KEYS:
        given = row.get(key)
        if given is None:
            continue
        if isinstance(given, Mapping) and any(name in names for name in given):
            if strange := [name for name in given if name not in names]:
                raise BadParameter(key, f"labels {strange[0]!r:.40}, which is not asked")
            found.update(given)
        elif len(names) == 1:
            found[names[0]] = given
        else:
            raise BadParameter(key, "must map the names of questions to their labels")
    return {name: label for name, label in found.items() if label is not None}


def _shares(question: Question, given: Mapping[str, Any]) -> Label:
    shares = [given.get(label, 0) for label in question.labels]
    is_number = all(isinstance(s, int | float) and not isinstance(s, bool) and 0 <= s <= 2 for s in shares)
    if not is_number or set(given) - set(question.labels) or abs(fsum(shares) - 1) > MOST_SHARE_ERROR:
        wanted = ", ".join(question.labels[:4])
        raise _wrong(question, given, f"shares of {wanted} that sum to 1")
    total = fsum(shares)
    return tuple(share / total for share in shares)


def _wrong(question: Question, value: Any, wanted: str) -> BadParameter:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return BadParameter("expected", f"{shown:.60} does not answer {question.name!r:.40}: give {wanted}")
