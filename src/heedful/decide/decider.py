"""What every decider is, whatever model is behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from heedful.decide.answer import Answers
from heedful.decide.question import Question, State


class Decider(Protocol):
    """Answers typed questions about a state."""

    @property
    def name(self) -> str:
        """Of the model, as receipts show it."""
        ...

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """One answer a question. Every question is judged from the state and itself alone: names, order and company
        change nothing. Raises BadParameter for malformed input and never cuts any of it."""
        ...
