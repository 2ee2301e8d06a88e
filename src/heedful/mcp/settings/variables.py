"""`${VAR}`, `${VAR:-default}` and `${env:VAR}` in a server's command, put in when it is started and not before; and
texts without the secrets that were put in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from heedful.errors import McpConfigError
from heedful.mcp.settings.config import HttpLaunch, ServerConfig, StdioLaunch

_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-((?:[^}\\]|\\.)*))?\}")
_LEAST_SECRET = 4
"""Shorter values stand in many texts by chance."""
_HIDDEN = "[hidden]"
_PLAIN_ENV = re.compile(r"true|false|yes|no|on|off|utf-?8|[0-9]{1,5}|[A-Za-z]{1,8}", re.IGNORECASE)


@dataclass(frozen=True)
class Secrets:
    """Values that stand in no error and in no log: those of env and headers, and those of variables."""

    values: tuple[str, ...] = field(default=(), repr=False)

    @staticmethod
    def of(values: Iterable[str]) -> Secrets:
        wanted = {value for value in values if len(value) >= _LEAST_SECRET and not _PLAIN_ENV.fullmatch(value)}
        wanted |= {value.partition(" ")[2] for value in wanted if value.lower().startswith(("bearer ", "basic "))}
        return Secrets(tuple(sorted(wanted - {""}, key=len, reverse=True)))

    def hidden(self, text: str) -> str:
        """`text` without them."""
        for value in self.values:
            text = text.replace(value, _HIDDEN)
        return text


@dataclass(frozen=True)
class ReadyStdio:
    argv: tuple[str, ...] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    cwd: Path | None
    secrets: Secrets


@dataclass(frozen=True)
class ReadyHttp:
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    secrets: Secrets


def ready_launch(config: ServerConfig, environ: Mapping[str, str] = os.environ) -> ReadyStdio | ReadyHttp:
    """What to start or connect to, its variables put in. Raises McpConfigError naming a variable that is not set."""
    launch, used = config.launch, _Used(config.name, environ)
    if isinstance(launch, HttpLaunch):
        url = used.expanded(launch.url, "url")
        headers = {name: used.expanded(value, f"headers.{name}") for name, value in launch.headers.items()}
        return ReadyHttp(url, headers, Secrets.of([*used.values, *headers.values()]))
    assert isinstance(launch, StdioLaunch), launch
    argv = tuple(used.expanded(text, f"args[{i - 1}]" if i else "command") for i, text in enumerate(launch.argv))
    env = {name: used.expanded(value, f"env.{name}") for name, value in launch.env.items()}
    cwd = None if launch.cwd is None else config.folder / Path(used.expanded(launch.cwd, "cwd")).expanduser()
    return ReadyStdio(argv, env, cwd, Secrets.of([*used.values, *env.values()]))


class _Used:
    """Puts variables in and remembers their values."""

    def __init__(self, server: str, environ: Mapping[str, str]) -> None:
        self._server = server
        self._environ = environ
        self.values: list[str] = []

    def expanded(self, text: str, where: str) -> str:
        def value_of(found: re.Match[str]) -> str:
            name, default = found.group(1), found.group(2)
            value = self._environ.get(name)
            if not value and default is not None:
                return default
            if value is None:
                raise McpConfigError(
                    f"server {self._server!r}: {where} needs the environment variable {name}, which is not set",
                    f"Set it, or write ${{{name}:-default}}.",
                )
            self.values.append(value)
            return value

        return _VARIABLE.sub(value_of, text)
