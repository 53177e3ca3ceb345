"""The C++ kernels against the torch references, and how they are built, kept and done without."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.attention import native_attention
from kernels.attention_layout import AttentionLayout
from kernels.gated_act import ACTIVATIONS, gated_act_native, gated_act_reference
from kernels.linear import pack_gated_linear, pack_linear, packed_gated_linear, packed_linear
from kernels.rms_norm import (
    fused_add_rms_norm_native,
    fused_add_rms_norm_reference,
    rms_norm_native,
    rms_norm_reference,
)
from kernels.rope import rope_native, rope_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 7, 15, 16, 17, 42, 96, 576, 1152, 2048]
ROWS = [0, 1, 3, 17]

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module")
def native_kernels() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    assert native.load_native_kernels()


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


# ---------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(dtype, rows, size, offset, assert_rounded):
    x, weight = draw(rows, size, dtype=dtype), draw(size, dtype=dtype, seed=1)
    result = rms_norm_native(x, weight, 1e-6, offset)
    assert result.dtype == dtype
    assert_rounded(result, rms_norm_reference(x.float(), weight.float(), 1e-6, offset))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_inside_a_fused_matrix_are_normalised_where_they_lie(dtype, assert_rounded):
    fused = draw(5, 8 * 16, dtype=dtype)
    heads = fused.view(5, 8, 16)[:, 2:5]
    weight = draw(16, dtype=torch.float32, seed=1)
    result = rms_norm_native(heads, weight, 1e-5, 1.0)
    assert result.is_contiguous()
    assert_rounded(result, rms_norm_reference(heads.float(), weight, 1e-5, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_fused_add_rms_norm(dtype, rows, size, assert_rounded):
    x, residual = draw(rows, size, dtype=dtype), draw(rows, 2 * size, dtype=dtype, seed=1)[:, size:]
    weight = draw(size, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    normed, total = fused_add_rms_norm_native(x, residual, weight, 1e-6, 1.0)
    _, expected_total = fused_add_rms_norm_reference(x, residual, weight, 1e-6, 1.0)
    assert torch.equal(total, expected_total)
    assert_rounded(normed, rms_norm_reference(total.float(), weight.float(), 1e-6, 1.0))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 256])
@pytest.mark.parametrize("shared_table", [False, True])
def test_rope(dtype, tokens, head_dim, shared_table, assert_rounded):
    fused = draw(tokens, 8 * head_dim, dtype=dtype).view(tokens, 8, head_dim)
    q, k = fused[:, :5], fused[:, 5:7]
    positions = torch.arange(tokens).flip(0) + 3 if shared_table else None
    angles = draw(tokens + 5 if shared_table else tokens, head_dim // 2, seed=3)
    rotated = rope_native(q, k, angles.cos(), angles.sin(), positions)
    expected = rope_reference(q.float(), k.float(), angles.cos(), angles.sin(), positions)
    for result, exact in zip(rotated, expected, strict=True):
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert_rounded(result, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_gated_act(dtype, activation, rows, size, assert_rounded):
    gate_up = draw(rows, 3 * size, dtype=dtype)[:, size:]
    result = gated_act_native(gate_up, activation)
    assert result.dtype == dtype
    assert_rounded(result, gated_act_reference(gate_up.float(), activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero_and_numbers_that_are_none(activation):
    gates = [1e4, 1e15, -1e4, -1e15, 88.0, -88.0, -103.0, torch.inf, torch.nan, -0.0, 1e-30]
    gate_up = torch.tensor([[*gates, *[2.0] * len(gates)]])
    expected = gated_act_reference(gate_up, activation)
    torch.testing.assert_close(
        gated_act_native(gate_up, activation), expected, equal_nan=True, atol=1e-35, rtol=1e-5
    )


def test_a_number_that_is_none_stays_in_its_row():
    x = draw(4, 576, dtype=torch.bfloat16)
    expected = rms_norm_native(x, torch.ones(576), 1e-6)
    x[2, 5] = torch.nan
    result = rms_norm_native(x, torch.ones(576), 1e-6)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3]], expected[[0, 1, 3]])


# ---------------------------------------------------------------------- bit for bit


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(2, 40), size=st.integers(1, 700), shift=st.integers(0, 9), dtype=st.sampled_from(DTYPES)
)
def test_a_row_has_the_same_bits_wherever_it_lies(rows, size, shift, dtype):
    """Alone or beside others, and wherever in memory it begins."""
    store = draw(rows * size + shift, dtype=dtype)
    x = store[shift:].view(rows, size)
    weight = draw(size, seed=1)
    together = fused_add_rms_norm_native(x, x, weight, 1e-6)[0]
    for row in range(rows):
        alone = x[row : row + 1].clone()
        assert torch.equal(fused_add_rms_norm_native(alone, alone, weight, 1e-6)[0][0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 2), (63, 16), (64, 42), (65, 576), (960, 576), (576, 1536)]
)
def test_linear(dtype, outputs, inputs):
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    weight, bias = draw(outputs, inputs, dtype=dtype) / inputs**0.5, draw(outputs, dtype=dtype, seed=1)
    packed = pack_linear(weight)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2**-7}[dtype]
    for rows in (1, 2, 31, 32, 33, 100):
        x = draw(rows, 2 * inputs, dtype=dtype, seed=rows)[:, inputs:]
        exact = x.double() @ weight.double().T
        for result, expected in (
            (packed_linear(x, packed, outputs), exact),
            (packed_linear(x, packed, outputs, bias), exact + bias.double()),
        ):
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1, 2])
def threads(request):
    """A library may share out a sum among threads, if there are fewer rows than those."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("size", "inputs"), [(1, 2), (31, 16), (32, 42), (33, 576), (96, 64)])
def test_gated_linear(dtype, activation, size, inputs):
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    weight, bias = draw(2 * size, inputs, dtype=dtype) / inputs**0.5, draw(2 * size, dtype=dtype, seed=1)
    packed = pack_gated_linear(weight)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2**-7}[dtype]
    for rows in (1, 2, 31, 32, 33, 100):
        x = draw(rows, 2 * inputs, dtype=dtype, seed=rows)[:, inputs:]
        gate_up = x.double() @ weight.double().T
        for result, expected in (
            (packed_gated_linear(x, packed, size, activation), gate_up),
            (packed_gated_linear(x, packed, size, activation, bias), gate_up + bias.double()),
        ):
            assert result.dtype == dtype
            expected = gated_act_reference(expected, activation)
            torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (1024, 2048), (300, 42)])
def test_a_linear_layers_row_has_the_same_bits_beside_others(dtype, outputs, inputs):
    """At sizes of real layers, where a product that is cut differently would show: some 2 million outputs."""
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    weight = draw(outputs, inputs, dtype=dtype)
    packed, gated = pack_linear(weight), pack_gated_linear(weight)
    x = draw(1000, inputs, dtype=dtype, seed=1)  # more rows than are kept at hand at a time

    def product(x):
        return packed_linear(x, packed, outputs)

    def gated_product(x):
        return packed_gated_linear(x, gated, outputs // 2, "silu")

    for layer in (product, gated_product):
        together = layer(x)
        for first in (*range(0, 512, 64), 936):
            for rows in (1, 2, 3, 17, 32, 64):
                alone = layer(x[first : first + rows].clone())
                assert torch.equal(alone, together[first : first + rows]), (first, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 100, 1000])
def test_a_linear_layer_has_the_same_bits_on_any_number_of_threads(dtype, rows):
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    packed = pack_linear(draw(960, 576, dtype=dtype))
    x = draw(rows, 576, dtype=dtype, seed=1)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(packed_linear(x, packed, 960))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    """Enough rows for both threads, and fewer."""
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    packed, weight = pack_linear(draw(576, 1536, dtype=dtype)), draw(1536, dtype=dtype, seed=1)

    def compute(x):
        normed, total = fused_add_rms_norm_native(x, x, weight, 1e-6)
        gated = gated_act_native(x, "gelu_tanh")
        return packed_linear(x, packed, 576), rms_norm_native(x, weight, 1e-6), normed, total, gated

    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            found.append(
                [y for rows in (1, 3, 100) for y in compute(draw(rows, 1536, dtype=dtype, seed=rows))]
            )
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------------- attention


def attend(spans, *, dtype, heads=(6, 2), size=16, block_size=16, window=None, seed=0):
    """Attention over random stores. A span is (queries, columns): the queries are the last so many columns'."""
    draw_table = torch.Generator().manual_seed(seed)
    widths = [-(-columns // block_size) for _, columns in spans]
    blocks = torch.randperm(sum(widths) + 2, generator=draw_table)
    table = torch.zeros(len(spans), max(widths), dtype=torch.int64)
    taken = 0
    for row, width in enumerate(widths):
        table[row, :width] = blocks[taken : taken + width]
        table[row, width:] = blocks[-1]
        taken += width
    shape = (sum(widths) + 2, block_size, heads[1], size)
    k, v = draw(*shape, dtype=dtype, seed=seed + 1), draw(*shape, dtype=dtype, seed=seed + 2)
    # A query is its sequence's and its position's own, whoever is computed with it.
    queries = torch.cat(
        [
            draw(columns, heads[0], size, dtype=dtype, seed=seed + 3 + row)[columns - n :]
            for row, (n, columns) in enumerate(spans)
        ]
    )
    layout = AttentionLayout(
        table,
        torch.arange(len(spans)),
        block_size,
        tuple(n for n, _ in spans),
        tuple(columns for _, columns in spans),
        heads[1],
    )
    return attend_again(queries, k, v, layout, size=size, window=window)


def attend_again(q, k, v, layout, *, size, window):
    """The kernel on stores that hold everything: the pass's own keys and values are put where they are already."""
    own = layout.write_addresses
    k_own, v_own = (store.flatten(0, 1)[own] for store in (k, v))
    return native_attention(q, k_own, v_own, k, v, layout, scale=size**-0.5, window=window)


WINDOWS = (None, 1, 5, 64, 100, 255, 256, 257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("heads", "size"),
    [
        ((9, 3), 64),
        ((4, 1), 80),
        pytest.param((6, 6), 16, marks=pytest.mark.slow),
        pytest.param((8, 1), 256, marks=pytest.mark.slow),
        ((2, 2), 32),
    ],
)
def test_a_token_has_the_same_bits_decoded_or_prefilled_in_any_chunk(dtype, window, heads, size):
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    columns = 530  # three tiles
    form = {"dtype": dtype, "heads": heads, "size": size, "window": window}
    whole = attend([(columns, columns)], **form)
    for chunk in (1, 7, 64, 130, 300):
        for end in (1, 2, 63, 64, 65, 129, 192, 255, 256, 257, 300, 320, 511, 512, 513, columns):
            queries = min(chunk, end)
            # The same store for every length: a shorter sequence is the beginning of the whole.
            part = attend_prefix(columns, queries, end, **form)
            assert torch.equal(part, whole[end - queries : end]), (chunk, end)


def attend_prefix(columns, queries, end, *, dtype, heads, size, window, block_size=16, seed=0):
    """The queries before column `end` of what `attend([(columns, columns)])` computes whole."""
    width = -(-columns // block_size)
    table = torch.randperm(width + 2, generator=torch.Generator().manual_seed(seed))[None, :width]
    shape = (width + 2, block_size, heads[1], size)
    k, v = draw(*shape, dtype=dtype, seed=seed + 1), draw(*shape, dtype=dtype, seed=seed + 2)
    q = draw(columns, heads[0], size, dtype=dtype, seed=seed + 3)[end - queries : end]
    layout = AttentionLayout(table, torch.arange(1), block_size, (queries,), (end,), heads[1])
    return attend_again(q, k, v, layout, size=size, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_has_the_same_bits_beside_others(dtype, window):
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    spans = [(1, 5), (1, 130), (3, 64), (70, 400), (300, 300), (1, 1), (1, 700)]
    together = attend(spans, dtype=dtype, window=window).split([n for n, _ in spans])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # sums must not be shared out differently
        assert torch.equal(torch.cat(together), attend(spans, dtype=dtype, window=window))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 2500])
@pytest.mark.parametrize(("heads", "size"), [((4, 1), 256), ((6, 2), 64)])
def test_a_long_sequence_has_the_same_bits_on_any_number_of_threads(dtype, window, heads, size):
    """Two threads and more cut it into pieces; a prompt of the same columns is computed in one."""
    if not native.has_products(dtype):
        pytest.skip(f"no products in {dtype} on this processor")
    form = {"dtype": dtype, "heads": heads, "size": size, "window": window}
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(attend([(1, 4001), *[(1, 130)] * 3, (20, 300)], **form))
            decoded, prefilled = (attend([(n, 4001)], **form) for n in (1, 33))
            assert torch.equal(decoded[0], prefilled[-1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], each) for each in found)


# ---------------------------------------------------------------------- building

LOAD = """
import logging, sys
from pathlib import Path
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
import torch
from kernels import native
from kernels.gated_act import gated_act
loaded = native.load_native_kernels(Path(sys.argv[1]))
assert torch.equal(gated_act(torch.zeros(2, 6), "silu"), torch.zeros(2, 3))
print("native" if loaded else "torch", native.count_libgomps())
"""

COMPILER = """#!{python}
import shutil, sys, time
with open({calls!r}, "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if "--version" in sys.argv:
    print("stand-in 1.0")
elif "-shared" in sys.argv:
    time.sleep(0.5)
    shutil.copy({library!r}, sys.argv[sys.argv.index("-o") + 1])
else:
    open(sys.argv[sys.argv.index("-o") + 1], "w").close()
"""


class Workshop:
    """A cache folder of its own, and a stand-in for the compiler that counts what it builds."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.calls = folder / "calls"
        self.calls.touch()
        self.compiler = folder / "c++"
        library = next(native.default_cache().glob(f"{native.key_of_this_machine()}/*.so"))
        text = COMPILER.format(python=sys.executable, calls=str(self.calls), library=str(library))
        self.compiler.write_text(text)
        self.compiler.chmod(self.compiler.stat().st_mode | stat.S_IEXEC)

    def start(self, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LOAD, str(self.cache)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"CXX": str(self.compiler)} | env,
        )

    def load(self, **env: str) -> list[str]:
        """What a process says that loads the kernels; its last line is what computes."""
        process = self.start(**env)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return said.splitlines()

    @property
    def builds(self) -> int:
        return self.calls.read_text().count("-shared")

    @property
    def library(self) -> Path:
        (library,) = self.cache.glob("*/*.so")
        return library


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_built_once_and_then_only_loaded(workshop: Workshop) -> None:
    first = workshop.load()
    assert first[0].startswith("building native CPU kernels")
    assert first[-1] == "native 1"
    assert workshop.load() == ["native 1"]
    assert workshop.builds == 1
    flags = workshop.calls.read_text()
    assert "-fopenmp" in flags
    assert "fast-math" not in flags


@pytest.mark.slow
def test_processes_that_start_together_build_once(workshop: Workshop) -> None:
    processes = [workshop.start() for _ in range(3)]
    ends = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert ends == ["native 1"] * 3
    assert workshop.builds == 1


@pytest.mark.slow
def test_a_library_that_is_cut_off_is_built_again(workshop: Workshop) -> None:
    workshop.load()
    whole = workshop.library.read_bytes()
    workshop.library.write_bytes(whole[:1000])
    said = workshop.load()
    assert said[0].startswith("building native CPU kernels")
    assert said[-1] == "native 1"
    assert workshop.library.read_bytes() == whole
    assert workshop.load() == ["native 1"]


@pytest.mark.slow
def test_a_build_that_was_killed_is_begun_again(workshop: Workshop) -> None:
    workshop.load()
    workshop.library.with_suffix(".unfinished").write_bytes(b"half of it")
    workshop.library.unlink()
    assert workshop.load()[-1] == "native 1"
    assert workshop.builds == 2


def assert_one_line_and_torch(said: list[str], reason: str) -> None:
    assert said[-1] == "torch 1"
    (line,) = said[:-1]
    assert line.startswith("no native CPU kernels, torch computes instead (slower): ")
    assert reason in line


def test_without_a_compiler_torch_computes(workshop: Workshop) -> None:
    workshop.compiler.unlink()
    assert_one_line_and_torch(workshop.load(CXX="", PATH="/nonexistent"), "no C++ compiler")
    assert_one_line_and_torch(workshop.load(), "does not run")


def test_where_nothing_can_be_kept_torch_computes(workshop: Workshop) -> None:
    workshop.cache.write_text("a file, where a folder should be")
    assert_one_line_and_torch(workshop.load(), "Not a directory")


def test_a_compiler_that_complains_is_quoted(workshop: Workshop) -> None:
    text = workshop.compiler.read_text()
    workshop.compiler.write_text(
        text.replace("    open(", "    sys.exit('native.h:1: error: unknown machine')\n    open(")
    )
    said = workshop.load()
    assert said[0].startswith("building native CPU kernels")
    assert_one_line_and_torch(said[1:], "native.h:1: error: unknown machine")


@pytest.mark.parametrize("name", ["FLAGS", "SOURCES", "HEADERS"])
def test_the_key_changes_with_what_the_library_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    before = native.key_of_this_machine()
    other = tmp_path / "other.cpp"
    other.write_text("// another source")
    monkeypatch.setattr(native, name, [*getattr(native, name)[1:], "-O1" if name == "FLAGS" else other])
    assert native.key_of_this_machine() != before
