"""The small endpoints: models, tokens, health, metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from heedful import __version__
from heedful.router.policy import AUTO
from heedful.server.asks import MOST_TEXT_CHARS, check_messages
from heedful.server.bodies import JSON, json_response, read_body
from heedful.server.chat_api import messages_of
from heedful.server.deciders import ALIASES, decider_name
from heedful.server.failures import HTTPFailure
from heedful.server.pool import Answering
from heedful.server.state import ServerState, state_of

MOST_TOKENS = 100_000


async def health(request: Request) -> Response:
    """The process answers."""
    return json_response({"status": "ok", "version": __version__})


async def ready(request: Request) -> Response:
    """The first model is loaded, and the server is not going down."""
    is_ready = state_of(request).is_ready
    return json_response({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(request: Request) -> Response:
    from heedful.server.openapi import document  # it needs the bodies of all APIs, this module's too

    return json_response(document())


async def models(request: Request) -> Response:
    """Both what OpenAI's clients read, in `data`, and what System One's do, in `models`: those that decide."""
    state = state_of(request)
    data = [*map(_model, state.pool.models), *map(_model, state.pool.adapters), *_routed(state)]
    default = decider_name(state.settings, None)
    about = dict.fromkeys(ALIASES, f"Another name of {default}.")
    about |= dict.fromkeys(state.settings.deciders, "A decider.")
    about |= dict.fromkeys(state.settings.models, "A model of this server; a chat model decides by its likelihoods.")
    base = state.settings.models[0]
    about |= dict.fromkeys(state.settings.adapters, f"An adapter of {base}, which decides by its likelihoods.")
    since = time.strftime("%Y-%m-%d", time.gmtime(state.pool.find(None).created))
    deciders = [{"name": name, "description": text, "release_date": since} for name, text in about.items()]
    return json_response({"object": "list", "data": data, "models": deciders})


async def model(request: Request) -> Response:
    return json_response(_model(state_of(request).pool.find(request.path_params["name"])))


def _routed(state: ServerState) -> list[JSON]:
    """The model that a policy sends on."""
    if state.router is None:
        return []
    about = {"id": AUTO, "object": "model", "created": state.pool.find(None).created, "owned_by": "heedful"}
    return [{**about, "loaded": True, "targets": list(state.router.policy.targets)}]


def _model(hosted: Answering) -> JSON:
    about: JSON = {"id": hosted.name, "object": "model", "created": hosted.created, "owned_by": "heedful"}
    if hosted.adapter is not None:
        about["parent"] = hosted.model.name
    about["loaded"] = hosted.is_loaded
    if hosted.service is not None:
        about["context_length"] = hosted.llm.context_len
    return about


class TokenizeBody(Struct, kw_only=True):
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None


async def tokenize(request: Request) -> Response:
    """`prompt` (vLLM's name) or `content` (llama.cpp's), or the `messages` of a chat, as token ids."""
    body = await read_body(request, TokenizeBody)
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise HTTPFailure(400, "give either prompt or messages", field="prompt")
    if text is not None and len(text) > MOST_TEXT_CHARS:
        raise HTTPFailure(400, f"has {len(text):,} characters; at most {MOST_TEXT_CHARS:,} are read", field="prompt")
    async with state_of(request).pool.lease(body.model) as hosted:
        llm = hosted.llm
        if text is None:
            messages = messages_of(body.messages or [])
            check_messages(messages)
            tokens = await asyncio.to_thread(llm.encode_chat, messages)
        else:
            add_bos = False if body.add_special_tokens is False else None
            tokens = await asyncio.to_thread(lambda: llm.tokenizer.encode(text, add_bos=add_bos))
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": llm.context_len})


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    if len(body.tokens) > MOST_TOKENS:
        raise HTTPFailure(400, f"has {len(body.tokens):,} tokens; at most {MOST_TOKENS:,} are read", field="tokens")
    async with state_of(request).pool.lease(body.model) as hosted:
        size = hosted.llm.tokenizer.vocab_size
        if bad := [token for token in body.tokens if not 0 <= token < size]:
            raise HTTPFailure(400, f"token id {bad[0]} is not in the vocabulary of {size:,}", field="tokens")
        text = await asyncio.to_thread(hosted.llm.tokenizer.decode, body.tokens, skip_special=False)
        return json_response({"prompt": text})
