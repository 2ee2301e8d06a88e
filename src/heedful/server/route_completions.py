"""`auto` at /v1/completions: the prompt is what a user says, and the answer is the text. Targets are chat models and
more, so what only a continued text has (token ids, its logprobs) is refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import ASGIApp

from heedful.router.dispatch import Routed
from heedful.server import sse
from heedful.server.asks import Chat
from heedful.server.bodies import JSON, json_response, until_hangup
from heedful.server.chat_api import sse_error
from heedful.server.failures import HTTPFailure
from heedful.server.ids import new_id
from heedful.server.route_bodies import chat_body
from heedful.server.routing import open_routed, route_headers, with_route

if TYPE_CHECKING:
    from heedful.server.completions_api import CompletionBody


async def routed_completion(
    request: Request, body: CompletionBody, prompts: list[str | list[int]], max_tokens: int | None
) -> ASGIApp:
    """`body`: checked, as for a model."""
    prompt = _only_text(body, prompts)
    chat = Chat([{"role": "user", "content": prompt}])
    asked = chat_body(body, chat, max_tokens=max_tokens, response_format=body.response_format)
    asked |= {} if body.n is None else {"n": body.n}
    async with AsyncExitStack() as held:
        routed = await open_routed(request, asked, held)
        if body.stream:
            events = _events(routed, body.wants_usage)
            return sse.EventStream(events, sse_error, held.pop_all(), route_headers(routed))
        return with_route(json_response(_text_of(await until_hangup(request, routed.whole()))), routed)


def _only_text(body: CompletionBody, prompts: list[str | list[int]]) -> str:
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise HTTPFailure(400, "must be one text: a router reads no token ids, and goes one way", field="prompt")
    for name in ("echo", "logprobs"):
        if getattr(body, name):
            raise HTTPFailure(400, "is not to be had of a routed answer; name a model", field=name)
    return prompts[0]


def _text_of(body: JSON) -> JSON:
    choices = [_choice(choice, choice["message"].get("content")) for choice in body["choices"]]
    return {**_head(body), "choices": choices, "usage": body["usage"]}


async def _events(routed: Routed, with_usage: bool) -> AsyncGenerator[bytes, None]:
    answer_id = new_id("cmpl-")
    async with aclosing(routed.chunks()) as chunks:
        async for chunk in chunks:
            head = {**_head(chunk), "id": answer_id}
            for choice in chunk["choices"]:
                text = (choice.get("delta") or {}).get("content")
                if text or choice.get("finish_reason"):
                    yield sse.data({**head, "choices": [_choice(choice, text)]})
            if not chunk["choices"] and with_usage:
                yield sse.data({**head, "choices": [], "usage": chunk["usage"]})
    yield sse.DONE


def _head(body: JSON) -> JSON:
    head: JSON = {"id": new_id("cmpl-"), "object": "text_completion"}
    return head | {name: body[name] for name in ("created", "model") if name in body}


def _choice(choice: JSON, text: Any) -> JSON:
    shown: JSON = {"index": choice.get("index", 0), "text": text or "", "logprobs": None}
    return shown | {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
