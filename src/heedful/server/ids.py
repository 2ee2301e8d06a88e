"""Names of answers: unguessable, since some can be asked for again."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
