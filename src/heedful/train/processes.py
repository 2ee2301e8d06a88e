"""Which of how many processes this one is: what torchrun tells each of them. Knows nothing of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from heedful.errors import BadParameter, UsageError
from heedful.train.settings import ParallelSettings


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    size: int = 1
    """On all machines together."""
    local_rank: int = 0
    local_size: int = 1
    """On this machine."""

    def resume_command(self, run: str) -> str:
        if self.size == 1:
            return f"heedful train --resume --out {run}"
        more = "" if self.local_size == self.size else f"--nnodes {self.size // self.local_size} --rdzv-backend … "
        return f"torchrun {more}--nproc-per-node {self.local_size} -m heedful.train --resume --out {run}"


def from_environment(environment: Mapping[str, str] = os.environ) -> Processes:
    """Raises UsageError for what torchrun would not say."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Processes()
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        raise UsageError(f"RANK and its like are no numbers: {error}", "Start the processes with torchrun.") from None
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UsageError(f"RANK is {rank} of WORLD_SIZE {size}", "Start the processes with torchrun.")
    return Processes(rank, size, local_rank, local_size)


def grid(size: int, settings: ParallelSettings) -> tuple[int, int]:
    """(data ranks, tensor ranks). Raises BadParameter."""
    tensor = settings.tensor or (1 if settings.data is None else max(1, size // settings.data))
    data = settings.data or max(1, size // tensor)
    if data * tensor != size:
        raise BadParameter(
            "parallel.data" if settings.data else "parallel.tensor",
            f"{data} data ranks times {tensor} tensor ranks are {data * tensor} processes, {size} "
            f"{'is' if size == 1 else 'are'} there",
            "Start as many with torchrun --nproc-per-node; or leave the setting out.",
        )
    return data, tensor


def fitting(size: int, settings: ParallelSettings) -> ParallelSettings:
    """Those of a run, or what becomes of them where another number of processes goes on with it: data ranks alone."""
    fits = settings.tensor is None or size % settings.tensor == 0
    return replace(settings, data=None, tensor=settings.tensor if fits else None)
