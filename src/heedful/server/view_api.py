"""/view: a page of where an answer's visits went, made when somebody asks for it.

The latest answers stay in memory as token ids with their receipts; a receipt names its answer, since no two took the
same time. POST /view with a receipt makes the page and says where it is; GET takes no key, for a link carries none, but
an address that nobody can guess. Both stores are small, and only a caller's own answers are found.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from heedful.engine.answer import Completion
from heedful.engine.llm import LLM
from heedful.engine.service import Observer, PassingOn
from heedful.errors import EngineStopped
from heedful.request import Request
from heedful.server.bodies import json_response, read_body, until_hangup
from heedful.server.failures import HTTPFailure
from heedful.server.guard import UNGUESSABLE_PATHS
from heedful.server.ids import new_id
from heedful.server.turns import Goes, Turns
from heedful.view.html import content_policy, view_page
from heedful.view.network import load_network, require_torch
from heedful.view.record import check_length, make_view, replanned_run

if TYPE_CHECKING:
    from heedful.server.state import ServerState

MOST_ANSWERS = 128
MOST_ANSWER_TOKENS = 1 << 20
MOST_PAGES = 16
MOST_WAITING = 4
MOST_TOKENS = 8_192
"""Of prompt and answer: about a minute's work, in which everybody's answers are slower."""

_HEADERS = {
    "content-security-policy": f"{content_policy()}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Answered:
    model: str
    """As it was named to the server."""
    completion: Completion
    request: Request


AnswerName = tuple[str, tuple[tuple[str, float], ...]]
"""The caller's salt, and the seconds of the receipt by name, ascending."""


class Views:
    """What can be looked at, and the pages that were made; the longest unused leave first."""

    def __init__(self) -> None:
        self.turns = Turns("heedful view", MOST_WAITING)
        self._answers: OrderedDict[AnswerName, Answered] = OrderedDict()
        self._tokens = 0
        self._pages: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()  # answers come from the engines' threads

    def keep(self, answered: Answered) -> None:
        name = _name(answered.request.cache_salt, answered.completion.receipt.to_dict()["seconds"])
        with self._lock:
            self._answers[name] = answered
            self._tokens += _num_tokens(answered.completion)
            while len(self._answers) > MOST_ANSWERS or self._tokens > MOST_ANSWER_TOKENS:
                _, dropped = self._answers.popitem(last=False)
                self._tokens -= _num_tokens(dropped.completion)

    def find(self, salt: str, seconds: dict[str, float]) -> Answered | None:
        name = _name(salt, seconds)
        with self._lock:
            if name in self._answers:
                self._answers.move_to_end(name)
            return self._answers.get(name)

    def add_page(self, page: str) -> str:
        """Returns its name."""
        name = new_id("view_")
        self._pages[name] = page
        if len(self._pages) > MOST_PAGES:
            self._pages.popitem(last=False)
        return name

    def page(self, name: str) -> str | None:
        return self._pages.get(name)


class Kept(PassingOn):
    """Keeps whole answers for a while."""

    def __init__(self, observer: Observer, model: str, views: Views) -> None:
        super().__init__(observer)
        self._model = model
        self._views = views

    def finished(self, completion: Completion, request: Request, opened: object) -> None:
        super().finished(completion, request, opened)
        if completion.finish_reason in ("stop", "length"):
            self._views.keep(Answered(self._model, completion, request))


class NamedReceipt(Struct, kw_only=True):
    """Of a receipt what names its answer; the rest may be there too."""

    seconds: dict[str, float]


class ViewBody(Struct, kw_only=True):
    receipt: NamedReceipt


async def make_page(request: HTTPRequest) -> Response:
    """Raises UnsupportedModel where PyTorch is missing, QueueFull."""
    from heedful.server.state import state_of  # it holds what is made here

    state = state_of(request)
    body = await read_body(request, ViewBody)
    require_torch()
    found = state.views.find(request.state.salt, body.receipt.seconds)
    if found is None:
        gone = f"this server does not hold that answer (any more): it keeps the latest {MOST_ANSWERS}. Answer again"
        raise HTTPFailure(404, gone, code="answer_gone")
    if found.request.adapter is not None:
        raise HTTPFailure(400, "answers of adapters cannot be viewed yet", field="receipt")
    length = _num_tokens(found.completion)
    if length > MOST_TOKENS:
        raise HTTPFailure(400, f"{length:,} tokens are more than {MOST_TOKENS:,}, the most that are viewed here")
    return json_response({"url": UNGUESSABLE_PATHS + await until_hangup(request, _made(state, found))}, 201)


async def read_page(request: HTTPRequest) -> Response:
    from heedful.server.state import state_of

    page = state_of(request).views.page(request.path_params["name"])
    if page is None:
        raise HTTPFailure(404, f"this view is gone: the latest {MOST_PAGES} are kept. Make it again from its answer")
    return Response(page, headers=_HEADERS, media_type="text/html; charset=utf-8")


async def _made(state: ServerState, found: Answered) -> str:
    async with state.pool.lease(found.model) as hosted:
        llm = hosted.llm
        return state.views.add_page(await state.views.turns.run(lambda goes: _page(llm, found, goes)))


def _page(llm: LLM, found: Answered, goes: Goes) -> str:
    def progress(tokens: int) -> None:
        if not goes():
            raise EngineStopped

    progress(0)
    check_length(_num_tokens(found.completion), llm.config)
    cache = llm.engine.runner.cache
    run = replanned_run(found.completion, found.request.policy, llm.config, cache)
    network = load_network(llm.name)
    view = make_view(run, found.model, llm.config, cache, llm.tokenizer, network, progress)
    return view_page(view)


def _name(salt: str, seconds: dict[str, float]) -> AnswerName:
    return salt, tuple(sorted(seconds.items()))


def _num_tokens(completion: Completion) -> int:
    return len(completion.prompt_token_ids) + len(completion.token_ids)
