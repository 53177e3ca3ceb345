"""Draws a learner's phase beside the project's phases, in a page like the stepper's page on the site.

The learner's scheduler and pool run in a process of their own, where they replace the phase's.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from common.errors import StartupError
from common.server.page.page import viewer_script, viewer_style
from docs.building.stepper import Setting, script, settings, stepper
from tutor.exercise import ROOT, Exercise

YOURS = "-yours"
TIMEOUT_S = 60  # a scheduler that never finishes its requests is stopped
HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Your phase, step by step</title><link rel="stylesheet" href="assets/viewer.css">
<body style="max-width: 70rem; margin: 1rem auto; padding: 0 1rem; font-family: sans-serif">
"""


def draw(exercise: Exercise) -> Path:
    """Write the page, and the traces that it loads, into the learner's folder. Returns the page.

    Raises:
        StartupError: the exercise is not about a phase from 4 on, there is no copy, or its code raised or did not
            end.
    """
    if exercise.serves.partition("_")[0] != f"phase{exercise.name}":
        raise StartupError("the stepper draws schedulers and pools: it shows exercises from phase 4 on")
    folder = exercise.written_tree() / "stepper"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "assets" / "steps").mkdir(parents=True)
    command = [sys.executable, "-m", "tutor.overlay", str(exercise.tree), "tutor.stepping", exercise.name]
    try:
        done = subprocess.run(
            [*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise StartupError(
            f"the stepper's requests were not done after {TIMEOUT_S} s: "
            "perhaps a request is never admitted, or never ends"
        ) from None
    if done.returncode:
        raise StartupError(done.stderr.strip().removeprefix("error: "))
    write(folder, settings())
    (folder / "assets" / "viewer.js").write_text(viewer_script(), encoding="utf-8")
    (folder / "assets" / "viewer.css").write_text(viewer_style(), encoding="utf-8")
    shutil.copy(ROOT / "docs" / "assets" / "stepper.js", folder / "assets")
    phase = int(exercise.name)
    body = stepper(f"{phase}{YOURS}", phase, "mixed", copies={f"{phase}{YOURS}": exercise.title.capitalize()})
    page = folder / "index.html"
    page.write_text(HEAD + body, encoding="utf-8")
    return page


def write(folder: Path, wanted: Iterable[Setting]) -> None:
    """Write a trace file for each setting in `wanted`, below `folder`."""
    for setting in wanted:
        (folder / "assets" / "steps" / f"{setting.name}.js").write_text(script(setting), encoding="utf-8")


if __name__ == "__main__":  # in the process that has the learner's modules
    own = [each for each in settings() if each.phase == int(sys.argv[1])]
    write(Path(sys.argv[2]), (dataclasses.replace(each, mark=YOURS) for each in own))
