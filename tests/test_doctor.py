"""`infer doctor`: each check, on a machine where it succeeds and on one where it does not."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from infer import doctor
from tests.support.forked import Forked


def screen(code: int, **environment: str) -> dict[str, str]:
    """Run the command in a process of its own. Returns its lines by name, each beginning with its mark."""
    ended, printed, log = Forked("infer", ["doctor"], env=environment).finish()
    assert ended == code, log
    lines: dict[str, str] = {}
    for line in printed.splitlines():
        if line[2] != " ":
            name, _, text = line[2:].partition(" ")
            lines[name] = f"{line[0]} {text.strip()}"
        else:
            lines[name] += f" {line.strip()}"
    return lines


def test_without_a_compiler_and_a_cache_folder(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    lines = screen(0, CXX="", PATH="/nonexistent", XDG_CACHE_HOME=str(cache), INFER_NATIVE_KERNELS="true")
    assert lines["compiler"] == "~ there is no C++ compiler here; install g++"
    assert lines["kernels"].startswith(
        "~ torch computes on the CPU, which is slower: there is no C++ compiler"
    )
    assert "not made yet" in lines["cache"]
    assert not cache.exists()
    assert lines["models"].startswith("  zoo:gemma3-tiny, zoo:llama-tiny, zoo:qwen3-tiny; `infer fetch`")
    assert lines["infer"] == f"  {importlib.metadata.version('infer-phases')}"


def test_options_in_the_environment_are_read_and_keys_are_not_shown() -> None:
    lines = screen(0, INFER_NATIVE_KERNELS="false", INFER_API_KEY="hunter2", INFER_HOSTS="0.0.0.0")
    assert lines["options"] == (
        "~ in the environment: INFER_API_KEY, INFER_HOSTS, INFER_NATIVE_KERNELS=false; "
        "INFER_HOSTS is ignored, since it is no option here: did you mean INFER_HOST?"
    )
    assert lines["kernels"].startswith("~ torch computes")
    assert lines["kernels"].endswith("INFER_NATIVE_KERNELS switches the native kernels off")
    assert "hunter2" not in " ".join(lines.values())


def test_a_wrong_option_keeps_a_server_from_starting() -> None:
    lines = screen(1, INFER_MAX_BATCH_SIZE="many", INFER_NATIVE_KERNELS="false")
    assert lines["options"].startswith("! in the environment: ")
    assert "INFER_MAX_BATCH_SIZE" in lines["options"]


def test_a_requirement_that_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2", "rich>=9999", "no-such-package", 'also-missing; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: required)
    version = importlib.metadata.version("rich")
    assert doctor.unmet() == [f"rich>=9999, not {version}", "no-such-package"]
    assert doctor.unmet("dev") == ["also-missing"]
    assert doctor.installed().mark == "!"


def test_how_large_a_model_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda _: 10**10)
    assert doctor.memory().startswith("9.3 GB free of ")
    assert doctor.memory().endswith("about 4.0 billion at 16 bits or 13.1 billion at 4.9 bits a weight")


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(doctor, "free_memory", lambda _: 2**33)
    monkeypatch.setattr("kernels.dispatch.HAS_TRITON", False)
    assert (doctor.gpu().mark, "Triton is not installed" in doctor.gpu().text) == ("~", True)
    monkeypatch.setattr("kernels.dispatch.HAS_TRITON", True)
    assert doctor.gpu().text == "a GPU, 8.0 GB free; Triton kernels"
