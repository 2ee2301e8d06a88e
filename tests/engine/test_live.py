"""The counts of an answer that is still being computed: exact at every step, and those of the receipt at the end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heedful.cost.meter import RunnerFacts
from heedful.engine.engine import Engine, Live
from heedful.models.config import ModelConfig
from heedful.request import Batch, Request, SamplingParams
from heedful.testing import plain_cache

HEADS, LAYERS, WINDOW = 4, 3, 100
CONFIG = ModelConfig(
    family="llama",
    vocab_size=10,
    hidden_size=8,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=8,
    context_len=2048,
    windows=(None, WINDOW, None),
    rope=None,
)


class SilentRunner:
    config = CONFIG
    facts = RunnerFacts(linear_bytes=10, head_bytes=1)
    threads = 1

    def __init__(self) -> None:
        self.cache = plain_cache(CONFIG.windows, 2, 2, capacity_tokens=2048)

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        return np.zeros((sum(chunk.reaches_end for chunk in batch.chunks), 10), dtype=np.float32)


def visits_of(tokens: int) -> int:
    """Token by token: two full layers and one with a window."""
    return sum(HEADS * (2 * (i + 1) + min(i + 1, WINDOW)) for i in range(tokens))


def test_live_counts_are_those_of_the_steps_so_far() -> None:
    engine = Engine(SilentRunner(), model_name="m", context_len=2048, eos_ids=())
    sequence = engine.add(Request(tuple([1] * 700), SamplingParams(max_tokens=4)))
    seen = [engine.live(sequence)]
    while sequence.finish is None:
        engine.step()
        seen.append(engine.live(sequence))
    assert [live.prompt_tokens for live in seen] == [700] * 6
    assert [live.prompt_tokens_computed for live in seen] == [0, 512, 700, 700, 700, 700]
    assert [live.output_tokens for live in seen] == [0, 0, 1, 2, 3, 4]
    assert [live.visits for live in seen] == [visits_of(n) for n in (0, 512, 700, 701, 702, 703)]
    assert [live.decode_seconds > 0 for live in seen] == [False, False, True, True, True, True]
    assert [live.seconds for live in seen] == sorted(live.seconds for live in seen)
    receipt = engine.receipt(sequence)
    assert (receipt.visits.total, receipt.output_tokens) == (seen[-1].visits, seen[-1].output_tokens)


def test_the_rate_leaves_out_the_first_token_which_is_prefills() -> None:
    def rate(output_tokens: int) -> float | None:
        return Live(9, 9, output_tokens, 0, seconds=30.0, decode_seconds=2.0).tokens_per_second

    assert [rate(0), rate(1), rate(2), rate(21)] == [None, None, 0.5, 10.0]
