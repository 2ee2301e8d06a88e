"""The table of `heedful generate --explain-cost`: what each policy would have made of the request just answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.cost.explain import Explained
    from heedful.cost.quality import Quality

_HEADINGS = ("this request with", "visits", "less", "KV read", "KV held", "time, at least", "measured loss")


def table(rows: list[Explained], tokens: int) -> str:
    """Lines for a terminal; `tokens`: of prompt and answer."""
    cells = [_HEADINGS, *(_cells(row, rows[0], tokens) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
    last = len(_HEADINGS) - 1
    return "\n".join(
        "  ".join(text.ljust(width) if column in (0, last) else text.rjust(width)
                  for column, (text, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    )  # fmt: skip


def _cells(row: Explained, exact: Explained, tokens: int) -> tuple[str, ...]:
    from heedful.cost.paper import duration, percent
    from heedful.cost.receipt import human

    if row.changes_nothing:
        return (row.policy, "", "", "", "", "", f"changes nothing over {tokens:,} tokens")
    return (
        row.policy,
        human(row.visits).strip(),
        percent(1 - row.visits / exact.visits) if row.visits < exact.visits else "",
        f"{human(row.kv_bytes_read)}B",
        f"{human(row.kv_bytes_held)}B",
        duration(row.seconds),
        _loss(row.quality),
    )


def _loss(quality: Quality | None) -> str:
    if quality is None:
        return "not measured"
    facts = "" if quality.needle_recall is None else f", {quality.needle_recall:.0%} of facts found"
    return f"KLD {quality.mean_kld:.4f}{facts}"
