"""Limits how long an idle OpenMP worker spins before it sleeps. Must be imported before torch.

torch's own operators, unlike the native kernels (`kernels/native/team.h`), are shared among threads by GNU's
OpenMP library (libgomp). Its threads wait for each other at an operator's end, and then for the next operator.
It lets them spin for 300,000 rounds, some milliseconds, which saves waking them. If another program needs the
core, a spinning thread blocks the thread that it waits for, and an operator takes as long as the operating
system's time slices. Ten thousand rounds take some hundred microseconds. They outlast the gaps between the
operators of a pass. With a thousand rounds, a quiet machine without native kernels lost a fifth of its
throughput.

libgomp reads its settings once, when torch is loaded. So this package and `common` import this module before
anything else.
"""

import os

SPIN_ROUNDS = 10_000

#: Environment variables by which a user sets how threads wait.
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

#: The cores of this process. If `OMP_PROC_BIND` or `GOMP_CPU_AFFINITY` is set, libgomp binds the thread that loads
#: it to one of them, and threads that this thread starts would all be on this core.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def limit_spinning() -> None:
    """Set `GOMP_SPINCOUNT` for this process and its children, unless the user has set one of `VARIABLES`."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)
