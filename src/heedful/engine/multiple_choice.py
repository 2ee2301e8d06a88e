"""Multiple choice by likelihood: which of several continuations a model finds likeliest, and how often that is right.

    rows = [choice_row(value) for value in json_values]
    score = measure_choices(llm, rows)              # score.acc.share, score.acc_norm.share, score.chance

Conventions are lm-evaluation-harness's: a choice follows its context after a space; `acc` takes the choice with the
highest summed log-likelihood, `acc_norm` that with the highest one per byte of the choice. A question is asked as
"Question: … Answer:", a context stands as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Any

from heedful.cost.ledger import Ledger
from heedful.engine.llm import LLM
from heedful.engine.prompt_scores import common_len, read_prompts, scored_request, summed_logprob
from heedful.errors import BadParameter, ContextOverflow
from heedful.text.tokenizer import Tokenizer

MOST_CHOICES = 256
_TOGETHER = 16
"""Choices that are read side by side, or those of one row where it has more."""
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class ChoiceRow:
    context: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right one."""


@dataclass(frozen=True)
class ChoiceIds:
    """Token ids of each choice behind its context, and from which on they are the choice's own."""

    texts: tuple[tuple[int, ...], ...]
    scored_from: tuple[int, ...]

    @property
    def shared_len(self) -> int:
        """Ids that all begin with, none of them scored."""
        return min(common_len(self.texts), *self.scored_from)


@dataclass(frozen=True)
class Share:
    """A share of rows, with the interval of 95 % that its number of rows allows (Wilson's score)."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class ChoiceScore:
    rows: int
    acc: Share
    acc_norm: Share
    chance: float
    """What guessing gets: the mean of 1 / choices."""


def choice_row(value: Any) -> ChoiceRow:
    """Of {"question" or "context": text, "choices": [text, …], "answer": index or text}. Raises BadParameter."""
    if not isinstance(value, Mapping):
        raise BadParameter("row", "must be a JSON object")
    asked = [key for key in ("question", "context") if key in value]
    if len(asked) != 1 or not isinstance(value[asked[0]], str):
        raise BadParameter("row", "needs a question or a context, one of them, as a text")
    choices = value.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise BadParameter("choices", "must be a list of texts")
    if not 2 <= len(choices) <= MOST_CHOICES:
        raise BadParameter("choices", f"are {len(choices)}; 2 to {MOST_CHOICES} are possible")
    if len(set(choices)) < len(choices):
        raise BadParameter("choices", "has the same text twice")
    text = value[asked[0]]
    context = text if asked == ["context"] else f"Question: {text}\nAnswer:"
    return ChoiceRow(context, tuple(choices), _answer(value.get("answer"), choices))


def parse_choices(lines: Iterable[tuple[int, bytes]], option: str) -> list[ChoiceRow]:
    """`lines`: (number, JSON). Raises BadParameter for `option`, naming the line."""
    rows = []
    for number, line in lines:
        try:
            rows.append(choice_row(json.loads(line.decode("utf-8-sig"))))
        except BadParameter as error:
            raise BadParameter(option, f"line {number:,}: {error.message}", error.remedy) from None
        except (ValueError, RecursionError) as error:
            raise BadParameter(option, f"line {number:,}: is not JSON: {str(error)[:100]}") from None
    if not rows:
        raise BadParameter(option, "holds no rows", 'Every line is {"question": …, "choices": […], "answer": …}.')
    return rows


def _answer(answer: Any, choices: list[str]) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise BadParameter("answer", f"{answer!r:.40} is neither one of the choices nor the index of one")


def choice_ids(tokenizer: Tokenizer, row: ChoiceRow) -> ChoiceIds:
    """White space at the end of the context goes to the choices, as a model has learned to begin words.

    Raises BadParameter where nothing stands before a choice, not even a token that begins texts.
    """
    context = row.context.rstrip()
    between = row.context[len(context) :] or (" " if context else "")
    alone = tokenizer.encode(context)
    texts = tuple(tuple(tokenizer.encode(f"{context}{between}{choice}")) for choice in row.choices)
    scored_from = tuple(common_len([alone, ids]) for ids in texts)
    if min(scored_from) == 0:
        raise BadParameter("context", "is empty, and this model has no token that begins texts", "Give a context.")
    return ChoiceIds(texts, scored_from)


def measure_choices(
    llm: LLM, rows: ListLike[ChoiceRow], *, progress: Callable[[int], None] = lambda rows: None
) -> tuple[ChoiceScore, Ledger]:
    """And what it cost. Choices share the computation of their context. Raises ContextOverflow, naming the row."""
    ledger, sums = Ledger(), list[list[float]]()
    for group in _groups(rows):
        ids = [choice_ids(llm.tokenizer, row) for row in group]
        _require_room(llm, ids, first_row=len(sums) + 1)
        asked = [
            scored_request(text, scored_from, policy=llm.policy)
            for of_row in ids
            for text, scored_from in zip(of_row.texts, of_row.scored_from, strict=True)
        ]
        found = read_prompts(llm, asked)
        for _, receipt in found:
            ledger.add(receipt)
        in_turn = (summed_logprob(sequence) for sequence, _ in found)
        sums += [[next(in_turn) for _ in row.choices] for row in group]
        progress(len(group))
    return score_choices(rows, sums), ledger


def _groups(rows: ListLike[ChoiceRow]) -> Iterator[list[ChoiceRow]]:
    group: list[ChoiceRow] = []
    for row in rows:
        if group and sum(len(each.choices) for each in [*group, row]) > _TOGETHER:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _require_room(llm: LLM, ids: ListLike[ChoiceIds], first_row: int) -> None:
    for number, of_row in enumerate(ids, first_row):
        longest = max(map(len, of_row.texts))
        if longest > llm.context_len:
            overflow = ContextOverflow(longest, llm.context_len)
            overflow.message = f"row {number:,}: {overflow.message}"
            raise overflow


def score_choices(rows: ListLike[ChoiceRow], sums: ListLike[ListLike[float]]) -> ChoiceScore:
    """`sums`: of each row its choices' log-likelihoods. Of choices that are equal the first is taken."""
    assert len(rows) == len(sums) > 0, (len(rows), len(sums))
    right = right_norm = 0
    for row, of_row in zip(rows, sums, strict=True):
        per_byte = [value / len(choice.encode()) for value, choice in zip(of_row, row.choices, strict=True)]
        right += of_row.index(max(of_row)) == row.answer
        right_norm += per_byte.index(max(per_byte)) == row.answer
    chance = fsum(1 / len(row.choices) for row in rows) / len(rows)
    return ChoiceScore(len(rows), share_of(right, len(rows)), share_of(right_norm, len(rows)), chance)


def share_of(count: int, total: int) -> Share:
    """Wilson's interval (J. Am. Stat. Assoc. 22, 1927): it stays within 0 and 1, and is honest for few rows."""
    share, z2 = count / total, _Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    reach = _Z95 / (1 + z2 / total) * sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return Share(share, max(0.0, middle - reach), min(1.0, middle + reach))
