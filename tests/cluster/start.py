"""`python -m tests.cluster.start PHASE …`: a cluster, started as `tests.server.support` starts a server, with the
phase first; its two replicas fit on however few cores there are."""

from __future__ import annotations

import sys

from cluster.__main__ import main

if __name__ == "__main__":
    main(["--phase", sys.argv[1], "--cpus", "0.25", *sys.argv[2:]])
