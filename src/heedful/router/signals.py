"""What is known of a request without asking anybody: numbers and truths that a policy's conditions are about."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heedful.router.expression import Value
from heedful.router.patterns import found_in, has_code, has_pii

JSON = dict[str, Any]
MOST_STATE_CHARS = 4_000
BYTES_PER_TOKEN = 4
"""Of an estimate: before a target is chosen there is no tokenizer. English text has 4 to 5, digits and code 2 to 4."""

SIGNALS: Mapping[str, str] = {
    "tokens": "number",
    "chars": "number",
    "turns": "number",
    "tools": "number",
    "max_tokens": "number",
    "has_pii": "bool",
    "has_code": "bool",
    "has_digits": "bool",
    "wants_json": "bool",
    "tool_loop": "bool",
    "stream": "bool",
}
"""Name → type. docs/routing.md says what each is."""


@dataclass(frozen=True)
class Asked:
    """A chat request as a policy sees it."""

    messages: Sequence[JSON]
    tools: Sequence[JSON] = ()
    max_tokens: int | None = None
    wants_json: bool = False
    stream: bool = False
    salt: str = ""
    """Of the caller: conversations are told apart by it."""
    body: JSON = field(default_factory=dict)
    """All of it, as targets get it."""
    given: Mapping[str, str] = field(default_factory=dict)
    """What the rule that chose found in the message, by the names of its groups, and what the decider answered."""

    @staticmethod
    def of_body(body: JSON, salt: str = "") -> Asked:
        """`body`: of a chat completion, its types already checked."""
        form = body.get("response_format") or {}
        return Asked(
            messages=body["messages"],
            tools=body.get("tools") or (),
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            wants_json=isinstance(form, Mapping) and str(form.get("type", "")).startswith("json"),
            stream=bool(body.get("stream")),
            salt=salt,
            body=body,
        )

    @staticmethod
    def of_text(text: str) -> Asked:
        """A conversation with this one message."""
        return Asked.of_body({"messages": [{"role": "user", "content": text}]})

    @property
    def last_user(self) -> int:
        """Where the last message of the user stands; -1: nowhere."""
        return max((i for i, m in enumerate(self.messages) if m.get("role") == "user"), default=-1)

    @property
    def text(self) -> str:
        """What the user said last."""
        return "" if self.last_user < 0 else text_of(self.messages[self.last_user])

    @property
    def decided_text(self) -> str:
        """What a decider is shown: the end of what the user said last. It is asked within a deadline."""
        return self.text[-MOST_STATE_CHARS:]

    @property
    def is_tool_loop(self) -> bool:
        """Whether tools have answered since the user spoke."""
        return any(m.get("role") == "tool" for m in self.messages[self.last_user + 1 :])


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content, whether it comes in parts or not."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def estimated_tokens(asked: Asked) -> int:
    """Of messages, calls and tool schemas together: their UTF-8 bytes over 4."""
    size = sum(len(text_of(message).encode("utf-8", "surrogatepass")) for message in asked.messages)
    size += sum(len(json.dumps(m["tool_calls"])) for m in asked.messages if m.get("tool_calls"))
    size += len(json.dumps(list(asked.tools), ensure_ascii=False)) if asked.tools else 0
    return -(-size // BYTES_PER_TOKEN)


def signals_of(asked: Asked, patterns: Mapping[str, re.Pattern[str]] = {}) -> dict[str, Value]:
    """Signal → value, and has_NAME of every pattern. has_… look at all that was said: what is forbidden to leave must
    not leave in an earlier message either."""
    said = [text_of(message) for message in asked.messages]
    last = asked.text
    return {
        "tokens": float(estimated_tokens(asked)),
        "chars": float(len(asked.text)),
        "turns": float(sum(m.get("role") == "user" for m in asked.messages)),
        "tools": float(len(asked.tools)),
        "max_tokens": float(asked.max_tokens or 0),
        "has_pii": any(map(has_pii, said)),
        "has_code": has_code(last),
        "has_digits": any(c.isdigit() for c in last),
        "wants_json": asked.wants_json,
        "tool_loop": asked.is_tool_loop,
        "stream": asked.stream,
        **{f"has_{name}": any(found_in(pattern, text) for text in said) for name, pattern in patterns.items()},
    }
