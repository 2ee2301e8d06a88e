"""A cost on paper, put together: a question about a shape, its counts, their seconds, joules and price, and a hint.

The dictionaries made here are what `heedful cost --json` prints; field names are public and those of the receipt where
both have the thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from heedful.cost.energy import JOULES_PER_KWH, Energy, Machine
from heedful.cost.formulas import (
    Cost,
    Shape,
    decode_cost,
    encoder_cost,
    generation_cost,
    prefill_cost,
    training_cost,
)
from heedful.cost.receipt import human


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

    def parts(self, shape: Shape) -> dict[str, Cost]:
        match self.kind:
            case "decode":
                return {"prefill": prefill_cost(shape, self.tokens), "decode": decode_cost(shape, self.tokens)}
            case "request":
                steps = decode_cost(shape, self.tokens + 1, self.output - 1)
                return {"prefill": prefill_cost(shape, self.tokens), "decode": steps}
            case "encoder":
                return {"encoder": encoder_cost(shape, self.tokens)}
            case "training":
                return {"training": training_cost(shape, {self.tokens: self.documents})}

    def answer(self, shape: Shape) -> Cost:
        """The cost that was asked for: of one decoded token, the whole request, one text, one training step."""
        if self.kind == "request":
            return generation_cost(shape, self.tokens, self.output)
        return self.parts(shape)["decode" if self.kind == "decode" else self.kind]

    @property
    def paid_tokens(self) -> int:
        """What a price per token divides by: output tokens, or tokens encoded or trained on."""
        output = {"decode": 1, "request": self.output}
        return output.get(self.kind, self.tokens * self.documents)


@dataclass(frozen=True)
class Setting:
    """How counts become bytes, seconds, joules and money."""

    kv_format: str
    weight_format: str
    machine: Machine
    price_per_kwh: float | None = None


@dataclass(frozen=True)
class Estimate:
    seconds: float
    energy: Energy
    covers: str
    """ "attention", or "attention and weights" where the number of weights is known."""


def dram_bytes(cost: Cost, setting: Setting) -> int:
    """KV rows read and written, and weights where they are known."""
    known = (
        (cost.kv_bytes_read, setting.kv_format),
        (cost.kv_bytes_written, setting.kv_format),
        (cost.weight_bytes_read, setting.weight_format),
    )
    return sum(by_format[name] for by_format, name in known if by_format is not None)


def estimate(costs: list[Cost], setting: Setting) -> Estimate | None:
    """Of work done one after the other; None where not even attention's FLOPs and bytes are known."""
    if any(cost.attention_flops is None or cost.kv_bytes_read is None for cost in costs):
        return None
    machine = setting.machine
    moved = [dram_bytes(cost, setting) for cost in costs]
    flops = [(cost.attention_flops or 0) + (cost.linear_flops or 0) for cost in costs]
    seconds = sum(map(machine.seconds, flops, moved))
    linear = all(cost.linear_flops is not None for cost in costs)
    covers = "attention and weights" if linear else "attention"
    return Estimate(seconds, machine.energy(seconds, sum(moved)), covers)


def report(question: Question, shape: Shape, setting: Setting) -> dict[str, Any]:
    """What `--json` prints: the answer's fields, then each part's under its name, then the hint."""
    parts = question.parts(shape)
    return {
        **describe(question.answer(shape), estimate_answer(question, shape, setting), setting, question.paid_tokens),
        **{name: describe(part, estimate([part], setting), setting, part.tokens) for name, part in parts.items()},
        "cheaper": cheaper(question, shape, setting),
    }


def describe(cost: Cost, estimated: Estimate | None, setting: Setting, paid_tokens: int) -> dict[str, Any]:
    dense = cost.dense_visits
    return {
        "tokens": cost.tokens,
        "visits": cost.visits,
        "dense_visits": dense,
        "saved": cost.saved,
        "saved_share": {name: count / dense if dense else 0.0 for name, count in cost.saved.items()},
        "kv_rows_read": cost.kv_rows_read,
        "kv_rows_written": cost.kv_rows_written,
        "kv_bytes_read": cost.kv_bytes_read,
        "kv_bytes_held": cost.kv_bytes_held,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "flops": cost.flops,
        "weight_bytes_read": cost.weight_bytes_read,
        "seconds": estimated.seconds if estimated else None,
        "energy": asdict(estimated.energy) if estimated else None,
        "estimate_covers": estimated.covers if estimated else None,
        "price": _price(estimated, setting.price_per_kwh, paid_tokens),
    }


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


def estimate_answer(question: Question, shape: Shape, setting: Setting) -> Estimate | None:
    if question.kind == "request":
        return estimate(list(question.parts(shape).values()), setting)
    return estimate([question.answer(shape)], setting)


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
    question: Question
    shape: Shape
    setting: Setting
    caveat: str


def cheaper(question: Question, shape: Shape, setting: Setting) -> str:
    """One sentence: the single change that lowers the cost most. Seconds decide; visits where they are unknown."""
    before = _measure(question, shape, setting)
    changes = [(_measure(c.question, c.shape, c.setting), c) for c in _changes(question, shape, setting)]
    after, change = min(changes, key=lambda pair: pair[0], default=(before, None))
    if change is None or after > before * (1 - WORTH_SAYING):
        return f"Cheaper: no change that heedful would propose saves {percent(WORTH_SAYING)} here."
    seconds = estimate_answer(question, shape, setting) is not None
    share = f"{percent(1 - after / before)} less"
    time = f" and take {duration(after)} instead of {duration(before)}, {share}" if seconds else f", {share}"
    return f"Cheaper: {change.how} would {_work(question, shape, setting, change)}{time}; {change.caveat}."


def _measure(question: Question, shape: Shape, setting: Setting) -> float:
    estimated = estimate_answer(question, shape, setting)
    return estimated.seconds if estimated else question.answer(shape).visits


def _work(question: Question, shape: Shape, setting: Setting, change: _Change) -> str:
    now, then = question.answer(shape), change.question.answer(change.shape)
    if then.visits != now.visits:
        return f"make {human(then.visits)} visits instead of {human(now.visits)}"
    return f"move {human(dram_bytes(then, change.setting))}B instead of {human(dram_bytes(now, setting))}B"


def _changes(question: Question, shape: Shape, setting: Setting) -> Iterator[_Change]:
    if question.kind in ("decode", "request"):
        window = _narrower_window(question.tokens, shape)
        sinks = max(_SINKS, shape.sinks)
        if window is not None:
            narrowed = shape.with_policy(window, sinks)
            yield _Change(f"--window {window} --sinks {sinks}", question, narrowed, setting, _LOSSY)
        if kv := _SMALLER_FORMAT.get(setting.kv_format):
            yield _Change(f"--kv {kv}", question, shape, replace(setting, kv_format=kv), _LOSSY)
    if question.kind != "training" and (weights := _SMALLER_FORMAT.get(setting.weight_format)):
        smaller = replace(setting, weight_format=weights)
        yield _Change(f"--weights {weights}", question, shape, smaller, _LOSSY)
    half = question.tokens // 2
    if question.kind == "encoder" and half:
        shorter = replace(question, tokens=half)
        yield _Change(f"--context {half}", shorter, shape, setting, "the model then reads half of the text")
    if question.kind == "training" and half:
        split = replace(question, tokens=half, documents=2 * question.documents)
        how = f"--train-length {half} --documents {split.documents}"
        yield _Change(how, split, shape, setting, "the model then learns from nothing further back")


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


def _narrower_window(tokens: int, shape: Shape) -> int | None:
    """Half of the widest window; without one the largest power of two in a quarter of the tokens, up to a limit."""
    windows = [window for window, _ in shape.layers_by_window]
    if None in windows:
        window = min(_WIDEST_WINDOW, 1 << max(0, (tokens // 4).bit_length() - 1))
    else:
        window = min(tokens, max(w for w in windows if w is not None)) // 2
    return window if window >= _NARROWEST_WINDOW else None
