"""/history: the page's conversations. They belong to the caller's API key; no other key sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from heedful.server.bodies import JSON, json_response, read_body
from heedful.server.failures import HTTPFailure
from heedful.server.history import Conversation, History, Message
from heedful.server.state import state_of

MOST_MESSAGES = 4000
MOST_QUERY_CHARS = 200
MOST_JSON_BYTES = 64 << 10
"""Of a receipt, or of a conversation's settings."""

Title = Annotated[str, Meta(max_length=300)]
Name = Annotated[str, Meta(max_length=1000)]
Text = Annotated[str, Meta(max_length=4 << 20)]


class MessageFields(Struct, kw_only=True):
    role: Literal["system", "user", "assistant"]
    content: Text
    finish: Literal["stop", "length", "cancelled", "error"] | None = None
    receipt: dict[str, Any] | None = None
    live: dict[str, Any] | None = None


Messages = Annotated[list[MessageFields], Meta(max_length=MOST_MESSAGES)]


class NewBody(Struct, kw_only=True):
    title: Title = ""
    model: Name | None = None
    settings: dict[str, Any] = {}  # msgspec copies it
    messages: Messages = []


class ChangeBody(Struct, kw_only=True):
    """What is missing stays. `messages` take the place of all stored ones but the first `keep`."""

    title: Title | None = None
    model: Name | None = None
    settings: dict[str, Any] | None = None
    messages: Messages | None = None
    keep: Annotated[int, Meta(ge=0, le=MOST_MESSAGES)] = 0


async def list_conversations(request: Request) -> Response:
    """The last touched first, without messages; `q`: only those that say it."""
    history, salt = _history(request)
    query = request.query_params.get("q", "").strip()
    if len(query) > MOST_QUERY_CHARS:
        raise HTTPFailure(400, f"may have at most {MOST_QUERY_CHARS} characters", field="q")
    found = await asyncio.to_thread(history.conversations, salt, query)
    return json_response({"conversations": found})


async def create_conversation(request: Request) -> Response:
    history, salt = _history(request)
    body = await read_body(request, NewBody)
    messages = _messages(body.messages)
    _check_size("settings", body.settings)
    made = await asyncio.to_thread(history.add, salt, body.title, body.model, body.settings, messages)
    return json_response(_whole(made, messages), 201)


async def read_conversation(request: Request) -> Response:
    history, salt = _history(request)
    found = await asyncio.to_thread(history.read, salt, request.path_params["id"])
    if found is None:
        raise _missing(request)
    return json_response(_whole(*found))


async def change_conversation(request: Request) -> Response:
    """409 where fewer messages are stored than are to stay: the caller sends all of them then."""
    history, salt = _history(request)
    body = await read_body(request, ChangeBody)
    messages = None if body.messages is None else _messages(body.messages)
    if body.keep + len(messages or []) > MOST_MESSAGES:
        raise HTTPFailure(400, f"a conversation has at most {MOST_MESSAGES:,} messages", field="messages")
    _check_size("settings", body.settings)
    try:
        changed = await asyncio.to_thread(
            history.change,
            salt,
            request.path_params["id"],
            title=body.title,
            model=body.model,
            settings=body.settings,
            messages=messages,
            keep=body.keep,
        )
    except ValueError as error:
        raise HTTPFailure(409, str(error), field="keep") from error
    if changed is None:
        raise _missing(request)
    return json_response(changed)


async def delete_conversation(request: Request) -> Response:
    history, salt = _history(request)
    if not await asyncio.to_thread(history.delete, salt, request.path_params["id"]):
        raise _missing(request)
    return Response(status_code=204)


async def export_conversations(request: Request) -> Response:
    """All of them, with their messages."""
    history, salt = _history(request)
    found = await asyncio.to_thread(history.export, salt)
    response = json_response({"version": 1, "conversations": [_whole(*one) for one in found]})
    response.headers["content-disposition"] = 'attachment; filename="heedful-conversations.json"'
    return response


def _history(request: Request) -> tuple[History, str]:
    history = state_of(request).history
    if history is None:
        raise HTTPFailure(404, "this server keeps no conversations (--no-history)", code="no_history")
    return history, request.state.salt


def _missing(request: Request) -> HTTPFailure:
    return HTTPFailure(404, f"there is no conversation {request.path_params['id']!r:.80}")


def _messages(given: Sequence[MessageFields]) -> list[Message]:
    for i, one in enumerate(given):
        _check_size(f"messages[{i}].receipt", one.receipt)
        _check_size(f"messages[{i}].live", one.live)
    return [Message(one.role, one.content, one.finish, one.receipt, one.live) for one in given]


def _check_size(field: str, value: dict[str, Any] | None) -> None:
    if value is not None and len(msgspec.json.encode(value)) > MOST_JSON_BYTES:
        raise HTTPFailure(400, f"may have at most {MOST_JSON_BYTES:,} bytes", field=field)


def _whole(head: Conversation, messages: Sequence[Message]) -> JSON:
    return {**msgspec.to_builtins(head), "messages": messages}
