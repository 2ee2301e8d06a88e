"""What the handlers share, kept on the application."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from heedful.router.dispatch import Dispatcher
from heedful.server.history import History
from heedful.server.metrics import Metrics
from heedful.server.pool import ModelPool
from heedful.server.request_log import RequestLog
from heedful.server.settings import ServerSettings
from heedful.server.stored import ResponseStore
from heedful.server.view_api import Views


@dataclass
class ServerState:
    settings: ServerSettings
    pool: ModelPool
    metrics: Metrics
    history: History | None = None
    """The page's conversations; None: none are kept."""
    router: Dispatcher | None = None
    """What answers for the model `auto`; None: there is no policy, and no such model."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    views: Views = field(default_factory=Views)
    log: RequestLog | None = None
    is_ready: bool = False


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.heedful
    return state
