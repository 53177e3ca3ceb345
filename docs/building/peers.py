"""Phase 9 beside vLLM, as bars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import Together
from benchmarks.report import LINES
from docs.building.pictures import Bar, bars
from docs.building.results import RESULTS, full_comparisons, setup_of, values_of

PHASE, PEER = "phase 9", "vLLM"
(THROUGHPUT,) = (line for line in LINES if line.title == "output tokens / s")
MODEL = "dummy:llama-60m"  # of the start page


@dataclass(frozen=True, slots=True)
class Pair:
    """Median output tokens a second of phase 9 (`ours`) and vLLM (`theirs`) in one workload."""

    group: Together
    ours: float
    theirs: float

    @property
    def workload(self) -> str:
        return self.group.first.workload.name


def pairs(results: Path = RESULTS, model: str = MODEL) -> list[Pair]:
    """Return a model's newest published comparison with vLLM for each workload on one machine, sorted by workload.

    The machine is that of the newest comparison: tokens a second of two machines cannot stand in one chart.
    """
    found: dict[str, Pair] = {}
    machine = None
    for group in full_comparisons(results):
        peers = [label for label in group.labels if label.startswith(PEER)]
        run = group.first
        if PHASE not in group.labels or not peers or group.local or run.server.model != model:
            continue
        place = run.environment.get("cpu")
        machine = machine or place
        values = dict(zip(group.labels, values_of(group, THROUGHPUT), strict=True))
        ours, theirs = values[PHASE], values[peers[0]]
        if place == machine and ours is not None and theirs is not None:
            found.setdefault(run.workload.name, Pair(group, ours, theirs))
    return [found[name] for name in sorted(found)]


def peer_chart(results: Path = RESULTS, model: str = MODEL) -> str:
    """Return two bars for each workload and the conditions below, or a sentence if nothing was measured."""
    shown = pairs(results, model)
    if not shown:
        return "No comparison with vLLM has been measured yet.\n"
    name = _peer(shown[0].group)
    rows = []
    for pair in shown:
        rows.append(Bar(pair.workload, pair.ours, f"{pair.ours:.0f}", opens_group=True))
        rows.append(Bar("", pair.theirs, f"{pair.theirs:.0f}", "prefill"))
    title = f"Output tokens a second of {PHASE} and of {name}, by workload"
    legend = f'<span class="key decode">{PHASE}</span> <span class="key prefill">{name}</span>'
    legend += " output tokens a second: longer is better"
    return f"{bars(rows, title, legend, labels=150)}\n{conditions(results, model)}\n"


def conditions(results: Path = RESULTS, model: str = MODEL) -> str:
    """Return the conditions under which the bars were measured, and a note on what was not measured."""
    shown = pairs(results, model)
    setup = setup_of(shown[0].group).split(", median")[0]
    repeats = min(pair.group.repeats for pair in shown)
    weights = "random weights" if model.startswith("dummy:") else "weights"
    return (
        f"{setup}; medians of {repeats} runs or more. Both servers have the same {weights}, get the same requests, "
        f"and have the same amount of KV memory. {_peer(shown[0].group)} runs in its build for CPUs, with one "
        "thread bound to each core and prefix caching on. vLLM is made for GPUs first, but the two servers were "
        "not compared on a GPU."
    )


def _peer(group: Together) -> str:
    return next(label for label in group.labels if label.startswith(PEER))
