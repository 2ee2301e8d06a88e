"""The file that names MCP servers: the `mcpServers` JSON that other programs read too, and our fields in `x-heedful`.

    config = read_config(Path("servers.json"))
    config.servers["git"].launch          # StdioLaunch or HttpLaunch, variables not put in yet

Knows nothing of processes and connections. What a value of env or headers says is in no repr and in no error; `${VAR}`
stays as written until a server is started (variables.py).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.errors import McpConfigError

MAX_FILE_BYTES = 1 << 20
TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 30.0
MAX_CONCURRENCY = 4
MAX_NAME_CHARS = 64
OUR_KEY = "x-heedful"

_STDIO_TYPES = ("stdio", "local")
_HTTP_TYPES = ("http", "streamable-http", "streamableHttp", "streamable_http", "remote")
_OUR_FIELDS = (
    *("trusted", "allow", "ask", "deny", "timeout_s", "idle_timeout_s"),
    *("max_concurrency", "cache", "always", "prefix"),
)
_EXAMPLE = '{"mcpServers": {"time": {"command": "mcp-server-time"}}}'


@dataclass(frozen=True)
class StdioLaunch:
    """A program that speaks the protocol on its stdin and stdout. No shell is between."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the program, beside HOME, LOGNAME, PATH, SHELL, TERM, USER; nothing else of ours is handed on."""
    cwd: str | None = None
    """Absolute, or relative to the folder of the configuration file. None: where heedful runs."""

    @property
    def shown(self) -> str:
        """The command line as written, for a person to agree to."""
        return " ".join(json.dumps(part) if re.search(r"[\s\"']", part) or not part else part for part in self.argv)

    @property
    def argv(self) -> tuple[str, ...]:
        return (self.command, *self.args)


@dataclass(frozen=True)
class HttpLaunch:
    """A server that runs elsewhere, reached over streamable HTTP."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The address as written, without what may be a secret in it."""
        return re.sub(r"//[^/@]*@", "//…@", self.url.partition("?")[0])


@dataclass(frozen=True)
class ServerConfig:
    name: str
    launch: StdioLaunch | HttpLaunch
    folder: Path
    """Of the configuration file."""
    trusted: bool = False
    """What its tools say of themselves (read-only, destructive, …) may be believed."""
    allow: tuple[str, ...] = ()
    """Patterns (`*`, `?`) of tool names, the server's own; deny goes before ask, ask before allow."""
    ask: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    """Tools that are never shown nor called."""
    timeout_s: float = TIMEOUT_S
    """A call's longest time, progress or not."""
    idle_timeout_s: float = IDLE_TIMEOUT_S
    """A call's longest time without a result and without progress."""
    max_concurrency: int = MAX_CONCURRENCY
    """Calls at a time; others wait."""
    cache_s: Mapping[str, float] = field(default_factory=dict)
    """Pattern of a tool's name → seconds for which a result may be used again."""
    always: tuple[str, ...] = ()
    """Tools that every selection keeps, abstention or not."""
    prefix: str | None = None
    """Before the names of its tools, instead of the server's name; "" for none."""


@dataclass(frozen=True)
class McpConfig:
    servers: Mapping[str, ServerConfig]
    source: Path | None = None


def read_config(path: Path) -> McpConfig:
    """The servers of a file. Raises McpConfigError naming the file, the server and the field."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise McpConfigError(
            f"{path} cannot be read: {error.strerror}", "Give a file: --config FILE, for a chat --mcp FILE"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise McpConfigError(f"{path} has more than {MAX_FILE_BYTES:,} bytes", "A file of servers is small.")
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise McpConfigError(f"{path} is not UTF-8 text (byte {error.start:,})") from None
    except json.JSONDecodeError as error:
        raise McpConfigError(
            f"{path}:{error.lineno}:{error.colno} is not JSON: {error.msg}", "It has no comments."
        ) from None
    except (ValueError, RecursionError):
        raise McpConfigError(f"{path} is not JSON that can be read") from None
    return config_from_json(value, path)


def config_from_json(value: Any, source: Path | None = None) -> McpConfig:
    """`value` as in a file at `source`. Raises McpConfigError."""
    where = str(source or "the configuration")
    named = None
    if isinstance(value, Mapping):
        named = value.get("mcpServers", value.get("servers"))
    if not isinstance(named, Mapping):
        raise McpConfigError(f"{where} names no servers: it needs an object mcpServers", f"The least: {_EXAMPLE}")
    folder = (source.parent if source else Path()).absolute()
    servers = {}
    for name, entry in named.items():
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise McpConfigError(f"{where}: {name!r:.80} is no name for a server", "Use 1 to 64 characters.")
        if not isinstance(entry, Mapping):
            raise McpConfigError(f"{where}: server {name!r} must be an object", f"The least: {_EXAMPLE}")
        reader = _Entry(f"{where}: server {name!r}", name, entry)
        if not reader.flag("disabled", False):
            servers[name] = reader.server(folder)
    return McpConfig(servers, source)


class _Entry:
    """One object of the file. Every check names the file, the server and the field."""

    def __init__(self, where: str, name: str, entry: Mapping[str, Any]) -> None:
        self._where = where
        self._name = name
        self._entry = entry

    def server(self, folder: Path) -> ServerConfig:
        launch = self._launch()
        ours = self._entry.get(OUR_KEY, {})
        if not isinstance(ours, Mapping):
            raise self._wrong(OUR_KEY, "must be an object")
        mine = _Entry(f"{self._where}: {OUR_KEY}", self._name, ours)
        mine.know_only(_OUR_FIELDS)
        return ServerConfig(
            self._name,
            launch,
            folder,
            trusted=mine.flag("trusted", False),
            allow=mine.texts("allow"),
            ask=mine.texts("ask"),
            deny=mine.texts("deny"),
            timeout_s=mine.seconds("timeout_s", TIMEOUT_S),
            idle_timeout_s=mine.seconds("idle_timeout_s", IDLE_TIMEOUT_S),
            max_concurrency=mine.count("max_concurrency", MAX_CONCURRENCY),
            cache_s=mine.lifetimes("cache"),
            always=mine.texts("always"),
            prefix=mine.text("prefix"),
        )

    def know_only(self, known: tuple[str, ...]) -> None:
        for key in self._entry:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
                raise McpConfigError(f"{self._where} has no field {key!r:.60}", hint)

    def _launch(self) -> StdioLaunch | HttpLaunch:
        kind = self.text("type") or self.text("transport")
        command, url = self.text("command"), self.text("url") or self.text("serverUrl") or self.text("httpUrl")
        if kind == "sse":
            raise self._wrong(
                "type",
                "sse, the protocol's first HTTP transport, is not spoken",
                "Most such servers answer type http too.",
            )
        if kind is not None and kind not in (*_STDIO_TYPES, *_HTTP_TYPES):
            raise self._wrong("type", f"{kind!r:.40} is not known", "Use stdio or http.")
        if command and url:
            raise self._wrong("url", "stands beside command", "Keep one of them.")
        if url and kind not in _STDIO_TYPES:
            if not re.match(r"https?://|\$\{", url):
                raise self._wrong("url", "must begin with http:// or https://")
            return HttpLaunch(url, self.mapping("headers"))
        if command and kind not in _HTTP_TYPES:
            cwd = self.text("cwd")
            return StdioLaunch(command, self.texts("args"), self.mapping("env"), cwd)
        raise self._wrong("url" if kind in _HTTP_TYPES else "command", "is missing", f"The least: {_EXAMPLE}")

    def text(self, key: str) -> str | None:
        value = self._entry.get(key)
        if not isinstance(value, str | None):
            raise self._wrong(key, "must be a text")
        if value is not None and "\0" in value:
            raise self._wrong(key, "has a NUL character")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._entry.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) and "\0" not in each for each in value):
            raise self._wrong(key, "must be a list of texts")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, str]:
        value = self._entry.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "must be an object of texts")
        for name, each in value.items():
            if not isinstance(each, str) or "\0" in each or not name or re.search(r"[\0=\r\n]", name):
                raise self._wrong(f"{key}.{name:.60}", "must be a text, under a name without = and line ends")
        return dict(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._entry.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "must be true or false")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self._entry.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(key, "must be a number of seconds above 0")
        return float(value)

    def count(self, key: str, default: int) -> int:
        value = self._entry.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1000:
            raise self._wrong(key, "must be a whole number from 1 to 1,000")
        return value

    def lifetimes(self, key: str) -> dict[str, float]:
        value = self._entry.get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, "must be an object: a tool's name or pattern, and seconds")
        found = {}
        for name, seconds in value.items():
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise self._wrong(f"{key}.{name:.60}", "must be a number of seconds above 0")
            found[name] = float(seconds)
        return found

    def _wrong(self, key: str, message: str, remedy: str = "") -> McpConfigError:
        return McpConfigError(f"{self._where}: {key} {message}", remedy)
