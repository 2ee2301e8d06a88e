"""The records that travel: what is asked (Request), its state while it runs (Sequence), one step's work (Batch).

Plain dataclasses of ints and strings; no tensors, no text decoding, no policy decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from numbers import Integral, Real

from heedful.errors import BadParameter


class Finish(enum.StrEnum):
    """Why an answer ended; the values are the OpenAI names."""

    STOP = "stop"  # an end-of-text token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"  # nothing could be chosen: Sequence.error says why


@dataclass(frozen=True)
class SamplingParams:
    """How one answer's tokens are chosen. The default is greedy: the same question gets the same answer."""

    max_tokens: int | None = None
    """At most this many output tokens; None: until the context is full."""
    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches it."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """CTRL (arXiv:1909.05858): a token of prompt or output has its logit divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id → number added to its logit."""
    seed: int | None = None
    """Same seed, same text on the same machine; None: fresh randomness."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    logprobs: int | None = None
    """None: no logprobs; n: the chosen token's and those of the n likeliest tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-text token (benchmarks)."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "logprobs"):
            _check_number(name, getattr(self, name), Integral, "a whole number", may_be_none=name != "top_k")
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            _check_number(name, getattr(self, name), Real, "a number")
        _check("stop", all(isinstance(text, str) and text for text in self.stop), "must be strings that are not empty")
        for token, bias in self.logit_bias.items():
            _check_number("logit_bias", token, Integral, "token ids that are whole numbers")
            _check_number("logit_bias", bias, Real, "numbers")
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        _check("temperature", 0 <= self.temperature <= 100, "must be between 0 and 100")
        _check("top_k", self.top_k >= 0, "must be 0 (all) or more")
        _check("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")
        _check("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1")
        _check("repetition_penalty", 0 < self.repetition_penalty <= 100, "must be above 0 and at most 100")
        _check("presence_penalty", abs(self.presence_penalty) <= 100, "must be between -100 and 100")
        _check("frequency_penalty", abs(self.frequency_penalty) <= 100, "must be between -100 and 100")
        _check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 1000, "must be between 0 and 1000")
        _check("seed", self.seed is None or self.seed >= 0, "must be 0 or more")
        _check("logit_bias", all(isfinite(v) for v in self.logit_bias.values()), "values must be finite numbers")


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _check_number(name: str, value: object, kind: type, what: str, *, may_be_none: bool = False) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    _check(name, is_number or (may_be_none and value is None), f"must be {what}, not {value!r:.40}")


def _check(name: str, ok: bool, requirement: str) -> None:
    if not ok:
        raise BadParameter(name, requirement)


DEFAULT_KV_FORMAT = "q8"
"""What the native kernels hold keys and values in unless asked otherwise: 8-bit rows."""


@dataclass(frozen=True)
class CachePolicy:
    """The cache and attention settings of a request."""

    kv_format: str | None = None
    """Number format of the KV rows held in pages (`heedful.cost.formulas.KV_FORMATS`); None: the runner's own."""


@dataclass(frozen=True)
class Request:
    """One question to the engine, already tokenised."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    policy: CachePolicy = CachePolicy()


@dataclass(eq=False)
class Sequence:
    """A request while it runs. `token_ids[:cached_len]` have their K and V in pages; the rest is yet to compute."""

    request: Request
    token_ids: list[int]
    cached_len: int = 0
    page_tables: list[list[int]] = field(default_factory=list)
    """One a layer group: page id by page index of the sequence; pages behind a window are FREED (-1)."""
    finish: Finish | None = None
    error: Exception | None = None
    """What ended it, with Finish.ERROR; its stream raises it."""

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True)
class KeySpan:
    """What attention does for one chunk in one layer group: queries at [start, end) read keys at [first_key, end).

    Kernels execute it and cost/ counts from it, so the counts are of the work that was done.
    """

    layers: tuple[int, ...]
    window: int | None
    first_key: int
    """Position of the oldest key that any query of the chunk attends to."""
    start: int
    end: int
    pages: tuple[int, ...]
    """Page ids holding positions first_page·page_len onwards, up to `end`."""
    first_page: int
    """Index in the sequence of pages[0]."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The part of one sequence that a step computes: the tokens at positions [start, end)."""

    sequence: Sequence
    start: int
    end: int
    spans: tuple[KeySpan, ...]
    """One a layer group."""

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    @property
    def reaches_end(self) -> bool:
        """Whether the last token's logits are wanted: after this step all known tokens are computed."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True)
class Batch:
    """What one step computes, for one or more sequences."""

    chunks: tuple[Chunk, ...]
