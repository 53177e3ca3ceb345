"""An opened checkpoint: a model's shape, and how its weights and its tokenizer are read.

A checkpoint has one of three forms: a Hugging Face folder, a dummy without files, or a GGUF file, which
`common.models.gguf.checkpoint` reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from common.models.compressed import Scheme
from common.models.config import JsonObject, ModelConfig
from common.models.layers import CausalLM
from common.models.loader import fill_randomly, load_weights
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
        generation_config: the object in the model's `generation_config.json`; empty if there is no such file.
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
    def fill(self, model: CausalLM, device: torch.device, *, keep_groups: bool = False) -> None:
        """Allocate a model that was built on the meta device, and fill its weights.

        Args:
            keep_groups: whether matrices that have a `form_of` stay in groups, instead of being dequantized.

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
    """A checkpoint in a Hugging Face folder."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        folder: Path,
        vocabulary: FolderVocabulary,
        scheme: Scheme | None = None,
        generation_config: JsonObject | None = None,
    ) -> None:
        super().__init__(name, config, generation_config)
        self.folder: Path = folder
        self.vocabulary = vocabulary
        self.is_int8 = scheme is not None

    def fill(self, model: CausalLM, device: torch.device, *, keep_groups: bool = False) -> None:  # noqa: ARG002
        load_weights(model, self.folder, device, quantized=self.is_int8)

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

    def fill(self, model: CausalLM, device: torch.device, *, keep_groups: bool = False) -> None:  # noqa: ARG002
        fill_randomly(model, device, DUMMY_SEED)

    def tokenizer(self, chat_template: Path | None = None) -> Tokenizer:
        return Tokenizer.from_folder(
            self.tokenizer_folder, vocab_size=self.config.vocab_size, chat_template=chat_template
        )
