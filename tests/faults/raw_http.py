"""HTTP over plain asyncio connections: cheap to read, and able to break the protocol's rules."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

#: Raised when a server closes a connection before its answer is complete.
CutError = (ConnectionError, asyncio.IncompleteReadError)


@dataclass(frozen=True)
class Target:
    """A server on this machine.

    Attributes:
        key: sent as a bearer token.
        max_tokens: most tokens of a request, prompt and answer together.
    """

    port: int
    model: str
    key: str
    max_tokens: int

    def head(self, path: str, framing: str, *, key: bool = True) -> bytes:
        """Return the head of a POST request with a JSON body. `framing` is the header with the body's length."""
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: 127.0.0.1:{self.port}",
            "Content-Type: application/json",
            framing,
        ]
        if key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, path: str, **fields: Any) -> bytes:
        """Return the bytes of a POST request."""
        body = orjson.dumps({"model": self.model} | fields)
        return self.head(path, f"Content-Length: {len(body)}") + body


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    @classmethod
    def from_head(cls, head: bytes) -> Answer:
        start, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        named = (line.partition(":") for line in lines)
        return cls(int(start.split()[1]), {name.lower(): value.strip() for name, _, value in named})


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection for the block, and abort it at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def connect_with_small_buffer(target: Target) -> socket.socket:
    """Return a connected socket that buffers few bytes if the client reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", target.port))
    connection.setblocking(False)
    return connection


async def read_answer(
    reader: asyncio.StreamReader, on_data: Callable[[bytes], object] = lambda data: None, *, keep: bool = True
) -> Answer:
    """Read one answer to its end.

    Args:
        reader: the connection's reader.
        on_data: called with each piece of the body as it comes.
        keep: whether the returned answer has the body.

    Raises:
        CutError: the connection ended first.
    """
    answer = Answer.from_head(await reader.readuntil(b"\r\n\r\n"))
    pieces = []
    async for data in _pieces(reader, answer.headers):
        on_data(data)
        if keep:
            pieces.append(data)
    answer.body = b"".join(pieces)
    return answer


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        left = int(headers.get("content-length", "0"))
        while left:
            data = await reader.readexactly(min(left, 2**16))
            left -= len(data)
            yield data
