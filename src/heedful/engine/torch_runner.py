"""The plain runner: calls the model file with PyTorch. It defines what every other runner must compute.

Weights are dequantized to float32 at load: 4 bytes a weight in memory and per step, 6.4 times what Q4_1 holds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.cache.pages import ARENA_PAGES, KVCache, plain_layout
from heedful.cache.policy import PAGE_LEN
from heedful.cost.meter import RunnerFacts
from heedful.kernels.attention import attention, causal_bias
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.request import Batch, Chunk, KeySpan, KVFormat
from heedful.weights.names import Weights, WeightsToPlace


class TorchRunner:
    def __init__(
        self, config: ModelConfig, weights: Weights, *, capacity_tokens: int, threads: int, device: str = "cpu"
    ) -> None:
        """`capacity_tokens`: how many tokens' K and V fit. Sets PyTorch's thread count for the whole process.

        `device`: where weights and pages lie; "cuda" has not been run yet for want of a GPU.
        """
        torch.set_num_threads(threads)
        self.threads = threads
        self.config = config
        self.device = torch.device(device)
        self.decoder = build_decoder(config, weights).to(self.device)
        self.cache = KVCache(
            config.windows,
            config.num_kv_heads,
            config.head_dim,
            lambda form: plain_layout(form, config.num_kv_heads, config.head_dim),
            default=KVFormat("f32", "f32"),
            numbers=("f32",),
            capacity_tokens=capacity_tokens,
        )
        self.facts = RunnerFacts(linear_bytes=4 * config.linear_weights, head_bytes=4 * config.head_weights)
        self._rows: dict[int, Tensor] = {}
        """By layer: keys and values (num_pages, 2, PAGE_LEN, K, D), shared with the cache's pages."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self._know_arenas()
        token_ids = [token for chunk in batch.chunks for token in chunk.token_ids]
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.end)]
        attend = PagedAttend(batch, self._rows)
        hidden = self.decoder(*(torch.tensor(ints, device=self.device) for ints in (token_ids, positions)), attend)
        ends = np.cumsum([chunk.end - chunk.start for chunk in batch.chunks]) - 1
        wanted = [int(end) for end, chunk in zip(ends, batch.chunks, strict=True) if chunk.reaches_end]
        if not wanted:
            return np.empty((0, self.config.vocab_size), dtype=np.float32)
        return self.decoder.logits(hidden[wanted]).cpu().numpy()

    def _know_arenas(self) -> None:
        config = self.config
        for arena in self.cache.arenas:
            for layer, pages in arena.buffers.items():
                if layer not in self._rows:
                    floats = pages.view(np.float32).reshape(-1, 2, PAGE_LEN, config.num_kv_heads, config.head_dim)
                    self._rows[layer] = _on_device(floats, self.device)


class PagedAttend:
    """The attend of one step: stores each chunk's new rows in its pages, then reads what its span allows."""

    def __init__(self, batch: Batch, rows: dict[int, Tensor]) -> None:
        """`rows`: keys and values of each layer, (num_pages, 2, PAGE_LEN, K, D)."""
        self._rows = rows
        self._lengths = [chunk.end - chunk.start for chunk in batch.chunks]
        self._steps: dict[int, list[_SpanRows]] = {}
        for chunk in batch.chunks:
            self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        for span in chunk.spans:
            step = _SpanRows(span, self._rows[span.layers[0]].device)
            for layer in span.layers:
                self._steps.setdefault(layer, []).append(step)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        pages = self._rows[layer]
        outs = []
        parts = zip(self._steps[layer], *(torch.split(x, self._lengths) for x in (q, k, v)), strict=True)
        for step, q_part, k_part, v_part in parts:
            pages[step.new_pages, 0, step.new_slots] = k_part
            pages[step.new_pages, 1, step.new_slots] = v_part
            keys, values = (pages[step.pages, part].flatten(0, 1)[step.keys] for part in (0, 1))
            out = attention(q_part, keys, values, step.bias, scale=scale, softcap=softcap)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _SpanRows:
    """A span as indices of pages and slots."""

    def __init__(self, span: KeySpan, device: torch.device) -> None:
        self.pages = torch.tensor([page % ARENA_PAGES for page in span.pages], device=device)
        self.keys = slice(span.first_key - span.first_page * PAGE_LEN, span.end - span.first_page * PAGE_LEN)
        new = torch.arange(span.start, span.end, device=device)
        self.new_pages = self.pages[new // PAGE_LEN - span.first_page]
        self.new_slots = new % PAGE_LEN
        count = span.end - span.first_key
        self.bias = causal_bias(span.start, span.end - span.start, span.first_key, count, span.window, device)


def _on_device(pages: npt.NDArray[np.float32], device: torch.device) -> Tensor:
    """The cache's own pages where the processor reads them, else as many on the device."""
    return torch.from_numpy(pages) if device.type == "cpu" else torch.empty(pages.shape, device=device)


def build_decoder(config: ModelConfig, weights: Weights) -> Decoder:
    """A Decoder in float32 with these weights. Raises UnsupportedModel when one is missing, extra or misshapen."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to_empty(device="cpu").requires_grad_(False).eval()
    if config.tied_head:  # to_empty has parted them
        decoder.head.weight = decoder.embed.weight
    to_place = WeightsToPlace(weights)
    for name, slot in decoder.weight_slots():
        to_place.take(name, tuple(slot.shape)).to_float32(out=slot.numpy())
    to_place.require_none_left()
    return decoder
