"""What a Kev's decision cost, from the passes that were made: the state once, each branch over state and itself.

Dense is every question's row, its state and branch, computed in full; what reading the state again for each would have
visited is `saved.prefix`, and those tokens are cached ones, as those of a state that was there from an earlier request.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from heedful.cost.energy import Energy
from heedful.cost.meter import rows_bytes
from heedful.cost.receipt import Flops, Saved, Visits, WeightTraffic
from heedful.cost.visits import attended
from heedful.decide.receipt import DecisionKV, DecisionReceipt, DecisionSeconds
from heedful.models.config import ModelConfig
from heedful.request import KVFormat

_FORMAT = KVFormat("f32", "f32")


@dataclass(frozen=True)
class KevPasses:
    """Lengths in tokens."""

    state_len: int
    state_steps: tuple[int, ...]
    """Lengths of the steps in which the state was read; () where it was there."""
    branch_lens: tuple[int, ...]
    """By question."""
    branch_steps: int
    options: int
    """Of all questions."""

    @property
    def cached_tokens(self) -> int:
        """Of the rows of all questions, one after the other: the first one reads the state, where none has yet."""
        finds_it = len(self.branch_lens) - bool(self.state_steps)
        return finds_it * self.state_len


def kev_receipt(
    model: str,
    config: ModelConfig,
    head_weights: int,
    passes: KevPasses,
    *,
    seconds: float,
    energy: Energy,
    saved_bytes: int = 0,
) -> DecisionReceipt:
    """`head_weights`: of each of the head's two matrices. `seconds`: from the question to the answer."""
    questions, rows = len(passes.branch_lens), [passes.state_len + length for length in passes.branch_lens]
    computed = sum(rows) - passes.cached_tokens
    visits = _visits(config, passes)
    read = _rows_read(config, passes)
    return DecisionReceipt(
        model=model,
        questions=questions,
        sequences=questions,
        prompt_tokens=sum(rows),
        cached_tokens=passes.cached_tokens,
        output_tokens=0,
        dropped_tokens=0,
        visits=visits,
        kv=DecisionKV(
            format=_FORMAT.name,
            bytes_read=rows_bytes([(_FORMAT, read)], config.head_dim),
            bytes_written=rows_bytes(
                [(_FORMAT, config.num_kv_heads * len(config.windows) * computed)], config.head_dim
            ),
            rows_read=2 * read,
        ),
        weights=WeightTraffic(kev_weight_bytes(config, head_weights, passes, saved_bytes)),
        flops=Flops(
            linear=2 * (config.linear_weights * computed + head_weights * (questions + passes.options)),
            attention=4 * config.head_dim * visits.total,
        ),
        seconds=DecisionSeconds(seconds),
        energy=energy,
    )


def kev_weight_bytes(config: ModelConfig, head_weights: int, passes: KevPasses, saved_bytes: int = 0) -> int:
    """The layers' once a step, float32 but for what packing saves, and the head's once a question."""
    steps = len(passes.state_steps) + passes.branch_steps
    return (4 * config.linear_weights - saved_bytes) * steps + 8 * head_weights * len(passes.branch_lens)


def _visits(config: ModelConfig, passes: KevPasses) -> Visits:
    state, lengths = passes.state_len, passes.branch_lens
    total = dense = prefix = 0
    for window in config.windows:
        of_state = attended(0, state, window)
        total += (of_state if passes.state_steps else 0) + sum(attended(state, state + n, window) for n in lengths)
        dense += sum(attended(0, state + n, None) for n in lengths)
        prefix += of_state * (len(lengths) - bool(passes.state_steps))
    total, dense, prefix = (config.num_heads * count for count in (total, dense, prefix))
    return Visits(total, 0, total, dense, Saved(window=dense - total - prefix, prefix=prefix))


def _rows_read(config: ModelConfig, passes: KevPasses) -> int:
    """Rows of keys: in each pass every position that any of its queries sees, once."""
    end, spans = 0, []
    for step in passes.state_steps:
        spans.append((end, end + step))
        end += step
    spans += [(passes.state_len, passes.state_len + length) for length in passes.branch_lens]
    return config.num_kv_heads * sum(_seen(spans, window) for window in config.windows)


def _seen(spans: ListLike[tuple[int, int]], window: int | None) -> int:
    return sum(end - (0 if window is None else max(0, start - window + 1)) for start, end in spans)
