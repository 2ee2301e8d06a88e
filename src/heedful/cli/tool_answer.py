"""A turn of a chat with tools on the screen: each call before the answer, the answer as it comes, what both took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from heedful.cli.terminal import LiveTerminal, Screen
from heedful.mcp.calls.results import as_data
from heedful.mcp.chat.turn import Called, Calling, Noted, Said, ToolTurn

if TYPE_CHECKING:
    from heedful.engine.engine import Live
    from heedful.mcp.catalogue.catalog import CatalogTool
    from heedful.mcp.catalogue.select import Selection

_SHOWN_CHARS = 200


def show_turn(turn: ToolTurn, screen: Screen, terminal: LiveTerminal, status: Any) -> None:
    """Until it ends or is stopped. `status`: words for the status line, of a Live."""
    for event in turn:
        if isinstance(event, Calling):
            screen.note(f"→ {call_text(event.tool, event.arguments)}")
        elif isinstance(event, Called):
            if event.done.error is not None:
                screen.note(f"← {event.done.text}")
        elif isinstance(event, Noted):
            screen.note(as_data(event.text))
        else:
            assert isinstance(event, Said), event
            screen.text(event.text)
        live: Live | None = turn.live
        if live is not None:
            terminal.show(status(live), screen.open_line)
    screen.line()


def call_text(tool: str, arguments: Mapping[str, Any] | str) -> str:
    """On one line, without what would move a cursor."""
    told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    line = " ".join(as_data(f"{tool} {told}").split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"


def question_text(tool: CatalogTool, arguments: Mapping[str, Any], why: str) -> str:
    return f"{call_text(tool.model_name, arguments)}\n  {as_data(why)}. Call it? [y/N] "


def selection_lines(selection: Selection | None) -> list[str]:
    """For /tools."""
    if selection is None:
        return ["nothing was asked yet; tools are chosen for each message"]
    if not selection.chosen:
        return [f"no tool of {selection.all_tools} fitted the last message"]
    head = (
        f"{len(selection.chosen)} of {selection.all_tools} tools fitted the last message: {selection.schema_tokens:,} "
        f"tokens, all would be {selection.all_schema_tokens:,}"
    )
    return [head, *(f"  {as_data(each.tool.signature)} ({each.cause})" for each in selection.chosen)]
