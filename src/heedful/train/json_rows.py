"""Files of one JSON object a line, as chats and preferences come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from heedful.errors import BadParameter


def json_rows(paths: Iterable[Path], option: str, remedy: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each line's object, and where it stands; empty lines are passed over. Raises BadParameter for `option`, with the
    place, where a file cannot be read or a line is no object.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        where = f"line {number:,} of {path}"
                        yield _object(line, where, option, remedy), where
        except OSError as error:
            raise BadParameter(option, f"{path} cannot be read: {error.strerror}") from error


def _object(line: bytes, where: str, option: str, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadParameter(option, f"{where} is no JSON: {error}", remedy) from None
    if not isinstance(found, dict):
        raise BadParameter(option, f"{where} is no object: {str(found)[:60]}", remedy)
    return found
