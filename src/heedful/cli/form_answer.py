"""A server's question on the terminal: who asks, what, field by field, and once more before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from heedful.errors import BadParameter
from heedful.mcp.calls.results import as_data
from heedful.mcp.client.elicit import OMIT, Answer, Field, Form, Link, Question

MOST_TRIES = 5
"""For one field, before the question is declined."""
_SHOWN_CHOICES = 12
DECLINED = Answer("decline")


def answer_of(question: Question, read: Callable[[str], str], show: Callable[[str], None]) -> Answer:
    """`read`: one typed line after a prompt; KeyboardInterrupt, for Ctrl-C, declines, and so does an empty line where
    something is needed. `show`: whole lines."""
    show(f"MCP server {question.server!r} asks:")
    for line in question.message.splitlines():
        show(f"  | {line}")  # so that no line of theirs looks like one of ours
    try:
        return _linked(question, read, show) if isinstance(question, Link) else _filled(question, read, show)
    except KeyboardInterrupt:
        show("\ndeclined")
        return DECLINED


def _linked(link: Link, read: Callable[[str], str], show: Callable[[str], None]) -> Answer:
    show(f"  It wants you to open this page, of {link.host}; heedful does not open it:\n  {link.url}")
    return Answer("accept") if _is_yes(read(f"Have you, and may {link.server!r} go on? [y/N] ")) else DECLINED


def _filled(form: Form, read: Callable[[str], str], show: Callable[[str], None]) -> Answer:
    if not form.fields:
        return Answer("accept", {}) if _is_yes(read("Yes or no? [y/N] ")) else DECLINED
    content: dict[str, Any] = {}
    for field in form.fields:
        value = _typed(field, read, show)
        if value is None:
            show("declined")
            return DECLINED
        if value is not OMIT:
            content[field.name] = value
    show(f"  {json.dumps(content, ensure_ascii=False)}")
    return Answer("accept", content) if _is_yes(read(f"Send this to {form.server!r}? [y/N] ")) else DECLINED


def _typed(field: Field, read: Callable[[str], str], show: Callable[[str], None]) -> Any:
    """OMIT for an optional field that was left out; None where a needed one is left empty, or never right."""
    if field.description:
        show(f"  {field.description}")
    for _ in range(MOST_TRIES):
        line = read(f"  {prompt_of(field)}: ")
        if not line.strip() and field.is_required and field.default is OMIT:
            return None
        try:
            return field.read(line)
        except BadParameter as error:
            show(f"  {as_data(error.message)}")
    return None


def prompt_of(field: Field) -> str:
    """As in: size (small | large) [small]"""
    parts = [field.title if field.title == field.name else f"{field.title} ({field.name})"]
    if field.choices:
        shown = [each.title for each in field.choices[:_SHOWN_CHOICES]]
        more = len(field.choices) - len(shown)
        several = ", several with commas" if field.kind == "choices" else ""
        parts.append(f"({' | '.join([*shown, *([f'… {more} more'] if more else [])])}{several})")
    if field.kind == "boolean":
        parts.append("(y | n)")
    if field.default is not OMIT:
        parts.append(f"[{_shown(field.default)}]")
    elif not field.is_required:
        parts.append("(may be left empty)")
    return as_data(" ".join(parts))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "y" if value else "n"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_yes(line: str) -> bool:
    return line.strip().lower() in ("y", "yes")
