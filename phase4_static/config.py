"""Options of static batching."""

from __future__ import annotations

from pydantic import Field

from common.engine.config import EngineConfig


class Config(EngineConfig):
    """The base options, and how long a batch waits to fill."""

    batch_wait_timeout_s: float = Field(default=0.05, ge=0.0)
    """seconds a batch waits for more requests before it starts"""
