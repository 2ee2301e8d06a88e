"""Whether a call may be made: allow, ask or deny, from a server's configuration and, where it is trusted, from what its
tools say of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from heedful.mcp.catalogue.catalog import CatalogTool
from heedful.mcp.settings.config import ServerConfig

Action = Literal["allow", "ask", "deny"]


@dataclass(frozen=True)
class Verdict:
    action: Action
    why: str


def verdict(tool: CatalogTool, server: ServerConfig) -> Verdict:
    """deny goes before ask, ask before allow. Named by none: what only reads, of a trusted server, is allowed; the rest
    asks."""
    lists: Iterable[tuple[Action, tuple[str, ...]]] = (
        ("deny", server.deny),
        ("ask", server.ask),
        ("allow", server.allow),
    )
    for action, patterns in lists:
        for pattern in patterns:
            if fnmatchcase(tool.name, pattern):
                return Verdict(action, f"{action} {pattern!r} of server {server.name!r}")
    if server.trusted and tool.hints.read_only and not tool.hints.destructive:
        return Verdict("allow", f"it only reads, says the trusted server {server.name!r}")
    if not server.trusted:
        return Verdict("ask", f"server {server.name!r} is not trusted")
    return Verdict("ask", "it does not say that it only reads")


def may_repeat(tool: CatalogTool, server: ServerConfig) -> bool:
    """Whether a call may be made twice where once was meant."""
    return server.trusted and bool(tool.hints.read_only or tool.hints.idempotent)


def lifetime_s(tool: CatalogTool, server: ServerConfig) -> float:
    """For which a result may be used again; 0: not at all. An exact name goes before patterns, those in their order."""
    if tool.name in server.cache_s:
        return server.cache_s[tool.name]
    return next((seconds for pattern, seconds in server.cache_s.items() if fnmatchcase(tool.name, pattern)), 0.0)
