"""Everything that `heedful mcp serve` offers, in one server: tools, prompts and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from heedful.mcp.server.app import make_server
from heedful.mcp.server.call import ServerTool
from heedful.mcp.server.file_resources import FileResources
from heedful.mcp.server.files import Roots
from heedful.mcp.server.menu import heedful_prompts
from heedful.mcp.server.models import ServedModels
from heedful.mcp.server.prompts import ServerPrompt
from heedful.mcp.server.resources import ResourceSource
from heedful.mcp.server.tools import heedful_tools

if TYPE_CHECKING:
    from mcp.server import Server


def heedful_server(
    models: ServedModels,
    roots: Roots,
    *,
    more_tools: Sequence[ServerTool] = (),
    more_prompts: Sequence[ServerPrompt] = (),
    more_resources: Sequence[ResourceSource] = (),
) -> Server[Any]:
    """Files, and what is about them, only where there is a root."""
    files = [FileResources(roots)] if roots else []
    return make_server(
        [*heedful_tools(models, roots), *more_tools],
        [*heedful_prompts(models.names, roots), *more_prompts],
        [*files, *more_resources],
    )
