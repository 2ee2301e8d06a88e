"""POST /v1/decisions, as OpenAI has it: predicates, choices and scores about an input, from the same deciders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from heedful.decide.answer import Answer, ChoiceAnswer, NoulAnswer
from heedful.decide.question import (
    MOST_LEVELS,
    MOST_OPTIONS,
    Choice,
    Meaning,
    Noul,
    Question,
    Score,
    State,
    check_state,
)
from heedful.errors import BadParameter, ContextOverflow
from heedful.server.bodies import JSON, json_response, read_body, until_hangup
from heedful.server.deciders import MOST_QUESTIONS, Decision, decide, decider_name
from heedful.server.decision_input import content_of, state_of_input
from heedful.server.failures import HTTPFailure, fields_named
from heedful.server.state import state_of

Instructions = str | list[dict[str, Any]]


class Predicate(Struct, tag_field="type", tag="predicate", kw_only=True):
    instructions: Instructions
    name: str | None = None


class Option(Struct, kw_only=True):
    value: str | bool
    description: str | None = None


class ChoiceOf(Struct, tag_field="type", tag="choice", kw_only=True):
    instructions: Instructions
    choices: Annotated[list[Option], Meta(min_length=1, max_length=MOST_OPTIONS)]
    name: str | None = None


class Level(Struct, kw_only=True):
    label: str
    description: str | None = None


class ScoreOf(Struct, tag_field="type", tag="score", kw_only=True):
    instructions: Instructions
    levels: Annotated[list[Level], Meta(min_length=1, max_length=MOST_LEVELS)]
    name: str | None = None


Asked = Predicate | ChoiceOf | ScoreOf


class DecisionsBody(Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    questions: Annotated[list[Asked], Meta(min_length=1, max_length=MOST_QUESTIONS)]
    model: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


async def create_decision(request: Request) -> Response:
    body = await read_body(request, DecisionsBody)
    judged, questions = await asyncio.to_thread(_read, body)
    server = state_of(request)
    name = decider_name(server.settings, body.model)
    salt = f"{request.state.salt}\n{body.prompt_cache_key}" if body.prompt_cache_key else request.state.salt
    try:
        decision = await until_hangup(request, decide(server, name, judged, questions, salt))
    except ContextOverflow as error:
        message = f"{error.message}; nothing is cut here"
        raise HTTPFailure(400, message, field="input", code="context_length_exceeded") from error
    answers = [_answer(asked, decision.answers[str(at)]) for at, asked in enumerate(body.questions)]
    return json_response({"model": decision.model, "answers": answers, "usage": _usage(decision)})


def _read(body: DecisionsBody) -> tuple[State, tuple[Question, ...]]:
    """Raises HTTPFailure."""
    with fields_named({"state": "input"}):
        judged = state_of_input(body.input)
        check_state(judged)
    return judged, tuple(_question(at, asked) for at, asked in enumerate(body.questions))


def _question(at: int, asked: Asked) -> Question:
    """Named by its place, since names need not be unique. Raises HTTPFailure."""
    where = f"questions[{at}]"
    try:
        instructions = content_of(asked.instructions, f"{where}.instructions")
        if isinstance(asked, Predicate):
            return Noul(str(at), instructions)
        if isinstance(asked, ScoreOf):
            return Score(str(at), [_level(level) for level in asked.levels], instructions)
        return Choice(str(at), _options(asked.choices, f"{where}.choices"), instructions)
    except BadParameter as error:
        field = f"{where}.{error.field.partition('.')[2]}"
        raise HTTPFailure(400, error.message.removeprefix(f"{error.field}: "), field=field) from error


def _level(level: Level) -> Meaning:
    return level.label if level.description is None else f"{level.label}: {level.description}"


def _options(choices: list[Option], where: str) -> dict[str, str | None]:
    """A text and a boolean of the same letters are two values."""
    values = [(type(choice.value), choice.value) for choice in choices]
    if len(set(values)) < len(values):
        raise HTTPFailure(400, "two have the same value", field=where)
    return {name: choice.description for name, choice in zip(_names(choices), choices, strict=True)}


def _names(choices: list[Option]) -> list[str]:
    """What a decider is shown of each value."""
    texts = {choice.value for choice in choices if isinstance(choice.value, str)}
    names = []
    for choice in choices:
        name = choice.value if isinstance(choice.value, str) else str(choice.value).lower()
        while not isinstance(choice.value, str) and name in texts:
            name = f"({name})"
        names.append(name)
    return names


def _answer(asked: Asked, answer: Answer) -> JSON:
    if isinstance(answer, NoulAnswer):
        return {"type": "predicate", "name": asked.name, "probability": answer.noul}
    if isinstance(answer, ChoiceAnswer):
        assert isinstance(asked, ChoiceOf), asked
        by_name: Mapping[str, str | bool] = {
            name: choice.value for name, choice in zip(_names(asked.choices), asked.choices, strict=True)
        }
        shares = [{"value": by_name[name], "probability": p} for name, p in answer.probabilities.items()]
        chosen = {"choice": by_name[answer.choice], "confidence": answer.confidence, "probabilities": shares}
        return {"type": "choice", "name": asked.name, **chosen}
    assert isinstance(asked, ScoreOf), asked
    levels = [
        {"label": level.label, "value": value, "probability": p}
        for value, (level, p) in enumerate(zip(asked.levels, answer.probabilities, strict=True))
    ]
    found = {"score": answer.score, "confidence": answer.confidence, "probabilities": levels}
    return {"type": "score", "name": asked.name, **found}


def _usage(decision: Decision) -> JSON:
    cached = decision.receipt.get("cached_tokens", 0)
    return {
        "input_tokens": decision.input_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": decision.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": decision.input_tokens + decision.output_tokens,
        "heedful": decision.receipt,
    }
