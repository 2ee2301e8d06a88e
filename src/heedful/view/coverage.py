"""From how much attention each budget would keep to the policy that is worth a try. Pure Python; nothing is promised:
mass is not quality, so what was measured of a policy stands beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from heedful.cache.policy_text import policy_name
from heedful.cost.formulas import Shape
from heedful.cost.paper import Question, page_policy
from heedful.cost.quality import MEAN_KLD_BOUND, Quality, measured_quality
from heedful.request import CachePolicy

ENOUGH = 0.95
"""Of the attention mass, on average over layers: less is not recommended of a policy that was not measured."""
LEAST_TOKENS = 256
"""Nor are budgets below: what a short text does without tells nothing of a long one."""


@dataclass(frozen=True)
class Budget:
    """One point of a curve."""

    policy: CachePolicy
    tokens: int
    """That a query reads where the policy is in force."""
    mass: float
    """Mean over layers, heads and queries."""
    layers_enough: int
    """Layers that keep ENOUGH of theirs."""
    visits: int
    """Of the whole request under the policy, on paper."""

    @property
    def options(self) -> str:
        """As `heedful generate` takes them."""
        if self.policy.budget is not None:
            return f"--budget {self.policy.budget}"
        return f"--window {self.policy.window}" + (f" --sinks {self.policy.sinks}" if self.policy.sinks else "")


@dataclass(frozen=True)
class Recommendation:
    """`budget` None: full attention."""

    budget: Budget | None
    quality: Quality | None
    """None: not measured."""
    measure: str
    """The command that measures it, or ""."""


def curve(
    policies: Sequence[CachePolicy], mass_of_layers: Sequence[Sequence[float]], shape: Shape, prompt: int, computed: int
) -> list[Budget]:
    """`mass_of_layers`: (B, L). `computed`: positions of prompt and answer that passed through the layers."""
    question = Question("request", prompt, output=computed - prompt + 1)
    return [
        Budget(
            policy=policy,
            tokens=policy.budget or (policy.window or 0) + policy.sinks,
            mass=sum(masses) / len(masses),
            layers_enough=sum(mass >= ENOUGH for mass in masses),
            visits=question.answer(question.parts(shape, page_policy(policy))).visits,
        )
        for policy, masses in zip(policies, mass_of_layers, strict=True)
    ]


def recommend(model: str, budgets: Sequence[Budget], dense_visits: int) -> Recommendation:
    """The one with the fewest visits of those that lose little: as measured on the model, or else keeping ENOUGH of the
    mass. Full attention where there is none that saves any."""
    worth = [one for one in budgets if one.tokens >= LEAST_TOKENS and one.visits < dense_visits]
    fit = [one for one in worth if _loses_little(measured_quality(model, one.policy), one.mass)]
    if not fit:
        return Recommendation(None, None, "")
    best = min(fit, key=lambda one: (one.visits, -one.mass))
    command = f"heedful eval policy -m {shlex.quote(model)} --policy {policy_name(best.policy)}"
    quality = measured_quality(model, best.policy)
    return Recommendation(best, quality, "" if quality else command)


def _loses_little(quality: Quality | None, mass: float) -> bool:
    """A measurement says more than mass."""
    return mass >= ENOUGH if quality is None else quality.mean_kld <= MEAN_KLD_BOUND
