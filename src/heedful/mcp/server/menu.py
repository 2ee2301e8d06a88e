"""The prompts of heedful's own MCP server: what a person may want of its tools often enough to have it in a menu. Each
makes a message to the model at the other end, which calls the tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from heedful.errors import BadParameter
from heedful.mcp.server.call import Call
from heedful.mcp.server.files import Roots
from heedful.mcp.server.models import ModelNames
from heedful.mcp.server.prompts import PromptArgument, ServerPrompt, Suggest, said
from heedful.mcp.server.work import DEFAULT_TOKENS, MAX_LABELS

if TYPE_CHECKING:
    from mcp_types import PromptMessage

KV_FORMATS = ("f32", "f16", "q8", "q4")
OUTPUT_TOKENS = ("64", "256", "1024", "4096")


def heedful_prompts(names: ModelNames, roots: Roots) -> tuple[ServerPrompt, ...]:
    """summarize_file is there only where a folder may be read."""
    always = (_classify_text(), _price_of_prompt(names))
    return (_summarize_file(names, roots), *always) if roots else always


def _summarize_file(names: ModelNames, roots: Roots) -> ServerPrompt:
    async def messages(given: Mapping[str, str], call: Call) -> Sequence[PromptMessage]:
        arguments = {"path": given["path"].strip()}
        if "focus" in given:
            arguments["focus"] = given["focus"].strip()
        roots.check(arguments["path"])
        return [
            said(
                f"{_call('summarize', arguments)}\nThen give me its quotes, word for word, and what they say together, "
                f"in three to five sentences. The summary is by {names.generator}, which misses and invents things: "
                "where no quote bears it out, leave it out or say that it is unsure."
            )
        ]

    return ServerPrompt(
        "summarize_file",
        "Summarize a file here",
        "What a long text file is about, without its text entering the conversation.",
        (
            PromptArgument("path", "Of the file, from an allowed folder on.", required=True, suggest=roots.names_like),
            PromptArgument("focus", "What it should be about, if not all of the file."),
        ),
        messages,
    )


def _classify_text() -> ServerPrompt:
    async def messages(given: Mapping[str, str], call: Call) -> Sequence[PromptMessage]:
        labels = list(dict.fromkeys(filter(None, map(str.strip, given["labels"].split(",")))))
        if not 2 <= len(labels) <= MAX_LABELS:
            raise BadParameter(
                "labels", f"are {len(labels)}, and must be 2 to {MAX_LABELS}", "Like this: billing, tech, sales"
            )
        arguments = {"texts": [given["text"]], "labels": labels}
        return [
            said(
                f"{_call('classify', arguments)}\nThen tell me the label and its probability; under 0.7 say that it is"
                " unsure, and name the next one too."
            )
        ]

    return ServerPrompt(
        "classify_text",
        "Sort a text into classes",
        "Which of your labels fits a text, with its probability.",
        (
            PromptArgument("text", "What is sorted.", required=True),
            PromptArgument("labels", "The classes, with commas between them: billing, tech, sales", required=True),
        ),
        messages,
    )


def _price_of_prompt(names: ModelNames) -> ServerPrompt:
    async def messages(given: Mapping[str, str], call: Call) -> Sequence[PromptMessage]:
        output = given.get("output_tokens", str(DEFAULT_TOKENS)).strip()
        if not (output.isascii() and output.isdigit() and 1 <= len(output) <= 9 and int(output)):
            raise BadParameter(
                "output_tokens", f"{output[:20]!r} is no number of tokens", f"Like this: {DEFAULT_TOKENS}"
            )
        arguments: dict[str, Any] = {"text": given["text"], "output_tokens": int(output)}
        if "kv" in given:
            if given["kv"] not in KV_FORMATS:
                raise BadParameter("kv", f"{given['kv'][:20]!r} is no format", f"There are: {', '.join(KV_FORMATS)}.")
            arguments["kv"] = given["kv"]
        return [
            said(
                f"{_call('cost', arguments)}\nThen tell me in two sentences how many token visits, bytes of keys and"
                " values and floating-point operations it would take, and whether it fits into the context."
            )
        ]

    return ServerPrompt(
        "price_of_prompt",
        "What a prompt would cost",
        f"Token visits, bytes and operations of a prompt with {names.generator}, before it is sent.",
        (
            PromptArgument("text", "The prompt.", required=True),
            PromptArgument("output_tokens", "Tokens of the answer.", suggest=_among(OUTPUT_TOKENS)),
            PromptArgument("kv", "Format of keys and values.", suggest=_among(KV_FORMATS)),
        ),
        messages,
    )


def _call(tool: str, arguments: Mapping[str, Any]) -> str:
    """An order that a model can hardly get wrong. A text in JSON ends where it ends, and adds no orders of its own."""
    return f"Call heedful's tool {tool} with exactly these arguments: {json.dumps(arguments, ensure_ascii=False)}"


def _among(values: Sequence[str]) -> Suggest:
    return lambda typed: [value for value in values if value.startswith(typed)]
