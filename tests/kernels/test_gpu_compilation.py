"""The kernels compile to machine code for an NVIDIA GPU, on a machine that has none.

The interpreter runs kernels as Python, and accepts code that Triton's compiler refuses (types that do not unify,
shapes that are no powers of two). The compiler needs no device, so the check runs everywhere. It runs in a process
of its own, because here the kernels may be decorated for the interpreter.
"""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_here(function: str, cache: Path) -> str:
    """Run a function of this module in a process with kernels decorated for the compiler. Returns its output."""
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        [sys.executable, __file__, function], env=environment, capture_output=True, text=True, timeout=850
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of processor time
def test_kernels_compile_for_a_gpu(tmp_path):
    compiled = set(re.findall(r"^compiled (\w+)", run_here("compile_all", tmp_path), re.MULTILINE))
    sources = "".join(file.read_text() for file in (ROOT / "kernels").glob("*.py"))
    assert compiled == set(re.findall(r"@triton\.jit.*\n +def (\w+_kernel)\(", sources))


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    element: str,
    capability: int,
    types: dict[str, str],
    aligned: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> Any:
    """Compile a kernel for a GPU, and print so. If the GPU can start it early, check that it waits first.

    Args:
        constants: arguments that the compiler knows, without `early`.
        element: type that pointers point to. Other arguments are int32.
        capability: of the GPU; 90 is a compute capability of 9.0.
        types: of the arguments that have another one.
        aligned: whether an argument, by its name, is a multiple of 16, as it is at a launch.
        options: of the launch.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    early = capability >= 90
    constants = constants | {"early": early}
    if early:
        options["launch_pdl"] = True
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, f"*{element}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and aligned(name)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    result = compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "cubin" in result.asm
    first = re.search(TOUCHES_MEMORY, result.asm["ptx"])
    assert first is not None
    assert (first[0] == "griddepcontrol.wait") == early, (kernel.__name__, first)
    print("compiled", kernel.__name__, constants, element, capability)
    return result


def compile_all() -> None:
    """Print "compiled" for every variant. The first variant that does not compile raises."""
    from kernels.decode_rows import _decode_rows_kernel
    from kernels.draw import MOST_COLUMNS, _best_kernel, _count_kernel, _pick_kernel, _search_kernel
    from kernels.few_rows_linear import _few_rows_linear_kernel
    from kernels.gated_act import _gated_act_kernel
    from kernels.penalties import _count_latest_kernel, _penalise_kernel
    from kernels.rms_norm import _fused_add_rms_norm_kernel, _rms_norm_kernel
    from kernels.rope import _rope_kernel

    # Types of arguments follow from their names, except for these.
    types = {"eps": "fp32", "offset": "fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i64"}
    types |= {"addresses_ptr": "*i64", "settings_ptr": "*fp64", "tables_ptr": "*i32", "tiles_ptr": "*i32"}
    types |= dict.fromkeys(("seats_ptr", "columns_ptr", "latest_ptr", "token_ids_ptr"), "*i64")
    tile = {"tile_rows": 8, "tile_columns": 128}
    rotates = {"tile_heads": 4, "tile_half": 64}
    rotates |= dict.fromkeys(("v_ptr", "q_weight_ptr", "k_weight_ptr", "addresses_ptr", "v_out_ptr"))
    rotates |= {"has_norms": False, "writes": False}
    table = rotates | {"has_positions": True}
    per_row = rotates | {"has_positions": False, "positions_ptr": None}
    writes = per_row | {"writes": True}
    del writes["v_ptr"], writes["addresses_ptr"], writes["v_out_ptr"]
    norms = writes | {"has_norms": True}
    del norms["q_weight_ptr"], norms["k_weight_ptr"]
    types |= {"tops_ptr": "*fp32", "ids_ptr": "*i32"}
    types |= dict.fromkeys(("residual_ptr", "new_residual_ptr", "logits_ptr", "scores_ptr"), "*fp32")
    types |= {"factors_ptr": "*fp64", "counts_ptr": "*i32", "penalised_ptr": "*fp32"}
    types |= dict.fromkeys(("states_ptr", "state_ptr", "sums_ptr"), "*i64")
    drawn = {"part": MOST_COLUMNS, "most_parts": 64}
    few = {"tile_rows": 16, "tile_outputs": 32, "tile_inputs": 128}
    by_row = {"by_seat": False, "seats_ptr": None}
    no_seats = by_row | dict.fromkeys(("columns_ptr", "latest_ptr", "positions_ptr"))
    unranked = {"searched": False, "state_ptr": None}
    greedy = no_seats | unranked | {"has_settings": False, "settings_ptr": None, "sums_ptr": None}
    search = {name: value for name, value in no_seats.items() if not name.startswith(("latest", "pos"))}
    variants = [
        (_rms_norm_kernel, tile),
        (_fused_add_rms_norm_kernel, tile),
        (_rope_kernel, table),
        (_rope_kernel, per_row),
        (_rope_kernel, writes),
        (_rope_kernel, norms),
        (_gated_act_kernel, {"activation": "silu", "tile": 1024}),
        (_gated_act_kernel, {"activation": "gelu_tanh", "tile": 1024}),
        (_few_rows_linear_kernel, few | {"activation": None}),
        (_few_rows_linear_kernel, few | {"activation": "silu", "bias_ptr": None}),
        (_decode_rows_kernel, {"tile": 128}),
        (_count_latest_kernel, {"tile": 128}),
        (_penalise_kernel, {"part": MOST_COLUMNS}),
        (_best_kernel, {"part": MOST_COLUMNS}),
        (_search_kernel, drawn | {"by_seat": True}),
        (_search_kernel, drawn | search),
        (_count_kernel, drawn | {"by_seat": True, "searched": True}),
        (_count_kernel, drawn | by_row | unranked),
        (_pick_kernel, drawn | {"by_seat": True, "searched": True, "has_settings": True}),
        (_pick_kernel, drawn | no_seats | unranked | {"has_settings": True}),
        (_pick_kernel, drawn | greedy),
    ]
    for kernel, constants in variants:
        for element, capability in (("fp32", 80), ("bf16", 90)):
            compiled(kernel, constants, element, capability, types)
    compile_few_rows()
    compile_paged_attention()


# The wait for the kernel before, and all that reads or writes memory which that kernel may write or read.
TOUCHES_MEMORY = r"griddepcontrol\.wait|\b(ld|st|atom|red)\.(?!param|shared)\S*|\bcp\.async\S*"

ROW_STRIDES = ("q_stride", "q_head_stride", "block_stride", "column_stride", "kv_head_stride")

# The most that a program may use on GPUs of these targets: 1 KiB less than a multiprocessor has.
SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024}
LEAST_SHARED_MEMORY = 89, 99 * 1024  # GPUs for desktops and laptops

# Asynchronous copies to shared memory, 16 bytes to a thread.
COPIES_OF_16_BYTES = r"cp\.async\.c[ag]\.shared\.global[^;]*0x10"


def compile_few_rows() -> None:
    """Compile products of few rows. A program's tiles must fit the shared memory."""
    from kernels.few_rows_linear import FEW_ROWS, _few_rows_linear_kernel, _tile

    capability, shared_bytes = LEAST_SHARED_MEMORY
    plain = [(outputs, None) for outputs in (1024, 4096, 5120, 8192, 128_256)]
    tiles = {
        # The result of the head, the layer with the most outputs, is float32.
        (_tile(rows, outputs, shared_bytes, gated=activation is not None), activation, outputs > 100_000)
        for rows in (1, FEW_ROWS)
        for outputs, activation in (*plain, (2048, "silu"), (8192, "silu"))
    }
    for tile, activation, wide in sorted(tiles, key=str):
        constants = {"tile_rows": tile.rows, "tile_outputs": tile.outputs, "tile_inputs": tile.inputs}
        constants |= {"activation": activation, "bias_ptr": None}
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
        result = compiled(
            _few_rows_linear_kernel,
            constants,
            "bf16",
            capability,
            {"out_ptr": "*fp32"} if wide else {},
            lambda name: name != "num_rows",
            **options,
        )
        assert result.metadata.shared <= shared_bytes, (tile, result.metadata.shared)
        assert re.search(COPIES_OF_16_BYTES, result.asm["ptx"])


def compile_paged_attention() -> None:
    """Compile paged attention, targets in turn. A tile depends on shapes and dtype; it must fit shared memory."""
    from kernels.paged_attention import SPLIT_COLUMNS, _merge_splits_kernel, _paged_attention_kernel, _tile

    whole = {"split_columns": SPLIT_COLUMNS}

    # Partial results are float32 for any type of the store.
    types = dict.fromkeys(("partial_ptr", "tops_ptr", "totals_ptr"), "*fp32")
    types |= {"table_ptr": "*i32", "tiles_ptr": "*i32", "positions_ptr": "*i64", "scale_log2": "fp32"}
    variants = [
        (_merge_splits_kernel, whole | {"head_dim": 80, "tile_dim": 128}, element, 1, 3)
        for element in ("bf16", "fp32")
    ]
    for group, head_dim, element, itemsize in (
        (1, 64, "bf16", 2),
        (4, 80, "fp16", 2),
        (4, 80, "fp32", 4),
        (8, 128, "bf16", 2),
        (8, 128, "fp32", 4),
        (16, 256, "bf16", 2),
        (128, 128, "bf16", 2),
        (1, 256, "fp32", 4),
    ):
        for decoding in ((8, 4), (64, 32), (512, 1), None):
            tile = _tile(group, head_dim, itemsize, decoding)
            constants = whole | {"group": group, "tile_rows": tile.rows, "tile_columns": tile.columns}
            constants |= {"head_dim": head_dim, "tile_dim": tile.dims, "decodes": decoding is not None}
            variants.append((_paged_attention_kernel, constants, element, tile.warps, tile.stages))
    targets = itertools.cycle((80, 80, 90))
    for kernel, constants, element, warps, stages in variants:
        capability = next(targets)
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
        result = compiled(
            kernel,
            constants,
            element,
            capability,
            types,
            lambda name: name.endswith("_ptr") or name in ROW_STRIDES,
            **options,
        )
        assert result.metadata.shared <= SHARED_MEMORY_BYTES[capability]
        if kernel is _paged_attention_kernel:
            assert re.search(COPIES_OF_16_BYTES, result.asm["ptx"])
            assert ("mma." in result.asm["ptx"]) == (element != "fp32")  # on tensor cores
        # No products and sums are fused, because merges in two kernels must have the same bits.
        assert not re.search(r"fma\.rn\.f32", result.asm["ptx"]) or element == "fp32"


if __name__ == "__main__":
    compile_all()
