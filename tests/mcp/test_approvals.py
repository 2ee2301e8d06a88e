"""What was agreed to is remembered by what it is, and nothing else."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import McpConfigError
from heedful.mcp.settings.approvals import Approvals, Pin, approvals_path
from heedful.mcp.settings.config import ServerConfig, config_from_json

ENTRY: dict[str, Any] = {"command": "server", "args": ["--x"], "cwd": "here", "env": {"TOKEN": "secret-value-1"}}


def server(**changes: Any) -> ServerConfig:
    return config_from_json({"mcpServers": {"s": {**ENTRY, **changes}}}).servers["s"]


@pytest.fixture
def approvals(tmp_path: Path) -> Approvals:
    return Approvals(tmp_path / "deep" / "mcp_approvals.json")


def test_a_command_is_known_by_what_would_run(approvals: Approvals) -> None:
    assert not approvals.is_approved(server())
    approvals.approve(server())
    assert approvals.is_approved(server())
    assert approvals.is_approved(replace(server(), name="other", timeout_s=1))
    assert approvals.is_approved(server(env={"TOKEN": "another value"})), "the names count"
    for change in ({"command": "server2"}, {"args": []}, {"args": ["--x", ""]}, {"cwd": "there"}, {"env": {}}):
        assert not approvals.is_approved(server(**change)), change
    far = config_from_json({"mcpServers": {"s": {"url": "http://a/mcp"}}}).servers["s"]
    assert not approvals.is_approved(far)
    assert approvals.forget(server())
    assert not approvals.forget(server())
    assert not approvals.is_approved(server())


def test_pins(approvals: Approvals) -> None:
    assert approvals.pins(server()) is None
    approvals.approve(server())
    assert approvals.pins(server()) is None, "nobody has seen the tools yet"
    approvals.approve(server(), {"t": Pin("abc", "d" * 9000)})
    assert approvals.pins(server()) == {"t": Pin("abc", "d" * 4096)}
    approvals.approve(server(), {})
    assert approvals.pins(server()) == {}


def test_the_file_has_no_secrets_and_one_reader(approvals: Approvals) -> None:
    approvals.approve(server(), {"t": Pin("abc", "")})
    text = approvals.path.read_text(encoding="utf-8")
    assert "secret-value" not in text
    assert json.loads(text)["version"] == 1
    assert approvals.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 1}', '{"version": 1, "servers": {"a": {"tools": {"t": {}}}}}']
)
def test_a_damaged_file_agrees_to_nothing(text: str, approvals: Approvals) -> None:
    approvals.path.parent.mkdir()
    approvals.path.write_text(text, encoding="utf-8")
    with pytest.raises(McpConfigError, match="is damaged"):
        approvals.is_approved(server())
    with pytest.raises(McpConfigError, match="is damaged"):
        approvals.approve(server())
    assert approvals.path.read_text(encoding="utf-8") == text


def test_another_version(approvals: Approvals) -> None:
    approvals.path.parent.mkdir()
    approvals.path.write_text('{"version": 2, "servers": {}}', encoding="utf-8")
    with pytest.raises(McpConfigError, match="another version"):
        approvals.is_approved(server())


def test_many_at_once(approvals: Approvals) -> None:
    threads = [threading.Thread(target=lambda i=i: approvals.approve(server(command=f"server{i}"))) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(approvals.is_approved(server(command=f"server{i}")) for i in range(12))


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    assert approvals_path() == tmp_path / "mcp_approvals.json"
    monkeypatch.delenv("HEEDFUL_DATA")
    assert approvals_path().name == "mcp_approvals.json"
