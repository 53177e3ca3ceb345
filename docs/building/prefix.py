"""Pictures and tables of the page on prefix caching: the phase's tree and engine, run when the site is built."""

from __future__ import annotations

import functools
from collections import defaultdict

import torch

import phase8_prefix
from common.engine import Engine
from common.kv import KVShape, Span
from common.llm import LLM
from common.request import Request, SamplingParams
from phase8_prefix.cache import PrefixCachingPool
from phase8_prefix.tree import Node

BLOCK = 4
TEXTS = {
    "A": "you are a friendly assistant . user: what is a cat ?",
    "B": "you are a friendly assistant . user: what is a dog ?",
    "C": "you are a pirate . user: what is a dog ?",
}

MODEL = "zoo:llama-tiny"
SYSTEM = "Once upon a time there was a kind old bear who told stories to every animal in the forest. "
QUESTIONS = (
    "Who came first?",
    "And what did the fox say?",
    "Did it rain?",
    "Who came last?",
    "Were they happy?",
    "How did it end?",
)
NEW_TOKENS = 40

SECRET = (
    "The old bear hid the honey under the oak tree beside the river, and told nobody of it. In the winter, when "
    "the forest was white and the fox was hungry, he went there at night and ate a little of it by himself."
)


def tree_picture() -> str:
    """What a pool's tree holds when three prompts that begin alike have been computed, one after the other."""
    config = phase8_prefix.Config(max_batch_size=len(TEXTS), max_seq_len=32, block_size=BLOCK, num_blocks=24)
    pool = PrefixCachingPool(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    words: list[str] = []
    lines = ["prompts, a word a token:", ""]
    requests = []
    for name, text in TEXTS.items():
        words += [word for word in text.split() if word not in words]
        request = Request(name, [words.index(word) for word in text.split()], SamplingParams())
        assert pool.reserve(request, len(request.token_ids))
        assert request.slot is not None
        start, end = request.prefill_start, len(request.token_ids)
        pool.advance([Span.exact(request.slot, start, end)])
        pool.register_prefix(request, end)
        table = " ".join(f"{block:2d}" for block in pool.block_table(request.slot))
        lines.append(f"  {name}  {text:<55} block table {table:<12}  computed from token {start}")
        requests.append(request)
    users: defaultdict[Node, list[str]] = defaultdict(list)
    for request in requests:
        for node in pool._paths[request.slot or 0]:
            users[node].append(request.request_id)
    lines += ["", "the tree:", "", "  root"]
    for depth, node in pool.tree.walk():
        ids = [each for each in node.key if isinstance(each, int)]
        text = " ".join(words[token_id] for token_id in ids)
        held = ", ".join(users[node])
        lines.append(f"  {'   ' * depth}└─ {text:<{42 - 3 * depth}} block {node.block:2d}   used by {held}")
    return "```text\n" + "\n".join(lines) + "\n```\n"


@functools.cache
def _chat() -> tuple[tuple[int, int, int], ...]:
    """A chat of six turns by a real engine: each turn's prompt tokens, those found, those that phase 7 computes."""
    engine = _engine("prefix")
    without = _engine("chunked")
    token_ids = engine.tokenizer.encode(SYSTEM)
    turns = []
    for question in QUESTIONS:
        token_ids += engine.tokenizer.encode(f"\n{question}\n", add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        request = _answer(engine, token_ids, params)
        before = without.telemetry.counters.prefill_tokens
        assert _answer(without, token_ids, params).token_ids == request.token_ids
        computed = without.telemetry.counters.prefill_tokens - before
        turns.append((request.num_prompt_tokens, request.cached_tokens, computed))
        token_ids = list(request.token_ids)
    return tuple(turns)


def _engine(phase: str) -> Engine:
    return LLM(MODEL, phase=phase, dtype="float32").engine


def _answer(engine: Engine, prompt: list[int], params: SamplingParams) -> Request:
    request = engine.create_request(prompt, params)
    assert engine.add_request(request)
    while engine.has_work:
        engine.step()
    return request


def chat_table() -> str:
    """The chat, turn by turn."""
    rows = [
        "| turn | prompt tokens | found | computed by phase 8 | computed by phase 7 |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    total_8 = total_7 = 0
    for turn, (prompt, found, computed) in enumerate(_chat(), start=1):
        rows.append(f"| {turn} | {prompt} | {found} | {prompt - found} | {computed} |")
        total_8, total_7 = total_8 + prompt - found, total_7 + computed
    rows.append(f"| all | | | {total_8} | {total_7} |")
    return "\n".join(rows) + "\n"


@functools.cache
def _asked() -> Engine:
    """An engine that somebody else uses, too."""
    return _engine("prefix")


def secret_tokens() -> int:
    return len(_asked().tokenizer.encode(SECRET))


def probe() -> str:
    """What a stranger is told who guesses another's prompt: `cached_tokens` by how much of the guess is right."""
    engine = _asked()
    secret = engine.tokenizer.encode(SECRET)
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    _answer(engine, secret, params)
    guesses = {
        "half of it right": [*secret[: len(secret) // 2], *[5] * (len(secret) - len(secret) // 2)],
        "wrong from the start": [7, *secret[1:]],
        "all of it right": secret,
    }
    rows = ["| the guess | without a salt | with another's salt |", "| --- | ---: | ---: |"]
    for name, guess in guesses.items():
        found = []
        for salt in ("", "somebody else"):
            request = engine.create_request(guess, params, cache_salt=salt)
            assert engine.add_request(request)
            while engine.has_work:
                engine.step()
            found.append(request.cached_tokens)
            engine.runner.pool.reset_prefix_cache()
            _answer(engine, secret, params)
        rows.append(f"| {name} | {found[0]} tokens | {found[1]} |")
    return "\n".join(rows) + "\n"
