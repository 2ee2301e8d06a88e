"""Targets behind an OpenAI-speaking endpoint: asked within time, again where that helps, left alone where it does not.

    target = OpenAITarget(spec)          # ${VAR} and the key are looked up in the environment here
    opened = await target.open(asked, held)

A stream is open once its first event is there; before that a failure can still go to somebody else. Events are passed
on one by one, as they come. Closing an answer closes the connection, which stops the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from heedful import __version__
from heedful.decide.http_client import Endpoint
from heedful.errors import BadParameter, PolicyError, TargetFailed
from heedful.router.breaker import Breaker
from heedful.router.policy import OpenAISpec
from heedful.router.policy_file import VARIABLE
from heedful.router.signals import JSON, Asked
from heedful.router.sse_reader import EventTooLong, SseReader
from heedful.router.target import Opened, WholeAnswer

if TYPE_CHECKING:
    import httpx

MOST_ANSWER_BYTES = 64 << 20
MOST_ERROR_BYTES = 64 << 10
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0
CONNECT_S = 10.0
_CALLERS_FAULT = frozenset({400, 413, 415, 422})
_DONE = "[DONE]"

Sleep = Callable[[float], Awaitable[None]]


class OpenAITarget:
    """`transport`, `sleep` and `clock` are the tests'. For one loop."""

    def __init__(
        self,
        spec: OpenAISpec,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises PolicyError where the environment lacks what the policy names."""
        if not find_spec("httpx"):
            raise PolicyError(f"targets.{spec.name}", "needs httpx", "pip install 'heedful[router]'")
        self._spec = spec
        self._base_url = _expanded(spec)
        self._headers = {"user-agent": f"heedful/{__version__}", **_authorization(spec)}
        self._transport = transport
        self._sleep = sleep
        self._client: httpx.AsyncClient | None = None
        self.breaker = Breaker(spec.breaker, clock)

    books_itself = False

    @property
    def name(self) -> str:
        return self._spec.name

    async def open(self, asked: Asked, held: AsyncExitStack) -> Opened:
        if not self.breaker.admits():
            raise self.failed(
                "is left alone after failures",
                "Wait until it may be tried again.",
                status=503,
                retry_after=self.breaker.seconds_left,
            )
        try:
            opened = await self._with_retries(asked, held)
        except TargetFailed:
            self.breaker.failed()
            raise
        except BadParameter:
            self.breaker.succeeded()  # it is there, and says what is wrong with the request
            raise
        except BaseException:
            self.breaker.left()
            raise
        self.breaker.succeeded()
        return opened

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _with_retries(self, asked: Asked, held: AsyncExitStack) -> Opened:
        for attempt in range(self._spec.retries + 1):
            async with AsyncExitStack() as mine:
                try:
                    opened = await self._attempt(asked, mine)
                except _Passing as passing:
                    wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt)
                    wanted = passing.failure.retry_after
                    if attempt == self._spec.retries or (wanted or 0.0) > LONGEST_WAIT_S:
                        raise passing.failure from passing.__cause__
                    wait = wait if wanted is None else wanted
                else:
                    held.push_async_exit(mine.pop_all())
                    return opened
            await self._sleep(wait)
        raise AssertionError(self._spec)

    async def _attempt(self, asked: Asked, held: AsyncExitStack) -> Opened:
        """Raises _Passing where another attempt may go better."""
        import httpx

        began = time.perf_counter()
        client = self._connected()
        url = f"{self._base_url}/chat/completions"
        try:
            request = client.build_request("POST", url, json=self._body(asked), headers=self._headers)
            response = await client.send(request, stream=True)
            held.push_async_callback(response.aclose)
            if response.status_code != 200:
                raise await self._refused(response)
            pieces = _bounded(response.aiter_bytes(), MOST_ANSWER_BYTES)
            if asked.stream:
                stream = _Stream(self, pieces, began)
                await stream.begin(response.headers.get("content-type", ""))
                return stream
            return WholeAnswer(await self._whole(pieces, began))
        except httpx.HTTPError as error:
            raise _Passing(self.broken(error)) from error

    async def _whole(self, pieces: AsyncIterator[bytes], began: float) -> JSON:
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                data = b"".join([piece async for piece in pieces])
        except TimeoutError as error:
            raise _Passing(self.broken(error)) from error
        body = self.read_json(data)
        choices = body.get("choices")
        given = choices if isinstance(choices, list) and choices else [None]
        if not all(isinstance(one, dict) and isinstance(one.get("message"), dict) for one in given):
            raise self.failed("answers something that is no chat completion")
        seconds = time.perf_counter() - began
        return {**body, "usage": self.usage(body.get("usage"), seconds, seconds)}

    def read_json(self, data: bytes | str) -> JSON:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise self.failed("answers something that is no JSON") from None
        if not isinstance(body, dict):
            raise self.failed("answers JSON that is no object")
        return body

    def usage(self, given: Any, first_token: float, total: float) -> JSON:
        """What the endpoint says it used, with a receipt: its own where it is a heedful, else with unknowns for what it
        does not say."""
        usage: JSON = dict(given) if isinstance(given, Mapping) else {}
        inner = usage.get("heedful")
        if isinstance(inner, Mapping) and isinstance(inner.get("visits"), Mapping):
            usage["heedful"] = {**inner, "remote": self.name}
            return usage
        details = usage.get("prompt_tokens_details")
        unknown = dict.fromkeys(("visits", "kv", "weights", "flops", "energy"))
        usage["heedful"] = {
            "model": self._spec.model,
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens") if isinstance(details, Mapping) else None,
            "output_tokens": usage.get("completion_tokens"),
            **unknown,
            "seconds": {"first_token": first_token, "total": total},
            "remote": self.name,
        }
        return usage

    def failed(self, problem: str, remedy: str = "", **more: Any) -> TargetFailed:
        return TargetFailed(self.name, problem, remedy or _LOOK, **more)

    def broken(self, error: Exception) -> TargetFailed:
        """What went wrong on the way."""
        import httpx

        if isinstance(error, httpx.TimeoutException | TimeoutError):
            remedy = "Raise timeout_s."
            return self.failed(f"gave no sign within {self._spec.timeout_s:g} s", remedy, status=504)
        return self.failed(f"could not be reached or broke off ({type(error).__name__})")

    def _body(self, asked: Asked) -> JSON:
        """The caller's, for the endpoint's model; our own fields mean nothing there."""
        body = {key: value for key, value in asked.body.items() if key != "heedful"}
        body["model"] = self._spec.model
        if asked.stream:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return body

    def _connected(self) -> httpx.AsyncClient:
        import httpx

        if self._client is None:
            seconds = self._spec.timeout_s
            timeout = httpx.Timeout(seconds, connect=min(CONNECT_S, seconds))
            self._client = httpx.AsyncClient(timeout=timeout, transport=self._transport, follow_redirects=False)
        return self._client

    async def _refused(self, response: httpx.Response) -> Exception:
        """What an answer of another status means. Raises nothing."""
        status = response.status_code
        if status in (401, 403):  # its words may repeat the key
            variable = self._spec.api_key_env or "api_key_env"
            return self.failed(f"refuses the key (HTTP {status})", f"Check {variable}.")
        said = await self._said(response)
        if status in _CALLERS_FAULT:
            return BadParameter("body", f"target {self.name} refuses it (HTTP {status}): {said}")
        if status in (408, 429) or status >= 500:
            wait = _retry_after(response.headers)
            kind = 429 if status == 429 else 502
            return _Passing(self.failed(f"answers HTTP {status}: {said}", status=kind, retry_after=wait))
        return self.failed(f"answers HTTP {status}: {said}", "Check base_url and model of the policy.")

    async def _said(self, response: httpx.Response) -> str:
        data = b""
        with suppress(TimeoutError):  # what has come by then will do
            async with asyncio.timeout(self._spec.timeout_s):
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > MOST_ERROR_BYTES:
                        break
        try:
            error = json.loads(data)["error"]
            text = str(error.get("message", "")) if isinstance(error, Mapping) else str(error)
        except (ValueError, KeyError, TypeError, RecursionError):
            text = data[:300].decode("utf-8", "replace")
        return re.sub(r"[^\x20-\x7e\u00a0-\uffff]+", " ", text)[:300].strip() or "no words"


_LOOK = "Look at that endpoint, or name a fallback for it in the policy."


class _Passing(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, failure: TargetFailed) -> None:
        self.failure = failure
        super().__init__(failure.message)


class _Stream:
    """An endpoint's events as chunks."""

    def __init__(self, target: OpenAITarget, pieces: AsyncIterator[bytes], began: float) -> None:
        self._target = target
        self._pieces = pieces
        self._began = began
        self._reader = SseReader()
        self._waiting: list[str] = []
        self._first_token = 0.0
        self._unfinished: set[int] = set()
        self._has_choices = False
        self._usage: Any = None
        self._head: JSON = {}

    async def begin(self, content_type: str) -> None:
        """Waits for the first event. Raises TargetFailed where what comes is none."""
        if "text/event-stream" not in content_type.lower():
            raise self._target.failed(f"answers {content_type[:60]!r} where a stream was asked for")
        while not self._waiting:
            if not await self._read():
                raise self._target.failed("ends its stream before the first event")
        if self._waiting[0] != _DONE:
            self._checked(self._waiting[0])
        self._first_token = time.perf_counter() - self._began

    async def whole(self) -> JSON:
        raise AssertionError("it streams")

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        import httpx

        try:
            while True:
                while self._waiting:
                    text = self._waiting.pop(0)
                    if text == _DONE:
                        yield self._last()
                        return
                    chunk = self._chunk(text)
                    if chunk is not None:
                        yield chunk
                if not await self._read():
                    break
            if not self._has_choices or self._unfinished:
                raise self._target.failed("ends its stream in the middle of the answer")
        except httpx.HTTPError as error:
            self._target.breaker.failed()
            raise self._target.broken(error) from error
        except TargetFailed:
            self._target.breaker.failed()
            raise
        yield self._last()

    async def _read(self) -> bool:
        """Whether anything came."""
        try:
            piece = await anext(self._pieces)
            self._waiting += self._reader.push(piece)
        except StopAsyncIteration:
            return False
        except (EventTooLong, UnicodeDecodeError):
            raise self._target.failed("sends a stream that is none") from None
        return True

    def _checked(self, text: str) -> JSON:
        """A chunk. Raises TargetFailed."""
        body = self._target.read_json(text)
        choices = body.get("choices")
        if "error" in body or not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise self._target.failed(f"sends {_error_text(body)}")
        return body

    def _chunk(self, text: str) -> JSON | None:
        """None for the event that has only the usage: it comes last, with a receipt."""
        body = self._checked(text)
        choices = body["choices"]
        usage = body.pop("usage", None)
        self._usage = usage or self._usage
        self._head = {key: body[key] for key in ("id", "object", "created", "model") if key in body} or self._head
        for choice in choices:
            self._has_choices = True
            index = choice.get("index", 0)
            (self._unfinished.discard if choice.get("finish_reason") else self._unfinished.add)(index)
        return body if choices else None

    def _last(self) -> JSON:
        total = time.perf_counter() - self._began
        return {**self._head, "choices": [], "usage": self._target.usage(self._usage, self._first_token, total)}


async def _bounded(pieces: AsyncIterator[bytes], most: int) -> AsyncGenerator[bytes, None]:
    import httpx

    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > most:
            raise httpx.RemoteProtocolError(f"more than {most >> 20} MiB")
        yield piece


def _error_text(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    text = str(error.get("message", "")) if isinstance(error, Mapping) else str(error) if error else ""
    return f"an error: {text[:200]}" if text else "something that is no chunk"


def _expanded(spec: OpenAISpec) -> str:
    """The URL with its variables. Raises PolicyError, without any variable's value in it."""
    where = f"targets.{spec.name}.base_url"
    for name in VARIABLE.findall(spec.base_url):
        if not os.environ.get(name):
            raise PolicyError(where, f"needs {name}, which the environment does not have", f"export {name}=…")
    url = VARIABLE.sub(lambda found: os.environ[found[1]], spec.base_url)
    try:
        Endpoint.parse(url, "/chat/completions")
    except BadParameter as problem:
        raise PolicyError(where, problem.message.partition(": ")[2], problem.remedy) from None
    return url.rstrip("/").removesuffix("/chat/completions")


def _authorization(spec: OpenAISpec) -> dict[str, str]:
    if spec.api_key_env is None:
        return {}
    key = os.environ.get(spec.api_key_env, "")
    where = f"targets.{spec.name}.api_key_env"
    if not key:
        raise PolicyError(where, f"{spec.api_key_env} is not in the environment", f"export {spec.api_key_env}=…")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise PolicyError(where, f"what {spec.api_key_env} holds is no key: it must be printable ASCII without spaces")
    return {"authorization": f"Bearer {key}"}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, seconds) if seconds == seconds else None
