"""`make demo`: watch a server write, then see what every phase makes of the same work.

Everything goes over HTTP, as any client's would. First the latest phase serves the bundled model to a few clients
at once; then every phase in turn serves a model of a more usual size to the clients of the `mixed` workload.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import exit_code, exit_on_sigterm
from benchmarks.compare import Comparison, compare
from benchmarks.measure import Measurement, new_comparison_name
from benchmarks.servers import Setup, find_phase_module, open_server, phase_target
from benchmarks.workloads import WORKLOADS, PromptWriter
from common.errors import StartupError
from common.models.registry import open_checkpoint
from common.phases import find_phase, phase_names

WRITER_MODEL = "zoo:llama-tiny"
MEASURED_MODEL = "dummy:llama-60m"
MOST_TOKENS = 600  # of a story: the writer ends nearly all of its stories before
#: Beginnings as in the text that the writer was trained on (`common.zoo.text`): it knows how to go on and to end.
PROMPTS = (
    "Once there was a young owl named Nora.",
    "Once upon a time there was a shy otter named Finn.",
    "Long ago there was a small owl named Tom.",
    "Once upon a time there was a brave fox named Zoë.",
    "Once there was a quiet painter named Oskar.",
    "Long ago there was a kind duck named Lily.",
)
ENDED = {"eos": "by itself", "length": "cut"}


@dataclass
class Answer:
    """One client's answer; times in seconds since it sent its request."""

    prompt: str
    text: str = ""
    tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""


async def complete(client: httpx.AsyncClient, prompt: str) -> Answer:
    """Stream one completion."""
    answer = Answer(prompt)
    body = {
        "model": WRITER_MODEL,
        "prompt": prompt,
        "max_tokens": MOST_TOKENS,
        "temperature": 0.7,
        "seed": 1,
        "stream": True,
    }
    started = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = orjson.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if "token" in event:
                answer.first_token_s = answer.first_token_s or time.perf_counter() - started
                answer.text += event["token"]
                answer.tokens += 1
            answer.finish_reason = event.get("finish_reason", answer.finish_reason)
    answer.total_s = time.perf_counter() - started
    return answer


async def stream_all(url: str) -> tuple[list[Answer], float]:
    """Send all prompts at once. Returns the answers, and the seconds until the last was complete."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        started = time.perf_counter()
        answers = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        return answers, time.perf_counter() - started


def write(phase: str, console: Console) -> None:
    """Serve a few clients at once, and print what they read."""
    console.rule(f"[bold]{len(PROMPTS)} clients at once, python -m {phase} --model {WRITER_MODEL}")
    with open_server(phase_target(phase, Setup(model=WRITER_MODEL))) as server:
        answers, elapsed_s = asyncio.run(stream_all(server.url))
    table = Table("prompt and text", "tokens", "first token", "all of it", "ended")
    for answer in answers:
        table.add_row(
            f"[bold]{answer.prompt}[/bold]{answer.text}",
            str(answer.tokens),
            f"{answer.first_token_s * 1e3:.0f} ms",
            f"{answer.total_s * 1e3:.0f} ms",
            ENDED[answer.finish_reason],
            end_section=True,
        )
    console.print(table)
    tokens = sum(answer.tokens for answer in answers)
    console.print(f"{tokens} tokens in {elapsed_s:.2f} s: {tokens / elapsed_s:.0f} tokens/s\n")


def race(phases: Sequence[str], console: Console) -> int:
    """Give every phase the same work, and print the table that compares them. Returns the exit code."""
    workload = WORKLOADS["mixed"]
    console.rule(f"[bold]the same {workload.requests} requests for every phase, {MEASURED_MODEL}")
    for phase in phases:
        info = find_phase(phase).PHASE
        console.print(f"phase {info.number}  {info.idea}")
    setup = Setup(model=MEASURED_MODEL)
    comparison = Comparison(
        targets=[phase_target(phase, setup) for phase in phases],
        workloads=[workload],
        model=MEASURED_MODEL,
        writer=PromptWriter(open_checkpoint(MEASURED_MODEL).tokenizer()),
        measurement=Measurement(comparison=new_comparison_name()),
    )
    return exit_code(compare(comparison, console))


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m benchmarks.demo") -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phases", help="numbers or names with commas (all)")
    options = parser.parse_args(arguments)
    try:
        names = options.phases.split(",") if options.phases else phase_names()
        phases = [find_phase_module(name.strip()) for name in names]
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    write(phases[-1], console)
    return race(phases, console)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
