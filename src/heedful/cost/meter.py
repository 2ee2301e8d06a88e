"""The meter: one sequence's counts while it runs, read from the plan of every step, and its receipt at the end.

A step shared by several sequences reads the weights once: `split_evenly` gives each its part and the parts sum to the
whole. The step's energy follows the bytes that each sequence made it read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from heedful.cost import visits
from heedful.cost.energy import Energy
from heedful.cost.formulas import KV_FORMATS
from heedful.cost.quality import Quality
from heedful.cost.receipt import Flops, KVTraffic, Receipt, Saved, Seconds, Visits, WeightTraffic
from heedful.models.config import ModelConfig
from heedful.request import Batch, Chunk, Sequence


@dataclass(frozen=True)
class RunnerFacts:
    """What a runner reads per step, whatever the batch: bytes as the weights lie in its memory."""

    linear_bytes: int
    """All matrices that every token passes."""
    head_bytes: int
    """The output head, read in a step that wants logits."""


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
    rows_read: int = 0
    rows_written: int = 0
    held_bytes_peak: int = 0
    weight_bytes_read: int = 0
    tokens_computed: int = 0
    logits_computed: int = 0
    joules: float = 0.0
    joules_low: float = 0.0
    joules_high: float = 0.0
    energy_source: str = "estimated"

    def count(self, chunk: Chunk, config: ModelConfig, held_bytes: int, weight_bytes: int) -> None:
        """Add one step. Visits of prompt tokens are prefill, of output tokens decode."""
        made = sum(visits.visits(span, config.num_heads) for span in chunk.spans)
        if chunk.start < self.sequence.prompt_len:
            self.prefill_visits += made
        else:
            self.decode_visits += made
        self.dense_visits += sum(visits.dense_visits(span, config.num_heads) for span in chunk.spans)
        self.rows_read += sum(visits.rows_read(span, config.num_kv_heads) for span in chunk.spans)
        self.rows_written += sum(visits.rows_written(span, config.num_kv_heads) for span in chunk.spans)
        self.held_bytes_peak = max(self.held_bytes_peak, held_bytes)
        self.weight_bytes_read += weight_bytes
        self.tokens_computed += chunk.end - chunk.start
        self.logits_computed += chunk.reaches_end

    def add_energy(self, energy: Energy, share: float) -> None:
        self.joules += energy.joules * share
        self.joules_low += energy.low * share
        self.joules_high += energy.high * share
        self.energy_source = energy.source

    def receipt(self, model: str, config: ModelConfig, kv_format: str, quality: Quality | None = None) -> Receipt:
        total = self.prefill_visits + self.decode_visits
        row_bytes = KV_FORMATS[kv_format](config.head_dim)
        return Receipt(
            model=model,
            prompt_tokens=self.sequence.prompt_len,
            cached_tokens=0,
            output_tokens=self.sequence.output_len,
            policy={"kv": kv_format, "windows": windows_in_words(config.windows)},
            visits=Visits(
                self.prefill_visits,
                self.decode_visits,
                total,
                self.dense_visits,
                Saved(window=self.dense_visits - total),
            ),
            kv=KVTraffic(
                kv_format,
                self.rows_read * row_bytes,
                self.rows_written * row_bytes,
                self.held_bytes_peak,
                self.rows_read,
            ),
            weights=WeightTraffic(self.weight_bytes_read),
            flops=Flops(
                linear=2 * (config.linear_weights * self.tokens_computed + config.head_weights * self.logits_computed),
                attention=4 * config.head_dim * total,
            ),
            seconds=self._seconds(),
            energy=Energy(self.joules, self.joules_low, self.joules_high, self.energy_source),
            quality=quality,
        )

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


def weight_shares(batch: Batch, facts: RunnerFacts) -> list[int]:
    """Bytes of weights that each chunk answers for; they sum to what the step read."""
    ending = [chunk.reaches_end for chunk in batch.chunks]
    linear = split_evenly(facts.linear_bytes, len(batch.chunks))
    head = iter(split_evenly(facts.head_bytes, sum(ending)))
    return [mine + (next(head) if reaches_end else 0) for mine, reaches_end in zip(linear, ending, strict=True)]


def split_evenly(whole: int, parts: int) -> list[int]:
    """Integers that differ by at most one and sum to `whole`; [] for no parts."""
    return [whole // parts + (i < whole % parts) for i in range(parts)]


def windows_in_words(windows: tuple[int | None, ...]) -> dict[str, int]:
    """Layers by attention window: {"full": 3, "512": 15}."""
    counts: dict[str, int] = {}
    for window in windows:
        key = "full" if window is None else str(window)
        counts[key] = counts.get(key, 0) + 1
    return counts
