"""Sizes that the user does not give: fixed on a CPU, by free memory on a GPU (a stand-in)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import common.startup.sizing
from common.engine.config import GPU_SEATS, SAFE_SEQ_LEN
from common.models.registry import open_checkpoint, weight_bytes
from common.server.options import read_options
from common.startup.memory import estimate_memory
from common.startup.phases import find_phase, phase_names
from common.startup.sizing import (
    CONTEXT_SHARE,
    GPU_CHUNK,
    GPU_SHARE,
    sized_for,
    with_context,
)
from tests.support.engines import CPU

CUDA = torch.device("cuda")
MODEL = open_checkpoint("dummy:llama-3.2-1b").config
WEIGHTS = weight_bytes(MODEL, torch.bfloat16)


def sized(phase: str, free: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Return the options for a GPU with `free` GB of free memory."""
    monkeypatch.setattr(common.startup.sizing, "free_memory", lambda _: int(free * 2**30))
    config = find_phase(phase).Config(**({"max_seq_len": 4096} | options))
    return sized_for(config, MODEL, torch.bfloat16, CUDA, weights=WEIGHTS)


def total(config: Any) -> int:
    return estimate_memory(config, MODEL, torch.bfloat16, CUDA, weights=WEIGHTS).total


@pytest.mark.parametrize("phase", phase_names())
@pytest.mark.parametrize("free", [6, 24, 80])
def test_a_gpu_is_filled(phase: str, free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more sequence, or one more block, would not fit."""
    config = sized(phase, free, monkeypatch)
    usable = GPU_SHARE * free * 2**30
    assert total(config) <= usable
    assert config.kv_tokens() >= 4096
    larger = "num_blocks" if "num_blocks" in type(config).model_fields else "max_batch_size"
    if config.max_batch_size < GPU_SEATS or larger == "num_blocks":
        assert total(config.model_copy(update={larger: getattr(config, larger) + 1})) > usable
    if larger == "num_blocks" and free == 80:
        assert config.max_batch_size == GPU_SEATS


@pytest.mark.parametrize("phase", phase_names())
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_context_is_the_models_where_memory_allows_it(
    phase: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MODEL.max_position_embeddings
    lengths = []

    def needed(length: int) -> int:
        config = find_phase(phase).Config().with_length(length, on_gpu=device is CUDA)
        return estimate_memory(config, MODEL, torch.bfloat16, device, weights=WEIGHTS).total

    for free in (1, 4, 8, 16, 64, 2**14):
        monkeypatch.setattr(common.startup.sizing, "free_memory", lambda _, free=free: free * 2**30)

        def served(**options: Any) -> Any:
            config = find_phase(phase).Config(**options)
            return with_context(config, MODEL, torch.bfloat16, device, weights=WEIGHTS, limit=limit)

        config = served()
        lengths.append(config.max_seq_len)
        usable = max(CONTEXT_SHARE * free * 2**30, needed(SAFE_SEQ_LEN))
        assert needed(lengths[-1]) <= usable
        assert lengths[-1] == limit or needed(2 * lengths[-1]) > usable
        assert config.kv_tokens() >= config.max_seq_len
        assert served(max_seq_len=8192).max_seq_len == 8192
        if device is CUDA and free >= 16:
            sized = sized_for(config, MODEL, torch.bfloat16, CUDA, weights=WEIGHTS)
            assert sized.kv_tokens() >= sized.max_seq_len
            assert (
                sized.max_batch_size
                == sized_for(
                    config.model_copy(update={"max_seq_len": SAFE_SEQ_LEN}),
                    *(MODEL, torch.bfloat16, CUDA),
                    weights=WEIGHTS,
                ).max_batch_size
            ), "a longer context costs no seats"
    assert lengths == sorted(lengths)
    assert lengths[-1] == limit
    assert SAFE_SEQ_LEN <= lengths[0] < limit


def test_a_given_size_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = sized("9", 80, monkeypatch, max_batch_size=24, num_blocks=100, prefill_chunk_size=64)
    assert (config.max_batch_size, config.num_blocks) == (24, 100)
    assert config.prefill_chunk_size == 64
    config = sized("9", 80, monkeypatch, max_batch_size=24, prefill_token_budget=300)
    assert config.max_batch_size == 24
    assert config.num_blocks > 24 * 4096 // 16
    assert (config.prefill_chunk_size, config.prefill_token_budget) == (GPU_CHUNK, 300)


def test_a_chunk_on_a_gpu_is_no_longer_than_a_sequence_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sized("7", 80, monkeypatch).prefill_chunk_size == GPU_CHUNK
    assert sized("7", 80, monkeypatch, max_seq_len=512).prefill_chunk_size == 512


def test_a_cpu_changes_nothing() -> None:
    config = find_phase("9").Config(max_seq_len=4096)
    assert sized_for(config, MODEL, torch.bfloat16, CPU, weights=WEIGHTS) is config


def test_a_flag_with_the_default_value_is_given() -> None:
    """`--max-batch-size 8` means 8 on a GPU, too."""
    package = find_phase("9")
    _, config = read_options(package, ["--max-batch-size", "8"])
    assert config.model_fields_set == {"max_batch_size"}
    assert read_options(package, [])[1] == package.Config()
