"""From a request to a target: what is forbidden first, then the first rule or route that fits, else the default.

    chooser = Chooser(policy, ask, thresholds)
    choice = await chooser.choose(asked)
    choice.target, choice.cause, choice.p, choice.threshold

Under the same policy, calibration and answers of the decider the choice is the same. A decider that fails, or is slow,
makes it the default target, and the choice says so.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from heedful.decide.answer import Answer, ChoiceAnswer, NoulAnswer
from heedful.decide.question import Question
from heedful.errors import BadParameter, HeedfulError
from heedful.router.breaker import Breaker
from heedful.router.expression import Value
from heedful.router.patterns import pieces
from heedful.router.pins import Pins
from heedful.router.policy import CALIBRATED, Policy, Route, Rule
from heedful.router.policy_file import questions_of
from heedful.router.signals import JSON, Asked, signals_of


@dataclass(frozen=True)
class Judged:
    """What a decider said of a request."""

    answers: Mapping[str, Answer]
    receipt: Mapping[str, Any]
    """As JSON shows it."""


log = logging.getLogger("heedful.router")

Ask = Callable[[str, tuple[Question, ...], str], Awaitable[Judged]]
"""(state, questions, salt) → answers. Raises HeedfulError."""


@dataclass(frozen=True)
class Thresholds:
    """What `heedful route calibrate` found."""

    by_route: Mapping[str, float | None] = field(default_factory=dict)
    """Route's name → the least probability at which it may be taken; None: at none."""
    version: str | None = None
    """Of the calibration, as records show it."""
    warnings: tuple[str, ...] = ()
    """What does not fit the policy or the decider that it is used with."""


@dataclass(frozen=True)
class Hop:
    """A target that was asked and did not answer, or whose answer was not taken."""

    target: str
    failure: str


@dataclass(frozen=True)
class Choice:
    """Why a request went where it went. All of it stands in the receipt, and the first two in headers."""

    target: str
    cause: str
    p: float | None = None
    threshold: float | None = None
    policy_hash: str = ""
    calibration_version: str | None = None
    router_ms: float = 0.0
    max_tokens: int | None = None
    """That the rule or route allows at most."""
    forbidden: tuple[str, ...] = ()
    answers: Mapping[str, JSON] = field(default_factory=dict)
    """Question → what the decider said, as JSON shows it; {} where it was not asked."""
    signals: Mapping[str, Value] = field(default_factory=dict)
    hops: tuple[Hop, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    """As Asked has it: of the message, so in no record."""
    receipt: Mapping[str, Any] | None = None
    """Of the decider; None where it was not asked. Of one that failed nothing is known but its time."""

    def to_dict(self) -> JSON:
        """As the receipt shows it."""
        return {
            "target": self.target,
            "cause": self.cause,
            "p": self.p,
            "threshold": self.threshold,
            "policy_hash": self.policy_hash,
            "calibration_version": self.calibration_version,
            "router_ms": round(self.router_ms, 3),
            "forbidden": list(self.forbidden),
            "hops": [{"target": hop.target, "failure": hop.failure} for hop in self.hops],
        }

    @property
    def reason(self) -> str:
        """One line for a header: ASCII, at most 200 characters."""
        parts = [f"{hop.target}: {hop.failure}; " for hop in self.hops]
        text = f"{''.join(parts)}{self.cause}"
        if self.p is not None:
            text += f", p {self.p:.3f}" + (f" against {self.threshold:.3f}" if self.threshold is not None else "")
        return re.sub(r"[^\x20-\x7e]", "?", text)[:200]


class Chooser:
    """For one loop's thread. `ask`: the decider; None where the policy has none."""

    def __init__(
        self,
        policy: Policy,
        ask: Ask | None,
        thresholds: Thresholds = Thresholds(),
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self.thresholds = thresholds
        self._ask = ask
        self._clock = clock
        self._pins = Pins(policy.stick.turn_ttl_s)
        self._breaker = Breaker(policy.decision.breaker) if policy.decision else None

    async def choose(self, asked: Asked) -> Choice:
        """Raises BadParameter where the constraints leave nobody."""
        began = self._clock()
        signals = signals_of(asked, self.policy.patterns)
        allowed = self._allowed(signals)
        found = self._without_decider(asked, signals, allowed)
        if found is None:
            judged, failure = await self._judged(asked)
            if failure:
                unknown = {"visits": None, "seconds": {"total": self._clock() - began}}
                found = replace(self._default(allowed, failure), receipt=unknown)
            else:
                found = self._by_answers({} if judged is None else judged.answers, signals, allowed)
                found = replace(found, receipt=None if judged is None else judged.receipt)
        return self._whole(asked, signals, found, allowed, began)

    def choose_given(self, asked: Asked, signals: Mapping[str, Value], answers: Mapping[str, Answer]) -> Choice:
        """The same, where what the decider says is known already; {}: it says nothing, and no route fits."""
        allowed = self._allowed(signals)
        found = self._without_decider(asked, signals, allowed) or self._by_answers(answers, signals, allowed)
        return self._whole(asked, signals, found, allowed, self._clock())

    def given_to(
        self, target: str, asked: Asked, signals: Mapping[str, Value], answers: Mapping[str, Answer]
    ) -> dict[str, str]:
        """What a target would be handed, had the request gone to it: by the first rule that sends it there, or the
        decider's answers."""
        for rule in self.policy.rules:
            if rule.to == target and (given := _given_by(rule, asked, signals)) is not None:
                return given
        return _as_texts(answers)

    def answered(self, asked: Asked, target: str) -> None:
        """The turn went to this target: its tool loop stays there."""
        self._pins.put(asked, target)

    def stand_in(self, choice: Choice, failure: str) -> Choice | None:
        """The fallback of a target that failed; None where there is none, or it is forbidden. One is all there is."""
        other = self.policy.fallbacks.get(choice.target)
        if other is None or other in choice.forbidden or choice.hops:
            return None
        hops = (Hop(choice.target, failure),)
        return replace(choice, target=other, cause=f"fallback from {choice.target} ({choice.cause})", hops=hops)

    # ---- The order of things --------------------------------------------------------------------------------------

    def forbidden(self, signals: Mapping[str, Value]) -> tuple[str, ...]:
        """Targets that the constraints leave out."""
        never = [one.never for one in self.policy.constraints if one.condition.holds(signals)]
        return tuple(name for name in self.policy.targets if any(name in names for names in never))

    def _allowed(self, signals: Mapping[str, Value]) -> list[str]:
        forbidden = self.forbidden(signals)
        allowed = [name for name in self.policy.targets if name not in forbidden]
        if not allowed:
            held = [one.condition.text for one in self.policy.constraints if one.condition.holds(signals)]
            raise BadParameter("messages", f"no target may answer this: {', '.join(held)}", "Change the request.")
        return allowed

    def _without_decider(self, asked: Asked, signals: Mapping[str, Value], allowed: Sequence[str]) -> Choice | None:
        """A turn's own target, or a rule's; None: the routes are to say."""
        if self.policy.stick.tool_loop and asked.is_tool_loop:
            pinned = self._pins.of_turn(asked)
            if pinned is not None and pinned in allowed:
                return Choice(pinned, "tool loop stays on its model")
        for number, rule in enumerate(self.policy.rules, 1):
            given = _given_by(rule, asked, signals) if rule.to in allowed else None
            if given is not None:
                return Choice(rule.to, f"rule {number}", max_tokens=rule.max_tokens, given=given)
        return None if self.policy.routes else self._default(allowed, "nothing else fits")

    def _by_answers(
        self, answers: Mapping[str, Answer], signals: Mapping[str, Value], allowed: Sequence[str]
    ) -> Choice:
        found = self._route(answers, signals, allowed) or self._default(allowed, "no route fits")
        shown = {name: answer.to_dict() for name, answer in answers.items()}
        return replace(found, answers=shown, given=_as_texts(answers))

    def _whole(
        self, asked: Asked, signals: Mapping[str, Value], found: Choice, allowed: Sequence[str], began: float
    ) -> Choice:
        return replace(
            self._kept_up(asked, signals, found, allowed),
            policy_hash=self.policy.sha256[:12],
            calibration_version=self.thresholds.version,
            router_ms=(self._clock() - began) * 1e3,
            forbidden=self.forbidden(signals),
            signals=signals,
        )

    async def _judged(self, asked: Asked) -> tuple[Judged | None, str]:
        """(what the decider says, why it says nothing)"""
        decision = self.policy.decision
        if decision is None or self._ask is None:
            return None, ""
        assert self._breaker is not None
        if not self._breaker.admits():
            return None, "decider left alone after failures"
        try:
            asking = self._ask(asked.decided_text, decision.questions, asked.salt)
            judged = await asyncio.wait_for(asking, decision.timeout_s)
        except TimeoutError:
            self._breaker.failed()
            return None, f"decider took longer than {decision.timeout_s:g} s"
        except HeedfulError as error:
            self._breaker.failed()
            log.warning("heedful: the router's decider failed: %s", error.message)
            return None, f"decider failed: {type(error).__name__}"
        except asyncio.CancelledError:
            self._breaker.left()
            raise
        except Exception as error:  # a bug of a decider must not take requests down
            self._breaker.failed()
            log.error("the router's decider failed", exc_info=error)
            return None, f"decider failed: {type(error).__name__}"
        self._breaker.succeeded()
        return judged, ""

    def _route(
        self, answers: Mapping[str, Answer], signals: Mapping[str, Value], allowed: Sequence[str]
    ) -> Choice | None:
        values = {**signals, **values_of(answers)}
        for number, route in enumerate(self.policy.routes, 1):
            if not route.condition.names <= set(values) or not route.condition.holds(values):
                continue
            p, threshold = self.route_p(route, answers), self.threshold_of(route)
            is_sure = route.min_p is None or (threshold is not None and p is not None and p >= threshold)
            cause = f"route {number}"
            if is_sure and route.to in allowed:
                return Choice(route.to, cause, p, threshold, max_tokens=route.max_tokens)
            if not is_sure and route.otherwise in allowed:
                assert route.otherwise is not None
                return Choice(route.otherwise, f"{cause} is not sure enough", p, threshold, max_tokens=route.max_tokens)
        return None

    def threshold_of(self, route: Route) -> float | None:
        """None: the route is never sure, or asks for no certainty."""
        if route.min_p == CALIBRATED:
            return self.thresholds.by_route.get(route.name)
        assert not isinstance(route.min_p, str), route
        return route.min_p

    def route_p(self, route: Route, answers: Mapping[str, Answer]) -> float | None:
        """How likely the answers that the condition is about are, the least likely of them."""
        decision = self.policy.decision
        about = questions_of(route.condition, decision.questions if decision else ())
        return min((probability_of(answers[q.name]) for q in about if q.name in answers), default=None)

    def _default(self, allowed: Sequence[str], why: str) -> Choice:
        default = self.policy.default
        if default in allowed:
            return Choice(default, f"default: {why}")
        stand_in = self.policy.fallbacks.get(default)
        chosen = stand_in if stand_in in allowed else allowed[-1]
        assert chosen is not None
        return Choice(chosen, f"default {default} is forbidden: {why}")

    def _kept_up(self, asked: Asked, signals: Mapping[str, Value], choice: Choice, allowed: Sequence[str]) -> Choice:
        """A long conversation goes to no cheaper target than before: its cache is there, and it has grown hard."""
        most = self.policy.stick.no_downgrade_above_tokens
        if most is None or float(signals["tokens"]) <= most:
            return choice
        before = self._pins.of_last_turn(asked)
        if (
            before is None
            or before not in allowed
            or self.policy.cost_rank(before) <= self.policy.cost_rank(choice.target)
        ):
            return choice
        cause = f"no downgrade above {most:,} tokens (else {choice.target}: {choice.cause})"
        return replace(choice, target=before, cause=cause, max_tokens=None)


def _given_by(rule: Rule, asked: Asked, signals: Mapping[str, Value]) -> dict[str, str] | None:
    """The named groups of the pattern; None: the rule does not fit."""
    if rule.condition is not None and not rule.condition.holds(signals):
        return None
    match = rule.match.search(next(pieces(asked.text))) if rule.match is not None else None
    if rule.match is not None and match is None:
        return None
    return {} if match is None else {name: text for name, text in match.groupdict().items() if text is not None}


def _as_texts(answers: Mapping[str, Answer]) -> dict[str, str]:
    return {name: str(answer.value) for name, answer in answers.items()}


def values_of(answers: Mapping[str, Answer]) -> dict[str, Value]:
    """What conditions call them."""
    values: dict[str, Value] = {}
    for name, answer in answers.items():
        values[name] = answer.value
        values[f"p_{name}"] = answer.noul if isinstance(answer, NoulAnswer) else probability_of(answer)
    return values


def probability_of(answer: Answer) -> float:
    """Of the likeliest option, level or truth."""
    if isinstance(answer, NoulAnswer):
        return max(answer.noul, 1 - answer.noul)
    shares = answer.probabilities.values() if isinstance(answer, ChoiceAnswer) else answer.probabilities
    return max(shares)
