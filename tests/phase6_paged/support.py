"""What the tests of paged memory share: small pools, a free list in any order, and the bookkeeping's invariants."""

from __future__ import annotations

import ast
import inspect
import itertools
import random
from types import ModuleType
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.engine import Engine
from common.kv import KVPool, KVShape
from common.request import Request, RequestState, SamplingParams, StepOutput
from phase6_paged.cache import PagedKVCachePool
from phase6_paged.config import Config
from tests.engine_helpers import CPU, RememberingModel, greedy
from tests.traffic import Traffic

SMALLEST = KVShape(1, 1, 1, torch.float32)


def make_pool(num_blocks: int, block_size: int = 4, **options: Any) -> PagedKVCachePool:
    config = Config(**{"num_blocks": num_blocks, "block_size": block_size, "max_seq_len": 64} | options)
    return PagedKVCachePool(config, SMALLEST, CPU)


def paged(pool: KVPool | Engine) -> PagedKVCachePool:
    """The pool as what it is."""
    pool = pool.runner.pool if isinstance(pool, Engine) else pool
    assert isinstance(pool, PagedKVCachePool)
    return pool


def shuffle_free_blocks(pool: KVPool | Engine, seed: int) -> None:
    """Blocks are given out in any order from here on, so tables are neither sorted nor contiguous."""
    random.Random(seed).shuffle(paged(pool).allocator._free)


def request(prompt: int, new: int = 4, name: str | None = None) -> Request:
    return Request(name or f"{prompt}+{new}", [1] * prompt, greedy(new))


def assert_consistent(pool: PagedKVCachePool) -> None:
    """free + held = all, disjoint; every held block in exactly one table, under its table's name."""
    allocator, tables = pool.allocator, pool._tables
    in_tables = list(itertools.chain.from_iterable(tables.values()))
    free, held = list(allocator._free), allocator.allocated_block_ids()
    assert len(set(in_tables)) == len(in_tables), "a block is in two tables"
    assert len(set(free)) == len(free), "a block is free twice"
    assert held == set(in_tables)
    assert held.isdisjoint(free)
    assert held | set(free) == set(range(allocator.num_blocks))
    assert (allocator.num_free, allocator.num_allocated) == (len(free), len(held))
    assert {block: allocator._owners[block] for block in held} == {
        block: slot for slot, table in tables.items() for block in table
    }
    assert tables.keys() == pool._lengths.keys()
    assert pool.audit_blocks() == set()
    assert all(pool.get_seq_len(slot) <= pool.capacity(slot) for slot in tables)


def assert_streams(outputs: list[StepOutput], tokens: dict[str, list[int]]) -> None:
    """Every client got its tokens, each once and in order, and one end."""
    for request_id, expected in tokens.items():
        own = [o for o in outputs if o.request_id == request_id]
        assert [o.token_id for o in own] == expected, request_id
        assert [o.completion_tokens for o in own] == list(range(1, len(expected) + 1)), request_id
        assert [o.finished for o in own] == [False] * (len(own) - 1) + [True], request_id
        assert {o.error for o in own} == {None}


class PagedTraffic(Traffic):
    """Random traffic on a pool of blocks, which are given out in another order at every step."""

    def check(self) -> None:
        super().check()
        assert_consistent(paged(self.engine))
        shuffle_free_blocks(self.engine, seed=self.operations)
        active = [r.arrival for r in self.engine.scheduler.active]
        waiting = [r.arrival for r in self.live.values() if r.state is RequestState.WAITING]
        assert not active or not waiting or max(active) < min(waiting), "nobody overtakes, preempted or not"


def the_refusal(error: ValidationError) -> ErrorDetails:
    """The one thing that is wrong. pydantic may add that a default which follows another option was not made."""
    (refusal,) = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
    return refusal


def collect(*modules: ModuleType) -> dict[str, Any]:
    """The tests and fixtures of other modules, to be run here once more: {name: function}."""
    found: dict[str, Any] = {}
    for module in modules:
        own = module.__name__.rpartition(".")[2]
        for name, value in vars(module).items():
            if name.startswith("test_") and callable(value):
                found[f"{own}__{name.removeprefix('test_')}"] = value
            elif type(value).__name__ == "FixtureFunctionDefinition":
                found[name] = value
    return found


def assert_asks_no_pool(module: ModuleType) -> None:
    """A module names no kind of pool, and finds out in no other way which one it has."""
    tree = ast.parse(inspect.getsource(module))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imports = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    backends = {"StaticKVCache", "SlottedKVCache", "PagedKVCachePool", "BlockAllocator", "kv_cache_backend"}
    assert names.isdisjoint(backends | {"hasattr", "type", "getattr"})
    assert imports.isdisjoint(backends)
    assert strings.isdisjoint({"paged", "contiguous"})
    asked = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    ]
    assert not [call for call in asked if "pool" in call.lower() or "cache" in call.lower()], asked


def trace(engine: Engine, seed: int) -> tuple[list[Any], list[list[StepOutput]]]:
    """Run random traffic with cancellations. Returns the model's calls, and the outputs of each step."""
    rng = random.Random(seed)
    told: list[list[StepOutput]] = []
    for _ in range(120):
        if rng.random() < 0.5:
            new = rng.randint(1, 12)
            params: SamplingParams = greedy(new)
            request = engine.create_request([rng.randrange(250)] * rng.randint(1, 40), params)
            engine.add_request(request)
        if rng.random() < 0.1:
            engine.cancel(f"request-{rng.randrange(60)}")
        told.append(engine.step())
    while engine.has_work:
        told.append(engine.step())
    model = engine.runner.model
    assert isinstance(model, RememberingModel)
    return model.calls, told
