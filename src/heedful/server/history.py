"""The page's conversations in one SQLite file. Owns the file and its schema; knows nothing of HTTP and models.

    history = History.open("page.sqlite")
    history.put(salt, Conversation(...), messages, keep=0)

What was stored survives a crash of the process and of the machine. A conversation belongs to the salt of the caller's
API key and is not there for any other. Methods block and may be called from any thread; they raise HistoryError.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import HistoryError
from heedful.server.ids import new_id

SCHEMA_VERSION = 1
MOST_LISTED = 500
"""Conversations that a list has; a search finds the older ones."""
BUSY_SECONDS = 10.0
"""How long a write waits for those of other servers on the same file; each takes milliseconds."""

_ONLY_OWNER = 0o600
_SCHEMA = (
    """CREATE TABLE conversations (
        id TEXT PRIMARY KEY,
        salt TEXT NOT NULL,
        title TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        model TEXT,
        settings TEXT NOT NULL
    )""",
    "CREATE INDEX conversations_by_age ON conversations (salt, updated)",
    """CREATE TABLE messages (
        conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        finish TEXT,
        receipt TEXT,
        live TEXT,
        PRIMARY KEY (conversation, position)
    )""",
)
_HEAD = "id, title, created, updated, model, settings"


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    finish: str | None = None
    """Of answers: "stop", "length", "cancelled" (`content` is what had come), "error"."""
    receipt: dict[str, Any] | None = None
    """What an answer cost, as Receipt.to_dict() gives it; a stopped one has none."""
    live: dict[str, Any] | None = None
    """What the page measured of an answer: tokens, seconds, tokens_per_second."""


@dataclass(frozen=True)
class Conversation:
    id: str
    title: str
    created: float
    updated: float
    """Seconds since 1970."""
    model: str | None
    settings: dict[str, Any]


class History:
    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._lock = threading.Lock()

    @staticmethod
    def open(path: str | os.PathLike[str]) -> History:
        """Makes the file and its folder where they are missing. Raises HistoryError for a file that is none of ours."""
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, _ONLY_OWNER))
        except OSError as error:
            raise HistoryError(f"{file} cannot be written: {error.strerror}", _remedy()) from error
        # autocommit: transactions are begun where they are needed
        connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, file)
        except sqlite3.Error as error:
            connection.close()
            raise HistoryError(f"{file} is not a readable history: {error}", _remedy()) from error
        except HistoryError:
            connection.close()
            raise
        return History(file, connection)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def conversations(self, salt: str, query: str = "", limit: int = MOST_LISTED) -> list[Conversation]:
        """The last touched first; with `query`, those that have it in the title or in a message."""
        sql = f"SELECT {_HEAD} FROM conversations c WHERE salt = ?"
        values: list[Any] = [salt]
        if query:
            found = "SELECT 1 FROM messages m WHERE m.conversation = c.id AND m.content LIKE ? ESCAPE '\\'"
            sql += f" AND (title LIKE ? ESCAPE '\\' OR EXISTS ({found}))"
            values += [_pattern(query)] * 2
        with self._transaction() as connection:
            rows = connection.execute(f"{sql} ORDER BY updated DESC, id LIMIT ?", [*values, limit]).fetchall()
        return [_conversation(row) for row in rows]

    def read(self, salt: str, conversation_id: str) -> tuple[Conversation, list[Message]] | None:
        """None where this salt has no such conversation."""
        with self._transaction() as connection:
            return _read(connection, salt, conversation_id)

    def export(self, salt: str) -> list[tuple[Conversation, list[Message]]]:
        """Everything, the oldest first."""
        with self._transaction() as connection:
            ids = connection.execute("SELECT id FROM conversations WHERE salt = ? ORDER BY created, id", [salt])
            found = [_read(connection, salt, row[0]) for row in ids.fetchall()]
        return [one for one in found if one is not None]

    def add(
        self, salt: str, title: str, model: str | None, settings: dict[str, Any], messages: Sequence[Message]
    ) -> Conversation:
        now = time.time()
        made = Conversation(new_id("conv_"), title, now, now, model, settings)
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)",
                [made.id, salt, title, now, now, model, json.dumps(settings)],
            )
            _append(connection, made.id, 0, messages)
        return made

    def change(
        self,
        salt: str,
        conversation_id: str,
        *,
        title: str | None = None,
        model: str | None = None,
        settings: dict[str, Any] | None = None,
        messages: Sequence[Message] | None = None,
        keep: int = 0,
    ) -> Conversation | None:
        """None of an argument: it stays. `messages` take the place of all but the first `keep`.

        Returns None where this salt has no such conversation. Raises ValueError where there are fewer than `keep`.
        """
        with self._transaction() as connection:
            found = _read(connection, salt, conversation_id)
            if found is None:
                return None
            head, stored = found
            if messages is not None:
                if keep > len(stored):
                    raise ValueError(f"{keep} messages are to stay and there are {len(stored)}")
                connection.execute(
                    "DELETE FROM messages WHERE conversation = ? AND position >= ?", [conversation_id, keep]
                )
                _append(connection, conversation_id, keep, messages)
            changed = Conversation(
                head.id,
                head.title if title is None else title,
                head.created,
                head.updated if messages is None else max(time.time(), head.updated),
                head.model if model is None else model,
                head.settings if settings is None else settings,
            )
            connection.execute(
                "UPDATE conversations SET title = ?, updated = ?, model = ?, settings = ? WHERE id = ?",
                [changed.title, changed.updated, changed.model, json.dumps(changed.settings), head.id],
            )
        return changed

    def delete(self, salt: str, conversation_id: str) -> bool:
        """Whether there was one."""
        with self._transaction() as connection:
            sql = "DELETE FROM conversations WHERE id = ? AND salt = ?"
            return connection.execute(sql, [conversation_id, salt]).rowcount > 0

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise HistoryError(f"{self._path} cannot be used: {error}", _remedy()) from error


def _remedy() -> str:
    return "Move that file away to begin a new one, name another with --history, or keep none with --no-history."


def _prepare(connection: sqlite3.Connection, file: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version == 0 and tables == 0:
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    elif version != SCHEMA_VERSION:
        raise HistoryError(f"{file} is not a history of version {SCHEMA_VERSION}", _remedy())
    connection.execute(f"SELECT {_HEAD}, salt FROM conversations LIMIT 1")
    connection.execute("SELECT conversation, position, role, content, finish, receipt, live FROM messages LIMIT 1")
    connection.execute("COMMIT")
    (fault,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if fault != "ok":
        raise HistoryError(f"{file} is damaged: {fault}", _remedy())


def _pattern(query: str) -> str:
    escaped = query.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _conversation(row: Sequence[Any]) -> Conversation:
    conversation_id, title, created, updated, model, settings = row
    return Conversation(conversation_id, title, created, updated, model, json.loads(settings))


def _read(connection: sqlite3.Connection, salt: str, conversation_id: str) -> tuple[Conversation, list[Message]] | None:
    head = connection.execute(
        f"SELECT {_HEAD} FROM conversations WHERE id = ? AND salt = ?", [conversation_id, salt]
    ).fetchone()
    if head is None:
        return None
    rows = connection.execute(
        "SELECT role, content, finish, receipt, live FROM messages WHERE conversation = ? ORDER BY position",
        [conversation_id],
    )
    messages = [
        Message(role, content, finish, _loaded(receipt), _loaded(live)) for role, content, finish, receipt, live in rows
    ]
    return _conversation(head), messages


def _append(connection: sqlite3.Connection, conversation_id: str, start: int, messages: Sequence[Message]) -> None:
    connection.executemany(
        "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (conversation_id, start + i, one.role, one.content, one.finish, _dumped(one.receipt), _dumped(one.live))
            for i, one in enumerate(messages)
        ],
    )


def _dumped(value: dict[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value)


def _loaded(text: str | None) -> dict[str, Any] | None:
    return None if text is None else json.loads(text)
