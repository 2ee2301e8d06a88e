"""Rows with known answers, put to every target: who is right, and at what cost. The labels of a calibration.

rows = [row_from_json({"prompt": "What is 17 + 25?", "check": {"number": 42}})]
labelled = await label(rows, policy, targets, ask)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from heedful.decide.answer import Answer
from heedful.errors import BadParameter, HeedfulError
from heedful.router.choose import Ask, Chooser
from heedful.router.dispatch import limited_to
from heedful.router.expression import Value
from heedful.router.ledger import Entry, Spent
from heedful.router.policy import Policy
from heedful.router.signals import JSON, Asked, signals_of
from heedful.router.target import Target, receipt_of, text_of_body
from heedful.router.verify import Check, check_from_json

COSTS = ("visits", "positions", "flops", "joules", "seconds")
_BODY = ("messages", "tools", "tool_choice", "max_tokens", "response_format", "temperature", "seed", "stop")


@dataclass(frozen=True)
class Row:
    asked: Asked
    check: Check
    kind: str = ""
    """What sort of request it is, for tables; "": nobody says."""


@dataclass(frozen=True)
class Outcome:
    """What a target made of a row."""

    is_right: bool
    cost: Mapping[str, float | None]
    """By COSTS; None: the target does not say."""
    text: str = ""
    failure: str = ""
    """Why there is no answer, which counts as a wrong one."""


@dataclass(frozen=True)
class Labelled:
    row: Row
    signals: Mapping[str, Value]
    forbidden: tuple[str, ...]
    answers: Mapping[str, Answer]
    """Of the decider; {} where the policy asks none, or it failed."""
    router: Mapping[str, float | None]
    """What asking it cost, by COSTS."""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """Of every target that is not forbidden."""


def row_from_json(value: Any, where: str = "row") -> Row:
    """{"prompt": text} or {"messages": […]}, with "check", and "kind" or fields of a chat body as one likes. Raises
    BadParameter."""
    if not isinstance(value, Mapping):
        raise BadParameter(where, "must be a JSON object")
    if known := [key for key in value if key not in ("prompt", "check", "kind", "id", *_BODY)]:
        raise BadParameter(where, f"has {known[0]!r:.40}, which means nothing here")
    check = check_from_json(value.get("check"), f"{where}.check")
    return Row(asked_from_json(value, where), check, str(value.get("kind", "")))


def asked_from_json(value: Mapping[str, Any], where: str = "row") -> Asked:
    """Raises BadParameter."""
    messages = value.get("messages")
    if isinstance(value.get("prompt"), str) and messages is None:
        messages = [{"role": "user", "content": value["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, Mapping) for one in messages):
        raise BadParameter(where, "needs a prompt, or messages")
    body = {key: value[key] for key in _BODY if key in value}
    return Asked.of_body({"temperature": 0, **body, "messages": [dict(one) for one in messages]})


async def label(
    rows: Sequence[Row],
    policy: Policy,
    targets: Mapping[str, Target],
    ask: Ask | None,
    *,
    progress: Callable[[int], object] = lambda rows: None,
) -> list[Labelled]:
    """Rows share no prefix with each other: every cost is that of a cold cache. Forbidden targets are not asked: what
    must not leave does not leave for a measurement either."""
    chooser = Chooser(policy, None)
    found = []
    for number, row in enumerate(rows):
        signals = signals_of(row.asked, policy.patterns)
        forbidden = chooser.forbidden(signals)
        answers, router = await _judged(row.asked, policy, ask)
        outcomes = {}
        for name, target in targets.items():
            if name not in forbidden:
                most = getattr(policy.targets[name], "max_tokens", None)
                given = chooser.given_to(name, row.asked, signals, answers)
                asked = replace(limited_to(row.asked, most), salt=f"calibrate {number}", given=given)
                outcomes[name] = await outcome_of(target, asked, row.check)
        found.append(Labelled(row, signals, forbidden, answers, router, outcomes))
        progress(1)
    return found


async def outcome_of(target: Target, asked: Asked, check: Check) -> Outcome:
    entry = Entry(None, "")
    body: JSON = {}
    failure = ""
    with entry.charging(target.name) as tab:
        try:
            async with AsyncExitStack() as held:
                body = await (await target.open(asked, held)).whole()
        except HeedfulError as error:
            failure = error.message
    if receipt_of(body) and not target.books_itself:
        entry.add(tab, receipt_of(body))
    text = text_of_body(body) if body else ""
    return Outcome(not failure and check.passes(text), cost_of(entry.spent), text, failure)


def served(row: Labelled, target: str, policy: Policy) -> Outcome:
    """What the caller gets where the policy sends the row to `target`: the answer of its fallback where it fails, of
    who stands above it where the draft fails its check; and the cost of both."""
    outcome, draft = row.outcomes[target], policy.targets[target].draft
    other = None
    if outcome.failure:
        other = policy.fallbacks.get(target)
    elif draft is not None and not draft.check.passes(outcome.text):
        other = draft.escalate
    if other is None or other not in row.outcomes:
        return outcome
    second = row.outcomes[other]
    return replace(second, cost={name: _sum([outcome.cost[name], second.cost[name]]) for name in COSTS})


async def _judged(
    asked: Asked, policy: Policy, ask: Ask | None
) -> tuple[Mapping[str, Answer], Mapping[str, float | None]]:
    if ask is None or policy.decision is None:
        return {}, dict.fromkeys(COSTS, 0.0)
    entry = Entry(None, "")
    with entry.charging("decider") as tab:
        try:
            judged = await ask(asked.decided_text, policy.decision.questions, "")
        except HeedfulError:
            return {}, dict.fromkeys(COSTS, 0.0)
        entry.add(tab, judged.receipt)
    return judged.answers, cost_of(entry.spent)


def cost_of(spent: Sequence[Spent]) -> dict[str, float | None]:
    """Sums; None where a part does not say."""
    return {
        "visits": _sum([None if one.visits is None else one.visits["total"] for one in spent]),
        "positions": _sum([one.positions for one in spent]),
        "flops": _sum([one.flops for one in spent]),
        "joules": _sum([one.joules for one in spent]),
        "seconds": _sum([one.seconds for one in spent]),
    }


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return float(sum(known)) if len(known) == len(parts) else None
