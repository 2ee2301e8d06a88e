"""Kev: a base model with a LoRA adapter and a pointer head. The state is read once, every question behind it.

    decider = Kev.load("path/to/kev-0.6b", base="hf:Qwen/Qwen3-0.6B-Base")
    decider.decide("I was charged twice", [Noul("refund", "Does the writer want money back?")])

Format: github.com/jaredpalmer/kev. Torch is imported when one is loaded. Threads may share it; they take turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Self

from heedful.cost.energy import EnergyMeter
from heedful.decide.answer import Answers
from heedful.decide.as_text import Reader, with_text_cost
from heedful.decide.calibrate import TYPES, Calibration
from heedful.decide.decider import DecisionModel
from heedful.decide.kev_cache import StateCache
from heedful.decide.kev_input import KevInput, KevReader, Limits
from heedful.decide.kev_receipt import KevPasses, kev_receipt, kev_weight_bytes
from heedful.decide.question import Question, State, check_state, checked_questions
from heedful.decide.receipt import DecisionReceipt
from heedful.decide.tempered import tempered_answers
from heedful.engine.pooled import plan_steps, require_torch, threads_or_all
from heedful.errors import BadLogits
from heedful.kernels import native
from heedful.text.tokenizer import Tokenizer
from heedful.weights.kev_files import load_kev

if TYPE_CHECKING:
    from heedful.engine.torch_kev import KevNetwork

Logits = list[tuple[float, ...]]


class Kev(DecisionModel):
    """calibration: temperatures fitted for this model, default the checkpoint's own. cache: keeps the last state, for
    questions asked of it later. digits: round probabilities.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        network: KevNetwork,
        *,
        calibration: Calibration | None = None,
        cache: StateCache | None = None,
        digits: int | None = None,
        saved_bytes: int = 0,
    ) -> None:
        """saved_bytes: of the layers' float32, where they are packed into less."""
        self._name = name
        self._tokenizer = tokenizer
        self._network = network
        self._config = network.decoder.config
        self._reader = KevReader(tokenizer, Limits(row=min(Limits.row, self._config.context_len)))
        self._cache = cache
        self._saved_bytes = saved_bytes
        self.calibration = calibration or Calibration(dict.fromkeys(TYPES, network.temperature))
        self.digits = digits

    @classmethod
    def load(
        cls,
        name: str,
        *,
        base: str | None = None,
        threads: int | None = None,
        accept_licence: bool = False,
        calibration: Calibration | None = None,
        cache: StateCache | None = None,
        digits: int | None = None,
        weights: str | None = None,
    ) -> Self:
        """`name`: the folder of adapter and head, `base`: the model they were trained on; both are a path, `hf:…`,
        `wheel:…` or an alias. Without `base` it is looked for as `weights.kev_files.load_kev` says. weights:
        "q8", "q6" or "q4" to quantize the base with its adapter at load (native kernels), None for float32.

        Raises SourceError when one cannot be had, FileFormatError when a file is damaged, UnsupportedModel when it is
        of a kind that heedful does not run, or PyTorch is not installed.
        """
        require_torch()
        threads, panel_format = threads_or_all(threads), native.panel_format(weights)
        loaded = load_kev(name, base=base, accept_licence=accept_licence)
        from heedful.engine.torch_kev import make_kev  # torch takes seconds to import
        from heedful.engine.torch_packed import pack_linears

        network = make_kev(loaded, threads=threads)
        saved = pack_linears(network.decoder.layers, panel_format, threads=threads)
        return cls(
            name, loaded.tokenizer, network, calibration=calibration, cache=cache, digits=digits, saved_bytes=saved
        )

    @property
    def name(self) -> str:
        return self._name

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """Raises BadParameter for malformed input, KevOverflow, a ContextOverflow, for what is too long, BadLogits when
        the model computes no usable numbers."""
        asked = checked_questions(questions)
        logits, receipt = self._run(state, asked)
        answers = tempered_answers(asked, logits, self.calibration, digits=self.digits)
        return Answers(self.name, answers, with_text_cost(receipt, state, asked, answers, self._as_text()))

    def logits(self, state: State, questions: Iterable[Question]) -> Logits:
        """Of each question one number a label, before any temperature."""
        return self._run(state, checked_questions(questions))[0]

    def _as_text(self) -> Reader:
        """The base itself, generating."""
        layer_heads = len(self._config.windows) * self._config.num_heads
        return Reader(self.name, layer_heads, lambda text: len(self._tokenizer.encode(text)))

    def _run(self, state: State, questions: tuple[Question, ...]) -> tuple[Logits, DecisionReceipt]:
        began, cpu_began, meter = perf_counter(), process_time(), EnergyMeter()
        check_state(state)
        read = self._reader.read(state, questions)
        meter.start()
        with self._network.turn:
            logits, passes = self._passes(read)
        if not all(isfinite(number) for of_one in logits for number in of_one):
            raise BadLogits(f"{self.name} computes no usable numbers for these questions", "Fetch the model again.")
        config, head_weights = self._config, self._network.head_weights
        moved = kev_weight_bytes(config, head_weights, passes, self._saved_bytes)
        energy = meter.read(process_time() - cpu_began, moved)
        seconds = perf_counter() - began
        return logits, kev_receipt(
            self.name,
            config,
            head_weights,
            passes,
            seconds=seconds,
            energy=energy,
            saved_bytes=self._saved_bytes,
        )

    def _passes(self, read: KevInput) -> tuple[Logits, KevPasses]:
        found = self._cache.find(self._network, read.state_ids) if self._cache else None
        lengths = [len(branch.ids) for branch in read.branches]
        shared = found or self._network.read(read.state_ids, room=max(lengths))
        steps = plan_steps(lengths)
        logits: Logits = [()] * len(read.branches)
        for step in steps:
            branches = [read.branches[i] for i in step]
            of_step = self._network.logits(shared, [b.ids for b in branches], [b.markers for b in branches])
            for i, of_one in zip(step, of_step, strict=True):
                logits[i] = tuple(of_one)
        if self._cache:
            self._cache.keep(self._network, read.state_ids, shared)
        return logits, KevPasses(
            state_len=len(read.state_ids),
            state_steps=() if found else tuple(shared.steps),
            branch_lens=tuple(lengths),
            branch_steps=len(steps),
            options=sum(len(branch.markers) for branch in read.branches),
        )
