"""Pages and README agree with the code: commands and named tests exist, and the numbers are right."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

import phase5_continuous
import phase6_paged
import phase7_chunked
from benchmarks.servers import Setup, phase_target
from benchmarks.workloads import CHAT_WORKLOADS, WORKLOADS
from cluster.policy import Load
from cluster.scaling import TARGET, replicas_for
from common.engine.reference import ContiguousCache
from common.engine.scheduling import PrefillChunk, StepPlan
from common.engine.telemetry import Telemetry
from common.hosting import calls as engine_calls
from common.kv import KVShape, Span
from common.models.config import kv_bytes
from common.models.layers import TokenBatch
from common.models.registry import load_model, open_checkpoint, weight_bytes
from common.request import Request, SamplingParams
from common.server.page import live_view
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


def test_the_flat_pass_on_its_page_is_one_that_a_runner_makes() -> None:
    text = (ROOT / "docs" / "flat-pass.md").read_text(encoding="utf-8")
    shown = {
        name: [int(number) for number in numbers.split(",")]
        for name, numbers in re.findall(
            r"^(token_ids|positions|logit_rows) +\[([\d ,]+)\]", text, re.MULTILINE
        )
    }
    config = phase7_chunked.Config(max_seq_len=256)
    pool = phase7_chunked.build_engine.pool(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    requests = []
    for name, held, new in (("A", 131, [812]), ("B", 7, [44]), ("C", 0, [17, 5, 90])):
        request = Request(name, [0] * held + new, SamplingParams())
        assert pool.reserve(request, held + len(new))
        assert request.slot is not None
        if held:
            pool.advance([Span.exact(request.slot, 0, held)])
        requests.append(request)
    plan = StepPlan(decode=tuple(requests[:2]), prefill=(PrefillChunk(requests[2], 0, 3),))
    [forward_pass] = phase7_chunked.Runner(config, None, pool, Telemetry()).passes(plan)
    shares = forward_pass.shares
    assert shown["token_ids"] == [token for share in shares for token in share.token_ids]
    assert shown["positions"] == pool.view([share.span for share in shares]).positions.tolist()
    ends = itertools.accumulate(len(share.token_ids) for share in shares)
    assert shown["logit_rows"] == [end - 1 for end in ends]


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


@pytest.mark.parametrize(
    ("page", "tokens"),
    [("phases/static.md", 8 * 4096), ("phases/continuous.md", 8 * 4096), ("phases/paged.md", 16)],
)
def test_sizes_in_sentences_are_kv_bytes(page: str, tokens: int) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    said = re.findall(rf"([\d.]+ [GM]B) for\s+({'|'.join(MODELS)})", text)
    assert said
    for size, name in said:
        config = open_checkpoint(MODELS[name][0]).config
        assert size == format_bytes(kv_bytes(config, tokens, torch.bfloat16)), name


def test_every_weight_is_in_the_table_of_shapes_once() -> None:
    model, parameters = MODELS["Llama 3.2 1B"]
    rows = {row[0].strip("`"): row for row in table("phases/model.md", "call")}
    factors = [
        row[-1].replace(",", "").split(" × ") for name, row in rows.items() if row[-1] and name != "embed"
    ]
    assert sum(math.prod(int(factor) for factor in each) for each in factors) == parameters
    assert rows["embed"][-1] == rows["lm_head"][-1]  # the same matrix
    config = open_checkpoint(model).config
    assert rows["lm_head"][-2] == f"`[3, {config.vocab_size}]`"


def test_the_shapes_on_the_page_are_those_of_a_pass() -> None:
    """Linear layers return the shapes that the column *here* says."""
    expected = {row[0].strip("`"): row[3] for row in table("phases/model.md", "call")}
    checkpoint = open_checkpoint("zoo:llama-tiny")
    model = load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32, max_positions=256)
    modules = {"lm_head": model.lm_head, **dict(model.layers[0].named_modules())}
    linear = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "lm_head")
    found: dict[str, str] = {}

    def note(name: str, _module: object, _inputs: object, result: torch.Tensor) -> None:
        found[name] = f"`{list(result.shape)}`"

    for name in linear:
        modules[name].register_forward_hook(functools.partial(note, name))
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, 256, 3)
    for name in "ABC":
        cache.reserve(Request(name, [0], SamplingParams()), 256)
    cache.advance([Span.exact(0, 0, 131), Span.exact(1, 0, 7)])
    view = cache.view([Span.exact(0, 131, 132), Span.exact(1, 7, 8), Span.exact(2, 0, 3)])
    model(TokenBatch(torch.tensor([812, 44, 17, 5, 90]), view.positions, torch.tensor([0, 1, 4])), view)
    assert found == {name: expected[name] for name in linear}


def test_more_seats_in_the_same_bytes_take_the_options_that_the_page_names() -> None:
    text = (ROOT / "docs" / "phases" / "paged.md").read_text(encoding="utf-8")
    [flags] = re.findall(r"python -m phase6_paged (--.*)", text)
    named = dict(re.findall(r"--([\w-]+) (\S+)", flags))
    assert named.items() <= phase_target("6", Setup()).options.items()
    seats = {"max_batch_size": int(named["max-batch-size"])}
    rows = [
        ("phase 5", "its defaults", phase5_continuous.Config(max_seq_len=4096)),
        ("phase 6", "its defaults", phase6_paged.Config(max_seq_len=4096)),
        (
            "phase 6",
            f"`--max-batch-size {seats['max_batch_size']}`",
            phase6_paged.Config(max_seq_len=4096, **seats),
        ),
        (
            *("phase 6", f"`{flags}`"),
            phase6_paged.Config(max_seq_len=4096, **seats, num_blocks=int(named["num-blocks"])),
        ),
    ]
    assert table("phases/paged.md", "phase") == [
        [phase, started, str(config.max_batch_size), str(config.kv_tokens())]
        for phase, started, config in rows
    ]
    assert rows[0][2].kv_tokens() == rows[1][2].kv_tokens() == rows[3][2].kv_tokens()
    assert rows[0][2].max_batch_size == rows[1][2].max_batch_size < rows[3][2].max_batch_size


def test_chunks_on_their_page_are_arithmetic() -> None:
    default = phase7_chunked.Config().prefill_chunk_size
    source = (ROOT / "kernels" / "native" / "attention.cpp").read_text(encoding="utf-8")
    found = re.search(r"constexpr int64_t kRows = (\d+);", source)
    assert found is not None
    config = open_checkpoint("dummy:llama-60m").config
    tile = int(found[1]) // (config.num_heads // config.num_kv_heads)  # queries that share loaded keys

    def read(chunk: int) -> int:
        """Return the columns that all tiles of the native kernel read. A tile has at most `tile` queries."""
        return sum(range(min(tile, chunk), 2048 + 1, min(tile, chunk)))

    *chunks, whole = table("phases/chunked.md", "chunk")
    assert whole == ["2048 (one pass)", "1", "2048", f"{read(2048)}"]
    for row in chunks:
        chunk, steps = int(row[0].split()[0]), int(row[1])
        assert ("(default)" in row[0]) == (chunk == default)
        assert steps == 2048 // chunk
        gathered = sum(chunk * (i + 1) for i in range(steps))
        assert row[2] == f"{gathered} ({gathered / 2048:.1f} ×)"
        assert row[3] == f"{read(chunk)} ({read(chunk) / read(2048):.1f} ×)"


def test_workloads_on_their_page_are_those_that_are_measured() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| .+ \|$", text, re.MULTILINE)
    workloads = {**WORKLOADS, **CHAT_WORKLOADS}
    assert rows == [(name, str(workload.requests)) for name, workload in workloads.items()]


def test_loads_and_replicas_on_the_clusters_page_are_those_of_its_router_and_scaling() -> None:
    loads = [
        Load(seats=8, queue_room=72),
        Load(seats=8, active=4, kv_use=0.1, queue_room=68),
        Load(seats=8, active=2, kv_use=0.9, queue_room=70),
        Load(seats=8, active=8, waiting=6, kv_use=0.7, queue_room=58),
    ]
    assert [row[1] for row in table("cluster.md", "an engine of 8 seats")] == [
        f"{each.value:.2f}" for each in loads
    ]
    for _, total, divided, replicas in table("cluster.md", "engines"):
        assert divided == f"{float(total) / TARGET:.2f}"
        assert replicas == str(replicas_for([float(total)]))


def test_source_is_cut_out_whole() -> None:
    shown = code.source("phase4_static.scheduler.StaticScheduler.plan")
    assert shown.startswith('```python title="phase4_static/scheduler.py, line ')
    ast.parse(shown.split("\n", 1)[1].rsplit("```", 1)[0])
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        code.source("phase4_static.scheduler.StaticScheduler.no_such_method")


def test_limits_of_the_live_view_are_the_codes() -> None:
    text = " ".join((ROOT / "docs" / "http-api.md").read_text(encoding="utf-8").split())
    said = re.search(r"at most (\d+) frames a second, .*? at most ([\d.]+) % .*? At most (\d+) viewers", text)
    assert said is not None
    limits = (engine_calls.MAX_FRAMES_PER_S, engine_calls.ENGINE_SHARE * 100, live_view.MAX_VIEWERS)
    assert tuple(float(each) for each in said.groups()) == pytest.approx(limits)


def test_tokens_and_the_rendered_conversation_are_the_bundled_models() -> None:
    text = (ROOT / "docs" / "phases" / "model.md").read_text(encoding="utf-8")
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    words, ids = (line.split() for line in text.partition("```text\nOnce")[2].split("\n")[:2])
    encoded = tokenizer.encode("Once upon a time there was a foxling.", add_special_tokens=False)
    assert [int(each) for each in ids] == encoded
    assert ["Once", *words] == [tokenizer.decode([each]).strip() for each in encoded]
    assert tokenizer.vocab_size == 1024
    assert tokenizer.chat_template is not None
    chat = tokenizer.chat_template.render([{"role": "user", "content": "Who?"}], add_generation_prompt=True)
    assert f"```text\n{chat}```" in text
