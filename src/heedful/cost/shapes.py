"""The numbers that people know of a model, some of them unknown, and those of the models that heedful has aliases for.

Turns them into the `Shape` that formulas.py counts with. Reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice

from heedful.cache.policy import DENSE_LAYERS
from heedful.cost.formulas import Shape
from heedful.models.config import DeltaNet, ModelConfig

WindowRuns = tuple[tuple[int | None, int], ...]
"""(window, number of layers in a row that have it), in layer order; repeated until all layers have one."""

FULL: WindowRuns = ((None, 1),)


@dataclass(frozen=True)
class Dimensions:
    """Sizes in channels, lengths in tokens; None: unknown."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    context_len: int | None = None
    windows: WindowRuns = FULL
    gated_mlp: bool = True
    """Three matrices in the MLP, not two."""
    causal: bool = True
    delta: DeltaNet | None = None
    """Layers that are none of attention, counted in `layers` too."""

    @staticmethod
    def from_config(config: ModelConfig) -> Dimensions:
        return Dimensions(
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            context_len=config.context_len,
            windows=tuple((window, 1) for window in config.windows),
            gated_mlp=config.gated_mlp,
            delta=config.delta,
        )

    def shape(self) -> Shape:
        assert self.layers is not None, self
        assert self.heads is not None, self
        attention_layers = self.layers - self._delta_layers
        return Shape(
            layers=attention_layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            windows=_count_windows(self.windows, attention_layers),
            dense_layers=_first_windows(self.windows, min(DENSE_LAYERS, attention_layers)).count(None),
            linear_weights=self._linear_weights,
            head_weights=self._head_weights if self.causal else 0,
            causal=self.causal,
            state_bytes=0 if self.delta is None else self._delta_layers * self.delta.state_bytes,
            recurrence_flops=0 if self.delta is None else self._delta_layers * self.delta.recurrence_flops,
        )

    @property
    def _delta_layers(self) -> int:
        return 0 if self.delta is None else len(self.delta.layers)

    @property
    def _linear_weights(self) -> int | None:
        """As `ModelConfig.linear_weights`, which needs every number."""
        match (self.layers, self.heads, self.kv_heads, self.head_dim, self.hidden, self.intermediate):
            case (int(layers), int(heads), int(kv_heads), int(head_dim), int(hidden), int(intermediate)):
                gated = self.delta is not None  # then attention's output is too, by a matrix of its own
                attention = hidden * head_dim * ((3 if gated else 2) * heads + 2 * kv_heads)
                delta = 0 if self.delta is None else self._delta_layers * self.delta.weights(hidden)
                mlp = hidden * intermediate * (3 if self.gated_mlp else 2)
                return (layers - self._delta_layers) * attention + delta + layers * mlp
        return None

    @property
    def _head_weights(self) -> int | None:
        return None if self.vocab is None or self.hidden is None else self.vocab * self.hidden


def local_global(window: int, local_per_global: int, causal: bool) -> WindowRuns:
    """Decoders (Gemma) end each run of local layers with a global one, encoders (ModernBERT) begin with it."""
    local, full = (window, local_per_global), (None, 1)
    return (local, full) if causal else (full, local)


def _count_windows(runs: WindowRuns, layers: int) -> WindowRuns:
    """(window, layers that have it) after repeating `runs` over all layers."""
    rounds, rest = divmod(layers, sum(count for _, count in runs))
    totals: dict[int | None, int] = {}
    for window, count in runs:
        extra = min(count, rest)
        rest -= extra
        totals[window] = totals.get(window, 0) + rounds * count + extra
    return tuple((window, count) for window, count in totals.items() if count)


def _first_windows(runs: WindowRuns, layers: int) -> list[int | None]:
    """Of so many layers, few."""
    in_order = (window for window, count in cycle(runs) for _ in range(min(count, layers)))
    return list(islice(in_order, layers))


KNOWN: dict[str, Dimensions] = {
    "smollm2": Dimensions(
        layers=30, heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, vocab=49152, context_len=8192
    ),
    "gemma3-270m": Dimensions(
        layers=18, heads=4, kv_heads=1, head_dim=256, hidden=640, intermediate=2048, vocab=262144, context_len=32768,
        windows=local_global(512, 5, causal=True),
    ),
    "minilm": Dimensions(
        layers=6, heads=12, kv_heads=12, head_dim=32, hidden=384, intermediate=1536, vocab=30522, context_len=512,
        gated_mlp=False, causal=False,
    ),
}  # fmt: skip
"""By alias, from each model's config.json."""
