"""How long things take: a forward pass from what it computes, and what the host does around it.

```text
            one pass of 3 sequences that decode and a chunk of a prompt

            A  ░░░░░░░░░░░░░░░█          rows     3    sequences with one query
            B  ░░░░░█                    columns 43    what those three see, themselves included
            C  ░░░░░░░░░░░░░░░░░░░█      tokens   4    queries of the others
            D  ░░░░░░████                pairs   34    what those four see: 7 + 8 + 9 + 10
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.models.config import ModelConfig
from common.runner import ForwardPass


class Work(NamedTuple):
    """What a forward pass computes, as far as its time depends on it.

    Attributes:
        rows: sequences with one query: those that decode, and rows that go along idle.
        columns: KV columns that they read, in all.
        tokens: queries of all other sequences, padding included.
        pairs: query and key, over those tokens.
        logits: rows of logits that a token is chosen from.
    """

    rows: int
    columns: int
    tokens: int
    pairs: int
    logits: int

    @classmethod
    def of(cls, forward_pass: ForwardPass) -> Work:
        rows = columns = tokens = pairs = logits = 0
        for _, (_, start, end, _), _, sample_at in forward_pass.shares:
            if end == start + 1:
                rows += 1
                columns += end
            else:
                tokens += end - start
                pairs += (end - start) * (start + end + 1) // 2
            if sample_at is not None:
                logits += 1
        return cls(rows, columns, tokens, pairs, logits)


class Cost(Protocol):
    """What takes how long, in seconds.

    Attributes:
        host_step_s: on the host for a step, whatever is in it.
        host_row_s: and for each token that is read.
        between_s: from a step's end to the next one's beginning, while there is work.
        arrival_s: from a client's sending to the engine's queue.
        delivery_s: from a step's end to the client.
    """

    @property
    def host_step_s(self) -> float: ...

    @property
    def host_row_s(self) -> float: ...

    @property
    def between_s(self) -> float: ...

    @property
    def arrival_s(self) -> float: ...

    @property
    def delivery_s(self) -> float: ...

    def pass_s(self, work: Work) -> float:
        """One forward pass and the choice of its tokens, on the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """A price for each thing that a pass computes: what `simulator.calibrate` finds for a machine."""

    pass_base_s: float = 0.0
    row_s: float = 0.0
    column_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    logit_s: float = 0.0
    host_step_s: float = 0.0
    host_row_s: float = 0.0
    between_s: float = 0.0
    arrival_s: float = 0.0
    delivery_s: float = 0.0

    def pass_s(self, work: Work) -> float:
        rows, columns, tokens, pairs, logits = work
        return (
            self.pass_base_s
            + self.row_s * rows
            + self.column_s * columns
            + self.token_s * tokens
            + self.pair_s * pairs
            + self.logit_s * logits
        )


#: A step takes a second, whatever is in it: for pictures, and for tests that count steps.
ONE_SECOND_A_PASS = LinearCost(pass_base_s=1.0)


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its data sheet has it.

    Attributes:
        bytes_per_s: of its memory.
        flops: multiplications and additions a second, each counted, in the model's type.
        efficiency: the share of either that a pass gets.
        launch_s: a pass takes so long whatever is in it.
    """

    bytes_per_s: float
    flops: float
    efficiency: float = 0.6
    launch_s: float = 1e-3


class RooflineCost:
    """Time on a device that nobody has measured: to read the memory or to compute, whichever is longer.

    A pass reads every weight once, and the keys and values of each row's columns; a prompt's are read once a chunk.
    A weight is multiplied and added once for each token. Sliding windows are not known here: every layer sees all.
    """

    def __init__(
        self,
        model: ModelConfig,
        device: Device,
        *,
        weight_bytes: int,
        host_step_s: float = 2e-4,
        host_row_s: float = 1e-5,
    ) -> None:
        self.host_step_s = host_step_s
        self.host_row_s = host_row_s
        self.between_s = self.arrival_s = self.delivery_s = 0.0
        itemsize = model.dtype.itemsize
        self._launch_s = device.launch_s
        self._bytes_per_s = device.bytes_per_s * device.efficiency
        self._flops = device.flops * device.efficiency
        self._weight_bytes = weight_bytes
        self._kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize  # a column
        head = model.vocab_size * model.hidden_size
        embedding = 0 if model.tie_word_embeddings else head  # looked up, not multiplied
        self._weights = weight_bytes // itemsize - head - embedding
        self._head = head
        self._flops_a_pair = 4 * model.num_layers * model.num_heads * model.head_dim

    def pass_s(self, work: Work) -> float:
        rows, columns, tokens, pairs, logits = work
        read = self._weight_bytes + self._kv_bytes * (columns + tokens)
        computed = 2 * (self._weights * (rows + tokens) + self._head * logits)
        computed += self._flops_a_pair * (columns + pairs)
        return self._launch_s + max(read / self._bytes_per_s, computed / self._flops)
