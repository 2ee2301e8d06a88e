"""Turns, tools and choices of Anthropic's Messages API as chat messages and what goes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from heedful.errors import BadParameter
from heedful.server.bodies import JSON
from heedful.text.tool_formats import ToolChoice, checked_choice, checked_tools

_READ = "Read are blocks of the types text, tool_use and tool_result."
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_UNREAD = frozenset({"thinking", "redacted_thinking"})
"""Of an assistant's turn by another model; no model here reads it back."""


def messages_of_turns(system: str | Sequence[JSON] | None, turns: Sequence[JSON]) -> list[JSON]:
    """Raises BadParameter for what nothing here can read."""
    if not turns:
        raise BadParameter("messages", "must have at least one message")
    messages = [{"role": "system", "content": _joined(system, "system", "it")}] if system else []
    names: dict[str, str] = {}
    for i, turn in enumerate(turns):
        messages += _messages_of(turn, names, f"message {i}")
    if messages[-1]["role"] == "assistant":
        raise BadParameter("messages", "the last one is the assistant's, and answers are not continued here")
    return messages


def _messages_of(turn: JSON, names: dict[str, str], where: str) -> list[JSON]:
    """`names`: of the tools called so far, by the calls' ids; grows."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadParameter("messages", f"{where} has the role {role!r:.80}", "Roles are user and assistant.")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [_checked_block(block, where) for block in _list(content, "messages", where)]
    if role == "assistant":
        return [_assistant_message(blocks, names, where)]
    return _user_messages(role, blocks, names, where)


def _assistant_message(blocks: Sequence[JSON], names: dict[str, str], where: str) -> JSON:
    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            call_id, name, given = _text(block, "id", where), _text(block, "name", where), block.get("input")
            if not isinstance(given, Mapping):
                raise BadParameter("messages", f"{where} has a tool_use whose input is no object", _READ)
            names[call_id] = name
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif block["type"] == "tool_result":
            raise BadParameter("messages", f"{where} is the assistant's and has a tool_result", _READ)
    text = "".join(_text(block, "text", where) for block in blocks if block["type"] == "text")
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _user_messages(role: str, blocks: Sequence[JSON], names: Mapping[str, str], where: str) -> list[JSON]:
    """Results of tools are messages of their own; texts that follow one another are one message."""
    messages: list[JSON] = []
    for block in blocks:
        if block["type"] == "tool_result":
            call_id = _text(block, "tool_use_id", where)
            told = "Error: " * (block.get("is_error") is True) + _joined(block.get("content"), "messages", where)
            name = {"name": names[call_id]} if call_id in names else {}
            messages.append({"role": "tool", "tool_call_id": call_id, "content": told, **name})
            continue
        if block["type"] != "text":
            raise BadParameter("messages", f"{where} is not the assistant's and has a {block['type']}", _READ)
        part = {"type": "text", "text": _text(block, "text", where)}
        if not messages or messages[-1]["role"] == "tool":
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append(part)
    return messages or [{"role": role, "content": ""}]


def _checked_block(block: Any, where: str) -> JSON:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind not in ("text", "tool_use", "tool_result", *_UNREAD):
        raise BadParameter("messages", f"{where} has a block of type {kind!r:.80}, which no model here reads", _READ)
    return dict(block)


def _joined(content: Any, field: str, where: str) -> str:
    """A text, or the texts of text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for block in _list(content, field, where):
        if not isinstance(block, Mapping) or block.get("type") != "text":
            raise BadParameter(field, f"{where} holds a block that is not text", _READ)
        texts.append(_text(block, "text", where, field))
    return "".join(texts)


def _list(content: Any, field: str, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise BadParameter(field, f"{where} has no content", _READ)
    return content


def _text(block: Mapping[str, Any], key: str, where: str, field: str = "messages") -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise BadParameter(field, f"{where} has a block that needs a text as {key}", _READ)
    return value


def tools_of(given: Sequence[JSON]) -> list[JSON]:
    """Tools with an input_schema, as the chat API has them. Raises BadParameter."""
    tools = []
    for i, tool in enumerate(given):
        if tool.get("type") not in (None, "custom"):
            kind = tool.get("type")
            raise BadParameter("tools", f"tool {i} is of type {kind!r:.80}", "This server runs no tools of its own.")
        function = {key: tool.get(key) for key in ("name", "description", "strict")}
        tools.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema")}})
    return checked_tools(tools)


def choice_of(given: JSON | None, tools: Sequence[JSON]) -> ToolChoice:
    """Raises BadParameter."""
    if given is None:
        return checked_choice(None, tools)
    kind = given.get("type")
    if kind == "tool":
        return checked_choice({"type": "function", "function": {"name": given.get("name")}}, tools)
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise BadParameter("tool_choice", f"is of type {kind!r:.80}", "Types are: auto, any, tool, none.")
    return checked_choice(_CHOICES[kind], tools)
