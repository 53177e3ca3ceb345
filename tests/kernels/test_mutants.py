"""Kernels that break the rule on purpose: the tests that compare bits must notice each of them.

A mutant is a copy of the C++ sources with a few words replaced, as in a wrong optimization. Its library is built
and loaded in a process of its own, which runs these tests on it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here"),
]

ROOT = Path(__file__).parents[2]
NATIVE, INT8 = "tests/kernels/test_native.py::", "tests/kernels/test_int8.py::"
TESTS = {
    "MEASURED": "tests/kernels/test_batch_invariance.py::test_native_kernels_are_batch_invariant",
    "NORMS": NATIVE + "test_a_row_has_the_same_bits_wherever_it_lies",
    "LINEAR": NATIVE + "test_a_linear_layers_row_has_the_same_bits_beside_others",
    "INT8": INT8 + "test_a_row_has_the_same_bits_beside_others",
    "EXACT": INT8 + "test_products_are_those_of_float64",
    "KEPT": INT8 + "test_a_panel_that_a_thread_kept_is_no_other_layers",
    "THREADS": NATIVE + "test_bits_do_not_depend_on_the_number_of_threads",
    "CHUNKS": NATIVE + "test_a_token_has_the_same_bits_decoded_or_prefilled_in_any_chunk",
    # A model with windows, whose prompts are computed in chunks.
    "SERVED": (
        "tests/identity/test_bits.py::test_a_sequence_has_the_same_bits_alone_and_under_load"
        "[zoo:gemma3-tiny-bfloat16-phase7_chunked-{'prefill_chunk_size': 7}]"
    ),
}
#: For each mutant, by name: the words replaced in one source, and the tests that must fail.
MUTANTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())

CAPABILITIES = torch.cpu.get_capabilities()
#: The kind of processor that decides which loops for few rows of bfloat16 run.
PROCESSOR = (
    "tiles"
    if CAPABILITIES.get("amx_bf16")
    else "pairs"
    if CAPABILITIES.get("avx512_bf16") and CAPABILITIES.get("avx512_vbmi")
    else "plain"
)

# Runs each test up to its first failure.
RUN = """
import sys
from pathlib import Path
import pytest
from kernels import native
sources, cache, *tests = sys.argv[1:]
native.SOURCES, native.HEADERS = (sorted(Path(sources).glob(kind)) for kind in ("*.cpp", "*.h"))
assert native.load_native_kernels(Path(cache))
arguments = ["-p", "no:cacheprovider", "-n", "0", "-x", "-q", "-rf", "--tb=no"]
sys.exit(max(pytest.main([*arguments, test]) for test in tests))
"""

# A compiler with a cache: a mutant differs from the original in one source or header only.
COMPILER = """#!{python}
import hashlib, os, pathlib, shutil, subprocess, sys
arguments = sys.argv[1:]
if "-c" in arguments:
    source, target = (pathlib.Path(arguments[arguments.index(flag) + 1]) for flag in ("-c", "-o"))
    seen = [source, *sorted(source.parent.glob("*.h"))]
    kept = pathlib.Path({kept!r}) / hashlib.sha256(b"".join(map(pathlib.Path.read_bytes, seen))).hexdigest()
    if not kept.exists():
        done = subprocess.run([{compiler!r}, *arguments])
        if done.returncode:
            sys.exit(done.returncode)
        own = kept.with_name(f"{{kept.name}}.{{os.getpid()}}")
        shutil.copy(target, own)
        own.replace(kept)
    shutil.copy(kept, target)
else:
    sys.exit(subprocess.run([{compiler!r}, *arguments]).returncode)
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("compiler") / "c++"
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled"  # for all test workers
    folder.mkdir(exist_ok=True)
    real = os.environ.get("CXX") or shutil.which("c++")
    script.write_text(COMPILER.format(python=sys.executable, kept=str(folder), compiler=real))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return script


def failures(sources: Path, compiler: Path, tests: list[str]) -> set[str]:
    """Run tests with a library built from these sources. Returns the names of the tests that fail."""
    process = subprocess.run(
        [sys.executable, "-c", RUN, str(sources), str(sources.parent / "cache"), *tests],
        cwd=ROOT,
        env=os.environ | {"CXX": str(compiler), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode in (0, 1), process.stdout + process.stderr  # all passed, or some failed
    failed = set(re.findall(r"^FAILED ([\w/.]+::\w+)", process.stdout, re.MULTILINE))
    assert bool(failed) is bool(process.returncode), process.stdout
    return failed


def copy_of_sources(folder: Path) -> Path:
    sources = folder / "sources"
    sources.mkdir()
    for path in (*native.SOURCES, *native.HEADERS):
        shutil.copy(path, sources)
    return sources


def test_without_a_mutation_nothing_fails(tmp_path: Path, compiler: Path) -> None:
    """Tests that some mutant spares need no check here: they are known to pass in this setup."""
    spared = {test for mutant in MUTANTS.values() for test in mutant["spared"]}
    others = [TESTS[name] for name in sorted(TESTS.keys() - spared)]
    assert others
    assert failures(copy_of_sources(tmp_path), compiler, others) == set()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path, compiler: Path) -> None:
    mutant = MUTANTS[name]
    if mutant.get("processor", PROCESSOR) != PROCESSOR:
        pytest.skip("its code does not run on this processor")
    sources = copy_of_sources(tmp_path)
    path = sources / mutant["source"]
    code = path.read_text()
    assert code.count(mutant["from"]) == 1, (
        f"{path.name} has {mutant['from']!r} {code.count(mutant['from'])} times"
    )
    path.write_text(code.replace(mutant["from"], mutant["to"]))
    caught_by, spared = ([TESTS[test] for test in mutant[kind]] for kind in ("caught_by", "spared"))
    failed = failures(sources, compiler, caught_by + spared)
    assert failed == {test.partition("[")[0] for test in caught_by}
