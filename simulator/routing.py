"""Routes requests to simulated servers by the policies of `cluster.policy`. Loads are read from the engines."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence

from cluster.policy import POLICIES, Load, Policy, prefix_keys
from simulator.loop import Server

__all__ = ["POLICIES", "Routed"]


class Routed:
    """Routes prompts by a policy. The policy sees the servers' present loads, not reported loads.

    Attributes:
        decisions: the number of prompts for which the policy chose among several servers.
        seconds: processor time of these decisions, prefix keys included.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.decisions = 0
        self.seconds = 0.0
        self._names: dict[str, int] = {}
        self._loads: dict[str, Load] = {}
        self._seen: list[int] = []  # each server's `changes` when its load was computed

    def __call__(self, prompt: Sequence[int], servers: Sequence[Server]) -> int:
        if len(servers) == 1:
            return 0
        loads = self._loads_of(servers)
        text = array("i", prompt).tobytes()  # 64 bytes are 16 token ids: a block
        started = time.thread_time()
        name = self.policy.choose(prefix_keys(text), loads)
        self.seconds += time.thread_time() - started
        self.decisions += 1
        return self._names[name]

    def _loads_of(self, servers: Sequence[Server]) -> Mapping[str, Load]:
        """Return the loads of all servers. A load is computed again only if its server has changed."""
        if not self._names:
            self._names = {f"replica {place:04}": place for place in range(len(servers))}
            self._seen = [-1] * len(servers)
        for (name, place), server in zip(self._names.items(), servers, strict=True):
            if self._seen[place] != server.changes:
                self._seen[place] = server.changes
                self._loads[name] = load_of(server)
        return self._loads


def load_of(server: Server) -> Load:
    """Return the load that a replica of a cluster would report in the server's place."""
    engine = server.engine
    return Load(
        seats=engine.config.max_batch_size,
        active=len(engine.scheduler.active),
        waiting=server.waiting,
        queue_room=engine.scheduler.queue_room() - server.at_the_door,
        kv_use=engine.runner.pool.reserved_tokens / engine.config.kv_tokens(),
    )
