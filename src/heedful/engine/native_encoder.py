"""BERT's trunk, and Laya's head on it, on the native kernels: a layer table from the same configs and weight names as
the plain model, and one native call a batch of texts. What people get on a CPU, without torch; torch_embed.py and
torch_laya.py compute the same and are what it is judged by.

Texts lie one after another, without padding; what is computed of one does not depend on the others, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from heedful.kernels import native
from heedful.kernels.packed import can_pack
from heedful.models.encoder_config import EncoderConfig
from heedful.models.laya_config import ACT_FACTS, ACT_WIDTH, QUESTION_TYPES, LayaConfig, LayaSequence
from heedful.models.pooling import PoolingMode
from heedful.weights.lora import LoraAdapter
from heedful.weights.names import Weights, WeightsToPlace
from heedful.weights.tensor import StoredTensor, forget_pages

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_NO_FLOATS = np.empty(0, dtype=np.float32)
_NO_INTS = np.empty(0, dtype=np.int32)
_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")  # their order is csrc/ops.h's
_GGML_F32 = 0


def runs_natively(config: EncoderConfig) -> bool:
    """Whether the native kernels are built and compute encoders of this family."""
    return native.is_built() and config.family == "bert"


class NativeEncoder:
    """Threads may share it. `saved_bytes`: of the matrices' float32, where they are packed into less."""

    def __init__(
        self,
        config: EncoderConfig,
        weights: Weights,
        *,
        threads: int,
        panel_format: str | None = None,
        laya: tuple[LayaConfig, Weights] | None = None,
        updates: LoraAdapter | None = None,
        variant: str = "",
    ) -> None:
        """weights: by the names of weights/encoder_names.py. panel_format: of native.WEIGHTS_FORMATS, for the matrices
        that it can hold. laya: a head, its weights by the names of weights/laya_names.py. updates: added to the trunk's
        matrices. variant: which kernels, "" for the processor's best.
        Raises UnsupportedModel when a weight is missing, extra or misshapen.
        """
        self.hidden_size = config.hidden_size
        self.saved_bytes = 0
        self._packer = native.module().Packer(threads)
        self._panel_format = panel_format
        self._scores = laya is not None
        head_layers = laya[0].head_layers if laya else 0
        self._encoder = native.module().Encoder(config.hidden_size, config.num_layers + head_layers, variant, threads)
        self._build_trunk(config, WeightsToPlace(weights), updates)
        if laya:
            self._build_head(laya[0], WeightsToPlace(laya[1]), first=config.num_layers)
        del self._packer  # and its threads
        forget_pages(weights.values())

    def embed(self, texts: Sequence[Sequence[int]], mode: PoolingMode) -> Floats:
        """Token ids of texts → pooled last hidden states (texts, C), not normalised."""
        lengths = np.array([len(text) for text in texts], dtype=np.int32)
        starts = _starts(lengths)
        ids = np.fromiter(chain.from_iterable(texts), dtype=np.int32, count=starts[-1])
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths)
        if mode != "mean":
            return self._run(ids, positions, starts, wanted=starts[:-1] if mode == "cls" else starts[1:] - 1)
        states = self._run(ids, positions, starts)
        means: Floats = np.add.reduceat(states, starts[:-1], axis=0)
        means /= lengths[:, None].astype(np.float32)
        return means

    def laya_logits(self, sequences: Sequence[LayaSequence]) -> list[list[float]]:
        """Of each question the logits of its options, before any temperature. The questions have one layout: either all
        or none have options that do not see each other.
        """
        assert self._scores, "there is no head"
        apart = [one.options is not None for one in sequences]
        assert all(apart) or not any(apart), apart
        starts = _starts(np.array([len(one.ids) for one in sequences], dtype=np.int32))
        ids, positions, options = (
            np.fromiter(chain.from_iterable(of), dtype=np.int32)
            for of in (
                (one.ids for one in sequences),
                (range(len(one.ids)) if one.positions is None else one.positions for one in sequences),
                (one.options or () for one in sequences),
            )
        )
        counts = [len(one.markers) for one in sequences]
        marks = np.array([start + at for start, one in zip(starts, sequences, strict=False) for at in one.markers])
        order = np.argsort(marks)
        kinds = np.array([one.type for one in sequences], dtype=np.int32)
        logits = np.empty(len(marks), dtype=np.float32)
        logits[order] = self._run(ids, positions, starts, options, kinds, marks[order].astype(np.int32))
        ends = list(accumulate(counts))
        return [logits[end - count : end].tolist() for count, end in zip(counts, ends, strict=True)]

    def _run(
        self,
        ids: Ints,
        positions: Ints,
        starts: Ints,
        options: Ints = _NO_INTS,
        kinds: Ints | None = None,
        wanted: Ints = _NO_INTS,
    ) -> Floats:
        """Last hidden states of the wanted tokens, or of all: (rows, C); with a head their scores (rows,)."""
        rows = len(wanted) or len(ids)
        out = np.empty(rows if self._scores else (rows, self.hidden_size), dtype=np.float32)
        kinds = np.zeros(len(starts) - 1, dtype=np.int32) if kinds is None else kinds
        self._encoder.run(ids, positions, np.zeros_like(ids), options, starts, kinds, wanted, out)
        return out

    def _build_trunk(self, config: EncoderConfig, weights: WeightsToPlace, updates: LoraAdapter | None) -> None:
        width = config.hidden_size
        self._encoder.set_embedding(
            _table(weights.take("embed.weight", (config.vocab_size, width))),
            weights.take("position_embed.weight", (config.context_len, width)).to_float32(),
            weights.take("type_embed.weight", (config.token_types, width)).to_float32(),
            config.norm_eps,
        )
        self._set_norm(-1, "embed_norm", "embed_norm", weights)
        matrices = _Updated(weights, updates)
        for layer in range(config.num_layers):
            self._set_layer(layer, config, _NO_FLOATS, norm_first=False)
            self._fill_layer(layer, f"layers.{layer}.", config, ("attn.q", "attn.k", "attn.v"), matrices)
        matrices.require_all_used()
        weights.require_none_left()

    def _build_head(self, config: LayaConfig, weights: WeightsToPlace, *, first: int) -> None:
        head, width = config.head, config.head.hidden_size
        kinds = weights.take("type_embed.weight", (len(QUESTION_TYPES), width)).to_float32()
        matrices = _Updated(weights, None)
        for layer in range(head.num_layers):
            self._set_layer(first + layer, head, _NO_FLOATS if layer else kinds, norm_first=True)
            self._fill_layer(first + layer, f"layers.{layer}.", head, ("attn.qkv",), matrices)
        self._encoder.set_scorer_eps(head.norm_eps)
        self._set_norm(-1, "scorer.norm", "scorer.norm", weights)
        self._set_linear(-1, "scorer.dense", ["scorer.dense"], (width, width), matrices)
        self._set_linear(-1, "scorer.out", ["scorer.out"], (1, width), matrices)
        if config.actions is not None:  # checked and left: no answer needs it
            for name, shape in {"dense": (ACT_WIDTH, width + ACT_FACTS), "out": (config.actions, ACT_WIDTH)}.items():
                weights.take(f"act.{name}.weight", shape)
                weights.take(f"act.{name}.bias", shape[:1])
        weights.require_none_left()

    def _set_layer(self, layer: int, config: EncoderConfig, added: Floats, *, norm_first: bool) -> None:
        self._encoder.set_layer(
            layer,
            heads=config.num_heads,
            norm_first=norm_first,
            options_apart=not norm_first,  # the head sees all
            norm_eps=config.norm_eps,
            activation=_ACTIVATIONS.index(config.activation),
            added=added,
        )

    def _fill_layer(
        self, layer: int, prefix: str, config: EncoderConfig, qkv: tuple[str, ...], matrices: _Updated
    ) -> None:
        width, wide = config.hidden_size, config.intermediate_size
        for name in ("attn_norm", "mlp_norm"):
            self._set_norm(layer, name, prefix + name, matrices.weights)
        self._set_linear(layer, "attn.qkv", [prefix + part for part in qkv], (3 * width // len(qkv), width), matrices)
        for name, shape in {"attn.out": (width, width), "mlp.up": (wide, width), "mlp.down": (width, wide)}.items():
            self._set_linear(layer, name, [prefix + name], shape, matrices)

    def _set_norm(self, layer: int, name: str, stored: str, weights: WeightsToPlace) -> None:
        pair = [weights.take(f"{stored}.{kind}", (self.hidden_size,)).to_float32() for kind in ("weight", "bias")]
        self._encoder.set_norm(layer, name, *pair)

    def _set_linear(self, layer: int, name: str, parts: list[str], shape: tuple[int, int], matrices: _Updated) -> None:
        """`shape`: of each of the parts, which stand one below the other."""
        weight = np.concatenate([matrices.take(f"{part}.weight", shape) for part in parts])
        bias = [matrices.weights.take(f"{part}.bias", shape[:1]).to_float32() for part in parts]
        form = self._panel_format if self._panel_format and can_pack(*weight.shape) else native.PANEL_FORMATS[0]
        stored, (rows, cols) = weight.view(np.uint8).reshape(len(weight), -1), weight.shape
        panels = self._packer.pack(_GGML_F32, stored, cols, form)
        self._encoder.set_linear(
            layer, name, native.PANEL_FORMATS.index(form), rows, cols, panels, np.concatenate(bias)
        )
        self.saved_bytes += weight.nbytes - panels.nbytes if form in native.WEIGHTS_FORMATS.values() else 0


class _Updated:
    """Matrices in float32 with low-rank updates added to them."""

    def __init__(self, weights: WeightsToPlace, updates: LoraAdapter | None) -> None:
        self.weights = weights
        self._left = dict(updates.updates) if updates else {}

    def take(self, name: str, shape: tuple[int, int]) -> Floats:
        matrix = self.weights.take(name, shape).to_float32()
        if (update := self._left.pop(name, None)) is not None:
            LoraAdapter({name: update}).merge_into([(name, matrix)])
        return matrix

    def require_all_used(self) -> None:
        LoraAdapter(self._left).merge_into([])


def _table(stored: StoredTensor) -> Floats:
    """Rows in float32: the file's own where it has them so, of which only those that are looked up are read."""
    if stored.format_name == "F32" and (rows := stored.blocks.view(np.float32)).flags.aligned:
        return rows
    return stored.to_float32()


def _starts(lengths: Ints) -> Ints:
    return np.concatenate([_NO_INTS, [0], np.cumsum(lengths)]).astype(np.int32)
