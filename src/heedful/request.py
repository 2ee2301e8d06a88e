"""The records that travel: what is asked (Request), its state while it runs (Sequence), one step's work (Batch).

Plain dataclasses of ints and strings; no tensors, no text decoding, no policy decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from numbers import Integral, Real
from typing import Any

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
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens after the first one; with it, max_tokens may be 0: nothing but to read."""
    prompt_logprobs_from: int = 0
    """With it: only those of the tokens from this position on, so that a shared prefix before them can be reused."""
    ignore_eos: bool = False
    """Go on after an end-of-text token (benchmarks)."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "prompt_logprobs_from", *_LOGPROBS):
            may_be_none = name not in ("top_k", "prompt_logprobs_from")
            _check_number(name, getattr(self, name), Integral, "a whole number", may_be_none=may_be_none)
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            _check_number(name, getattr(self, name), Real, "a number")
        _check("stop", all(isinstance(text, str) and text for text in self.stop), "must be strings that are not empty")
        for token, bias in self.logit_bias.items():
            _check_number("logit_bias", token, Integral, "token ids that are whole numbers")
            _check_number("logit_bias", bias, Real, "numbers")
        least = 0 if self.prompt_logprobs is not None else 1
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= least, f"must be at least {least}")
        _check("temperature", 0 <= self.temperature <= 100, "must be between 0 and 100")
        _check("top_k", self.top_k >= 0, "must be 0 (all) or more")
        _check("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")
        _check("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1")
        _check("repetition_penalty", 0 < self.repetition_penalty <= 100, "must be above 0 and at most 100")
        _check("presence_penalty", abs(self.presence_penalty) <= 100, "must be between -100 and 100")
        _check("frequency_penalty", abs(self.frequency_penalty) <= 100, "must be between -100 and 100")
        for name in _LOGPROBS:
            count = getattr(self, name)
            _check(name, count is None or 0 <= count <= 1000, "must be between 0 and 1000")
        _check("prompt_logprobs_from", self.prompt_logprobs_from >= 0, "must be 0 or more")
        needs = "means something only with prompt_logprobs"
        _check("prompt_logprobs_from", not self.prompt_logprobs_from or self.prompt_logprobs is not None, needs)
        _check("seed", self.seed is None or self.seed >= 0, "must be 0 or more")
        _check("logit_bias", all(isfinite(v) for v in self.logit_bias.values()), "values must be finite numbers")


_LOGPROBS = ("logprobs", "prompt_logprobs")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _check_number(name: str, value: object, kind: type, what: str, *, may_be_none: bool = False) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    _check(name, is_number or (may_be_none and value is None), f"must be {what}, not {value!r:.40}")


def _check(name: str, ok: bool, requirement: str) -> None:
    if not ok:
        raise BadParameter(name, requirement)


MOST_POSITIONS = 1 << 24
"""The whole numbers that float32 holds: no sequence is longer, and no window needs to be."""

DEFAULT_KV_FORMAT = "q8"
"""What the native kernels hold keys and values in unless asked otherwise: 8-bit rows."""

KV_ROW_BYTES: dict[str, Callable[[int], int]] = {
    "f32": lambda head_dim: 4 * head_dim,
    "f16": lambda head_dim: 2 * head_dim,
    "q8": lambda head_dim: head_dim + 4,  # int8 numbers and one float32 scale a row
    "q4": lambda head_dim: 18 * -(-head_dim // 32),  # blocks of 32: 16 bytes of nibbles and a float16 scale
}
"""Number format of KV rows → bytes of one row of head_dim numbers."""


@dataclass(frozen=True)
class KVFormat:
    """What a page holds: the number formats of its keys and of its values, and whether both lie rotated."""

    keys: str
    values: str
    rotated: bool = False
    """By a normalised Hadamard matrix, after positions: it spreads a row's outliers over all channels, so fewer bits
    do, and leaves every product of a query and a key as it was (llama.cpp PR #21038; docs/policies.md)."""

    @property
    def name(self) -> str:
        """As it is written after --kv."""
        return self.keys if self.keys == self.values else f"k={self.keys},v={self.values}"

    @staticmethod
    def parse(text: str) -> KVFormat:
        """ "q8", or "k=q8,v=q4" in either order, not rotated. Raises BadParameter."""
        parts = dict(part.split("=", 1) for part in text.split(",")) if "=" in text else {"k": text, "v": text}
        ok = set(parts) == {"k", "v"} and all(number in KV_ROW_BYTES for number in parts.values())
        _check("kv", ok, f"{text!r:.40} is not a format: one of {', '.join(KV_ROW_BYTES)}, or k=…,v=… with two of them")
        return KVFormat(parts["k"], parts["v"])


@dataclass(frozen=True)
class CachePolicy:
    """The cache and attention settings of a request. The default changes nothing but the runner's own number format."""

    kv_format: str | None = None
    """Of the KV rows held in pages, as `KVFormat.parse` reads it; None: the runner's own."""
    precise: int | None = None
    """With 4-bit rows: the newest tokens that stay 8-bit, and with them the first page; 0: none, None: 128."""
    window: int | None = None
    """No layer looks further back than so many tokens, itself included; layers with a narrower window keep theirs."""
    sinks: int = 0
    """With `window`: the first tokens, which the layers that it narrows see nevertheless, at positions as if the tokens
    between had never been there (StreamingLLM, arXiv:2309.17453)."""
    budget: int | None = None
    """Decoding, layers without a window: a query reads the pages that weigh most, so many tokens a KV head."""
    sparse_prefill: bool = False
    """Prompt tokens see the first 128 and the newest 1,920 tokens, the last 100 of them everything."""

    def __post_init__(self) -> None:
        for name, may_be_none in (("precise", True), ("window", True), ("sinks", False), ("budget", True)):
            _check_number(name, getattr(self, name), Integral, "a whole number", may_be_none=may_be_none)
            value = getattr(self, name)
            _check(name, value is None or value <= MOST_POSITIONS, f"must be at most {MOST_POSITIONS:,}")
        if self.kv_format is not None:
            KVFormat.parse(self.kv_format)
        _check("precise", self.precise is None or self.precise >= 0, "must be 0 or more")
        _check("window", self.window is None or self.window >= 1, "must be at least 1")
        _check("sinks", self.sinks >= 0, "must be 0 or more")
        _check("sinks", self.sinks == 0 or self.window is not None, "mean something only with a window")
        _check("budget", self.budget is None or self.budget >= 256, "must be at least 256 tokens")
        _check("budget", self.budget is None or self.window is None, "cannot be combined with a window")
        _check("prefill", not (self.sparse_prefill and self.window), "sparse cannot be combined with a window")


@dataclass(frozen=True)
class GrammarSpec:
    """What an answer must look like."""

    kind: str
    """ "json_schema", "json_object", "regex", "choice" or "lark"."""
    text: str
    """A schema, or a list of choices, as JSON; a regex; a grammar. json_object needs none."""


@dataclass(frozen=True)
class Request:
    """One question to the engine, already tokenised."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    policy: CachePolicy = CachePolicy()
    cache_salt: str = ""
    """Prefixes are shared among requests with the same salt only: one a tenant, so that none learns of another's."""
    speculate: bool = False
    """Guess tokens from what the prompt and the answer said before, and check several in one step. The same tokens as
    without; the visits of wrong guesses are in the receipt."""
    adapter: str | None = None
    """Name of the low-rank update that is added to the model's matrices for this request; None: the base alone."""


@dataclass(eq=False)
class Sequence:
    """A request while it runs. `token_ids[:cached_len]` have their K and V in pages; the rest is yet to compute."""

    request: Request
    token_ids: list[int]
    drafts: list[int] = field(default_factory=list)
    """Guessed to follow; the next step checks them."""
    cached_len: int = 0
    page_tables: list[list[int]] = field(default_factory=list)
    """One a layer group: page by page index of the sequence; pages behind a window are FREED (-1)."""
    adapter_sha256: str = ""
    """Of what is in the request's adapter: rows of another one, or of the base, are never read as its own."""
    held_bytes: int = 0
    """Of the pages in its tables; one that it shares counts in full here and with every other reader."""
    state: int | None = None
    """Where models have layers with a recurrent state: the slot that holds it; see StateStep."""
    state_len: int = 0
    """Tokens that the state in `state` has seen, once the step that was planned last has run."""
    state_cuts: tuple[int, ...] = ()
    """Positions at which a state is to be kept: a chunk ends there."""
    selected: Any = None
    """int32 (layers, K, pages): what a page selection last chose; see Selection."""
    exact_len: int | None = None
    """First position computed under a page selection: from there on rows are not what a prompt's would be."""
    prefix: Any = None
    """What was found of its prompt when it was admitted: cache.prefix.PrefixReport."""
    prompt_logprobs: list[Any] = field(default_factory=list)
    """Of the prompt's tokens behind `logits_wanted_from`, where they are asked for: sampling.sampler.Sampled."""
    finish: Finish | None = None
    error: Exception | None = None
    """What ended it, with Finish.ERROR; its stream raises it."""

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def logits_wanted_from(self) -> int:
        """First position whose logits are wanted: the newest known token's, or before it where the prompt's are."""
        newest, sampling = len(self.token_ids) - 1, self.request.sampling
        if sampling.prompt_logprobs is None or self.output_len:
            return newest
        return min(newest, max(0, sampling.prompt_logprobs_from - 1))


@dataclass(frozen=True)
class FormatRun:
    """Positions [begin, end) of a sequence whose pages have one format."""

    format: KVFormat
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Selection:
    """Which pages the one query of a span reads: those that weigh most, for each KV head its own.

    The kernel chooses when `renew` is set, and keeps its choice in `chosen`; either way it reads exactly `num_pages`.
    To choose it reads the keys of `listed_pages` more: of all candidates, or of those whose bounds promise most.
    """

    num_pages: int
    """Of each KV head, the first page, the newest `local_pages` and the page of the query itself among them."""
    local_pages: int
    dense_layers: int
    """Layers below this one (by number in the model) read everything."""
    renew: bool
    chosen: Any
    """int32 (layers of the model, K, num_pages): pages by index in the sequence, ascending; kept from step to step."""
    listed_pages: int = 0
    """Of each KV head, those whose keys are read when `renew` is set."""
    listed: Any = None
    """int32 (layers of the model, K, listed_pages), likewise, written by the kernel; None: all candidates are."""


@dataclass(frozen=True, eq=False)
class KeySpan:
    """What attention does for one chunk in one layer group: queries at [start, end) read the keys at [first_key, end),
    as far as each query's window goes, and the first `sinks` keys.

    Kernels execute it and cost/ counts from it, so the counts are of the work that was done.
    """

    layers: tuple[int, ...]
    window: int | None
    first_key: int
    """Position of the oldest key, sinks aside, that any query of the chunk attends to; at least `sinks`."""
    start: int
    end: int
    pages: tuple[int, ...]
    """Pages holding positions first_page·page_len onwards, up to `end`."""
    first_page: int
    """Index in the sequence of pages[0]."""
    formats: tuple[FormatRun, ...]
    """Of the pages, as they are when the queries run; ascending, without gaps, from 0 to at least `end`."""
    sinks: int = 0
    sink_pages: tuple[int, ...] = ()
    """Pages holding positions [0, sinks)."""
    sink_distance: int | None = None
    """Queries beyond this position are rotated as if they stood there when they meet the sinks; None: as they stand."""
    selection: Selection | None = None


@dataclass(frozen=True)
class PageMove:
    """Before a step: rewrite the rows of a full page into a page of another format."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class StateStep:
    """Where a chunk's recurrent state begins and where it ends, by slot. All are read before any is written."""

    before: int | None
    """None: the sequence begins here, from zeros."""
    after: int
    """The same slot as `before` unless that is shared or kept."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The part of one sequence that a step computes: the tokens at positions [start, end)."""

    sequence: Sequence
    start: int
    end: int
    spans: tuple[KeySpan, ...]
    """One a layer group."""
    logits_from: int
    """Logits are wanted of the tokens at positions [logits_from, end)."""
    moves: tuple[PageMove, ...] = ()
    """To be done before anything of the batch is stored."""
    state: StateStep | None = None
    """None where no layer has a recurrent state."""

    @property
    def token_ids(self) -> list[int]:
        known = self.sequence.token_ids
        drafts = self.sequence.drafts[: self.end - len(known)] if self.end > len(known) else []
        return known[self.start : self.end] + drafts

    @property
    def num_logits(self) -> int:
        return self.end - self.logits_from

    @property
    def reaches_end(self) -> bool:
        """Whether all known tokens are computed after this step."""
        return self.end >= len(self.sequence.token_ids)


@dataclass(frozen=True)
class Batch:
    """What one step computes, for one or more sequences."""

    chunks: tuple[Chunk, ...]
