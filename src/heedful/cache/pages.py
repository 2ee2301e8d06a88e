"""The KV cache: pages of token slots, a page table per sequence and layer group. Numpy buffers and ints; no kernels.

Layers with the same window form a *group*: they hold the same positions, so one page stands for one page in each of
the group's layers. An *arena* holds a group's pages of one number format. Behind a group's window pages go back at
once; when a sequence ends all of its pages do. A page that is registered by what it holds (sharing.py) can be in the
tables of several sequences, and stays after them until its memory is needed.

Where a model has layers with a recurrent state, each sequence has a slot for them: a page of a kind of its own, taken,
shared, registered and evicted like others. A state cannot be cut, so one that is registered is never written again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from heedful.cache.policy import (
    DENSE_LAYERS,
    LOCAL_PAGES,
    PAGE_LEN,
    RENEW_STEPS,
    SPARSE_SINKS,
    SPARSE_TAIL,
    SPARSE_WINDOW,
    STRIDE,
    PagePolicy,
    candidate_pages,
    listed_pages,
    resolve,
)
from heedful.cache.prefix import PageName, PrefixIndex
from heedful.errors import CacheFull
from heedful.request import (
    KV_ROW_BYTES,
    CachePolicy,
    Chunk,
    FormatRun,
    KeySpan,
    KVFormat,
    PageMove,
    Selection,
    Sequence,
    StateStep,
)

FREED = -1
"""In a page table: the page lay behind the window and was given back."""
EVICTED_PART = 64
"""When resting pages make room, one part in so many of the memory becomes free at once."""
ARENA_PAGES = 1 << 20
"""A page is arena · ARENA_PAGES + its row in the arena's buffers."""


@dataclass(frozen=True)
class LayerGroup:
    layers: tuple[int, ...]
    window: int | None


def layer_groups(windows: tuple[int | None, ...]) -> tuple[LayerGroup, ...]:
    """Layers by window, in order of first appearance."""
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    return tuple(LayerGroup(tuple(layers), window) for window, layers in by_window.items())


@dataclass(frozen=True)
class PageLayout:
    """What one page of one layer takes, keys and values, and the bounds of its keys, which lie apart."""

    page_bytes: int
    bounds_bytes: int = 0


@dataclass(frozen=True)
class StateLayout:
    """What layers with a recurrent state take of each sequence, whatever its length."""

    layers: int
    layer_bytes: int


STATE_FORMAT = KVFormat("f32", "f32")


def plain_layout(form: KVFormat, kv_heads: int, head_dim: int) -> PageLayout:
    """Rows one after another: keys (PAGE_LEN, K, row bytes), then values, without padding and bounds."""
    row_bytes = KV_ROW_BYTES[form.keys](head_dim) + KV_ROW_BYTES[form.values](head_dim)
    return PageLayout(PAGE_LEN * kv_heads * row_bytes)


class PageArena:
    """A layer group's pages of one format: which are free, and the buffers behind them.

    The memory is reserved, not touched: the system provides it when a page is first written. The lowest free row is
    taken first: touched pages are used again, and a sequence alone has its pages in a row, readable as one block.
    """

    def __init__(self, index: int, group: int, layers: tuple[int, ...], form: KVFormat, layout: PageLayout, rows: int):
        assert rows <= ARENA_PAGES, rows
        self.index = index
        self.group = group
        self.layers = layers
        self.format = form
        self.layout = layout
        self.num_pages = rows
        self.page_bytes = len(layers) * (layout.page_bytes + layout.bounds_bytes)
        """Bytes that one page stands for: keys and values of all the group's layers."""
        self.buffers = {layer: _reserve(rows, layout.page_bytes) for layer in layers}
        self.bounds = {layer: _reserve(rows, layout.bounds_bytes) for layer in layers}
        self.users: Counter[int] = Counter()
        """Page → sequences that have it in their tables."""
        self._used = 0
        self._free: list[int] = []  # a heap of the rows below _used that are free

    def take(self) -> int:
        if self._free:
            row = heapq.heappop(self._free)
        elif self._used < self.num_pages:
            row, self._used = self._used, self._used + 1
        else:
            raise CacheFull(f"all {self.num_pages} pages of {PAGE_LEN} tokens are taken", "Use a shorter context.")
        return self.index * ARENA_PAGES + row

    def page_rows(self, page: int) -> list[memoryview]:
        """The page's bytes in all layers: of each its keys and values, then their bounds."""
        row = page % ARENA_PAGES
        sides = [side[layer] for layer in self.layers for side in (self.buffers, self.bounds)]
        return [memoryview(pages[row]) for pages in sides if pages.shape[1]]

    def give_back(self, page: int) -> None:
        assert page // ARENA_PAGES == self.index, (page, self.index)
        heapq.heappush(self._free, page % ARENA_PAGES)


def _reserve(rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    return np.empty((rows, row_bytes), dtype=np.uint8)


class KVCache:
    """All layer groups' pages. A sequence's page tables change only here."""

    def __init__(
        self,
        windows: tuple[int | None, ...],
        kv_heads: int,
        head_dim: int,
        layout_of: Callable[[KVFormat], PageLayout],
        *,
        default: KVFormat,
        numbers: tuple[str, ...],
        capacity_tokens: int,
        states: StateLayout | None = None,
    ) -> None:
        """`windows` per attention layer. `layout_of`: how the runner lays out a page. `default`: its format where a
        request names none; `numbers`: the number formats that it can hold. `capacity_tokens`: tokens of the default
        format that fit where no layer has a window, over all sequences; `states` lie in the same memory.
        """
        self.groups = layer_groups(windows)
        self.default = default
        self.capacity_tokens = capacity_tokens
        self.arenas: list[PageArena] = []
        """By index; grows when a request brings a format that is new. Runners look at it before each step."""
        self.taken_bytes = 0
        """Of the pages in sequences' tables, each counted once however many sequences read it."""
        self.resting_bytes = 0
        """Of the registered pages that no sequence uses; they go when their memory is needed."""
        self.registered = PrefixIndex()
        self._num_layers = len(windows)
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._layout_of = layout_of
        self.numbers = numbers
        self._arenas: dict[tuple[int, str], PageArena] = {}
        self._policies: dict[CachePolicy, PagePolicy] = {}
        self.budget_bytes = pages_for(capacity_tokens) * sum(
            self._page_bytes(group, default) for group in range(len(self.groups))
        )
        self.states = None if states is None else self._new_state_arena(states)
        """The slots of recurrent states; the arena of a group of its own, behind those of attention layers."""

    def _new_state_arena(self, states: StateLayout) -> PageArena:
        layout = PageLayout(states.layer_bytes)
        rows = max(1, self.budget_bytes // (states.layers * states.layer_bytes))
        arena = PageArena(0, len(self.groups), tuple(range(states.layers)), STATE_FORMAT, layout, rows)
        self._arenas[arena.group, STATE_FORMAT.name] = arena
        self.arenas.append(arena)
        return arena

    @property
    def state_bytes(self) -> int:
        """Of one sequence's recurrent states."""
        return 0 if self.states is None else self.states.page_bytes

    def policy(self, asked: CachePolicy) -> PagePolicy:
        """Raises BadParameter for what this cache cannot do."""
        if asked not in self._policies:
            self._policies[asked] = resolve(asked, self.default, self.numbers, self._head_dim)
        return self._policies[asked]

    def page_bytes_by_group(self, form: KVFormat) -> tuple[int, ...]:
        return tuple(self._page_bytes(group, form) for group in range(len(self.groups)))

    def bytes_needed(self, asked: CachePolicy, longest: int, chunk_len: int) -> int:
        """The most that a sequence of `longest` tokens can hold, computed in chunks of up to `chunk_len`."""
        policy = self.policy(asked)
        most = self.state_bytes
        for index, group in enumerate(self.groups):
            pages, window = pages_for(longest), policy.window_of(group.window)
            if window is not None:
                pages = min(pages, pages_for(window + chunk_len) + 1 + pages_for(policy.sinks_of(group.window)))
            main, precise = self._page_bytes(index, policy.main), self._page_bytes(index, policy.precise)
            newest = min(pages, 1 + (policy.precise_len + STRIDE) // PAGE_LEN)  # and the first page
            most += pages * main + newest * max(0, precise - main)
        return most

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Where a chunk that wants to reach `end` must stop: formats and the reach of queries change at positions that
        do not depend on how a prompt is cut."""
        policy, start = self.policy(sequence.request.policy), sequence.cached_len
        if policy.is_mixed:
            end = min(end, (start // STRIDE + 1) * STRIDE)
        if policy.sinks and policy.window is not None and start < policy.window:
            end = min(end, policy.window)
        if policy.sparse_prefill and start < (tail := sequence.prompt_len - SPARSE_TAIL):
            end = min(end, tail)
        return min([end, *(cut for cut in sequence.state_cuts if start < cut)])

    def plan(self, sequence: Sequence, end: int) -> Chunk:
        """Take pages for positions [cached_len, end) and say what the step must store and read.

        Gives back pages that lie behind the window of every query from cached_len on. Raises CacheFull, and then has
        taken and moved none.
        """
        if not sequence.page_tables:
            sequence.page_tables = [[] for _ in self.groups]
        start, groups, policy = sequence.cached_len, range(len(self.groups)), self.policy(sequence.request.policy)
        assert start < end <= len(sequence.token_ids) + len(sequence.drafts), (start, end, len(sequence.token_ids))
        for index in groups:
            self._free_behind(index, sequence, policy)
        outdated = [self._outdated(index, sequence, policy) if policy.is_mixed else [] for index in groups]
        self._check_room(sequence, end, outdated, policy)
        moves = tuple(self._move(index, sequence, page, policy) for index in groups for page in outdated[index])
        spans = tuple(self._plan_group(index, sequence, end, policy) for index in groups)
        state = None if self.states is None else self._plan_state(self.states, sequence, end)
        return Chunk(sequence, start, end, spans, _logits_from(sequence, end), moves, state)

    def release(self, sequence: Sequence) -> None:
        """Give back every page of the sequence, the last one first: memory is taken from the end of a prefix."""
        for page_index in reversed(range(max(map(len, sequence.page_tables), default=0))):
            for table in sequence.page_tables:
                if page_index < len(table) and table[page_index] != FREED:
                    self._give_back(sequence, table[page_index])
        if sequence.state is not None:
            self._give_back(sequence, sequence.state)
            sequence.state = None
        assert sequence.held_bytes == 0, sequence.held_bytes
        sequence.page_tables = []
        sequence.selected = None
        sequence.cached_len = 0

    def _plan_group(self, index: int, sequence: Sequence, end: int, policy: PagePolicy) -> KeySpan:
        group = self.groups[index]
        table, start = sequence.page_tables[index], sequence.cached_len
        while len(table) * PAGE_LEN < end:
            table.append(self.take(index, policy.precise, sequence))
        window, sinks, distance = _reach(policy, group.window, sequence, end)
        first_key = 0 if window is None else min(max(sinks, start - window + 1), end)
        first_page = min(first_key, start) // PAGE_LEN
        pages = tuple(table[first_page : pages_for(end)])
        assert FREED not in pages, (pages, first_key, start, end)
        return KeySpan(
            layers=group.layers,
            window=window,
            first_key=first_key,
            start=start,
            end=end,
            pages=pages,
            first_page=first_page,
            formats=page_formats(policy, start, end),
            sinks=sinks,
            sink_pages=tuple(table[: pages_for(min(sinks, end))]),
            sink_distance=distance,
            selection=self._selection(policy, group, sequence, end),
        )

    def _plan_state(self, states: PageArena, sequence: Sequence, end: int) -> StateStep:
        """In the sequence's own slot; from one that is kept or shared the state moves on into a new one."""
        before = sequence.state
        assert before is None or sequence.state_len == sequence.cached_len, (sequence.state_len, sequence.cached_len)
        if before is None or self.registered.has_page(before):
            if before is not None:
                self._give_back(sequence, before)  # whoever takes its slot in this step writes after it is read
            sequence.state = self.take(states.group, states.format, sequence)
        assert sequence.state is not None
        sequence.state_len = end
        return StateStep(before, sequence.state)

    def _state_bytes_to_take(self, sequence: Sequence) -> int:
        """Beyond what planning gives back."""
        if self.states is None or (sequence.state is not None and self.states.users[sequence.state] == 1):
            return 0
        return self.state_bytes

    def forget(self, name: PageName) -> None:
        """A registered page that nobody uses becomes free; any other stays."""
        page = self.registered.forget(name)
        if page is not None:
            arena = self.arenas[page // ARENA_PAGES]
            self.resting_bytes -= arena.page_bytes
            arena.give_back(page)

    def _selection(self, policy: PagePolicy, group: LayerGroup, sequence: Sequence, end: int) -> Selection | None:
        start, wanted = sequence.cached_len, policy.budget_pages
        if wanted is None or group.window is not None or start < sequence.prompt_len or end - start > 1:
            return None
        if pages_for(end) <= wanted:
            return None
        renew = start % RENEW_STEPS == 0 or sequence.selected is None
        if sequence.exact_len is None:
            sequence.exact_len = start
        if sequence.selected is None:
            sequence.selected = np.zeros((self._num_layers, self._kv_heads, wanted), dtype=np.int32)
        local_pages = min(LOCAL_PAGES, wanted - 3)  # with the first page and its own, one is left to be chosen
        if not renew:
            return Selection(wanted, local_pages, DENSE_LAYERS, renew, sequence.selected)
        candidates = candidate_pages(pages_for(end), local_pages)
        count = listed_pages(wanted, candidates)
        some = np.empty((self._num_layers, self._kv_heads, count), dtype=np.int32) if count < candidates else None
        return Selection(wanted, local_pages, DENSE_LAYERS, renew, sequence.selected, count, some)

    def _outdated(self, index: int, sequence: Sequence, policy: PagePolicy) -> list[int]:
        """Indices of the pages that are to take the main format before a chunk begins at cached_len."""
        table, main = sequence.page_tables[index], self._arena(index, policy.main).index
        sink_pages, first_kept = kept_pages(policy, self.groups[index].window, sequence.cached_len)
        end = min(_old_end(policy, sequence.cached_len) // PAGE_LEN, len(table))
        found = []
        for first, last in ((max(1, sink_pages, first_kept), end), (1, min(sink_pages, end))):
            page = last - 1
            while page >= first and table[page] // ARENA_PAGES != main:  # before one that is main all are
                found.append(page)
                page -= 1
        return found

    def _move(self, index: int, sequence: Sequence, page: int, policy: PagePolicy) -> PageMove:
        table = sequence.page_tables[index]
        source = table[page]
        self._give_back(sequence, source)  # moves are done before anything is stored
        table[page] = self.take(index, policy.main, sequence)
        return PageMove(index, source, table[page])

    def _free_behind(self, index: int, sequence: Sequence, policy: PagePolicy) -> None:
        table = sequence.page_tables[index]
        sink_pages, first_kept = kept_pages(policy, self.groups[index].window, sequence.cached_len)
        page = min(first_kept, len(table)) - 1
        while page >= sink_pages and table[page] != FREED:  # everything before a freed page is freed already
            self._give_back(sequence, table[page])
            table[page] = FREED
            page -= 1

    def _check_room(self, sequence: Sequence, end: int, outdated: list[list[int]], policy: PagePolicy) -> None:
        """Raises CacheFull where the pages to take do not fit beside those that are taken."""
        needed, num_pages = self._state_bytes_to_take(sequence), pages_for(end)
        for index, table in enumerate(sequence.page_tables):
            if len(table) == num_pages and not outdated[index]:
                continue
            precise = self._arena(index, policy.precise)
            needed += (num_pages - len(table)) * precise.page_bytes
            if outdated[index]:
                own = sum(precise.users[table[page]] == 1 for page in outdated[index])  # others' stay taken
                main_bytes = self._arena(index, policy.main).page_bytes
                needed += len(outdated[index]) * main_bytes - own * precise.page_bytes
        if needed > 0 and self.taken_bytes + needed > self.budget_bytes:
            raise self._full()

    def take(self, group: int, form: KVFormat, sequence: Sequence) -> int:
        """A page that is free, or that rests. Raises CacheFull."""
        arena = self._arena(group, form)
        self._make_room(arena.page_bytes)
        page = arena.take()
        self._add_user(sequence, arena, page)
        return page

    def hold(self, sequence: Sequence, page: int) -> None:
        """Share a registered page, whether it rests or is in use."""
        arena = self.arenas[page // ARENA_PAGES]
        if not arena.users[page]:
            self.registered.wake(page)
            self.resting_bytes -= arena.page_bytes
        self._add_user(sequence, arena, page)

    def _make_room(self, page_bytes: int) -> None:
        """Where there are many, some at once: those that come from the end of a prefix are then taken in order."""
        if self._fits(page_bytes):
            return
        wanted = page_bytes * (1 + self.budget_bytes // EVICTED_PART // page_bytes)
        while not self._fits(wanted) and (page := self.registered.evict()) is not None:
            arena = self.arenas[page // ARENA_PAGES]
            self.resting_bytes -= arena.page_bytes
            arena.give_back(page)
        if not self._fits(page_bytes):
            raise self._full()

    def _fits(self, more_bytes: int) -> bool:
        return self.taken_bytes + self.resting_bytes + more_bytes <= self.budget_bytes

    def _full(self) -> CacheFull:
        return CacheFull(f"all {self.budget_bytes / 1e6:,.3g} MB of the KV cache are taken", "Use a shorter context.")

    def _add_user(self, sequence: Sequence, arena: PageArena, page: int) -> None:
        arena.users[page] += 1
        self.taken_bytes += arena.page_bytes if arena.users[page] == 1 else 0
        sequence.held_bytes += arena.page_bytes

    def _give_back(self, sequence: Sequence, page: int) -> None:
        arena = self.arenas[page // ARENA_PAGES]
        sequence.held_bytes -= arena.page_bytes
        arena.users[page] -= 1
        if arena.users[page]:
            return
        del arena.users[page]
        self.taken_bytes -= arena.page_bytes
        if self.registered.has_page(page):
            self.resting_bytes += arena.page_bytes
            self.registered.rest(page)
        else:
            arena.give_back(page)

    def _arena(self, group: int, form: KVFormat) -> PageArena:
        """Rotated or not makes no difference to a page."""
        arena = self._arenas.get((group, form.name))
        if arena is None:
            layout, layers = self._layout(group, form), self.groups[group].layers
            rows = max(1, self.budget_bytes // self._page_bytes(group, form))
            arena = PageArena(len(self.arenas), group, layers, form, layout, rows)
            self._arenas[group, form.name] = arena
            self.arenas.append(arena)
        return arena

    def _page_bytes(self, group: int, form: KVFormat) -> int:
        layout = self._layout(group, form)
        return len(self.groups[group].layers) * (layout.page_bytes + layout.bounds_bytes)

    def _layout(self, group: int, form: KVFormat) -> PageLayout:
        """Without bounds where the layers have a window: nothing is selected there."""
        layout = self._layout_of(form)
        return layout if self.groups[group].window is None else replace(layout, bounds_bytes=0)


def _logits_from(sequence: Sequence, end: int) -> int:
    """First position of a chunk up to `end` whose logits are wanted; `end` when none are."""
    return min(end, max(sequence.logits_wanted_from, sequence.cached_len))


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_LEN)


def _reach(policy: PagePolicy, own: int | None, sequence: Sequence, end: int) -> tuple[int | None, int, int | None]:
    """(window, sinks, sink distance) of the queries from cached_len to `end`, in layers whose own window is `own`.

    Sinks are none apart while the window holds them: so a window that cannot matter changes no bit.
    """
    if policy.sparse_prefill and own is None and sequence.cached_len < sequence.prompt_len - SPARSE_TAIL:
        return SPARSE_WINDOW, SPARSE_SINKS, None
    window, sinks = policy.window_of(own), policy.sinks_of(own)
    if window is None or not sinks or end <= window:
        return window, 0, None
    return window, sinks, window + sinks - 1


def kept_pages(policy: PagePolicy, own: int | None, start: int) -> tuple[int, int]:
    """(pages of sinks, page that holds the oldest key that a query from `start` on sees besides), in layers whose own
    window is `own`. Those between are not needed any more."""
    window = policy.window_of(own)
    return pages_for(policy.sinks_of(own)), 0 if window is None else max(0, start - window + 1) // PAGE_LEN


def _old_end(policy: PagePolicy, start: int) -> int:
    """Up to here pages are in the main format when a chunk begins at `start`; the first page never is."""
    return max(PAGE_LEN, start // STRIDE * STRIDE - policy.precise_len)


def page_formats(policy: PagePolicy, start: int, end: int) -> tuple[FormatRun, ...]:
    """Of the pages of positions [0, end) when a chunk begins at `start`."""
    if not policy.is_mixed:
        return (FormatRun(policy.main, 0, end),)
    old_end = _old_end(policy, start)
    runs = (
        FormatRun(policy.precise, 0, PAGE_LEN),
        FormatRun(policy.main, PAGE_LEN, old_end),
        FormatRun(policy.precise, old_end, max(end, old_end)),
    )
    return tuple(run for run in runs if run.begin < run.end)
