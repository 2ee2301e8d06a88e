"""A question, its options and a state as the tokens that Laya reads, one sequence a question, and what was cut for it.

    [CLS] type question: instructions [SEP] ([MASK] option)… [SEP] state [SEP]

Budgets and cuts are those of the laya package. Text is text: a special token's name in it stays plain text, where the
package makes it the token itself; the mask's is a space, as there.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from heedful.decide.question import Choice, Meaning, Question, Score, State, json_text
from heedful.errors import ContextOverflow, UsageError
from heedful.models.laya_config import QUESTION_TYPES, LayaLayout, LayaSequence
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load_laya import LayaMarks

OPTION_TOKENS = 48
"""More of an option are never read."""
_LEAST_ROOM = 16
"""Where options leave less to the instructions, they are cut."""
_LEAST_OPTION = 4
"""An option is cut no further, its mark counted."""
_LEAST_INSTRUCTIONS = 8
_NO, _YES = "no, the statement does not hold", "yes, the statement holds"


@dataclass(frozen=True)
class Dropped:
    """Tokens that a question lost."""

    options: int = 0
    instructions: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        return self.options + self.instructions + self.state

    def __str__(self) -> str:
        parts = {"its options": self.options, "its instructions": self.instructions, "the state": self.state}
        return " and ".join(f"{count:,} tokens of {what}" for what, count in parts.items() if count)


class QuestionTooLong(ContextOverflow):
    """Which question, and in `dropped` what cutting would lose of it. problem: why cutting would not help."""

    def __init__(self, question: str, tokens: int, layout: LayaLayout, dropped: Dropped, problem: str = "") -> None:
        self.question = question
        self.prompt_tokens = tokens
        self.context_len = layout.max_len
        self.dropped = dropped
        cut = "" if problem else " Or allow cutting (Python: truncate=True), which says how many tokens it dropped."
        UsageError.__init__(
            self,
            f"question {question!r:.40} has {tokens:,} tokens with the state: {problem or f'{dropped} do not fit'}; "
            f"the model reads {layout.max_len:,} at {layout.positions:,} positions, of them {layout.head_max_len:,} of "
            f"instructions and options, {OPTION_TOKENS} an option",
            f"Shorten them, or load a model that bears more with more room (Python: max_len=, head_max_len=).{cut}",
        )


@dataclass(frozen=True)
class StateTokens:
    """Of a state, once for all questions."""

    ids: ListLike[int]
    keeps_end: bool
    """A list, as of messages, is cut at its beginning."""


@dataclass(frozen=True)
class PackedQuestion:
    sequence: LayaSequence
    dropped: Dropped


@dataclass(frozen=True)
class LayaPacker:
    """truncate: cut what does not fit, else it is refused."""

    tokenizer: Tokenizer
    marks: LayaMarks
    layout: LayaLayout
    truncate: bool = False

    def state(self, state: State) -> StateTokens:
        return StateTokens(self._ids(json_text(state)), keeps_end=isinstance(state, list | tuple))

    def pack(self, question: Question, state: StateTokens, order: ListLike[int] | None = None) -> PackedQuestion:
        """`order`: of the options' indices, as they are shown; the markers stay in the order of `question.labels`.

        Raises QuestionTooLong.
        """
        order = range(len(question.labels)) if order is None else order
        head, lost = self._head(question, order)
        layout = self.layout
        most = layout.max_len if layout.parallel else min(layout.max_len, layout.positions)
        room = max(0, min(most - len(head.ids), layout.positions - head.num_positions) - 1)
        kept = state.ids[max(0, len(state.ids) - room) :] if state.keeps_end else state.ids[:room]
        over = max(0, len(head.ids) + len(kept) + 1 - most)  # two marks, then tokens of the last option
        dropped = replace(lost, options=lost.options + max(0, over - 2), state=len(state.ids) - len(kept))
        problem = self._misfit(head, most)
        if over and not dropped.total and not self.truncate:
            problem = "its marks do not fit"
        if problem or (dropped.total and not self.truncate):
            tokens = len(head.ids) + lost.total + len(state.ids) + 1
            raise QuestionTooLong(question.name, tokens, layout, dropped, problem)
        markers = [at for _, at in sorted(zip(order, head.markers(), strict=True))]
        kind = QUESTION_TYPES.index(question.type)
        return PackedQuestion(head.sequence([*kept, self.marks.sep], most, markers, kind), dropped)

    def _head(self, question: Question, order: ListLike[int]) -> tuple[_Head, Dropped]:
        """What stands before the state, cut to its budget, and what it lost."""
        marks, budget, texts = self.marks, self.layout.head_max_len, option_texts(question)
        options = [self._ids(f" {texts[at]}") for at in order]
        kept = _kept_options(list(map(len, options)), budget)
        instructions = self._ids(f"{question.type} question: {json_text(question.instructions or '')}")
        room = max(_LEAST_INSTRUCTIONS, budget - sum(kept) - len(kept))
        head = _Head(
            [marks.cls, *instructions[:room], marks.sep],
            [[marks.mask, *ids[:count]] for ids, count in zip(options, kept, strict=True)],
            marks.sep,
            self.layout.parallel,
        )
        return head, Dropped(sum(map(len, options)) - sum(kept), max(0, len(instructions) - room))

    def _misfit(self, head: _Head, most: int) -> str:
        """What cutting as the package cuts does not help against; "" where there is nothing of that kind."""
        markers = head.markers()
        if markers[-1] >= most:
            return f"only {sum(at < most for at in markers)} of its {len(markers)} options fit"
        if self.layout.parallel and head.num_positions >= self.layout.positions:
            return f"its instructions and longest option do not fit into {self.layout.positions:,} positions"
        return ""

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.replace(self.marks.mask_text, " "), add_bos=False)


@dataclass(frozen=True)
class _Head:
    """What stands before the state."""

    question: list[int]
    """Up to the first [SEP]."""
    options: list[list[int]]
    """Each with its mark, as they are shown."""
    sep: int
    parallel: bool

    @cached_property
    def ids(self) -> list[int]:
        return [*self.question, *(token for option in self.options for token in option), self.sep]

    @property
    def num_positions(self) -> int:
        return len(self.question) + max(map(len, self.options)) + 1 if self.parallel else len(self.ids)

    def markers(self) -> list[int]:
        return list(accumulate(map(len, self.options[:-1]), initial=len(self.question)))

    def sequence(self, tail: list[int], most: int, markers: list[int], kind: int) -> LayaSequence:
        """With `tail` after it, cut to `most` tokens."""
        ids = [*self.ids, *tail][:most]
        if not self.parallel:
            return LayaSequence(ids, markers, kind)
        start, after = len(self.question), self.num_positions
        of_options = [start + at for option in self.options for at in range(len(option))]
        positions = [*range(start), *of_options, *range(after - 1, after + len(tail))]
        option_of = [index for index, option in enumerate(self.options, 1) for _ in option]
        options = [*[0] * start, *option_of, *[0] * (1 + len(tail))]
        return LayaSequence(ids, markers, kind, positions[: len(ids)], options[: len(ids)])


def option_texts(question: Question) -> list[str]:
    """As the model reads them, in the order of `question.labels`."""
    if isinstance(question, Choice):
        return [name if meaning in (None, "") else f"{name}: {json_text(meaning)}"
                for name, meaning in question.described().items()]  # fmt: skip
    if isinstance(question, Score):
        return [f"level {level}: {json_text(meaning)}" for level, meaning in enumerate(question.levels)]
    return [f"false: {_text_or(question.false, _NO)}", f"true: {_text_or(question.true, _YES)}"]


def _text_or(meaning: Meaning | None, usual: str) -> str:
    return usual if meaning in (None, "") else json_text(meaning)


def _kept_options(lengths: list[int], head_max_len: int) -> list[int]:
    """How many tokens of each option are kept, without its mark."""
    kept = [min(length, OPTION_TOKENS) for length in lengths]
    if head_max_len - sum(kept) - len(kept) >= _LEAST_ROOM:
        return kept
    each = max(_LEAST_OPTION, (head_max_len - _LEAST_ROOM) // len(kept)) - 1
    return [min(count, each) for count in kept]
