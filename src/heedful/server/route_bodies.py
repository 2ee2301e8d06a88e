"""What the other APIs ask, as the chat completion that a routed request is."""

from __future__ import annotations

from typing import Any

from heedful.router.policy import AUTO
from heedful.server.asks import Chat
from heedful.server.bodies import JSON
from heedful.server.fields import SamplingFields, plain_json

_OF_ONE_ANSWER = frozenset({"n", "stream_options"})
"""Left out: Responses and Messages have one answer, and its usage always."""


def chat_body(fields: SamplingFields, chat: Chat, **named: Any) -> JSON:
    """`named`: what the API has under names of its own, in the chat's; None: it has not."""
    shared = {name: plain_json(getattr(fields, name)) for name in SamplingFields.__struct_fields__}
    if isinstance(form := named.get("response_format"), dict):
        named["response_format"] = _form(form)
    body = {**_given(shared), **_given(named), "model": AUTO, "messages": chat.messages}
    if chat.tools:
        choice = chat.choice
        function = {"type": "function", "function": {"name": choice.name}}
        tools = [{**tool, "function": _given(tool["function"])} for tool in chat.tools]
        body |= {"tools": tools, "tool_choice": choice.mode if choice.name is None else function}
    return {name: value for name, value in body.items() if name not in _OF_ONE_ANSWER}


def _form(form: JSON) -> JSON:
    """Responses and Messages have the schema beside its type; the chat, under its name."""
    if form.get("type") != "json_schema" or "json_schema" in form:
        return form
    inner = {"name": "answer", **{name: value for name, value in form.items() if name != "type"}}
    return {"type": "json_schema", "json_schema": inner}


def _given(values: JSON) -> JSON:
    return {
        name: _given(value) if isinstance(value, dict) and name == "heedful" else value
        for name, value in values.items()
        if value is not None
    }
