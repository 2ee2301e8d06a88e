"""A runner whose rows bear witness: each holds all that it depends on, and every row that a step reads is checked.

A row at position p is a hash of the tokens up to p, of the request's salt and of its policy, marked with its number
format; rows that depend on more (on the prompt's length, or on what was selected) are marked with that too. A recurrent
state holds a hash of all rows before it. The next token follows from the hash, so a page that came from elsewhere shows
twice: in the check and in the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from heedful.cache.pages import ARENA_PAGES, FREED, KVCache, PageLayout, StateLayout
from heedful.cache.policy import PAGE_LEN, SPARSE_TAIL, PagePolicy
from heedful.cost.meter import RunnerFacts
from heedful.models.config import ModelConfig
from heedful.request import KV_ROW_BYTES, Batch, Chunk, KeySpan, KVFormat, Sequence

VOCAB = 32
FACTOR = np.uint64(6364136223846793005)
with np.errstate(over="ignore"):
    POWERS = np.cumprod(np.full(1 << 12, FACTOR))
Rows = npt.NDArray[np.uint64]


def config(windows: tuple[int | None, ...]) -> ModelConfig:
    return ModelConfig(
        family="gpt2", vocab_size=VOCAB, hidden_size=8, num_layers=len(windows), num_heads=2, num_kv_heads=1,
        head_dim=32, intermediate_size=8, context_len=1 << 20, windows=windows, rope=None,
    )  # fmt: skip


class WitnessRunner:
    threads = 1
    facts = RunnerFacts(1, 1)

    def __init__(
        self, windows: tuple[int | None, ...], capacity_tokens: int, states: StateLayout | None = None
    ) -> None:
        self.config = config(windows)
        self.cache = KVCache(
            windows,
            1,
            32,
            # 8 bytes a row, and more where the format is finer, so that formats differ in what they take
            lambda form: PageLayout(8 * PAGE_LEN * (1 + (form.name != "q4")), 8),
            default=KVFormat.parse("q8"),
            numbers=tuple(KV_ROW_BYTES),
            capacity_tokens=capacity_tokens,
            states=states,
        )
        self.on_step: Callable[[Batch], None] = lambda batch: None
        self._rows: dict[Sequence, Rows] = {}
        """By sequence: what its rows must be, format aside."""

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.on_step(batch)
        for chunk in batch.chunks:
            for move in chunk.moves:
                self._move(move.source, move.target)
        before = [self._states(chunk.state and chunk.state.before) for chunk in batch.chunks]
        logits = [self._compute(chunk) for chunk in batch.chunks]
        for chunk, states in zip(batch.chunks, before, strict=True):
            self._move_state_on(chunk, states)
        wanted = [row for row, chunk in zip(logits, batch.chunks, strict=True) if chunk.reaches_end]
        return np.array(wanted, dtype=np.float32).reshape(len(wanted), VOCAB)

    def _move(self, source: int, target: int) -> None:
        before, after = (self.cache.arenas[page // ARENA_PAGES] for page in (source, target))
        assert before.layers == after.layers
        for layer in before.layers:
            rows = self._slots(layer, source) ^ mark(before.format.name) ^ mark(after.format.name)
            self._slots(layer, target)[:] = rows

    def _compute(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        policy = replace(self.cache.policy(chunk.sequence.request.policy), budget_pages=None)
        exact = hashes(chunk.sequence, policy, chunk.end)
        known, new = self._rows.get(chunk.sequence, exact)[: chunk.start], exact[chunk.start :]
        assert len(known) == chunk.start, (len(known), chunk.start)
        if any(span.selection is not None for span in chunk.spans):
            new = new ^ mark("chosen")
        expected = np.concatenate([known, new])
        self._rows[chunk.sequence] = expected
        for span in chunk.spans:
            self._store(span, new)
            self._check(span, expected)
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[int(expected[-1] >> np.uint64(40)) % VOCAB] = 1
        return logits

    def _states(self, slot: int | None) -> list[Rows]:
        """What the slot holds, by layer."""
        if self.cache.states is None or slot is None:
            return []
        return [buffer[slot % ARENA_PAGES].view(np.uint64).copy() for buffer in self.cache.states.buffers.values()]

    def _move_state_on(self, chunk: Chunk, before: list[Rows]) -> None:
        if self.cache.states is None:
            return
        assert chunk.state is not None
        rows = self._rows[chunk.sequence]
        assert (chunk.state.before is None) == (chunk.start == 0), chunk.state
        for state in before:
            np.testing.assert_array_equal(state, _state_of(rows[: chunk.start]))
        for buffer in self.cache.states.buffers.values():
            buffer[chunk.state.after % ARENA_PAGES].view(np.uint64)[:] = _state_of(rows[: chunk.end])

    def _store(self, span: KeySpan, new: Rows) -> None:
        for index in range(span.start // PAGE_LEN, (span.end - 1) // PAGE_LEN + 1):
            page, begin = span.pages[index - span.first_page], index * PAGE_LEN
            first, end = max(begin, span.start), min(begin + PAGE_LEN, span.end)
            form = self.cache.arenas[page // ARENA_PAGES].format.name
            for layer in span.layers:
                self._slots(layer, page)[first - begin : end - begin] = new[
                    first - span.start : end - span.start
                ] ^ mark(form)

    def _check(self, span: KeySpan, expected: Rows) -> None:
        for layer in span.layers:
            for index, page in enumerate(span.pages, span.first_page):
                self._check_page(span, layer, page, index, expected, span.first_key, span.end)
            for index, page in enumerate(span.sink_pages):
                self._check_page(span, layer, page, index, expected, 0, min(span.sinks, span.end))

    def _check_page(
        self, span: KeySpan, layer: int, page: int, index: int, expected: Rows, first: int, end: int
    ) -> None:
        begin = index * PAGE_LEN
        first, end = max(first, begin), min(end, begin + PAGE_LEN)
        if first >= end:
            return
        arena = self.cache.arenas[page // ARENA_PAGES]
        form = next(run.format for run in span.formats if run.begin <= begin < run.end)
        assert (arena.format.name, layer in arena.layers) == (form.name, True), (span, page)
        found = self._slots(layer, page)[first - begin : end - begin]
        np.testing.assert_array_equal(found, expected[first:end] ^ mark(form.name))

    def _slots(self, layer: int, page: int) -> Rows:
        arena = self.cache.arenas[page // ARENA_PAGES]
        return arena.buffers[layer][page % ARENA_PAGES].view(np.uint64)[:PAGE_LEN]


def account(cache: KVCache, sequences: list[Sequence]) -> None:
    """Every page (a slot of a state is one) is held, as often as it says, or rests registered, or is free; bytes say so
    too."""
    held = {s: [page for table in s.page_tables for page in table if page != FREED] for s in sequences}
    for sequence in sequences:
        held[sequence] += [] if sequence.state is None else [sequence.state]
    users = Counter(page for pages in held.values() for page in pages)
    for arena in cache.arenas:
        assert arena.users == Counter({page: n for page, n in users.items() if page // ARENA_PAGES == arena.index})
        resting = {page for page in cache.registered.resting if page // ARENA_PAGES == arena.index}
        rows = [page % ARENA_PAGES for page in (*arena.users, *resting)]
        free = list(range(arena.num_pages))[arena._used :] + arena._free
        assert sorted(rows + free) == list(range(arena.num_pages))
    size_of = {arena.index: arena.page_bytes for arena in cache.arenas}
    assert cache.taken_bytes == sum(size_of[page // ARENA_PAGES] for page in users)
    assert cache.resting_bytes == sum(size_of[page // ARENA_PAGES] for page in cache.registered.resting)
    assert cache.taken_bytes + cache.resting_bytes <= cache.budget_bytes
    for sequence in sequences:
        assert sequence.held_bytes == sum(size_of[page // ARENA_PAGES] for page in held[sequence])


def _state_of(rows: Rows) -> np.uint64:
    return np.bitwise_xor.reduce(rows) ^ np.uint64(len(rows))


def mark(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(text.encode()[:8].ljust(8, b"."), "little"))


def hashes(sequence: Sequence, policy: PagePolicy, end: int) -> Rows:
    """(end,): of each position, all that its row depends on but a selection."""
    root = np.uint64(hash((sequence.request.cache_salt, policy)) % (1 << 64))
    with np.errstate(over="ignore"):
        tokens = np.array(sequence.token_ids[:end], dtype=np.uint64)
        rows = np.cumsum((tokens + np.uint64(1)) * POWERS[:end]) ^ root
        if policy.sparse_prefill:  # what is beyond the tail's begin depends on where that is
            tail = max(0, sequence.prompt_len - SPARSE_TAIL)
            rows[tail:] ^= np.uint64(sequence.prompt_len) * FACTOR
    return rows
