"""Default sampling parameters of requests: the checkpoint's, unless an option of the server changes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from torch import Tensor

from common.llm import LLM
from common.models.registry import ZOO
from common.request import SamplingParams
from tests.support.gguf_files import save_gguf
from tests.support.servers import MESSAGES, LocalServer, ServerProcess

PHASE = "phase5_continuous"
SUGGESTED = {"temperature": 0.0, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2}
PROMPT = "Once there was"


def folder_with(tmp_path: Path, **entries: Any) -> str:
    """Copy the bundled model, with these entries added to its generation config. Returns the folder."""
    folder = tmp_path / "model"
    shutil.copytree(ZOO / "llama-tiny", folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return str(folder)


def ask(server: ServerProcess, route: str = "/v1/completions", **fields: Any) -> str:
    given = {"messages": MESSAGES} if "/chat/" in route else {"prompt": PROMPT}
    body = {"max_tokens": 24, "stream": False, "seed": 1} | given | fields
    response = server.client.post(route, json=body)
    assert response.status_code == 200, response.text
    return json.dumps(response.json()["choices"])


def card(server: ServerProcess) -> tuple[dict[str, Any], str]:
    (model,) = server.client.get("/v1/models").json()["data"]
    return model["sampling_defaults"], model["sampling_defaults_from"]


@pytest.mark.slow
def test_a_checkpoints_suggestions_are_the_defaults(tmp_path: Path) -> None:
    model = folder_with(tmp_path, **SUGGESTED, do_sample=False, max_new_tokens=3)
    with ServerProcess(PHASE, "--model", model) as server:
        log = "temperature 0, top_p 0.9, repetition_penalty 1.2, top_k 7: its generation_config.json"
        assert log in server.log_text
        assert card(server) == (SUGGESTED | {"min_p": 0.0}, "generation_config.json")
        for route in ("/v1/completions", "/openai/v1/completions", "/v1/chat/completions"):
            unnamed = ask(server, route)
            assert unnamed == ask(server, route, **SUGGESTED)
            assert unnamed == ask(server, route, temperature=None, top_k=None)
            assert unnamed != ask(server, route, repetition_penalty=1.0)
            sampled = ask(server, route, temperature=1.5)
            assert sampled == ask(server, route, temperature=1.5, top_p=0.9, top_k=7)
            for top_k in (-1, 0):  # all tokens, although the model suggests a top_k
                assert ask(server, route, temperature=3, top_p=1, top_k=top_k) != ask(
                    server, route, temperature=3, top_p=1
                )


@pytest.mark.parametrize("generation_config", ["auto", "none"])
def test_a_gguf_file_has_suggestions_of_its_own(generation_config: str, tmp_path: Path) -> None:
    """The entries are those that llama.cpp's converter writes. 0.95 is no float32, and comes back as 0.95."""

    def add(writer: gguf.GGUFWriter, _: dict[str, Tensor]) -> None:
        for key, value in {"temp": 0.6, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}.items():
            writer.add_float32(f"general.sampling.{key}", value)
        writer.add_int32("general.sampling.top_k", 20)

    file = save_gguf(ZOO / "llama-tiny", tmp_path / "model.gguf", change=add)
    with LocalServer(PHASE, model=str(file), generation_config=generation_config) as server:
        (model,) = server.client.get("/v1/models").json()["data"]
    suggested = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}
    found = (model["sampling_defaults"], model["sampling_defaults_from"])
    assert found == ((suggested, "GGUF file") if generation_config == "auto" else (usual, "server"))


def test_generation_config_none_keeps_the_servers_defaults(tmp_path: Path) -> None:
    flags = ("--model", folder_with(tmp_path, **SUGGESTED), "--generation-config", "none")
    with ServerProcess(PHASE, *flags) as server:
        assert "get temperature 1: the server's defaults" in server.log_text
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}
        assert card(server) == (usual, "server")
        assert ask(server) == ask(server, temperature=1)
        assert ask(server) != ask(server, **SUGGESTED)
        # The EOS ids of that file are still used: a chat would not end without them.
        answer = server.ask("/v1/chat/completions", max_tokens=400).json()
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("generation_config", ["auto", "none"])
@pytest.mark.slow
def test_offline_requests_get_the_models_defaults(tmp_path: Path, generation_config: str) -> None:
    model = folder_with(tmp_path, **SUGGESTED)
    llm = LLM(model, phase=PHASE, dtype="float32", max_seq_len=256, generation_config=generation_config)
    suggested = SamplingParams(**SUGGESTED) if generation_config == "auto" else SamplingParams()
    assert llm.default_params == suggested
    (unnamed,) = llm.generate(PROMPT, progress=False)
    (named,) = llm.generate(PROMPT, SamplingParams(**SUGGESTED), progress=False)
    assert (unnamed.token_ids == named.token_ids) is (generation_config == "auto")
