"""Prompts of an MCP server of ours: texts that a person picks from a menu of their program, with blanks to fill in.

What heedful's own say is menu.py's; here is what a prompt is and how the protocol asks for one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heedful.errors import BadParameter, HeedfulError
from heedful.mcp.server.call import Call
from heedful.mcp.server.questions import NeedsInput

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp_types import (
        GetPromptRequestParams,
        GetPromptResult,
        InputRequiredResult,
        ListPromptsResult,
        PaginatedRequestParams,
        Prompt,
        PromptMessage,
    )

MAX_ARGUMENT_CHARS = 1 << 20

Suggest = Callable[[str], Sequence[str]]
"""What a blank may be filled in with, by what was typed so far; the best first."""


@dataclass(frozen=True)
class PromptArgument:
    name: str
    description: str
    required: bool = False
    suggest: Suggest | None = None


@dataclass(frozen=True)
class ServerPrompt:
    name: str
    title: str
    description: str
    """For the person who picks it."""
    arguments: tuple[PromptArgument, ...]
    messages: Callable[[Mapping[str, str], Call], Awaitable[Sequence[PromptMessage]]]
    """Called with the arguments that are required, and others of its own. Raises HeedfulError for what the caller can
    mend."""


def add_prompts(server: Server[Any], prompts: Iterable[ServerPrompt]) -> None:
    from mcp_types import GetPromptRequestParams, GetPromptResult, ListPromptsResult, PaginatedRequestParams

    by_name = {prompt.name: prompt for prompt in prompts}
    listed = [_listed(prompt) for prompt in by_name.values()]

    async def list_prompts(
        context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListPromptsResult:
        return ListPromptsResult(prompts=listed)

    async def get_prompt(
        context: ServerRequestContext[Any, Any], params: GetPromptRequestParams
    ) -> GetPromptResult | InputRequiredResult:
        prompt = _found(by_name, params.name)
        try:
            messages = await prompt.messages(_checked(prompt, params.arguments or {}), Call.of(context, params))
        except NeedsInput as needed:
            return needed.result()
        except HeedfulError as error:
            raise invalid(error) from None
        return GetPromptResult(description=prompt.description, messages=list(messages))

    server.add_request_handler("prompts/list", PaginatedRequestParams, list_prompts)
    server.add_request_handler("prompts/get", GetPromptRequestParams, get_prompt)


def invalid(error: HeedfulError, data: Any = None) -> Exception:
    """The SDK's MCPError for what a caller can mend, where the protocol has no place for it in a result."""
    from mcp import MCPError
    from mcp_types import INVALID_PARAMS

    return MCPError(INVALID_PARAMS, " ".join(f"{error.message}. {error.remedy}".split()), data)


def _found(prompts: Mapping[str, ServerPrompt], name: str) -> ServerPrompt:
    from mcp import MCPError
    from mcp_types import INVALID_PARAMS

    if name not in prompts:
        raise MCPError(INVALID_PARAMS, f"Unknown prompt: {name[:80]!r}. There are: {', '.join(prompts)}")
    return prompts[name]


def _checked(prompt: ServerPrompt, given: Mapping[str, str]) -> dict[str, str]:
    """Without blanks that were left empty, as forms of clients send them. Raises BadParameter."""
    known = {argument.name: argument for argument in prompt.arguments}
    for name, text in given.items():
        if name not in known:
            raise BadParameter(
                name[:80], f"is no argument of {prompt.name}", f"There are: {', '.join(known) or 'none'}."
            )
        if len(text) > MAX_ARGUMENT_CHARS:
            raise BadParameter(name, f"has over {MAX_ARGUMENT_CHARS:,} characters")
    filled = {name: text for name, text in given.items() if text.strip()}
    for argument in prompt.arguments:
        if argument.required and argument.name not in filled:
            raise BadParameter(argument.name, f"is needed by {prompt.name}", argument.description)
    return filled


def _listed(prompt: ServerPrompt) -> Prompt:
    from mcp_types import Prompt
    from mcp_types import PromptArgument as Argument

    return Prompt(
        name=prompt.name,
        title=prompt.title,
        description=prompt.description,
        arguments=[
            Argument(name=each.name, description=each.description, required=each.required) for each in prompt.arguments
        ],
    )


def said(text: str) -> PromptMessage:
    """By the user."""
    from mcp_types import PromptMessage, TextContent

    return PromptMessage(role="user", content=TextContent(type="text", text=text))
