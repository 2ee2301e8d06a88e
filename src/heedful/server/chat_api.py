"""/v1/chat/completions, as OpenAI has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from heedful.engine.answer import Completion, Logprob
from heedful.errors import BadParameter
from heedful.router.policy import AUTO
from heedful.server import sse
from heedful.server.asks import Ask, Chat, ChatTurn, Delta
from heedful.server.bodies import JSON, json_response, read_body, until_hangup
from heedful.server.failures import HTTPFailure, openai_body
from heedful.server.fields import MOST_TOP_LOGPROBS, SamplingFields, ask_of, grammar_of
from heedful.server.ids import new_id
from heedful.server.merge import merged
from heedful.server.pool import Answering
from heedful.server.state import state_of
from heedful.text.tokenizer import Tokenizer
from heedful.text.tool_calls import CallArguments, CallBegin, Event, TextDelta
from heedful.text.tool_formats import checked_choice, checked_tools


class ChatBody(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


async def chat_completions(request: Request) -> ASGIApp:
    state = state_of(request)
    body = await read_body(request, ChatBody)
    if state.router is not None and body.model == AUTO:
        from heedful.server.routing import routed_chat  # it needs this module

        return await routed_chat(request, body)
    chat, ask = chat_of(body), chat_ask_of(body, state.settings, request.state.salt)
    async with AsyncExitStack() as stack:
        hosted = await stack.enter_async_context(state.pool.lease(body.model))
        reply = ChatReply(hosted.name, hosted.llm.tokenizer, with_usage=body.wants_usage)
        turns = await open_turns(hosted, chat, ask, body.num_choices, stack)
        if body.stream:
            return sse.EventStream(events_of(reply.chunks(turns)), sse_error, stack.pop_all())
        return json_response(await until_hangup(request, reply.whole(turns)))


async def events_of(chunks: AsyncGenerator[JSON, None]) -> AsyncGenerator[bytes, None]:
    """Chunks as they are sent, and the mark of their end."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield sse.data(chunk)
    yield sse.DONE


async def open_turns(hosted: Answering, chat: Chat, ask: Ask, count: int, held: AsyncExitStack) -> list[ChatTurn]:
    """`held`: closes the turns' streams."""
    turns = []
    for i in range(count):
        turns.append(await ChatTurn.open(hosted, chat, nth_ask(ask, i)))
        held.callback(turns[-1].stream.close)
    return turns


def chat_of(body: ChatBody) -> Chat:
    """Raises BadParameter for malformed tools and choices."""
    tools = checked_tools(body.tools or [])
    return Chat(messages_of(body.messages), tools, checked_choice(body.tool_choice, tools))


def messages_of(messages: list[JSON]) -> list[JSON]:
    """As templates know them: a developer is the system."""
    if not messages:
        raise BadParameter("messages", "must be a list with at least one message")
    return [_message(message) for message in messages]


def _message(message: JSON) -> JSON:
    """Clients send the null content of an answer that had none back."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    has_none = message.get("content") is None and not message.get("tool_calls")
    return {**message, "role": role, **({"content": ""} if has_none else {})}


def nth_ask(ask: Ask, i: int) -> Ask:
    """Several choices of one request must differ, and the same request must give the same ones."""
    seed = ask.sampling.seed
    return ask if seed is None or i == 0 else replace(ask, sampling=replace(ask.sampling, seed=(seed + i) % (1 << 63)))


def sse_error(failure: Any) -> bytes:
    return sse.data(openai_body(failure))


def chat_ask_of(body: ChatBody, settings: Any, salt: str) -> Ask:
    if body.max_tokens == 0 or (body.max_completion_tokens is not None and body.max_completion_tokens < 1):
        raise HTTPFailure(400, "must be at least 1", field="max_tokens")
    top = body.top_logprobs
    if top and not (body.logprobs and 0 <= top <= MOST_TOP_LOGPROBS):
        message = f"must be between 0 and {MOST_TOP_LOGPROBS}, with logprobs true"
        raise HTTPFailure(400, message, field="top_logprobs")
    more = {
        "logprobs": (top or 0) if body.logprobs else None,
        "max_tokens": body.max_completion_tokens or body.max_tokens,
    }
    return ask_of(body, settings, salt, grammar=grammar_of(body.response_format), **more)


class ChatReply:
    """One request's answers on the wire."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, with_usage: bool) -> None:
        self._tokenizer = tokenizer
        self._with_usage = with_usage
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model}

    async def whole(self, turns: list[ChatTurn]) -> JSON:
        events = await asyncio.gather(*(turn.complete() for turn in turns))
        choices = [self._choice(i, turn, mine) for i, (turn, mine) in enumerate(zip(turns, events, strict=True))]
        usage = usage_of([turn.completion for turn in turns])
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, index: int, turn: ChatTurn, events: Sequence[Event]) -> JSON:
        message: JSON = {"role": "assistant", **message_of(events), "refusal": None}
        logprobs = turn.completion.logprobs
        return {
            "index": index,
            "message": message,
            "logprobs": None if logprobs is None else {"content": self._logprobs(logprobs), "refusal": None},
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.completion.matched_stop,
        }

    async def chunks(self, turns: list[ChatTurn]) -> AsyncGenerator[JSON, None]:
        head = {**self._head, "object": "chat.completion.chunk"}
        if self._with_usage:
            head["usage"] = None
        for index in range(len(turns)):
            yield {**head, "choices": [_chunk(index, {"role": "assistant", "content": ""})]}
        writers = [_CallWriter() for _ in turns]
        async for index, delta in merged([turn.deltas() for turn in turns]):
            if delta is not None:
                yield {**head, "choices": [self._chunk(index, delta, writers[index])]}
                continue
            turn = turns[index]
            reasons = {"finish_reason": turn.finish_reason, "stop_reason": turn.completion.matched_stop}
            yield {**head, "choices": [{**_chunk(index, {}), **reasons}]}
        if self._with_usage:
            yield {**head, "choices": [], "usage": usage_of([turn.completion for turn in turns])}

    def _chunk(self, index: int, delta: Delta, writer: _CallWriter) -> JSON:
        chunk = _chunk(index, writer.delta(delta.events))
        if delta.logprobs:
            chunk["logprobs"] = {"content": self._logprobs(delta.logprobs), "refusal": None}
        return chunk

    def _logprobs(self, logprobs: Sequence[Logprob]) -> list[JSON]:
        return [
            {
                **self._token(logprob.token_id, logprob.logprob),
                "top_logprobs": [self._token(token, value) for token, value in logprob.top],
            }
            for logprob in logprobs
        ]

    def _token(self, token_id: int, logprob: float) -> JSON:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


class _CallWriter:
    """Events as deltas of one choice."""

    def delta(self, events: Sequence[Event]) -> JSON:
        delta: JSON = {}
        if text := "".join(event.text for event in events if isinstance(event, TextDelta)):
            delta["content"] = text
        calls = [call for event in events if (call := self._call(event)) is not None]
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _call(self, event: Event) -> JSON | None:
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            return {"index": event.index, "id": new_id("call_"), "type": "function", "function": function}
        if isinstance(event, CallArguments):
            return {"index": event.index, "function": {"arguments": event.json_text}}
        return None


def message_of(events: Sequence[Event]) -> JSON:
    """Content and tool calls of a whole answer."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls: list[JSON] = []
    for event in events:
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": new_id("call_"), "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.json_text
    if not calls:
        return {"content": text}
    return {"content": (text.strip() and text) or None, "tool_calls": calls}


def usage_of(completions: Sequence[Completion]) -> JSON:
    """Tokens and receipts; of several choices the prompt counts once, as OpenAI has it."""
    receipts = [completion.receipt for completion in completions]
    output = sum(receipt.output_tokens for receipt in receipts)
    first = receipts[0]
    right = sum(receipt.guesses.right for receipt in receipts)
    wrong = sum(receipt.guesses.made for receipt in receipts) - right
    details = {"rejected_prediction_tokens": wrong, "accepted_prediction_tokens": right, "reasoning_tokens": 0}
    usage: JSON = {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": first.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": details,
        "heedful": first.to_dict(),
    }
    if len(receipts) > 1:
        usage["heedful_choices"] = [receipt.to_dict() for receipt in receipts]
    if completions[0].dropped_tokens:
        usage["heedful"]["dropped_tokens"] = completions[0].dropped_tokens
    return usage


def _chunk(index: int, delta: JSON) -> JSON:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
