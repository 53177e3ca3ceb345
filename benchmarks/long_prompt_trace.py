"""What a long prompt does to those who decode, as a trace of each phase: a few steps before it, and some after.

`python -m benchmarks.long_prompt_trace [--phases 6 7] [--model dummy:llama-60m] [--prompt 1000]`

An engine in a process of its own, without a server, records its own steps. Pages draw the files it writes
(`benchmarks/results/traces`), and Perfetto shows them.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import orjson
import torch

from benchmarks.environment import describe_environment
from benchmarks.results import LOCAL, write_whole
from common.phases import find_phase
from common.request import Request, SamplingParams
from common.trace import TraceBuffer, Tracer

TRACES = "traces"  # the folder below one of results
DECODING, SHORT_PROMPT = 3, 64
STEPS_BEFORE, TOKENS_AFTER = 4, 4


def record(phase: str, model: str, prompt: int) -> tuple[str, bytes]:
    """Three who decode, and a prompt of so many tokens: the phase's name, and the trace."""
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
    """A trace that says what it is of, and on which machine."""
    environment = describe_environment()
    label = f"{what}, {environment['cpu']}, {torch.get_num_threads()} threads"
    event = {"pid": 1, "ph": "M", "name": "process_labels", "args": {"labels": label}}
    first, rest = trace.split(b"\n", 1)
    return b"\n".join([first, orjson.dumps(event) + b",", rest])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phases", nargs="+", default=["6", "7"])
    parser.add_argument("--model", default="dummy:llama-60m")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens (1000)")
    parser.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    options = parser.parse_args(arguments)
    for phase in options.phases:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            name, trace = process.submit(record, phase, options.model, options.prompt).result()
        path = options.out / TRACES / f"long_prompt-{name}.trace"
        print(f"written to {write_whole(path, trace.decode())}")


if __name__ == "__main__":
    main()
