"""Which part of a tensor each process holds, and how the parts make the whole again. Plain arithmetic on shapes.

Processes lie in a grid of data ranks × tensor ranks. Tensor ranks cut a matrix first: by its rows, where what is fused
in it is cut matrix by matrix, so that a rank has whole heads of q, of k and of v; or by its columns. Data ranks then
cut the rows that are left, the first ones ⌈rows / ranks⌉ each, as FSDP2 does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    shape: tuple[int, ...]
    """Of the whole."""
    data_parts: int = 1
    """1: every data rank holds all of it."""
    tensor_parts: int = 1
    tensor_dim: int | None = None
    """None: every tensor rank holds all of it."""
    fused_rows: tuple[int, ...] = ()
    """Where `tensor_dim` is 0: the rows of each matrix in it."""

    def of_tensor_rank(self, whole: Tensor, rank: int) -> Tensor:
        if self.tensor_dim is None:
            return whole
        if self.tensor_dim == 1:
            return whole.chunk(self.tensor_parts, dim=1)[rank]
        return torch.cat(
            [matrix.chunk(self.tensor_parts)[rank] for matrix in torch.split(whole, list(self.fused_rows))]
        )

    def part(self, whole: Tensor, data_rank: int, tensor_rank: int) -> Tensor:
        assert tuple(whole.shape) == self.shape, (whole.shape, self.shape)
        first, last = self._rows(data_rank)
        return self.of_tensor_rank(whole, tensor_rank)[first:last]

    def part_shape(self, data_rank: int) -> tuple[int, ...]:
        """The same for all tensor ranks."""
        first, last = self._rows(data_rank)
        return (last - first, *self._tensor_shape[1:])

    def joined(self, parts: list[list[Tensor]]) -> Tensor:
        """`parts[tensor rank][data rank]`, one of each rank that `holders` names."""
        of_tensor_ranks = [by_data[0] if len(by_data) == 1 else torch.cat(by_data) for by_data in parts]
        if self.tensor_dim is None:
            return of_tensor_ranks[0]
        if self.tensor_dim == 1:
            return torch.cat(of_tensor_ranks, dim=1)
        rows = [n // self.tensor_parts for n in self.fused_rows]
        by_matrix = zip(*(torch.split(part, rows) for part in of_tensor_ranks), strict=True)
        return torch.cat([piece for matrix in by_matrix for piece in matrix])

    def is_holder(self, data_rank: int, tensor_rank: int) -> bool:
        """Whether this rank's part is needed: one of each kind is."""
        return (data_rank < self.data_parts) and (tensor_rank == 0 or self.tensor_dim is not None)

    @property
    def _tensor_shape(self) -> tuple[int, ...]:
        if self.tensor_dim is None:
            return self.shape
        cut = [n // self.tensor_parts if dim == self.tensor_dim else n for dim, n in enumerate(self.shape)]
        return tuple(cut)

    def _rows(self, data_rank: int) -> tuple[int, int]:
        rows = self._tensor_shape[0]
        if self.data_parts == 1:
            return 0, rows
        each = -(-rows // self.data_parts)
        return min(data_rank * each, rows), min((data_rank + 1) * each, rows)

    def part_size(self, data_rank: int) -> int:
        return math.prod(self.part_shape(data_rank))
