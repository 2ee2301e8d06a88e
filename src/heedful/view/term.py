"""A view in a few lines for a terminal: plain characters, no colour, nothing that moves a cursor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from heedful.cost.receipt import human

_SHADES = " ░▒▓█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_MADE = {"full": "full attention", "window": "in the window", "sink": "sinks", "selected": "chosen pages"}
_SAVED = {"saved_window": "saved by the window", "saved_pages": "saved by pages", "saved_prefix": "saved by the prefix"}
_BLOCKS = {"full": "█", "window": "▓", "sink": "▒", "selected": "▚"}
_MOST_SURPRISING = 5


def view_text(view: dict[str, Any]) -> str:
    """`view`: what `record.make_view` made."""
    parts = [
        f"{view['model']} · {view['policy']} · {view['receipt_line']}",
        "\n".join(_budget(view)),
        "\n".join(_heads(view)),
        "\n".join(_coverage(view)),
        "\n".join(_surprises(view)),
    ]
    return "\n\n".join(part for part in parts if part)


def _budget(view: dict[str, Any]) -> Iterable[str]:
    visits, steps = view["receipt"]["visits"], view["steps"]
    sums = {part: sum(step.get(part, 0) for step in steps) for part in (*_MADE, *_SAVED)}
    bar = "".join(_BLOCKS[part] * round(_WIDTH * sums[part] / visits["dense"]) for part in _MADE)
    yield f"visits     {bar.ljust(_WIDTH, '·')}  {visits['total']:,} of {visits['dense']:,} dense"
    yield "           " + " · ".join(
        f"{_BLOCKS.get(part, '·')} {name} {sums[part]:,}" for part, name in (_MADE | _SAVED).items() if sums[part]
    )
    per_token = [sum(step.get(part, 0) for part in _MADE) / (step["end"] - step["start"]) for step in steps]
    yield f"each step  {_line(per_token)}  up to {human(max(per_token, default=0)).strip()} a token"


def _heads(view: dict[str, Any]) -> Iterable[str]:
    """Heads down, layers across."""
    light = view["layers"]["light"]
    yield "visits that carried under 0.1 % of their query's weight: a row a head, a column a layer, from none to all"
    for head in range(view["shape"]["heads"]):
        shades = "".join(_SHADES[min(4, int(5 * layer[head]))] for layer in light)
        yield f"  head {head:<3} {shades}"


def _coverage(view: dict[str, Any]) -> Iterable[str]:
    coverage = view["coverage"]
    points = [point for budgets in coverage["curves"].values() for point in budgets]
    if points:
        yield "what less would keep of the attention weight"
    for point in points:
        bar = "█" * round(30 * point["mass"])
        yield f"  {point['options']:<26} {bar.ljust(30, '·')} {100 * point['mass']:5.1f} %"
    best = coverage["recommended"]
    if best is None:
        yield "stay with full attention: nothing smaller saves visits and keeps 95 %, or was measured to lose little"
        return
    known = "" if coverage["measure"] == "" else f"; measure its loss: {coverage['measure']}"
    if coverage["quality"] is not None:
        known = f"; measured mean KLD {coverage['quality']['mean_kld']:.4f}"
    less = 1 - best["visits"] / coverage["dense_visits"]
    yield f"worth a try: {best['options']}, {100 * less:.1f} % fewer visits{known}"


def _surprises(view: dict[str, Any]) -> Iterable[str]:
    tokens, first = view["tokens"], view["prompt_tokens"]
    bits = [(value, at) for at, value in enumerate(tokens["surprisal"]) if at >= first and value is not None]
    if not bits:
        return
    yield "the answer's most surprising tokens"
    for value, at in sorted(bits, reverse=True)[:_MOST_SURPRISING]:
        before = printable("".join(tokens["text"][max(0, at - 6) : at]))
        yield f"  {value:5.2f} bits  …{before}[{printable(tokens['text'][at])}]"


def printable(text: str) -> str:
    """On one line, without what would move a cursor."""
    return "".join(c if c.isprintable() else "↵" if c == "\n" else "�" for c in text)


def _line(values: Sequence[float]) -> str:
    """At most _WIDTH characters as high as the values, means where several share one."""
    if not values:
        return ""
    count = min(len(values), _WIDTH)
    groups = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means, top = [sum(group) / len(group) for group in groups], max(values)
    return "".join(_HEIGHTS[min(7, int(8 * mean / top))] if top else _HEIGHTS[0] for mean in means)
