"""Lanes: threads for the work that requests cause outside of the engine's steps, and bounds on that work.

Each kind of work has a *lane*: a few threads of its own and, unless the requests are bounded elsewhere, a bound on
those that wait. Slow work of one kind delays requests of that kind only. A request that finds its lane full is
refused at once (503 with the name of the lane and `Retry-After`). If a client leaves while its request waits in a
lane, the request is dropped.
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

#: Niceness of threads that no running stream waits for. On a core that the engine uses, too, they get a tenth of
#: the time. They get all of an idle core.
NICENESS = 10


class Admission:
    """The lanes of one server.

    Attributes:
        validating: bodies over `LARGE_BODY_BYTES`, or with more than `MANY_CONTAINERS` lists and objects; others
            are validated on the event loop.
        compiling: grammars that are not known to compile quickly.
        tokenizing: prompts. The places in the engine's queue bound their number.
        converting: texts and token ids of `/tokenize` and `/detokenize`.
        encoding: answers too large for the event loop. The connections bound their number.
    """

    #: Validating a body of this size takes about a millisecond.
    LARGE_BODY_BYTES = 64 * 1024

    #: Validating a message takes about ten microseconds.
    MANY_CONTAINERS = 256

    def __init__(self) -> None:
        self.validating = Lane("validating", threads=1, limit=32)
        self.compiling = Lane("compiling", threads=1, limit=8, retry_after_s=2, niceness=NICENESS)
        # With one thread, a prompt of two megabytes would delay every short one for a second. With more than two,
        # such prompts would take the cores that the engine computes on.
        self.tokenizing = Lane("tokenizing", threads=2, limit=None)
        self.converting = Lane("converting", threads=1, limit=16, niceness=NICENESS)
        self.encoding = Lane("encoding", threads=1, limit=None)


class Lane:
    """Threads for one kind of work, and a bound on the requests whose work runs or waits there.

    Args:
        name: the work, as a participle: the error of the full lane `tokenizing` has the code `tokenizing_busy`.
        threads: number of requests that are worked on at the same time.
        limit: most requests whose work may run or wait; None if their number is bounded elsewhere.
        retry_after_s: `Retry-After` of the error of a full lane.
        niceness: of the threads, as in `nice(1)`; on Linux only.
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
        self.jobs = 0  # that run or wait, also those whose client has left

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the lane's threads and return its result.

        If the caller is cancelled, work that has not begun is dropped; work that has begun goes on, since a thread
        cannot be interrupted.

        Raises:
            ApiError: 503, the lane is full.
        """
        with self._lock:
            if self._limit is not None and self.jobs >= self._limit:
                raise unavailable(
                    f"{self._limit} requests are {self.name} or wait for it, the most this server allows; "
                    "try again shortly",
                    code=f"{self.name}_busy",
                    retry_after_s=self._retry_after_s,
                    type=OVERLOADED,
                )
            self.jobs += 1
        job = self._threads.submit(work)
        job.add_done_callback(self._end_job)
        return await asyncio.wrap_future(job)

    def _end_job(self, _: Future[Any]) -> None:
        with self._lock:
            self.jobs -= 1


def _stand_back(niceness: int) -> None:
    """Add `niceness` to this thread's niceness, on Linux only: elsewhere this would slow the whole process."""
    if sys.platform == "linux" and niceness > 0:
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)  # of the server, which may run under `nice`
        os.setpriority(os.PRIO_PROCESS, thread, min(own + niceness, 19))
