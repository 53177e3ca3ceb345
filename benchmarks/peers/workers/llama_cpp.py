"""Worker that runs llama.cpp by its C functions. Its environment needs `llama-cpp-python` and `gguf`.

Requests are batched as llama.cpp's `llama-server` batches them: the last token of every sequence that decodes comes
first, then as many prompt tokens as still fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers.workers.protocol import Options, SteppingWorker, main

CPU_INFO = Path("/proc/cpuinfo")  # on Linux

# ---------------------------------------------------------------------------------------------- computing


@dataclass(slots=True)
class _Sequence:
    """A request. `pending` has the tokens to compute next; `computed` is the number of tokens in KV memory."""

    job: int
    pending: list[int]
    max_tokens: int
    computed: int = 0
    generated: int = 0


class LlamaCpp(SteppingWorker):
    """Continuous batching on one KV pool, which must hold all sequences of a batch."""

    def __init__(self, options: Options) -> None:
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        # With weights rearranged for matrix tiles (AMX), version 0.3.36 ends at an illegal instruction.
        loading.use_extra_bufts = not (CPU_INFO.is_file() and "amx_int8" in CPU_INFO.read_text())
        model = llama_cpp.llama_model_load_from_file(options.folder.encode(), loading)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = options.kv_tokens
        parameters.n_seq_max = options.max_sequences
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = options.threads
        if options.max_pass_tokens:
            parameters.n_batch = options.max_pass_tokens
        # Keys and values stay in float16, the library's default: as many bytes as bfloat16.
        if options.dtype == "float32":
            parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp made no context; its reason is above")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch_size = llama_cpp.llama_n_batch(self._context)
        self._batch = llama_cpp.llama_batch_init(self._batch_size, 0, 1)
        self._running: list[_Sequence] = []
        self.name = f"llama-cpp-python {llama_cpp.__version__}"

    def add(self, job: int, prompt: Sequence[int], max_tokens: int) -> None:
        self._running.append(_Sequence(job, list(prompt), max_tokens))

    def step(self) -> Iterable[tuple[int, int]]:
        rows = self._fill()
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")
        for sequence, row in rows:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            token = int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))
            sequence.pending = [token]
            sequence.generated += 1
            if sequence.generated == sequence.max_tokens:
                self._running.remove(sequence)
                llama_cpp.llama_memory_seq_rm(self._memory, sequence.job, -1, -1)
            yield sequence.job, token

    def _fill(self) -> list[tuple[_Sequence, int]]:
        """Build the next batch. Returns each sequence that gets a token from it, and the index of its logits."""
        rows: list[tuple[_Sequence, int]] = []
        batch = self._batch
        batch.n_tokens = 0
        decoding_first = sorted(self._running, key=lambda each: each.generated == 0)
        for sequence in decoding_first:
            chunk = sequence.pending[: self._batch_size - batch.n_tokens]
            sequence.pending = sequence.pending[len(chunk) :]
            for token in chunk:
                row = batch.n_tokens
                batch.token[row] = token
                batch.pos[row] = sequence.computed
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence.job
                batch.logits[row] = False
                batch.n_tokens += 1
                sequence.computed += 1
            if chunk and not sequence.pending:
                batch.logits[batch.n_tokens - 1] = True
                rows.append((sequence, batch.n_tokens - 1))
        return rows


# ---------------------------------------------------------------------------------------------- converting

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_STORED: dict[str, tuple[np.dtype[Any], Any]] = {
    "BF16": (np.dtype("uint16"), gguf.GGMLQuantizationType.BF16),  # numpy has no bfloat16: bits are copied
    "F16": (np.dtype("float16"), gguf.GGMLQuantizationType.F16),
    "F32": (np.dtype("float32"), gguf.GGMLQuantizationType.F32),
}

Array = np.ndarray[Any, np.dtype[Any]]


def convert(source: Path, target: Path, quantize: str) -> None:
    """Convert a Hugging Face folder of a Llama or Qwen 3 to one GGUF file without a vocabulary.

    Matrices keep their type, or are quantized to Q8_0 if `quantize` is `int8`. Norms become float32.

    Raises:
        ValueError: the model has another architecture, or its rotary frequencies are scaled.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = config["model_type"]
    rope = config.get("rope_parameters") or {}
    if architecture not in ("llama", "qwen3") or rope.get("rope_type", "default") != "default":
        raise ValueError(f"only unscaled llama and qwen3 are converted to GGUF, not {architecture} {rope}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    for name, kind, stored in _read(source / "model.safetensors"):
        array = stored
        # Rotary pairs of a Llama: neighbours (2i, 2i + 1) in llama.cpp, (i, i + d/2) in Hugging Face's format.
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _interleaved(array, heads if "q_proj" in name else kv_heads)
        if array.ndim == 1:  # norms are kept in float32
            writer.add_tensor(_renamed(name), _widened(array, kind))
        elif quantize == "int8":
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_renamed(name), gguf.quantize(_widened(array, kind), q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(_renamed(name), array, raw_dtype=_STORED[kind][1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read(path: Path) -> Iterable[tuple[str, str, Array]]:
    """Yield every tensor of a safetensors file with its name and type; bfloat16 as its bits."""
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        kind = entry["dtype"]
        yield name, kind, content[first:last].view(_STORED[kind][0]).reshape(entry["shape"])


def _widened(array: Array, kind: str) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else array.astype(np.float32)


def _interleaved(weight: Array, heads: int) -> Array:
    """Return a weight [heads * d, hidden] with the rows of each head in the order 0, d/2, 1, d/2 + 1, ..."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _renamed(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        index, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{_NAMES[rest]}.weight"
    return f"{_NAMES[stem]}.weight"


if __name__ == "__main__":
    main(LlamaCpp, convert)
