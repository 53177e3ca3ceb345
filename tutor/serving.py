"""Serves a phase with the engine in the server's process: `python -m tutor.overlay TREE tutor.serving PHASE …`.

An engine's own process would import the project's files, not the learner's.
"""

from __future__ import annotations

import sys

from common.hosting.local import EngineThread
from common.server.run import main

if __name__ == "__main__":
    main(sys.argv.pop(1), process=EngineThread)
