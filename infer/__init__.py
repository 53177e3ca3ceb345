"""The command `infer`, which serves phases, measures them, and shows demos.

`infer serve 7` is `python -m phase7_chunked`, `infer compare` is `python -m benchmarks compare`, `infer demo` is
`python -m benchmarks.demo`, all with the same options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.startup.console import replace_unknown_characters

USAGE = """\
usage: infer serve PHASE [options]      serve a phase; infer serve --help lists the options
       infer cluster [options]          serve replicas of a phase behind one address, on Ray
       infer chat [options]             chat with a model in the terminal; --url for a server that runs already
       infer fetch [MODEL]              download a real model, for --model; without MODEL, list what there is
       infer doctor                     say what this machine can do, and what is missing
       infer phases                     list the phases: PHASE is a number or a name
       infer compare [options]          start servers in turn and compare them
       infer run --server URL [options] measure a server that runs already
       infer plots [options]            draw every figure from the results
       infer demo [options]             watch a server write, then every phase at the same work"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns its exit code, or exits with it; 2 for an unknown command."""
    replace_unknown_characters()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # imports take seconds, so `_run` does them: Ctrl-C is caught here
        print("interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    match words:
        case ["-h" | "--help"]:
            print(USAGE)
        case ["--version"]:
            from common.server.options import version_text

            print(version_text())
        case ["serve", "-h" | "--help"]:
            from common.server import run as serve
            from common.startup.phases import phase_names

            serve.main(phase_names()[-1], ["--help"], prog="infer serve PHASE")
        case ["phases"]:
            from common.startup.phases import find_phase, phase_names

            for phase in (find_phase(name).PHASE for name in phase_names()):
                print(f"{phase.number}  {phase.slug:<18}  {phase.idea}")
        case ["serve", *arguments]:
            return _serve(arguments)
        case ["cluster", *options]:
            from cluster.__main__ import main as serve_cluster

            serve_cluster(options, prog="infer cluster")
        case ["fetch"]:
            from common.models.fetch import print_models

            print_models()
        case ["fetch", "-h" | "--help"]:
            from common.models.fetch import HELP

            print(HELP)
        case ["fetch", name]:
            return _fetch(name)
        case ["doctor", *options]:
            from infer.doctor import main as examine

            return examine(options)
        case ["chat", *options]:
            from infer.chat import main as chat

            return chat(options)
        case ["compare" | "run" | "plots" | "demo" as word, *options]:
            return _measure(word, options)
        case _:
            wrong = f"error: infer has no command {' '.join(words)!r}\n" if words else ""
            print(f"{wrong}{USAGE}", file=sys.stderr)
            return 2
    return 0


def _serve(arguments: Sequence[str]) -> int:
    """Serve a phase; does not return. If it is named wrongly, say so and return the exit code 2."""
    from common.errors import StartupError
    from common.startup.phases import find_phase, phases_in_words

    if not arguments:
        print(f"error: infer serve takes a phase; there are {phases_in_words()}", file=sys.stderr)
        return 2
    name, *options = arguments
    try:
        find_phase(name)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from common.server import run as serve  # with torch and more, which take seconds

    return serve.main(name, options, prog=f"infer serve {name}")


def _fetch(name: str) -> int:
    from common.errors import StartupError
    from common.models.fetch import fetch

    try:
        print(f"{name} is in {fetch(name)}")
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"serve it: infer serve 9 --model {name}")
    return 0


def _measure(word: str, options: Sequence[str]) -> int:
    from benchmarks import __main__ as benchmarks
    from benchmarks import demo

    benchmarks.exit_on_sigterm()
    if word == "demo":
        return demo.main(options, prog="infer demo")
    return benchmarks.main([word, *options], prog="infer")
