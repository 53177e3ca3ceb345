"""The layers that all architectures share, and the flat pass through them.

A pass is a flat list of `T` tokens of any sequences. Linear layers, norms and rotary embeddings compute each token
by itself. Only attention must know which sequence a token belongs to, and uses the pass's `KVView` for that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.kv import KVView
from common.models.config import (
    ConfigReader,
    DividedFrequencies,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
)
from kernels import int4
from kernels.batch_invariance import Heads, Product, is_batch_invariant
from kernels.dispatch import has_native_products, use_triton
from kernels.few_rows_linear import gated_linear, linear
from kernels.gated_act import gated_act
from kernels.grouped import Form, Layout, grouped_gated_linear, grouped_linear, grouped_rows
from kernels.int8 import dequantized_rows, linear_int8_reference, quantize
from kernels.linear import pack_gated_linear, pack_linear, packed_gated_linear, packed_linear
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rope import HeadNorms, rope

#: How linear layers can be quantized when they are read.
Quantization = Literal["int8", "int4"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of one forward pass: those of one or more sequences, end to end (selective batching: Yu et al.
    2022, Orca).

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each token's place in its own sequence.
        logit_rows: [S] int64, S >= 1: the rows that need logits. None: all T rows.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None


class Linear(nn.Module):
    """A linear layer: `y = x W^T (+ b)`, [T, in] -> [T, sum of sizes].

    Matrices of a checkpoint that have the same input (`loader.FUSED`) are fused, so one product replaces two or
    three. The weight may be int8 with a factor for each output (`kernels.int8`), or bytes of weights in groups
    (`kernels.grouped`).

    Sums are float32. They are rounded to the model's type, unless the layer is `wide`: then y is float32.
    """

    def __init__(
        self, in_features: int, *sizes: int, dtype: torch.dtype, bias: bool = False, wide: bool = False
    ) -> None:
        super().__init__()
        self.sizes = sizes  # output features of each of the checkpoint's matrices, in order
        self.in_features = in_features
        self.out_features = sum(sizes)
        self.dtype = dtype  # of x, and of a weight that is not quantized
        self.wide = wide
        self.weight = nn.Parameter(
            torch.empty(self.out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(self.out_features, dtype=dtype), requires_grad=False) if bias else None
        )
        self.weight_scale: nn.Parameter | None = None  # [out, 1] float32, of a quantized weight
        self.layout: Layout | None = None  # of a weight in groups
        self.int4_forms = [int4.FORM] * len(sizes)  # of each matrix, in a model of four bits
        self.order: Tensor | None = None  # [in] int64, the inputs of a weight in groups, group after group
        self.packed: Tensor | None = None  # the weight in panels (`kernels.linear`), after `pack`

    def quantize(self, kind: Quantization = "int8") -> None:
        """Replace the weight by its quantized form, if it has none yet. The weight may be on the meta device.

        Args:
            kind: `int4` is four bits in groups of 32 inputs, and more for some matrices (`int4_forms`). If the
                inputs are no whole groups, the weight becomes int8.
        """
        if self.weight_scale is not None or self.layout is not None:
            return
        weight = self.weight
        if kind == "int4" and self.in_features % int4.GROUP == 0:
            self.group(self.int4_forms)
            if not weight.is_meta:
                assert self.layout is not None
                self.weight = nn.Parameter(int4.quantize(weight, self.layout), requires_grad=False)
        else:
            values, scales = quantize(weight)
            self.weight = nn.Parameter(values, requires_grad=False)
            self.weight_scale = nn.Parameter(scales, requires_grad=False)

    def group(self, forms: Sequence[Form]) -> None:
        """Replace the weight by room for weights in groups. The weight is on the meta device.

        Args:
            forms: of each of the checkpoint's matrices.
        """
        self.layout = Layout.of(self.in_features, self.sizes, forms)
        self.weight = self.layout.room()

    def pack(self) -> None:
        """Replace the weight by its form for native CPU kernels. Changes nothing if they cannot compute with it.

        Weights in groups have that form already.
        """
        if self.layout is not None:
            return
        self.packed = self.in_panels(self.weight)
        if self.packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def in_panels(self, weight: Tensor) -> Tensor | None:
        """Return `weight` in panels, the form for native CPU kernels; None if they cannot compute with it."""
        return pack_linear(weight, self.dtype)

    @property
    def is_packed(self) -> bool:
        """Whether native CPU kernels compute this layer."""
        if self.layout is not None:
            return has_native_products(self.weight, self.dtype)
        return self.packed is not None

    def forward(self, x: Tensor) -> Tensor:
        if self.layout is not None:
            return grouped_linear(self.in_order(x), self.weight, self.layout, self.bias, self.wide)
        if self.packed is not None:
            return packed_linear(x, self.packed, self.out_features, self.bias, self.weight_scale, self.wide)
        return self.product(x)

    def in_order(self, x: Tensor) -> Tensor:
        """Return the inputs in the order of a weight in groups: [T, in]."""
        return x if self.order is None else x.index_select(1, self.order)

    def product(self, x: Tensor) -> Tensor:
        """Compute the product of a layer that is not packed: [T, in] -> [T, out]."""
        if self.weight_scale is not None:
            return linear_int8_reference(x, self.weight, self.weight_scale, self.bias, self.wide)
        return linear(x, self.weight, self.bias, self.wide)


class GatedLinear(Linear):
    """Gate and up projections with the activation: `act(gate(x)) * up(x)`, [T, in] -> [T, size]."""

    def __init__(
        self, in_features: int, size: int, activation: str, *, dtype: torch.dtype, bias: bool
    ) -> None:
        super().__init__(in_features, size, size, dtype=dtype, bias=bias)
        self.activation = activation

    def in_panels(self, weight: Tensor) -> Tensor | None:
        return pack_gated_linear(weight, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.layout is not None:
            return grouped_gated_linear(
                self.in_order(x), self.weight, self.layout, self.activation, self.bias
            )
        if self.packed is not None:
            return packed_gated_linear(
                x, self.packed, self.sizes[0], self.activation, self.bias, self.weight_scale
            )
        if self.weight_scale is not None:
            return gated_act(self.product(x), self.activation)
        return gated_linear(x, self.weight, self.activation, self.bias)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019) times `weight + offset`. The offset is 1 in Gemma, else 0."""

    def __init__(self, size: int, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = config.rms_norm_eps
        self.offset = config.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension: [..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add `x` and `residual`, [T, size] each. Returns the normalised sum and the sum, [T, size] each.

        `residual` and the sum are float32. The normalised sum has the type of `x`.
        """
        return fused_add_rms_norm(x, residual, self.weight, self.eps, self.offset)


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle by which each pair of dimensions turns from one position to the next.

    Returns:
        [head_dim / 2] float32, in radians.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / config.theta**exponents
    match config.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case DividedFrequencies(divisors):
            return frequencies / torch.tensor(divisors, device="cpu")
        case Llama3Scaling(factor, low, high, original):
            turns = original * frequencies / (2 * math.pi)  # full turns within the original context
            ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: long waves, 1: short ones
            return (1 - ramp) * frequencies / factor + ramp * frequencies


class RotaryTable(nn.Module):
    """Tables of cos and sin of every position's angles: [max_positions, head_dim / 2] float32 each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.register_buffer("cos", torch.empty(max_positions, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(max_positions, head_dim // 2), persistent=False)

    def fill(self) -> None:
        """Fill `cos` and `sin`: row p gets the values at the angles p × `rope_frequencies`.

        The CPU computes them, so that every device rotates by the same angles.
        """
        positions = torch.arange(self.cos.shape[0], device="cpu").float()
        angles = torch.outer(positions, rope_frequencies(self.config, self.head_dim))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of cos and sin at positions [T]: [T, head_dim / 2] each.

        Called once a pass, for all layers that use this table.
        """
        return self.cos[positions], self.sin[positions]


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023). The pass's `KVView` writes and reads keys and values."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.window = layer.window
        self.scale = config.attention_scale
        self.head_dim = config.head_dim
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size, q_size, kv_size, kv_size, dtype=dtype, bias=config.qkv_bias
        )
        self.qkv_proj.int4_forms[2] = int4.FINER_FORM
        self.o_proj = Linear(q_size, config.hidden_size, dtype=dtype, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config, dtype)
            self.k_norm = RMSNorm(config.head_dim, config, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: KVView) -> Tensor:
        """Project to heads, normalise (if `qk_norm`) and rotate queries and keys, attend, and project back.

        x [T, hidden], cos and sin [T, head_dim / 2] -> [T, hidden].
        """
        heads = self.qkv_proj(x).view(-1, sum(self.sizes), self.head_dim)
        if use_triton(heads):  # on a GPU launches cost time: one launch does norms, rotation and writes
            norms = None
            if self.qk_norm:
                weights = self.q_norm.weight, self.k_norm.weight
                norms = HeadNorms(*weights, self.q_norm.eps, self.q_norm.offset)
            mixed = view.attend_heads(
                self.index, heads, norms, cos, sin, scale=self.scale, window=self.window
            )
        else:
            q, k, v = heads.split(self.sizes, dim=1)
            if self.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = rope(q, k, cos, sin)
            mixed = view.attend(self.index, q, k, v, scale=self.scale, window=self.window)
        projected: Tensor = self.o_proj(mixed.view(-1, self.sizes[0] * self.head_dim))
        return projected


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020): [T, hidden] -> [T, hidden]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = GatedLinear(
            config.hidden_size, size, config.activation, dtype=dtype, bias=config.mlp_bias
        )
        self.down_proj = Linear(size, config.hidden_size, dtype=dtype, bias=config.mlp_bias)
        self.down_proj.int4_forms[0] = int4.FINER_FORM

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(self.gate_up_proj(x))
        return hidden


class CausalLM(nn.Module, ABC):
    """A decoder-only language model. A pass computes a flat list of tokens of any sequences."""

    #: The class of a layer, constructed with (config, layer, index, dtype). The docstring of `states` says how a
    #: layer is called.
    layer_type: type[nn.Module]
    #: Prefixes of tensor names in checkpoints that hold other models, too -> the prefixes in checkpoints of this
    #: model alone.
    renamed_prefixes: ClassVar[Mapping[str, str]] = {}
    #: Prefixes of the names of tensors that belong to other models, and are not loaded.
    skipped_prefixes: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.max_positions = max_positions  # length of the rotary tables
        table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table, _freeze=True)
        # Rounded to bfloat16, logits from 16 to 32 would be multiples of 1/8, and many of them equal.
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, wide=True)
        self.lm_head.int4_forms[0] = int4.HEAD_FORM
        self.embedding_layout: Layout | None = None  # of an embedding in groups
        self._tie()
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self.rotary = nn.ModuleList(RotaryTable(entry, config.head_dim, max_positions) for entry in ropes)
        # The index of each layer's rotary table.
        self.rotary_of_layer = [ropes.index(layer.rope) for layer in config.layers]
        self.layers = nn.ModuleList(
            self.layer_type(config, layer, index, dtype) for index, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config, dtype)
        self.batch_invariant = False  # set by `measure_batch_invariance`
        #: In words, the types of weights in groups, as the checkpoint stores them. None: there are none.
        self.stored_as: str | None = None

    @classmethod
    @abstractmethod
    def read_config(cls, reader: ConfigReader) -> ModelConfig:
        """Return the model's shape from a `config.json` of this architecture.

        Raises:
            StartupError: an entry is missing, invalid or not implemented.
        """

    def _tie(self) -> None:
        """Make the embedding and the head one parameter, if the model ties them."""
        if self.config.tie_word_embeddings:
            self.embed_tokens.weight = self.lm_head.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up the embeddings of tokens: [T] -> [T, hidden]."""
        table = self.embed_tokens.weight
        if self.embedding_layout is not None:
            return grouped_rows(token_ids, table, self.embedding_layout, self.dtype)
        if table.dtype != torch.int8:
            return F.embedding(token_ids, table)
        assert self.lm_head.weight_scale is not None  # an int8 embedding is tied to the head
        return dequantized_rows(token_ids, table, self.lm_head.weight_scale, self.dtype)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def materialise(self, device: torch.device) -> None:
        """Allocate a model built on the meta device: weights uninitialised, rotary tables filled."""
        if self.config.tie_word_embeddings:
            del self.embed_tokens.weight  # it would get memory of its own
        # As `to_empty`, which for meta tensors imports hundreds of modules.
        self._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))  # type: ignore[no-untyped-call]
        self._tie()
        for table in self.rotary:
            assert isinstance(table, RotaryTable)
            table.fill()

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, view: KVView) -> Tensor:
        """Run one pass. Returns the logits of the batch's `logit_rows`: [S, vocab] float32.

        `view` tells attention which sequence each token belongs to.
        """
        logits: Tensor = self.lm_head(self.states(batch, view))
        return logits

    @torch.inference_mode()
    def states(self, batch: TokenBatch, view: KVView) -> Tensor:
        """Run one pass up to the head: embedding, layers, last norm. Returns states of `logit_rows`: [S, hidden].

        `layer(hidden, residual, cos, sin, view)` returns the next hidden and residual, [T, hidden] each. Their sum
        is the layer's result: the addition is left to the next norm (`RMSNorm.add_and_norm`). The residual is
        float32, and 0 at first. Layer i rotates by the table `rotary[rotary_of_layer[i]]`.

        No branch here depends on a tensor's values. So a whole pass can be captured, for example as a CUDA graph.
        """
        angles = [table(batch.positions) for table in self.rotary]
        hidden = self.embed(batch.token_ids)
        residual = torch.zeros_like(hidden, dtype=torch.float32)
        for table, layer in zip(self.rotary_of_layer, self.layers, strict=True):
            cos, sin = angles[table]
            hidden, residual = layer(hidden, residual, cos, sin, view)
        # Only rows that need logits reach the head: logits of a whole prompt are never computed.
        if batch.logit_rows is not None:
            hidden, residual = hidden[batch.logit_rows], residual[batch.logit_rows]
        hidden, _ = self.norm.add_and_norm(hidden, residual)
        return hidden

    def linear_layers(self) -> Iterator[Linear]:
        """Yield every linear layer of a pass, the head included."""
        return (module for module in self.modules() if isinstance(module, Linear))

    def products(self) -> Iterator[Product]:
        """Yield every linear layer, for the measurement of batch invariance."""
        return (Product(layer.in_features, layer.out_features, layer) for layer in self.linear_layers())

    def quantize(self, kind: Quantization = "int8", *, head: bool = True) -> None:
        """Replace the weights of all linear layers by their quantized form, one layer after the other.

        A tied embedding is quantized with the head: both are one parameter. An untied embedding keeps its type.

        Args:
            kind: as for `Linear.quantize`.
            head: whether the head is quantized, too.
        """
        for layer in self.linear_layers():
            if head or layer is not self.lm_head:
                layer.quantize(kind)
        if kind == "int4":
            if self.config.tie_word_embeddings:
                self.embedding_layout = self.lm_head.layout
            self.stored_as = "int4"
        self._tie()

    def group_embedding(self, form: Form) -> None:
        """Replace the embedding by room for weights in groups. A tied one is the head's, which has its by now."""
        if self.config.tie_word_embeddings:
            self.embedding_layout = self.lm_head.layout
            self._tie()
        else:
            self.embedding_layout = Layout.of(self.config.hidden_size, (self.config.vocab_size,), (form,))
            self.embed_tokens.weight = self.embedding_layout.room()

    @property
    def is_quantized(self) -> bool:
        """Whether any linear layer has int8 weights. The head or other layers may be unquantized."""
        return any(layer.weight_scale is not None for layer in self.linear_layers())

    @property
    def weight_dtype(self) -> torch.dtype | str:
        """The type of the linear layers' weights: int8 if any layer is quantized; words if any has groups."""
        return self.stored_as or (torch.int8 if self.is_quantized else self.dtype)

    def pack(self) -> None:
        """Pack all linear layers for native CPU kernels, one after the other (see `Linear.pack`).

        Only a tied embedding is held twice: tokens are looked up in one form, and the head multiplies by the other.
        """
        for layer in self.linear_layers():
            layer.pack()

    @property
    def is_packed(self) -> bool:
        """Whether native CPU kernels compute the head, and so the other linear layers and attention.

        If so, no branch of a pass depends on a tensor's values.
        """
        return self.lm_head.is_packed

    def measure_batch_invariance(self) -> None:
        """Measure whether a token's logits have the same bits in any batch, and set `batch_invariant`.

        Products of the model's sizes and attention are tried on random numbers. If torch computes them, without
        native or Triton kernels, `batch_invariant` becomes False without a trial.
        """
        heads = Heads(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)
        self.batch_invariant = is_batch_invariant(self.products(), heads, self.dtype, self.device)
