"""What a decider says: probabilities, and what the contract derives from them. Every decider gives these objects.

Choice, score and confidence are computed from the probabilities that are returned, rounded ones included, by the
reference formulas (system-one-adapter, the same that jevcompat's SPEC 4.5 pins); docs differ among models about what
"confidence" is, so none of a model's own is passed on. A confidence is not a probability of being right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from math import fsum, isfinite
from typing import Any, Protocol

from heedful.decide.question import Choice, Meaning, Noul, Question, Score


class DecisionCost(Protocol):
    """A receipt: what answering cost."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...

    def line(self) -> str: ...


@dataclass(frozen=True)
class ChoiceAnswer:
    probabilities: Mapping[str, float]
    """Option name → probability, in the question's order."""

    @property
    def choice(self) -> str:
        """The likeliest option; of equal ones the first."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        return choice_confidence(list(self.probabilities.values()))

    @property
    def value(self) -> str:
        return self.choice

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "choice",
            "choice": self.choice,
            "probabilities": dict(self.probabilities),
            "confidence": self.confidence,
        }


@dataclass(frozen=True)
class ScoreAnswer:
    probabilities: tuple[float, ...]
    """By level, the lowest first."""
    levels: tuple[Meaning, ...]

    @property
    def score(self) -> float:
        """The expected level, from 0."""
        return fsum(level * p for level, p in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        return score_confidence(self.probabilities)

    @property
    def value(self) -> float:
        return self.score

    @property
    def legend(self) -> dict[str, Meaning]:
        """Level, as a key of JSON → what the question said of it."""
        return {str(level): meaning for level, meaning in enumerate(self.levels)}

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "score",
            "score": self.score,
            "confidence": self.confidence,
            "legend": self.legend,
            "probabilities": {str(level): p for level, p in enumerate(self.probabilities)},
        }


@dataclass(frozen=True)
class NoulAnswer:
    """It has no confidence: the probability is all there is to know."""

    noul: float
    """Probability of yes."""

    @property
    def value(self) -> bool:
        return self.noul > 0.5

    def to_dict(self) -> dict[str, Any]:
        return {"type": "noul", "noul": self.noul}


Answer = ChoiceAnswer | ScoreAnswer | NoulAnswer


@dataclass(frozen=True)
class Answers(Mapping[str, Answer]):
    """One answer a question, by the question's name."""

    model: str
    """What answered: the concrete name behind an alias."""
    answers: Mapping[str, Answer]
    receipt: DecisionCost

    def __getitem__(self, name: str) -> Answer:
        return self.answers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def to_dict(self) -> dict[str, Any]:
        """The body of a System One response. The receipt is no part of that contract, and has its own to_dict()."""
        return {
            "model": self.model,
            "answers": {name: answer.to_dict() for name, answer in self.answers.items()},
            "usage": {"input_tokens": self.receipt.prompt_tokens, "output_tokens": self.receipt.output_tokens},
        }


def answer_to(question: Question, weights: ListLike[float], *, digits: int | None = None) -> Answer:
    """The answer that gives each of `question.labels` its share of `weights`, which are finite and not negative.

    All zero counts as all alike. digits: round probabilities to so many decimals.
    """
    shares = normalised(weights)
    assert len(shares) == len(question.labels), (len(shares), question.labels)
    if digits is not None:
        shares = [round(share, digits) for share in shares]
    if isinstance(question, Noul):
        return NoulAnswer(shares[1])
    if isinstance(question, Score):
        return ScoreAnswer(tuple(shares), tuple(question.levels))
    assert isinstance(question, Choice), question
    return ChoiceAnswer(dict(zip(question.labels, shares, strict=True)))


def normalised(weights: ListLike[float]) -> list[float]:
    assert all(isfinite(w) and w >= 0 for w in weights), list(weights)
    total = fsum(weights)
    return [w / total for w in weights] if total > 0 else [1 / len(weights)] * len(weights)


def choice_confidence(probabilities: ListLike[float]) -> float:
    """(p_max − 1/n) / (1 − 1/n): 0 where all n options are alike, 1 where one is certain, or there is only one."""
    n = len(probabilities)
    return 1.0 if n == 1 else _clamped((max(probabilities) - 1 / n) / (1 - 1 / n))


def score_confidence(probabilities: ListLike[float]) -> float:
    """1 − E|level − k| / D, at least 0: k is the likeliest level, D the mean of |level − (n − 1)/2| over all n."""
    n = len(probabilities)
    if n == 1:
        return 1.0
    mode = max(range(n), key=probabilities.__getitem__)
    distance = fsum(p * abs(level - mode) for level, p in enumerate(probabilities))
    even = fsum(abs(level - (n - 1) / 2) for level in range(n)) / n
    return _clamped(1 - distance / even)


def _clamped(number: float) -> float:
    """Within [0, 1], where rounding may have left it."""
    return min(1.0, max(0.0, number))
