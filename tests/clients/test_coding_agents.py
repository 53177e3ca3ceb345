"""Coding agents in the terminal: each gets one task, makes a call, and answers once it has the call's result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.models.registry import ZOO
from common.startup.phases import find_phase
from tests.clients.forcing import ForcingProxy
from tests.clients.support import KEY, NotInstalledError, Tool, clean_environment
from tests.support.servers import ServerProcess

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("phase", [9], indirect=True, scope="session"),
]

MODEL = "agent-tiny"
TASK_S = 800.0  # prompts of 35,000 tokens, twice
MAX_TOKENS = 1024  # a random model's call is seldom longer; its answer may not end by itself
TASK = "Look around in this folder, and say what you see."


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent.

    Attributes:
        tool: its package.
        program: its command.
        calls: the tool of its own that the first answer must call. It only reads.
        settings: writes the settings into a home folder, for a server's address. Returns environment variables.
        arguments: of the command, before the task.
    """

    tool: Tool
    program: str
    calls: str
    settings: Callable[[Path, str], dict[str, str]]
    arguments: tuple[str, ...]


def codex(home: Path, url: str) -> dict[str, str]:
    folder = home / ".codex"
    folder.mkdir()
    provider = {"name": "infer", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "INFER_KEY"}
    lines = [f'model = "{MODEL}"', 'model_provider = "infer"', "[model_providers.infer]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    return {"CODEX_HOME": str(folder), "INFER_KEY": KEY}


def opencode(home: Path, url: str) -> dict[str, str]:
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "infer",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 65_536, "output": 1024}}},
    }
    settings = {
        "model": f"infer/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"infer": provider},
    }
    (folder / "opencode.json").write_text(json.dumps(settings))
    return {"XDG_CONFIG_HOME": str(home / ".config")}


def qwen_code(home: Path, url: str) -> dict[str, str]:
    return {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL}


def cline(home: Path, url: str) -> dict[str, str]:
    folder = home / ".cline" / "data" / "settings"
    folder.mkdir(parents=True)
    settings = {"provider": "openai-compatible", "apiKey": KEY, "model": MODEL, "baseUrl": f"{url}/v1"}
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    known = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "providers": {"openai-compatible": provider},
    }
    (folder / "providers.json").write_text(json.dumps(known))
    return {}


def claude_code(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_MODEL": MODEL,
        **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": MODEL for kind in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


AGENTS = {
    "codex": Agent(
        Tool("Codex CLI", ("@openai/codex@0.171.0",)),
        "codex",
        "get_goal",
        codex,
        ("exec", "--skip-git-repo-check"),
    ),
    "opencode": Agent(Tool("opencode", ("opencode-ai@1.18.33",)), "opencode", "glob", opencode, ("run",)),
    "qwen-code": Agent(
        Tool("qwen-code", ("@qwen-code/qwen-code@0.24.4",)),
        "qwen",
        "glob",
        qwen_code,
        ("--auth-type", "openai", "-p"),
    ),
    "cline": Agent(
        Tool("Cline CLI", ("cline@3.0.65",)),
        "cline",
        "search_codebase",
        cline,
        ("-P", "openai-compatible", "-m", MODEL, "--json"),
    ),
    "claude-code": Agent(
        Tool("Claude Code", ("@anthropic-ai/claude-code@2.1.332",)), "claude", "Read", claude_code, ("-p",)
    ),
}


@pytest.fixture(scope="session")
def server(phase: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a tiny model with room for the thousands of tokens that agents send before the task."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(ZOO / "qwen3-tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    with ServerProcess(
        find_phase(phase).__name__,
        *("--model", str(folder), "--max-seq-len", "98304", "--max-batch-size", "2", "--api-key", KEY),
        headers={"Authorization": f"Bearer {KEY}"},
    ) as process:
        yield process
        assert "Traceback" not in process.log_text


@pytest.fixture(params=list(AGENTS))
def agent(request: pytest.FixtureRequest) -> Agent:
    return AGENTS[request.param]


@pytest.fixture
def tool(agent: Agent) -> Tool:
    return agent.tool


@pytest.fixture(autouse=True)
def _no_daemons(tmp_path: Path) -> Iterator[None]:
    """End what an agent leaves running: Cline has a daemon for each home folder."""
    yield
    for process in psutil.process_iter(["cmdline"]):
        if any(str(tmp_path) in argument for argument in process.info["cmdline"] or ()):
            process.kill()


def test_a_task_with_a_call(server: ServerProcess, agent: Agent, tmp_path: Path) -> None:
    """A task in the terminal: a forced call, its result, an answer."""
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / "fox.txt").write_text("A fox lives here.\n")
    try:
        node, *_ = agent.tool.command()
    except NotInstalledError as error:
        pytest.skip(str(error))
    with ForcingProxy(server.url, agent.calls, MAX_TOKENS) as proxy:
        environment = clean_environment(HOME=str(home), **agent.settings(home, proxy.url))
        environment["PATH"] = f"{Path(node).parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            [agent.tool.folder / "node_modules" / ".bin" / agent.program, *agent.arguments, TASK],
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_S,
            check=False,
        )
    said = ran.stdout + ran.stderr
    assert proxy.statuses, said
    assert set(proxy.statuses) == {200}, said
    assert ran.returncode == 0, said
    first, second = proxy.bodies[:2]
    assert results_in(first) == 0
    assert results_in(second) == 1, "the agent has not sent the call's result back"


def results_in(body: dict[str, Any]) -> int:
    """Return how many results of calls a conversation has, in any of the three APIs."""
    turns = body.get("messages") or body.get("input") or []
    inner = [part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"]]
    return sum(
        each.get("role") == "tool" or each.get("type") in ("function_call_output", "tool_result")
        for each in (*turns, *inner)
    )
