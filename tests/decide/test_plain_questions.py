"""Questions as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from heedful.decide import Choice, Noul, Score
from heedful.decide.plain_questions import choice_from_text, noul_from_text, score_from_text
from heedful.errors import BadParameter


def test_choices() -> None:
    without = choice_from_text("team: billing, returns=wants money back, other")
    assert without == Choice("team", {"billing": None, "returns": "wants money back", "other": None})
    asked = choice_from_text("  team :Who answers?billing,other = a=b ")
    assert asked == Choice("team", {"billing": None, "other": "a=b"}, "Who answers?")


def test_scores_and_nouls() -> None:
    assert score_from_text("anger: calm | annoyed, a bit |furious") == Score(
        "anger", ["calm", "annoyed, a bit", "furious"]
    )
    assert score_from_text("anger: How upset? calm | furious") == Score("anger", ["calm", "furious"], "How upset?")
    assert noul_from_text("urgent: Is this urgent: yes or no?") == Noul("urgent", "Is this urgent: yes or no?")


@pytest.mark.parametrize(
    ("read", "text", "problem"),
    [
        (choice_from_text, "billing, other", "no name or nothing"),
        (choice_from_text, "team: Who answers?", "no name or nothing"),
        (choice_from_text, ": a, b", "no name or nothing"),
        (choice_from_text, "team: a,,b", "without a name"),
        (choice_from_text, "team: a, =b", "without a name"),
        (choice_from_text, "team: a, a=b", "'a' twice"),
        (choice_from_text, "team: " + ",".join(map(str, range(256))), "1 to 255"),
        (score_from_text, "anger: low | | high", "empty level"),
        (score_from_text, "anger: " + "|".join("abcdefghijk"), "1 to 10"),
        (noul_from_text, "urgent", "no name or no question"),
        (noul_from_text, "urgent:  ", "no name or no question"),
    ],
)
def test_what_is_refused(read: Callable[[str], Any], text: str, problem: str) -> None:
    with pytest.raises(BadParameter, match=problem):
        read(text)
