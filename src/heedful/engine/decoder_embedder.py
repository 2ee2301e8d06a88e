"""A decoder's hidden states as embeddings: the states after its last norm, pooled. Runs on the plain PyTorch model.

A model that was not trained for it gives vectors of modest worth: compare before relying on them.
"""

from __future__ import annotations

from functools import partial
from typing import Self

from heedful.cost.encoder_receipt import causal_visits
from heedful.engine.pooled import PooledEmbedder, TrunkFacts, require_torch, threads_or_all
from heedful.kernels import native
from heedful.models.config import ModelConfig
from heedful.models.pooling import Pooling, PoolingMode
from heedful.weights.load import load
from heedful.weights.sentence_files import read_pooling


class DecoderEmbedder(PooledEmbedder):
    """Any decoder that runs here. Pooled as sentence-transformers' files beside it say, else the mean of all tokens."""

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
        """Parameters and errors as for `Encoder.load`."""
        require_torch()
        threads, panel_format = threads_or_all(threads), native.panel_format(weights)
        loaded = load(name, accept_licence=accept_licence)
        own = read_pooling(loaded.path) if loaded.path.is_dir() else Pooling()
        from heedful.engine.torch_embed import embed_with_decoder, make_decoder  # torch takes seconds to import
        from heedful.engine.torch_packed import pack_linears

        decoder = make_decoder(loaded.config, loaded.weights, threads=threads)
        facts = _facts(loaded.config, pack_linears(decoder.layers, panel_format, threads=threads))
        chosen = own.with_mode(pooling)
        return cls(name, loaded.tokenizer, chosen, facts, partial(embed_with_decoder, decoder))


def _facts(config: ModelConfig, saved_bytes: int) -> TrunkFacts:
    return TrunkFacts(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_len=config.context_len,
        head_dim=config.head_dim,
        linear_weights=config.linear_weights,
        visits=partial(causal_visits, windows=config.windows, heads=config.num_heads),
        saved_bytes=saved_bytes,
    )
