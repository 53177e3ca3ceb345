"""Options that every phase has. A phase's own `Config` subclasses this and adds its own.

A config is a plain pydantic model: building one reads no environment. `common.server.options` wraps it for the
command line, where field descriptions become `--help`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from common.errors import StartupError

DEFAULT_MAX_SEQ_LEN = 4096


class EngineConfig(BaseModel):
    """Options of the engine that every phase has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        default="zoo:llama-tiny",
        description="checkpoint folder, zoo:NAME, dummy:PRESET, or a Hugging Face hub id",
    )
    chat_template: Path | None = Field(
        default=None, description="Jinja file with a chat template; default: the checkpoint's own"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes a GPU where there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="auto is the checkpoint's own where the device computes in it natively, else float32",
    )
    native_kernels: bool = Field(
        default=True,
        description="on a CPU, C++ kernels, built at the first start; without them torch computes, more slowly",
    )
    max_batch_size: int = Field(default=8, ge=1, description="sequences computed together")
    max_seq_len: int | None = Field(
        default=None,
        ge=2,
        description=f"prompt and new tokens of one request; default: the model's, at most {DEFAULT_MAX_SEQ_LEN}",
    )
    max_waiting_requests: int = Field(
        default=64, ge=1, description="requests that may queue before new ones are answered 503"
    )
    request_timeout: float | None = Field(
        default=None,
        gt=0,
        description="seconds from arrival to a request's last token; default: as long as it takes",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="what requests without a seed of their own draw from"
    )

    def resolve_max_seq_len(self, model_limit: int) -> int:
        """The longest sequence served. StartupError: more was asked for than the model's positions reach."""
        if self.max_seq_len is None:
            return min(model_limit, DEFAULT_MAX_SEQ_LEN)
        if self.max_seq_len > model_limit:
            raise StartupError(
                f"--max-seq-len {self.max_seq_len} is beyond the model's {model_limit} positions: lower it"
            )
        return self.max_seq_len

    def kv_tokens(self) -> int:
        """KV memory at the most, in tokens. `max_seq_len` must be resolved."""
        assert self.max_seq_len is not None
        return self.max_batch_size * self.max_seq_len

    def max_pass_tokens(self) -> int:
        """Tokens of the widest forward pass: every prompt at its longest. `max_seq_len` must be resolved.

        Each of them has a column of KV memory, so it is never more than that.
        """
        assert self.max_seq_len is not None
        return min(self.max_batch_size * self.max_seq_len, self.kv_tokens())

    def captured_sizes(self) -> Sequence[int]:
        """Rows of each graph that is captured on a GPU."""
        return ()

    def kv_formula(self) -> str:
        """How `kv_tokens` comes about, for the log."""
        return f"{self.max_batch_size} × {self.max_seq_len}"

    def kv_advice(self) -> str:
        """What to do where that is too much."""
        return "lower --max-batch-size or --max-seq-len"


def resolve_device(name: str) -> torch.device:
    """StartupError: cuda was asked for and there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The type to compute in. A type the device can only emulate is worse than float32 in every way but size.

    float16 is no stand-in for bfloat16, though older GPUs have it: it ends at 65,504, and activations of models
    that were trained in bfloat16 (Gemma 3's) go beyond.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return checkpoint if _is_native(checkpoint, device) else torch.float32


def _is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device has instructions for products of `dtype`, and torch uses them."""
    if dtype != torch.bfloat16:
        return dtype == torch.float32 or device.type == "cuda"
    if device.type == "cuda":  # from compute capability 8.0 on, and on AMD's cards
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # x86 and ARM have a name each. torch calls them by way of oneDNN, which its builds for macOS lack.
    instructions = torch.cpu.get_capabilities()
    has_them = bool(instructions.get("avx512_bf16") or instructions.get("bf16"))
    return has_them and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch's own
