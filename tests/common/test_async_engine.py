"""`AsyncEngine` with an engine in another thread and a real event loop."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.engine.engine import Engine
from common.errors import EngineDeadError, QueueFullError, ShuttingDownError
from common.hosting.async_engine import AsyncEngine
from common.hosting.local import LocalEngine
from common.hosting.messages import Stepped
from common.request import Request, StepOutput
from tests.support.engines import (
    TIMEOUT_S,
    RememberingModel,
    assert_all_free,
    build,
    continuation,
    greedy,
    read,
    submit,
    tokens_of,
    until,
    working,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["static", "continuous"])
def phase(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Gate:
    """A model hook that holds every pass until `open` is set; `reached` is set once a pass is held."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, _: object) -> None:
        self.reached.set()
        assert self.open.wait(TIMEOUT_S)


@pytest.fixture
def gate() -> Gate:
    return Gate()


def engine_of(phase: str, before_pass: Callable[[Any], None] = lambda _: None, **options: Any) -> Engine:
    """Build an engine with a real clock."""
    return build(phase, RememberingModel(before_pass=before_pass), clock=time.monotonic, **options)


def slowly(_: object) -> None:
    time.sleep(0.002)


def has_a_message(async_engine: AsyncEngine) -> bool:
    """Return whether a message has arrived at the engine, which has not taken it."""
    thread: Any = async_engine.process._process
    return bool(thread._connection.poll())


# ---------------------------------------------------------------------- streams


async def test_who_comes_while_a_step_waits_for_another_is_part_of_it(gate: Gate) -> None:
    engine = engine_of("pipelined", gate)
    async with working(engine) as async_engine:
        first = submit(async_engine, "one", greedy(9))
        await until(lambda: gate.reached.is_set() and engine.scheduler.active[0].pending_tokens == 2)
        late = submit(async_engine, "late", greedy(9))
        await until(lambda: has_a_message(async_engine))
        gate.open.set()
        assert len(await read(first)) == len(await read(late)) == 9
    calls = engine.runner.model.calls[:4]
    assert [len(call.query_lengths) for call in calls] == [1, 1, 2, 2], "two were launched before it came"


async def test_a_step_comes_back_in_one_message(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    async with working(engine_of("continuous", gate)) as async_engine:
        counts: list[int] = []
        take_step = async_engine._take_step

        def counted(step: Stepped) -> None:
            if step.outputs:
                counts.append(len(step.outputs))
            take_step(step)

        monkeypatch.setattr(async_engine, "_take_step", counted)
        first = submit(async_engine, "zero", greedy(1))
        await until(gate.reached.is_set)
        with async_engine.hold_places(4):
            streams = async_engine.submit([async_engine.maker.create(str(i), greedy(6)) for i in range(4)])
        gate.open.set()
        await asyncio.gather(*map(read, [first, *streams]))
        assert counts == [1] + [4] * 6


# ---------------------------------------------------------------------- cancelling


async def test_cancelled_while_running(phase: str) -> None:
    engine = engine_of(phase, slowly, max_seq_len=1000)
    async with working(engine) as async_engine:
        stays, leaves = submit(async_engine, "one", greedy(40)), submit(async_engine, "two", greedy(900))
        await until(lambda: leaves.received_tokens >= 3)
        leaves.cancel()
        assert tokens_of(await read(stays)) == continuation(b"one", 40)
        await until(lambda: not engine.has_work)
    assert engine.telemetry.counters.requests_cancelled == 1
    assert_all_free(engine)


async def test_a_reader_in_another_task_hears_of_the_cancelling(phase: str, gate: Gate) -> None:
    def slowly_behind_the_gate(sequences: Any) -> None:
        gate(sequences)
        slowly(sequences)

    async with working(engine_of(phase, slowly_behind_the_gate)) as async_engine:
        running, waiting = submit(async_engine, "one", greedy(60)), submit(async_engine, "two", greedy(60))
        readers = [asyncio.create_task(read(stream)) for stream in (running, waiting)]
        await until(gate.reached.is_set)
        running.cancel()
        waiting.cancel()
        gate.open.set()
        for outputs in await asyncio.gather(*readers):
            assert outputs[-1].finish_reason == "cancelled"
        assert len(await read(submit(async_engine, "next", greedy(2)))) == 2
        assert await async_engine.drain(TIMEOUT_S)


# ---------------------------------------------------------------------- places


async def test_places_are_held_and_given_back(phase: str, gate: Gate) -> None:
    engine = engine_of(phase, gate, max_waiting_requests=4, max_batch_size=1)
    async with working(engine) as async_engine:
        first = submit(async_engine, "one", greedy(2))
        await until(
            lambda: gate.reached.is_set() and async_engine.queue_room() == 4
        )  # the only seat is taken
        with async_engine.hold_places(3):
            with pytest.raises(QueueFullError), async_engine.hold_places(2):
                pass
            with async_engine.hold_places(1), pytest.raises(QueueFullError), async_engine.hold_places(1):
                pass
        requests = [async_engine.maker.create(str(i), greedy(2)) for i in range(4)]
        with pytest.raises(QueueFullError):
            async_engine.check_room(4)  # several places at once must leave a quarter of the queue free
        with async_engine.hold_places(3):  # all places were given back
            streams = async_engine.submit(requests[:3])
        with async_engine.hold_places(1):
            streams += async_engine.submit(requests[3:])
        with pytest.raises(QueueFullError):
            async_engine.check_room(1)  # requests in the inbox count, though they are not in the queue yet
        gate.open.set()
        for stream in [first, *streams]:
            assert (await read(stream))[-1].finish_reason == "length"
        await until(lambda: not engine.has_work)
        with async_engine.hold_places(4):
            pass


async def test_the_prefix_cache_is_reset_between_two_steps(gate: Gate) -> None:
    """A reset waits for the running step, whose request keeps its blocks. After shutdown it is refused."""
    engine = engine_of("prefix", gate, block_size=4)
    async with working(engine) as async_engine:
        first = submit(async_engine, "a prompt of some length", greedy(2))
        await until(gate.reached.is_set)
        resetting = asyncio.create_task(async_engine.reset_prefix_cache())
        await asyncio.sleep(0.01)
        assert not resetting.done(), "the engine's thread is in a step"
        gate.open.set()
        assert await resetting == 0, "all of it is used"
        await read(first)
        await until(lambda: not engine.has_work)
        assert await async_engine.reset_prefix_cache() > 0
        assert await async_engine.reset_prefix_cache() == 0
        given_up = asyncio.create_task(async_engine.reset_prefix_cache())
        await asyncio.sleep(0)
        given_up.cancel()
        assert len(await read(submit(async_engine, "next", greedy(2)))) == 2
        async_engine.stop_accepting()
        with pytest.raises(ShuttingDownError):
            await async_engine.reset_prefix_cache()


@pytest.mark.parametrize("phase", ["static", "prefix", "pipelined"])
async def test_a_pause_delivers_what_is_in_flight_and_then_nothing_is_computed(phase: str) -> None:
    engine = engine_of(phase, slowly)
    watched: list[StepOutput] = []
    engine.watchers.append(lambda _record, _plan, outputs: watched.extend(outputs))
    async with working(engine) as async_engine:
        streams = [submit(async_engine, prompt, greedy(40)) for prompt in ("one", "two")]
        await until(lambda: all(stream.received_tokens for stream in streams))
        await async_engine.pause()
        assert not engine.runner.in_flight
        told = [stream.received_tokens for stream in streams]
        assert sum(told) == len(tokens_of(watched)), "none is kept back"
        late, left = submit(async_engine, "late", greedy(3)), submit(async_engine, "left", greedy(3))
        left.cancel()
        assert (await read(left))[-1].finish_reason == "cancelled"
        calls = len(engine.runner.model.calls)
        await asyncio.sleep(0.05)
        assert [stream.received_tokens for stream in streams] == told
        assert (len(engine.runner.model.calls), late.received_tokens) == (calls, 0)
        await async_engine.pause()  # changes nothing
        await async_engine.resume()
        for stream in (*streams, late):
            prompt, count = stream.request.prompt_token_ids, stream.request.params.max_new_tokens
            assert tokens_of(await read(stream)) == continuation(prompt, count)
        async_engine.stop_accepting()
        with pytest.raises(ShuttingDownError):
            await async_engine.pause()
        with pytest.raises(ShuttingDownError):
            await async_engine.resume()


async def test_an_engine_that_fails_while_it_is_paused_says_so(gate: Gate) -> None:

    def fail(_: object) -> None:
        gate(None)
        raise torch.AcceleratorError("an illegal memory access was encountered")

    async with working(engine_of("pipelined", fail)) as async_engine:
        stream = submit(async_engine, "one", greedy(9))
        await until(gate.reached.is_set)
        pausing = asyncio.create_task(async_engine.pause())
        await asyncio.sleep(0.01)
        gate.open.set()
        with pytest.raises(EngineDeadError):
            await pausing
        assert isinstance((await read(stream))[-1].error, EngineDeadError)


async def test_every_promise_is_kept_under_load(phase: str) -> None:
    """Clients hold places, wait, submit, withdraw and cancel at random. The engine refuses no request with a place,
    and in the end every place is free."""
    engine = engine_of(phase, max_waiting_requests=5, max_batch_size=3)
    rng = random.Random(0)
    refused = finished = cancelled = 0

    async def client(async_engine: AsyncEngine, number: int) -> None:
        nonlocal refused, finished, cancelled
        for turn in range(12):
            await asyncio.sleep(rng.random() * 0.004)
            count = rng.randint(1, 2)
            try:
                async_engine.check_room(count)
            except QueueFullError:
                refused += 1
                continue
            with async_engine.hold_places(count):
                await asyncio.sleep(rng.random() * 0.002)
                if rng.random() < 0.2:
                    continue
                prompts = [f"{number} {turn} {i}" for i in range(count)]
                requests = [async_engine.maker.create(p, greedy(rng.randint(1, 6))) for p in prompts]
                streams = async_engine.submit(requests)
            for prompt, stream in zip(prompts, streams, strict=True):
                if rng.random() < 0.2:
                    stream.cancel()
                    cancelled += 1
                    continue
                outputs = await read(stream)
                assert outputs[-1].error is None
                assert tokens_of(outputs) == continuation(
                    prompt.encode(), stream.request.params.max_new_tokens
                )
                finished += 1

    async with working(engine) as async_engine:
        await asyncio.gather(*(client(async_engine, number) for number in range(16)))
        assert await async_engine.drain(TIMEOUT_S)
        # Requests that were cancelled at once may still be in the inbox.
        await until(lambda: async_engine.num_waiting() == 0)
        await until(lambda: not engine.has_work)
    assert min(refused, finished, cancelled) > 0
    counters = engine.telemetry.counters
    assert counters.requests_failed == 0
    assert counters.requests_finished + counters.requests_cancelled == finished + cancelled
    assert_all_free(engine)


async def test_a_refusal_does_not_wait_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = [Gate(), Gate()]
    passes = iter(gates)
    engine = engine_of("continuous", lambda inputs: next(passes)(inputs))
    add_request = engine.add_request

    def picky(request: Request) -> bool:
        if request.request_id == "odd":
            raise ValueError("an odd one")
        return add_request(request)

    monkeypatch.setattr(engine, "add_request", picky)
    async with working(engine) as async_engine:
        first = submit(async_engine, "one", greedy(2))
        await until(gates[0].reached.is_set)
        with async_engine.hold_places():
            (odd,) = async_engine.submit([async_engine.maker.create("two", greedy(2), "odd")])
        await until(lambda: has_a_message(async_engine))
        gates[0].open.set()
        await until(gates[1].reached.is_set)
        assert str((await read(odd))[-1].error) == "ValueError: an odd one"  # while that step is held
        gates[1].open.set()
        assert len(await read(first)) == 2


# ---------------------------------------------------------------------- ending


@pytest.mark.parametrize("end", ["stop", "drain"])
async def test_the_end_does_not_wait_for_a_step_that_hangs(end: str, gate: Gate) -> None:
    async with working(engine_of("continuous", gate)) as async_engine:
        stream = submit(async_engine, "one", greedy(3))
        await until(gate.reached.is_set)
        if end == "drain":
            assert not await async_engine.drain(0.01)
        else:
            await async_engine.stop(0.01)
        outputs = await read(stream)
        assert isinstance(outputs[-1].error, ShuttingDownError)
        assert (outputs[-1].prompt_tokens, outputs[-1].completion_tokens) == (3, 0)
        assert async_engine.process.running
        gate.open.set()


async def test_drain_waits_for_those_who_run(phase: str, gate: Gate) -> None:
    async with working(engine_of(phase, gate)) as async_engine:
        streams = [submit(async_engine, text, greedy(3)) for text in ("one", "two")]
        await until(gate.reached.is_set)
        draining = asyncio.create_task(async_engine.drain(TIMEOUT_S))
        await asyncio.sleep(0.01)
        assert not draining.done()
        assert async_engine.draining
        with pytest.raises(ShuttingDownError):
            async_engine.check_room(1)
        gate.open.set()
        assert await draining
        for outputs in await asyncio.gather(*map(read, streams)):
            assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("end", ["stop", "drain"])
async def test_the_end_fails_those_who_are_not_done_in_time(phase: str, end: str) -> None:
    """At the time limit, running and waiting requests fail."""
    engine = engine_of(phase, slowly, max_seq_len=1000, max_batch_size=2)
    async with working(engine) as async_engine:
        streams = [submit(async_engine, str(i), greedy(990)) for i in range(3)]
        if end == "stop":
            await async_engine.stop()
        else:
            assert not await async_engine.drain(0.05)
        for outputs in await asyncio.gather(*map(read, streams)):
            assert isinstance(outputs[-1].error, ShuttingDownError)
        if end == "drain":  # after `stop`, the engine takes no further step
            await until(lambda: not engine.has_work)
            assert_all_free(engine)


@pytest.mark.parametrize("end", ["stop", "drain"])
async def test_a_request_submitted_after_the_end_is_refused(end: str) -> None:
    """The engine ends while the request holds a place. Without a refusal the request would wait for ever."""
    engine = engine_of("continuous", slowly, max_seq_len=1000)
    async with working(engine) as async_engine:
        running = submit(async_engine, "one", greedy(990))
        with async_engine.hold_places():
            if end == "stop":
                await async_engine.stop()
                drained = None
            else:
                drained = asyncio.create_task(async_engine.drain(0.02))
                assert isinstance((await read(running))[-1].error, ShuttingDownError)
            with pytest.raises(ShuttingDownError):
                async_engine.submit([async_engine.maker.create("late", greedy(3))])
        assert async_engine._held == 0
        assert drained is None or not await drained


async def test_drain_waits_for_those_who_were_held_a_place() -> None:
    engine = engine_of("continuous")
    async with working(engine) as async_engine:
        with async_engine.hold_places():
            draining = asyncio.create_task(async_engine.drain(TIMEOUT_S))
            await asyncio.sleep(0.02)
            assert not draining.done()
            (stream,) = async_engine.submit([async_engine.maker.create("late", greedy(3))])
        assert len(await read(stream)) == 3
        assert await draining


@pytest.mark.parametrize("mistake", [KeyError("slot 3"), SystemExit(3)], ids=repr)
async def test_a_mistake_of_the_engines_own_ends_it_and_answers_everyone(
    phase: str, mistake: BaseException, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    engine = engine_of(phase, gate, max_batch_size=2)
    async with working(engine) as async_engine:
        streams = [submit(async_engine, text, greedy(9)) for text in ("one", "two", "three", "four")]
        await until(gate.reached.is_set)

        def plan() -> None:
            raise mistake

        monkeypatch.setattr(engine.scheduler, "plan", plan)
        with async_engine.hold_places():
            gate.open.set()
            for outputs in await asyncio.gather(*map(read, streams)):
                assert isinstance(outputs[-1].error, EngineDeadError)
            assert async_engine.dead is not None
            with pytest.raises(EngineDeadError):
                async_engine.check_room(1)
            # A request that holds a place is answered, too.
            (late,) = async_engine.submit([async_engine.maker.create("late", greedy(1))])
        assert isinstance((await read(late))[-1].error, EngineDeadError)
        assert await async_engine.drain(TIMEOUT_S)


def test_a_closed_event_loop_does_not_hang_the_thread(gate: Gate) -> None:
    engine = engine_of("continuous", gate)
    workers: list[AsyncEngine] = []

    async def main() -> None:
        async_engine = LocalEngine(engine)
        async_engine.start()
        workers.append(async_engine)
        submit(async_engine, "one", greedy(2))
        await until(gate.reached.is_set)

    asyncio.run(main())
    gate.open.set()
    asyncio.run(asyncio.wait_for(workers[0].stop(), TIMEOUT_S))
    assert not workers[0].process.running


# ---------------------------------------------------------------------- time


async def test_idle_means_blocked(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """One quiet time of several is enough: a busy machine may delay the last turn into the first of them."""
    engine = engine_of(phase)
    calls: list[str] = []
    next_wake, step = engine.next_wake, engine.step

    def noted_next_wake() -> float | None:
        calls.append("next_wake")
        return next_wake()

    def noted_step() -> list[StepOutput]:
        calls.append("step")
        return step()

    monkeypatch.setattr(engine, "next_wake", noted_next_wake)
    monkeypatch.setattr(engine, "step", noted_step)
    async with working(engine) as async_engine:
        await read(submit(async_engine, "one", greedy(2)))
        await until(lambda: not engine.has_work)
        counts = []
        while 0 not in counts:
            assert len(counts) < 10, counts
            calls.clear()
            await asyncio.sleep(0.3)
            counts.append(len(calls))
        assert len(await read(submit(async_engine, "two", greedy(2)))) == 2


async def test_a_static_batch_is_woken_by_its_timer() -> None:
    """One request waits for a batch of four. The engine takes no step until the timeout ends."""
    wait_s = 0.15
    engine = engine_of("static", batch_wait_timeout_s=wait_s)
    async with working(engine) as async_engine:
        started = time.monotonic()
        outputs = await read(submit(async_engine, "one", greedy(2)))
        assert time.monotonic() - started >= wait_s
        assert len(outputs) == 2
        await until(lambda: not engine.has_work)
    assert engine.telemetry.counters.steps == 3
