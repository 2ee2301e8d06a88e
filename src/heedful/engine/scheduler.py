"""Which tokens of which sequences run now. Pure Python on integers; no tensors, no text.

Every sequence has tokens known, tokens guessed and tokens computed (`cached_len`); a step closes the gap within a token
budget, so chunked prefill, prefix hits, decode and the check of guesses are one case.

Fairness: whoever decodes gets a token in every step, and a step computes at most PREFILL_BESIDE_DECODE prompt tokens
beside them, which bounds what a long prompt adds to the time between two tokens. Of those the oldest prompt gets at
least half, so short prompts cannot starve it, and the shortest ones the rest, so it cannot hold them up.

Memory: pages are taken as tokens come. When they run out the youngest sequence gives its pages back and waits; what it
had is computed again, or found again as a shared prefix, to the same bits.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import count

from heedful.cache.disk import DiskTier
from heedful.cache.pages import KVCache
from heedful.cache.policy import PAGE_LEN
from heedful.cache.sharing import PrefixSharing
from heedful.errors import CacheFull
from heedful.request import Batch, CachePolicy, Chunk, Sequence

TOKEN_BUDGET = 512  # tokens a step: matrix products are near their best speed, and a step stays short
PREFILL_BESIDE_DECODE = 128  # still 80 % of that speed, in a quarter of the time
MOST_RUNNING = 64  # sequences; from about 16 on a step's time grows with every one
LOGITS_ROWS = 64  # of a prompt whose logprobs are wanted, a step: 13 MB with a vocabulary of 50,000


class Scheduler:
    """First come, first served, among the tenants in turn; but a prompt that a running one is just computing the
    beginning of waits for it.

    A sequence begins behind the longest prefix of its prompt whose pages are there; `disk` keeps them beyond the
    process.
    """

    def __init__(self, cache: KVCache, token_budget: int = TOKEN_BUDGET, disk: DiskTier | None = None) -> None:
        self.cache = cache
        self.sharing = PrefixSharing(cache, disk)
        self.token_budget = token_budget
        self.preemptions = 0
        """How often a sequence had to give its pages back."""
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """In order of admission: a sequence that was preempted comes first again when it comes back."""
        self._order = count()
        self._age: dict[Sequence, int] = {}
        """By first arrival."""
        self._bytes_needed: dict[Sequence, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        return sum(_is_decoding(sequence) for sequence in self._running)

    def check_room(self, policy: CachePolicy, longest: int) -> int:
        """Bytes that a sequence of `longest` tokens may need. Raises CacheFull when they can never fit."""
        needed, room = self.cache.bytes_needed(policy, longest, self.token_budget), self.cache.budget_bytes
        if needed > room:
            raise CacheFull(
                f"{longest:,} tokens need {needed / 1e6:,.3g} MB of KV cache and there are {room / 1e6:,.3g}",
                "Ask for a shorter prompt or answer, a smaller --kv format or a --window, or free memory: the cache is "
                "sized from what is available.",
            )
        return needed

    def add(self, sequence: Sequence, longest: int) -> None:
        """`longest`: the most tokens whose K and V the sequence will hold. Raises CacheFull as check_room does."""
        self._bytes_needed[sequence] = self.check_room(sequence.request.policy, longest)
        self._age[sequence] = next(self._order)
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, or is aborted; its pages go back at once. Removing twice does nothing."""
        if self._bytes_needed.pop(sequence, None) is None:
            return
        del self._age[sequence]
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self.sharing.end(sequence)

    def schedule(self) -> Batch:
        """The next step's chunks: decoding sequences first, so a long prefill never starves them."""
        for sequence in self._running:
            self.sharing.register(sequence)
        if self._waiting:
            self._admit()
        lengths = self._lengths()
        order = sorted(lengths, key=lambda s: (not self._is_reserved(s), not _is_decoding(s), self._age[s]))
        chunks: list[Chunk] = []
        while order:
            sequence = order.pop(0)
            chunk = self._plan(sequence, lengths[sequence], order)
            chunks += [] if chunk is None else [chunk]
        chunks.sort(key=lambda chunk: chunk.sequence.request.adapter or "")  # each adapter's side by side
        return Batch(tuple(chunks))

    def _lengths(self) -> dict[Sequence, int]:
        """Tokens of each running sequence that the step is to compute, guessed ones among them."""
        decoding = [sequence for sequence in self._running if _is_decoding(sequence)]
        lengths = {sequence: 1 + len(sequence.drafts) for sequence in decoding}
        budget = max(0, self.token_budget - sum(lengths.values()))
        if decoding:
            budget = min(budget, PREFILL_BESIDE_DECODE)
        reading = sorted((s for s in self._running if not _is_decoding(s)), key=_missing)
        if not reading:
            return lengths
        oldest = min(reading, key=self._age.__getitem__)
        kept = min(_missing(oldest), budget // 2)
        for sequence in reading:
            room = budget if sequence is oldest else budget - kept
            if length := min(_most_rows(sequence), room):
                lengths[sequence] = length
                budget -= length
            kept = 0 if sequence is oldest else kept
        return lengths

    def _plan(self, sequence: Sequence, length: int, later: list[Sequence]) -> Chunk | None:
        """None when there is no memory for it in this step. `later`: who is planned after it, and may be preempted."""
        while True:
            try:
                chunk = self.cache.plan(sequence, self.cache.chunk_end(sequence, sequence.cached_len + length))
            except CacheFull:
                if sequence.drafts:  # guesses are not worth another's pages
                    sequence.drafts, length = [], 1
                    continue
                victims = [s for s in self._running if s in later and not self._is_reserved(s)]
                self._preempt(max(victims, key=self._age.__getitem__, default=sequence), later)
                if sequence not in self._running:
                    return None
                continue
            self.sharing.note_moves(chunk)
            return chunk

    def _preempt(self, sequence: Sequence, later: list[Sequence]) -> None:
        """Its pages go back; those that are registered rest, and are found again if nobody needs the memory."""
        assert len(self._running) > 1, "a sequence that runs alone has all the memory, and it was found to be enough"
        assert not self._is_reserved(sequence), "reserved sequences have what they need"
        if sequence in later:
            later.remove(sequence)
        self._running.remove(sequence)
        sequence.drafts = []
        self.sharing.end(sequence)
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _is_reserved(self, sequence: Sequence) -> bool:
        """Whether the sequence has all the memory that it may ever need from the start: what a page selection has made
        of it could not be computed again."""
        return sequence.request.policy.budget is not None

    def _admit(self) -> None:
        held_up: list[Sequence] = []
        promised = sum(self._promised(sequence) for sequence in self._running)
        while self._waiting and len(self._running) < MOST_RUNNING:
            sequence = self._next()
            if self._awaits_prefix(sequence):
                self._waiting.remove(sequence)
                held_up.append(sequence)
                continue
            needed = self._promised(sequence)
            if promised + needed > self.cache.budget_bytes:
                break
            self._waiting.remove(sequence)
            promised += needed
            self._running.append(sequence)
            sequence.prefix = self.sharing.begin(sequence)
        if held_up:
            self._waiting = deque(sorted([*held_up, *self._waiting], key=self._age.__getitem__))

    def _next(self) -> Sequence:
        """The oldest of the tenant who has the fewest running, so that none can shut the others out."""
        running = Counter(sequence.request.cache_salt for sequence in self._running)
        if len(running) < 2 and len({sequence.request.cache_salt for sequence in self._waiting}) < 2:
            return self._waiting[0]
        return min(self._waiting, key=lambda sequence: (running[sequence.request.cache_salt], self._age[sequence]))

    def _promised(self, sequence: Sequence) -> int:
        """Bytes that admitted sequences may take before they compete for memory: the known tokens' and one page's."""
        if self._is_reserved(sequence):
            return self._bytes_needed[sequence]
        known = len(sequence.token_ids) + PAGE_LEN
        return min(
            self._bytes_needed[sequence],
            self.cache.bytes_needed(sequence.request.policy, known, self.token_budget),
        )

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing pages just now with which this one could begin."""
        for other in self._running:
            if (
                _is_decoding(other)
                or other.request.policy != sequence.request.policy
                or other.request.cache_salt != sequence.request.cache_salt
                or other.adapter_sha256 != sequence.adapter_sha256
            ):
                continue
            shared = pages_shared(sequence, other) * PAGE_LEN
            if other.cached_len < shared:
                self.sharing.expect(other, shared)
                return True
        return False


def pages_shared(first: Sequence, second: Sequence) -> int:
    """Full pages at the beginning of both prompts that hold the same tokens, those of `first` whose logits are wanted
    left out."""
    ours, theirs = first.request.prompt_ids, second.request.prompt_ids
    most = min(len(ours) - 1, first.logits_wanted_from, len(theirs)) // PAGE_LEN * PAGE_LEN
    pages = 0
    while pages * PAGE_LEN < most:
        page = slice(pages * PAGE_LEN, (pages + 1) * PAGE_LEN)
        if ours[page] != theirs[page]:
            break
        pages += 1
    return pages


def _missing(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.cached_len


def _is_decoding(sequence: Sequence) -> bool:
    return _missing(sequence) == 1 and sequence.output_len > 0


def _most_rows(sequence: Sequence) -> int:
    """Tokens that a step may compute of a sequence that is not decoding."""
    without_logits = max(0, sequence.logits_wanted_from - sequence.cached_len)
    return min(_missing(sequence), without_logits + LOGITS_ROWS)
