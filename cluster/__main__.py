"""`python -m cluster --phase 7 --replicas 2`, or `infer cluster …`: replicas of a phase behind one address.

The exit codes are those of a phase's own command: 0 after a signal, 1 after a second one or if serving could
not begin, 2 for wrong options.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import NoReturn

from cluster.environment import prepare
from cluster.options import read_flags
from common.errors import StartupError
from common.server.logs import configure_logging
from common.server.options import UsageError
from common.server.run import exit_with


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m cluster") -> NoReturn:
    """Serve until a signal; does not return. Options are read first, then Ray is looked for, then started.

    Args:
        argv: the flags; the process's own if None.
        prog: the name of this command in `--help`.
    """
    try:
        plan = read_flags(sys.argv[1:] if argv is None else argv, prog)
        if importlib.util.find_spec("ray") is None:
            exit_with("error: a cluster needs Ray, which is not installed: pip install -e '.[cluster]'", 1)
        configure_logging(plan.options.log_level, plan.options.log_format)
        prepare()
        from cluster.lifecycle import serve  # here, since it imports Ray

        sys.exit(serve(plan))
    except UsageError as error:
        exit_with(f"error: {error}", 2)
    except StartupError as error:
        exit_with(f"error: {error}", 1)


if __name__ == "__main__":
    main()
