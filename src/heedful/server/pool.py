"""The models that the server knows: loaded when first asked for, unloaded when nobody uses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from heedful.decide.calibrate import Calibration
from heedful.decide.load import KEPT, calibration_of, find_decider, load_decider
from heedful.engine.llm import LLM
from heedful.engine.service import Observer, Service
from heedful.errors import BadParameter, UnknownModel
from heedful.sampling.grammar import GrammarCompiler
from heedful.server.turns import Turns

if TYPE_CHECKING:
    from heedful.decide.decider import DecisionModel
    from heedful.engine.embedder import Embedder

Load = Callable[[str], LLM]
LoadEmbedder = Callable[[str], "Embedder"]
LoadDecider = Callable[[str], "DecisionModel"]
CHECK_SECONDS = 1.0


class Hosted:
    """A model of the server. What is loaded of it is loaded under `lock`."""

    adapter = None

    def __init__(self, name: str, most_waiting: int) -> None:
        self.name = name
        self.created = int(time.time())
        self.lock = asyncio.Lock()
        self.service: Service | None = None
        self.grammars: GrammarCompiler | None = None
        self.embedder: Embedder | None = None
        self.decider: DecisionModel | None = None
        self.calibration: Calibration | None = None
        """Of a chat model's decisions; None: nobody has asked for one yet."""
        self.decisions = Turns(f"heedful decisions {name}", most_waiting)
        self.users = 0
        """Requests that hold a lease."""
        self.last_used = time.monotonic()

    @property
    def model(self) -> Hosted:
        return self

    @property
    def is_loaded(self) -> bool:
        return not (self.service is None and self.embedder is None and self.decider is None)

    @property
    def llm(self) -> LLM:
        assert self.service is not None, f"{self.name} is not loaded"
        return self.service.llm


class HostedAdapter:
    """An adapter under a name of its own. All that is loaded is `model`'s, which was loaded with it."""

    decider = None
    calibration = Calibration()
    """The model's own is not fitted for what an adapter says."""

    def __init__(self, name: str, model: Hosted) -> None:
        self.name = name
        self.adapter = name
        self.model = model
        self.created = model.created

    @property
    def is_loaded(self) -> bool:
        return self.model.service is not None

    @property
    def service(self) -> Service | None:
        return self.model.service

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self.model.grammars

    @property
    def decisions(self) -> Turns:
        return self.model.decisions

    @property
    def llm(self) -> LLM:
        return self.model.llm


Answering = Hosted | HostedAdapter
"""What a request names as its model."""


class ModelPool:
    """`load` and the like run in a thread; `observer`: makes what a service reports to. `deciders`: names of those that
    are none of the models `names`; a chat model decides without being one. `adapters`: names of those that the first
    model is loaded with. `routed`: a name that is none of them, but a router's."""

    def __init__(
        self,
        names: tuple[str, ...],
        load: Load,
        load_embedder: LoadEmbedder,
        *,
        observer: Callable[[str], Observer],
        most_waiting: int,
        most_loaded: int,
        idle_unload_seconds: float | None,
        adapters: tuple[str, ...] = (),
        deciders: tuple[str, ...] = (),
        load_decider: LoadDecider = load_decider,
        routed: str = "",
    ) -> None:
        self._hosted = {name: Hosted(name, most_waiting) for name in names}
        self._adapters = {name: HostedAdapter(name, self._hosted[names[0]]) for name in adapters}
        self._deciders = {name: Hosted(name, most_waiting) for name in deciders if name not in names}
        self._load = load
        self._load_embedder = load_embedder
        self._load_decider = load_decider
        self._observer = observer
        self._most_waiting = most_waiting
        self._most_loaded = most_loaded
        self._idle_seconds = idle_unload_seconds
        self._routed = routed
        self._watch: asyncio.Task[None] | None = None

    @property
    def models(self) -> list[Hosted]:
        return list(self._hosted.values())

    @property
    def adapters(self) -> list[HostedAdapter]:
        return list(self._adapters.values())

    @property
    def _all(self) -> list[Hosted]:
        return [*self._hosted.values(), *self._deciders.values()]

    def find(self, name: str | None) -> Answering:
        """None: the first model. Raises UnknownModel."""
        if name is None:
            return self.models[0]
        known: dict[str, Answering] = {**self._adapters, **self._hosted}
        if name not in known:
            remedy = f"This server has: {', '.join((*self._hosted, *self._adapters))}."
            if name == self._routed:
                remedy = f"The router answers where text is written, and there alone. {remedy}"
            raise UnknownModel(name, [], remedy)
        return known[name]

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Answering]:
        """A model that can generate, or an adapter of one, loaded; it stays so meanwhile. Raises UnknownModel and what
        loading raises."""
        found = self.find(name)
        async with _held(found.model) as hosted:
            async with hosted.lock:
                if hosted.service is None:
                    await self._make_room(hosted)
                    llm = await asyncio.to_thread(self._load, hosted.name)
                    hosted.grammars = GrammarCompiler(llm.tokenizer)
                    hosted.service = Service(llm, most_waiting=self._most_waiting, observer=self._observer(hosted.name))
            yield found

    @asynccontextmanager
    async def lease_embedder(self, name: str | None) -> AsyncIterator[Embedder]:
        """Raises BadParameter for an adapter, UnknownModel and what loading raises."""
        found = self.find(name)
        if found.adapter is not None:
            raise BadParameter("model", f"{found.name} is an adapter, and none makes vectors", "Name a model.")
        async with _held(found.model) as hosted:
            async with hosted.lock:
                if hosted.embedder is None:
                    await self._make_room(hosted)
                    hosted.embedder = await asyncio.to_thread(self._load_embedder, hosted.name)
            yield hosted.embedder

    @asynccontextmanager
    async def lease_decider(self, name: str) -> AsyncIterator[Answering]:
        """One of `deciders`, with its `decider` loaded; or a chat model, which has none, with its calibration."""
        if name not in self._deciders:
            async with self.lease(name) as found:
                if isinstance(found, Hosted):
                    async with found.lock:
                        if found.calibration is None:
                            found.calibration = await asyncio.to_thread(_kept_calibration, found.llm.name)
                yield found
            return
        async with _held(self._deciders[name]) as hosted:
            async with hosted.lock:
                if hosted.decider is None:
                    await self._make_room(hosted)
                    hosted.decider = await asyncio.to_thread(self._load_decider, hosted.name)
            yield hosted

    def start(self) -> None:
        self._watch = asyncio.create_task(self._unload_idle())

    @property
    def num_open(self) -> int:
        """Answers and decisions that are waited for."""
        answers = sum(hosted.service.num_open for hosted in self.models if hosted.service is not None)
        return answers + sum(hosted.decisions.num_open for hosted in self._deciders.values())

    async def close(self, drain_seconds: float, in_hurry: Callable[[], bool] = lambda: False) -> None:
        """As Service.close."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        services = [hosted.service for hosted in self.models if hosted.service is not None]
        turns, deadline = [hosted.decisions for hosted in self._all], time.monotonic() + drain_seconds
        await asyncio.gather(*(one.close(drain_seconds, in_hurry) for one in turns))  # they need the services
        seconds = max(0.0, deadline - time.monotonic())
        await asyncio.gather(*(service.close(seconds, in_hurry) for service in services))
        await asyncio.gather(*(one.ended() for one in turns))

    async def _make_room(self, wanted: Hosted) -> None:
        """Unload what nobody uses, the longest unused first, until one more may be loaded."""
        loaded = [hosted for hosted in self._all if hosted.is_loaded and hosted is not wanted]
        idle = sorted((hosted for hosted in loaded if not hosted.users), key=lambda hosted: hosted.last_used)
        for hosted in idle[: max(0, len(loaded) + 1 - self._most_loaded)]:
            await self._unload(hosted)

    async def _unload(self, hosted: Hosted) -> None:
        service, hosted.service, hosted.grammars, hosted.embedder = hosted.service, None, None, None
        hosted.decider, hosted.calibration = None, None
        if service is not None:
            await service.close()

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._idle_seconds is None:
                continue
            now = time.monotonic()
            for hosted in self._all:
                if hosted.is_loaded and not hosted.users and now - hosted.last_used > self._idle_seconds:
                    async with hosted.lock:
                        if not hosted.users:
                            await self._unload(hosted)


def _kept_calibration(name: str) -> Calibration:
    """As `heedful decide` takes it."""
    return calibration_of(find_decider(name), KEPT) or Calibration()


@asynccontextmanager
async def _held(hosted: Hosted) -> AsyncIterator[Hosted]:
    hosted.users += 1
    try:
        yield hosted
    finally:
        hosted.users -= 1
        hosted.last_used = time.monotonic()
