"""config.json of every style and age, read into one form."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from common.errors import StartupError
from common.kv import kv_bytes
from common.models.config import (
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    token_id_set,
)
from common.models.registry import parse_config
from common.zoo.presets import PRESETS
from tests.helpers import ARCHITECTURES, as_transformers_4

# What the families publish, written by transformers 4, entries that say nothing of the shape left out.
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "vocab_size": 32000,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vocab_size": 262144,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": LLAMA_32_1B,
    "qwen3-0.6b": QWEN3_06B,
    "gemma-3-1b": GEMMA_3_1B,
}
OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "llama": LLAMA_32_1B,
    "mistral": MISTRAL_7B,
    "qwen2": QWEN25_05B,
    "qwen3": QWEN3_06B,
    "gemma3_text": GEMMA_3_1B,
}
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)


def refusal(raw: Mapping[str, Any]) -> str:
    with pytest.raises(StartupError) as caught:
        parse_config(raw)
    message = str(caught.value)
    assert "\n" not in message
    return message


def resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config.json, its defaults filled in, written in the style of version 5."""
    config = AutoConfig.for_model(**copy.deepcopy(dict(raw)))  # it writes into what it is given
    return {**config.to_dict(), "dtype": raw.get("dtype", raw.get("torch_dtype"))}


def llama(**entries: Any) -> dict[str, Any]:
    return LLAMA_32_1B | entries


def gemma(**entries: Any) -> dict[str, Any]:
    return GEMMA_3_1B | entries


# ---------------------------------------------------------------------- what is read


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_shape(preset: str) -> None:
    published = parse_config(PUBLISHED[preset] | {"eos_token_id": None})
    assert parse_config(PRESETS[preset]) == published


def test_llama_is_read_entry_by_entry() -> None:
    config = parse_config(LLAMA_32_1B)
    rope = RopeConfig(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        layers=(LayerConfig(window=None, rope=rope),) * 16,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        activation="silu",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        norm_offset=0.0,
        tie_word_embeddings=True,
        attention_scale=0.125,
        dtype=torch.bfloat16,
        eos_token_ids=frozenset({128_001, 128_008, 128_009}),
    )


@pytest.mark.parametrize("family", [QWEN25_05B, QWEN3_06B], ids=["qwen2", "qwen3"])
def test_a_qwens_windows_begin_at_a_layer_if_they_are_in_use(family: dict[str, Any]) -> None:
    raw = family | {"num_hidden_layers": 4, "sliding_window": 512, "max_window_layers": 3}
    assert [layer.window for layer in parse_config(raw).layers] == [None] * 4
    raw["use_sliding_window"] = True
    assert [layer.window for layer in parse_config(raw).layers] == [None, None, None, 512]
    assert (
        parse_config(raw | {"sliding_window": None}).layers
        == parse_config(raw | {"max_window_layers": 4}).layers
    )
    raw["layer_types"] = ["sliding_attention", "full_attention"] * 2
    assert [layer.window for layer in parse_config(raw).layers] == [512, None, 512, None]


def test_mistrals_window_is_for_every_layer_or_for_none() -> None:
    assert {layer.window for layer in parse_config(MISTRAL_7B).layers} == {4096}
    assert {layer.window for layer in parse_config(MISTRAL_7B | {"sliding_window": None}).layers} == {None}


@EVERY_ARCHITECTURE
def test_biases_of_queries_keys_and_values_and_of_the_output(architecture: str) -> None:
    for asked in (False, True):
        config = parse_config(OF_ARCHITECTURE[architecture] | {"attention_bias": asked})
        if architecture in ("mistral", "qwen2"):  # the entry is not theirs
            assert (config.qkv_bias, config.o_bias) == (architecture == "qwen2", False)
        else:
            assert (config.qkv_bias, config.o_bias) == (asked, asked)


def test_gemma_alternates_windows_and_bases() -> None:
    config = parse_config(gemma(query_pre_attn_scalar=100))
    local = LayerConfig(window=512, rope=RopeConfig(10_000.0))
    everything = LayerConfig(window=None, rope=RopeConfig(1_000_000.0))
    assert config.layers == (((local,) * 5 + (everything,)) * 5)[:26]
    assert config.attention_scale == pytest.approx(0.1)
    assert config.activation == "gelu_tanh"


def test_gemma_scaling_is_for_global_layers_only() -> None:
    old = gemma(rope_scaling={"rope_type": "linear", "factor": 8.0})
    for raw in (old, resolved(old)):
        ropes = {layer.window: layer.rope for layer in parse_config(raw).layers}
        assert ropes == {512: RopeConfig(10_000.0), None: RopeConfig(1_000_000.0, LinearScaling(8.0))}


# What Google's 4B says of its language model, and all that it says.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}


def test_of_a_multimodal_gemma_the_language_model_is_read() -> None:
    config = parse_config(GEMMA_3_4B)
    assert config.architecture == "gemma3_text"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert (config.hidden_size, config.vocab_size, config.tie_word_embeddings) == (2560, 262_208, True)
    assert (config.dtype, config.eos_token_ids) == (torch.bfloat16, {1, 106})
    assert {layer.window: layer.rope for layer in config.layers} == {
        1024: RopeConfig(10_000.0),
        None: RopeConfig(1_000_000.0, LinearScaling(8.0)),
    }
    theirs = AutoConfig.for_model(**copy.deepcopy(GEMMA_3_4B)).to_dict()
    assert parse_config(theirs | {"dtype": "bfloat16"}) == config
    text = theirs["text_config"] | {"dtype": "bfloat16", "eos_token_id": [1, 106]}
    assert parse_config(text) == config


def test_entries_outside_the_text_config_hold_for_it() -> None:
    text = GEMMA_3_1B | {"eos_token_id": None, "torch_dtype": None}
    outside = {"eos_token_id": 7, "torch_dtype": "float16", "tie_word_embeddings": False}
    config = parse_config({"model_type": "gemma3", "text_config": text, **outside})
    assert config == parse_config(gemma(**outside))


@EVERY_ARCHITECTURE
def test_both_styles_are_one_config(architecture: str) -> None:
    old = OF_ARCHITECTURE[architecture]
    new = resolved(old)
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    assert parse_config(new) == parse_config(old)
    assert parse_config(as_transformers_4(new)) == parse_config(old)


REQUIRED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
}
# transformers fills these with fixed numbers of its own: 32 KV heads, an EOS of 2, a type found in the weights.
DEFAULTS_NOBODY_MEANS = {"num_key_value_heads", "eos_token_id", "torch_dtype", "dtype"}


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize(
    ("architecture", "entry"),
    [
        (architecture, entry)
        for architecture, raw in OF_ARCHITECTURE.items()
        for entry in raw
        if entry != "model_type"
    ],
)
def test_an_entry_left_out_means_what_it_means_to_transformers(
    architecture: str, entry: str, style: int
) -> None:
    """Or is refused, where no two checkpoints agree."""
    full = OF_ARCHITECTURE[architecture] if style == 4 else resolved(OF_ARCHITECTURE[architecture])
    raw = {key: value for key, value in full.items() if key != entry}
    if entry in DEFAULTS_NOBODY_MEANS:
        parse_config(raw)
    elif entry in REQUIRED:
        assert entry in refusal(raw)
    else:
        assert parse_config(raw) == parse_config(resolved(raw))


def test_the_old_name_of_a_rope_type() -> None:
    raw = llama(rope_scaling={"type": "linear", "factor": 2.0})
    assert parse_config(raw).layers[0].rope == RopeConfig(500_000.0, LinearScaling(2.0))


@pytest.mark.parametrize(
    ("written", "ids"), [(None, set()), (7, {7}), ([7], {7}), ([7, 9, 7], {7, 9}), (0, {0}), ([], set())]
)
def test_eos_ids_are_null_one_or_many(written: Any, ids: set[int]) -> None:
    assert token_id_set(written) == ids
    assert parse_config(llama(eos_token_id=written)).eos_token_ids == ids


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        pytest.param({}, ["model_type", "llama, mistral, qwen2, qwen3, gemma3_text"], id="nothing"),
        pytest.param(
            llama(model_type="mixtral"),
            ["'mixtral'", "llama, mistral, qwen2, qwen3, gemma3_text"],
            id="unknown model",
        ),
        pytest.param(llama(model_type=["llama"]), ["model_type"], id="model_type is a list"),
        pytest.param(llama(hidden_size=None), ["hidden_size"], id="no hidden_size"),
        pytest.param(llama(hidden_size="2048"), ["hidden_size", "'2048'"], id="text for a number"),
        pytest.param(llama(num_hidden_layers=0), ["num_hidden_layers", "0"], id="no layers"),
        pytest.param(llama(num_hidden_layers=True), ["num_hidden_layers", "True"], id="true for a number"),
        pytest.param(
            llama(num_key_value_heads=5), ["num_attention_heads 32", "num_key_value_heads 5"], id="heads"
        ),
        pytest.param(llama(hidden_act="relu"), ["hidden_act", "'relu'"], id="activation"),
        pytest.param(llama(rms_norm_eps="small"), ["rms_norm_eps", "'small'"], id="eps"),
        pytest.param(llama(torch_dtype="float8_e4m3fn"), ["dtype", "float8_e4m3fn"], id="dtype"),
        pytest.param(llama(torch_dtype=["float32"]), ["dtype"], id="dtype is a list"),
        pytest.param(llama(rope_theta=-1), ["rope_theta", "-1"], id="theta"),
        pytest.param(
            llama(rope_scaling={"rope_type": "yarn", "factor": 2}),
            ["rope_type", "'yarn'", "default, linear, llama3", "take it out"],
            id="yarn",
        ),
        *(
            pytest.param(
                llama(quantization_config={"quant_method": method, "bits": 4}, torch_dtype="float8_e4m3fn"),
                ["quantized", f"({method})", "float32, bfloat16, float16", "take the checkpoint"],
                id=method,
            )
            for method in ("gptq", "awq", "fp8", "bitsandbytes")
        ),
        pytest.param(
            llama(quantization_config={"group_size": 64, "bits": 4}), ["quantized"], id="some quantization"
        ),
        pytest.param({"model_type": "gemma3"}, ["text_config", "None"], id="multimodal without text"),
        pytest.param(
            {"model_type": "gemma3", "text_config": {"hidden_size": 8, "quantization_config": {}}},
            ["quantized"],
            id="multimodal and quantized",
        ),
        pytest.param(llama(rope_scaling={"rope_type": "linear"}), ["factor"], id="linear without factor"),
        pytest.param(
            llama(rope_scaling={"rope_type": "llama3", "factor": 2.0}),
            ["low_freq_factor"],
            id="llama3 without ramp",
        ),
        pytest.param(llama(eos_token_id="</s>"), ["eos_token_id", "'</s>'"], id="EOS as text"),
        pytest.param(
            QWEN25_05B | {"max_window_layers": -1},
            ["max_window_layers", "-1", "or 0"],
            id="windows from nowhere",
        ),
        pytest.param(
            MISTRAL_7B | {"sliding_window": 0}, ["sliding_window", "0"], id="Mistral's window of none"
        ),
        pytest.param(
            gemma(final_logit_softcapping=30.0), ["final_logit_softcapping", "30.0"], id="final soft cap"
        ),
        pytest.param(
            gemma(attn_logit_softcapping=50.0), ["attn_logit_softcapping", "50.0"], id="attention soft cap"
        ),
        pytest.param(
            gemma(use_bidirectional_attention=True), ["use_bidirectional_attention"], id="bidirectional"
        ),
        pytest.param(gemma(layer_types=["full_attention"]), ["layer_types", "26"], id="too few layer types"),
        pytest.param(gemma(layer_types=["chunked_attention"] * 26), ["layer_types"], id="unknown layer type"),
        pytest.param(gemma(sliding_window=0), ["sliding_window", "0"], id="window of none"),
    ],
)
def test_a_config_we_cannot_run_is_refused_by_name(raw: dict[str, Any], named: list[str]) -> None:
    message = refusal(raw)
    assert all(part in message for part in named), message


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("preset", "gigabytes"),
    [
        ("llama-3.2-1b", 1.0),
        ("llama-3.2-3b", 3.5),
        ("qwen3-0.6b", 3.5),
        ("qwen3-1.7b", 3.5),
        ("qwen3-4b", 4.5),
        ("gemma-3-1b", 0.8125),
    ],
)
def test_kv_memory_of_eight_sequences_of_4096(preset: str, gigabytes: float) -> None:
    config = parse_config(PRESETS[preset])
    assert kv_bytes(config, 8 * 4096, torch.bfloat16) == gigabytes * 2**30
    assert kv_bytes(config, 8 * 4096, torch.float32) == 2 * gigabytes * 2**30
