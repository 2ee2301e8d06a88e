"""JSON values, one a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from heedful.errors import BadParameter


def json_lines(path: Path, option: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of those that are not blank, as they come; "-" is stdin. Raises BadParameter."""
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise BadParameter(option, f"{path} cannot be read: {error.strerror}") from error


def print_json(value: Any) -> None:
    """A line of it to stdout; its characters as they are where stdout can carry them, else escaped."""
    try:
        print(json.dumps(value, ensure_ascii=False))
    except UnicodeEncodeError:
        print(json.dumps(value))


def json_value(line: bytes) -> Any:
    """Raises BadParameter."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadParameter("row", f"is not UTF-8 text (byte {error.start:,})") from None
    except (ValueError, RecursionError) as error:
        raise BadParameter("row", f"is not JSON: {str(error)[:100]}") from None
