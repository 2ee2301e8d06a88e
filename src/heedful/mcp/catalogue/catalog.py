"""What all servers together offer a model: one snapshot, with names that are unique and lead back, schemas in one form,
and the tools that are not offered, each with its reason.

    catalogue = await manager.catalogue()
    tool = catalogue["git__git_log"]
    tool.server, tool.name, tool.parameters, tool.signature
    tool.as_json("full")                         # {"type": "function", "function": {...}}

Made from listings alone (`make_catalogue`): no connection, no clock.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

from heedful.mcp.catalogue.lint import Finding, clean, cleaned_schema, findings, orders_about
from heedful.mcp.schemas.normalise import BadSchema, normalised
from heedful.mcp.schemas.signature import brief_schema, signature, summary
from heedful.mcp.settings.approvals import Pin, tool_fingerprint

MAX_NAME_CHARS = 64
SEPARATOR = "__"
_HASH_CHARS = 8

Form = Literal["full", "brief", "signature"]
FORMS: tuple[Form, ...] = ("full", "brief", "signature")
"""How a tool is told to a model, the longest first: its JSON; its JSON with first sentences only; one line."""

Cause = Literal["schema", "name", "duplicate", "denied", "new", "changed", "flagged"]


@dataclass(frozen=True)
class ToolHints:
    """What the server says of its tool; None: nothing. Only to be believed of a trusted server."""

    read_only: bool | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None


@dataclass(frozen=True)
class CatalogTool:
    """One tool that may be offered to a model."""

    model_name: str
    """Under which the model knows it: 1 to 64 letters, digits, _ and -; unique in its catalogue."""
    server: str
    name: str
    """The server's own name for it."""
    description: str
    """Without hidden characters and comments."""
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, normalised (schemas/normalise.py)."""
    output_schema: Mapping[str, Any] | None
    """As the server gave it."""
    hints: ToolHints
    fingerprint: str
    findings: tuple[Finding, ...]
    """What is suspicious in its texts, though somebody has agreed to it."""
    is_always: bool
    """Its configuration wants it in every selection."""

    @cached_property
    def signature(self) -> str:
        """`git__git_log(repo_path: str, max_count?: int = 10) - Shows the commit logs.`"""
        return signature(self.model_name, self.description, self.parameters)

    def as_json(self, form: Literal["full", "brief"] = "full") -> dict[str, Any]:
        """As chat APIs and templates take tools."""
        description, parameters = self.description, self.parameters
        if form == "brief":
            description, parameters = summary(description), brief_schema(parameters)
        function = {"name": self.model_name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    def text(self, form: Form) -> str:
        """What a model reads of it."""
        return self.signature if form == "signature" else json.dumps(self.as_json(form), ensure_ascii=False)


@dataclass(frozen=True)
class NotOffered:
    """A tool that no model sees, and why."""

    server: str
    name: str
    cause: Cause
    reason: str
    pin: Pin | None = None
    """As it is now; None where it cannot be agreed to."""


@dataclass(frozen=True)
class ListedTool:
    """A tool as its server lists it; the field names are the protocol's in Python."""

    name: str
    description: str | None
    input_schema: Any
    output_schema: Any = None
    annotations: Mapping[str, Any] | None = None
    """readOnlyHint, destructiveHint, …"""
    fault: str | None = None
    """Why the protocol does not allow it."""

    @property
    def pin(self) -> Pin:
        fingerprint = tool_fingerprint(
            self.name, self.description, self.input_schema, self.output_schema, self.annotations
        )
        return Pin(fingerprint, self.description or "")


@dataclass(frozen=True)
class ServerListing:
    """All that one server lists, and what was agreed to of it."""

    server: str
    tools: Sequence[ListedTool]
    prefix: str | None = None
    deny: Sequence[str] = ()
    always: Sequence[str] = ()
    pins: Mapping[str, Pin] | None = None
    """None: nothing was pinned; what is not suspicious is offered."""


class Catalogue(Mapping[str, CatalogTool]):
    """Model's name → tool, in the order of the servers and of their own lists. Immutable."""

    def __init__(
        self,
        tools: Sequence[CatalogTool],
        not_offered: Sequence[NotOffered] = (),
        unavailable: Mapping[str, str] | None = None,
    ) -> None:
        self._tools = {tool.model_name: tool for tool in tools}
        assert len(self._tools) == len(tools), [tool.model_name for tool in tools]
        self.not_offered = tuple(not_offered)
        self.unavailable = dict(unavailable or {})
        """Server → why none of its tools is here."""

    def __getitem__(self, model_name: str) -> CatalogTool:
        return self._tools[model_name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def tools(self) -> tuple[CatalogTool, ...]:
        return tuple(self._tools.values())

    def find(self, server: str, name: str) -> CatalogTool | None:
        """By the server's own name."""
        return next((tool for tool in self._tools.values() if (tool.server, tool.name) == (server, name)), None)

    def named(self, text: str) -> CatalogTool | None:
        """By the model's name, or by a server's own name that only one tool has."""
        if text in self._tools:
            return self._tools[text]
        same = [tool for tool in self._tools.values() if text in (tool.name, f"{tool.server}/{tool.name}")]
        return same[0] if len(same) == 1 else None

    def token_counts(self, count: Callable[[str], int]) -> dict[Form, int]:
        """Form → tokens of all tools in it; `count` is the model's: `lambda text: len(tokenizer.encode(text))`."""
        return {form: sum(count(tool.text(form)) for tool in self._tools.values()) for form in FORMS}


def make_catalogue(listings: Sequence[ServerListing], unavailable: Mapping[str, str] | None = None) -> Catalogue:
    """One snapshot of all servers."""
    kept: list[tuple[ServerListing, ListedTool, dict[str, Any], tuple[Finding, ...]]] = []
    not_offered: list[NotOffered] = []
    for listing in listings:
        seen: set[str] = set()
        names = {tool.name for tool in listing.tools}
        orders = orders_about({tool.name for other in listings for tool in other.tools} - names)
        for tool in listing.tools:
            found = findings(tool.description or "", tool.input_schema, orders)
            problem = _problem(listing, tool, found, seen)
            seen.add(tool.name)
            if problem is None:
                try:
                    kept.append((listing, tool, cleaned_schema(normalised(tool.input_schema)), found))
                    continue
                except BadSchema as error:
                    problem = NotOffered(listing.server, tool.name, "schema", str(error))
            not_offered.append(problem)
    model_names = _model_names([(listing.server, listing.prefix, tool.name) for listing, tool, _, _ in kept])
    tools = [
        CatalogTool(
            model_name=name,
            server=listing.server,
            name=tool.name,
            description=clean(tool.description or ""),
            parameters=parameters,
            output_schema=tool.output_schema,
            hints=_hints(tool.annotations),
            fingerprint=tool.pin.fingerprint,
            findings=found,
            is_always=any(fnmatchcase(tool.name, pattern) for pattern in listing.always),
        )
        for name, (listing, tool, parameters, found) in zip(model_names, kept, strict=True)
    ]
    return Catalogue(tools, not_offered, unavailable)


def _problem(listing: ServerListing, tool: ListedTool, found: tuple[Finding, ...], seen: set[str]) -> NotOffered | None:
    """Why a tool is not offered, before its schema is looked at."""

    def because(cause: Cause, reason: str, pin: Pin | None = None) -> NotOffered:
        return NotOffered(listing.server, tool.name, cause, reason, pin)

    if not tool.name or len(tool.name) > 256 or not tool.name.isprintable():
        return because("name", "its name is empty, too long or not printable")
    if tool.name in seen:
        return because("duplicate", "the server lists two tools of this name; the first is taken")
    if tool.fault is not None:
        return because("schema", tool.fault)
    if any(fnmatchcase(tool.name, pattern) for pattern in listing.deny):
        return because("denied", "its server's configuration denies it")
    if listing.pins is None:
        return because("flagged", _said(found), tool.pin) if found else None
    known = listing.pins.get(tool.name)
    if known is None:
        return because("new", "it was not there when the server was approved" + _and(found), tool.pin)
    if known.fingerprint != tool.pin.fingerprint:
        what = "its description" if known.description[:4096] != (tool.description or "")[:4096] else "its schema"
        return because("changed", f"{what} is another one than when it was approved" + _and(found), tool.pin)
    return None


def _said(found: tuple[Finding, ...]) -> str:
    return "; ".join(f"its {each.where} {each.rule}: {each.excerpt!r}" for each in found[:3])


def _and(found: tuple[Finding, ...]) -> str:
    return f"; {_said(found)}" if found else ""


def _hints(annotations: Mapping[str, Any] | None) -> ToolHints:
    said = annotations or {}
    keys = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
    return ToolHints(*(said[key] if isinstance(said.get(key), bool) else None for key in keys))


def _model_names(tools: Sequence[tuple[str, str | None, str]]) -> list[str]:
    """One name for each (server, prefix, tool). Where two would be the same, or one too long, its own hash ends it: no
    name depends on what comes after it in the list."""
    plain = [_plain_name(*tool) for tool in tools]
    times = Counter(plain)
    return [
        name if times[name] == 1 and len(name) <= MAX_NAME_CHARS else _hashed_name(name, server, tool)
        for name, (server, _, tool) in zip(plain, tools, strict=True)
    ]


def _plain_name(server: str, prefix: str | None, tool: str) -> str:
    before = server if prefix is None else prefix
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{before}{SEPARATOR}{tool}" if before else tool)


def _hashed_name(name: str, server: str, tool: str) -> str:
    digest = sha256(f"{server}\0{tool}".encode()).hexdigest()[:_HASH_CHARS]
    return f"{name[: MAX_NAME_CHARS - _HASH_CHARS - 1]}_{digest}"
