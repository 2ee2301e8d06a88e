"""A tool's arguments from what a request says, from its schema, and from what other tools of its server list: no model.

    filler = Filler(request, server, tools, ask)
    await filler.fill(tool)          # [Filled({"timezone": "Asia/Tokyo"}, …)]; several where it may mean several; []

Every value stands in the request, in the server's own configuration, in a tool's list, or in the tool's own words for
the case; a required argument that is in none of them leaves the tool unfilled, and optional ones stay out.
"""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from heedful.mcp.catalogue.bm25 import split_name, stem, words
from heedful.mcp.catalogue.catalog import CatalogTool
from heedful.mcp.catalogue.thesaurus import with_synonyms
from heedful.mcp.delegation.mentions import Mention, Request, Word, is_within, occurrences
from heedful.mcp.delegation.select_sql import Table
from heedful.mcp.delegation.sql_tools import Ask, is_sql, queries, takes_select
from heedful.mcp.schemas.signature import summary
from heedful.mcp.settings.config import ServerConfig, StdioLaunch

MOST_WAYS = 8
"""Of filling one tool."""
ALL = 10_000
"""For a parameter that limits what is counted."""

_TOLD_CHARS = 400
"""Of a tool's description, whose words account for words of a request."""

MOST_SEARCHED = 3
"""Words that are looked for as paths."""
NOT_NAMED = "(nothing names it)"
_MEDIA = frozenset(words("media image audio video picture photo"))

Span = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """One value for a parameter, and where in the request it is said."""

    value: Any
    spans: tuple[Span, ...] = ()
    how: str = "said"


@dataclass(frozen=True)
class Filled:
    arguments: dict[str, Any]
    spans: tuple[Span, ...]
    how: dict[str, str]
    """Argument → said, listed, configured, stated (by the tool itself), or one of its options."""
    is_whole: bool = False
    """The arguments say all of the request: a query."""

    @property
    def is_lone_list(self) -> bool:
        """A list is made of one value, where a tool for one might have been meant."""
        return any(isinstance(value, list) and len(value) == 1 for value in self.arguments.values())

    @property
    def is_guess(self) -> bool:
        """An argument is one of several that would do, and the request does not say which."""
        return "option" in self.how.values()


class Filler:
    """Of one request and one server. `tools`: the server's, as they are offered. `tables`: known ones, to be kept."""

    def __init__(
        self,
        request: Request,
        server: ServerConfig,
        tools: Sequence[CatalogTool],
        ask: Ask,
        tables: dict[str, Table] | None = None,
    ) -> None:
        self._request = request
        self._server = server
        self._tools = tools
        self._ask = ask
        self._tables = {} if tables is None else tables
        self._roots_found: list[str] | None = None
        self._lists = True
        self._searched: set[str] = set()
        """Paths that the server's search has found."""

    async def fill(self, tool: CatalogTool, *, lists: bool = True) -> list[Filled]:
        """Ways to call it for this request. `lists`: other tools may be asked for the values that there are."""
        schema, self._lists = tool.parameters, lists
        required = [name for name in schema.get("required", []) if name in schema["properties"]]
        ways: list[list[Found]] = []
        taken: list[Mention] = []
        for name in required:
            found = await self._values(tool, name, schema["properties"][name], required, taken)
            if not found:
                return []
            ways.append(found[:MOST_WAYS])
        optional = {
            name: one
            for name, each in schema["properties"].items()
            if name not in required and (one := self._optional(name, each)) is not None
        }
        filled = []
        for chosen in list(product(*ways))[:MOST_WAYS]:
            values = {**dict(zip(required, chosen, strict=True)), **optional}
            spans = tuple(span for each in values.values() for span in each.spans)
            arguments = {name: each.value for name, each in values.items()}
            how = {name: each.how for name, each in values.items()}
            filled.append(Filled(arguments, spans, how, any(each.how == "composed" for each in chosen)))
        return filled

    async def values(self, tool: CatalogTool) -> dict[str, list[Any]]:
        """Required parameter → the values that it may have here; [] where any may be meant."""
        schema, taken = tool.parameters, list[Mention]()
        required = [name for name in schema.get("required", []) if name in schema["properties"]]
        found = {}
        for name in required:
            ways = await self._values(tool, name, schema["properties"][name], required, taken)
            found[name] = [each.value for each in ways]
        return found

    async def _values(
        self, tool: CatalogTool, name: str, schema: Any, required: Sequence[str], taken: list[Mention]
    ) -> list[Found]:
        """Of one required parameter; `taken`: mentions that parameters before it have used."""
        if not isinstance(schema, Mapping):
            return []
        if schema.get("type") == "array":
            inner = await self._values(tool, name, _items(schema), required, taken)
            said = [each for each in inner if each.spans]
            spans = tuple(span for each in said for span in each.spans)
            return [Found([each.value for each in said], spans, said[0].how)] if said else []
        told = f"{split_name(name)} {schema.get('description', '')}"
        if isinstance(schema.get("enum"), list):
            return self._options([str(each) for each in schema["enum"]], schema["enum"])
        if schema.get("type") in ("integer", "number"):
            return self._numbers(tool, required, taken)
        if schema.get("type") not in (None, "string"):
            return []
        if is_sql(told):
            if not takes_select(tool, told) or not self._lists:
                return []
            made = await queries(self._request, tool, name, self._tools, self._ask, self._tables)
            return [Found(query.sql, query.spans, "composed") for query in made]
        for kind, found in self._typed(tool, name, told, taken).items():
            if found or kind in ("zone", "clock", "url", "path"):
                return found if kind != "path" else await self._paths(tool, name, told)
        if options := re.findall(r"\('([\w.-]{1,40})'\)", str(schema.get("description", ""))):
            return self._options(options, options)
        if self._lists and (listed := await self._listed(tool, name)):
            return listed
        return self._free_text(tool, name, told)

    def _typed(self, tool: CatalogTool, name: str, told: str, taken: list[Mention]) -> dict[str, list[Found]]:
        """Kind → values, of the kind of thing that the parameter's words name."""
        if re.search(r"time ?zone|\biana\b", told, re.IGNORECASE):
            return {"zone": self._zones(name, told, taken)}
        if re.search(r"\btime\b", split_name(name)) and re.search(r"HH:MM|24.hour", told):
            return {"clock": [_said(each) for each in self._request.mentions("clock")[:1]]}
        if re.search(r"\b(?:url|uri|link)\b", split_name(name)):
            return {"url": [_said(each) for each in self._request.mentions("url")]}
        if re.search(
            r"\b(?:path|paths|file|files|filename|dir|directory|folder|repo|repository|cwd)\b", split_name(name)
        ):
            return {"path": []}
        if re.search(r"\bdate\b", split_name(name)):
            return {"date": [_said(each) for each in self._request.mentions("date")]}
        return {}

    def _zones(self, name: str, told: str, taken: list[Mention]) -> list[Found]:
        places = self._request.mentions("zone")
        is_source = re.search(r"\b(?:source|from|origin)\b", split_name(name)) is not None
        is_target = re.search(r"\b(?:target|to|destination|dest)\b", split_name(name)) is not None
        if is_source or is_target:
            source = self._source_zone(places)
            places = [each for each in places if (each is source) == is_source]
        if not places and (stated := re.search(r"[Uu]se '([\w/+-]+)' as .{0,40}\bif no\b", told)):
            return [Found(stated[1], (), "stated")]
        free = [each for each in places if each not in taken]
        taken += free[:1]
        return [_said(each) for each in free[:1]] if len(free) == 1 or is_source or is_target else []

    def _source_zone(self, places: list[Mention]) -> Mention | None:
        """The place whose time is given: that behind or before the time of day, or behind "from"."""
        text = self._request.text
        for place in places:
            if re.search(r"\bfrom\s+$", text[: place.start], re.IGNORECASE):
                return place
        for clock in self._request.mentions("clock"):
            after = [each for each in places if each.start >= clock.end and len(text[clock.end : each.start]) <= 12]
            if after and not re.search(r"\bto\b", text[clock.end : after[0].start]):
                return after[0]
            before = [each for each in places if each.end <= clock.start and len(text[each.end : clock.start]) <= 12]
            if before:
                return before[-1]
        return None

    def _numbers(self, tool: CatalogTool, required: Sequence[str], taken: list[Mention]) -> list[Found]:
        """All numbers go to all required numeric parameters, in order, or none to any."""
        wanted = [name for name in required if tool.parameters["properties"][name].get("type") in ("integer", "number")]
        numbers = self._request.mentions("number")
        if len(numbers) != len(wanted):
            return []
        free = [each for each in numbers if each not in taken]
        taken += free[:1]
        return [_said(each) for each in free[:1]]

    def _options(self, texts: Sequence[str], values: Sequence[Any]) -> list[Found]:
        """The one that is said; else any, which is a guess."""
        said = [
            Found(value, tuple(spans))
            for text, value in zip(texts, values, strict=True)
            if (spans := occurrences(split_name(text) or text, self._request.text))
        ]
        return said[:1] if len(said) == 1 else [] if said else [Found(value, (), "option") for value in values]

    def _optional(self, name: str, schema: Any) -> Found | None:
        """Only what the request plainly asks for: an amount, or an option by its name."""
        if not isinstance(schema, Mapping):
            return None
        if schema.get("type") in ("integer", "number") and re.search(r"(?:^|_)(?:max|limit|count|top|n)", name, re.I):
            return self._limit(schema)
        if isinstance(schema.get("enum"), list):
            found = self._options([str(each) for each in schema["enum"]], schema["enum"])
            return found[0] if found and found[0].spans else None
        return None

    def _limit(self, schema: Mapping[str, Any]) -> Found | None:
        request = self._request
        newest = r"(?:last|latest|newest|most recent|first|top|\w+)"
        for number in request.mentions("number"):
            around = request.text[: number.start], request.text[number.end :]
            before = re.search(r"\b(?:last|latest|newest|recent|first|top)\s+$", around[0], re.IGNORECASE)
            if before or re.match(rf"\s+{newest}\s+\w+|\s+\w+s\b", around[1], re.IGNORECASE):
                return Found(number.value, ((before.start() if before else number.start, number.end),))
        if request.asks_count:
            return Found(schema.get("maximum", ALL), (), "all, to count")
        return Found(1, (request.newest,)) if request.newest else None

    async def _paths(self, tool: CatalogTool, name: str, told: str) -> list[Found]:
        """Paths that are said, under what the server may see; where none is, that itself, for tools of folders."""
        roots = await self._roots()
        said = self._request.mentions("path", "folder")
        if re.search(r"repo|root|cwd|workspace", name, re.IGNORECASE) and roots:
            said = [each for each in said if os.path.isabs(each.value)]  # others are inside of it
        if _is_of_folders(tool) and any(each.kind == "path" and "." in os.path.basename(each.value) for each in said):
            return []
        quoted = [each for each in self._request.mentions("quoted") if re.search(r"[/.]", each.value)]
        if found := said or quoted:
            return [Found(await self._whole_path(each.value, roots), ((each.start, each.end),)) for each in found]
        says_folder = self._request.has(r"\b(?:sub)?(?:folders?|director(?:y|ies))\b")
        if self._lists and says_folder and _is_of_folders(tool) and (named := await self._named_folder(tool, roots)):
            return [named]
        wants_folder = re.search(r"repo|dir|folder|cwd|root", f"{name} {tool.name}", re.IGNORECASE) is not None
        wants_file = re.search(r"(?:^|_)file(?:_|$)", tool.name) is not None
        folders = [root for root in roots if wants_folder or not wants_file]
        return [Found(root, (), "configured") for root in folders[:1]] if len(folders) == 1 else []

    async def _named_folder(self, tool: CatalogTool, roots: Sequence[str]) -> Found | None:
        """A word of the request that is not the tool's own, and that the server's search finds as one path."""
        own = set(with_synonyms(words(f"{tool.server} {split_name(tool.name)} {summary(tool.description)}")))
        for word in [each for each in self._request.words if not own & set(with_synonyms(each.stems))][:MOST_SEARCHED]:
            path = await self._whole_path(word.text, roots)
            if path in self._searched:
                return Found(path, ((word.start, word.end),), "listed")
        return None

    async def _whole_path(self, path: str, roots: Sequence[str]) -> str:
        """A relative one is found by the server's own search, or stands directly in what it may see."""
        if os.path.isabs(path) or not roots:
            return path
        for searcher in self._tools:
            required = searcher.parameters.get("required", [])
            if not {"search", "find", "glob"} & set(split_name(searcher.name).split()) or len(required) != 2:
                continue
            places = [name for name in required if re.search("path|dir|folder|root", name, re.IGNORECASE)]
            patterns = [name for name in required if re.search("pattern|glob|name", name, re.IGNORECASE)]
            if places and patterns:
                reading = await self._ask(searcher, {places[0]: roots[0], patterns[0]: f"**/{path}"})
                found = [text for text in (reading.texts if reading else ()) if text.endswith(f"/{path}")]
                if len(found) == 1:
                    self._searched.add(found[0])
                    return found[0]
        return os.path.normpath(os.path.join(roots[0], path))

    async def _roots(self) -> list[str]:
        """Folders of the server's command line; else what a tool of its says that it may see."""
        if self._roots_found is None:
            self._roots_found = _configured_folders(self._server)
            for lister in self._tools if not self._roots_found else ():
                if _takes_nothing(lister) and {"list", "director"} <= set(words(lister.name)):
                    reading = await self._ask(lister, {})
                    self._roots_found += [text for text in (reading.texts if reading else []) if os.path.isabs(text)]
        return self._roots_found

    async def _listed(self, tool: CatalogTool, name: str) -> list[Found]:
        """Values that another tool of the server lists, and the request says."""
        meant = set(words(split_name(name))) - set(words("name names id ids"))
        for lister in self._tools:
            if lister is tool or not meant & set(words(lister.name)) or not _lists_something(lister):
                continue
            ways = [{}] if _takes_nothing(lister) else [each.arguments for each in await self.fill(lister)]
            reading = await self._ask(lister, ways[0]) if ways else None
            texts = dict.fromkeys(reading.texts) if reading else {}
            said = [
                Found(text, tuple(spans), "listed")
                for text in texts
                if (spans := occurrences(text, self._request.text))
            ]
            if said:
                return [each for each in said if not _is_part(each, said)]
        return []

    def _free_text(self, tool: CatalogTool, name: str, told: str) -> list[Found]:
        """A quoted text; for tools that search, what of the request is not about the tool itself."""
        quoted = self._request.mentions("quoted")
        if len(quoted) == 1:
            return [_said(quoted[0])]
        if re.search("pattern|glob", name, re.IGNORECASE) and (found := _glob(self._request.text)):
            return [found]
        if quoted or not re.search(r"search|find|lookup|query", f"{tool.name} {name}", re.IGNORECASE) or is_sql(told):
            return []
        own = set(with_synonyms(words(f"{tool.server} {tool.name} {tool.description[:200]}")))
        rest = [word for word in self._request.words if not own & set(with_synonyms(word.stems))]
        if not rest or not re.search(r"\b(?:for|about|on|of|with|mentions?)\s+$", self._request.text[: rest[0].start]):
            return []
        if not all(self._request.text[a.end : b.start].isspace() for a, b in pairwise(rest)):
            return []
        span = (rest[0].start, rest[-1].end)
        return [Found(self._request.text[slice(*span)], (span,))]


def unexplained(request: Request, tool: CatalogTool, filled: Filled, *, must_be_named: bool = True) -> list[str]:
    """Words of the request that neither the tool's own words nor the arguments account for. `must_be_named`: without
    arguments the request must say, or mean, the tool's name."""
    if filled.is_whole:
        return []
    parameters = " ".join(split_name(each).replace("not ", "") for each in tool.parameters.get("properties", {}))
    named = f"{tool.server} {split_name(tool.name)}"
    told = {*words(f"{named} {parameters} {tool.description[:_TOLD_CHARS]}")}
    own = set(words(named))
    meant = {*told, *with_synonyms(words(f"{named} {parameters} {summary(tool.description)}"))}
    told_before = _told_before(request, filled)
    left = [
        word.text
        for word in request.words
        if not is_within(word, [*filled.spans, *told_before]) and not _accounts_for(word, request, meant, own)
    ]
    if must_be_named and not filled.spans and not _is_named(request, tool):
        left.append(NOT_NAMED)
    media = _media(request)
    if not media and request.mentions("path") and _MEDIA & set(words(tool.name)):
        left.append("(no media)")
    return left + [kind for kind in media if kind not in told]


def _told_before(request: Request, filled: Filled) -> list[Span]:
    """What stands before the question itself, where the arguments take up something of it: the rest of it is story."""
    begin = request.asked_part[0]
    return [(0, begin)] if any(end <= begin for _, end in filled.spans) else []


def _accounts_for(word: Word, request: Request, meant: set[str], own: set[str]) -> bool:
    """Whether a tool's words mean this one; "not staged" is meant by unstaged, and not by staged."""
    if re.search(r"\bnot\s+(?:yet\s+)?$", request.text[: word.start], re.IGNORECASE):
        return bool({f"un{stem}" for stem in word.stems} & (meant | own)) or not set(word.stems) & own
    return bool(meant & set(with_synonyms(word.stems)))


def _is_named(request: Request, tool: CatalogTool) -> bool:
    """Whether the request says a word of the tool's name, means two of them, or asks with a word of its summary."""
    own = words(f"{tool.server} {split_name(tool.name)}")
    said = [word.stems for word in request.words]
    if any(set(stems) & set(own) for stems in said):
        return True
    if sum(bool(set(with_synonyms(stems)) & set(with_synonyms(own))) for stems in said) >= 2:
        return True
    told = set(words(summary(tool.description)))
    return request.asks and any(set(stems) & told for stems in said)


def _media(request: Request) -> set[str]:
    """Kinds of files in the request that are no text: image, audio, video."""
    kinds = (mimetypes.guess_type(str(each.value))[0] or "" for each in request.mentions("path"))
    return {stem(kind.partition("/")[0]) for kind in kinds if kind.startswith(("image/", "audio/", "video/"))}


def _said(mention: Mention) -> Found:
    return Found(mention.value, ((mention.start, mention.end),))


def _glob(text: str) -> Found | None:
    """Of "csv files": **/*.csv."""
    match = re.search(r"(?:\.|\b)(\w{2,5})\s+files?\b", text, re.IGNORECASE)
    if match is None or mimetypes.guess_type(f"x.{match[1].lower()}")[0] is None:
        return None
    return Found(f"**/*.{match[1].lower()}", (match.span(),))


def _items(schema: Mapping[str, Any]) -> Any:
    items = schema.get("items")
    return {"description": schema.get("description", ""), **items} if isinstance(items, Mapping) else None


def _is_of_folders(tool: CatalogTool) -> bool:
    return bool({"director", "fold", "tree"} & set(words(tool.name)))


def _takes_nothing(tool: CatalogTool) -> bool:
    return not tool.parameters.get("required")


def _lists_something(tool: CatalogTool) -> bool:
    told = re.match(r"list(?:s|ing)?\b", tool.description.strip(), re.IGNORECASE)
    return tool.hints.read_only is not False and (told is not None or "list" in words(tool.name))


def _is_part(found: Found, others: Sequence[Found]) -> bool:
    """Whether another one's name holds this one's, at the same place."""
    (start, end), *_ = found.spans
    return any(
        other is not found and a <= start and end <= b and (b - a) > (end - start)
        for other in others
        for a, b in other.spans
    )


def _configured_folders(server: ServerConfig) -> list[str]:
    if not isinstance(server.launch, StdioLaunch):
        return []
    base = server.folder / (server.launch.cwd or "")
    found = []
    for arg in server.launch.args:
        path = Path(arg) if os.path.isabs(arg) else base / arg
        if (os.path.isabs(arg) or arg.startswith(".")) and path.is_dir():
            found.append(os.path.normpath(path))
    return found
