"""What the tools of one turn took: which way answered, what was put before the model, what all would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from heedful.cost.receipt import Receipt, human
from heedful.mcp.calls.call import CallRecord
from heedful.mcp.catalogue.select import SchemaVisits, Selection

Way = Literal["none", "rules", "likelihood", "model", "refused"]
"""How the call came about: there was none; by rules, no model asked; the model scored calls that rules had made; it
wrote the call itself; none was allowed or none gave an answer."""


@dataclass(frozen=True)
class ToolReceipt:
    way: Way
    said_by: Literal["rules", "model"]
    """Who put the answer into words; by rules it took no generated token."""
    selection: Selection
    schema_tokens: int
    """Put before the model in this turn."""
    visits: SchemaVisits
    """Of a cold prefill, by the tools that were shown, by all, and by the encoder that chose."""
    calls: tuple[CallRecord, ...]
    """Those that list values for arguments among them."""
    runs: tuple[Receipt, ...]
    """Of the model, in this turn: scoring, writing calls, answering."""
    stopped_by: str = ""
    """The guard that ended the calls; "" for none."""

    @property
    def tool_ms(self) -> float:
        return sum(call.ms for call in self.calls)

    @property
    def output_tokens(self) -> int:
        return sum(run.output_tokens for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "way": self.way,
            "said_by": self.said_by,
            "selection": self.selection.to_dict(),
            "schema_tokens": self.schema_tokens,
            "all_schema_tokens": self.selection.all_schema_tokens,
            "visits": asdict(self.visits),
            "tool_ms": self.tool_ms,
            "output_tokens": self.output_tokens,
            "calls": [asdict(call) for call in self.calls],
            "runs": [run.to_dict() for run in self.runs],
            "stopped_by": self.stopped_by,
        }

    def line(self) -> str:
        """One line for a terminal."""
        return " · ".join((
            _WAYS[self.way],
            *([] if self.way == "none" else [_calls(self.calls)]),
            f"{self.output_tokens:,} tokens generated",
            f"{self.schema_tokens:,} schema tokens of {self.selection.all_schema_tokens:,}",
            f"{human(self.visits.chosen).strip()} visits of {human(self.visits.all_tools).strip()}",
            *([f"chosen with {human(self.visits.selection).strip()} visits"] if self.visits.selection else []),
            *([self.stopped_by] if self.stopped_by else []),
        ))  # fmt: skip


_WAYS = {
    "none": "no tool fits",
    "rules": "tool by rules",
    "likelihood": "tool by likelihood",
    "model": "tool by the model",
    "refused": "no tool answered",
}


def _calls(calls: Sequence[CallRecord]) -> str:
    names = dict.fromkeys(call.tool for call in calls)
    return f"{', '.join(names)} {sum(call.ms for call in calls):.0f} ms" if calls else "no call"
