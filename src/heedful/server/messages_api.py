"""/v1/messages and its count_tokens, as Anthropic has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from heedful.request import GrammarSpec
from heedful.server import sse
from heedful.server.answered import Answered, Ending, LocalAnswer, RoutedAnswer
from heedful.server.asks import Chat, ChatTurn, count_tokens
from heedful.server.blocks import Block, BlockReader, Closed, Grew, Opened, Step
from heedful.server.bodies import JSON, json_response, read_body, until_hangup
from heedful.server.failures import Failure, HTTPFailure, anthropic_body, fields_named
from heedful.server.fields import SamplingFields, ask_of, grammar_of, stops_of
from heedful.server.ids import new_id
from heedful.server.message_blocks import choice_of, messages_of_turns, tools_of
from heedful.server.route_bodies import chat_body
from heedful.server.routing import is_routed, model_of, open_routed, route_headers, with_route
from heedful.server.state import state_of

_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


class OutputConfig(Struct, kw_only=True):
    format: dict[str, Any] | None = None


class MessagesBody(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None

    @property
    def chat(self) -> Chat:
        """Raises BadParameter."""
        tools = tools_of(self.tools or [])
        return Chat(messages_of_turns(self.system, self.messages), tools, choice_of(self.tool_choice, tools))

    @property
    def grammar(self) -> GrammarSpec | None:
        return grammar_of(self.output_config.format if self.output_config else None, "output_config.format")


async def create_message(request: Request) -> ASGIApp:
    state = state_of(request)
    body = await read_body(request, MessagesBody)
    with fields_named(_NAMES):
        if not body.max_tokens:
            raise HTTPFailure(400, "must be given, and at least 1", field="max_tokens")
        chat, stops = body.chat, stops_of(body.stop_sequences)
        ask = ask_of(body, state.settings, request.state.salt, grammar=body.grammar, stop=stops)
        if is_routed(state, body.model):
            return await _routed(request, body, chat)
        async with AsyncExitStack() as stack:
            hosted = await stack.enter_async_context(state.pool.lease(body.model))
            turn = await ChatTurn.open(hosted, chat, ask)
            stack.callback(turn.stream.close)
            reply, answered = _Reply(hosted.name), LocalAnswer(turn)
            if body.stream:
                return sse.EventStream(reply.events(answered), _error_event, stack.pop_all())
            return await until_hangup(request, reply.whole(answered))


async def _routed(request: Request, body: MessagesBody, chat: Chat) -> ASGIApp:
    form = body.output_config.format if body.output_config else None
    asked = chat_body(body, chat, stop=body.stop_sequences, response_format=form)
    async with AsyncExitStack() as held:
        routed = await open_routed(request, asked, held)
        reply, answered = _Reply(model_of(state_of(request), routed)), RoutedAnswer(routed)
        if body.stream:
            return sse.EventStream(reply.events(answered), _error_event, held.pop_all(), route_headers(routed))
        return with_route(await until_hangup(request, reply.whole(answered)), routed)


async def count_message_tokens(request: Request) -> Response:
    body = await read_body(request, MessagesBody)
    async with state_of(request).pool.lease(body.model) as hosted:
        return json_response({"input_tokens": await count_tokens(hosted, body.chat)})


class _Reply:
    """One answer on the wire."""

    def __init__(self, model: str) -> None:
        self._blocks = BlockReader(text_prefix="text_", call_prefix="toolu_")
        self._body: JSON = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self, answered: Answered) -> Response:
        self._blocks.read(await answered.complete())
        ending, _ = self._end(answered.ending)
        content = [_content_of(block, block.text, _input_of(block)) for block in self._blocks.blocks]
        return json_response({**self._body, **ending, "content": content, "usage": _usage(answered.ending.usage)})

    async def events(self, answered: Answered) -> AsyncGenerator[bytes, None]:
        usage = _input_usage(answered.prompt_tokens, 0) | {"output_tokens": 0}
        yield _event("message_start", message={**self._body, "usage": usage})
        yield _event("ping")
        async with aclosing(answered.events()) as steps_of_answer:
            async for events in steps_of_answer:
                for step in self._blocks.read(events):
                    yield _step_event(step)
        ending, steps = self._end(answered.ending)
        for step in steps:
            yield _step_event(step)
        yield _event("message_delta", delta=ending, usage=_usage(answered.ending.usage))
        yield _event("message_stop")

    def _end(self, ending: Ending) -> tuple[JSON, list[Step]]:
        """Why it ended, and the steps that the end brings."""
        steps = self._blocks.close(is_cut=ending.is_cut)
        return {"stop_reason": self._stop_reason(ending), "stop_sequence": ending.matched_stop}, steps

    def _stop_reason(self, ending: Ending) -> str:
        if ending.matched_stop is not None:
            return "stop_sequence"
        if ending.is_cut:
            return "max_tokens"
        has_call = any(block.name is not None and block.is_complete for block in self._blocks.blocks)
        return "tool_use" if has_call else "end_turn"


def _event(name: Literal["message_start", "ping", "message_delta", "message_stop"], **fields: Any) -> bytes:
    return sse.event(name, {"type": name, **fields})


def _step_event(step: Step) -> bytes:
    block = step.block
    match step:
        case Opened():
            name, more = "content_block_start", {"content_block": _content_of(block, "", {})}
        case Grew(_, text) if block.name is None:
            name, more = "content_block_delta", {"delta": {"type": "text_delta", "text": text}}
        case Grew(_, text):
            name, more = "content_block_delta", {"delta": {"type": "input_json_delta", "partial_json": text}}
        case Closed():
            name, more = "content_block_stop", {}
    return sse.event(name, {"type": name, "index": block.index, **more})


def _content_of(block: Block, text: str, given: Any) -> JSON:
    """`given`: the input of a call."""
    if block.name is None:
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _input_of(block: Block) -> Any:
    """{} where the call was cut off: the stop reason says so, and is never tool_use then."""
    return msgspec.json.decode(block.text) if block.name is not None and block.is_complete else {}


def _error_event(failure: Failure) -> bytes:
    return sse.event("error", anthropic_body(failure))


def _input_usage(prompt_tokens: int, cached_tokens: int) -> JSON:
    """Anthropic counts what a cache had apart from the rest; the cache here is kept without being asked to."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
    }


def _usage(usage: JSON) -> JSON:
    """Of a chat completion's. Endpoints that a router asks may leave out what they do not know."""
    details = usage.get("prompt_tokens_details") or {}
    read = _input_usage(usage.get("prompt_tokens") or 0, details.get("cached_tokens") or 0)
    return {**read, "output_tokens": usage.get("completion_tokens") or 0, "heedful": usage["heedful"]}
