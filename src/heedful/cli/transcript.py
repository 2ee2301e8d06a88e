"""A conversation as a file for people (Markdown) or programs (JSON). A file appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from heedful.cli.conversation import receipt_from_dict
from heedful.cli.history import ChatMessage
from heedful.errors import UsageError


def save(path: Path, model: str, system: str | None, messages: Sequence[ChatMessage], *, overwrite: bool) -> None:
    """JSON where the name ends in .json, else Markdown. Raises UsageError when it cannot be written, or is there."""
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists", f"To overwrite it: /save! {path}")
    text = as_json(model, system, messages) if path.suffix.lower() == ".json" else as_markdown(model, system, messages)
    try:
        with _whole(path) as file:
            file.write(text)
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise UsageError(f"{path} cannot be written: {error}", "Choose another place.") from error


def as_json(model: str, system: str | None, messages: Sequence[ChatMessage]) -> str:
    """{"model", "messages"}: what `heedful generate --messages` reads, with receipts beside the answers."""
    head = [] if system is None else [{"role": "system", "content": system}]
    fields = {"model": model, "messages": [*head, *map(_fields, messages)]}
    return json.dumps(fields, ensure_ascii=False, indent=2) + "\n"


def as_markdown(model: str, system: str | None, messages: Sequence[ChatMessage]) -> str:
    parts = [f"# A conversation with {model}"]
    if system is not None:
        parts.append(f"**System:** {system}")
    for message in messages:
        parts += [f"## {'You' if message.role == 'user' else model}", message.content, *_remarks(message)]
    return "\n\n".join(parts) + "\n"


def _fields(message: ChatMessage) -> dict[str, object]:
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.receipt is not None:
        fields["receipt"] = message.receipt
    if message.cancelled:
        fields["cancelled"] = True
    return fields


def _remarks(message: ChatMessage) -> list[str]:
    stopped = ["*(stopped here)*"] if message.cancelled else []
    return [*stopped, *([f"*{receipt_from_dict(message.receipt).line()}*"] if message.receipt is not None else [])]


@contextmanager
def _whole(path: Path) -> Iterator[TextIO]:
    """A file that gets its name when it is complete and on the disk."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
