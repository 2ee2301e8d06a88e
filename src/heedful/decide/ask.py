"""The short way to ask: a decider by its name, questions as plain values.

decider = Decider("heedful-decider")
answers = decider.ask("I was charged twice", {"team": ["billing", "returns"], "urgent": "Is this urgent?"})
answers["team"].choice, answers["urgent"].noul, answers.receipt.line()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from heedful.decide.answer import Answers
from heedful.decide.calibrate import Calibration
from heedful.decide.decider import DecisionModel
from heedful.decide.load import KEPT, default_decider, load_decider
from heedful.decide.plain_questions import named_score
from heedful.decide.question import Choice, Meaning, Noul, Question, Score, State, questions_from_json
from heedful.errors import BadParameter

Asked = str | Meaning | Question
"""A question as a plain value: see question_from()."""


class Decider:
    """Any decision model, by its name or as it is.

    name: as `heedful decide -m` takes it, default the built-in decider where this installation has it. The options are
    those of load_decider(), which says what it raises.
    """

    def __init__(
        self,
        name: str | DecisionModel | None = None,
        *,
        orders: int | None = None,
        threads: int | None = None,
        truncate: bool = False,
        weights: str | None = None,
        calibration: Calibration | Path | str | None = KEPT,
    ) -> None:
        if name is not None and not isinstance(name, str):
            if (orders, threads, truncate, weights, calibration) != (None, None, False, None, KEPT):
                raise BadParameter(
                    "name", "is a decider already, made with options of its own", "Give its name instead."
                )
            self.model = name
        else:
            self.model = load_decider(
                default_decider() if name is None else name,
                orders=orders,
                threads=threads,
                truncate=truncate,
                weights=weights,
                calibration=calibration,
            )

    @property
    def name(self) -> str:
        return self.model.name

    def ask(self, state: State, questions: Mapping[str, Asked] | Iterable[Question]) -> Answers:
        """One answer a question, by its name. questions: a mapping of names to what question_from() takes, or question
        objects. Raises BadParameter, and what the model's decide() raises."""
        return self.model.decide(state, questions_from(questions))


def questions_from(questions: Any) -> tuple[Question, ...]:
    """Of what Decider.ask() takes. Raises BadParameter."""
    if isinstance(questions, Mapping):
        return tuple(question_from(name, asked) for name, asked in questions.items())
    if isinstance(questions, str) or not isinstance(questions, Iterable):
        raise BadParameter("questions", f"must map names to questions, not {type(questions).__name__}")
    return tuple(questions)


def question_from(name: str, asked: Any) -> Question:
    """The question that a plain value stands for:

    - "Is this urgent?": a noul, yes or no
    - ["billing", "returns"] or {"billing": "owns invoices", "returns": None}: a choice
    - "How upset? calm | annoyed | furious", the question optional: a score, the lowest level first
    - {"type": "choice", "instructions": …, "criteria": …}: as System One has it; so no option of the short form is
      called "type"
    - a Choice, Score or Noul of that name

    Raises BadParameter.
    """
    if isinstance(asked, Choice | Score | Noul):
        if asked.name != name:
            raise BadParameter(
                f"questions[{name!r:.40}]", f"is called {asked.name!r:.40} itself", "Use one name, or give a list."
            )
        return asked
    if isinstance(asked, str):
        return named_score(name, asked) if "|" in asked else Noul(name, asked)
    if isinstance(asked, Mapping) and "type" in asked:
        return questions_from_json({name: asked})[0]
    if isinstance(asked, Mapping | list | tuple):
        return Choice(name, asked)
    raise BadParameter(
        f"questions[{name!r:.40}]",
        f"is no question: {type(asked).__name__}",
        'Give "a question?", ["an", "option"], "low | high", or a Choice, Score or Noul.',
    )
