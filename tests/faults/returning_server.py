"""A phase's server that returns freed memory each second: `python -m tests.faults.returning_server PHASE …`."""

from __future__ import annotations

import sys

from common.server import logs
from common.server import run as serve

PULSE_EVERY_S = 1.0

if __name__ == "__main__":
    logs.PULSE_EVERY_S = PULSE_EVERY_S
    serve.main(sys.argv.pop(1))
