"""A request router for Ray Serve that uses our policies.

The router runs in the front, which sends the requests. Serve tells it which replicas exist, and passes on each
replica's report (`Replica.record_routing_stats`). For each request, Serve asks the router for a replica.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.forwarding import Forwarded
from cluster.policy import POLICIES, Load, LoadTable, Policy, Prefix


class PolicyRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types where it is not installed
    """Chooses replicas with a policy. Serve calls the methods on one event loop."""

    def initialize_state(self, policy: str, seed: int, margin: float) -> None:
        """Set up the policy. Serve calls this once, with the arguments of the deployment."""
        self._policy: Policy = (
            Prefix(seed, margin=margin) if policy == Prefix.name else POLICIES[policy](seed)
        )
        self._table = LoadTable()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one replica. Serve asks again if that replica did not take the request."""
        assert pending_request is not None, "our requests are routed one by one"
        request: Forwarded = pending_request.args[0]
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        for name, replica in replicas.items():
            if replica.routing_stats:
                report = dict(replica.routing_stats)
                self._table.report(name, number=report.pop("number"), load=Load(**report))
        loads = {name: self._table.load(name) for name in replicas}
        untried = {name: load for name, load in loads.items() if name not in request.avoid}
        if request.holder in untried:
            chosen = request.holder
        else:
            chosen = self._policy.choose(request.keys, untried or loads)
        self._table.count(chosen, 1)  # a request that is not sent after all counts until the next report
        return [[replicas[chosen]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002
        self._table.count(replica_id.unique_id, -1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        here = {each.replica_id.unique_id for each in replicas}
        for gone in {each.unique_id for each in self.curr_replicas} - here:
            self._policy.forget(gone)
        self._table.keep(here)
        super().update_replicas(replicas)
