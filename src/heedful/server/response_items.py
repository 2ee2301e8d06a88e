"""The items of OpenAI's Responses API: input items to chat messages, and an answer's blocks to output items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heedful.errors import BadParameter
from heedful.server.blocks import Block
from heedful.server.bodies import JSON
from heedful.text.tool_formats import ToolChoice, checked_choice, checked_tools

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def messages_of_input(given: str | Sequence[JSON]) -> list[JSON]:
    """Raises BadParameter for items that nothing here can read."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[JSON] = []
    for i, item in enumerate(given):
        _add(messages, item, f"item {i}")
    return messages


def _add(messages: list[JSON], item: JSON, where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        messages.append({"role": _role(item, where), "content": _content(item.get("content"), where)})
    elif kind == "function_call":
        _add_call(messages, item, where)
    elif kind == "function_call_output":
        call_id = _text(item, "call_id", where)
        content = _content(item.get("output"), where)
        name = _name_of_call(messages, call_id)
        messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": content, **({"name": name} if name else {})}
        )
    elif kind != "reasoning":  # no model here reads that back
        raise BadParameter("input", f"{where} is of type {kind!r:.80}, which no model here reads", _READ)


def _add_call(messages: list[JSON], item: JSON, where: str) -> None:
    """Calls belong to the assistant's message before them, of which they are a part."""
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), call]}
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _name_of_call(messages: Sequence[JSON], call_id: str) -> str | None:
    calls = [call for message in messages for call in message.get("tool_calls", []) if call["id"] == call_id]
    return calls[-1]["function"]["name"] if calls else None


def _role(item: JSON, where: str) -> str:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadParameter("input", f"{where} has the role {role!r:.80}", f"Roles are: {', '.join(_ROLES)}.")
    return _ROLES[role]


def _content(given: Any, where: str) -> str | list[JSON]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise BadParameter("input", f"{where} has no content", _READ)
    return [{"type": "text", "text": _part_text(part, where)} for part in given]


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise BadParameter("input", f"{where} has a part of type {kind!r:.80}, which no model here reads", _READ)
    return _text(part, "text", where)


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise BadParameter("input", f"{where} needs a text as {key}", _READ)
    return value


_READ = "Read are messages of text, function_call and function_call_output."


def tools_of(given: Sequence[JSON]) -> list[JSON]:
    """Function tools, their fields beside `type`, as the chat API has them. Raises BadParameter."""
    for i, tool in enumerate(given):
        if tool.get("type") != "function":
            kind = tool.get("type")
            raise BadParameter("tools", f"tool {i} is of type {kind!r:.80}", "This server knows function tools only.")
    return checked_tools([{"type": "function", "function": tool} for tool in given])


def choice_of(given: str | JSON | None, tools: Sequence[JSON]) -> ToolChoice:
    """Raises BadParameter."""
    if isinstance(given, Mapping) and given.get("type") == "function":
        given = {"type": "function", "function": {"name": given.get("name")}}
    return checked_choice(given, tools)


def flat_tools(tools: Sequence[JSON]) -> list[JSON]:
    """Checked tools as this API shows them."""
    defaults = {"description": None, "parameters": None, "strict": False}
    return [{"type": "function", **defaults, **tool["function"]} for tool in tools]


def flat_choice(choice: ToolChoice) -> str | JSON:
    return choice.mode if choice.name is None else {"type": "function", "name": choice.name}


def item_of(block: Block, status: str) -> JSON:
    """`status`: in_progress, completed or incomplete."""
    if block.name is None:
        content = [] if status == "in_progress" else [part_of(block.text)]
        return {"id": block.id, "type": "message", "status": status, "role": "assistant", "content": content}
    arguments = "" if status == "in_progress" else block.text
    return {
        "id": block.id,
        "type": "function_call",
        "status": status,
        "call_id": call_id(block),
        "name": block.name,
        "arguments": arguments,
    }


def part_of(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_id(block: Block) -> str:
    return "call_" + block.id.rpartition("_")[2]


def message_of_blocks(blocks: Sequence[Block]) -> list[JSON]:
    """The answer as the turn of a conversation that goes on; a call that was cut off is not part of it."""
    said = [item_of(block, "completed") for block in blocks if block.name is None or block.is_complete]
    text = "".join(part["text"] for item in said if item["type"] == "message" for part in item["content"])
    messages = [{"role": "assistant", "content": text}]
    for item in said:
        if item["type"] == "function_call":
            _add_call(messages, item, "the answer")
    return messages
