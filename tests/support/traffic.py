"""Random traffic for one engine: requests come, are cancelled and fail. No memory leaks, no output comes twice."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from common.engine.requests import Handling
from common.errors import NaNLogitsError
from common.request import Request, RequestState, SamplingParams, StepOutput
from phase6_paged.cache import PagedKVCachePool
from tests.support.engines import EOS, RememberingModel, assert_all_free, build, chained, greedy, one_hot
from tests.support.pools import assert_consistent, shuffle_free_blocks

NAN_TOKEN = 250  # a prompt that begins with it gets NaN logits after a few tokens
MAX_SEQ_LEN = 40


def answer(token_ids: list[int]) -> int | Tensor:
    """Return the next token: `chained`, sometimes EOS, or NaN logits if the prompt begins with `NAN_TOKEN`."""
    token_id = chained(token_ids)
    if token_ids[0] == NAN_TOKEN and len(token_ids) > 6:
        return one_hot(0, math.nan)
    return EOS if token_id % 13 == 0 else token_id


class Traffic:
    """An engine with a `RememberingModel`, and the requests that it must answer.

    Attributes:
        priorities: priorities of the requests, used in turn.
    """

    priorities: Sequence[int] = (0,)

    def __init__(self, phase: str, **options: Any) -> None:
        self.model = RememberingModel(rule=answer)
        self.engine = build(
            phase, self.model, max_seq_len=MAX_SEQ_LEN, max_batch_size=3, max_waiting_requests=4, **options
        )
        self.live: dict[str, Request] = {}
        self.told: dict[str, list[StepOutput]] = {}
        self.cancelled: set[str] = set()
        self.guilty: int | None = None
        self.operations = 0
        self.model.before_pass = self._fail_if_told_to

    def _fail_if_told_to(self, sequences: list[list[int]]) -> None:
        if self.guilty is not None and any(len(ids) % 3 == self.guilty for ids in sequences):
            raise RuntimeError("told to fail")

    # ------------------------------------------------------------------ operations

    def add(self, first: int, prompt_tokens: int, new_tokens: int) -> None:
        self.operations += 1
        params: SamplingParams = greedy(min(new_tokens, MAX_SEQ_LEN - prompt_tokens))
        priority = self.priorities[self.operations % len(self.priorities)]
        request = self.engine.maker.create(
            [first] + [7] * (prompt_tokens - 1), params, handling=Handling(priority=priority)
        )
        room = self.engine.scheduler.queue_room()
        accepted = self.engine.add_request(request)
        assert accepted == (room > 0)
        if accepted:
            self.live[request.request_id] = request
            self.told[request.request_id] = []

    def cancel(self, choice: int) -> None:
        """Cancel a request that has not ended, chosen by its place in the order of arrival."""
        self.operations += 1
        if self.live:
            request_id = sorted(self.live, key=lambda i: self.live[i].arrival)[choice % len(self.live)]
            self.engine.cancel(request_id)
            self.cancelled.add(request_id)

    def step(self, guilty: int | None = None) -> None:
        """Run a step. Passes with a sequence whose length mod 3 is `guilty` fail."""
        self.operations += 1
        self.guilty = guilty
        for output in self.engine.step():
            self._hear(output)
        self.guilty = None
        self.check()

    def abort(self) -> None:
        """End every request with one error."""
        self.operations += 1
        for output in self.engine.abort_all(RuntimeError("told to fail: all")):
            self._hear(output)
        assert not self.live
        self.check()

    def finish(self) -> None:
        """Run until no work is left. Then all requests must have ended, and all memory must be free."""
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.live
        assert_all_free(self.engine)

    # ------------------------------------------------------------------ what must hold

    def _hear(self, output: StepOutput) -> None:
        request = self.live[output.request_id]  # KeyError: it has had its terminal output
        heard = self.told[output.request_id]
        heard.append(output)
        if output.token_id is not None:
            spoken = [o.token_id for o in heard]
            before = [*request.prompt_token_ids, *(t for t in spoken[:-1] if t is not None)]
            assert output.token_id == answer(before), "a token that is not the request's own"
            assert request.scheduled_s is not None, "a token of a request that was never scheduled"
        if output.finished:
            del self.live[output.request_id]
            if isinstance(output.error, NaNLogitsError):
                assert request.prompt_token_ids[0] == NAN_TOKEN
            elif output.error is not None:
                assert "told to fail" in str(output.error)
            assert (output.finish_reason == "cancelled") == (output.request_id in self.cancelled)

    def check(self) -> None:
        scheduler, pool = self.engine.scheduler, self.engine.runner.pool
        active = scheduler.active
        slots = [request.slot for request in active]
        assert None not in slots
        assert len(set(slots)) == len(slots) <= 3, "a slot is shared"
        assert set(pool._lengths) == set(slots), "a slot is held by nobody, or not by its pool"
        line = [request for request in scheduler.waiting if not request.preemptions]
        assert line == sorted(line, key=lambda request: request.rank)
        assert list(scheduler.waiting)[-len(line) :] == line or not line, "preempted requests go first"
        latest = {request.priority: request.arrival for request in sorted(active, key=lambda r: r.arrival)}
        for request in self.live.values():
            waits = request.state is RequestState.WAITING
            assert waits == (request.slot is None)
            assert waits != (request in active)
            assert not waits or request.prefill_progress == 0
            assert not waits or request.arrival > latest.get(request.priority, -1), "overtaken"
            if request.slot is not None:
                columns = pool.get_seq_len(request.slot)
                assert columns == request.prefill_progress
                if request.state is RequestState.PREFILL:
                    assert columns < len(request.token_ids) <= pool.capacity(request.slot)
                else:
                    assert columns == request.num_tokens - 1
        waiting = sum(request.state is RequestState.WAITING for request in self.live.values())
        assert waiting <= scheduler.num_waiting <= 4 + 3
        assert pool.used_tokens <= pool.reserved_tokens
        assert self.engine.has_work or pool.reserved_tokens == 0, "held for those who left"
        assert_consistent(pool)
        if isinstance(pool, PagedKVCachePool):
            shuffle_free_blocks(pool, seed=self.operations)


def random_traffic(traffic: Traffic, operations: int, seed: int) -> None:
    """Run `operations` random operations on one engine, then drain it and check that all memory is free."""
    rng = random.Random(seed)
    while traffic.operations < operations:
        match rng.random():
            case draw if draw < 0.35:
                traffic.add(rng.randint(235, NAN_TOKEN), rng.randint(1, 20), rng.randint(1, 12))
            case draw if draw < 0.42:
                traffic.cancel(rng.randrange(8))
            case draw if draw < 0.45:
                traffic.step(rng.randrange(3))
            case draw if draw < 0.452:
                traffic.abort()
            case _:
                traffic.step()
    traffic.finish()


def assert_everything_happened(traffic: Traffic) -> None:
    """Assert that requests ended in every way, since a run without failures would prove nothing."""
    counters = traffic.engine.telemetry.counters
    ends = [outputs[-1] for outputs in traffic.told.values()]
    assert len(ends) == counters.requests_added
    assert {end.finish_reason for end in ends} >= {"eos", "length", "cancelled", None}
    assert any(isinstance(end.error, NaNLogitsError) for end in ends)
    assert counters.failed_passes > 10
    assert min(counters.requests_finished, counters.requests_failed, counters.requests_cancelled) > 10
