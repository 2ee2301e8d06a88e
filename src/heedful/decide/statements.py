"""A question as statements that may hold: for models that judge how well a text suits a state."""

from __future__ import annotations

from dataclasses import dataclass

from heedful.decide.question import Choice, Noul, Question, json_text
from heedful.errors import ContextOverflow, UsageError

SHORTER_TEXT = (
    "Shorten the text, or allow cutting it with --truncate (Python: truncate=True), which keeps its beginning and says "
    "how many tokens it dropped."
)
SHORTER_LABELS = "Ask with fewer or shorter labels: these are never cut."


class TooLongToJudge(ContextOverflow):
    """A text, or what it is judged by alone, is longer than the model takes; both numbers are in it."""

    def __init__(self, what: str, tokens: int, max_tokens: int, remedy: str) -> None:
        self.prompt_tokens, self.context_len = tokens, max_tokens
        UsageError.__init__(self, f"{what} has {tokens:,} tokens and the model takes at most {max_tokens:,}", remedy)


@dataclass(frozen=True)
class Statements:
    """One of several holds, one a label, in the order of `question.labels`; or one holds or does not."""

    texts: tuple[str, ...]
    instructions: str
    """What they answer; "" where nothing is asked, or where that is the statement itself."""
    alone: str = ""
    """The label that the one statement means; "" where there is one for each label."""

    def sides(self, holds: float, fails: float) -> tuple[float, float]:
        """Logits of the one statement, in the order of a noul's labels."""
        return (holds, fails) if self.alone == "false" else (fails, holds)


def statements_of(question: Question) -> Statements:
    """A choice's options with their descriptions; a score's levels. A noul's two sides where both are described, else
    one statement: the description of the side that has one, or the instructions. A noul that says nothing is yes or no.
    """
    instructions = _text(question.instructions)
    if isinstance(question, Choice):
        described = question.described().items()
        return Statements(tuple(f"{name}: {_text(what)}" if what else name for name, what in described), instructions)
    if not isinstance(question, Noul):
        return Statements(tuple(map(json_text, question.levels)), instructions)
    false, true = _text(question.false), _text(question.true)
    if false and true:
        return Statements((false, true), instructions)
    if false or true:
        return Statements((false or true,), instructions, alone="false" if false else "true")
    return Statements((instructions,), "", alone="true") if instructions else Statements(("no", "yes"), "")


def _text(meaning: object) -> str:
    """Nothing and what is empty are the same."""
    return json_text(meaning) if meaning else ""
