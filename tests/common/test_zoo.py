"""The zoo: rules of its training text, and properties of its checkpoints that other tests rely on."""

import json
import random
import struct
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models import ZOO_NAMES
from zoo import text, train

ZOO = Path(train.__file__).parent
#: The number of query heads that share a KV head.
GROUPS = {"llama-tiny": 3, "qwen3-tiny": 2, "gemma3-tiny": 4}
#: Config entries that differ between the architectures.
ENTRIES: dict[str, dict[str, Any]] = {
    "llama-tiny": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "qwen3-tiny": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3-tiny": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 40,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    },
}
STORY = "Once upon a time there was a brave fox named Zoë."
AWKWARD = (
    "Zoë met André 🦊 and Inès 🐿️.",
    "  two spaces, a\ttab\n\n\nand three lines  ",
    "👩‍👩‍👧 漢字 naïve Ünïcödé <0x41> \u0000 ▁",
    'say("1234567") # {}',
)


@cache
def load(name: str) -> tuple[Any, Any]:
    """Return the model (float32, CPU) and the tokenizer as transformers reads them."""
    model = AutoModelForCausalLM.from_pretrained(ZOO / name, dtype=torch.float32)
    return model.train(False), AutoTokenizer.from_pretrained(ZOO / name)


def read_json(name: str, file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ZOO / name / file).read_text())
    return loaded


def continue_greedily(name: str, ids: torch.Tensor, limit: int = 300) -> list[int]:
    model, _ = load(name)
    with torch.no_grad():
        written: list[int] = model.generate(ids, max_new_tokens=limit, do_sample=False)[0].tolist()
    return written[ids.shape[1] :]


# -------------------------------------------------------------------------------- the generator


def test_same_seed_same_text_and_another_seed_another_text() -> None:
    def draw(seed: int) -> list[Any]:
        rng = random.Random(seed)
        return [text.plain_document(rng) for _ in range(50)] + [text.conversation(rng) for _ in range(50)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_question_about_a_holder_names_the_last_to_receive() -> None:
    """``Who has the bell?`` must agree with the last sentence of the story that hands the bell over."""
    checked = 0
    for seed in range(200):
        story = text.draw_story(random.Random(seed))
        for question, answer in story.questions:
            if question.startswith("Who has the "):
                noun = question.removeprefix("Who has the ").removesuffix("?")
                holder = answer.split()[0]
                assert answer == f"{holder} has the {noun}."
                assert holder in (story.cast.hero.name, story.cast.friend.name)
                assert f"{noun}" in story.text
                checked += 1
    assert checked > 50


def test_conversations_alternate_and_end_with_the_assistant() -> None:
    rng = random.Random(0)
    for _ in range(200):
        roles = [message["role"] for message in text.conversation(rng)]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles


# -------------------------------------------------------------------------------- every folder


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_folder_is_an_ordinary_checkpoint_of_at_most_five_megabytes(name: str) -> None:
    files = {path.name for path in (ZOO / name).iterdir()}
    assert files >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert sum((ZOO / name / file).stat().st_size for file in files) <= 5_000_000


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_weights_are_bfloat16(name: str) -> None:
    raw = (ZOO / name / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert read_json(name, "config.json")["dtype"] == "bfloat16"
    tied = read_json(name, "config.json")["tie_word_embeddings"]
    assert ("lm_head.weight" in header) == (not tied)


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_shapes_catch_bugs(name: str) -> None:
    config = read_json(name, "config.json")
    model, tokenizer = load(name)
    assert config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]
    assert config["num_attention_heads"] == GROUPS[name] * config["num_key_value_heads"]
    assert config["max_position_embeddings"] == 4096
    assert 1_000_000 <= sum(weight.numel() for weight in model.parameters()) <= 2_000_000
    entries = ENTRIES[name]
    assert {key: config[key] for key in entries} == entries
    # As in the real Qwen checkpoints: the last rows of the vocabulary have no token.
    assert (config["vocab_size"] > len(tokenizer)) == (name == "qwen3-tiny")


def test_end_tokens_come_in_both_forms() -> None:
    """``eos_token_id`` is an int in two configs and a list in the third, and always a list for generation."""
    assert [type(read_json(name, "config.json")["eos_token_id"]) for name in ZOO_NAMES] == [int, int, list]
    for name in ZOO_NAMES:
        _, tokenizer = load(name)
        ids = read_json(name, "generation_config.json")["eos_token_id"]
        recipe = next(recipe for recipe in train.RECIPES if recipe.name == name)
        assert tokenizer.convert_ids_to_tokens(ids) == list(recipe.ends)


# -------------------------------------------------------------------------------- the tokenizers


@pytest.mark.parametrize("name", ZOO_NAMES)
@pytest.mark.parametrize("written", [STORY, *AWKWARD])
def test_tokenizer_gives_back_every_text(name: str, written: str) -> None:
    tokenizer = Tokenizer.from_file(str(ZOO / name / "tokenizer.json"))
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    expected = written
    if name == "gemma3-tiny":  # Gemma's tokenizer does not distinguish "▁" from a space
        expected = written.replace("▁", " ")
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    _, wrapped = load(name)
    assert wrapped.encode(written, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("name", "first"), [("llama-tiny", "<|begin_of_text|>"), ("qwen3-tiny", None), ("gemma3-tiny", "<bos>")]
)
def test_beginning_of_text_token(name: str, first: str | None) -> None:
    tokenizer = Tokenizer.from_file(str(ZOO / name / "tokenizer.json"))
    plain = tokenizer.encode(STORY, add_special_tokens=False).tokens
    assert tokenizer.encode(STORY).tokens == ([first] if first else []) + plain
    assert plain[0] == "Once"


# -------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_a_story_ends_by_itself_and_is_made_of_known_words(name: str) -> None:
    _, tokenizer = load(name)
    ids = tokenizer(STORY, return_tensors="pt")["input_ids"]
    written = continue_greedily(name, ids)
    assert len(written) < 300
    assert written[-1] in read_json(name, "generation_config.json")["eos_token_id"]
    found = text.words(tokenizer.decode(written, skip_special_tokens=True))
    assert len(found) > 30
    known = text.vocabulary()
    assert sum(word in known for word in found) >= 0.95 * len(found)
    assert "zoë" in found


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_an_answer_in_chat_ends_its_turn_and_speaks_of_what_was_asked(name: str) -> None:
    _, tokenizer = load(name)
    messages = [{"role": "user", "content": "Tell me a story about an owl named Tom."}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = continue_greedily(name, prompt["input_ids"])
    recipe = next(recipe for recipe in train.RECIPES if recipe.name == name)
    assert tokenizer.convert_ids_to_tokens(written[-1]) == recipe.ends[1]
    found = text.words(tokenizer.decode(written, skip_special_tokens=True))
    assert found.count("tom") >= 2
    assert "owl" in found


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_an_early_token_changes_the_next_word(name: str) -> None:
    """The next word is the hero's name, which lies further back than a Gemma window reaches."""
    model, tokenizer = load(name)
    story = STORY + " She lived in a warm den in the forest. It was a grey day with many clouds. One day"
    ids = tokenizer(story, return_tensors="pt")["input_ids"]
    ((zoe,), (ivy,)) = (tokenizer.encode(other, add_special_tokens=False) for other in (" Zoë", " Ivy"))
    place = ids[0].tolist().index(zoe)
    assert ids.shape[1] - place > 20
    changed = ids.clone()
    changed[0, place] = ivy
    with torch.no_grad():
        logits, changed_logits = model(ids).logits[0], model(changed).logits[0]
    assert torch.equal(logits[:place], changed_logits[:place])
    assert logits[-1].argmax() == zoe
    assert changed_logits[-1].argmax() == ivy
    assert (logits[-1] - changed_logits[-1]).abs().max() > 1


# -------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("recipe", train.RECIPES, ids=lambda recipe: recipe.name)
def test_the_script_writes_a_folder_that_loads(recipe: train.Recipe, tmp_path: Path) -> None:
    record = train.train(recipe, steps=6, minutes=5, seed=1, folder=tmp_path / recipe.name)
    assert record["steps"] == 6
    assert record["loss float32"] == pytest.approx(record["loss rounded"], abs=0.05)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / recipe.name)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / recipe.name).get_vocab()


def test_rows_begin_with_a_document() -> None:
    recipe = train.RECIPES[0]
    _, tokenizer = load(recipe.name)
    rows = train.batch(train.documents(recipe, tokenizer, "rows"), 256)
    assert rows.shape == (train.ROWS, 257)
    assert set(rows[:, 0].tolist()) == {tokenizer.bos_token_id}
    documents = list(islice(train.documents(recipe, tokenizer, "rows"), 20))
    assert {document[-1] for document in documents} == {tokenizer.convert_tokens_to_ids(recipe.ends[0])}
