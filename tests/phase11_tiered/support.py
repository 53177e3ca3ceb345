"""Engines with a file below their prefix cache, which always finds that reading pays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from common.engine.engine import Engine
from common.request import Request, StepOutput
from phase11_tiered import Pool
from phase11_tiered.tier import Tier
from tests.support.engines import add, build, greedy, run

SLOW_S = 1.0  # seconds of computing a token, as far as the tier knows


def engine_of(folder: Path | None, model: Any = None, *, token_s: float = SLOW_S, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 60,
        "prefill_chunk_size": 8,
        "kv_tier_bytes": 2**20,
    }
    engine = build("phase11_tiered", model, **(defaults | {"kv_tier": folder} | options))
    reading_pays(engine, token_s)
    return engine


def reading_pays(engine: Engine, token_s: float = SLOW_S) -> None:
    """Let the tier believe that computing a token takes so long. And let the engine sleep before a step that is not
    due yet, as a server does."""
    if (tier := pool_of(engine).tier) is not None:
        tier.block_s = pool_of(engine).block_size * token_s
    step = engine.step

    def patient_step() -> list[StepOutput]:
        time.sleep(max(0.0, (engine.next_wake() or 0.0) - engine.clock()))
        return step()

    engine.step = patient_step  # type: ignore[method-assign]


def pool_of(engine: Engine) -> Pool:
    assert isinstance(engine.runner.pool, Pool)
    return engine.runner.pool


def tier_of(engine: Engine) -> Tier:
    tier = pool_of(engine).tier
    assert tier is not None
    return tier


def settle(engine: Engine) -> None:
    """Wait until the file has all that it is to keep."""
    tier_of(engine)._thread.submit(int).result(60)


def stop(engine: Engine) -> None:
    """Write what waits, and close the file as the end of a process does."""
    tier = tier_of(engine)
    tier._thread.shutdown()
    tier._file.close()


def ask(engine: Engine, prompt: list[int], new: int = 4, **fields: Any) -> Request:
    """Serve one request alone. Returns it."""
    request = add(engine, prompt, greedy(new, **fields))
    run(engine)
    return request
