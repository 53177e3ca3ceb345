"""The zoo: rules of its training text, and properties of its checkpoints that other tests rely on."""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.models.registry import ZOO
from tests.support.models import ZOO_NAMES
from zoo import text

STORY = "Once upon a time there was a brave fox named Zoë."


@cache
def load(name: str) -> tuple[Any, Any]:
    """Return the model (float32, CPU) and the tokenizer as transformers reads them."""
    model = AutoModelForCausalLM.from_pretrained(ZOO / name, dtype=torch.float32)
    return model.train(False), AutoTokenizer.from_pretrained(ZOO / name)


def read_json(name: str, file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ZOO / name / file).read_text())
    return loaded


def words(written: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters, of any alphabet."""
    return [word.lower() for word in re.findall(r"[^\W\d_]+", written)]


@cache
def vocabulary() -> set[str]:
    """Return nearly every word of the training text: those of many documents, and of as many conversations."""
    rng = random.Random("vocabulary")
    texts = [text.plain_document(rng) for _ in range(1000)]
    texts += [message["content"] for _ in range(1000) for message in text.conversation(rng)]
    return {word for each in texts for word in words(each)}


def continue_greedily(name: str, ids: torch.Tensor) -> list[int]:
    model, _ = load(name)
    with torch.no_grad():
        written: list[int] = model.generate(ids, max_new_tokens=300, do_sample=False)[0].tolist()
    return written[ids.shape[1] :]


# -------------------------------------------------------------------------------- the models


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == ZOO_NAMES[0] else pytest.mark.slow) for name in ZOO_NAMES],
)
def test_a_story_ends_by_itself_and_is_made_of_known_words(name: str) -> None:
    _, tokenizer = load(name)
    ids = tokenizer(STORY, return_tensors="pt")["input_ids"]
    written = continue_greedily(name, ids)
    assert len(written) < 300
    assert written[-1] in read_json(name, "generation_config.json")["eos_token_id"]
    found = words(tokenizer.decode(written, skip_special_tokens=True))
    assert len(found) > 30
    known = vocabulary()
    assert sum(word in known for word in found) >= 0.95 * len(found)
    assert "zoë" in found


# -------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO_NAMES)
def test_the_script_writes_a_folder_that_loads(name: str, tmp_path: Path) -> None:
    from zoo import train  # takes five seconds

    (recipe,) = (each for each in train.RECIPES if each.name == name)
    record = train.train(recipe, steps=2, minutes=5, seed=1, folder=tmp_path / recipe.name)
    assert record["steps"] == 2
    assert record["loss float32"] == pytest.approx(record["loss rounded"], abs=0.05)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / recipe.name)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / recipe.name).get_vocab()
