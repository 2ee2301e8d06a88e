"""Any encoder with a classifier as a decider: BERT, ModernBERT, DeBERTa. The labels are those of its config.

    spam = ClassifierDecider.load("path/to/folder", yes_label="spam")
    spam.decide("You have won", [Noul("spam"), Choice("kind", ["spam", "ham"])])

A plain classifier answers one question, the one it was trained for, and reads the state alone: how a question is worded
changes nothing, only which labels it is about. A choice's options are some of the model's labels; a score has as many
levels as the model has labels, in their order; a noul asks for the label that means yes.

A model of natural language inference, which has the label "entailment", answers any question: the state is its premise,
every statement of the question (statements.py) a hypothesis, after the question's instructions or in a sentence of its
own; what is entailed most is likeliest. A noul's one statement is entailed or contradicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from math import exp, fsum, log
from time import perf_counter
from typing import Self

from heedful.decide.answer import Answers
from heedful.decide.as_text import default_reader, with_text_cost
from heedful.decide.calibrate import Calibration
from heedful.decide.decider import DecisionModel
from heedful.decide.question import Choice, Noul, Question, Score, State, check_state, checked_questions, json_text
from heedful.decide.receipt import encoder_decision_receipt
from heedful.decide.statements import SHORTER_LABELS, SHORTER_TEXT, Statements, TooLongToJudge, statements_of
from heedful.decide.tempered import tempered_answers
from heedful.engine.classify import ClassBatch, Classifier
from heedful.engine.pooled import TextTooLong, marks_around
from heedful.errors import BadParameter, UnsupportedModel

HYPOTHESIS = "This example is {}."
"""Around a statement that no instructions lead to."""

Logits = tuple[float, ...]


class ClassifierDecider(DecisionModel):
    """yes_label: what a noul asks a plain classifier for; default the second of two labels (LABEL_1), or the one that a
    model with one logit has. hypothesis: the sentence around a statement, at {}. calibration: temperatures fitted for
    this model. digits: round probabilities. truncate: cut states that do not fit, at their end, and count in the
    receipt what was dropped. Threads may share it.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        yes_label: str | None = None,
        hypothesis: str = HYPOTHESIS,
        calibration: Calibration | None = None,
        digits: int | None = None,
        truncate: bool = False,
    ) -> None:
        """Raises BadParameter; UnsupportedModel for a model that computes numbers and knows no classes."""
        if classifier.problem_type == "regression":
            raise UnsupportedModel(f"{classifier.name} computes numbers, not classes", "Use it with heedful classify.")
        if "{}" not in hypothesis:
            raise BadParameter("hypothesis", "has no {} where the statement belongs", f"Like this: {HYPOTHESIS}")
        self.classifier = classifier
        self.calibration = calibration or Calibration()
        self.digits = digits
        self.truncate = truncate
        self._hypothesis = hypothesis
        names = [_plain(label) for label in classifier.labels]
        self._entailment = names.index("entailment") if "entailment" in names and len(names) > 1 else None
        if yes_label is not None and self._entailment is not None:
            raise BadParameter("yes_label", f"means nothing to {classifier.name}, which judges statements")
        self._yes = self._label_at("yes_label", yes_label) if yes_label is not None else self._usual_yes()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        threads: int | None = None,
        accept_licence: bool = False,
        yes_label: str | None = None,
        hypothesis: str = HYPOTHESIS,
        calibration: Calibration | None = None,
        digits: int | None = None,
        truncate: bool = False,
        weights: str | None = None,
    ) -> Self:
        """`name`, threads and weights, and what is raised: as Classifier.load has them."""
        return cls(
            Classifier.load(name, threads=threads, accept_licence=accept_licence, weights=weights),
            yes_label=yes_label,
            hypothesis=hypothesis,
            calibration=calibration,
            digits=digits,
            truncate=truncate,
        )

    @property
    def name(self) -> str:
        return self.classifier.name

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """Raises BadParameter for malformed input and for a question that the model's labels do not answer;
        TooLongToJudge, a ContextOverflow, for what does not fit; BadLogits when the model computes no usable numbers.
        """
        began = perf_counter()
        asked = checked_questions(questions)
        logits, batch = self._ask(state, asked)
        answers = tempered_answers(asked, logits, self.calibration, digits=self.digits)
        receipt = encoder_decision_receipt(self.name, len(asked), [batch.receipt], seconds=perf_counter() - began)
        reader = default_reader(lambda text: len(self.classifier.tokenizer.encode(text)))
        return Answers(self.name, answers, with_text_cost(receipt, state, asked, answers, reader))

    def logits(self, state: State, questions: Iterable[Question]) -> list[Logits]:
        """Of each question one number a label, before any temperature. Raises as decide."""
        return self._ask(state, checked_questions(questions))[0]

    def _ask(self, state: State, questions: tuple[Question, ...]) -> tuple[list[Logits], ClassBatch]:
        check_state(state)
        text = json_text(state)
        if self._entailment is not None:
            return self._infer(text, questions, self._entailment)
        columns = [self._columns(question) for question in questions]
        batch = self._classify([text])
        row = [float(logit) for logit in batch.logits[0]]
        return [
            self._yes_or_no(row) if isinstance(question, Noul) else tuple(row[at] for at in of_labels)
            for question, of_labels in zip(questions, columns, strict=True)
        ], batch

    def _classify(self, texts: ListLike[str | tuple[str, str]]) -> ClassBatch:
        """Raises TooLongToJudge."""
        try:
            return self.classifier.classify(texts, truncate=self.truncate)
        except TextTooLong as error:
            tokens, most = error.prompt_tokens, error.context_len
            raise TooLongToJudge("the state with the question", tokens, most, SHORTER_TEXT) from None

    # ---- a plain classifier -------------------------------------------------------------------------------------

    def _columns(self, question: Question) -> list[int]:
        """By label of the question the model's class. Raises BadParameter where its labels do not answer it."""
        where, labels = f"questions[{question.name!r:.40}]", self.classifier.labels
        if isinstance(question, Noul):
            if self._yes is None:
                raise BadParameter(
                    where,
                    f"{self.name} has {len(labels)} labels, and none of them is known to mean yes",
                    f"Name it when the model is loaded, yes_label=…, of {_listed(labels)}.",
                )
            return [self._yes]
        if isinstance(question, Score):
            if len(labels) != len(question.levels):
                raise BadParameter(
                    where,
                    f"has {len(question.levels)} levels and {self.name} {len(labels)} labels",
                    f"A score of a plain classifier has a level for each: {_listed(labels)}.",
                )
            return list(range(len(labels)))
        assert isinstance(question, Choice), question
        found = [self._label_at(where, option) for option in question.labels]
        if len(set(found)) < len(found):
            raise BadParameter(where, "two options name the same label")
        return found

    def _yes_or_no(self, row: list[float]) -> Logits:
        """A class that may hold beside others is yes or not; else the others together are no."""
        assert self._yes is not None, row
        if len(row) == 1 or self.classifier.problem_type == "multi_label_classification":
            return 0.0, row[self._yes]
        return _together(row, self._yes), row[self._yes]

    def _usual_yes(self) -> int | None:
        """LABEL_1 of two, the only one of one."""
        return len(self.classifier.labels) - 1 if len(self.classifier.labels) <= 2 else None

    def _label_at(self, where: str, name: str) -> int:
        """The class of this name; upper and lower case count where two differ in nothing else."""
        labels = self.classifier.labels
        found = [at for at, label in enumerate(labels) if label == name]
        found = found or [at for at, label in enumerate(labels) if _plain(label) == _plain(name)]
        if len(found) != 1:
            raise BadParameter(where, f"{name!r:.40} is no label of {self.name}", f"Its labels: {_listed(labels)}.")
        return found[0]

    # ---- natural language inference -----------------------------------------------------------------------------

    def _infer(self, state: str, questions: tuple[Question, ...], entailment: int) -> tuple[list[Logits], ClassBatch]:
        statements = [statements_of(question) for question in questions]
        hypotheses = [self._sentence(asked, text) for asked in statements for text in asked.texts]
        if self.truncate:
            self._require_short(hypotheses)
        batch = self._classify([(state, one) for one in hypotheses])
        rows = iter([[float(logit) for logit in row] for row in batch.logits])
        found: list[Logits] = []
        for asked in statements:
            if asked.alone:
                row = next(rows)
                found.append(asked.sides(row[entailment], self._against(row, entailment)))
            else:
                found.append(tuple(next(rows)[entailment] for _ in asked.texts))
        return found, batch

    def _sentence(self, asked: Statements, text: str) -> str:
        if asked.instructions:
            return f"{asked.instructions} {text}"
        return text if asked.alone else self._hypothesis.replace("{}", text)

    def _against(self, row: list[float], entailment: int) -> float:
        """The logit of contradiction; where the model has no such label, of all others together."""
        names = [_plain(label) for label in self.classifier.labels]
        return row[names.index("contradiction")] if "contradiction" in names else _together(row, entailment)

    def _require_short(self, hypotheses: list[str]) -> None:
        """Of a pair the longer text is cut; it must be the state. Raises TooLongToJudge."""
        prefix, suffix = marks_around(self.classifier.tokenizer)
        room = (self.classifier.max_tokens - len(prefix) - 2 * len(suffix)) // 2
        for hypothesis in hypotheses:
            tokens = len(self.classifier.tokenizer.encode(hypothesis, add_bos=False))
            if tokens > room:
                raise TooLongToJudge("a statement of a question", tokens, room, SHORTER_LABELS)


def _together(row: list[float], without: int) -> float:
    """log Σ exp of all other logits: what one class for all of them would have."""
    others = [logit for at, logit in enumerate(row) if at != without]
    most = max(others)
    return most + log(fsum(exp(logit - most) for logit in others))


def _plain(label: str) -> str:
    return label.strip().casefold()


def _listed(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:20]) + (f", … ({len(labels)})" if len(labels) > 20 else "")
