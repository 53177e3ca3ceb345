"""`python -m simulator`: simulates a workload on every phase in virtual time, with up to millions of requests."""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from benchmarks.__main__ import parse_options, targets_of
from benchmarks.calibrate import fixed_factor, reference_capacity
from benchmarks.environment import cpu_name
from benchmarks.measure import Measurement, blank_run
from benchmarks.report import report
from benchmarks.results import RESULTS, Calibration, Lineup, Run, ServerInfo
from benchmarks.servers import Setup, Target
from benchmarks.workloads import WORKLOADS, Lengths, Workload, planned_requests
from common.engine.engine import Engine
from common.errors import StartupError
from common.models.registry import open_checkpoint
from common.startup.phases import find_phase
from simulator.arrivals import Arrival, Unlike, arrivals_of
from simulator.cost import Cost, Device, RooflineCost
from simulator.engine import simulate_engine
from simulator.loop import run
from simulator.observers import Summary, Timelines
from simulator.prices import find_cost, load_fits, mode_of_config
from simulator.replay import NO_SCHEDULE, options_of
from simulator.routing import POLICIES, Routed

_LENGTHS = re.compile(r"([1-9]\d*)\+([1-9]\d*)")
_GPU = re.compile(r"(\d+\.?\d*),(\d+\.?\d*)(?:,(\d*\.?\d+))?")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = parser().parse_args(arguments)
    console = Console()
    try:
        simulate(options, console)
    except (StartupError, ValidationError, ValueError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m simulator",
        description="Serve a workload with the real schedulers and KV pools of any phase, and no model.",
    )
    group = top.add_argument_group("workload")
    group.add_argument(
        "--workload",
        default="mixed",
        help=f"{', '.join(WORKLOADS)}; or PROMPT+NEW, such as 64+32: that many tokens, all at once (mixed)",
    )
    group.add_argument("--requests", type=int, help="how many (the workload's own number)")
    group.add_argument("--seed", type=int, default=0, help="draws lengths and arrivals (0)")
    group.add_argument(
        "--rate", default="auto", help="auto (by the capacity of the first phase), table, or a factor (auto)"
    )
    group.add_argument("--poisson", type=float, metavar="RATE", help="instead, so many a second, at random")
    group = top.add_argument_group("servers, as `benchmarks compare` has them")
    group.add_argument("--phases", help="numbers or names with commas (all)")
    group.add_argument(
        "--model", default="dummy:llama-60m", help="any whose config is at hand (dummy:llama-60m)"
    )
    group.add_argument("--slots", type=int, default=8, help="KV memory, in sequences of full length (8)")
    group.add_argument("--max-seq-len", type=int, default=4096, help="length of a full sequence (4096)")
    for name, what in (("option", "a further option of a phase, or of all"), ("variant", "one more column")):
        group.add_argument(f"--{name}", action="append", default=[], metavar="PHASE:NAME[=VALUE]", help=what)
    group.add_argument("--replicas", type=int, default=1, help="engines behind a router (1)")
    group.add_argument(
        "--policy", default="least_loaded", choices=POLICIES, help="the router's (least_loaded)"
    )
    group.add_argument(
        "--acceptance",
        type=float,
        default=0.0,
        help="how likely a guess of phase 10 comes true (0: no guesses)",
    )
    group.add_argument(
        "--disk",
        type=float,
        default=1.0,
        metavar="GB/S",
        help="how fast phase 11 reads, if it has a kv-tier: nothing is written to that folder (1)",
    )
    group = top.add_argument_group("time")
    group.add_argument(
        "--machine", help="prices of a machine whose name begins so (this one if it was measured, else any)"
    )
    group.add_argument("--results", type=Path, default=RESULTS, help=f"folder with prices ({RESULTS})")
    group.add_argument(
        "--gpu",
        metavar="GB/S,TFLOP/S[,EFFICIENCY]",
        help="instead of prices, a device of so much bandwidth and arithmetic, such as 3350,990,0.6",
    )
    return top


def simulate(options: argparse.Namespace, console: Console) -> list[Run]:
    """Simulate the workload on every phase that the options name, print the table, and return the results."""
    workload = find_workload(options)
    setup = Setup(
        model=options.model,
        slots=options.slots,
        max_seq_len=options.max_seq_len,
        extra=parse_options(options.option),
    )
    columns = [Column(target, options) for target in targets_of(setup, options.phases, options.variant)]
    calibration = calibrate(workload, columns[0], options)
    runs = []
    for each in columns:
        started = time.perf_counter()
        found = each.serve(workload, calibration, options)
        took = time.perf_counter() - started
        runs.append(found)
        assert found.metrics is not None
        console.print(
            f"{each.target.label}: {found.metrics.requests:,} requests, {found.metrics.duration_s:,.0f} s of "
            f"theirs in {took:.1f} s ({each.source})",
            highlight=False,
        )
    console.print(report(runs))
    return runs


def find_workload(options: argparse.Namespace) -> Workload:
    """Return the workload that `--workload` names, changed as `--requests` and `--poisson` say.

    Raises:
        ValueError: there is no such workload, or a number is out of its range.
    """
    name = options.workload
    if (lengths := _LENGTHS.fullmatch(name)) is not None:
        prompt, new = map(int, lengths.groups())
        prompts = ((1.0, Lengths(prompt, prompt)),)
        found = Workload(name, 1000, prompts, Lengths(new, new), "burst")
    elif name in WORKLOADS:
        found = WORKLOADS[name]
    else:
        raise ValueError(f"--workload: no {name}; there are {', '.join(WORKLOADS)}, and PROMPT+NEW")
    if options.requests is not None:
        if options.requests < found.turns:
            raise ValueError(f"--requests {options.requests}: {found.turns} is the least of {name}")
        found = dataclasses.replace(found, requests=options.requests)
    if options.poisson is not None:
        if not options.poisson > 0 or found.turns > 1:
            raise ValueError("--poisson: a rate is positive, and conversations have none")
        found = dataclasses.replace(found, arrivals="poisson", rate=options.poisson)
    return found


class Column:
    """One column of the printed table: a phase, its options, and the times (prices) of its work.

    Attributes:
        source: where the prices come from, in words.
    """

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        assert target.module is not None
        if options.replicas < 1:
            raise ValueError(f"--replicas {options.replicas}: there must be one at least")
        self.target = target
        self.package = find_phase(target.module)
        own = {name: value for name, value in target.options.items() if name not in NO_SCHEDULE}
        self.options = options_of(self.package.Config, own)
        self.cost, self.source = self._cost(options)
        if not 0 <= options.acceptance <= 1:
            raise ValueError(f"--acceptance {options.acceptance}: a probability is between 0 and 1")
        self.acceptance = options.acceptance
        if not options.disk > 0:
            raise ValueError(f"--disk {options.disk}: a rate is positive")
        self.disk_bytes_s = options.disk * 1e9

    def _cost(self, options: argparse.Namespace) -> tuple[Cost, str]:
        config = self.package.Config(**self.options)
        quantized = "none" if config.quantize == "auto" else config.quantize
        if options.gpu is not None:
            shape = open_checkpoint(options.model).config
            return RooflineCost(shape, parse_gpu(options.gpu), quantized=quantized), options.gpu
        if quantized != "none":
            raise ValueError(f"quantize={quantized}: no prices of it were measured; name a device with --gpu")
        mode = mode_of_config(config)
        fits = load_fits(options.results)
        machine = options.machine
        if machine is None:
            measured = {(fit.group.machine, fit.group.model, fit.group.mode) for fit in fits}
            machine = cpu_name() if (cpu_name(), options.model, mode) in measured else ""
        fit = find_cost(fits, options.model, mode, machine)
        return fit.cost, f"prices of {fit.group.machine}, {fit.group.revision}"

    def engines(self, count: int) -> list[Engine]:
        return [
            simulate_engine(
                self.package,
                self.cost,
                acceptance=self.acceptance,
                disk_bytes_s=self.disk_bytes_s,
                **self.options,
            )
            for _ in range(count)
        ]

    def serve(self, workload: Workload, calibration: Calibration, options: argparse.Namespace) -> Run:
        """Simulate a workload to its end, and return the result in the form of a measured run."""
        engines = self.engines(options.replicas)
        seen, route = Summary(engines), Routed(POLICIES[options.policy](options.seed))
        plan = planned_requests(workload, Unlike(), seed=options.seed, factor=calibration.factor)
        run(engines, arrivals_of(plan, sequential=workload.arrivals == "sequential"), seen, route=route)
        target = self.target
        server = ServerInfo(
            label=target.label,
            order=target.order,
            model=target.options["model"],
            options=target.options,
            variant=target.variant,
        )
        measurement = Measurement(comparison="simulated", seed=options.seed)
        lineup = Lineup(servers=[target.label], repeats=1)
        found = blank_run(workload, server, calibration, measurement, lineup=lineup)
        found.status, found.reason = "ok", None
        found.metrics, found.server_metrics = seen.metrics(), seen.server_metrics()
        return found


def calibrate(workload: Workload, column: Column, options: argparse.Namespace) -> Calibration:
    """Return the factor for arrival rates. For `--rate auto` it is measured as in `benchmarks.calibrate`, but in
    virtual time.

    Raises:
        ValueError: `--rate` is neither `auto`, nor `table`, nor a positive number.
    """
    reference = reference_capacity(workload)
    if reference is None or options.poisson is not None:
        return Calibration(mode="table", factor=1.0)
    if options.rate != "auto":
        return fixed_factor(workload, options.rate)
    batch, write = int(column.options["max_batch_size"]), Unlike()
    prompt, new = round(workload.mean_prompt_tokens), round(workload.new_tokens.mean)
    crowd = [Arrival(index, 0.0, write(random.Random(), prompt), new) for index in range(batch)]
    seconds = run(column.engines(1), crowd, Timelines())
    capacity = options.replicas * batch / seconds
    return Calibration(
        mode="auto",
        factor=capacity / reference,
        capacity=capacity,
        reference=reference,
        batch=batch,
        rounds_s=[seconds],
        measured_on=column.target.label,
    )


def parse_gpu(text: str) -> Device:
    """Parse a device such as `3350,990,0.6`: GB/s, TFLOP/s and, optionally, the share of both that a pass reaches.

    Raises:
        ValueError: the text does not have that form.
    """
    if (numbers := _GPU.fullmatch(text)) is None or not all(float(each) > 0 for each in numbers.groups("1")):
        raise ValueError(f"--gpu {text}: expected GB/S,TFLOP/S, such as 3350,990")
    bandwidth, teraflops, efficiency = numbers.groups()
    share = {} if efficiency is None else {"efficiency": float(efficiency)}
    return Device(float(bandwidth) * 1e9, float(teraflops) * 1e12, **share)


if __name__ == "__main__":
    sys.exit(main())
