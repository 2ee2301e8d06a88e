"""A server as `heedful serve` starts it, in this process: tiny models behind a socket on loopback."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from heedful.decide.load import load_decider
from heedful.engine.embedder import Embedder, load_embedder
from heedful.engine.llm import LLM
from heedful.listening import listen
from heedful.router.policy import Policy
from heedful.server.app import make_app
from heedful.server.pool import LoadDecider
from heedful.server.request_log import RequestLog
from heedful.server.run import Server, make_server
from heedful.server.settings import ServerSettings
from heedful.server.state import ServerState

START_SECONDS = 30.0
KEYS = ("key-of-a", "key-of-b")


@dataclass(frozen=True)
class RunningServer:
    url: str
    state: ServerState
    model_dir: Path
    _server: Server
    _thread: threading.Thread

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(START_SECONDS)
        assert not self._thread.is_alive(), "the server does not end"


def start_server(
    model_dir: Path,
    *,
    load_decider: LoadDecider = load_decider,
    policy: Policy | None = None,
    log: RequestLog | None = None,
    **settings: object,
) -> RunningServer:
    """With two names for the same tiny model, "tiny" and "other"."""
    chosen = ServerSettings(**{"models": ("tiny", "other"), "port": 0, "drain_seconds": 5.0, **settings})  # type: ignore[arg-type]

    def load(name: str) -> LLM:
        return LLM(str(model_dir), threads=1, adapters=chosen.adapters if name == chosen.models[0] else None)

    def load_vectors(name: str) -> Embedder:
        return load_embedder(str(model_dir), threads=1)

    app = make_app(chosen, load, load_vectors, load_decider, policy, log)
    listening = listen(chosen.host, chosen.port)
    server = make_server(app, chosen)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        assert thread.is_alive(), "the server has ended"
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)
    return RunningServer(url, app.state.heedful, model_dir, server, thread)
