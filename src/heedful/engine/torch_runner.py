"""The plain runner: calls the model file with PyTorch. It defines what every other runner must compute.

Weights are dequantized to float32 at load: 4 bytes a weight in memory and per step, 6.4 times what Q4_1 holds.
Keys and values are stored as the request's policy says and read back as float32, those of the current token too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.cache.pages import ARENA_PAGES, KVCache, PageArena, PageLayout, plain_layout
from heedful.cache.policy import PAGE_LEN, rotation_block
from heedful.cost.meter import RunnerFacts
from heedful.engine.adapter_runs import adapter_runs
from heedful.engine.torch_adapters import TorchAdapters
from heedful.engine.torch_states import StateSlots, on_device, state_layout
from heedful.kernels import reference
from heedful.kernels.attention import attention, causal_bias
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.models.qwen3_5 import Qwen35
from heedful.models.rope import Rope
from heedful.request import KV_ROW_BYTES, Batch, KeySpan, KVFormat, Selection
from heedful.weights.adapter import Adapter
from heedful.weights.names import Weights, WeightsToPlace


class TorchRunner:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        capacity_tokens: int,
        threads: int,
        device: str = "cpu",
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """`capacity_tokens`: how many tokens' K and V fit. `adapters`: by the names that requests give them. Sets
        PyTorch's thread count for the whole process.

        `device`: where weights and pages lie; "cuda" has not been run yet for want of a GPU.
        """
        torch.set_num_threads(threads)
        self.threads = threads
        self.config = config
        self.device = torch.device(device)
        self.decoder = build_model(config, weights).to(self.device)
        self.cache = KVCache(
            config.windows,
            config.num_kv_heads,
            config.head_dim,
            lambda form: _page_layout(form, config.num_kv_heads, config.head_dim),
            default=KVFormat("f32", "f32"),
            numbers=tuple(KV_ROW_BYTES),
            capacity_tokens=capacity_tokens,
            states=state_layout(config),
        )
        self._states = None if self.cache.states is None else StateSlots(self.cache.states, config, self.device)
        self._adapters = TorchAdapters(self.decoder, adapters or {}, self.device)
        self.facts = RunnerFacts(4 * config.linear_weights, 4 * config.head_weights, self._adapters.facts)
        self._arenas: dict[int, _ArenaRows] = {}

    @torch.inference_mode()
    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        token_ids = [token for chunk in batch.chunks for token in chunk.token_ids]
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.end)]
        self._adapters.runs = adapter_runs(batch)
        over_time = [self.attend(batch), *([] if self._states is None else [self._states.recur(batch)])]
        hidden = self.decoder(*(torch.tensor(ints, device=self.device) for ints in (token_ids, positions)), *over_time)
        ends = np.cumsum([chunk.end - chunk.start for chunk in batch.chunks]) - 1
        wanted = [
            row
            for end, chunk in zip(ends, batch.chunks, strict=True)
            for row in range(int(end) + 1 - chunk.num_logits, int(end) + 1)
        ]
        if not wanted:
            return np.empty((0, self.config.vocab_size), dtype=np.float32)
        return self.decoder.logits(hidden[wanted]).cpu().numpy()

    def attend(self, batch: Batch) -> PagedAttend:
        """What the model's layers call in this step; page moves are done."""
        for arena in self.cache.arenas:
            if arena.index not in self._arenas and arena is not self.cache.states:
                self._arenas[arena.index] = _ArenaRows(arena, self.config, self.device)
        for chunk in batch.chunks:
            for move in chunk.moves:
                self._move(move.source, move.target)
        return PagedAttend(batch, self._arenas, self.config, self.device)

    def _move(self, source: int, target: int) -> None:
        (from_arena, from_row), (to_arena, to_row) = (divmod(page, ARENA_PAGES) for page in (source, target))
        for layer in self._arenas[from_arena].layers:
            keys, values = self._arenas[from_arena].read(layer, _slots_of_page(from_row))
            self._arenas[to_arena].write(layer, _slots_of_page(to_row), keys, values)
            self._arenas[to_arena].make_bounds(layer, to_row)


def _page_layout(form: KVFormat, kv_heads: int, head_dim: int) -> PageLayout:
    """A page's slots one after another, in each the rows of its K keys, then those of its K values: so the keys of
    pages that follow one another are one strided view. Bounds as `reference.encode_bounds` makes them.
    """
    return replace(plain_layout(form, kv_heads, head_dim), bounds_bytes=kv_heads * (2 * head_dim + 8))


Rows = slice | Tensor
"""Which rows of a buffer: a slice where they follow one another (a view, no copy), else int64 numbers."""


def _slots_of_page(row: int) -> slice:
    return slice(row * PAGE_LEN, (row + 1) * PAGE_LEN)


class _ArenaRows:
    """An arena's buffers as rows of token slots and of page bounds."""

    def __init__(self, arena: PageArena, config: ModelConfig, device: torch.device) -> None:
        self.format = arena.format
        self.layers = arena.layers
        self._kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._slots = {
            layer: on_device(pages, device).view(arena.num_pages * PAGE_LEN, -1)
            for layer, pages in arena.buffers.items()
        }
        """uint8 (num_pages · PAGE_LEN, bytes of K keys and K values)."""
        self._bounds = {
            layer: on_device(bounds, device).view(arena.num_pages, config.num_kv_heads, -1)
            for layer, bounds in arena.bounds.items()
        }
        """uint8 (num_pages, K, bytes of a bound)."""

    def write(self, layer: int, slots: Rows, k: Tensor, v: Tensor) -> None:
        """k and v float (N, K, D), as they are to lie (rotated or not)."""
        keys, values = reference.encode(self.format.keys, k), reference.encode(self.format.values, v)
        self._slots[layer][slots] = torch.cat((keys.flatten(1), values.flatten(1)), dim=1)

    def read(self, layer: int, slots: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values float32 (N, K, D), as they lie."""
        rows = self._slots[layer][slots]
        key_bytes = self._kv_heads * KV_ROW_BYTES[self.format.keys](self._head_dim)
        sides = (rows[:, :key_bytes], rows[:, key_bytes:])
        keys, values = (side.reshape(len(rows), self._kv_heads, -1) for side in sides)
        return (
            reference.decode(self.format.keys, keys, self._head_dim),
            reference.decode(self.format.values, values, self._head_dim),
        )

    def make_bounds(self, layer: int, page: int) -> None:
        """Of a full page, from its keys as stored; layers with a window have none."""
        if self._bounds[layer].shape[-1]:
            keys, _ = self.read(layer, _slots_of_page(page))
            self._bounds[layer][page] = reference.encode_bounds(keys)

    def bounds(self, layer: int, pages: Rows) -> Tensor:
        return self._bounds[layer][pages]


_Arenas = Mapping[int, _ArenaRows]
"""By index in the cache."""


class PagedAttend:
    """The attend of one step: stores each chunk's new rows in its pages, then reads what its span allows."""

    def __init__(
        self, batch: Batch, arenas: Mapping[int, _ArenaRows], config: ModelConfig, device: torch.device
    ) -> None:
        self._lengths = [chunk.end - chunk.start for chunk in batch.chunks]
        self._spans: dict[int, list[_SpanAttend]] = {}
        for chunk in batch.chunks:
            for span in chunk.spans:
                step = _SpanAttend(span, arenas, config, device)
                for layer in span.layers:
                    self._spans.setdefault(layer, []).append(step)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        parts = zip(self._spans[layer], *(torch.split(x, self._lengths) for x in (q, k, v)), strict=True)
        outs = [span(layer, *qkv, scale=scale, softcap=softcap) for span, *qkv in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _SpanAttend:
    """Attention of one chunk in the layers of one group."""

    def __init__(
        self, span: KeySpan, arenas: Mapping[int, _ArenaRows], config: ModelConfig, device: torch.device
    ) -> None:
        self._span = span
        self._arenas = arenas
        self._device = device
        self._block = rotation_block(config.head_dim) if span.formats[0].format.rotated else 1
        self._sinks = min(span.sinks, span.end)
        self._turn = _turn_to_sinks(span, config.rope_of(span.layers[0]), device)
        pages = np.asarray(span.pages, dtype=np.int64)
        new = _slots(pages, span.first_page, span.start, span.end)
        (self._new,) = _runs(new, PAGE_LEN, device)
        sink_keys = _slots(np.asarray(span.sink_pages, dtype=np.int64), 0, 0, self._sinks)
        main_keys = _slots(pages, span.first_page, span.first_key, span.end)
        self._keys = _runs(np.concatenate((sink_keys, main_keys)), PAGE_LEN, device)
        count = span.end - span.first_key
        self._bias = causal_bias(
            span.start, span.end - span.start, span.first_key, count, span.window, device, sinks=self._sinks
        )
        filled = range(span.start // PAGE_LEN - span.first_page, span.end // PAGE_LEN - span.first_page)
        self._filled = [span.pages[index] % ARENA_PAGES for index in filled]
        """Rows, in the arena of the new keys, of pages whose last slot this chunk stores."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None) -> Tensor:
        """q (T, H, D), k and v (T, K, D), positions applied → (T, H, D)."""
        sink_q = None if self._turn is None else self._rotated(reference.rotate(q, *self._turn))
        q, k, v = self._rotated(q), self._rotated(k), self._rotated(v)
        self._store(layer, k, v)
        selection = self._span.selection
        if selection is not None and layer >= selection.dense_layers:
            keys, values = self._read_chosen(layer, q, selection, scale, softcap)
        else:
            keys, values = self._read(layer, self._keys, q.dtype)
        out = attention(q, keys, values, self._bias, scale=scale, softcap=softcap, sink_q=sink_q, sinks=self._sinks)
        return self._rotated(out)

    def _rotated(self, x: Tensor) -> Tensor:
        return x if self._block == 1 else reference.hadamard(x, self._block)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        arena = self._arenas[self._new.arena]
        arena.write(layer, self._new.rows, k, v)
        for page in self._filled:
            arena.make_bounds(layer, page)

    def _read(self, layer: int, runs: list[_Run], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (N, K, D) of the slots, in their order."""
        parts = [self._arenas[run.arena].read(layer, run.rows) for run in runs]
        keys, values = parts[0] if len(parts) == 1 else (torch.cat(rows) for rows in zip(*parts, strict=True))
        return keys.to(dtype), values.to(dtype)

    def _read_chosen(
        self, layer: int, q: Tensor, selection: Selection, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (N, K, D) of the pages that each KV head has chosen, up to the query's own position."""
        if selection.renew:
            selection.chosen[layer] = self._choose(q[0] * scale, selection, layer, softcap)
        chosen = selection.chosen[layer]  # (K, pages)
        indices, place = np.unique(chosen, return_inverse=True)
        pages = np.asarray(self._span.pages, dtype=np.int64)[indices]
        slots = (pages[:, None] * PAGE_LEN + np.arange(PAGE_LEN)).ravel()
        heads = torch.arange(len(chosen), device=self._device)[:, None]
        place_of_head = torch.from_numpy(place.reshape(chosen.shape)).to(self._device)
        last_page_len = (self._span.end - 1) % PAGE_LEN + 1
        count = (selection.num_pages - 1) * PAGE_LEN + last_page_len

        def of_heads(rows: Tensor) -> Tensor:
            by_page = rows.reshape(-1, PAGE_LEN, *rows.shape[1:]).transpose(1, 2)  # (pages, K, PAGE_LEN, D)
            return by_page[place_of_head, heads].flatten(1, 2)[:, :count].transpose(0, 1)

        keys, values = self._read(layer, _runs(slots, PAGE_LEN, self._device), q.dtype)
        return of_heads(keys), of_heads(values)

    def _choose(self, q: Tensor, selection: Selection, layer: int, softcap: float | None) -> npt.NDArray[np.int32]:
        """(K, num_pages): the first page, those that weigh most, the newest full ones and the query's own. q (H, D) is
        scaled.
        """
        own = (self._span.end - 1) // PAGE_LEN
        candidates = np.arange(1, own - selection.local_pages)
        count = selection.num_pages - selection.local_pages - 2
        assert 0 <= count <= len(candidates), (selection.num_pages, own)
        pages = np.asarray(self._span.pages, dtype=np.int64)[candidates]
        last = selection.chosen[layer]
        before = np.stack([np.isin(candidates, of_head) for of_head in last]) if last.any() else None
        bonus = None if before is None else torch.from_numpy(before).to(self._device)
        slots = (pages[:, None] * PAGE_LEN + np.arange(PAGE_LEN)).ravel()
        keys, _ = self._read(layer, _runs(slots, PAGE_LEN, self._device), q.dtype)
        weights = reference.page_weights(q, keys.reshape(len(pages), PAGE_LEN, *keys.shape[1:]), softcap)
        if selection.listed is not None:
            runs = _runs(pages, 1, self._device)
            rows = torch.cat([self._arenas[run.arena].bounds(layer, run.rows) for run in runs])
            promises = reference.page_promises(reference.page_bounds(q, *reference.decode_bounds(rows)), len(last))
            listed = reference.choose_pages(promises, selection.listed_pages, bonus)
            selection.listed[layer] = candidates[listed.cpu().numpy()]
            is_listed = torch.zeros_like(promises, dtype=torch.bool).scatter(-1, listed, True)
            of_heads = is_listed.repeat_interleave(len(weights) // len(last), dim=0)
            shares = reference.page_promises(weights.where(of_heads, -torch.inf), len(last)).where(is_listed, -1.0)
        else:
            shares = reference.page_promises(weights, len(last))
        best = candidates[reference.choose_pages(shares, count, bonus).cpu().numpy()]
        always = np.array([0, *range(own - selection.local_pages, own + 1)])
        return np.sort([[*always, *of_head] for of_head in best], axis=1).astype(np.int32)


@dataclass(frozen=True)
class _Run:
    """Rows of one arena."""

    arena: int
    rows: Rows


def _slots(pages: npt.NDArray[np.int64], first_page: int, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Of positions [begin, end): page · PAGE_LEN + slot. `first_page`: index in the sequence of pages[0]."""
    positions = np.arange(begin, end)
    return pages[positions // PAGE_LEN - first_page] * PAGE_LEN + positions % PAGE_LEN


def _runs(numbers: npt.NDArray[np.int64], per_page: int, device: torch.device) -> list[_Run]:
    """page · per_page + slot, split where the arena changes."""
    arenas, rows = np.divmod(numbers, ARENA_PAGES * per_page)
    borders = [0, *(np.flatnonzero(np.diff(arenas)) + 1).tolist(), len(numbers)]
    return [_Run(int(arenas[begin]), _rows(rows[begin:end], device)) for begin, end in pairwise(borders)]


def _rows(numbers: npt.NDArray[np.int64], device: torch.device) -> Rows:
    if (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers).to(device)


def _turn_to_sinks(span: KeySpan, rope: Rope | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """cos and sin (T, rotary_dim / 2) that turn the chunk's queries from where they stand to where the sinks meet them.

    The difference of two angles of `layers.rotary_table`, which has its scaling in q already; None: all stay.
    """
    if rope is None or span.sink_distance is None or span.end - 1 <= span.sink_distance:
        return None
    here = torch.arange(span.start, span.end, device=device).float()[:, None]
    there = here.clamp(max=span.sink_distance)
    inv_freq = torch.from_numpy(rope.inv_freq()).float().to(device)
    angles = there * inv_freq - here * inv_freq
    return angles.cos(), angles.sin()


def build_model(config: ModelConfig, weights: Weights) -> Decoder | Qwen35:
    """The decoder of the config's family in float32 with these weights.

    Raises UnsupportedModel when one is missing, extra or misshapen.
    """
    return build_decoder(config, weights) if config.delta is None else build_hybrid(config, weights)


def build_decoder(config: ModelConfig, weights: Weights) -> Decoder:
    """Where all layers are attention. Raises as `build_model`."""
    assert config.delta is None, config.family
    with torch.device("meta"):
        decoder = Decoder(config)
    return _placed(decoder, weights)


def build_hybrid(config: ModelConfig, weights: Weights) -> Qwen35:
    """Where some layers are DeltaNet. Raises as `build_model`."""
    assert config.delta is not None, config.family
    with torch.device("meta"):
        decoder = Qwen35(config)
    return _placed(decoder, weights)


Model = TypeVar("Model", Decoder, Qwen35)


def _placed(decoder: Model, weights: Weights) -> Model:
    decoder = decoder.to_empty(device="cpu").requires_grad_(False).eval()
    if decoder.config.tied_head:  # to_empty has parted them
        decoder.head.weight = decoder.embed.weight
    to_place = WeightsToPlace(weights)
    for name, slot in decoder.weight_slots():
        to_place.take(name, tuple(slot.shape)).to_float32(out=slot.numpy())
    to_place.require_none_left()
    return decoder
