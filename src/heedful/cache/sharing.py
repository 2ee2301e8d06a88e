"""Which pages sequences share: finds a new one the longest prefix that is there, registers what running ones complete.

    report = sharing.begin(sequence)    # page tables filled, cached_len set
    sharing.register(sequence)          # before each plan: what earlier steps have completed
    sharing.note_moves(chunk)           # after it: what the planned step will write in another format
    sharing.end(sequence)               # pages go back; registered ones rest until their memory is needed

Cold or from a prefix, a sequence computes the same bits: a page is found only in the format that it would have at this
point, and only when nothing but its name decided what is in it.

A recurrent state is there for the position where it was kept and no other. Kept are those at the last whole page of a
prompt, where a prompt parts from earlier or waiting ones, and at the newest whole page of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from heedful.cache.disk import DiskTier
from heedful.cache.pages import ARENA_PAGES, FREED, STATE_FORMAT, KVCache, kept_pages, page_formats
from heedful.cache.policy import PAGE_LEN, SPARSE_TAIL, PagePolicy
from heedful.cache.prefix import Chain, PageName, PageRun, PrefixReport, Served, ServedRecord, longest_prefix, root_of
from heedful.request import Chunk, KVFormat, Sequence


@dataclass
class _Sharer:
    """A running sequence's part in it."""

    chain: Chain
    served: Served
    moved: list[tuple[int, int]] = field(default_factory=list)
    """(group, page index) of pages that the planned step writes in another format."""
    moved_at: int = 0
    """cached_len when it was planned."""
    states: list[PageName] = field(default_factory=list)
    """Recurrent states that it began from or left, by position."""
    newest_state: PageName | None = None
    """Of its answer's whole pages; an earlier one is forgotten."""


class PrefixSharing:
    """`disk`: where registered pages are written too, and found by later processes."""

    def __init__(self, kv_cache: KVCache, disk: DiskTier | None = None) -> None:
        self.disk = disk
        self._cache = kv_cache
        self._record = ServedRecord()
        self._sharers: dict[Sequence, _Sharer] = {}

    def begin(self, sequence: Sequence) -> PrefixReport:
        """Give a new sequence the pages of the longest prefix that is there; sets its cached_len."""
        assert not sequence.page_tables, sequence.cached_len
        policy, salt = self._cache.policy(sequence.request.policy), sequence.request.cache_salt
        adapter = sequence.adapter_sha256
        known = sequence.logits_wanted_from  # logits are of tokens that are computed; beyond the prompt when preempted
        most = _shareable_len(policy, known, sequence.prompt_len)
        chain = Chain(root_of(salt, policy, adapter))
        chain.grow(sequence.token_ids, most // PAGE_LEN)
        refused: set[PageName] = set()
        while not self._adopt(sequence, chain, self._longest(chain, policy, refused), refused):
            pass  # a page on disk was bad or is gone: look again without it
        chain.num_registered = sequence.cached_len // PAGE_LEN
        prompt = np.array(sequence.token_ids, dtype=np.int32)
        has_states = self._cache.states is not None
        report = self._record.explain(
            salt, chain.root, prompt, sequence.cached_len, most, adapter_sha256=adapter, has_states=has_states
        )
        if has_states:
            parted_at = min(most, self._record.common_len(salt, chain.root, prompt))
            sequence.state_cuts = tuple(length // PAGE_LEN * PAGE_LEN for length in (parted_at, most))
        sharer = self._sharers[sequence] = _Sharer(chain, self._record.begin(salt, chain.root, prompt, adapter))
        if sequence.state is not None:
            sharer.states.append(self._state_name(chain, chain.num_registered))
        return report

    def expect(self, sequence: Sequence, position: int) -> None:
        """Another sequence waits to begin where this running one will be, and needs its state there."""
        if self._cache.states is not None and position not in sequence.state_cuts:
            sequence.state_cuts += (position,)

    def register(self, sequence: Sequence) -> None:
        """Name the pages that the steps so far have completed, and those that they have converted."""
        sharer = self._sharers[sequence]
        end = self._shareable_pages(sequence)
        first, chain = sharer.chain.num_registered, sharer.chain
        if end > first:
            chain.grow(sequence.token_ids, end)
            chain.num_registered = end
            for page_index in range(first, end):
                for group in range(len(sequence.page_tables)):
                    self._name(sequence, chain, group, page_index)
        if sequence.state is not None and sequence.state_len == sequence.cached_len == end * PAGE_LEN:
            self._keep_state(sequence, sharer, end)
        if sharer.moved and sequence.cached_len > sharer.moved_at:  # else the step was planned and never ran
            for group, page_index in sharer.moved:
                if page_index < end:
                    self._name(sequence, chain, group, page_index)
        sharer.moved.clear()

    def note_moves(self, chunk: Chunk) -> None:
        if chunk.moves:
            sharer, tables = self._sharers[chunk.sequence], chunk.sequence.page_tables
            sharer.moved = [(move.group, tables[move.group].index(move.target)) for move in chunk.moves]
            sharer.moved_at = chunk.start

    def end(self, sequence: Sequence) -> None:
        """The sequence's pages go back. One that never began has none."""
        if sequence in self._sharers:
            self.register(sequence)
            sharer = self._sharers.pop(sequence)
            computed = np.array(sequence.token_ids[: sequence.cached_len], dtype=np.int32)
            sharer.served.end(computed, sharer.chain.num_registered * PAGE_LEN)
            for name in reversed(sharer.states):
                self._cache.registered.touch(name)
            if self.disk is not None:
                self._end_on_disk(self.disk, sequence, sharer)
        self._cache.release(sequence)

    def close(self) -> None:
        """Wait until all pages that are to go to disk are there."""
        if self.disk is not None:
            self.disk.close()

    def _shareable_pages(self, sequence: Sequence) -> int:
        """Full pages whose rows depend on nothing but their names."""
        computed = sequence.cached_len if sequence.exact_len is None else min(sequence.cached_len, sequence.exact_len)
        policy = self._cache.policy(sequence.request.policy)
        return _shareable_len(policy, computed, sequence.prompt_len) // PAGE_LEN

    def _longest(self, chain: Chain, policy: PagePolicy, refused: set[PageName]) -> int:
        """Pages of the chain behind which a sequence can go on. `refused`: what the disk could not give."""

        @cache
        def has(group: int, form: str, page_index: int) -> bool:
            name = PageName(chain.blocks[page_index], group, form)
            if self._cache.registered.page(name) is not None:
                return True
            return self.disk is not None and name not in refused and self.disk.has(name)

        return longest_prefix(len(chain.blocks), lambda num_pages: self._read_at(policy, num_pages), has)

    def _read_at(self, policy: PagePolicy, num_pages: int) -> list[PageRun]:
        """What the tables of a sequence hold that goes on behind its first `num_pages` pages."""
        start, runs = num_pages * PAGE_LEN, list[PageRun]()
        if self._cache.states is not None and num_pages:
            runs.append(PageRun(self._cache.states.group, STATE_FORMAT.name, num_pages - 1, num_pages))
        for index, group in enumerate(self._cache.groups):
            sink_pages, first_kept = kept_pages(policy, group.window, start)
            for begin, end in ((0, min(sink_pages, first_kept)), (first_kept, num_pages)):
                for run in page_formats(policy, start, start):
                    first, last = max(begin, run.begin // PAGE_LEN), min(end, run.end // PAGE_LEN)
                    if first < last:
                        runs.append(PageRun(index, run.format.name, first, last))
        return runs

    def _adopt(self, sequence: Sequence, chain: Chain, num_pages: int, refused: set[PageName]) -> bool:
        """Fill the sequence's tables up to there. False, with nothing held, when a page on disk cannot be read."""
        sequence.page_tables = [[FREED] * num_pages for _ in self._cache.groups]
        missing: list[tuple[PageName, int]] = []
        for group, form, begin, end in self._read_at(self._cache.policy(sequence.request.policy), num_pages):
            for page_index in range(begin, end):
                name = PageName(chain.blocks[page_index], group, form)
                if (page := self._cache.registered.page(name)) is None:
                    missing.append((name, page_index))
                else:
                    self._cache.hold(sequence, page)
                    self._put(sequence, name, page_index, page)
        for name, page_index in missing:  # after holding what is there, which making room would evict
            if not self._read(sequence, name, page_index):
                refused.add(name)
                self._cache.release(sequence)
                return False
        sequence.cached_len = sequence.state_len = num_pages * PAGE_LEN
        return True

    def _read(self, sequence: Sequence, name: PageName, page_index: int) -> bool:
        """A page from disk into the sequence's table; False when it is bad or gone."""
        assert self.disk is not None, name
        page = self._cache.take(name.group, KVFormat.parse(name.format), sequence)
        self._put(sequence, name, page_index, page)
        if not self.disk.read(name, self._cache.arenas[page // ARENA_PAGES].page_rows(page)):
            return False
        self._cache.registered.add(name, page)
        return True

    def _put(self, sequence: Sequence, name: PageName, page_index: int, page: int) -> None:
        if self._cache.states is not None and name.group == self._cache.states.group:
            sequence.state = page
        else:
            sequence.page_tables[name.group][page_index] = page

    def _state_name(self, chain: Chain, num_pages: int) -> PageName:
        assert self._cache.states is not None
        return PageName(chain.blocks[num_pages - 1], self._cache.states.group, STATE_FORMAT.name)

    def _keep_state(self, sequence: Sequence, sharer: _Sharer, num_pages: int) -> None:
        """Register the state behind so many whole pages, where it is one to be kept."""
        is_cut, is_answer = sequence.cached_len in sequence.state_cuts, sequence.cached_len >= sequence.prompt_len
        if sequence.state is None or not num_pages or not (is_cut or is_answer):
            return
        name = self._state_name(sharer.chain, num_pages)
        if not self._cache.registered.add(name, sequence.state):
            return
        if is_cut:
            sharer.states.append(name)
            self._write_state(name, sequence.state)
        else:
            if sharer.newest_state is not None:
                self._cache.forget(sharer.newest_state)
            sharer.newest_state = name

    def _write_state(self, name: PageName, page: int) -> None:
        if self.disk is not None:
            self.disk.write(name, self._cache.arenas[page // ARENA_PAGES].page_rows(page))

    def _name(self, sequence: Sequence, chain: Chain, group: int, page_index: int) -> None:
        page = sequence.page_tables[group][page_index]
        if page == FREED:
            return
        arena = self._cache.arenas[page // ARENA_PAGES]
        name = PageName(chain.blocks[page_index], group, arena.format.name)
        if self._cache.registered.add(name, page) and self.disk is not None:
            self.disk.write(name, arena.page_rows(page))

    def _end_on_disk(self, disk: DiskTier, sequence: Sequence, sharer: _Sharer) -> None:
        newest = sharer.newest_state
        if newest is not None and (page := self._cache.registered.page(newest)) is not None:
            self._write_state(newest, page)
        disk.touch([*reversed(sharer.states), *self._names_held(sequence, sharer.chain)])

    def _names_held(self, sequence: Sequence, chain: Chain) -> list[PageName]:
        """Of the sequence's registered pages, the last one first."""
        return [
            PageName(chain.blocks[index], group, self._cache.arenas[table[index] // ARENA_PAGES].format.name)
            for index in reversed(range(chain.num_registered))
            for group, table in enumerate(sequence.page_tables)
            if table[index] != FREED
        ]


def _shareable_len(policy: PagePolicy, computed: int, prompt_len: int) -> int:
    """Of `computed` positions those whose rows do not depend on the length of the prompt."""
    return max(0, min(computed, prompt_len - SPARSE_TAIL)) if policy.sparse_prefill else computed
