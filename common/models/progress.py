"""Shows how far the reading of a model's weights is, if it takes longer than a second."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

SHORT_S = 1.0  # loading that is over by then shows nothing


def shown(items: Iterable[tuple[Item, int]]) -> Iterator[Item]:
    """Yield items, and show how many of their bytes are done: as a bar on a terminal, and in a line of the log.

    Args:
        items: each with its bytes in memory.
    """
    items = list(items)
    total, done, began_s = sum(count for _, count in items), 0, time.monotonic()
    columns = TextColumn("reading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=total)
    try:
        for item, count in items:
            yield item
            done += count
            bar.update(task, completed=done)
            if not bar.live.is_started and time.monotonic() - began_s > SHORT_S and sys.stderr.isatty():
                bar.start()
    finally:
        if bar.live.is_started:
            bar.stop()
    if (seconds := time.monotonic() - began_s) > SHORT_S:
        logger.info(
            "read %.0f MB of weights in %.1f s: %.0f MB/s", total / 1e6, seconds, total / 1e6 / seconds
        )
