"""What pages say of the exercises that are as large as a phase (`tutor`)."""

from __future__ import annotations

from common.phases import phase_names
from tutor.emptying import empty, owed_words
from tutor.exercise import Exercise, load_exercise
from tutor.judging import Judgement, report


def learn_commands(phase: str) -> str:
    """How to write a phase oneself."""
    exercise = load_exercise(phase)
    count = sum(len(methods) for methods in to_write(exercise).values())
    return (
        f"The same at full size: `make learn PHASE={exercise.number}` copies this phase into "
        f"`learn/phase{exercise.number}` without the bodies of {count} methods, and `make check "
        f"PHASE={exercise.number}` says what holds of what you write in their place "
        "([how that works](../learn.md)).\n"
    )


def learn_table() -> str:
    """What is to be written in each phase, and which of its ideas are judged."""
    rows = ["| phase | to be written | judged by |", "| --- | --- | --- |"]
    for name in phase_names():
        exercise = load_exercise(name)
        classes: dict[str, int] = {}
        for methods in to_write(exercise).values():
            for method in methods:
                owner = method.partition(".")[0]
                classes[owner] = classes.get(owner, 0) + 1
        written = ", ".join(f"`{owner}` ({count})" for owner, count in classes.items())
        ideas = "; ".join(f"{idea.title} ({len(idea.tests)})" for idea in exercise.ideas)
        rows.append(f"| {exercise.number}, {exercise.title.lower()} | {written} | {ideas} |")
    return "\n".join(rows) + "\n"


def learn_sample() -> str:
    """What is said of a solution that is half written and half right."""
    exercise = load_exercise("6")
    wrong = "test_with_nobody_active_a_prompt_may_take_the_whole_pool"
    owed = f"PagedScheduler.make_room: {owed_words('phase6_paged.scheduler', 'PagedScheduler.make_room')}"
    written, later = exercise.ideas[:3], exercise.ideas[3:]
    tests = [test for idea in written for test in idea.tests]
    judgement = Judgement(
        held={test for test in tests if not test.endswith(f"::{wrong}")},
        failed={test: "assert [] == ['r0']" for test in tests if test.endswith(f"::{wrong}")},
        unwritten={test: owed for idea in later for test in idea.tests},
    )
    return f"```text\n{report(exercise, judgement)}\n```\n"


def to_write(exercise: Exercise) -> dict[str, list[str]]:
    """By module, the methods whose bodies are taken out."""
    modules = dict.fromkeys(name.partition(".")[0] for name in exercise.empty)
    found = {}
    for module in modules:
        text = (exercise.source / f"{module}.py").read_text(encoding="utf-8")
        names = [name.partition(".")[2] for name in exercise.empty if name.partition(".")[0] == module]
        found[module] = empty(text, f"{exercise.package}.{module}", names)[1]
    return found
