"""`infer`: one command for what `python -m` serves, measures and shows.

`infer serve 7` is `python -m phase7_chunked`, `infer compare` is `python -m benchmarks compare`, `infer demo` is
`python -m benchmarks.demo`, all with the same options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from common.errors import StartupError
from common.phases import find_phase, phase_names
from common.server import cli

USAGE = """\
usage: infer serve PHASE [options]      serve a phase; infer serve 7 --help lists its options
       infer phases                     list the phases: PHASE is a number or a name
       infer compare [options]          start servers in turn and compare them
       infer run --server URL [options] measure a server that runs already
       infer plots [options]            draw every figure from the results
       infer demo [options]             watch a server write, then every phase at the same work"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns or exits with an exit code, which is 2 for words that make no command."""
    match sys.argv[1:] if argv is None else list(argv):
        case ["-h" | "--help"] | ["serve", "-h" | "--help"]:
            print(USAGE)
        case ["phases"]:
            for phase in (find_phase(name).PHASE for name in phase_names()):
                print(f"{phase.number}  {phase.slug:<18}  {phase.idea}")
        case ["serve"]:
            cli.exit_with(f"error: infer serve takes a phase; there are {', '.join(phase_names())}", 2)
        case ["serve", name, *options]:
            _serve(name, options)
        case ["compare" | "run" | "plots" | "demo" as word, *options]:
            return _measure(word, options)
        case words:
            wrong = f"error: infer has no command {' '.join(words)!r}\n" if words else ""
            print(f"{wrong}{USAGE}", file=sys.stderr)
            return 2
    return 0


def _serve(name: str, options: Sequence[str]) -> NoReturn:
    try:
        find_phase(name)
    except StartupError as error:
        cli.exit_with(f"error: {error}", 2)
    cli.main(name, options, prog=f"infer serve {name}")


def _measure(word: str, options: Sequence[str]) -> int:
    from benchmarks import __main__ as benchmarks  # here, since a server needs none of it
    from benchmarks import demo

    benchmarks.exit_on_sigterm()
    if word == "demo":
        return demo.main(options, prog="infer demo")
    return benchmarks.main([word, *options], prog="infer")
