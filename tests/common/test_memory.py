"""Memory: the estimate of an engine's parts, the check against free memory, and the memory really taken."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import common.startup.build
import common.startup.memory
import common.startup.process_memory
import common.startup.sizing
from common.engine.config import EngineConfig
from common.errors import StartupError
from common.models.registry import load_model, open_checkpoint, weight_bytes
from common.request import Request, SamplingParams
from common.sampling.draw import sample
from common.startup.control_groups import cpu_quota, limit_threads
from common.startup.memory import (
    SAMPLING_BYTES_PER_LOGIT,
    MemoryEstimate,
    check_memory,
    control_group_room,
    estimate_memory,
    free_memory,
)
from common.startup.phases import find_phase, phase_names
from kernels.dispatch import HAS_TRITON
from tests.support.engines import CPU, byte_tokenizer, tiny_model
from tests.support.forked import in_a_fork, memory_bytes
from tests.support.models import refusal_of

GB = 2**30
CUDA = torch.device("cuda")
LLAMA_3B = open_checkpoint("dummy:llama-3.2-3b").config
EIGHT = EngineConfig(max_batch_size=8, max_seq_len=4096)


class LoadedError(Exception):
    """Raised in place of reading the weights."""


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise LoadedError

    monkeypatch.setattr(common.startup.build, "load_model", load)


def set_free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (common.startup.memory, common.startup.sizing):
        monkeypatch.setattr(module, "free_memory", lambda _: count)


def refusal(config: EngineConfig, **sizes: int) -> str:
    return refusal_of(functools.partial(check_memory, **sizes), config, LLAMA_3B, torch.bfloat16, CPU)


# ---------------------------------------------------------------------- the estimate


def test_the_parts_by_hand() -> None:
    """Llama 3.2 3B: 28 layers, hidden 3072, MLP 8192, 24 query heads and 8 KV heads of 128, vocabulary 128256."""
    kv_cache = 8 * 4096 * 2 * 28 * 8 * 128 * 2
    widest, streams = 2 * 3072 + 3 * 8192, 2 * 3072 * 4  # numbers of the model's type; bytes of float32
    beside = kv_cache // 28 * 5 // 4 + 128 * 2**20
    on_cpu = estimate_memory(EIGHT, LLAMA_3B, torch.bfloat16, CPU, weights=7)
    assert on_cpu == MemoryEstimate(
        weights=7,
        kv_cache=kv_cache,
        activations=8 * 4096 * (widest * 4 + streams) + beside,
        sampling=8 * 128_256 * 72,
    )
    assert on_cpu.total == sum((7, kv_cache, on_cpu.activations, on_cpu.sampling))
    on_gpu = estimate_memory(EIGHT, LLAMA_3B, torch.bfloat16, CUDA, weights=7)
    splits = 8 * 24 * 8 * (128 + 2) * 4  # 4096 columns are 8 splits
    assert on_gpu.activations == 8 * 4096 * (widest * 2 + streams) + splits + 128 * 2**20
    assert on_gpu.sampling == 8 * 128_256 * (24 if HAS_TRITON else 72)
    wide = estimate_memory(EIGHT, LLAMA_3B, torch.float32, CPU, weights=7)
    assert (wide.kv_cache, wide.sampling) == (2 * kv_cache, on_cpu.sampling)


def test_graphs_count_where_they_are_captured() -> None:
    """24 sequences need graphs of up to 24 rows. The graphs share scratch memory, with logits and scores for
    penalties, and a buffer for logits, all in float32."""
    config = find_phase("pipelined").Config(max_batch_size=24, max_seq_len=4096)
    on_gpu, on_cpu = (
        estimate_memory(config, LLAMA_3B, torch.bfloat16, device, weights=0) for device in (CUDA, CPU)
    )
    splits = 24 * 24 * 8 * (128 + 2) * 4
    pass_bytes = 24 * ((2 * 3072 + 3 * 8192) * 2 + 2 * 3072 * 4)
    assert on_gpu.graphs == pass_bytes + splits + 3 * 24 * 128_256 * 4
    assert on_gpu.total - on_gpu.graphs == on_gpu.kv_cache + on_gpu.activations + on_gpu.sampling
    assert on_cpu.graphs == 0
    called = find_phase("pipelined").Config(max_batch_size=24, max_seq_len=4096, captured_steps=False)
    assert estimate_memory(called, LLAMA_3B, torch.bfloat16, CUDA, weights=0).graphs == 0
    prefix = find_phase("prefix").Config(max_batch_size=24, max_seq_len=4096)
    assert estimate_memory(prefix, LLAMA_3B, torch.bfloat16, CUDA, weights=0).graphs == 0


# ---------------------------------------------------------------------- the check


def test_memory_that_does_not_suffice_is_refused_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weight_bytes(LLAMA_3B, torch.bfloat16)
    total = estimate_memory(EIGHT, LLAMA_3B, torch.bfloat16, CPU, weights=weights).total
    set_free(monkeypatch, total - 1)
    message = refusal(EIGHT, weights=weights)
    assert message == (
        "weights 6.0 GB + KV cache (8 × 4096 tokens) 3.5 GB + activations (32768 tokens in a pass) 4.8 GB + "
        "logits and sampling (8 rows) 70.5 MB = 14.3 GB, but only 14.3 GB are free on cpu: "
        "lower --max-batch-size or --max-seq-len"
    )
    set_free(monkeypatch, total)
    check_memory(EIGHT, LLAMA_3B, torch.bfloat16, CPU, weights=weights)


def test_weights_that_do_not_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 4 * GB)
    assert "the weights alone do not fit; take a smaller model" in refusal(EIGHT, weights=5 * GB)


def test_the_advice_is_the_phases_own(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 7 * GB)
    config = find_phase("paged").Config(max_seq_len=64, num_blocks=10_000)
    message = refusal(config, weights=0)
    assert "KV cache (10000 blocks × 16 tokens)" in message
    assert message.endswith(config.kv_advice())
    assert "--num-blocks" in message


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("phase", phase_names())
def test_weights_are_not_read_if_they_cannot_fit(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = find_phase(phase)
    config = package.Config(model="dummy:llama-3.2-3b", device="cpu", dtype="bfloat16", native_kernels=False)
    set_free(monkeypatch, 8 * GB)
    with pytest.raises(StartupError, match=r"weights 6\.0 GB \+ KV cache .* but only 8\.0 GB are free"):
        package.build_engine(config)
    set_free(monkeypatch, 64 * GB)
    with pytest.raises(LoadedError):
        package.build_engine(config)
    set_free(monkeypatch, 8 * GB)  # the remedy that the refusal names helps
    with pytest.raises(LoadedError):
        package.build_engine(config.model_copy(update={"max_batch_size": 1, "max_seq_len": 2048}))


@pytest.mark.parametrize("phase", phase_names())
def test_a_ready_models_weights_are_not_counted_again(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = find_phase(phase)
    config = package.Config(max_seq_len=64, max_batch_size=2)
    ready = {"model": tiny_model(), "tokenizer": byte_tokenizer()}
    set_free(monkeypatch, 10 * 2**20)
    with pytest.raises(StartupError) as caught:
        package.build_engine(config, **ready)
    assert "weights" not in str(caught.value)
    assert "KV cache" in str(caught.value)
    set_free(monkeypatch, 200 * 2**20)
    assert package.build_engine(config, **ready).maker.facts.max_seq_len == 64


# ---------------------------------------------------------------------- free memory


def make_tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Write a `/proc/self/cgroup` with these lines, and files below `/sys/fs/cgroup`, under `root`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def version_2(group: str, limit: str, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        f"{group}memory.max": limit,
        f"{group}memory.current": str(usage),
        f"{group}memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}",
    }


def version_1(group: str, limit: int, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        f"memory/{group}memory.limit_in_bytes": str(limit),
        f"memory/{group}memory.usage_in_bytes": str(usage),
        f"memory/{group}memory.stat": f"active_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}",
    }


V1_LINES = "5:cpu,cpuacct:/pod/box\n4:memory:/pod/box\n1:name=systemd:/pod/box\n0::/\n"


ONE, BOX = "0::/\n", "0::/pod/box\n"
GROUPS: dict[str, tuple[str, dict[str, str], int | None]] = {
    "v2, a container's own root": (ONE, version_2("", "1000", 300, 50), 750),
    "v2, a group": (BOX, version_2("pod/box/", "1000", 300), 700),
    "v2, a file was read twice": (ONE, version_2("", "1000", 300, 50, 200), 950),
    "v2, the limit is further out": (
        BOX,
        version_2("pod/box/", "max", 300) | version_2("pod/", "900", 400),
        500,
    ),
    "v2, the outer one is tighter": (
        BOX,
        version_2("pod/box/", "1000", 300) | version_2("pod/", "2000", 1900),
        100,
    ),
    "v2, no limit": (BOX, version_2("pod/box/", "max", 300), None),
    "v2, over the limit": (ONE, version_2("", "1000", 1200), 0),
    "v2, moved out of its namespace": ("0::/../box\n", version_2("", "1000", 300), 700),
    "v1, a group": (V1_LINES, version_1("pod/box/", 1000, 300, 50), 750),
    "v1, a file was read twice": (V1_LINES, version_1("pod/box/", 1000, 300, 50, 200), 950),
    "v1, a container shown the host's path": (V1_LINES, version_1("", 1000, 300), 700),
    "v1, the outer one is tighter": (
        V1_LINES,
        version_1("pod/box/", 1000, 300) | version_1("pod/", 600, 200),
        400,
    ),
    "v1, not shown": (V1_LINES, {}, None),
    "no memory controller": ("4:cpu:/pod\n", version_2("pod/", "1000", 300), None),
    "no groups": ("", {}, None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_room_control_groups_leave(name: str, tmp_path: Path) -> None:
    assert control_group_room(tmp_path) is None, "there is no /proc"
    cgroup, files, room = GROUPS[name]
    assert control_group_room(make_tree(tmp_path, cgroup, files)) == room


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        (ONE, {"cpu.max": "400000 100000"}, 4.0),
        (BOX, {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "250000 100000"}, 2.5),
        (ONE, {"cpu.max": "max 100000"}, None),
        (V1_LINES, {"cpu/pod/box/cpu.cfs_quota_us": "50000", "cpu/pod/box/cpu.cfs_period_us": "100000"}, 0.5),
        (V1_LINES, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_a_quota_of_cpus_limits_the_threads(
    cgroup: str, files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu_quota(make_tree(tmp_path, cgroup, files)) == quota
    set_threads: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(common.startup.control_groups, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    limit_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    limit_threads()
    assert set_threads == {2.5: [2], 0.5: [1]}.get(quota or 0, [])


@pytest.mark.parametrize(("allowed", "free"), [(None, 12345), (99999, 12345), (999, 999)])
def test_free_memory_of_the_cpu_is_the_smaller_of_machine_and_group(
    allowed: int | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = psutil.virtual_memory()._replace(available=12345)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(common.startup.memory, "control_group_room", lambda: allowed)
    assert free_memory(CPU) == free


def test_memory_that_torch_holds_unused_on_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    assert free_memory(CUDA) == 1500


def test_freed_memory_is_returned_and_living_objects_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = gc.get_freeze_count()
    common.startup.process_memory.freeze_objects()
    assert gc.get_freeze_count() > frozen
    for platform in (sys.platform, "darwin"):  # another library's allocator is left alone
        monkeypatch.setattr(sys, "platform", platform)
        common.startup.process_memory._malloc_trim.cache_clear()
        common.startup.process_memory.return_freed_memory()
    assert common.startup.process_memory._malloc_trim() is None
    common.startup.process_memory._malloc_trim.cache_clear()


# ---------------------------------------------------------------------- taken memory

PARAMS = SamplingParams(  # its top_k makes sampling sort all
    top_p=0.9, top_k=100_000, min_p=0.1, repetition_penalty=1.2, logprobs=5, max_new_tokens=2, seed=0
)


def of_sampling(_: torch.dtype) -> tuple[int, int]:
    """Return the estimated bytes and those that were taken, as `of_an_engine` does."""
    sequences, vocab = 12, 128_000
    requests = [Request(str(i), [1, 2], PARAMS) for i in range(sequences)]
    for request in requests:
        request.sampling.seed(0)
    with torch.inference_mode():
        sample(torch.randn(1, 100), requests[:1])  # what libraries take is not measured
        before = memory_bytes("VmRSS")
        sample(torch.randn(sequences, vocab), requests)
    return SAMPLING_BYTES_PER_LOGIT * sequences * vocab, memory_bytes("VmHWM") - before


def of_an_engine(dtype: torch.dtype) -> tuple[int, int]:
    before = memory_bytes("VmRSS")
    checkpoint = open_checkpoint("dummy:llama-60m")
    shape = dataclasses.replace(
        checkpoint.config, layers=checkpoint.config.layers[:1], hidden_size=256, intermediate_size=4096
    )
    checkpoint.config = shape
    model = load_model(checkpoint, device=CPU, dtype=dtype, max_positions=512)
    package = find_phase("static")
    config = package.Config(max_batch_size=8, max_seq_len=512)
    engine = package.build_engine(config, model=model, tokenizer=checkpoint.tokenizer())
    for _ in range(8):
        engine.add_request(engine.maker.create(list(range(510)), PARAMS))
    while engine.has_work:
        assert not [output.error for output in engine.step() if output.error]
    weights = weight_bytes(shape, dtype)
    estimated = estimate_memory(config, shape, dtype, CPU, weights=weights).total
    return estimated, memory_bytes("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("what", "dtype"),
    [
        (of_sampling, torch.float32),
        (of_an_engine, torch.float32),
        pytest.param(of_an_engine, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_no_more_was_taken_than_estimated(
    what: Callable[[torch.dtype], tuple[int, int]], dtype: torch.dtype
) -> None:
    """All sequences have full length, passes their largest size, and sampling uses every filter."""
    estimated, taken = in_a_fork(what, dtype)
    print(f"{what.__name__}, {dtype}: took {taken / 2**20:.0f} of {estimated / 2**20:.0f} MB")
    assert taken <= 1.05 * estimated
    assert taken >= 0.4 * estimated  # a larger estimate would refuse models that fit easily
