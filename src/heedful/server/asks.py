"""What a request to any of the APIs asks of a model, and the events that come back. Knows no wire format.

turn = await ChatTurn.open(hosted, ask)
async for delta in turn.deltas(): ...
turn.completion, turn.finish_reason
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from heedful.engine.answer import Completion, Logprob
from heedful.engine.llm import LLM
from heedful.engine.service import AnswerStream
from heedful.errors import BadParameter, ContextOverflow, EngineStopped
from heedful.request import CachePolicy, GrammarSpec, Request, SamplingParams
from heedful.server.failures import HTTPFailure
from heedful.server.pool import Answering
from heedful.text.tool_calls import CallEnd, Event, TextDelta, ToolCallParser, tool_grammar
from heedful.text.tool_formats import ToolChoice, ToolFormat, tool_format, with_tools

MOST_TEXT_CHARS = 1 << 20
"""Of a text that is encoded; a million take a second or two, and the tokenizer lets nobody else run meanwhile."""
TRUNCATED_TIMES = 4
MOST_MESSAGES = 5_000


@dataclass(frozen=True)
class Ask:
    """What prompts and chats have in common."""

    sampling: SamplingParams
    policy: CachePolicy
    salt: str = ""
    speculate: bool = False
    truncate: bool = False
    grammar: GrammarSpec | None = None
    stream: bool = False


@dataclass(frozen=True)
class Chat:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))


@dataclass(frozen=True)
class Delta:
    """What a step added to a chat's answer."""

    events: tuple[Event, ...]
    logprobs: tuple[Logprob, ...] = ()


async def open_prompt(
    hosted: Answering, prompt: str | Sequence[int], ask: Ask, *, wants_pieces: bool | None = None
) -> AnswerStream:
    """A text, or token ids, to be continued."""
    llm = hosted.llm
    check_length(llm, prompt, ask)
    ids = await asyncio.to_thread(llm.tokenizer.encode, prompt) if isinstance(prompt, str) else list(prompt)
    kept = llm.newest(ids, llm.prompt_room(ask.sampling, ask.policy)) if ask.truncate else ids
    return await _open(hosted, kept, ask, dropped=len(ids) - len(kept), continues=True, wants_pieces=wants_pieces)


async def count_tokens(hosted: Answering, chat: Chat) -> int:
    """Of the prompt that the conversation is, tools included. Raises what rendering does."""
    return len(await asyncio.to_thread(_rendered, hosted.llm, chat, _format_of(hosted.llm)))


class ChatTurn:
    """An assistant's answer in a chat, tool calls in it recognised."""

    def __init__(self, stream: AnswerStream, parser: ToolCallParser | None) -> None:
        self._stream = stream
        self._parser = parser
        self._has_calls = False

    @staticmethod
    async def open(hosted: Answering, chat: Chat, ask: Ask) -> ChatTurn:
        """Raises what rendering, the grammar and the engine do."""
        llm = hosted.llm
        how = _format_of(llm)
        ids, dropped = await asyncio.to_thread(_chat_ids, llm, chat, ask, how)
        calls = bool(chat.tools) and chat.choice.mode != "none"
        parser = None
        kept_special: frozenset[int] = frozenset()
        if calls:
            parser = ToolCallParser(how, [tool["function"]["name"] for tool in chat.tools])
            marker_ids = (llm.tokenizer.id_of(text) for text in how.markers)
            kept_special = frozenset(token for token in marker_ids if token is not None)
        grammar_field = "response_format"
        if calls and chat.choice.mode == "required":
            if ask.grammar is not None:
                raise HTTPFailure(400, "cannot be combined with a tool call that is required", field="response_format")
            sampling = replace(ask.sampling, stop=())  # a stop string would leave half a call
            ask = replace(ask, sampling=sampling, grammar=tool_grammar(chat.tools, chat.choice, how, llm.tokenizer))
            grammar_field = "tools"
        stream = await _open(
            hosted,
            ids,
            ask,
            dropped=dropped,
            continues=False,
            kept_special=kept_special,
            grammar_field=grammar_field,
        )
        return ChatTurn(stream, parser)

    @property
    def completion(self) -> Completion:
        return self._stream.completion

    @property
    def stream(self) -> AnswerStream:
        return self._stream

    @property
    def finish_reason(self) -> str:
        """OpenAI's word; "tool_calls" only for an answer that came to its own end."""
        reason = self.completion.finish_reason
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Text and calls as they come; the stream closes with this iterator."""
        try:
            async for piece in self._stream:
                events = self._read(piece.text)
                if events or piece.logprobs:
                    yield Delta(events, piece.logprobs)
            check_ended(self.completion)
            if self._parser is not None and (events := self._noted(self._parser.flush())):
                yield Delta(events)
        finally:
            self._stream.close()

    async def complete(self) -> tuple[Event, ...]:
        """All events of an answer that was opened without `stream`."""
        completion = await self._stream.complete()
        check_ended(completion)
        if self._parser is None:
            return (TextDelta(completion.text),) if completion.text else ()
        return self._noted([*self._parser.push(completion.text), *self._parser.flush()])

    def _read(self, text: str) -> tuple[Event, ...]:
        if not text:
            return ()
        return (TextDelta(text),) if self._parser is None else self._noted(self._parser.push(text))

    def _noted(self, events: list[Event]) -> tuple[Event, ...]:
        self._has_calls = self._has_calls or any(isinstance(event, CallEnd) for event in events)
        return tuple(events)


def _format_of(llm: LLM) -> ToolFormat:
    template = llm.tokenizer.chat_template
    return tool_format(template.source if template else None, llm.tokenizer.control_texts)


def _told_tools(chat: Chat, how: ToolFormat) -> list[dict[str, Any]] | None:
    """Those that the template itself tells of."""
    return chat.tools if how.is_native and chat.tools and chat.choice.mode != "none" else None


def _rendered(llm: LLM, chat: Chat, how: ToolFormat) -> list[int]:
    check_messages(chat.messages)
    return llm.encode_chat(with_tools(chat.messages, chat.tools, chat.choice, how), _told_tools(chat, how))


def check_ended(completion: Completion) -> None:
    """Raises EngineStopped for an answer that the server's end has cut off: it is none."""
    if completion.finish_reason == "cancelled":
        raise EngineStopped


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what would hold everybody up while it is rendered and encoded."""
    if len(messages) > MOST_MESSAGES:
        raise HTTPFailure(400, f"has {len(messages):,}; at most {MOST_MESSAGES:,} are read", field="messages")
    if (chars := sum(len(_content_text(message)) for message in messages)) > MOST_TEXT_CHARS:
        message = f"has {chars:,} characters; at most {MOST_TEXT_CHARS:,} are read"
        raise HTTPFailure(400, message, field="messages")


def check_length(llm: LLM, text: str | Sequence[int], ask: Ask) -> None:
    """Refuse what cannot fit before it is encoded, which would hold everybody up. Raises ContextOverflow.

    With `truncate` a text may be some times as long as what is kept of it.
    """
    longest = llm.engine.longest(ask.policy)
    least = len(text) if not isinstance(text, str) else len(text) // llm.tokenizer.longest_token_bytes
    most = min(MOST_TEXT_CHARS, longest * (TRUNCATED_TIMES if ask.truncate else 1))
    if least > most or (isinstance(text, str) and len(text) > MOST_TEXT_CHARS):
        raise ContextOverflow(least, min(longest, MOST_TEXT_CHARS))


def _content_text(message: Mapping[str, Any]) -> str:
    """The text of a message's content, whether it comes in parts or not."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _chat_ids(llm: LLM, chat: Chat, ask: Ask, how: ToolFormat) -> tuple[list[int], int]:
    """Token ids of the conversation, and how many were dropped to make it fit."""
    check_messages(chat.messages)
    check_length(llm, "".join(map(_content_text, chat.messages)), ask)
    ids = _rendered(llm, chat, how)
    if not ask.truncate:
        return ids, 0
    messages = with_tools(chat.messages, chat.tools, chat.choice, how)
    kept = llm.fit(list(messages), llm.prompt_room(ask.sampling, ask.policy), _told_tools(chat, how))
    return kept, len(ids) - len(kept)


async def _open(
    hosted: Answering,
    ids: Sequence[int],
    ask: Ask,
    *,
    dropped: int,
    continues: bool,
    kept_special: frozenset[int] = frozenset(),
    wants_pieces: bool | None = None,
    grammar_field: str = "response_format",
) -> AnswerStream:
    service, grammars = hosted.service, hosted.grammars
    assert service is not None, hosted.name
    assert grammars is not None, hosted.name
    grammar = None
    if ask.grammar is not None:
        if ask.sampling.ignore_eos:
            raise BadParameter("response_format", "cannot be combined with ignore_eos")
        grammar = await asyncio.to_thread(grammars.compile, ask.grammar, grammar_field)
    request = Request(tuple(ids), ask.sampling, ask.policy, ask.salt, ask.speculate, hosted.adapter)
    return await service.open(
        request,
        grammar=grammar,
        continues=continues,
        kept_special=kept_special,
        dropped_tokens=dropped,
        wants_pieces=ask.stream if wants_pieces is None else wants_pieces,
    )
