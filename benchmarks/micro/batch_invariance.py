"""How many answers change when their requests share a server with others.

Half of the requests are greedy. The others are sampled with a seed each, some with penalties and stop strings. An
engine answers every request twice with the same options: alone, and together with all requests of its kind (greedy
or sampled). Requests that are served together arrive in shuffled order, while memory is so short that some are
preempted. Prompts are English-like text of varied lengths.

The table has the number of answers in which a token differs, and of answers in which a log-probability differs
(even in the last bit only), for each number type, with the native kernels and without. Nothing is timed, so the
machine need not be idle.
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
from common.engine.engine import Engine
from common.request import SamplingParams
from common.text.tokenizer import Tokenizer
from kernels.dispatch import kernels_on

PROMPT_TOKENS = (8, 200)
NEW_TOKENS = (8, 48)
SEATS = 32
BLOCK_SIZE, NUM_BLOCKS = 16, 160  # about half of the blocks that `SEATS` sequences need
CHUNK = 64
MOST_ARRIVALS = 2  # requests that arrive before a step, at most

DTYPES = ("bfloat16", "float32")
COLUMNS = [
    *("model", "type", "kernels", "batch invariant"),
    *("greedy answers with another token", "sampled answers with another token"),
    *("answers with other log-probabilities", "sequences in a step, mean", "preemptions"),
]

Order = tuple[list[int], SamplingParams]  # a request: prompt token ids, sampling parameters
Answer = list[tuple[int | None, float]]  # new tokens, each with its log-probability


@dataclass(frozen=True, slots=True)
class Served:
    """An engine's answers to all requests, the mean number of sequences in a step, and the count of preemptions."""

    answers: list[Answer]
    sequences: float
    preemptions: int


def draw_orders(tokenizer: Tokenizer, count: int, *, sampled: bool) -> list[Order]:
    """Draw `count` requests, either greedy or sampled.

    Of the sampled requests, on average one in four has a repetition penalty, and one in five a stop string.
    """
    writer = PromptWriter(tokenizer)
    orders = []
    for number in range(count):
        rng = random.Random(f"batch invariance:{'sampled' if sampled else 'greedy'}:{number}")
        prompt, new_tokens = writer.write(rng, rng.randint(*PROMPT_TOKENS)), rng.randint(*NEW_TOKENS)
        params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, logprobs=0)
        if sampled:
            params = SamplingParams(
                temperature=rng.uniform(0.5, 1.2),
                top_p=rng.choice([1.0, 0.9]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
                stop=rng.choice([(), (), (), (), (".",)]),
                seed=rng.getrandbits(31),
                max_new_tokens=new_tokens,
                logprobs=0,
            )
        orders.append((prompt, params))
    return orders


def serve(engine: Engine, orders: Sequence[Order]) -> Served:
    """Serve requests that arrive shuffled, up to `MOST_ARRIVALS` a step. Answers are in the order of `orders`.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random("batch invariance:arrivals")
    requests = [engine.create_request(prompt, params) for prompt, params in orders]
    answers: dict[str, Answer] = {request.request_id: [] for request in requests}
    waiting = rng.sample(requests, len(requests))
    preempted = engine.scheduler.preemptions
    active = []
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, MOST_ARRIVALS)):
            if waiting and engine.add_request(waiting[-1]):
                waiting.pop()
        if not engine.has_work:
            continue
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            assert output.logprobs is not None
            answers[output.request_id].append((output.token_id, output.logprobs.logprob))
        active.append(len(engine.scheduler.active))
    return Served(list(answers.values()), sum(active) / len(active), engine.scheduler.preemptions - preempted)


def alone(engine: Engine, orders: Sequence[Order]) -> list[Answer]:
    """Serve the requests one after the other, and return their answers."""
    return [serve(engine, [order]).answers[0] for order in orders]


def count_changes(phase: str, model: str, dtype: str, native: bool, count: int) -> list[Cell]:
    """Count the answers that batching changes, of `count` greedy and `count` sampled requests.

    Returns a row of the table; cells as in `COLUMNS`.
    """
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
    kinds = [draw_orders(engine.tokenizer, count, sampled=sampled) for sampled in (False, True)]
    together = [serve(engine, orders) for orders in kinds]
    pairs = [
        list(zip(alone(engine, orders), served.answers, strict=True))
        for orders, served in zip(kinds, together, strict=True)
    ]
    return [
        model,
        dtype,
        kernels_on(engine.runner.model.device),
        "yes" if engine.runner.model.batch_invariant else "no",
        *(sum(tokens_of(a) != tokens_of(b) for a, b in each) for each in pairs),
        sum(a != b for a, b in itertools.chain(*pairs)),
        sum(served.sequences for served in together) / len(together),
        sum(served.preemptions for served in together),
    ]


def tokens_of(answer: Answer) -> list[int | None]:
    return [token_id for token_id, _ in answer]


def changes(
    phase: str = "7",
    models: tuple[str, ...] = ("zoo:llama-tiny", "zoo:qwen3-tiny", "zoo:gemma3-tiny"),
    requests: int = 1000,
) -> Iterator[MeasuredTable]:
    """Count the answers that differ between a request served alone and the same request served beside others.

    Args:
        phase: number, word or module of a phase with chunks
        requests: number of greedy requests, and of sampled requests
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
