"""Threads that compute grammar masks while the engine's thread does other work.

```text
engine's thread   [commit token 7][plan][ forward pass of token 8 ......... ][wait][sample]
mask thread                  [ mask of token 8 ... ]
```

The native call that computes a mask releases the interpreter's lock, so the two threads run in parallel. The call
cannot be interrupted. So a mask that takes too long is given up: its request no longer waits, its thread ends after
the call, and a new thread replaces that thread.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable

#: Number of threads that compute masks, besides threads whose mask was given up.
MASK_THREADS = min(4, os.cpu_count() or 1)

#: While a thread waits for a mask: seconds from one check of the mask's processor time to the next.
LOOK_EVERY_S = 0.01


class Work:
    """A function that a thread calls once.

    Attributes:
        error: the function's exception; None if the function returned, or has not ended.
        processor_s: seconds of processor time (see `_own_clock`) that the function took, or had taken when `wait`
            returned False.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self.processor_s = 0.0
        self._function: Callable[[], None] | None = function
        self._clock: Callable[[], float] | None = None  # of the thread that runs it, readable from any other
        self._began_s = 0.0
        self._ended = threading.Event()
        self._lock = threading.Lock()  # work either ends or is given up, never both
        self._given_up = False

    def run(self) -> bool:
        """Call the function and keep its exception, if it raises one. Returns False if the work was given up."""
        assert self._function is not None
        clock, began_s = _own_clock(), time.thread_time()
        self._began_s = clock()
        self._clock = clock  # last: other threads subtract `_began_s` from it as soon as it is set
        try:
            self._function()
        except Exception as error:
            self.error = error
        self._function = None  # breaks the reference cycle: the function's owner holds this work
        self.processor_s = time.thread_time() - began_s
        with self._lock:
            self._ended.set()
            return not self._given_up

    def wait(self, processor_s: float) -> bool:
        """Block until the function has ended. Returns False, without waiting further, once the function has taken
        more than `processor_s` seconds of processor time."""
        while not self._ended.wait(LOOK_EVERY_S):
            taken_s = 0.0 if self._clock is None else self._clock() - self._began_s
            if taken_s > processor_s:
                self.processor_s = taken_s
                return False
        return True

    def give_up(self) -> bool:
        """Mark the work as given up, unless it has ended. Returns whether it was marked."""
        with self._lock:
            self._given_up = not self._ended.is_set()
            return self._given_up


def _own_clock() -> Callable[[], float]:
    """Return a clock of the calling thread's processor time. On other systems than Linux, return a wall clock."""
    if sys.platform != "linux":
        return time.monotonic
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock_id)


class MaskThreads:
    """Runs work in a few threads. They start with the first work and end with this object."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._started = 0

    def start(self, function: Callable[[], None]) -> Work:
        """Queue `function` for the next free thread. Returns its `Work`, which can be waited for."""
        if not self._started:
            weakref.finalize(self, _end, self._queue)
        while self._started < MASK_THREADS:
            self._start_thread()
        work = Work(function)
        self._queue.put(work)
        return work

    def give_up(self, work: Work) -> None:
        """Give up work that takes too long, and start another thread for the queued work. Does nothing if the work
        has ended."""
        if work.give_up():
            self._start_thread()

    def _start_thread(self) -> None:
        self._started += 1
        threading.Thread(target=_run_all, args=(self._queue,), name="masks", daemon=True).start()


def _run_all(works: queue.SimpleQueue[Work | None]) -> None:
    for work in iter(works.get, None):
        if not work.run():
            return


def _end(works: queue.SimpleQueue[Work | None]) -> None:
    for _ in range(MASK_THREADS):
        works.put(None)
