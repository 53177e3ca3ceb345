"""The folder for what is built or downloaded once on a machine."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/infer-phases`, by default `~/.cache/infer-phases`.

    Raises FileNotFoundError if the user has no home folder, as a container's user may.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer-phases"
    except RuntimeError:
        raise FileNotFoundError("this user has no home folder; XDG_CACHE_HOME names a cache folder") from None
