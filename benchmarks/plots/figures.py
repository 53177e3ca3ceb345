"""The figures: for each kind a function that draws a group of runs, and a function for the caption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.plots.groups import Group, Server, thin, watched_client
from benchmarks.plots.style import BLUE, FAINT, GREY, INK, PAPER, SKY, VERMILION
from benchmarks.report import LINES, Line, format_seconds

WIDTH = 8.0  # inches
BY_TITLE: dict[str, Line] = {line.title: line for line in LINES}


@dataclass(frozen=True, slots=True)
class FigureKind:
    """A kind of figure. It is drawn for every group of runs that has the data for it."""

    name: str
    has_data: Callable[[Group], bool]
    draw: Callable[[Group], Figure]
    caption: Callable[[Group], str]


def _figure(group: Group, height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(group.title, fontsize=10)
    return figure


def _panels(group: Group, servers: Sequence[Server], height: float, unit: str) -> tuple[Figure, list[Axes]]:
    """Return a titled figure and its panels, one for each server, one below the other, with the same scales.

    Args:
        group: the comparison that the figure shows.
        servers: the servers of the panels.
        height: of one panel, in inches.
        unit: the label of the vertical axes. The horizontal axes are in seconds.
    """
    figure = _figure(group, height * len(servers) + 0.6)
    panels = list(figure.subplots(len(servers), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    for axes, server in zip(panels, servers, strict=True):
        axes.set_title(server.label, loc="left")
        axes.set_ylabel(unit)
    panels[-1].set_xlabel("seconds")
    return figure, panels


# ---------------------------------------------------------------------------------------------- side by side


def _draw_bars(group: Group) -> Figure:
    figure = _figure(group, 3.4)
    throughput, ttft, itl = figure.subplots(1, 3, width_ratios=[1, 2, 2])
    _bars(throughput, group.servers, [BY_TITLE["output tokens / s"]], [""], 1.0)
    throughput.set_title("output tokens/s")
    names = ["p50", "p95", "p99"]
    for axes, kind in ((ttft, "TTFT"), (itl, "ITL")):
        _bars(axes, group.servers, [BY_TITLE[f"{kind} {name}"] for name in names], names, 1000.0)
        axes.set_title(f"{kind}, ms")
    handles = [
        Patch(facecolor=server.colour, hatch=server.hatch, edgecolor=PAPER, label=server.label)
        for server in group.servers
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _bars(
    axes: Axes,
    servers: Sequence[Server],
    lines: Sequence[Line],
    names: Sequence[str],
    scale: float,
) -> None:
    """Draw grouped bars of medians, each with a whisker from the smallest to the largest repeat."""
    width = 0.8 / len(servers)
    for place, server in enumerate(servers):
        for at, line in enumerate(lines):
            value = server.median(line)
            if value is None:
                continue
            x = at + (place - (len(servers) - 1) / 2) * width
            low, high = server.spread(line)
            bar = axes.bar(
                x, value * scale, width * 0.92, color=server.colour, hatch=server.hatch, edgecolor=PAPER
            )
            axes.vlines(x, low * scale, high * scale, color=INK, linewidth=1.0)
            label = f"{value * scale:.3g}" if value * scale < 1000 else f"{value * scale:,.0f}"
            axes.bar_label(bar, [label], fontsize=6, padding=2, rotation=90 if len(servers) > 3 else 0)
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.16)


def _bars_caption(_group: Group) -> str:
    return "Medians over repeats; the thin lines reach from the best to the worst repeat."


def _draw_cdf(group: Group) -> Figure:
    figure = _figure(group, 3.2)
    ttft, itl = figure.subplots(1, 2, sharey=True)
    for server in group.servers:
        for axes, found in ((ttft, server.latencies.ttft), (itl, server.latencies.itl)):
            xs = [seconds * 1000 for seconds in found.seconds]
            look = {"color": server.colour, "linestyle": server.dash, "label": server.label}
            axes.step(xs, found.shares, where="post", **look)
    ttft.set_xscale("log")
    itl.set_xscale("symlog", linthresh=1.0)  # unlike log, it shows 0: the gap of tokens that arrive together
    itl.set_xlim(left=0.0)
    for axes, title in ((ttft, "time to first token, ms"), (itl, "gap between two tokens, ms")):
        axes.set_xlabel(title)
        axes.axhline(0.99, color=GREY, linewidth=0.8, linestyle=":")
    ttft.set_ylabel("share at or below")
    ttft.legend(loc="upper left")
    return figure


def _cdf_caption(_group: Group) -> str:
    return (
        "All requests of all repeats; further left is better. Where a curve meets the dotted line is its p99: look "
        "at the upper right corner for the tail, not at the middle."
    )


# ---------------------------------------------------------------------------------------------- one client


def _draw_stall(group: Group) -> Figure:
    figure, panels = _panels(group, group.servers, 1.3, "gap, ms")
    watched = watched_client(group)
    for axes, server in zip(panels, group.servers, strict=True):
        record = server.typical.requests[watched]
        times = [record.ttft_s + time - record.token_times_s[0] for time in record.token_times_s[1:]]
        gaps = [gap * 1000 for gap in record.gaps_s]
        axes.axvspan(0, record.ttft_s, color=FAINT, linewidth=0)
        waited = f"first token after {format_seconds(record.ttft_s)}"
        axes.set_title(waited, loc="right", fontsize=8, fontweight="normal")
        axes.vlines(times, 0, gaps, color=server.colour, linewidth=1.2)
        longest = max(range(len(gaps)), key=gaps.__getitem__)
        axes.annotate(
            format_seconds(gaps[longest] / 1000),
            (times[longest], gaps[longest]),
            xytext=(4, -2),
            textcoords="offset points",
            fontsize=7,
            color=INK,
        )
    panels[0].set_xlim(left=0)
    panels[-1].set_xlabel("seconds since this client's request")
    return figure


def _stall_caption(group: Group) -> str:
    watched = watched_client(group)
    longest = [
        f"{server.label} {format_seconds(max(server.typical.requests[watched].gaps_s))}"
        for server in group.servers
    ]
    return (
        f"The waits of one client, from the moment of its request on (request {watched} in each panel). Grey is "
        "the wait for the first token. Each line after that is the wait for one more token. "
        f"In a tall line, the server computed something else meanwhile. Longest waits: {', '.join(longest)}."
    )


# ---------------------------------------------------------------------------------------------- steps

Steps = dict[str, list[int | float]]


def _with_steps(group: Group) -> list[tuple[Server, Steps]]:
    return [(server, steps) for server in group.servers if (steps := server.typical.engine_steps)]


def _over_time(
    group: Group, height: float, unit: str, layers: Mapping[str, Callable[[Steps], Sequence[float]]]
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel over time for each server whose engine steps are known.

    Args:
        layers: for each colour a function that returns a value for each step. The area below these values is filled
            with the colour. Later colours cover earlier ones.
    """
    shown = _with_steps(group)
    figure, panels = _panels(group, [server for server, _ in shown], height, unit)
    for axes, (_, steps) in zip(panels, shown, strict=True):
        for colour, values_of in layers.items():
            times, values = thin(steps["started_s"], values_of(steps))
            axes.fill_between(times, values, step="post", color=colour, linewidth=0)
    return figure, panels


def _draw_kv(group: Group) -> Figure:
    layers = {SKY: lambda steps: steps["kv_reserved_tokens"], BLUE: lambda steps: steps["kv_used_tokens"]}
    figure, _ = _over_time(group, 1.4, "tokens", layers)
    handles = [Patch(facecolor=SKY, label="reserved, not used"), Patch(facecolor=BLUE, label="used")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _kv_caption(group: Group) -> str:
    used = [
        f"{server.label} {metrics.kv_used_mean / metrics.kv_reserved_mean:.0%}"
        for server, _ in _with_steps(group)
        if (metrics := server.typical.server_metrics) and metrics.kv_reserved_mean
    ]
    return (
        "KV memory in tokens: light is held for sequences, dark holds something. The light part is memory in which "
        f"other sequences could have run. Used of what was reserved, on average: {', '.join(used)}."
    )


def _draw_waste(group: Group) -> Figure:
    figure, panels = _over_time(group, 1.2, "% wasted", {VERMILION: _wasted_percent})
    panels[0].set_ylim(0, 100)
    return figure


def _wasted_percent(steps: Steps) -> list[float]:
    """Return for each step the percentage of computed tokens that were padding or rows without a request."""
    shares = []
    columns = (steps[name] for name in ("decode_tokens", "prefill_tokens", "padded_tokens", "idle_rows"))
    for decode, prefill, padded, idle in zip(*columns, strict=True):
        computed = decode + prefill + padded + idle
        shares.append(100 * (padded + idle) / computed if computed else 0.0)
    return shares


def _waste_caption(group: Group) -> str:
    wasted = [
        f"{server.label} {metrics.padded_share:.0%}"
        for server, _ in _with_steps(group)
        if (metrics := server.typical.server_metrics)
    ]
    return (
        "Share of the tokens of each step that were computed for nothing: padding of prompts to a rectangle "
        "(spikes), and rows of finished requests (slopes that climb until the batch ends). "
        f"Over the whole run: {', '.join(wasted)}."
    )


# ---------------------------------------------------------------------------------------------- all of them


def _has_several(group: Group) -> bool:
    return group.first.metrics is not None and group.first.metrics.requests > 1


def _has_gaps(group: Group) -> bool:
    if not all(server.typical.requests for server in group.servers):
        return False
    watched = watched_client(group)
    return all(len(server.typical.requests[watched].token_times_s) > 2 for server in group.servers)


KINDS: Sequence[FigureKind] = (
    FigureKind("bars", lambda _: True, _draw_bars, _bars_caption),
    FigureKind("cdf", _has_several, _draw_cdf, _cdf_caption),
    FigureKind("stall", _has_gaps, _draw_stall, _stall_caption),
    FigureKind("kv", lambda group: bool(_with_steps(group)), _draw_kv, _kv_caption),
    FigureKind("waste", lambda group: bool(_with_steps(group)), _draw_waste, _waste_caption),
)
