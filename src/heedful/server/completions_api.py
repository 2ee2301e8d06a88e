"""/v1/completions: texts, or token ids, continued; with `echo` and `logprobs` also read (lm-eval's loglikelihoods)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from heedful.engine.answer import Completion, Logprob, Piece
from heedful.engine.service import AnswerStream
from heedful.server import sse
from heedful.server.asks import Ask, open_prompt
from heedful.server.bodies import JSON, json_response, read_body, until_hangup
from heedful.server.chat_api import nth_ask, sse_error, usage_of
from heedful.server.failures import HTTPFailure
from heedful.server.fields import SamplingFields, ask_of, grammar_of
from heedful.server.ids import new_id
from heedful.server.merge import merged
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
        if self._echo:
            for index, stream in enumerate(streams):
                text = self._tokenizer.decode(stream.sequence.request.prompt_ids)
                yield self._event(index, text)
        offsets = [0] * len(streams)
        async for index, piece in merged([_pieces(stream) for stream in streams]):
            if piece is None:
                yield self._event(index, "", finish_reason=streams[index].completion.finish_reason)
            elif piece.text or piece.logprobs:
                shown = self._columns(piece.logprobs, offsets[index]) if self._wants_logprobs else None
                offsets[index] += len(piece.text)
                yield self._event(index, piece.text, logprobs=shown)
        if self._with_usage:
            completions = [stream.completion for stream in streams]
            yield sse.data({**self._head, "choices": [], "usage": _usage(completions, self._choices)})
        yield sse.DONE

    def _event(self, index: int, text: str, *, logprobs: JSON | None = None, finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.data({**self._head, "choices": [choice]})

    def _logprobs(self, completion: Completion) -> JSON:
        """OpenAI's old columns; the first token of an echoed prompt has no logprob."""
        output = self._columns(completion.logprobs or (), 0)
        if completion.prompt_logprobs is None:
            return output
        first = self._columns((Logprob(completion.prompt_token_ids[0], 0.0, ()),), 0)
        first["token_logprobs"], first["top_logprobs"] = [None], [None]
        rest = self._columns(completion.prompt_logprobs, len(first["tokens"][0]))
        prompt_len = len(self._tokenizer.decode(completion.prompt_token_ids))
        output["text_offset"] = [prompt_len + offset for offset in output["text_offset"]]
        return {name: first[name] + rest[name] + output[name] for name in output}

    def _columns(self, logprobs: Sequence[Logprob], offset: int) -> JSON:
        tokens = [self._text(logprob.token_id) for logprob in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(logprob.logprob, -9999.0) for logprob in logprobs],
            "top_logprobs": [{self._text(token): max(value, -9999.0) for token, value in p.top} for p in logprobs],
            "text_offset": offsets,
        }

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


def _usage(completions: Sequence[Completion], choices_per_prompt: int) -> JSON:
    """Every prompt counts, once for all its choices."""
    usage = usage_of(completions)
    usage["prompt_tokens"] = sum(len(c.prompt_token_ids) for c in completions[::choices_per_prompt])
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return usage
