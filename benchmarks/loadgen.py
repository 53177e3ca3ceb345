"""The load generator: sends a plan's requests on time and returns their timelines.

The load generator runs in a process of its own, so that the progress bar takes no processor time from it. The
report shows how much processor time that process used. `run_load` starts the process, and `generate_load` runs in
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import httpx
import orjson

from benchmarks.client import AnswerReader, Endpoint, new_record, send
from benchmarks.results import Generator, RequestRecord
from benchmarks.workloads import PlannedRequest

START_DELAY_S = 0.05  # between the warm-up's end and the first request
WATCH_EVERY_S = 0.1
NO_STEPS = 2**53  # later than any step: `/telemetry` then returns counters and no steps

Progress = Callable[[int, int, int], None]  # finished, failed, total


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests to send, where to, and when to give up.

    Attributes:
        requests: the measured requests, in the order of their `index`.
        warmup: requests that are sent first, all at once, and are not part of the result.
        sequential: send each request only when the one before has ended. Planned send times are ignored.
        stall_timeout_s: give up if no stream brings a token for this many seconds.
        run_timeout_s: give up if the whole run takes longer than this.
    """

    endpoint: Endpoint
    requests: list[PlannedRequest]
    warmup: list[PlannedRequest] = field(default_factory=list)
    sequential: bool = False
    stall_timeout_s: float = 120.0
    run_timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The timelines of a run's requests, and the load generator's own cost.

    Attributes:
        origin_s: the machine's monotonic clock when the run's clock was at zero.
        abort: why the watchdog ended the run early; None: it did not.
        telemetry_before, telemetry_after: the server's `/telemetry` before and after the run; None: there was no
            answer.
    """

    origin_s: float
    requests: list[RequestRecord]
    generator: Generator
    abort: str | None = None
    telemetry_before: dict[str, Any] | None = None
    telemetry_after: dict[str, Any] | None = None

    @property
    def duration_s(self) -> float:
        """Return the time from the first request's sending to the last answer's end."""
        sent = min(record.sent_s for record in self.requests if record.sent_s is not None)
        return max(record.finished_s for record in self.requests if record.finished_s is not None) - sent

    def raise_for_errors(self) -> None:
        """Raise RuntimeError if a request failed."""
        errors = [record.error for record in self.requests if record.error is not None]
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(self.requests)} requests failed: {errors[0]}")


class LoadGeneratorError(RuntimeError):
    """The generator's own process failed, so nothing can be said about the server."""


# ---------------------------------------------------------------------------------------------- outside


def run_load(plan: LoadPlan, on_progress: Progress = lambda *_: None) -> LoadResult:
    """Run a plan in a new process and wait for its result.

    Raises:
        LoadGeneratorError: the process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_generate, args=(plan, writer), daemon=True)
    process.start()
    writer.close()  # only the process holds this end now: if it dies, `recv` raises EOFError
    try:
        while not isinstance(message := reader.recv(), LoadResult):
            on_progress(*message)
    except EOFError:
        process.join()
        raise LoadGeneratorError(
            f"the load generator ended without a result (exit {process.exitcode})"
        ) from None
    finally:
        process.terminate()
        process.join()
    return message


def _generate(plan: LoadPlan, results: Connection) -> None:
    results.send(asyncio.run(generate_load(plan, lambda *counts: results.send(counts))))


# ---------------------------------------------------------------------------------------------- inside


class _Run:
    """The state of a run, shared by its tasks."""

    def __init__(self, plan: LoadPlan, client: httpx.AsyncClient, on_progress: Progress) -> None:
        self.plan = plan
        self.records = [new_record(planned) for planned in plan.requests]
        self.origin_s = time.monotonic() + START_DELAY_S
        self.abort: str | None = None
        self._client = client
        self._next_turns = {each.follows: each for each in plan.requests if each.follows is not None}
        self._on_progress = on_progress
        self._in_flight = 0
        self._finished = 0
        self._failed = 0
        self._last_sign_of_life = self.origin_s

    async def everything(self) -> None:
        """Send all requests at their times. Returns when all have ended or were cancelled by the watchdog."""
        pairs = list(zip(self.plan.requests, self.records, strict=True))
        jobs: list[Coroutine[Any, Any, None]]
        if self.plan.sequential:
            jobs = [self._one_after_the_other(pairs)]
        else:
            jobs = [
                self._conversation(planned, record) for planned, record in pairs if planned.follows is None
            ]
        tasks = [asyncio.create_task(job) for job in jobs]
        watchdog = asyncio.create_task(self._watch(tasks))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        watchdog.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watchdog
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # a bug of the generator, not an error of the server
                raise outcome

    async def _conversation(self, planned: PlannedRequest, record: RequestRecord) -> None:
        """Send a request at its time, then each later turn of its conversation after the answer before it. An error
        ends the conversation."""
        await asyncio.sleep(self.origin_s + planned.send_at_s - time.monotonic())
        answer = await self._send(planned, record)
        while (turn := self._next_turns.get(planned.index)) is not None and record.error is None:
            record = self.records[turn.index]
            record.scheduled_s = time.monotonic() - self.origin_s
            try:
                before = answer.continued(planned.prompt)
            except ValueError as error:
                record.error = str(error)
                return
            planned = replace(turn, prompt=before + turn.prompt)  # type: ignore[operator]  # both text or both ids
            answer = await self._send(planned, record)

    async def _one_after_the_other(self, pairs: list[tuple[PlannedRequest, RequestRecord]]) -> None:
        await asyncio.sleep(self.origin_s - time.monotonic())
        for planned, record in pairs:
            record.scheduled_s = time.monotonic() - self.origin_s  # due when the request before has ended
            await self._send(planned, record)

    async def _send(self, planned: PlannedRequest, record: RequestRecord) -> AnswerReader:
        self._in_flight += 1
        self._sign_of_life()
        try:
            return await send(
                self._client,
                self.plan.endpoint,
                planned,
                record,
                origin_s=self.origin_s,
                on_tokens=self._sign_of_life,
            )
        except asyncio.CancelledError:
            record.error = self.abort or "cancelled"
            raise
        finally:
            self._in_flight -= 1
            self._finished += 1
            self._failed += record.error is not None
            self._sign_of_life()
            self._on_progress(self._finished, self._failed, len(self.records))

    def _sign_of_life(self) -> None:
        self._last_sign_of_life = time.monotonic()

    async def _watch(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel the run after `run_timeout_s`, or if for `stall_timeout_s` no token arrives and no request begins
        or ends.

        One request without tokens is no stall while other streams bring tokens: it may be queued.
        """
        limit = self.plan.stall_timeout_s
        while self.abort is None:
            await asyncio.sleep(WATCH_EVERY_S)
            now = time.monotonic()
            if self._in_flight and now - self._last_sign_of_life > limit:
                self.abort = f"stalled: no token on any stream for {limit:g} s"
            elif now - self.origin_s > self.plan.run_timeout_s:
                self.abort = f"not done after {self.plan.run_timeout_s:g} s"
        for task in tasks:
            task.cancel()


async def generate_load(plan: LoadPlan, on_progress: Progress = lambda *_: None) -> LoadResult:
    """Send the warm-up requests, then the plan's requests, and return the records of the plan's requests. The
    server's errors are noted in these records and not raised."""
    # No limit on connections: a request that waits for a free one would be the client's delay, not the server's.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # Reading has no timeout: the watchdog decides whether the server is stuck.
    timeout = httpx.Timeout(10.0, read=None, pool=None)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
        await _warm_up(plan, client)
        gc.collect()
        gc.disable()  # a garbage collection here must not look like a stall of the server
        before = await read_telemetry(client, plan.endpoint.url, since_step=NO_STEPS)
        run = _Run(plan, client, on_progress)
        cpu_s, wall_s = time.process_time(), time.monotonic()
        await run.everything()
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        gc.enable()
        first_step = before["counters"]["steps"] if before else 0
        after = await read_telemetry(client, plan.endpoint.url, since_step=first_step)
    lags = [record.sent_s - record.scheduled_s for record in run.records if record.sent_s is not None]
    return LoadResult(
        origin_s=run.origin_s,
        requests=[record.rounded() for record in run.records],
        generator=Generator(
            cpu_s=round(cpu_s, 4), wall_s=round(wall_s, 4), max_lag_s=round(max(lags, default=0.0), 5)
        ),
        abort=run.abort,
        telemetry_before=before,
        telemetry_after=after,
    )


async def read_telemetry(client: httpx.AsyncClient, url: str, *, since_step: int) -> dict[str, Any] | None:
    """Return the engine's counters, and its steps from `since_step` on. Returns None if the server has no telemetry
    or does not answer."""
    steps: list[dict[str, Any]] = []
    while True:
        try:
            response = await client.get(f"{url}/telemetry", params={"since_step": since_step}, timeout=10.0)
            page = orjson.loads(response.content) if response.status_code == 200 else None
        except (httpx.HTTPError, orjson.JSONDecodeError):
            return None
        if not isinstance(page, dict) or "counters" not in page:
            return None
        steps += page["steps"]
        since_step = page["next_step"]
        if since_step >= page["counters"]["steps"]:
            return page | {"steps": steps}


async def _warm_up(plan: LoadPlan, client: httpx.AsyncClient) -> None:
    """Send the warm-up requests, so that the run need not wait for connections, thread pools or compilation."""
    jobs = [
        send(client, plan.endpoint, planned, new_record(planned), origin_s=time.monotonic())
        for planned in plan.warmup
    ]
    # Errors are ignored here. A server that fails these requests fails the run's requests, too, which is reported.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*jobs), plan.stall_timeout_s)
