"""Kernels that start early: which GPUs start them so, and that each kernel waits before it does anything else."""

import pytest
import torch

from kernels import overlap


@pytest.fixture(autouse=True)
def forget():
    overlap.early_launch.cache_clear()
    yield
    overlap.early_launch.cache_clear()


@pytest.mark.parametrize(
    ("capability", "hip", "options"),
    [
        ((8, 9), None, {"early": False}),
        ((9, 0), None, {"early": True, "launch_pdl": True}),
        ((12, 0), None, {"early": True, "launch_pdl": True}),
        ((9, 4), "6.3", {"early": False}),  # AMD's compiler has no such option
    ],
)
def test_the_gpus_that_start_kernels_early(monkeypatch, capability, hip, options):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert overlap.early_launch(torch.device("cuda:0")) == options
