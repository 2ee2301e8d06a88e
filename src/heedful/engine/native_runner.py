"""The native runner: hands a layer table, built from the same ModelConfig and weights as the plain model, to one native
call a step. What people get on a CPU; torch_runner.py is what it is judged by.

Matrices are repacked at load into panels of 8 interleaved rows (kernels/csrc/ops.h); 4-bit and 8-bit ones multiply with
activations rounded to 8 bits. Keys and values lie in pages in any number format each (csrc/pages.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heedful.cache.pages import KVCache, PageLayout
from heedful.cache.policy import rotation_block
from heedful.cost.meter import AdapterFacts, RunnerFacts
from heedful.engine.adapter_runs import adapter_runs
from heedful.kernels import native
from heedful.models.config import ModelConfig
from heedful.models.rope import Rope
from heedful.request import Batch, KeySpan, KVFormat
from heedful.weights.names import Weights, WeightsToPlace
from heedful.weights.quantize import Floats
from heedful.weights.tensor import StoredTensor, forget_pages

if TYPE_CHECKING:
    from heedful.weights.adapter import Adapter

_NO_FLOATS = np.empty(0, dtype=np.float32)
_GGML_F32 = 0
_MOST_TO_PACK = 256 << 20  # bytes of a file that are kept in memory beside their panels
_ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # their order is csrc/ops.h's
_PRODUCTS = {"qkv": ("attn.q", "attn.k", "attn.v"), "out": ("attn.out",), "down": ("mlp.down",)}
_NORMS = {"attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"}


class NativeRunner:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        capacity_tokens: int,
        threads: int,
        kv_format: str = "q8",
        weights_format: str | None = None,
        variant: str = "",
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """`weights_format`: "q8", "q6" or "q4" to quantize all matrices at load, None to keep the file's precision.
        `variant`: which kernels, "" for the processor's best. `adapters`: by the names that requests give them; they
        stay in float32. Raises UnsupportedModel as build_decoder does.
        """
        self.config = config
        self._products = _PRODUCTS | {"up": ("mlp.gate", "mlp.up") if config.gated_mlp else ("mlp.up",)}
        self._panel_format = native.WEIGHTS_FORMATS[weights_format] if weights_format else None
        self.threads = threads
        self._weights = WeightsToPlace(weights)
        self._embed = self._weights.take("embed.weight", (config.vocab_size, config.hidden_size))
        self._logits = np.empty((0, config.vocab_size), dtype=np.float32)
        self._decoder = _new_decoder(config, threads, variant)
        self._packer = native.module().Packer(threads)
        """Writes panels in the background; None when all are there."""
        self._unpacked: list[StoredTensor] = []
        """What it may still be reading."""
        self.facts = self._build()
        self._weights.require_none_left()
        self._adapters = {name: number for number, name in enumerate(adapters or {})}
        """Their numbers in the kernels."""
        self.facts = replace(self.facts, adapters={n: self._add_adapter(n, a) for n, a in (adapters or {}).items()})
        self.cache = KVCache(
            config.windows,
            config.num_kv_heads,
            config.head_dim,
            lambda form: _page_layout(form, config.num_kv_heads, config.head_dim),
            default=KVFormat.parse(kv_format),
            numbers=native.KV_NUMBERS,
            capacity_tokens=capacity_tokens,
        )
        self._arenas_known = 0
        self._set_layers()

    def finish_loading(self) -> None:
        if self._packer is not None:
            self._finish_packing()
            self._packer = None  # and its threads

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.finish_loading()
        self._hand_over_arenas()
        chunks = batch.chunks
        self._move_pages(batch)
        token_ids = np.array([token for chunk in chunks for token in chunk.token_ids], dtype=np.int32)
        positions = np.array([p for chunk in chunks for p in range(chunk.start, chunk.end)], dtype=np.int32)
        starts = [0, *accumulate(chunk.end - chunk.start for chunk in chunks)]
        ends = zip(starts[1:], chunks, strict=True)
        wanted = [row for end, chunk in ends for row in range(end - chunk.num_logits, end)]
        spans, pages, chosen = _span_arrays(batch)
        logits = self._logits_buffer(len(wanted))
        runs = [(self._adapters[run.adapter], run) for run in adapter_runs(batch)]
        self._decoder.run(
            token_ids,
            positions,
            np.array(starts, dtype=np.int32),
            spans,
            pages,
            chosen,
            np.array(wanted, dtype=np.int32),
            logits,
            np.array([(n, run.begin, run.end) for n, run in runs], dtype=np.int32),
            np.array([(n, run.wanted_begin, run.wanted_end) for n, run in runs if run.wanted], dtype=np.int32),
        )
        return logits

    def _logits_buffer(self, rows: int) -> npt.NDArray[np.float32]:
        """(rows, vocab); the same memory every time, since fresh pages would cost more than the sampling."""
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self.config.vocab_size), dtype=np.float32)
        return self._logits[:rows]

    def _build(self) -> RunnerFacts:
        """Fill the layer table; returns what a step reads."""
        config, decoder = self.config, self._decoder
        learned = _NO_FLOATS
        if config.rope is None:
            learned = self._weights.take("position_embed.weight", (config.context_len, config.hidden_size)).to_float32()
        decoder.set_embedding(*_ggml_blocks(self._embed), config.embedding_scale, learned)
        ropes = _rope_tables(config)
        for rope in ropes:
            decoder.add_rope(*_rope_arrays(rope))
        linear_bytes = sum(self._build_layer(layer) for layer in range(config.num_layers))
        decoder.set_norm(0, "norm", *self._norm("norm", config.hidden_size))
        head = self._embed if config.tied_head else self._weights.take("head.weight", self._embed.shape)
        head_bytes = self._set_product(0, "head", [head], _NO_FLOATS)
        return RunnerFacts(linear_bytes, head_bytes)

    def _set_layers(self) -> None:
        """Which layer group's spans each layer reads, and how it turns."""
        ropes = _rope_tables(self.config)
        for index, group in enumerate(self.cache.groups):
            for layer in group.layers:
                self._decoder.set_layer(layer, index, ropes.index(self.config.rope_of(layer)))

    def _hand_over_arenas(self) -> None:
        """Those that are new since the last step."""
        for arena in self.cache.arenas[self._arenas_known :]:
            keys, values = (native.KV_NUMBERS.index(number) for number in (arena.format.keys, arena.format.values))
            for layer, pages in arena.buffers.items():
                self._decoder.set_pages(layer, arena.index, keys, values, pages, arena.bounds[layer])
        self._arenas_known = len(self.cache.arenas)

    def _move_pages(self, batch: Batch) -> None:
        moves = [(move.group, move.source, move.target) for chunk in batch.chunks for move in chunk.moves]
        if moves:
            self._decoder.move_pages(np.array(moves, dtype=np.int32))

    def _build_layer(self, layer: int) -> int:
        """Returns the bytes of its matrices."""
        config, prefix = self.config, f"layers.{layer}."
        for name in _NORMS if config.sandwich_norm else {"attn_norm", "mlp_norm"}:
            self._decoder.set_norm(layer, name, *self._norm(prefix + name, config.hidden_size))
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            self._decoder.set_norm(layer, name, *self._norm(f"{prefix}attn.{name}", config.head_dim))
        packed_bytes = sum(
            self._set_product(
                layer,
                name,
                [self._weights.take(f"{prefix}{part}.weight", self._shape(part)) for part in parts],
                self._bias(prefix, parts),
            )
            for name, parts in self._products.items()
        )
        if sum(tensor.blocks.nbytes for tensor in self._unpacked) > _MOST_TO_PACK:
            self._finish_packing()
        return packed_bytes

    def _finish_packing(self) -> None:
        self._packer.finish()
        forget_pages([self._embed, *self._unpacked])  # the file's; embedding rows are read again as tokens ask for them
        self._unpacked = []

    def _shape(self, part: str) -> tuple[int, int]:
        c = self.config
        attention = c.num_heads * c.head_dim
        return {
            "attn.q": (attention, c.hidden_size),
            "attn.k": (c.kv_channels, c.hidden_size),
            "attn.v": (c.kv_channels, c.hidden_size),
            "attn.out": (c.hidden_size, attention),
            "mlp.gate": (c.intermediate_size, c.hidden_size),
            "mlp.up": (c.intermediate_size, c.hidden_size),
            "mlp.down": (c.hidden_size, c.intermediate_size),
        }[part]

    def _norm(self, name: str, channels: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        bias = _NO_FLOATS
        if self.config.norm == "layer":
            bias = self._weights.take(f"{name}.bias", (channels,)).to_float32()
        return self._weights.take(f"{name}.weight", (channels,)).to_float32(), bias

    def _bias(self, prefix: str, parts: tuple[str, ...]) -> npt.NDArray[np.float32]:
        """The parts' biases one after another; empty where the config has none."""
        c = self.config
        kinds = {"attn.q": c.qkv_bias, "attn.out": c.out_bias, "mlp.up": c.mlp_bias, "mlp.gate": c.mlp_bias}
        if not {**kinds, "mlp.down": c.mlp_bias}[parts[0]]:
            return _NO_FLOATS
        return np.concatenate(
            [self._weights.take(f"{prefix}{part}.bias", self._shape(part)[:1]).to_float32() for part in parts]
        )

    def _add_adapter(self, name: str, adapter: Adapter) -> AdapterFacts:
        number, weights, num_bytes = self._adapters[name], {True: 0, False: 0}, {True: 0, False: 0}
        for matrix, update in adapter.updates.items():
            layer, product, part = self._place_of(matrix)
            odd = update.rank % 2  # pairs of columns are read together: an odd rank gets a row and a column of zeros
            padded = (np.pad(update.a, ((0, odd), (0, 0))), np.pad(update.b, ((0, 0), (0, odd))))
            sides = [_pack_floats(side, self._packer) for side in padded]
            self._decoder.set_update(number, layer, product, part, update.rank + odd, *sides)
            is_head = product == "head"
            weights[is_head] += update.a.size + update.b.size
            num_bytes[is_head] += sum(panels.nbytes for panels in sides)
        return AdapterFacts(adapter.sha256, weights[False], weights[True], num_bytes[False], num_bytes[True])

    def _place_of(self, matrix: str) -> tuple[int, str, int]:
        """Layer, product and part in it that the kernels know a matrix by."""
        if matrix == "head.weight":
            return 0, "head", 0
        _, layer, part = matrix.removesuffix(".weight").split(".", 2)
        product = next(name for name, parts in self._products.items() if part in parts)
        return int(layer), product, self._products[product].index(part)

    def _set_product(self, layer: int, name: str, parts: list[StoredTensor], bias: npt.NDArray[np.float32]) -> int:
        packed = [_start_to_pack(part, self._panel_format, self._packer) for part in parts]
        self._unpacked += parts
        self._decoder.set_product(layer, name, packed, bias)
        return sum(panels.nbytes for *_, panels in packed)


def _page_layout(form: KVFormat, kv_heads: int, head_dim: int) -> PageLayout:
    """How the native kernels lay out a page; its bytes belong to pages.cpp and selection.cpp."""
    kernels, shape = native.module(), (kv_heads, head_dim, "portable")
    return PageLayout(kernels.page_bytes(form.keys, form.values, *shape), kernels.bounds_bytes(*shape))


def _pack_floats(values: Floats, packer: Any) -> npt.NDArray[np.uint8]:
    panels: npt.NDArray[np.uint8] = packer.pack(_GGML_F32, values.view(np.uint8), values.shape[1], "f32")
    return panels


def _start_to_pack(
    tensor: StoredTensor, wanted: str | None, packer: Any
) -> tuple[int, int, int, npt.NDArray[np.uint8]]:
    """A matrix as panels: (panel format, rows, columns, panels that `packer` will have written when it has finished).

    In panel format `wanted` where its columns come in blocks of 32, else at the stored precision (csrc/pack.h).
    """
    rows, columns = tensor.shape
    ggml_type, blocks = _ggml_blocks(tensor)
    form = wanted if wanted and columns % 32 == 0 else native.module().packed_format(ggml_type)
    panels = packer.start(ggml_type, blocks, columns, form)
    return native.PANEL_FORMATS.index(form), rows, columns, panels


def _ggml_blocks(tensor: StoredTensor) -> tuple[int, npt.NDArray[np.uint8]]:
    """Of a matrix: ggml's type number and the rows' bytes, (rows, bytes); float32 where ggml has no such type."""
    ggml_type = tensor.format.ggml_type
    if ggml_type is None or native.module().packed_format(ggml_type) is None:
        return _GGML_F32, tensor.to_float32().view(np.uint8)
    return ggml_type, np.ascontiguousarray(tensor.blocks)


def _new_decoder(config: ModelConfig, threads: int, variant: str) -> Any:
    return native.module().Decoder(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        layer_norm=config.norm == "layer",
        norm_eps=config.norm_eps,
        activation=_ACTIVATIONS.index(config.activation),
        gated_mlp=config.gated_mlp,
        rotation_block=rotation_block(config.head_dim),
        query_scale=config.query_scale,
        attention_softcap=config.attention_softcap or 0.0,
        logit_softcap=config.logit_softcap or 0.0,
        threads=threads,
        variant=variant,
    )


def _rope_tables(config: ModelConfig) -> list[Rope | None]:
    """The distinct ones, in order of first use."""
    return list(dict.fromkeys(config.rope_of(layer) for layer in range(config.num_layers)))


def _rope_arrays(rope: Rope | None) -> tuple[npt.NDArray[np.float32], float]:
    if rope is None:
        return _NO_FLOATS, 1.0
    return rope.inv_freq().astype(np.float32), rope.attention_scaling


def _span_arrays(batch: Batch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], list[Any]]:
    """Table (chunks, groups, columns) as bind_step.cpp reads it; all spans' pages and what is chosen of them, to which
    it points.
    """
    chosen: list[Any] = []
    rows: list[tuple[int, ...]] = []
    pages: list[tuple[int, ...]] = []
    offset = 0
    for chunk in batch.chunks:
        for span in chunk.spans:
            rows.append(_span_row(span, offset) + _selection_columns(span, len(chosen)))
            if span.selection is not None:
                chosen += [each for each in (span.selection.chosen, span.selection.listed) if each is not None]
            pages += (span.pages, span.sink_pages)
            offset += len(span.pages) + len(span.sink_pages)
    table = np.array(rows, dtype=np.int32).reshape(len(batch.chunks), len(batch.chunks[0].spans), -1)
    return table, np.fromiter(chain.from_iterable(pages), dtype=np.int32, count=offset), chosen


def _span_row(span: KeySpan, offset: int) -> tuple[int, ...]:
    """start, end, window (0: none), first page, where its pages begin, sinks, where their pages begin, sink distance
    (-1: none), rotated.
    """
    distance = -1 if span.sink_distance is None else span.sink_distance
    rotated = int(span.formats[0].format.rotated)
    sinks_at = offset + len(span.pages)
    return span.start, span.end, span.window or 0, span.first_page, offset, span.sinks, sinks_at, distance, rotated


def _selection_columns(span: KeySpan, chosen_at: int) -> tuple[int, ...]:
    """Pages of each KV head (0: all), newest among them, layers that read all, whether to choose anew, where the choice
    is, listed pages, where these are (-1: all candidates are listed).
    """
    if (wanted := span.selection) is None:
        return 0, 0, 0, 0, 0, 0, -1
    listed_at = -1 if wanted.listed is None else chosen_at + 1
    how = wanted.num_pages, wanted.local_pages, wanted.dense_layers, int(wanted.renew)
    return *how, chosen_at, wanted.listed_pages, listed_at
