"""Counts of tokens and steps in the comparison of one process with two. No server is started."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.micro.two_processes import count_tokens, full_steps


def step(started_s: float, decode_tokens: int) -> dict[str, float]:
    return {"started_s": started_s, "duration_s": 0.5, "decode_tokens": decode_tokens}


def test_steps_with_every_stream_before_another_such_step_are_counted() -> None:
    steps = [step(0.0, 1), step(1.0, 4), step(3.0, 4), step(6.0, 4), step(7.0, 2)]
    assert full_steps(steps, 4) == [(2.0, 0.5), (3.0, 0.5)]


@pytest.mark.parametrize("size", [1, 5, 4096])
def test_an_event_in_pieces_counts_once(size: int) -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"event: token\ndata: {}\n\n" * 7 + b"event: done\ndata: {}\n\n"

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(answer), size):
            writer.write(answer[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def count() -> int:
        async with await asyncio.start_server(send, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await count_tokens(f"http://127.0.0.1:{port}", b"{}")

    assert asyncio.run(count()) == 7
