"""Real models, loaded by us and by transformers. A model that cannot be fetched is skipped, with the reason."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor

from common.errors import StartupError
from common.models.checkpoint import Checkpoint
from common.models.fetch import FETCHABLE, fetch
from common.models.layers import CausalLM
from common.models.registry import load_model, open_checkpoint
from common.text.tokenizer import Tokenizer
from tests.support.models import CPU, oracle_logits

MAX_POSITIONS = 2304


class RealModel:
    """A fetched model. Each part is loaded at its first use."""

    def __init__(self, name: str, file: Path) -> None:
        self.name = name
        self.file = file

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.name)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.tokenizer()

    @functools.cached_property
    def model(self) -> CausalLM:
        """The model as a server computes it, but in float32."""
        return self.load(torch.float32)

    def load(self, dtype: torch.dtype) -> CausalLM:
        """Load the model. Its weights keep their bits, as in a server. The oracle dequantizes them."""
        model = load_model(
            self.checkpoint, device=CPU, dtype=dtype, max_positions=MAX_POSITIONS, keep_groups=True
        )
        model.pack()
        model.measure_batch_invariance()
        return model

    @functools.cached_property
    def oracle(self) -> transformers.PreTrainedModel:
        """The model as transformers reads the same file, in float32."""
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.file.parent, gguf_file=self.file.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def oracle_logits(self, token_ids: list[int]) -> Tensor:
        return oracle_logits(self.oracle, token_ids)

    @functools.cached_property
    def oracle_tokenizer(self) -> Any:
        """The tokenizer as transformers reads the same file.

        transformers does not know SmolLM's pre-tokenizer, and splits numbers by GPT-2's rule. So the pre-tokenizer
        is replaced by that of the model's own tokenizer.json, which llama.cpp uses, too.
        """
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.file.parent, gguf_file=self.file.name)
        if self.name == "smollm2":
            split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
            tokenizer.backend_tokenizer.pre_tokenizer = split
        return tokenizer


@functools.cache
def opened(name: str) -> RealModel | str:
    """Fetch a model. Returns it, or the reason why it cannot be fetched."""
    try:
        return RealModel(name, fetch(name))
    except StartupError as error:
        return str(error)


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FETCHABLE], scope="session"
)
def real(request: pytest.FixtureRequest) -> RealModel:
    found = opened(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(params=[pytest.param("smollm2", marks=pytest.mark.xdist_group("smollm2"))], scope="session")
def chat_model(request: pytest.FixtureRequest) -> RealModel:
    """The model that has a chat template."""
    found = opened(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found
