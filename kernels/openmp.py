"""Limits how long an idle OpenMP worker spins before it sleeps. Must be imported before torch.

Threads that share an operator wait for each other at its end. GNU's OpenMP library (libgomp) lets them spin there
for 300,000 rounds, some milliseconds, which saves waking them for the next operator. If another program needs the
core, a spinning thread blocks the thread that it waits for, and an operator takes as long as the operating system's
time slices. A hundred thousand rounds take a millisecond or a few. They outlast the gaps between operators, and
most gaps between steps. With a thousand rounds, workers fell asleep within a step, and a quiet machine lost two
fifths of its throughput.

libgomp reads its settings once, when torch is loaded. So this package and `common` import this module before
anything else.
"""

import os

SPIN_ROUNDS = 100_000

#: Environment variables by which a user sets how threads wait.
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Set `GOMP_SPINCOUNT` for this process and its children, unless the user has set one of `VARIABLES`."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)
