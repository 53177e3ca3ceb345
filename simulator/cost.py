"""The time of a forward pass, from the work in it, and the time of the host's work around it.

```text
            one pass of 3 sequences that decode and a chunk of a prompt

            A  ░░░░░░░░░░░░░░░█          rows     3    sequences with one query
            B  ░░░░░█                    columns 42    seen by these three queries, their own included
            C  ░░░░░░░░░░░░░░░░░░░█      tokens   4    queries of the other sequences
            D  ░░░░░░████                pairs   34    columns that these four see: 7 + 8 + 9 + 10
                                         logits   4    tokens chosen, if D's prompt ends here
```

A column is the key and the value of one token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.engine.runner import ForwardPass
from common.kv import KVPool
from common.models.config import ModelConfig
from common.models.registry import weight_bytes


class Work(NamedTuple):
    """The amounts of work in a forward pass that its time depends on.

    Attributes:
        rows: number of sequences with one query: sequences that decode without guesses, idle rows, and chunks of
            one token.
        columns: number of keys that the queries of these rows see, summed over rows.
        held: like `columns`, but a block that several sequences share counts once: when one sequence has read the
            block, it is in the processor's cache for the others. Estimated: `columns`, but at most the used tokens
            of KV memory plus one for each row.
        tokens: number of queries of all other sequences (prompts, or a token and its guesses), padding included.
        pairs: number of pairs of a query that `tokens` counts and a key that it sees.
        logits: number of rows of logits, from each of which a token is chosen.
    """

    rows: int
    columns: int
    held: int
    tokens: int
    pairs: int
    logits: int

    @classmethod
    def of(cls, forward_pass: ForwardPass, pool: KVPool) -> Work:
        """Return the work of a pass that is about to be launched."""
        rows = columns = tokens = pairs = logits = 0
        for _, (_, start, end, _), _, sample_at in forward_pass.shares:
            if end == start + 1:
                rows += 1
                columns += end
            else:
                tokens += end - start
                pairs += (end - start) * (start + end + 1) // 2
            logits += len(sample_at)
        return cls(rows, columns, min(columns, pool.used_tokens + rows), tokens, pairs, logits)


@dataclass(kw_only=True)
class Cost(ABC):
    """The times of a server's work, in seconds.

    Attributes:
        host_step_s: host time of a step, whatever the step computes.
        host_row_s: added to `host_step_s` for each token that the host reads from the device.
        between_s: time from a step's end to the next step's beginning, while there is work.
        between_row_s: added to `between_s` for each token of the step, which the server writes to its client.
        arrival_s: time from a client's sending of a request until the request is in the engine's queue.
        delivery_s: time from a step's end until its tokens are at the clients.
    """

    host_step_s: float = 0.0
    host_row_s: float = 0.0
    between_s: float = 0.0
    between_row_s: float = 0.0
    arrival_s: float = 0.0
    delivery_s: float = 0.0

    @abstractmethod
    def pass_s(self, work: Work) -> float:
        """Return the seconds of one forward pass and its sampling on the device."""


@dataclass(kw_only=True)
class LinearCost(Cost):
    """A pass takes a fixed price plus a price for each unit of each kind of work (`Work`).

    `simulator.calibrate` fits the prices to measured runs.
    """

    pass_base_s: float = 0.0
    row_s: float = 0.0
    column_s: float = 0.0
    held_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    logit_s: float = 0.0

    def pass_s(self, work: Work) -> float:
        rows, columns, held, tokens, pairs, logits = work
        return (
            self.pass_base_s
            + self.row_s * rows
            + self.column_s * columns
            + self.held_s * held
            + self.token_s * tokens
            + self.pair_s * pairs
            + self.logit_s * logits
        )


#: Each pass takes one second. For pictures, and for tests that count steps.
ONE_SECOND_A_PASS = LinearCost(pass_base_s=1.0)


@dataclass(frozen=True, slots=True)
class Device:
    """A device, described by its data sheet.

    Attributes:
        bytes_per_s: bandwidth of its memory.
        flops: multiplications plus additions a second, in the model's type.
        efficiency: the share of bandwidth and of flops that a pass reaches.
        launch_s: seconds that are added to the time of every pass.
    """

    bytes_per_s: float
    flops: float
    efficiency: float = 0.6
    launch_s: float = 1e-3


class RooflineCost(Cost):
    """Times for a device that was not measured: a pass takes as long as its memory traffic or its arithmetic,
    whichever takes longer, plus `Device.launch_s`.

    A pass reads every weight once, and the cached keys and values of sequences with one query. It writes the keys
    and values of its prompt tokens. A layer's weights are multiplied once for each token, the head's once for each
    row of logits. Sliding windows are ignored: every layer attends to all keys.

    Args:
        quantized: how the weights are quantized (`--quantize`).
    """

    def __init__(
        self, model: ModelConfig, device: Device, *, quantized: Literal["none", "int8", "int4"] = "none"
    ) -> None:
        super().__init__(host_step_s=2e-4, host_row_s=1e-5)  # about as measured on a CPU with 2 cores
        self._launch_s = device.launch_s
        self._bytes_per_s = device.bytes_per_s * device.efficiency
        self._flops = device.flops * device.efficiency
        self._weight_bytes = weight_bytes(model, model.dtype, quantized=quantized)
        weights = weight_bytes(model, model.dtype) // model.dtype.itemsize
        self._bytes_a_column = model.kv_shape(model.dtype).bytes_per_token
        self._head = model.vocab_size * model.hidden_size  # multiplied only for rows whose logits are needed
        embedding = 0 if model.tie_word_embeddings else self._head  # looked up, not multiplied
        self._layers = weights - self._head - embedding
        self._flops_a_pair = 4 * model.num_layers * model.num_heads * model.head_dim

    def pass_s(self, work: Work) -> float:
        rows, columns, held, tokens, pairs, logits = work
        moved = self._weight_bytes + self._bytes_a_column * (held + tokens)
        computed = 2 * (self._layers * (rows + tokens) + self._head * logits)
        computed += self._flops_a_pair * (columns + pairs)
        return self._launch_s + max(moved / self._bytes_per_s, computed / self._flops)
