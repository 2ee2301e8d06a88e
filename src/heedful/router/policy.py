"""The records of a policy file, checked: who may answer, what is forbidden, which way a request goes.

policy_file.py reads them; choose.py follows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.decide.question import Question
from heedful.router.breaker import BreakerLimits
from heedful.router.expression import Condition
from heedful.router.template import Template
from heedful.router.verify import Check

AUTO = "auto"
"""The model that a routed request asks for."""
CALIBRATED = "calibrated"
"""As min_p of a route: what `heedful route calibrate` found."""
KINDS = ("decider", "local", "mcp", "openai")


@dataclass(frozen=True)
class Draft:
    """What must hold of a target's answer before it is shown, and who answers where it does not."""

    check: Check
    escalate: str


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    name: str
    kind: str
    draft: Draft | None = None


@dataclass(frozen=True, kw_only=True)
class LocalSpec(TargetSpec):
    model: str
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeciderSpec(TargetSpec):
    """Answers with the label of a question, at no generated token."""

    model: str
    question: Question
    say: Mapping[str, str] = field(default_factory=dict)
    """Label → the text that is answered; default: the label itself."""


@dataclass(frozen=True, kw_only=True)
class OpenAISpec(TargetSpec):
    base_url: str
    """As it stands in the file: ${VAR} is looked up when the target is made, and never shown."""
    model: str
    endpoints: tuple[str, ...] = ()
    """Several of them that answer alike, in the place of base_url, which is then the first."""
    api_key_env: str | None = None
    timeout_s: float = 60.0
    """Until the first piece of an answer, and again from each to the next."""
    retries: int = 2
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class McpSpec(TargetSpec):
    """Answers with a tool's result, at no generated token."""

    config: Path
    """The file of servers."""
    server: str
    tool: str
    """As the server names it."""
    arguments: Mapping[str, Any] | None = None
    """Name → a Template, or a value as it is; None: they are found in the message by rules."""
    answer: Template | None = None
    """Filled from the result; None: said by rules."""
    timeout_s: float = 30.0

    @property
    def model(self) -> str:
        """What answers are signed with."""
        return f"{self.server}/{self.tool}"


@dataclass(frozen=True)
class Constraint:
    """Where it holds, none of `never` may answer, whatever else the policy says."""

    condition: Condition
    never: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """Where the pattern is found in the last message of the user, and the condition holds, it goes to that target."""

    match: re.Pattern[str] | None
    condition: Condition | None
    to: str
    max_tokens: int | None = None


@dataclass(frozen=True)
class Decision:
    model: str | None
    """None: the default decider."""
    questions: tuple[Question, ...]
    timeout_s: float = 1.0
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    calibration: Path | None = None


@dataclass(frozen=True)
class Route:
    """Where the condition holds and the decider is sure enough, it goes to `to`; not sure enough: to `otherwise`."""

    to: str
    condition: Condition
    min_p: float | str | None = None
    """A probability, "calibrated", or None: the likeliest answer counts however unsure it is."""
    otherwise: str | None = None
    max_tokens: int | None = None

    @property
    def name(self) -> str:
        """What calibrations call it."""
        return f"{self.condition.text} -> {self.to}"


@dataclass(frozen=True)
class Stick:
    tool_loop: bool = True
    """While tools answer, the model that called them goes on."""
    no_downgrade_above_tokens: int | None = None
    """A conversation of more tokens goes to no cheaper target than its last turn did."""
    turn_ttl_s: float = 600.0


@dataclass(frozen=True)
class Counterfactual:
    """Of a random share of requests, what these targets would have cost is found out by asking them too."""

    share: float
    targets: tuple[str, ...]
    seed: int = 0


@dataclass(frozen=True)
class LedgerSpec:
    path: Path
    fsync: str = "interval"
    """"always": after each line; "interval": at most once a second, and at the end; "never": as the system does."""


@dataclass(frozen=True)
class Policy:
    path: Path
    sha256: str
    """Of what the file says, not of how it is written: comments and order of keys change nothing."""
    targets: Mapping[str, TargetSpec]
    """The cheapest first."""
    default: str
    patterns: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    rules: tuple[Rule, ...] = ()
    decision: Decision | None = None
    routes: tuple[Route, ...] = ()
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    stick: Stick = Stick()
    counterfactual: Counterfactual | None = None
    ledger: LedgerSpec | None = None

    @property
    def local_models(self) -> tuple[str, ...]:
        """Models that have to be served here for it."""
        specs = [s for s in self.targets.values() if isinstance(s, LocalSpec)]
        return tuple(dict.fromkeys(spec.model for spec in specs))

    def deciders(self, default: str) -> tuple[str, ...]:
        """Deciders that it asks; `default`: where the file names none."""
        asked = [] if self.decision is None else [self.decision.model or default]
        asked += [spec.model for spec in self.targets.values() if isinstance(spec, DeciderSpec)]
        return tuple(dict.fromkeys(asked))

    def cost_rank(self, target: str) -> int:
        """0: the cheapest."""
        return list(self.targets).index(target)
