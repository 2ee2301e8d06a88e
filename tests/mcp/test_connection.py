"""One server and its process: both protocol revisions, both transports, time-outs, cancellation, crashes, orphans."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import QUICK, SERVERS
from heedful.errors import McpCallFailed, McpConfigError, McpServerDown, McpTimeout
from heedful.mcp.client.connection import Connection, Patience
from heedful.mcp.settings.config import McpConfig, ServerConfig, config_from_json

Running = Callable[[Any], Any]
Hostile = Callable[..., McpConfig]


def only(config: McpConfig, **changes: Any) -> ServerConfig:
    (server,) = config.servers.values()
    return replace(server, **changes)


def text(result: Any) -> str:
    return str(result.content[0].text)


def processes(marker: str) -> list[int]:
    """Ids of the processes in whose command line or environment `marker` stands, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if marker.encode() in told and state != "Z":
                found.append(int(folder.name))
    return found


def there(marker: str, count: int, within_s: float = 10.0) -> bool:
    """Whether so many come: a child's environment is its parent's for a moment, or none."""
    deadline = time.monotonic() + within_s
    while len(processes(marker)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(processes(marker)) >= count


def gone(marker: str, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while processes(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_call_and_a_second_one_on_the_same_process(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(hostile("plain")), QUICK)
        assert connection.status().state == "stopped"
        for value in ("Grüße", "日本 \u2028 \U0001f600"):
            assert json.loads(text(await connection.call("echo", {"a": value}))) == {"a": value}
        status = connection.status()
        assert (status.state, status.protocol, status.starts) == ("ready", "2025-11-25", 1)
        await connection.close()
        with pytest.raises(McpServerDown, match="its manager was closed"):
            await connection.call("echo", {})

    running(work())


def test_a_crash_in_the_middle_of_a_call(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(hostile("plain", env={"SECRET": "hunter2-hunter2"})), QUICK)
        with pytest.raises(McpServerDown) as caught:
            await connection.call("crash", {})
        assert "has ended during crash" in str(caught.value)
        assert "about to crash: token is [hidden]" in str(caught.value), "what it wrote last, without the secret"
        assert text(await connection.call("echo", {"n": 1})) == '{"n": 1}'
        assert connection.status().starts == 2
        assert connection.status().failures_in_row == 0, "an answer shows that it works"
        await connection.close()

    running(work())


def test_killed_between_two_calls(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(hostile("plain", env={"MARK": "killed-between"})), QUICK)
        await connection.call("echo", {})
        for pid in processes("killed-between"):
            os.kill(pid, signal.SIGKILL)
        while connection.status().state == "ready":
            await asyncio.sleep(0.01)
        assert text(await connection.call("echo", {"n": 2})) == '{"n": 2}'
        await connection.close()

    running(work())


def test_a_server_that_keeps_failing_is_left_alone_and_then_tried_once(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(hostile("dies", env={"SECRET": "hunter2-hunter2"})), QUICK)
        for _ in range(3):
            with pytest.raises(McpServerDown, match="cannot open the database"):
                await connection.call("echo", {})
        assert connection.status().state == "open"
        with pytest.raises(McpServerDown, match=r"3 times in a row .* cannot open the database: \[hidd"):
            await connection.call("echo", {})
        assert connection.status().starts == 3, "the fourth call has started nothing"
        await asyncio.sleep(QUICK.breaker_s)
        with pytest.raises(McpServerDown, match="cannot open"):
            await connection.call("echo", {})
        assert connection.status().starts == 4
        assert connection.status().state == "open"
        await connection.close()

    running(work())


def test_back_off_doubles_within_its_bounds() -> None:
    patience = Patience(backoff_first_s=0.2, backoff_most_s=3.0)
    assert patience.backoff_s(0, 0.5) == 0
    assert [patience.backoff_s(n, 1.0) for n in (1, 2, 3, 4, 5, 6, 10**6)] == [0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0]
    assert patience.backoff_s(3, 0.0) == 0.4, "the dice take at most half of it"


def test_many_callers_start_one_process(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(hostile("plain")), QUICK)
        answers = await asyncio.gather(*(connection.call("echo", {"i": i}) for i in range(20)))
        assert [json.loads(text(answer)) for answer in answers] == [{"i": i} for i in range(20)]
        assert connection.status().starts == 1
        await connection.close()

    running(work())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/nowhere/mcp-server"], "No such file or directory"),
        ([sys.executable, "-c", "print('hello')"], "does not start"),
    ],
)
def test_what_is_no_server(command: list[str], message: str, running: Running) -> None:
    config = config_from_json({"mcpServers": {"x": {"command": command[0], "args": command[1:]}}})

    async def work() -> None:
        connection = Connection(only(config), QUICK)
        with pytest.raises(McpServerDown, match=message):
            await connection.start()
        await connection.close()

    running(work())


def test_a_folder_that_is_not_there(hostile: Hostile, running: Running) -> None:
    config = config_from_json({"mcpServers": {"x": {"command": "true", "cwd": "/nowhere"}}})

    async def work() -> None:
        connection = Connection(only(config), QUICK)
        with pytest.raises(McpServerDown, match="/nowhere"):
            await connection.start()
        await connection.close()

    running(work())


def test_a_server_that_says_nothing_is_not_waited_for_for_ever(running: Running) -> None:
    config = config_from_json({"mcpServers": {"x": {"command": "sleep", "args": ["3599"]}}})

    async def work() -> None:
        connection = Connection(only(config), replace(QUICK, start_s=0.4))
        with pytest.raises(McpServerDown, match=r"was not ready within 0.4 s"):
            await connection.start()
        await connection.close()

    running(work())
    assert gone("sleep\x003599")


def test_a_variable_that_is_not_set_names_itself(monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    config = config_from_json({"mcpServers": {"x": {"command": "true", "env": {"TOKEN": "${NOT_SET_HERE}"}}}})

    async def work() -> None:
        connection = Connection(only(config), QUICK)
        with pytest.raises(McpConfigError, match=r"'x': env.TOKEN needs the environment variable NOT_SET_HERE"):
            await connection.start()
        await connection.close()

    running(work())


def test_lines_that_are_no_messages(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(hostile("stray")), QUICK)
        assert text(await connection.call("echo", {"n": 1})) == '{"n": 1}'
        assert "Loading model…" in connection.tail.text()
        await connection.close()

    running(work())


def test_answers_against_the_protocol_are_errors_of_one_call(hostile: Hostile, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(hostile("plain", env={"SECRET": "hunter2-hunter2"})), QUICK)
        with pytest.raises(McpCallFailed, match=r"refuse of MCP server 'bad': no: \[hidden\]") as refused:
            await connection.call("refuse", {})
        assert refused.value.code == -32602
        with pytest.raises(McpCallFailed, match="against the protocol: content"):
            await connection.call("wrong", {})
        assert text(await connection.call("surrogate", {})) == "a\ufffdb\u2028c"
        assert connection.status().starts == 1
        await connection.close()

    running(work())


def test_twenty_megabytes_cost_little_time(hostile: Hostile, running: Running) -> None:
    """The SDK's own transport takes 23 s for it, for its time grows with the square of a line's length."""

    async def work() -> float:
        connection = Connection(only(hostile("plain")), QUICK)
        await connection.start()
        begun = time.process_time()
        result = await connection.call("big", {"bytes": 20_000_000})
        spent = time.process_time() - begun
        assert len(text(result)) == len(result.structured_content["result"]) == 20_000_000
        await connection.close()
        return spent

    assert running(work()) < 5, "of processor time: 0.2 s here, and a bound that no load reaches"


def test_a_message_without_end_is_given_up(hostile: Hostile, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    import heedful.mcp.client.session as module

    plain = module.stdio_transport
    monkeypatch.setattr(module, "stdio_transport", lambda *args: plain(*args, max_message_bytes=1_000_000))

    async def work() -> None:
        connection = Connection(only(hostile("plain")), QUICK)
        with pytest.raises(McpServerDown, match="more than 1,000,000 bytes"):
            await connection.call("big", {"bytes": 3_000_000})
        assert text(await connection.call("echo", {"n": 1})) == '{"n": 1}'
        await connection.close()

    running(work())


def test_progress_keeps_a_call_alive(both_eras: McpConfig, running: Running) -> None:
    async def work() -> None:
        server = only(both_eras, idle_timeout_s=1.0, timeout_s=30.0)
        connection = Connection(server, QUICK)
        assert (await connection.call("add", {"a": 2, "b": 3}, idle_timeout_s=30)).structured_content == {"result": 5}
        assert connection.status().protocol == "2026-07-28"
        heard: list[tuple[float, float | None, str | None]] = []
        begun = time.monotonic()
        result = await connection.call(
            "slow", {"seconds": 2.4, "steps": 8}, on_progress=lambda *said: heard.append(said)
        )
        assert text(result) == "done"
        assert time.monotonic() - begun > 2 * server.idle_timeout_s
        assert heard == [(float(i), 8.0, f"step {i}") for i in range(1, 9)]
        await connection.close()

    running(work())


@pytest.mark.parametrize("end", ["idle", "cap", "cancel"])
def test_a_call_that_is_given_up_is_cancelled_in_the_server(
    end: str, both_eras: McpConfig, running: Running, tmp_path: Path
) -> None:
    async def work() -> None:
        connection = Connection(only(both_eras), QUICK)
        await connection.start()
        if end == "idle":
            with pytest.raises(McpTimeout, match=r"gave neither result nor progress for 0.3 s") as caught:
                await connection.call("slow", {"seconds": 60}, idle_timeout_s=0.3)
            assert caught.value.is_idle
        elif end == "cap":
            with pytest.raises(McpTimeout, match=r"took longer than 0.8 s") as caught:
                await connection.call("slow", {"seconds": 60, "steps": 600}, idle_timeout_s=30, timeout_s=0.8)
            assert not caught.value.is_idle
        else:
            task = asyncio.create_task(connection.call("slow", {"seconds": 60}))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for _ in range(200):
            if (tmp_path / "cancelled").exists():
                break
            await asyncio.sleep(0.02)
        assert (tmp_path / "cancelled").exists()
        assert (await connection.call("add", {"a": 1, "b": 1})).structured_content == {"result": 2}
        assert connection.status().starts == 1
        await connection.close()

    running(work())


def test_calls_wait_for_a_free_place(both_eras: McpConfig, running: Running) -> None:
    async def work() -> None:
        connection = Connection(only(both_eras, max_concurrency=1), QUICK)
        await connection.start()
        calls = [connection.call("slow", {"seconds": 0.4}, idle_timeout_s=1.0) for _ in range(4)]
        begun = time.monotonic()
        assert [text(result) for result in await asyncio.gather(*calls)] == ["done"] * 4, "waiting is no idle time"
        assert time.monotonic() - begun > 1.5
        await connection.close()

    running(work())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_http_and_a_restart_of_the_server(running: Running, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, str(SERVERS / "both_eras.py"), str(tmp_path), str(port)]
    entry = {"type": "http", "url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer abc-def-123"}}
    config = config_from_json({"mcpServers": {"far": entry}})

    def started() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for _ in range(1000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        return process

    async def work() -> None:
        connection = Connection(only(config), QUICK)
        with pytest.raises(McpServerDown, match=r"MCP server 'far' does not start"):
            await connection.start()
        with started() as process:
            assert (await connection.call("add", {"a": 2, "b": 3})).structured_content == {"result": 5}
            assert connection.status().protocol == "2026-07-28"
            process.kill()
        with pytest.raises(McpServerDown, match="far") as caught:
            await connection.call("add", {"a": 2, "b": 3})
        assert "abc-def" not in str(caught.value)
        with started() as process:
            for _ in range(5):
                try:
                    answer = await connection.call("add", {"a": 2, "b": 3})
                    break
                except McpServerDown:
                    await asyncio.sleep(QUICK.breaker_s)
            assert answer.structured_content == {"result": 5}
            await connection.close()
            process.kill()

    running(work())


def test_a_child_sees_little_of_our_environment(
    hostile: Hostile, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_OWN_SECRET", "not for servers")
    monkeypatch.setenv("SOURCE", "for this one")

    async def work() -> None:
        connection = Connection(only(hostile("plain", env={"GIVEN": "${SOURCE}", "ELSE": "${NOPE:-x y}"})), QUICK)
        seen = json.loads(text(await connection.call("environment", {})))
        assert "OUR_OWN_SECRET" not in seen
        assert (seen["GIVEN"], seen["ELSE"], seen["PYTHONUTF8"]) == ("for this one", "x y", "1")
        await connection.close()

    running(work())


@pytest.mark.parametrize("mode", ["plain", "family", "deaf"])
def test_nothing_is_left_after_close(mode: str, hostile: Hostile, running: Running) -> None:
    marker = f"closed-{mode}-{os.getpid()}"

    async def work() -> None:
        connection = Connection(only(hostile(mode, env={"MARK": marker})), QUICK)
        await connection.start()
        assert there(marker, 4 if mode == "family" else 2), processes(marker)
        await connection.close()

    running(work())
    assert gone(marker), processes(marker)


@pytest.mark.skipif(sys.platform != "linux", reason="children in sessions of their own are found on Linux only")
@pytest.mark.parametrize("mode", ["plain", "family", "deaf"])
def test_no_orphans_when_heedful_is_killed(mode: str, hostile: Hostile, tmp_path: Path) -> None:
    marker = f"orphans-{mode}-{os.getpid()}"
    server = only(hostile(mode, env={"MARK": marker}))
    assert hasattr(server.launch, "argv")
    program = f"""
import asyncio
from heedful.mcp.settings.config import config_from_json
from heedful.mcp.client.connection import Connection
entry = {{"command": {server.launch.command!r}, "args": {list(server.launch.args)!r}, "env": {{"MARK": {marker!r}}}}}
async def main():
    connection = Connection(config_from_json({{"mcpServers": {{"x": entry}}}}).servers["x"])
    await connection.start()
    print("ready", flush=True)
    await connection.call("hang", {{}})
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as ours:
        assert ours.stdout is not None
        assert ours.stdout.readline() == b"ready\n"
        assert there(marker, 1)
        ours.kill()
    assert gone(marker), processes(marker)
