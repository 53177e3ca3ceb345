"""The stages of the GPU run, the most valuable first, and their sizes on a GPU and on a CPU.

This module imports the standard library only: the run must start on machines that lack packages, and list what is
missing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

STAGE_S = 460.0  # time limit for all programs of a stage together

#: Environment variables of the run on a CPU: Triton's interpreter runs its kernels, and native CPU kernels are off.
INTERPRETED = {"INFER_INTERPRET_TRITON": "true", "INFER_NATIVE_KERNELS": "false"}


@dataclass(frozen=True, slots=True)
class Program:
    """A program that a stage runs, as `python -m WORDS`.

    Attributes:
        name: names the log file, and the program's row in the table.
        words: the module and its arguments; `{out}` is the folder for results.
        seconds: the program's time limit; the stage's limit applies, too.
        interpreted: whether it runs with Triton's interpreter if there is no GPU.
    """

    name: str
    words: str
    seconds: float = STAGE_S
    interpreted: bool = True


@dataclass(frozen=True, slots=True)
class Stage:
    """Programs that run one after the other, whether or not the one before has succeeded."""

    title: str
    programs: tuple[Program, ...]


TITLES = {
    1: "kernels, bits and phases",
    2: "decode steps",
    3: "attention",
    4: "offline",
    5: "servers",
    6: "timelines",
}
MODELS = ("llama-3.2-1b", "qwen3-0.6b", "llama-3.2-3b")
TESTS = "tests/kernels tests/gpu tests/phase9_pipelined tests/common/test_streams.py"
#: Eight processes run the tests: most tests wait for a compiler, and machines with a GPU have cores for several.
WORKERS = "-n 8 --dist worksteal" if importlib.util.find_spec("xdist") else ""
PYTEST = "pytest -v -p no:cacheprovider --continue-on-collection-errors --durations=10"


def stages(*, toy: bool) -> dict[int, Stage]:
    """Return all stages by number. If `toy`, sizes are small enough for a CPU."""
    return _toy() if toy else _full()


def _full() -> dict[int, Stage]:
    steps = [
        Program(f"steps_{model}", f"{_micro('gpu_steps')} --model dummy:{model}", 180) for model in MODELS
    ]
    batching = [
        Program(f"transformers_{model}", f"{_micro('gpu_transformers')} --model dummy:{model}", 80)
        for model in MODELS[:2]
    ]
    compare = "--model dummy:llama-3.2-1b --workload mixed --repeats 1 --rate table --out {out}/servers"
    programs: dict[int, tuple[Program, ...]] = {
        1: (Program("tests", f"{PYTEST} {WORKERS} -m gpu {TESTS}"),),
        2: (steps[0], batching[0], steps[1], batching[1], steps[2]),
        3: (Program("attention", _micro("gpu_attention")),),
        4: (Program("offline", _micro("offline")),),
        5: (Program("compare", f"benchmarks compare {compare}"),),
        6: (Program("timeline", f"{_micro('gpu_timeline')} --traces {{out}}/traces"),),
    }
    return {number: Stage(TITLES[number], each) for number, each in programs.items()}


def _toy() -> dict[int, Stage]:
    model = "--model dummy:llama-1m --dtype float32"
    # 16 tokens: at two tokens a step, these are at least seven steps before the last.
    short = f"{model} --prompt-tokens 8 --new-tokens 16 --sequences 2"
    single = f"{model} --prompt-tokens 8 --new-tokens 10 --sequences 1"
    attention = "--models dummy:llama-1m --dtype float32 --sequences 2 --contexts 40"
    offline = f"{model} --phases 9 5 --requests 4 --fewest 4 --most 8 --seats 3 --seconds 60"
    compare = "--model zoo:llama-tiny --workload mixed --quick --repeats 1 --rate table --phases 4,9"
    programs = {
        1: Program("tests", f"{PYTEST} -m 'not gpu' -k 'failed_pass and phase9' tests/gpu"),
        2: Program("steps_llama-1m", f"{_micro('gpu_steps')} {short}"),
        3: Program("attention", f"{_micro('gpu_attention')} {attention}"),
        4: Program("offline", f"{_micro('offline')} {offline}"),
        5: Program("compare", f"benchmarks compare {compare} --out {{out}}/servers", interpreted=False),
        6: Program("timeline", f"{_micro('gpu_timeline')} {single} --traces {{out}}/traces"),
    }
    found = {number: Stage(TITLES[number], (program,)) for number, program in programs.items()}
    beside = Program("transformers_llama-1m", f"{_micro('gpu_transformers')} {short}")
    found[2] = Stage(TITLES[2], (programs[2], beside))
    return found


def _micro(name: str) -> str:
    return f"benchmarks micro {name} --out {{out}}"
