"""What a request's CachePolicy means for one model: formats by page, windows by layer, what is selected. Ints only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heedful.errors import BadParameter
from heedful.request import CachePolicy, KVFormat

PAGE_LEN = 64  # token slots; reference measurements found 64 twice as fast to select from as 16
STRIDE = 512
"""Where 4-bit rows are asked for, pages change format when the sequence crosses a multiple of it, and no chunk does
cross one: so every query sees the same formats however the prompt was cut."""
PRECISE_LEN = 128
LOCAL_PAGES = 1
DENSE_LAYERS = 1
RENEW_STEPS = 4
"""A selection is renewed at positions that are multiples of it."""
LISTED_PAGES = 64
"""Pages whose keys are read when a selection is renewed, at the least: all there are up to 4,200 tokens."""
SPARSE_SINKS, SPARSE_WINDOW, SPARSE_TAIL = 128, 1920, 100
"""Tri-shape prefill (arXiv:2412.10319): first tokens, newest tokens, and how many last ones of the prompt see all."""


@dataclass(frozen=True)
class PagePolicy:
    """A resolved CachePolicy."""

    main: KVFormat
    precise: KVFormat
    """Of the first page and the newest ones; `main` unless that is 4-bit."""
    precise_len: int
    """Newest tokens that stay precise when a multiple of STRIDE is crossed, whole pages; 0: all pages are `main`."""
    window: int | None = None
    sinks: int = 0
    budget_pages: int | None = None
    sparse_prefill: bool = False

    @property
    def is_mixed(self) -> bool:
        return self.precise_len > 0

    def window_of(self, own: int | None) -> int | None:
        """Of a layer whose own window is `own`."""
        if own is None or self.window is None:
            return self.window if own is None else own
        return min(own, self.window)

    def sinks_of(self, own: int | None) -> int:
        """A layer's own window stays exactly as it was trained: only layers that the policy narrows see sinks."""
        return self.sinks if self.window is not None and (own is None or own > self.window) else 0


def resolve(policy: CachePolicy, default: KVFormat, numbers: tuple[str, ...], head_dim: int) -> PagePolicy:
    """`default`: the runner's own format; `numbers`: what it can hold. Raises BadParameter."""
    asked = KVFormat.parse(policy.kv_format) if policy.kv_format else default
    for number in (asked.keys, asked.values):
        if number not in numbers:
            raise BadParameter("kv", f"{number} is not a format of this runner", f"Choose from: {', '.join(numbers)}.")
    main = replace(asked, rotated=is_rotated(asked, head_dim))
    precise_len = _precise_len(policy, main)
    precise = KVFormat(_at_least_8_bits(main.keys), _at_least_8_bits(main.values), main.rotated)
    return PagePolicy(
        main=main,
        precise=precise if precise_len else main,
        precise_len=precise_len,
        window=policy.window,
        sinks=policy.sinks,
        budget_pages=None if policy.budget is None else -(-policy.budget // PAGE_LEN),
        sparse_prefill=policy.sparse_prefill,
    )


def candidate_pages(pages: int, local_pages: int) -> int:
    """Of a sequence's pages those that may be chosen: not the first, the newest full ones and the query's own."""
    return pages - 2 - local_pages


def listed_pages(budget_pages: int, candidates: int) -> int:
    """Of the candidates those whose keys are read when a selection is renewed."""
    return min(candidates, max(LISTED_PAGES, 2 * budget_pages))


def _at_least_8_bits(number: str) -> str:
    return "q8" if number == "q4" else number


def _precise_len(policy: CachePolicy, main: KVFormat) -> int:
    if "q4" not in (main.keys, main.values):
        return 0
    wanted = PRECISE_LEN if policy.precise is None else policy.precise
    return -(-wanted // PAGE_LEN) * PAGE_LEN


def rotation_block(head_dim: int) -> int:
    """Channels that one Hadamard matrix turns: the largest power of two that divides the head; below 32 none are."""
    block = head_dim & -head_dim
    return block if block >= 32 else 1


def is_rotated(form: KVFormat, head_dim: int) -> bool:
    """Where it pays; docs/policies.md has what was measured."""
    return rotation_block(head_dim) > 1 and not {form.keys, form.values}.isdisjoint({"q8", "q4"})
