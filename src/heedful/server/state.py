"""What the handlers share, kept on the application."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from heedful.server.metrics import Metrics
from heedful.server.pool import ModelPool
from heedful.server.settings import ServerSettings


@dataclass
class ServerState:
    settings: ServerSettings
    pool: ModelPool
    metrics: Metrics
    is_ready: bool = False


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.heedful
    return state
