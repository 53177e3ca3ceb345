"""Traces of a long prompt that arrives while other requests decode: some steps before it, some after.

An engine in a process of its own, without a server, records its own steps. Pages draw the files it writes
(`benchmarks/results/traces`), and Perfetto shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import torch
from rich.console import Console

from benchmarks.environment import describe_environment
from benchmarks.micro import in_new_process
from benchmarks.results import write_whole
from benchmarks.tables import MeasuredTable
from common.phases import find_phase
from common.request import Request, SamplingParams
from common.trace import TraceBuffer, Tracer

TRACES = "traces"  # the folder below one of results
DECODING, SHORT_PROMPT = 3, 64
STEPS_BEFORE, TOKENS_AFTER = 4, 4


def record(phase: str, model: str, prompt: int) -> tuple[str, bytes]:
    """Trace three decoding requests and a prompt of so many tokens. Returns the phase's name and the trace."""
    package = find_phase(phase)
    config = package.Config(model=model, max_batch_size=DECODING + 1, max_seq_len=prompt + 128)
    engine = package.build_engine(config)

    def add(name: str, tokens: int) -> Request:
        prompt_ids = [(7 * i + len(name)) % 200 + 3 for i in range(tokens)]
        params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
        request = engine.create_request(prompt_ids, params, name)
        assert engine.add_request(request)
        return request

    def finish() -> None:
        for request in list(engine.live_requests):
            engine.cancel(request.request_id)
        while engine.has_work:
            engine.step()

    add("warm-up", prompt)  # a pass as wide as there will be
    for _ in range(8):
        engine.step()
    finish()

    decoding = [add(f"decodes {number}", SHORT_PROMPT) for number in range(1, DECODING + 1)]
    while min(request.num_generated_tokens for request in decoding) < STEPS_BEFORE:
        engine.step()
    tracer, buffer = Tracer(engine), TraceBuffer()
    tracer.start(buffer)
    for _ in range(STEPS_BEFORE):
        engine.step()
    long = add("long prompt", prompt)
    while long.num_generated_tokens < TOKENS_AFTER:
        engine.step()
    tracer.stop(buffer)
    finish()
    dtype = str(engine.runner.model.dtype).removeprefix("torch.")
    return package.PHASE.slug, labelled(buffer.fetch(), f"{model}, {dtype}")


def labelled(trace: bytes, what: str) -> bytes:
    """Return a trace with a label that names the model and the machine."""
    environment = describe_environment()
    label = f"{what}, {environment['cpu']}, {torch.get_num_threads()} threads"
    event = {"pid": 1, "ph": "M", "name": "process_labels", "args": {"labels": label}}
    first, rest = trace.split(b"\n", 1)
    return b"\n".join([first, orjson.dumps(event) + b",", rest])


def traces(
    console: Console,
    out: Path,
    phases: tuple[str, ...] = ("6", "7"),
    model: str = "dummy:llama-60m",
    prompt: int = 1000,
) -> Iterator[MeasuredTable]:
    """Write a trace of each phase. There is no table.

    Args:
        prompt: its tokens
    """
    for phase in phases:
        name, trace = in_new_process(record, phase, model, prompt)
        path = write_whole(out / TRACES / f"long_prompt-{name}.trace", trace)
        console.print(f"written to {path}", soft_wrap=True, highlight=False)
    yield from ()
