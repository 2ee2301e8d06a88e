"""What a blank of a prompt, or of a resource's template, may be filled in with, for programs that complete what their
user types."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from heedful.mcp.server.prompts import ServerPrompt
from heedful.mcp.server.resources import ResourceSource

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp_types import CompleteRequestParams, CompleteResult

MOST_SUGGESTED = 100
"""The protocol's limit."""


def add_completion(server: Server[Any], prompts: Iterable[ServerPrompt], sources: Sequence[ResourceSource]) -> None:
    from mcp_types import CompleteRequestParams, CompleteResult, Completion, PromptReference

    blanks = {(prompt.name, each.name): each.suggest for prompt in prompts for each in prompt.arguments}

    def suggested(params: CompleteRequestParams) -> list[str]:
        name, typed = params.argument.name, params.argument.value
        if isinstance(params.ref, PromptReference):
            suggest = blanks.get((params.ref.name, name))
            return list(suggest(typed)) if suggest else []
        return [each for source in sources for each in source.suggest(params.ref.uri, name, typed)]

    async def complete(context: ServerRequestContext[Any, Any], params: CompleteRequestParams) -> CompleteResult:
        found = await asyncio.to_thread(suggested, params)
        values = found[:MOST_SUGGESTED]
        return CompleteResult(
            completion=Completion(values=values, total=len(found), has_more=len(found) > MOST_SUGGESTED)
        )

    server.add_request_handler("completion/complete", CompleteRequestParams, complete)
