"""How models write tool calls, as data, and the check of tools as clients send them (OpenAI's chat API).

A model's format is read off its chat template. A template that knows no tools gets Hermes's: `with_tools` then tells
of the tools in the system message, and turns calls and results in the history into text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from heedful.errors import BadParameter


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls. Where several texts are known, the first is the one to write."""

    name: str
    opens: tuple[str, ...]
    """Texts before a call; () for bare JSON."""
    closes: tuple[str, ...]
    """Texts behind a call."""
    arguments_key: str = "arguments"
    padding: str = ""
    """Between a marker and the JSON."""
    in_list: bool = False
    """Calls are written as a JSON list."""
    bare: bool = False
    """A JSON object at the answer's beginning, or behind a call, is a call without any marker."""
    separators: str = ""
    """What may stand between two calls, besides white space."""
    name_end: str = ""
    """The name stands before the arguments, with this text between: name[ARGS]{…}."""
    is_native: bool = True
    """The template renders `tools`, tool_calls and tool messages itself."""
    tools_in_system: bool = False
    """The template reads the tools, as JSON text, from the system message's key `tools`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that may be control tokens; they must stay in the decoded text."""
        extra = (self.name_end, CALL_ID) if self.name_end else ()
        return (*self.opens, *self.closes, *extra)


CALL_ID = "[CALL_ID]"
HERMES = ToolFormat("hermes", ("<tool_call>",), ("</tool_call>",), padding="\n")
DEFAULT = replace(HERMES, is_native=False)
LLAMA = ToolFormat("llama", ("<|python_tag|>",), (), arguments_key="parameters", bare=True, separators=";")
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), (), in_list=True)
MISTRAL_ARGS = replace(MISTRAL, name="mistral_args", in_list=False, name_end="[ARGS]")
PHI = ToolFormat(
    "phi", ("<|tool_call|>",), ("<|/tool_call|>", "</|tool_call|>"), in_list=True, is_native=False, tools_in_system=True
)

_TOOLS_VARIABLE = re.compile(r"\btools\b")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EXAMPLE = 'A tool looks like {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}.'


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools may, must or must not be called."""

    mode: str
    """ "none", "auto" or "required"."""
    name: str | None = None
    """With "required": the one tool to call."""


def tool_format(template_source: str | None, control_texts: Collection[str]) -> ToolFormat:
    """The format of a model with this chat template and these control tokens; DEFAULT where none is recognised."""
    source = template_source or ""
    if "<|tool|>" in source and ("<|tool_call|>" in control_texts or "<|tool_call|>" in source):
        return PHI
    if not _TOOLS_VARIABLE.search(source) or "<function=" in source:
        return DEFAULT  # Qwen3-Coder's XML calls are not read here
    if "[TOOL_CALLS]" in source:
        return MISTRAL_ARGS if "[ARGS]" in source or "[ARGS]" in control_texts else MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ('"parameters"' in source and "ipython" in source):
        return LLAMA
    return DEFAULT


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """`tools` as a list of {"type": "function", "function": {...}}. Raises BadParameter for malformed ones."""
    if not isinstance(tools, list | tuple):
        raise BadParameter("tools", "must be a list", _EXAMPLE)
    checked = [_checked_tool(tool, f"tool {i}") for i, tool in enumerate(tools)]
    names: set[str] = set()
    for tool in checked:
        name = tool["function"]["name"]
        if name in names:
            raise BadParameter("tools", f"two tools are called {name!r}", "Give each tool a name of its own.")
        names.add(name)
    return checked


def _checked_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise BadParameter("tools", f'{where} must be a mapping whose type is "function"', _EXAMPLE)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadParameter("tools", f"{where} has no function", _EXAMPLE)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadParameter("tools", f"{where} needs a name of 1 to 64 letters, digits, _ and -", _EXAMPLE)
    for key, kind, kind_name in (("description", str, "a text"), ("strict", bool, "true or false")):
        if not isinstance(function.get(key), kind | None):
            raise BadParameter("tools", f"{key} of {name!r} must be {kind_name}", _EXAMPLE)
    if not isinstance(function.get("parameters"), Mapping | None):
        raise BadParameter("tools", f"parameters of {name!r} must be a JSON schema, an object", _EXAMPLE)
    _json_text(function, "tools", f"tool {name!r}")
    kept = {
        key: function[key] for key in ("name", "description", "parameters", "strict") if function.get(key) is not None
    }
    return {"type": "function", "function": kept}


def _json_text(value: Any, field: str, what: str) -> str:
    """`value` as JSON. Raises BadParameter for what JSON cannot carry, or carries too deep."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadParameter(field, f"{what} cannot be written as JSON: {error}") from error


def checked_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """`tool_choice` of a request; None is "auto" where there are tools. `tools` are checked. Raises BadParameter."""
    names = [tool["function"]["name"] for tool in tools]
    if choice is None:
        return ToolChoice("auto" if names else "none")
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        if choice == "required" and not names:
            raise BadParameter("tool_choice", "a call is required and there are no tools", "Send tools too.")
        return ToolChoice(choice if names else "none")
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise BadParameter(
            "tool_choice",
            "is none of the known values",
            'Use "none", "auto", "required" or {"type": "function", "function": {"name": ...}}.',
        )
    if name not in names:
        known = ", ".join(names) or "none"
        raise BadParameter("tool_choice", f"there is no tool {name!r:.80}", f"The tools are: {known}.")
    return ToolChoice("required", name)


def with_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    form: ToolFormat = DEFAULT,
) -> list[dict[str, Any]]:
    """`messages` as the format's template can render them; the given ones stay as they are.

    For a native format only the arguments of calls become objects, as templates expect; pass `tools` to the template.
    For others the tools are told in the system message, and calls and results become text. With `choice` "none" no
    tools are told.
    """
    if form.is_native:
        return [_with_objects(message) for message in messages]
    plain = _without_tool_roles(messages, form)
    if not tools or choice.mode == "none":
        return plain
    if form.tools_in_system:
        told = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return _with_system(plain, {"tools": told}, _PHI_ORDER.get(choice.mode, ""))
    return _with_system(plain, {}, _description(tools, choice))


def _with_system(messages: list[dict[str, Any]], keys: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """`messages` whose system message, the first, has more keys and more text."""
    has_one = bool(messages) and messages[0].get("role") in ("system", "developer")
    first = messages[0] if has_one else {"role": "system", "content": ""}
    content = "\n\n".join(part for part in (_text_of(first), text) if part)
    return [{**first, **keys, "content": content}, *messages[has_one:]]


def _description(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    order = "If no tool helps, answer without one."
    if choice.mode == "required":
        order = f"Call {choice.name} now." if choice.name else "Call one of them now."
    return (
        f"You can use these tools, each described by a JSON object:\n<tools>\n{listed}\n</tools>\n"
        "To call a tool, write its name and arguments as JSON, like this:\n"
        '<tool_call>\n{"name": "tool-name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        f"The result comes in <tool_response></tool_response>. {order}"
    )


_PHI_ORDER = {"required": "Call one of the tools now."}


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    functions = [_function(call) for call in calls]
    pairs = zip(calls, functions, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in pairs]}


def _function(call: Any) -> dict[str, Any]:
    """Name and arguments, an object, of a call in the history; {"text": …} where they are none. Raises BadParameter."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise BadParameter("messages", "a tool call has no function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a call that the model once broke must not end the conversation
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        arguments = {"text": arguments}
    return {"name": name, "arguments": dict(arguments)}


def _as_text(message: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    """A message without anything that only templates with tools know."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list | tuple) or not calls:
        return plain if "content" in plain else {**plain, "content": ""}
    texts = [_json_text(_function(call), "messages", "a tool call") for call in calls]
    start, end = form.opens[0] + form.padding, form.padding + form.closes[0]
    written = [f"{start}[{', '.join(texts)}]{end}"] if form.in_list else [f"{start}{text}{end}" for text in texts]
    return {**plain, "content": "\n".join(part for part in (_text_of(message), *written) if part)}


def _without_tool_roles(messages: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[dict[str, Any]]:
    """`messages` as text; results that follow one another share a message: many templates want roles to alternate."""
    plain: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        text, is_result = _as_text(message, form), message.get("role") == "tool"
        if is_result and was_result:
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text['content']}"}
        else:
            plain.append(text)
        was_result = is_result
    return plain


def _text_of(message: Mapping[str, Any]) -> str:
    """A message's content as one text."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
