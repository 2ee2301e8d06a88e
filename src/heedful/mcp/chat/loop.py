"""A chat with tools: for each message the few tools that fit, a call by rules where they are sure, by the model's
likelihoods or its own writing where not, the result back as data, and an answer.

    chat = ToolChat(llm, mcp_thread, ask=ask_the_person)
    turn = chat.turn([{"role": "user", "content": "What time is it in Tokyo?"}])
    for event in turn: ...                     # Calling, Called, Said, Noted
    turn.text, turn.receipt.line()

Synchronous, as LLM is: servers are in the other thread of McpThread, and this one waits for them in small pieces, so
that `stopped` is heard and a question is asked where the person is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heedful.engine.llm import LLM
from heedful.mcp.calls.call import ToolCaller
from heedful.mcp.calls.handles import HandleStore
from heedful.mcp.calls.results import Shower
from heedful.mcp.catalogue.catalog import CatalogTool, Catalogue
from heedful.mcp.catalogue.select import Selection, ToolSelector
from heedful.mcp.chat.prompt import ModelPrompt
from heedful.mcp.chat.turn import Limits, ToolTurn
from heedful.mcp.client.desk import Desk
from heedful.mcp.delegation.delegate import Delegate

if TYPE_CHECKING:
    from heedful.engine.embedder import Embedder
    from heedful.mcp.client.blocking import McpThread

Ask = Callable[[CatalogTool, Mapping[str, Any], str], bool]
"""Whether the person wants this call; in the thread of who iterates over the turn."""


class ToolChat:
    """Of one conversation. `embedder`: makes the encoder that helps to choose, when first needed; None: words alone.
    `ask`: for calls that the policy asks about; None: they are refused. `desk`: has servers' own questions too."""

    def __init__(
        self,
        llm: LLM,
        tools: McpThread,
        *,
        embedder: Callable[[], Embedder | None] = lambda: None,
        ask: Ask | None = None,
        desk: Desk | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.llm = llm
        self.tools = tools
        self.limits = limits or Limits()
        self.store = HandleStore()
        self.last: Selection | None = None
        """What was chosen for the newest turn."""
        self._make_embedder = embedder
        self.desk = desk or Desk()
        self.shower = Shower(self.store, self.limits.result, self.count)
        self.caller = ToolCaller(
            tools.manager, self.shower, approve=None if ask is None else partial(self._approve, ask)
        )
        self.delegate = Delegate(self.caller, tools.manager.config)
        self._selector: ToolSelector | None = None
        self._embedder: Embedder | None = None
        self._has_embedder = False
        self.recent: list[str] = []
        self.prompt = ModelPrompt(llm)

    def count(self, text: str) -> int:
        return len(self.llm.tokenizer.encode(text, add_bos=False))

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stopped: Callable[[], bool] = lambda: False,
        tick: Callable[[str], None] = lambda text: None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> ToolTurn:
        """The answer to a conversation whose last message is the user's; iterate over it. `tick`: is told what is
        waited for, now and then. Raises as LLM.stream_chat does, and McpError where no server can be used."""
        return ToolTurn(self, messages, stopped, tick, adapter, sampling)

    def start_over(self) -> None:
        """A new conversation: no tool was used in it yet. Handles stay readable."""
        self.recent.clear()
        self.last = None

    def catalogue(self) -> Catalogue:
        return self.tools.catalogue()

    def selector(self, catalogue: Catalogue) -> ToolSelector:
        if self._selector is None or self._selector.catalogue is not catalogue:
            if not self._has_embedder:
                self._embedder, self._has_embedder = self._make_embedder(), True
            self._selector = ToolSelector(catalogue, self.count, embedder=self._embedder)
        return self._selector

    async def _approve(self, ask: Ask, tool: CatalogTool, arguments: Mapping[str, Any], why: str) -> bool:
        """In the servers' thread: puts the question to the other one."""
        return await self.desk.put(lambda: ask(tool, arguments, why))
