"""Workers: the line protocol, what is timed, and the table."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.micro import decode_step
from benchmarks.micro.decode_step import (
    BATCHES,
    COLUMNS,
    LONG,
    MANY,
    SINGLE,
    Contender,
    find_peer,
    measure,
    prompts,
    rows_of,
)
from benchmarks.peers.process import WorkerProcess
from benchmarks.peers.weights import converted, weights_of
from benchmarks.peers.workers import protocol
from benchmarks.peers.workers.protocol import Options, SteppingWorker
from common.engine.reference import generate
from common.errors import StartupError
from common.request import Request, SamplingParams
from tests.support.models import load, zoo

PROMPTS = [[5, 9, 11], [7, 3], [100, 200, 300, 400]]
NEW = 6


def options(phase: str = "phase5_continuous", **changes: Any) -> Options:
    found = weights_of("zoo:llama-tiny", "float32").options(
        max_seq_len=64, max_sequences=4, kv_tokens=256, threads=1
    )
    return found._replace(phase=phase, **changes)


@pytest.fixture(scope="module")
def ours() -> Iterator[WorkerProcess]:
    with WorkerProcess("ours", options()) as worker:
        yield worker


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens that `generate()` gives."""
    model = load(zoo("llama-tiny"))
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    requests = [Request(str(n), prompt, params) for n, prompt in enumerate(PROMPTS)]
    return [
        [output.token_id for output in generate(model, request) if output.token_id is not None]
        for request in requests
    ]


def first_of(tokens: Sequence[Sequence[int]]) -> list[int]:
    return [each[0] for each in tokens]


# ---------------------------------------------------------------------------------------------- orders


def test_our_worker_measures_a_batch(ours: WorkerProcess, expected: list[list[int]]) -> None:
    assert ours.name == "phase 5"
    for prompts_, tokens in ((PROMPTS, expected), (PROMPTS[::-1], expected[::-1])):
        answer = ours.ask({"prompts": prompts_, "new_tokens": NEW})
        assert answer["first_tokens"] == first_of(tokens)
        assert answer["prefill_s"] > 0
        assert answer["decode_s"] > 0
    assert ours.ask({"prompts": PROMPTS, "new_tokens": 1})["decode_s"] is None


def test_a_worker_is_suspended_between_orders(ours: WorkerProcess) -> None:
    """Its children, too: of vLLM's processes, one spins."""
    process = psutil.Process(ours._process.pid)
    order = {"prompts": PROMPTS, "new_tokens": NEW}
    for _ in range(2):
        ours.ask(order)
        until_stopped = time.monotonic() + 10
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until_stopped
            time.sleep(0.01)


@pytest.mark.slow
def test_transformers_worker_measures_the_same_batch(expected: list[list[int]]) -> None:
    same_length = [prompt[:2] for prompt in PROMPTS]
    with WorkerProcess("transformers", options()) as worker, WorkerProcess("ours", options()) as own:
        assert worker.name.startswith("transformers ")
        order = {"prompts": same_length, "new_tokens": NEW}
        theirs, mine = worker.ask(order), own.ask(order)
        assert theirs["first_tokens"] == mine["first_tokens"]
        assert theirs["prefill_s"] > 0
        assert theirs["decode_s"] > 0
        assert worker.ask({"prompts": same_length, "new_tokens": 1})["decode_s"] is None


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(StartupError, match="there is no folder") as refusal:
        WorkerProcess("ours", options(model="/nowhere"))
    assert "\n" not in str(refusal.value)
    with pytest.raises(StartupError, match=r"No module named 'openvino'"):
        WorkerProcess("openvino", options())


@pytest.mark.slow
def test_a_worker_that_dies_is_noticed() -> None:
    with WorkerProcess("ours", options()) as worker:
        worker._process.send_signal(signal.SIGKILL)
        worker._process.wait()
        with pytest.raises(StartupError, match=r"exit -9"):
            worker.ask({"prompts": PROMPTS, "new_tokens": 1})


def test_what_a_library_cannot_convert_is_one_line(tmp_path: Path) -> None:
    weights = weights_of("zoo:llama-tiny", "float32")
    with pytest.raises(StartupError, match=r"llama_cpp cannot convert zoo:.*No module") as refusal:
        converted(weights, "llama_cpp", Path(sys.executable), "1.0", tmp_path)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.rglob("llama_cpp*"))


def test_quantized_weights_are_kept_apart(tmp_path: Path) -> None:
    weights = weights_of("zoo:llama-tiny", "float32", quantize="int8")
    (tmp_path / weights.key / "llama_cpp-1.0").mkdir(parents=True)  # bfloat16, converted before
    with pytest.raises(StartupError, match="cannot convert"):
        converted(weights, "llama_cpp", Path(sys.executable), "1.0", tmp_path)
    with pytest.raises(StartupError, match="only openvino and llama"):
        find_peer("transformers", "int8")


# ---------------------------------------------------------------------------------------------- timing


class Script(SteppingWorker):
    """A worker with scripted steps: the seconds of each, and the jobs that get a token from it."""

    name = "a script"

    def __init__(self, steps: Sequence[tuple[float, Sequence[int]]]) -> None:
        self.now_s = 0.0
        self._steps = iter(steps)

    def add(self, job: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Do nothing: the script has all jobs."""

    def step(self) -> Iterable[tuple[int, int]]:
        seconds, jobs = next(self._steps)
        self.now_s += seconds
        return [(job, 10 * job) for job in jobs]


def test_prefill_ends_with_the_last_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        (1.0, []),  # a part of a prompt
        (2.0, [1]),
        (4.0, [1, 0]),  # job 0 gets its first token beside job 1's second
        (0.25, [0, 1]),
        (0.75, [0, 1]),
        (8.0, [0]),  # job 1 is done, so the step is not one of the whole batch
    ]
    worker = Script(steps)
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: worker.now_s)
    timing = worker.measure([[1], [2]], 4)
    assert timing.prefill_s == 7.0
    assert timing.decode_s == 0.5
    assert timing.first_tokens == [0, 10]


def test_steps_that_only_bring_first_tokens_are_no_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Script([(1.5, [0, 1])])
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: worker.now_s)
    assert worker.measure([[1], [2]], 1) == (1.5, None, [0, 10])


# ---------------------------------------------------------------------------------------------- the table


class Counting(WorkerProcess):
    """A worker without a process. It reports `seconds` for each turn, and the prompts' first tokens."""

    def __init__(self, name: str, seconds: Callable[[int], float], log: list[tuple[str, Any]]) -> None:
        self.name = name
        self._seconds = seconds
        self._log = log
        self._turns = 0

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        prompts_, new_tokens = order["prompts"], order["new_tokens"]
        self._log.append((self.name, prompts_))
        turn, self._turns = self._turns // len(BATCHES), self._turns + 1
        seconds = self._seconds(turn)
        decode_s = seconds / 10 if new_tokens > 1 else None
        return {
            "prefill_s": seconds * len(prompts_),
            "decode_s": decode_s,
            "first_tokens": [prompt[0] for prompt in prompts_],
        }


def contenders(log: list[tuple[str, Any]]) -> list[Contender]:
    return [
        Contender(Counting("phase 6", lambda turn: 9.0, log), ours=True),
        Contender(Counting("phase 7", lambda turn: [100.0, 1.0, 2.0, 6.0][turn], log), ours=True),
        Contender(Counting("fast", lambda turn: 4.0, log), ours=False),
        Contender(Counting("slow", lambda turn: 8.0, log), ours=False),
    ]


def test_turns_alternate_and_everybody_gets_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "SETTLE_S", 0.0)
    log: list[tuple[str, Any]] = []
    floors = iter([50.0, 3.0, 1.0, 2.0])
    found = contenders(log)
    assert measure(found, lambda: next(floors), 3, vocab_size=100) == 2.0  # the warm-up is not counted
    per_turn = len(found) * len(BATCHES)
    assert len(log) == 4 * per_turn
    order = [name for name, _ in log[:: len(BATCHES)]]
    assert order[4:8] == order[:4][::-1]
    assert order[8:12] == order[:4]
    by_name: dict[str, list[Any]] = {}
    for name, sent in log:
        by_name.setdefault(name, []).append(sent)
    first, *others = by_name.values()
    assert all(sent == first for sent in others)
    assert all(a != b for n, a in enumerate(first) for b in first[:n])  # no prompt comes twice


def test_our_last_phase_is_compared_with_the_best_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "SETTLE_S", 0.0)
    found = contenders([])
    measure(found, lambda: 0.001, 3, vocab_size=100)
    older, newest, fast, slow, floor, ratio = rows_of(found, 0.001)
    assert [row[0] for row in (older, newest, fast, slow)] == ["phase 6", "phase 7", "fast", "slow"]
    assert newest[1:5] == pytest.approx([200.0, 200.0, 32_000.0, 2000.0])  # the median turn took 2 seconds
    assert fast[1:5] == pytest.approx([400.0, 400.0, 64_000.0, 4000.0])
    assert floor[1:5] == [1.0, 1.0, None, None]
    assert ratio[0] == "phase 7 ÷ the best of the others"
    assert ratio[1:5] == pytest.approx([0.5] * 4)
    tokens = 3 * sum(batch.sequences for batch in BATCHES)
    assert fast[-1] == f"{tokens} of {tokens}"
    assert {len(row) for row in rows_of(found, 0.001)} == {len(COLUMNS) + 2}


def test_a_contender_with_other_weights_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "SETTLE_S", 0.0)
    found = contenders([])
    measure(found, lambda: 0.001, 1, vocab_size=100)
    stranger = found[2].found[LONG][0]
    found[2].found[LONG][0] = stranger._replace(first_tokens=[-1])
    assert rows_of(found, 0.001)[2][-1] == "17 of 18"


def test_without_a_peer_there_is_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "SETTLE_S", 0.0)
    found = contenders([])[:2]
    measure(found, lambda: 0.001, 1, vocab_size=100)
    assert [row[0] for row in rows_of(found, 0.001)] == ["phase 6", "phase 7", "reading the weights once"]


def test_prompts_are_as_long_as_said() -> None:
    for batch in (SINGLE, MANY, LONG):
        drawn = prompts(batch, 1, 50)
        assert [len(prompt) for prompt in drawn] == [batch.prompt_tokens] * batch.sequences
        assert max(map(max, drawn)) < 50
        assert drawn == prompts(batch, 1, 50)
