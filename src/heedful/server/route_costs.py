"""What engines tell the router's ledger: each answer's receipt, charged to whoever had it opened, finished or not."""

from __future__ import annotations

from heedful.engine.answer import Completion
from heedful.engine.service import PassingOn
from heedful.request import Request
from heedful.router.ledger import Tab, charged_to


class Charged(PassingOn):
    def opened(self) -> object:
        """In the caller's context, which says whose tab it is."""
        tab = charged_to.get()
        if tab is not None:
            tab.entry.opened()
        return tab, super().opened()

    def finished(self, completion: Completion, request: Request, opened: object) -> None:
        assert isinstance(opened, tuple), opened
        tab, inner = opened
        super().finished(completion, request, inner)
        if isinstance(tab, Tab):
            tab.entry.add(tab, completion.receipt.to_dict(), was_opened=True)
