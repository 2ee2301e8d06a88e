"""Chats on disk as tokens with marks, and one of them shown before training, so that what is learned can be seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from heedful.errors import BadParameter
from heedful.text.tokenizer import Tokenizer
from heedful.train.chat_rows import ChatEncoder, Piece, chat_rows, pieces, template_of
from heedful.train.token_store import ChatTokens, TokenStore, write_chats

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""For a base that has these tokens and no template, as those that heedful trained on text."""


class _Fitting:
    """Chats that the context holds; the others are counted."""

    def __init__(self, encoder: ChatEncoder, paths: Sequence[Path], context_len: int) -> None:
        self._encoder, self._paths, self._context_len = encoder, paths, context_len
        self.rows = self.too_long = self.longest = self.targets = 0

    def __iter__(self) -> Iterator[ChatTokens]:
        for row in chat_rows(self._paths):
            self.rows += 1
            chats = self._encoder.encode(row)
            inputs = max(len(chat.token_ids) for chat in chats) - 1
            self.longest = max(self.longest, inputs)
            if inputs > self._context_len:
                self.too_long += 1
                continue
            self.targets += sum(sum(chat.learned) for chat in chats)
            yield from chats


def write_chat_store(folder: Path, paths: Sequence[Path], tokenizer: Tokenizer, context_len: int, name: str) -> str:
    """What it holds, in words. A row that the context does not hold is left out whole, and said.

    Raises BadParameter when no row is left, and as `chat_rows` does.
    """
    fitting = _Fitting(ChatEncoder(tokenizer, template_of(tokenizer)), paths, context_len)
    try:
        facts = write_chats(folder, fitting, tokenizer.vocab_size).facts
    except BadParameter as error:
        if fitting.too_long == 0:
            raise
        raise BadParameter(
            "--chat",
            f"every row is longer than {context_len:,} tokens",
            f"The longest needs --context {fitting.longest}.",
        ) from error
    said = (
        f"{name}: {fitting.rows - fitting.too_long:,} rows, {facts.tokens:,} tokens, "
        f"of which {fitting.targets:,} are learned"
    )
    if fitting.too_long:
        said += (
            f"; {fitting.too_long:,} {'row' if fitting.too_long == 1 else 'rows'} left out: longer than "
            f"{context_len:,} tokens (the longest needs --context {fitting.longest})"
        )
    return said


def chat_of(store: TokenStore, number: int) -> ChatTokens:
    assert store.learned is not None, store.facts
    span = slice(int(store.starts[number]), int(store.starts[number + 1]))
    return ChatTokens(store.tokens[span].tolist(), store.learned[span].tolist())


def shown(store: TokenStore, tokenizer: Tokenizer) -> list[Piece]:
    """The first chat."""
    return pieces(chat_of(store, 0), tokenizer)


def as_plain_text(found: Iterable[Piece]) -> str:
    """What is learned stands between [[ and ]]."""
    return "".join(f"[[{piece.text}]]" if piece.learned else piece.text for piece in found)
