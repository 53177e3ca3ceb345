"""`python -m tests.cluster.start PHASE …` starts a cluster with the arguments of a server's command. Each of the
two replicas reserves a quarter of a core, so that they fit on any machine."""

from __future__ import annotations

import sys

from cluster.__main__ import main

if __name__ == "__main__":
    main(["--phase", sys.argv[1], "--cpus", "0.25", *sys.argv[2:]])
