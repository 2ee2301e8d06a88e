"""What a model file says about its tokens, in one form, whatever the file: ids, bytes, and which of them are control.

Files become a `Vocabulary` in gguf_vocabulary.py and json_vocabulary.py; tokenizer.py is built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from heedful.text.sentencepiece import SPACE

# Tokens that end a turn or a text in the chat formats in use. A file often names only one of them as its eos.
END_TEXTS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)


@dataclass(frozen=True)
class Vocabulary:
    size: int
    """Number of token ids; all are below it."""
    encode_plain: Callable[[str, bool], list[int]]
    """(text, whether a prompt starts here) → ids without any control token. No lone surrogates in the text."""
    bytes_of: Callable[[int], bytes]
    """Id → the bytes it stands for; a control token's are its text. Ids that no token has: no bytes."""
    control: Mapping[str, int]
    """Text → id of every control token."""
    bos_id: int | None
    eos_id: int | None
    """The one that chat templates know as eos_token."""
    eos_ids: frozenset[int]
    """All that end an answer."""
    prefix_ids: tuple[int, ...]
    """What the model wants before a text: bos, or [CLS]."""
    suffix_ids: tuple[int, ...]
    """What the model wants after a text: [SEP], for an encoder."""
    leading_space: bool
    """Encoding puts a space before the text, so decoding takes one away."""
    strips_before: frozenset[int] = field(default=frozenset())
    """Control tokens that swallow the white space before them."""
    strips_after: frozenset[int] = field(default=frozenset())
    """Control tokens that swallow the white space after them."""
    template: str | None = None
    """Source of the chat template."""


def end_ids(control: Mapping[str, int], named: Iterable[int | None]) -> frozenset[int]:
    """Ids that end an answer: those that the file names, and the known end tokens if they are control tokens."""
    known = (control.get(text) for text in END_TEXTS)
    return frozenset(token_id for token_id in (*named, *known) if token_id is not None)


def is_template_mark(text: str, template: str | None) -> bool:
    """Whether a token that the file does not call a control token serves as one: its chat template writes it."""
    return template is not None and text.startswith("<") and text.endswith(">") and text in template


def text_bytes(text: str) -> bytes:
    """Bytes of a token's text, in which U+DC80..U+DCFF are bytes that the file has outside of UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def sentencepiece_bytes(piece: str) -> bytes:
    return text_bytes(piece.replace(SPACE, " "))


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a piece of byte-level BPE, in which one character stands for one byte (GPT-2's table)."""
    return b"".join(_BYTE_OF_CHAR.get(char, text_bytes(char)) for char in piece)


def _byte_chars() -> list[str]:
    """The character for each byte: itself where it is printable Latin-1, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


_BYTE_OF_CHAR = {char: bytes([byte]) for byte, char in enumerate(_byte_chars())}
