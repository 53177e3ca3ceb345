"""The C++ kernels for CPUs: built once a machine, loaded into the process, or done without.

Sources are the `.cpp` files beside this module. The first process that wants them builds them, which takes a
compiler and some seconds; the library is kept outside the tree, under a name that changes with everything that it
depends on, and later processes only load it. Without a compiler, or if anything else goes wrong, every operation is
computed by torch: slower, and otherwise the same.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from filelock import FileLock

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))

FLAGS = (
    "-O3",
    "-march=native",
    # Without it `at::parallel_for` is a plain loop. Only compiling takes it, not linking: the process has torch's
    # libgomp, and a second one would bring a second pool of workers.
    "-fopenmp",
    # Nobody reads errno or the exception flags, and loops that might set them are not vectorised. Not
    # -ffast-math: that makes NaN and infinity meaningless, and loading it changes the arithmetic of the process.
    "-fno-math-errno",
    "-fno-trapping-math",
    # GCC prefers half of what x86 has at its widest, from times when that made processors clock down.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)

_NAME = "infer_native"


class NativeKernelsError(Exception):
    """The native kernels cannot be had: why, in one line."""


# Operators are registered with torch, so it is a process that has them, not an engine.
_loaded = False


def is_loaded() -> bool:
    """Whether this process has the native kernels."""
    return _loaded


@functools.cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether the kernels that are made of matrix products work here: those for linear layers and attention.

    They use torch's micro kernels, which not every processor has. Tried once, since it cannot be told otherwise.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator).to(dtype) for rows in (80, 3))
    try:
        y = torch.ops.infer.linear(x, torch.ops.infer.pack_linear(weight), 80, None)
    except RuntimeError:
        return False
    return torch.allclose(y.double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-2)


def load_native_kernels(cache: Path | None = None) -> bool:
    """Load the native kernels, building them first if this machine has not yet; whether that worked.

    Without them everything works, more slowly; one line in the log says why.

    Args:
        cache: where libraries are kept; default: `infer-phases` in the user's cache folder.
    """
    global _loaded
    if not _loaded:
        try:
            _load(cache or default_cache())
        except NativeKernelsError as error:
            logger.warning("no native CPU kernels, torch computes instead (slower): %s", error)
        else:
            _register_shapes()
            _loaded = True
    return _loaded


def _register_shapes() -> None:
    """Tell compilers what the operators return, so that a model can be captured with them in it."""
    fake = torch.library.register_fake
    fake("infer::rms_norm")(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
    fake("infer::fused_add_rms_norm")(lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
    fake("infer::rope")(lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)))
    fake("infer::gated_act")(lambda x, _: x.new_empty(x.shape[0], x.shape[1] // 2))
    fake("infer::linear")(lambda x, _, outputs, __: x.new_empty(x.shape[0], outputs))
    fake("infer::gated_linear")(lambda x, _, size, *__: x.new_empty(x.shape[0], size))
    fake("infer::attention")(lambda q, *_: q.new_empty(q.shape))


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/infer-phases`, by default `~/.cache/infer-phases`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer-phases"


def _load(cache: Path) -> None:
    compiler = _compiler()
    folder = cache / key_of_this_machine()
    library = folder / f"{_NAME}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Servers that start together build once. The lock goes with the process that holds it, however that ends.
        with FileLock(folder / "lock"):
            if not _is_whole(library):
                _build(compiler, library)
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch's own
        if (copies := count_libgomps()) > 1:
            logger.warning("%d copies of libgomp in one process: every pass takes longer", copies)
    except OSError as error:
        raise NativeKernelsError(str(error).splitlines()[0]) from None


def _compiler() -> str:
    """`$CXX`, or the C++ compiler on the path."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise NativeKernelsError("there is no C++ compiler here; install g++ or clang++")
    return compiler


def key_of_this_machine() -> str:
    """A name for what the library depends on: sources, flags, torch, compiler and processor."""
    parts = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    parts += [flag.encode() for flag in FLAGS]
    parts += [torch.__version__.encode(), _output(_compiler(), "--version"), _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """What -march=native looks at: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    kinds = (b"model name", b"flags", b"CPU part", b"Features")
    return b"\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _output(*command: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeKernelsError(f"{command[0]} does not run: {error}") from None


def _checksum(library: Path) -> Path:
    """The file that holds the library's checksum."""
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """Whether a library is there, just as it was built. To load one that was cut off would kill the process."""
    try:
        return _checksum(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except OSError:
        return False


def _build(compiler: str, library: Path) -> None:
    """Compile the sources and put the library in its place, whole or not at all."""
    from torch.utils import cpp_extension  # imports setuptools, for which a start that only loads has no use

    logger.info("building native CPU kernels, once for this machine; this takes some seconds")
    started = time.perf_counter()
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    objects = [library.with_name(f"{source.stem}.o") for source in SOURCES]
    _run_all(
        [compiler, "-std=c++20", "-fPIC", *FLAGS, *includes, "-c", str(source), "-o", str(target)]
        for source, target in zip(SOURCES, objects, strict=True)
    )
    unfinished = library.with_suffix(".unfinished")
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries = ["-lc10", "-ltorch_cpu"]
    _run_all([[compiler, "-shared", *map(str, objects), *folders, *libraries, "-o", str(unfinished)]])
    _checksum(library).write_text(hashlib.sha256(unfinished.read_bytes()).hexdigest())
    unfinished.replace(library)
    for path in objects:
        path.unlink()
    logger.info("built native CPU kernels in %.0f s: %s", time.perf_counter() - started, library)


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run commands side by side. NativeKernelsError: one failed; its first line of complaint."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    complaints = [process.communicate()[1] for process in running]
    for process, complaint in zip(running, complaints, strict=True):
        if process.returncode != 0:
            lines = [
                line for line in complaint.splitlines() if "error" in line.lower()
            ] or complaint.splitlines()
            raise NativeKernelsError(
                f"building them failed: {lines[0] if lines else 'the compiler says nothing'}"
            )


def count_libgomps() -> int:
    """How many copies of libgomp this process has, where that can be told (Linux): each has workers of its own."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return 1
    return len({line.split()[-1] for line in maps if "libgomp" in line})


if __name__ == "__main__":  # `make` builds them ahead of the first server
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    load_native_kernels()
