"""Before the first client, a start runs every kind of pass, and on a GPU every kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import common.kv
import common.models.layers
import common.startup.build
from common.kv import KVView
from common.startup.phases import find_phase, phase_names
from kernels.paged_attention import SPLIT_COLUMNS
from tests.support.engines import greedy, run

Compilations = dict[str, set[str]]  # for each kernel, the keys of its lookups


class AbsentGPU:
    """The part of a driver that the lookup of a kernel needs."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def collect() -> Compilations:
    """Make every later launch only add its key to the returned sets.

    Triton looks a compiled kernel up by types, constants and properties of arguments (1, a multiple of 16). Before
    it compiles a missing kernel, it calls `jit_cache_hook`. The hook here returns that the kernel is compiled
    already, so nothing is compiled and nothing runs.
    """
    import triton

    found: Compilations = {}

    def note(*, key: str, fn: Any, **others: Any) -> bool:
        found.setdefault(fn.name.rpartition(".")[2], set()).add(key)
        return True

    triton.runtime.driver.set_active(AbsentGPU())
    triton.knobs.runtime.jit_cache_hook = note
    return found


ROOT = Path(__file__).parents[2]
KERNELS = {
    "_rms_norm_kernel",
    "_fused_add_rms_norm_kernel",
    "_rope_kernel",
    "_gated_act_kernel",
    "_paged_attention_kernel",
    "_merge_splits_kernel",
}


def start(phase: str, **options: Any) -> Any:
    """Build an engine that loads its model itself."""
    package = find_phase(phase)
    return package.build_engine(package.Config(device="cpu", dtype="float32", **options))


@pytest.mark.parametrize("model", ["zoo:llama-tiny", "zoo:gemma3-tiny"])
def test_every_kind_of_pass_runs_before_anyone_asks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    sampled: list[tuple[torch.Size, list[tuple[bool, bool]]]] = []
    attend, sample = KVView.attend, common.startup.build.sample

    def recording_attend(self: KVView, layer: int, *args: Any, **options: Any) -> Tensor:
        if layer == 0:
            passes.append((self.layout.query_lengths, self.layout.kv_lengths))
        return attend(self, layer, *args, **options)

    def recording_sample(logits: Tensor, requests: Any) -> Any:
        params = [request.params for request in requests]
        sampled.append((logits.shape, [(p.greedy, p.top_p < 1.0) for p in params]))
        return sample(logits, requests)

    monkeypatch.setattr(KVView, "attend", recording_attend)
    monkeypatch.setattr(common.startup.build, "sample", recording_sample)
    engine = start("continuous", model=model)
    prefill, decode, mixed = passes
    assert min(prefill[0]) > 1
    assert decode[0] == (1, 1)
    assert mixed[0][0] == 1 < mixed[0][1]
    assert mixed[1][0] > SPLIT_COLUMNS
    rows = torch.Size([2, engine.runner.model.config.vocab_size])
    assert sampled == [(rows, [(True, False), (False, True)])] * 3


def test_a_server_of_few_positions_starts() -> None:
    engine = start("continuous", model="zoo:llama-tiny", max_seq_len=2)
    assert engine.add_request(engine.create_request([5], greedy(1, ignore_eos=True)))
    assert [output.error for output in run(engine)] == [None]


@pytest.mark.slow
def test_no_client_pays_for_a_compilation() -> None:
    """On a GPU, no request makes a phase launch a kernel variant that its start has not launched."""
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {each["phase"] for each in found} == set(phase_names())
    for each in found:
        assert set(each["after the start"]) == KERNELS
        assert each["in the end"] == each["after the start"], each["phase"]


# ---------------------------------------------------------------------- in a process of its own


def compute_as_well(module: Any, name: str, reference: Callable[..., Any]) -> None:
    """Make a module choose Triton. A launch is only counted here, so torch computes the result afterwards."""
    launch = getattr(module, name)

    def both(*args: Any, **options: Any) -> Any:
        launch(*args, **options)
        return reference(*args, **options)

    setattr(module, name, both)
    module.use_triton = lambda tensor: True


def collect_compilations() -> None:
    """Print as JSON the kernels that each phase would compile at its start, and after many kinds of requests."""
    import kernels.attention
    import kernels.gated_act
    import kernels.paged_attention
    import kernels.rms_norm
    import kernels.rope

    torch.set_num_threads(1)
    found = collect()
    norms = kernels.rms_norm
    compute_as_well(norms, "rms_norm_triton", norms.rms_norm_reference)
    compute_as_well(norms, "fused_add_rms_norm_triton", norms.fused_add_rms_norm_reference)
    compute_as_well(common.kv, "norm_rope_write_triton", kernels.rope.norm_rope_write_reference)
    common.models.layers.use_triton = lambda tensor: True
    compute_as_well(kernels.gated_act, "gated_act_triton", kernels.gated_act.gated_act_reference)
    paged = kernels.paged_attention
    compute_as_well(kernels.attention, "paged_attention_triton", paged.paged_attention_reference)

    def so_far() -> dict[str, list[str]]:
        return {kernel: sorted(keys) for kernel, keys in found.items()}

    report = []
    for phase in phase_names():
        found.clear()
        options = {"batch_wait_timeout_s": 0.0} if phase == "phase4_static" else {}
        # This model has windows and norms of heads, so it launches every kernel.
        engine = start(phase, model="zoo:gemma3-tiny", max_seq_len=700, native_kernels=False, **options)
        after_start = so_far()
        for prompts in ([1], [2], [33], [600], [16] * 8, [1, 300, 5, 64], [7, 100, 17]):
            for prompt in prompts:
                params = greedy(1 + prompt % 5, ignore_eos=True)
                assert engine.add_request(engine.create_request([5] * prompt, params))
            assert not any(output.error for output in run(engine))
        report.append({"phase": phase, "after the start": after_start, "in the end": so_far()})
    print(json.dumps(report))


if __name__ == "__main__":
    collect_compilations()
