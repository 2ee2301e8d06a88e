"""All servers together: what is offered, what is not and why, calls by the model's names; with and without a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_connection import processes, text

from conftest import QUICK
from heedful.errors import McpNotApproved, McpServerDown, McpTimeout, McpUnknownTool
from heedful.mcp.client.blocking import McpThread
from heedful.mcp.client.manager import McpManager
from heedful.mcp.settings.approvals import Approvals
from heedful.mcp.settings.config import McpConfig

Running = Callable[[Any], Any]
Hostile = Callable[..., McpConfig]


@pytest.fixture
def approvals(tmp_path: Path) -> Approvals:
    return Approvals(tmp_path / "mcp_approvals.json")


def together(*configs: McpConfig) -> McpConfig:
    return McpConfig({name: server for config in configs for name, server in config.servers.items()})


def waited_for(path: Path) -> Path:
    for _ in range(500):
        if path.exists():
            return path
        time.sleep(0.02)
    raise AssertionError(f"{path.name} does not come")


def test_nothing_is_started_that_nobody_agreed_to(hostile: Hostile, running: Running, approvals: Approvals) -> None:
    marker = f"unapproved-{os.getpid()}"
    config = hostile("plain", env={"MARK": marker})

    async def work() -> None:
        for nobody in (None, approvals):
            async with McpManager(config, nobody, patience=QUICK) as manager:
                catalogue = await manager.catalogue()
                assert not catalogue
                assert "'bad' was not approved: " in catalogue.unavailable["bad"]
                with pytest.raises(McpUnknownTool):
                    await manager.call("bad__echo", {})
            assert not processes(marker)
        approvals.approve(config.servers["bad"])
        async with McpManager(config, approvals, patience=QUICK) as manager:
            assert text(await manager.call("bad__echo", {"a": 1})) == '{"a": 1}'
            approvals.forget(config.servers["bad"])
            with pytest.raises(McpNotApproved, match="heedful mcp approve"):
                await manager.call("bad__echo", {})

    running(work())


def test_one_server_that_fails_costs_no_other(hostile: Hostile, running: Running) -> None:
    config = together(hostile("dies", name="down"), hostile("plain", name="up"), hostile("endless", name="endless"))

    async def work() -> None:
        async with McpManager(config, trust=True, patience=QUICK) as manager:
            catalogue = await manager.catalogue()
            assert {tool.server for tool in catalogue.tools} == {"up"}
            assert "cannot open the database" in catalogue.unavailable["down"]
            assert "more than 100 pages" in catalogue.unavailable["endless"]
            assert [status.failures_in_row for status in manager.status()] == [1, 0, 0]
            assert [status.state for status in manager.status()][1:] == ["ready", "ready"]
            assert "cannot open the database" in manager.stderr("down")

    running(work())


def test_all_pages_and_two_servers_with_the_same_tools(hostile: Hostile, running: Running) -> None:
    config = together(hostile("pages", name="a"), hostile("pages", name="b", ours={"prefix": "second"}))

    async def work() -> None:
        async with McpManager(config, trust=True, patience=QUICK) as manager:
            catalogue = await manager.catalogue()
            assert list(catalogue) == [f"{name}__tool_{i}" for name in ("a", "second") for i in range(5)]
            assert catalogue is await manager.catalogue(), "nothing has changed"
            assert text(await manager.call("second__tool_3", {"x": 1})) == '{"x": 1}'

    running(work())


def test_duplicates_bad_schemas_and_poison(hostile: Hostile, running: Running) -> None:
    config = together(*(hostile(mode, name=mode) for mode in ("duplicate", "schemas", "poisoned")))

    async def work() -> None:
        async with McpManager(config, trust=True, patience=QUICK) as manager:
            catalogue = await manager.catalogue()
            assert list(catalogue) == [
                *("duplicate__same", "duplicate__other", "schemas__recursive", "schemas__fine", "poisoned__fine")
            ]
            causes = {(each.server, each.name): each.cause for each in catalogue.not_offered}
            assert causes == {
                ("duplicate", "same"): "duplicate",
                **{
                    ("schemas", name): "schema" for name in ("dangling", "remote", "file", "wrong_type", "list", "deep")
                },
                ("poisoned", "add"): "flagged",
                ("poisoned", "hid\u200bden"): "name",
            }
            with pytest.raises(McpUnknownTool, match=r"'add' of MCP server 'poisoned' is not offered: .*secrets"):
                await manager.call("poisoned__add", {})
            with pytest.raises(McpUnknownTool, match="no MCP server offers a tool 'nothing'"):
                await manager.call("nothing", {})

    running(work())


def test_a_description_that_changes_is_not_used_until_somebody_agrees(
    hostile: Hostile, running: Running, approvals: Approvals, tmp_path: Path
) -> None:
    config = hostile("changing", state=tmp_path / "starts", env={"MARK": f"changing-{os.getpid()}"})
    server = config.servers["bad"]
    approvals.approve(server)

    async def work() -> None:
        async with McpManager(config, approvals, patience=QUICK) as manager:
            catalogue = await manager.catalogue()
            before = catalogue["bad__weather"]
            assert approvals.pins(server) is not None, "seen first, and remembered"
            await manager.call("bad__weather", {})
            for pid in processes(f"changing-{os.getpid()}"):
                os.kill(pid, signal.SIGKILL)
            while manager.status()[0].state == "ready":
                await asyncio.sleep(0.01)
            with pytest.raises(McpUnknownTool, match="its description is another one than when it was approved"):
                await manager.call_tool(before, {})
            catalogue = await manager.catalogue()
            assert not catalogue
            (held,) = catalogue.not_offered
            assert held.cause == "changed"
            assert held.pin is not None
            approvals.approve(server, {"weather": held.pin})
            assert (await manager.catalogue())["bad__weather"].description == "Tells the weather and your secrets."
            await manager.call("bad__weather", {})

    running(work())


def test_a_call_is_made_twice_only_where_that_is_allowed(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        async with McpManager(hostile("plain"), trust=True, patience=replace(QUICK, breaker_failures=5)) as manager:
            for replay, starts in ((False, 1), (True, 3)):
                with pytest.raises(McpServerDown, match="has ended during crash"):
                    await manager.call("bad__crash", {}, replay=replay)
                assert manager.status()[0].starts == starts
            assert text(await manager.call("bad__echo", {}, replay=True)) == "{}"

    running(work())


def test_without_a_loop(both_eras: McpConfig, tmp_path: Path) -> None:
    with McpThread(both_eras, trust=True, patience=QUICK) as tools:
        catalogue = tools.catalogue()
        heard: list[float] = []
        answer = tools.call(catalogue["both__add"], {"a": 2, "b": 3})
        assert answer.structured_content == {"result": 5}
        said = tools.call("both__slow", {"seconds": 0.2, "steps": 2}, on_progress=lambda done, *_: heard.append(done))
        assert (text(said), heard) == ("done", [1.0, 2.0])
        with pytest.raises(McpTimeout):
            tools.call("both__slow", {"seconds": 60}, idle_timeout_s=0.2)
        waited_for(tmp_path / "cancelled").unlink()
        future = tools.submit(tools.manager.call("both__slow", {"seconds": 60}))
        time.sleep(0.3)
        future.cancel()
        waited_for(tmp_path / "cancelled")
        assert tools.status()[0].starts == 1
    tools.close()
    assert "heedful-mcp" not in {thread.name for thread in threading.enumerate()}
