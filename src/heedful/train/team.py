"""The processes of one run and what they tell each other: torch.distributed, over gloo. A team of one says nothing.

They lie in a grid of data ranks × tensor ranks, neighbours being tensor ranks: those talk most, so they should share a
machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from heedful.errors import ProcessLost
from heedful.train.layout import Layout
from heedful.train.processes import Processes, grid
from heedful.train.settings import ParallelSettings

_REMEDY = (
    "What it said is above or in its log. Go on from the newest checkpoint, with as many processes as you like: "
    "the same command with --resume --out FOLDER alone."
)
FIRST_TO_PREPARE = timedelta(days=1)
"""How long the others wait while the first process tokenizes. One that dies is noticed at once all the same."""


ALONE = Processes()


@dataclass(frozen=True)
class Team:
    processes: Processes = ALONE
    mesh: DeviceMesh | None = None
    """Dimensions "data" and "tensor"; None: there is one process."""
    waiting: dist.ProcessGroup | None = None
    """All of them, for waits that may be long."""

    @property
    def is_first(self) -> bool:
        return self.processes.rank == 0

    @property
    def data_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["data"].size()

    @property
    def tensor_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["tensor"].size()

    @property
    def data_rank(self) -> int:
        return self.processes.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.processes.rank % self.tensor_size

    # ---- numbers

    def sum_over_data(self, *numbers: float) -> list[float]:
        """Of the data ranks; tensor ranks of one data rank have the same numbers."""
        return self._reduced(numbers, "data")

    def sum_over_all(self, number: float) -> float:
        return number if self.mesh is None else self._reduced([number], None)[0]

    def largest(self, number: int) -> int:
        if self.mesh is None:
            return number
        held = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return int(held)

    def of_first(self, number: int) -> int:
        """The first process's number."""
        if self.mesh is None:
            return number
        held = torch.tensor(number, dtype=torch.int64)
        dist.broadcast(held, 0)
        return int(held)

    def _reduced(self, numbers: Sequence[float], dimension: str | None) -> list[float]:
        if self.mesh is None:
            return list(numbers)
        held = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(held, group=None if dimension is None else self.mesh.get_group(dimension))
        return [float(each) for each in held]

    # ---- tensors

    def add_up(self, tensors: Sequence[Tensor], dimension: str) -> None:
        """In place, over the ranks of a dimension; one message for all."""
        if self.mesh is None or not tensors or self.mesh[dimension].size() == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self.mesh.get_group(dimension))
        for tensor, sums in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(sums.view_as(tensor))

    def to_owners(
        self, layouts: Sequence[Layout], parts: Sequence[Tensor], owners: Sequence[int]
    ) -> list[Tensor | None]:
        """Each tensor whole at the rank that owns it, from the parts of all ranks; None elsewhere."""
        if self.mesh is None:
            return list(parts)
        items = list(zip(layouts, parts, owners, strict=True))
        mine = [layout for layout, owner in zip(layouts, owners, strict=True) if owner == self.processes.rank]
        out = [
            [part for layout, part, owner in items if owner == rank and layout.is_holder(*self._place())]
            for rank in range(self.processes.size)
        ]
        expected = [
            [layout.part_shape(data) for layout in mine if layout.is_holder(data, tensor)]
            for data, tensor in self._places()
        ]
        received = [iter(tensors) for tensors in self._exchanged(out, expected)]
        wholes: list[Tensor | None] = []
        for layout, _, owner in items:
            wholes.append(layout.joined(self._taken(layout, received)) if owner == self.processes.rank else None)
        return wholes

    def _taken(self, layout: Layout, received: Sequence[Iterator[Tensor]]) -> list[list[Tensor]]:
        """`[tensor rank][data rank]`, of the ranks that hold something of it."""
        by_tensor: dict[int, list[Tensor]] = {}
        for tensors, (data, tensor) in zip(received, self._places(), strict=True):
            if layout.is_holder(data, tensor):
                by_tensor.setdefault(tensor, []).append(next(tensors))
        return list(by_tensor.values())

    def from_owners(
        self, layouts: Sequence[Layout], wholes: Sequence[Tensor | None], owners: Sequence[int]
    ) -> list[Tensor]:
        """The way back: this rank's part of each."""
        if self.mesh is None:
            return [whole for whole in wholes if whole is not None]
        items = list(zip(layouts, wholes, owners, strict=True))
        out = [
            [layout.part(whole, data, tensor) for layout, whole, _ in items if whole is not None]
            for data, tensor in self._places()
        ]
        mine = self.data_rank
        expected = [
            [layout.part_shape(mine) for layout, _, owner in items if owner == rank]
            for rank in range(self.processes.size)
        ]
        received = [iter(tensors) for tensors in self._exchanged(out, expected)]
        return [next(received[owner]) for _, _, owner in items]

    def _exchanged(
        self, out: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """`out[rank]` goes there, float32; what comes from each rank has the `expected` shapes."""
        sizes = [[torch.Size(shape).numel() for shape in shapes] for shapes in expected]
        flat = [tensor.reshape(-1) for tensors in out for tensor in tensors]
        to_send = torch.cat(flat) if flat else torch.empty(0)
        incoming = torch.empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            incoming, to_send, [sum(each) for each in sizes], [sum(t.numel() for t in tensors) for tensors in out]
        )
        pieces = iter(torch.split(incoming, [n for each in sizes for n in each]))
        return [[next(pieces).view(shape) for shape in shapes] for shapes in expected]

    def _place(self) -> tuple[int, int]:
        return self.data_rank, self.tensor_rank

    def _places(self) -> list[tuple[int, int]]:
        return [divmod(rank, self.tensor_size) for rank in range(self.processes.size)]

    # ---- order

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """The first process does what is inside, then the others do."""
        if not self.is_first:
            self._meet()
        yield
        if self.is_first:
            self._meet()

    def _meet(self) -> None:
        if self.mesh is not None:
            dist.barrier(group=self.waiting)


@contextmanager
def joined(processes: Processes, settings: ParallelSettings) -> Iterator[Team]:
    """Raises BadParameter when the settings are of another number of processes, and, out of what is inside, ProcessLost
    when another process has ended or says nothing for `parallel.timeout` seconds.
    """
    data, tensor = grid(processes.size, settings)
    if processes.size == 1:
        yield Team()
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout))
    try:
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        yield Team(processes, mesh, dist.new_group(backend="gloo", timeout=FIRST_TO_PREPARE))
    except (RuntimeError, dist.DistError) as error:
        if not _is_of_connections(error):
            raise
        raise ProcessLost(processes.rank, processes.size, _cause(error), _REMEDY) from error
    finally:
        dist.destroy_process_group()


def _cause(error: BaseException) -> str:
    """The first sentence, without the place in gloo's source."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0].splitlines()[0][:200]


def _is_of_connections(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)
