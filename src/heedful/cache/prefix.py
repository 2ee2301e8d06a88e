"""Shared prefixes: full pages by what they hold, so that a later request with the same beginning reads them again.

Pages are named by a chain over their tokens: h_0 = sha256(root), h_i = sha256(h_(i-1), tokens of page i). The root
holds the request's salt, what is in its adapter, and all of its policy that changes what a prompt's rows become. So a
name says everything that a row depends on, and equal names mean equal bytes. Nothing here knows of page tables;
sharing.py does.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heedful.cache.policy import PAGE_LEN, PagePolicy

SERVED_KEPT = 64
"""Token sequences that are remembered to say why a prefix was not reused; their pages may be gone."""

Tokens = npt.NDArray[np.int32]


class PageName(NamedTuple):
    """What a page holds: the same bytes wherever it is found."""

    block: bytes
    """32 bytes: the chain's hash up to and with the page's tokens."""
    group: int
    format: str


class PageRun(NamedTuple):
    """Pages [begin, end) of a sequence, by index, in one layer group and number format."""

    group: int
    format: str
    begin: int
    end: int


def root_of(salt: str, policy: PagePolicy, adapter_sha256: str = "") -> bytes:
    """Of the chains of requests with this salt, policy and adapter. What is chosen while decoding changes no prompt's
    rows."""
    fields = asdict(policy)
    del fields["budget_pages"]
    key = [salt, fields, *([adapter_sha256] if adapter_sha256 else [])]
    return sha256(json.dumps(key, sort_keys=True).encode()).digest()


@dataclass
class Chain:
    """The names of one sequence's full pages, and how many of them have been registered."""

    root: bytes
    blocks: list[bytes] = field(default_factory=list)
    """By page index; at least those that are registered."""
    num_registered: int = 0
    """Pages, from the first one on."""

    def grow(self, token_ids: list[int], num_pages: int) -> None:
        """Name the pages up to `num_pages`."""
        begin = len(self.blocks)
        tokens = np.array(token_ids[begin * PAGE_LEN : num_pages * PAGE_LEN], dtype="<i4").reshape(-1, PAGE_LEN)
        for page_tokens in tokens:
            before = self.blocks[-1] if self.blocks else self.root
            self.blocks.append(sha256(before + page_tokens.tobytes()).digest())


class PrefixIndex:
    """Registered pages by name, and which of them nobody uses."""

    def __init__(self) -> None:
        self._pages: dict[PageName, int] = {}
        self._names: dict[int, PageName] = {}
        self.resting: OrderedDict[int, None] = OrderedDict()
        """Registered pages that nobody uses, the one to go first at the front."""

    def page(self, name: PageName) -> int | None:
        return self._pages.get(name)

    def add(self, name: PageName, page: int) -> bool:
        """Whether it is new; a page that holds the same already stays the registered one."""
        if (known := self._pages.get(name)) is not None:
            if known in self.resting:
                self.resting.move_to_end(known)
            return False
        assert page not in self._names, (page, name)
        self._pages[name] = page
        self._names[page] = name
        return True

    def has_page(self, page: int) -> bool:
        return page in self._names

    def rest(self, page: int) -> None:
        """Nobody uses the page now; it goes after all that rest already."""
        self.resting[page] = None

    def wake(self, page: int) -> None:
        del self.resting[page]

    def touch(self, name: PageName) -> None:
        """If its page rests, it goes after all that do."""
        page = self._pages.get(name)
        if page is not None and page in self.resting:
            self.resting.move_to_end(page)

    def forget(self, name: PageName) -> int | None:
        """Forget a page that rests; None where it does not, or is not registered."""
        page = self._pages.get(name)
        if page is None or page not in self.resting:
            return None
        del self.resting[page], self._pages[name], self._names[page]
        return page

    def evict(self) -> int | None:
        """Forget the page that has rested longest; None when every page is in use."""
        if not self.resting:
            return None
        page, _ = self.resting.popitem(last=False)
        del self._pages[self._names.pop(page)]
        return page


def longest_prefix(
    most_pages: int, read_at: Callable[[int], list[PageRun]], has: Callable[[int, str, int], bool]
) -> int:
    """The most pages, up to `most_pages`, after which a sequence can go on.

    `read_at(n)`: the pages that a chunk behind the first n pages would read. `has(group, format, page index)`.
    """
    missing: tuple[int, str, int] | None = None
    for num_pages in range(most_pages, 0, -1):
        runs = read_at(num_pages)
        if missing is not None and any(run[:2] == missing[:2] and run.begin <= missing[2] < run.end for run in runs):
            continue
        missing = _first_missing(runs, has)
        if missing is None:
            return num_pages
    return 0


def _first_missing(runs: Iterable[PageRun], has: Callable[[int, str, int], bool]) -> tuple[int, str, int] | None:
    for group, form, begin, end in runs:
        for page_index in range(end - 1, begin - 1, -1):
            if not has(group, form, page_index):
                return group, form, page_index
    return None


@dataclass(frozen=True)
class PrefixReport:
    """What a request found of its prompt, and why not more."""

    cached_tokens: int
    diverged_at: int | None
    """Position of the first token that no earlier sequence had there; None where tokens were not what ended it."""
    reason: str
    """"none_before": nothing was served before; "other_key": only requests with other salts were, and nobody is told
    what they asked; "policy_differs": it was served under another policy; "adapter_differs": with another adapter, or
    with none; "tokens_differ"; "earlier_ended": an earlier sequence is the beginning of this one; "page_border": all of
    it is known, and whole pages without the last token were reused; "evicted"; "not_yet_computed": the sequence that
    has it still runs; "no_state_kept": in a model with recurrent states, none was kept, or is any more, where the
    tokens part; "not_recorded": pages from disk, or from so long ago that their tokens are forgotten."""


@dataclass
class Served:
    """Tokens whose pages were computed, as far as they can be shared."""

    salt: str
    root: bytes
    tokens: Tokens
    adapter_sha256: str = ""
    is_running: bool = True

    def end(self, tokens: Tokens, shared_len: int) -> None:
        """`shared_len` of the tokens can be reused; the rest of a page that was not filled is remembered too."""
        self.tokens = tokens[: shared_len + PAGE_LEN - 1]
        self.is_running = False

    def common_len(self, prompt: Tokens) -> int:
        shorter = min(len(prompt), len(self.tokens))
        differs = self.tokens[:shorter] != prompt[:shorter]
        first = int(differs.argmax()) if shorter else 0
        return first if shorter and differs[first] else shorter


class ServedRecord:
    """The last sequences that were served. Explains; decides nothing."""

    def __init__(self) -> None:
        self._served: deque[Served] = deque(maxlen=SERVED_KEPT)

    def begin(self, salt: str, root: bytes, prompt: Tokens, adapter_sha256: str = "") -> Served:
        served = Served(salt, root, prompt, adapter_sha256)
        self._served.append(served)
        return served

    def common_len(self, salt: str, root: bytes, prompt: Tokens) -> int:
        """The most tokens at the prompt's beginning that a sequence with this salt and policy had too."""
        same = (served for served in self._served if served.salt == salt and served.root == root)
        return max((served.common_len(prompt) for served in same), default=0)

    def explain(
        self,
        salt: str,
        root: bytes,
        prompt: Tokens,
        cached_len: int,
        most: int,
        *,
        adapter_sha256: str = "",
        has_states: bool = False,
    ) -> PrefixReport:
        """`most`: tokens that could be reused at best, were all pages there; and states, where the model has them."""
        diverged_at, reason = self._why(salt, root, prompt, cached_len, most, adapter_sha256)
        if has_states and reason in ("evicted", "not_yet_computed"):
            reason = "no_state_kept"
        return PrefixReport(cached_len, diverged_at, reason)

    def _why(
        self, salt: str, root: bytes, prompt: Tokens, cached_len: int, most: int, adapter_sha256: str
    ) -> tuple[int | None, str]:
        mine = [(served.common_len(prompt), served) for served in self._served if served.salt == salt]
        same = max((pair for pair in mine if pair[1].root == root), key=_common, default=None)
        other = max((pair for pair in mine if pair[1].root != root), key=_common, default=None)
        reached = 0 if same is None else _whole_pages(min(same[0], most))
        if other is not None and _whole_pages(min(other[0], most)) > max(reached, cached_len):
            return None, "policy_differs" if other[1].adapter_sha256 == adapter_sha256 else "adapter_differs"
        if cached_len == _whole_pages(most) and cached_len:
            return None, "page_border"
        if cached_len > reached:
            return None, "not_recorded"
        if same is None:
            return None, "other_key" if self._served and not mine else "none_before"
        common, served = same
        if reached > cached_len:
            return None, "not_yet_computed" if served.is_running else "evicted"
        if common >= most:
            return None, "page_border"
        return common, "earlier_ended" if common == len(served.tokens) else "tokens_differ"


def _common(pair: tuple[int, Served]) -> int:
    return pair[0]


def _whole_pages(tokens: int) -> int:
    return tokens // PAGE_LEN * PAGE_LEN
