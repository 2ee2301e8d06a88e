"""What an answered request would have cost under other policies, on paper: the same prompt, as many tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

from heedful.cache.policy import PAGE_LEN
from heedful.cost.energy import Machine
from heedful.cost.formulas import Cost, Shape
from heedful.cost.meter import RunnerFacts
from heedful.cost.paper import Question, page_policy
from heedful.cost.quality import Quality, measured_quality
from heedful.cost.receipt import Receipt
from heedful.models.config import ModelConfig
from heedful.request import CachePolicy

_EXACT = CachePolicy("q8")
_POLICIES = {
    "--kv q8": _EXACT,
    "--kv f16": CachePolicy("f16"),
    "--kv q4": CachePolicy("q4"),
    "--window 1024 --sinks 4": CachePolicy("q8", window=1024, sinks=4),
    "--budget 1024": CachePolicy("q8", budget=1024),
    "--prefill sparse": CachePolicy("q8", sparse_prefill=True),
}
_REUSE = "the prompt a second time"


@dataclass(frozen=True)
class Explained:
    """One policy. All but the first are compared with the first; fields are those of receipts."""

    policy: str
    """As options of `heedful generate`, 8-bit rows unless it says otherwise; or which part is there already."""
    visits: int
    dense_visits: int
    kv_bytes_read: int
    kv_bytes_held: int
    """Rows, at the end; pages are whole, so a little more."""
    seconds: float
    """At least: on the reference machine, with its memory and its arithmetic fully used."""
    quality: Quality | None
    """None: not measured."""
    changes_nothing: bool
    """The request is too short, or the model's own windows narrow enough, for the policy to make a difference."""


def explain(model: str, config: ModelConfig, facts: RunnerFacts, receipt: Receipt) -> list[Explained]:
    """`facts`: what the weights take in memory here. [] for a request of which nothing was computed."""
    computed = _tokens_computed(receipt, config)
    prompt = min(receipt.prompt_tokens, computed)
    if not prompt:
        return []
    asked, shape = Question("request", prompt, output=computed - prompt + 1), Shape.from_config(config)
    rows = [_explained(name, asked, shape, policy, facts, model) for name, policy in _POLICIES.items()]
    cached = (prompt - 1) // PAGE_LEN * PAGE_LEN  # whole pages, and a token is left that makes the first logits
    again = Question("request", prompt, asked.output, cached=cached)
    return _compared([*rows, _explained(_REUSE, again, shape, _EXACT, facts, model)])


def _tokens_computed(receipt: Receipt, config: ModelConfig) -> int:
    """Prompt and output tokens that passed through the layers, or were there: n of them make n (n + 1) / 2 dense visits
    a head. The last output token does not, unless an end-of-text token came after it."""
    of_head = receipt.visits.dense // (config.num_heads * len(config.windows))
    return (isqrt(8 * of_head + 1) - 1) // 2


def _explained(
    name: str, question: Question, shape: Shape, policy: CachePolicy, facts: RunnerFacts, model: str
) -> Explained:
    parts = question.parts(shape, page_policy(policy))
    cost = question.answer(parts)
    assert cost.kv_bytes_read is not None, shape
    assert cost.kv_bytes_held is not None, shape
    return Explained(
        policy=name,
        visits=cost.visits,
        dense_visits=cost.dense_visits,
        kv_bytes_read=cost.kv_bytes_read,
        kv_bytes_held=cost.kv_bytes_held,
        seconds=sum(_seconds(part, facts) for part in parts.values()),
        quality=measured_quality(model, policy),
        changes_nothing=False,
    )


def _seconds(cost: Cost, facts: RunnerFacts) -> float:
    weights = cost.linear_passes * facts.linear_bytes + cost.head_passes * facts.head_bytes
    flops = sum(count or 0 for count in cost.flops.values())
    return Machine().seconds(flops, (cost.kv_bytes_read or 0) + (cost.kv_bytes_written or 0) + weights)


def _compared(rows: list[Explained]) -> list[Explained]:
    base = (rows[0].visits, rows[0].kv_bytes_held)
    return [rows[0], *(replace(row, changes_nothing=(row.visits, row.kv_bytes_held) == base) for row in rows[1:])]
