"""Simulates servers and their clients: virtual time advances from one event to the next.

```text
   arrivals, in order ──> route ──> a server's door ──> add_request ──> step ──> outputs ──> observer
            ^                                                                        │
            └─────────── the next request of a client that waited for them ──────────┘
```

A request waits at a server's door until the engine's queue takes it. Each server has a clock of its own, which its
steps advance. Events are handled in the order of their times, so a server begins its next step only when all other
servers have reached that time.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from common.engine.engine import Engine
from common.request import Request, SamplingParams, StepOutput
from simulator.arrivals import Arrival
from simulator.runner import SimulatedRunner


class Observer(Protocol):
    """Receives the events of a simulation. Times are seconds since it began."""

    def on_sent(self, arrival: Arrival, prompt_tokens: int, time_s: float) -> None:
        """A client sends a request."""

    def on_outputs(self, outputs: Sequence[StepOutput], time_s: float) -> None:
        """Clients receive the outputs of a step. Request ids are the arrivals' indices."""


class Server:
    """A simulated engine, and the requests that were sent to it and are not in its queue yet (at its door).

    A request that finds the queue full waits at the door, like a client that retries at once.

    Attributes:
        changes: a number that grows whenever the server's load may have changed.
    """

    def __init__(self, engine: Engine) -> None:
        runner = engine.runner
        if not isinstance(runner, SimulatedRunner):
            raise TypeError("an engine that computes cannot be simulated: see simulate_engine")
        self.engine = engine
        self.clock, self.cost = runner.clock, runner.cost
        self.changes = 0
        self._door: deque[tuple[float, Request]] = deque()

    def send(self, request: Request, time_s: float) -> None:
        self._door.append((time_s + self.cost.arrival_s, request))
        self.changes += 1

    def next_s(self) -> float | None:
        """Return the time at which `go_on` must be called next; None: not before another request is sent."""
        wake = self.engine.next_wake()
        if self._door and self.engine.scheduler.queue_room() > 0:
            arrival = max(self.clock.now, self._door[0][0])
            return arrival if wake is None else min(wake, arrival)
        return wake

    def go_on(self, time_s: float) -> Sequence[StepOutput] | None:
        """Queue the requests that arrived by `time_s`, and run a step if one is due. Returns the step's outputs.

        Returns None if no step was due, or if the engine had to wait for an earlier step beyond `time_s`: other
        requests may have arrived meanwhile, so `go_on` must be called again.
        """
        self.changes += 1
        self.clock.wait_until(time_s)
        if self.engine.is_due:
            self.engine.wait()
            if self.clock.now > time_s:
                return None
        while self._door and self._door[0][0] <= self.clock.now:
            if not self.engine.add_request(self._door[0][1]):
                break
            self._door.popleft()
        return self.engine.step() if self.engine.is_due else None

    def rest(self, tokens: int) -> None:
        """Advance the clock by the time between a step that delivered `tokens` tokens and the next step."""
        self.clock.advance(self.cost.between_s + self.cost.between_row_s * tokens)

    @property
    def at_the_door(self) -> int:
        """Return the number of requests that were sent here and are not in the engine's queue yet."""
        return len(self._door)

    @property
    def waiting(self) -> int:
        """Return how many requests were sent here and have no seat now: not admitted yet, or preempted."""
        return len(self._door) + self.engine.scheduler.num_waiting


Route = Callable[[Sequence[int], Sequence[Server]], int]


def first_server(_prompt: Sequence[int], _servers: Sequence[Server]) -> int:
    return 0


def run(
    engines: Engine | Sequence[Engine],
    arrivals: Iterable[Arrival],
    observer: Observer,
    *,
    route: Route = first_server,
) -> float:
    """Serve all arrivals to their end. Returns the simulated seconds.

    Args:
        engines: made by `simulate_engine`, without requests.
        arrivals: in the order of their times. A request with `after` comes after the request that `after` names.
        observer: is called for each event.
        route: returns the index of the server that gets a prompt; by default the first server gets all.

    Raises:
        ValueError: a request is too long for the engines, or the request that `after` names was not read yet or was
            answered already.
    """
    servers = [Server(engine) for engine in ([engines] if isinstance(engines, Engine) else engines)]
    return _Simulation(servers, arrivals, observer, route).run()


# The order of events at the same time: clients get their answers, then requests come, then steps begin.
_ANSWER, _ARRIVAL, _STEP = range(3)


class _Simulation:
    def __init__(
        self, servers: Sequence[Server], arrivals: Iterable[Arrival], observer: Observer, route: Route
    ) -> None:
        self._servers = servers
        self._arrivals = iter(arrivals)
        self._next: Arrival | None = None  # the next arrival without `after`, read and not yet scheduled
        self._observer = observer
        self._route = route
        self._limit = min(server.engine.maker.facts.max_request_tokens for server in servers)
        configs = [server.engine.config for server in servers]
        # While all seats and queues are full, an arrival becomes a request only when another request ends.
        self._most_live = sum(config.max_batch_size + config.max_waiting_requests for config in configs)
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        # Events of the same time and kind happen in the order in which they were added.
        self._places = itertools.count()
        # The time of each server's next step event. A step event with another time is out of date.
        self._due: dict[Server, float] = {}
        self._live: dict[str, Request] = {}
        # Index of each unanswered arrival -> arrivals that wait for its answer.
        self._followers: dict[int, list[Arrival]] = {}
        self._is_reading = True

    def run(self) -> float:
        now = 0.0
        self._next = self._read()
        self._read_on(now)
        while self._events:
            now, _, _, happen = heapq.heappop(self._events)
            happen(now)
        return now

    def _at(self, time_s: float, kind: int, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, kind, next(self._places), happen))

    # ------------------------------------------------------------------ clients

    def _read_on(self, now: float) -> None:
        """Schedule the next arrival without `after`, and read the arrivals behind it.

        Does nothing while as many requests are unanswered as all seats and queues hold.
        """
        self._is_reading = len(self._followers) < self._most_live
        if self._is_reading and self._next is not None:
            arrival = self._next
            self._followers[arrival.index] = []
            self._at(max(arrival.at_s, now), _ARRIVAL, functools.partial(self._arrive, arrival))
            self._next = self._read()

    def _read(self) -> Arrival | None:
        """Read arrivals up to the next arrival without `after`, and return it. The arrivals before it are sent when
        the answer to their `after` ends."""
        for arrival in self._arrivals:
            if arrival.after is None:
                return arrival
            if arrival.after not in self._followers:
                raise ValueError(
                    f"arrival {arrival.index} comes after {arrival.after}, which is not on its way"
                )
            self._followers[arrival.index] = []
            self._followers[arrival.after].append(arrival)
        return None

    def _arrive(self, arrival: Arrival, now: float) -> None:
        self._read_on(now)
        self._send(arrival, list(arrival.prompt), arrival.at_s)

    def _send(self, arrival: Arrival, prompt: list[int], time_s: float) -> None:
        if len(prompt) + arrival.new_tokens > self._limit:
            raise ValueError(
                f"arrival {arrival.index} has {len(prompt)} tokens and asks for {arrival.new_tokens}; "
                f"{self._limit} are the most that a request can have"
            )
        request = Request(str(arrival.index), prompt, params(arrival.new_tokens))
        server = self._servers[self._route(prompt, self._servers)]
        self._live[request.request_id] = request
        self._observer.on_sent(arrival, len(prompt), time_s)
        server.send(request, time_s)
        self._schedule(server)

    def _answer(self, outputs: Sequence[StepOutput], now: float) -> None:
        self._observer.on_outputs(outputs, now)
        for output in outputs:
            if output.finished:
                request = self._live.pop(output.request_id)
                for follower in self._followers.pop(int(output.request_id)):
                    before = request.token_ids if follower.continues else []
                    happen = functools.partial(self._send, follower, [*before, *follower.prompt])
                    self._at(now + follower.at_s, _ARRIVAL, happen)
        if not self._is_reading:
            self._read_on(now)

    # ------------------------------------------------------------------ servers

    def _schedule(self, server: Server) -> None:
        time_s = server.next_s()
        if time_s is not None and self._due.get(server) != time_s:
            self._due[server] = time_s
            self._at(time_s, _STEP, functools.partial(self._go_on, server))

    def _go_on(self, server: Server, now: float) -> None:
        if self._due.get(server) != now:
            return
        del self._due[server]
        outputs = server.go_on(now)
        if outputs is not None:
            if outputs:
                answer = functools.partial(self._answer, outputs)
                self._at(server.clock.now + server.cost.delivery_s, _ANSWER, answer)
            server.rest(len(outputs))
        self._schedule(server)


@functools.cache
def params(new_tokens: int) -> SamplingParams:
    """Return sampling parameters for exactly `new_tokens` tokens, with a seed, so that the engine draws none."""
    return SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True, seed=0)
