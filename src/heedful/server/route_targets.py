"""The router's targets that run in this server: its models and its deciders. Tools are in route_mcp.py."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack

import msgspec

from heedful.router.policy import DeciderSpec, LocalSpec, McpSpec, OpenAISpec, TargetSpec
from heedful.router.replicas import remote_target
from heedful.router.signals import JSON, Asked
from heedful.router.target import Opened, Target, WholeAnswer
from heedful.server.asks import ChatTurn
from heedful.server.chat_api import ChatBody, ChatReply, chat_ask_of, chat_of, open_turns
from heedful.server.deciders import decide
from heedful.server.ids import new_id
from heedful.server.route_mcp import McpTarget
from heedful.server.state import ServerState


def make_target(spec: TargetSpec, state: ServerState) -> Target:
    """Raises PolicyError where the environment, or this installation, lacks what it needs."""
    if isinstance(spec, LocalSpec):
        return LocalTarget(spec, state)
    if isinstance(spec, DeciderSpec):
        return DeciderTarget(spec, state)
    if isinstance(spec, OpenAISpec):
        return remote_target(spec)
    assert isinstance(spec, McpSpec), spec
    return McpTarget(spec)


class LocalTarget:
    """A chat model of this server."""

    books_itself = True

    def __init__(self, spec: LocalSpec, state: ServerState) -> None:
        self._spec = spec
        self._state = state

    @property
    def name(self) -> str:
        return self._spec.name

    async def open(self, asked: Asked, held: AsyncExitStack) -> Opened:
        body = msgspec.convert(asked.body, ChatBody)
        chat, ask = chat_of(body), chat_ask_of(body, self._state.settings, asked.salt)
        hosted = await held.enter_async_context(self._state.pool.lease(self._spec.model))
        reply = ChatReply(hosted.name, hosted.llm.tokenizer, with_usage=True)
        turns = await open_turns(hosted, chat, ask, body.num_choices, held)
        return _LocalAnswer(reply, turns)

    async def aclose(self) -> None:
        """The server's pool has the model."""


class _LocalAnswer:
    def __init__(self, reply: ChatReply, turns: list[ChatTurn]) -> None:
        self._reply = reply
        self._turns = turns

    async def whole(self) -> JSON:
        return await self._reply.whole(self._turns)

    def chunks(self) -> AsyncGenerator[JSON, None]:
        return self._reply.chunks(self._turns)


class DeciderTarget:
    """A decision as the answer: the label's text, and no token of it generated."""

    books_itself = False

    def __init__(self, spec: DeciderSpec, state: ServerState, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._state = state
        self._clock = clock

    @property
    def name(self) -> str:
        return self._spec.name

    async def open(self, asked: Asked, held: AsyncExitStack) -> Opened:
        question = self._spec.question
        decision = await decide(self._state, self._spec.model, asked.text, (question,), asked.salt)
        answer = decision.answers[question.name]
        label = str(answer.value)
        receipt = {**decision.receipt, "answer": answer.to_dict()}
        message = {"role": "assistant", "content": self._spec.say.get(label, label), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        body = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(self._clock()),
            "model": decision.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": decision.input_tokens,
                "completion_tokens": 0,
                "total_tokens": decision.input_tokens,
                "heedful": receipt,
            },
        }
        return WholeAnswer(body)

    async def aclose(self) -> None:
        """The server's pool has the decider."""
