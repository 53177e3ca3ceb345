"""A process that is killed while it writes: the next one finds whole blocks, and all that had been written."""

from __future__ import annotations

import hashlib
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kernels.native import load_native_kernels
from phase11_tiered.block_file import HEADER_BYTES, BlockFile, DamagedBlockError
from tests.phase11_tiered.support import ask, engine_of, settle, stop
from tests.support.engines import continuation
from tests.support.forked import FORKS

BLOCK = 400_000  # bytes: so large that a kill often comes within a write
PLACES = 8
LIMIT = PLACES * (HEADER_BYTES + BLOCK)


def data_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK // 100) * 100


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def write_blocks(folder: Path, said: Connection) -> None:
    file = BlockFile(folder, "blocks", BLOCK, LIMIT)
    for number in range(10**9):
        file.write(number % PLACES, key_of(number), data_of(key_of(number)))
        said.send(number)


def prompt_of(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(240) for _ in range(33)]


def serve(folder: Path, said: Connection) -> None:
    load_native_kernels()  # as in the process of the tests: other kernels would have another file
    engine = engine_of(folder)
    for number in range(10**9):
        ask(engine, prompt_of(number))
        settle(engine)
        said.send(number)


def killed(target: object, folder: Path, after_s: float) -> int:
    """Run a function in a process, and kill it some time after its first message. Returns its last message."""
    heard, said = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=target, args=(folder, said))  # type: ignore[arg-type]
    process.start()
    said.close()
    last: int = heard.recv()
    end_s = time.monotonic() + after_s
    while (left_s := end_s - time.monotonic()) > 0 and heard.poll(left_s):
        last = heard.recv()
    process.kill()
    process.join()
    try:
        while heard.poll(0):
            last = heard.recv()
    except EOFError:
        pass
    return last


@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_blocks_are_whole_or_missing(tmp_path: Path, times: int) -> None:
    draw = random.Random(times)
    torn = 0
    for _ in range(times):
        last = killed(write_blocks, tmp_path, draw.uniform(0, 0.1))
        file = BlockFile(tmp_path, "blocks", BLOCK, LIMIT)
        found = {}
        for key, place in file.blocks():
            try:
                assert file.read(place, key) == data_of(key)
                found[key] = place
            except DamagedBlockError:
                torn += 1
        written = range(max(0, last + 1 - PLACES + 1), last + 1)  # the next write may have begun
        assert {key_of(number) for number in written} <= found.keys()
        file.close()
    assert torn <= times


@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_the_next_start_serves_right_tokens(tmp_path: Path, times: int) -> None:
    draw = random.Random(times)
    for _ in range(times):
        last = killed(serve, tmp_path, draw.uniform(0, 0.1))
        engine = engine_of(tmp_path)
        for number in range(max(0, last - 2), last + 2):
            request = ask(engine, prompt_of(number))
            assert request.token_ids == [*prompt_of(number), *continuation(prompt_of(number), 4)]
            assert number > last or request.cached_tokens == 32
        stop(engine)
