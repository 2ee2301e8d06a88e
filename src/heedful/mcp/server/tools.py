"""What heedful's own MCP server offers, as records: names, words for whoever chooses among tools, schemas, hints.

What each tool does is work.py's business; how a record becomes the protocol's messages, app.py's.
"""

from __future__ import annotations

from typing import Any

from heedful.mcp.server.call import ServerTool
from heedful.mcp.server.files import MAX_FILE_BYTES, Roots
from heedful.mcp.server.models import ServedModels, names_remote
from heedful.mcp.server.work import (
    MAX_CLASSIFIED,
    MAX_EMBEDDED,
    MAX_LABELS,
    MAX_QUESTIONS,
    MAX_SUMMARY_TOKENS,
    MAX_TOKENS,
    Work,
)

JSON = dict[str, Any]
MAX_CHARS = 1 << 20
"""Of a text in a call; encoding a million takes a second or two."""

INSTRUCTIONS = (
    "Small language models on this machine: cheap, private, quick at small things, and often wrong at big ones. "
    "Give them classification, gates, routing, short rewrites, extraction, similarity and the reading of long files "
    "whose text you do not need yourself. Keep facts, arithmetic, planning and code. Every result carries what it cost "
    "in _meta, under heedful/receipt."
)


def heedful_tools(models: ServedModels, roots: Roots) -> tuple[ServerTool, ...]:
    """summarize is there only where a folder may be read."""
    work = Work(models, roots)
    tools = (_generate(work), _decide(work), _classify(work), _embed(work), _cost(work))
    return (*tools, _summarize(work)) if roots else tools


def _generate(work: Work) -> ServerTool:
    name = work.models.names.generator
    return ServerTool(
        name="generate",
        title="Write text with a local model",
        description=(
            f"Write text with the local model {name}. Use it for short rewrites, drafts, paraphrases, titles, and for "
            "pulling fields out of a text into JSON (json_schema: the answer then has exactly that form), where a "
            "mistake is cheap or easily checked, or where the text must not leave this machine. Not for facts, "
            "arithmetic, several steps of reasoning, or code: do these yourself. It sees only what is in prompt and "
            "system; greedy unless temperature is given, so the same call gives the same text."
        ),
        parameters=_object(
            {
                "prompt": _text("What to do, with all the text that it needs.", MAX_CHARS),
                "system": _text("How to behave: one or two sentences.", MAX_CHARS),
                "max_tokens": _whole("At most so many tokens of answer.", 1, MAX_TOKENS, 256),
                "temperature": {"type": "number", "minimum": 0, "maximum": 2, "default": 0},
                "seed": _whole("With a temperature: the same one gives the same text.", 0, 2**53),
                "stop": _list({"type": "string", "minLength": 1}, "Texts that end the answer.", 0, 8),
                "json_schema": {"type": "object", "description": "A JSON schema that the answer must obey."},
                "truncate": {
                    "type": "boolean",
                    "default": False,
                    "description": "Drop the beginning of a prompt that is too long, instead of refusing it.",
                },
            },
            required=["prompt"],
        ),
        output=_object(
            {
                "text": _text(),
                "json": {"description": "The text as a value, where json_schema was given and it is complete."},
                "finish_reason": {"type": "string", "enum": ["stop", "length"]},
                "prompt_tokens": _count(),
                "output_tokens": _count(),
                "dropped_tokens": _count("Of the prompt, cut off by truncate."),
                "model": _text(),
            },
            required=["text", "finish_reason", "prompt_tokens", "output_tokens", "dropped_tokens", "model"],
        ),
        run=work.generate,
    )


def _decide(work: Work) -> ServerTool:
    example = '{"team": ["billing", "tech"], "urgent": "Is this urgent?", "mood": "calm | annoyed | furious"}'
    return ServerTool(
        name="decide",
        title="Answer typed questions with probabilities",
        description=(
            "Judge one text: for each question the probabilities of its answers, and no prose. Use it to route, gate, "
            "moderate or triage: milliseconds, and a number that can be compared with a threshold. Each question is "
            "yes-or-no (a text), a choice (a list of options, or an object of options with what each means), or a "
            f"scale (a text with | between levels, the lowest first): {example}. Not for answers that have to be "
            "written, nor for what depends on facts outside of the text."
        ),
        parameters=_object(
            {
                "state": {
                    "type": ["string", "object", "array"],
                    "description": "What is judged: a text, or JSON.",
                    "maxLength": MAX_CHARS,
                },
                "questions": {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": MAX_QUESTIONS,
                    "additionalProperties": {"type": ["string", "array", "object"]},
                    "description": "Name → question.",
                },
            },
            required=["state", "questions"],
        ),
        output=_object(
            {
                "answers": {
                    "type": "object",
                    "additionalProperties": _object(
                        {
                            "type": {"type": "string", "enum": ["choice", "score", "noul"]},
                            "choice": _text("The likeliest option."),
                            "score": {"type": "number", "description": "The expected level, from 0."},
                            "noul": {"type": "number", "description": "Probability of yes."},
                            "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
                            "confidence": {"type": "number"},
                            "legend": {"type": "object"},
                        },
                        required=["type"],
                    ),
                },
                "model": _text(),
            },
            required=["answers", "model"],
        ),
        run=work.decide,
        hints=_decider_hints(work),
    )


def _classify(work: Work) -> ServerTool:
    return ServerTool(
        name="classify",
        title="Sort texts into classes",
        description=(
            f"Sort up to {MAX_CLASSIFIED} texts into classes that you name: for each the likeliest label and all "
            "probabilities. Use it for bulk work (tickets, comments, rows) that would fill your context; send the "
            "unsure ones (a low probability) to somebody better. Labels may be a list, or an object of labels with "
            "what each means, which is more exact. Not for classes that need knowledge the texts do not have."
        ),
        parameters=_object(
            {
                "texts": _list(_text(most=MAX_CHARS), "What is sorted.", 1, MAX_CLASSIFIED),
                "labels": {
                    "anyOf": [
                        _list({"type": "string", "minLength": 1}, "Names.", 2, MAX_LABELS),
                        {
                            "type": "object",
                            "minProperties": 2,
                            "maxProperties": MAX_LABELS,
                            "additionalProperties": {"type": "string"},
                        },
                    ],
                    "description": "Labels, or label → what it means.",
                },
                "instructions": _text("What the labels are about, as a question: Which team answers this?"),
            },
            required=["texts", "labels"],
        ),
        output=_object(
            {
                "classes": _list(
                    _object(
                        {
                            "label": _text(),
                            "p": {"type": "number", "description": "Its probability."},
                            "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
                        },
                        required=["label", "p", "probabilities"],
                    ),
                    "One a text, in order.",
                ),
                "model": _text(),
            },
            required=["classes", "model"],
        ),
        run=work.classify,
        hints=_decider_hints(work),
    )


def _embed(work: Work) -> ServerTool:
    return ServerTool(
        name="embed",
        title="Compare texts by meaning",
        description=(
            f"With query: rank up to {MAX_EMBEDDED} texts by how near they are to it in meaning (cosine similarity), "
            "for instance to find the three notes worth reading. Without: the texts' vectors, for a program that keeps "
            "them; do not ask for vectors to read them yourself, they are hundreds of numbers a text."
        ),
        parameters=_object(
            {
                "texts": _list(_text(most=MAX_CHARS), "What is compared.", 1, MAX_EMBEDDED),
                "query": _text("What they are compared with.", MAX_CHARS),
                "top": _whole("With query: only the nearest so many.", 1, MAX_EMBEDDED),
                "truncate": {"type": "boolean", "default": True, "description": "Cut texts that are too long."},
            },
            required=["texts"],
        ),
        output=_object(
            {
                "ranking": _list(
                    _object({"index": _count(), "similarity": {"type": "number"}}, required=["index", "similarity"]),
                    "With query: the nearest first; index counts the texts from 0.",
                ),
                "vectors": _list(_list({"type": "number"}, "Of length 1."), "Without query: one a text."),
                "dimensions": _count(),
                "dropped_tokens": _count("Cut off, of all texts together."),
                "model": _text(),
            },
            required=["dimensions", "dropped_tokens", "model"],
        ),
        run=work.embed,
    )


def _summarize(work: Work) -> ServerTool:
    return ServerTool(
        name="summarize",
        title="Summarize a file here",
        description=(
            f"Summarize a text file under {work.roots.shown} (up to {MAX_FILE_BYTES >> 20} MiB) without its text "
            "entering your context. Use it to find out what a long file is about, or whether it is worth reading. Not "
            f"where each detail counts: {work.models.names.generator} writes the summary, piece by piece, and misses "
            "and invents things; the quotes beside it are the file's own sentences. Read the file yourself then. Takes "
            "seconds to minutes; progress is reported, and it can be cancelled."
        ),
        parameters=_object(
            {
                "path": _text("Of the file: under one of these folders, or relative to one; no .. and no links."),
                "focus": _text("What the summary should be about, if not all of it."),
                "max_tokens": _whole("At most so many tokens of summary.", 16, MAX_SUMMARY_TOKENS, 200),
            },
            required=["path"],
        ),
        output=_object(
            {
                "summary": _text(),
                "quotes": _list(_text(), "Sentences of the file itself, the most central ones, in order."),
                "path": _text(),
                "chars": _count("Of the file."),
                "tokens": _count("Of the file."),
                "pieces": _count("That were read one by one."),
                "finish_reason": {"type": "string", "enum": ["stop", "length"]},
                "model": _text(),
            },
            required=["summary", "quotes", "path", "chars", "tokens", "pieces", "finish_reason", "model"],
        ),
        run=work.summarize,
    )


def _cost(work: Work) -> ServerTool:
    return ServerTool(
        name="cost",
        title="What a call would cost",
        description=(
            f"What a call of generate would cost with {work.models.names.generator}, before it is made: token visits "
            "of attention, bytes of keys and values, floating-point operations, exact, on paper; and what this server "
            "has spent so far. Use it before sending long prompts. Give prompt_tokens, or the text itself."
        ),
        parameters=_object(
            {
                "prompt_tokens": _whole("Tokens of the prompt.", 1, 10**9),
                "text": _text("Instead: the prompt, whose tokens are counted.", MAX_CHARS),
                "output_tokens": _whole("Tokens of the answer.", 1, 10**9, 256),
                "window": _whole("If attention saw only so many newest tokens.", 1, 10**9),
                "sinks": _whole("With window: first tokens that are seen nevertheless.", 0, 10**6),
                "kv": {"type": "string", "enum": ["f32", "f16", "q8", "q4"], "description": "Format of keys, values."},
            },
        ),
        output=_object(
            {
                "model": _text(),
                "prompt_tokens": _count(),
                "output_tokens": _count(),
                "context": _count("Tokens that prompt and answer may have together."),
                "fits": {"type": "boolean"},
                "visits": _count(),
                "dense_visits": _count("What full attention makes."),
                "saved": {"type": "object", "additionalProperties": {"type": "integer"}},
                "kv_bytes_read": _count(),
                "kv_bytes_held": _count(),
                "flops": {"type": "object", "additionalProperties": {"type": "integer"}},
                "spent": {"type": "object", "description": "By this server so far.", "additionalProperties": True},
            },
            required=["model", "prompt_tokens", "output_tokens", "context", "fits", "visits", "dense_visits", "spent"],
        ),
        run=work.cost,
    )


def _decider_hints(work: Work) -> dict[str, bool]:
    return {"read_only": True, "open_world": names_remote(work.models.names.decider)}


def _object(properties: JSON, required: list[str] | None = None) -> JSON:
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**closed, "required": required} if required else closed


def _text(description: str = "", most: int | None = None) -> JSON:
    found: JSON = {"type": "string"}
    found |= {"description": description} if description else {}
    return found if most is None else {**found, "maxLength": most}


def _count(description: str = "") -> JSON:
    return {"type": "integer", "minimum": 0, **({"description": description} if description else {})}


def _whole(description: str, least: int, most: int, default: int | None = None) -> JSON:
    found = {"type": "integer", "minimum": least, "maximum": most, "description": description}
    return found if default is None else {**found, "default": default}


def _list(items: JSON, description: str, least: int = 0, most: int | None = None) -> JSON:
    found: JSON = {"type": "array", "items": items, "description": description}
    found |= {"minItems": least} if least else {}
    return found if most is None else {**found, "maxItems": most}
