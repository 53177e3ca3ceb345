"""A request router for Ray Serve that uses our policies.

The router runs in the front, which sends the requests. Serve tells it which replicas exist, and passes on each
replica's report (`Replica.record_routing_stats`). For each request, Serve asks the router for a replica.
"""

from __future__ import annotations

import threading
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.forwarding import Forwarded
from cluster.policy import POLICIES, Load, LoadTable, Policy, Prefix


class PolicyRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types where it is not installed
    """Chooses replicas with a policy. Loads include the requests that this router sent since the last report."""

    def initialize_state(self, policy: str, seed: int, margin: float) -> None:
        """Set up the policy. Serve calls this once, with the arguments of the deployment."""
        self._policy: Policy = (
            Prefix(seed, margin=margin) if policy == Prefix.name else POLICIES[policy](seed)
        )
        self._table = LoadTable()
        self._chosen: dict[str, str] = {}  # request -> replica, until it has ended
        self._lock = threading.Lock()  # a request may end on another thread than it began on

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one replica. Serve asks again if that replica did not take the request."""
        assert pending_request is not None, "our requests are routed one by one"
        request: Forwarded = pending_request.args[0]
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        request_id = pending_request.metadata.internal_request_id
        with self._lock:
            self._end(request_id)  # if it was sent to a replica that did not take it
            for name, replica in replicas.items():
                self._read_report(name, replica.routing_stats)
            loads = {name: self._table.load(name) for name in replicas if name not in request.avoid}
            if request.holder in loads:
                chosen = request.holder
            else:
                chosen = self._policy.choose(
                    request.keys, loads or {name: self._table.load(name) for name in replicas}
                )
            self._chosen[request_id] = chosen
            self._table.begin(chosen)
        pending_request.future.add_done_callback(
            lambda future: self._give_up(request_id) if future.cancelled() else None
        )
        return [[replicas[chosen]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._lock:
            if self._chosen.get(internal_request_id) == replica_id.unique_id:
                self._end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        here = {each.replica_id.unique_id for each in replicas}
        with self._lock:
            for gone in {each.unique_id for each in self.curr_replicas} - here:
                self._policy.forget(gone)
            self._table.keep(here)
            self._chosen = {request: name for request, name in self._chosen.items() if name in here}
        super().update_replicas(replicas)

    def _read_report(self, name: str, stats: dict[str, Any]) -> None:
        if stats:
            report = dict(stats)
            number = report.pop("number")
            self._table.report(name, Load(**report), number)

    def _give_up(self, request_id: str) -> None:
        with self._lock:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        chosen = self._chosen.pop(request_id, None)
        if chosen is not None:
            self._table.end(chosen)
