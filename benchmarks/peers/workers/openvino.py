"""Worker for OpenVINO GenAI's continuous batching. Its environment needs `openvino-genai` and `optimum-intel`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.workers.protocol import Options, SteppingWorker, main

BLOCK_SIZE = 32  # tokens in a block of OpenVINO's KV cache on a CPU
PRECISION = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class OpenVino(SteppingWorker):
    """OpenVINO GenAI's pipeline. Keys and values have the type of the computation, not the default of 8 bits."""

    def __init__(self, options: Options) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = options.max_sequences
        scheduler.num_kv_blocks = options.kv_tokens // BLOCK_SIZE
        if options.max_pass_tokens:
            scheduler.max_num_batched_tokens = options.max_pass_tokens
        precision = PRECISION[options.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": options.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.folder, scheduler, "CPU", properties
        )
        self._handles: dict[int, openvino_genai.GenerationHandle] = {}
        self.name = f"OpenVINO GenAI {openvino_genai.__version__.partition('-')[0]}"

    def add(self, job: int, prompt: Sequence[int], max_tokens: int) -> None:
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[job] = self._pipeline.add_request(job, ids, config)

    def step(self) -> Iterable[tuple[int, int]]:
        self._pipeline.step()
        for job, handle in list(self._handles.items()):
            if handle.can_read():
                (output,) = handle.read().values()
                yield from ((job, token) for token in output.generated_ids)
                if output.finish_reason != openvino_genai.GenerationFinishReason.NONE:
                    del self._handles[job]


def convert(source: Path, target: Path, quantize: str) -> None:
    """Convert a Hugging Face folder to OpenVINO's intermediate representation, with weights of the same type or
    quantized as by `optimum-cli export openvino --weight-format int8`."""
    from optimum.exporters.openvino import main_export  # takes seconds, and only this needs it
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    config = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8)) if quantize == "int8" else None
    main_export(
        str(source), target, task="text-generation-with-past", library_name="transformers", ov_config=config
    )


if __name__ == "__main__":
    main(OpenVino, convert)
