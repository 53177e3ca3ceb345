"""Disks that are full, slow, read-only or damaged: right tokens, one line in the log, and no long waits."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

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


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    engine = engine_of(tmp_path / "file")
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
    assert engine.telemetry.counters.tier_failures > 0 or tier_of(engine).counters["tier_failures"] > 1
    monkeypatch.setattr(os, "pwrite", write)
    pool_of(engine).clear()
    assert_serves(engine)
    stop(engine)
    engine = engine_of(tmp_path)
    assert_serves(engine, cached=40)
    stop(engine)


def damage(file: Path, at: int, how: Any = lambda byte: byte ^ 1) -> None:
    with file.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([how(byte)]))


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


@pytest.mark.parametrize("read_s", [0.05, 60.0])
def test_nothing_waits_long_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_s: float
) -> None:
    """A disk that is slower than computing, and one that does not answer at all."""
    warmed(tmp_path)
    token_s = 0.002  # 80 ms for the ten blocks
    engine = engine_of(tmp_path, token_s=token_s)
    monkeypatch.setattr(tier_module, "BOUND_S", 0.2)
    released, read = threading.Event(), tier_of(engine)._file.read

    def slowly(place: int, key: bytes) -> bytes:
        released.wait(read_s)
        return read(place, key)

    monkeypatch.setattr(tier_of(engine)._file, "read", slowly)
    waited_s = []
    for _ in range(3):
        began_s = time.monotonic()
        assert_serves(engine)
        waited_s.append(time.monotonic() - began_s)
        pool_of(engine).clear()
    counters = tier_of(engine).counters
    assert counters["tier_failures"] + counters["tier_declined"] > 0
    assert min(waited_s) < 0.2 + 10 * 4 * token_s + 2.0
    released.set()
    stop(engine)
