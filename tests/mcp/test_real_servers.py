"""The eight reference servers as their authors ship them, of both protocol revisions, each in its own environment."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from real_servers import RealServers

from heedful.errors import McpTimeout
from heedful.mcp.catalogue.catalog import ListedTool
from heedful.mcp.client.blocking import McpThread
from heedful.mcp.client.connection import Patience
from heedful.mcp.settings.config import config_from_json

PROTOCOLS = {
    **dict.fromkeys(["time", "git", "fetch"], "2026-07-28"),
    **dict.fromkeys(["sqlite", "everything", "filesystem", "memory", "thinking"], "2025-11-25"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def tools(real_servers: RealServers, folder: Path) -> Iterator[McpThread]:
    config = config_from_json({"mcpServers": real_servers.entries(folder)})
    with McpThread(config, trust=True, patience=Patience(start_s=240)) as manager:  # they are compiled at a first start
        manager.run(manager.manager.catalogue(wait_s=240))
        yield manager


def said(result: Any) -> str:
    assert not result.is_error, result
    return "\n".join(block.text for block in result.content if block.type == "text")


def test_all_tools_as_recorded(tools: McpThread, golden: Path) -> None:
    """None is quarantined, none is taken for poison; the recording that the selection is judged on is still true."""
    catalogue = tools.catalogue()
    assert catalogue.unavailable == {}
    assert catalogue.not_offered == ()
    assert {status.name: status.protocol for status in tools.status()} == PROTOCOLS
    recorded = json.loads((golden / "mcp" / "catalogue.json").read_bytes())
    listed = {(each["server"], tool["name"]): ListedTool(**tool) for each in recorded for tool in each["tools"]}
    assert {(tool.server, tool.name) for tool in catalogue.tools} == set(listed)
    assert len(catalogue) == 58
    assert all(tool.description == listed[tool.server, tool.name].description.strip() for tool in catalogue.tools)


def test_time(tools: McpThread) -> None:
    when = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}
    result = tools.call("time__convert_time", when)
    assert result.structured_content["target"]["datetime"].endswith("T03:00:00+00:00")
    wrong = tools.call("time__get_current_time", {"timezone": "Nowhere/Land"})
    assert wrong.is_error
    assert "Nowhere/Land" in wrong.content[0].text


def test_git(tools: McpThread, folder: Path) -> None:
    repo = str(folder / "repo")
    for name, value in (("user.name", "A"), ("user.email", "a@example.org")):
        subprocess.run(["git", "-C", repo, "config", name, value], check=True)
    (folder / "repo" / "a.txt").write_text("one\n", encoding="utf-8")
    assert "a.txt" in said(tools.call("git__git_status", {"repo_path": repo}))
    said(tools.call("git__git_add", {"repo_path": repo, "files": ["a.txt"]}))
    said(tools.call("git__git_commit", {"repo_path": repo, "message": "Grüße, 世界"}))
    assert "Grüße, 世界" in said(tools.call("git__git_log", {"repo_path": repo, "max_count": 1}))


def test_sqlite_which_needs_the_old_sdk(tools: McpThread) -> None:
    said(tools.call("sqlite__create_table", {"query": "CREATE TABLE orders (n INTEGER)"}))
    said(tools.call("sqlite__write_query", {"query": "INSERT INTO orders VALUES (1), (2), (3)"}))
    assert "3" in said(tools.call("sqlite__read_query", {"query": "SELECT COUNT(*) AS c FROM orders"}))


def test_fetch(tools: McpThread) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html><body><h1>Tariffs</h1><p>A letter costs 95 cents.</p></body></html>")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/prices"
        page = said(
            tools.call("fetch__fetch", {"url": url, "raw": True})
        )  # else it installs a JavaScript package first
    finally:
        server.shutdown()
        server.server_close()
    assert "95 cents" in page


def test_everything(tools: McpThread) -> None:
    assert "42" in said(tools.call("everything__get-sum", {"a": 40, "b": 2}))
    heard: list[float] = []
    slow = {"duration": 1.2, "steps": 4}
    tools.call(
        "everything__trigger-long-running-operation",
        slow,
        on_progress=lambda done, *_: heard.append(done),
        idle_timeout_s=30,
    )
    assert heard == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(McpTimeout, match=r"took longer than 0\.5 s"):
        tools.call("everything__trigger-long-running-operation", {"duration": 60, "steps": 600}, timeout_s=0.5)
    image = tools.call("everything__get-tiny-image", {})
    assert "image" in {block.type for block in image.content}


def test_filesystem(tools: McpThread, folder: Path) -> None:
    path = folder / "notes.txt"
    said(tools.call("filesystem__write_file", {"path": str(path), "content": "milk, eggs"}))
    assert path.read_text(encoding="utf-8") == "milk, eggs"
    assert "milk, eggs" in said(tools.call("filesystem__read_text_file", {"path": str(path)}))
    assert tools.call("filesystem__read_text_file", {"path": "/etc/hostname"}).is_error


def test_memory_and_thinking(tools: McpThread) -> None:
    ana = {"name": "Ana", "entityType": "person", "observations": ["plays chess"]}
    said(tools.call("memory__create_entities", {"entities": [ana]}))
    assert "plays chess" in said(tools.call("memory__search_nodes", {"query": "chess"}))
    thought = {"thought": "First.", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    assert '"thoughtNumber": 1' in said(tools.call("thinking__sequentialthinking", thought))
