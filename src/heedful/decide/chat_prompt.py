"""A question as a chat model is asked it: the prompt, the answers it may give, in which orders options are shown."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from heedful.decide.question import Choice, Noul, Question, Score, json_text


def prompt_text(state: str, question: Question, order: ListLike[int]) -> str:
    """The state, then the question, then the options in this order of their indices."""
    instructions = [] if question.instructions is None else [json_text(question.instructions)]
    answers, meanings = answers_of(question), _meanings(question)
    lines = [f"- {answers[at]}: {json_text(meanings[at])}" if meanings[at] else f"- {answers[at]}" for at in order]
    how = {"choice": "one of these options", "score": "the number of one of these levels", "noul": "yes or no"}
    asked = [*instructions, *lines, f"Answer with {how[question.type]} and nothing else."]
    return "\n".join([state, "", *asked])


def answers_of(question: Question) -> tuple[str, ...]:
    """What the model is to say, by label."""
    return ("no", "yes") if isinstance(question, Noul) else question.labels


def orders_of(question: Question, count: int) -> list[list[int]]:
    """At most `count` orders of the options' indices: evenly spaced rotations; of a scale the two directions."""
    n = len(question.labels)
    straight = list(range(n))
    if isinstance(question, Score):
        return [straight, straight[::-1]][: min(count, n)]
    count = min(count, n)
    starts = [i * n // count for i in range(count)]
    return [straight[start:] + straight[:start] for start in starts]


def _meanings(question: Question) -> list[object]:
    if isinstance(question, Choice):
        return list(question.described().values())
    return list(question.levels) if isinstance(question, Score) else [question.false, question.true]
