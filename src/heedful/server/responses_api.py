"""/v1/responses, as OpenAI has it: answers as items, which the next request may refer to."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from heedful.request import GrammarSpec
from heedful.server import sse
from heedful.server.answered import Answered, Ending, LocalAnswer, RoutedAnswer
from heedful.server.asks import Chat, ChatTurn
from heedful.server.blocks import BlockReader, Closed, Grew, Opened, Step
from heedful.server.bodies import JSON, json_response, read_body, until_hangup
from heedful.server.failures import Failure, HTTPFailure, fields_named
from heedful.server.fields import Count, HeedfulOptions, SamplingFields, ask_of, grammar_of
from heedful.server.ids import new_id
from heedful.server.response_items import (
    choice_of,
    flat_choice,
    flat_tools,
    item_of,
    message_of_blocks,
    messages_of_input,
    part_of,
    tools_of,
)
from heedful.server.route_bodies import chat_body
from heedful.server.routing import is_routed, model_of, open_routed, route_headers, with_route
from heedful.server.state import state_of
from heedful.server.stored import Stored

_NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
_REFUSED = {
    "background": "answers are given at once here",
    "conversation": "this server keeps no conversations; use previous_response_id",
    "prompt": "this server keeps no prompts",
    "top_logprobs": "logprobs come from /v1/chat/completions",
}
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


Keep = Callable[[JSON, list[JSON]], None]


class TextOptions(Struct, kw_only=True):
    format: dict[str, Any] | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def grammar(self) -> GrammarSpec | None:
        return grammar_of(self.text.format if self.text else None, "text.format")


async def create_response(request: Request) -> ASGIApp:
    state = state_of(request)
    body = await read_body(request, ResponsesBody)
    salt = request.state.salt
    with fields_named(_NAMES):
        said = [*_earlier(request, body.previous_response_id), *messages_of_input(body.input)]
        chat = _chat_of(body, said)
        if body.truncation == "auto":
            body.heedful = body.heedful or HeedfulOptions()
            body.heedful.truncate = True
        ask = ask_of(body, state.settings, salt, grammar=body.grammar, max_tokens=body.max_output_tokens)

        def keep(answer: JSON, said_now: list[JSON]) -> None:
            if body.is_stored:
                state.responses.put(salt, Stored(answer, [*said, *said_now]))

        if is_routed(state, body.model):
            return await _routed(request, body, chat, keep)
        async with AsyncExitStack() as stack:
            hosted = await stack.enter_async_context(state.pool.lease(body.model))
            turn = await ChatTurn.open(hosted, chat, ask)
            stack.callback(turn.stream.close)
            reply, answered = _Reply(hosted.name, body, chat, keep), LocalAnswer(turn)
            if body.stream:
                return sse.EventStream(reply.events(answered), reply.failed, stack.pop_all())
            return await until_hangup(request, reply.whole(answered))


async def _routed(request: Request, body: ResponsesBody, chat: Chat, keep: Keep) -> ASGIApp:
    form = body.text.format if body.text else None
    asked = chat_body(body, chat, max_tokens=body.max_output_tokens, response_format=form)
    async with AsyncExitStack() as held:
        routed = await open_routed(request, asked, held)
        reply, answered = _Reply(model_of(state_of(request), routed), body, chat, keep), RoutedAnswer(routed)
        if body.stream:
            return sse.EventStream(reply.events(answered), reply.failed, held.pop_all(), route_headers(routed))
        return with_route(await until_hangup(request, reply.whole(answered)), routed)


async def get_response(request: Request) -> Response:
    if request.query_params.get("stream") == "true":
        raise HTTPFailure(400, "a stored response does not stream again", field="stream")
    return json_response(_stored(request, request.path_params["response_id"]).body)


async def delete_response(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    _stored(request, response_id)
    state_of(request).responses.drop(request.state.salt, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _stored(request: Request, response_id: str, field: str | None = None) -> Stored:
    """Raises HTTPFailure for another caller's too: it is as if there were none."""
    found = state_of(request).responses.get(request.state.salt, response_id)
    if found is None:
        raise HTTPFailure(404, f"there is no response {response_id!r:.80}", field=field)
    return found


def _earlier(request: Request, response_id: str | None) -> list[JSON]:
    return [] if response_id is None else _stored(request, response_id, "previous_response_id").messages


def _chat_of(body: ResponsesBody, said: list[JSON]) -> Chat:
    for field, reason in _REFUSED.items():
        if getattr(body, field):
            raise HTTPFailure(400, f"{field}: {reason}", field=field)
    if not said:
        raise HTTPFailure(400, "must have at least one item", field="input")
    tools = tools_of(body.tools or [])
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return Chat([*system, *said], tools, choice_of(body.tool_choice, tools))


class _Reply:
    """One answer on the wire. `keep`: takes the answer, and what it adds to the conversation, once it is complete."""

    def __init__(self, model: str, body: ResponsesBody, chat: Chat, keep: Keep) -> None:
        self._blocks = BlockReader(text_prefix="msg_", call_prefix="fc_")
        self._keep = keep
        self._num_events = 0
        self._body: JSON = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.is_stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": flat_choice(chat.choice),
            "tools": flat_tools(chat.tools),
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    async def whole(self, answered: Answered) -> Response:
        self._blocks.read(await answered.complete())
        self._finish(answered.ending)
        return json_response(self._body)

    async def events(self, answered: Answered) -> AsyncGenerator[bytes, None]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._body)
        async with aclosing(answered.events()) as steps_of_answer:
            async for events in steps_of_answer:
                for step in self._blocks.read(events):
                    for event in self._step_events(step):
                        yield event
        for step in self._finish(answered.ending):
            for event in self._step_events(step):
                yield event
        yield self._event(f"response.{self._body['status']}", response=self._body)

    def failed(self, failure: Failure) -> bytes:
        """The last event of a stream that an error ends."""
        error = {"code": "server_error", "message": failure.message}
        body = {**self._body, "status": "failed", "error": error}
        return self._event("response.failed", response=body)

    def _finish(self, ending: Ending) -> list[Step]:
        is_cut = ending.is_cut
        steps = self._blocks.close(is_cut=is_cut)
        blocks = self._blocks.blocks
        self._body["status"] = "incomplete" if is_cut else "completed"
        self._body["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self._body["completed_at"] = None if is_cut else int(time.time())
        self._body["output"] = [item_of(block, _status(block.is_complete)) for block in blocks]
        self._body["usage"] = _usage(ending.usage)
        self._keep(self._body, message_of_blocks(blocks))
        return steps

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse.event(name, body)

    def _step_events(self, step: Step) -> list[bytes]:
        block = step.block
        place: JSON = {"item_id": block.id, "output_index": block.index}
        part = {**place, "content_index": 0}
        is_text = block.name is None
        match step:
            case Opened():
                added = self._item_event("added", step)
                shown = [self._event("response.content_part.added", **part, part=part_of(""))] if is_text else []
                return [added, *shown]
            case Grew(_, text) if is_text:
                return [self._event("response.output_text.delta", **part, delta=text, logprobs=[])]
            case Grew(_, text):
                return [self._event("response.function_call_arguments.delta", **place, delta=text)]
            case Closed() if is_text:
                return [
                    self._event("response.output_text.done", **part, text=block.text, logprobs=[]),
                    self._event("response.content_part.done", **part, part=part_of(block.text)),
                    self._item_event("done", step),
                ]
            case Closed():
                done = {"name": block.name, "arguments": block.text}
                return [
                    self._event("response.function_call_arguments.done", **place, **done),
                    self._item_event("done", step),
                ]

    def _item_event(self, what: str, step: Step) -> bytes:
        status = "in_progress" if what == "added" else _status(step.block.is_complete)
        item = item_of(step.block, status)
        return self._event(f"response.output_item.{what}", output_index=step.block.index, item=item)


def _status(is_complete: bool) -> str:
    return "completed" if is_complete else "incomplete"


def _usage(usage: JSON) -> JSON:
    """Of a chat completion's. Endpoints that a router asks may leave out what they do not know."""
    details = usage.get("prompt_tokens_details") or {}
    prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
        "heedful": usage["heedful"],
    }
