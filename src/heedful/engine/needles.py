"""Whether facts in a long text are found again under a policy: a needle in a haystack, alone or among seven others.

After RULER (arXiv:2404.06654): a generated text has "The special magic number for WORD is 1234567." in it; then the
number is asked for, and the answer's first words are given, so that small models do not talk of something else. The
question is part of the prompt, the given words are computed as an answer's are. Everything is made here, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import islice

from heedful.cost.quality import NeedleScore
from heedful.engine.haystack import sentences
from heedful.engine.lockstep import Lockstep
from heedful.engine.policy_quality import EXACT
from heedful.engine.runner import Runner
from heedful.errors import BadParameter
from heedful.request import CachePolicy
from heedful.text.tokenizer import Tokenizer

LENGTHS = (512, 1024, 2048, 4096)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
FACTS = {"single": 1, "multi": 8}
"""Kind → facts in the text."""
ANSWER_TOKENS = 16
CHOICES = 8

_WORDS = (
    "harbour", "lantern", "orchard", "meadow", "violin", "thunder", "pepper", "marble", "feather", "canyon", "velvet",
    "copper", "window", "saddle", "cotton", "island", "turnip", "anchor", "mirror", "castle", "walnut", "needle",
    "button", "kettle", "pillow", "ribbon", "tunnel", "garlic", "hammer", "basket",
)  # fmt: skip
_OPENING = (
    "Some special magic numbers are hidden in the following text. Remember them: one will be asked for afterwards."
)


@dataclass(frozen=True)
class NeedleCase:
    """One haystack with its question."""

    kind: str
    length: int
    """Tokens that were asked for; the prompt has as many or a few less."""
    prompt_ids: tuple[int, ...]
    given_ids: tuple[int, ...]
    """The answer's words up to the value."""
    value: str
    first_ids: tuple[int, ...]
    """The first token of the value, then those of seven others; different ones all."""


@dataclass(frozen=True)
class NeedleOutcome:
    kind: str
    length: int
    found: bool
    """The greedy answer has the value in it."""
    chosen: bool
    """Its first token is the likeliest of the eight."""


def needle_cases(
    tokenizer: Tokenizer,
    *,
    context_len: int,
    lengths: ListLike[int] = LENGTHS,
    depths: ListLike[float] = DEPTHS,
    seed: int = 0,
) -> list[NeedleCase]:
    """One for every kind, length within the context and depth. Raises BadParameter where no length fits."""
    fitting = [length for length in lengths if length <= context_len]
    if not fitting:
        raise BadParameter("needles", f"need {min(lengths)} tokens; the context is {context_len:,}", "Leave them out.")
    return [
        _case(tokenizer, kind, length, depth, random.Random(f"{seed} {kind} {length} {depth}"))
        for kind in FACTS
        for length in fitting
        for depth in depths
    ]


def ask(runner: Runner, case: NeedleCase, policies: ListLike[CachePolicy], tokenizer: Tokenizer) -> list[NeedleOutcome]:
    """One a policy. Raises what Lockstep does."""
    longest = len(case.prompt_ids) + len(case.given_ids) + ANSWER_TOKENS
    with Lockstep(runner, policies, case.prompt_ids, longest=longest) as lockstep:
        logits = lockstep.prefill()
        for token in case.given_ids:
            logits = lockstep.step([token] * len(policies))
        right, *others = case.first_ids
        chosen = [bool(row[right] > row[others].max()) for row in logits]
        answers: list[list[int]] = [[] for _ in policies]
        for _ in range(ANSWER_TOKENS):
            best = [int(token) for token in logits.argmax(axis=-1)]
            for answer, token in zip(answers, best, strict=True):
                answer.append(token)
            texts = [_text(answer, tokenizer) for answer in answers]
            if all(case.value in text for text in texts) or len(answers[0]) == ANSWER_TOKENS:
                break
            logits = lockstep.step(best)
    return [
        NeedleOutcome(case.kind, case.length, case.value in text, choice)
        for text, choice in zip(texts, chosen, strict=True)
    ]


def measure_needles(
    runner: Runner,
    cases: ListLike[NeedleCase],
    policies: ListLike[CachePolicy],
    tokenizer: Tokenizer,
    *,
    progress: Callable[[int], None] = lambda cases: None,
) -> list[NeedleScore]:
    """One a policy. Progress comes to the number of cases."""
    outcomes: list[list[NeedleOutcome]] = []
    for case in cases:
        outcomes.append(ask(runner, case, [EXACT, *policies], tokenizer))
        progress(1)
    exact, *others = zip(*outcomes, strict=True)
    return [score(exact, found) for found in others]


def score(exact: ListLike[NeedleOutcome], found: ListLike[NeedleOutcome]) -> NeedleScore:
    """`exact` and `found`: of the same cases."""
    kinds, lengths = dict.fromkeys(o.kind for o in found), sorted({o.length for o in found})
    return NeedleScore(
        recall=_share(o.found for o in found),
        exact_recall=_share(o.found for o in exact),
        choice=_share(o.chosen for o in found),
        exact_choice=_share(o.chosen for o in exact),
        asked=len(found),
        recall_by_kind={kind: _share(o.found for o in found if o.kind == kind) for kind in kinds},
        recall_by_length={str(n): _share(o.found for o in found if o.length == n) for n in lengths},
    )


def _share(hits: Iterable[bool]) -> float:
    each = list(hits)
    return sum(each) / len(each)


def _text(answer: list[int], tokenizer: Tokenizer) -> str:
    """Of an answer's tokens, up to one that ends it."""
    ended = next((i for i, token in enumerate(answer) if token in tokenizer.eos_ids), len(answer))
    return tokenizer.decode(answer[:ended], continues=True)


def _case(tokenizer: Tokenizer, kind: str, length: int, depth: float, source: random.Random) -> NeedleCase:
    words = _sample(_WORDS, CHOICES, source)
    values = [
        first + "".join(_sample("0123456789", 1, source)[0] for _ in range(6))
        for first in _sample("123456789", CHOICES, source)
    ]
    facts = [_fact(word, value) for word, value in zip(words, values, strict=True)][: FACTS[kind]]
    given, firsts = _answers(tokenizer, words[0], values)
    hay = list(islice(sentences(int(source.random() * 2**32)), length // 8))

    def prompt_of(count: int) -> list[int]:
        return _prompt_ids(tokenizer, " ".join(_planted(hay[:count], facts, depth)), words[0])

    count = _most(len(hay), lambda count: len(prompt_of(count)) + len(given) + ANSWER_TOKENS <= length)
    return NeedleCase(kind, length, tuple(prompt_of(count)), given, values[0], firsts)


def _fact(word: str, value: str) -> str:
    return f"The special magic number for {word} is {value}."


def _planted(hay: list[str], facts: list[str], depth: float) -> list[str]:
    """The first fact at `depth` of the hay, the others evenly spread."""
    others = facts[1:]
    places = [(depth, facts[0]), *(((i + 0.5) / len(others), fact) for i, fact in enumerate(others))]
    text = list(hay)
    for share, fact in sorted(places, reverse=True):
        text.insert(round(share * len(hay)), fact)
    return text


def _prompt_ids(tokenizer: Tokenizer, text: str, word: str) -> list[int]:
    question = f"What is the special magic number for {word} that the text mentions?"
    if (template := tokenizer.chat_template) is not None:
        message = {"role": "user", "content": f"{_OPENING}\n\n{text}\n\n{question}"}
        return tokenizer.encode_segments(template.render([message]))
    return tokenizer.encode(f"{_OPENING}\n\n{text}\n\nQuestion: {question}\nAnswer:")


def _answers(tokenizer: Tokenizer, word: str, values: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens that all answers begin with, and the one that follows in each. Their values differ in the first digit."""
    space = "" if tokenizer.chat_template is not None else " "
    answers = [tokenizer.encode(space + _fact(word, value), add_bos=False) for value in values]
    common = next(i for i, tokens in enumerate(zip(*answers, strict=False)) if len(set(tokens)) > 1)
    firsts = tuple(answer[common] for answer in answers)
    assert len(set(firsts)) == len(values), firsts
    return tuple(answers[0][:common]), firsts


def _sample(choices: ListLike[str], count: int, source: random.Random) -> list[str]:
    """Different ones; by random() alone, whose values are the same in every version of Python."""
    return sorted(choices, key=lambda _: source.random())[:count]


def _most(upper: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `upper` that fits, where smaller ones fit too; 0 is taken for granted."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
