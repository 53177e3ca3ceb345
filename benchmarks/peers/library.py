"""Serves a library from another environment behind our front: `python -m benchmarks.peers.library PEER FOLDER`.

The front takes the requests and the library's worker the steps, in a process each.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
from collections.abc import Callable

import torch

from benchmarks.peers.environments import LIBRARIES, Environment, find_environment
from benchmarks.peers.front import Job, serve
from benchmarks.peers.generate import peer_parser
from benchmarks.peers.process import WorkerProcess
from benchmarks.peers.weights import Weights, converted, weights_of
from benchmarks.peers.workers.protocol import Options


def start(peer: str, environment: Environment, weights: Weights, options: Options) -> WorkerProcess:
    """Start a library's worker on the weights, converted to the form that the library reads.

    Raises:
        StartupError: it cannot read them, or does not start.
    """
    library = LIBRARIES[peer]
    if library.converts:
        folder = converted(weights, library.module, environment.python, environment.version)
        options = options._replace(folder=str(folder))
    return WorkerProcess(library.module, options, environment.python)


class Piped:
    """A worker that steps, as a backend of the front. Jobs go to its input, tokens come from its output.

    `on_end` is called when the worker has ended, after every job of its has been told.
    """

    def __init__(self, worker: WorkerProcess, on_end: Callable[[], None]) -> None:
        self._worker = worker
        self._on_end = on_end
        self._jobs: dict[int, Job] = {}
        self._left: dict[int, int] = {}

    def serve(self, inbox: queue.Queue[Job]) -> None:
        threading.Thread(target=self._listen, name="answers", daemon=True).start()
        for number in itertools.count():
            job = inbox.get()
            self._jobs[number], self._left[number] = job, job.max_tokens
            self._worker.send({"add": number, "prompt": job.prompt, "max_tokens": job.max_tokens})

    def _listen(self) -> None:
        try:
            while True:
                self._pass_on(self._worker.receive())
        except Exception as error:
            for job in list(self._jobs.values()):
                job.end(error)
            self._on_end()

    def _pass_on(self, answer: dict[str, object]) -> None:
        match answer:
            case {"tokens": list(tokens)}:
                for number, token in tokens:
                    self._jobs[number].emit(token)
                    self._left[number] -= 1
                    if not self._left[number]:
                        self._take(number).end()
            case {"error": str(message), "id": int(number)}:
                self._take(number).end(ValueError(message))
            case _:
                raise RuntimeError(str(answer.get("error", answer)))

    def _take(self, number: int) -> Job:
        del self._left[number]
        return self._jobs.pop(number)


def main() -> None:
    parser = peer_parser("Serve a library that lives in an environment of its own.")
    parser.add_argument("peer", choices=[name for name, library in LIBRARIES.items() if library.converts])
    parser.add_argument("folder", help="its virtual environment")
    parser.add_argument("--max-batch-size", type=int, default=24, help="sequences computed together")
    parser.add_argument("--kv-tokens", type=int, default=32_768, help="KV memory, in tokens")
    options = parser.parse_args()
    environment = find_environment(options.peer, options.folder)
    weights = weights_of(options.model, options.dtype)
    settings = weights.options(
        max_seq_len=options.max_seq_len,
        max_sequences=options.max_batch_size,
        kv_tokens=options.kv_tokens,
        threads=torch.get_num_threads(),
    )
    worker = start(options.peer, environment, weights, settings)

    def end() -> None:
        """End this process: a front without its worker serves nobody."""
        os.kill(os.getpid(), signal.SIGTERM)

    with worker:
        serve(
            lambda: Piped(worker, end),
            model=options.model,
            name=worker.name,
            host=options.host,
            port=options.port,
        )


if __name__ == "__main__":
    main()
