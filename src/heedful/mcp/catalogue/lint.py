"""What in a tool's description is made to be read by the model and not by the person: hidden characters, orders to the
model, other tools' names in orders, paths of secrets. A finding is a hint and no proof; it keeps a tool from the model
until somebody has looked at it (`heedful mcp approve`).

Patterns after OWASP's MCP top ten and published poisoned descriptions (MCPTox, blender-mcp#214).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_TEXT_CHARS = 8192
"""Longer descriptions are cut before the model, and that is a finding."""
_EXCERPT_CHARS = 80

_HIDDEN = re.compile(
    "[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0e\ufeff\ufff9-\ufffb\U000e0000-\U000e01ef]"
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_COMMENT = re.compile(r"<!--.*?(?:-->|$)", re.DOTALL)

_TELL = "(tell|telling|mention|mentioning|inform|informing|reveal|revealing|show|showing|notify|notifying|alert)"
_SECRET = "(private|ssh|api)[ _-]keys?"
_GIVE = "(pass|send|include|put|provide|append)"
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile("|".join(patterns), re.IGNORECASE | re.DOTALL))
    for name, *patterns in (
        (
            "tells the model to forget its orders",
            r"\b(ignore|disregard|forget|override)\b.{0,30}\b(previous|prior|above|earlier|other|all|system)\b.{0,20}"
            r"\b(instructions?|prompts?|rules?|messages?)\b",
        ),
        (
            "tells the model to keep something from the user",
            rf"\b(do not|don'?t|never|without)\b.{{0,15}}\b{_TELL}\b.{{0,25}}\b(the )?(user|human|person|operator)s?\b",
            r"\b(silently|secretly|covertly)\b.{0,25}\b(read|send|remember|store|include|call|copy|upload|append|save)\b",
        ),
        (
            "pretends to be a part of the prompt",
            r"<\/?(important|system|instructions?|secret|assistant|im_start|im_end)\b[^>]*>",
            r"\[/?INST\]",
            r"<\|[a-z_]{2,20}\|>",
        ),
        (
            "names files or values that hold secrets",
            r"~?/?\.(ssh|aws|gnupg|kube|netrc|npmrc|docker)\b/?|\bid_(rsa|ed25519)\b|/etc/(passwd|shadow)|\bmcp\.json\b",
            rf"\b{_SECRET}\b.{{0,60}}\b({_GIVE}|content)\b",
            rf"\b{_GIVE}\b.{{0,60}}\b{_SECRET}\b",
        ),
        (
            "gives orders about every use of the assistant",
            r"\b(before|after|instead of)\b.{0,20}\b(using|calling|use of|any|every|all|each)\b.{0,20}"
            r"\b(other|another|any|every|all|each)?\s*tools?\b.{0,60}\b(must|always|call|use|read|send|first)\b",
        ),
    )
)


@dataclass(frozen=True)
class Finding:
    rule: str
    where: str
    """ "description", or the parameter whose description it is."""
    excerpt: str


def findings(
    description: str, schema: Mapping[str, Any] | None = None, orders: re.Pattern[str] | None = None
) -> tuple[Finding, ...]:
    """All that is suspicious in one tool's texts. `orders`: of `orders_about` other servers' tools."""
    found: list[Finding] = []
    for where, text in _texts(description, schema):
        found += _in_text(where, text, orders)
    return tuple(found)


def orders_about(names: Collection[str]) -> re.Pattern[str] | None:
    """Finds orders about tools of these names; None where no name is long enough to mean anything in a sentence."""
    meant = sorted(re.escape(name) for name in names if len(name) > 3)
    if not meant:
        return None
    order = r"\b(?:always|must|before|after|instead of|first)\b.{0,60}?\b"
    return re.compile(rf"{order}({'|'.join(meant)})\b", re.IGNORECASE | re.DOTALL)


def clean(text: str) -> str:
    """`text` as a model may read it: without hidden and control characters and HTML comments, and not endless."""
    text = _COMMENT.sub("", _HIDDEN.sub("", text))
    text = _CONTROL.sub(" ", text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return text[:MAX_TEXT_CHARS].strip()


def visible(text: str) -> str:
    """All of `text`, without hidden characters, and with control characters (tab and line end aside) as `\\x1b`."""
    text = _HIDDEN.sub("", text.replace("\r\n", "\n"))
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)


def cleaned_schema(schema: Any) -> Any:
    """A schema whose descriptions are clean."""
    if isinstance(schema, Mapping):
        return {
            key: clean(value) if key == "description" and isinstance(value, str) else cleaned_schema(value)
            for key, value in schema.items()
        }
    return [cleaned_schema(each) for each in schema] if isinstance(schema, list) else schema


def _in_text(where: str, whole: str, orders: re.Pattern[str] | None) -> Iterator[Finding]:
    text = whole[: 4 * MAX_TEXT_CHARS]
    for rule, pattern in (("hides characters", _HIDDEN), ("has control characters", _CONTROL)):
        if found := pattern.search(text.replace("\r\n", "\n")):
            yield Finding(
                rule, where, f"U+{ord(found.group()):04X} after {text[max(0, found.start() - 30) : found.start()]!r}"
            )
    if found := _COMMENT.search(text):
        yield Finding("has an HTML comment, which no page would show", where, _excerpt(found))
    for rule, pattern in _RULES:
        if found := pattern.search(text):
            yield Finding(rule, where, _excerpt(found))
    if orders is not None and (found := orders.search(text)):
        yield Finding(f"gives orders about {found.group(1)}, a tool of another server", where, _excerpt(found))
    if len(whole) > MAX_TEXT_CHARS:
        yield Finding(f"is longer than {MAX_TEXT_CHARS:,} characters", where, f"{len(whole):,} characters")


def _texts(description: str, schema: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if description:
        yield where or "description", description
    if isinstance(schema, Mapping):
        for name, each in schema.items():
            if name == "description" and isinstance(each, str):
                yield where or "description", each
            elif isinstance(each, str) and name in ("title", "default", "$comment"):
                yield f"{where}.{name}".lstrip("."), each
            else:
                inner = where if name in ("properties", "items") else f"{where}.{name}".lstrip(".")
                yield from _texts("", each, inner)
    elif isinstance(schema, list):
        for each in schema:
            yield from [(where, each)] if isinstance(each, str) else _texts("", each, where)


def _excerpt(found: re.Match[str]) -> str:
    return clean(" ".join(found.group().split()))[:_EXCERPT_CHARS]
