"""The application: which path is whose, what happens at start and end, how errors leave."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from time import perf_counter

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from heedful.decide.load import default_decider, load_decider
from heedful.engine.service import Observer, Service
from heedful.router.policy import AUTO, Policy
from heedful.server import (
    chat_api,
    completions_api,
    decisions_api,
    embeddings_api,
    history_api,
    messages_api,
    page_api,
    plain_api,
    responses_api,
    systemone_api,
    view_api,
)
from heedful.server.bodies import HungUp
from heedful.server.failures import Failure, failure_of, response_of
from heedful.server.guard import Guard
from heedful.server.history import History
from heedful.server.metrics import Metrics
from heedful.server.pool import Load, LoadDecider, LoadEmbedder, ModelPool
from heedful.server.request_log import Logged, RequestLog
from heedful.server.route_costs import Charged
from heedful.server.routing import make_dispatcher, warm
from heedful.server.settings import ServerSettings
from heedful.server.state import ServerState, state_of
from heedful.server.traces import Traces, caller, has_opentelemetry
from heedful.server.view_api import Kept, Views

CLIENT_CLOSED = 499
WITHOUT_RECEIPT = frozenset({"/v1/embeddings", "/v1/systemone", "/v1/decisions"})
"""Paths whose answers no model's observer is told of."""
Handler = Callable[[Request], Awaitable[ASGIApp]]


def make_app(
    settings: ServerSettings,
    load: Load,
    load_embedder: LoadEmbedder,
    load_decider: LoadDecider = load_decider,
    policy: Policy | None = None,
    log: RequestLog | None = None,
) -> Starlette:
    """`load` makes an LLM of a name that is in the settings, `load_embedder` an Embedder, `load_decider` a decider.
    `policy`: of the router, whose local models are in the settings too. `log`: takes a line for each request.

    Raises HistoryError where the page's conversations cannot be kept at `settings.history_path`, PolicyError where the
    policy's targets cannot be made.
    """
    metrics, views = Metrics(), Views()
    pool = ModelPool(
        settings.models,
        load,
        load_embedder,
        observer=lambda name: Kept(_observer(metrics, name, policy, log), name, views),
        most_waiting=settings.most_waiting,
        most_loaded=settings.most_models_loaded,
        idle_unload_seconds=settings.idle_unload_seconds,
        adapters=tuple(settings.adapters),
        deciders=(*settings.deciders, *(policy.deciders(default_decider()) if policy else ())),
        load_decider=load_decider,
        routed=AUTO if policy else "",
    )
    metrics.watch(lambda: _services(pool))
    history = None if settings.history_path is None else History.open(settings.history_path)
    state = ServerState(settings, pool, metrics, history, views=views, log=log)
    state.router = make_dispatcher(policy, state) if policy else None

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        pool.start()
        if policy is not None:
            await warm(policy, state)
        state.is_ready = True
        yield
        state.is_ready = False
        await views.turns.close()
        await pool.close(settings.drain_seconds)
        await views.turns.ended()
        if state.router is not None:
            await state.router.aclose()
        if history is not None:
            history.close()
        if log is not None:
            log.close()

    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(Guard, settings=settings, log=log)],
        exception_handlers={HTTPException: _unknown_path},
        lifespan=lifespan,
    )
    app.state.heedful = state
    return app


def _observer(metrics: Metrics, name: str, policy: Policy | None, log: RequestLog | None) -> Observer:
    observer: Observer = metrics.observer(name)
    observer = Logged(observer, log, name) if log is not None else observer
    observer = Traces(observer) if has_opentelemetry() else observer
    return Charged(observer) if policy is not None else observer


def _services(pool: ModelPool) -> Iterable[tuple[str, Service]]:
    return [(hosted.name, hosted.service) for hosted in pool.models if hosted.service is not None]


def _routes() -> list[Route]:
    get = {
        "/health": plain_api.health,
        "/ready": plain_api.ready,
        "/metrics": plain_api.metrics,
        "/openapi.json": plain_api.openapi,
        "/v1/models": plain_api.models,
        "/v1/models/{name:path}": plain_api.model,
        "/v1/responses/{response_id}": responses_api.get_response,
        "/history": history_api.list_conversations,
        "/history/export": history_api.export_conversations,
        "/history/{id}": history_api.read_conversation,
        "/view/{name}": view_api.read_page,
        **dict.fromkeys(page_api.FILES, page_api.page_file),
    }
    post = {
        "/v1/chat/completions": chat_api.chat_completions,
        "/v1/completions": completions_api.completions,
        "/v1/responses": responses_api.create_response,
        "/v1/messages": messages_api.create_message,
        "/v1/messages/count_tokens": messages_api.count_message_tokens,
        "/v1/embeddings": embeddings_api.embeddings,
        "/v1/systemone": systemone_api.system_one,
        "/v1/decisions": decisions_api.create_decision,
        "/tokenize": plain_api.tokenize,
        "/detokenize": plain_api.detokenize,
        "/history": history_api.create_conversation,
        "/view": view_api.make_page,
    }
    conversation, response = "/history/{id}", "/v1/responses/{response_id}"
    return [
        *(Route(path, Endpoint(handler, "GET"), methods=["GET"]) for path, handler in get.items()),
        *(Route(path, Endpoint(handler, "POST"), methods=["POST"]) for path, handler in post.items()),
        Route(conversation, Endpoint(history_api.change_conversation, "PUT"), methods=["PUT"]),
        Route(conversation, Endpoint(history_api.delete_conversation, "DELETE"), methods=["DELETE"]),
        Route(response, Endpoint(responses_api.delete_response, "DELETE"), methods=["DELETE"]),
    ]


class Endpoint:
    """A handler as an ASGI application: its errors become answers of the API's shape, and are counted."""

    def __init__(self, handler: Handler, method: str) -> None:
        self._handler = handler
        self.__name__ = handler.__name__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        state = state_of(request)
        path = scope["route"].path if "route" in scope else scope["path"]
        began = perf_counter()
        try:
            with caller(request.headers):
                response: ASGIApp = await self._handler(request)
            status = response.status_code if isinstance(response, Response) else 200
        except HungUp:
            state.metrics.count_request(path, CLIENT_CLOSED)
            return
        except Exception as error:
            failure = failure_of(error)
            response, status = response_of(failure, scope["path"]), failure.status
            if state.log is not None:
                state.log.refused(request.method, scope["path"], failure)
        state.metrics.count_request(path, status)
        if state.log is not None and status == 200 and path in WITHOUT_RECEIPT:
            state.log.served(request.method, path, status, perf_counter() - began)
        await response(scope, receive, send)


async def _unknown_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    message = {
        404: f"there is no {request.url.path[:200]}",
        405: f"{request.method} is not for {request.url.path[:200]}",
    }
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    failure = Failure(error.status_code, kind, message.get(error.status_code, error.detail))
    if (log := state_of(request).log) is not None:
        log.refused(request.method, request.scope["path"], failure)
    return response_of(failure, request.url.path)
