"""Decisions for the APIs that ask for them: which decider, its turn, and what the answers cost. Knows no wire format.

Questions go to a decider in groups, so that one request holds neither its thread nor memory for long after its caller
is gone. Each is judged from the state and itself alone: groups change no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

from heedful.cost.receipt import summed
from heedful.decide.answer import Answer, Answers
from heedful.decide.chat_prompt import prompt_text
from heedful.decide.decider import DecisionModel
from heedful.decide.likelihood import Likelihood
from heedful.decide.question import Question, State, json_text
from heedful.errors import ContextOverflow, EngineStopped, UnknownModel
from heedful.server.asks import MOST_TEXT_CHARS
from heedful.server.failures import TOO_MANY_TOKENS, HTTPFailure
from heedful.server.pool import Answering
from heedful.server.service_reader import MOST_OPEN, ServiceReader
from heedful.server.settings import ServerSettings
from heedful.server.state import ServerState

ALIASES = ("jev-latest", "jev-preview")
"""Of the default decider: what clients of System One ask for where nobody tells them otherwise."""
_PINNED = re.compile(r"jev-1\.13(\.[0-9]{1,4})?")
MOST_QUESTIONS = 400
GROUP_LABELS = 128
"""Options and levels of a group of questions, unless one alone has more."""


@dataclass(frozen=True)
class Decision:
    model: str
    """The decider's own name in this server."""
    answers: Mapping[str, Answer]
    receipt: Mapping[str, Any]
    """As JSON shows it, summed over the groups."""
    input_tokens: int
    output_tokens: int


def decider_name(settings: ServerSettings, asked: str | None) -> str:
    """Raises UnknownModel."""
    known = dict.fromkeys((*settings.deciders, *settings.models, *settings.adapters))
    if asked in known:
        return asked
    if asked is None or asked in ALIASES or _PINNED.fullmatch(asked):
        return next(iter(known))
    raise UnknownModel(asked, [], f"Deciders here: {', '.join((*known, *ALIASES))}.")


async def decide(server: ServerState, name: str, state: State, questions: tuple[Question, ...], salt: str) -> Decision:
    """`name`: as decider_name has it. `questions` are checked ones; `salt`: states are shared among decisions of the
    same one. When the caller is cancelled, what waits leaves the queue, and what runs ends after its group.

    Raises QueueFull, EngineStopped, ContextOverflow, and what loading and the decider do.
    """
    async with server.pool.lease_decider(name) as hosted:
        reader = None if hosted.service is None else ServiceReader(hosted.service, _most_open(server.settings))
        decider = hosted.decider if reader is None else _likelihood(hosted, reader, salt)
        assert decider is not None, name
        try:
            parts = await hosted.decisions.run(lambda goes: _decided(decider, state, questions, goes))
        finally:
            if reader is not None:
                reader.stop()
    decision = _whole(name, parts)
    server.metrics.decided(name, [question.type for question in questions], decision.receipt)
    return decision


def _most_open(settings: ServerSettings) -> int:
    """A share of the queue: others find room in it too."""
    return max(1, min(MOST_OPEN, settings.most_waiting // 4))


def _likelihood(hosted: Answering, reader: ServiceReader, salt: str) -> Likelihood:
    return Likelihood(
        hosted.llm,
        calibration=hosted.calibration,
        cache_salt=salt,
        read_prompts=reader,
        adapter=hosted.adapter,
    )


def _decided(
    decider: DecisionModel, state: State, questions: tuple[Question, ...], goes: Callable[[], bool]
) -> list[Answers]:
    """In the decider's thread. Raises EngineStopped where it does not go on."""
    chars = len(json_text(state)) + sum(len(json_text(question.to_dict())) for question in questions)
    if chars > MOST_TEXT_CHARS:
        message = f"state and questions have {chars:,} characters; at most {MOST_TEXT_CHARS:,} are read"
        raise HTTPFailure(413, message, code=TOO_MANY_TOKENS)
    if isinstance(decider, Likelihood):
        _check_fits(decider, state, questions)
    parts: list[Answers] = []
    for group in groups_of(questions):
        if not goes():
            raise EngineStopped
        parts.append(decider.decide(state, group))
    return parts


def _check_fits(decider: Likelihood, state: State, questions: tuple[Question, ...]) -> None:
    """Before every option is encoded behind all of it. Raises ContextOverflow."""
    llm = decider.llm
    longest = llm.engine.longest(decider.policy)
    text = json_text(state)
    for question in questions:
        prompt = llm.tokenizer.encode(prompt_text(text, question, range(len(question.labels))))
        if len(prompt) > longest:
            raise ContextOverflow(len(prompt), longest)


def groups_of(questions: ListLike[Question]) -> Iterator[tuple[Question, ...]]:
    """In order; each at most GROUP_LABELS labels, or one question."""
    group: list[Question] = []
    labels = 0
    for question in questions:
        count = len(question.labels)
        if group and labels + count > GROUP_LABELS:
            yield tuple(group)
            group, labels = [], 0
        group.append(question)
        labels += count
    yield tuple(group)


def _whole(name: str, parts: ListLike[Answers]) -> Decision:
    return Decision(
        name,
        {key: answer for part in parts for key, answer in part.answers.items()},
        summed([part.receipt.to_dict() for part in parts]),
        sum(part.receipt.prompt_tokens for part in parts),
        sum(part.receipt.output_tokens for part in parts),
    )
