"""A cost on paper, put together: a question about a shape, its counts, their seconds, joules and price, and a hint.

The dictionaries made here are what `heedful cost --json` prints; field names are public and those of the receipt where
both have the thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from heedful.cache.policy import PagePolicy, resolve
from heedful.cost.energy import JOULES_PER_KWH, Energy, Machine
from heedful.cost.formulas import (
    PLAIN,
    Cost,
    Shape,
    decode_cost,
    encoder_cost,
    prefill_cost,
    total,
    training_cost,
)
from heedful.cost.receipt import human
from heedful.request import KV_ROW_BYTES, CachePolicy


@dataclass(frozen=True)
class Question:
    """What is to be counted."""

    kind: Literal["decode", "request", "encoder", "training"]
    tokens: int
    """Context of the decoded token, or length of the prompt, of the text, of each training document."""
    output: int = 1
    """Output tokens of the request."""
    documents: int = 1
    """Training documents in one step."""
    cached: int = 0
    """Tokens of the request's prompt whose keys and values are there already."""

    def parts(self, shape: Shape, policy: PagePolicy) -> dict[str, Cost]:
        match self.kind:
            case "decode":
                prefill = prefill_cost(shape, self.tokens, policy=policy)
                return {"prefill": prefill, "decode": decode_cost(shape, self.tokens, policy=policy)}
            case "request":
                prefill = prefill_cost(shape, self.tokens, self.cached, policy)
                return {"prefill": prefill, "decode": decode_cost(shape, self.tokens + 1, self.output - 1, policy)}
            case "encoder":
                return {"encoder": encoder_cost(shape, self.tokens, policy)}
            case "training":
                return {"training": training_cost(shape, {self.tokens: self.documents}, policy)}

    def answer(self, parts: dict[str, Cost]) -> Cost:
        """The cost that was asked for: of one decoded token, the whole request, one text, one training step."""
        return total(parts["prefill"], parts["decode"]) if self.kind == "request" else parts[self.kind]

    @property
    def paid_tokens(self) -> int:
        """What a price per token divides by: output tokens, or tokens encoded or trained on."""
        output = {"decode": 1, "request": self.output}
        return output.get(self.kind, self.tokens * self.documents)


@dataclass(frozen=True)
class Setting:
    """How counts become seconds, joules and money."""

    weight_format: str
    machine: Machine
    price_per_kwh: float | None = None


def page_policy(policy: CachePolicy) -> PagePolicy:
    """For a runner that has every format. Whether rows lie rotated makes no difference to counts."""
    return resolve(policy, PLAIN.main, tuple(KV_ROW_BYTES), head_dim=1)


@dataclass(frozen=True)
class Case:
    """A question about a model under a policy, on a machine."""

    question: Question
    shape: Shape
    policy: CachePolicy
    setting: Setting

    @property
    def page_policy(self) -> PagePolicy:
        return page_policy(self.policy)

    @property
    def kv_format(self) -> str:
        return self.page_policy.main.name

    def answer(self) -> Cost:
        return self.question.answer(self.parts())

    def parts(self) -> dict[str, Cost]:
        return self.question.parts(self.shape, self.page_policy)


@dataclass(frozen=True)
class Estimate:
    seconds: float
    energy: Energy
    covers: str
    """ "attention", or "attention and weights" where the number of weights is known."""


def dram_bytes(cost: Cost, setting: Setting) -> int:
    """KV rows read and written, page bounds, and weights where they are known."""
    weights = None if cost.weight_bytes_read is None else cost.weight_bytes_read[setting.weight_format]
    return sum(size or 0 for size in (cost.kv_bytes_read, cost.kv_bytes_written, weights))


def estimate(costs: list[Cost], setting: Setting) -> Estimate | None:
    """Of work done one after the other; None where not even attention's FLOPs and bytes are known."""
    if any(cost.attention_flops is None or cost.kv_bytes_read is None for cost in costs):
        return None
    machine = setting.machine
    moved = [dram_bytes(cost, setting) for cost in costs]
    flops = [sum(count or 0 for count in cost.flops.values()) for cost in costs]
    seconds = sum(map(machine.seconds, flops, moved))
    linear = all(cost.linear_flops is not None for cost in costs)
    covers = "attention and weights" if linear else "attention"
    return Estimate(seconds, machine.energy(seconds, sum(moved)), covers)


def report(case: Case) -> dict[str, Any]:
    """What `--json` prints: the answer's fields, then each part's under its name, then the hint."""
    formats = dict.fromkeys((*KV_ROW_BYTES, case.kv_format))
    parts = {name: replace(case, policy=replace(case.policy, kv_format=name)).parts() for name in formats}
    answers = {name: case.question.answer(of_format) for name, of_format in parts.items()}
    setting, question, own = case.setting, case.question, case.kv_format
    return {
        **describe(answers, own, _estimate_answer(case, parts[own]), setting, question.paid_tokens),
        **{
            name: describe({f: costs[name] for f, costs in parts.items()}, own, estimate([part], setting), setting)
            for name, part in parts[own].items()
        },
        "cheaper": cheaper(case),
    }


def describe(
    costs: dict[str, Cost], own: str, estimated: Estimate | None, setting: Setting, paid_tokens: int | None = None
) -> dict[str, Any]:
    """`costs` by KV format, `own` the one that was asked for. `paid_tokens`: None: those that were computed."""
    cost = costs[own]
    dense = cost.dense_visits
    return {
        "tokens": cost.tokens,
        "visits": cost.visits,
        "dense_visits": dense,
        "saved": cost.saved,
        "saved_share": {name: count / dense if dense else 0.0 for name, count in cost.saved.items()},
        "kv_rows_read": cost.kv_rows_read,
        "kv_rows_written": cost.kv_rows_written,
        "bounds_read": cost.bounds_read,
        "keys_listed": cost.keys_listed,
        "kv_bytes_read": _by_format(costs, "kv_bytes_read"),
        "kv_bytes_held": _by_format(costs, "kv_bytes_held"),
        "kv_bytes_per_token": _by_format(costs, "kv_bytes_per_token"),
        "flops": cost.flops,
        "weight_bytes_read": cost.weight_bytes_read,
        "seconds": estimated.seconds if estimated else None,
        "energy": asdict(estimated.energy) if estimated else None,
        "estimate_covers": estimated.covers if estimated else None,
        "price": _price(estimated, setting.price_per_kwh, cost.tokens if paid_tokens is None else paid_tokens),
    }


def _by_format(costs: dict[str, Cost], name: str) -> dict[str, int] | None:
    """With --kv so and all else as it was asked for. None: not known."""
    sizes = {form: getattr(cost, name) for form, cost in costs.items()}
    return None if None in sizes.values() else sizes


def _price(estimated: Estimate | None, per_kwh: float | None, tokens: int) -> dict[str, float] | None:
    """In the currency of `per_kwh`: electricity alone."""
    if estimated is None or per_kwh is None or tokens == 0:
        return None
    energy = estimated.energy
    per_token, low, high = (j / JOULES_PER_KWH * per_kwh / tokens for j in (energy.joules, energy.low, energy.high))
    return {
        "per_kwh": per_kwh,
        "per_token": per_token,
        "per_million_tokens": 1e6 * per_token,
        "per_million_tokens_low": 1e6 * low,
        "per_million_tokens_high": 1e6 * high,
    }


def _estimate_answer(case: Case, parts: dict[str, Cost]) -> Estimate | None:
    costs = list(parts.values()) if case.question.kind == "request" else [case.question.answer(parts)]
    return estimate(costs, case.setting)


# ---- what would make it cheaper -----------------------------------------------------------------------------------

WORTH_SAYING = 0.02
"""Share of the cost; a change that saves less is not proposed."""

_SMALLER_FORMAT = {"f32": "q8", "f16": "q8", "q8": "q4"}
_WIDEST_WINDOW, _NARROWEST_WINDOW = 4096, 256
_SINKS = 4  # StreamingLLM (arXiv:2309.17453) needs no more
_LOSSY = "it changes the output, so measure the loss"


@dataclass(frozen=True)
class _Change:
    how: str
    case: Case
    caveat: str = _LOSSY


def cheaper(case: Case) -> str:
    """One sentence: the single change that lowers the cost most. Seconds decide; visits where they are unknown."""
    before = _measure(case)
    after, change = min(
        ((_measure(change.case), change) for change in _changes(case)),
        key=lambda pair: pair[0],
        default=(before, None),
    )
    if change is None or after > before * (1 - WORTH_SAYING):
        return f"Cheaper: no change that heedful would propose saves {percent(WORTH_SAYING)} here."
    share = f"{percent(1 - after / before)} less"
    seconds = _estimate_answer(case, case.parts()) is not None
    time = f" and take {duration(after)} instead of {duration(before)}, {share}" if seconds else f", {share}"
    return f"Cheaper: {change.how} would {_work(case, change.case)}{time}; {change.caveat}."


def _measure(case: Case) -> float:
    parts = case.parts()
    estimated = _estimate_answer(case, parts)
    return estimated.seconds if estimated else case.question.answer(parts).visits


def _work(now: Case, then: Case) -> str:
    made, less = now.answer(), then.answer()
    if less.visits != made.visits:
        return f"make {human(less.visits)} visits instead of {human(made.visits)}"
    moved, left = dram_bytes(made, now.setting), dram_bytes(less, then.setting)
    return f"move {human(left)}B instead of {human(moved)}B"


def _changes(case: Case) -> Iterator[_Change]:
    question, policy, setting = case.question, case.policy, case.setting
    if question.kind in ("decode", "request"):
        window, sinks = _narrower_window(case), max(_SINKS, policy.sinks)
        if window is not None:
            narrowed = replace(policy, window=window, sinks=sinks)
            yield _Change(f"--window {window} --sinks {sinks}", replace(case, policy=narrowed))
        if kv := _SMALLER_FORMAT.get(case.kv_format):
            yield _Change(f"--kv {kv}", replace(case, policy=replace(policy, kv_format=kv)))
    if question.kind != "training" and (weights := _SMALLER_FORMAT.get(setting.weight_format)):
        yield _Change(f"--weights {weights}", replace(case, setting=replace(setting, weight_format=weights)))
    half = question.tokens // 2
    if question.kind == "encoder" and half:
        shorter = replace(case, question=replace(question, tokens=half))
        yield _Change(f"--context {half}", shorter, "the model then reads half of the text")
    if question.kind == "training" and half:
        split = replace(question, tokens=half, documents=2 * question.documents)
        how = f"--train-length {half} --documents {split.documents}"
        yield _Change(how, replace(case, question=split), "the model then learns from nothing further back")


def duration(seconds: float) -> str:
    """For people, three digits: 0.0105 is "10.5 ms"."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for limit, length, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds / 86_400:,.0f} days"


def percent(share: float) -> str:
    return "over 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"


def _narrower_window(case: Case) -> int | None:
    """Half of the widest window; without one the largest power of two in a quarter of the tokens, up to a limit."""
    policy, tokens = case.page_policy, case.question.tokens
    if policy.budget_pages is not None or policy.sparse_prefill:
        return None
    windows = [policy.window_of(own) for own, _ in case.shape.layers_by_window]
    if None in windows:
        window = min(_WIDEST_WINDOW, 1 << max(0, (tokens // 4).bit_length() - 1))
    else:
        window = min(tokens, max(w for w in windows if w is not None)) // 2
    return window if window >= _NARROWEST_WINDOW else None
