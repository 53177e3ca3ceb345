"""Our own engine as a worker: `benchmarks micro decode_step` measures it like the other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.peers.workers.protocol import Options, SteppingWorker, main
from common.request import SamplingParams
from common.startup.phases import find_phase


class Ours(SteppingWorker):
    """A phase's engine, built and stepped in this thread."""

    def __init__(self, options: Options) -> None:
        import torch  # after `common`, which limits how long its threads spin

        torch.set_num_threads(options.threads)
        package = find_phase(options.phase)
        passes = {}
        if options.max_pass_tokens and "prefill_chunk_size" in package.Config.model_fields:
            passes["prefill_chunk_size"] = options.max_pass_tokens
        config = package.Config(
            model=options.model,
            device="cpu",
            dtype=options.dtype,
            quantize=options.quantize,
            max_batch_size=options.max_sequences,
            max_seq_len=options.max_seq_len,
            **passes,
        )
        self._engine = package.build_engine(config)
        self.name = f"phase {package.PHASE.number}"

    def add(self, job: int, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_new_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(self._engine.create_request(prompt, params, str(job)))

    def step(self) -> Iterable[tuple[int, int]]:
        for output in self._engine.step():
            if output.error is not None:
                raise output.error
            assert output.token_id is not None
            yield int(output.request_id), output.token_id


if __name__ == "__main__":
    main(Ours)
