"""The few tools of a request: names first, few tokens, recent ones stay, none where none fits; on labelled rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from heedful.cost.formulas import Shape
from heedful.decide.answer import Answers, ChoiceAnswer
from heedful.mcp.catalogue.bm25 import BM25, split_name, words
from heedful.mcp.catalogue.catalog import Catalogue, ListedTool, ServerListing, make_catalogue
from heedful.mcp.catalogue.rank import request_words
from heedful.mcp.catalogue.select import NONE, ToolSelector
from heedful.text.tool_formats import checked_tools

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import tool_selection
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return tool_selection


@pytest.fixture(scope="module")
def catalogue(bench: ModuleType) -> Catalogue:
    return bench.recorded_catalogue()


def count(text: str) -> int:
    """Tokens of a model that has four characters a token."""
    return -(-len(text) // 4)


@pytest.fixture(scope="module")
def selector(catalogue: Catalogue) -> ToolSelector:
    return ToolSelector(catalogue, count)


def test_words() -> None:
    assert words("Deletes the entityNames of git_log!") == ["delet", "entit", "nam", "git", "log"]
    assert split_name("getHTTPResponse_code2") == "get http response code 2"
    assert {"url", "pag"} <= set(request_words("read https://a.b/c"))
    assert {"fil", "path"} <= set(request_words("open config/settings.toml"))
    assert "tim" in request_words("see you at 17:30")
    assert "checkout" in request_words("check out main")
    assert {"numb"} <= set(request_words("add 128.5 and 71.25")) - set(request_words("see you at 17.30"))


def test_bm25_by_hand() -> None:
    """Three documents, one word in one of them once: idf · f·(k1+1) / (f + k1·(1-b+b·length/mean))."""
    index = BM25([["a", "b"], ["b", "c", "c", "d"], ["e"]])
    expected = 0.9808292530117263 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / (7 / 3)))
    assert index.scores(["a"]) == pytest.approx([expected, 0.0, 0.0])
    assert index.scores(["a", "a", "zebra"]) == pytest.approx([expected, 0.0, 0.0])
    assert BM25([[], []]).scores(["a"]) == [0.0, 0.0]
    assert BM25([["a"], ["a"]], least=50).scores(["a"])[0] > 3 > 0.2 > BM25([["a"], ["a"]]).scores(["a"])[0]


def test_few_tools_and_few_tokens(selector: ToolSelector) -> None:
    found = selector.select("Which files in my git repository are staged for the next commit?")
    assert not found.abstained
    assert 1 <= len(found.tools) <= 5
    assert "git__git_diff_staged" in [tool.model_name for tool in found.tools]
    assert found.schema_tokens <= 600 < found.all_schema_tokens
    assert found.schema_tokens == sum(count(each.tool.text(each.form)) for each in found.chosen)
    assert found.all_schema_tokens == sum(
        count(json.dumps(t.as_json(), ensure_ascii=False)) for t in selector.catalogue.tools
    )
    checked_tools(found.as_json())
    assert json.dumps(found.to_dict())


def test_more_words_where_the_budget_allows(catalogue: Catalogue) -> None:
    request = "Shows the commit logs of this git repository"
    forms = {
        budget: {
            each.tool.model_name: each.form
            for each in ToolSelector(catalogue, count, token_budget=budget).select(request).chosen
        }
        for budget in (10, 600, 10_000)
    }
    assert set(forms[10].values()) == {"signature"}, "the least that a tool takes"
    assert set(forms[10_000].values()) == {"full"}
    assert forms[600]["git__git_log"] == "full", "the best one first"


def test_names_come_first_whatever_they_mean(selector: ToolSelector) -> None:
    for request in (
        "please use memory__read_graph",
        "call `echo` on it",
        "try git_reset, then thinking/sequentialthinking",
        "Hello, read_media_file!",
    ):
        found = selector.select(request)
        assert not found.abstained
        assert found.chosen[0].cause == "named", request
    assert [each.tool.name for each in selector.select("try git_reset, then thinking/sequentialthinking").chosen][
        :2
    ] == [
        "git_reset",
        "sequentialthinking",
    ]
    assert all(
        each.cause != "named" for each in selector.select("I heard an echo; fetch me a read_media_file_x").chosen
    )


def test_no_tool_for_talk_and_nothing(selector: ToolSelector) -> None:
    for request in ("", "   ", "Hello!", "Thank you so much, goodbye", "\ud800", "?" * 10_000):
        found = selector.select(request)
        assert found.abstained, request
        assert (found.chosen, found.schema_tokens, found.as_json(), found.text()) == ((), 0, [], "")


def test_recent_tools_stay_in_their_places(selector: ToolSelector) -> None:
    found = selector.select("Thank you!", recent=["time__convert_time", "gone__tool", "git__git_log", "git__git_log"])
    assert found.abstained
    assert [(each.tool.model_name, each.cause) for each in found.chosen] == [
        ("time__convert_time", "recent"),
        ("git__git_log", "recent"),
    ]
    more = selector.select(
        "delete the entities of the knowledge graph", recent=["a", "time__convert_time", "git__git_log"]
    )
    assert [each.tool.model_name for each in more.chosen][:2] == ["time__convert_time", "git__git_log"]
    assert len(more.chosen) == 5
    assert "memory__delete_entities" in [each.tool.model_name for each in more.chosen]


def test_always() -> None:
    tools = [ListedTool(name, "A tool.", {"type": "object"}) for name in ("now", "other")]
    selector = ToolSelector(make_catalogue([ServerListing("s", tools, always=["now"])]), count)
    found = selector.select("Hello!")
    assert found.abstained
    assert [(each.tool.name, each.cause) for each in found.chosen] == [("now", "always")]


def test_an_empty_catalogue() -> None:
    found = ToolSelector(make_catalogue([]), count).select("What time is it?")
    assert (found.chosen, found.abstained, found.all_schema_tokens) == ((), True, 0)


def test_visits_by_hand(selector: ToolSelector) -> None:
    """One layer, one head: a prompt of n tokens makes n (n + 1) / 2 visits."""
    found = selector.select("Which files are staged for the next commit of my git repository?")
    chosen, everything, prompt = found.schema_tokens, found.all_schema_tokens, 40
    visits = found.visits(Shape(layers=1, heads=1), prompt)

    def cold(tokens: int) -> int:
        return tokens * (tokens + 1) // 2

    assert visits.chosen == cold(prompt + chosen) - cold(prompt)
    assert visits.all_tools == cold(prompt + everything) - cold(prompt)
    assert visits.selection == 0
    assert selector.select("Hello!").visits(Shape(layers=3, heads=2), 10).chosen == 0


class ScriptedDecider:
    name = "scripted"

    def __init__(self, favourite: str) -> None:
        self._favourite = favourite

    def decide(self, state: Any, questions: Any) -> Answers:
        (question,) = questions
        rest = 0.1 / (len(question.labels) - 1)
        answer = ChoiceAnswer({label: 0.9 if label == self._favourite else rest for label in question.labels})
        return Answers("scripted", {"tool": answer}, None)  # type: ignore[arg-type]


def test_a_decider_has_the_last_word(catalogue: Catalogue) -> None:
    request = "Which files are staged for the next commit of my git repository?"
    found = ToolSelector(catalogue, count, decider=ScriptedDecider("git__git_add")).select(request)  # type: ignore[arg-type]
    assert found.chosen[0].tool.model_name == "git__git_add"
    assert not found.abstained
    none = ToolSelector(catalogue, count, decider=ScriptedDecider(NONE)).select(request)  # type: ignore[arg-type]
    assert none.abstained


@pytest.fixture(scope="module")
def judged(bench: ModuleType, catalogue: Catalogue, minilm_dir: Path, smollm2_path: Path) -> Callable[[], Any]:
    from heedful.engine.embedder import load_embedder

    rows = bench.labelled("test", "last")
    selector = ToolSelector(catalogue, bench.smollm2_counter(), embedder=load_embedder(str(minilm_dir), threads=1))
    chosen = [selector.select(row.request) for row in rows]
    return lambda: (bench.figures(rows, chosen), chosen)


def test_labelled_rows(bench: ModuleType, catalogue: Catalogue) -> None:
    test, fitted = bench.labelled("test"), bench.labelled("calibration")
    requests = [row.request for row in [*test, *fitted, *bench.labelled("further", "last")]]
    assert len(set(requests)) == len(requests)
    for rows in (test, fitted):
        assert {name for row in rows for name in row.tools} == set(catalogue)
    assert sum(not row.tools for row in test + fitted) >= 30


def test_the_judged_rows(judged: Callable[[], Any]) -> None:
    """139 that nothing was fitted to, 36 of which need no tool. The goal: 95 % found, 80 % abstained, 600 tokens.
    `python bench/tool_selection.py` prints such figures.
    """
    found, chosen = judged()
    assert found.recall_at_5 >= 0.95
    assert found.abstained >= 0.80
    assert found.schema_tokens_most <= 600
    assert all(len(each.chosen) <= 5 for each in chosen)
    assert found.all_schema_tokens > 7000
    assert all(each.receipt is not None and each.visits(Shape(30, 9), 20).selection > 0 for each in chosen)
