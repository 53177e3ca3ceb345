"""How many answers change when their requests share a server with others.

Every request is answered twice by an engine with the same options: alone, and among all others, which arrive in
shuffled order while memory is so short that some are preempted. Prompts are English-like text of varied lengths.
Half of the requests are greedy; the others are sampled with a seed each, some with penalties and stop strings. The
table has the number of answers with another token, and of answers with another log-probability (even in the last
bit only), for each number type, with the native kernels and without. Nothing is timed: the machine need not be
idle.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.micro import in_new_process
from benchmarks.micro.engines import build_engine
from benchmarks.servers import find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import PromptWriter
from common.engine import Engine
from common.request import SamplingParams, StepOutput
from common.text import Tokenizer
from kernels.dispatch import kernels_on

PROMPT_TOKENS = (8, 200)
NEW_TOKENS = (8, 48)
SEATS = 32
BLOCK_SIZE, NUM_BLOCKS = 16, 160  # about half of what so many sequences need
CHUNK = 64
ARRIVALS = (0, 2)  # fewest and most in a step

DTYPES = ("bfloat16", "float32")
COLUMNS = [
    "model",
    "type",
    "kernels",
    "batch invariant",
    "greedy answers with another token",
    "sampled answers with another token",
    "answers with other log-probabilities",
    "sequences in a step, mean",
    "preemptions",
]


@dataclass(frozen=True, slots=True)
class Order:
    """Prompt and sampling parameters of a request, before an engine creates it."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens, and the log-probability of each."""

    token_ids: list[int | None]
    logprobs: list[float]

    @classmethod
    def of(cls, outputs: Sequence[StepOutput]) -> Answer:
        return cls(
            [output.token_id for output in outputs],
            [output.logprobs.logprob for output in outputs if output.logprobs is not None],
        )


@dataclass(frozen=True, slots=True)
class Served:
    """An engine's answers to all orders, and how crowded its steps were.

    Attributes:
        answers: one for each order.
        sequences: the mean number of sequences in a step.
    """

    answers: list[Answer]
    sequences: float
    preemptions: int


def greedy_orders(tokenizer: Tokenizer, count: int) -> list[Order]:
    """Draw greedy requests."""
    return [
        Order(prompt, SamplingParams(temperature=0.0, max_new_tokens=new_tokens, logprobs=0))
        for _, prompt, new_tokens in _draw(tokenizer, count, "greedy")
    ]


def sampled_orders(tokenizer: Tokenizer, count: int) -> list[Order]:
    """Draw sampled requests: one in four with a repetition penalty, one in five with a stop string."""
    return [
        Order(
            prompt,
            SamplingParams(
                temperature=rng.uniform(0.5, 1.2),
                top_p=rng.choice([1.0, 0.9]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
                stop=rng.choice([(), (), (), (), (".",)]),
                seed=rng.getrandbits(31),
                max_new_tokens=new_tokens,
                logprobs=0,
            ),
        )
        for rng, prompt, new_tokens in _draw(tokenizer, count, "sampled")
    ]


def _draw(tokenizer: Tokenizer, count: int, kind: str) -> list[tuple[random.Random, list[int], int]]:
    """Draw a random generator, a prompt and a number of new tokens for each request."""
    writer = PromptWriter(tokenizer)
    sources = [random.Random(f"batch invariance:{kind}:{number}") for number in range(count)]
    return [
        (rng, writer.write(rng, rng.randint(*PROMPT_TOKENS)), rng.randint(*NEW_TOKENS)) for rng in sources
    ]


def alone(engine: Engine, orders: Sequence[Order]) -> list[Answer]:
    """Serve the orders one after the other, and return their answers."""
    return [serve(engine, [order], most_arrivals=1).answers[0] for order in orders]


def serve(engine: Engine, orders: Sequence[Order], most_arrivals: int = ARRIVALS[1]) -> Served:
    """Serve orders that arrive in shuffled order, a few a step.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random("batch invariance:arrivals")
    requests = [engine.create_request(order.prompt, order.params) for order in orders]
    waiting = rng.sample(requests, len(requests))
    preempted = engine.scheduler.preemptions
    outputs: dict[str, list[StepOutput]] = {request.request_id: [] for request in requests}
    active = []
    while waiting or engine.has_work:
        for _ in range(rng.randint(ARRIVALS[0], most_arrivals)):
            if waiting and engine.add_request(waiting[-1]):
                waiting.pop()
        if not engine.has_work:
            continue
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            outputs[output.request_id].append(output)
        active.append(len(engine.scheduler.active))
    return Served(
        answers=[Answer.of(outputs[request.request_id]) for request in requests],
        sequences=sum(active) / len(active),
        preemptions=engine.scheduler.preemptions - preempted,
    )


def count_changes(phase: str, model: str, dtype: str, native: bool, count: int) -> list[Cell]:
    """Return a row of the table for one model, type and choice of kernels; cells as in `COLUMNS`."""
    engine = build_engine(
        phase,
        model=model,
        device="cpu",
        dtype=dtype,
        native_kernels=native,
        max_batch_size=SEATS,
        max_seq_len=PROMPT_TOKENS[1] + NEW_TOKENS[1],
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        prefill_chunk_size=CHUNK,
    )
    kinds = [orders(engine.tokenizer, count) for orders in (greedy_orders, sampled_orders)]
    together = [serve(engine, orders) for orders in kinds]
    pairs = [
        list(zip(alone(engine, orders), served.answers, strict=True))
        for orders, served in zip(kinds, together, strict=True)
    ]
    invariant = engine.runner.model.batch_invariant
    return [
        model,
        dtype,
        kernels_on(engine.runner.model.device),
        "yes" if invariant else "no",
        *(sum(a.token_ids != b.token_ids for a, b in each) for each in pairs),
        sum(a.logprobs != b.logprobs for each in pairs for a, b in each),
        sum(served.sequences for served in together) / len(together),
        sum(served.preemptions for served in together),
    ]


def changes(
    phase: str = "7",
    models: tuple[str, ...] = ("zoo:llama-tiny", "zoo:qwen3-tiny", "zoo:gemma3-tiny"),
    requests: int = 1000,
) -> Iterator[MeasuredTable]:
    """Count answers that change under load.

    Args:
        phase: number, word or module of one with chunks
        requests: of each kind
    """
    module = find_phase_module(phase)
    table = MeasuredTable(
        name="batch_invariance",
        title="answers under load against the same requests alone",
        setup={
            "phase": module,
            "requests": f"{requests} greedy and {requests} sampled",
            "prompts of": f"{PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} tokens",
            "answers of at most": f"{NEW_TOKENS[0]}-{NEW_TOKENS[1]}",
            "chunks of": f"{CHUNK}",
            "seats": f"{SEATS} on {NUM_BLOCKS} blocks of {BLOCK_SIZE}",
        },
        columns=COLUMNS,
        rows=[],
    )
    for model, native, dtype in itertools.product(models, (True, False), DTYPES):
        # A process has no native kernels unless it loads them.
        table.rows.append(in_new_process(count_changes, module, model, dtype, native, requests))
        yield table  # each row takes minutes
