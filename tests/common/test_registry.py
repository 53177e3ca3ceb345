"""From a name to a model: folders, the zoo, dummies, and the hub (a stub of it, on this machine)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import StartupError
from common.models import registry
from common.models.presets import PRESETS
from common.models.registry import default_params, load_model, open_checkpoint, weight_bytes
from common.request import SamplingParams
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
def test_a_dummy_runs_and_is_the_same_every_time(preset: str) -> None:
    checkpoint = open_checkpoint(f"dummy:{preset}")
    assert checkpoint.folder is None
    lender = open_checkpoint(str(checkpoint.tokenizer_folder)).config
    assert lender.architecture == checkpoint.config.architecture
    assert checkpoint.config.eos_token_ids == lender.eos_token_ids != frozenset()
    first, second = (
        load_model(checkpoint, device=CPU, dtype=torch.bfloat16, max_positions=32) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    ids = draw_ids(20, checkpoint.config.vocab_size)
    logits = solo_logits(first, ids)
    assert logits.isfinite().all()
    assert logits.dtype == torch.float32
    assert logits.std() > 0.1
    assert not torch.equal(logits, logits.bfloat16().float()), "rounded"
    assert largest_difference(logits[-1], solo_logits(first, [*ids[:5], 0, *ids[6:]])[-1]) > 0.01


# ---------------------------------------------------------------------- the hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO, GATED, NO_REPO = "someone/tiny", "someone/gated", "someone/else"
NOT_HERE = "is no folder here, and cannot be downloaded from the hub"
UNREACHABLE = "http://127.0.0.1:9"  # the discard port, on which no server listens
NOT_NEEDED = ("pytorch_model.bin", "original/consolidated.00.pth", "original/model.safetensors", "README.md")


@dataclass
class StubHub:
    """The part of the hub's API that a download needs. Serves the files of a folder, and records the requests."""

    files: Path
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> set[str]:
        """Return the names of the files whose content was sent."""
        prefix = f"GET /{REPO}/resolve/{COMMIT}/"
        return {line.removeprefix(prefix) for line in self.requests if line.startswith(prefix)}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content for a path."""
        names = sorted(str(p.relative_to(self.files)) for p in self.files.rglob("*") if p.is_file())
        json_type, oids = {"Content-Type": "application/json"}, {n: f"{i:040x}" for i, n in enumerate(names)}
        name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if path.startswith(f"/api/models/{GATED}/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if path.startswith(f"/api/models/{REPO}/revision/"):
            siblings = [{"rfilename": each} for each in names]
            return 200, json_type, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
        if path.startswith(f"/api/models/{REPO}/tree/"):
            sizes = {each: (self.files / each).stat().st_size for each in names}
            tree = [{"type": "file", "path": n, "oid": oids[n], "size": size} for n, size in sizes.items()]
            return 200, json_type, json.dumps(tree).encode()
        if name in names:
            headers = {"ETag": f'"{oids[name]}"', "X-Repo-Commit": COMMIT}
            return 200, headers, (self.files / name).read_bytes()
        known = path.startswith((f"/{REPO}/", f"/api/models/{REPO}/"))
        return 404, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"}, b""


def _handler(hub: StubHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            status, headers, content = hub.answer(path)
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    return Handler


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StubHub]:
    files = tmp_path / "hub"
    save_tiny(files, "qwen3", shard_size="60KB", eos_token_id=3)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(zoo("qwen3-tiny") / name, files)
    for name in NOT_NEEDED:
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(b"not needed")
    stub = StubHub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stub))
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield stub
    server.shutdown()
    server.server_close()
    thread.join()


OPEN = """
import sys, torch
from common.errors import StartupError
from common.models.registry import load_model, open_checkpoint

for name in sys.argv[1:]:
    try:
        checkpoint = open_checkpoint(name)
    except StartupError as error:
        print("REFUSED", error)
    else:
        model = load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
        print(checkpoint.name, checkpoint.tokenizer().encode("the fox"), sorted(checkpoint.config.eos_token_ids))
"""


def open_in_a_process(names: list[str], endpoint: str, cache: Path, **env: str) -> list[str]:
    """Open models in a new process, because the hub's address is read only once. Returns a line for each model."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", OPEN, *names]
    result = subprocess.run(command, env=clean | settings | env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(names), "one line for each"
    return lines


def test_a_hub_id_is_downloaded_once_and_only_what_is_needed(hub: StubHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    downloaded, missing, gated = open_in_a_process([REPO, NO_REPO, GATED], hub.url, cache)
    assert downloaded.startswith(f"{REPO} [")
    assert downloaded.endswith(" [3]")
    assert missing.startswith(f"REFUSED {NO_REPO} {NOT_HERE}: there is no such model")
    assert gated.startswith(f"REFUSED {GATED} {NOT_HERE}: its owner wants their terms")
    present = {str(path.relative_to(hub.files)) for path in hub.files.rglob("*") if path.is_file()}
    assert hub.fetched() == present - set(NOT_NEEDED)
    assert not [line for line in hub.requests if any(name in line for name in NOT_NEEDED)]
    assert any(name.startswith("model-00002") for name in hub.fetched())

    hub.requests.clear()
    assert open_in_a_process([REPO], hub.url, cache, HF_HUB_OFFLINE="1") == [downloaded]
    assert hub.requests == []

    again, unreachable = open_in_a_process([REPO, NO_REPO], UNREACHABLE, cache)
    assert again == downloaded
    assert unreachable.startswith(f"REFUSED {NO_REPO} {NOT_HERE}: ")
    assert "connect" in unreachable.lower()


def test_a_download_is_refused_in_one_line_whatever_the_library_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device\nand a second line")

    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", fail)
    assert "No space left on device" in refusal(REPO)
    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    assert "division by zero" in refusal(REPO)
