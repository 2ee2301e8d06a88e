"""Token ids of all documents on disk: one flat array, mapped, and where each document begins.

Documents share the end token between them: end d1 end d2 end. So every one of them starts after an end token, as a
prompt does, and ends by predicting one. Chats stand side by side, each as its template begins and ends it, with a mark
for every token that is to be learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from heedful.errors import BadParameter, FileFormatError
from heedful.text.tokenizer import Tokenizer
from heedful.weights.run_folder import sha256_of

_BUFFERED_TOKENS = 1 << 20


@dataclass(frozen=True)
class StoreFacts:
    dtype: str
    tokens: int
    documents: int
    text_bytes: int | None
    """Of the documents as UTF-8; None: chats."""
    sha256: str
    """Of the array of tokens."""
    learned_sha256: str | None = None
    """Of the array of marks, where there is one."""
    paired: bool = False
    """Whether chats 2 i and 2 i + 1 are the chosen and the rejected answer to one prompt."""


class TokenStore:
    """`tokens`: the flat array. `starts` int64 (documents + 1,): of each document's opening end token, and the last; of
    each chat's first token, and the end. `learned` bool (tokens,): of chats, which tokens are targets; None: all are.
    """

    def __init__(
        self,
        facts: StoreFacts,
        tokens: npt.NDArray[np.unsignedinteger],
        starts: npt.NDArray[np.int64],
        learned: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.facts = facts
        self.tokens = tokens
        self.starts = starts
        self.learned = learned

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Raises FileFormatError when the files are not what was written."""
        try:
            facts = StoreFacts(**json.loads((folder / "store.json").read_text(encoding="utf-8")))
            tokens = np.memmap(folder / "tokens.bin", dtype=np.dtype(facts.dtype), mode="r")
            starts = np.fromfile(folder / "starts.bin", dtype="<i8")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _damaged(folder, f"{type(error).__name__}: {error}") from error
        if len(tokens) != facts.tokens or len(starts) != facts.documents + 1:
            raise _damaged(folder, f"{len(tokens):,} tokens are there, {facts.tokens:,} were written")
        if sha256_of(folder / "tokens.bin") != facts.sha256:
            raise _damaged(folder, "its sha256 is another")
        return cls(facts, tokens, starts, _open_learned(folder, facts))


def _open_learned(folder: Path, facts: StoreFacts) -> npt.NDArray[np.bool_] | None:
    if facts.learned_sha256 is None:
        return None
    path = folder / "learned.bin"
    if not path.is_file() or sha256_of(path) != facts.learned_sha256:
        raise _damaged(folder, "which tokens are learned is not what was written")
    return np.memmap(path, dtype=np.bool_, mode="r")


def _damaged(folder: Path, what: str) -> FileFormatError:
    return FileFormatError(f"{folder} is not the data that was written ({what})", "Begin the run anew elsewhere.")


def write_store(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, end_id: int) -> TokenStore:
    """Encodes document by document; no more than one of them is in memory. Raises BadParameter when there is none."""
    folder.mkdir(parents=True)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    starts, at, text_bytes = [0], 0, 0
    with (folder / "tokens.bin").open("wb") as file:
        buffer = [end_id]
        for text in texts:
            buffer += tokenizer.encode(text, add_bos=False)
            buffer.append(end_id)
            starts.append(at + len(buffer) - 1)
            text_bytes += len(text.encode("utf-8"))
            if len(buffer) >= _BUFFERED_TOKENS:
                file.write(np.array(buffer, dtype=dtype).tobytes())
                at, buffer = at + len(buffer), []
        file.write(np.array(buffer, dtype=dtype).tobytes())
    if len(starts) == 1:
        raise BadParameter("--data", "holds no text", "Name text files, or JSONL files with a text in every line.")
    np.array(starts, dtype="<i8").tofile(folder / "starts.bin")
    digest = sha256_of(folder / "tokens.bin")
    facts = StoreFacts(dtype.str, starts[-1] + 1, len(starts) - 1, text_bytes, digest)
    (folder / "store.json").write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")
    return TokenStore.open(folder)


@dataclass(frozen=True)
class ChatTokens:
    """A chat as the model reads it."""

    token_ids: list[int]
    learned: list[bool]
    """Of each token, whether it is a target."""


def write_chats(folder: Path, chats: Iterable[ChatTokens], vocab_size: int, *, paired: bool = False) -> TokenStore:
    """Raises BadParameter when there is none."""
    folder.mkdir(parents=True)
    dtype, starts = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4"), [0]
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "learned.bin").open("wb") as learned:
        for chat in chats:
            tokens.write(np.array(chat.token_ids, dtype=dtype).tobytes())
            learned.write(np.array(chat.learned, dtype=np.bool_).tobytes())
            starts.append(starts[-1] + len(chat.token_ids))
    if len(starts) == 1:
        raise BadParameter("--chat", "holds no row that can be learned from", "Every row needs an assistant's message.")
    np.array(starts, dtype="<i8").tofile(folder / "starts.bin")
    of_tokens, of_marks = (sha256_of(folder / name) for name in ("tokens.bin", "learned.bin"))
    facts = StoreFacts(dtype.str, starts[-1], len(starts) - 1, None, of_tokens, of_marks, paired)
    (folder / "store.json").write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")
    return TokenStore.open(folder)
