"""The C++ kernels: products, bits that depend on no other row, building, caching, and working without them."""

from __future__ import annotations

import functools
import logging.handlers
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import native
from kernels.attention import native_attention
from kernels.attention_layout import AttentionLayout
from kernels.cache_folder import default_cache
from kernels.few_rows_linear import linear
from kernels.gated_act import gated_act, gated_act_native, gated_act_reference
from kernels.int8 import linear_int8_reference, quantize
from kernels.linear import pack_gated_linear, pack_linear, packed_gated_linear, packed_linear
from kernels.rms_norm import fused_add_rms_norm_native, rms_norm_native
from tests.kernels.support import BF16, DTYPES, FP32, draw
from tests.support.forked import in_a_fork

pytestmark = pytest.mark.usefixtures("native_kernels")


def on_threads(counts: Sequence[int], compute: Callable[[], Any]) -> list[Any]:
    """Call `compute` with each of these numbers of threads. Returns the results."""
    before = torch.get_num_threads()
    found = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(compute())
    finally:
        torch.set_num_threads(before)
    return found


# ---------------------------------------------------------------------- products


def assert_is_linear(layer: Callable[..., Tensor], weight: Tensor, after: Callable[[Tensor], Tensor]) -> None:
    """Assert that a layer gives `after` of the product in float64, with and without a bias, on rows with gaps."""
    inputs, dtype = weight.shape[1], weight.dtype
    bias = draw(len(weight), dtype=dtype, seed=1)
    tolerance = {FP32: 1e-4, BF16: 2**-7}[dtype]
    for rows in (1, 2, 31, 32, 33, 100):
        x = draw(rows, 2 * inputs, dtype=dtype, seed=rows)[:, inputs:]
        exact = x.double() @ weight.double().T
        for result, expected in ((layer(x), exact), (layer(x, bias), exact + bias.double())):
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), after(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("threads")  # two threads may share a panel, and then add half of the bias each
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 2), (63, 16), (64, 42), (65, 576), (960, 576), (576, 1536)]
)
def test_linear(dtype, outputs, inputs):
    weight = draw(outputs, inputs, dtype=dtype) / inputs**0.5
    packed = pack_linear(weight)
    assert_is_linear(lambda x, *bias: packed_linear(x, packed, outputs, *bias), weight, lambda y: y)


@pytest.mark.parametrize("int8", [False, True])
def test_a_wide_layer_keeps_its_float32_sums(dtype: torch.dtype, int8: bool) -> None:
    """Rounded, they are the other layers' results, bit for bit. A row has the same bits beside others."""
    outputs, inputs = 300, 576
    weight = draw(outputs, inputs, dtype=dtype)
    values, scales = quantize(weight) if int8 else (weight, None)
    exact = weight.double() if scales is None else values.double() * scales.double()
    packed, bias = pack_linear(values, dtype), draw(outputs, dtype=dtype, seed=1)
    assert packed is not None
    x = draw(100, inputs, dtype=dtype, seed=2)
    together = packed_linear(x, packed, outputs, bias, scales, wide=True)
    assert together.dtype == FP32
    for rows in (1, 2, 10, 17, 33):
        assert torch.equal(
            packed_linear(x[7 : 7 + rows], packed, outputs, bias, scales, wide=True), together[7 : 7 + rows]
        )
    assert torch.equal(together.to(dtype), packed_linear(x, packed, outputs, bias, scales))
    layer = functools.partial(linear_int8_reference, scales=scales) if int8 else linear
    for sums in (together, layer(x, values, bias=bias, wide=True)):
        expected = x.double() @ exact.T + bias.double()
        torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("outputs", "inputs"), [(65, 42), (960, 576), (576, 1536)])
def test_bfloat16_weights_in_float32_are_kept_in_half_the_bytes(outputs: int, inputs: int) -> None:
    """If all weights are bfloat16 numbers, results have the same bits. If one weight is not, all stay float32."""
    weight = draw(2 * outputs, inputs, dtype=BF16).float() / 8
    other = weight.clone()
    other[-1, -1] += 2**-20 * other[-1, -1]
    (narrow, wide), (gated, wide_gated) = (
        [pack(each) for each in (weight, other)] for pack in (pack_linear, pack_gated_linear)
    )
    for packed, dtype in ((narrow, BF16), (gated, BF16), (wide, FP32), (wide_gated, FP32)):
        assert packed is not None
        assert packed.dtype == dtype
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 32, 33, 100):
        x = draw(rows, inputs, seed=rows)
        y = packed_linear(x, narrow, 2 * outputs), packed_linear(x, wide, 2 * outputs)
        assert torch.equal(y[0][:, :-1], y[1][:, :-1])
        torch.testing.assert_close(y[0].double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)
        z = [packed_gated_linear(x, panels, outputs, "silu") for panels in (gated, wide_gated)]
        assert torch.equal(z[0][:, :-1], z[1][:, :-1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("size", "inputs", "activation"),
    [
        *((size, inputs, "silu") for size, inputs in ((1, 2), (31, 16), (32, 42), (33, 576))),
        (96, 64, "gelu_tanh"),
    ],
)
def test_gated_linear(dtype, size, inputs, activation):
    weight = draw(2 * size, inputs, dtype=dtype) / inputs**0.5
    packed = pack_gated_linear(weight)
    assert_is_linear(
        lambda x, *bias: packed_gated_linear(x, packed, size, activation, *bias),
        weight,
        lambda gate_up: gated_act_reference(gate_up, activation),
    )


# ---------------------------------------------------------------------- rounding


def test_a_result_between_two_bfloat16_numbers_is_rounded_as_by_torch() -> None:
    """The activation of a gate this large is the gate. Many of the products lie in the middle of two numbers."""
    gates = torch.arange(128, 256).to(BF16)
    result = gated_act_native(torch.cat([gates, torch.full_like(gates, 1.5)]).view(1, -1), "silu")
    assert torch.equal(result[0], (gates.float() * 1.5).to(BF16))


# ---------------------------------------------------------------------- bit for bit


@settings(max_examples=40)
@given(
    rows=st.integers(2, 40), size=st.integers(1, 700), shift=st.integers(0, 9), dtype=st.sampled_from(DTYPES)
)
def test_a_row_has_the_same_bits_wherever_it_lies(rows, size, shift, dtype):
    """The row may be alone or beside others, and begin anywhere in memory."""
    x = draw(rows * size + shift, dtype=dtype)[shift:].view(rows, size)
    weight = draw(size, seed=1)
    together = fused_add_rms_norm_native(x, x.float(), weight, 1e-6)[0]
    for row in range(rows):
        alone = x[row : row + 1].clone()
        assert torch.equal(fused_add_rms_norm_native(alone, alone.float(), weight, 1e-6)[0][0], together[row])


@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (1024, 2048), (300, 42)])
def test_a_linear_layers_row_has_the_same_bits_beside_others(dtype, outputs, inputs):
    """Real layers' sizes and some 2 million outputs: a product that is split differently would show."""
    weight = draw(outputs, inputs, dtype=dtype)
    packed, gated = pack_linear(weight), pack_gated_linear(weight)
    values, scales = quantize(weight)
    int8 = pack_linear(values, dtype)
    x = draw(1000, inputs, dtype=dtype, seed=1)  # more rows than the kernel handles at a time
    for layer in (
        lambda x: packed_linear(x, packed, outputs),
        lambda x: packed_linear(x, int8, outputs, None, scales),
        lambda x: packed_gated_linear(x, gated, outputs // 2, "silu"),
    ):
        together = layer(x)
        for first in (*range(0, 512, 64), 936):
            for rows in (1, 2, 3, 17, 32, 64):
                alone = layer(x[first : first + rows].clone())
                assert torch.equal(alone, together[first : first + rows]), (first, rows)


def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    """There may be more or fewer rows than threads."""
    matrix, weight = draw(960, 1536, dtype=dtype), draw(1536, dtype=dtype, seed=1)
    values, scales = quantize(matrix)
    packed, int8 = pack_linear(matrix), pack_linear(values, dtype)

    def compute() -> list[Tensor]:
        found = []
        for rows in (1, 3, 13, 100, 1000):
            x = draw(rows, 1536, dtype=dtype, seed=rows)
            found += [packed_linear(x, packed, 960), packed_linear(x, int8, 960, None, scales)]
            found.append(gated_act_native(x, "gelu_tanh"))
            found += [
                rms_norm_native(x, weight, 1e-6),
                *fused_add_rms_norm_native(x, x.float(), weight, 1e-6),
            ]
        return found

    one, *more = on_threads((1, 2, 3), compute)
    assert all(torch.equal(a, b) for others in more for a, b in zip(one, others, strict=True))


# ---------------------------------------------------------------------- attention

same_draw = functools.lru_cache(maxsize=16)(draw)  # a test attends a hundred times to the same numbers


def attend(spans, *, dtype, heads=(6, 2), size=16, window=None, drawn=None, block_size=16):
    """Compute attention over random stores. A span is (queries, columns): the queries are at the last columns.

    With `drawn`, sequences of `drawn` columns are drawn, and only their first columns are used.
    """
    totals = [drawn or columns for _, columns in spans]
    widths = [-(-total // block_size) for total in totals]
    blocks = torch.randperm(sum(widths) + 2, generator=torch.Generator().manual_seed(0))
    *tables, rest = blocks.split([*widths, 2])
    table = torch.stack([torch.cat([each, rest[-1].expand(max(widths) - len(each))]) for each in tables])
    k, v = (same_draw(len(blocks), block_size, heads[1], size, dtype=dtype, seed=seed) for seed in (1, 2))
    # A query depends only on its sequence and position.
    queries = [
        same_draw(total, heads[0], size, dtype=dtype, seed=3 + row)[columns - n : columns]
        for row, ((n, columns), total) in enumerate(zip(spans, totals, strict=True))
    ]
    lengths = tuple(zip(*spans, strict=True))
    layout = AttentionLayout(table, torch.arange(len(spans)), block_size, *lengths, heads[1])
    # The stores hold the pass's own keys and values already, so it writes the same numbers.
    own = [store.flatten(0, 1)[layout.write_addresses] for store in (k, v)]
    return native_attention(torch.cat(queries), *own, k, v, layout, scale=size**-0.5, window=window)


@pytest.mark.parametrize(
    ("heads", "size", "block_size", "window"),
    [
        *(((9, 3), 64, 16, window) for window in (None, 1, 5, 64, 100, 255, 256, 257)),
        *(
            (*form, window)
            for form in (((4, 1), 80, 16), ((6, 6), 16, 16), ((8, 1), 256, 16), ((2, 2), 96, 8))
            for window in (None, 100)
        ),
    ],
)
def test_a_token_has_the_same_bits_decoded_or_prefilled_in_any_chunk(dtype, window, heads, size, block_size):
    columns = 530  # three tiles
    form = {"dtype": dtype, "heads": heads, "size": size, "window": window, "drawn": columns}
    form["block_size"] = block_size
    whole = attend([(columns, columns)], **form)
    for chunk in (1, 5, 7, 64, 130, 300):
        for end in (1, 2, 63, 64, 65, 129, 192, 255, 256, 257, 300, 320, 511, 512, 513, columns):
            queries = min(chunk, end)
            assert torch.equal(attend([(queries, end)], **form), whole[end - queries : end]), (chunk, end)


@pytest.mark.parametrize("window", [None, 2500])
@pytest.mark.parametrize(("heads", "size"), [((4, 1), 256), ((6, 2), 64)])
def test_a_long_sequence_has_the_same_bits_on_any_number_of_threads(dtype, window, heads, size):
    """With two or more threads, the sequence is cut into pieces. A prompt of the same length is not."""
    form = {"dtype": dtype, "heads": heads, "size": size, "window": window}

    def compute() -> Tensor:
        decoded, prefilled = (attend([(n, 4001)], **form) for n in (1, 33))
        assert torch.equal(decoded[0], prefilled[-1])
        return attend([(1, 4001), *[(1, 130)] * 3, (20, 300)], **form)

    one, *more = on_threads((1, 2, 3, 5), compute)
    assert all(torch.equal(one, each) for each in more)


# ---------------------------------------------------------------------- building


def load(cache: Path, compiler: str) -> list[str]:
    """Load the kernels. Returns the lines that were logged, and one more: what computes.

    Torch's own lines are left out: its CUDA build warns if there is a CUDA toolkit and no GPU.
    """
    os.environ["CXX"] = compiler
    logged = logging.handlers.BufferingHandler(1000)
    logging.basicConfig(level="INFO", handlers=[logged])
    loaded = native.load_native_kernels(cache)
    assert torch.equal(gated_act(torch.zeros(2, 6), "silu"), torch.zeros(2, 3))
    lines = [each.getMessage() for each in logged.buffer if not each.name.startswith("torch")]
    return [*lines, "native" if loaded else "torch"]


COMPILER = """#!/bin/sh
echo "$*" >> '{calls}'
case "$*" in
    *--version*) echo "stand-in 1.0"; exit ;;
    *-shared*) made='{library}'; sleep 0.5 ;;
    *) made=/dev/null ;;
esac
while [ "$1" != -o ]; do shift; done
cp "$made" "$2"
"""


class Workshop:
    """A cache folder of its own, and a stand-in for the compiler that counts what it builds."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.calls = folder / "calls"
        self.calls.touch()
        self.compiler = folder / "c++"
        library = next(default_cache().glob(f"{native.key_of_this_machine()}/*.so"))
        text = COMPILER.format(calls=self.calls, library=library)
        self.compiler.write_text(text)
        self.compiler.chmod(self.compiler.stat().st_mode | stat.S_IEXEC)

    def load(self) -> list[str]:
        """Load the kernels in a process of its own (`load`)."""
        return in_a_fork(load, self.cache, f"env STAND_IN=1 {self.compiler}")

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


@pytest.mark.slow
def test_built_once_and_then_only_loaded(workshop: Workshop) -> None:
    first = workshop.load()
    assert first[0].startswith("building native CPU kernels")
    assert first[-1] == "native"
    assert workshop.load() == ["native"]
    assert workshop.builds == 1
    # As in a cache that this user cannot write: the lock's file cannot be opened.
    lock = workshop.library.with_name("lock")
    lock.unlink()
    lock.mkdir()
    assert workshop.load() == ["native"]
    flags = workshop.calls.read_text()
    assert "fast-math" not in flags


@pytest.mark.slow
def test_where_memory_is_short_one_compiler_runs_at_a_time(workshop: Workshop) -> None:
    alone = 'mkdir "$0.runs" || { echo "c++: fatal error: Killed signal" >&2; exit 1; }; sleep 0.1; rmdir "$0.runs"'
    text = workshop.compiler.read_text()
    workshop.compiler.write_text(text.replace("made=/dev/null ;;", f"made=/dev/null; {alone} ;;"))
    assert workshop.load()[-1] == "native"
    assert workshop.builds == 1


@pytest.mark.slow
def test_processes_that_start_together_build_once(workshop: Workshop) -> None:
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(lambda _: workshop.load(), range(3)))
    assert [lines[-1] for lines in said] == ["native"] * 3
    assert workshop.builds == 1


@pytest.mark.slow
@pytest.mark.parametrize("cut_off", [True, False], ids=["a library cut off", "a build that was killed"])
def test_a_library_that_is_not_whole_is_built_again(cut_off: bool, workshop: Workshop) -> None:
    workshop.load()
    whole = workshop.library.read_bytes()
    if cut_off:
        workshop.library.write_bytes(whole[:1000])
    else:
        workshop.library.with_suffix(".unfinished").write_bytes(b"half of it")
        workshop.library.unlink()
    said = workshop.load()
    assert said[0].startswith("building native CPU kernels")
    assert said[-1] == "native"
    assert workshop.builds == 2
    assert workshop.library.read_bytes() == whole
    assert workshop.load() == ["native"]


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize(
    ("compiler", "has_home", "reason"),
    [
        ("", True, "no C++ compiler"),
        ("/nonexistent/c++", True, "does not run"),
        ("/bin/true", False, "no home"),
    ],
)
def test_without_a_compiler_or_a_folder_torch_computes(
    compiler: str,
    has_home: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", "/nonexistent")
    if not has_home:  # as for a container's user without an entry in /etc/passwd
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert not native.load_native_kernels()
    (line,) = caplog.messages
    assert line.startswith("no native CPU kernels, torch computes instead (slower): ")
    assert reason in line
    assert torch.equal(gated_act(torch.zeros(2, 6), "silu"), torch.zeros(2, 3))
