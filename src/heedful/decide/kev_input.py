"""A state and its questions as the tokens that Kev's models read. Pure Python.

    state:     <|fim_prefix|> state
    a branch:  <|fim_middle|> instructions (<|box_start|> option <|box_end|>)… <|fim_suffix|>

Every piece of text is tokenised by itself. A question's row is the state and its branch, positions from 0 on; packed,
the state stands once, before all branches, each of which goes on at position len(state) and sees the state and itself.
Layout and limits: github.com/jaredpalmer/kev, kev/encoding.py and kev/api.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from heedful.decide.question import Choice, Meaning, Noul, Question, Score, State, line_text
from heedful.errors import ContextOverflow, UnsupportedModel, UsageError
from heedful.text.tokenizer import Tokenizer

STATE, QUESTION, OPTION, OPTION_END, DECIDE = MARKS = (
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|fim_suffix|>",
)
_LIKE_A_MARK = re.compile(r"<\|([A-Za-z0-9_]+)\|>")


class KevOverflow(ContextOverflow):
    """Nothing is ever cut for Kev; both numbers are in the message."""

    def __init__(self, what: str, tokens: int, most: int) -> None:
        self.prompt_tokens = tokens
        self.context_len = most
        remedy = "Shorten the state, or ask fewer questions at once."
        UsageError.__init__(self, f"{what} {tokens:,} tokens and may have {most:,}", remedy)


@dataclass(frozen=True)
class Limits:
    """In tokens, marks included; the defaults are those of the published server."""

    state: int = 8192
    row: int = 8192
    """A state and one branch; a model's own context may be shorter."""
    packed: int = 16384
    """The state and all branches."""


@dataclass(frozen=True)
class Branch:
    ids: tuple[int, ...]
    markers: tuple[int, ...]
    """Where in `ids` each option ends. The last token is the one that decides."""


@dataclass(frozen=True)
class KevInput:
    state_ids: tuple[int, ...]
    branches: tuple[Branch, ...]
    """One a question."""


class KevReader:
    """Raises UnsupportedModel for a tokenizer without the marks."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits = Limits()) -> None:  # frozen
        self._tokenizer = tokenizer
        self._limits = limits
        self._marks = {mark: _id_of(tokenizer, mark) for mark in MARKS}

    def read(self, state: State, questions: Iterable[Question]) -> KevInput:
        """Raises KevOverflow, a ContextOverflow, for what is too long."""
        most = self._limits
        state_ids = (self._marks[STATE], *self._ids(line_text(state)))
        if len(state_ids) > most.state:
            raise KevOverflow("the state has", len(state_ids), most.state)
        branches = []
        packed = len(state_ids)
        for question in questions:
            branch = self._branch(question)
            row = len(state_ids) + len(branch.ids)
            if row > most.row:
                raise KevOverflow(f"the state and question {question.name!r:.40} have", row, most.row)
            branches.append(branch)
            packed += len(branch.ids)
        if packed > most.packed:
            raise KevOverflow("the state and all questions have", packed, most.packed)
        return KevInput(state_ids, tuple(branches))

    def _branch(self, question: Question) -> Branch:
        ids = [self._marks[QUESTION], *self._ids(line_text(question.instructions))]
        markers = []
        for option in option_texts(question):
            ids += [self._marks[OPTION], *self._ids(option), self._marks[OPTION_END]]
            markers.append(len(ids) - 1)
        return Branch((*ids, self._marks[DECIDE]), tuple(markers))

    def _ids(self, text: str) -> list[int]:
        """What looks like a mark is written differently, as it was in training."""
        return self._tokenizer.encode(_LIKE_A_MARK.sub("<¦\\1¦>", text), add_bos=False)


def option_texts(question: Question) -> list[str]:
    """What the model reads of each of `question.labels`."""
    if isinstance(question, Score):
        return [line_text(level) for level in question.levels]
    if isinstance(question, Noul):
        return [_described("no", question.false), _described("yes", question.true)]
    assert isinstance(question, Choice), question
    return [_described(name, meaning) for name, meaning in question.described().items()]


def _described(name: str, meaning: Meaning | None) -> str:
    return name if meaning is None or meaning == "" else f"{name}: {line_text(meaning)}"


def _id_of(tokenizer: Tokenizer, mark: str) -> int:
    found = tokenizer.id_of(mark)
    if found is None:
        raise UnsupportedModel(f"the tokenizer has no token {mark}, with which Kev's models mark a question", "")
    return found
