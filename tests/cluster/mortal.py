"""Phase 8 with engines that a test can kill, as by a fault of the device: `--phase tests.cluster.mortal`.

The environment names a file. The first engine that computes while the file exists deletes it and dies.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from phase8_prefix import PHASE as PHASE_8
from phase8_prefix import Config
from phase8_prefix import build_engine as build_healthy_engine

__all__ = ["DEATH", "PHASE", "Config", "build_engine"]

PHASE = dataclasses.replace(PHASE_8, slug="tests.cluster.mortal")
DEATH = "TEST_DEATH"


def build_engine(config: Config) -> Any:
    engine = build_healthy_engine(config)

    def before_pass(*_: object) -> None:
        try:
            Path(os.environ[DEATH]).unlink()
        except FileNotFoundError:
            return
        raise torch.AcceleratorError("the device is gone")

    engine.runner.model.register_forward_pre_hook(before_pass)
    return engine
