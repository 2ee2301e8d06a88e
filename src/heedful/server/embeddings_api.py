"""/v1/embeddings, as OpenAI has it: encoders, and decoders whose hidden states are pooled."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from heedful.errors import UsageError
from heedful.server.bodies import json_response, read_body, until_hangup
from heedful.server.failures import HTTPFailure
from heedful.server.fields import HeedfulOptions
from heedful.server.state import state_of

MOST_INPUTS = 2048


class EmbeddingBody(Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    heedful: HeedfulOptions | None = None


async def embeddings(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, EmbeddingBody)
    texts = _texts_of(body.input)
    truncate = body.heedful is not None and body.heedful.truncate
    async with state.pool.lease_embedder(body.model) as embedder:
        if body.dimensions not in (None, embedder.dimensions):
            raise HTTPFailure(400, f"the model has {embedder.dimensions} dimensions and no fewer", field="dimensions")
        try:
            batch = await until_hangup(request, asyncio.to_thread(embedder.embed, texts, truncate=truncate))
        except UsageError as error:
            raise HTTPFailure(400, error.message, field="input") from error
        name = body.model or embedder.name
    receipt = batch.receipt.to_dict()
    prompt_tokens = sum(batch.token_counts)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(batch.vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "heedful": receipt}
    return json_response({"object": "list", "model": name, "data": data, "usage": usage})


def _texts_of(given: Any) -> list[str] | list[list[int]]:
    texts = [given] if isinstance(given, str) else given
    if texts and all(isinstance(part, int) for part in texts):
        texts = [texts]
    if not texts or len(texts) > MOST_INPUTS:
        raise HTTPFailure(400, f"must be 1 to {MOST_INPUTS} texts", field="input")
    if not (all(isinstance(part, str) for part in texts) or all(isinstance(part, list) for part in texts)):
        raise HTTPFailure(400, "must be a text, texts, token ids, or lists of token ids", field="input")
    return list(texts)


def _encoded(vector: np.ndarray, how: str | None) -> list[float] | str:
    if how == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
