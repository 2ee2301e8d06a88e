"""The OpenAPI document, made of the types that bodies are read into."""

from __future__ import annotations

from typing import Any

import msgspec

from heedful import __version__
from heedful.server.chat_api import ChatBody
from heedful.server.completions_api import CompletionBody
from heedful.server.decisions_api import DecisionsBody
from heedful.server.embeddings_api import EmbeddingBody
from heedful.server.history_api import ChangeBody, NewBody
from heedful.server.messages_api import MessagesBody
from heedful.server.plain_api import DetokenizeBody, TokenizeBody
from heedful.server.responses_api import ResponsesBody
from heedful.server.systemone_api import SystemOneBody
from heedful.server.view_api import ViewBody

BODIES: dict[tuple[str, str], tuple[type, str]] = {
    ("post", "/v1/chat/completions"): (ChatBody, "Answer a conversation (OpenAI)"),
    ("post", "/v1/completions"): (CompletionBody, "Continue texts (OpenAI)"),
    ("post", "/v1/responses"): (ResponsesBody, "Answer (OpenAI's Responses API)"),
    ("post", "/v1/messages"): (MessagesBody, "Answer a conversation (Anthropic)"),
    ("post", "/v1/messages/count_tokens"): (MessagesBody, "Tokens of a conversation (Anthropic)"),
    ("post", "/v1/embeddings"): (EmbeddingBody, "Texts as vectors (OpenAI)"),
    ("post", "/v1/systemone"): (SystemOneBody, "Answer typed questions about a state (TypeSafe's System One)"),
    ("post", "/v1/decisions"): (DecisionsBody, "Answer typed questions about an input (OpenAI)"),
    ("post", "/tokenize"): (TokenizeBody, "A text or a conversation as token ids"),
    ("post", "/detokenize"): (DetokenizeBody, "Token ids as text"),
    ("post", "/history"): (NewBody, "Begin a conversation of the page"),
    ("post", "/view"): (ViewBody, "Make a page of where an answer's visits went"),
    ("put", "/history/{id}"): (ChangeBody, "Replace a conversation of the page"),
}
READS = {
    "/health": "The process answers",
    "/ready": "A request would be answered",
    "/metrics": "Prometheus metrics",
    "/v1/models": "The models",
    "/v1/models/{name}": "One model",
    "/v1/responses/{response_id}": "A stored response",
    "/history": "Conversations of the page",
    "/history/{id}": "One of them",
    "/view/{name}": "A page that was made",
}
DELETES = {"/v1/responses/{response_id}": "Forget a response", "/history/{id}": "Forget a conversation"}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas, components = msgspec.json.schema_components(
        [body for body, _ in BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for ((method, path), (_, summary)), schema in zip(BODIES.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})[method] = {**_operation(path, summary), "requestBody": body}
    for method, summaries in (("get", READS), ("delete", DELETES)):
        for path, summary in summaries.items():
            paths.setdefault(path, {})[method] = _operation(path, summary)
    return {
        "openapi": "3.1.0",
        "info": {"title": "heedful", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(path: str, summary: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    failed = {"description": "The caller's fault; the body says which"}
    return {"summary": summary, "parameters": parameters, "responses": {"200": {"description": "Done"}, "4XX": failed}}
