"""Gaps between a client's tokens: how many tokens arrive together, from the published distributions."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import columns_of
from docs.building.arithmetic import checked
from docs.building.charts import NOT_MEASURED
from docs.building.markdown import table
from docs.building.results import RESULTS
from docs.building.stories import newest_groups

TOGETHER_S = 5e-5  # tokens with gaps up to this were read from the socket at once, or written at once
BEFORE, AFTER = "phase 9, pipeline-depth=0", "phase 9"
MODELS = ("zoo:llama-tiny", "dummy:llama-60m")


class Gaps(NamedTuple):
    """The gaps of one server in seconds.

    Attributes:
        together: the share of gaps up to `TOGETHER_S`.
        apart: the mean of all other gaps.
    """

    label: str
    p50: float
    mean: float
    p95: float
    together: float
    apart: float

    @property
    def group(self) -> float:
        """Return the mean number of tokens that arrive together."""
        return 1 / (1 - self.together)


def gaps_of(model: str, results: Path = RESULTS) -> list[Gaps]:
    """Return the gaps of each server in the newest comparison by the workload `baseline`, which sends one request
    at a time; [] without results."""
    group = newest_groups("baseline", BEFORE, AFTER, results).get(model)
    if group is None:
        return []
    found = []
    for runs in columns_of(group.runs):
        label = runs[0].server.label
        p50, mean, p95 = (
            statistics.median(getattr(run.metrics.itl_s, name) for run in runs if run.metrics is not None)
            for name in ("p50", "mean", "p95")
        )
        points = group.latencies[label].itl
        counts = [0, *points.counts]
        long = [
            (seconds, after - before)
            for seconds, before, after in zip(points.seconds, counts, points.counts, strict=False)
            if seconds > TOGETHER_S
        ]
        number = sum(count for _, count in long)
        apart = sum(seconds * count for seconds, count in long) / number
        found.append(Gaps(label, p50, mean, p95, 1 - number / points.counts[-1], apart))
    return found


def gaps_table(results: Path = RESULTS) -> str:
    """Return the table of gaps by model and server."""
    rows = [
        [f"`{model}`", each.label, _ms(each.p50), _ms(each.mean), _ms(each.p95), f"{each.together:.0%}"]
        for model in MODELS
        for each in gaps_of(model, results)
    ]
    head = ["model", "server", "ITL p50, ms", "mean, ms", "p95, ms", "arrive with the token before"]
    return table(head, rows, "llrrrr") if rows else "Not measured yet.\n"


def gaps_fact(name: str, results: Path = RESULTS) -> str:
    """Return one fact about phase 9 with the tiny model, for a sentence.

    Args:
        name: `p50` or `mean`: of the gaps, in ms; `group`: the mean number of tokens that arrive together;
            `verdict`: tokens a group times the mean gap, beside the measured mean gap between groups.

    Raises:
        WrongPredictionError: for `verdict`, if these two differ by more than `arithmetic.FACTOR`.
    """
    found = [each for each in gaps_of(MODELS[0], results) if each.label == AFTER]
    if not found:
        return NOT_MEASURED
    (gaps,) = found
    if name == "verdict":
        checked("the gap between two groups", gaps.group * gaps.mean, gaps.apart)
        return (
            f"{gaps.group:.1f} tokens a group × {_ms(gaps.mean)} ms a token = "
            f"{_ms(gaps.group * gaps.mean)} ms from group to group; measured: {_ms(gaps.apart)} ms"
        )
    return f"{gaps.group:.1f}" if name == "group" else _ms(getattr(gaps, name))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
