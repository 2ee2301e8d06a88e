"""A decider that answers as a test has it, and waits where a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from heedful.decide.answer import Answers, answer_to
from heedful.decide.question import Question, State
from heedful.decide.receipt import decision_receipt

# reference/systemone.md 1.7: the probabilities of its examples, by count of labels
SHARES = {2: [0.03, 0.97], 3: [0.12, 0.79, 0.09], 4: [0.05, 0.15, 0.55, 0.25]}
PATIENCE_SECONDS = 30.0


class Scripted:
    name = "a name that no answer shows"

    def __init__(self) -> None:
        self.asked: list[tuple[State, tuple[Question, ...]]] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        asked = tuple(questions)
        self.asked.append((state, asked))
        assert self.may_go.wait(PATIENCE_SECONDS), "nobody lets it go"
        answers = {q.name: answer_to(q, SHARES.get(len(q.labels), [1.0] * len(q.labels))) for q in asked}
        return Answers(self.name, answers, decision_receipt(self.name, len(asked), [], seconds=0.0))
