"""Calls: what a model wrote as arguments, the policy, repeats, the cache, records; against real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import QUICK
from heedful.errors import McpBadArguments, McpCallFailed, McpDenied, McpRepeated, McpUnknownTool
from heedful.mcp.calls.call import CallDone, ToolCaller
from heedful.mcp.calls.handles import HandleStore
from heedful.mcp.calls.policy import lifetime_s, may_repeat, verdict
from heedful.mcp.calls.results import Budget, Shower
from heedful.mcp.catalogue.catalog import CatalogTool, ToolHints
from heedful.mcp.client.manager import McpManager
from heedful.mcp.schemas.arguments import Arguments, fitted, parsed
from heedful.mcp.schemas.validate import has_more_values, is_quick
from heedful.mcp.settings.config import McpConfig, ServerConfig, config_from_json

Running = Callable[[Any], Any]
Hostile = Callable[..., McpConfig]
JSON_OBJECT = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
ALLOWED = {"allow": ["*"]}


def caller(manager: McpManager, **options: Any) -> ToolCaller:
    return ToolCaller(manager, Shower(HandleStore(), Budget(), lambda text: -(-len(text) // 4)), **options)


def body(done: CallDone) -> Any:
    return json.loads(done.text.rpartition("]\n")[2])


# arguments


@given(JSON_OBJECT)
def test_right_json_is_read_as_it_is(value: dict[str, Any]) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        assert parsed(text, "t", "t()") == Arguments(value, ())
    assert parsed(value, "t", "t()") == Arguments(value, ())


@given(JSON_OBJECT)
def test_trivial_slips_are_repaired_and_told(value: dict[str, Any]) -> None:
    text = json.dumps(value)
    for wrong in (f"```json\n{text}\n```", json.dumps(text), repr(value)):
        read = parsed(wrong, "t", "t()")
        assert read.values == value
        assert read.repairs or wrong == text, wrong
    if value:
        read = parsed(text[:-1] + ", }", "t", "t()")
        assert (read.values, len(read.repairs)) == (value, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are none; for no arguments write {}"),
        ("  \n", "there are none"),
        ("null", "one JSON object"),
        ("[1]", "one JSON object"),
        ('"tea"', "not JSON"),
        ('{"a": 1', "not JSON"),
        ("{a: 1}", "not JSON"),
        ('{"a": 1} and more', "not JSON"),
        ('{"a": 1, "a": 2}', "a key stands twice"),
        ('{"a": NaN}', "NaN is no JSON value"),
        ("{'a': {1, 2}}", "not JSON"),
        ("{1: 2}", "not JSON"),
        ("__import__('os').system('true')", "not JSON"),
        ('{"a": ' + "[" * 100_000, "nested too deep"),
        ("{" + " " * (2 << 20), "at most 1,048,576 are read"),
    ],
)
def test_what_is_no_object_is_never_taken_for_an_empty_one(text: str, said: str) -> None:
    with pytest.raises(McpBadArguments, match=said) as caught:
        parsed(text, "shop__stock", "shop__stock(item: str)")
    assert caught.value.remedy == "It takes: shop__stock(item: str)"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1},
        "x": {"type": "number"},
        "yes": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "integer"}},
        "where": {"type": "object", "properties": {"zip": {"type": "string"}}, "required": ["zip"]},
        "mode": {"enum": ["r", "w"]},
        "code": {"type": "string", "pattern": "^[A-Z]+$"},
    },
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ({"n": "3"}, {"n": 3}),
        ({"n": 3.0, "x": "2.5"}, {"n": 3, "x": 2.5}),
        ({"n": 1, "x": "7"}, {"n": 1, "x": 7}),
        ({"n": 1, "yes": "true"}, {"n": 1, "yes": True}),
        ({"n": 1, "tags": "[1, 2]"}, {"n": 1, "tags": [1, 2]}),
        ({"n": 1, "tags": ["1", 2]}, {"n": 1, "tags": [1, 2]}),
        ({"n": 1, "where": {"zip": "0123"}}, {"n": 1, "where": {"zip": "0123"}}),
        ({"n": 1, "yes": None}, {"n": 1}),
    ],
)
def test_types_that_can_be_meant_in_one_way(given_values: dict[str, Any], expected: dict[str, Any]) -> None:
    made = fitted(Arguments(given_values, ()), SCHEMA, "t", "t()")
    assert made.values == expected
    assert [type(each) for each in made.values.values()] == [type(each) for each in expected.values()]
    assert bool(made.repairs) == (given_values != expected or isinstance(given_values["n"], float))


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        ({}, "'n' is a required property"),
        ({"n": "three"}, "n: 'three' is not of type 'integer'"),
        ({"n": 2.5}, "n: 2.5 is not of type 'integer'"),
        ({"n": "0x10"}, "is not of type 'integer'"),
        ({"n": True}, "n: True is not of type 'integer'"),
        ({"n": 0}, "n: 0 is less than the minimum of 1"),
        ({"n": None}, "n: None is not of type 'integer'"),
        ({"n": 1, "mode": "rw"}, "mode: 'rw' is not one of"),
        ({"n": 1, "where": {}}, "where: 'zip' is a required property"),
        ({"n": 1, "more": 1}, "'more' was unexpected"),
        ({"n": 1, "code": "ab"}, "code: 'ab' does not match"),
        ({"n": 1, "tags": [1, "x"]}, r"tags\[1\]: 'x' is not of type 'integer'"),
    ],
)
def test_what_the_schema_does_not_allow_is_one_line(given_values: dict[str, Any], said: str) -> None:
    with pytest.raises(McpBadArguments, match=said) as caught:
        fitted(Arguments(given_values, ()), SCHEMA, "t", "t(n: int)")
    assert "\n" not in caught.value.message


def test_a_strangers_pattern_costs_no_time() -> None:
    slow = ["(a+)+$", "^(a|aa)+$", "a*a*a*b", "(a|a)" * 9, "a?" * 30 + "a" * 30, "(?:x*)*y", "^[^)]*(b{2}){3}$"]
    assert [is_quick(pattern) for pattern in slow] == [False] * len(slow)
    quick = ["^[A-Z]+$", r"^\d{4}-\d{2}$", "^(a|b)$", r"^\(\)\+\*\{x$", "^[(+*]{3}$"]
    assert [is_quick(pattern) for pattern in quick] == [True] * len(quick)
    schema = {
        "type": "object",
        "properties": {"patternProperties": {"type": "string", "pattern": "(a+)+$"}},
        "patternProperties": {"(a+)+$": {"type": "integer"}},
        "additionalProperties": False,
    }
    evil = "a" * 5000 + "!"  # takes longer than the world where these patterns are tried
    fitted(Arguments({"patternProperties": evil, evil: "x"}, ()), schema, "t", "t()")
    with pytest.raises(McpBadArguments, match="is not of type 'string'"):
        fitted(Arguments({"patternProperties": 3}, ()), schema, "t", "t()")


# policy


def configured(**ours: Any) -> ServerConfig:
    return config_from_json({"mcpServers": {"s": {"command": "x", "x-heedful": ours}}}).servers["s"]


def tool(name: str, **hints: bool) -> CatalogTool:
    return CatalogTool(f"s__{name}", "s", name, "", {}, None, ToolHints(**hints), "f", (), False)


@pytest.mark.parametrize(
    ("ours", "hints", "action"),
    [
        ({}, {"read_only": True}, "ask"),  # anybody can say that
        ({"trusted": True}, {"read_only": True}, "allow"),
        ({"trusted": True}, {"read_only": True, "destructive": True}, "ask"),
        ({"trusted": True}, {}, "ask"),
        ({"allow": ["get_*"]}, {}, "allow"),
        ({"allow": ["*"], "ask": ["get_*"]}, {}, "ask"),
        ({"allow": ["*"], "ask": ["*"], "deny": ["*_all"]}, {}, "deny"),
        ({"trusted": True, "ask": ["*"]}, {"read_only": True}, "ask"),
        ({"allow": ["get"]}, {}, "ask"),
    ],
)
def test_the_policy(ours: dict[str, Any], hints: dict[str, bool], action: str) -> None:
    assert verdict(tool("get_all", **hints), configured(**ours)).action == action


def test_what_may_be_repeated_and_used_again() -> None:
    trusted = configured(trusted=True, cache={"get_*": 60, "get_all": 5})
    assert may_repeat(tool("x", idempotent=True), trusted)
    assert not may_repeat(tool("x", idempotent=True), configured())
    assert not may_repeat(tool("x"), trusted)
    assert [lifetime_s(tool(name), trusted) for name in ("get_all", "get_one", "put")] == [5, 60, 0]


def test_asking_denying_and_nobody_to_ask(hostile: Hostile, running: Running) -> None:
    asked: list[tuple[str, Any, str]] = []

    async def work() -> None:
        async with McpManager(hostile("plain"), trust=True, patience=QUICK) as manager:
            headless = await caller(manager).call("bad__echo", {"a": 1})
            assert isinstance(headless.error, McpDenied)
            assert headless.record.outcome == "denied"
            assert headless.text == "error: bad__echo is not allowed: server 'bad' is not trusted"
            assert "allow of x-heedful" in headless.error.remedy

            async def decide(tool: CatalogTool, arguments: Any, why: str) -> bool:
                asked.append((tool.name, arguments, why))
                return bool(arguments["a"] == 1)

            person = caller(manager, approve=decide)
            assert body(await person.call("bad__echo", '{"a": 1}')) == {"a": 1}
            refused = await person.call("bad__echo", '{"a": 2}')
            assert refused.text == "error: bad__echo: the user does not want this call"
            again = await person.call("bad__echo", '{"a": 2}')
            assert isinstance(again.error, McpDenied)
            assert [arguments["a"] for _, arguments, _ in asked] == [1, 2], "nobody is asked the same twice in a turn"

    running(work())


# calls


def test_a_call_its_record_and_what_goes_wrong(both_eras: McpConfig, running: Running) -> None:
    async def work() -> None:
        async with McpManager(both_eras, trust=True, patience=QUICK) as manager:
            calls = caller(manager, approve=lambda *_: True)
            done = await calls.call("both__add", '```\n{"a": "40", "b": 2,}\n```')
            assert done.text == "[data from both__add]\n42"
            record = done.record
            assert (record.tool, record.server, record.outcome, record.cached) == ("both__add", "both", "ok", False)
            assert (record.result_bytes, record.shown_tokens, record.held_tokens) == (2, 6, 0)
            assert record.ms > 0
            assert len(record.repairs) == 3
            wrong = await calls.call("both__add", {"a": 1})
            assert wrong.text == (
                "error: arguments of both__add: 'b' is a required property. It takes: both__add(a: int, b: int)"
            )
            assert wrong.record.outcome == "bad_arguments"
            none = await calls.call("both__ad", {})
            assert isinstance(none.error, McpUnknownTool)
            assert none.text == "error: no MCP server offers a tool 'both__ad'"
            late = await calls.call("both__slow", {"seconds": 60}, timeout_s=0.3)
            assert late.record.outcome == "failed"
            assert "took longer than 0.3 s" in late.text

    running(work())


def test_what_a_tool_promises_of_its_results(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        async with McpManager(hostile("promises", ours=ALLOWED), trust=True, patience=QUICK) as manager:
            catalogue = await manager.catalogue()
            schema = catalogue["bad__kept"].output_schema
            assert schema is not None
            assert schema["required"] == ["n"], "the catalogue, and what is agreed to, still have it"
            calls = caller(manager)
            done = {name: await calls.call(f"bad__{name}", {}) for name in ("kept", "broken", "slow", "many", "none")}
            assert body(done["kept"]) == {"n": 1}
            assert "not what its output schema says: n: 'one' is not of type 'integer'" in done["broken"].text
            assert done["slow"].record.outcome == "ok", "its pattern would be tried for ever"
            assert done["many"].record.outcome == "ok", "too many values to look at"
            assert "output schema says: there is none" in done["none"].text

    running(work())


@given(JSON_OBJECT, st.integers(1, 30))
def test_counting_values_stops_in_time(value: dict[str, Any], most: int) -> None:
    def counted(each: Any) -> int:
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        return 1 + sum(map(counted, inner))

    assert has_more_values(value, most) == (counted(value) > most)


def test_a_result_goes_from_tool_to_tool_without_the_model(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        async with McpManager(hostile("plain", ours=ALLOWED), trust=True, patience=QUICK) as manager:
            calls = caller(manager)
            big = await calls.call("bad__big", {"bytes": 1_000_000})
            assert big.record.shown_tokens is not None
            assert big.record.shown_tokens < 1000
            assert (big.record.result_bytes, big.record.held_tokens) == (1_000_000, 250_000 - big.record.shown_tokens)
            passed = await calls.call("bad__echo", '{"text": {"$handle": "h1"}}')
            assert passed.output is not None
            assert json.loads(passed.output.value) == {"text": "x" * 1_000_000}
            unknown = await calls.call("bad__echo", '{"text": {"$handle": "h7"}}')
            assert unknown.text == "error: no result is kept as 'h7'. There are: h1, h2."
            other = await caller(manager).call("bad__echo", {"text": {"$handle": "h1"}})
            assert other.text == "error: no result is kept as 'h1'. There are: none."

    running(work())


def test_the_same_call_again_and_a_third_time(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        async with McpManager(hostile("plain", ours=ALLOWED), trust=True, patience=QUICK) as manager:
            calls = caller(manager)
            first = await calls.call("bad__echo", '{"a": 1, "b": 2}')
            second = await calls.call("bad__echo", '{"b": 2, "a": 1}')
            third = await calls.call("bad__echo", {"a": 1, "b": 2})
            assert (first.record.cached, second.record.cached) == (False, True)
            assert second.text.startswith("[the same call as before")
            assert second.text.endswith(first.text)
            assert isinstance(third.error, McpRepeated)
            assert "was called with the same arguments 3 times" in third.text
            assert (await calls.call("bad__echo", {"a": 1})).record.outcome == "ok"
            calls.new_turn()
            anew = await calls.call("bad__echo", {"a": 1, "b": 2})
            assert (anew.text, anew.record.cached) == (first.text, False)
            refused = [await calls.call("bad__refuse", {}) for _ in range(3)]
            assert isinstance(refused[1].error, McpCallFailed), "what gave no answer is asked again"
            assert [each.record.outcome for each in refused] == ["failed", "failed", "repeated"]

    running(work())


def test_declared_lifetimes_and_equal_calls_at_once(tmp_path: Path, running: Running) -> None:
    server = tmp_path / "counting.py"
    server.write_text(
        "import time\nfrom mcp.server import MCPServer\nserver, n = MCPServer('counting'), [0]\n"
        "@server.tool()\ndef count(wait: float = 0) -> int:\n    time.sleep(wait)\n    n[0] += 1\n    return n[0]\n"
        "@server.tool()\ndef rows() -> str:\n    n[0] += 1\n    return str(n[0]) * 9000\n"
        "server.run('stdio')\n",
        encoding="utf-8",
    )
    ours = {"allow": ["*"], "cache": {"count": 60, "rows": 60}, "prefix": ""}
    config = config_from_json(
        {"mcpServers": {"c": {"command": sys.executable, "args": [str(server)], "x-heedful": ours}}}
    )
    now = [0.0]

    async def work() -> None:
        async with McpManager(config, trust=True, patience=QUICK) as manager:
            store = HandleStore(max_bytes=10_000)
            calls = ToolCaller(manager, Shower(store), clock=lambda: now[0])
            at_once = await asyncio.gather(*(calls.call("count", {"wait": 0.3}) for _ in range(4)))
            assert [body(each) for each in at_once] == [1] * 4
            assert [each.record.cached for each in at_once] == [False, True, True, True]
            calls.new_turn()
            kept = await calls.call("count", {"wait": 0.3})
            assert (body(kept), kept.record.cached) == (1, True)
            calls.new_turn()
            now[0] = 61
            assert body(await calls.call("count", {"wait": 0.3})) == 2
            big = await calls.call("rows", {})
            assert big.shown is not None
            calls.new_turn()
            assert (await calls.call("rows", {})).shown is big.shown
            calls.new_turn()
            store.keep("x" * 9000, source="t")  # the rows have to go
            anew = await calls.call("rows", {})
            assert anew.shown is not None
            assert anew.shown.handles[0].id == "h3", "an answer whose handle is gone is no answer"

    running(work())


def test_who_gives_up_ends_no_call_of_another(both_eras: McpConfig, tmp_path: Path, running: Running) -> None:
    async def work() -> None:
        async with McpManager(both_eras, trust=True, patience=QUICK) as manager:
            calls = caller(manager, approve=lambda *_: True)
            await manager.catalogue()
            pair = [asyncio.create_task(calls.call("both__slow", {"seconds": 1.5})) for _ in range(2)]
            await asyncio.sleep(0.3)
            pair[0].cancel()
            done = await pair[1]
            assert done.text.endswith("[data from both__slow]\ndone")
            assert not (tmp_path / "cancelled").exists()
            alone = asyncio.create_task(calls.call("both__slow", {"seconds": 60}))
            await asyncio.sleep(0.3)
            alone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await alone
            for _ in range(250):
                if (tmp_path / "cancelled").exists():
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("the server was not told")

    running(work())
