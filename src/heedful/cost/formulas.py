"""What attention costs on paper: from the numbers of a model and of a request, without weights, in exact ints.

The identities are those of GQA and windows, worked out over `cost.visits`; docs/cost.md states them in words. What was
really done is counted from plans (`visits.py`), and the two agree. Seconds and joules are `energy.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from heedful.cost.visits import attended
from heedful.models.config import ModelConfig
from heedful.request import KV_ROW_BYTES, KVFormat

KV_FORMATS = KV_ROW_BYTES


@cache
def key_and_value_bytes(form: KVFormat, head_dim: int) -> int:
    """Of one token's row of keys and its row of values, in one KV head."""
    return KV_FORMATS[form.keys](head_dim) + KV_FORMATS[form.values](head_dim)


def bounds_bytes(head_dim: int) -> int:
    """Of a page and KV head: the least and the largest key of every channel as int8, with a float32 scale."""
    return 2 * head_dim + 4


WEIGHT_BLOCK_BYTES = {"f32": 128, "f16": 64, "q8": 34, "q4": 18}
"""Name → bytes of 32 weights; q8 and q4 are ggml's Q8_0 and Q4_0: a float16 scale a block."""

BytesByFormat = dict[str, int]


@dataclass(frozen=True)
class Shape:
    """What the cost of a transformer depends on. None: not known, and what depends on it is None too."""

    layers: int
    heads: int
    """Query heads of a layer."""
    kv_heads: int | None = None
    head_dim: int | None = None
    windows: tuple[tuple[int | None, int], ...] = ()
    """(window, number of layers that have it), in any order; (): no layer has one.
    Causal: a query sees itself and the window - 1 positions before it. Encoder: |i - j| <= window // 2."""
    sinks: int = 0
    """The first tokens, which layers with a window see too when they lie outside of it."""
    linear_weights: int | None = None
    """Weights of the matrices that every token passes, without embeddings and head."""
    head_weights: int | None = None
    """Weights of the matrix that makes logits, passed once per sampled token."""
    causal: bool = True
    """False: an encoder, every token sees every token."""

    def __post_init__(self) -> None:
        assert min(self.layers, self.heads) >= 1, self
        assert self.sinks >= 0, self
        assert self.kv_heads is None or (self.kv_heads >= 1 and self.heads % self.kv_heads == 0), self
        assert self.head_dim is None or self.head_dim >= 1, self
        assert all(count >= 0 and (window is None or window >= 1) for window, count in self.windows), self
        assert not self.windows or sum(count for _, count in self.windows) == self.layers, self

    @staticmethod
    def from_config(config: ModelConfig) -> Shape:
        return Shape(
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=tuple(Counter(config.windows).items()),
            linear_weights=config.linear_weights,
            head_weights=config.head_weights,
        )

    @property
    def layers_by_window(self) -> tuple[tuple[int | None, int], ...]:
        return self.windows or ((None, self.layers),)

    def with_policy(self, window: int | None, sinks: int = 0) -> Shape:
        """The same model under a policy: no layer looks further back than `window`, except at the first `sinks` tokens.

        A layer whose own window is narrower keeps it. Sinks are seen by every layer that has a window.
        """
        narrowed: Counter[int | None] = Counter()
        for own, count in self.layers_by_window:
            narrowed[min((w for w in (own, window) if w is not None), default=None)] += count
        return replace(self, windows=tuple(narrowed.items()), sinks=sinks)

    def over_layers(self, one_layer: Callable[[int | None], int]) -> int:
        """Σ over layers of a count that depends on the layer's window alone."""
        return sum(count * one_layer(window) for window, count in self.layers_by_window)

    def reach(self, window: int | None) -> int | None:
        """Most keys that a causal query sees: sinks outside of the window come on top of it."""
        return None if window is None else window + self.sinks


@dataclass(frozen=True)
class Cost:
    """Counts of one piece of work. None: unknown, because the shape lacks a number."""

    tokens: int
    """Token positions that pass through the layers."""
    visits: int
    dense_visits: int
    """visits + saved_by_window + saved_by_prefix, exactly."""
    saved_by_window: int
    saved_by_prefix: int
    """Visits (inside the window) of queries whose keys and values were in the cache already."""
    kv_rows_read: int | None
    kv_rows_written: int | None
    kv_rows_held: int | None
    """In the cache when the work is done."""
    kv_rows_per_token: int | None
    """What one more token stores. Layers with a full window let go of as much."""
    head_dim: int | None
    linear_flops: int | None
    attention_flops: int | None
    """4 · head_dim a visit: a multiplication and an addition per channel for q·k, and again for p·v."""
    weights_read: int | None
    """Weights fetched from memory: every matrix once per step."""

    def __post_init__(self) -> None:
        assert self.dense_visits == self.visits + self.saved_by_window + self.saved_by_prefix, self

    @property
    def saved(self) -> dict[str, int]:
        return {"window": self.saved_by_window, "prefix": self.saved_by_prefix}

    @property
    def flops(self) -> dict[str, int | None]:
        return {"linear": self.linear_flops, "attention": self.attention_flops}

    @property
    def kv_bytes_read(self) -> BytesByFormat | None:
        return self._kv_bytes(self.kv_rows_read)

    @property
    def kv_bytes_written(self) -> BytesByFormat | None:
        return self._kv_bytes(self.kv_rows_written)

    @property
    def kv_bytes_held(self) -> BytesByFormat | None:
        return self._kv_bytes(self.kv_rows_held)

    @property
    def kv_bytes_per_token(self) -> BytesByFormat | None:
        return self._kv_bytes(self.kv_rows_per_token)

    @property
    def weight_bytes_read(self) -> BytesByFormat | None:
        if self.weights_read is None:
            return None
        return {name: -(-self.weights_read * block // 32) for name, block in WEIGHT_BLOCK_BYTES.items()}

    def _kv_bytes(self, rows: int | None) -> BytesByFormat | None:
        if rows is None or self.head_dim is None:
            return None
        return {name: rows * row_bytes(self.head_dim) for name, row_bytes in KV_FORMATS.items()}


def decode_cost(shape: Shape, context: int, steps: int = 1) -> Cost:
    """`steps` decoded tokens, one after the other; the first attends to `context` tokens, itself included."""
    assert shape.causal, shape
    assert context >= 1, context
    assert steps >= 0, steps
    start, end = context - 1, context - 1 + steps
    seen = shape.over_layers(lambda window: attended(start, end, shape.reach(window)))
    return _cost(
        shape,
        tokens=steps,
        seen=seen,
        dense=shape.layers * attended(start, end, None),
        keys_read=seen,
        keys_held=_keys_held(shape, end),
        passes=steps,
        sampled=steps,
    )


def prefill_cost(shape: Shape, tokens: int, cached: int = 0) -> Cost:
    """A prompt of `tokens`, of which the first `cached` are in the cache; computed in one step, which samples a token.

    An engine that cuts the prompt into chunks makes the same visits and reads old rows again for each chunk.
    """
    assert shape.causal, shape
    assert 0 <= cached < tokens, (cached, tokens)

    def keys_read(window: int | None) -> int:
        # from the first query's window on, and the sinks before it
        return tokens if window is None else min(tokens, tokens - cached + window - 1 + shape.sinks)

    return _cost(
        shape,
        tokens=tokens - cached,
        seen=shape.over_layers(lambda window: attended(cached, tokens, shape.reach(window))),
        dense=shape.layers * attended(0, tokens, None),
        prefix=shape.over_layers(lambda window: attended(0, cached, shape.reach(window))),
        keys_read=shape.over_layers(keys_read),
        keys_held=_keys_held(shape, tokens),
        passes=1,
        sampled=1,
    )


def generation_cost(shape: Shape, prompt: int, output: int, cached: int = 0) -> Cost:
    """A whole request. The prefill samples the first output token; the last one is not fed back: output - 1 steps."""
    assert output >= 1, output
    return total(prefill_cost(shape, prompt, cached), decode_cost(shape, prompt + 1, output - 1))


def encoder_cost(shape: Shape, tokens: int) -> Cost:
    """One text through an encoder: tokens² a head, in local layers (ModernBERT) the pairs with |i - j| <= window // 2.

    Nothing is cached and no token is sampled.
    """
    assert not shape.causal, shape
    assert tokens >= 1, tokens
    return _cost(
        shape,
        tokens=tokens,
        seen=_seen_within(shape, tokens),
        dense=shape.layers * tokens * tokens,
        passes=1,
    )


def training_cost(shape: Shape, documents: Iterable[int] | Mapping[int, int]) -> Cost:
    """One optimizer step over documents that do not see each other. Lengths, or length → number of documents.

    Visits are counted once, forward. FLOPs are forward and backward, 3 × forward: the backward pass has two products
    for each one. Weights are read twice; gradients, optimizer state and activations are not counted.
    """
    lengths = Counter(documents)
    assert all(length >= 1 for length in lengths), lengths
    tokens = sum(length * count for length, count in lengths.items())
    return _cost(
        shape,
        tokens=tokens,
        seen=sum(count * _seen_within(shape, length) for length, count in lengths.items()),
        dense=sum(count * shape.layers * _dense_within(shape, length) for length, count in lengths.items()),
        passes=2,
        sampled=tokens,
        flops_factor=3,
    )


def total(first: Cost, then: Cost) -> Cost:
    """Two pieces of work of one shape, one after the other; what is held is what the second one leaves."""
    return replace(
        then,
        tokens=first.tokens + then.tokens,
        visits=first.visits + then.visits,
        dense_visits=first.dense_visits + then.dense_visits,
        saved_by_window=first.saved_by_window + then.saved_by_window,
        saved_by_prefix=first.saved_by_prefix + then.saved_by_prefix,
        kv_rows_read=_plus(first.kv_rows_read, then.kv_rows_read),
        kv_rows_written=_plus(first.kv_rows_written, then.kv_rows_written),
        linear_flops=_plus(first.linear_flops, then.linear_flops),
        attention_flops=_plus(first.attention_flops, then.attention_flops),
        weights_read=_plus(first.weights_read, then.weights_read),
    )


def _cost(
    shape: Shape,
    *,
    tokens: int,
    seen: int,
    dense: int,
    passes: int,
    prefix: int = 0,
    keys_read: int = 0,
    keys_held: int = 0,
    sampled: int = 0,
    flops_factor: int = 1,
) -> Cost:
    """`seen`, `dense`, `prefix`, `keys_*`: of one head, summed over layers. `passes`: times the weights are read."""
    cached = keys_held > 0
    return Cost(
        tokens=tokens,
        visits=shape.heads * seen,
        dense_visits=shape.heads * dense,
        saved_by_window=shape.heads * (dense - seen - prefix),
        saved_by_prefix=shape.heads * prefix,
        kv_rows_read=_times(2 * keys_read, shape.kv_heads),
        kv_rows_written=_times(2 * shape.layers * tokens * cached, shape.kv_heads),
        kv_rows_held=_times(2 * keys_held, shape.kv_heads),
        kv_rows_per_token=_times(2 * shape.layers * cached, shape.kv_heads),
        head_dim=shape.head_dim,
        linear_flops=_weights(shape, 2 * flops_factor * tokens, 2 * flops_factor * sampled),
        attention_flops=_times(4 * flops_factor * shape.heads * seen, shape.head_dim),
        weights_read=_weights(shape, passes, passes if sampled else 0),
    )


def _keys_held(shape: Shape, tokens: int) -> int:
    return shape.over_layers(lambda window: tokens if window is None else min(tokens, window + shape.sinks))


def _seen_within(shape: Shape, tokens: int) -> int:
    """Over all layers and queries of one text, whole in one pass."""
    if shape.causal:
        return shape.over_layers(lambda window: attended(0, tokens, shape.reach(window)))
    return shape.over_layers(lambda window: tokens * tokens if window is None else _band(tokens, window // 2))


def _dense_within(shape: Shape, tokens: int) -> int:
    return attended(0, tokens, None) if shape.causal else tokens * tokens


def _band(tokens: int, reach: int) -> int:
    """Pairs with |i - j| <= reach: those that look back, mirrored, the diagonal once."""
    return 2 * attended(0, tokens, reach + 1) - tokens


def _weights(shape: Shape, linear_times: int, head_times: int) -> int | None:
    head = _times(head_times, shape.head_weights) if head_times else 0
    return _plus(_times(linear_times, shape.linear_weights), head)


def _times(count: int, number: int | None) -> int | None:
    return None if number is None else count * number


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
