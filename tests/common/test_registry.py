"""From a name to a model: folders, the zoo, dummies, and the hub."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from common.errors import StartupError
from common.models import registry
from common.models.presets import PRESETS
from common.models.registry import default_params, load_model, open_checkpoint, weight_bytes
from common.request import SamplingParams
from tests.support.gguf_files import save_gguf
from tests.support.models import (
    CPU,
    ZOO_NAMES,
    draw_ids,
    largest_difference,
    load,
    refusal_of,
    save_tiny,
    solo_logits,
    zoo,
)

refusal = functools.partial(refusal_of, open_checkpoint)


# ---------------------------------------------------------------------- folders and the zoo


def test_an_unknown_model_is_refused_with_the_forms_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the tree has a folder named zoo
    assert all(f"zoo:{name}" in refusal("zoo:llama-huge") for name in ZOO_NAMES)
    assert all(f"dummy:{preset}" in refusal("dummy:llama-huge") for preset in PRESETS)
    for name in ("nothing", "/no/such/folder", "a/b/c", "zoo"):
        message = refusal(name)
        assert repr(name) in message
        assert all(form in message for form in ("folder", "zoo:NAME", "dummy:PRESET", "owner/name"))


@pytest.mark.parametrize("name", ["./nope", "../nope", "nope/", "./a/nope", "~/nope", "/nope", ".", ".."])
def test_a_path_is_never_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reach_out(*_: Any, **__: Any) -> None:
        pytest.fail("the hub was asked")

    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", reach_out)
    monkeypatch.chdir(tmp_path)
    message = refusal(name)
    if Path(name).is_dir():
        assert "has no config.json" in message
    else:
        assert f"there is no folder {Path(name).absolute()}" in message
    save_tiny(tmp_path / "nope", "llama")
    assert open_checkpoint("./nope").config.vocab_size == 97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ZOO_NAMES)
def test_weight_bytes_are_known_before_the_weights(name: str, dtype: torch.dtype) -> None:
    model = load(zoo(name), dtype=dtype)
    expected = sum(weight.nbytes for weight in model.parameters())
    config = open_checkpoint(f"zoo:{name}").config
    assert weight_bytes(config, dtype) == expected
    head = model.embed_tokens.weight.nbytes if config.tie_word_embeddings else 0
    assert weight_bytes(config, dtype, packed=True) == expected + head


@pytest.mark.parametrize(
    ("config", "generation", "union"),
    [
        (7, None, {7}),
        (7, {}, {7}),
        (7, {"eos_token_id": None}, {7}),
        (7, {"eos_token_id": 9}, {7, 9}),
        ([7, 8], {"eos_token_id": [8, 9]}, {7, 8, 9}),
        (None, {"eos_token_id": [9]}, {9}),
        (7, {"eos_token_id": [-1, 9, 10**6]}, {7, 9}),  # no such tokens
        (None, None, set()),
    ],
)
def test_eos_ids_are_the_union_of_both_configs(
    config: Any, generation: dict[str, Any] | None, union: set[int], tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama", eos_token_id=config)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(str(tmp_path)).config.eos_token_ids == union


# ---------------------------------------------------------------------- sampling defaults


SUGGESTED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("entries", "params"),
    [
        (SUGGESTED, SamplingParams(**SUGGESTED)),
        ({"temperature": 1, "top_k": 0, "top_p": None, "do_sample": False}, SamplingParams()),
        ({"top_k": 64, "max_new_tokens": 5, "eos_token_id": 7}, SamplingParams(top_k=64)),
        ({}, SamplingParams()),
    ],
    ids=str,
)
def test_a_generation_config_suggests_sampling_parameters(
    entries: dict[str, Any], params: SamplingParams, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps(entries))
    assert default_params(open_checkpoint(str(tmp_path))) == params


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_k": 2.5}, "top_k must be a number, not 2.5"),
        ({"top_p": True}, "top_p must be a number, not True"),
        ({"top_p": 1.5}, "top_p is out of range: 1.5"),
        ({"top_k": -3}, "top_k is out of range: -3"),
    ],
    ids=str,
)
def test_a_suggestion_that_cannot_be_sampled_with_stops_the_start(
    entries: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps(entries))
    with pytest.raises(StartupError) as refused:
        default_params(open_checkpoint(str(tmp_path)))
    assert f"{tmp_path / 'generation_config.json'}: {says}" in str(refused.value)
    assert str(refused.value).endswith("; --generation-config none leaves it out")


# ---------------------------------------------------------------------- dummies


@pytest.mark.parametrize("preset", ["llama-60m", "qwen3-60m", "gemma3-60m"])
def test_a_dummy_runs(preset: str) -> None:
    checkpoint = open_checkpoint(f"dummy:{preset}")
    assert checkpoint.folder is None
    lender = open_checkpoint(str(checkpoint.tokenizer_folder)).config
    assert lender.architecture == checkpoint.config.architecture
    assert checkpoint.config.eos_token_ids == lender.eos_token_ids != frozenset()
    model = load_model(checkpoint, device=CPU, dtype=torch.bfloat16, max_positions=32)
    ids = draw_ids(20, checkpoint.config.vocab_size)
    logits = solo_logits(model, ids)
    assert logits.isfinite().all()
    assert logits.dtype == torch.float32
    assert logits.std() > 0.1
    assert not torch.equal(logits, logits.bfloat16().float()), "rounded"
    assert largest_difference(logits[-1], solo_logits(model, [*ids[:5], 0, *ids[6:]])[-1]) > 0.01


def test_a_dummys_weights_are_the_same_every_time() -> None:
    first, second = (
        load_model(open_checkpoint("dummy:llama-1m"), device=CPU, dtype=torch.bfloat16, max_positions=32)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# ---------------------------------------------------------------------- the hub

REPO = "someone/tiny"
NOT_NEEDED = ("pytorch_model.bin", "original/consolidated.00.pth", "original/model.safetensors", "README.md")


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def be_hub(hub: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder stand for `REPO` on the hub. The library's own filter applies the patterns that it is given."""

    def download(hub_id: str, **patterns: list[str]) -> str:
        assert hub_id == REPO
        cache.mkdir(exist_ok=True)
        for name in filter_repo_objects(files_of(hub), **patterns):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(hub / name, cache / name)
        return str(cache)

    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", download)


def in_two_parts(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    writer.split_max_tensors = (len(tensors) + 1) // 2


def test_only_what_is_needed_of_a_hub_id_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, cache = save_tiny(tmp_path / "hub", "qwen3", shard_size="60KB", eos_token_id=3), tmp_path / "cache"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(zoo("qwen3-tiny") / name, hub)
    (hub / "additional_chat_templates").mkdir()
    (hub / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (hub / "original").mkdir()
    for name in NOT_NEEDED:
        (hub / name).write_bytes(b"not needed")
    be_hub(hub, cache, monkeypatch)
    checkpoint = open_checkpoint(REPO)
    assert (checkpoint.name, checkpoint.config.eos_token_ids) == (REPO, {3})
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.encode("the fox")
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.for_tools.source == "with tools"
    load_model(checkpoint, device=CPU, dtype=torch.float32, max_positions=64)
    assert files_of(cache) == files_of(hub) - {*NOT_NEEDED}
    assert any(name.startswith("model-00002") for name in files_of(cache))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("tiny-Q4_K_M.gguf", ["tiny-Q4_K_M.gguf"]),
        ("F16", ["F16/tiny-F16-00001-of-00002.gguf", "F16/tiny-F16-00002-of-00002.gguf"]),
    ],
)
def test_one_gguf_file_of_a_hub_id_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: list[str]
) -> None:
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    source = save_tiny(tmp_path / "source", "llama")
    (hub / "F16").mkdir(parents=True)
    save_gguf(source, hub / "tiny-Q4_K_M.gguf")
    save_gguf(source, hub / "F16" / "tiny-F16.gguf", change=in_two_parts)
    for other in ("tiny-Q8_0.gguf", "tiny-BF16.gguf", "mmproj-F16.gguf", "config.json"):
        (hub / other).write_bytes(b"not needed")
    be_hub(hub, cache, monkeypatch)
    for _ in range(2):
        checkpoint = open_checkpoint(f"{REPO}:{name}")
        load_model(checkpoint, device=CPU, dtype=torch.float32, max_positions=64)
        assert checkpoint.name == f"{REPO}:{name}"
        assert files_of(cache) == {*files}
        shutil.copy(hub / "tiny-Q8_0.gguf", cache)  # of an earlier download
        files = [*files, "tiny-Q8_0.gguf"]


def test_a_gguf_file_that_a_hub_id_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    for name in ("a-Q8_0.gguf", "b-Q8_0.gguf"):
        (hub / name).write_bytes(b"GGUF")
    be_hub(hub, tmp_path / "cache", monkeypatch)
    assert refusal(f"{REPO}:Q4_0").startswith(f"{REPO} has no GGUF file on the hub whose name ends with Q4_0")
    assert "several GGUF files: name one of a-Q8_0.gguf, b-Q8_0.gguf" in refusal(f"{REPO}:Q8_0")
    assert f"name one by its end: {REPO}:Q4_K_M" in refusal(REPO)


def hub_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    return kind(
        "refused", response=httpx.Response(status, request=httpx.Request("GET", "https://hub.example"))
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (hub_error(GatedRepoError, 403), "its owner wants their terms accepted first"),
        (hub_error(RepositoryNotFoundError, 404), "there is no such model, or it is private"),
        (OSError("No space left on device\nand a second line"), "No space left on device"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
    ids=repr,
)
def test_a_download_is_refused_in_one_line_whatever_the_library_says(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", fail)
    found = refusal(REPO)
    assert found.startswith(f"{REPO} is no folder here, and cannot be downloaded from the hub: {says}")
