"""The file of blocks alone: what was written is read, or is found to be damaged, whatever happens to the file."""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phase11_tiered.block_file import HEADER_BYTES, BlockFile, DamagedBlockError

BLOCK = 40
PLACES = 5


def key_of(number: int) -> bytes:
    return bytes([number]) * 32


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK)


def open_file(folder: Path, places: int = PLACES) -> BlockFile:
    return BlockFile(folder, "blocks", BLOCK, places * (HEADER_BYTES + BLOCK))


def listed(file: BlockFile) -> dict[int, bytes]:
    return {place: key for key, place in file.blocks()}


writes = st.tuples(st.just("write"), st.integers(0, PLACES - 1), st.integers(1, 200))
spoiled = st.tuples(
    st.just("spoil"), st.integers(0, PLACES * (HEADER_BYTES + BLOCK) - 1), st.integers(1, 255)
)
others = st.tuples(st.sampled_from(["reopen", "clear"]), st.just(0), st.just(0))


@given(steps=st.lists(st.one_of(writes, spoiled, others), max_size=30))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_block_is_read_as_it_was_written_or_not_at_all(tmp_path: Path, steps: list[Any]) -> None:
    """Any byte of the file may change between two operations, in headers and in data."""
    file = open_file(tmp_path)
    file.clear()
    held: dict[int, int] = {}
    sound: dict[int, bool] = {}
    for kind, first, second in steps:
        match kind:
            case "write":
                file.write(first, key_of(second), data_of(second))
                held[first], sound[first] = second, True
            case "spoil":
                with file.path.open("r+b") as raw:
                    raw.seek(first)
                    before = raw.read(1)[0]
                    raw.seek(first)
                    raw.write(bytes([before ^ second]))
                of_header = first < PLACES * HEADER_BYTES
                place = first // HEADER_BYTES if of_header else (first - PLACES * HEADER_BYTES) // BLOCK
                sound[place] = False
            case "reopen":
                file.close()
                file = open_file(tmp_path)
            case "clear":
                file.clear()
                held, sound = {}, {}
        assert set(listed(file)) >= {place for place in held if sound[place]}
        for place, number in held.items():
            try:
                assert file.read(place, key_of(number)) == data_of(number)
            except DamagedBlockError:
                assert not sound[place]
    file.close()


def test_a_place_that_holds_another_block_is_damaged(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.write(1, key_of(7), data_of(7))
    for place, key in ((1, key_of(8)), (0, key_of(7)), (0, bytes(32))):
        with pytest.raises(DamagedBlockError):
            file.read(place, key)
    assert listed(file) == {1: key_of(7)}
    file.close()


@pytest.mark.parametrize("system", ["Linux", "macOS"])
def test_the_file_is_private_and_has_its_size_from_the_start(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "macOS":  # which lacks it
        monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "blocks-0.kv"
    path.write_bytes(b"something else")
    path.chmod(0o666)
    file = open_file(tmp_path)
    assert file.path == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == PLACES * (HEADER_BYTES + BLOCK)
    if system == "Linux":
        assert path.stat().st_blocks * 512 >= path.stat().st_size, "no room is missing later"
    assert listed(file) == {}
    file.close()


def test_a_second_server_gets_a_file_of_its_own_and_the_next_start_the_first_one(tmp_path: Path) -> None:
    first, second = open_file(tmp_path), open_file(tmp_path)
    assert (first.path.name, second.path.name) == ("blocks-0.kv", "blocks-1.kv")
    first.write(0, key_of(1), data_of(1))
    assert listed(second) == {}
    first.close()
    again = open_file(tmp_path)
    assert again.path == first.path
    assert again.read(0, key_of(1)) == data_of(1)
    second.close()
    again.close()


def test_a_file_of_another_size_is_emptied(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.write(0, key_of(1), data_of(1))
    os.truncate(file.path, HEADER_BYTES * PLACES + BLOCK // 2)
    with pytest.raises(DamagedBlockError):
        file.read(0, key_of(1))
    file.close()
    file = open_file(tmp_path)
    assert listed(file) == {}
    file.write(0, key_of(1), data_of(1))
    file.close()
    larger = open_file(tmp_path, places=PLACES + 1)
    assert (larger.places, listed(larger)) == (PLACES + 1, {})
    larger.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("not to be emptied")
    (tmp_path / "blocks-0.kv").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        open_file(tmp_path)
    assert target.read_text() == "not to be emptied"


def test_a_full_disk_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        os.ftruncate(file, length)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            open_file(tmp_path)
    assert (tmp_path / "blocks-0.kv").stat().st_size == 0
    open_file(tmp_path).close()


def test_a_block_that_is_larger_than_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hold no block of 40 bytes"):
        BlockFile(tmp_path, "blocks", BLOCK, BLOCK)
