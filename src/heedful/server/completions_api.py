"""/v1/completions: texts, or token ids, continued; with `echo` and `logprobs` also read (lm-eval's loglikelihoods)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as ListLike
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from heedful.engine.answer import Completion, Logprob, Piece, logprob_of
from heedful.engine.service import AnswerStream
from heedful.request import Sequence
from heedful.server import sse
from heedful.server.asks import Ask, check_ended, open_prompt
from heedful.server.bodies import JSON, json_response, read_body, until_hangup
from heedful.server.chat_api import nth_ask, sse_error, usage_of
from heedful.server.failures import HTTPFailure, fields_named
from heedful.server.fields import SamplingFields, ask_of, grammar_of
from heedful.server.ids import new_id
from heedful.server.merge import merged
from heedful.server.route_completions import routed_completion
from heedful.server.routing import is_routed
from heedful.server.state import state_of
from heedful.text.tokenizer import Tokenizer

MOST_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16  # OpenAI's
MOST_LOGPROBS = 20


class CompletionBody(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | bool | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None


async def completions(request: Request) -> ASGIApp:
    state = state_of(request)
    body = await read_body(request, CompletionBody)
    prompts, ask = prompts_of(body.prompt), _ask_of(body, state.settings, request.state.salt)
    if len(prompts) * body.num_choices > state.settings.most_waiting:
        message = (
            f"{len(prompts)} prompts with n {body.num_choices} are more than may wait ({state.settings.most_waiting})"
        )
        raise HTTPFailure(400, message, field="prompt")
    with fields_named({"messages": "prompt"}):
        if is_routed(state, body.model):
            return await routed_completion(request, body, prompts, ask.sampling.max_tokens)
        async with AsyncExitStack() as stack:
            hosted = await stack.enter_async_context(state.pool.lease(body.model))
            reply = _Reply(hosted.name, hosted.llm.tokenizer, body)
            streams = []
            for prompt in prompts:
                for i in range(body.num_choices):
                    streams.append(await open_prompt(hosted, prompt, nth_ask(ask, i)))
                    stack.callback(streams[-1].close)
            if body.stream:
                return sse.EventStream(reply.events(streams), sse_error, stack.pop_all())
            return await until_hangup(request, reply.whole(streams))


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """One text, several, token ids, or several lists of them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise HTTPFailure(400, "must not be empty", field="prompt")
    if all(isinstance(part, int) for part in prompt):
        return [prompt]
    if len(prompt) > MOST_PROMPTS:
        raise HTTPFailure(400, f"at most {MOST_PROMPTS} prompts in one request", field="prompt")
    if not (all(isinstance(part, str) for part in prompt) or all(isinstance(part, list) for part in prompt)):
        raise HTTPFailure(400, "must be a text, texts, token ids, or lists of token ids", field="prompt")
    return prompt


def _ask_of(body: CompletionBody, settings: Any, salt: str) -> Ask:
    if body.suffix:
        raise HTTPFailure(400, "no model here fills in the middle", field="suffix")
    count = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise HTTPFailure(400, f"must be between 0 and {MOST_LOGPROBS}", field="logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise HTTPFailure(400, "must be at least 1, unless echo is true", field="max_tokens")
    reads_prompt = body.echo and (count is not None or max_tokens == 0)
    prompt_logprobs = (count or 0) if reads_prompt else None
    return ask_of(
        body,
        settings,
        salt,
        grammar=grammar_of(body.response_format),
        max_tokens=max_tokens,
        logprobs=count,
        prompt_logprobs=prompt_logprobs,
    )


class _Reply:
    def __init__(self, model: str, tokenizer: Tokenizer, body: CompletionBody) -> None:
        self._tokenizer = tokenizer
        self._echo = bool(body.echo)
        self._choices = body.num_choices
        self._wants_logprobs = body.logprobs is not None and body.logprobs is not False
        self._with_usage = body.wants_usage
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, streams: list[AnswerStream]) -> Response:
        completions = await asyncio.gather(*(stream.complete() for stream in streams))
        for completion in completions:
            check_ended(completion)
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return json_response({**self._head, "choices": choices, "usage": _usage(completions, self._choices)})

    def _choice(self, index: int, completion: Completion) -> JSON:
        echoed = self._tokenizer.decode(completion.prompt_token_ids) if self._echo else ""
        return {
            "index": index,
            "text": echoed + completion.text,
            "logprobs": self._logprobs(completion) if self._wants_logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.matched_stop,
        }

    async def events(self, streams: list[AnswerStream]) -> AsyncGenerator[bytes, None]:
        columns = [_Columns(self._tokenizer) for _ in streams]
        has_begun = [not self._echo] * len(streams)
        async for index, piece in merged([_pieces(stream) for stream in streams]):
            if not has_begun[index]:  # the prompt's logprobs are there with the first token
                has_begun[index] = True
                yield self._event(index, *self._echoed(streams[index].sequence, columns[index]))
            if piece is None:
                completion = streams[index].completion
                check_ended(completion)
                reasons = {"finish_reason": completion.finish_reason, "stop_reason": completion.matched_stop}
                yield self._event(index, "", None, **reasons)
            elif piece.text or piece.logprobs:
                yield self._event(
                    index, piece.text, columns[index].of(piece.logprobs) if self._wants_logprobs else None
                )
        if self._with_usage:
            completions = [stream.completion for stream in streams]
            yield sse.data({**self._head, "choices": [], "usage": _usage(completions, self._choices)})
        yield sse.DONE

    def _event(self, index: int, text: str, logprobs: JSON | None, **reasons: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **reasons}
        return sse.data({**self._head, "choices": [choice]})

    def _echoed(self, sequence: Sequence, columns: _Columns) -> tuple[str, JSON | None]:
        """The prompt, and its logprobs where they are wanted."""
        ids = sequence.request.prompt_ids
        logprobs = (
            columns.of_prompt(ids, [logprob_of(s) for s in sequence.prompt_logprobs]) if self._wants_logprobs else None
        )
        return self._tokenizer.decode(ids), logprobs

    def _logprobs(self, completion: Completion) -> JSON:
        columns = _Columns(self._tokenizer)
        prompt: JSON = {}
        if completion.prompt_logprobs is not None:
            prompt = columns.of_prompt(completion.prompt_token_ids, completion.prompt_logprobs)
        output = columns.of(completion.logprobs or ())
        return {name: prompt.get(name, []) + column for name, column in output.items()}


class _Columns:
    """OpenAI's old columns: tokens, token_logprobs, top_logprobs, text_offset; offsets go on from call to call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream(continues=True)
        self._offset = 0

    def of_prompt(self, ids: ListLike[int], logprobs: ListLike[Logprob]) -> JSON:
        """The first token has no logprob."""
        first, rest = self.of([Logprob(ids[0], 0.0, ())]), self.of(logprobs)
        first["token_logprobs"], first["top_logprobs"] = [None], [None]
        return {name: first[name] + rest[name] for name in first}

    def of(self, logprobs: ListLike[Logprob]) -> JSON:
        return {
            "tokens": [self._text(logprob.token_id) for logprob in logprobs],
            "token_logprobs": [max(logprob.logprob, -9999.0) for logprob in logprobs],
            "top_logprobs": [{self._text(token): max(value, -9999.0) for token, value in p.top} for p in logprobs],
            "text_offset": [self._advance(logprob.token_id) for logprob in logprobs],
        }

    def _advance(self, token_id: int) -> int:
        """Where the token begins; one in the middle of a character, where that character does."""
        offset = self._offset
        self._offset += len(self._decoder.push(token_id))
        return offset

    def _text(self, token_id: int) -> str:
        """Part of a character is written as OpenAI does: bytes:\\xe2\\x80."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


async def _pieces(stream: AnswerStream) -> AsyncGenerator[Piece, None]:
    async for piece in stream:
        yield piece


def _usage(completions: ListLike[Completion], choices_per_prompt: int) -> JSON:
    """Every prompt counts, once for all its choices."""
    usage = usage_of(completions)
    usage["prompt_tokens"] = sum(len(c.prompt_token_ids) for c in completions[::choices_per_prompt])
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return usage
