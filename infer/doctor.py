"""`infer doctor`: one screen that says what this machine can do, and what is missing. Bug reports ask for it.

A line that begins with `~` names something that makes a server slower. A line that begins with `!` names something
that may keep a server from starting. Keys and the name of the user's home folder are not shown.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement

from benchmarks.environment import cpu_name
from common.devices.resolve import resolve_dtype
from common.models.fetch import FETCHABLE, is_fetched
from common.models.registry import zoo_names
from common.server.options import ENV_PREFIX, UsageError, read_options, settings_for, unknown_variables
from common.startup.control_groups import cpu_quota, limit_threads
from common.startup.memory import format_bytes, free_memory
from common.startup.phases import find_phase, phase_names
from kernels import native
from kernels.cache_folder import default_cache
from kernels.dispatch import kernels_on

DISTRIBUTION = "infer-phases"
CPU = torch.device("cpu")

#: Instructions that decide how fast a CPU multiplies matrices, as `torch.cpu.get_capabilities` calls them.
INSTRUCTIONS = (
    "avx2",
    "avx512_f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "bf16",
    "i8mm",
    "sve",
)

#: Bits of a weight in the commonest GGUF files (`Q4_K_M`): most weights have 4.5, some 6.6.
MIXED_BITS = 4.9
#: The share of the free memory that is left for weights beside keys, values and activations.
WEIGHTS_SHARE = 0.8

Mark = Literal[" ", "~", "!"]  # nothing wrong, slower than need be or ignored, a server may not start


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    mark: Mark = " "

    def __str__(self) -> str:
        first = f"{self.mark} {self.name:<10} "
        text = self.text.replace(os.path.expanduser("~"), "~")
        return textwrap.fill(
            text, 110, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
        )


def main(argv: Sequence[str]) -> int:
    """Print the findings. Returns 1 if one of them is marked `!`, otherwise 0."""
    argparse.ArgumentParser(
        prog="infer doctor",
        description="Says what this machine can do, and what is missing. Builds the native kernels, if they are "
        "not built yet. ~ marks what makes a server slower or is ignored, ! what keeps it from starting.",
    ).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    marks = set()
    for finding in findings():
        print(finding, flush=True)
        marks.add(finding.mark)
    return int("!" in marks)


def findings() -> Iterator[Finding]:
    """Examine the machine. Yields a line of the report for each thing examined."""
    yield installed()
    yield Finding("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield torch_build()
    yield Finding("processor", processor())
    yield compiler()
    engine = options()
    yield engine[1]
    yield native_kernels(wanted=engine[0])
    yield gpu()
    yield Finding("memory", memory())
    yield cache()
    yield Finding("models", models())
    yield Finding("extras", extras())


def installed() -> Finding:
    """Check the installed package and its requirements, and that no other package has modules of the same names."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return Finding("infer", f"{DISTRIBUTION} is not installed here: pip install {DISTRIBUTION}", "!")
    if wrong := unmet():
        return Finding("infer", f"{version}, but it requires {', '.join(wrong)}", "!")
    owners = importlib.metadata.packages_distributions()
    shared = {
        f"{module} (of {owner})"
        for module, names in owners.items()
        if DISTRIBUTION in names
        for owner in names
        if owner != DISTRIBUTION
    }
    if shared:
        return Finding(
            "infer", f"{version}, but another package has a module of the same name: {', '.join(shared)}", "!"
        )
    return Finding("infer", version)


def unmet(extra: str = "") -> list[str]:
    """Return the packages of an extra that are not installed in the version that is required.

    Args:
        extra: the name of the extra; empty: the packages that are always required.
    """
    wrong = []
    for requirement in map(Requirement, importlib.metadata.requires(DISTRIBUTION) or ()):
        marker = requirement.marker
        if marker is None:
            applies = not extra
        else:
            applies = marker.evaluate({"extra": extra}) and not (extra and marker.evaluate({"extra": ""}))
        if not applies:
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(wanted)
        else:
            if not requirement.specifier.contains(found, prereleases=True):
                wrong.append(f"{wanted}, not {found}")
    return wrong


def torch_build() -> Finding:
    """Report torch's version, and its threads."""
    limit_threads()
    text = f"{torch.__version__}; {torch.get_num_threads()} threads compute"
    if (number := os.environ.get("OMP_NUM_THREADS")) is not None:
        text += f" (OMP_NUM_THREADS={number})"
    if (quota := cpu_quota()) is not None:
        text += f", quota {quota:g} CPUs"
    return Finding("torch", text)


def processor() -> str:
    """Return the processor's name, its cores and instructions, and the type that `--dtype auto` takes on it."""
    found = torch.cpu.get_capabilities()
    names = (
        " ".join(name for name in INSTRUCTIONS if found.get(name)) or "no instructions for matrix products"
    )
    auto = str(resolve_dtype("auto", torch.bfloat16, CPU)).removeprefix("torch.")
    return f"{cpu_name()}, {psutil.cpu_count()} cores; {names}; --dtype auto serves bfloat16 models in {auto}"


def compiler() -> Finding:
    """Report the C++ compiler."""
    try:
        return Finding("compiler", native.compiler_version())
    except native.NativeKernelsError as error:
        return Finding("compiler", str(error), "~")


def options() -> tuple[bool, Finding]:
    """Return whether the environment's options allow native kernels, and the finding that lists the options.

    If the options are invalid, the finding has the error, and native kernels count as allowed.
    """
    package = find_phase(phase_names()[-1])
    names = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    try:
        _, config = read_options(package, [])
    except UsageError as error:
        return True, Finding("options", f"in the environment: {error}", "!")
    # Only the engine's options are shown with their values: the server's may be secret.
    fields = type(config).model_fields
    shown = (
        f"{name}={os.environ[name]}" if name.removeprefix(ENV_PREFIX).lower() in fields else name
        for name in names
    )
    ignored = unknown_variables(settings_for(package))
    text = "; ".join([f"in the environment: {', '.join(shown) or 'none'}", *ignored])
    return config.native_kernels, Finding("options", text, "~" if ignored else " ")


def native_kernels(*, wanted: bool) -> Finding:
    """Load the native kernels, and build them first if needed.

    Args:
        wanted: whether the options allow them.
    """
    slower = "torch computes on the CPU, which is slower"
    if not wanted:
        return Finding(
            "kernels", f"{slower}: {ENV_PREFIX}NATIVE_KERNELS switches the native kernels off", "~"
        )
    try:
        native.require_native_kernels()
    except native.NativeKernelsError as error:
        return Finding("kernels", f"{slower}: {error}", "~")
    types = [
        str(dtype).removeprefix("torch.")
        for dtype in (torch.float32, torch.bfloat16)
        if native.has_products(dtype)
    ]
    if not types:
        return Finding("kernels", "native, but products and attention are torch's on this processor", "~")
    return Finding(
        "kernels", f"native, in {default_cache()}; products and attention in {' and '.join(types)}"
    )


def gpu() -> Finding:
    """Report the first GPU that torch finds, its free memory, and the kernels that it runs."""
    if not torch.cuda.is_available():
        why = "this torch is a build for CPUs" if torch.version.cuda is None else "torch finds none"
        return Finding("GPU", f"none: {why}")
    device = torch.device("cuda")
    text = f"{torch.cuda.get_device_name()}, {format_bytes(free_memory(device))} free"
    if kernels_on(device) == "triton":
        return Finding("GPU", f"{text}; Triton kernels")
    return Finding("GPU", f"{text}; torch computes, since Triton is not installed", "~")


def memory() -> str:
    """Return as text the memory that a server may take, the machine's memory, and how large a model may be."""
    free = free_memory(CPU)
    sizes = " or ".join(
        f"{WEIGHTS_SHARE * free * 8 / bits / 1e9:.1f} billion at {bits} bits" for bits in (16, MIXED_BITS)
    )
    total = format_bytes(psutil.virtual_memory().total)
    return f"{format_bytes(free)} free of {total}: room for about {sizes} a weight"


def cache() -> Finding:
    """Report the folder that keeps built kernels and fetched models."""
    try:
        folder = default_cache()
    except FileNotFoundError as error:
        return Finding("cache", str(error), "~")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return Finding(
            "cache", f"{folder}: {existing} cannot be written; XDG_CACHE_HOME names another folder", "~"
        )
    free = format_bytes(shutil.disk_usage(existing).free)
    return Finding("cache", f"{folder}, {'' if folder.exists() else 'not made yet, '}{free} free on its disk")


def models() -> str:
    """Return as text the names of the models that are at hand, and of models that can be fetched."""
    at_hand = [*zoo_names(), *(name for name, model in FETCHABLE.items() if is_fetched(model))]
    others = [name for name in FETCHABLE if name not in at_hand]
    return ", ".join(at_hand) + (f"; `infer fetch` downloads {' or '.join(others)}" if others else "")


def extras() -> str:
    """Return as text the extras whose packages are installed, and how many packages each other extra lacks."""
    try:
        names = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
    missing = {name: unmet(name) for name in names}
    complete = ", ".join(name for name, lacks in missing.items() if not lacks)
    lacking = (f"{name} lacks {len(lacks)} packages" for name, lacks in missing.items() if lacks)
    return "; ".join(filter(None, (complete, ", ".join(lacking))))
