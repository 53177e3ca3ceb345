"""Options: their ranges, the values that they resolve to, and refusals that name the option and the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from common.devices.resolve import resolve_device, resolve_dtype
from common.engine.config import EngineConfig
from common.errors import StartupError
from common.startup.phases import find_phase, phase_names
from tests.support.engines import CPU, RememberingModel, byte_tokenizer, tiny_model

REFUSED: list[tuple[str, Any]] = [
    *((name, value) for name in ("max_batch_size", "block_size", "num_blocks") for value in (0, -1)),
    *(
        (name, value)
        for name in ("prefill_chunk_size", "max_prefill_chunks_per_step", "prefill_token_budget")
        for value in (0, -1)
    ),
    ("max_seq_len", 1),
    ("max_waiting_requests", 0),
    ("seed", -1),
    ("seed", 2**63),
    ("device", "tpu"),
    ("dtype", "int8"),
    ("batch_wait_timeout_s", -1.0),
    ("kv_cache_backend", "virtual"),
    ("max_batch", 3),
]


@pytest.mark.parametrize("phase", phase_names())
def test_errors_name_the_option(phase: str) -> None:
    """A phase also refuses options that it does not have."""
    for option, value in REFUSED:
        with pytest.raises(ValidationError) as caught:
            find_phase(phase).Config(**{option: value})
        error, *notes = caught.value.errors()  # the first, for those who say only that
        assert {note["type"] for note in notes} <= {"default_factory_not_called"}
        assert error["loc"] == (option,)


@pytest.mark.parametrize(
    ("asked", "model_limit", "resolved"), [(None, 2048, 2048), (None, 131_072, 4096), (8192, 131_072, 8192)]
)
def test_the_longest_sequence(asked: int | None, model_limit: int, resolved: int) -> None:
    assert EngineConfig(max_seq_len=asked).resolve_max_seq_len(model_limit) == resolved


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=r"--device cuda.*--device cpu"):
        resolve_device("cuda")


X86, ARM = {"architecture": "x86_64", "avx512_bf16": True}, {"architecture": "aarch64", "bf16": True}
OLD_X86, OLD_ARM = X86 | {"avx512_bf16": False}, {"architecture": "aarch64", "bf16": False}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("checkpoint", "cpu", "onednn", "expected"),
    [
        (BF16, X86, True, BF16),
        (BF16, OLD_X86, True, FP32),
        (BF16, ARM, True, BF16),
        (BF16, OLD_ARM, True, FP32),
        (BF16, ARM, False, FP32),  # a Mac has the instructions, but torch's build for it does not use them
        (BF16, {"architecture": "ppc64le"}, True, FP32),
        (FP16, X86, True, FP32),
        (FP32, X86, True, FP32),
    ],
)
def test_auto_dtype_on_a_cpu(
    checkpoint: torch.dtype,
    cpu: dict[str, Any],
    onednn: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    assert resolve_dtype("auto", checkpoint, CPU) == expected


# ---------------------------------------------------------------------- phases


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("4", "phase4_static"),
        ("static", "phase4_static"),
        ("phase4", "phase4_static"),
        ("phase4_static", "phase4_static"),
        ("5", "phase5_continuous"),
        ("continuous", "phase5_continuous"),
        (4, "phase4_static"),
        (5, "phase5_continuous"),
    ],
)
def test_a_phase_by_number_or_name(name: int | str, slug: str) -> None:
    package = find_phase(name)
    assert package.PHASE.slug == slug
    assert package.PHASE.default_port == 8000 + package.PHASE.number


@pytest.mark.parametrize(
    "name", ["phase3_cache", "json", "json.decoder", "./phase4_static", ".", "4.0", 3, -4]
)
def test_an_unknown_phase_is_refused_with_the_list_of_phases(name: int | str) -> None:
    with pytest.raises(StartupError, match=f"no phase '{re.escape(str(name))}'; there are phase4_static"):
        find_phase(name)


@pytest.mark.parametrize("phase", phase_names())
def test_the_phase_contract(phase: str) -> None:
    package: Any = find_phase(phase)
    assert phase == package.PHASE.slug == package.__name__
    assert package.PHASE.title
    assert "\n" not in package.PHASE.idea
    model = tiny_model()
    engine = package.build_engine(package.Config(max_seq_len=32), model=model, tokenizer=byte_tokenizer())
    assert type(engine.scheduler) is package.Scheduler
    assert type(engine.runner) is package.Runner
    assert type(engine.runner.pool) is package.Pool
    assert engine.phase is package.PHASE
    assert (engine.maker.facts.max_seq_len, engine.runner.model) == (32, model)


@pytest.mark.parametrize("phase", phase_names())
def test_the_ready_models_positions_are_the_limit(phase: str) -> None:
    package: Any = find_phase(phase)
    ready = {"model": RememberingModel(), "tokenizer": byte_tokenizer()}
    assert package.build_engine(package.Config(), **ready).maker.facts.max_seq_len == 1024
    with pytest.raises(StartupError, match="--max-seq-len"):
        package.build_engine(package.Config(max_seq_len=1025), **ready)


def test_an_ambiguous_name_lists_what_it_could_be() -> None:
    with pytest.raises(StartupError, match="could be phase4_static, phase5_continuous"):
        find_phase("phase")
