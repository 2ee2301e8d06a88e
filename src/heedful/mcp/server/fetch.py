"""Models that a tool needs and that are not on this disk yet: the person at the other end is asked, where that can be,
before they are fetched; where it cannot, they are fetched, as whoever started the server has named them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from heedful.decide.load import BUILT_IN
from heedful.errors import McpDenied
from heedful.mcp.server.call import Call
from heedful.mcp.server.models import names_remote
from heedful.mcp.server.questions import agreed
from heedful.weights.model_cache import find_model
from heedful.weights.progress import bytes_text
from heedful.weights.source_names import Alias, LocalPath, parse_source

BUILT_IN_ENCODER = "minilm"
"""On which the decider that comes with the package stands."""


@dataclass(frozen=True)
class Missing:
    name: str
    size_bytes: int | None
    """None where it is not known before."""

    @property
    def shown(self) -> str:
        return f"{self.name} ({'of unknown size' if self.size_bytes is None else bytes_text(self.size_bytes)})"


class Fetching:
    """For one server."""

    def __init__(self) -> None:
        self._here: set[str] = set()

    async def agree(self, call: Call, *names: str) -> None:
        """Returns when these models may be loaded, as deciders and others are named. Raises McpDenied where the person
        does not want them fetched, and SourceError."""
        missing = [each for name in dict.fromkeys(names) if (each := await asyncio.to_thread(self._missing, name))]
        if not missing:
            return
        shown = " and ".join(each.shown for each in missing)
        if call.asker.can_ask("elicitation"):
            message = f"heedful needs the model {shown}, which is not on this machine yet. Fetch it now, and keep it?"
            if not await agreed(call.asker, "fetch", message):
                wanted = "; ".join(f"heedful pull {each.name}" for each in missing)
                raise McpDenied(f"{shown} is needed, and the user does not want it fetched", f"To fetch it: {wanted}")
        await call.log(f"fetching {shown}; the call takes longer this once")

    def _missing(self, name: str) -> Missing | None:
        """None too where it cannot be fetched without more: what is wrong is said when it is loaded."""
        name = BUILT_IN_ENCODER if name == BUILT_IN else name
        if name in self._here or names_remote(name):
            return None
        source = parse_source(name)
        if isinstance(source, LocalPath) or find_model(name) is not None:
            self._here.add(name)
            return None
        if isinstance(source, Alias):
            return None if source.terms else Missing(name, source.size_bytes)
        return Missing(name, None)
