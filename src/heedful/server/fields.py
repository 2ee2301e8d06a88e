"""Fields that the OpenAI-like bodies share, and what they mean to the engine. Unknown fields are ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from heedful.errors import BadParameter
from heedful.request import CachePolicy, GrammarSpec, SamplingParams
from heedful.server.asks import Ask
from heedful.server.failures import HTTPFailure
from heedful.server.settings import ServerSettings

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class HeedfulOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """`heedful` in a body: the policy of this request, in place of the server's, field by field.

    Unknown ones are refused: a misspelt one would silently cost the full price.
    """

    kv: str | None = None
    precise: int | None = None
    window: int | None = None
    sinks: int | None = None
    budget: int | None = None
    prefill: Literal["dense", "sparse"] | None = None
    speculate: bool | None = None
    truncate: bool = False


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    heedful: HeedfulOptions | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """In a stream, a last event with what it cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def sampling_of(fields: SamplingFields, **more: Any) -> SamplingParams:
    """`more`: fields of SamplingParams that the APIs name differently. Raises BadParameter."""
    given = {
        "max_tokens": fields.max_tokens,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": fields.top_p or None,  # 0 means the likeliest token only, as 1e-9 does
        "top_k": None if fields.top_k is None else max(0, fields.top_k),
        "min_p": fields.min_p,
        "seed": None if fields.seed is None else fields.seed % (1 << 63),
        "stop": stops_of(fields.stop),
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "logit_bias": None if fields.logit_bias is None else _biases(fields.logit_bias),
        "ignore_eos": fields.ignore_eos,
        **more,
    }
    if fields.top_p == 0:
        given["top_p"] = 1e-9
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def ask_of(
    fields: SamplingFields,
    settings: ServerSettings,
    salt: str,
    *,
    grammar: GrammarSpec | None = None,
    **more: Any,
) -> Ask:
    options = fields.heedful or HeedfulOptions()
    return Ask(
        sampling=sampling_of(fields, **more),
        policy=policy_of(options, settings.policy),
        salt=salt,
        speculate=settings.speculate if options.speculate is None else options.speculate,
        truncate=options.truncate,
        grammar=grammar,
        stream=bool(fields.stream),
    )


def policy_of(options: HeedfulOptions, default: CachePolicy) -> CachePolicy:
    """Raises HTTPFailure that names the field as the body has it."""
    names = {"kv": "kv_format", "precise": "precise", "window": "window", "sinks": "sinks", "budget": "budget"}
    given = {theirs: getattr(options, ours) for ours, theirs in names.items()}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.prefill is not None:
        changed["sparse_prefill"] = options.prefill == "sparse"
    try:
        return replace(default, **changed)
    except BadParameter as error:
        raise HTTPFailure(400, error.message, field=f"heedful.{error.field}") from error


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MOST_STOPS or any(len(text) > 1000 for text in stops):
        raise HTTPFailure(400, f"at most {MOST_STOPS} stop strings of up to 1,000 characters", field="stop")
    return tuple(text for text in stops if text)


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise HTTPFailure(400, f"{token!r:.40} is not a token id", field="logit_bias")
        if not -100 <= bias <= 100:
            raise HTTPFailure(400, "biases are between -100 and 100", field="logit_bias")
        biases[int(token)] = bias
    return biases


def grammar_of(response_format: dict[str, Any] | None, field: str = "response_format") -> GrammarSpec | None:
    """OpenAI's text, json_object and json_schema, and our regex, choice and lark. Raises HTTPFailure."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object" and "schema" in response_format:  # as llama.cpp has it
        return grammar_of({**response_format, "type": "json_schema"}, field)
    if kind == "json_object":
        return GrammarSpec("json_object", "")
    if kind == "json_schema":
        holder = response_format.get("json_schema", response_format)
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict | bool):
            where = f"{field}.json_schema" if "json_schema" in response_format else field
            raise HTTPFailure(400, "a JSON schema is missing", field=f"{where}.schema")
        return GrammarSpec("json_schema", json.dumps(schema))
    text = response_format.get(kind) if isinstance(kind, str) else None
    if kind in ("regex", "lark") and isinstance(text, str):
        return GrammarSpec(kind, text)
    if kind == "choice" and isinstance(text, list) and all(isinstance(choice, str) for choice in text):
        return GrammarSpec("choice", json.dumps(text))
    known = "text, json_object, json_schema, regex, choice, lark"
    raise HTTPFailure(400, f"must have a type of {known}, and under that name what it is", field=field)


def plain_json(value: Any) -> Any:
    """A msgspec value as dicts and lists."""
    return msgspec.to_builtins(value)
