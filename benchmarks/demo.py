"""`make demo`: shows the answers of a server, then compares all phases on the same requests.

All requests are sent over HTTP. First the latest phase serves the bundled model to a few clients at once. Then
every phase in turn serves a larger model, with random weights, to a few clients that chat. Two servers start at a
time, since a start keeps one core busy. They are measured one after the other, and no server starts meanwhile.

`--model smollm2` fetches a real chat model first, and asks it a question. Then all phases serve this model.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import exit_code, exit_on_sigterm
from benchmarks.client import AnswerReader, Endpoint, new_record, send
from benchmarks.compare import Comparison, compare
from benchmarks.events import data_of
from benchmarks.measure import Measurement, new_comparison_name
from benchmarks.report import summary
from benchmarks.results import RequestRecord
from benchmarks.servers import Setup, find_phase_module, open_server, phase_target
from benchmarks.workloads import Lengths, PlannedRequest, PromptWriter, Workload
from common.errors import StartupError
from common.models.fetch import FETCHABLE, fetch
from common.models.registry import open_checkpoint
from common.startup.console import replace_unknown_characters
from common.startup.phases import find_phase, phase_names

WRITER_MODEL = "zoo:llama-tiny"
MEASURED_MODEL = "dummy:llama-15m"
#: Sequences that phases 4 and 5 have memory for. All phases get the same memory.
SLOTS = 4
CLIENTS, TURNS = 6, 2
STARTED_TOGETHER = 2
ALIKE = 0.25  # of a value: by chance, two runs of a few seconds may differ by so much
#: Chats of a few clients. Each client waits for an answer before it asks again, so the load fits a machine of any
#: speed. There are more clients than slots. Prompts and answers differ in length. A client's second prompt begins
#: with its first prompt and the answer.
CHATS = Workload(
    "demo",
    requests=CLIENTS * TURNS,
    turns=TURNS,
    prompts=((1.0, Lengths(32, 256)),),
    new_tokens=Lengths(16, 80),
    arrivals="turns",
)
#: The same with fewer tokens: a real model takes several times as long for each.
SHORT_CHATS = replace(CHATS, prompts=((1.0, Lengths(16, 128)),), new_tokens=Lengths(12, 48))
MOST_TOKENS = 600  # limit of a story's length: the model ends nearly all of its stories before it
#: Beginnings as in the model's training text (`zoo.text`), so that it can continue and end the stories.
PROMPTS = (
    "Once there was a young owl named Nora.",
    "Once upon a time there was a shy otter named Finn.",
    "Long ago there was a small owl named Tom.",
    "Once upon a time there was a brave fox named Zoë.",
    "Once there was a quiet painter named Oskar.",
    "Long ago there was a kind duck named Lily.",
)
SAMPLING = {"temperature": 0.3, "seed": 1}
QUESTION = "Write three tips for staying healthy."
ENDED = {"eos": "by itself", "length": "cut"}


async def stream_all(endpoint: Endpoint) -> list[tuple[AnswerReader, RequestRecord]]:
    """Send all of `PROMPTS` at once. Returns each prompt's answer and the record of its times."""
    requests = [PlannedRequest(index, 0.0, text, 0, MOST_TOKENS) for index, text in enumerate(PROMPTS)]
    records = [new_record(request) for request in requests]
    origin_s = time.monotonic()
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        sends = [
            send(client, endpoint, request, record, origin_s=origin_s)
            for request, record in zip(requests, records, strict=True)
        ]
        return list(zip(await asyncio.gather(*sends), records, strict=True))


def write(phase: str, console: Console) -> None:
    """Start a server, send it all of `PROMPTS` at once, and print each answer with its times.

    Raises:
        RuntimeError: a request failed.
    """
    console.rule(f"[bold]{len(PROMPTS)} clients at once, python -m {phase} --model {WRITER_MODEL}")
    console.print("starting the server …")
    with open_server(phase_target(phase, Setup(model=WRITER_MODEL))) as server:
        console.print(f"{server.url} answers; waiting for {len(PROMPTS)} stories …")
        answers = asyncio.run(stream_all(Endpoint(server.url, server.model, False, fields=SAMPLING)))
    table = Table("prompt and text", "tokens", "first token", "all of it", "ended")
    for prompt, (answer, record) in zip(PROMPTS, answers, strict=True):
        if record.error is not None:
            raise RuntimeError(record.error)
        table.add_row(
            f"[bold]{prompt}[/bold]{answer.text}",
            str(answer.tokens),
            f"{record.ttft_s * 1e3:.0f} ms",
            f"{record.latency_s * 1e3:.0f} ms",
            ENDED[record.finish_reason or ""],
            end_section=True,
        )
    console.print(table)
    tokens = sum(answer.tokens for answer, _ in answers)
    elapsed_s = max(record.finished_s or 0.0 for _, record in answers)
    console.print(f"{tokens} tokens in {elapsed_s:.2f} s: {tokens / elapsed_s:.0f} tokens/s\n")


def chat(phase: str, model: str, console: Console) -> None:
    """Serve a real model, ask a question, and print the answer as it arrives.

    A model without a chat template continues the question.
    """
    console.rule(f"[bold]a question, python -m {phase} --model {model}")
    console.print(f"[bold]{QUESTION}")
    console.print("starting the server …")
    chats = open_checkpoint(model).tokenizer().chat_template is not None
    body = {"model": model, "temperature": 0, "max_tokens": 200, "stream": True}
    body |= {"messages": [{"role": "user", "content": QUESTION}]} if chats else {"prompt": QUESTION}
    path = "/openai/v1/chat/completions" if chats else "/openai/v1/completions"
    with (
        open_server(phase_target(phase, Setup(model=model))) as server,
        httpx.stream("POST", server.url + path, json=body, timeout=120, trust_env=False) as response,
    ):
        response.raise_for_status()
        for data in data_of(response.iter_bytes()):
            for choice in json.loads(data).get("choices", ()):
                text = choice["delta"].get("content") if chats else choice["text"]
                console.print(text or "", end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")


def race(
    phases: Sequence[str], console: Console, model: str = MEASURED_MODEL, workload: Workload = CHATS
) -> int:
    """Send every phase the same requests, and print the table that compares them. Returns the exit code."""
    console.rule(f"[bold]the same {workload.requests} requests for every phase, {model}")
    console.print(f"{CLIENTS} clients, {TURNS} turns of a chat each; phases 4 and 5 serve {SLOTS} at once\n")
    for phase in phases:
        info = find_phase(phase).PHASE
        console.print(f"phase {info.number}  {info.idea}")
    setup = Setup(model=model, slots=SLOTS, max_seq_len=1024)
    comparison = Comparison(
        targets=[phase_target(phase, setup) for phase in phases],
        workloads=[workload],
        model=model,
        writer=PromptWriter(open_checkpoint(model).tokenizer()),
        measurement=Measurement(comparison=new_comparison_name()),
        show=functools.partial(summary, alike=ALIKE),
        started_together=STARTED_TOGETHER,
    )
    runs = compare(comparison, console)
    console.print(
        "Each phase was measured once, for seconds. The sentences leave out differences of up to "
        f"{ALIKE:.0%}, which may be chance. `infer compare` measures longer.",
        soft_wrap=True,
    )
    return exit_code(runs)


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m benchmarks.demo") -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phases", help="numbers or names with commas (all)")
    parser.add_argument(
        "--model", help=f"a real model: {' or '.join(FETCHABLE)}, which is fetched, or any name"
    )
    options = parser.parse_args(arguments)
    replace_unknown_characters()
    console = Console()
    try:
        names = options.phases.split(",") if options.phases else phase_names()
        phases = [find_phase_module(name.strip()) for name in names]
        if options.model in FETCHABLE:
            console.print(f"downloading {options.model}, unless it was downloaded before …")
            console.print(f"{options.model} is in {fetch(options.model)}")
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.model is not None:
        chat(phases[-1], options.model, console)
        return race(phases, console, options.model, SHORT_CHATS)
    write(phases[-1], console)
    code = race(phases, console)
    console.print(
        "\nnext, with a real chat model (93 MB to download): make demo MODEL=smollm2", soft_wrap=True
    )
    return code


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
