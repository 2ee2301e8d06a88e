"""Preferences on disk: chats as tokens with marks, chosen and rejected in turn, and beside them what the base thought
of each answer, so that no step needs a second model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from heedful.errors import BadParameter, FileFormatError
from heedful.text.tokenizer import Tokenizer
from heedful.train.chat_rows import ChatEncoder, template_of
from heedful.train.checkpoint import write_aside
from heedful.train.preference_rows import encoded_pair, preference_rows
from heedful.train.token_store import ChatTokens, write_chats
from heedful.weights.run_folder import sha256_of

_VALUES, _FACTS = "reference.bin", "reference.json"


class _Fitting:
    """Pairs that the context holds and that differ; the others are counted."""

    def __init__(self, encoder: ChatEncoder, paths: Sequence[Path], context_len: int) -> None:
        self._encoder, self._paths, self._context_len = encoder, paths, context_len
        self.rows = self.too_long = self.same = self.longest = self.targets = 0

    def __iter__(self) -> Iterator[ChatTokens]:
        for row in preference_rows(self._paths):
            self.rows += 1
            pair = encoded_pair(row, self._encoder)
            inputs = max(len(chat.token_ids) for chat in pair) - 1
            self.longest = max(self.longest, inputs)
            if inputs > self._context_len:
                self.too_long += 1
            elif pair[0] == pair[1]:
                self.same += 1
            else:
                self.targets += sum(sum(chat.learned) for chat in pair)
                yield from pair


def write_preference_store(
    folder: Path, paths: Sequence[Path], tokenizer: Tokenizer, context_len: int, name: str
) -> str:
    """What it holds, in words. A row that the context does not hold is left out whole, and said; so is one whose
    answers are the same.

    Raises BadParameter when no row is left, and as `preference_rows` does.
    """
    fitting = _Fitting(ChatEncoder(tokenizer, template_of(tokenizer)), paths, context_len)
    try:
        facts = write_chats(folder, fitting, tokenizer.vocab_size, paired=True).facts
    except BadParameter as error:
        if error.field == "--preferences":  # it is about a row
            raise
        raise BadParameter(
            "--preferences",
            f"hold no row to learn from: {fitting.too_long:,} of {fitting.rows:,} are longer than {context_len:,} "
            f"tokens, {fitting.same:,} have the same answer twice",
            f"The longest needs --context {fitting.longest}." if fitting.too_long else "Name JSONL files with rows.",
        ) from error
    pairs = facts.documents // 2
    said = f"{name}: {pairs:,} preferences, {facts.tokens:,} tokens, of which {fitting.targets:,} are scored"
    if fitting.too_long:
        said += (
            f"; left out are {fitting.too_long:,} longer than {context_len:,} tokens "
            f"(the longest needs --context {fitting.longest})"
        )
    if fitting.same:
        said += f"; left out are {fitting.same:,} whose two answers are the same"
    return said


# ---- what the base thought


def has_reference(folder: Path) -> bool:
    return (folder / _FACTS).exists()


def write_reference(folder: Path, log_probs: npt.NDArray[np.float64]) -> None:
    """float64 (chats,): of each answer Σ log p under the base."""
    write_aside(folder / _VALUES, np.ascontiguousarray(log_probs, dtype="<f8").tobytes())
    facts = {"answers": len(log_probs), "sha256": sha256_of(folder / _VALUES)}
    write_aside(folder / _FACTS, f"{json.dumps(facts, indent=1)}\n".encode())


def open_reference(folder: Path) -> npt.NDArray[np.float64]:
    """Mapped. Raises FileFormatError when it is not what was written."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        values = np.memmap(folder / _VALUES, dtype="<f8", mode="r")
        if len(values) == facts["answers"] and sha256_of(folder / _VALUES) == facts["sha256"]:
            return values
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f" ({error})") from error
    raise _damaged(folder, "")


def _damaged(folder: Path, why: str) -> FileFormatError:
    return FileFormatError(
        f"{folder / _VALUES} is not what was written{why}",
        f"Delete {folder / _FACTS}: a resumed run then asks the base again.",
    )
