"""Text to token ids and back, for any model file. Owns the rule that text is text: what a user writes never becomes a
control token, only what a chat template writes does.

    tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
    tokenizer.decode(tokenizer.encode("Hello"))

Knows nothing of models, prompts' meaning or sampling. Lone surrogates in a text, which no file or socket can carry,
count as U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from heedful.errors import BadParameter
from heedful.text.chat import ChatTemplate, Segment
from heedful.text.gguf_vocabulary import gguf_vocabulary
from heedful.text.vocabulary import Vocabulary


class Tokenizer:
    """Immutable and safe to share between threads. Token ids are ints in [0, vocab_size)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        """Every token that ends an answer."""
        self.special_ids = frozenset(vocabulary.control.values())
        """Control tokens: never made from plain text, left out when decoding."""
        self.control_texts = frozenset(vocabulary.control)

    @classmethod
    def from_file(cls, path: Path, *, control: Collection[str] = ()) -> Tokenizer:
        """From a tokenizer.json and the settings beside it. Raises TokenizerError.

        control: added tokens that are control tokens whatever the file says of them.
        """
        from heedful.text.json_vocabulary import json_vocabulary  # a GGUF needs none

        return cls(json_vocabulary(path, control))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF's metadata, key → value. Raises TokenizerError, for a kind of tokenizer not known here too."""
        return cls(gguf_vocabulary(metadata))

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's template; None when it has none, as base models do."""
        if self._vocabulary.template is None:
            return None
        return ChatTemplate(
            self._vocabulary.template,
            bos_token=self._text_of(self._vocabulary.bos_id),
            eos_token=self._text_of(self._vocabulary.eos_id),
            control_tokens=self._vocabulary.control.keys(),
        )

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Ids of `text`; the text of a control token in it is plain text.

        `add_bos`: None wraps it in what the model wants (bos, or an encoder's [CLS] and [SEP]); False adds nothing;
        True adds at least bos.
        """
        plain = self._vocabulary.encode_plain(_well_formed(text), True) if text else []
        suffix = () if add_bos is False else self._vocabulary.suffix_ids
        return [*self._prefix(add_bos), *plain, *suffix]

    def encode_segments(self, segments: Iterable[Segment], *, add_bos: bool | None = None) -> list[int]:
        """Ids of a rendered chat. Bos is added as by `encode`, unless the chat begins with it."""
        parts = self._joined(segments)
        ids: list[int] = []
        for i, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            if i and parts[i - 1] in self._vocabulary.strips_after:
                part = part.lstrip()
            if i + 1 < len(parts) and parts[i + 1] in self._vocabulary.strips_before:
                part = part.rstrip()
            if part:
                ids.extend(self._vocabulary.encode_plain(_well_formed(part), i == 0))
        prefix = self._prefix(add_bos)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids that no token has become nothing.

        `continues`: the ids go on after other text, so the space that SentencePiece puts before a text is kept.
        """
        stream = self.stream(skip_special=skip_special, continues=continues)
        return stream.push_all(ids) + stream.flush()

    def stream(
        self, *, skip_special: bool = True, continues: bool = False, kept_special: frozenset[int] = frozenset()
    ) -> IncrementalDecoder:
        """Decodes token by token; parameters as for `decode`. `kept_special`: control tokens whose text is kept."""
        return IncrementalDecoder(
            self,
            skipped_ids=self.special_ids - kept_special if skip_special else frozenset(),
            drops_space=self._vocabulary.leading_space and not continues,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character; a control token's are its text."""
        return self._vocabulary.bytes_of(token_id)

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes: so many of a text make at least one."""
        return max(1, max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size)))

    def id_of(self, text: str) -> int | None:
        """Id of the control token with this text."""
        return self._vocabulary.control.get(text)

    def _text_of(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.token_bytes(token_id).decode("utf-8", "replace")

    def _prefix(self, add_bos: bool | None) -> list[int]:
        wanted = self._vocabulary.prefix_ids
        if add_bos is False:
            return []
        if add_bos and not wanted:
            if self.bos_id is None:
                raise BadParameter("add_bos", "this model has no bos token", "Leave add_bos out.")
            return [self.bos_id]
        return list(wanted)

    def _joined(self, segments: Iterable[Segment]) -> list[int | str]:
        """Ids of control segments and, between them, all plain text in one piece: its borders must not show."""
        parts: list[int | str] = []
        for is_control, run in groupby(segments, key=lambda segment: segment.control):
            if is_control:
                parts.extend(self._control_id(segment.text) for segment in run)
            else:
                parts.append("".join(segment.text for segment in run))
        return parts

    def _control_id(self, text: str) -> int:
        token_id = self.id_of(text)
        if token_id is None:
            raise BadParameter("segments", f"{text!r} is no control token of this model", "Mark it as plain text.")
        return token_id


class IncrementalDecoder:
    """Tokens in, whole characters out; bytes of a character that is not complete wait for the next token.

    All that `push` and `flush` return, joined, is what `Tokenizer.decode` gives for the same ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skipped_ids: frozenset[int], drops_space: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = skipped_ids
        self._drops_space = drops_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes(token_id))

    def push_all(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes, ids)))

    def flush(self) -> str:
        """What still waits when no more tokens come, as U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped_ids:
            return b""
        data = self._token_bytes(token_id)
        if data and self._drops_space:
            self._drops_space = False
            return data.removeprefix(b" ")
        return data


def _well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
