"""`python -m tutor learn 6` sets an exercise up, `check 6` judges it; `serve`, `compare` and `step` run it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from common.errors import StartupError
from common.startup.console import replace_unknown_characters
from tutor.emptying import set_up
from tutor.exercise import Exercise, load_exercise, shown
from tutor.judging import TEST_TIMEOUT_S, judge, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 on success, 1 if the copy does not pass `check`, 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m tutor", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.__doc__, add_help=False)
        sub.add_argument("exercise", help="number of a phase, or kernel")
        sub.set_defaults(command=command)
    options, more = parser.parse_known_args(arguments)
    replace_unknown_characters()
    try:
        code: int = options.command(load_exercise(options.exercise), more)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def learn(exercise: Exercise, _: Sequence[str]) -> int:
    """Copy the modules of an exercise without the bodies that the learner writes."""
    set_up(exercise)
    print(f"{shown(exercise.tree)} is yours. To be written:\n")
    for file, names in exercise.empty.items():
        print(f"  {file}")
        for name in names:
            print(f"      {name}")
    print(
        f"\nmake check PHASE={exercise.name} says what holds. The same files in the checkout have the bodies."
    )
    return 0


def check(exercise: Exercise, _: Sequence[str]) -> int:
    """Run the exercise's tests on the copy. Say which ideas hold, and where tests fail."""
    exercise.written_tree()  # raises if there is no copy
    print(
        f"running the tests; one that does not end is stopped after {TEST_TIMEOUT_S} s",
        file=sys.stderr,
        flush=True,
    )
    judgement = judge(exercise)
    print(report(exercise, judgement))
    return 0 if judgement.all_hold else 1


def serve(exercise: Exercise, more: Sequence[str]) -> int:
    """Serve the copy. Further options are the server's."""
    tree = exercise.written_tree()
    print(f"serving {shown(tree)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tutor.overlay", str(tree), "tutor.serving", exercise.serves, *more]
    os.execve(sys.executable, command, os.environ | dict(exercise.environment))


def compare(exercise: Exercise, more: Sequence[str]) -> int:
    """Measure the copy beside the project's own. Further options are those of `infer compare`."""
    phase = exercise.serves
    command = [sys.executable, "-m", "benchmarks", "compare", "--phases", phase]
    command += ["--copy", f"{phase}={exercise.written_tree()}", *(more or ["--quick"])]
    os.execve(sys.executable, command, os.environ | dict(exercise.environment))


def step(exercise: Exercise, _: Sequence[str]) -> int:
    """Draw the copy's steps beside those of the project's phases."""
    from tutor.stepping import draw  # imports every phase, which the other commands do not need

    print(f"open {shown(draw(exercise))} in a browser")
    return 0


COMMANDS = {"learn": learn, "check": check, "serve": serve, "compare": compare, "step": step}

if __name__ == "__main__":
    sys.exit(main())
