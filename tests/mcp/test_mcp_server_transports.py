"""`heedful mcp serve` as other programs meet it: a process that speaks over stdin and stdout, an address that speaks
HTTP; by the SDK's client, by our own, and by hand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client, StdioServerParameters

from heedful.listening import listen
from heedful.mcp.client.manager import McpManager
from heedful.mcp.server.app import make_server
from heedful.mcp.server.files import Roots
from heedful.mcp.server.http import HttpSettings, make_app, url_of
from heedful.mcp.server.models import ModelNames, ServedModels
from heedful.mcp.server.tools import heedful_tools
from heedful.mcp.settings.config import config_from_json
from heedful.testing import make_tiny_model

Running = Callable[[Coroutine[Any, Any, Any]], Any]
HEEDFUL = [sys.executable, "-m", "heedful"]
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "hand", "version": "1"}},
}
JSON_HEADERS = {"content-type": "application/json", "accept": "application/json, text/event-stream"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_len=2048)


@pytest.fixture(scope="module")
def arguments(tiny: Path) -> list[str]:
    return ["mcp", "serve", "-m", str(tiny), "--decider", str(tiny), "--embedder", str(tiny), "--threads", "1"]


def tool_call(number: int, name: str, arguments: dict[str, Any], **meta: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments, **({"_meta": meta} if meta else {})}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


# ---- stdin and stdout ---------------------------------------------------------------------------------------------


class Process:
    """The server's, spoken to by hand."""

    def __init__(self, arguments: list[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*HEEDFUL, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def send(self, *messages: Any) -> None:
        assert self.process.stdin is not None
        for message in messages:
            self.process.stdin.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
        self.process.stdin.flush()

    def read(self, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The reply of this number, and what came before it."""
        assert self.process.stdout is not None
        before: list[dict[str, Any]] = []
        while True:
            message = json.loads(self.process.stdout.readline())
            assert message["jsonrpc"] == "2.0", message
            if message.get("id") == number:
                return message, before
            before.append(message)


@pytest.fixture(scope="module")
def spoken(arguments: list[str]) -> Iterator[Process]:
    made = Process(arguments)
    made.send(HELLO, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    made.read(1)
    yield made
    made.process.send_signal(signal.SIGINT)
    assert made.process.wait(20) == 130, "Ctrl-C ends it, though its input is still open"
    made.process.communicate()


def test_stdout_is_the_protocols_alone(spoken: Process) -> None:
    spoken.send("not JSON", '{"jsonrpc": "2.0"}', tool_call(2, "generate", {"prompt": "Hi", "max_tokens": 4}))
    reply, before = spoken.read(2)
    assert reply["result"]["structuredContent"]["output_tokens"] == 4
    assert all(message.get("error") for message in before)
    spoken.send({"jsonrpc": "2.0", "id": 3, "method": "tools/list"})
    assert "summarize" not in [tool["name"] for tool in spoken.read(3)[0]["result"]["tools"]]


def test_progress_and_cancellation_by_hand(spoken: Process) -> None:
    """A cancelled request gets no answer, and its pages are free: far fewer tokens were written than asked for."""
    long = {"prompt": "a", "max_tokens": 1900}
    spoken.send(tool_call(10, "generate", long, progressToken="t"))
    assert spoken.process.stdout is not None
    first = json.loads(spoken.process.stdout.readline())
    assert (first["method"], first["params"]["progressToken"]) == ("notifications/progress", "t")
    spoken.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 10}})
    spoken.send(tool_call(11, "generate", {"prompt": "b", "max_tokens": 2}))
    _, before = spoken.read(11)
    assert all(message.get("method") == "notifications/progress" for message in before)
    spoken.send(tool_call(12, "cost", {"prompt_tokens": 1}))
    spent = spoken.read(12)[0]["result"]["structuredContent"]["spent"]["generated"]
    assert spent["output_tokens"] < 1000


def test_the_sdks_client_over_stdio(arguments: list[str], tmp_path: Path, running: Running) -> None:
    """By the older revision; by hand above, too, and our own client takes the newer one."""
    (tmp_path / "note.txt").write_text("Ships.")
    given = StdioServerParameters(
        command=sys.executable, args=["-m", "heedful", *arguments, "--root", str(tmp_path)], env=environment()
    )

    async def work() -> None:
        async with Client(given, mode="legacy") as client:
            result = await client.call_tool("summarize", {"path": "note.txt", "max_tokens": 16})
            assert result.structured_content is not None
            assert result.structured_content["chars"] == 6
            refused = await client.call_tool("summarize", {"path": "/etc/passwd"})
            assert refused.is_error

    running(work())


def environment() -> dict[str, str]:
    """What a client hands on to the server, so that it is this heedful."""
    return {name: os.environ[name] for name in ("PYTHONPATH", "HEEDFUL_CACHE") if name in os.environ}


# ---- HTTP ---------------------------------------------------------------------------------------------------------


class HttpServer:
    """In a thread of this process."""

    def __init__(self, tiny: Path, **settings: Any) -> None:
        import uvicorn

        chosen = HttpSettings(port=0, **settings)
        listening = listen(chosen.host, chosen.port)
        self.url = url_of(listening)

        async def serve() -> None:
            self.models = ServedModels(ModelNames(str(tiny), str(tiny), str(tiny), threads=1))
            server = make_server(heedful_tools(self.models, Roots([])))
            config = uvicorn.Config(make_app(server, chosen, listening.getsockname()[1]), log_config=None)
            self.server = uvicorn.Server(config)
            await self.server.serve(sockets=[listening])
            await self.models.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def http(tiny: Path) -> Iterator[HttpServer]:
    made = HttpServer(tiny, allowed_hosts=("box.example",), allowed_origins=("https://app.example",))
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_the_sdks_client_over_http(http: HttpServer, mode: str, running: Running) -> None:
    """It leaves in the middle, too, and the pages are free."""
    heard = asyncio.Event()
    reports: list[float] = []

    async def note(done: float, total: float | None, message: str | None) -> None:
        reports.append(done)
        heard.set()

    async def work() -> None:
        async with Client(http.url, mode=mode) as client:
            assert client.protocol_version == ("2025-11-25" if mode == "legacy" else mode)
            result = await client.call_tool("generate", {"prompt": "Hi", "max_tokens": 3})
            assert result.structured_content is not None
            assert result.structured_content["output_tokens"] == 3
            asked = {"prompt": "a", "max_tokens": 1900}
            leaving = asyncio.create_task(client.call_tool("generate", asked, progress_callback=note))
            await asyncio.wait_for(heard.wait(), 20)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            service = http.models.running
            assert service is not None
            async with asyncio.timeout(10):
                while service.num_open or service.llm.engine.scheduler.num_running:
                    await asyncio.sleep(0.01)
            assert service.llm.ledger.output_tokens < 1000

    running(work())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "box.example"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:1"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://app.example"}, 200),
    ],
)
def test_foreign_hosts_and_pages_are_refused(http: HttpServer, headers: dict[str, str], status: int) -> None:
    answer = httpx.post(http.url, json=HELLO, headers={**JSON_HEADERS, **headers})
    assert answer.status_code == status
    assert answer.headers.get("access-control-allow-origin") == (
        "https://app.example" if headers.get("origin") == "https://app.example" else None
    )


def test_a_page_of_its_own_origin_may_call(http: HttpServer) -> None:
    origin = http.url.removesuffix("/mcp")
    assert httpx.post(http.url, json=HELLO, headers={**JSON_HEADERS, "origin": origin}).status_code == 200


def test_keys_are_asked_for_where_there_are_any(tiny: Path) -> None:
    made = HttpServer(tiny, api_keys=("one", "two"))
    try:
        for given, status in (("", 401), ("Bearer three", 401), ("Basic one", 401), ("Bearer two", 200)):
            answer = httpx.post(made.url, json=HELLO, headers={**JSON_HEADERS, "authorization": given})
            assert answer.status_code == status, given
    finally:
        made.close()


def test_our_own_client_by_both_ways(http: HttpServer, arguments: list[str], running: Running) -> None:
    entry = {"command": sys.executable, "args": ["-m", "heedful", *arguments], "env": environment()}
    config = config_from_json({"mcpServers": {"here": entry, "there": {"type": "http", "url": http.url}}})
    reports: list[float] = []

    async def work() -> list[str]:
        async with McpManager(config, trust=True) as manager:
            catalogue = await manager.catalogue()
            assert catalogue.not_offered == ()
            assert {status.protocol for status in manager.status()} == {"2026-07-28"}
            assert all(tool.hints.read_only and not tool.hints.open_world for tool in catalogue.tools)
            given = {"prompt": "Hi", "max_tokens": 300}
            results = [
                await manager.call(f"{name}__generate", given, on_progress=lambda done, *_: reports.append(done))
                for name in config.servers
            ]
            return [result.structured_content["text"] for result in results]

    first, second = running(work())
    assert first == second != ""
    assert reports


def test_heedful_calls_itself(http: HttpServer, tmp_path: Path) -> None:
    config = tmp_path / "servers.json"
    config.write_text(json.dumps({"mcpServers": {"there": {"type": "http", "url": http.url}}}))
    command = [*HEEDFUL, "mcp", "call", "there", "generate", "{}", "--config", str(config), "--trust"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "'prompt' is a required property" in done.stderr) == (2, True)


# ---- The command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--port", "8090"], "--port: means something only with --http", 2),
        (["--root", "/nothing/here"], "--root: /nothing/here is no folder", 2),
        (["-m", "smollm3"], "Did you mean smollm2?", 1),
        (["--http", "--host", "999.0.0.1"], "--host: '999.0.0.1' is no address", 2),
        (["--threads", "0"], "--threads: must be between 1 and 1024", 2),
    ],
)
def test_what_is_wrong_is_said_at_the_start(
    words: list[str], said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from heedful.cli.main import run

    assert run(["mcp", "serve", *words]) == status
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_http_from_the_command_line_and_its_end(arguments: list[str]) -> None:
    with subprocess.Popen(
        [*HEEDFUL, *arguments, "--http", "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("heedful: MCP at http://127.0.0.1:")
        url = line.split()[-1]
        deadline = time.monotonic() + 20
        while True:
            try:
                assert httpx.post(url, json=HELLO, headers=JSON_HEADERS).status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
        assert "Traceback" not in process.stderr.read()
