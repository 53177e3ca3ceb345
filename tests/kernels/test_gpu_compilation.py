"""The kernels compile to machine code for an NVIDIA GPU, on a machine that has none.

The interpreter runs kernels as Python and forgives what Triton's compiler does not (types that do not unify,
shapes that are no powers of two). A compiler needs no device, so the check runs everywhere; in a process of
its own, because this one may have decorated the kernels for the interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kernels_compile_for_a_gpu(tmp_path):
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split().count("compiled") == 12


def compile_all() -> None:
    """Print "compiled" for every variant; raise at the first that does not compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    from kernels.gated_act import _gated_act_kernel
    from kernels.rms_norm import _fused_add_rms_norm_kernel, _rms_norm_kernel
    from kernels.rope import _rope_kernel

    # Types of arguments follow from their names; these are the ones that tell nothing.
    types = {"eps": "fp32", "offset": "fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i64"}
    tile = {"tile_rows": 8, "tile_columns": 128}
    per_row = {"positions_ptr": None, "has_positions": False, "block_heads": 4, "block_half": 64}
    table = {"has_positions": True, "block_heads": 4, "block_half": 64}
    variants = [
        (_rms_norm_kernel, tile),
        (_fused_add_rms_norm_kernel, tile),
        (_rope_kernel, table),
        (_rope_kernel, per_row),
        (_gated_act_kernel, {"activation": "silu", "block": 1024}),
        (_gated_act_kernel, {"activation": "gelu_tanh", "block": 1024}),
    ]
    for kernel, constants in variants:
        for element in ("fp32", "bf16"):
            signature = {
                name: "constexpr"
                if name in constants
                else types.get(name, f"*{element}" if name.endswith("_ptr") else "i32")
                for name in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            assert "cubin" in compile_source(source, target=GPUTarget("cuda", 80, 32)).asm
            print("compiled", kernel.__name__, element)


if __name__ == "__main__":
    compile_all()
