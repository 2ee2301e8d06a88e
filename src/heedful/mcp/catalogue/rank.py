"""Scores of all tools for a request: BM25 over their words, and cosines of an encoder's vectors where there is one.

The weights and thresholds were chosen on the calibration half of tests/mcp/requests.jsonl and are judged on its other
half by bench/tool_selection.py. What is compared: a tool's name, server, description, parameters and their enums; of a
request its words, and the kinds of things in it (a path, an address, a time of day), for a tool's author names those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from heedful.mcp.catalogue.bm25 import BM25, split_name, stem, words
from heedful.mcp.catalogue.catalog import CatalogTool
from heedful.mcp.catalogue.talk import TALK
from heedful.mcp.catalogue.thesaurus import with_synonyms
from heedful.mcp.schemas.signature import summary

if TYPE_CHECKING:
    import numpy as np

    from heedful.cost.encoder_receipt import EncoderReceipt
    from heedful.engine.embedder import Embedder

WORDS_WEIGHT, NEED_WORDS_WEIGHT = 0.5, 0.3
"""Of the words' score, which is in [0, 1), beside a cosine: for the order of tools, and for whether any is needed."""
TALK_WEIGHT = 1.3
TALK_NEAREST = 3
"""Kinds of talk whose nearness is averaged."""
HALF_WORDS = 3.0
"""A best BM25 score of so much counts half."""
THRESHOLD = -0.095
"""With an encoder."""
WORDS_TALK_WEIGHT = 0.5
WORDS_THRESHOLD = 0.21
"""Without."""
LEAST_TOOLS = 50
"""Among fewer tools words are as rare as among so many; scores of small catalogues then mean the same."""
_DESCRIPTION_CHARS = 1000
_PARAMETER_WORDS = 40
_NAME_TIMES, _SERVER_TIMES = 3, 2

_URL = re.compile(r"https?://\S+")
_PATH = re.compile(r"(?<!\w)(?:~|\.{0,2})?/[\w./-]+|\b[\w-]+\.[A-Za-z][A-Za-z0-9]{0,4}\b")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)")
_CLOCK = re.compile(r"\b(?:[01]?\d|2[0-4])[:.][0-5]\d\b|\b\d{1,2} ?[ap]m\b|\bo'clock\b", re.IGNORECASE)


@dataclass(frozen=True)
class Ranking:
    """Of one request over all tools of a ranker."""

    scores: tuple[float, ...]
    """One a tool, in the ranker's order; the higher, the better it fits."""
    need: float
    """How much speaks for a tool rather than for none; to be compared with `threshold`."""
    threshold: float
    receipt: EncoderReceipt | None
    """What the request's vector cost."""


class ToolRanker:
    """An index over tools. An embedder reads their texts once, here: 58 tools take minilm 3 s of processor time."""

    def __init__(self, tools: Sequence[CatalogTool], embedder: Embedder | None = None) -> None:
        self._words = BM25([with_synonyms(_tool_words(tool)) for tool in tools], LEAST_TOOLS)
        self._talk_words = BM25([with_synonyms(words(text)) for text in TALK])
        self._embedder = embedder
        self._vectors: np.ndarray[Any, Any] | None = None
        if embedder is not None and tools:
            views = [view for tool in tools for view in _views(tool)]
            found = embedder.embed([*views, *TALK], truncate=True).vectors
            self._vectors = found[: len(views)].reshape(len(tools), -1, found.shape[1]).mean(axis=1)
            self._talk = found[len(views) :]

    def rank(self, request: str) -> Ranking:
        """One score a tool, and whether any is needed."""
        asked = request_words(request)
        shared = self._words.scores(asked)
        best = max(shared, default=0.0)
        by_words = [score / (best + HALF_WORDS) for score in shared]
        if self._embedder is None or self._vectors is None:
            talk = max(self._talk_words.scores(asked))
            need = best / (best + HALF_WORDS) - WORDS_TALK_WEIGHT * talk / (talk + HALF_WORDS)
            return Ranking(tuple(by_words), need, WORDS_THRESHOLD, None)
        batch = self._embedder.embed([request], truncate=True)
        cosines = self._vectors @ batch.vectors[0]
        pairs = [(float(cosine), each) for cosine, each in zip(cosines, by_words, strict=True)]
        scores = [cosine + WORDS_WEIGHT * each for cosine, each in pairs]
        nearest = int(cosines.argmax())  # what the encoder likes best is among the best, whatever the words say
        scores[nearest] = max(scores[nearest], sorted(scores)[-2:][0])
        talk = sum(sorted(map(float, self._talk @ batch.vectors[0]))[-TALK_NEAREST:]) / TALK_NEAREST
        need = max(cosine + NEED_WORDS_WEIGHT * each for cosine, each in pairs) - TALK_WEIGHT * talk
        return Ranking(tuple(scores), need, THRESHOLD, batch.receipt)


def request_words(request: str) -> list[str]:
    """Stems of a request, those of the kinds of things in it, and the thesaurus' marks."""
    kinds: list[str] = []
    if _URL.search(request):
        kinds += ["url", "page"]
    rest = _URL.sub(" ", request)
    for path in _PATH.findall(rest):
        kinds += ["file" if re.search(r"\w\.\w+$", path) else "directory", "path"]
    if _CLOCK.search(rest):
        kinds.append("time")
    rest = _CLOCK.sub(" ", _PATH.sub(" ", rest))
    if len(_NUMBER.findall(rest)) > 1:
        kinds.append("numbers")
    pairs = ["".join(pair) for pair in pairwise(re.findall("[a-z]+", rest.lower()))]  # check out, time zone
    return with_synonyms(words(rest) + words(" ".join(dict.fromkeys(kinds))) + list(map(stem, pairs)))


def _tool_words(tool: CatalogTool) -> list[str]:
    told = [word for text in _parameter_texts(tool.parameters) for word in words(text)]
    said = words(summary(tool.description, 400))
    return words(tool.name) * _NAME_TIMES + words(tool.server) * _SERVER_TIMES + said + told[:_PARAMETER_WORDS]


def _views(tool: CatalogTool) -> tuple[str, ...]:
    """Texts about one tool whose vectors are averaged."""
    name = split_name(tool.name)
    return (
        f"{name}: {tool.description[:_DESCRIPTION_CHARS]}",
        f"{name}. {summary(tool.description)}",
        f"{name}: {', '.join(split_name(each) for each in tool.parameters.get('properties', {}))}",
        f"{tool.server} {name}",
    )


def _parameter_texts(schema: Any) -> Iterator[str]:
    """Names, descriptions and enums of parameters, nested ones too."""
    if not isinstance(schema, Mapping):
        return
    for name, each in (schema.get("properties") or {}).items():
        yield name
        if isinstance(each, Mapping):
            yield str(each.get("description", ""))
            yield from map(str, each.get("enum", []))
            yield from _parameter_texts(each)
            yield from _parameter_texts(each.get("items"))
