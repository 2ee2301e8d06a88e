"""A request done by a tool alone: the tool chosen, its arguments filled, the answer said by rules; no token generated.

    delegate = Delegate(caller, manager.config)
    plans, calls = await delegate.plans("What time is it in Tokyo?", catalogue, selection)
    plan = sure(plans)                       # None: the model does it
    done = await caller.call(plan.tool, plan.arguments)
    said(request, plan.arguments, read(done.output.value))   # "21:05 on Tuesday 2026-12-01 (UTC+09:00)"

Sure is what leaves no word of the request unaccounted for, and needs no guess. Only tools that the policy lets be
called without a question are asked on the way; the call itself is under the policy like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heedful.mcp.calls.call import CallRecord, ToolCaller
from heedful.mcp.calls.policy import verdict
from heedful.mcp.calls.reading import Reading, keys_of, read
from heedful.mcp.catalogue.bm25 import split_name, words
from heedful.mcp.catalogue.catalog import CatalogTool, Catalogue
from heedful.mcp.catalogue.select import SHORTLIST, Selection
from heedful.mcp.catalogue.thesaurus import with_synonyms
from heedful.mcp.delegation.fill import NOT_NAMED, Filled, Filler, unexplained
from heedful.mcp.delegation.mentions import Request, occurrences, orders_change
from heedful.mcp.delegation.say import ORDERING, moment_key
from heedful.mcp.delegation.select_sql import Table
from heedful.mcp.delegation.sql_tools import takes_query
from heedful.mcp.settings.config import McpConfig

MOST_LEFT = 0.67
"""Share of a request's words that a call may leave over, where a model reads its result."""
LEAST_SHARED = 0.3
"""Share of a request's words that some tool must account for, before a model that knows no tools must call one."""
_LONE_LIST = 0.5
"""Less does a tool fit that takes a list and gets one."""


@dataclass(frozen=True)
class Plan:
    """One call that may answer a request."""

    tool: CatalogTool
    filled: Filled
    left_over: tuple[str, ...]
    """Words of the request that it does not account for."""
    fit: float
    """How near the tool is to the request, for the order among plans."""
    share_left: float
    """Of its words."""
    follows: bool = False
    """It asks the question before anew, of something else: "and in Paris?"."""

    @property
    def is_unnamed(self) -> bool:
        return NOT_NAMED in self.left_over

    @property
    def arguments(self) -> dict[str, Any]:
        return self.filled.arguments


@dataclass(frozen=True)
class Narrowed:
    """A tool for a model to call, and its schema without what may be left out; what has few possible values has them as
    an enum, so that decoding chooses among them."""

    tool: CatalogTool
    schema: dict[str, Any]


class Delegate:
    """For one conversation."""

    def __init__(self, caller: ToolCaller, config: McpConfig) -> None:
        self._caller = caller
        self._config = config
        self._tables: dict[str, Table] = {}

    async def plans(self, text: str, catalogue: Catalogue, selection: Selection) -> tuple[list[Plan], list[CallRecord]]:
        """Ways to do it by one call each, the best first; and the calls of tools that list, made where the policy
        allows them."""
        request = Request.of(text)
        if orders_change(text):
            return [], []
        asking = _Asking(self._caller, self._config)
        plans = await self._filled(request, catalogue, selection, asking, lists=False)
        if sure(plans) is None and (request.asks_data or fits_somehow(text, selection)):
            plans = await self._filled(request, catalogue, selection, asking, lists=True)
        return plans, asking.records

    async def narrowed(self, text: str, catalogue: Catalogue, selection: Selection) -> Narrowed | None:
        """The tool that fits best; for a question the best that only reads. None where there is none."""
        is_order = orders_change(text)
        fitting = sorted(selection.chosen, key=lambda each: -each.score)
        tool = next((each.tool for each in fitting if is_order or self._only_reads(each.tool)), None)
        if tool is None or takes_query(tool):  # a query that no rule finds is beyond a weak model
            return None
        siblings = [other for other in catalogue.tools if other.server == tool.server]
        asking = _Asking(self._caller, self._config)
        filler = Filler(Request.of(text), self._config.servers[tool.server], siblings, asking.ask, self._tables)
        values = await filler.values(tool)
        required = [name for name in tool.parameters.get("required", []) if name in tool.parameters["properties"]]
        properties = {
            name: {"enum": values[name]} if values.get(name) else tool.parameters["properties"][name]
            for name in required
        }
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        return Narrowed(tool, schema)

    async def _filled(
        self, request: Request, catalogue: Catalogue, selection: Selection, asking: _Asking, *, lists: bool
    ) -> list[Plan]:
        found: list[Plan] = []
        for tool, score, follows in self._candidates(request, catalogue, selection, lists):
            siblings = [other for other in catalogue.tools if other.server == tool.server]
            filler = Filler(request, self._config.servers[tool.server], siblings, asking.ask, self._tables)
            for filled in await filler.fill(tool, lists=lists):
                left = tuple(unexplained(request, tool, filled))
                fit = score + _said_share(request, filled) + filled.is_whole - _LONE_LIST * filled.is_lone_list
                found.append(Plan(tool, filled, left, fit, len(left) / max(1, len(request.words)), follows))
        return sorted(found, key=lambda plan: (len(plan.left_over), -plan.fit))

    def _candidates(
        self, request: Request, catalogue: Catalogue, selection: Selection, lists: bool
    ) -> list[tuple[CatalogTool, float, bool]]:
        """(tool, how well it fits, whether it goes on with the question before). A tool that takes queries is one
        whatever its words: a question names what is in the tables."""
        found: list[tuple[CatalogTool, float, bool]] = []
        if not selection.abstained:
            found += [(tool, score, False) for tool, score in selection.ranked[: SHORTLIST if lists else None]]
        elif request.goes_on:
            found += [(each.tool, each.score, True) for each in selection.chosen if each.cause == "recent"]
        if lists and request.asks_data:
            chosen = {tool.model_name for tool, _, _ in found}
            found += [
                (tool, 0.0, False)
                for tool in catalogue.tools
                if tool.model_name not in chosen and takes_query(tool) and self._may_be_asked(tool)
            ]
        return [each for each in found if self._only_reads(each[0])]

    def may_be_tried(self, plan: Plan) -> bool:
        """Whether it may be called only to see what it says: it reads, by its own word, what the server itself holds,
        and nobody is asked."""
        hints = plan.tool.hints
        return self._may_be_asked(plan.tool) and hints.read_only is True and not hints.open_world

    def _may_be_asked(self, tool: CatalogTool) -> bool:
        return verdict(tool, self._config.servers[tool.server]).action == "allow"

    def _only_reads(self, tool: CatalogTool) -> bool:
        """What may be called on a rule's word: what says that it only reads, what is allowed by name, and what says
        nothing and is not called like a change; of that the policy asks a person."""
        action = verdict(tool, self._config.servers[tool.server]).action
        if tool.hints.destructive or tool.hints.read_only is False or action == "deny":
            return False
        return bool(tool.hints.read_only) or action == "allow" or not orders_change(split_name(tool.name))


class _Asking:
    """Tools that list values, each asked once in a turn, and only where that needs no question."""

    def __init__(self, caller: ToolCaller, config: McpConfig) -> None:
        self._caller = caller
        self._config = config
        self._readings: dict[str, Reading | None] = {}
        self.records: list[CallRecord] = []

    async def ask(self, tool: CatalogTool, arguments: Mapping[str, Any]) -> Reading | None:
        key = json.dumps([tool.model_name, arguments], sort_keys=True)
        if key not in self._readings:
            self._readings[key] = await self._asked(tool, arguments)
        return self._readings[key]

    async def _asked(self, tool: CatalogTool, arguments: Mapping[str, Any]) -> Reading | None:
        if verdict(tool, self._config.servers[tool.server]).action != "allow":
            return None
        done = await self._caller.call(tool, arguments)
        self.records.append(done.record)
        return read(done.output.value) if done.output is not None and not done.output.is_error else None


def sure(plans: Sequence[Plan]) -> Plan | None:
    """The plan to go by without a model; None where there is none, or where it would be a guess."""
    whole = [plan for plan in plans if not plan.left_over]
    if not whole or whole[0].filled.is_guess:
        return None
    return whole[0]


def near(text: str, plans: Sequence[Plan], selection: Selection) -> list[Plan]:
    """Those that leave words over, but account for most of the request; none where the tool that fits best would change
    something, and nothing is asked."""
    best = max(selection.chosen, key=lambda each: each.score, default=None)
    is_order = best is not None and best.tool.hints.read_only is False and not Request.of(text).asks
    if selection.abstained or best is None or is_order:
        return []
    found = [plan for plan in plans if plan.share_left <= MOST_LEFT and not plan.is_unnamed]
    whole = [plan for plan in found if not plan.left_over]
    return whole or found


def narrowed(request: Request, plan: Plan, reading: Reading) -> tuple[Reading, list[str]] | None:
    """Of a result the rows in which words stand that the call has left over, and those of them that name its fields;
    None where it accounts for less than all."""
    names = reading.record if reading.record is not None else {key for row in reading.rows[:1] for key in keys_of(row)}
    told = set(with_synonyms([stem for name in names for stem in words(split_name(str(name)))]))
    about = [word for word in plan.left_over if told & set(with_synonyms(words(word)))]
    said = [word for word in plan.left_over if word not in about and not _is_of_form(word, request, reading)]
    rows = tuple(row for row in reading.rows if all(_stands_in(word, row) for word in said))
    if said and (not rows or len(rows) == len(reading.rows) > 1):
        return None
    return (replace(reading, rows=rows) if said else reading), about


def _is_of_form(word: str, request: Request, reading: Reading) -> bool:
    """Whether it asks for what any such result has: the first or last of rows with dates, the words of a text."""
    if word.lower() in ORDERING:
        return moment_key(reading.rows) is not None
    is_text = reading.form == "text" or all(isinstance(row, str) for row in reading.rows)
    return request.asks_count and is_text and word.lower() in ("words", "lines")


def _stands_in(word: str, row: Any) -> bool:
    texts = [str(value) for value in row.values()] if isinstance(row, Mapping) else [str(row)]
    return any(occurrences(word, text) for text in texts)


def fits_somehow(text: str, selection: Selection) -> bool:
    """Whether some tool accounts for a part of the request: a small catalogue shares a word with nearly anything."""
    request = Request.of(text)
    nothing = Filled({}, (), {})
    return any(
        1 - len(unexplained(request, tool, nothing, must_be_named=False)) / max(1, len(request.words)) >= LEAST_SHARED
        for tool in selection.tools
    )


def _said_share(request: Request, filled: Filled) -> float:
    """How much of the request the arguments say: who takes more of it is nearer to it."""
    if not request.text:
        return 0.0
    return sum(end - start for start, end in set(filled.spans)) / len(request.text)
