"""The site, built once for a test run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.support import ROOT, Page, read_page
from tests.support.browser import tab
from tests.support.servers import ServerProcess

__all__ = ["tab"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, unless BUILT_SITE names a folder with it. A warning fails the build, and so every test."""
    if built := os.environ.get("BUILT_SITE"):
        return Path(built)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    assert done.returncode == 0, "\n".join(told)[-4000:]
    return out


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("phase9_pipelined") as process:
        yield process


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    return {path: read_page(path) for path in sorted(site.rglob("*.html"))}
