"""Kernels that break the rule on purpose: the tests that compare bits must notice each of them.

A mutant is a copy of the C++ sources with a few words replaced, as somebody might who wants to be faster. Its
library is built and loaded in a process of its own, which runs those tests on it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here"),
]

ROOT = Path(__file__).parents[2]
NATIVE = "tests/kernels/test_native.py::"
MEASURED = "tests/kernels/test_batch_invariance.py::test_native_kernels_are_batch_invariant"
NORMS = NATIVE + "test_a_row_has_the_same_bits_wherever_it_lies"
LINEAR = NATIVE + "test_a_linear_layers_row_has_the_same_bits_beside_others"
THREADS = NATIVE + "test_bits_do_not_depend_on_the_number_of_threads"
CHUNKS = NATIVE + "test_a_token_has_the_same_bits_decoded_or_prefilled_in_any_chunk"
SERVED = (  # by a model with windows, in chunks
    "tests/identity/test_bits.py::test_a_sequence_has_the_same_bits_alone_and_under_load"
    "[zoo:gemma3-tiny-float32-phase7_chunked-{'prefill_chunk_size': 7}]"
)


@dataclass(frozen=True)
class Mutant:
    """What is replaced in one source, and who must notice.

    Attributes:
        replaced: what stands there once, and what comes in its place.
        caught_by: tests, each of which fails for one of its parameters at least.
        spared: tests that pass, because what they compare is the same.
    """

    source: str
    replaced: dict[str, str]
    caught_by: tuple[str, ...]
    spared: tuple[str, ...] = ()


MUTANTS = {
    "a tile of columns begins at the window's edge": Mutant(
        "attention.cpp",
        {"first_seen / kColumns * kColumns": "first_seen"},
        caught_by=(CHUNKS,),
        spared=(MEASURED, LINEAR),
    ),
    "the library's exp where a whole tile is visible": Mutant(
        "attention.cpp",
        {
            "for (int64_t i = 0; i < width; ++i) scores[i] = exp_of_nonpositive(scores[i] * scale - best);": (
                "const bool whole = scores[0] != kHidden && scores[width - 1] != kHidden;"
                "for (int64_t i = 0; i < width; ++i) scores[i] = whole ? std::exp(scores[i] * scale - best) : "
                "exp_of_nonpositive(scores[i] * scale - best);"
            )
        },
        caught_by=(CHUNKS,),
        spared=(LINEAR, NORMS),
    ),
    "every thread adds up a part of a norm's squares": Mutant(
        "rms_norm.cpp",
        {
            "squares.total()": """[&] {
              const int64_t threads = at::get_num_threads();
              float sum = 0;
              for (int64_t t = 0; t < threads; ++t) {
                const int64_t first = columns * t / threads;
                OrderedSum part;
                part.add(columns * (t + 1) / threads - first, [&](int64_t i) {
                  return to_float(x[first + i]) * to_float(x[first + i]);
                });
                sum += part.total();
              }
              return sum;
            }()"""
        },
        caught_by=(THREADS,),
        spared=(NORMS, SERVED),  # in one thread
    ),
    "a norm's sum begins where memory is aligned": Mutant(
        "rms_norm.cpp",
        {
            "squares.total()": """[&] {
              const int64_t unaligned = int64_t(reinterpret_cast<uintptr_t>(x) % 64 / sizeof(T));
              OrderedSum turned;
              turned.add(columns, [&](int64_t i) {
                const float value = to_float(x[(i + unaligned) % columns]);
                return value * value;
              });
              return turned.total();
            }()"""
        },
        caught_by=(NORMS,),
        spared=(LINEAR, CHUNKS),
    ),
    "rows that are fewer than threads have their sums shared out": Mutant(
        "linear.cpp",
        {
            'library.impl("linear", &linear);': """using at::Tensor;
            library.impl("linear", [](
                const Tensor& x, const Tensor& packed, int64_t outputs, const std::optional<Tensor>& bias) {
              if (x.size(0) >= at::get_num_threads()) return linear(x, packed, outputs, bias);
              const int64_t groups = packed.size(1) / 2, inputs = groups * packed.size(3);
              const auto rest = packed.narrow(1, groups, packed.size(1) - groups).contiguous();
              return linear(x.narrow(1, 0, inputs), packed.narrow(1, 0, groups).contiguous(), outputs, bias)
                  .add(linear(x.narrow(1, inputs, x.size(1) - inputs), rest, outputs, std::nullopt));
            });"""
        },
        caught_by=(THREADS, MEASURED),
        spared=(SERVED,),  # in one thread
    ),
    "one row goes another way than several": Mutant(
        "linear.cpp",
        {
            'library.impl("linear", &linear);': """using at::Tensor;
            library.impl("linear", [](
                const Tensor& x, const Tensor& packed, int64_t outputs, const std::optional<Tensor>& bias) {
              if (x.size(0) != 1) return linear(x, packed, outputs, bias);
              auto out = at::empty({1, outputs}, x.options());
              const int64_t inputs = x.size(1), group = packed.size(3);
              with_product_type(x, [&](auto element) {
                using T = decltype(element);
                const T *row = x.const_data_ptr<T>(), *weights = packed.const_data_ptr<T>();
                for (int64_t output = 0; output < outputs; ++output) {
                  const T* panel = weights + output / kPanel * inputs * kPanel + output % kPanel * group;
                  OrderedSum sum;  // sixteen running sums, where the product has one
                  sum.add(inputs, [&](int64_t k) {
                    return to_float(row[k]) * to_float(panel[k / group * group * kPanel + k % group]);
                  });
                  const float added = bias ? to_float(bias->const_data_ptr<T>()[output]) : 0.0f;
                  out.mutable_data_ptr<T>()[output] = from_float<T>(sum.total() + added);
                }
              });
              return out;
            });"""
        },
        caught_by=(LINEAR, MEASURED),
        spared=(NORMS,),
    ),
}

RUN = """
import sys
from pathlib import Path
import pytest, torch
from kernels import native
sources, cache, *arguments = sys.argv[1:]
native.SOURCES, native.HEADERS = (sorted(Path(sources).glob(kind)) for kind in ("*.cpp", "*.h"))
assert native.load_native_kernels(Path(cache))
sys.exit(pytest.main(arguments))
"""

# Compiles what it has not compiled before: a mutant differs from the rest in one source.
COMPILER = """#!{python}
import hashlib, pathlib, shutil, subprocess, sys
arguments = sys.argv[1:]
if "-c" in arguments:
    source, target = (pathlib.Path(arguments[arguments.index(flag) + 1]) for flag in ("-c", "-o"))
    kept = pathlib.Path({kept!r}) / hashlib.sha256(source.read_bytes()).hexdigest()
    if not kept.exists():
        done = subprocess.run([{compiler!r}, *arguments])
        if done.returncode:
            sys.exit(done.returncode)
        shutil.copy(target, kept)
    shutil.copy(kept, target)
else:
    sys.exit(subprocess.run([{compiler!r}, *arguments]).returncode)
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    script = folder / "c++"
    real = os.environ.get("CXX") or shutil.which("c++")
    script.write_text(COMPILER.format(python=sys.executable, kept=str(folder), compiler=real))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return script


def failures(sources: Path, compiler: Path, tests: tuple[str, ...]) -> set[str]:
    """Those of the tests that fail with a library of these sources, without their parameters."""
    process = subprocess.run(
        [
            *[sys.executable, "-c", RUN, str(sources), str(sources.parent / "cache")],
            *["-p", "no:cacheprovider", "-n", "0", "-q", "-rf", "--tb=no", *tests],
        ],
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
    everything = (MEASURED, NORMS, LINEAR, THREADS, CHUNKS, SERVED)
    assert failures(copy_of_sources(tmp_path), compiler, everything) == set()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path, compiler: Path) -> None:
    mutant = MUTANTS[name]
    sources = copy_of_sources(tmp_path)
    path = sources / mutant.source
    code = path.read_text()
    for old, new in mutant.replaced.items():
        assert code.count(old) == 1, f"{mutant.source} has {old!r} {code.count(old)} times"
        code = code.replace(old, new)
    path.write_text(code)
    failed = failures(sources, compiler, mutant.caught_by + mutant.spared)
    assert failed == {test.partition("[")[0] for test in mutant.caught_by}
