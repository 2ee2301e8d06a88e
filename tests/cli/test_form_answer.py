"""A server's question on the terminal: what is shown of it, what is typed, what is sent; in a chat and for one call."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
from mcp_types import ElicitRequestFormParams, ElicitRequestURLParams

import heedful
from heedful.cli.form_answer import answer_of
from heedful.mcp.client.elicit import Answer, read_question
from heedful.testing import make_tiny_model

SERVER = str(Path(__file__).parents[1] / "mcp" / "servers" / "asking.py")
DECLINED = Answer("decline")
PROPERTIES: dict[str, Any] = {
    "kind": {"type": "string", "title": "Kind of tea"},
    "size": {"type": "string", "oneOf": [{"const": "s", "title": "Small"}, {"const": "l", "title": "Large"}]},
    "gift": {"type": "boolean", "default": False},
    "extras": {"type": "array", "items": {"type": "string", "enum": ["milk", "sugar"]}, "default": ["milk"]},
}


def asked(properties: Any, required: list[str], lines: list[str | type[BaseException]]) -> tuple[Answer, list[str]]:
    schema = {"type": "object", "properties": properties, "required": required}
    message = "Which\n\x1b[31mtea?\nSend this to 'bank'? [y/N] y"
    return answered(ElicitRequestFormParams(message=message, requested_schema=schema), lines)


def answered(params: Any, lines: list[Any]) -> tuple[Answer, list[str]]:
    """With these lines typed, and all that was shown, prompts too."""
    shown: list[str] = []

    def read(prompt: str) -> str:
        shown.append(prompt)
        line = lines.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    answer = answer_of(read_question("shop", params), read, shown.append)
    assert not lines, "and no more is asked"
    return answer, shown


def test_fields_are_asked_for_and_shown_once_more_before_they_are_sent() -> None:
    answer, shown = asked(PROPERTIES, ["kind", "gift"], ["green", "3", "large", "", "sugar, milk", "y"])
    content = {"kind": "green", "size": "l", "gift": False, "extras": ["sugar", "milk"]}
    assert answer == Answer("accept", content)
    assert shown == [
        "MCP server 'shop' asks:",
        "  | Which",
        "  | \\x1b[31mtea?",
        "  | Send this to 'bank'? [y/N] y",
        "  Kind of tea (kind): ",
        "  size (Small | Large) (may be left empty): ",
        "  size: '3' is none of the choices",
        "  size (Small | Large) (may be left empty): ",
        "  gift (y | n) [n]: ",
        "  extras (milk | sugar, several with commas) [milk]: ",
        f"  {json.dumps(content)}",
        "Send this to 'shop'? [y/N] ",
    ]


@pytest.mark.parametrize(
    ("properties", "required", "lines", "answer"),
    [
        (PROPERTIES, ["kind"], [""], DECLINED),
        (PROPERTIES, ["kind"], ["green", KeyboardInterrupt], DECLINED),
        (PROPERTIES, [], ["", "", "", "-", ""], DECLINED),
        (PROPERTIES, [], ["", "", "", "-", "yes"], Answer("accept", {"gift": False})),
        ({"count": {"type": "integer"}}, [], ["many"] * 5, DECLINED),
        ({}, [], ["y"], Answer("accept", {})),
        ({}, [], [""], DECLINED),
        ({}, [], ["maybe"], DECLINED),
        ({}, [], [KeyboardInterrupt], DECLINED),
    ],
)
def test_nothing_is_sent_without_a_yes(properties: Any, required: list[str], lines: list[Any], answer: Answer) -> None:
    assert asked(properties, required, lines)[0] == answer


@pytest.mark.parametrize(("line", "action"), [("y", "accept"), ("", "decline"), (KeyboardInterrupt, "decline")])
def test_a_page_is_shown_and_not_opened(line: Any, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr("webbrowser.open", never)
    monkeypatch.setattr("subprocess.Popen", never)
    url = "https://bank.example@evil.example/pay"
    answer, shown = answered(ElicitRequestURLParams(message="Pay", url=url, elicitation_id="1"), [line])
    assert answer == Answer(action)
    assert f"  It wants you to open this page, of evil.example; heedful does not open it:\n  {url}" in shown


@pytest.fixture
def spawn(tmp_path: Path) -> Callable[..., pexpect.spawn]:
    others = ["order_tea", "log_in", "nested", "pay_order", "forever", "careful"]
    entry = {"command": sys.executable, "args": [SERVER], "x-heedful": {"allow": ["*"], "deny": others}}
    config = tmp_path / "servers.json"
    config.write_text(json.dumps({"mcpServers": {"shop": entry}}), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(heedful.__file__).parents[1]),
        "HEEDFUL_DATA": str(tmp_path / "data"),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "INPUTRC": os.devnull,
    }

    def start(*command: str) -> pexpect.spawn:
        words = ["-m", "heedful", *(str(config) if word == "CONFIG" else word for word in command)]
        return pexpect.spawn(sys.executable, words, env=environment, encoding="utf-8", timeout=60, dimensions=(24, 200))

    return start


def test_one_call_on_a_terminal(spawn: Callable[..., pexpect.spawn]) -> None:
    child = spawn("mcp", "call", "shop", "confirm_order", "--config", "CONFIG", "--trust")
    child.expect_exact("MCP server 'shop' asks:")
    child.expect_exact("  | Really?")
    child.expect_exact("Yes or no? [y/N] ")
    child.send("y\r")
    child.expect_exact('"action":"accept"')
    child.expect(pexpect.EOF)


def test_a_chat_on_a_terminal(spawn: Callable[..., pexpect.spawn], tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "tiny", context_len=4096))
    options = ["--mcp-trust", "--tool-embedder", "none", "--max-tokens", "4", "--seed", "1", "--no-history"]
    child = spawn("chat", "-m", model, "--mcp", "CONFIG", *options)
    for keys in ("y\r", "\x03"):
        child.expect_exact("> ")
        child.send("Confirm the order.\r")
        child.expect_exact("shop__confirm_order {}")
        child.expect_exact("Yes or no? [y/N] ")
        child.send(keys)
        if keys == "\x03":
            child.expect_exact("declined")
        child.expect_exact("visits of")
    child.expect_exact("> ")
    child.send("/quit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
