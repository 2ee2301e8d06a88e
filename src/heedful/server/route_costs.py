"""What engines tell the router's ledger: each answer's receipt, charged to whoever had it opened, finished or not."""

from __future__ import annotations

from heedful.engine.answer import Completion
from heedful.engine.service import Observer
from heedful.request import Request
from heedful.router.ledger import Tab, charged_to


class Charged:
    """An observer between a service and another observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def opened(self) -> object:
        """In the caller's context, which says whose tab it is."""
        tab = charged_to.get()
        if tab is not None:
            tab.entry.opened()
        return tab, self._observer.opened()

    def stepped(self, seconds: float, new_tokens: int, num_sequences: int) -> None:
        self._observer.stepped(seconds, new_tokens, num_sequences)

    def finished(self, completion: Completion, request: Request, opened: object) -> None:
        assert isinstance(opened, tuple), opened
        tab, inner = opened
        self._observer.finished(completion, request, inner)
        if isinstance(tab, Tab):
            tab.entry.add(tab, completion.receipt.to_dict(), was_opened=True)
