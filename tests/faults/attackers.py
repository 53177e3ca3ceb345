"""Attacks: requests that cost a client little and a server much, from a few connections each.

`Attackers` runs them in a process of its own. They are no floods: each connection pauses between two attempts, and
every attack ends by itself after its time.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from string import ascii_lowercase
from typing import Any

from tests.faults.raw_http import Answer, CutError, Target, connect, connect_with_small_buffer, read_answer

LONGEST_S = 120.0  # the time after which attacks end by themselves
PAUSE_S = 0.1
HOLD_S = 2.0  # the time for which an attacker reads nothing

COMPLETIONS = "/v1/completions"

HI = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "tool_calls": [CALL | {"id": str(number)} for number in range(100)]}
RESULTS = [{"role": "tool", "tool_call_id": "0", "content": text} for text in ("x" * 1_500_000, *[""] * 2000)]
THOUGHTS = [
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
    for text in ("x" * 1_500_000, *[""] * 2000)
]


def outcome(answer: Answer) -> str:
    """Return the status of an answer. A 503 without Retry-After is an outcome of its own."""
    if answer.status == 503 and "retry-after" not in answer.headers:
        return "503 without Retry-After"
    return str(answer.status)


async def ask(target: Target, request: bytes) -> str:
    async with connect(target) as (reader, writer):
        writer.write(request)
        return outcome(await read_answer(reader, keep=False))


# ---------------------------------------------------------------------- the attacks


@functools.cache
def in_one_byte_chunks(body: bytes) -> bytes:
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


async def one_byte_chunks(target: Target, draw: random.Random) -> str:
    """Send a body of 256 KiB in chunks of one byte, half of the time without a key."""
    body = in_one_byte_chunks(json.dumps({"model": target.model, "prompt": "word " * 52_000}).encode())
    head = target.head(COMPLETIONS, "Transfer-Encoding: chunked", key=draw.random() < 0.5)
    async with connect(target) as (reader, writer):
        writer.write(head + body)
        return outcome(await read_answer(reader))


async def slow_grammar(target: Target, draw: random.Random) -> str:
    """Request sixteen choices with a new schema that takes a second or more to compile."""
    schema = {"type": "integer", "multipleOf": draw.randrange(100_001, 999_999, 2)}
    fields = {"max_tokens": 4, "n": 16, "structured_outputs": {"json": schema}}
    return await ask(target, target.post(COMPLETIONS, prompt="Once", **fields))


async def slow_mask(target: Target, draw: random.Random) -> str:
    """Send a grammar of 3 kB that compiles quickly, but makes every mask slow: 230 rules match any text."""
    names = ["".join(pair) for pair in itertools.product(ascii_lowercase, repeat=2)]
    rules = draw.sample(names, 230)
    lines = [f"{rule}:{rule} C|C" for rule in rules]
    grammar = "\n".join(["start:" + "|".join(rules), *lines, r"C:/(.|\n)/"])
    fields = {"max_tokens": 200, "temperature": 1, "structured_outputs": {"grammar": grammar}}
    return await ask(target, target.post(COMPLETIONS, prompt="Once", **fields))


@functools.cache
def huge_tokenize(target: Target) -> bytes:
    return target.post("/tokenize", prompt="word " * 400_000)


async def tokenize(target: Target, draw: random.Random) -> str:
    """Send two megabytes to tokenize. A third of the clients leaves at once."""
    if draw.random() < 1 / 3:
        async with connect(target) as (_, writer):
            writer.write(huge_tokenize(target))
            await writer.drain()
        return "left"
    return await ask(target, huge_tokenize(target))


async def prompt_logprobs(target: Target, draw: random.Random) -> str:
    """Ask for the scores of the longest possible prompt, for sixteen choices: 15 kB in, tens of megabytes out."""
    prompt = [draw.randrange(50, 750) for _ in range(target.max_tokens - 1)]
    scores = draw.choice([{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
    return await ask(
        target, target.post(COMPLETIONS, prompt=prompt, n=16, max_tokens=1, stream=False, **scores)
    )


async def unread_bytes(target: Target, draw: random.Random) -> str:
    """Ask for a stream of 32 prompts with log-probabilities, and read nothing for a while."""
    prompts = [f"The fox number {draw.randrange(10**6)}" for _ in range(32)]
    fields = {"prompt": prompts, "max_tokens": 1000, "ignore_eos": True, "logprobs": 20, "stream": True}
    with connect_with_small_buffer(target) as connection:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, target.post(COMPLETIONS, **fields))
        await asyncio.sleep(HOLD_S)
        head = await loop.sock_recv(connection, 4096)
    return outcome(Answer.from_head(head.partition(b"\r\n\r\n")[0])) if head else "closed"


async def metrics(target: Target, _: random.Random) -> str:
    """Ask for the metrics, which need no key, ten times."""
    async with connect(target) as (reader, writer):
        for _again in range(10):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            answer = await read_answer(reader, keep=False)
        return outcome(answer)


#: Conversations within every limit on bodies whose rendering may cost far more than their size: many messages, many
#: calls, one long text that each further item might copy, one long text that might be read character by character.
CONVERSATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/chat/completions", {"messages": [HI] * 2040, "max_tokens": 1}),
    "calls": ("/v1/chat/completions", {"messages": [HI, *[CALLS] * 80, HI], "max_tokens": 1}),
    "results": ("/v1/chat/completions", {"messages": [HI, *RESULTS, HI], "max_tokens": 1}),
    "thoughts": ("/v1/responses", {"input": [*THOUGHTS, HI], "max_output_tokens": 1}),
    "long text": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "fox \n" * 80_000}, HI], "max_tokens": 1},
    ),
}


@functools.cache
def conversation(target: Target, name: str) -> bytes:
    path, fields = CONVERSATIONS[name]
    return target.post(path, **fields)


async def rendering(target: Target, draw: random.Random) -> str:
    """Send one of the conversations whose rendering is slow."""
    return await ask(target, conversation(target, draw.choice(list(CONVERSATIONS))))


@functools.cache
def long_numbers(target: Target) -> bytes:
    number = int("9" * 4300)
    schema = {"enum": [0] * 400}
    fields = {"prompt": "Once", "max_tokens": 4, "structured_outputs": {"json": schema}}
    body = json.dumps({"model": target.model} | fields).replace("0, ", f"{number}, ").encode()
    return target.head(COMPLETIONS, f"Content-Length: {len(body)}") + body


async def schema_of_long_numbers(target: Target, _: random.Random) -> str:
    """Send a schema with 400 integers of 4,300 digits, which take a quadratic time to be written as text."""
    return await ask(target, long_numbers(target))


Attempt = Callable[[Target, random.Random], Awaitable[str]]

#: The attacks by name, each with its number of connections.
ATTACKS: dict[str, tuple[Attempt, int]] = {
    "one_byte_chunks": (one_byte_chunks, 4),
    "slow_grammar": (slow_grammar, 6),
    "slow_mask": (slow_mask, 4),
    "tokenize": (tokenize, 24),
    "prompt_logprobs": (prompt_logprobs, 2),
    "unread_bytes": (unread_bytes, 2),
    "metrics": (metrics, 4),
    "rendering": (rendering, 4),
    "schema_of_long_numbers": (schema_of_long_numbers, 2),
}


async def repeat(attempt: Attempt, target: Target, seed: str, outcomes: Counter[str]) -> None:
    draw = random.Random(seed)
    while True:
        try:
            outcomes[await attempt(target, draw)] += 1
        except CutError:
            outcomes["closed"] += 1
        await asyncio.sleep(PAUSE_S)


async def attack(target: Target, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Attack until SIGTERM comes, or for `LONGEST_S` seconds.

    Returns:
        The counts of each attack's outcomes: a status, `closed` by the server, or `left` by the client.
    """
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    tasks = [
        asyncio.create_task(repeat(ATTACKS[name][0], target, f"{name} {number}", outcomes[name]))
        for name in names
        for number in range(ATTACKS[name][1])
    ]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stopped = asyncio.create_task(stop.wait())
    ended, _ = await asyncio.wait([stopped, *tasks], timeout=LONGEST_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopped, *tasks):
        task.cancel()
    for task in ended - {stopped}:
        task.result()  # an attack that raises has a bug
    return {name: dict(sorted(counted.items())) for name, counted in outcomes.items()}


# ---------------------------------------------------------------------- a process


class Attackers:
    """Runs attacks in a process of their own, so that they do not slow the ordinary clients' event loop."""

    def __init__(self, target: Target, names: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.faults.attackers"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(target), list(names)]))
        self._process.stdin.close()
        assert self._process.stdout.readline() == "attacking\n"

    def stop(self) -> dict[str, dict[str, int]]:
        """End the attacks. Returns the counts of each attack's outcomes."""
        with self._process:
            self._process.terminate()
            assert self._process.stdout is not None
            outcomes: dict[str, dict[str, int]] = json.loads(self._process.stdout.read())
        return outcomes


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the event loop handles it
    target, names = json.load(sys.stdin)
    print("attacking", flush=True)
    print(json.dumps(asyncio.run(attack(Target(**target), names))))


if __name__ == "__main__":
    main()
