"""What goes between ingress and replica: a whole HTTP request one way, the head and the pieces of its answer back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from heedful.router.affinity import BLOCK_BYTES, BLOCK_TOKENS, Work, blocks_of
from heedful.router.replicas import OUTPUT_TOKENS

Headers = tuple[tuple[bytes, bytes], ...]

PROMPT_KEYS = ("model", "tools", "system", "instructions", "messages", "input", "state", "prompt")
"""What prompts are made of in the bodies of all APIs, in the order in which templates put it."""
_KEYS = (b"authorization", b"x-api-key")


@dataclass(frozen=True)
class Forwarded:
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    blocks: tuple[int, ...] = ()
    """Names of its prompt's beginnings, as the router's policy has them."""
    work: Work = Work(0)  # noqa: RUF009  # frozen
    unlike: frozenset[str] = frozenset()
    """Replicas that are not to get it, as long as there is another one."""


@dataclass(frozen=True)
class Head:
    status: int
    headers: Headers
    replica: str
    """Who answers."""


def forwarded(method: str, path: str, query: bytes, headers: Headers, body: bytes) -> Forwarded:
    """With what the router has to know of it; a body that is no JSON object has no prompt."""
    fields = _fields(body) if method == "POST" else {}
    prompt = b"".join(_pieces(fields.get(key)) for key in PROMPT_KEYS)
    key = next((value for name, value in headers if name.lower() in _KEYS), b"")
    tokens = -(-len(prompt) * BLOCK_TOKENS // BLOCK_BYTES)
    work = Work(tokens, _most_tokens(fields)) if prompt else Work(0)
    return Forwarded(method, path, query, headers, body, blocks_of(prompt, hashlib.sha256(key).digest()), work)


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _pieces(value: Any) -> bytes:
    """One after the other, so that a longer list only makes it longer."""
    if value is None:
        return b""
    parts: Iterable[Any] = value if isinstance(value, list) else [value]
    text = "".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)
    return text.encode("utf-8", "surrogatepass")


def _most_tokens(fields: Mapping[str, Any]) -> int:
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        most = fields.get(key)
        if isinstance(most, int) and 0 < most < 1 << 31:
            return most
    return OUTPUT_TOKENS
