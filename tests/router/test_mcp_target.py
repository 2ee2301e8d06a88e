"""Tools as targets of the router: a rule or a decision sends a request to one, and its result is the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.router.policies import Keyed, policy_of
from tests.server.running import RunningServer, start_server

from heedful.decide.answer import ChoiceAnswer
from heedful.decide.question import Question, State
from heedful.errors import PolicyError
from heedful.mcp.settings.approvals import Approvals
from heedful.mcp.settings.config import read_config
from heedful.router.choose import Chooser
from heedful.router.ledger import read_ledger
from heedful.router.signals import Asked, signals_of
from heedful.router.template import parsed

SHOP = Path(__file__).parents[2] / "examples" / "shop_server.py"
POLICY = """\
version: 1
targets:
  stock: {kind: mcp, config: servers.json, server: shop, tool: stock,
          arguments: {item: "{item}"}, answer: "{stock} packets of {item} are left."}
  price: {kind: mcp, config: servers.json, server: shop, tool: price, arguments: {item: "{thing}"}}
  found: {kind: mcp, config: servers.json, server: shop, tool: stock}
  wrong: {kind: mcp, config: servers.json, server: shop, tool: stock, arguments: {item: tea}, answer: "{colour}"}
  denied: {kind: mcp, config: servers.json, server: closed, tool: stock, arguments: {item: tea}}
  strange: {kind: mcp, config: servers.json, server: unseen, tool: stock, arguments: {item: tea}}
  missing: {kind: mcp, config: servers.json, server: shop, tool: nothing, arguments: {}}
  small: {kind: local, model: tiny, max_tokens: 4}
rules:
  - {match: '(?i)how many packets of (?P<item>\\w+)', to: stock}
  - {match: '^by rules:', to: found}
  - {match: '^wrong', to: wrong}
  - {match: '^denied', to: denied}
  - {match: '^strange', to: strange}
  - {match: '^missing', to: missing}
decision: {model: keyed, timeout_s: 60, questions: {thing: [tea, coffee, none], asks: [price, other]}}
routes:
  - {to: price, when: asks == "price", min_p: 0.8}
default: small
fallbacks: {stock: small, found: small, wrong: small, denied: small, strange: small}
ledger: {path: ledger.jsonl, fsync: never}
"""


def says(state: State, question: Question) -> list[float]:
    if question.name == "thing":
        return [0.0, 1.0, 0.0] if "coffee" in str(state) else [1.0, 0.0, 0.0]
    return [0.9, 0.1] if "cost" in str(state) else [0.1, 0.9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a file of servers, of which all but one are agreed to, and one allows nothing."""
    made = tmp_path_factory.mktemp("tools")
    entry = {"command": sys.executable, "args": ["-S", str(SHOP)]}
    servers = {
        "shop": {**entry, "x-heedful": {"allow": ["*"]}},
        "closed": {**entry, "env": {"SHOP": "closed"}},
        "unseen": {**entry, "env": {"OTHER": "1"}, "x-heedful": {"allow": ["*"]}},
    }
    (made / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    return made


@pytest.fixture(scope="module")
def routed(folder: Path, tiny_dir: Path) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEEDFUL_DATA", str(folder / "data"))
        from heedful.mcp.client.blocking import McpThread

        config = read_config(folder / "servers.json")
        with McpThread(config, trust=True) as manager:
            manager.catalogue()
            pins = {name: manager.manager.pins(name) for name in config.servers}
        approvals = Approvals.open()
        for name in ("shop", "closed"):
            approvals.approve(config.servers[name], pins[name])
        policy = policy_of(folder, POLICY)
        running = start_server(tiny_dir, load_decider=lambda name: Keyed(says), policy=policy)
        yield running
        running.stop()


def ask(routed: RunningServer, text: str, **more: Any) -> httpx.Response:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], **more}
    return httpx.post(f"{routed.url}/v1/chat/completions", json=body, timeout=60)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def receipt(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["usage"]["heedful"]
    return found


def test_a_rule_sends_a_request_to_a_tool(routed: RunningServer) -> None:
    """12 packets of tea are on the example's shelf."""
    answer = ask(routed, "Hello! How many packets of tea do you have?")
    assert said(answer) == "12 packets of tea are left."
    assert (answer.headers["x-heedful-route"], answer.headers["x-heedful-route-reason"]) == ("stock", "rule 1")
    assert answer.json()["model"] == "shop/stock"
    usage = answer.json()["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"], receipt(answer)["visits"]["total"]) == (0, 0, 0)
    assert (receipt(answer)["tool"]["outcome"], receipt(answer)["tool"]["server"]) == ("ok", "shop")
    assert receipt(answer)["tool_ms"] > 0


def test_a_decision_does_and_fills_the_arguments(routed: RunningServer) -> None:
    """Coffee costs 7.9; the answer is said by rules."""
    answer = ask(routed, "What does the coffee cost?")
    assert "7.9" in said(answer)
    assert answer.headers["x-heedful-route-reason"] == "route 1, p 0.900 against 0.800"


def test_arguments_are_found_in_the_message(routed: RunningServer) -> None:
    answer = ask(routed, "by rules: how much sugar is in stock?")
    assert "40" in said(answer)
    assert answer.headers["x-heedful-route"] == "found"
    unsure = ask(routed, "by rules: tea or sugar?")
    assert receipt(unsure)["route"]["hops"][0]["target"] == "found"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_by_every_api_and_as_a_stream(routed: RunningServer, path: str, stream: bool) -> None:
    text = "How many packets of sugar?"
    named = {"/v1/responses": {"input": text}, "/v1/completions": {"prompt": text}}
    body = named.get(path, {"messages": [{"role": "user", "content": text}], "max_tokens": 9})
    answer = httpx.post(f"{routed.url}{path}", json={"model": "auto", "stream": stream, **body}, timeout=60)
    assert "40 packets of sugar are left." in answer.text
    assert answer.headers["x-heedful-route"] == "stock"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("How many packets of gold are there?", "stock: does not take these arguments"),
        ("wrong", "wrong: has no colour in its result"),
        ("denied", "denied: would need somebody to allow the call"),
        ("strange", "strange: needs a server that nobody has agreed to"),
    ],
)
def test_where_it_cannot_answer_the_fallback_does_and_says_why(routed: RunningServer, text: str, why: str) -> None:
    answer = ask(routed, text)
    assert said(answer)
    assert answer.headers["x-heedful-route"] == "small"
    assert answer.headers["x-heedful-route-reason"].startswith(why)
    assert receipt(answer)["visits"]["total"] > 0


def test_without_a_fallback_the_failure_is_the_answer(routed: RunningServer) -> None:
    answer = ask(routed, "missing")
    assert answer.status_code == 502
    assert "target missing needs a tool that is not offered" in answer.json()["error"]["message"]


def test_the_ledger_has_the_tools_time_and_no_message(routed: RunningServer, folder: Path) -> None:
    ask(routed, "How many packets of coffee?")
    lines = [line for line in read_ledger(folder / "ledger.jsonl") if line["target"] == "stock"]
    (part,) = lines[-1]["spent"]
    assert (part["phase"], part["visits"]["total"], part["output_tokens"]) == ("answer", 0, 0)
    assert part["tool_ms"] > 0
    ask(routed, "How many packets of gold?")
    assert not any(word in (folder / "ledger.jsonl").read_text() for word in ("coffee", "gold", "packets"))


def test_calibration_asks_a_tool_as_a_request_would(folder: Path) -> None:
    """A target is handed what the rule that leads to it finds, or what the decider says."""
    policy = policy_of(folder, POLICY)
    chooser = Chooser(policy, None)
    asked = Asked.of_text("How many packets of tea?")
    answers = {"thing": ChoiceAnswer({"tea": 0.2, "coffee": 0.8, "none": 0.0})}
    assert chooser.given_to("stock", asked, signals_of(asked), answers) == {"item": "tea"}
    assert chooser.given_to("price", asked, signals_of(asked), answers) == {"thing": "coffee"}


# ---- The file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said_of_it"),
    [
        (('item: "{item}"', 'item: "{itm}"'), r"targets\.stock\.arguments\.item: has \{itm\}, which nothing fills"),
        (('item: "{item}"', 'item: "{item"'), r"a lone \{"),
        (('item: "{item}"', 'item: "{a b}"'), "which is no name"),
        (("server: shop, tool: nothing", "tool: nothing"), "targets.missing: has no server"),
        (("tool: nothing, ", ""), "targets.missing: has no tool"),
        (("tool: nothing, ", "tool: nothing, k: 4, "), r"missing\.k"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, change: tuple[str, str], said_of_it: str) -> None:
    assert change[0] in POLICY
    with pytest.raises(PolicyError, match=said_of_it):
        policy_of(tmp_path, POLICY.replace(*change))


def test_a_server_that_is_not_in_the_file_is_refused_at_the_start(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "servers.json").write_text('{"mcpServers": {}}')
    text = "version: 1\ntargets: {t: {kind: mcp, config: servers.json, server: a, tool: b}}\ndefault: t\n"
    with pytest.raises(PolicyError, match=r"targets\.t\.server: .* names no server 'a'"):
        start_server(tiny_dir, policy=policy_of(tmp_path, text))


def test_places_in_texts() -> None:
    values = {"a": "x{b}", "n": 3, "list[0].name": ["é"], "deep.key": None}
    for text, filled in (
        ("{a}{n}", "x{b}3"),
        ("{{{a}}} {{n}}", "{x{b}} {n}"),
        ("{list[0].name} {deep.key}", '["é"] null'),
        ("none", "none"),
    ):
        assert parsed(text).filled(values.__getitem__) == filled
    assert parsed("{a} {{x}} {n}").names == ("a", "n")
    for wrong in ("{", "}", "{}", "{a{b}}", "{a}}", "{1}", "x" * 5000):
        with pytest.raises(ValueError, match=r"lone|no name|characters"):
            parsed(wrong)
