"""What the architectures share: the flat pass and the layers it runs through.

A pass is a flat list of `T` tokens of any sequences. Linear layers, norms and rotary embeddings see rows; only
attention must know which token belongs to whom, and it asks the KV view (`KVView.attend`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.kv import KVView
from common.models.config import LayerConfig, LinearScaling, Llama3Scaling, ModelConfig, RopeConfig
from kernels.batch_invariance import Heads, Product, is_batch_invariant
from kernels.gated_act import gated_act
from kernels.linear import pack_gated_linear, pack_linear, packed_gated_linear, packed_linear
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rope import rope


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of one forward pass, of any sequences end to end (selective batching: Yu et al. 2022, Orca).

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each token's place in its own sequence.
        logit_rows: [S] int64, S >= 1: which of the T rows need logits.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor


class HeldTensor(NamedTuple):
    """A tensor of a checkpoint and the part of one of our parameters that takes it."""

    name: str  # as the checkpoint calls it
    parameter: nn.Parameter
    row: int  # first row of the parameter's dimension 0 that it fills
    rows: int


class Linear(nn.Module):
    """`y = x W^T (+ b)`: [T, in] -> [T, sum of outs].

    Several matrices of a checkpoint that read the same input are one matrix here: one product instead of three.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts  # checkpoint name -> output features, in order
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.weight = nn.Parameter(
            torch.empty(self.out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(self.out_features, dtype=dtype), requires_grad=False) if bias else None
        )
        self.packed: Tensor | None = None  # the weight in panels, once `pack` has put it there

    def pack(self) -> None:
        """Keep the weight in the form that a CPU computes with, where there is one, instead of the checkpoint's."""
        self.packed = self.in_panels(self.weight)
        if self.packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def in_panels(self, weight: Tensor) -> Tensor | None:
        """`weight` in the form that a CPU computes with, or None."""
        return pack_linear(weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return packed_linear(x, self.packed, self.out_features, self.bias)
        return F.linear(x, self.weight, self.bias)

    def held_tensors(self, prefix: str) -> Iterator[HeldTensor]:
        row = 0
        for name, rows in self.parts.items():
            yield HeldTensor(f"{prefix}{name}.weight", self.weight, row, rows)
            if self.bias is not None:
                yield HeldTensor(f"{prefix}{name}.bias", self.bias, row, rows)
            row += rows


class GatedLinear(Linear):
    """Gates and ups of one input, and what they come to: [T, in] -> [T, outs of one of the two parts]."""

    def __init__(
        self, in_features: int, parts: dict[str, int], activation: str, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, parts, bias=bias, dtype=dtype)
        self.activation = activation

    def in_panels(self, weight: Tensor) -> Tensor | None:
        return pack_gated_linear(weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            size = self.out_features // 2
            return packed_gated_linear(x, self.packed, size, self.activation, self.bias)
        return gated_act(F.linear(x, self.weight, self.bias), self.activation)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019) times `weight + offset`; offset 1 is Gemma's (1 + w)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """[T, size] twice -> (norm of their sum, their sum)."""
        return fused_add_rms_norm(x, residual, self.weight, self.eps, self.offset)

    def held_tensors(self, name: str) -> Iterator[HeldTensor]:
        yield HeldTensor(f"{name}.weight", self.weight, 0, self.weight.shape[0])


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / config.theta**exponents
    match config.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling(factor, low, high, original):
            turns = original * frequencies / (2 * math.pi)  # full turns within the original context
            ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: long waves, 1: short ones
            return (1 - ramp) * frequencies / factor + ramp * frequencies


class RotaryTable(nn.Module):
    """cos and sin of every position's angles: [max_positions, head_dim / 2] float32 each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.register_buffer("cos", torch.empty(max_positions, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(max_positions, head_dim // 2), persistent=False)

    def fill(self) -> None:
        """Compute the table, on the CPU so that every device rotates by the same angles."""
        positions = torch.arange(self.cos.shape[0], device="cpu").float()
        angles = torch.outer(positions, rope_frequencies(self.config, self.head_dim))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cos, sin [T, head_dim / 2]: picked once a pass, used by every layer."""
        return self.cos[positions], self.sin[positions]


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over a pass's KV view."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.window = layer.window
        self.scale = config.attention_scale
        self.head_dim = config.head_dim
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.out = Linear(q_size, {"o_proj": config.hidden_size}, bias=config.attention_bias, dtype=dtype)

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """A hook for architectures that normalise queries and keys before rotating them."""
        return q, k

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: KVView) -> Tensor:
        """x [T, hidden], cos and sin [T, head_dim / 2] -> [T, hidden]."""
        heads = self.qkv(x).view(-1, sum(self.sizes), self.head_dim)
        q, k, v = heads.split(self.sizes, dim=1)
        q, k = self.normalise(q, k)
        q, k = rope(q, k, cos, sin)
        mixed = view.attend(self.index, q, k, v, scale=self.scale, window=self.window)
        projected: Tensor = self.out(mixed.view(-1, self.sizes[0] * self.head_dim))
        return projected

    def held_tensors(self, prefix: str) -> Iterator[HeldTensor]:
        yield from self.qkv.held_tensors(prefix)
        yield from self.out.held_tensors(prefix)


class QKNormAttention(Attention):
    """Attention that normalises every head's query and key (Qwen 3, Gemma 3)."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype, offset: float = 0.0
    ) -> None:
        super().__init__(config, layer, index, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, offset)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, offset)

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)

    def held_tensors(self, prefix: str) -> Iterator[HeldTensor]:
        yield from super().held_tensors(prefix)
        yield from self.q_norm.held_tensors(f"{prefix}q_norm")
        yield from self.k_norm.held_tensors(f"{prefix}k_norm")


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020): [T, hidden] -> [T, hidden]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up = GatedLinear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            config.activation,
            bias=config.mlp_bias,
            dtype=dtype,
        )
        self.down = Linear(size, {"down_proj": config.hidden_size}, bias=config.mlp_bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.gate_up(x))
        return hidden

    def held_tensors(self, prefix: str) -> Iterator[HeldTensor]:
        yield from self.gate_up.held_tensors(prefix)
        yield from self.down.held_tensors(prefix)


class DecoderLayer(nn.Module, ABC):
    """One layer of the stack; an architecture's file shows how its own is wired."""

    @abstractmethod
    def forward(
        self, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """hidden and residual [T, hidden], whose sum is the stream -> the same two after this layer."""

    @abstractmethod
    def held_tensors(self, prefix: str) -> Iterator[HeldTensor]:
        """Which checkpoint tensors this layer takes, and where."""


class CausalLM(nn.Module, ABC):
    """A decoder-only language model on the flat pass."""

    norm_offset = 0.0
    #: Beginnings of tensor names in checkpoints that hold more than this model: what `held_tensors` has instead.
    renamed_prefixes: ClassVar[Mapping[str, str]] = {}
    #: Beginnings of the names of tensors that are not this model's.
    skipped_prefixes: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.max_positions = max_positions  # rotary tables end here
        self.embedding = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size, dtype=dtype), requires_grad=False
        )
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self.rotary = nn.ModuleList(RotaryTable(entry, config.head_dim, max_positions) for entry in ropes)
        # Which table each layer rotates by.
        self.rotary_of_layer = [ropes.index(layer.rope) for layer in config.layers]
        self.layers = nn.ModuleList(
            self.make_layer(layer, index) for index, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, self.norm_offset)
        self.untied_head = (
            None
            if config.tie_word_embeddings
            else nn.Parameter(torch.empty_like(self.embedding), requires_grad=False)
        )
        self.packed_head: Tensor | None = None
        self.batch_invariant = False  # until it has been measured

    @abstractmethod
    def make_layer(self, layer: LayerConfig, index: int) -> DecoderLayer:
        """The architecture's layer."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        return F.embedding(token_ids, self.embedding)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def materialise(self, device: torch.device) -> None:
        """Give a model built on the meta device its memory: weights uninitialised, rotary tables filled."""
        self.to_empty(device=device)
        for table in self.rotary:
            assert isinstance(table, RotaryTable)
            table.fill()

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, view: KVView) -> Tensor:
        """Run one pass: `view` tells attention whose token is whose. Returns logits [S, vocab]."""
        return self.head(self.states(batch, view))

    @torch.inference_mode()
    def states(self, batch: TokenBatch, view: KVView) -> Tensor:
        """The same up to the head: [S, hidden].

        No line here depends on what is in a tensor, so that a pass can be captured whole.
        """
        angles = [table(batch.positions) for table in self.rotary]
        hidden = self.embed(batch.token_ids)
        residual = torch.zeros_like(hidden)
        for table, layer in zip(self.rotary_of_layer, self.layers, strict=True):
            cos, sin = angles[table]
            hidden, residual = layer(hidden, residual, cos, sin, view)
        # The rows that need logits are picked before the head: full-prompt logits are never computed.
        rows = batch.logit_rows
        hidden, _ = self.norm.add_and_norm(hidden[rows], residual[rows])
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> logits [S, vocab]."""
        if self.packed_head is not None:
            return packed_linear(hidden, self.packed_head, self.config.vocab_size)
        return F.linear(hidden, self.embedding if self.untied_head is None else self.untied_head)

    def products(self) -> Iterator[Product]:
        """Every linear layer of a pass, the head last."""
        for module in self.modules():
            if isinstance(module, Linear):
                yield Product(module.in_features, module.out_features, module)
        yield Product(self.config.hidden_size, self.config.vocab_size, self.head)

    def pack(self) -> None:
        """Keep the weights of all products in the form that a CPU computes with, layer by layer.

        Nothing is held twice but a tied embedding, which is looked up in one form and multiplied in the other.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        self.packed_head = pack_linear(self.embedding if self.untied_head is None else self.untied_head)
        if self.packed_head is not None and self.untied_head is not None:
            self.untied_head = nn.Parameter(self.untied_head.new_empty(0), requires_grad=False)

    @property
    def is_packed(self) -> bool:
        """Whether its products are native kernels'. A pass then decides nothing by what is in a tensor."""
        return self.packed_head is not None

    def measure_batch_invariance(self) -> None:
        """Find out whether a token's logits have the same bits whoever shares its passes, on native kernels.

        Takes the time of a few hundred small products.
        """
        heads = Heads(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)
        self.batch_invariant = is_batch_invariant(self.products(), heads, self.dtype)

    def held_tensors(self) -> Iterator[HeldTensor]:
        """Every checkpoint tensor of this model and the parameter rows it fills."""
        vocab = self.config.vocab_size
        yield HeldTensor("model.embed_tokens.weight", self.embedding, 0, vocab)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.held_tensors(f"model.layers.{index}.")
        yield from self.norm.held_tensors("model.norm")
        if self.untied_head is not None:
            yield HeldTensor("lm_head.weight", self.untied_head, 0, vocab)
