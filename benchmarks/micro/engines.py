"""Engines that measurements step without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.engine.engine import Engine
from common.request import Request, SamplingParams
from common.startup.phases import find_phase


def build_engine(phase: str, **options: Any) -> Engine:
    """Build the engine of a phase with these options of its configuration."""
    package = find_phase(phase)
    engine: Engine = package.build_engine(package.Config.model_validate(options))
    return engine


def greedy(new_tokens: int) -> SamplingParams:
    """Return the parameters of a greedy request that generates exactly `new_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)


def add(engine: Engine, prompt: Sequence[int], new_tokens: int) -> Request:
    """Add a greedy request to an engine, which must take it."""
    request = engine.create_request(list(prompt), greedy(new_tokens))
    assert engine.add_request(request)
    return request
