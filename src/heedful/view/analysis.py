"""Where attention went: one plain pass of the PyTorch model over the tokens of a finished run, in exact attention.

    analyse(model, token_ids, samples, seen) -> Analysis

Nothing of it happens while an answer is computed. The pass goes through the tokens in chunks, and in each layer the
rows of the sampled queries are computed once more, summed up and dropped, so memory does not grow with their number.
What the run's policy allowed comes in as `seen`; the rows themselves are those of exact attention, so that what a
policy left out shows as mass that it did not keep.

Shapes: L attention layers, H query heads, K KV heads, Q sampled queries, N tokens, P pages, B budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.cache.policy import DENSE_LAYERS, LOCAL_PAGES, PAGE_LEN, listed_pages, rotation_block
from heedful.kernels import reference
from heedful.models.carried import Carried
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.models.qwen3_5 import Qwen35
from heedful.view.sampled import Samples

CHUNK_LEN = 256
LOGITS_AT_ONCE = 1 << 24
"""Rows times vocabulary: 64 MB."""
SINKS = 4
LIGHT = 1e-3
"""A visit that carried less of its query's weight than this."""
MOST_SOURCES = 6
TOP_PREDICTIONS = 3
WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BUDGETS = (256, 512, 1024, 2048, 4096)

Floats = npt.NDArray[np.float64]
Pairs = tuple[tuple[int, float], ...]
"""(token id or position, probability or share), the largest first."""
Seen = Callable[[int, int], npt.NDArray[np.bool_] | None]
"""(layer, position) → which keys up to the position the run's query there read, bool (1 or K, position + 1); None where
the run did not compute it."""


@dataclass(frozen=True)
class HeadSums:
    """Means over the sampled queries, (L, H) each."""

    entropy: Floats
    """Bits."""
    distance: Floats
    """Tokens between a query and what it looks at, weighted."""
    sink_mass: Floats
    """On the first SINKS tokens."""
    light: Floats
    """Share of the run's visits that carried less than LIGHT."""
    kept: Floats
    """Weight on what the run read: 1 where it read everything."""


@dataclass(frozen=True)
class Coverage:
    """Attention mass that would be kept, mean over queries and heads, (L, B): of windows without and with SINKS sinks,
    and of pages chosen by their bounds while decoding."""

    queries: int
    window: Floats
    sinks: Floats
    pages: Floats


@dataclass(frozen=True)
class Analysis:
    surprisal: Floats
    """Bits, (N,); NaN for the first token."""
    predicted: tuple[Pairs, ...]
    """Of each sampled query: (token id, probability) of the likeliest next tokens."""
    heads: HeadSums
    page_mass: npt.NDArray[np.float32]
    """Of each row of the page map: (L + 1, rows, P), the mean over heads; the last layer is the mean of all."""
    sources: tuple[Pairs, ...]
    """Of each sampled query: (position, share) of the keys that it looked at most, over all layers and heads, the first
    SINKS tokens aside, which take a share without meaning much."""
    sink_share: Floats
    """(Q,)"""
    coverage: Coverage
    lens: tuple[Pairs, ...]
    """After each block of the model and at each lens position: (token id, probability) of the likeliest next token, as
    the output head would have it there (logit lens, nostalgebraist 2020)."""


@torch.inference_mode()
def analyse(
    model: Decoder | Qwen35,
    token_ids: list[int],
    samples: Samples,
    answer_from: int,
    seen: Seen,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Analysis:
    """`answer_from`: the first position whose queries decide about coverage; all do where there are none.

    `progress` is called with the tokens of every chunk, and may raise to break off.
    """
    taps = _Taps(model.config, samples, answer_from, seen)
    carried = _TappedCarried(model.config, taps)
    hidden_of_blocks: list[list[Tensor]] = [[] for _ in model.layers]
    handles = [
        block.register_forward_hook(lambda _, __, out, rows=rows: rows.append(out[taps.lens_rows]))
        for block, rows in zip(model.layers, hidden_of_blocks, strict=True)
    ]
    surprisal = np.full(len(token_ids), np.nan)
    predicted: dict[int, Pairs] = {}
    try:
        for begin in range(0, len(token_ids), CHUNK_LEN):
            ids = token_ids[begin : begin + CHUNK_LEN]
            taps.begin_chunk(begin, len(ids))
            positions = torch.arange(begin, begin + len(ids))
            states = () if model.config.delta is None else (carried,)
            hidden = model(torch.tensor(ids), positions, carried, *states)
            _read_logits(model, hidden, begin, token_ids, samples.queries, surprisal, predicted)
            progress(len(ids))
    finally:
        for handle in handles:
            handle.remove()
    lens = tuple(_lens(model, torch.cat(rows)) for rows in hidden_of_blocks)
    return taps.result(surprisal, tuple(predicted[query] for query in samples.queries), lens)


def _read_logits(
    model: Decoder | Qwen35,
    hidden: Tensor,
    begin: int,
    token_ids: list[int],
    queries: tuple[int, ...],
    surprisal: Floats,
    predicted: dict[int, Pairs],
) -> None:
    wanted = set(queries)
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for first in range(0, len(hidden), rows):
        logprobs = model.logits(hidden[first : first + rows]).log_softmax(dim=-1)
        best = logprobs.topk(TOP_PREDICTIONS, dim=-1)
        for row, at in enumerate(range(begin + first, begin + first + len(logprobs))):
            if at + 1 < len(token_ids):
                surprisal[at + 1] = -float(logprobs[row, token_ids[at + 1]]) / np.log(2)
            if at in wanted:
                pairs = zip(best.indices[row].tolist(), best.values[row].exp().tolist(), strict=True)
                predicted[at] = tuple(pairs)


def _lens(model: Decoder | Qwen35, hidden: Tensor) -> Pairs:
    if not len(hidden):
        return ()
    best = model.logits(model.norm(hidden)).softmax(dim=-1).max(dim=-1)
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


class _TappedCarried(Carried):
    """Plain causal attention that shows every layer's queries and keys to the taps."""

    def __init__(self, config: ModelConfig, taps: _Taps) -> None:
        super().__init__(config)
        self.taps = taps

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        out = super().__call__(layer, q, k, v, window=window, scale=scale, softcap=softcap)
        self.taps.take(layer, q, self.keys[layer], window, scale, softcap)
        return out


@dataclass
class _Taps:
    """Sums over the rows of sampled queries."""

    config: ModelConfig
    samples: Samples
    answer_from: int
    seen: Seen
    lens_rows: list[int] = field(default_factory=list)
    """Rows of the chunk whose hidden states the lens wants."""

    def __post_init__(self) -> None:
        layers, heads, queries = len(self.config.windows), self.config.num_heads, self.samples.queries
        if not any(query >= self.answer_from for query in queries):
            self.answer_from = 0
        self.sums = {name: np.zeros((layers, heads)) for name in ("entropy", "distance", "sink", "light", "kept")}
        self.visited = np.zeros((layers, heads))
        self.run_queries = 0
        pages = queries[-1] // PAGE_LEN + 1
        self.map_row = {self.samples.queries[index]: row for row, index in enumerate(self.samples.map_rows)}
        self.page_mass = np.zeros((layers + 1, len(self.map_row), pages), dtype=np.float32)
        self.sink_share = np.zeros(len(queries))
        self.looked_at: dict[int, Tensor] = {}
        """Of the chunk's sampled queries: the mean row over the layers so far."""
        self.sources: dict[int, Pairs] = {}
        self.covered = {
            "window": np.zeros((layers, len(WINDOWS))),
            "sinks": np.zeros((layers, len(WINDOWS))),
            "pages": np.zeros((layers, len(BUDGETS))),
        }
        self.index_of = {query: index for index, query in enumerate(queries)}

    def begin_chunk(self, begin: int, length: int) -> None:
        self.begin = begin
        self.queries = [query for query in self.samples.queries if begin <= query < begin + length]
        self.lens_rows = [at - begin for at in self.samples.lens if begin <= at < begin + length]
        self.looked_at = {}

    def take(
        self, layer: int, q: Tensor, keys: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> None:
        """q (T, H, D) of the chunk, keys (N, K, D) up to its end, positions applied."""
        if not self.queries:
            return
        at = torch.tensor(self.queries)
        rows = q[at - self.begin]
        weights = attention_rows(rows, keys, at, window, scale, softcap)
        self._sum_up(layer, weights, at)
        self._note_pages(layer, weights)
        self._note_sources(layer, weights)
        self._cover(layer, rows * scale, keys, weights, at, window)

    def _sum_up(self, layer: int, weights: Tensor, at: Tensor) -> None:
        """weights (Q, H, N)."""
        distance = (at[:, None] - torch.arange(weights.shape[-1])[None, :]).float()
        self.sums["entropy"][layer] += _over_queries(torch.special.entr(weights).sum(-1) / np.log(2))
        self.sums["distance"][layer] += _over_queries(torch.einsum("qhn,qn->qh", weights, distance))
        self.sums["sink"][layer] += _over_queries(weights[..., :SINKS].sum(-1))
        share = self.config.num_heads // self.config.num_kv_heads
        for row, query in enumerate(self.queries):
            seen = self.seen(layer, query)
            if seen is None:
                continue
            self.run_queries += layer == 0
            mask = torch.from_numpy(seen)
            mask = mask.repeat_interleave(share, dim=0) if len(mask) > 1 else mask
            mine = weights[row, :, : query + 1]
            self.visited[layer] += mask.sum(-1).numpy()
            self.sums["light"][layer] += ((mine < LIGHT) & mask).sum(-1).numpy()
            self.sums["kept"][layer] += (mine * mask).sum(-1).double().numpy()

    def _note_pages(self, layer: int, weights: Tensor) -> None:
        wanted = [(row, self.map_row[query]) for row, query in enumerate(self.queries) if query in self.map_row]
        if not wanted:
            return
        by_page = page_sums(weights[[row for row, _ in wanted]].mean(dim=1)).numpy()
        for mass, (_, row) in zip(by_page, wanted, strict=True):
            self.page_mass[layer, row, : len(mass)] = mass[: self.page_mass.shape[-1]]

    def _note_sources(self, layer: int, weights: Tensor) -> None:
        mean = weights.mean(dim=1)
        layers = len(self.config.windows)
        for row, query in enumerate(self.queries):
            mine = mean[row, : query + 1] / layers
            self.looked_at[query] = mine if layer == 0 else self.looked_at[query] + mine
            if layer == layers - 1:
                self._close_sources(query, self.looked_at.pop(query))

    def _close_sources(self, query: int, looked_at: Tensor) -> None:
        self.sink_share[self.index_of[query]] = float(looked_at[:SINKS].sum())
        rest = looked_at[SINKS:]
        best = rest.topk(min(MOST_SOURCES, len(rest)))
        places = (best.indices + SINKS).tolist()
        self.sources[query] = tuple(zip(places, best.values.tolist(), strict=True))

    def _cover(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor, at: Tensor, window: int | None) -> None:
        """q: scaled."""
        deciding = at >= self.answer_from
        if not deciding.any():
            return
        q, weights, at = q[deciding], weights[deciding], at[deciding]
        before = torch.nn.functional.pad(weights.cumsum(-1), (1, 0))  # mass of the keys before each one
        total = before[..., -1]
        for index, width in enumerate(WINDOWS):
            first = (at - width + 1).clamp(min=0)
            left_out = before.gather(-1, first[:, None, None].expand(-1, weights.shape[1], 1))[..., 0]
            of_sinks = before.gather(-1, first.clamp(max=SINKS)[:, None, None].expand(-1, weights.shape[1], 1))[..., 0]
            self.covered["window"][layer, index] += float((total - left_out).mean(1).sum())
            self.covered["sinks"][layer, index] += float((total - left_out + of_sinks).mean(1).sum())
        if window is not None or layer < DENSE_LAYERS:  # these read everything under a budget too
            self.covered["pages"][layer] += float(total.mean(1).sum())
            return
        bounds, mass = page_bounds(q, keys), page_sums(weights)
        for index, budget in enumerate(BUDGETS):
            kept = mass_of_chosen(bounds, keys.shape[1], mass, at, budget // PAGE_LEN)
            self.covered["pages"][layer, index] += float(kept.mean(1).sum())

    def result(
        self,
        surprisal: Floats,
        predicted: tuple[Pairs, ...],
        lens: tuple[Pairs, ...],
    ) -> Analysis:
        queries = len(self.samples.queries)
        deciding = sum(query >= self.answer_from for query in self.samples.queries)
        self.page_mass[-1] = self.page_mass[:-1].mean(axis=0)
        return Analysis(
            surprisal=surprisal,
            predicted=predicted,
            heads=HeadSums(
                entropy=self.sums["entropy"] / queries,
                distance=self.sums["distance"] / queries,
                sink_mass=self.sums["sink"] / queries,
                light=self.sums["light"] / np.maximum(self.visited, 1),
                kept=self.sums["kept"] / max(1, self.run_queries),
            ),
            page_mass=self.page_mass,
            sources=tuple(self.sources[query] for query in self.samples.queries),
            sink_share=self.sink_share,
            coverage=Coverage(deciding, *(self.covered[name] / deciding for name in ("window", "sinks", "pages"))),
            lens=lens,
        )


def attention_rows(
    q: Tensor, keys: Tensor, at: Tensor, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Weights (Q, H, N) of queries q (Q, H, D) at positions `at` on keys (N, K, D) from position 0 on.

    exp(score - log-sum-exp of the row), which is what the kernel multiplied the values with.
    """
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
    scores = torch.einsum("qkgd,nkd->qkgn", grouped, keys).flatten(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = at[:, None] - torch.arange(len(keys))[None, :]
    allowed = (distance >= 0) & (distance < (window or len(keys) + 1))
    scores = scores.masked_fill(~allowed[:, None, :], float("-inf"))
    return (scores - scores.logsumexp(dim=-1, keepdim=True)).exp()


def page_sums(weights: Tensor) -> Tensor:
    """(..., N) → (..., P)."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % PAGE_LEN))
    return padded.view(*padded.shape[:-1], -1, PAGE_LEN).sum(-1)


def page_bounds(q: Tensor, keys: Tensor) -> Tensor:
    """What a key of each full page could score: q (Q, H, D), scaled, keys (N, K, D) → (Q, H, full pages).

    As a run chooses by: bounds of 8 bits, here of exact keys, rotated as those of quantized rows are.
    """
    block = rotation_block(q.shape[-1])
    if block > 1:
        q, keys = reference.hadamard(q, block), reference.hadamard(keys, block)
    full = len(keys) // PAGE_LEN
    if full == 0:
        return q.new_empty(*q.shape[:2], 0)
    bounds = reference.encode_bounds(keys[: full * PAGE_LEN].reshape(full, PAGE_LEN, *keys.shape[1:]))
    means, variances = reference.decode_bounds(bounds)
    return torch.stack([reference.page_bounds(one, means, variances) for one in q])


def mass_of_chosen(bounds: Tensor, kv_heads: int, mass: Tensor, at: Tensor, num_pages: int) -> Tensor:
    """What a budget of `num_pages` keeps of the queries' mass by page (Q, H, P) → (Q, H): the first page, the newest,
    and those that weigh most of the rest, or of those of the rest that promise most by `bounds` (Q, H, full pages); as
    if each query were the first to choose.
    """
    local, own = min(LOCAL_PAGES, num_pages - 3), (at // PAGE_LEN)[:, None]
    pages = torch.arange(bounds.shape[-1])
    is_candidate = (pages >= 1) & (pages < own - local)
    promises = reference.page_promises(bounds.masked_fill(~is_candidate[:, None, :], float("-inf")), kv_heads)
    promises = promises.masked_fill(~is_candidate[:, None, :], -1.0)
    listed = promises.sort(dim=-1, descending=True, stable=True).indices[..., : listed_pages(num_pages, len(pages))]
    is_listed = torch.zeros_like(promises, dtype=torch.bool).scatter_(-1, listed, True) & is_candidate[:, None, :]
    weights = mass[..., : len(pages)] * is_listed.repeat_interleave(mass.shape[1] // kv_heads, dim=1)
    shares = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    shares = shares.view(len(mass), kv_heads, mass.shape[1] // kv_heads, len(pages)).sum(2)
    shares = shares.masked_fill(~is_listed, -1.0)
    best = shares.sort(dim=-1, descending=True, stable=True).indices[..., : num_pages - local - 2]
    read = torch.zeros(len(mass), kv_heads, mass.shape[-1], dtype=torch.bool).scatter_(-1, best, True)
    pages = torch.arange(mass.shape[-1])
    read |= ((pages == 0) | (pages >= own - local) | (own + 1 <= num_pages))[:, None, :]
    return (mass * read.repeat_interleave(mass.shape[1] // kv_heads, dim=1)).sum(-1)


def _over_queries(x: Tensor) -> Floats:
    """(Q, H) → (H,)."""
    summed: Floats = x.sum(0).double().numpy()
    return summed
