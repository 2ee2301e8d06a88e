"""Questions that servers put to the person: what forms mean, what is never shown, and calls in which a server of the
SDK asks, in both revisions, somebody who answers, somebody who takes long, and nobody."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import ElicitRequestFormParams, ElicitRequestURLParams

from heedful.errors import BadParameter, McpCallFailed
from heedful.mcp.client.connection import Connection
from heedful.mcp.client.elicit import OMIT, Answer, Ask, Form, Link, Question, read_question, secret_in
from heedful.mcp.client.manager import McpManager
from heedful.mcp.settings.config import McpConfig, config_from_json

Running = Callable[[Coroutine[Any, Any, Any]], Any]
SERVER = str(Path(__file__).parent / "servers" / "asking.py")
ERAS = ("2025-11-25", "2026-07-28")


def form_of(properties: Any, required: Any = (), message: str = "Please fill in", **more: Any) -> Form:
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    question = read_question("shop", ElicitRequestFormParams(message=message, requested_schema=schema))
    assert isinstance(question, Form)
    return question


TITLED = [{"const": "s", "title": "Small one"}, {"const": "l", "title": "Large one"}]


@pytest.mark.parametrize(
    ("schema", "typed", "value"),
    [
        ({"type": "string"}, " tea ", "tea"),
        ({"type": "string", "default": "tea"}, "", "tea"),
        ({"type": "string", "default": "tea"}, "-", OMIT),
        ({"type": "string"}, "", OMIT),
        ({"type": "string", "format": "email"}, "a@b.example", "a@b.example"),
        ({"type": "string", "format": "date"}, "2026-12-01", "2026-12-01"),
        ({"type": "string", "format": "date-time"}, "2026-12-01T10:00:00Z", "2026-12-01T10:00:00Z"),
        ({"type": "string", "format": "uri"}, "https://a.example", "https://a.example"),
        ({"type": "integer"}, "-3", -3),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "Yes", True),
        ({"type": "boolean", "default": True}, "n", False),
        ({"type": "string", "enum": ["s", "l"]}, "l", "l"),
        ({"type": "string", "enum": ["1", "0"]}, "1", "1"),  # a value goes before a number of a choice
        ({"type": "string", "oneOf": TITLED}, "large ONE", "l"),
        ({"type": "string", "oneOf": TITLED}, "2", "l"),
        ({"type": "string", "enum": ["a", "b"], "enumNames": ["First", "Second"]}, "second", "b"),
        ({"type": "array", "items": {"type": "string", "enum": ["a", "b", "c"]}}, "c, a ,c", ["c", "a"]),
        ({"type": "array", "items": {"anyOf": TITLED}, "default": ["s"]}, "", ["s"]),
        ({"type": "array", "items": {"anyOf": TITLED}}, "Small one, 2", ["s", "l"]),
    ],
)
def test_what_is_typed_means_a_value_that_the_schema_allows(schema: Any, typed: str, value: Any) -> None:
    (field,) = form_of({"field": schema}).fields
    found = field.read(typed)
    assert found is value if value is OMIT else (found == value and type(found) is type(value))
    if value is not OMIT:
        jsonschema.validate(found, schema)


@pytest.mark.parametrize(
    ("schema", "typed", "said"),
    [
        ({"type": "integer"}, "2.5", "a whole number"),
        ({"type": "number"}, "nan", "is a number"),
        ({"type": "number"}, "1e999", "is a number"),
        ({"type": "integer", "minimum": 1, "maximum": 5}, "6", "greater than the maximum of 5"),
        ({"type": "boolean"}, "perhaps", "is y or n"),
        ({"type": "string", "enum": ["s", "l"]}, "m", "none of the choices"),
        ({"type": "string", "enum": ["s", "l"]}, "3", "none of the choices"),
        ({"type": "string", "minLength": 3}, "ab", "too short"),
        ({"type": "string", "pattern": "^[a-z]+$"}, "A", "does not match"),
        ({"type": "string", "format": "email"}, "nobody", "is no email"),
        ({"type": "string", "format": "date"}, "yesterday", "is no date"),
        ({"type": "string", "format": "uri"}, "somewhere", "is no uri"),
        ({"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 1}, "a,b", "too long"),
        ({"type": "string"}, "", "is needed"),
        ({"type": "string", "enum": ["s", "l"]}, "-", "none of the choices"),
    ],
)
def test_what_the_schema_forbids_is_said(schema: Any, typed: str, said: str) -> None:
    (field,) = form_of({"field": schema}, ["field"]).fields
    with pytest.raises(BadParameter, match=said):
        field.read(typed)


@given(st.text(max_size=30))
def test_nothing_that_is_typed_passes_against_the_schema(typed: str) -> None:
    schemas = [
        {"type": "string", "maxLength": 5},
        {"type": "integer", "multipleOf": 3},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "boolean"},
        {"type": "string", "oneOf": TITLED},
        {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "minItems": 2},
    ]
    for field in form_of({str(number): schema for number, schema in enumerate(schemas)}, map(str, range(6))).fields:
        try:
            value = field.read(typed)
        except BadParameter:
            continue
        jsonschema.validate(value, schemas[int(field.name)])


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"apiKey": {"type": "string"}}, "wanted a secret (apiKey)"),
        ({"x": {"type": "string", "title": "Your password"}}, "wanted a secret (password)"),
        ({"x": {"type": "string", "description": "The GitHub token, please"}}, "wanted a secret (GitHub token)"),
        ({"token": {"type": "string"}}, "wanted a secret"),
        ({"x": {"type": "string", "format": "password"}}, "wants a secret"),
        ({"card_number": {"type": "string"}}, "wanted a secret"),
        ({"a": {"type": "object"}}, "cannot be shown: 'a'"),
        ({"a": {"type": "array", "items": {"type": "object"}}}, "cannot be shown"),
        ({"a": {"$ref": "file:///etc/passwd"}}, "cannot be shown"),
        ({"a": True}, "cannot be shown"),
        ({"a\x1b[2J": {"type": "string"}}, "cannot be shown"),
        ({"": {"type": "string"}}, "cannot be shown"),
        ({"a": {"type": "string", "minLength": "three"}}, "malformed schema"),
        ({"a": {"type": "string", "pattern": "("}}, "malformed schema"),
        ({"a": {"type": "integer", "default": "three"}}, "default that it forbids itself"),
        ({"a": {"type": "string", "enum": ["b"], "default": "c"}}, "default that it forbids itself"),
        ({str(number): {"type": "string"} for number in range(33)}, "over 32 fields"),
        ({"a": {"type": "string", "enum": [str(number) for number in range(201)]}}, "cannot be shown"),
        ({"a": {"type": "string", "enum": ["x"] * 10_000}}, "over 5,000 values"),
        ([], "no object with properties"),
    ],
)
def test_forms_that_are_malformed_or_want_secrets_are_not_shown(properties: Any, said: str) -> None:
    with pytest.raises(BadParameter) as caught:
        form_of(properties)
    assert said in caught.value.message
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize(
    "more", [{"required": ["nobody"]}, {"required": "a"}, {"type": "array"}, {"properties": None}, {"required": [[1]]}]
)
def test_forms_that_are_no_objects_are_not_shown(more: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, **more}
    with pytest.raises(BadParameter, match="its form"):
        read_question("shop", ElicitRequestFormParams(message="Please", requested_schema=schema))


@pytest.mark.parametrize("text", ["max_tokens", "keyboard", "Pin to the board?", "secretary", "author", "card colour"])
def test_words_that_only_look_like_secrets_are_none(text: str) -> None:
    assert secret_in(text) == ""


def test_what_a_server_says_comes_without_what_moves_a_cursor() -> None:
    form = form_of(
        {"a": {"type": "string", "title": "T\x1b]0;x\x07\u202eitle", "default": "d"}}, message="M\x1b[2J\r\n2"
    )
    assert form.message == "M\\x1b[2J\n2"
    assert "\x1b" not in form.fields[0].title + form.message
    assert "\u202e" not in form.fields[0].title


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://pay.example/x?a=1", "pay.example"),
        ("http://127.0.0.1:8000/", "127.0.0.1"),
        ("https://bank.example@evil.example/", "evil.example"),
        ("https://bänk.example/", "xn--bnk-qla.example"),
        ("file:///etc/passwd", None),
        ("javascript:alert(1)", None),
        ("https://", None),
        ("https://a.example/\x1b[2J", None),
        ("https://a.example/ b", None),
        ("https://[::1", None),
        ("https://a.example/" + "x" * 2000, None),
    ],
)
def test_pages_are_of_the_web_and_their_host_is_known(url: str, host: str | None) -> None:
    params = ElicitRequestURLParams(message="Pay", url=url, elicitation_id="1")
    if host is None:
        with pytest.raises(BadParameter, match="no address of the web"):
            read_question("shop", params)
    else:
        found = read_question("shop", params)
        assert isinstance(found, Link)
        assert (found.host, found.url) == (host, url)


# ---- In calls -----------------------------------------------------------------------------------------------------


def config(era: str, **ours: Any) -> McpConfig:
    args = [SERVER, *(["legacy"] if era == ERAS[0] else [])]
    return config_from_json({"mcpServers": {"shop": {"command": sys.executable, "args": args, "x-heedful": ours}}})


Called = Callable[[str], Coroutine[Any, Any, tuple[str, Any]]]


@asynccontextmanager
async def shop(era: str, ask: Ask | None, **ours: Any) -> AsyncIterator[tuple[McpManager, Called]]:
    """And what calls a tool and returns the answer that its question got."""

    async def called(tool: str) -> tuple[str, Any]:
        said = json.loads((await manager.call(f"shop__{tool}", {})).content[0].text)
        return said["action"], said["content"]

    async with McpManager(config(era, **ours), trust=True, ask=ask) as manager:
        yield manager, called
        assert manager.status()[0].protocol == era


@pytest.mark.parametrize("era", ERAS)
def test_a_call_is_answered_with_what_the_person_says_and_no_time_runs_meanwhile(era: str, running: Running) -> None:
    asked: list[Question] = []

    async def ask(question: Question) -> Answer:
        asked.append(question)
        if len(asked) > 3:
            await asyncio.sleep(1.2)
            return Answer("decline")
        if isinstance(question, Link):
            return Answer("accept")
        return Answer("accept", {"kind": "green", **question.defaults()} if question.fields else {})

    async def work() -> None:
        async with shop(era, ask, idle_timeout_s=0.8, timeout_s=1) as (manager, called):
            assert await called("order_tea") == ("accept", {"kind": "green", "size": "small"})
            assert await called("confirm_order") == ("accept", {})
            assert await called("pay_order") == ("accept", None)
            assert await called("order_tea") == ("decline", None), "later than both time-outs"
            assert manager.asked_s("shop") >= 1.2
            for tool, said in (("log_in", r"secret \(passWord\)"), ("nested", "cannot be shown: 'inner'")):
                with pytest.raises(McpCallFailed, match=said):
                    await called(tool)

    running(work())
    form, confirm, link, _ = asked  # and not those that were refused
    assert isinstance(form, Form)
    assert [(field.name, field.kind, field.is_required) for field in form.fields] == [
        ("kind", "text", True),
        ("size", "choice", False),
        ("count", "integer", False),
    ]
    assert isinstance(confirm, Form)
    assert isinstance(link, Link)
    assert (confirm.fields, link.host) == ((), "shop.example")


@pytest.mark.parametrize("era", ERAS)
def test_where_nobody_is_one_line_says_so(era: str, running: Running) -> None:
    async def work() -> None:
        async with shop(era, None) as (_, called):
            for tool in ("order_tea", "careful"):
                with pytest.raises(McpCallFailed, match="wants to ask you something, and nobody can be asked here"):
                    await called(tool)
            if era == ERAS[1]:
                with pytest.raises(McpCallFailed, match="asks for more again and again"):
                    await called("forever")

    running(work())


def test_a_call_that_is_given_up_takes_its_question_along(running: Running) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def forever(question: Question) -> Answer:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            gone.set()
        raise AssertionError

    async def work() -> None:
        for era in ERAS:
            begun.clear()
            gone.clear()
            connection = Connection(config(era).servers["shop"], ask=forever)
            call = asyncio.create_task(connection.call("order_tea", {}))
            await asyncio.wait_for(begun.wait(), 60)
            call.cancel()
            await asyncio.wait([call])
            await asyncio.wait_for(gone.wait(), 60)
            await connection.close()

    running(work())
