"""The memory of this process: what garbage collections scan, and what the allocator keeps."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import sys
from collections.abc import Callable


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the operating system. Works with the GNU C library only.

    That library's allocator keeps the memory of many small objects. Two megabytes of text become 600 MB of the
    tokenizer's objects, and without this call the process stays that large. The call takes milliseconds. Any
    thread may make it.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # musl has neither
        return None
    return trim


def freeze_objects() -> None:
    """Collect garbage once, then exclude all remaining objects from later garbage collections.

    These objects live as long as the server. A collection that scans them takes 0.1 to 0.2 s, in which no step is
    planned and no client gets a token.
    """
    gc.collect()
    freeze()


def freeze() -> None:
    """Exclude all objects that exist now from later garbage collections, without collecting first."""
    gc.freeze()
    # At exit the interpreter does not destroy frozen objects, and libraries complain about objects that are left.
    atexit.register(gc.unfreeze)
