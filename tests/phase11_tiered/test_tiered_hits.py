"""Blocks that come back from the file: after an eviction, after a restart, and for whom."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from common.engine.requests import Handling
from common.request import Request
from phase11_tiered import tier as tier_module
from tests.phase11_tiered.support import (
    ask,
    engine_of,
    pool_of,
    settle,
    stop,
    tier_of,
)
from tests.support.engines import add, assert_all_free, assert_answered, greedy, run, tiny_model
from tests.support.pools import assert_consistent

TEXT = [(7 * i + 3) % 240 for i in range(41)]  # ten blocks and a token


def other(number: int) -> list[int]:
    return [number, *[number + 1] * 40]


def assert_right(engine: Any, request: Request) -> None:
    assert_answered(run(engine), [])
    assert request.finish_reason is not None
    alone = ask(engine_of(None), request.prompt_token_ids, request.params.max_new_tokens)
    assert request.token_ids == alone.token_ids


def test_a_restart_finds_the_blocks_of_before(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    first = ask(engine, TEXT)
    stop(engine)
    engine = engine_of(tmp_path)
    second = ask(engine, TEXT)
    assert (first.cached_tokens, second.cached_tokens) == (0, 40)
    assert_right(engine, second)
    counters = engine.telemetry.counters
    assert (counters.prefill_tokens, counters.tier_hits, counters.tier_failures) == (1, 10, 0)
    assert counters.tier_read_bytes == 10 * 4 * 8
    assert counters.tier_saved_s > 0
    third = ask(engine, TEXT)
    assert third.cached_tokens == 40
    assert engine.telemetry.counters.tier_hits == 10, "now they are in memory"
    assert_consistent(pool_of(engine))
    assert_all_free(engine)
    stop(engine)


def test_an_answer_is_in_the_file_for_the_next_turn(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    first = ask(engine, TEXT, new=12)
    stop(engine)
    engine = engine_of(tmp_path)
    second = ask(engine, [*first.token_ids, 1, 2, 3])
    assert second.cached_tokens == 52, "all full blocks, but the last token is in no column"
    assert_right(engine, second)
    stop(engine)


def test_evicted_blocks_come_back(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, num_blocks=16)
    ask(engine, TEXT)
    settle(engine)
    ask(engine, other(1))
    assert engine.telemetry.counters.evictions > 0
    again = ask(engine, TEXT)
    assert again.cached_tokens == 40
    assert engine.telemetry.counters.tier_hits > 0
    assert_right(engine, again)
    assert_consistent(pool_of(engine))
    stop(engine)


def test_only_the_same_salt_finds_blocks_in_the_file(tmp_path: Path) -> None:
    found = []
    for salt in ("", "a", "", "a", "b"):
        engine = engine_of(tmp_path)
        request = engine.maker.create(TEXT, greedy(1), handling=Handling(cache_salt=salt))
        assert engine.add_request(request)
        assert_answered(run(engine), [request])
        found.append(request.cached_tokens)
        stop(engine)
    assert found == [0, 0, 40, 40, 0]


def test_another_model_has_another_file(tmp_path: Path) -> None:
    """Also if one's file is put in the place of the other's."""
    answers = {}
    for seed in (1, 2):
        engine = engine_of(tmp_path / str(seed), tiny_model(seed), block_size=16)
        answers[seed] = ask(engine, TEXT).token_ids
        stop(engine)
    (own,), (foreign,) = (list((tmp_path / str(seed)).iterdir()) for seed in (1, 2))
    assert own.name != foreign.name
    own.write_bytes(foreign.read_bytes())
    engine = engine_of(tmp_path / "1", tiny_model(1), block_size=16)
    request = ask(engine, TEXT)
    assert (request.cached_tokens, request.token_ids) == (0, answers[1])
    stop(engine)


@pytest.mark.parametrize("change", [{"block_size": 8}, {"model": "weights"}, {}], ids=str)
def test_blocks_are_found_by_the_same_model_and_block_size(tmp_path: Path, change: dict[str, Any]) -> None:
    engine = engine_of(tmp_path, tiny_model(), block_size=16)
    ask(engine, TEXT)
    stop(engine)
    model = tiny_model()
    if change.pop("model", None):
        next(model.parameters()).data[3] += 1e-3  # one row of the embedding, which the probe has
    engine = engine_of(tmp_path, model, **({"block_size": 16} | change))
    assert (ask(engine, TEXT).cached_tokens > 0) == (len(list(tmp_path.iterdir())) == 1)
    stop(engine)


def test_two_servers_with_one_folder_have_a_file_of_their_own_each(tmp_path: Path) -> None:
    engines = [engine_of(tmp_path), engine_of(tmp_path)]
    found = [ask(engine, TEXT).cached_tokens for engine in engines]
    assert len(list(tmp_path.iterdir())) == 2
    for engine in engines:
        stop(engine)
    engines = [engine_of(tmp_path), engine_of(tmp_path)]
    found += [ask(engine, TEXT).cached_tokens for engine in engines]
    assert found == [0, 0, 40, 40]
    for engine in engines:
        stop(engine)


def test_an_engine_that_nobody_has_any_more_leaves_its_file(tmp_path: Path) -> None:
    """As in a notebook, where a cell that builds the engine runs again."""
    engine = engine_of(tmp_path)
    ask(engine, TEXT)
    settle(engine)
    del engine
    gc.collect()
    engine = engine_of(tmp_path)
    assert ask(engine, TEXT).cached_tokens == 40
    assert len(list(tmp_path.iterdir())) == 1
    stop(engine)


@pytest.mark.parametrize("when", ["after the writes", "before the writes"])
def test_a_reset_clears_the_file(tmp_path: Path, when: str) -> None:
    engine, idle = engine_of(tmp_path), threading.Event()
    tier_of(engine)._thread.submit(idle.wait)
    if when == "after the writes":
        idle.set()
    ask(engine, TEXT)
    if when == "after the writes":
        settle(engine)
    assert engine.reset_prefix_cache() == 11
    idle.set()
    stop(engine)
    engine = engine_of(tmp_path)
    assert ask(engine, TEXT).cached_tokens == 0
    stop(engine)


def test_a_full_file_keeps_what_was_used_last(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    tier = tier_of(engine)
    tier._free = tier._free[:25]
    for number in (1, 50, 1, 100):
        ask(engine, other(number))
        settle(engine)
    assert len(tier._places) == 25
    stop(engine)
    engine = engine_of(tmp_path)
    assert [ask(engine, other(number)).cached_tokens for number in (100, 1)] == [40, 40]
    assert ask(engine, other(50)).cached_tokens < 40
    stop(engine)


# ---------------------------------------------------------------------- while blocks are read


class Slow:
    """Holds every read of an engine's file until it is told how many may go on."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Semaphore(0)
        read = tier_of(engine)._file.read

        def held(place: int, key: bytes) -> bytearray:
            self.gate.acquire()
            return read(place, key)

        monkeypatch.setattr(tier_of(engine)._file, "read", held)

    def let(self, blocks: int) -> None:
        self.gate.release(blocks)


def warm(folder: Path) -> Any:
    """Return an engine whose file has the blocks of `TEXT`, and whose memory has none."""
    engine = engine_of(folder)
    ask(engine, TEXT)
    stop(engine)
    return engine_of(folder)


def test_what_a_slow_disk_cannot_take_is_skipped_and_pushes_nothing_out_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "MOST_WRITES", 11)
    engine, idle = engine_of(tmp_path), threading.Event()
    tier = tier_of(engine)
    tier._free = tier._free[:11]
    ask(engine, TEXT)
    settle(engine)
    tier._thread.submit(idle.wait)
    held = ask(engine, other(1))
    lost = ask(engine, other(50))
    assert engine.telemetry.counters.tier_skipped == 11
    idle.set()
    stop(engine)
    engine = engine_of(tmp_path)
    assert [ask(engine, each.prompt_token_ids).cached_tokens for each in (lost, held)] == [0, 40]
    stop(engine)


def test_a_reset_while_the_disk_is_behind_makes_no_room_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "MOST_WRITES", 11)
    engine, idle = engine_of(tmp_path), threading.Event()
    tier_of(engine)._thread.submit(idle.wait)
    ask(engine, TEXT)
    pool_of(engine).reset_prefix_cache()
    ask(engine, other(1))
    assert engine.telemetry.counters.tier_skipped == 11
    idle.set()
    stop(engine)


def test_a_block_that_is_evicted_before_its_turn_is_written(tmp_path: Path) -> None:
    engine, idle = engine_of(tmp_path, num_blocks=16), threading.Event()
    tier_of(engine)._thread.submit(idle.wait)
    ask(engine, TEXT)
    ask(engine, other(1))
    assert engine.telemetry.counters.evictions > 0
    idle.set()
    stop(engine)
    engine = engine_of(tmp_path)
    assert_right(engine, again := ask(engine, TEXT))
    assert again.cached_tokens == 40
    stop(engine)


def test_others_are_computed_while_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm(tmp_path)
    slow = Slow(engine, monkeypatch)
    reader, neighbour = add(engine, TEXT, greedy(4)), add(engine, other(1), greedy(6))
    outputs = []
    while not neighbour.is_terminal:
        outputs += engine.step()
        assert (reader.fetching, reader.prefill_progress) == (True, 0)
        assert_consistent(pool_of(engine))
    slow.let(3)
    while reader.prefill_progress < 12:
        outputs += engine.step()
    assert reader.fetching
    slow.let(7)
    outputs += run(engine)
    assert reader.cached_tokens == 40
    assert_answered(outputs, [reader, neighbour])
    assert_all_free(engine)
    stop(engine)


@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_a_request_may_leave_while_its_blocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    engine = warm(tmp_path)
    slow = Slow(engine, monkeypatch)
    reader = add(engine, TEXT, greedy(4))
    engine.step()
    slow.let(2)
    while reader.prefill_progress < 8:
        engine.step()
    if how == "cancelled":
        engine.cancel(reader.request_id)
    else:
        engine.runner.release(engine.scheduler._make_way(reader))
    slow.let(100)
    outputs = run(engine)
    again = add(engine, TEXT, greedy(4))
    outputs += run(engine)
    assert_answered(outputs, [again] if how == "cancelled" else [reader, again])
    assert_consistent(pool_of(engine))
    assert_all_free(engine)
    stop(engine)


def test_two_requests_for_the_same_blocks_read_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = warm(tmp_path)
    slow = Slow(engine, monkeypatch)
    pair = [add(engine, TEXT, greedy(4)) for _ in range(2)]
    engine.step()
    slow.let(10)
    outputs = run(engine)
    assert [each.cached_tokens for each in pair] == [40, 40]
    assert engine.telemetry.counters.tier_read_bytes == 10 * 32
    slow.let(100)
    assert_answered(outputs, pair)
    stop(engine)


def test_prompt_logprobs_are_computed(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, tiny_model())
    ask(engine, TEXT)
    stop(engine)
    engine = engine_of(tmp_path, tiny_model())
    request = ask(engine, TEXT, prompt_logprobs=1)
    assert request.cached_tokens == 0
    assert engine.telemetry.counters.prefill_tokens == len(TEXT)
    stop(engine)


def test_blocks_that_are_computed_sooner_are_not_read(tmp_path: Path) -> None:
    engine = warm(tmp_path)
    tier = tier_of(engine)
    tier.read_s, tier.block_s = 0.002, 0.001
    assert ask(engine, TEXT).cached_tokens == 0
    assert engine.telemetry.counters.tier_declined == 10
    stop(engine)


def test_a_slow_disk_is_tried_again_after_a_while(tmp_path: Path) -> None:
    engine = warm(tmp_path)
    tier_of(engine).read_s = 40.0
    hits = []
    for _ in range(30):
        hits.append(ask(engine, TEXT).cached_tokens)
        pool_of(engine).clear()
    assert hits[0] == 0
    assert 40 in hits
    stop(engine)
