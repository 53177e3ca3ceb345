"""Tokenizers of Hugging Face folders: tokens that only small files name, and the ends of answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.models.registry import open_checkpoint
from common.startup.phases import find_phase
from tests.support.gguf_files import save_gguf
from tests.support.models import ZOO_NAMES, save_tiny, zoo
from tests.support.strings import strings


def folder_of(
    tmp_path: Path, name: str, config: dict[str, Any], vocab_size: int = 97, **files: dict[str, Any]
) -> Path:
    """Write a tiny model with the tokenizer of a model of the zoo.

    Args:
        config: changes to its `tokenizer_config.json`.
        files: contents of further JSON files, by name without the ending.
    """
    folder = save_tiny(tmp_path / "model", "llama", vocab_size=vocab_size, eos_token_id=3)
    for file in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(zoo(name) / file, folder)
    own = json.loads((zoo(name) / "tokenizer_config.json").read_text())
    for file, content in {"tokenizer_config": own | config, **files}.items():
        (folder / f"{file}.json").write_text(json.dumps(content), "utf-8-sig")
    return folder


def oracle_of(folder: Path) -> Any:
    """Return the tokenizer of `transformers`."""
    for path in folder.glob("*.json"):  # it reads no byte-order mark
        path.write_text(path.read_text("utf-8-sig"))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("source", ["added_tokens_decoder", "added_tokens.json"])
@pytest.mark.parametrize("name", ZOO_NAMES)
def test_added_tokens_are_those_of_transformers(name: str, source: str, tmp_path: Path) -> None:
    """Two new tokens, and one that is in the vocabulary already."""
    plain = AutoTokenizer.from_pretrained(zoo(name))
    texts = ("<|call|>", "<note>", "in")
    ids = (len(plain), len(plain) + 1, plain.convert_tokens_to_ids("in"))
    tokens = {
        str(i): {"content": text, "special": text == "<|call|>"} for i, text in zip(ids, texts, strict=True)
    }
    if source == "added_tokens.json":
        folder = folder_of(tmp_path, name, {}, added_tokens=dict(zip(texts, ids, strict=True)))
    else:
        folder = folder_of(tmp_path, name, {"added_tokens_decoder": tokens})
    ours = open_checkpoint(str(folder)).tokenizer()
    oracle = oracle_of(folder)
    assert [ours.encode(text, add_special_tokens=False) for text in texts] == [[i] for i in ids]
    for number, text in enumerate(strings(300)):
        text = text.replace(" ", f" {texts[number % 3]} ", 2)
        assert ours.encode(text) == oracle.encode(text), repr(text)
        assert ours.decode(oracle.encode(text)) == oracle.decode(
            oracle.encode(text), skip_special_tokens=True
        )


TURN_END = {"content": "<|eot_id|>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eos_token": "<|eot_id|>"},
        {"pad_token": "in"},
        {"added_tokens_decoder": {"1023": TURN_END}},
        {"added_tokens_decoder": {"1023": TURN_END | {"special": False, "lstrip": True, "rstrip": True}}},
        {"added_tokens_decoder": {"1023": TURN_END | {"special": False}}, "eos_token": "<|eot_id|>"},
    ],
    ids=str,
)
def test_flags_of_known_tokens_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """`tokenizer.json` has the token, but not as a special one."""
    folder = folder_of(tmp_path, "llama-tiny", config, vocab_size=1024, added_tokens={"<|eot_id|>": 1023})
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    assert vocabulary["added_tokens"][-1].pop("content") == TURN_END["content"]
    vocabulary["added_tokens"][-1] |= TURN_END | {"special": False}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    ours = open_checkpoint(str(folder)).tokenizer()
    oracle = oracle_of(folder)
    ids = oracle.encode("A fox <|eot_id|>  in the rain<|eot_id|>")
    assert ours.encode("A fox <|eot_id|>  in the rain<|eot_id|>") == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


ENDS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("config", "template", "ends"),
    [
        ({"eos_token": "<|im_end|>"}, None, {3, 999}),
        ({"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, None, {3, 999}),
        ({"eos_token": None}, None, {3, 999}),
        ({"eos_token": "<|endoftext|>"}, "{% for %}", {3, 997}),
        ({"eos_token": "<|endoftext|>"}, ENDS, {3, 997, 1000}),
        ({"eos_token": "<|none of them|>"}, "{{ raise_exception('no') }}", {3}),
    ],
    ids=str,
)
def test_where_an_answer_ends(
    config: dict[str, Any], template: str | None, ends: set[int], tmp_path: Path
) -> None:
    """The EOS of config.json and of tokenizer_config.json, and the token that the template writes."""
    added = {"1000": {"content": "<|end|>", "special": False}}
    folder = folder_of(tmp_path, "qwen3-tiny", {**config, "added_tokens_decoder": added}, vocab_size=1001)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config.eos_token_ids == ends
    assert ("eos_token" in str(checkpoint.unused)) == ("<|none of them|>" in str(config))


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("as_objects", [False, True])
def test_special_tokens_map_counts_as_in_transformers(as_objects: bool, is_new: bool, tmp_path: Path) -> None:
    """An older checkpoint names its special tokens in this file. With `added_tokens_decoder`, it does not count."""
    named = {"bos_token": "<|end_header_id|>", "eos_token": "<|start_header_id|>"}
    objects = {name: {"content": text, "lstrip": False} for name, text in named.items()}
    config: dict[str, Any] = {"added_tokens_decoder": {}} if is_new else {}
    folder = folder_of(
        tmp_path, "llama-tiny", config, vocab_size=1024, special_tokens_map=objects if as_objects else named
    )
    checkpoint = open_checkpoint(str(folder))
    oracle = oracle_of(folder)
    asked = [{"role": "user", "content": "Hi"}]
    template = checkpoint.tokenizer().chat_template
    assert template is not None
    assert template.render(asked) == oracle.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    end_of_turn = oracle.convert_tokens_to_ids("<|eot_id|>")
    assert checkpoint.config.eos_token_ids == {3, oracle.eos_token_id, end_of_turn}


@pytest.mark.parametrize("form", ["folder", "GGUF"])
def test_a_template_of_ones_own_says_where_an_answer_ends(form: str, tmp_path: Path) -> None:
    """A base model gets a template whose messages end with a token that is no end elsewhere."""
    model = folder_of(tmp_path, "qwen3-tiny", {"eos_token": "<|endoftext|>"}, vocab_size=1000)
    (model / "chat_template.jinja").unlink()
    if form == "GGUF":
        model = save_gguf(model, tmp_path / "model.gguf", tokenizer="qwen3-tiny")
    end = AutoTokenizer.from_pretrained(zoo("qwen3-tiny")).convert_tokens_to_ids("<|im_start|>")
    package, odd, between = find_phase("static"), tmp_path / "odd.jinja", tmp_path / "between.jinja"
    chatml = (Path(__file__).parent / "templates" / "chatml.jinja").read_text()
    odd.write_text(chatml.replace("<|im_end|>", "<|im_start|>"))
    between.write_text(  # as in the ChatML template among vLLM's examples
        odd.read_text().replace("'<|im_start|>' + '\\n'", "('' if loop.last else '<|im_start|>\\n')")
    )
    for template, is_end in ((None, False), (odd, True), (between, True)):
        config = package.Config(model=str(model), chat_template=template, device="cpu", dtype="float32")
        assert (end in package.build_engine(config).maker.facts.eos_token_ids) == is_end


def test_what_is_not_used_is_named(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        "llama-tiny",
        {
            "chat_template": [{"name": name, "template": "x"} for name in ("default", "rag", "tool_use")],
            "added_tokens_decoder": {"5000": {"content": "<far>"}},
        },
        generation_config={"eos_token_id": 10**6, "suppress_tokens": [3], "num_beams": 1, "do_sample": True},
        adapter_config={},
        special_tokens_map={},
    )
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["mrope_section"] = [16, 24, 24]
    (folder / "config.json").write_text(json.dumps(config), "utf-8-sig")
    (folder / "README.md").write_text("# A model")
    assert open_checkpoint(str(folder)).unused == [
        "EOS tokens outside the vocabulary: [1020, 1023, 1000000]",
        "the token '<far>' with the id 5000",
        "chat templates: rag, the one in tokenizer_config.json",
        "rotary settings: rope_parameters.mrope_section",
        "entries of generation_config.json: suppress_tokens",
        "files: adapter_config.json",
    ]
