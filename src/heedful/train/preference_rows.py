"""Rows of preferences: a prompt with two answers, the first of which is to become likelier than the second.

Each of the two is a chat that is rendered, encoded and marked as chat_rows.py does: what is scored is what the model
would have to write itself, the end of its turn with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import BadParameter, TemplateError
from heedful.train.chat_rows import ChatEncoder, ChatRow, as_messages, messages_of
from heedful.train.json_rows import json_rows
from heedful.train.token_store import ChatTokens

_REMEDY = 'Every line is {"prompt": "…", "chosen": "…", "rejected": "…"}, each a text or a list of messages.'

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class PreferenceRow:
    chosen: ChatRow
    rejected: ChatRow

    @property
    def where(self) -> str:
        return self.chosen.where


def preference_rows(paths: Iterable[Path]) -> Iterator[PreferenceRow]:
    """Raises BadParameter, with the place, for a line that is no prompt with two answers."""
    for found, where in json_rows(paths, "--preferences", _REMEDY):
        yield _row(found, where)


def _row(found: dict[str, Any], where: str) -> PreferenceRow:
    if not {"chosen", "rejected"} <= found.keys():
        raise BadParameter("--preferences", f"{where} has not both chosen and rejected: {str(found)[:60]}", _REMEDY)
    try:
        prompt, chosen, rejected = _parts(found, where)
    except BadParameter as error:
        raise _of_preferences(error) from None
    rows = [ChatRow(prompt + answer, None, len(prompt), where) for answer in (chosen, rejected)]
    if not prompt:
        raise BadParameter("--preferences", f"{where} has no prompt that both answers go on from", _REMEDY)
    if not all(row.answers for row in rows):
        raise BadParameter("--preferences", f"{where} has an answer without an assistant's message", _REMEDY)
    return PreferenceRow(*rows)


def _parts(found: Mapping[str, Any], where: str) -> tuple[Messages, Messages, Messages]:
    """Prompt and the two answers. Answers that begin before an assistant speaks have the prompt in them: it is what
    both begin with.
    """
    chosen, rejected = (
        messages_of(as_messages(found[name], "assistant"), name, where) for name in ("chosen", "rejected")
    )
    if "prompt" not in found or (isinstance(found["prompt"], str) and chosen[0]["role"] != "assistant"):
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        return chosen[:shared], chosen[shared:], rejected[shared:]
    return messages_of(as_messages(found["prompt"], "user"), "prompt", where), chosen, rejected


def _of_preferences(error: BadParameter, remedy: str = _REMEDY) -> BadParameter:
    return BadParameter("--preferences", error.message.removeprefix(f"{error.field}: "), remedy)


def encoded_pair(row: PreferenceRow, encoder: ChatEncoder) -> tuple[ChatTokens, ChatTokens]:
    """Chosen and rejected. Raises BadParameter and TemplateError, naming the row."""
    try:
        chosen, rejected = encoder.encode(row.chosen), encoder.encode(row.rejected)
    except BadParameter as error:
        raise _of_preferences(error, error.remedy) from error
    if len(chosen) != 1 or len(rejected) != 1:
        raise TemplateError(
            f"{row.where}: the template writes earlier answers in another way once later ones are there",
            "Give rows whose chosen and rejected are one answer each.",
        )
    return chosen[0], rejected[0]
