"""Builds the C++ kernels for CPUs once on each machine, and loads them into the process.

Sources are the `.cpp` files beside this module. The first process that needs the kernels builds a library of
them, which takes a compiler and some seconds. The library is kept outside the repository, under a key of
everything it depends on, and later processes with the same key only load it. Without a compiler, or after any
other error, torch computes every operation: more slowly, with results that differ by rounding.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

from kernels.cache_folder import default_cache
from kernels.openmp import CORES

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))

FLAGS = (
    "-O3",
    "-march=native",
    # errno and the exception flags are not read, and loops that may set them are not vectorised. Not -ffast-math:
    # it makes NaN and infinity meaningless, and loading such a library changes the arithmetic of the process.
    "-fno-math-errno",
    "-fno-trapping-math",
    # GCC prefers half the vector width, since the full one made older x86 processors clock down.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)

_NAME = "infer_native"


class NativeKernelsError(Exception):
    """The native kernels cannot be built or loaded. The message is one line."""


# For the process, not an engine: torch registers operators for the whole process.
_loaded = False


def is_loaded() -> bool:
    """Return whether this process has the native kernels."""
    return _loaded


@functools.cache
def has_products(dtype: torch.dtype) -> bool:
    """Return whether the kernels that use matrix products (linear layers and attention) work on this processor.

    They use torch's micro kernels, which not every processor supports. Only a trial can tell, so this
    function tries a small product. The native kernels must be loaded.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator).to(dtype) for rows in (80, 3))
    try:
        packed = torch.ops.infer.pack_linear(weight, 1 if dtype == torch.float32 else 2)
        y = torch.ops.infer.linear(x, packed, 80, None, None, False)
    except RuntimeError:
        return False
    return torch.allclose(y.double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-2)


def load_native_kernels(cache: Path | None = None) -> bool:
    """Load the native kernels, and build them first if needed. Returns whether that worked.

    If it failed, one line in the log says why, and torch computes, more slowly.

    Args:
        cache: folder for built libraries; default: `infer-phases` in the user's cache folder.
    """
    try:
        require_native_kernels(cache)
    except NativeKernelsError as error:
        logger.warning("no native CPU kernels, torch computes instead (slower): %s", error)
    return _loaded


def require_native_kernels(cache: Path | None = None) -> None:
    """Load the native kernels, and build them first if needed. NativeKernelsError: that failed."""
    global _loaded
    if not _loaded:
        _load(cache)
        _register_shapes()
        _loaded = True


def _register_shapes() -> None:
    """Register the operators' result shapes, so that a model that uses them can be compiled."""
    fake = torch.library.register_fake
    fake("infer::rms_norm")(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
    fake("infer::fused_add_rms_norm")(lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
    fake("infer::rope")(lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)))
    fake("infer::gated_act")(lambda x, _: x.new_empty(x.shape[0], x.shape[1] // 2))
    fake("infer::linear")(lambda x, _, outputs, *__: x.new_empty(x.shape[0], outputs))
    fake("infer::gated_linear")(lambda x, _, size, *__: x.new_empty(x.shape[0], size))
    fake("infer::grouped_linear")(
        lambda x, _, __, outputs, ___, wide: x.new_empty(
            x.shape[0], outputs, dtype=torch.float32 if wide else x.dtype
        )
    )
    fake("infer::grouped_gated_linear")(lambda x, _, __, size, *___: x.new_empty(x.shape[0], size))
    fake("infer::grouped_rows")(
        lambda rows, _, __, inputs, dtype: rows.new_empty(len(rows), inputs, dtype=dtype)
    )
    fake("infer::attention")(lambda q, *_: q.new_empty(q.shape))


def _load(cache: Path | None) -> None:
    compiler = find_compiler()
    try:
        folder = (cache or default_cache()) / key_of_this_machine()
        library = folder / f"{_NAME}.so"
        if not _is_whole(library):  # a built library may be in a folder that this user cannot write
            folder.mkdir(parents=True, exist_ok=True)
            # Servers that start together build once. The lock is released when its process ends in any way.
            with FileLock(folder / "lock"):
                if not _is_whole(library):
                    _build(compiler, library)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch's own
        torch.ops.infer.use_cores(CORES)
    except OSError as error:
        reason = error.__cause__ or error  # of a library that cannot be loaded, torch only says that much
        raise NativeKernelsError(str(reason).splitlines()[0]) from None


def find_compiler() -> list[str]:
    """Return the words of `$CXX`, or the C++ compiler on the path. NativeKernelsError: there is none."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or ""]
    if compiler == [""]:
        raise NativeKernelsError("there is no C++ compiler here; install g++")
    return compiler


def key_of_this_machine() -> str:
    """Return a hash of everything the library depends on: sources, flags, torch, compiler and processor."""
    parts = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    parts += [flag.encode() for flag in FLAGS]
    parts += [torch.__version__.encode(), _output(*find_compiler(), "--version"), _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """Return the processor's features, which -march=native uses: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    kinds = (b"model name", b"flags", b"CPU part", b"Features")
    return b"\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def compiler_version() -> str:
    """Return the first line of the C++ compiler's `--version`. NativeKernelsError: there is none, or it fails."""
    return _output(*find_compiler(), "--version").decode(errors="replace").partition("\n")[0]


def _output(*command: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeKernelsError(f"{command[0]} does not run: {error}") from None


def _checksum(library: Path) -> Path:
    """Return the path of the file with the library's checksum."""
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """Return whether a library exists and matches its checksum.

    Loading a truncated library would kill the process.
    """
    try:
        return _checksum(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except OSError:
        return False


def _build(compiler: list[str], library: Path) -> None:
    """Compile the sources, then move the complete library to its place."""
    from torch.utils import cpp_extension  # here, since it imports setuptools, which takes time

    logger.info("building native CPU kernels, once for this machine; this takes some seconds")
    started = time.perf_counter()
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    objects = [library.with_name(f"{source.stem}.o") for source in SOURCES]
    commands = [
        [*compiler, "-std=c++20", "-fPIC", *FLAGS, *includes, "-c", str(source), "-o", str(target)]
        for source, target in zip(SOURCES, objects, strict=True)
    ]
    at_once = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)  # as torch's own builder
    try:
        _run_all(commands, at_once)
    except NativeKernelsError as error:
        if "Killed" not in str(error):
            raise
        _run_all(commands, 1)  # each takes 0.7 GB, and several were too much
    unfinished = library.with_suffix(".unfinished")
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries = ["-lc10", "-ltorch_cpu"]
    _run_all([[*compiler, "-shared", *map(str, objects), *folders, *libraries, "-o", str(unfinished)]], 1)
    _checksum(library).write_text(hashlib.sha256(unfinished.read_bytes()).hexdigest())
    unfinished.replace(library)
    for path in objects:
        path.unlink()
    logger.info("built native CPU kernels in %.0f s: %s", time.perf_counter() - started, library)


def _run_all(commands: list[list[str]], at_once: int) -> None:
    """Run commands, so many at once. NativeKernelsError: a command failed; the message has its first error line."""
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        ended = list(pool.map(functools.partial(subprocess.run, capture_output=True, text=True), commands))
    for process in ended:
        if process.returncode != 0:
            said = process.stderr.splitlines()
            lines = [line for line in said if "error" in line.lower()] or said
            raise NativeKernelsError(
                f"building them failed: {lines[0] if lines else 'the compiler says nothing'}"
            )
