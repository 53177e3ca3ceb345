"""`python -m tutor learn 6` sets an exercise up, `python -m tutor check 6` judges it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from common.errors import StartupError
from tutor.emptying import set_up
from tutor.exercise import ROOT, load_exercise
from tutor.judging import judge, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 on success, 1 if a test of the copy fails, 2 if nothing was done."""
    parser = argparse.ArgumentParser(prog="python -m tutor", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="learn | check")
    for name, command, what in (
        ("learn", _learn, "copy a phase, its idea taken out"),
        ("check", _check, "what holds of the copy, and what does not"),
    ):
        sub = commands.add_parser(name, help=what)
        sub.add_argument("phase", help="number or name")
        sub.set_defaults(command=command)
    options = parser.parse_args(arguments)
    try:
        code: int = options.command(options.phase)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _learn(phase: str) -> int:
    exercise = load_exercise(phase)
    taken = set_up(exercise)
    place = exercise.tree.relative_to(ROOT)
    print(f"Phase {exercise.number}, {exercise.title.lower()}: {place} is yours. To be written:\n")
    for path, methods in taken.items():
        print(f"  {path}")
        for method in methods:
            print(f"      {method}")
    print(f"\nmake check PHASE={exercise.number} says what holds. The real ones are in {exercise.package}/.")
    return 0


def _check(phase: str) -> int:
    exercise = load_exercise(phase)
    judgement = judge(exercise)
    print(report(exercise, judgement))
    return 0 if judgement.all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
