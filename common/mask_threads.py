"""Threads that compute masks while the engine's thread does something else.

```text
engine's thread   [commit token 7][plan][ forward pass of token 8 ......... ][wait][sample]
mask thread                  [ mask of token 8 ... ]
```

The native call that computes a mask releases the interpreter's lock, so the two run side by side. It cannot be
interrupted. A mask that takes too long is given up instead: nobody waits for it any longer, its thread ends with
it, and another thread takes that thread's place.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable

#: Masks that are computed at the same time.
MASK_THREADS = min(4, os.cpu_count() or 1)

#: How often a thread that waits for a mask looks at the processor time the mask has taken, in seconds.
LOOK_EVERY_S = 0.01


class Work:
    """A function that a thread calls once.

    Attributes:
        error: what the function raised; None if it returned, or has not ended.
        processor_s: seconds of processor time that it took, or had taken when `wait` returned False.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self.processor_s = 0.0
        self._function: Callable[[], None] | None = function
        self._clock: Callable[[], float] | None = None  # of the thread that runs it, readable from any other
        self._began_s = 0.0
        self._ended = threading.Event()
        self._lock = threading.Lock()  # a work that has ended cannot be given up, nor the other way round
        self._given_up = False

    def run(self) -> bool:
        """Call the function. Returns False if the work was given up meanwhile."""
        assert self._function is not None
        clock, began_s = _own_clock(), time.thread_time()
        self._began_s = clock()
        self._clock = clock  # last: from now on it is compared with when the work began
        try:
            self._function()
        except Exception as error:
            self.error = error
        self._function = None  # its owner refers to this work
        self.processor_s = time.thread_time() - began_s
        with self._lock:
            self._ended.set()
            return not self._given_up

    def wait(self, processor_s: float) -> bool:
        """Block until the function has ended. Returns False if it is not worth waiting for: it has taken more than
        `processor_s` seconds of processor time."""
        while not self._ended.wait(LOOK_EVERY_S):
            taken_s = 0.0 if self._clock is None else self._clock() - self._began_s
            if taken_s > processor_s:
                self.processor_s = taken_s
                return False
        return True

    def give_up(self) -> bool:
        """Declare that nobody waits for the function. Returns False if it has ended."""
        with self._lock:
            self._given_up = not self._ended.is_set()
            return self._given_up


def _own_clock() -> Callable[[], float]:
    """Return a clock of the calling thread's processor time; of the time of day, where the system has none."""
    if sys.platform != "linux":
        return time.monotonic
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock_id)


class MaskThreads:
    """Runs work in a few threads, which start with the first work and end with this object."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._started = 0

    def start(self, function: Callable[[], None]) -> Work:
        """Have a thread call `function`."""
        if not self._started:
            weakref.finalize(self, _end, self._queue)
        while self._started < MASK_THREADS:
            self._start_thread()
        work = Work(function)
        self._queue.put(work)
        return work

    def give_up(self, work: Work) -> None:
        """Leave a work that takes too long to its thread, and start another thread for the work behind it."""
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
