"""The file of past chats: what is written comes back, from any number of writers, after any death, to its owner."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful.cli.history import SCHEMA_VERSION, ChatMessage, History, history_path
from heedful.errors import HistoryError

HELLO, HI = ChatMessage("user", "Hello"), ChatMessage("assistant", "Hi", {"visits": {"total": 7}})
MORE, STOPPED = ChatMessage("user", "More?"), ChatMessage("assistant", "Ye", {"visits": {"total": 9}}, cancelled=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[[], History]]:
    """Opens the file, as often as wanted."""
    connections: list[History] = []

    def open_history() -> History:
        connections.append(History.open(path))
        return connections[-1]

    yield open_history
    for history in connections:
        history.close()


def raw(path: Path, query: str) -> Any:
    connection = sqlite3.connect(path, timeout=0)
    try:
        with connection:
            return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_what_is_stored_comes_back(opened: Callable[[], History]) -> None:
    history = opened()
    chat_id, position = history.start("smollm2", "Be brief.", [HELLO, HI])
    assert position == 1
    assert history.append(chat_id, [MORE, STOPPED]) == 3
    again = opened()
    assert again.messages(chat_id) == {0: HELLO, 1: HI, 2: MORE, 3: STOPPED}
    chat = again.chat(chat_id)
    assert chat is not None
    assert (chat.id, chat.model, chat.system) == (chat_id, "smollm2", "Be brief.")
    assert chat.created.endswith("+00:00")
    assert again.chat(chat_id + 1) is None


def test_the_tables_are_the_documented_ones(opened: Callable[[], History], path: Path) -> None:
    opened().start("m", None, [HELLO, STOPPED])
    assert raw(path, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert raw(path, "PRAGMA journal_mode") == [("wal",)]
    assert raw(path, "SELECT id, model, system FROM chats") == [(1, "m", None)]
    assert raw(path, "SELECT chat_id, position, role, content, receipt, cancelled FROM messages") == [
        (1, 0, "user", "Hello", None, 0),
        (1, 1, "assistant", "Ye", '{"visits": {"total": 9}}', 1),
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(ChatMessage, st.sampled_from(["user", "assistant"]), st.text(), st.none(), st.booleans()), min_size=1
    )
)
def test_any_text_comes_back(opened: Callable[[], History], messages: list[ChatMessage]) -> None:
    history = opened()
    chat_id, _ = history.start("m", None, messages)
    assert list(history.messages(chat_id).values()) == messages
    history.close()


def test_an_answer_is_replaced_in_its_place(opened: Callable[[], History]) -> None:
    history = opened()
    chat_id, position = history.start("m", None, [HELLO, HI])
    history.append(chat_id, [MORE, HI])
    history.replace(chat_id, position, STOPPED)
    assert list(history.messages(chat_id).values()) == [HELLO, STOPPED, MORE, HI]


def test_the_system_message_can_change(opened: Callable[[], History]) -> None:
    history = opened()
    first, _ = history.start("m", "a", [HELLO, HI])
    second, _ = history.start("m", "b", [HELLO, HI])
    history.set_system(first, None)
    systems = [chat.system for chat in (history.chat(first), history.chat(second)) if chat is not None]
    assert systems == [None, "b"]


def test_the_chat_talked_in_last_is_the_latest(opened: Callable[[], History]) -> None:
    history = opened()
    assert history.latest_id() is None
    assert history.summaries(5) == []
    old, _ = history.start("m", None, [HELLO, HI])
    new, _ = history.start("n", None, [MORE, HI])
    assert history.latest_id() == new
    history.append(old, [MORE, HI])
    assert history.latest_id() == old
    assert [(s.chat.id, s.chat.model, s.num_messages, s.opening) for s in history.summaries(5)] == [
        (new, "n", 2, "More?"),
        (old, "m", 4, "Hello"),
    ]
    assert [s.chat.id for s in history.summaries(1)] == [old]


def test_questions_of_all_chats_in_order(opened: Callable[[], History]) -> None:
    history = opened()
    chat_id, _ = history.start("m", None, [HELLO, HI])
    history.start("m", None, [MORE, HI])
    history.append(chat_id, [ChatMessage("user", "last"), HI])
    assert history.questions(10) == ["Hello", "More?", "last"]
    assert history.questions(2) == ["More?", "last"]


def test_a_turn_is_stored_whole_or_not_at_all(opened: Callable[[], History]) -> None:
    history = opened()
    nothing: Any = None
    with pytest.raises(HistoryError):
        history.start("m", None, [HELLO, ChatMessage("assistant", nothing)])
    assert history.summaries(5) == []
    chat_id, _ = history.start("m", None, [HELLO, HI])
    with pytest.raises(HistoryError):
        history.append(chat_id, [MORE, ChatMessage("assistant", nothing)])
    assert len(history.messages(chat_id)) == 2


def test_two_connections_see_each_other(opened: Callable[[], History]) -> None:
    one, two = opened(), opened()
    first, _ = one.start("m", None, [HELLO, HI])
    second, _ = two.start("m", None, [HELLO, HI])
    assert first != second
    one.append(second, [MORE, HI])
    assert two.append(second, [MORE, STOPPED]) == 5
    assert list(one.messages(second).values()) == [HELLO, HI, MORE, HI, MORE, STOPPED]


def test_nobody_writes_between_the_look_at_a_chat_and_the_writing(opened: Callable[[], History], path: Path) -> None:
    class Interrupted(list[ChatMessage]):
        def __iter__(self) -> Iterator[ChatMessage]:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                raw(path, "INSERT INTO messages VALUES (1, 2, 'user', 'mine', NULL, 0)")
            return super().__iter__()

    history = opened()
    chat_id, _ = history.start("m", None, [HELLO, HI])
    assert history.append(chat_id, Interrupted([MORE, HI])) == 3


WRITER = """
import os, signal, sys
from pathlib import Path
from heedful.cli.history import ChatMessage, History
turn = [ChatMessage("user", sys.argv[2]), ChatMessage("assistant", "a" * 5000)]
history = History.open(Path(sys.argv[1]))
chat_id, _ = history.start("m", None, turn)
for _ in range(19):
    history.append(chat_id, turn)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_programs_that_write_at_once_and_are_killed_lose_nothing(opened: Callable[[], History], path: Path) -> None:
    """They create the file at once, too."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [-signal.SIGKILL] * 3
    history = opened()
    summaries = history.summaries(5)
    assert sorted(s.opening for s in summaries) == ["a", "b", "c"]
    assert [s.num_messages for s in summaries] == [40, 40, 40]
    for summary in summaries:
        contents = [message.content for message in history.messages(summary.chat.id).values()]
        assert contents == [summary.opening, "a" * 5000] * 20


def test_only_its_owner_can_read_it(opened: Callable[[], History], path: Path) -> None:
    opened().start("m", None, [HELLO, HI])
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["history.db", "history.db-shm", "history.db-wal"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(opened: Callable[[], History], path: Path) -> None:
    opened().close()
    path.chmod(0o644)
    opened()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def put_garbage(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all " * 500)


def put_a_folder(path: Path) -> None:
    path.mkdir(parents=True)


def put_a_file_in_its_folders_place(path: Path) -> None:
    path.parent.write_text("")


def put_another_database(path: Path) -> None:
    path.parent.mkdir()
    raw(path, "CREATE TABLE chats (something)")


def put_a_newer_format(path: Path) -> None:
    path.parent.mkdir()
    raw(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


@pytest.mark.parametrize(
    ("put", "says"),
    [
        (put_garbage, "not a database"),
        (put_a_folder, "unable to open"),
        (put_a_file_in_its_folders_place, "File exists"),
        (put_another_database, "already exists"),
        (put_a_newer_format, "newer heedful"),
    ],
)
def test_what_is_no_history_is_refused_and_left_alone(path: Path, put: Callable[[Path], None], says: str) -> None:
    put(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(HistoryError, match=says) as refusal:
        History.open(path)
    assert "HEEDFUL_DATA" in refusal.value.remedy
    if put is put_garbage:
        assert path.read_bytes() == before


def test_damage_below_an_open_history_is_named(opened: Callable[[], History], path: Path) -> None:
    history = opened()
    chat_id, position = history.start("m", None, [HELLO, HI])
    raw(path, "UPDATE messages SET receipt = '{' WHERE position = 1")
    with pytest.raises(HistoryError, match="damaged"):
        history.messages(chat_id)
    raw(path, "DROP TABLE messages")
    for use in (
        lambda: history.append(chat_id, [HELLO]),
        lambda: history.replace(chat_id, position, HI),
        lambda: history.summaries(5),
        lambda: history.questions(5),
    ):
        with pytest.raises(HistoryError, match="no such table"):
            use()


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    assert history_path() == tmp_path / "history.db"
    monkeypatch.setenv("HEEDFUL_DATA", "~/chats")
    assert history_path() == Path(os.path.expanduser("~/chats/history.db"))
    monkeypatch.delenv("HEEDFUL_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert history_path() == tmp_path / "xdg" / "heedful" / "history.db"
