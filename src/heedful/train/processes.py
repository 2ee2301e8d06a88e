"""Which of how many processes this one is: what torchrun tells each of them. Knows nothing of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from heedful.errors import UsageError


@dataclass(frozen=True)
class ParallelSettings:
    """How the processes that torchrun starts share a model. Of what is None, their number decides."""

    data: int | None = None
    """Ranks that share the batch, and weights and optimizer by rows. None: all processes over `tensor`."""
    tensor: int | None = None
    """Ranks that share every matrix of a layer. None: 1."""
    timeout: int = 1800
    """Seconds that a process waits for the others before the run ends."""


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
