"""Runs a chat template in a process with limits on time and memory. Knows nothing of messages or tokens.

A separate process, because nothing less holds: one expression such as `10 ** 10 ** 10`, `x | center(10 ** 9)` or the
comparison of two deeply shared lists spends its time inside C, where no hook, thread or deadline of the same process
reaches it, and its memory would be ours. It starts at the first rendering (about 0.1 s), stays for the next ones
(0.2 ms each), and keeps jinja2 out of this process. POSIX only; the memory limit holds on Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heedful.errors import TemplateError

_BASE_MEMORY_BYTES = 256 << 20
_BYTES_A_CHAR = 32  # of the rendered text: its pieces, the whole, and its JSON, at up to 4 bytes a character each
_PROGRAM = "import sys; sys.path += sys.argv[1:]; from heedful.text.template_worker import main; main()"
_REMEDY = "Take another model file, or give the finished prompt as text instead of messages."


class TemplateProcess:
    """Renders `source`. One rendering at a time, from any thread; the process ends with this object.

    `control_texts`: see provenance.py. `max_chars`: longest result. `cpu_seconds`: processor time for one rendering.
    """

    def __init__(self, source: str, *, control_texts: Sequence[str] = (), max_chars: int, cpu_seconds: float) -> None:
        self._max_chars = max_chars
        self._cpu_seconds = cpu_seconds
        self._job = _line(
            {
                "source": source,
                "control_texts": control_texts,
                "max_chars": max_chars,
                "cpu_seconds": cpu_seconds,
                "memory_bytes": _BASE_MEMORY_BYTES + _BYTES_A_CHAR * max_chars,
            }
        )
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(self, variables: Mapping[str, Any], stand_ins: Mapping[str, str] | None = None) -> str:
        """The text for variables that JSON can carry, with stand-ins in the control tokens. Raises TemplateError."""
        with self._lock:
            try:
                reply = self._reply(_line({"variables": variables, "stand_ins": stand_ins or {}}))
            except BaseException:
                self._stop()  # half an exchange must not meet the next one
                raise
        if "text" in reply:
            return str(reply["text"])
        raise self._error(reply["kind"], reply["error"])

    def _reply(self, request: bytes) -> dict[str, str]:
        if self._worker is not None and not self._worker.usable:
            self._stop()
        if self._worker is None:
            self._worker = _Worker()
            request = self._job + request
        line = self._worker.ask(request)
        if not line:
            raise self._death(self._worker.exit_status())
        reply: dict[str, str] = json.loads(line)
        return reply

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _error(self, kind: str, message: str) -> TemplateError:
        if kind == "refused":
            return TemplateError(f"the chat template refuses these messages: {message}", "Change them accordingly.")
        if kind == "length":
            written = f"the chat template wrote more than {self._max_chars:,} characters"
            return TemplateError(written, "Shorten the messages.")
        if kind == "memory":
            return TemplateError("the chat template ran out of the memory that it may use", _REMEDY)
        if kind == "syntax":
            return TemplateError(f"the chat template has a syntax error: {message}", _REMEDY)
        return TemplateError(f"the chat template fails on these messages: {message}", _REMEDY)

    def _death(self, exit_status: int) -> TemplateError:
        if exit_status == -signal.SIGPROF:
            return TemplateError(f"the chat template took more than {self._cpu_seconds:g} s of processor time", _REMEDY)
        return TemplateError(f"the process of the chat template ended with status {exit_status}", _REMEDY)


class _Worker:
    """One running template_worker.py: isolated from the user's environment, with only the paths that it needs, and in
    a session of its own, so that Ctrl-C reaches this process alone."""

    def __init__(self) -> None:
        folders = [_folder_of(package) for package in ("jinja2", "markupsafe", "heedful")]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise TemplateError(f"no process could be started for the chat template: {error}", _REMEDY) from error
        self._owner_pid = os.getpid()
        self.end = weakref.finalize(self, _end, self._process, self._owner_pid)

    @property
    def usable(self) -> bool:
        """False once it has died, and after a fork, where the other side goes on using it."""
        return self._owner_pid == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes) -> bytes:
        """The line that it answers; empty when it has died."""
        assert self._process.stdin is not None, self._process
        assert self._process.stdout is not None, self._process
        with contextlib.suppress(BrokenPipeError):  # its death shows in reading
            self._process.stdin.write(request)
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def exit_status(self) -> int:
        return self._process.wait()


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _folder_of(package: str) -> str:
    """The folder on sys.path that holds `package`, found without importing it."""
    spec = find_spec(package)
    assert spec is not None, package
    assert spec.origin is not None, package
    return str(Path(spec.origin).parent.parent)


def _end(process: subprocess.Popen[bytes], owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child leaves its parent's process alone
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, process
        with contextlib.suppress(BrokenPipeError):  # unsent bytes of a request whose process has died
            pipe.close()
