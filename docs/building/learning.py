"""The table of the exercises that are as large as a phase (`tutor`)."""

from __future__ import annotations

from collections import Counter

from common.phases import phase_names
from docs.building.markdown import table
from tutor.emptying import empty
from tutor.exercise import Exercise, load_exercise


def learn_table() -> str:
    """Return a row for each phase: the classes with methods to write, and the ideas with their numbers of tests."""
    rows = []
    for name in phase_names():
        exercise = load_exercise(name)
        classes = Counter(method.partition(".")[0] for method in _to_write(exercise))
        written = ", ".join(f"`{owner}` ({count})" for owner, count in classes.items())
        ideas = "; ".join(f"{idea.title} ({len(idea.tests)})" for idea in exercise.ideas)
        rows.append([f"{exercise.number}, {exercise.title.lower()}", written, ideas])
    return table(["phase", "to be written", "judged by"], rows, "lll")


def _to_write(exercise: Exercise) -> list[str]:
    """Return the methods whose bodies are taken out, as `Class.method`."""
    found = []
    for module in dict.fromkeys(name.partition(".")[0] for name in exercise.empty):
        text = (exercise.source / f"{module}.py").read_text(encoding="utf-8")
        names = [name.partition(".")[2] for name in exercise.empty if name.partition(".")[0] == module]
        found += empty(text, f"{exercise.package}.{module}", names)[1]
    return found
