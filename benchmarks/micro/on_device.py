"""Helpers that build engines and time them on the best device of this machine: a GPU, or else the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.micro import batch_size
from benchmarks.micro.batch_size import Machine
from common.devices.resolve import resolve_device
from common.engine.engine import Engine
from common.models.layers import CausalLM
from common.request import SamplingParams
from common.startup.phases import find_phase
from common.startup.process_memory import freeze_objects
from common.text.tokenizer import Tokenizer

COPIED_BYTES = 2**30
PEAK_SIZE = 8192  # sides of a product in which nearly all time is arithmetic

WARM_STEPS = 4
# Steps left out at the end: the last step of phases 9 and 10 already launches a pass of fewer sequences, and may
# capture a graph for it.
LAST_STEPS = 1

DEVICE = resolve_device("auto")


def build_engine(phase: str, **options: Any) -> Engine:
    """Build the engine of a phase with these options of its configuration."""
    package = find_phase(phase)
    engine: Engine = package.build_engine(package.Config.model_validate(options))
    return engine


def add(engine: Engine, prompt: Sequence[int], new_tokens: int) -> None:
    """Add a greedy request that generates exactly `new_tokens` tokens. The engine must take it."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    assert engine.add_request(engine.maker.create(list(prompt), greedy))


class Loaded(NamedTuple):
    """A model that several engines share."""

    model: CausalLM
    tokenizer: Tokenizer

    @classmethod
    def of(cls, name: str, dtype: str, positions: int) -> Loaded:
        """Load a model as a server loads it, for sequences of up to `positions` tokens."""
        engine = build_engine("4", model=name, dtype=dtype, max_seq_len=positions, max_batch_size=1)
        return cls(engine.runner.model, engine.maker.tokenizer)

    def engine(self, phase: str, **options: Any) -> Engine:
        """Build the engine of a phase. Options that the phase lacks are left out."""
        package = find_phase(phase)
        known = {name: value for name, value in options.items() if name in package.Config.model_fields}
        engine: Engine = package.build_engine(
            package.Config.model_validate(known), model=self.model, tokenizer=self.tokenizer
        )
        return engine


class DecodeSteps(NamedTuple):
    """Steps in which all sequences of a batch decoded.

    Attributes:
        seconds: the duration of each step.
        tokens: the number of tokens generated in all these steps together.
    """

    seconds: list[float]
    tokens: int

    @property
    def step_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(self.seconds)


def decode(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> DecodeSteps:
    """Serve prompts of the same length together, each with exactly `new_tokens` greedy tokens.

    Returns:
        The steps after every sequence has its first token and before any sequence ends, without the first
        `WARM_STEPS` and the last `LAST_STEPS`.

    Raises:
        ValueError: the requests generate too few tokens to time such steps.
    """
    for prompt in prompts:
        add(engine, prompt, new_tokens)
    freeze_objects()  # as a server does; otherwise garbage collections would be timed, too
    begun: set[str] = set()
    counts: list[int] = []
    seconds: list[float] = []
    ended = False
    before_s = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise output.error
        all_decode = len(begun) == len(prompts) and not ended
        ended = ended or any(output.finished for output in outputs)
        if all_decode and not ended:
            counts.append(sum(output.token_id is not None for output in outputs))
            seconds.append(now_s - before_s)
        begun |= {output.request_id for output in outputs}
        before_s = time.perf_counter()
    if len(counts) <= WARM_STEPS + LAST_STEPS:
        raise ValueError(f"{new_tokens} new tokens are too few to time decode steps")
    timed = slice(WARM_STEPS, -LAST_STEPS)
    return DecodeSteps(seconds[timed], sum(counts[timed]))


def seconds_of(run: Callable[[], object], times: int = 5) -> float:
    """Return the seconds of a call: the best of `times` calls, after one that warms up."""
    run()
    best = float("inf")
    for _ in range(times):
        _synchronize()
        began_s = time.perf_counter()
        run()
        _synchronize()
        best = min(best, time.perf_counter() - began_s)
    return best


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    """Return a function that calls `call` `times` times. On a GPU it replays a graph, as decode steps do.

    Without a graph the host would be measured: launching a small kernel takes longer than running it.
    """

    def calls() -> None:
        for _ in range(times):
            call()

    if DEVICE.type == "cpu":
        return calls
    call()  # compiles, and puts tensors on the device that later calls reuse
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure_machine(dtype: torch.dtype) -> Machine:
    """Measure the device's bandwidth by a copy (a CPU's by reading), and its arithmetic rate by a large product."""
    if DEVICE.type == "cpu":
        return batch_size.measure_machine(dtype, 3)
    source = torch.ones(COPIED_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), 10)
    x, weight = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=DEVICE, dtype=dtype) for _ in range(2))
    product_s = seconds_of(lambda: x @ weight, 10)
    return Machine(2 * COPIED_BYTES / copy_s, 2 * PEAK_SIZE**3 / product_s)


def free_unused() -> None:
    """Free the memory of an engine that nothing refers to any more. The next engine's size may depend on it."""
    gc.unfreeze()  # `decode` has frozen the objects of the engine
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def describe(machine: Machine) -> dict[str, str]:
    """Return the device and its measured rates, for the setup of a table."""
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU"
    return {
        "device": name,
        "copies": f"{machine.bytes_per_s / 1e9:,.0f} GB/s",
        "multiplies": f"{machine.operations_per_s / 1e12:,.2f} TFLOP/s",
    }


def prompts_of(count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """Return prompts that differ from each other in their first token."""
    return [[(31 * number + 7 * i) % (vocab_size - 8) + 4 for i in range(tokens)] for number in range(count)]
