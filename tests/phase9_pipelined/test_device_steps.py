"""Steps of phases 9 and 10 on a stand-in for a GPU: copies and launches are counted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import common.models.layers
import common.sampling.draw
import kernels.attention
import kernels.decode_rows
import kernels.draw
import kernels.few_rows_linear
import kernels.gated_act
import kernels.paged_attention
import kernels.penalties
import kernels.rms_norm
import kernels.rope
import phase9_pipelined.runner
from common.devices.streams import Done, Pending, Stream
from common.engine.engine import Engine
from common.engine.runner import PassShare
from common.kv import Span
from common.models.layers import CausalLM
from common.models.registry import _without_memory, open_checkpoint
from common.request import Request, SamplingParams
from kernels.dispatch import HAS_TRITON
from kernels.penalties import IN_PROMPT
from kernels.tape import Function
from phase8_prefix.cache import PrefixCachingPool
from phase9_pipelined.seats import DeviceSeats
from tests.support.engines import add, build
from tests.support.streams import StandIns, runner_of

META = torch.device("meta")

MAKERS = (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor)


class Copies(TorchFunctionMode):
    """Counts copies from the host to the device.

    Attributes:
        blocking: names of the calls that wait for the device.
        sent: number of copies that do not.
        bytes: total size of the copies that do not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []
        self.sent = self.bytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MAKERS and (func is Tensor.new_tensor or result.device.type != "cpu"):
            self.blocking.append(func.__name__)
        if func is Tensor.to and result.device.type != "cpu" and args[0].device.type == "cpu":
            if (kwargs or {}).get("non_blocking"):
                self.sent += 1
                self.bytes += args[0].nbytes
            else:
                self.blocking.append("to")
        return result


#: Operators that launch nothing: they make views, or memory that nothing is written to. `_to_copy` is part of `to`.
VIEWS = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
    *("_unsafe_view", "reshape", "_to_copy"),
}


class Launches(TorchDispatchMode):
    """Counts the kernels that operators on the device launch, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        outputs = result if isinstance(result, tuple | list) else (result,)
        on_device = any(isinstance(each, Tensor) and each.device == META for each in outputs)
        if on_device and name not in VIEWS:
            self.found[name] += 1
        return result


class Kernel:
    """Stands for a Triton kernel: counts its launches."""

    def __init__(self, name: str, found: Counter[str]) -> None:
        self._name, self._found = name, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self._found[self._name] += 1
        return lambda *arguments, **options: None


def use_kernels(monkeypatch: pytest.MonkeyPatch, found: Counter[str]) -> None:
    """Make every module choose Triton, and count launches instead of launching."""
    k = kernels
    layers, runner = common.models.layers, phase9_pipelined.runner
    for module in (k.attention, k.gated_act, k.rms_norm, k.rope, layers, common.sampling.draw, runner):
        monkeypatch.setattr(module, "use_triton", lambda _: True)
    monkeypatch.setattr(k.few_rows_linear, "takes", lambda x: x.shape[0] <= k.few_rows_linear.FEW_ROWS)
    for module in (
        *(
            k.paged_attention,
            k.gated_act,
            k.rms_norm,
            k.rope,
            k.draw,
            k.decode_rows,
            k.few_rows_linear,
            k.penalties,
        ),
    ):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Kernel(name, found))


class MetaStream(Stream):
    """Runs submitted work at once. Work by rows runs in stand-ins for graphs. Results on the host are zeros."""

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.graphs = StandIns(sizes, to_device=lambda each: each.to(META, non_blocking=True))

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,
        by_row: bool = False,
        rows: int | None = None,
    ) -> Pending:
        before = after.wait() if after is not None else ()
        with torch.inference_mode():
            outputs = self.graphs.run(key, function, inputs) if by_row else function(*before, *inputs)
        return Done(tuple(torch.zeros_like(each, device="cpu") for each in outputs) if fetch else outputs)

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def drain(self) -> None:
        pass


pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not published for this platform")


@pytest.fixture(autouse=True)
def finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of blocks for NaN. It reads from the device, but on a stream of its own."""
    monkeypatch.setattr(PrefixCachingPool, "_are_finite", lambda *_: True)


def engine_of(phase: str, model: CausalLM, graph_sizes: Sequence[int] = (), **options: Any) -> Engine:
    engine = build(phase, model, **({"max_seq_len": 256, "block_size": 4} | options))
    runner_of(engine).stream = MetaStream(graph_sizes)
    return engine


def test_tokens_that_the_device_has_not_counted() -> None:
    """A decode step counts the token that it reads. All other tokens are sent once."""
    seats = DeviceSeats(2, 10, torch.device("cpu"))
    penalised = Request("a", [4, 4, 7], SamplingParams(repetition_penalty=1.5, presence_penalty=0.5))
    plain = Request("b", [4], SamplingParams(temperature=0.0))

    def step(request: Request, column: int) -> list[list[int]] | None:
        """Decode at seat 1. Returns the seat's counts before the step; None: nothing was sent."""
        share = PassShare(request, Span.exact(0, column, column + 1), [1], range(1))
        changed = seats.changes([share], seats=[1])
        if not changed:
            return None
        seats.apply(*changed)
        assert seats.penalties is not None
        return seats.penalties.counts[1].tolist()

    penalised.token_ids += [9, 7]
    prompt = [0, 0, 0, 0, IN_PROMPT, 0, 0, IN_PROMPT, 0, 0]
    assert step(penalised, 4) == [*prompt[:9], 1]  # the token 7 is read, and counted, in this step
    assert step(penalised, 5) is None
    penalised.token_ids += [2, 3, 3]
    assert step(penalised, 7) == [0, 0, 0, 1, IN_PROMPT, 0, 0, IN_PROMPT, 0, 1], (
        "3 was computed beside a prompt"
    )
    assert seats.penalties is not None
    assert seats.penalties.factors.tolist() == [[1, 0, 0], [1.5, 0, 0.5]]
    assert step(plain, 1) == [0] * 10
    assert seats.penalties.factors.tolist() == [[1, 0, 0]] * 2
    seats.forget()
    assert step(penalised, 5) == [0, 0, 0, 0, IN_PROMPT, 0, 0, 1 + IN_PROMPT, 0, 1]


def model_of(name: str) -> CausalLM:
    """Return a model whose weights are on the meta device, without memory."""
    config = open_checkpoint(f"zoo:{name}-tiny").config
    return _without_memory(config, torch.bfloat16, 256)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("phase", ["phase9_pipelined", "phase10_speculative"])
def test_a_step_makes_no_blocking_copy(phase: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps mix chunks of prompts, decode and every kind of sampling, and block tables grow."""
    use_kernels(monkeypatch, Counter())
    engine = engine_of(phase, model_of(name), prefill_chunk_size=16, num_blocks=200, max_batch_size=6)
    params = [
        {"temperature": 0.0, "min_tokens": 3},
        {"top_p": 0.9, "frequency_penalty": 0.5},
        {"top_k": 5, "logit_bias": ((3, 1.0),)},
        {"temperature": 0.0, "logprobs": 2},
        {"min_p": 0.1},
    ]
    for i, fields in enumerate(params):
        add(engine, [1 + i] * (10 + 9 * i), SamplingParams(max_new_tokens=12, ignore_eos=True, **fields))
    most, steps = 0, 0
    while engine.has_work:
        with Copies() as copies:
            outputs = engine.step()
        assert not any(output.error for output in outputs)
        assert copies.blocking == []
        most, steps = max(most, copies.sent), steps + 1
    assert steps > 12
    # A pass with prompts sends its indices and tokens, block table entries, sampling parameters, and tokens after
    # wrong guesses. A decode pass sends block table entries, changes at seats, the seats, and sampling parameters.
    assert most == 4


def test_a_decode_step_is_sent_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two greedy and two sampled sequences in a graph of four rows, most steps send nothing. One sequence has
    penalties."""
    use_kernels(monkeypatch, Counter())
    engine = engine_of("phase9_pipelined", model_of("llama"), [4], max_batch_size=4, num_blocks=300)
    given = SamplingParams(temperature=0.0, max_new_tokens=110, ignore_eos=True)
    params = [given, given, *[SamplingParams(top_p=0.9, max_new_tokens=110, ignore_eos=True)] * 2]
    params[1] = dataclasses.replace(given, repetition_penalty=1.2)
    requests = [add(engine, [1 + i] * 5, each) for i, each in enumerate(params)]
    sent = []
    for _ in range(90):
        with Copies() as copies:
            engine.step()
        sent.append((copies.sent, copies.bytes))
    steps = Counter(sent[3:])  # a prompt's pass, the first decode step, and the graph's first replay
    blocks = (
        4 * 8 + 16
    )  # once in four steps: an entry of each sequence's block table and its address, to 16 bytes
    numbers = 16 + 2 * 69 * 8  # once in 64 steps: the sampled seats' parameters and next random numbers
    assert steps == {(0, 0): 64, (1, blocks): 22, (1, numbers): 1}
    engine.cancel(requests[0].request_id)
    with Copies() as copies:
        engine.step()
    assert (copies.sent, copies.bytes) == (1, 4 * 8), "the seats that decode"


@pytest.mark.parametrize(
    ("name", "expected"), [("llama-3.2-1b", 156), ("qwen3-0.6b", 264), ("gemma-3-1b", 301)]
)
@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"temperature": 0.0, "top_p": 0.9}, 0),
        ({"temperature": 0.0}, 0),
        ({"top_k": 50, "top_p": 0.9}, 16),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, 16 + 2),
    ],
    ids=str,
)
def test_launches_of_a_decode_step(
    name: str, expected: int, fields: dict[str, Any], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of docs/phases/recorded.md."""
    launches = Launches()
    use_kernels(monkeypatch, launches.found)
    model = _without_memory(open_checkpoint(f"dummy:{name}").config, torch.bfloat16, 4096)
    engine = engine_of("phase9_pipelined", model, max_batch_size=4, max_seq_len=4096)
    for i in range(4):
        add(engine, [1 + i] * 5, SamplingParams(max_new_tokens=20, ignore_eos=True, **fields))
    for _ in range(3):
        engine.step()
    launches.found.clear()
    with launches:
        engine.step()
    assert launches.found["_paged_attention_kernel"] == engine.runner.model.config.num_layers
    assert sum(launches.found.values()) == expected + more, launches.found
