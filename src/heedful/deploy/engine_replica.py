"""A replica: the whole server of `heedful serve` in a process, without a socket. Requests come as Forwarded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.applications import Starlette

from heedful.deploy.forwarded import Forwarded, Head
from heedful.deploy.settings import DeploySettings
from heedful.errors import EngineStopped
from heedful.server.settings import ServerSettings

REPLICA_HEADER = b"x-heedful-replica"
MOST_PIECES_AHEAD = 16
"""Of an answer that are there before the ingress has taken them; then whoever writes waits."""


class EngineReplica:
    """For one loop."""

    def __init__(self, settings: DeploySettings, name: str) -> None:
        self.name = name
        self.app = _make_app(settings)
        self._lifespan: AbstractAsyncContextManager[Any] | None = None

    async def start(self) -> None:
        """Loads the first model; raises what loading raises."""
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()
        async with self.app.state.heedful.pool.lease(None):
            pass

    async def close(self) -> None:
        """Open answers get their time to end."""
        lifespan, self._lifespan = self._lifespan, None
        if lifespan is not None:
            await lifespan.__aexit__(None, None, None)

    def check_health(self) -> None:
        """Raises EngineStopped where nothing can be answered any more."""
        if not self.app.state.heedful.is_ready:
            raise EngineStopped

    async def forward(self, asked: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        """The head, then pieces of the body. Closing it is the client hanging up."""
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MOST_PIECES_AHEAD)
        gone = asyncio.Event()
        incoming = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if gone.is_set():
                raise OSError("nobody is there any more")
            await sent.put(message)

        async def answer() -> None:
            try:
                await self.app(_scope(asked), receive, send)
            finally:
                if not gone.is_set():
                    await sent.put(_END)

        answering = asyncio.ensure_future(answer())
        try:
            async for piece in self._pieces(sent, answering):
                yield piece
        finally:
            gone.set()
            while not answering.done():
                while not sent.empty():  # whoever still writes is let go
                    sent.get_nowait()
                await asyncio.wait({answering}, timeout=0.02)
            if not answering.cancelled():
                answering.exception()

    async def _pieces(
        self, sent: asyncio.Queue[dict[str, Any]], answering: asyncio.Future[None]
    ) -> AsyncGenerator[Head | bytes, None]:
        while True:
            message = await sent.get()
            if message["type"] == "http.response.start":
                yield Head(message["status"], (*message["headers"], (REPLICA_HEADER, self.name.encode())), self.name)
            elif message["type"] == "http.response.body":
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body"):
                    return
            else:
                await answering  # it has ended without an end of its answer: with an error
                return


_END = {"type": "end"}


def _scope(asked: Forwarded) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": list(asked.headers),
        "client": None,
        "server": None,
    }


def _make_app(settings: DeploySettings) -> Starlette:
    from heedful.decide.load import find_decider, load_decider
    from heedful.engine.embedder import load_embedder
    from heedful.engine.llm import LLM
    from heedful.server.app import make_app

    served = ServerSettings(
        models=settings.models,
        deciders=settings.deciders,
        api_keys=settings.api_keys,
        allowed_hosts=settings.allowed_hosts,
        policy=settings.policy,
        most_waiting=settings.most_waiting,
        most_models_loaded=len({*settings.models, *settings.deciders}),
        idle_unload_seconds=None,
        drain_seconds=settings.drain_s,
    )

    def load(name: str) -> LLM:
        return LLM(
            name,
            context_len=settings.context,
            threads=settings.cpus,
            policy=settings.policy,
            weights=settings.weights,
            kv_memory_bytes=settings.kv_memory_bytes,
        )

    def decider(name: str) -> Any:
        is_remote = find_decider(name).kind == "jev"
        return load_decider(name, threads=None if is_remote else settings.cpus)

    return make_app(served, load, lambda name: load_embedder(name, threads=settings.cpus), decider)
