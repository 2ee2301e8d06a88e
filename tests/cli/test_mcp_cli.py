"""`heedful mcp` as a person types it, against hostile and plain servers of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

SERVER = str(Path(__file__).parents[1] / "mcp" / "servers" / "hostile.py")
Heedful = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def heedful(tmp_path: Path) -> Heedful:
    """Runs it in an empty folder, with a data folder of its own."""
    environment = {**os.environ, "HEEDFUL_DATA": str(tmp_path / "data"), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "heedful", "mcp", *arguments]
        return subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
            env=environment,
        )

    return run


@pytest.fixture
def servers(tmp_path: Path) -> Callable[..., Path]:
    def write(**modes: str) -> Path:
        path = tmp_path / "servers.json"
        entries = {
            name: {
                "command": sys.executable,
                "args": ["-S", SERVER, *mode.split()],
                "env": {"SECRET": "hunter2-hunter2"},
            }
            for name, mode in modes.items()
        }
        path.write_text(json.dumps({"mcpServers": entries}), encoding="utf-8")
        return path

    return write


def test_from_the_first_look_to_a_call(heedful: Heedful, servers: Callable[..., Path]) -> None:
    servers(plain="plain", sick="dies")
    first = heedful("list")
    assert first.returncode == 0
    assert "plain: not approved, 0 tools, " in first.stdout
    assert "heedful mcp approve" in first.stderr
    refused = heedful("call", "plain", "echo")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "MCP server 'plain' was not approved" in refused.stderr
    asked = heedful("approve", "plain")
    assert asked.returncode == 1
    assert "heedful mcp approve --yes" in asked.stderr, "nobody is there to ask"
    agreed = heedful("approve", "plain", "--yes")
    assert agreed.returncode == 0, agreed.stderr
    assert "gets: SECRET" in agreed.stdout
    assert "new: echo: A tool." in agreed.stdout
    called = heedful("call", "plain", "echo", '{"a": "Grüße"}')
    assert (called.returncode, json.loads(called.stdout)) == (0, {"a": "Grüße"}), called.stderr
    assert json.loads(heedful("call", "plain", "plain__echo", "-", stdin='{"b": 1}').stdout) == {"b": 1}
    after = json.loads(heedful("list", "--json").stdout)["servers"]
    assert [(each["name"], each["approved"], each["state"], each["protocol"], each["tools"]) for each in after] == [
        ("plain", True, "ready", "2025-11-25", 8),
        ("sick", False, "not approved", None, 0),
    ]
    forgotten = heedful("approve", "plain", "--forget")
    assert forgotten.stdout == "plain: forgotten\n"
    for run in (first, refused, agreed, called):
        assert "hunter2" not in run.stdout + run.stderr


def test_trust_is_for_one_run(heedful: Heedful, servers: Callable[..., Path]) -> None:
    servers(bad="poisoned", sick="dies")
    found = heedful("tools", "--trust")
    assert found.returncode == 0
    assert found.stdout == "bad__fine() - A tool.\n"
    assert "not offered: bad/add: its description tells the model to keep something from the user" in found.stderr
    assert "MCP server 'sick' does not start" in found.stderr
    assert "hunter2" not in found.stderr
    assert json.loads(heedful("tools", "--json").stdout)["tools"] == []


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["call", "plain", "echo", "{", "--trust"], 2, "ARGUMENTS: is not JSON"),
        (["call", "plain", "echo", "[]", "--trust"], 2, "must be a JSON object"),
        (["call", "other", "echo", "--trust"], 2, "names no server 'other'"),
        (["call", "plain", "ech", "--trust"], 2, "no MCP server offers a tool 'ech'"),
        (["call", "plain", "refuse", "--trust"], 1, "refuse of MCP server 'plain': no: [hidden]"),
        (
            ["call", "plain", "crash", "--trust"],
            1,
            "has ended during crash; it wrote last: about to crash: token is [h",
        ),
        (["call", "plain", "hang", "--trust", "--timeout", "0.3"], 1, "took longer than 0.3 s"),
        (["approve", "nobody"], 2, "names no server 'nobody'"),
        (["select", "hello", "--k", "0"], 2, "--k: must be at least 1"),
        (["list", "--config", "nowhere.json"], 2, "nowhere.json cannot be read: No such file"),
    ],
)
def test_what_goes_wrong_is_one_line(
    arguments: list[str], status: int, said: str, heedful: Heedful, servers: Callable[..., Path]
) -> None:
    servers(plain="plain")
    run = heedful(*arguments)
    assert run.returncode == status, run.stderr
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_select(heedful: Heedful, servers: Callable[..., Path], smollm2_path: Path) -> None:
    servers(plain="plain")
    run = heedful("select", "echo this back to me", "--trust", "--embedder", "none", "-m", str(smollm2_path), "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert "plain__echo" in [each["name"] for each in found["tools"]]
    assert found["schema_tokens"] <= 600
    assert found["all_tools"] == 8
    assert 0 < found["visits"]["chosen"] <= found["visits"]["all_tools"]
    told = heedful("select", "echo this back to me", "--trust", "--embedder", "none", "-m", str(smollm2_path))
    assert "schema tokens of" in told.stderr
    assert "plain__echo" in told.stdout


def test_parts_of_a_result(heedful: Heedful, servers: Callable[..., Path]) -> None:
    servers(plain="plain")
    given = json.dumps({"rows": [{"n": i, "name": f"row {i}"} for i in range(2000)]})
    call = ["call", "plain", "echo", "-", "--trust"]
    assert json.loads(heedful(*call, "--path", ".rows[-2:].n", stdin=given).stdout) == [1998, 1999]
    found = heedful("call", "plain", "environment", "--trust", "--grep", "PYTHONUTF8")
    assert found.stderr == "1 lines, 1 shown\n"
    assert "PYTHONUTF8" in found.stdout
    assert json.loads(heedful(*call, stdin=given).stdout) == json.loads(given), "a pipe gets all of it"
    record = json.loads(heedful(*call, "--json", stdin=given).stdout)["record"]
    assert (record["outcome"], record["result_bytes"]) == ("ok", len(given))
    wrong = heedful(*call, "--path", ".row", stdin=given)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Its keys: rows" in wrong.stderr
    assert heedful(*call, "--lines", "a:b", stdin=given).returncode == 2
    assert heedful(*call, "--lines", "1", "--grep", "x", stdin=given).returncode == 2


def test_a_terminal_gets_a_long_result_in_short(tmp_path: Path, servers: Callable[..., Path]) -> None:
    path = servers(plain="plain")
    environment = {**os.environ, "HEEDFUL_DATA": str(tmp_path / "data")}
    command = ["-m", "heedful", "mcp", "call", "plain", "big", '{"bytes": 100000}', "--trust", "--config", str(path)]
    for more, longest in (([], 6_000), (["--full"], 110_000)):
        terminal = pexpect.spawn(sys.executable, [*command, *more], env=environment, timeout=120, encoding="utf-8")
        said = terminal.read()
        terminal.close()
        assert terminal.exitstatus == 0
        assert said.count("x") > 2000
        assert len(said) < longest
        assert ("kept as h1" in said) == ("All of it: --full" in said) == (not more)
