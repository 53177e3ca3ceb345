"""An opened checkpoint: a model's shape, and how its weights and its tokenizer are read.

A checkpoint has one of three forms: a Hugging Face folder, a dummy without files, or a GGUF file, which
`common.models.gguf.checkpoint` reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.models.compressed import Scheme
from common.models.config import JsonObject, ModelConfig
from common.models.layers import CausalLM
from common.models.loader import (
    WhenRead,
    checkpoint_tensors,
    fill_from,
    fill_randomly,
    fused_with,
    quantize_as_stored,
    set_orders,
    stored_tensors,
)
from common.models.packed import (
    PackedMatrix,
    Stored,
    are_int8,
    bits_a_weight,
    matrices_of,
    without_empty_biases,
)
from common.text.chat_template import ChatTemplate
from common.text.folder_vocabulary import FolderVocabulary
from common.text.tokenizer import Tokenizer
from kernels.grouped import Form

DUMMY_SEED = 0  # fixed, so that all phases are measured with the same weights


class Checkpoint(ABC):
    """A model on disk, or a dummy.

    Attributes:
        name: the name that the user gave.
        config: the model's shape.
        folder: the model's Hugging Face folder; None if it has none.
        quantization: for the log, the names of the quantized types whose weights are dequantized when they are
            read; None if there are none.
        is_int8: whether weights are stored as int8, and kernels compute with them as int8.
        generation_config: the object in the model's `generation_config.json`; empty if there is no such file. Of a
            GGUF file, the sampling parameters that it recommends, in this form.
        unused: what the files say and is not used, in words, for the log.
    """

    folder: Path | None = None
    quantization: str | None = None
    is_int8: bool = False

    def __init__(self, name: str, config: ModelConfig, generation_config: JsonObject | None = None) -> None:
        self.name = name
        self.config = config
        self.generation_config = generation_config or {}
        self.unused: list[str] = []

    @abstractmethod
    def fill(self, model: CausalLM, device: torch.device, keep_groups: bool, when_read: WhenRead) -> None:
        """Allocate a model that was built on the meta device, and fill its weights.

        Memory that was not written to yet is free. So if `when_read` makes each layer smaller, the whole model is
        never there in its first size.

        Args:
            keep_groups: whether matrices that have a `form_of` stay in groups, instead of being dequantized.
            when_read: called with each linear layer, as soon as all of its tensors are read. A tied head has none.

        Raises:
            StartupError: the weights do not fit the config, or cannot be read.
        """

    def form_of(self, name: str) -> Form | None:  # noqa: ARG002 - most checkpoints have no groups
        """Return the form of a matrix that is stored in groups, from its name in a Hugging Face checkpoint.

        None: it is not in groups.
        """
        return None

    @abstractmethod
    def tokenizer(self, chat_template: Path | None = None) -> Tokenizer:
        """Read the tokenizer. The file `chat_template`, if given, replaces the checkpoint's chat template.

        Raises:
            StartupError: the tokenizer or the template cannot be read.
        """


class FolderCheckpoint(Checkpoint):
    """A checkpoint in a Hugging Face folder.

    Args:
        scheme: how the weights are quantized, if they are.
        tensors: the checkpoint's tensors (`packed.with_matrices`), if its weights are quantized.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        folder: Path,
        vocabulary: FolderVocabulary,
        generation_config: JsonObject | None = None,
        *,
        scheme: Scheme | None = None,
        tensors: Mapping[str, Stored] | None = None,
    ) -> None:
        super().__init__(name, config, generation_config)
        self.folder: Path = folder
        self.vocabulary = vocabulary
        self.tensors = tensors
        self.is_int8 = tensors is not None and are_int8(tensors)
        if scheme is not None and tensors is not None and matrices_of(tensors) and not self.is_int8:
            self.quantization = f"{scheme.title}, {bits_a_weight(tensors):.1f} bits a weight"

    def fill(self, model: CausalLM, device: torch.device, keep_groups: bool, when_read: WhenRead) -> None:
        if self.tensors is None:
            stored = stored_tensors(self.folder, type(model), tied=self.config.tie_word_embeddings)
        else:
            stored = without_empty_biases(self.tensors, checkpoint_tensors(model).keys())
        if self.is_int8:
            quantize_as_stored(model, stored.keys())
        keep = keep_groups and self.quantization is not None
        form_of = self.form_of if keep else None
        fill_from(model, stored, device, when_read, origin=self.folder, form_of=form_of)
        if keep:
            set_orders(model, self._order_of)
            model.stored_as = self.quantization

    def form_of(self, name: str) -> Form | None:
        if self.tensors is None or self.is_int8:
            return None
        found = [self.tensors.get(each) for each in fused_with(name)]
        matrices = [each for each in found if isinstance(each, PackedMatrix)]
        # Fused matrices take the same inputs. GPTQ gives them the same order, or the layer is dequantized.
        orders = {None if each.order is None else tuple(each.order.tolist()) for each in matrices}
        matrix = self.tensors.get(name)
        return matrix.form if isinstance(matrix, PackedMatrix) and len(orders) == 1 else None

    def _order_of(self, name: str) -> Tensor | None:
        matrix = None if self.tensors is None else self.tensors.get(name)
        return matrix.order if isinstance(matrix, PackedMatrix) else None

    def tokenizer(self, chat_template: Path | None = None) -> Tokenizer:
        template = ChatTemplate.from_folder(self.folder, chat_template)
        return Tokenizer(
            self.vocabulary.backend,
            vocab_size=self.config.vocab_size,
            chat_template=template,
            files=self.folder,
        )


class DummyCheckpoint(Checkpoint):
    """A dummy: the shape of a preset, random weights, and the tokenizer of a zoo model."""

    def __init__(self, name: str, config: ModelConfig, tokenizer_folder: Path) -> None:
        super().__init__(name, config)
        self.tokenizer_folder = tokenizer_folder

    def fill(
        self,
        model: CausalLM,
        device: torch.device,
        keep_groups: bool,  # noqa: ARG002 - it has none
        when_read: WhenRead,
    ) -> None:
        fill_randomly(model, device, DUMMY_SEED, when_read)

    def tokenizer(self, chat_template: Path | None = None) -> Tokenizer:
        return Tokenizer.from_folder(
            self.tokenizer_folder, vocab_size=self.config.vocab_size, chat_template=chat_template
        )
