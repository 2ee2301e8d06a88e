"""What attention costs on paper: from the numbers of a model and of a request, without weights, in exact ints.

The identities are those of GQA and windows, worked out over `cost.visits`; docs/cost.md states them in words. What was
really done is counted from plans (`visits.py`), and the two agree. Seconds and joules are `energy.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from heedful.cache.policy import DENSE_LAYERS, PagePolicy
from heedful.cost.steps import Keys, LayerOnPaper, prompt_steps
from heedful.cost.visits import attended
from heedful.models.config import ModelConfig
from heedful.request import DEFAULT_KV_FORMAT, KV_ROW_BYTES, KVFormat

KV_FORMATS = KV_ROW_BYTES


@cache
def key_and_value_bytes(form: KVFormat, head_dim: int) -> int:
    """Of one token's row of keys and its row of values, in one KV head."""
    return KV_FORMATS[form.keys](head_dim) + KV_FORMATS[form.values](head_dim)


@cache
def key_bytes(form: KVFormat, head_dim: int) -> int:
    """Of one token's row of keys alone."""
    return KV_FORMATS[form.keys](head_dim)


def bounds_bytes(head_dim: int) -> int:
    """Of a page and KV head: mean and variance of every channel's keys as int8, with a float32 scale of either."""
    return 2 * head_dim + 8


WEIGHT_BLOCK_BYTES = {"f32": 128, "f16": 64, "q8": 34, "q4": 18}
"""Name → bytes of 32 weights; q8 and q4 are ggml's Q8_0 and Q4_0: a float16 scale a block."""

BytesByFormat = dict[str, int]

PLAIN = PagePolicy(KVFormat.parse(DEFAULT_KV_FORMAT), KVFormat.parse(DEFAULT_KV_FORMAT), precise_len=0)
"""Everything is read, in the native runner's own format."""


@dataclass(frozen=True)
class Shape:
    """What the cost of a transformer depends on. None: not known, and what depends on it is None too."""

    layers: int
    """Of attention."""
    heads: int
    """Query heads of a layer."""
    kv_heads: int | None = None
    head_dim: int | None = None
    windows: tuple[tuple[int | None, int], ...] = ()
    """(window, number of layers that have it), in any order; (): no layer has one.
    Causal: a query sees itself and the window - 1 positions before it. Encoder: |i - j| <= window // 2."""
    dense_layers: int = DENSE_LAYERS
    """Layers without a window among the first DENSE_LAYERS: they read everything under a budget too."""
    linear_weights: int | None = None
    """Weights of the matrices that every token passes, without embeddings and head."""
    head_weights: int | None = None
    """Weights of the matrix that makes logits, passed once per sampled token."""
    causal: bool = True
    """False: an encoder, every token sees every token."""
    state_bytes: int = 0
    """What a sequence carries in layers that are not attention, whatever its length; each step reads and writes it."""
    recurrence_flops: int = 0
    """What moving it on takes, of one token."""

    def __post_init__(self) -> None:
        assert min(self.layers, self.heads) >= 1, self
        assert self.kv_heads is None or (self.kv_heads >= 1 and self.heads % self.kv_heads == 0), self
        assert self.head_dim is None or self.head_dim >= 1, self
        assert all(count >= 0 and (window is None or window >= 1) for window, count in self.windows), self
        assert not self.windows or sum(count for _, count in self.windows) == self.layers, self

    @staticmethod
    def from_config(config: ModelConfig) -> Shape:
        return Shape(
            layers=len(config.windows),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=tuple(Counter(config.windows).items()),
            dense_layers=config.windows[:DENSE_LAYERS].count(None),
            linear_weights=config.linear_weights,
            head_weights=config.head_weights,
            state_bytes=config.state_bytes,
            recurrence_flops=config.recurrence_flops,
        )

    @property
    def layers_by_window(self) -> tuple[tuple[int | None, int], ...]:
        return self.windows or ((None, self.layers),)

    def over_layers(self, one_layer: Callable[[int | None], int]) -> int:
        """Σ over layers of a count that depends on the layer's window alone."""
        return sum(count * one_layer(window) for window, count in self.layers_by_window)

    def _layers_of_window(self) -> Counter[int | None]:
        layers: Counter[int | None] = Counter()
        for window, count in self.layers_by_window:
            layers[window] += count
        return layers

    def on_paper(self, policy: PagePolicy) -> list[tuple[LayerOnPaper, int]]:
        """The layers under a policy, and how many there are of each."""
        found = []
        for window, count in self._layers_of_window().items():
            reads_all = count
            if window is None and policy.budget_pages is not None:
                reads_all = min(count, self.dense_layers)
                found.append((LayerOnPaper(policy, None, chooses=True), count - reads_all))
            found.append((LayerOnPaper(policy, window, chooses=False), reads_all))
        return [(layer, count) for layer, count in found if count]


@dataclass(frozen=True)
class Cost:
    """Counts of one piece of work under one policy. None: unknown, because the shape lacks a number."""

    tokens: int
    """Token positions that pass through the layers."""
    visits: int
    dense_visits: int
    """visits and all that was saved, exactly."""
    saved_by_window: int
    saved_by_pages: int
    saved_by_prefix: int
    """Visits (inside the window) of queries whose keys and values were in the cache already."""
    kv_rows_read: int | None
    """Keys and values; those of pages that change their number format are read, and written, once more."""
    kv_rows_written: int | None
    kv_rows_held: int | None
    """In the cache when the work is done."""
    bounds_read: int | None
    """Of pages, to list some by; one a KV head."""
    keys_listed: int | None
    """Rows of keys that are read without their values, to choose pages."""
    kv_bytes_read: int | None
    """Rows, bounds, listed keys, states. Chosen and listed pages count as main ones as far as there are such: at
    least so much."""
    kv_bytes_written: int | None
    kv_bytes_held: int | None
    kv_bytes_per_token: int | None
    """What one more token adds in the main format. Layers with a full window let go of as much."""
    linear_flops: int | None
    attention_flops: int | None
    """4 · head_dim a visit: a multiplication and an addition per channel for q·k, and again for p·v."""
    selection_flops: int | None
    """4 · head_dim a bound and query head: two products, of the mean and of the variance; 2 · head_dim a listed key."""
    linear_passes: int
    """Times that the matrices of the layers are read: once a step."""
    head_passes: int
    """Times that the output head is: once a step that samples."""
    weights_read: int | None
    """Weights fetched from memory."""

    def __post_init__(self) -> None:
        assert self.dense_visits == self.visits + sum(self.saved.values()), self

    @property
    def saved(self) -> dict[str, int]:
        return {"window": self.saved_by_window, "pages": self.saved_by_pages, "prefix": self.saved_by_prefix}

    @property
    def flops(self) -> dict[str, int | None]:
        return {"linear": self.linear_flops, "attention": self.attention_flops, "selection": self.selection_flops}

    @property
    def weight_bytes_read(self) -> BytesByFormat | None:
        if self.weights_read is None:
            return None
        return {name: -(-self.weights_read * block // 32) for name, block in WEIGHT_BLOCK_BYTES.items()}


def decode_cost(shape: Shape, context: int, steps: int = 1, policy: PagePolicy = PLAIN) -> Cost:
    """`steps` decoded tokens, one after the other; the first attends to `context` tokens, itself included.

    As after a prompt of context - 1 tokens: under a budget the first step chooses pages, later ones now and then.
    """
    assert shape.causal, shape
    assert context >= 1, context
    assert steps >= 0, steps
    layers = [(layer, count, layer.decode_keys(context - 1, steps)) for layer, count in shape.on_paper(policy)]
    dense = attended(context - 1, context - 1 + steps, None)
    return _cost(
        shape,
        policy,
        tokens=steps,
        keys=_total(layers),
        dense=shape.layers * dense,
        by_pages=sum(count * (dense - keys.seen) for layer, count, keys in layers if layer.chooses),
        held_tokens=context - 1 + steps,
        passes=steps,
        head_passes=steps,
        sampled=steps,
    )


def prefill_cost(shape: Shape, tokens: int, cached: int = 0, policy: PagePolicy = PLAIN) -> Cost:
    """A prompt of `tokens`, of which the first `cached` are in the cache; the last step samples a token.

    In steps of STEP_TOKENS: each reads the weights, and the rows of the steps before it.
    """
    assert shape.causal, shape
    assert 0 <= cached < tokens, (cached, tokens)
    on_paper = shape.on_paper(policy)
    keys = _total([(layer, count, layer.prompt_keys(tokens, cached)) for layer, count in on_paper])
    cold = keys if not cached else _total([(layer, count, layer.prompt_keys(tokens)) for layer, count in on_paper])
    return _cost(
        shape,
        policy,
        tokens=tokens - cached,
        keys=keys,
        dense=shape.layers * attended(0, tokens, None),
        by_prefix=cold.seen - keys.seen,
        from_zeros=not cached,
        held_tokens=tokens,
        passes=prompt_steps(policy, tokens, cached),
        head_passes=1,
        sampled=1,
    )


def generation_cost(shape: Shape, prompt: int, output: int, cached: int = 0, policy: PagePolicy = PLAIN) -> Cost:
    """A whole request. The prefill samples the first output token; the last one is not fed back: output - 1 steps."""
    assert output >= 1, output
    prefill, decode = prefill_cost(shape, prompt, cached, policy), decode_cost(shape, prompt + 1, output - 1, policy)
    return total(prefill, decode)


def encoder_cost(shape: Shape, tokens: int, policy: PagePolicy = PLAIN) -> Cost:
    """One text through an encoder: tokens² a head, in local layers (ModernBERT) the pairs with |i - j| <= window // 2.

    Nothing is cached and no token is sampled.
    """
    assert not shape.causal, shape
    assert tokens >= 1, tokens
    return _cost(
        shape,
        policy,
        tokens=tokens,
        keys=Keys(seen=_seen_within(shape, tokens, policy)),
        dense=shape.layers * tokens * tokens,
        passes=1,
    )


def training_cost(shape: Shape, documents: Iterable[int] | Mapping[int, int], policy: PagePolicy = PLAIN) -> Cost:
    """One optimizer step over documents that do not see each other. Lengths, or length → number of documents.

    Visits are counted once, forward. FLOPs are forward and backward, 3 × forward: the backward pass has two products
    for each one. Weights are read twice; gradients, optimizer state and activations are not counted.
    """
    lengths = Counter(documents)
    assert all(length >= 1 for length in lengths), lengths
    tokens = sum(length * count for length, count in lengths.items())
    return _cost(
        shape,
        policy,
        tokens=tokens,
        keys=Keys(seen=sum(count * _seen_within(shape, length, policy) for length, count in lengths.items())),
        dense=sum(count * shape.layers * _dense_within(shape, length) for length, count in lengths.items()),
        passes=2,
        head_passes=2,
        sampled=tokens,
        flops_factor=3,
    )


_LAST_STATE = ("kv_rows_held", "kv_bytes_held", "kv_bytes_per_token")


def total(first: Cost, then: Cost) -> Cost:
    """Two pieces of work of one shape, one after the other; what is held is what the second one leaves."""
    names = [field.name for field in fields(Cost) if field.name not in _LAST_STATE]
    summed: dict[str, Any] = {name: _plus(getattr(first, name), getattr(then, name)) for name in names}
    return replace(then, **summed)


def _total(layers: Iterable[tuple[LayerOnPaper, int, Keys]]) -> Keys:
    summed = Keys()
    for _, count, keys in layers:
        summed = summed.plus(keys, count)
    return summed


def _cost(
    shape: Shape,
    policy: PagePolicy,
    *,
    tokens: int,
    keys: Keys,
    dense: int,
    passes: int,
    head_passes: int = 0,
    by_pages: int = 0,
    by_prefix: int = 0,
    held_tokens: int = 0,
    sampled: int = 0,
    flops_factor: int = 1,
    from_zeros: bool = False,
) -> Cost:
    """`keys`, `dense`, `by_*`: of one head, summed over layers. `passes`: times the layers' weights are read.
    `from_zeros`: the first of them has no state to read."""
    held = [(count, layer.held_keys(held_tokens)) for layer, count in shape.on_paper(policy)] if held_tokens else []
    main_held, precise_held = (sum(count * rows[i] for count, rows in held) for i in (0, 1))
    rows = _Rows(shape.kv_heads, shape.head_dim, policy)
    state_bytes = shape.state_bytes if held_tokens else 0
    bounds = _times(keys.bounds_read, shape.kv_heads)
    bounds_size = None if shape.head_dim is None else _times(bounds_bytes(shape.head_dim), bounds)
    listed_size = rows.keys_size(keys.main_listed, keys.precise_listed)
    return Cost(
        tokens=tokens,
        visits=shape.heads * keys.seen,
        dense_visits=shape.heads * dense,
        saved_by_window=shape.heads * (dense - keys.seen - by_pages - by_prefix),
        saved_by_pages=shape.heads * by_pages,
        saved_by_prefix=shape.heads * by_prefix,
        kv_rows_read=rows.number(keys.main_read + keys.precise_read),
        kv_rows_written=rows.number(keys.main_written + keys.precise_written),
        kv_rows_held=rows.number(main_held + precise_held),
        bounds_read=bounds,
        keys_listed=_times(keys.main_listed + keys.precise_listed, shape.kv_heads),
        kv_bytes_read=_plus(
            rows.size(keys.main_read, keys.precise_read),
            _plus(_plus(bounds_size, listed_size), (passes - from_zeros) * state_bytes),
        ),
        kv_bytes_written=_plus(rows.size(keys.main_written, keys.precise_written), passes * state_bytes),
        kv_bytes_held=_plus(rows.size(main_held, precise_held), state_bytes),
        kv_bytes_per_token=rows.size(shape.layers if held_tokens else 0, 0),
        linear_flops=_plus(
            _weights(shape, 2 * flops_factor * tokens, 2 * flops_factor * sampled),
            flops_factor * tokens * shape.recurrence_flops,
        ),
        attention_flops=_times(4 * flops_factor * shape.heads * keys.seen, shape.head_dim),
        selection_flops=_times(
            shape.heads * (4 * keys.bounds_read + 2 * (keys.main_listed + keys.precise_listed)), shape.head_dim
        ),
        linear_passes=passes,
        head_passes=head_passes,
        weights_read=_weights(shape, passes, head_passes),
    )


@dataclass(frozen=True)
class _Rows:
    """Turns keys of one KV head into rows of keys and values, and into bytes."""

    kv_heads: int | None
    head_dim: int | None
    policy: PagePolicy

    def number(self, keys: int) -> int | None:
        return _times(2 * keys, self.kv_heads)

    def keys_size(self, main: int, precise: int) -> int | None:
        """Of keys alone."""
        if self.head_dim is None:
            return None
        of_head = main * key_bytes(self.policy.main, self.head_dim)
        return _times(of_head + precise * key_bytes(self.policy.precise, self.head_dim), self.kv_heads)

    def size(self, main: int, precise: int) -> int | None:
        if self.head_dim is None:
            return None
        policy, head_dim = self.policy, self.head_dim
        of_head = main * key_and_value_bytes(policy.main, head_dim)
        return _times(of_head + precise * key_and_value_bytes(policy.precise, head_dim), self.kv_heads)


def _seen_within(shape: Shape, tokens: int, policy: PagePolicy) -> int:
    """Over all layers and queries of one text, whole in one pass."""

    def seen(own: int | None) -> int:
        window = policy.window_of(own)
        if shape.causal:
            return attended(0, tokens, None if window is None else window + policy.sinks_of(own))
        return tokens * tokens if window is None else _band(tokens, window // 2)

    return shape.over_layers(seen)


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
