"""Which tokens of a step use which adapter: the base's own come first, then those of one adapter after the other."""

from __future__ import annotations

from typing import NamedTuple

from heedful.request import Batch


class AdapterRun(NamedTuple):
    """Tokens [begin, end) of a batch that an adapter is for, and places [wanted_begin, wanted_end) of those whose
    logits are wanted."""

    adapter: str
    begin: int
    end: int
    wanted_begin: int
    wanted_end: int

    @property
    def wanted(self) -> int:
        return self.wanted_end - self.wanted_begin


def adapter_runs(batch: Batch) -> list[AdapterRun]:
    """Ascending, without overlaps; [] for a batch of the base alone. Neighbours with one adapter are one run."""
    runs: list[AdapterRun] = []
    end = wanted_end = 0
    for chunk in batch.chunks:
        begin, end = end, end + chunk.end - chunk.start
        wanted_begin, wanted_end = wanted_end, wanted_end + chunk.num_logits
        adapter = chunk.sequence.request.adapter
        if adapter is None:
            continue
        if runs and runs[-1].adapter == adapter and runs[-1].end == begin:
            _, begin, _, wanted_begin, _ = runs.pop()
        runs.append(AdapterRun(adapter, begin, end, wanted_begin, wanted_end))
    return runs
