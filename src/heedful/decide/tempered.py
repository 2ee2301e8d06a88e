"""From logits to answers: the last step of every local decider."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike

from heedful.decide.answer import Answer, answer_to
from heedful.decide.calibrate import Calibration, softmax
from heedful.decide.question import Question


def tempered_answers(
    questions: Iterable[Question],
    logits: Iterable[ListLike[float]],
    calibration: Calibration,
    *,
    digits: int | None = None,
) -> dict[str, Answer]:
    """By the question's name. `logits`: of each question one number a label; digits: round probabilities."""
    return {
        question.name: answer_to(
            question, softmax(row, calibration.temperature(question.type, len(row))).tolist(), digits=digits
        )
        for question, row in zip(questions, logits, strict=True)
    }
