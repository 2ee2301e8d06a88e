"""What a Kev's decision cost, counted by loops over heads, layers and positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kev_cases import ATTENTION, FOLDERS, HYBRID, SEVERAL, kev_of, network_of, recorded_input, request_of

from heedful.cost.energy import estimate_energy
from heedful.decide.kev_receipt import KevPasses, kev_receipt
from heedful.decide.question import questions_from_json


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_receipt_counts_the_state_once(folder: str) -> None:
    """Visits by loops over heads, layers, positions: 4 heads; 2 attention layers, or 1 of the hybrid's 4."""
    layers = {ATTENTION: 2, HYBRID: 1}[folder]
    request = request_of(folder, SEVERAL[folder])
    receipt = kev_of(folder).decide(request["state"], questions_from_json(request["questions"])).receipt.to_dict()
    read = recorded_input(kev_of(folder)._reader, request)
    n, lengths = len(read.state_ids), [len(branch.ids) for branch in read.branches]
    made = 4 * layers * (sum(p + 1 for p in range(n)) + sum(p + 1 for t in lengths for p in range(n, n + t)))
    dense = 4 * layers * sum(p + 1 for t in lengths for p in range(n + t))
    assert receipt["visits"]["total"] == receipt["visits"]["prefill"] == made
    assert receipt["visits"]["dense"] == dense
    assert receipt["visits"]["saved"] == {"window": 0, "pages": 0, "prefix": dense - made}
    assert receipt["prompt_tokens"] == sum(n + t for t in lengths)
    assert receipt["cached_tokens"] == n * (len(lengths) - 1)
    assert receipt["kv"]["rows_read"] == 2 * 2 * layers * (n + sum(n + t for t in lengths))
    head_dim = network_of(kev_of(folder)).decoder.config.head_dim
    assert receipt["kv"]["bytes_written"] == 2 * 2 * layers * (n + sum(lengths)) * head_dim * 4
    config = network_of(kev_of(folder)).decoder.config
    head = 2 * 64 * 64 * len(lengths)
    assert receipt["weights"]["bytes_read"] == 4 * (2 * config.linear_weights + head)
    options = sum(len(branch.markers) for branch in read.branches)
    tokens = n + sum(lengths)
    linear = config.linear_weights * tokens + 64 * 64 * (len(lengths) + options)
    assert receipt["flops"] == {"linear": 2 * linear, "attention": 4 * config.head_dim * made, "selection": 0}
    assert receipt["as_text"]["visits"] > 0


def test_windows_are_counted_apart_from_the_shared_state() -> None:
    """A layer with a window of 8 and one without, a state of 20 read in steps of 12 and 8, branches of 5 and 9."""
    config = replace(network_of(kev_of(ATTENTION)).decoder.config, windows=(8, None))
    passes = KevPasses(state_len=20, state_steps=(12, 8), branch_lens=(5, 9), branch_steps=1, options=5)
    receipt = kev_receipt("kev", config, 0, passes, seconds=1.0, energy=estimate_energy(0, 0))

    def seen(first: int, last: int, window: int) -> int:
        return 4 * sum(min(p + 1, window) for p in range(first, last))

    made = sum(seen(0, 20, w) + seen(20, 25, w) + seen(20, 29, w) for w in (8, 99))
    dense = 2 * (seen(0, 25, 99) + seen(0, 29, 99))
    again = seen(0, 20, 8) + seen(0, 20, 99)
    assert (receipt.visits.total, receipt.visits.dense, receipt.visits.saved.prefix) == (made, dense, again)
    assert receipt.visits.saved.window == dense - made - again
    # by pass, the first key that any query sees up to the last one; 2 KV heads, keys and values
    assert receipt.kv.rows_read == 2 * 2 * ((12 + 20 + 25 + 29) + (12 + (20 - 5) + (25 - 13) + (29 - 13)))
