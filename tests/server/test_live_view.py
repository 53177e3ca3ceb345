"""The live view: clients see the steps of a running engine, and slow no request down."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from common.engine.engine import Engine
from common.errors import ShuttingDownError
from common.hosting import calls as engine_calls
from common.hosting.local import LocalEngine
from common.observing.frames import FrameMaker
from common.server.app import create_app
from common.server.errors import ApiError
from common.server.options import ServerOptions
from common.server.page import live_view
from common.server.page.live_view import LiveView, Viewer
from tests.phase11_tiered.support import engine_of as tiered_engine_of
from tests.phase11_tiered.support import settle, stop
from tests.support.engines import build, continuation, greedy, read, submit, tokens_of, until, working
from tests.support.servers import Event, ServerProcess, assert_error, read_events

pytestmark = pytest.mark.anyio


def engine_of() -> Engine:
    return build("chunked", clock=time.monotonic)


async def events_of(viewer: Viewer) -> AsyncIterator[Event]:
    """Yield the events of a viewer's stream."""
    async for chunk in viewer.events():
        for block in chunk.decode().removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def frames_until_idle(events: AsyncIterator[Event]) -> list[dict[str, Any]]:
    """Return the frames up to one in which no request runs or waits."""
    frames, waiting = [], 0
    async for name, data in events:
        if name == "step":
            frames.append(data)
            waiting = data.get("waiting", [waiting])[0]
            if not data["running"] and not waiting:
                return frames
    raise AssertionError("the view has ended")


async def test_two_requests_are_seen_sharing_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "MAX_FRAMES_PER_S", 1e6)  # every step has its frame
    monkeypatch.setattr(engine_calls, "ENGINE_SHARE", 1e6)
    engine = engine_of()
    async with working(engine) as async_engine:
        view = LiveView(async_engine)
        viewer = view.open()
        await until(lambda: bool(engine.watchers))
        events = events_of(viewer)
        assert await anext(events) == (
            "begin",
            {
                "format": "infer-steps",
                "version": 1,
                "phase": [7, "Chunked prefill"],
                "seats": 4,
                "max_seq_len": 64,
            },
        )
        streams = [submit(async_engine, prompt, greedy(30)) for prompt in ("one", "two")]
        frames: list[dict[str, Any]] = []
        while (
            sum(len(frame.get("ended", ())) for frame in frames) < 2
        ):  # the first request may end before the second comes
            frames += await frames_until_idle(events)
        for stream, prompt in zip(streams, ("one", "two"), strict=True):
            assert tokens_of(await read(stream)) == continuation(prompt.encode(), 30)
        named = [each[1] for frame in frames for each in frame.get("requests", ())]
        assert named == [stream.request.request_id for stream in streams]
        assert frames[0]["key"]
        assert frames[-1]["step"] == engine.telemetry.latest.step, "the last step is told of, if late"
        view.close(viewer)


async def test_blocks_on_disk_are_counted(tmp_path: Path) -> None:
    engine = tiered_engine_of(tmp_path)
    async with working(engine) as async_engine:
        view = LiveView(async_engine)
        events = events_of(viewer := view.open())
        await until(lambda: bool(engine.watchers))
        seen = []
        for prompt in (list(b"one two three"), list(b"another")):
            await read(submit(async_engine, prompt, greedy(5)))
            settle(engine)
            seen += [frame["disk"] for frame in await frames_until_idle(events) if "disk" in frame]
        stored = [blocks for blocks, _ in seen]
        assert stored == sorted(stored), "no block is evicted from a file with room"
        assert {places for _, places in seen} == {engine.runner.pool.disk_blocks()[1]}
        view.close(viewer)
        events = events_of(viewer := view.open())
        await read(submit(async_engine, list(b"third"), greedy(5)))
        frames = await frames_until_idle(events)
        assert frames[0]["key"]
        assert frames[0]["disk"][0] >= 6, (
            "three full blocks of the first request, two of the second, and answers"
        )
        view.close(viewer)
    stop(engine)


async def test_no_frames_are_made_without_viewers() -> None:
    engine = engine_of()
    async with working(engine) as async_engine:
        view, tasks = LiveView(async_engine), asyncio.all_tasks()
        assert engine.watchers == []
        first, second = view.open(), view.open()
        await until(lambda: len(engine.watchers) == 1)
        view.close(first)
        assert len(await read(submit(async_engine, "one", greedy(3)))) == 3
        assert len(engine.watchers) == 1
        view.close(second)
        await until(lambda: not engine.watchers)
        await until(lambda: asyncio.all_tasks() == tasks)
        third = view.open()
        await until(lambda: len(engine.watchers) == 1)
        view.close(third)


async def test_a_slow_viewer_misses_frames_and_resumes_with_a_key_frame() -> None:
    async with working(engine_of()) as async_engine:
        view = LiveView(async_engine)
        slow, quick = view.open(), view.open()
        seen = []

        async def look() -> None:
            async for name, data in events_of(quick):
                if name == "step":
                    seen.append(data["step"])

        looking = asyncio.create_task(look())
        view.publish({"step": 0, "key": True, "running": []})
        for step in range(1, 3 * live_view.MAX_QUEUED):
            view.publish({"step": step, "running": []})
            await asyncio.sleep(0)
        assert len(slow._frames) <= live_view.MAX_QUEUED
        dropped = slow.missed
        assert dropped == 3 * live_view.MAX_QUEUED
        view.publish({"step": 1000, "key": True, "running": []})
        events = events_of(slow)
        assert (await anext(events))[0] == "begin"
        assert await anext(events) == ("step", {"step": 1000, "key": True, "running": []})
        assert await anext(events) == ("missed", {"frames": dropped})
        await until(lambda: len(seen) == 3 * live_view.MAX_QUEUED + 1)
        assert quick.missed == 0
        looking.cancel()
        view.close(slow)
        view.close(quick)


async def test_too_many_viewers_are_refused() -> None:
    async with working(engine_of()) as async_engine:
        view = LiveView(async_engine)
        viewers = [view.open() for _ in range(live_view.MAX_VIEWERS)]
        with pytest.raises(ApiError, match="as many as may") as refused:
            view.open()
        assert (refused.value.status, refused.value.code) == (503, "too_many_viewers")
        view.close(viewers.pop())
        viewers.append(view.open())
        for viewer in viewers:
            view.close(viewer)


async def test_the_view_ends_with_the_server() -> None:
    async with working(engine_of()) as async_engine:
        view = LiveView(async_engine)
        viewer = view.open()
        async_engine.stop_accepting()
        assert [name async for name, _ in events_of(viewer)] == ["begin", "end"]
        with pytest.raises(ShuttingDownError):
            view.open()
        view.close(viewer)


async def test_a_view_that_fails_ends_and_requests_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()

    def fail(*_: object) -> None:
        raise ValueError("no frame")

    async with working(engine) as async_engine:
        view = LiveView(async_engine)
        viewer = view.open()
        await until(lambda: bool(engine.watchers))
        with monkeypatch.context() as broken:
            broken.setattr(FrameMaker, "frame", fail)
            assert len(await read(submit(async_engine, "one", greedy(3)))) == 3
            assert [name async for name, _ in events_of(viewer)] == ["begin", "end"]
        view.close(viewer)
        events = events_of(again := view.open())
        await until(lambda: bool(engine.watchers))
        await read(submit(async_engine, "two", greedy(3)))
        assert (await frames_until_idle(events))[0]["key"]
        view.close(again)


# ---------------------------------------------------------------------- over HTTP


def test_steps_are_streamed_over_http(server: ServerProcess) -> None:
    with server.client.stream("GET", "/steps") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = read_events(response)
        assert next(events)[0] == "begin"
        answer = server.complete(n=2, max_tokens=20, ignore_eos=True)
        wanted = {f"{answer['id']}-{choice}" for choice in range(2)}
        seen: set[str] = set()
        for name, frame in events:
            assert name == "step"
            seen |= {each[1] for each in frame.get("requests", ())} & wanted
            if seen == wanted:
                break


def test_the_view_can_be_switched_off() -> None:
    with TestClient(
        create_app(LocalEngine(engine_of()), ServerOptions(served_model_name=["mine"], live_view=False))
    ) as client:
        assert_error(client.get("/steps"), 404, None, "live_view_off")
        page = client.get("/").text
        assert 'data-live="off"' in page
        assert "--no-live-view" in page
        body = {"model": "mine", "prompt": "Once", "max_tokens": 3, "stream": False}
        assert client.post("/v1/completions", json=body).status_code == 200
