"""Questions that a server puts to the person in the middle of a call (elicitation): what is asked, read from the
protocol's record, and what may be answered. How it is shown and typed is the command line's business.

A server's words are data. What it may ask for is little: a flat form of texts, numbers, yes or no and choices, or that
the person opens a page. A form that cannot be shown, or that wants a secret, is refused and not shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from heedful.errors import BadParameter
from heedful.mcp.catalogue.lint import visible
from heedful.mcp.schemas.validate import has_more_values, schema_fault

if TYPE_CHECKING:
    from mcp_types import ElicitRequestParams, ElicitResult, ErrorData

MAX_FIELDS = 32
MAX_CHOICES = 200
MAX_VALUES = 5000
MAX_MESSAGE_CHARS = 4000
MAX_NAME_CHARS = 200
MAX_URL_CHARS = 2000
OMIT = object()
"""What stands for a field that is left out."""

FieldKind = Literal["text", "number", "integer", "boolean", "choice", "choices"]


@dataclass(frozen=True)
class Choice:
    value: str
    title: str


@dataclass(frozen=True)
class Field:
    name: str
    kind: FieldKind
    schema: Mapping[str, Any]
    title: str
    """For the person; the name where there is none."""
    description: str
    choices: tuple[Choice, ...]
    default: Any
    """OMIT where there is none."""
    is_required: bool

    def read(self, text: str) -> Any:
        """What a typed line means; empty is the default, - leaves it out. Raises BadParameter."""
        text = text.strip()
        if not text and self.default is not OMIT:
            return self.default
        if not text or (text == "-" and not self.is_required):
            if self.is_required:
                raise BadParameter(self.name, "is needed")
            return OMIT
        value = self._value(text)
        fault = schema_fault(value, self.schema) or _format_fault(text, self.schema.get("format"))
        if fault:
            raise BadParameter(self.name, fault)
        return value

    def _value(self, text: str) -> Any:
        if self.kind == "choice":
            return self._chosen(text)
        if self.kind == "choices":
            return list(dict.fromkeys(self._chosen(each.strip()) for each in text.split(",") if each.strip()))
        if self.kind == "boolean":
            if text.lower() not in _BOOLEANS:
                raise BadParameter(self.name, "is y or n")
            return _BOOLEANS[text.lower()]
        if self.kind in ("integer", "number"):
            return self._number(text)
        return text

    def _number(self, text: str) -> float:
        try:
            value = int(text) if self.kind == "integer" else float(text)
        except ValueError:
            raise BadParameter(self.name, f"is a{' whole' if self.kind == 'integer' else ''} number") from None
        if not math.isfinite(value):
            raise BadParameter(self.name, "is a number")
        return value

    def _chosen(self, text: str) -> str:
        """By its value, its title, or its number from 1."""
        for choice in self.choices:
            if text == choice.value:
                return choice.value
        for choice in self.choices:
            if text.lower() in (choice.value.lower(), choice.title.lower()):
                return choice.value
        if text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= len(self.choices):
            return self.choices[int(text[:6]) - 1].value
        raise BadParameter(self.name, f"{text[:60]!r} is none of the choices")


@dataclass(frozen=True)
class Form:
    server: str
    message: str
    """Of the server, without hidden and control characters."""
    fields: tuple[Field, ...]
    """None: it is a yes or no."""
    schema: Mapping[str, Any]

    def defaults(self) -> dict[str, Any]:
        return {field.name: field.default for field in self.fields if field.default is not OMIT}


@dataclass(frozen=True)
class Link:
    """A page that the person is to open, and nobody else does."""

    server: str
    message: str
    url: str
    host: str


Question = Form | Link


@dataclass(frozen=True)
class Answer:
    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, Any] | None = None
    """Of an accepted form."""


Ask = Callable[[Question], Awaitable[Answer]]


async def answered(server: str, params: ElicitRequestParams, ask: Ask) -> ElicitResult | ErrorData:
    """As the SDK wants it. What is refused is an error to the server, which says why."""
    from mcp_types import INVALID_PARAMS, ElicitResult, ErrorData

    try:
        question = read_question(server, params)
    except BadParameter as error:
        return ErrorData(code=INVALID_PARAMS, message=error.message)
    answer = await ask(question)
    if answer.action != "accept" or isinstance(question, Link):
        return ElicitResult(action=answer.action)
    content = dict(answer.content or {})
    fault = schema_fault(content, question.schema)
    assert not fault, (fault, content)
    return ElicitResult(action="accept", content=content)


def read_question(server: str, params: ElicitRequestParams) -> Question:
    """Raises BadParameter for what is not put to anybody."""
    message = visible(params.message[:MAX_MESSAGE_CHARS]).strip()
    if params.mode == "url":
        return _link(server, message, params.url)
    return _form(server, message, params.requested_schema)


def _link(server: str, message: str, url: str) -> Link:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode("ascii")
    except (ValueError, UnicodeError):
        host = ""
    if (
        len(url) > MAX_URL_CHARS
        or not host
        or parts.scheme not in ("http", "https")
        or visible(url) != url
        or " " in url
    ):
        raise _refused("the page that it wants opened has no address of the web")
    return Link(server, message, url, host)


def _form(server: str, message: str, schema: Any) -> Form:
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
    required = schema.get("required", []) if isinstance(schema, Mapping) else None
    if has_more_values(schema, MAX_VALUES):
        raise _refused(f"its form has over {MAX_VALUES:,} values")
    if (
        not isinstance(properties, Mapping)
        or not isinstance(required, list)
        or schema.get("type", "object") != "object"
    ):
        raise _refused("its form is no object with properties")
    if len(properties) > MAX_FIELDS or not set(map(str, required)) <= set(properties):
        raise _refused(f"its form has over {MAX_FIELDS} fields, or requires one that it does not have")
    fields = tuple(_field(str(name), each, name in required) for name, each in properties.items())
    texts = [text for field in fields for text in (field.name, field.title, field.description)]
    texts += [message] if any(field.kind == "text" for field in fields) else []
    for text in texts:
        if found := secret_in(text):
            raise _refused(f"its form looks as if it wanted a secret ({found}), which a form must not")
    if any(field.schema.get("format") == "password" or field.schema.get("writeOnly") for field in fields):
        raise _refused("its form wants a secret, which a form must not")
    flat = {"type": "object", "properties": {field.name: field.schema for field in fields}, "required": required}
    return Form(server, message, fields, flat)


def _field(name: str, schema: Any, is_required: bool) -> Field:
    if not isinstance(schema, Mapping) or not name or len(name) > MAX_NAME_CHARS or visible(name) != name:
        raise _refused(f"its form has a field that cannot be shown: {name[:40]!r}")
    known = {key: schema[key] for key in _KEYWORDS if key in schema}
    choices, kind = _choices(schema), _KINDS.get(str(schema.get("type")))
    if kind == "text" and choices:
        kind = "choice"
    if kind is None or (kind == "choices" and not choices) or len(choices) > MAX_CHOICES:
        raise _refused(f"its form has a field that cannot be shown: {name[:40]!r}")
    if _is_malformed(known):
        raise _refused(f"field {name[:40]!r} of its form has a malformed schema")
    if "default" in schema and schema_fault(schema["default"], known):
        raise _refused(f"field {name[:40]!r} of its form has a default that it forbids itself")
    title, description = (_line(schema.get(key), name if key == "title" else "") for key in ("title", "description"))
    return Field(name, kind, known, title, description, choices, schema.get("default", OMIT), is_required)


def _is_malformed(schema: Mapping[str, Any]) -> bool:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
        re.compile(schema.get("pattern", ""))
    except (SchemaError, re.error, RecursionError):
        return True
    return False


_KINDS: Mapping[str, FieldKind] = {
    "string": "text",
    "number": "number",
    "integer": "integer",
    "boolean": "boolean",
    "array": "choices",
}
_KEYWORDS = (
    *("type", "enum", "oneOf", "items", "minLength", "maxLength", "pattern", "format", "minimum", "maximum"),
    *(
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minItems",
        "maxItems",
        "uniqueItems",
        "const",
        "writeOnly",
    ),
)
_BOOLEANS = {"y": True, "yes": True, "true": True, "1": True, "n": False, "no": False, "false": False, "0": False}


def _choices(schema: Mapping[str, Any]) -> tuple[Choice, ...]:
    """All five ways that the protocol has; nothing for what is no list of texts."""
    items = schema.get("items")
    if schema.get("type") == "array" and isinstance(items, Mapping):
        schema = items
    titled = schema.get("oneOf", schema.get("anyOf"))
    if isinstance(titled, list) and titled and all(isinstance(each, Mapping) for each in titled):
        values = [each.get("const") for each in titled]
        titles = [each.get("title") for each in titled]
    else:
        values, titles = schema.get("enum", []), schema.get("enumNames", [])
    if (
        not isinstance(values, list)
        or not isinstance(titles, list)
        or not all(isinstance(each, str) for each in values)
    ):
        return ()
    titles = [*titles, *[None] * len(values)]
    return tuple(Choice(value, _line(title, value)) for value, title in zip(values, titles, strict=False))


def _line(text: Any, otherwise: str) -> str:
    return (
        visible(" ".join(text.split()))[:MAX_NAME_CHARS]
        if isinstance(text, str) and text.strip()
        else visible(otherwise)
    )


_SECRET = re.compile(
    r"\b(pass ?(word|phrase|code|wd)|secret|api ?key|private ?key|credential|recovery ?(phrase|code)|seed ?phrase"
    r"|(access|auth|authentication|bearer|refresh|session|security|github|personal|api) ?token|one time (code|password)"
    r"|cv[vc]|otp|2fa|pin ?(code|number)|(credit|debit|bank|card) ?(card|number|account)|social security|ssn)s?\b",
    re.IGNORECASE,
)
_SECRET_ALONE = re.compile(r"(your )?(token|pin)s?", re.IGNORECASE)


def secret_in(text: str) -> str:
    """The words by which it asks for a secret; "" for none."""
    plain = " ".join(re.sub(r"[_\-\s]+", " ", text).split())
    for words in (plain, re.sub(r"([a-z])([A-Z])", r"\1 \2", plain)):  # api_key, apiKey
        if found := _SECRET.search(words) or _SECRET_ALONE.fullmatch(words):
            return found.group()
    return ""


def _is_web_address(text: str) -> bool:
    return bool(urlsplit(text).scheme)


_FORMATS: Mapping[str, Callable[[str], Any]] = {
    "email": re.compile(r"[^@\s]+@[^@\s]+").fullmatch,
    "uri": _is_web_address,
    "date": date.fromisoformat,
    "date-time": datetime.fromisoformat,
}


def _format_fault(text: str, wanted: Any) -> str:
    if not isinstance(wanted, str) or wanted not in _FORMATS:
        return ""
    try:
        return "" if _FORMATS[wanted](text) else f"is no {wanted}"
    except ValueError:
        return f"is no {wanted}"


def _refused(why: str) -> BadParameter:
    return BadParameter("question", f"it was not put to the user: {why}")
