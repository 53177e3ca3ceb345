"""Runs the ordinary test suite in other environments than `.venv`: `make test-pythons`, `make test-lowest`.

A Python version that is not on the machine is skipped. `PIP_ARGS` goes to pip and uv, words after `--` to pytest.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

import nox

ARGUMENTS = shlex.split(os.environ.get("PIP_ARGS", ""))

nox.needs_version = ">=2025.2"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "venv"  # `infer fetch` runs the environment's pip


def suite(session: nox.Session) -> None:
    """Run the tests that `make test` runs."""
    session.run("pytest", "-n", "2", "--dist", "worksteal", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    session.install(*ARGUMENTS, "-c", "constraints.txt", "-e", ".[dev,docs]")
    suite(session)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """Run the tests with the lowest versions that pyproject.toml allows, but with constraints.txt's torch.

    The lowest torch is left out, because an index may have its CPU build in one version only.
    """
    torch = ["--no-deps", "torch"]  # uv keeps a version that is installed
    session.install(*ARGUMENTS, "-c", "constraints.txt", *torch)
    # Where make installs it, beside nox, is not on PATH.
    program = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    uv = [program, "pip", "install", *ARGUMENTS, "--python", session.virtualenv.location]
    lowest = ["--resolution", "lowest-direct", "--override", "constraints.txt"]
    session.run_install(*uv, *lowest, "-e", ".[dev,docs]", external=True)
    suite(session)
