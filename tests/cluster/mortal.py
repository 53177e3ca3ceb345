"""Phase 8, of which one engine dies, as of a fault of its device: `--phase tests.cluster.mortal`.

It is the one that first computes anything while there is a file, whose path is in the environment. The file goes
with it: the others live.
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
