"""The meter: one sequence's counts while it runs, read from the plan of every step, and its receipt at the end.

A step shared by several sequences reads the weights once: `split_evenly` gives each its part and the parts sum to the
whole. The step's energy follows the bytes that each sequence made it read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from heedful.cache.policy import PAGE_LEN, SPARSE_SINKS, SPARSE_WINDOW, PagePolicy
from heedful.cache.prefix import PrefixReport
from heedful.cost import visits
from heedful.cost.energy import Energy
from heedful.cost.formulas import bounds_bytes, key_and_value_bytes, key_bytes
from heedful.cost.quality import Quality
from heedful.cost.receipt import AdapterUse, Flops, Guesses, KVTraffic, Receipt, Saved, Seconds, Visits, WeightTraffic
from heedful.models.config import ModelConfig
from heedful.request import Batch, Chunk, KVFormat, Sequence


@dataclass(frozen=True)
class AdapterFacts:
    """What an adapter adds to a step that has tokens of it."""

    sha256: str
    """Of what is in it."""
    linear_weights: int
    """Of the two thin matrices beside each matrix that every token passes."""
    head_weights: int
    linear_bytes: int
    head_bytes: int


@dataclass(frozen=True)
class RunnerFacts:
    """What a runner reads per step, whatever the batch: bytes as the weights lie in its memory."""

    linear_bytes: int
    """All matrices that every token passes."""
    head_bytes: int
    """The output head, read in a step that wants logits."""
    adapters: Mapping[str, AdapterFacts] = field(default_factory=dict)
    """Those that requests may name."""


@dataclass
class Meter:
    """Counts of one sequence. Times are perf_counter seconds."""

    sequence: Sequence
    created: float = field(default_factory=perf_counter)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    prefill_visits: int = 0
    decode_visits: int = 0
    dense_visits: int = 0
    saved_by_window: int = 0
    saved_by_pages: int = 0
    saved_by_prefix: int = 0
    rejected_visits: int = 0
    guesses_made: int = 0
    guesses_right: int = 0
    recomputed_visits: int = 0
    computed_len: int = 0
    """Up to where positions were computed at least once."""
    prefix: PrefixReport | None = None
    """None before the first step."""
    rows_read: Counter[KVFormat] = field(default_factory=Counter)
    """Rows of keys, and as many of values."""
    rows_written: Counter[KVFormat] = field(default_factory=Counter)
    bounds_read: int = 0
    keys_listed: Counter[KVFormat] = field(default_factory=Counter)
    states_read: int = 0
    states_written: int = 0
    held_bytes_peak: int = 0
    weight_bytes_read: int = 0
    """An adapter's among them."""
    adapter_bytes_read: int = 0
    tokens_computed: int = 0
    logits_computed: int = 0
    joules: float = 0.0
    joules_low: float = 0.0
    joules_high: float = 0.0
    energy_source: str = "estimated"

    @property
    def cached_tokens(self) -> int:
        return 0 if self.prefix is None else self.prefix.cached_tokens

    def count_prefix(self, found: PrefixReport, config: ModelConfig, policy: PagePolicy) -> None:
        """Before the first step: what computing the positions that are there already would have visited."""
        self.prefix = found
        for own in config.windows:
            dense = config.num_heads * visits.attended(0, found.cached_tokens, None)
            made = config.num_heads * visits.attended(0, found.cached_tokens, _prompt_reach(policy, own))
            self.dense_visits += dense
            self.saved_by_prefix += made
            self.saved_by_window += dense - made

    def count(self, chunk: Chunk, config: ModelConfig, weight_bytes: int, adapter_bytes: int = 0) -> int:
        """Add one step. Visits of prompt tokens are prefill, of output tokens decode. Returns the bytes of KV read.

        `adapter_bytes`: those of the weight_bytes that are an adapter's.
        """
        made = dense = 0
        for span in chunk.spans:
            span_visits, span_dense = visits.visits(span, config.num_heads), visits.dense_visits(span, config.num_heads)
            made, dense = made + span_visits, dense + span_dense
            if span.selection is not None:
                self.saved_by_pages += span_dense - span_visits
            else:
                self.saved_by_window += span_dense - span_visits
        if chunk.start < self.sequence.prompt_len:
            self.prefill_visits += made
        else:
            self.decode_visits += made
        self.dense_visits += dense
        if chunk.start < self.computed_len:
            self.recomputed_visits += _part_visits(chunk, chunk.start, self.computed_len, config.num_heads)
        self.computed_len = max(self.computed_len, chunk.end)
        self.held_bytes_peak = max(self.held_bytes_peak, self.sequence.held_bytes)
        self.weight_bytes_read += weight_bytes
        self.adapter_bytes_read += adapter_bytes
        self.tokens_computed += chunk.end - chunk.start
        self.logits_computed += chunk.num_logits
        return self._count_rows(chunk, config.num_kv_heads, config.head_dim) + self._count_state(chunk, config)

    def _count_state(self, chunk: Chunk, config: ModelConfig) -> int:
        """Returns the bytes read."""
        if chunk.state is None:
            return 0
        self.states_written += 1
        self.states_read += chunk.state.before is not None
        return 0 if chunk.state.before is None else config.state_bytes

    def _count_rows(self, chunk: Chunk, kv_heads: int, head_dim: int) -> int:
        """Returns the bytes read."""
        rows, listed, bounds = [], [], 0
        for span in chunk.spans:
            rows += visits.rows_read(span, kv_heads)
            if span.selection is not None:
                bounds += visits.bounds_read(span, kv_heads)
                listed += visits.keys_listed(span, kv_heads)
            form, count = visits.rows_written(span, kv_heads)
            self.rows_written[form] += count
        for before, after, count in visits.rows_moved(chunk, kv_heads):
            rows.append((before, count))
            self.rows_written[after] += count
        for form, count in rows:
            self.rows_read[form] += count
        for form, count in listed:
            self.keys_listed[form] += count
        self.bounds_read += bounds
        return rows_bytes(rows, head_dim) + keys_bytes(listed, head_dim) + bounds * bounds_bytes(head_dim)

    def count_guesses(self, chunk: Chunk, made: int, right: int, config: ModelConfig) -> None:
        """Of the `made` tokens at the chunk's end `right` were: the visits of the others are counted already, here as
        what they were."""
        first_wrong = chunk.end - made + right
        self.guesses_made += made
        self.guesses_right += right
        self.rejected_visits += _part_visits(chunk, first_wrong, chunk.end, config.num_heads)
        self.computed_len = first_wrong

    def add_energy(self, energy: Energy, share: float) -> None:
        self.joules += energy.joules * share
        self.joules_low += energy.low * share
        self.joules_high += energy.high * share
        self.energy_source = energy.source

    def receipt(
        self,
        model: str,
        config: ModelConfig,
        policy: PagePolicy,
        quality: Quality | None = None,
        adapter: AdapterFacts | None = None,
    ) -> Receipt:
        """`adapter`: the one that the sequence's request named."""
        total = self.prefill_visits + self.decode_visits
        used = self._adapter_use(adapter)
        return Receipt(
            model=model,
            prompt_tokens=self.sequence.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=self.sequence.output_len,
            policy=policy_in_words(policy, config.windows),
            visits=Visits(
                self.prefill_visits,
                self.decode_visits,
                total,
                self.dense_visits,
                Saved(self.saved_by_window, self.saved_by_pages, self.saved_by_prefix),
                self.rejected_visits,
                self.recomputed_visits,
            ),
            kv=KVTraffic(
                policy.main.name,
                rows_bytes(self.rows_read.items(), config.head_dim)
                + keys_bytes(self.keys_listed.items(), config.head_dim)
                + self.bounds_read * bounds_bytes(config.head_dim)
                + self.states_read * config.state_bytes,
                rows_bytes(self.rows_written.items(), config.head_dim) + self.states_written * config.state_bytes,
                self.held_bytes_peak,
                2 * self.rows_read.total(),
                self.bounds_read,
                self.keys_listed.total(),
            ),
            weights=WeightTraffic(self.weight_bytes_read),
            flops=Flops(
                linear=2 * (config.linear_weights * self.tokens_computed + config.head_weights * self.logits_computed)
                + config.recurrence_flops * self.tokens_computed
                + (0 if used is None else used.flops),
                attention=4 * config.head_dim * total,
                selection=config.head_dim
                * (4 * self.bounds_read + 2 * self.keys_listed.total())
                * (config.num_heads // config.num_kv_heads),
            ),
            seconds=self._seconds(),
            energy=Energy(self.joules, self.joules_low, self.joules_high, self.energy_source),
            quality=quality,
            guesses=Guesses(self.guesses_made, self.guesses_right),
            prefix=self.prefix,
            adapter=used,
        )

    def _adapter_use(self, adapter: AdapterFacts | None) -> AdapterUse | None:
        name = self.sequence.request.adapter
        if name is None or adapter is None:
            return None
        weights = adapter.linear_weights * self.tokens_computed + adapter.head_weights * self.logits_computed
        return AdapterUse(name, adapter.sha256, self.adapter_bytes_read, flops=2 * weights)

    def _seconds(self) -> Seconds:
        end = self.ended if self.ended is not None else perf_counter()
        started = self.started if self.started is not None else end
        first = self.first_token if self.first_token is not None else end
        return Seconds(
            queue=started - self.created,
            prefill=first - started,
            decode=end - first,
            first_token=first - self.created,
            total=end - self.created,
        )


def _part_visits(chunk: Chunk, begin: int, end: int, heads: int) -> int:
    """Visits of the chunk's queries at positions [begin, end)."""
    begin, end = max(begin, chunk.start), min(end, chunk.end)
    return sum(visits.visits(replace(span, start=begin, end=end), heads) for span in chunk.spans) if begin < end else 0


def _prompt_reach(policy: PagePolicy, own: int | None) -> int | None:
    """Most keys that a query of a shared prefix sees, in a layer whose own window is `own`."""
    if policy.sparse_prefill and own is None:
        return SPARSE_WINDOW + SPARSE_SINKS
    window = policy.window_of(own)
    return None if window is None else window + policy.sinks_of(own)


def weight_shares(batch: Batch, facts: RunnerFacts) -> list[int]:
    """Bytes of the base's weights that each chunk answers for; they sum to what the step read."""
    return _shares(batch.chunks, facts.linear_bytes, facts.head_bytes)


def adapter_shares(batch: Batch, facts: RunnerFacts) -> list[int]:
    """Likewise of adapters: a step reads each once that it has tokens of, and those share it."""
    shares = [0] * len(batch.chunks)
    for name, adapter in facts.adapters.items():
        at = [i for i, chunk in enumerate(batch.chunks) if chunk.sequence.request.adapter == name]
        mine = _shares([batch.chunks[i] for i in at], adapter.linear_bytes, adapter.head_bytes)
        for i, share in zip(at, mine, strict=True):
            shares[i] = share
    return shares


def _shares(chunks: ListLike[Chunk], linear_bytes: int, head_bytes: int) -> list[int]:
    if len(chunks) == 1:
        return [linear_bytes + (head_bytes if chunks[0].num_logits else 0)]
    wanting = [chunk.num_logits > 0 for chunk in chunks]
    linear = split_evenly(linear_bytes, len(chunks))
    head = iter(split_evenly(head_bytes, sum(wanting)))
    return [mine + (next(head) if wants else 0) for mine, wants in zip(linear, wanting, strict=True)]


def split_evenly(whole: int, parts: int) -> list[int]:
    """Integers that differ by at most one and sum to `whole`; [] for no parts."""
    return [whole // parts + (i < whole % parts) for i in range(parts)]


def rows_bytes(rows: Iterable[tuple[KVFormat, int]], head_dim: int) -> int:
    """Bytes of so many rows of keys and as many of values, by format."""
    return sum(count * key_and_value_bytes(form, head_dim) for form, count in rows)


def keys_bytes(rows: Iterable[tuple[KVFormat, int]], head_dim: int) -> int:
    """Bytes of so many rows of keys alone, by format."""
    return sum(count * key_bytes(form, head_dim) for form, count in rows)


def policy_in_words(policy: PagePolicy, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """What of a policy was in force, as receipts have it; only what is on. "windows": layers by attention window."""
    words: dict[str, Any] = {
        "kv": policy.main.name,
        "windows": windows_in_words(tuple(policy.window_of(window) for window in windows)),
    }
    if policy.main.rotated:
        words["rotated"] = True
    if policy.is_mixed:
        words["precise"] = {"kv": policy.precise.name, "newest": policy.precise_len, "first": PAGE_LEN}
    if any(map(policy.sinks_of, windows)):
        words["sinks"] = policy.sinks
    if policy.budget_pages is not None:
        words["budget"] = policy.budget_pages * PAGE_LEN
    if policy.sparse_prefill:
        words["prefill"] = "sparse"
    return words


def windows_in_words(windows: tuple[int | None, ...]) -> dict[str, int]:
    """Layers by attention window: {"full": 3, "512": 15}."""
    counts: dict[str, int] = {}
    for window in windows:
        key = "full" if window is None else str(window)
        counts[key] = counts.get(key, 0) + 1
    return counts
