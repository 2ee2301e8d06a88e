"""The input of OpenAI's Decisions API as a state: text, or a list of what was said and called, in order.

One message of a user is its content alone, so that the usual case costs no names of roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import Any

from heedful.decide.question import Meaning
from heedful.server.bodies import JSON
from heedful.server.failures import HTTPFailure

_ROLES = frozenset({"user", "assistant", "system", "developer"})
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of calls, and the field that has what they were called with."""
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are texts, and where it stands."""


def state_of_input(given: str | ListLike[JSON]) -> Meaning:
    """Raises HTTPFailure for what no decider reads."""
    if isinstance(given, str):
        return given
    if not given:
        raise HTTPFailure(400, "must not be empty", field="input")
    items = [_item(item, f"input[{at}]") for at, item in enumerate(given)]
    content: Meaning = items[0].get("content", items)
    return content if len(items) == 1 and items[0].get("role") == "user" else items


def content_of(given: Any, where: str) -> Meaning:
    """A text, or parts; one part alone is what it holds. Raises HTTPFailure."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise HTTPFailure(400, "must be text, or a list of parts", field=where)
    parts = [_part(part, f"{where}[{at}]") for at, part in enumerate(given)]
    return parts[0] if len(parts) == 1 else parts


def _item(item: JSON, where: str) -> JSON:
    kind = item.get("type", "message")
    if kind == "message":
        if not isinstance(item.get("role"), str) or item["role"] not in _ROLES:
            raise HTTPFailure(400, f"must be one of {', '.join(sorted(_ROLES))}", field=f"{where}.role")
        return {"role": item["role"], "content": content_of(item.get("content"), f"{where}.content")}
    if isinstance(kind, str) and kind in _CALLS:
        return {"call": _text(item, "name", where), "with": _text(item, _CALLS[kind], where)}
    if isinstance(kind, str) and kind in _OUTPUTS:
        return {"output": content_of(item.get("output"), f"{where}.output")}
    known = ", ".join(("message", *_CALLS, *sorted(_OUTPUTS)))
    raise HTTPFailure(400, f"must be one of {known}", field=f"{where}.type")


def _part(part: Any, where: str) -> Meaning:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _TEXTS:
        return _text(part, _TEXTS[kind], where)
    if kind == "input_json":
        data = part.get("data")
        if isinstance(data, dict) or (isinstance(data, list) and all(isinstance(one, dict) for one in data)):
            return data
        raise HTTPFailure(400, "must be an object or an array of objects", field=f"{where}.data")
    if kind == "input_image":
        raise HTTPFailure(400, "is an image, which no decider here looks at", field=where)
    raise HTTPFailure(400, "must be a part of type input_text or input_json", field=where)


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise HTTPFailure(400, "must be text", field=f"{where}.{key}")
    return value
