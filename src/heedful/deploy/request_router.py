"""Request routers of Ray Serve: router/affinity.py, and chance, to compare it with. Each process that asks has one, and
knows what it sent.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from heedful.deploy.forwarded import Forwarded
from heedful.router.affinity import Affinity, Placement


class AffinityRouter(RequestRouter):
    """Replicas by their unique ids. In its handle's loop alone."""

    def initialize_state(self, **kwargs: Any) -> None:
        assert not kwargs, kwargs
        self._affinity: Affinity[str] = Affinity()
        self._open: dict[str, tuple[Placement[str], tuple[int, ...]]] = {}
        """By request; what is chosen is load at once: others are chosen for before it is sent."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        there = {replica.replica_id.unique_id for replica in replicas}
        for name in set(self._affinity.replicas) - there:
            self._affinity.remove(name)
        for name in sorted(there):
            self._affinity.add(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if replica_id.unique_id in self._affinity.replicas:
            self._affinity.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        available = self.select_available_replicas(candidate_replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in available}
        by_name = {name: replica for name, replica in by_name.items() if name in self._affinity.replicas}
        if pending_request is None or not by_name:
            return [available]
        asked = pending_request.args[0]
        assert isinstance(asked, Forwarded), type(asked)
        request = pending_request.metadata.internal_request_id
        self._end(request)  # chosen for before, and not sent
        among = (by_name.keys() - asked.unlike) or by_name.keys()
        placement = self._affinity.choose(asked.blocks, asked.work, among)
        self._begin(request, placement, asked.blocks)
        pending_request.future.add_done_callback(lambda future: self._end(request) if future.cancelled() else None)
        return [[by_name[placement.replica]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """It may have been sent to another than the one that was chosen for it."""
        request = pending_request.metadata.internal_request_id
        name, (placement, blocks) = replica_id.unique_id, self._open.get(request, (None, ()))
        if (placement is None or placement.replica != name) and name in self._affinity.replicas:
            asked = pending_request.args[0]
            self._end(request)
            self._begin(request, self._affinity.choose(asked.blocks, asked.work, {name}), blocks or asked.blocks)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._end(internal_request_id)

    def _begin(self, request: str, placement: Placement[str], blocks: tuple[int, ...]) -> None:
        self._affinity.begin(placement, blocks)
        self._open[request] = (placement, blocks)

    def _end(self, request: str) -> None:
        found = self._open.pop(request, None)
        if found is not None:
            self._affinity.end(found[0])


class RandomRouter(RequestRouter):
    """Any replica that has room, whatever is asked and whatever it has to do."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        available = self.select_available_replicas(candidate_replicas)
        return [[random.choice(available)] if available else []]
