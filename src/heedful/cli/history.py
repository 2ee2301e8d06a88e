"""Past chats in one SQLite file. Owns the file, its schema and what it promises: a stored turn survives a crash, any
number of programs may write at once, and only its owner can read it.

    history = History.open(history_path())
    chat_id, position = history.start("smollm2", None, [question, answer])

Knows nothing of models, prompts or screens.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from heedful.errors import HistoryError

SCHEMA_VERSION = 1
BUSY_SECONDS = 10.0
"""How long a write waits for other programs' writes; each takes milliseconds."""

_ONLY_OWNER = 0o600
_SCHEMA = (
    """CREATE TABLE chats (
        id INTEGER PRIMARY KEY,
        created TEXT NOT NULL,
        model TEXT NOT NULL,
        system TEXT
    )""",
    """CREATE TABLE messages (
        chat_id INTEGER NOT NULL REFERENCES chats (id),
        position INTEGER NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        receipt TEXT,
        cancelled INTEGER NOT NULL,
        UNIQUE (chat_id, position)
    )""",
)


@dataclass(frozen=True)
class ChatMessage:
    role: str
    """"user" or "assistant"."""
    content: str
    receipt: Mapping[str, Any] | None = None
    """What an answer cost, as Receipt.to_dict() gives it."""
    cancelled: bool = False
    """An answer that was stopped; `content` is what had come."""


@dataclass(frozen=True)
class StoredChat:
    id: int
    created: str
    """UTC, ISO 8601."""
    model: str
    system: str | None


@dataclass(frozen=True)
class ChatSummary:
    chat: StoredChat
    num_messages: int
    opening: str
    """The first message."""


def history_path() -> Path:
    """history.db in $HEEDFUL_DATA, or in the user's data folder."""
    chosen = os.environ.get("HEEDFUL_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute() / "history.db"
    import platformdirs

    return Path(platformdirs.user_data_dir("heedful")) / "history.db"


class History:
    """One connection. Every method is one transaction and raises HistoryError when the file does not serve."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> History:
        """Creates the file, and the folders above it, where they are missing."""
        with _named_errors(path), _alone(path.parent):
            _make_private(path)
            connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
            history = cls(path, connection)
            try:
                history._prepare()
            except BaseException:
                connection.close()
                raise
        return history

    def close(self) -> None:
        with _named_errors(self.path):
            self._connection.close()

    def start(self, model: str, system: str | None, messages: Sequence[ChatMessage]) -> tuple[int, int]:
        """A new chat with its first messages; returns its id and the position of the last one."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        with self._writing() as db:
            row = (created, model, system)
            chat_id = db.execute("INSERT INTO chats (created, model, system) VALUES (?, ?, ?)", row).lastrowid
            assert chat_id is not None
            return chat_id, _insert(db, chat_id, messages)

    def append(self, chat_id: int, messages: Sequence[ChatMessage]) -> int:
        """Adds them behind whatever the chat holds by now; returns the position of the last one."""
        with self._writing() as db:
            return _insert(db, chat_id, messages)

    def replace(self, chat_id: int, position: int, message: ChatMessage) -> None:
        with self._writing() as db:
            db.execute(
                "UPDATE messages SET role = ?, content = ?, receipt = ?, cancelled = ? "
                "WHERE chat_id = ? AND position = ?",
                (*_columns(message), chat_id, position),
            )

    def set_system(self, chat_id: int, system: str | None) -> None:
        with self._writing() as db:
            db.execute("UPDATE chats SET system = ? WHERE id = ?", (system, chat_id))

    def summaries(self, limit: int) -> list[ChatSummary]:
        """The chats that were last written to, the latest one last."""
        rows = self._rows(
            """SELECT id, created, model, system, count(*), max(messages.rowid),
                (SELECT content FROM messages WHERE chat_id = id ORDER BY position LIMIT 1)
            FROM chats JOIN messages ON chat_id = id GROUP BY id ORDER BY max(messages.rowid) DESC LIMIT ?""",
            limit,
        )
        return [ChatSummary(StoredChat(*row[:4]), row[4], row[6]) for row in reversed(rows)]

    def latest_id(self) -> int | None:
        """The chat that was last written to."""
        rows = self._rows("SELECT chat_id FROM messages ORDER BY rowid DESC LIMIT 1")
        return rows[0][0] if rows else None

    def chat(self, chat_id: int) -> StoredChat | None:
        rows = self._rows("SELECT id, created, model, system FROM chats WHERE id = ?", chat_id)
        return StoredChat(*rows[0]) if rows else None

    def messages(self, chat_id: int) -> dict[int, ChatMessage]:
        """By position, in order."""
        columns = "position, role, content, receipt, cancelled"
        rows = self._rows(f"SELECT {columns} FROM messages WHERE chat_id = ? ORDER BY position", chat_id)
        return {row[0]: ChatMessage(row[1], row[2], self._receipt(row[3]), bool(row[4])) for row in rows}

    def questions(self, limit: int) -> list[str]:
        """The latest messages of the user in all chats, the latest one last."""
        rows = self._rows("SELECT content FROM messages WHERE role = 'user' ORDER BY rowid DESC LIMIT ?", limit)
        return [row[0] for row in reversed(rows)]

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        with self._writing() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise HistoryError(
                    f"{self.path} was written by a newer heedful (format {version}; {SCHEMA_VERSION} is known here)",
                    "Update heedful, or set HEEDFUL_DATA to another folder.",
                )
            if version == 0:
                for statement in _SCHEMA:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with _named_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or rolls back
                yield self._connection

    def _rows(self, query: str, *parameters: int) -> list[Any]:
        with _named_errors(self.path):
            return self._connection.execute(query, parameters).fetchall()

    def _receipt(self, column: str | None) -> Mapping[str, Any] | None:
        try:
            receipt: Mapping[str, Any] | None = json.loads(column) if column is not None else None
        except (ValueError, TypeError) as error:
            raise HistoryError(f"{self.path} is damaged: a receipt in it is not JSON", _remedy(self.path)) from error
        return receipt


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One program at a time: SQLite waits for no one while a file becomes WAL, but fails with "database is locked"."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _make_private(path: Path) -> None:
    """SQLite would create it readable for all; its -wal and -shm files take over the mode set here.

    A file that is there is not opened: closing it would drop the locks that SQLite holds for this process.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _ONLY_OWNER))
    except FileExistsError:
        if path.is_file():
            path.chmod(_ONLY_OWNER)


def _insert(db: sqlite3.Connection, chat_id: int, messages: Sequence[ChatMessage]) -> int:
    query = "SELECT coalesce(max(position), -1) FROM messages WHERE chat_id = ?"
    position: int = db.execute(query, (chat_id,)).fetchone()[0]
    for message in messages:
        position += 1
        db.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?)", (chat_id, position, *_columns(message)))
    return position


def _columns(message: ChatMessage) -> tuple[str, str, str | None, int]:
    receipt = None if message.receipt is None else json.dumps(message.receipt)
    return message.role, message.content, receipt, int(message.cancelled)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise HistoryError(f"the chat history {path} does not serve: {error}", _remedy(path)) from error


def _remedy(path: Path) -> str:
    return f"Move {path.name} away if it is damaged, or set HEEDFUL_DATA to a folder that can be written to."
