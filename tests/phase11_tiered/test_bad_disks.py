"""Disks that are full, slow, read-only or damaged: right tokens, one line in the log, and no long waits."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.engine import Engine
from phase11_tiered import tier as tier_module
from phase11_tiered.block_file import HEADER_BYTES
from tests.phase11_tiered.support import ask, engine_of, pool_of, settle, stop, tier_of
from tests.support.engines import add, assert_all_free, assert_answered, greedy, run
from tests.support.pools import assert_consistent

TEXT = [(7 * i + 3) % 240 for i in range(41)]  # ten blocks and a token


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def assert_serves(engine: Engine, cached: int | None = None) -> None:
    """Assert that requests get right tokens, `TEXT` with so many hits, and another request after it."""
    requests = [add(engine, TEXT, greedy(4)), add(engine, [5, *TEXT[:20]], greedy(4))]
    outputs = run(engine)
    assert_answered(outputs, requests)
    assert cached is None or requests[0].cached_tokens == cached
    assert_consistent(pool_of(engine))
    assert_all_free(engine)


def warmed(folder: Path) -> Path:
    """Serve `TEXT` and stop. Returns the file with its blocks."""
    engine = engine_of(folder)
    ask(engine, TEXT)
    stop(engine)
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("why", ["it is a file", "it is read-only"])
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    folder = tmp_path / "folder"
    if why == "it is a file":
        folder.write_text("not a folder")
    else:
        folder.mkdir()
        open_any = os.open

        def refuse(path: Any, flags: int, *mode: Any, **more: Any) -> int:
            if flags & os.O_CREAT and Path(path).parent == folder:  # permissions do not stop the root user
                raise OSError(errno.EROFS, "Read-only file system")
            return open_any(path, flags, *mode, **more)

        monkeypatch.setattr(os, "open", refuse)
    engine = engine_of(folder)
    assert pool_of(engine).tier is None
    assert_serves(engine)
    assert len(lines(caplog)) == 1
    assert "no blocks are kept in" in lines(caplog)[0]


def test_a_disk_without_room_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    engine = engine_of(tmp_path)
    assert_serves(engine)
    assert len(lines(caplog)) == 1
    assert "No space left" in lines(caplog)[0]


def test_a_disk_that_is_full_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(tmp_path)
    write = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert_serves(engine)
    settle(engine)
    assert len(lines(caplog)) == 1
    assert tier_of(engine).counts()["tier_failures"] > 1
    monkeypatch.setattr(os, "pwrite", write)
    pool_of(engine).clear()
    assert_serves(engine)
    stop(engine)
    engine = engine_of(tmp_path)
    assert_serves(engine, cached=40)
    stop(engine)


def damage(file: Path, at: int) -> None:
    with file.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("where", ["data", "header", "header of a running server", "truncated"])
def test_a_damaged_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str) -> None:
    file = warmed(tmp_path)
    data = file.stat().st_size // (HEADER_BYTES + 32) * HEADER_BYTES
    with file.open("rb") as raw:
        header = raw.read(data)
    third = sorted(i for i in range(0, data, HEADER_BYTES) if any(header[i : i + HEADER_BYTES]))[-9]
    if where == "data":
        damage(file, data + third // HEADER_BYTES * 32 + 5)
    if where == "header":
        damage(file, third + 40)
    engine = engine_of(tmp_path)
    if where == "header of a running server":
        damage(file, third + 40)
    if where == "truncated":
        os.truncate(file, data // 2)
    assert_serves(engine)
    assert 0 <= engine.telemetry.counters.tier_hits < 10
    assert len(lines(caplog)) == 1
    assert_serves(engine, cached=40)
    stop(engine)


def slowed(engine: Engine, monkeypatch: pytest.MonkeyPatch, read_s: float) -> threading.Event:
    """Let each read of an engine's file take so long, or until the returned event is set."""
    released, read = threading.Event(), tier_of(engine)._file.read

    def slowly(place: int, key: bytes) -> bytearray:
        released.wait(read_s)
        return read(place, key)

    monkeypatch.setattr(tier_of(engine)._file, "read", slowly)
    return released


def test_a_disk_that_is_slower_than_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warmed(tmp_path)
    engine = engine_of(tmp_path, token_s=0.002)  # 80 ms for the ten blocks
    monkeypatch.setattr(tier_module, "BOUND_S", 0.2)
    released = slowed(engine, monkeypatch, 0.05)
    for _ in range(3):
        assert_serves(engine)
        pool_of(engine).clear()
    assert tier_of(engine).counts()["tier_declined"] == 2 * (10 + 5), "tried once, and measured"
    assert len(lines(caplog)) == 1
    released.set()
    stop(engine)


@pytest.mark.parametrize("most_reads", [32, 3])
def test_steps_that_take_long_are_not_the_disks_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most_reads: int
) -> None:
    """Blocks that have come are taken, however late it is. For others, the request waits no longer."""
    warmed(tmp_path)
    engine, now_s = engine_of(tmp_path), 0.0
    tier = tier_of(engine)
    monkeypatch.setattr(tier, "clock", lambda: now_s)
    monkeypatch.setattr(tier_module, "MOST_READS", most_reads)
    request = add(engine, TEXT, greedy(4))
    engine.step()
    settle(engine)
    now_s += 3600.0
    if most_reads == 3:  # the reads that begin now have not ended at once
        tier._thread.submit(time.sleep, 0.2)
    assert_answered(run(engine), [request])
    assert request.cached_tokens >= 4 * min(most_reads, 10)
    assert (tier.counts()["tier_failures"], lines(caplog)) == (0, [])
    pool_of(engine).clear()
    assert_serves(engine, cached=40)
    assert tier.counts()["tier_declined"] == 0, "the disk counts as quick as it is"
    stop(engine)


def test_blocks_are_not_written_if_there_is_no_memory_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tmp_path)
    tier = tier_of(engine)
    load = tier._load

    def refuse(blocks: Sequence[int]) -> list[memoryview]:
        if blocks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return []

    monkeypatch.setattr(tier, "_load", refuse)
    assert_serves(engine)
    assert (engine.dead, tier.counts()["tier_skipped"], tier.size[0]) == (None, 17, 0)
    monkeypatch.setattr(tier, "_load", load)
    pool_of(engine).clear()
    assert_serves(engine)
    assert tier.size[0] > 0
    stop(engine)


def test_a_disk_that_does_not_answer_is_waited_for_as_long_as_computing_takes_and_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warmed(tmp_path)
    engine, now_s = engine_of(tmp_path, token_s=0.01), 0.0  # 0.4 s for the ten blocks
    tier = tier_of(engine)
    monkeypatch.setattr(tier, "clock", lambda: now_s)
    released = slowed(engine, monkeypatch, 60.0)
    request = add(engine, TEXT, greedy(4))
    engine.step()
    now_s = 0.4 + tier_module.BOUND_S - 0.01
    engine.step()
    assert request.fetching
    now_s += 0.02
    engine.step()
    assert not request.fetching
    assert_answered(run(engine), [request])
    assert tier.counts()["tier_failures"] == 10
    assert len(lines(caplog)) == 1
    pool_of(engine).clear()
    assert_serves(engine, cached=0)
    assert tier.counts()["tier_declined"] == 10, "the next request does not try"
    released.set()
    stop(engine)
