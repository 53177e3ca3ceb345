"""How long an OpenMP worker that has run out of work spins before it sleeps. No torch here: it must come first.

Threads that share an operator wait for each other at its end. GNU's OpenMP library (libgomp) lets them spin there
for 300,000 rounds, some milliseconds, which saves waking them for the next operator. If another program needs the
core, a spinning thread is in the way of the very thread that it waits for, and an operator takes as long as the
operating system's time slices. A thousand rounds, a few microseconds, bridge the gap between two operators and no
more.

libgomp reads its settings once, when torch is loaded. So this package and `common` import this module before
anything else.
"""

import os

SPIN_ROUNDS = 1000

#: The variables with which a user decides how threads wait.
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Set `GOMP_SPINCOUNT` for this process and its children, unless the user has set one of `VARIABLES`."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)
