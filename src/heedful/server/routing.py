"""`auto`: a request that the router's policy sends to one of its targets, whichever API it came by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from heedful.decide.load import default_decider
from heedful.decide.question import Question
from heedful.router.choose import Ask, Chooser, Judged
from heedful.router.dispatch import Dispatcher, Routed
from heedful.router.ledger import RouteLedger
from heedful.router.policy import AUTO, Policy
from heedful.router.signals import JSON, Asked
from heedful.router.thresholds import decider_identity, thresholds_of
from heedful.server import sse
from heedful.server.bodies import json_response, read_body, until_hangup
from heedful.server.chat_api import ChatBody, chat_ask_of, chat_of, events_of, sse_error
from heedful.server.deciders import decide
from heedful.server.route_mcp import McpTarget
from heedful.server.route_targets import make_target
from heedful.server.state import ServerState, state_of

log = logging.getLogger("heedful.server")

ROUTE_HEADER, REASON_HEADER = "x-heedful-route", "x-heedful-route-reason"
WARM_TEXT = "Hello"


def make_dispatcher(policy: Policy, state: ServerState) -> Dispatcher:
    """Raises PolicyError for what the environment, a calibration or this installation lacks."""
    name = decider_of(policy)
    is_calibrated = policy.decision is not None and policy.decision.calibration is not None
    thresholds = thresholds_of(policy, decider_identity(name) if name and is_calibrated else "")
    for warning in thresholds.warnings:
        log.warning("heedful: %s", warning)
    targets = {spec.name: make_target(spec, state) for spec in policy.targets.values()}
    ledger = RouteLedger(policy.ledger) if policy.ledger else None
    return Dispatcher(policy, Chooser(policy, asker(policy, state), thresholds), targets, ledger)


def decider_of(policy: Policy) -> str | None:
    """Whom the policy asks; None: nobody."""
    return None if policy.decision is None else policy.decision.model or default_decider()


def asker(policy: Policy, state: ServerState) -> Ask | None:
    name = decider_of(policy)
    if name is None:
        return None

    async def ask(text: str, questions: tuple[Question, ...], salt: str) -> Judged:
        decision = await decide(state, name, text, questions, salt)
        return Judged(decision.answers, decision.receipt)

    return ask


async def warm(policy: Policy, state: ServerState) -> None:
    """Asks the decider once, so that the first request does not wait for its loading, and would go without it; starts
    the servers of tools."""
    if state.router is not None:
        tools = [target for target in state.router.targets.values() if isinstance(target, McpTarget)]
        await asyncio.gather(*(target.warm() for target in tools))
    ask = asker(policy, state)
    if ask is None or policy.decision is None:
        return
    try:
        await ask(WARM_TEXT, policy.decision.questions, "")
    except Exception as error:  # whatever is wrong with it: requests are answered without it, as they would be later
        log.warning("heedful: the policy's decider fails, and %s answers in its place: %s", policy.default, error)


def is_routed(state: ServerState, model: str | None) -> bool:
    return state.router is not None and model == AUTO


async def open_routed(request: Request, body: JSON, held: AsyncExitStack) -> Routed:
    """`body`: of a chat completion, checked by the API that it came by. `held`: releases what the answer needs."""
    state = state_of(request)
    assert state.router is not None
    asked = Asked.of_body(body, request.state.salt)
    routed = await until_hangup(request, state.router.open(asked, held))
    state.metrics.routed(routed.choice.target, stood_in=bool(routed.choice.hops))
    return routed


async def routed_chat(request: Request, body: ChatBody) -> ASGIApp:
    """`body`: the same request, read already."""
    chat_of(body)
    settings = state_of(request).settings
    chat_ask_of(body, settings, request.state.salt)  # what is wrong with a request ends it here, wherever it went
    async with AsyncExitStack() as held:
        routed = await open_routed(request, await read_body(request, dict[str, Any]), held)
        if body.stream:
            chunks = _shown(routed, body.wants_usage)
            return sse.EventStream(events_of(chunks), sse_error, held.pop_all(), route_headers(routed))
        return with_route(json_response(await until_hangup(request, routed.whole())), routed)


def with_route(response: Response, routed: Routed) -> Response:
    response.headers.update(route_headers(routed))
    return response


def model_of(state: ServerState, routed: Routed) -> str:
    """That answers, as the policy names it; a target without one is called by its own name."""
    assert state.router is not None
    spec = state.router.policy.targets[routed.choice.target]
    return str(getattr(spec, "model", spec.name))


def route_headers(routed: Routed) -> Mapping[str, str]:
    return {ROUTE_HEADER: routed.choice.target, REASON_HEADER: routed.choice.reason}


async def _shown(routed: Routed, with_usage: bool) -> AsyncGenerator[JSON, None]:
    """The usage's chunk is there for the ledger in any case, and for the client where it asks for it."""
    async with aclosing(routed.chunks()) as chunks:
        async for chunk in chunks:
            if chunk["choices"] or with_usage:
                yield chunk
