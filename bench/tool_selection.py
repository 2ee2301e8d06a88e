"""Choosing a request's tools among the 58 of eight reference servers: recall at 5, abstention, tokens before the model.

    python bench/tool_selection.py [--calibrate] [--words-only] [--decider NAME] [--misses]

Labelled requests: tests/mcp/requests.jsonl (`tools`: any of them will do; none: no tool is needed). What was chosen and
fitted looked at the calibration half. The table is of the others: `test`, by the hand that wrote the calibration half;
`further`, by another hand, whose misses were looked at and two faults mended; `last`, by that hand, asked after that.
The catalogue is a recorded one, tests/golden/mcp/catalogue.json. A request is a miss too when its tool would be there
but selection abstained.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

from heedful.mcp.catalogue.catalog import Catalogue, ListedTool, ServerListing, make_catalogue
from heedful.mcp.catalogue.select import Selection, ToolSelector

TESTS = Path(__file__).parent.parent / "tests"
LOST = 0.01
"""Share of calibration's requests for tools that the threshold may lose."""


@dataclass(frozen=True)
class Row:
    request: str
    tools: tuple[str, ...]
    half: str


@dataclass(frozen=True)
class Figures:
    requests_with_tool: int
    requests_without: int
    recall_at_1: float
    recall_at_5: float
    recall_low: float
    """Clopper and Pearson's lower bound, 95 %, one-sided."""
    abstained: float
    schema_tokens_mean: float
    schema_tokens_most: int
    all_schema_tokens: int


def labelled(*halves: str) -> list[Row]:
    lines = (TESTS / "mcp" / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [Row(found["request"], tuple(found["tools"]), found["half"]) for found in map(json.loads, lines)]
    return [row for row in rows if row.half in halves]


def recorded_catalogue() -> Catalogue:
    servers = json.loads((TESTS / "golden" / "mcp" / "catalogue.json").read_bytes())
    return make_catalogue(
        [ServerListing(each["server"], [ListedTool(**tool) for tool in each["tools"]]) for each in servers]
    )


def smollm2_counter() -> Callable[[str], int]:
    from heedful.text.tokenizer import Tokenizer
    from heedful.weights.gguf_file import read_gguf
    from heedful.weights.sources import resolve

    tokenizer = Tokenizer.from_gguf(read_gguf(resolve("smollm2").path).metadata)
    return lambda text: len(tokenizer.encode(text, add_bos=False))


def figures(rows: Sequence[Row], chosen: Sequence[Selection]) -> Figures:
    pairs = list(zip(rows, chosen, strict=True))
    with_tool = [(row, found) for row, found in pairs if row.tools]
    without = [found for row, found in pairs if not row.tools]
    hits = sum(_is_hit(row, found) for row, found in with_tool)
    tokens = [found.schema_tokens for found in chosen]
    return Figures(
        requests_with_tool=len(with_tool),
        requests_without=len(without),
        recall_at_1=sum(_is_hit(row, found, 1) for row, found in with_tool) / len(with_tool),
        recall_at_5=hits / len(with_tool),
        recall_low=_lower_bound(hits, len(with_tool)),
        abstained=sum(found.abstained for found in without) / len(without),
        schema_tokens_mean=sum(tokens) / len(tokens),
        schema_tokens_most=max(tokens),
        all_schema_tokens=chosen[0].all_schema_tokens,
    )


def _is_hit(row: Row, found: Selection, k: int = 5) -> bool:
    best = sorted(found.chosen, key=lambda each: -each.score)[:k]
    return any(each.tool.model_name in row.tools for each in best)


def _lower_bound(hits: int, total: int) -> float:
    """The rate at which as many hits would be a 5 % chance."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        tail = sum(comb(total, i) * rate**i * (1 - rate) ** (total - i) for i in range(hits, total + 1))
        low, high = (rate, high) if tail < 0.05 else (low, rate)
    return low


def threshold(rows: Sequence[Row], chosen: Sequence[Selection]) -> float:
    """The highest that loses at most LOST of the requests for tools."""
    needs = sorted(found.need for row, found in zip(rows, chosen, strict=True) if row.tools)
    return needs[int(LOST * len(needs))] - 1e-6


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Selection of tools, judged on labelled requests.")
    parser.add_argument("--calibrate", action="store_true", help="the calibration half, and its threshold")
    parser.add_argument("--words-only", action="store_true", help="without an encoder")
    parser.add_argument("--decider", help="a decision model that has the last word")
    parser.add_argument("--misses", action="store_true", help="print requests that went wrong")
    options = parser.parse_args(arguments)
    rows = labelled("calibration") if options.calibrate else labelled("test", "further", "last")
    extras: dict[str, Any] = {}
    if not options.words_only:
        from heedful.engine.embedder import load_embedder

        extras["embedder"] = load_embedder("minilm", threads=1)
    if options.decider:
        from heedful.decide.load import load_decider

        extras["decider"] = load_decider(options.decider)
    selector = ToolSelector(recorded_catalogue(), smollm2_counter(), **extras)
    chosen = [selector.select(row.request) for row in rows]
    found = figures(rows, chosen)
    for name, value in asdict(found).items():
        print(f"{name:22} {value:.3f}" if isinstance(value, float) else f"{name:22} {value}")
    for row, each in zip(rows, chosen, strict=True):
        is_wrong = not (each.abstained if not row.tools else _is_hit(row, each))
        if options.misses and is_wrong:
            print(f"  {row.request!r} wants {row.tools}: need {each.need:.3f}, {[t.model_name for t in each.tools]}")
    extra = {"threshold": threshold(rows, chosen)} if options.calibrate else {}
    halves = sorted({row.half for row in rows})
    print(json.dumps({"halves": halves, "words_only": options.words_only, **asdict(found), **extra}))


if __name__ == "__main__":
    main(sys.argv[1:])
