"""Texts to vectors, whatever model makes the hidden states: reading texts, planning steps, counting what they cost.

Knows no torch: the model is handed in as a function from token ids to pooled vectors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
import numpy.typing as npt

from heedful import hardware
from heedful.cost.encoder_receipt import EncoderReceipt, EncoderSeconds, EncoderVisits
from heedful.cost.energy import Energy, EnergyMeter, estimate_energy
from heedful.cost.receipt import Flops, WeightTraffic
from heedful.errors import BadLogits, BadParameter, ContextOverflow, UnsupportedModel, UsageError
from heedful.kernels import native
from heedful.models.pooling import Pooling, PoolingMode
from heedful.text.tokenizer import Tokenizer

Vectors = npt.NDArray[np.float32]
TokenIds = Sequence[int]

STEP_TOKENS = 4096
"""Texts run together up to so many tokens; a longer one runs alone."""


class TextTooLong(ContextOverflow):
    """One text of several is longer than the model takes; both numbers and its place are in it."""

    def __init__(self, index: int, tokens: int, max_tokens: int, does: str = "embeds") -> None:
        self.index = index
        self.prompt_tokens = tokens
        self.context_len = max_tokens
        UsageError.__init__(
            self,
            f"text {index} has {tokens:,} tokens and the model {does} at most {max_tokens:,}",
            "Split the text, or allow cutting with --truncate (Python: truncate=True), "
            "which keeps its beginning and says how many tokens it dropped.",
        )


@dataclass(frozen=True, eq=False)
class EmbeddingBatch:
    """Vectors of N texts, in the order of the texts, and what they cost together."""

    vectors: Vectors
    """float32 (N, dimensions)."""
    token_counts: tuple[int, ...]
    """Computed tokens of each text, the marks at its ends among them."""
    dropped_tokens: tuple[int, ...]
    """Of each text, cut off because `truncate` was asked for."""
    receipt: EncoderReceipt


@dataclass(frozen=True)
class TrunkFacts:
    """What a model takes, gives and costs."""

    vocab_size: int
    hidden_size: int
    context_len: int
    head_dim: int
    linear_weights: int
    """Weights of all matrices that every token passes; read once a step."""
    visits: Callable[[list[int]], EncoderVisits]
    """From the texts' lengths in tokens."""
    saved_bytes: int = 0
    """Of the linear weights' float32, where they are packed into less."""

    @property
    def linear_bytes(self) -> int:
        """Of the linear weights in memory."""
        return 4 * self.linear_weights - self.saved_bytes


class PooledEmbedder:
    """Threads may share it. `Encoder` and `DecoderEmbedder` load one."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        pooling: Pooling,
        facts: TrunkFacts,
        run: Callable[[list[TokenIds], PoolingMode], Vectors],
    ) -> None:
        """`run`: token ids of texts that fit one step → (texts, hidden_size), pooled."""
        self.name = name
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.facts = facts
        self.dimensions = facts.hidden_size
        self.max_tokens = min(facts.context_len, pooling.max_tokens or facts.context_len)
        self._run = run
        self._prefix, self._suffix = marks_around(tokenizer)
        if self.max_tokens < len(self._prefix) + len(self._suffix):
            raise UnsupportedModel(f"{name} takes {self.max_tokens} tokens, its own marks alone are more", "")

    def embed(
        self, texts: Sequence[str] | Sequence[TokenIds], *, normalize: bool = True, truncate: bool = False
    ) -> EmbeddingBatch:
        """Vectors of `texts`, strings or token ids; ids are taken as they are, nothing is put around them.

        A text's vector does not depend on the texts beside it, up to rounding (about 1e-7). normalize: vectors of
        length 1; False leaves them as the model's own pipeline does, which may normalise too. truncate: cut what is
        over max_tokens, at its end.
        Raises BadParameter for what is neither text nor token ids, and for a text without tokens; TextTooLong, a
        ContextOverflow; BadLogits when the model computes no usable numbers.
        """
        began, cpu_began, meter = perf_counter(), process_time(), EnergyMeter()
        meter.start()
        ids, dropped = self._read(texts, truncate)
        lengths = [len(text) for text in ids]
        steps, computing = plan_steps(lengths), perf_counter()
        vectors = self._vectors(ids, steps, normalize)
        ended, read = perf_counter(), self.facts.linear_bytes * len(steps)
        energy = meter.read(process_time() - cpu_began, read) if steps else estimate_energy(0, 0)
        seconds = EncoderSeconds(prefill=ended - computing, total=ended - began)
        receipt = pass_receipt(self.name, self.facts, lengths, sum(dropped), len(steps), seconds, energy)
        return EmbeddingBatch(vectors, tuple(lengths), tuple(dropped), receipt)

    def _vectors(self, ids: list[TokenIds], steps: list[list[int]], normalize: bool) -> Vectors:
        vectors = np.zeros((len(ids), self.dimensions), dtype=np.float32)
        for step in steps:
            vectors[step] = self._run([ids[i] for i in step], self.pooling.mode)
        if not np.isfinite(vectors).all():
            raise BadLogits(f"{self.name} computes no usable numbers for these texts", "Fetch the model again.")
        if normalize or self.pooling.normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def _read(self, texts: Sequence[str] | Sequence[TokenIds], truncate: bool) -> tuple[list[TokenIds], list[int]]:
        """(token ids, how many were cut) of every text."""
        require_list(texts)
        ids: list[TokenIds] = []
        dropped = []
        for index, text in enumerate(texts):
            found = self._text_ids(text) if isinstance(text, str) else checked_ids(index, text, self.facts.vocab_size)
            if not found:
                raise BadParameter("texts", f"text {index} has no tokens", "Give at least one character.")
            if len(found) > self.max_tokens and not truncate:
                raise TextTooLong(index, len(found), self.max_tokens)
            kept = self._cut(found) if len(found) > self.max_tokens else found
            ids.append(kept)
            dropped.append(len(found) - len(kept))
        return ids, dropped

    def _text_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.lower() if self.pooling.lowercase else text)

    def _cut(self, ids: TokenIds) -> TokenIds:
        """The first max_tokens of a text; where a mark stood at its end, it stands there again."""
        suffix = self._suffix if tuple(ids[len(ids) - len(self._suffix) :]) == self._suffix else ()
        return [*ids[: self.max_tokens - len(suffix)], *suffix]


def pass_receipt(
    name: str,
    facts: TrunkFacts,
    lengths: list[int],
    dropped: int,
    steps: int,
    seconds: EncoderSeconds,
    energy: Energy,
    *,
    head_weights: int = 0,
) -> EncoderReceipt:
    """What texts of these lengths cost. `head_weights`: of matrices that every text passes once, not every token."""
    visits, tokens = facts.visits(lengths), sum(lengths)
    linear = 2 * (facts.linear_weights * tokens + head_weights * len(lengths))
    return EncoderReceipt(
        model=name,
        texts=len(lengths),
        prompt_tokens=tokens,
        dropped_tokens=dropped,
        steps=steps,
        visits=visits,
        weights=WeightTraffic((facts.linear_bytes + 4 * head_weights) * steps),
        flops=Flops(linear=linear, attention=4 * facts.head_dim * visits.total),
        seconds=seconds,
        energy=energy,
    )


def require_list(texts: object) -> None:
    """Raises BadParameter for what is no list of texts, as one text alone."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise BadParameter("texts", f"is {type(texts).__name__}, not a list", 'Give a list: ["one text"].')


def checked_ids(index: int, ids: object, vocab_size: int) -> list[int]:
    """Raises BadParameter for what is no list of token ids of this vocabulary."""
    if not isinstance(ids, Sequence) or isinstance(ids, bytes) or any(type(token) is not int for token in ids):
        raise BadParameter("texts", f"text {index} is neither a string nor a list of token ids")
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise BadParameter("texts", f"text {index}: token id {bad[0]} is not in the vocabulary of {vocab_size:,}")
    return list(ids)


def plan_steps(lengths: Sequence[int]) -> list[list[int]]:
    """Which texts run together: their places, shortest text first, so that those of one length are neighbours."""
    steps: list[list[int]] = []
    tokens = STEP_TOKENS
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if tokens + lengths[index] > STEP_TOKENS:
            steps.append([])
            tokens = 0
        steps[-1].append(index)
        tokens += lengths[index]
    return steps


def require_torch() -> None:
    """Raises UnsupportedModel, with the remedy, where PyTorch is not installed."""
    if not has_torch():
        raise UnsupportedModel("this model runs on PyTorch, which is not installed", "pip install 'heedful[torch]'")


def require_torch_or_native() -> None:
    """Raises UnsupportedModel where neither PyTorch nor the native kernels could run any encoder."""
    if not native.is_built():
        require_torch()


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def threads_or_all(threads: int | None) -> int:
    """Raises BadParameter for an impossible number."""
    if threads is None:
        return hardware.detect().threads
    if type(threads) is not int or not 1 <= threads <= 1024:
        raise BadParameter("threads", "must be between 1 and 1024")
    return threads


def marks_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The marks that the tokenizer puts before and after a text, seen on one letter. Raises UnsupportedModel."""
    plain, whole = tokenizer.encode("a", add_bos=False), tokenizer.encode("a")
    for start in range(len(whole)):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    raise UnsupportedModel(f"the tokenizer makes {plain} of a letter, {whole} of a text of it", "The file is damaged.")
