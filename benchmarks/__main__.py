"""`python -m benchmarks compare | run | publish | micro | plots | export`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks import micro
from benchmarks.calibrate import LOADS, CalibrationError
from benchmarks.compare import Comparison, compare
from benchmarks.export import export
from benchmarks.files import publish
from benchmarks.measure import Measurement, new_comparison_name
from benchmarks.peers.registry import peer_target
from benchmarks.report import report, summary
from benchmarks.results import LOCAL, RESULTS, Run
from benchmarks.servers import ForeignServer, Options, Setup, Target, copy_target, phase_target
from benchmarks.workloads import CHAT_WORKLOADS, WORKLOADS, PromptWriter, Workload
from common.errors import StartupError
from common.models.presets import PRESETS
from common.models.registry import open_checkpoint
from common.startup.console import replace_unknown_characters
from common.startup.phases import phase_names

PLOTS = Path("docs/assets/plots")
DTYPES = ["auto", "float32", "bfloat16", "float16"]


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m benchmarks") -> int:
    """Run the command line. Returns the exit code: 0 only if the command succeeded and every run is complete."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    replace_unknown_characters()
    console = Console()
    try:
        if words[:1] == ["micro"]:  # `micro` makes its options from the signature of a function
            return micro.main(words[1:], console)
        options = parser(prog).parse_args(words)
        code: int = options.command(options, console)
    except (StartupError, CalibrationError, ValueError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", markup=True, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that each server's `with` statement ends and stops the server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog=prog, description="Measure servers and draw what was found.")
    commands = top.add_subparsers(required=True, metavar="compare | run | publish | micro | plots | export")
    load = _load_options()

    compare_ = commands.add_parser("compare", parents=[load], help="start servers in turn, compare them")
    compare_.set_defaults(command=_compare)
    add = compare_.add_argument_group("servers").add_argument
    add("--phases", help="numbers or names with commas, compared in this order (all)")
    add(
        "--peer",
        action="append",
        default=[],
        help="also measure: generate, vllm=FOLDER (the virtual environment that has it), llama-server=PROGRAM, or "
        "the URL of a running server; may be repeated",
    )
    add(
        "--copy",
        action="append",
        default=[],
        metavar="PHASE=FOLDER",
        help="also measure a phase with the files of a folder in place of its own: 5=learn/phase5 (`make learn`)",
    )
    add("--model", default="dummy:llama-60m", help="every server's (dummy:llama-60m)")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add("--dtype", default="auto", choices=DTYPES)
    add("--slots", type=int, default=8, help="KV memory, in sequences of full length (8)")
    add("--max-seq-len", type=int, default=4096, help="length of a full sequence, in tokens (4096)")
    add(
        "--option",
        action="append",
        default=[],
        metavar="PHASE:NAME[=VALUE]",
        help="start a phase (or all) with a further option, such as 6:num-blocks=512; may be repeated",
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar="PHASE:NAME[=VALUE][,...]",
        help="one more column: a phase with these options, such as 7:prefill-chunk-size=64; may be repeated. "
        "With variants, only the phases in --phases are measured beside them",
    )

    run = commands.add_parser("run", parents=[load], help="measure a server that runs already")
    run.set_defaults(command=_run)
    add = run.add_argument_group("server").add_argument
    add("--server", required=True, metavar="URL", help="any OpenAI-compatible server")
    add("--model-name", default="", help="the server's name for its model (the first it lists)")
    add("--tokenizer", help="model whose tokenizer makes the prompts (the served one)")
    add("--label", default="", help="its column in tables (the URL)")
    add("--batch", type=int, default=8, help="sequences at once while calibrating (8)")
    add("--no-ignore-eos", action="store_true", help="for servers that do not know the field ignore_eos")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="sent as a bearer token")

    publish_ = commands.add_parser("publish", help="make small files of complete comparisons")
    publish_.set_defaults(command=_publish)
    add = publish_.add_argument
    add("--results", type=Path, default=LOCAL, help=f"folder with the runs ({LOCAL})")
    add("--out", type=Path, default=RESULTS, help=f"folder to publish in ({RESULTS})")
    add("--only", nargs="+", default=[], help="names of comparisons, such as 20261125-140318")
    add(
        "--timelines",
        default="typical",
        choices=["typical", "all", "none"],
        help="whose requests and engine steps are kept: of each server the run with the median throughput, "
        "which figures draw; of all runs, for the simulator; or of none (typical)",
    )

    commands.add_parser("micro", help="measurements that answer one question each")

    plots = commands.add_parser("plots", help="draw every figure from the results")
    plots.set_defaults(command=_plots)
    plots.add_argument("--results", type=Path, default=RESULTS, help=f"folder of results ({RESULTS})")
    plots.add_argument("--out", type=Path, default=PLOTS, help=f"folder for figures ({PLOTS})")

    folder = commands.add_parser("export", help="write a dummy's or a GGUF file's weights for other servers")
    folder.set_defaults(command=_export)
    add = folder.add_argument
    add("model", help=f"a GGUF file, a fetched model, or a dummy: {', '.join(PRESETS)}")
    add("folder", type=Path, help="a new folder")
    add("--dtype", default="auto", choices=DTYPES, help="the type of the weights (auto)")
    return top


def _load_options() -> argparse.ArgumentParser:
    """Return a parser with the options that `compare` and `run` share."""
    load = argparse.ArgumentParser(add_help=False)
    add = load.add_argument_group("workload").add_argument
    add(
        "--workload",
        default="mixed",
        help=f"{', '.join(WORKLOADS)}; for a model that chats {', '.join(CHAT_WORKLOADS)}; several with commas; or "
        "all of the first kind",
    )
    add("--seed", type=int, default=0, help="draws lengths, texts and arrivals (0)")
    add("--quick", action="store_true", help="a quarter of the requests, for demos")
    add("--text", action="store_true", help="send prompts as text, not as token ids")
    add("--rate", default="auto", help="auto (measure this machine and scale), table, or a factor (auto)")
    loads = ", ".join(f"{name} {value}" for name, value in LOADS.items())
    add("--load", type=float, help=f"offered load relative to the measured capacity ({loads})")
    add("--repeats", type=int, help="runs of each server; compare does 3 (quick: 1), run does 1")
    add = load.add_argument_group("report").add_argument
    add("--slo-ttft", type=float, default=2.0, help="SLO: first token within so many s (2)")
    add("--slo-itl", type=float, default=0.2, help="SLO: 99 %% of gaps within so many s (0.2)")
    add("--stall-timeout", type=float, default=120.0, help="give up after so many s without any token (120)")
    add("--run-timeout", type=float, default=3600.0, help="give up a run after so many s (3600)")
    add("--all", action="store_true", help="print every metric and ratios: a wide table")
    add("--trace", action="store_true", help="keep a trace of each run beside its result")
    add("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return load


# ---------------------------------------------------------------------------------------------- commands


def exit_code(runs: Sequence[Run]) -> int:
    """Return 0 if every run is complete, else 1."""
    return 0 if all(run.status == "ok" for run in runs) else 1


def _compare(options: argparse.Namespace, console: Console) -> int:
    setup = Setup(
        model=options.model,
        slots=options.slots,
        max_seq_len=options.max_seq_len,
        device=options.device,
        dtype=options.dtype,
        extra=parse_options(options.option),
    )
    targets = targets_of(setup, options.phases, options.variant)
    targets += [copy_target(text, setup) for text in options.copy]
    targets += [peer_target(name, setup) for name in options.peer]
    if not targets:
        raise ValueError("nothing to compare: name --phases, a --variant, a --copy or a --peer")
    checkpoint = open_checkpoint(options.model)
    repeats = options.repeats or (1 if options.quick else 3)
    return _measure(options, console, targets, PromptWriter(checkpoint.tokenizer()), options.model, repeats)


def _run(options: argparse.Namespace, console: Console) -> int:
    target = Target(
        label=options.label or options.server,
        order=1000.0,
        module=None,
        options={"model": options.model_name} if options.model_name else {},
        url=options.server,
    )
    with ForeignServer(target) as server:
        model = server.model
    writer = PromptWriter(open_checkpoint(options.tokenizer or model).tokenizer())
    return _measure(options, console, [target], writer, model, options.repeats or 1)


def _measure(
    options: argparse.Namespace,
    console: Console,
    targets: Sequence[Target],
    writer: PromptWriter,
    model: str,
    repeats: int,
) -> int:
    comparison = Comparison(
        targets=targets,
        workloads=parse_workloads(options.workload),
        model=model,
        writer=writer,
        measurement=Measurement(
            comparison=new_comparison_name(),
            seed=options.seed,
            quick=options.quick,
            text=options.text,
            slo_ttft_s=options.slo_ttft,
            slo_itl_s=options.slo_itl,
            stall_timeout_s=options.stall_timeout,
            run_timeout_s=options.run_timeout,
        ),
        repeats=repeats,
        rate=options.rate,
        load=options.load,
        batch=getattr(options, "batch", 8),
        out=options.out,
        ignore_eos=not getattr(options, "no_ignore_eos", False),
        api_key=getattr(options, "api_key", None),
        trace=options.trace,
        show=report if options.all else summary,
    )
    return exit_code(compare(comparison, console))


def _publish(options: argparse.Namespace, console: Console) -> int:
    published = publish(options.results, options.out, timelines=options.timelines, only=options.only)
    for each in published:
        comparison, workload, model, quick = each.key
        name = f"{workload}{' (quick)' if quick else ''}, {model}"
        console.print(f"{comparison}: {name}, runs: {len(each.runs)}", highlight=False)
    if not published:
        raise ValueError(f"--results {options.results}: no complete comparison to publish")
    console.print(f"published in {options.out}")
    return 0


def _plots(options: argparse.Namespace, console: Console) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "figures are drawn with matplotlib, which is not installed: `make plots` installs it, "
            "and so does .venv/bin/pip install -e '.[docs]'"
        )
    from benchmarks.plots import draw_all  # matplotlib takes a second to import, and only this needs it

    written = draw_all(options.results, options.out)
    console.print(f"{len(written)} figures in {options.out}")
    return 0


def _export(options: argparse.Namespace, console: Console) -> int:
    name = f"dummy:{options.model}" if options.model in PRESETS else options.model
    export(name, options.folder, options.dtype)
    console.print(f"{options.model} written to {options.folder}")
    return 0


# ---------------------------------------------------------------------------------------------- parsing


def parse_workloads(names: str) -> list[Workload]:
    """Return the workloads that `names` lists with commas. `all` means all workloads without chats.

    Raises:
        ValueError: a name is no workload's.
    """
    if names == "all":
        return list(WORKLOADS.values())
    known = WORKLOADS | CHAT_WORKLOADS
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ValueError(f"--workload: no {', '.join(unknown)}; there are {', '.join(known)}, and all")
    return [known[name] for name in names.split(",")]


def targets_of(setup: Setup, phases: str | None, variants: Sequence[str]) -> list[Target]:
    """Return the servers that `--phases` and `--variant` name; without both options, every phase.

    Raises:
        StartupError: there is no such phase.
        ValueError: a variant does not have the form `PHASE:NAME=VALUE`.
    """
    parsed = [parse_variant(text) for text in variants]
    default = [] if parsed else phase_names()
    names = default if phases is None else [name.strip() for name in phases.split(",") if name]
    targets = [phase_target(name, setup) for name in names]
    return targets + [phase_target(name, setup, own, place) for place, (name, own) in enumerate(parsed, 1)]


def parse_options(given: Sequence[str]) -> dict[str, Options]:
    """Parse `6:num-blocks=512` into `{"6": {"num-blocks": "512"}}`. Raises ValueError as `parse_variant` does."""
    found: dict[str, Options] = {}
    for text in given:
        phase, options = parse_variant(text, flag="--option")
        found.setdefault(phase, {}).update(options)
    return found


def parse_variant(text: str, *, flag: str = "--variant") -> tuple[str, Options]:
    """Parse `7:prefill-chunk-size=64,no-mixed-batches` into a phase and its options. A flag's value is empty.

    Raises:
        ValueError: `text` does not have that form; the message names the command line's `flag`.
    """
    phase, _, options = text.partition(":")
    if not (phase and options):
        raise ValueError(f"{flag} {text}: expected PHASE:NAME=VALUE, such as 7:prefill-chunk-size=64")
    found: Options = {}
    for option in options.split(","):
        name, equals, value = option.partition("=")
        name = name.strip().lstrip("-")
        if not name or (equals and not value):
            raise ValueError(f"{option!r} is no option: expected NAME=VALUE, or NAME for a flag")
        found[name] = value
    return phase, found


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
