"""From messages to the text that a model expects, through its chat template. Owns the check of messages and the split
of the result into control tokens, which only the template can write, and plain text.

Token ids are tokenizer.py's business, limits on the template those of template_process.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from heedful.errors import BadParameter, TemplateError
from heedful.text.provenance import ControlTexts, unmarked
from heedful.text.template_process import TemplateProcess

_MAX_DEPTH = 64
_CONTENT_LOOP = re.compile(r"\bfor\s+\w+\s+in\s+(?:\w+\.|\w+\[['\"])?content\b")


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered chat: the text of one control token, or plain text."""

    text: str
    control: bool


class ChatTemplate:
    """A model's template in Jinja's language, rendered as transformers does (apply_chat_template).

    `control_tokens`: the texts of the model's control tokens. `max_chars`: longest rendered chat. `cpu_seconds`:
    processor time for one rendering.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        control_tokens: Collection[str],
        max_chars: int = 4_000_000,
        cpu_seconds: float = 3.0,
    ) -> None:
        self.source = source
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._control = ControlTexts(control_tokens)
        self._process = TemplateProcess(
            source, control_texts=self._control.texts, max_chars=max_chars, cpu_seconds=cpu_seconds
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[Segment]:
        """The chat in pieces; their texts joined are what the template wrote.

        `messages`: mappings with `role` (str) and `content` (str, None, or a list of {"type": "text", "text": ...}),
        and whatever else the template reads. `tools`: JSON schemas. `variables`: further ones of the template, JSON
        types too. Raises BadParameter for malformed ones, TemplateError when the template refuses or fails.
        """
        given = {
            "messages": _checked_messages(messages, joins_parts=not self._takes_parts),
            "tools": None if tools is None else _plain_json(list(tools), "tools"),
            **{name: _plain_json(value, name) for name, value in variables.items()},
        }
        stand_ins = self._control.stand_ins(taken=self.source + json.dumps(given, ensure_ascii=False))
        if stand_ins is None:
            raise BadParameter("messages", "they use nearly all private-use characters of Unicode", "Shorten them.")
        marked = {name: self._control.marked(token, stand_ins) for name, token in self._special.items()}
        settings = {"documents": None, **marked, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._process.render({**settings, **given}, stand_ins)
        except TemplateError as error:
            raise TemplateError(unmarked(error.message, stand_ins), error.remedy) from error
        roles = {message["role"] for message in given["messages"]}
        return [Segment(piece, control) for piece, control in self._control.split(text, stand_ins, roles)]

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template goes through the parts of a content; others expect a string."""
        return _CONTENT_LOOP.search(self.source) is not None


def _checked_messages(messages: Sequence[Mapping[str, Any]], *, joins_parts: bool) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise BadParameter("messages", "must be a list with at least one message", _EXAMPLE)
    return [_checked_message(message, f"message {i}", joins_parts) for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str, joins_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadParameter("messages", f"{where} must be a mapping whose role is a string", _EXAMPLE)
    content = message.get("content")
    if "content" not in message and not message.get("tool_calls"):
        raise BadParameter("messages", f"{where} has neither content nor tool_calls", _EXAMPLE)
    plain: dict[str, Any] = _plain_json(dict(message), "messages", where)
    if isinstance(content, list):
        texts = [_part_text(part, where) for part in content]
        if joins_parts:
            plain["content"] = "".join(texts)
    elif not isinstance(content, str | None):
        raise BadParameter("messages", f"{where} has content that is neither text nor a list of parts", _EXAMPLE)
    return plain


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    raise BadParameter(
        "messages",
        f"{where} has a part that is not text ({kind!r:.40}); nothing else is read",
        'Parts look like {"type": "text", "text": "Hello"}.',
    )


def _plain_json(value: Any, field: str, where: str = "it", depth: int = 0) -> Any:
    """A copy of dicts, lists, strings and numbers, of bounded depth."""
    if depth > _MAX_DEPTH:
        raise BadParameter(field, f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain_json(item, field, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(item, field, where, depth + 1) for item in value]
    if value is None or isinstance(value, str | bool | float) or (isinstance(value, int) and abs(value) < 1 << 128):
        return value
    problem = f"{where} holds a {type(value).__name__} that JSON cannot carry"
    raise BadParameter(field, problem, "Use texts, numbers, lists and mappings.")


_EXAMPLE = 'A message looks like {"role": "user", "content": "Hello"}.'
