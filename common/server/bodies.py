"""The bodies of requests: read whole, or refused for being too long, too late, or no JSON."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from common.errors import ShuttingDownError
from common.server.errors import ApiError, from_exception
from common.server.schemas.parsing import MAX_BODY_BYTES


class Bodies:
    """Reads what clients send, for as long as they may take to send it.

    Large bodies share a rate: the event loop copies and scans every byte, and clients that send bodies as fast as
    they can would take its time. While the rate is used up, connections are not read, and their clients wait.

    Args:
        timeout_s: from the end of a request's head to that of its body.
    """

    #: Of each body, bytes that do not count.
    FREE_BYTES = 64 * 1024
    BYTES_PER_S = 8 * 2**20
    #: How far the rate may be exceeded for a moment.
    BURST_BYTES = 4 * 2**20

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._paid_until_s = (
            0.0  # when the bytes read so far would have come at the rate, on the loop's clock
        )
        self._deadlines: set[asyncio.Timeout] = set()  # of those that are being read
        self._given_up = False

    async def read_json(self, request: Request) -> bytes:
        """The body of a request that says it is JSON.

        Raises:
            ApiError: 400, it is not called JSON; 408, it has not come in time; 413, as soon as it is known to be
                over the limit; 503, the server ends.
            ClientDisconnect: nobody sends it any more.
        """
        _require_json(request)
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise too_large()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    if self._given_up:
                        expire(deadline)  # what has come already can be read all the same
                    return await self._read(request)
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            refusal = self._ending() if self._given_up else self._late()
        # The rest of the body would be taken for the next request.
        refusal.headers["Connection"] = "close"
        raise refusal

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise too_large()
            if len(body) > self.FREE_BYTES:
                await self._pay_for(len(chunk))
        return bytes(body)

    async def _pay_for(self, count: int) -> None:
        """Wait until so many bytes more are within the rate of all large bodies."""
        now_s = asyncio.get_running_loop().time()
        earliest_s = now_s - self.BURST_BYTES / self.BYTES_PER_S
        self._paid_until_s = max(self._paid_until_s, earliest_s) + count / self.BYTES_PER_S
        if self._paid_until_s > now_s:
            await asyncio.sleep(self._paid_until_s - now_s)

    def give_up(self) -> None:
        """The server ends: refuse whatever has not come by now."""
        self._given_up = True
        for deadline in self._deadlines:
            expire(deadline)

    def _late(self) -> ApiError:
        return ApiError(408, f"the body did not come within {self._timeout_s:g} s", code="body_timeout")

    def _ending(self) -> ApiError:
        return from_exception(ShuttingDownError("the server is shutting down"))


def expire(deadline: asyncio.Timeout) -> None:
    """Its time is over. One that has just run out by itself cannot be changed any more."""
    if not deadline.expired():
        deadline.reschedule(asyncio.get_running_loop().time())


def too_large() -> ApiError:
    return ApiError(
        413, f"the body is over {MAX_BODY_BYTES} bytes, the most this server reads", code="body_too_large"
    )


def says_json(request: Request) -> bool:
    """Return whether a request says that its body is JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json"


def _require_json(request: Request) -> None:
    """A page in a browser can post text to any port of its machine unasked, but not JSON."""
    if not says_json(request):
        raise ApiError(
            400,
            "the body must be JSON; send it with Content-Type: application/json",
            code="invalid_content_type",
        )
