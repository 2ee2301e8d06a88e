"""The state that a Kev read last, kept so that questions asked of it later need not read it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.engine.torch_branches import SharedState


class StateCache:
    """At most one state of at most `max_bytes`, found by exactly its token ids. A base of Qwen3-0.6B's shape takes
    229 kB a token. Several models may share one; each finds its own alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: tuple[object, tuple[int, ...], SharedState] | None = None

    def find(self, owner: object, ids: Sequence[int]) -> SharedState | None:
        kept = self._kept
        return kept[2] if kept is not None and kept[0] is owner and kept[1] == tuple(ids) else None

    def keep(self, owner: object, ids: Sequence[int], state: SharedState) -> None:
        """Instead of the one before; one that is too large is not kept."""
        fits = state.num_bytes <= self.max_bytes
        self._kept = (owner, tuple(ids), state) if fits else None
