"""GGUF files: their weights, shapes and tokenizers, and one-line errors for broken files."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import struct
import tracemalloc
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from torch import Tensor
from transformers import AutoTokenizer

from common.errors import StartupError
from common.llm import LLM
from common.models.config import LinearScaling
from common.models.gguf import file as gguf_file
from common.models.gguf.file import PLAIN, READABLE, GGUFFile
from common.models.gguf.groups import KINDS
from common.models.gguf.tokenizer import GGUFVocabulary
from common.models.layers import CausalLM, Linear, rope_frequencies
from common.models.registry import open_checkpoint, weight_bytes
from common.models.tokenizer_files import open_tokenizer
from common.request import SamplingParams
from common.startup.phases import find_phase
from common.text.tokenizer import Tokenizer
from kernels.dispatch import has_native_products
from kernels.grouped import unpack
from tests.support.gguf_files import (
    ARCHITECTURES,
    BYTE,
    CONTROL,
    UNKNOWN,
    add_entry,
    add_tokenizer,
    finish,
    save_gguf,
)
from tests.support.models import (
    draw_ids,
    largest_difference,
    load,
    refusal_of,
    save_tiny,
    solo_logits,
    zoo,
)
from tests.support.strings import strings

#: The text that `train_sentencepiece` learns from, beside indented code. It has runs of 2 to 16 spaces.
_TEXT = ["the fox and the hen", "if x: return y", *("a" + " " * n for n in range(1, 20) for _ in range(n))]


def train_sentencepiece(*, spaces_last: bool, add_dummy_prefix: bool = True) -> bytes:
    """Train a SentencePiece model of 1,000 tokens on this package's code, and return its file's bytes.

    Args:
        spaces_last: give runs of spaces the lowest score, -1e9, as in Mistral's vocabulary.
        add_dummy_prefix: whether a space is put before each text.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines() + _TEXT * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        add_dummy_prefix=add_dummy_prefix,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["[INST]", "[/INST]"],
        minloglevel=2,
    )
    content = model.getvalue()
    if spaces_last:
        # Each token is stored as 0x0a, the length of its text, the text, 0x15, and four bytes of its score.
        stored = re.compile(rb"(\x0a.(?:\xe2\x96\x81){2,}\x15)(?s:....)")
        content, count = stored.subn(lambda found: found[1] + struct.pack("<f", -1e9), content)
        assert count > 3
    return content


def add_sentencepiece(writer: gguf.GGUFWriter, model: bytes, **replaced: Any) -> None:
    """Write a SentencePiece model as llama.cpp's converter does."""
    source = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(source.vocab_size())

    def kind(i: int) -> int:
        kinds = {UNKNOWN: source.is_unknown, CONTROL: source.is_control, BYTE: source.is_byte}
        user_defined = source.id_to_piece(i) in ("[INST]", "[/INST]")
        return next((kind for kind, holds in kinds.items() if holds(i)), 4 if user_defined else 1)

    entries = {
        "model": "llama",
        "tokens": [source.id_to_piece(i) for i in ids],
        "scores": [source.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "unknown_token_id": source.unk_id(),
        "bos_token_id": source.bos_id(),
        "eos_token_id": source.eos_id(),
    }
    for key, value in (entries | replaced).items():
        if value is not None:
            add_entry(writer, f"tokenizer.ggml.{key}", value)


def save_tensor(target: Path, name: str, data: np.ndarray[Any, Any], kind: str) -> Path:
    """Write a file with one tensor, whose bytes are given."""
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    return target


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random bytes of a quantized matrix. Any bytes are valid if their scales are finite."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    if kind == "F32":
        return generator.standard_normal((rows, width), np.float32)
    # No byte of a half-precision number above 0x3f makes it infinite, and its sign does not matter here.
    return generator.integers(0, 0x40, (rows, width // block_values * block_bytes), np.uint8)


EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}


def refusal(path: Path) -> str:
    """Return the one-line error with which a file is refused."""
    message = refusal_of(load, path)
    assert str(path) in message
    return message


def save(tmp_path: Path, architecture: str = "llama", **arguments: Any) -> Path:
    return save_gguf(save_tiny(tmp_path / "source", architecture), tmp_path / "model.gguf", **arguments)


# ---------------------------------------------------------------------- weights and shapes


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@EVERY_ARCHITECTURE
def test_a_gguf_file_computes_the_logits_of_its_source(
    architecture: str, tied: bool, biased: bool, tmp_path: Path
) -> None:
    if biased and architecture not in BIASED:
        pytest.skip("no entry of its config adds biases")
    entries = BIASED[architecture] if biased else {}
    source = save_tiny(tmp_path / "source", architecture, tie_word_embeddings=tied, **entries)
    file = save_gguf(source, tmp_path / "model.gguf")
    theirs, ours = open_checkpoint(str(source)).config, open_checkpoint(str(file)).config
    assert ours.architecture == theirs.architecture
    assert [layer.window for layer in ours.layers] == [layer.window for layer in theirs.layers]
    assert [layer.rope for layer in ours.layers] == [layer.rope for layer in theirs.layers]
    assert ours.tie_word_embeddings == tied
    expected, found = load(source), load(file)
    ids = draw_ids(60)
    # Gemma's norms are stored as w + 1, and (w + 1) - 1 is not always w.
    bound = 1e-5 if architecture == "gemma3_text" else 1e-6
    assert largest_difference(solo_logits(found, ids), solo_logits(expected, ids)) < bound
    for (name, a), (_, b) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=2e-7 if "norm" in name else 0), name


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("kind", READABLE)
def test_every_type_is_dequantized_some_rows_at_a_time(
    kind: str, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_blocks(kind, rows=24, width=512)
    name = "blk.0.attn_q.weight"
    tensor = GGUFFile.open(save_tensor(tmp_path / "one.gguf", name, data, kind)).tensors[name]
    assert tensor.shape == (24, 512)
    whole = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).copy())
    expected = whole.view(3, 4, 2, 512).swapaxes(1, 2).reshape(24, 512) if heads else whole
    monkeypatch.setattr(gguf_file, "_CHUNK_VALUES", 5 * 512)
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.empty(24, 512, dtype=dtype)
        dataclasses.replace(tensor, heads=heads).read_into(target)
        assert torch.equal(target, expected.to(dtype))


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind not in PLAIN])
@pytest.mark.parametrize("native", [True, False])
def test_every_quantized_type_is_read_as_its_own_numbers(
    native: bool, kind: str, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("common.models.gguf.groups.use_native", lambda _: False)
    rows = 24 if heads else 75
    data = random_blocks(kind, rows=rows, width=512)
    file = save_tensor(tmp_path / "one.gguf", "blk.0.attn_q.weight", data, kind)
    tensor = dataclasses.replace(GGUFFile.open(file).tensors["blk.0.attn_q.weight"], heads=heads)
    expected = torch.empty(rows, 512)
    tensor.read_into(expected)
    monkeypatch.setattr("common.models.gguf.groups.CHUNK_WEIGHTS", 32 * 512)
    form = KINDS[kind].form
    panels = torch.empty(form.num_bytes(rows, 512), dtype=torch.uint8)
    tensor.read_into(panels)
    assert panels.nbytes < 1.05 * file.stat().st_size * -(-rows // 32) * 32 / rows
    assert torch.equal(unpack(panels, form, 512)[:rows], expected)


#: Sizes that are whole blocks, and types as files of four bits mix them.
WHOLE_BLOCKS = {"hidden_size": 96, "intermediate_size": 160}
MIXED = {"attn_v": "Q5_1", "attn_k": "Q8_0", "ffn_down": "Q5_0", "ffn_up": "Q4_1", "token_embd": "Q8_0"}


def save_mixed(tmp_path: Path, architecture: str = "llama", **entries: Any) -> Path:
    source = save_tiny(tmp_path / "source", architecture, **WHOLE_BLOCKS, **entries)
    return save_gguf(source, tmp_path / "model.gguf", lambda name: MIXED.get(name.split(".")[-2], "Q4_0"))


@pytest.mark.parametrize("tied", [True, False])
@EVERY_ARCHITECTURE
def test_a_model_in_its_own_bits_computes_what_its_dequantized_weights_do(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    file = save_mixed(tmp_path, architecture, tie_word_embeddings=tied)
    model = load(file, keep_groups=True)
    assert all(layer.layout is not None for layer in model.linear_layers())
    assert model.embed_tokens.weight.dtype == torch.uint8
    sizes = [parameter.nbytes for parameter in model.parameters()]
    form_of = open_checkpoint(str(file)).form_of
    assert sum(sizes) == weight_bytes(model.config, torch.float32, packed=True, form_of=form_of)
    ids = draw_ids(60)
    expected = solo_logits(load(file), ids)
    bound = 1e-5 * expected.abs().max().item()
    assert largest_difference(solo_logits(model, ids), expected) < bound
    model.pack()  # changes nothing
    assert largest_difference(solo_logits(model, ids), expected) < bound


def test_a_layer_with_a_matrix_that_is_not_quantized_is_dequantized(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama", **WHOLE_BLOCKS)
    file = save_gguf(source, tmp_path / "model.gguf", lambda name: "F16" if "attn_v" in name else "Q4_0")
    model = load(file, keep_groups=True)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            assert (module.layout is None) == ("qkv_proj" in name)


@pytest.mark.parametrize(
    ("quantize", "weights"), [(None, "Q4_0"), ("none", "float32"), ("int8", "int8"), ("int4", "int4")]
)
def test_what_is_served_is_said(
    quantize: str | None, weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not has_native_products(torch.empty(0)):
        pytest.skip("without native kernels, weights are dequantized")
    caplog.set_level("INFO")
    file = save_mixed(tmp_path)
    package = find_phase("static")
    options = {} if quantize is None else {"quantize": quantize}
    engine = package.build_engine(package.Config(model=str(file), dtype="float32", **options))
    assert engine.maker.facts.weight_dtype.startswith(weights)
    loaded = next(line for line in caplog.messages if line.startswith("loaded"))
    said = {
        None: "bits a weight, computed in float32",
        "none": "dequantized to float32",
        "int8": "int8 weights",
        "int4": "int4 weights",
    }
    assert said[quantize] in loaded


def divisors(source: Path) -> Tensor:
    """Return the divisors of the rotary frequencies in Llama 3.1's scaling."""
    config = open_checkpoint(str(source)).config
    rope = config.layers[0].rope
    return rope_frequencies(type(rope)(rope.theta), config.head_dim) / rope_frequencies(rope, config.head_dim)


def test_scaled_frequencies(tmp_path: Path) -> None:
    """Llama 3.1's scaling is a tensor of divisors. Linear scaling is metadata. Any other scaling is refused."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = save_tiny(tmp_path / "source", "llama", rope_parameters=scaling)

    def add(writer: gguf.GGUFWriter, tensors: dict[str, Tensor]) -> None:
        tensors["rope_freqs.weight"] = divisors(source)

    file = save_gguf(source, tmp_path / "model.gguf", change=add)
    ids = draw_ids(200)
    assert largest_difference(solo_logits(load(file), ids), solo_logits(load(source), ids)) < 1e-4

    linear = save_gguf(
        source, tmp_path / "linear.gguf", rope__scaling__type="linear", rope__scaling__factor=4.0
    )
    assert open_checkpoint(str(linear)).config.layers[0].rope.scaling == LinearScaling(4.0)
    yarn = save_gguf(source, tmp_path / "yarn.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert "rope.scaling.type = 'yarn' is not implemented" in refusal(yarn)


def add_bos_and_scaling(writer: gguf.GGUFWriter, tensors: dict[str, Tensor]) -> None:
    tensors["rope_freqs.weight"] = divisors(zoo("llama-tiny"))
    writer.add_bos_token_id(1019)
    writer.add_add_bos_token(True)


def test_a_file_is_served(tmp_path: Path) -> None:
    """The latest phase serves a file by its path, and by the name of its folder."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')  # as some repositories of GGUF files have
    save_gguf(zoo("llama-tiny"), folder / "model.gguf", change=add_bos_and_scaling)
    params = SamplingParams(temperature=0.0, max_new_tokens=24)
    options = {"dtype": "float32", "max_seq_len": 64}
    (theirs,) = LLM("zoo:llama-tiny", **options).generate("Once upon a time", params, progress=False)
    (ours,) = LLM(str(folder), **options).generate([theirs.prompt], params, progress=False)
    assert ours.token_ids == theirs.token_ids
    (folder / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"several GGUF files: name one of model\.gguf, second\.gguf"):
        open_checkpoint(str(folder))


def test_a_model_in_parts_is_found_by_its_folder_and_by_each_part(tmp_path: Path) -> None:
    source, folder = save_tiny(tmp_path / "source", "llama"), tmp_path / "split"
    folder.mkdir()
    save_gguf(
        source, folder / "model.gguf", change=lambda writer, _: setattr(writer, "split_max_tensors", 12)
    )
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    ids = draw_ids(20)
    expected = solo_logits(load(save_gguf(source, tmp_path / "whole.gguf")), ids)
    for name in (folder, *parts):
        assert torch.equal(solo_logits(load(name), ids), expected)

    whole = parts[1].read_bytes()
    parts[1].write_bytes(parts[0].read_bytes())
    assert f"{parts[1]} is not part 2 of the model" in refusal_of(load, folder)
    parts[1].unlink()
    for name in (folder, parts[0], parts[2]):
        assert "is one of 3 parts, and 1 are missing: model-00002-of-00003.gguf" in refusal_of(load, name)
    parts[1].write_bytes(whole)
    parts[2].rename(folder / "renamed.gguf")
    assert "its name does not tell the others'" in refusal_of(load, folder / "renamed.gguf")


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_whose_parts_were_merged_is_one_file(count: int, tmp_path: Path) -> None:
    """llama.cpp's `gguf-split --merge` sets `split.count` to 0, and leaves the other entries."""

    def merged(writer: gguf.GGUFWriter, tensors: dict[str, Tensor]) -> None:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))

    expected, ids = solo_logits(load(save(tmp_path)), draw_ids(20)), draw_ids(20)
    assert torch.equal(solo_logits(load(save(tmp_path, change=merged)), ids), expected)


# ---------------------------------------------------------------------- tokenizers


def save_vocabulary(path: Path, name: str, architecture: str = "llama", **replaced: Any) -> Path:
    """Write a file with a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer, name, **replaced)
    finish(writer)
    return path


def backend_of(path: Path) -> tokenizers.Tokenizer:
    return GGUFVocabulary(GGUFFile.open(path)).backend()


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "llama3", "deepseek-r1-qwen", "mellum"])
def test_byte_level_tokens_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    path = save_vocabulary(tmp_path / "v.gguf", "llama-tiny", pre=pre, add_bos_token=False)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = backend_of(path)
    for text in strings(300):
        if "<|endoftext|>" in text:  # transformers adds this token, which the file does not have
            continue
        if "qwen" in pre:  # Qwen's own tokenizer.json composes characters first
            text = unicodedata.normalize("NFC", text)
        assert ours.encode(text).ids == oracle.encode(text, add_special_tokens=False), text
        ids = ours.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("spaces_last", [True, False])
def test_sentencepiece_tokens_are_those_of_the_library(
    spaces_last: bool, prefix: bool, tmp_path: Path
) -> None:
    """As in llama.cpp, special tokens in a text divide it, and each part is tokenized like a text of its own."""
    model = train_sentencepiece(spaces_last=spaces_last, add_dummy_prefix=prefix)
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    add_sentencepiece(writer, model, add_space_prefix=prefix)
    finish(writer)
    ours = Tokenizer(backend_of(tmp_path / "v.gguf"), vocab_size=1000)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in strings(2000):
        parts = re.split(r"(<s>|</s>|\[INST\]|\[/INST\])", text)
        expected = [
            oracle.encode(part) if i % 2 == 0 else [oracle.piece_to_id(part)] for i, part in enumerate(parts)
        ]
        ids = ours.encode(text)
        assert ids == [oracle.bos_id(), *itertools.chain(*expected)], repr(text)
        if len(parts) == 1 and "▁" not in text:
            assert ours.decode(ids) == text
            tokens = [ours.token_bytes(i, first=place == 0) for place, i in enumerate(ids[1:])]
            assert b"".join(tokens) == text.encode()


@pytest.mark.parametrize(
    ("replaced", "ends", "bos"),
    [
        ({"bos_token_id": 1019, "eos_token_id": 5}, {5}, []),
        ({"bos_token_id": 1019, "eos_token_id": 5, "eot_token_id": 7}, {5, 7}, []),
        ({"bos_token_id": 1019, "add_bos_token": True}, set(), [1019]),
        ({"bos_token_id": 1019, "pre": "llama-bpe"}, set(), [1019]),
        ({"bos_token_id": 1019, "pre": "llama-v3"}, set(), [1019]),
        ({"bos_token_id": 1019, "pre": "llama-bpe", "add_bos_token": False}, set(), []),
    ],
    ids=str,
)
def test_first_and_last_tokens(
    replaced: dict[str, Any], ends: set[int], bos: list[int], tmp_path: Path
) -> None:
    vocabulary = GGUFVocabulary(GGUFFile.open(save_vocabulary(tmp_path / "v.gguf", "llama-tiny", **replaced)))
    assert set(vocabulary.end_token_ids()) == ends | {1020, 1023}  # <|end_of_text|>, <|eot_id|>
    tokenizer = vocabulary.backend()
    text = tokenizer.encode("a fox", add_special_tokens=False).ids
    assert tokenizer.encode("a fox").ids == [*bos, *text]


@pytest.mark.parametrize(
    ("ends", "others"),
    [
        ("<|endoftext|> <|im_end|>", "<|im_start|> <|file_sep|>"),  # Qwen 3
        ("<|end_of_text|> <|eom_id|> <|eot_id|>", "<|start_header_id|>"),  # Llama 3.1
        ("<eos> <end_of_turn>", "<bos> </s>"),  # Gemma 3
    ],
)
def test_an_answer_ends_as_the_models_generation_config_says(ends: str, others: str, tmp_path: Path) -> None:
    """A GGUF file of each of these models names the last of these tokens alone. A plain word ends nothing."""
    tokens, last = ["a", *ends.split(), *others.split()], len(ends.split())
    for kind, expected in ((CONTROL, set(range(1, last + 1))), (1, {last})):
        kinds = [1, *(kind for _ in tokens[1:])]
        path = save_vocabulary(
            tmp_path / "v.gguf", "llama-tiny", tokens=tokens, token_type=kinds, eos_token_id=last
        )
        assert set(GGUFVocabulary(GGUFFile.open(path)).end_token_ids()) == expected


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("written", ["", "{{ bos_token }}", "<s>"])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_a_conversation_begins_with_bos_once_if_texts_do(
    add_bos: bool | None, written: str, as_file: bool, tmp_path: Path
) -> None:
    """As in llama.cpp. Without an entry, SentencePiece's texts begin with BOS."""
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    add_sentencepiece(writer, train_sentencepiece(spaces_last=False), add_bos_token=add_bos)
    source = written + "{% for each in messages %}[INST] {{ each.content }} [/INST]{% endfor %}"
    writer.add_chat_template(
        [{"name": "default", "template": source}, {"name": "tool_use", "template": source}]
    )
    finish(writer)
    (tmp_path / "own.jinja").write_text(source)
    own = tmp_path / "own.jinja" if as_file else None
    tokenizer = open_tokenizer(tmp_path / "v.gguf", vocab_size=1000, chat_template=own)
    assert tokenizer.chat_template is not None
    begins = [1] * (written != "" or add_bos is not False)
    for template in (tokenizer.chat_template, tokenizer.chat_template.for_tools):
        ids = tokenizer.encode(
            template.render([{"role": "user", "content": "a fox"}]), add_special_tokens=False
        )
        assert ids == [*begins, *tokenizer.encode("[INST] a fox [/INST]", add_special_tokens=False)]


# ---------------------------------------------------------------------- broken files


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(tmp_path)


def drop(name: str) -> Callable[[gguf.GGUFWriter, dict[str, Tensor]], object]:
    return lambda writer, tensors: tensors.pop(name)


def test_a_truncated_file(whole: Path) -> None:
    """The file may end in the magic number, the metadata, the table of tensors, or the data."""
    content = whole.read_bytes()
    start = GGUFFile.open(whole).tensors["token_embd.weight"].offset
    for size in (0, 3, 4, 20, 24, 300, start - 200, start + 10, len(content) - 40):
        whole.write_bytes(content[:size])
        assert ("no GGUF file" if size < 4 else "is damaged or cut off") in refusal(whole)
    whole.write_bytes(content)
    load(whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"change": drop("blk.1.attn_k.weight")}, "missing: blk.1.attn_k.weight"),
        ({"change": drop("token_embd.weight")}, "missing: token_embd.weight"),
        (
            {"change": lambda _, tensors: tensors.update({"blk.2.ffn_gate.weight": torch.zeros(56, 40)})},
            "wrong shape: blk.2.ffn_gate.weight is [56, 40], metadata makes it [56, 42]",
        ),
        (
            {"change": lambda _, tensors: tensors.update({"blk.0.extra.weight": torch.zeros(3)})},
            "unexpected: blk.0.extra.weight",
        ),
        ({"embedding_length": None}, "its metadata lacks llama.embedding_length"),
        ({"embedding_length": 2**31}, "its metadata makes it [97, 2147483648]"),
        ({"block_count": 2**31}, "block_count is 2147483648, and there are tensors of 3 layers"),
        ({"feed_forward_length": 2**32 - 1}, "its metadata makes it [4294967295, 42]"),
        ({"attention__head_count": 0}, "llama.attention.head_count must be a positive integer, not 0"),
        ({"attention__head_count": [6, 6, 6]}, "must be a positive integer, not [6, 6, 6]"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "rms_norm_eps must be a positive number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_contradicts_itself(
    arguments: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("memory was taken before the tensors were checked")

    path = save(tmp_path, **arguments)
    monkeypatch.setattr(CausalLM, "materialise", refuse)
    assert words in refusal(path)


def test_absurd_counts_take_no_memory(whole: Path) -> None:
    """Files claim more tensors, entries, tokens or bytes than they can have."""
    content = whole.read_bytes()
    tokens = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4
    name = b"blk.0.attn_q.weight"
    dimensions = content.index(name) + len(name)
    changes = {
        8: struct.pack("<Q", 2**60),  # tensors
        16: struct.pack("<Q", 2**60),  # entries
        24: struct.pack("<Q", 2**63),  # the length of the first key
        tokens + 4: struct.pack("<Q", 2**60),
        tokens: struct.pack("<I", 4),  # numbers, not texts
        dimensions: struct.pack("<I", 2**31),
        dimensions + 4: struct.pack("<Q", 2**62),
    }
    tracemalloc.start()
    for at, value in changes.items():
        whole.write_bytes(content[:at] + value + content[at + len(value) :])
        refusal(whole)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_gemmas_windows_are_every_sixth_layers_if_the_file_does_not_say(tmp_path: Path) -> None:
    source = save_tiny(
        tmp_path / "source",
        "gemma3_text",
        num_hidden_layers=7,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    )
    absent = ("attention__sliding_window_pattern", "attention__scale", "rope__freq_base_swa")
    file = save_gguf(source, tmp_path / "model.gguf", **dict.fromkeys(absent))
    config = open_checkpoint(str(file)).config
    assert [layer.window for layer in config.layers] == [8] * 5 + [None, 8]
    assert [layer.rope.theta for layer in config.layers] == [10_000.0] * 5 + [40_000.0, 10_000.0]
    assert config.attention_scale == config.head_dim**-0.5


@pytest.mark.parametrize(
    "entries",
    [
        {"expert_count": 8},
        {"rope__dimension_count": 8},
        {"attention__value_length": 8},
        {"attention__scale": 0.5},
        {"final_logit_softcapping": 30.0},
    ],
    ids=str,
)
def test_what_would_change_the_numbers_is_refused(entries: dict[str, Any], tmp_path: Path) -> None:
    (key,) = entries
    assert f"llama.{key.replace('__', '.')} = " in refusal(save(tmp_path, **entries))


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not implemented"),
        ({"pre": "tekken"}, "the pre-tokenizer 'tekken' is not implemented"),
        ({"pre": None}, "the pre-tokenizer None is not implemented"),
        ({"token_type": [1, 1]}, "do not fit their types"),
        ({"merges": ["one", "t h e"]}, "its merges do not fit its tokens"),
        ({"merges": [1, 2]}, "its merges do not fit its tokens"),
        ({"tokens": 5}, "its tokens are not a list of texts"),
        ({"token_type": 5}, "do not fit their types"),
        ({"model": "llama", "scores": [1.0]}, "its scores are not one number for each of its tokens"),
        ({"model": "llama", "scores": "high"}, "its scores are not one number for each of its tokens"),
        ({"merges": ["no tokens"]}, "its merges do not fit its tokens"),
        ({"bos_token_id": 999_999, "add_bos_token": True}, "bos_token_id = 999999 is none of its"),
    ],
    ids=str,
)
def test_a_tokenizer_that_is_not_implemented_is_refused(
    replaced: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = save_vocabulary(tmp_path / "v.gguf", "llama-tiny", **replaced)
    with pytest.raises(StartupError, match=words) as caught:
        backend_of(path)
    assert str(tmp_path / "v.gguf") in str(caught.value)


def test_a_file_that_is_no_gguf(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    whole.write_bytes(b"PK\x03\x04" + content[4:])
    assert "is no GGUF file: it begins with b'PK" in refusal(whole)
    whole.write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    assert "is GGUF of version 1" in refusal(whole)
    assert "there is no GGUF file" in refusal(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("number", "words"), [(16, "is stored as IQ2_XXS"), (4_000_000, "is stored as the unknown type 4000000")]
)
def test_a_type_that_is_not_read(number: int, words: str, whole: Path) -> None:
    name = b"blk.0.attn_q.weight"
    content = bytearray(whole.read_bytes())
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = struct.pack("<I", number)
    whole.write_bytes(content)
    message = refusal(whole)
    assert words in message
    assert name.decode() in message
