"""Admission: a bound for every kind of work that a request causes outside of the engine's steps.

```text
body ──> validated ──> grammar compiled ──> places in the queue ──> tokenized ──> submitted ─ … ─> answer encoded
         over 64 kB:   unless quick:        --max-waiting-         2 threads                      large ones:
         1 thread,     1 thread,            requests                                              1 thread
         32 requests   8 requests

/tokenize, /detokenize ──> 1 thread, 16 requests
```

Each kind of work has a *lane*: a few threads of its own and a bounded number of requests that wait for them. Slow
work of one kind delays requests of that kind only. A request that finds its lane full is refused at once (503 with
the name of the lane and `Retry-After`). A request whose client has left gives its turn to the next.

Requests for text hold places in the engine's queue (`EngineWorker.hold_places`) while they are tokenized. They hold
none while their body is validated or their grammar compiled: a place is for a request that will soon be computed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from common.server.errors import OVERLOADED, unavailable

T = TypeVar("T")

#: Work that no stream waits for gets about a tenth of a core that the engine wants, and all of an idle one.
NICENESS = 10


class Lane:
    """Threads for one kind of work, and a bound on the requests that run or wait there.

    Args:
        name: of the work, a participle: `tokenizing`. Its refusals have the code `tokenizing_busy`.
        threads: how many requests are worked for at the same time.
        limit: requests that may run or wait; None if another bound holds for them already.
        retry_after_s: when a refused client is told to come back.
        niceness: how far its threads stand back while the cores are busy, as in `nice(1)`; on Linux only.
    """

    def __init__(
        self, name: str, *, threads: int, limit: int | None, retry_after_s: int = 1, niceness: int = 0
    ) -> None:
        self.name = name
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=_stand_back, initargs=(niceness,)
        )
        self._lock = threading.Lock()
        self._jobs = 0

    @property
    def jobs(self) -> int:
        """Requests whose work runs or waits. Work whose client has left counts until its thread is free."""
        return self._jobs

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the lane's threads and return its result.

        If the caller is cancelled, work that has not begun is dropped; work that has begun goes on, since a thread
        cannot be interrupted.

        Raises:
            ApiError: 503, the lane is full.
        """
        with self._lock:
            if self._limit is not None and self._jobs >= self._limit:
                raise unavailable(
                    f"{self._limit} requests are {self.name} or wait for it, the most this server allows; "
                    "try again shortly",
                    code=f"{self.name}_busy",
                    retry_after_s=self._retry_after_s,
                    type=OVERLOADED,
                )
            self._jobs += 1
        job = self._threads.submit(work)
        job.add_done_callback(self._end_job)
        return await asyncio.wrap_future(job)

    def _end_job(self, _: Future[Any]) -> None:
        with self._lock:
            self._jobs -= 1


def _stand_back(niceness: int) -> None:
    """Lower this thread's priority. Elsewhere than on Linux that would be the whole process's."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class Admission:
    """The lanes of one server.

    Attributes:
        validating: bodies over `LARGE_BODY_BYTES`; smaller ones are validated on the event loop.
        compiling: grammars that are not known to compile quickly.
        tokenizing: prompts. The places in the engine's queue bound their number.
        converting: texts and token ids of `/tokenize` and `/detokenize`.
        encoding: answers too large for the event loop. The requests that run bound their number.
    """

    #: Validating a body of this size takes about a millisecond.
    LARGE_BODY_BYTES = 64 * 1024

    def __init__(self) -> None:
        self.validating = Lane("validating", threads=1, limit=32)
        self.compiling = Lane("compiling", threads=1, limit=8, retry_after_s=2, niceness=NICENESS)
        # With one thread, a prompt of two megabytes would delay every short one for a second. With more than two,
        # such prompts would take the cores that the engine computes on.
        self.tokenizing = Lane("tokenizing", threads=2, limit=None)
        self.converting = Lane("converting", threads=1, limit=16, niceness=NICENESS)
        self.encoding = Lane("encoding", threads=1, limit=None)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.validating, self.compiling, self.tokenizing, self.converting, self.encoding

    @property
    def busy(self) -> bool:
        """Whether a thread of any lane is at work."""
        return any(lane.jobs for lane in self.lanes)
