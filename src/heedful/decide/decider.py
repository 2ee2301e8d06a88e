"""What every decision model is, whatever is behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from heedful.decide.answer import Answers
from heedful.decide.calibrate import Calibration
from heedful.decide.question import Question, State


class DecisionModel(Protocol):
    """Answers typed questions about a state."""

    @property
    def name(self) -> str:
        """Of the model, as receipts show it."""
        ...

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """One answer a question. Every question is judged from the state and itself alone: names, order and company
        change nothing. Raises BadParameter for malformed input and never cuts any of it."""
        ...


@runtime_checkable
class HasLogits(Protocol):
    """A decision model that runs here, and so can be calibrated."""

    calibration: Calibration
    """The temperatures that its answers have."""

    def logits(self, state: State, questions: Iterable[Question]) -> list[tuple[float, ...]]:
        """Of each question one number a label, in `question.labels` order, before any temperature."""
        ...
