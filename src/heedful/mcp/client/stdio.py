"""A server's process and the lines between it and us: the transport that the SDK's Client is given.

Beside what the SDK's own does: the process cannot outlive us (guard.py), a long line is read in linear time (the SDK's
takes 23 s for 20 MB) and bounded, lines that are no messages are kept apart, lone surrogates in an answer do not lose
it, and stderr goes to a bounded tail instead of ours.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.mcp.settings.variables import ReadyStdio, Secrets

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

MAX_MESSAGE_BYTES = 64 << 20
TAIL_BYTES = 16 << 10
"""Of stderr that are kept."""
CLOSE_S, GUARD_S = 2.0, 2.0
"""How long a server may take to end after its stdin has closed; and the guard to end it after that."""
_PIPE_BYTES = 1 << 20
_LONG_BYTES = 1 << 18
_PASSES = 20
"""Of the loop, in which the SDK takes a long message apart."""
_HANDED_ON = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_ALL", "TMPDIR")
_UTF8 = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
_GUARD = str(Path(__file__).with_name("guard.py"))


class Tail:
    """The last bytes of a server's stderr, and of what it wrote to stdout that is no message."""

    def __init__(self, secrets: Secrets, max_bytes: int = TAIL_BYTES) -> None:
        self._secrets = secrets
        self._max_bytes = max_bytes
        self._chunks: deque[bytes] = deque()
        self._held = 0

    def add(self, data: bytes) -> None:
        self._chunks.append(data[-self._max_bytes :])
        self._held += len(self._chunks[-1])
        while self._held - len(self._chunks[0]) >= self._max_bytes:
            self._held -= len(self._chunks.popleft())

    def text(self, most_chars: int = TAIL_BYTES) -> str:
        """Printable, without secrets; the newest `most_chars`."""
        text = self._secrets.hidden(b"".join(self._chunks).decode("utf-8", "replace"))
        clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
        return clean[-most_chars:].strip()

    def last_line(self) -> str:
        """The newest line that says something; "" for none."""
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


def child_environment(env: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a server sees: little of ours, UTF-8 for Python, and what its configuration gives."""
    return {name: environ[name] for name in _HANDED_ON if name in environ} | _UTF8 | dict(env)


@asynccontextmanager
async def stdio_transport(
    ready: ReadyStdio, tail: Tail, lost: Callable[[], None], max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[TransportStreams]:
    """Starts the process. At the end its stdin closes; CLOSE_S later the guard ends it and all below it.

    `lost` is called once when no message can come any more, for whatever reason. Raises OSError where the process
    cannot be started at all; a command that does not exist shows as an end with status 127 and a line in `tail`.
    """
    import anyio

    reading_end, writing_end = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _GUARD, str(reading_end), *ready.argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(ready.env),
            cwd=ready.cwd,
            start_new_session=True,
            pass_fds=(reading_end,),
            limit=_PIPE_BYTES,
        )
    except BaseException:
        os.close(writing_end)
        raise
    finally:
        os.close(reading_end)
    to_us, from_server = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
    to_server, from_us = anyio.create_memory_object_stream["SessionMessage"](0)
    tasks = [
        asyncio.create_task(_read_messages(process, to_us, tail, lost, max_message_bytes)),
        asyncio.create_task(_write_messages(process, from_us, to_us)),
        asyncio.create_task(_read_stderr(process, tail)),
    ]
    try:
        yield from_server, to_server
    finally:
        with anyio.CancelScope(shield=True):
            from_server.close()
            to_server.close()
            await asyncio.wait(tasks[1:2], timeout=0.5)  # what is on its way out
            await _end(process, writing_end)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            to_us.close()
            from_us.close()
            process._transport.close()  # type: ignore[attr-defined]  # else the pipes wait for the collector


async def _read_messages(
    process: asyncio.subprocess.Process, to_us: Any, tail: Tail, lost: Callable[[], None], max_bytes: int
) -> None:
    assert process.stdout is not None
    import anyio

    async with to_us:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in _lines(process.stdout, tail, max_bytes):
                is_long = len(line) >= _LONG_BYTES
                with _collector_paused(is_long):
                    message = message_of(line, tail)
                    if message is not None:
                        await to_us.send(message)
                    for _ in range(_PASSES if is_long else 0):
                        await asyncio.sleep(0)
    lost()
    while await process.stdout.read(_PIPE_BYTES):
        pass  # nobody listens any more; the server must not hang on a full pipe while it ends


async def _lines(stdout: asyncio.StreamReader, tail: Tail, max_bytes: int) -> AsyncIterator[bytes]:
    """In linear time; ends at one that is too long."""
    pieces: list[bytes] = []
    held = 0
    while chunk := await stdout.read(_PIPE_BYTES):
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            yield b"".join([*pieces, line])
            pieces, held = [], 0
        pieces.append(rest)
        held += len(rest)
        if held > max_bytes:
            tail.add(f"\na message of more than {max_bytes:,} bytes: the connection was given up\n".encode())
            return


def message_of(line: bytes, tail: Tail) -> SessionMessage | None:
    """The message that a line is; None for one that is none, which is kept in `tail`."""
    import mcp_types
    import pydantic_core
    from mcp.shared.message import SessionMessage

    if not line.strip():
        return None
    adapter = mcp_types.jsonrpc_message_adapter
    if line.lstrip()[:1] == b"{":
        with suppress(ValueError):
            if len(line) < _LONG_BYTES:
                return SessionMessage(adapter.validate_json(line, by_name=False))
            value = pydantic_core.from_json(line)  # once, not for each kind of message
            return SessionMessage(adapter.validate_python(value, by_name=False))
        with suppress(ValueError, RecursionError):  # bytes that are no UTF-8, or escapes of lone surrogates
            value = _well_formed(json.loads(line.decode("utf-8", "replace")))
            return SessionMessage(adapter.validate_python(value, by_name=False))
    tail.add(line[:1000] + b"\n")
    return None


@contextmanager
def _collector_paused(is_long: bool) -> Iterator[None]:
    """While a long message is read: the collector would go through all of its parts again and again, half of the time,
    and JSON has no cycles to find."""
    was_on = is_long and gc.isenabled()
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_well_formed(each) for each in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(each) for key, each in value.items()}
    return value


async def _write_messages(process: asyncio.subprocess.Process, from_us: Any, to_us: Any) -> None:
    assert process.stdin is not None
    try:
        async for message in from_us:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode("utf-8", "replace") + b"\n")
            await process.stdin.drain()
    except OSError:
        to_us.close()  # the session sees the connection end instead of a call that hangs


async def _read_stderr(process: asyncio.subprocess.Process, tail: Tail) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(1 << 16):
        tail.add(chunk)


async def _end(process: asyncio.subprocess.Process, life: int) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    await _has_ended(process, CLOSE_S)
    os.close(life)
    if not await _has_ended(process, GUARD_S):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await _has_ended(process, GUARD_S)


async def _has_ended(process: asyncio.subprocess.Process, within: float) -> bool:
    """Looks at the status, for `wait` waits for pipes too, which a grandchild may hold."""
    deadline = asyncio.get_running_loop().time() + within
    while process.returncode is None:
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True
