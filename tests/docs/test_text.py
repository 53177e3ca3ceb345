"""Pages and README agree with the code: commands, examples and named tests exist, and memory is as they say."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from benchmarks.workloads import CHAT_WORKLOADS, WORKLOADS
from common.models.config import kv_bytes
from common.models.registry import open_checkpoint, weight_bytes
from common.startup.memory import format_bytes
from docs.building import code
from tests.docs.support import ROOT

TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_pages_name_exist(path: Path) -> None:
    """Pages write `tests/test_file.py::test_one`, or `tests/test_file.py`: `test_one`, `test_other`."""
    named = r"`(tests/[\w/]+\.py)(?:::(\w+))?`((?:[:,] `test_\w+`)*)"
    for module, name, names in re.findall(named, path.read_text(encoding="utf-8")):
        defined = (ROOT / module).read_text(encoding="utf-8")
        for each in [name, *re.findall(r"\w+", names)]:
            assert not each or re.search(rf"^(async def|def|class) {each}\b", defined, re.MULTILINE), each


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([a-z][a-z -]*):", makefile, re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE):
            assert target in targets, f"make {target}"
        for phase in re.findall(r"PHASE=(\d+)", block):
            assert list(ROOT.glob(f"phase{phase}_*/__main__.py")), f"PHASE={phase}"
        for module in re.findall(r"python -m ([\w.]+)", block):
            assert importlib.util.find_spec(module) is not None, module
        for script in re.findall(r"pytest (docs/\S+)", block):
            assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_examples_are_python_and_their_imports_work(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_references_leave_no_module_out() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    calls = re.findall(r"reference\((.*?)\)", text)
    packages = [name for call in calls for name in re.findall(r'"([\w.]+)"', call)]
    listed = [name for package in packages for name in code.modules_of(package)]
    assert len(listed) == len(set(listed))
    # Modules are found, not imported: those for a peer's environment cannot be imported here.
    assert all(importlib.util.find_spec(name) for name in listed)
    for package in {name.split(".")[0] for name in packages}:
        assert set(code.modules_of(package)) == {name for name in listed if name.split(".")[0] == package}


# ---------------------------------------------------------------------- numbers


#: Models of the tables, and their published numbers of parameters. A tied embedding counts once.
MODELS = {
    "Llama 3.2 1B": ("dummy:llama-3.2-1b", 1_235_814_400),
    "Llama 3.2 3B": ("dummy:llama-3.2-3b", 3_212_749_824),
    "Qwen3 1.7B": ("dummy:qwen3-1.7b", 1_720_574_976),
    "Qwen3 4B": ("dummy:qwen3-4b", 4_022_468_096),
    "Gemma 3 1B": ("dummy:gemma-3-1b", 999_885_952),
}


def table(page: str, head: str) -> list[list[str]]:
    """Return the rows of the page's table whose first heading is `head`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = text.partition(f"\n| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert lines
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def test_memory_table_is_kv_bytes() -> None:
    rows = table("kv-memory.md", "model")
    assert [row[0] for row in rows] == list(MODELS)
    for name, *sizes, per_token, weights, kv, total in rows:
        model, parameters = MODELS[name]
        config = open_checkpoint(model).config
        assert sizes == [str(each) for each in (config.num_layers, config.num_kv_heads, config.head_dim)]
        by_hand = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
        assert kv_bytes(config, 1, torch.bfloat16) == by_hand
        assert weight_bytes(config, torch.bfloat16) == 2 * parameters
        assert per_token == f"{by_hand / 1024:.0f} kB"
        assert weights == format_bytes(2 * parameters)
        assert kv == format_bytes(8 * 4096 * by_hand)
        assert total == format_bytes(8 * 4096 * by_hand + 2 * parameters)


def test_workloads_on_their_page_are_those_that_are_measured() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| .+ \|$", text, re.MULTILINE)
    workloads = {**WORKLOADS, **CHAT_WORKLOADS}
    assert rows == [(name, str(workload.requests)) for name, workload in workloads.items()]


def test_source_is_cut_out_whole() -> None:
    shown = code.source("phase4_static.scheduler.StaticScheduler.plan")
    assert shown.startswith('```python title="phase4_static/scheduler.py, line ')
    ast.parse(shown.split("\n", 1)[1].rsplit("```", 1)[0])
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        code.source("phase4_static.scheduler.StaticScheduler.no_such_method")
