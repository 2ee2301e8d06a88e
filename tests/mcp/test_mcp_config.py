"""The servers' file: what users have is read, mistakes are named with file, server and field, secrets stay unsaid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import McpConfigError
from heedful.mcp.settings.config import HttpLaunch, StdioLaunch, config_from_json, read_config
from heedful.mcp.settings.variables import ReadyHttp, ReadyStdio, Secrets, ready_launch


def one(entry: Any, **more: Any) -> Any:
    return config_from_json({"mcpServers": {"x": entry}, **more}).servers["x"]


def test_what_other_programs_write(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    servers = {
        "Home Assistant": {
            "command": "npx",
            "args": ["-y", "server"],
            "env": {"TOKEN": "${HA_TOKEN}"},
            "autoApprove": [],
        },
        "far": {
            "type": "streamable-http",
            "url": "https://example.com/mcp",
            "headers": {"Authorization": "Bearer ${T}"},
        },
        "cursor": {"url": "http://localhost:1/mcp"},
        "off": {"command": "x", "disabled": True},
    }
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"mcpServers": servers, "inputs": []}).encode())
    config = read_config(path)
    assert list(config.servers) == ["Home Assistant", "far", "cursor"]
    assert config.servers["Home Assistant"].launch == StdioLaunch("npx", ("-y", "server"), {"TOKEN": "${HA_TOKEN}"})
    assert config.servers["far"].launch == HttpLaunch("https://example.com/mcp", {"Authorization": "Bearer ${T}"})
    assert config.servers["cursor"].launch == HttpLaunch("http://localhost:1/mcp")
    vs_code = config_from_json({"servers": {"a": {"type": "stdio", "command": "a"}}})
    assert vs_code.servers["a"].launch == StdioLaunch("a")


def test_our_fields() -> None:
    ours = {
        "trusted": True,
        "allow": ["get_*"],
        "ask": ["*"],
        "deny": ["rm"],
        "timeout_s": 5,
        "idle_timeout_s": 1.5,
        "max_concurrency": 2,
        "cache": {"get_*": 60},
        "always": ["now"],
        "prefix": "",
    }
    server = one({"command": "a", "x-heedful": ours})
    assert (server.trusted, server.allow, server.ask, server.deny) == (True, ("get_*",), ("*",), ("rm",))
    assert (server.timeout_s, server.idle_timeout_s, server.max_concurrency) == (5.0, 1.5, 2)
    assert (server.cache_s, server.always, server.prefix) == ({"get_*": 60.0}, ("now",), "")
    assert one({"command": "a"}).prefix is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "server 'x' must be an object"),
        ({}, "'x': command is missing"),
        ({"type": "http"}, "'x': url is missing"),
        ({"type": "sse", "url": "http://a"}, "'x': type sse, the first|'x': type sse"),
        ({"type": "carrier pigeon", "command": "a"}, "'x': type 'carrier pigeon' is not known"),
        ({"command": "a", "url": "http://a"}, "'x': url stands beside command"),
        ({"url": "ftp://a"}, "'x': url must begin with http"),
        ({"command": 5}, "'x': command must be a text"),
        ({"command": "a\0b"}, "'x': command has a NUL"),
        ({"command": "a", "args": "b c"}, "'x': args must be a list of texts"),
        ({"command": "a", "env": {"A": 5}}, r"'x': env\.A must be a text"),
        ({"command": "a", "env": {"A=B": "c"}}, r"'x': env\.A=B must be"),
        ({"command": "a", "disabled": "yes"}, "'x': disabled must be true or false"),
        (
            {"command": "a", "x-heedful": {"timeot_s": 5}},
            "'x': x-heedful has no field 'timeot_s'\nDid you mean timeout_s",
        ),
        ({"command": "a", "x-heedful": {"timeout_s": 0}}, "x-heedful: timeout_s must be a number of seconds above 0"),
        ({"command": "a", "x-heedful": {"timeout_s": True}}, "timeout_s must be"),
        ({"command": "a", "x-heedful": {"max_concurrency": 1.5}}, "max_concurrency must be a whole number"),
        ({"command": "a", "x-heedful": {"cache": {"t": "long"}}}, r"cache\.t must be a number"),
        ({"command": "a", "x-heedful": {"cache": 60}}, "cache must be an object"),
        ({"command": "a", "x-heedful": []}, "x-heedful must be an object"),
        ({"command": "a", "x-heedful": {"allow": [1]}}, "allow must be a list"),
    ],
)
def test_mistakes_are_named(entry: Any, message: str) -> None:
    with pytest.raises(McpConfigError, match=message):
        one(entry)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"mcpServers": {\n  "a": }}', ":2:8 is not JSON"),
        (b"\xff", "is not UTF-8 text"),
        (b"[]", "names no servers"),
        (b'{"mcpServers": []}', "names no servers"),
        (b'{"mcpServers": {"": {}}}', "'' is no name"),
        (b'{"mcpServers": {"a\\u0000": {}}}', "is no name"),
        (b"[" * 100_000, "is not JSON that can be read"),
        (b" " * 2_000_000, "more than 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_none(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(data)
    with pytest.raises(McpConfigError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(McpConfigError, match="No such file"):
        read_config(tmp_path / "nothing.json")


def test_variables_are_put_in_at_the_start_only(tmp_path: Path) -> None:
    entry = {
        "command": "${BIN:-server}",
        "args": ["--key", "${KEY}", "${env:KEY}", "${EMPTY:-x}", "$KEY ${1} ${}"],
        "env": {"K": "pre-${KEY}"},
        "cwd": "${WHERE}",
    }
    server = config_from_json({"mcpServers": {"x": entry}}, tmp_path / "s.json").servers["x"]
    assert "${KEY}" in repr(server)
    ready = ready_launch(server, {"KEY": "hush-hush-1", "EMPTY": "", "WHERE": "work"})
    assert isinstance(ready, ReadyStdio)
    assert ready.argv == ("server", "--key", "hush-hush-1", "hush-hush-1", "x", "$KEY ${1} ${}")
    assert ready.env == {"K": "pre-hush-hush-1"}
    assert ready.cwd == tmp_path / "work"
    assert ready.secrets.hidden("a pre-hush-hush-1 b hush-hush-1") == "a [hidden] b [hidden]"
    assert "hush" not in repr(ready)


def test_a_value_is_not_put_in_twice() -> None:
    server = one({"command": "a", "args": ["${A}"]})
    ready = ready_launch(server, {"A": "${B}", "B": "never"})
    assert isinstance(ready, ReadyStdio)
    assert ready.argv == ("a", "${B}")


def test_headers_are_secrets_with_and_without_their_scheme() -> None:
    ready = ready_launch(one({"url": "http://h/mcp", "headers": {"Authorization": "Bearer t0ken-1234"}}), {})
    assert isinstance(ready, ReadyHttp)
    assert ready.secrets.hidden("401 for t0ken-1234 (Bearer t0ken-1234)") == "401 for [hidden] ([hidden])"
    assert "t0ken" not in repr(ready)
    shown = one({"url": "https://me:pw@host/mcp?key=1"}).launch.shown
    assert shown == "https://…@host/mcp"


def test_short_and_everyday_values_hide_nothing() -> None:
    assert (
        Secrets.of(["1", "true", "utf-8", "INFO", "8080"]).hidden("INFO: port 8080 true 1") == "INFO: port 8080 true 1"
    )


def test_literal_values_are_in_no_repr() -> None:
    server = one({"command": "a", "env": {"TOKEN": "literal-secret-9"}})
    assert "literal-secret" not in repr(server)
