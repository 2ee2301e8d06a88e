"""Who does what of a step's work: items shared among ranks by their cost. The same answer in every process, so nothing
is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import TypeVar

Item = TypeVar("Item")


def shares(items: Sequence[Item], cost: Callable[[Item], int], ranks: int) -> list[list[Item]]:
    """The dearest first, each to the rank that has least so far; at most 4/3 − 1 / (3 · ranks) of the best possible
    (R. L. Graham, 1969). Within a rank the items keep their order. A rank may have none.
    """
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    costs = [cost(item) for item in items]
    owners = [0] * len(items)
    for place in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        owners[place] = rank
        heapreplace(loads, (load + costs[place], rank))
    return [[item for item, owner in zip(items, owners, strict=True) if owner == rank] for rank in range(ranks)]


def own_parts(
    items: Sequence[Item],
    cost: Callable[[Item], int],
    in_parts: Callable[[Sequence[Item]], list[list[Item]]],
    *,
    rank: int,
    ranks: int,
) -> list[list[Item]]:
    """This rank's share, in the parts that `in_parts` makes of one. Every rank gets as many, since they wait for each
    other in each: some may be empty.
    """
    if ranks == 1:
        return in_parts(items)
    by_rank = [in_parts(share) if share else [] for share in shares(items, cost, ranks)]
    most = max(map(len, by_rank))
    return by_rank[rank] + [[] for _ in range(most - len(by_rank[rank]))]
