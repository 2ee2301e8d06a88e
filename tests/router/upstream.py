"""An OpenAI-speaking endpoint that behaves as badly as its path says, over a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

CHUNKS = [
    {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"id": "c", "choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": None}]},
    {"id": "c", "choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None}]},
    {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"id": "c", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}},
]
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "upstream",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
}


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\r\n\r\n" for e in events)


class Upstream:
    """Counts requests and hang-ups by mode; keeps the last request's body and headers."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.hung_up: Counter[str] = Counter()
        self.may_go_on = threading.Event()
        self.body: dict[str, object] = {}
        self.headers: dict[str, str] = {}
        self.port = 0

    def base_url(self, mode: str) -> str:
        return f"http://127.0.0.1:{self.port}/{mode}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        mode = head.split("/")[1]
        assert " /" + mode + "/v1/chat/completions " in head, head
        self.headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
        self.body = json.loads(await reader.readexactly(int(self.headers["content-length"])))
        self.requests[mode] += 1
        try:
            await getattr(self, mode)(reader, writer)
        except (ConnectionError, OSError):
            self.hung_up[mode] += 1
        finally:
            writer.close()

    async def _say(self, writer: asyncio.StreamWriter, status: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + body)
        await writer.drain()

    async def fine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.body.get("stream"):
            await self._stream(writer, b": ping\n\n" + sse(*CHUNKS, b"[DONE]"))
        else:
            await self._say(writer, "200 OK", json.dumps(WHOLE).encode())

    async def paced(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The rest comes only when it may; until then it looks whether anybody is still there."""
        await self._stream(writer, sse(*CHUNKS[:2]))
        while not self.may_go_on.is_set():
            try:
                gone = await asyncio.wait_for(reader.read(1), 0.02) == b""
            except TimeoutError:
                continue
            if gone:
                raise ConnectionError
        writer.write(sse(*CHUNKS[2:], b"[DONE]"))
        await writer.drain()

    async def slow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1) == b"":
            raise ConnectionError

    async def broken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, "500 Oh no", b'{"error": {"message": "out of\\nluck"}}')

    async def flaky(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.requests["flaky"] % 3:
            await self._say(writer, "503 Busy", b"busy", "retry-after: 0")
        else:
            await self.fine(reader, writer)

    async def busy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, "429 Too Many", b'{"error": "slow down"}', "retry-after: 77")

    async def refusing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, "400 Bad", b'{"error": {"message": "context too long"}}')

    async def locked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key = self.headers.get("authorization", "")
        await self._say(writer, "401 No", json.dumps({"error": {"message": f"wrong key: {key}"}}).encode())

    async def garbage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.body.get("stream"):
            await self._stream(writer, sse(b"\xff\xfe not utf-8"))
        else:
            await self._say(writer, "200 OK", b"<html>hello</html>")

    async def odd(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.body.get("stream"):
            await self._say(writer, "200 OK", json.dumps(WHOLE).encode(), "content-type: application/json")
        else:
            await self._say(writer, "200 OK", b'{"choices": [{"text": "no message"}]}')

    async def cut(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.body.get("stream"):
            await self._stream(writer, sse(*CHUNKS[:2]) + b'data: {"cho')
        else:
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"choices": [')
            await writer.drain()

    async def failing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An error in the middle of a stream."""
        await self._stream(writer, sse(*CHUNKS[:2], {"error": {"message": "the model has fallen over"}}))

    async def endless(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._stream(writer, b"data: " + b"a" * (2 << 20))


@contextmanager
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def main() -> None:
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        made.port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield made
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()
