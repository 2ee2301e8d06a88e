"""From one row of logits to one token: bias, penalties, filters and the draw, for one sequence.

Knows nothing of models, text, stop conditions or batches. V is the vocabulary size, C the number of candidates.

The order, which in bias and penalties is that of vLLM and in the filters that of transformers (vLLM has min-p first):

1. logit bias, then the repetition penalty (tokens of prompt and output), then presence and frequency penalties (output
   only): these change which token is likeliest, so greedy decoding sees them too. Then a grammar rules tokens out.
2. temperature 0: the likeliest token, the lowest id on a tie. Otherwise the logits are divided by the temperature.
3. top-k, then top-p of what is left, renormalised, then min-p. min-p compares with the likeliest token, so its place
   would change nothing by itself; it comes after top-p because top-p's share must not depend on it.
4. one uniform number picks from the candidates' cumulative distribution, in ascending id.

Nothing here sorts a vocabulary: top-k and top-p look for the border value and keep what reaches it. Exponentials are
float32, good to about a millionth of each probability at ordinary temperatures; every sum of them is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from heedful.errors import BadLogits, BadParameter
from heedful.request import SamplingParams

if TYPE_CHECKING:
    from heedful.sampling.grammar import GrammarState

LOGIT_LIMIT = 1e30
"""Biased and penalised logits saturate here: beyond any model's logit, and safe from float32 overflow."""
TEMPERATURE_FLOOR = 1e-30
"""A smaller temperature would round to 0 in float32; this one already leaves only the likeliest token."""
SORTED_AT_MOST = 1024
"""The search for top-p's border narrows to so few values before it sorts them."""
BINS = 4096
"""Bins of a histogram in that search."""
DRAW_BLOCK = 512
"""Candidates a block in the two-level draw; a running sum over all of them would cost more than their exponentials."""

Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Sampled:
    """A chosen token. Logprobs are natural logs of the model's own distribution, the log-softmax of its raw logits."""

    token_id: int
    logprob: float | None
    """None unless asked for."""
    top_logprobs: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, likeliest first, the lower id first on a tie."""


class Sampler:
    """Chooses one sequence's tokens. It remembers what it chose; its random numbers come from the request's seed.

    The same seed, prompt and logits give the same tokens; each token that isn't greedy takes one random number.
    With a `grammar` only tokens that it allows are chosen, and it is told of them.
    Raises BadParameter when `logit_bias` names a token that the vocabulary lacks.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, grammar: GrammarState | None = None
    ) -> None:
        self._params = params
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._bias_ids, self._bias = _bias_arrays(params.logit_bias, vocab_size)
        self._seen = _SeenTokens(prompt_ids, vocab_size) if _has_penalties(params) else None

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._params.seed))  # greedy answers need not import it

    def sample(self, logits: Floats32) -> Sampled:
        """Choose the next token from `logits` (V,) float32, which stay as they are. -inf means never.

        Raises BadLogits when nothing can be chosen, GrammarFailed.
        """
        assert logits.shape == (self._vocab_size,), (logits.shape, self._vocab_size)
        assert logits.dtype == np.float32, logits.dtype
        token_id = self._choose(self._adjusted(logits))
        if self._grammar is not None:
            self._grammar.accept(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        if self._params.logprobs is None:
            return Sampled(token_id, None, ())
        return with_logprobs(token_id, logits, self._params.logprobs)

    def _adjusted(self, logits: Floats32) -> Floats32:
        """The logits with bias, penalties and grammar: a copy, or `logits` itself where nothing is asked for."""
        if self._seen is None and not len(self._bias_ids) and self._grammar is None:
            return logits
        _peak(logits)  # raises, before a limit could hide it
        adjusted = logits.copy()
        adjusted[self._bias_ids] += self._bias
        if self._seen is not None:
            self._seen.penalise(adjusted, self._params)
        if self._grammar is not None:
            self._grammar.mask(adjusted)
        return adjusted

    def _choose(self, logits: Floats32) -> int:
        if self._params.temperature == 0:
            likeliest = int(logits.argmax())
            if not np.isfinite(logits[likeliest]):
                _peak(logits)  # says why nothing can be chosen
            return likeliest
        ids, weights = _kept(logits, self._params)
        position = _draw(weights, self._random.random())
        return position if ids is None else int(ids[position])


class _SeenTokens:
    """The tokens of a sequence, each once, and how often its output has each.

    The arrays have one entry a vocabulary token but only touched memory pages exist, so a step costs what was seen.
    """

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        prompt = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        if len(prompt):
            lowest, highest = int(prompt[0]), int(prompt[-1])
            assert 0 <= lowest <= highest < vocab_size, (lowest, highest, vocab_size)
        self._is_seen = np.zeros(vocab_size, dtype=np.bool_)
        self._is_seen[prompt] = True
        self._ids = np.empty(vocab_size, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._id_count = len(prompt)
        self._output_counts = np.zeros(vocab_size, dtype=np.int32)

    def add(self, token_id: int) -> None:
        """Count an output token."""
        if not self._is_seen[token_id]:
            self._is_seen[token_id] = True
            self._ids[self._id_count] = token_id
            self._id_count += 1
        self._output_counts[token_id] += 1

    def penalise(self, logits: Floats32, params: SamplingParams) -> None:
        """Apply the three penalties to `logits` (V,) in place; a masked token (-inf) stays masked."""
        ids = self._ids[: self._id_count]
        counts = self._output_counts[ids]
        values = logits[ids].astype(np.float64)
        masked = values == -np.inf
        with np.errstate(over="ignore"):  # an extreme repetition penalty: clipped below
            values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        np.clip(values, -LOGIT_LIMIT, LOGIT_LIMIT, out=values, where=~masked)
        logits[ids] = values


def candidates(logits: Floats32, params: SamplingParams) -> tuple[Ids, Floats64]:
    """The tokens that may be drawn, and their probabilities, after temperature, top-k, top-p and min-p.

    `logits` (V,) have their bias and penalties already; `params.temperature` is above 0. Returns ids (C,), ascending,
    and probs (C,) float64, which sum to 1; C is at least 1. Tokens whose probability is 0 in float32 are left out.

    top-k keeps exactly k tokens; top-p the fewest, likeliest first, whose share of top-k's mass is at least top_p. Of
    tokens with equal logits at either border the lower ids are kept. min-p keeps all that reach its share.
    """
    ids, weights = _kept(logits, params)
    drawable = np.flatnonzero(weights)
    weights = weights[drawable]
    return _subset(ids, drawable), weights / weights.sum(dtype=np.float64)


def _kept(logits: Floats32, params: SamplingParams) -> tuple[Ids | None, Floats32]:
    """The candidates' ids (None: the whole vocabulary) and weights, some of which may be 0; see `candidates`."""
    assert params.temperature > 0, params.temperature
    peak = _peak(logits)
    ids, values = None, logits
    if 0 < params.top_k < len(values):
        ids = _largest(values, _kth_largest(values, params.top_k), params.top_k)
        values = values[ids]
    weights = _weights(values, peak, params.temperature)
    if params.top_p < 1:
        kept = _nucleus(values, weights, params.top_p)
        ids, weights = _subset(ids, kept), weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids, weights = _subset(ids, kept), weights[kept]
    return ids, weights


def _subset(ids: Ids | None, kept: Ids) -> Ids:
    """`ids[kept]`, where None stands for the whole vocabulary."""
    return kept if ids is None else ids[kept]


def _peak(logits: Floats32) -> np.float32:
    """The largest logit. Raises BadLogits for NaN, +inf, or -inf everywhere, from which nothing can be chosen."""
    peak = np.float32(logits.max())  # NaN wins a maximum, so this one pass finds it
    if not np.isfinite(peak):
        raise BadLogits(
            f"the model's largest logit is {peak}, first at token {logits.argmax()} of {len(logits):,}",
            "Its weights are damaged or out of range; with --kv f16 try q8.",
        )
    return peak


def _weights(values: Floats32, peak: np.float32, temperature: float) -> Floats32:
    """exp((values - peak) / temperature), in which the likeliest token has weight 1."""
    with np.errstate(over="ignore"):  # to -inf, whose weight is the right one, 0
        weights: Floats32 = values - peak
        weights /= np.float32(max(temperature, TEMPERATURE_FLOOR))
    np.exp(weights, out=weights)
    return weights


def _kth_largest(values: Floats32, k: int) -> np.float32:
    """The k-th largest of `values` (n,), 0 < k <= n.

    Partitioning all values costs several times a softmax. The k-th largest of some groups' maxima can't be above the
    border, since k values reach it; what is below it goes first, and only few more than k are left.
    """
    groups = 8 * k
    if len(values) >= 2 * groups:
        rows = len(values) // groups
        maxima = values[: rows * groups].reshape(rows, groups).max(axis=0)
        values = values[values >= np.partition(maxima, -k)[-k]]
    return np.float32(np.partition(values, -k)[-k])


def _largest(values: Floats32, border: np.float32, count: int) -> Ids:
    """Positions, ascending, of the `count` largest of `values`; `border` is the least of them, and low ids win ties."""
    kept = np.flatnonzero(values >= border)
    surplus = len(kept) - count
    assert surplus >= 0, (border, len(kept), count)
    if not surplus:
        return kept
    at_border = np.flatnonzero(values[kept] == border)
    return np.delete(kept, at_border[-surplus:])


def _nucleus(values: Floats32, weights: Floats32, top_p: float) -> Ids:
    """Positions, ascending, of the fewest largest `values` (n,) that hold `top_p` of the sum of `weights` (n,).

    Looks for the least of them, the border, in a histogram, then in a histogram of its bin, until few values are left.
    """
    total = weights.sum(dtype=np.float64)
    target = top_p * total
    # Tokens below this weight hold less than 1 - top_p even if all are: the border is not among them.
    in_question = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    values_left, weights_left = values[in_question], weights[in_question]
    kept_count, kept_mass = 0, 0.0
    while len(values_left) > SORTED_AT_MOST and values_left.min() < values_left.max():
        bins = _bins(values_left)
        masses = np.bincount(bins, weights_left)
        border_bin = min(int(np.searchsorted(kept_mass + np.cumsum(masses), target)), len(masses) - 1)
        kept_count += int(np.count_nonzero(bins < border_bin))
        kept_mass += float(masses[:border_bin].sum())
        in_border_bin = np.flatnonzero(bins == border_bin)
        values_left, weights_left = values_left[in_border_bin], weights_left[in_border_bin]
    order = np.argsort(-values_left, kind="stable")
    reached = kept_mass + np.cumsum(weights_left[order], dtype=np.float64)
    last = min(int(np.searchsorted(reached, target)), len(order) - 1)
    return _largest(values, values_left[order[last]], kept_count + last + 1)


def _bins(values: Floats32) -> NDArray[np.intp]:
    """The bins of `values` (n,), which are not all equal: 0 for the largest, down to BINS - 1 for the smallest."""
    high = values.max()
    depth: Floats32 = high - values
    depth /= high - values.min()
    depth *= np.float32(BINS)
    np.minimum(depth, np.float32(BINS - 1), out=depth)
    return depth.astype(np.intp)


def _draw(weights: Floats32, uniform: float) -> int:
    """The position where the running sum of `weights` (C,) first exceeds `uniform` of their total; it has a weight."""
    whole = len(weights) - len(weights) % DRAW_BLOCK
    sums = weights[:whole].reshape(-1, DRAW_BLOCK).sum(axis=1, dtype=np.float64)
    reached = np.cumsum(np.append(sums, weights[whole:].sum(dtype=np.float64)))
    target = uniform * reached[-1]
    block = int(np.searchsorted(reached, target, side="right"))
    before = reached[block - 1] if block else 0.0
    start = block * DRAW_BLOCK
    within = np.cumsum(weights[start : start + DRAW_BLOCK], dtype=np.float64)
    # The two sums of a block may differ in the last bit; without the bound a target could lie behind all of them.
    rest = min(target - before, np.nextafter(within[-1], 0.0))
    return start + int(np.searchsorted(within, rest, side="right"))


def with_logprobs(token_id: int, logits: Floats32, top_count: int) -> Sampled:
    """`token_id` with its logprob, and those of the `top_count` likeliest tokens of the raw `logits` (V,)."""
    peak = _peak(logits)
    log_total = float(peak) + float(np.log(_weights(logits, peak, 1.0).sum(dtype=np.float64)))
    count = min(top_count, len(logits))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = _largest(logits, _kth_largest(logits, count), count)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(i), float(logits[i]) - log_total) for i in ids)
    return Sampled(token_id, float(logits[token_id]) - log_total, top)


def _bias_arrays(logit_bias: Mapping[int, float], vocab_size: int) -> tuple[Ids, Floats32]:
    """`logit_bias` as ids and numbers to add."""
    for token_id in logit_bias:
        if not 0 <= token_id < vocab_size:
            raise BadParameter(
                "logit_bias",
                f"there is no token {token_id}: the vocabulary has {vocab_size:,} tokens",
                f"Use token ids from 0 to {vocab_size - 1}.",
            )
    bias = np.clip(np.fromiter(logit_bias.values(), np.float64), -LOGIT_LIMIT, LOGIT_LIMIT)
    return np.fromiter(logit_bias.keys(), np.int64), bias.astype(np.float32)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
