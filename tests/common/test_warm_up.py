"""Before the first client, a start runs every kind of pass, and on a GPU every kernel."""

from __future__ import annotations

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


def start(phase: str, **options: Any) -> Any:
    """Build an engine that loads its model itself."""
    package = find_phase(phase)
    return package.build_engine(package.Config(**{"device": "cpu", "dtype": "float32"} | options))


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
    assert engine.add_request(engine.maker.create([5], greedy(1, ignore_eos=True)))
    assert [output.error for output in run(engine)] == [None]


@pytest.mark.gpu
@pytest.mark.parametrize("phase", phase_names())
def test_no_client_pays_for_a_compilation(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request makes a phase launch a variant of a kernel that its start has not launched."""
    triton: Any = pytest.importorskip("triton")
    # This model has windows and norms of heads, so it launches every kernel.
    engine = start(phase, device="cuda", model="zoo:gemma3-tiny", max_seq_len=700)
    late: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *, fn, **_: late.append(fn.name))
    for prompts in ([1], [2], [33], [600], [16] * 8, [1, 300, 5, 64], [7, 100, 17]):
        for prompt in prompts:
            params = greedy(1 + prompt % 5, ignore_eos=True)
            assert engine.add_request(engine.maker.create([5] * prompt, params))
        assert not any(output.error for output in run(engine))
    assert late == []
