"""config.json in the styles of transformers 4 and 5, read into one form."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from common.models.config import (
    LayerConfig,
    RopeConfig,
    token_id_set,
)
from common.models.presets import PRESETS
from common.models.registry import parse_config
from tests.support.models import ARCHITECTURES, refusal_of


def as_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of transformers 5 in the form in which version 4 would have written it."""
    old = dict(config)
    old["torch_dtype"] = old.pop("dtype")
    rope = old.pop("rope_parameters")
    if old["model_type"] == "gemma3_text":
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        old["sliding_window_pattern"] = old.pop("layer_types").index("full_attention") + 1
        old.pop("_sliding_window_pattern", None)
    else:
        old.pop("layer_types", None)
    old["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    return old


#: Published config.json files, written by transformers 4, without entries that do not concern the shape.
PUBLISHED: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "configs").glob("*.json")
}
LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA = (
    PUBLISHED[name] for name in ("llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-1b")
)
OF_ARCHITECTURE = dict(zip(ARCHITECTURES, (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA), strict=True))
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)


refusal = functools.partial(refusal_of, parse_config)


def resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json in the style of transformers 5, with the defaults that transformers fills in."""
    config = AutoConfig.for_model(**copy.deepcopy(dict(raw)))  # a copy, because it changes its arguments
    return {**config.to_dict(), "dtype": raw.get("dtype", raw.get("torch_dtype"))}


def llama(**entries: Any) -> dict[str, Any]:
    return LLAMA | entries


def gemma(**entries: Any) -> dict[str, Any]:
    return GEMMA | entries


# ---------------------------------------------------------------------- accepted files


@pytest.mark.parametrize("preset", sorted(PUBLISHED.keys() & PRESETS))
def test_a_preset_has_the_published_shape(preset: str) -> None:
    published = parse_config(PUBLISHED[preset] | {"eos_token_id": None})
    assert parse_config(PRESETS[preset]) == published


@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
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


@EVERY_ARCHITECTURE
def test_biases_of_queries_keys_and_values_and_of_the_output(architecture: str) -> None:
    for asked in (False, True):
        config = parse_config(OF_ARCHITECTURE[architecture] | {"attention_bias": asked})
        if architecture in ("mistral", "qwen2"):  # these architectures do not have the entry
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


@EVERY_ARCHITECTURE
def test_both_styles_are_one_config(architecture: str) -> None:
    old = OF_ARCHITECTURE[architecture]
    new = resolved(old)
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    assert parse_config(new) == parse_config(old)
    assert parse_config(as_transformers_4(new)) == parse_config(old)


REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"}
# transformers fills these with its own values: 32 KV heads, an EOS of 2, the type of the weights. Ours differ.
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
def test_a_missing_entry_has_the_default_of_transformers(architecture: str, entry: str, style: int) -> None:
    """Entries without a common default are refused if they are missing."""
    full = OF_ARCHITECTURE[architecture] if style == 4 else resolved(OF_ARCHITECTURE[architecture])
    raw = {key: value for key, value in full.items() if key != entry}
    if entry in DEFAULTS_NOBODY_MEANS:
        parse_config(raw)
    elif entry in REQUIRED:
        assert entry in refusal(raw)
    else:
        assert parse_config(raw) == parse_config(resolved(raw))


@pytest.mark.parametrize(
    ("written", "ids"), [(None, set()), (7, {7}), ([7], {7}), ([7, 9, 7], {7, 9}), (0, {0}), ([], set())]
)
def test_eos_ids_are_null_one_or_many(written: Any, ids: set[int]) -> None:
    assert token_id_set(written) == ids
    assert parse_config(llama(eos_token_id=written)).eos_token_ids == ids


# ---------------------------------------------------------------------- refused files


ROPE = {"rope_type": "linear", "factor": 2.0}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, ["model_type", "llama, mistral, qwen2, qwen3, gemma3_text"]),
    "unknown model": (
        llama(model_type="mixtral"),
        ["'mixtral'", "llama, mistral, qwen2, qwen3, gemma3_text"],
    ),
    "model_type is a list": (llama(model_type=["llama"]), ["model_type"]),
    "no hidden_size": (llama(hidden_size=None), ["hidden_size"]),
    "text for a number": (llama(hidden_size="2048"), ["hidden_size", "'2048'"]),
    "no layers": (llama(num_hidden_layers=0), ["num_hidden_layers", "0"]),
    "true for a number": (llama(num_hidden_layers=True), ["num_hidden_layers", "True"]),
    "heads": (llama(num_key_value_heads=5), ["num_attention_heads 32", "num_key_value_heads 5"]),
    "activation": (llama(hidden_act="relu"), ["hidden_act", "'relu'"]),
    "eps": (llama(rms_norm_eps="small"), ["rms_norm_eps", "'small'"]),
    "dtype": (llama(torch_dtype="float8_e4m3fn"), ["dtype", "float8_e4m3fn"]),
    "dtype is a list": (llama(torch_dtype=["float32"]), ["dtype"]),
    "theta": (llama(rope_theta=-1), ["rope_theta", "-1"]),
    "yarn": (
        llama(rope_scaling=ROPE | {"rope_type": "yarn"}),
        ["rope_type", "'yarn'", "default, linear, llama3", "take it out"],
    ),
    "linear without factor": (llama(rope_scaling={"rope_type": "linear"}), ["factor"]),
    "llama3 without ramp": (llama(rope_scaling=ROPE | {"rope_type": "llama3"}), ["low_freq_factor"]),
    **{
        method: (
            llama(quantization_config={"quant_method": method, "bits": 4}, torch_dtype="float8_e4m3fn"),
            ["quantized", f"({method})", "compressed-tensors", "take the checkpoint"],
        )
        for method in ("fp8", "bitsandbytes")
    },
    "some quantization": (llama(quantization_config={"group_size": 64, "bits": 4}), ["quantized"]),
    "multimodal without text": ({"model_type": "gemma3"}, ["text_config", "None"]),
    "multimodal and quantized": (
        {"model_type": "gemma3", "text_config": {"hidden_size": 8, "quantization_config": {}}},
        ["quantized"],
    ),
    "EOS as text": (llama(eos_token_id="</s>"), ["eos_token_id", "'</s>'"]),
    "windows from nowhere": (QWEN2 | {"max_window_layers": -1}, ["max_window_layers", "-1", "or 0"]),
    "Mistral's window of none": (MISTRAL | {"sliding_window": 0}, ["sliding_window", "0"]),
    "final soft cap": (gemma(final_logit_softcapping=30.0), ["final_logit_softcapping", "30.0"]),
    "attention soft cap": (gemma(attn_logit_softcapping=50.0), ["attn_logit_softcapping", "50.0"]),
    "bidirectional": (gemma(use_bidirectional_attention=True), ["use_bidirectional_attention"]),
    "too few layer types": (gemma(layer_types=["full_attention"]), ["layer_types", "26"]),
    "a base beyond any float": (llama(rope_theta=10**400), ["rope_theta", "positive number"]),
    "layer types of no list": (gemma(layer_types=26), ["layer_types", "26"]),
    "divided without divisors": (llama(rope_scaling={"rope_type": "divided"}), ["divisors", "None"]),
    "unknown layer type": (gemma(layer_types=["chunked_attention"] * 26), ["layer_types"]),
    "window of none": (gemma(sliding_window=0), ["sliding_window", "0"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_we_cannot_run_is_refused_by_name(name: str) -> None:
    raw, named = REFUSED[name]
    message = refusal(raw)
    assert all(part in message for part in named), message
