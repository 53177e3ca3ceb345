"""Phase 11 beside phase 10: a document after a restart, chats that exceed the memory, texts without repetition.

Both phases serve the same prompts of random tokens, in turns. If their answers differ in any token, the measurement
fails. Phase 11's file begins empty in each turn.
"""

from __future__ import annotations

import functools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.micro import in_turns, processes, say
from benchmarks.micro.on_device import build_engine
from benchmarks.tables import MeasuredTable
from common.engine.engine import Engine
from common.request import SamplingParams

BLOCK_SIZE = 16
NEW_TOKENS = 16  # of each answer
OWN_TOKENS = 48  # new tokens in a turn of a chat
TURNS = 4  # of each chat
CLIENTS = 4
WARM_TOKENS = 8  # of a prompt that is served before the clock runs
QUIET_S = 0.5  # the file has all blocks if it has grown by none for this long


class Found(NamedTuple):
    """The result of one run."""

    ttft_s: float  # the median of all requests
    token_rate: float  # generated tokens a second
    answers: tuple[tuple[int, ...], ...]
    counts: dict[str, float]  # of the pool


def serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> Found:
    """Serve prompts, `CLIENTS` at a time."""
    requests = [
        engine.maker.create(
            list(prompt), SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True), str(i)
        )
        for i, prompt in enumerate(prompts)
    ]
    waiting, live, began_s = list(requests), 0, time.perf_counter()
    sent_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    while waiting or live:
        while waiting and live < CLIENTS:
            sent_s[waiting[0].request_id] = time.perf_counter()
            engine.add_request(waiting.pop(0))
            live += 1
        time.sleep(max(0.0, (engine.next_wake() or 0.0) - engine.clock()))  # as a server: blocks are read
        for output in engine.step():
            assert output.error is None
            first_s.setdefault(output.request_id, time.perf_counter() - sent_s[output.request_id])
            live -= output.finished
    took_s = time.perf_counter() - began_s
    return Found(
        statistics.median(first_s.values()),
        len(requests) * NEW_TOKENS / took_s,
        tuple(tuple(request.token_ids[len(request.prompt_token_ids) :]) for request in requests),
        dict(engine.runner.pool.counts()),
    )


def texts(count: int, tokens: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000) for _ in range(tokens)] for _ in range(count)]


def start(phase: int, folder: str, model: str, memory: int, longest: int) -> Engine:
    """Build the engine of a phase, with KV memory for `memory` tokens. Phase 11's file is in `folder`."""
    options: dict[str, Any] = {"kv_tier": folder} if phase == 11 else {}
    longest, memory = longest + NEW_TOKENS + 1, max(memory, longest + NEW_TOKENS + BLOCK_SIZE)
    return build_engine(
        str(phase),
        model=model,
        max_seq_len=longest,
        max_batch_size=CLIENTS,
        num_blocks=-(-memory // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        **options,
    )


def wait_for_file(engine: Engine) -> None:
    """Wait until no further block is written."""
    written = None
    while written != (written := engine.runner.pool.counts().get("tier_written_bytes", 0)):
        time.sleep(QUIET_S)


def ask_once(phase: int, folder: str, model: str, document: int) -> Found:
    """Serve a document in a new engine, after a prompt that warms it up."""
    engine = start(phase, folder, model, 2 * document, document)
    serve(engine, texts(1, WARM_TOKENS, seed=2))
    found = serve(engine, texts(1, document, seed=1))
    wait_for_file(engine)
    return found


def chats(phase: int, folder: str, model: str, document: int) -> Found:
    """Serve the turns of chats whose blocks take four times the pool's memory."""
    count = 16
    length = document // 16 + TURNS * (OWN_TOKENS + NEW_TOKENS)
    engine = start(phase, folder, model, count * length // 4, length)
    prompts, all_found = texts(count, document // 16, seed=3), []
    for turn in range(TURNS):
        found = serve(engine, prompts)
        all_found.append(found)
        own = texts(count, OWN_TOKENS, seed=10 + turn)
        prompts = [[*prompts[i], *found.answers[i], *own[i]] for i in range(count)]
    later = all_found[1:]  # the first turn has nothing to find
    return Found(
        statistics.median(found.ttft_s for found in later),
        statistics.harmonic_mean([found.token_rate for found in later]),
        tuple(answer for found in all_found for answer in found.answers),
        all_found[-1].counts,
    )


def unique(phase: int, folder: str, model: str, document: int) -> Found:
    """Serve prompts that have nothing in common, and need more memory than there is."""
    length = document // 16
    engine = start(phase, folder, model, 8 * length, length)
    serve(engine, texts(1, WARM_TOKENS, seed=2))
    return serve(engine, texts(32, length, seed=4))


WORKLOADS = {"after a restart": ask_once, "chats, a quarter in memory": chats, "without repetition": unique}


def compare(
    model: str = "dummy:qwen3-60m",
    document: int = 8000,
    workloads: tuple[str, ...] = tuple(WORKLOADS),
    turns: int = 3,
    folder: str = tempfile.gettempdir(),
) -> Iterator[MeasuredTable]:
    """Compare phase 11 with phase 10 where blocks come back, and where none does.

    Args:
        model: a model of any kind
        document: tokens of the document; the other prompts are shorter in proportion
        workloads: the workloads
        turns: runs of each phase, taken in turns; the median counts
        folder: a folder for the file, on the disk to be measured
    """
    table = MeasuredTable(
        name="tiered",
        title="requests with a file below the prefix cache, and without",
        setup={"model": model, "document": f"{document} tokens", "median of": f"{turns} turns"},
        columns=[
            "workload",
            "TTFT p50, phase 10, s",
            "TTFT p50, phase 11, s",
            "TTFT, 11 ÷ 10",
            "tokens a second, 11 ÷ 10",
            "blocks read",
            "blocks declined",
            "GB written",
        ],
        rows=[],
    )
    rates: dict[int, list[float]] = {}
    latest: dict[int, Found] = {}

    def ttft_s(phase: int, workload: str) -> float:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            for _ in range(2 if workload == "after a restart" else 1):
                with processes((phase,)) as started:  # a process of its own: its end is the restart
                    asked = started[phase].submit(WORKLOADS[workload], phase, place, model, document)
                    latest[phase] = asked.result()
            assert phase == 10 or list(Path(place).iterdir()), "phase 11 has its file there"
        rates[phase].append(latest[phase].token_rate)
        return latest[phase].ttft_s

    for workload in workloads:
        rates = {10: [], 11: []}
        seconds = in_turns({n: functools.partial(ttft_s, n, workload) for n in (10, 11)}, turns)
        assert latest[10].answers == latest[11].answers, f"{workload}: the answers differ"
        faster = statistics.median(rates[11][1:]) / statistics.median(rates[10][1:])
        counts = latest[11].counts
        table.rows.append(
            [
                workload,
                seconds[10],
                seconds[11],
                seconds[11] / seconds[10],
                faster,
                int(counts.get("tier_hits", 0)),
                int(counts.get("tier_declined", 0)),
                counts.get("tier_written_bytes", 0) / 1e9,
            ]
        )
        say(f"{workload}: TTFT × {seconds[11] / seconds[10]:.3f}, tokens a second × {faster:.3f}")
        yield table
