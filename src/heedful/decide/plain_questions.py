"""Questions as people write them on a command line.

    "team: Who answers? billing, returns=wants money back, other"      choice
    "anger: How upset is the writer? calm | annoyed | furious"         score, the lowest level first
    "urgent: Is this urgent?"                                          noul

What is between the name and the first question mark is the question; a choice and a score can do without. Names with a
colon, options with a comma or an equals sign are written as JSON: question.questions_from_json.
"""

from __future__ import annotations

from heedful.decide.question import Choice, Noul, Score
from heedful.errors import BadParameter


def choice_from_text(text: str) -> Choice:
    """Raises BadParameter."""
    name, instructions, rest = _parts("choice", text, "team: Who answers? billing, returns=wants money back, other")
    options: dict[str, str | None] = {}
    for part in rest.split(","):
        option, has_meaning, meaning = (piece.strip() for piece in part.partition("="))
        if not option:
            raise BadParameter("choice", f"{text!r:.80} has an option without a name", "Separate options by commas.")
        if option in options:
            raise BadParameter("choice", f"{text!r:.80} has {option!r:.40} twice")
        options[option] = meaning if has_meaning else None
    return Choice(name, options, instructions)


def score_from_text(text: str) -> Score:
    """Raises BadParameter."""
    name, instructions, rest = _parts("score", text, "anger: How upset is the writer? calm | annoyed | furious")
    return Score(name, _levels(text, rest), instructions)


def named_score(name: str, text: str) -> Score:
    """The same where the name stands elsewhere. Raises BadParameter."""
    instructions, rest = _question_and_rest(text.strip())
    return Score(name, _levels(text, rest), instructions)


def noul_from_text(text: str) -> Noul:
    """Raises BadParameter."""
    name, _, question = (part.strip() for part in text.partition(":"))
    if not name or not question:
        raise BadParameter(
            "noul", f"{text!r:.80} has no name or no question", "Write it like this: urgent: Is this urgent?"
        )
    return Noul(name, question)


def _levels(text: str, levels: str) -> list[str]:
    found = [level.strip() for level in levels.split("|")]
    if not all(found):
        raise BadParameter("score", f"{text!r:.80} has an empty level", "Separate levels by |, the lowest first.")
    return found


def _parts(kind: str, text: str, example: str) -> tuple[str, str | None, str]:
    """(name, question, what can be answered)"""
    name, _, rest = (part.strip() for part in text.partition(":"))
    instructions, answers = _question_and_rest(rest)
    if not name or not answers:
        raise BadParameter(kind, f"{text!r:.80} has no name or nothing to answer", f"Write it like this: {example}")
    return name, instructions, answers


def _question_and_rest(text: str) -> tuple[str | None, str]:
    asked, mark, rest = text.partition("?")
    return (f"{asked}?", rest.strip()) if mark else (None, text)
