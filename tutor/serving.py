"""Serves a phase with the engine in the server's process: `python -m tutor.overlay TREE tutor.serving PHASE …`.

An engine's own process would import the project's files, not the learner's.
"""

from __future__ import annotations

import sys

from common.hosting.local import EngineThread
from common.server import run

if __name__ == "__main__":
    run.EngineProcess = EngineThread  # type: ignore[attr-defined]  # for this program only
    run.main(sys.argv.pop(1))
