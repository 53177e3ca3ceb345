"""Options that every phase has. A phase's `Config` subclasses `EngineConfig` and adds its own options.

A config is a plain pydantic model: building one reads no environment. `common.server.options` wraps it for the
command line, where field descriptions become `--help`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from common.errors import StartupError

#: The longest sequence, in tokens, that is served by default without asking whether memory allows it.
SAFE_SEQ_LEN = 4096
GPU_SEATS = 256


class EngineConfig(BaseModel):
    """Options of the engine that every phase has. The text below an option is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = "zoo:llama-tiny"
    """checkpoint folder, GGUF file, zoo:NAME, dummy:PRESET, a model of infer fetch, or a hub id"""
    chat_template: Path | None = None
    """Jinja file with a chat template; default: the checkpoint's own"""
    escape_special_tokens: bool = False
    """the text of a message stays text where it spells a special token, such as <|im_end|>"""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: the checkpoint's generation_config.json or GGUF file gives the defaults of temperature, top_p, top_k,
    min_p and repetition_penalty; none: these are not used"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's type if the device has instructions for it, else float32"""
    quantize: Literal["auto", "none", "int8", "int4"] = "auto"
    """auto: weights of a file that is quantized (GGUF, GPTQ, AWQ, compressed-tensors) keep their bits if native
    kernels compute with them; none: they are dequantized; int8: weights of half the bytes, with a factor for each
    output; int4: a third of the bytes, with factors for groups of 32 inputs; int8 and int4 are for a CPU"""
    native_kernels: bool = True
    """compute on a CPU by C++ kernels, which are built at the first start; without them torch computes, more
    slowly"""
    max_batch_size: int = Field(
        default=8,
        ge=1,
        description=f"most sequences computed together; default on a GPU: {GPU_SEATS}, or as many as fit",
    )
    max_seq_len: int | None = Field(
        default=None,
        ge=2,
        description="most prompt and new tokens of one request together; default: the model's limit, halved "
        f"(down to {SAFE_SEQ_LEN}) until the server takes half of the free memory",
    )
    max_waiting_requests: int = Field(default=64, ge=1)
    """most requests in the queue (from phase 5 on, one more for each free seat); further ones are answered 503"""
    request_timeout: float | None = Field(default=None, gt=0)
    """most seconds from a request's arrival to its last token; default: no limit"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """seed for requests that have none of their own; none: a random one at each start"""

    @field_validator("quantize", "generation_config", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        """Return the text "none" in place of None. The command line turns the word `none` into None, but for these
        options the word is a value."""
        return "none" if value is None else value

    @field_validator("seed", mode="before")
    @classmethod
    def _random_seed(cls, value: Any) -> Any:
        """Return a random seed in place of None."""
        return secrets.randbits(63) if value is None else value

    def resolve_max_seq_len(self, model_limit: int) -> int:
        """Return the longest sequence served, in tokens; without the option, at most `SAFE_SEQ_LEN`.

        Raises:
            StartupError: the option exceeds the model's positions.
        """
        if self.max_seq_len is None:
            return min(model_limit, SAFE_SEQ_LEN)
        if self.max_seq_len > model_limit:
            raise StartupError(
                f"--max-seq-len {self.max_seq_len} is beyond the model's {model_limit} positions: lower it"
            )
        return self.max_seq_len

    def with_length(self, tokens: int, *, on_gpu: bool) -> Self:
        """Return the options with `max_seq_len` set to `tokens`, to estimate the memory that this takes.

        A slot for each sequence is as long as `max_seq_len`. On a GPU, longer slots must not cost seats.
        """
        seats = self.most_seats if on_gpu else self.max_batch_size
        return self.model_copy(update={"max_seq_len": tokens, "max_batch_size": seats})

    def for_gpu(self, fits: Callable[[Self], bool]) -> Self:
        """Return the options for a GPU. Sizes that were not given are set by what fits into its memory.

        These sizes are `max_batch_size` and, from phase 6 on, `num_blocks`.

        `max_seq_len` must not be None.

        Args:
            fits: returns whether an engine with given options fits into the memory.
        """
        if "max_batch_size" in self.model_fields_set:
            return self
        return self.largest("max_batch_size", GPU_SEATS, fits)

    def largest(self, name: str, most: int, fits: Callable[[Self], bool]) -> Self:
        """Return the options with option `name` at its largest value up to `most` that fits; 1 if none fits."""
        fitting, too_many = 1, most + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if fits(self.model_copy(update={name: middle})):
                fitting = middle
            else:
                too_many = middle
        return self.model_copy(update={name: fitting})

    @property
    def most_seats(self) -> int:
        """The largest value that `max_batch_size` can get on any device, for use before `for_gpu` has set it."""
        if "max_batch_size" in self.model_fields_set:
            return self.max_batch_size
        return max(self.max_batch_size, GPU_SEATS)

    def with_chunk(self, tokens: int) -> Self:  # noqa: ARG002 - a phase without chunks has nothing to set
        """Return the options with prefill chunks of `tokens` tokens. Returns `self` if prompts are not divided into
        chunks, or if the size of chunks was given."""
        return self

    def kv_tokens(self) -> int:
        """Return the size of the KV memory, in tokens. `max_seq_len` must not be None."""
        assert self.max_seq_len is not None
        return self.max_batch_size * self.max_seq_len

    def max_pass_tokens(self) -> int:
        """Return the most tokens of one forward pass: a full batch of the longest prompts.

        Each token needs a place in the KV memory, whose size is a limit, too. `max_seq_len` must not be None.
        """
        assert self.max_seq_len is not None
        return min(self.max_batch_size * self.max_seq_len, self.kv_tokens())

    def max_sampled_rows(self) -> int:
        """Return the most rows of a pass from which a token is sampled: one row for each sequence."""
        return self.max_batch_size

    def captured_sizes(self) -> Sequence[int]:
        """Return the numbers of rows for which an engine on a GPU captures CUDA graphs; empty: it captures none."""
        return ()

    def kv_formula(self) -> str:
        """Return the formula of `kv_tokens` with its numbers, for the log."""
        return f"{self.max_batch_size} × {self.max_seq_len}"

    def kv_advice(self) -> str:
        """Return advice for the error message if the KV memory does not fit."""
        return "lower --max-batch-size or --max-seq-len"
