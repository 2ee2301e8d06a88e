"""One way to embeddings, whatever the model is: an encoder, or a decoder whose hidden states are pooled.

embedder = load_embedder("minilm")
batch = embedder.embed(["one text", "another"])
batch.vectors @ batch.vectors.T        # cosine similarities
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from heedful.engine.decoder_embedder import DecoderEmbedder
from heedful.engine.encoder import Encoder
from heedful.engine.pooled import EmbeddingBatch, TextTooLong, require_torch_or_native
from heedful.errors import BadParameter
from heedful.models.pooling import PoolingMode
from heedful.weights.load_encoder import names_encoder
from heedful.weights.sources import resolve

__all__ = ["Embedder", "EmbeddingBatch", "TextTooLong", "default_embedder", "load_embedder"]

default_embedder = "minilm"


class Embedder(Protocol):
    """What `load_embedder` gives. `dimensions`: numbers of a vector; `max_tokens`: of a text, its marks included."""

    name: str
    dimensions: int
    max_tokens: int

    def embed(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, normalize: bool = True, truncate: bool = False
    ) -> EmbeddingBatch:
        """As `PooledEmbedder.embed`."""
        ...


def load_embedder(
    name: str | os.PathLike[str] = default_embedder,
    *,
    threads: int | None = None,
    accept_licence: bool = False,
    pooling: PoolingMode | None = None,
    weights: str | None = None,
) -> Embedder:
    """The embedder that the model's config asks for. Parameters and errors as for `Encoder.load`.

    pooling: "mean", "cls" (the first token) or "last"; None: what the model's files say, else the mean.
    """
    if not isinstance(name, str | os.PathLike):
        raise BadParameter("model", f"{name!r} is not a name or a path")
    if pooling not in (None, "mean", "cls", "last"):
        raise BadParameter("pooling", f"{pooling!r} is not known", "Choose one of: mean, cls, last.")
    require_torch_or_native()  # before anything is fetched
    name = os.fspath(name)
    kind = Encoder if names_encoder(resolve(name, accept_licence=accept_licence).path) else DecoderEmbedder
    return kind.load(name, threads=threads, accept_licence=accept_licence, pooling=pooling, weights=weights)
