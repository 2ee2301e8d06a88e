"""What a person has agreed to: commands that may be started, and the tools as they were described then.

    approvals = Approvals.open()                 # mcp_approvals.json in the user's data folder
    approvals.is_approved(server)
    approvals.approve(server, tools)             # tools=None: they are pinned when they are first seen

A command is known by the sha256 of command, arguments, working folder and the names of its environment, all as written;
a tool by that of its name, description, schemas and annotations. Values of the environment are nowhere here.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from heedful.errors import McpConfigError
from heedful.mcp.settings.config import HttpLaunch, ServerConfig, StdioLaunch

VERSION = 1
_DESCRIPTION_CHARS = 4096
"""Kept of a description, to show what has changed."""


@dataclass(frozen=True)
class Pin:
    """A tool as it was agreed to."""

    fingerprint: str
    description: str


def launch_hash(config: ServerConfig) -> str:
    """sha256 of what would be started or connected to, in hex."""
    launch = config.launch
    if isinstance(launch, HttpLaunch):
        what: list[Any] = ["http", launch.url, sorted(launch.headers)]
    else:
        assert isinstance(launch, StdioLaunch), launch
        folder = None if launch.cwd is None else str(config.folder / launch.cwd)
        what = ["stdio", launch.command, list(launch.args), folder, sorted(launch.env)]
    return sha256(json.dumps(what).encode()).hexdigest()


def tool_fingerprint(
    name: str, description: str | None, input_schema: Any, output_schema: Any = None, annotations: Any = None
) -> str:
    """sha256 of everything about a tool that a model or a policy goes by, in hex."""
    what = [name, description or "", input_schema, output_schema, annotations]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def approvals_path() -> Path:
    """mcp_approvals.json in $HEEDFUL_DATA, or in the user's data folder."""
    chosen = os.environ.get("HEEDFUL_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute() / "mcp_approvals.json"
    import platformdirs

    return Path(platformdirs.user_data_dir("heedful")) / "mcp_approvals.json"


class Approvals:
    """The file; read at each question, so that several programs agree. Raises McpConfigError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def open() -> Approvals:
        return Approvals(approvals_path())

    def is_approved(self, config: ServerConfig) -> bool:
        return launch_hash(config) in self._read()

    def pins(self, config: ServerConfig) -> Mapping[str, Pin] | None:
        """The server's tools by name; None: nobody has seen them yet."""
        entry = self._read().get(launch_hash(config), {})
        tools = entry.get("tools")
        return None if tools is None else {name: Pin(**pin) for name, pin in tools.items()}

    def approve(self, config: ServerConfig, tools: Mapping[str, Pin] | None = None) -> None:
        """Remembers the command and, where given, its tools, in the place of those known before."""
        with self._changing() as servers:
            entry = servers.setdefault(launch_hash(config), {"shown": config.launch.shown, "tools": None})
            entry["approved"] = datetime.now(UTC).isoformat(timespec="seconds")
            if tools is not None:
                entry["tools"] = {
                    name: {"fingerprint": pin.fingerprint, "description": pin.description[:_DESCRIPTION_CHARS]}
                    for name, pin in tools.items()
                }

    def forget(self, config: ServerConfig) -> bool:
        """Whether there was anything to forget."""
        with self._changing() as servers:
            return servers.pop(launch_hash(config), None) is not None

    def _read(self) -> dict[str, Any]:
        try:
            value = json.loads(self.path.read_bytes())
            if value["version"] != VERSION:
                raise McpConfigError(f"{self.path} is of another version of heedful", "Update heedful.")
            servers = value["servers"]
            for entry in servers.values():
                for pin in (entry["tools"] or {}).values():
                    Pin(**pin)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise McpConfigError(f"{self.path} cannot be read: {error.strerror}", _REMEDY) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise McpConfigError(f"{self.path} is damaged", _REMEDY) from None
        return dict(servers)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "w", encoding="ascii") as lock:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                servers = self._read()
                yield servers
                self._write(servers)
        except OSError as error:
            raise McpConfigError(f"{self.path} cannot be written: {error.strerror}", _REMEDY) from error

    def _write(self, servers: dict[str, Any]) -> None:
        """Under another name, synced and renamed: readable by its owner alone."""
        descriptor, name = tempfile.mkstemp(prefix=".approvals-", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"version": VERSION, "servers": servers}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


_REMEDY = "Move it away, or set HEEDFUL_DATA to another folder; then approve again: heedful mcp approve"
