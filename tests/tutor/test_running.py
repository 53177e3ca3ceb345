"""A learner's copy is served, measured and drawn: a right copy works, and errors of a wrong one name its line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import httpx
import pytest

from benchmarks.servers import RunningServer, Setup, copy_target
from tutor.exercise import ROOT, Exercise, load_exercise
from tutor.stepping import draw

pytestmark = pytest.mark.slow


@pytest.fixture
def exercise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exercise:
    """Phase 5, with a copy of the project's own files."""
    monkeypatch.setattr("tutor.exercise.TREES", tmp_path)
    found = load_exercise("5")
    for file in found.empty:
        (found.tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, found.tree / file)
    return found


def change(exercise: Exercise, file: str, old: str, new: str) -> None:
    path = exercise.tree / file
    text = path.read_text()
    assert text.count(old) == 1, f"the original has changed: {old!r}"
    path.write_text(text.replace(old, new))


def served(exercise: Exercise) -> RunningServer:
    return RunningServer(copy_target(f"5={exercise.tree}", Setup(model="zoo:llama-tiny")))


def complete(server: RunningServer) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": False}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0, trust_env=False)


def test_a_right_copy_answers(exercise: Exercise) -> None:
    with served(exercise) as server:
        answer = complete(server)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_log_names_the_line_that_raised(exercise: Exercise) -> None:
    change(exercise, "phase5_continuous/runner.py", "        tokens = 0\n", "        tokens = 1 // 0\n")
    with served(exercise) as server:
        answer = complete(server)
    assert answer.status_code >= 500
    assert re.search(r"runner\.py:\d+, in share_out: ZeroDivisionError", "\n".join(server.log))
    assert "tokens = 1 // 0" in "\n".join(server.log)


def test_a_copy_is_drawn_beside_the_phases(exercise: Exercise) -> None:
    page = draw(exercise)
    assert page.is_relative_to(exercise.tree)
    assert "5-yours" in page.read_text()
    steps = [path.name for path in (page.parent / "assets" / "steps").iterdir()]
    assert (
        sum(name.startswith("p5-yours-") for name in steps)
        == sum(name.startswith("p5-s") for name in steps)
        > 0
    )
