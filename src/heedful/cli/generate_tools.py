"""`heedful generate --chat … --mcp servers.json`: one answer that tools may help with; notes and receipts to stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli.json_rows import print_json
from heedful.cli.tool_options import check_tools, opened_tools
from heedful.errors import BadParameter

if TYPE_CHECKING:
    from heedful.engine.llm import LLM
    from heedful.mcp.chat.turn import ToolTurn


def check_for_answer(mcp: Path | None, trust: bool, conversation: Any, others: Mapping[str, bool]) -> None:
    """`others`: options that want one run of the model, and whether they are given. Before anything is loaded."""
    check_tools(mcp, trust=trust, can_ask=False)
    if mcp is None:
        return
    if conversation is None:
        raise BadParameter("--mcp", "is for answers, not for texts that go on", "Add --chat.")
    for option, is_given in others.items():
        if is_given:
            raise BadParameter("--mcp", f"cannot be combined with {option}: there may be several runs, or none")


def answer_with_tools(
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    mcp: Path,
    *,
    trust: bool,
    embedder: str,
    as_json: bool,
    receipt: bool,
    how: dict[str, Any],
) -> None:
    """Nobody is asked: calls that the policy asks about are refused. Ctrl-C cancels the call that is under way."""
    from heedful.cli.tool_answer import call_text
    from heedful.mcp.chat.turn import Calling, Noted, Said

    if messages[-1].get("role") != "user":
        raise BadParameter("--messages", "must end with the user's message, for tools to answer it")
    with opened_tools(llm, mcp, trust=trust, embedder=embedder, ask=None, approve=None, answer=None) as tools:
        assert tools is not None
        turn = tools.turn(messages, **how)
        for event in turn:
            if isinstance(event, Said) and not as_json:
                print(event.text, end="", flush=True)
            elif isinstance(event, Calling) and receipt:
                print(f"→ {call_text(event.tool, event.arguments)}", file=sys.stderr)
            elif isinstance(event, Noted):
                print(f"heedful: {event.text}", file=sys.stderr)
    if as_json:
        print_json(_as_json(turn))
        return
    print()
    if receipt and turn.receipt is not None:
        print(turn.receipt.line(), *(run.line() for run in turn.runs[-1:]), sep="\n", file=sys.stderr)


def _as_json(turn: ToolTurn) -> dict[str, Any]:
    return {
        "text": turn.text,
        "finish_reason": turn.finish_reason,
        "receipt": turn.runs[-1].to_dict() if turn.runs else None,
        "tools": turn.receipt.to_dict() if turn.receipt is not None else None,
    }
