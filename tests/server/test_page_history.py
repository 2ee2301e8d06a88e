"""The page's conversations: the file, and the endpoints over it."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.running import KEYS, RunningServer, start_server

from heedful.errors import HistoryError
from heedful.server.history import History, Message

QUESTION = {"role": "user", "content": "Où est la Loire ? 🌊"}
ANSWER = {
    "role": "assistant",
    "content": "In France.",
    "finish": "stop",
    "receipt": {"visits": {"total": 12345678901234567890}},
    "live": {"tokens": 3, "seconds": 0.5, "tokens_per_second": 4.0},
}


@pytest.fixture(scope="module")
def keyed(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("keyed") / "deep" / "page.sqlite"
    running = start_server(tiny_dir, api_keys=KEYS, history_path=str(path))
    yield running
    running.stop()


def client_of(running: RunningServer, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=running.url, headers=headers)


@pytest.fixture
def mine(keyed: RunningServer) -> Iterator[httpx.Client]:
    with client_of(keyed, KEYS[0]) as client:
        yield client
        for one in client.get("/history").json()["conversations"]:
            client.delete(f"/history/{one['id']}")


@pytest.fixture
def theirs(keyed: RunningServer) -> Iterator[httpx.Client]:
    with client_of(keyed, KEYS[1]) as client:
        yield client


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the fields that are null."""
    return [{name: value for name, value in one.items() if value is not None} for one in messages]


def create(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/history", json=body)
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    return made


def test_what_is_created_can_be_read(mine: httpx.Client) -> None:
    made = create(mine, title="Rivers", model="tiny", settings={"policy": "q4"}, messages=[QUESTION, ANSWER])
    found = mine.get(f"/history/{made['id']}").json()
    assert (found["title"], found["model"], found["settings"]) == ("Rivers", "tiny", {"policy": "q4"})
    assert plain(found["messages"]) == [QUESTION, ANSWER]
    assert mine.get("/history").json()["conversations"] == [{k: v for k, v in found.items() if k != "messages"}]


def test_a_change_replaces_what_it_names(mine: httpx.Client) -> None:
    made = create(mine, title="Rivers", model="tiny", settings={"policy": "q4"}, messages=[QUESTION, ANSWER])
    again = {**ANSWER, "content": "It flows to Nantes.", "finish": "cancelled"}
    path = f"/history/{made['id']}"
    assert mine.put(path, json={"messages": [again], "keep": 1}).status_code == 200
    assert mine.put(path, json={"title": "The Loire"}).status_code == 200
    found = mine.get(path).json()
    assert (found["title"], found["model"], found["settings"]) == ("The Loire", "tiny", {"policy": "q4"})
    assert plain(found["messages"]) == [QUESTION, again]
    assert mine.put(path, json={"messages": [QUESTION]}).status_code == 200
    assert plain(mine.get(path).json()["messages"]) == [QUESTION]


def test_keeping_more_than_there_is_changes_nothing(mine: httpx.Client) -> None:
    made = create(mine, title="Rivers", messages=[QUESTION])
    response = mine.put(f"/history/{made['id']}", json={"title": "no", "messages": [ANSWER], "keep": 2})
    assert response.status_code == 409
    assert response.json()["error"]["param"] == "keep"
    found = mine.get(f"/history/{made['id']}").json()
    assert (found["title"], plain(found["messages"])) == ("Rivers", [QUESTION])


def test_the_last_touched_comes_first(mine: httpx.Client) -> None:
    first, second = create(mine, title="one"), create(mine, title="two")
    assert [one["id"] for one in mine.get("/history").json()["conversations"]] == [second["id"], first["id"]]
    mine.put(f"/history/{first['id']}", json={"messages": [QUESTION]})
    mine.put(f"/history/{second['id']}", json={"title": "renamed is not touched"})
    assert [one["id"] for one in mine.get("/history").json()["conversations"]] == [first["id"], second["id"]]


@pytest.mark.parametrize(
    ("query", "titles"),
    [("loire", {"a"}), ("100%", {"b"}), ("_", set()), ("%", {"b"}), ("A", {"a", "b"}), ("\\", set()), ("zzz", set())],
)
def test_search_finds_titles_and_messages(mine: httpx.Client, query: str, titles: set[str]) -> None:
    create(mine, title="a", messages=[QUESTION])
    create(mine, title="b", messages=[{"role": "user", "content": "a full 100% of it"}])
    found = mine.get("/history", params={"q": query}).json()["conversations"]
    assert {one["title"] for one in found} == titles


def test_delete(mine: httpx.Client) -> None:
    path = f"/history/{create(mine, messages=[QUESTION])['id']}"
    assert mine.delete(path).status_code == 204
    for response in (mine.get(path), mine.delete(path), mine.put(path, json={"title": "x"})):
        assert response.status_code == 404
        assert "there is no conversation" in response.json()["error"]["message"]
    assert mine.get("/history").json() == {"conversations": []}


def test_export_has_everything(mine: httpx.Client) -> None:
    create(mine, title="one", messages=[QUESTION, ANSWER])
    create(mine, title="two")
    response = mine.get("/history/export")
    assert response.headers["content-disposition"].startswith("attachment")
    body = response.json()
    assert body["version"] == 1
    assert [(one["title"], plain(one["messages"])) for one in body["conversations"]] == [
        ("one", [QUESTION, ANSWER]),
        ("two", []),
    ]


def test_no_key_sees_another_ones(mine: httpx.Client, theirs: httpx.Client, keyed: RunningServer) -> None:
    path = f"/history/{create(mine, title='secret', messages=[QUESTION])['id']}"
    assert theirs.get("/history").json() == {"conversations": []}
    assert theirs.get("/history", params={"q": "secret"}).json() == {"conversations": []}
    assert theirs.get("/history/export").json()["conversations"] == []
    for response in (theirs.get(path), theirs.delete(path), theirs.put(path, json={"title": "x", "messages": []})):
        assert response.status_code == 404
    found = mine.get(path).json()
    assert (found["title"], plain(found["messages"])) == ("secret", [QUESTION])
    with client_of(keyed, None) as nobody:
        assert nobody.get("/history").status_code == 401


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"title": "x" * 301}, "title"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{**ANSWER, "finish": "whatever"}]}, "messages[0].finish"),
        ({"messages": [{**ANSWER, "receipt": {"a": "x" * (64 << 10)}}]}, "messages[0].receipt"),
        ({"messages": [QUESTION] * 4001}, "messages"),
        ({"settings": {"a": "x" * (64 << 10)}}, "settings"),
        ({"settings": []}, "settings"),
    ],
)
def test_bad_bodies_are_named(mine: httpx.Client, body: dict[str, Any], field: str) -> None:
    response = mine.post("/history", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text
    assert mine.get("/history").json() == {"conversations": []}


def test_a_conversation_cannot_outgrow_its_bound_bit_by_bit(mine: httpx.Client) -> None:
    path = f"/history/{create(mine, messages=[QUESTION] * 3000)['id']}"
    response = mine.put(path, json={"messages": [QUESTION] * 1001, "keep": 3000})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_a_server_without_history_says_so(server: RunningServer) -> None:
    response = httpx.get(f"{server.url}/history")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "no_history"
    assert "--no-history" in response.json()["error"]["message"]


_WRITER = """
import sys
from heedful.server.history import History, Message
history = History.open(sys.argv[1])
made = history.add("", "t", None, {}, [])
print(made.id, flush=True)
for i in range(100_000):
    history.change("", made.id, messages=[Message("user", f"message {i} " + "x" * 3000)], keep=i)
    print(i, flush=True)
"""


def test_what_was_stored_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "page.sqlite"
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) as writer:
        assert writer.stdout is not None
        made = writer.stdout.readline().strip()
        confirmed = -1
        while confirmed < 20:
            confirmed = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        confirmed = max([confirmed, *(int(line) for line in writer.stdout.read().splitlines() if line.strip())])
    history = History.open(path)
    found = history.read("", made)
    history.close()
    assert found is not None
    contents = [message.content for message in found[1]]
    assert len(contents) > confirmed
    assert contents == [f"message {i} " + "x" * 3000 for i in range(len(contents))]


def test_only_the_owner_reads_the_file(tmp_path: Path) -> None:
    History.open(tmp_path / "new" / "page.sqlite").close()
    assert stat.S_IMODE((tmp_path / "new" / "page.sqlite").stat().st_mode) == 0o600


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is no database " * 500)


def _foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE cats (name TEXT)")
    connection.close()


def _newer(path: Path) -> None:
    History.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def _torn(path: Path) -> None:
    history = History.open(path)
    history.add("", "t", None, {}, [Message("user", "x" * 5000) for _ in range(200)])
    history.close()
    data = bytearray(path.read_bytes())
    data[8192:-4096] = os.urandom(len(data) - 8192 - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [_garbage, _foreign, _newer, _torn])
def test_a_file_that_is_no_history_is_named_and_left_alone(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "page.sqlite"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(HistoryError) as caught:
        History.open(path)
    assert str(path) in caught.value.message
    assert "--no-history" in caught.value.remedy
    assert path.read_bytes()[100:] == before[100:]


def test_a_server_does_not_start_on_such_a_file(tmp_path: Path, tiny_dir: Path) -> None:
    _garbage(tmp_path / "page.sqlite")
    with pytest.raises(HistoryError):
        start_server(tiny_dir, history_path=str(tmp_path / "page.sqlite"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be written"):
        History.open(tmp_path / "file" / "page.sqlite")


_MESSAGES = st.lists(st.builds(Message, st.sampled_from(["user", "assistant"]), st.text(max_size=20)), max_size=4)


@settings(max_examples=40, deadline=None)
@given(changes=st.lists(st.tuples(_MESSAGES, st.integers(0, 6)), max_size=8))
def test_changes_are_those_of_a_list(
    changes: list[tuple[list[Message], int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    history = History.open(tmp_path_factory.mktemp("list") / "page.sqlite")
    try:
        made = history.add("", "t", None, {}, [])
        expected: list[Message] = []
        for messages, keep in changes:
            if keep > len(expected):
                with pytest.raises(ValueError, match="are to stay"):
                    history.change("", made.id, messages=messages, keep=keep)
            else:
                history.change("", made.id, messages=messages, keep=keep)
                expected = expected[:keep] + messages
            found = history.read("", made.id)
            assert found is not None
            assert found[1] == expected
    finally:
        history.close()
