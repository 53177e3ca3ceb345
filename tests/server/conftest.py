"""Fixtures of the API's tests. They run against phase 9, which has the features of the phases before it.

All phases have the same routes, and what differs between phases is tested at their engines. Tests that need another
phase start a server of their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.models.registry import ZOO
from tests.support.browser import tab
from tests.support.servers import BATCH, PREFIXES, QUEUE, ServerProcess, called_from_python

__all__ = ["tab"]


@pytest.fixture(params=PREFIXES)
def prefix(request: pytest.FixtureRequest) -> str:
    """The prefixes of OpenAI's routes."""
    return str(request.param)


@pytest.fixture(scope="session")
def phase() -> str:
    return "phase9_pipelined"


@pytest.fixture(scope="session")
def shared_server(phase: str) -> Iterator[ServerProcess]:
    with ServerProcess(phase, "--max-seq-len", "1024") as process:
        yield process
        assert process.process.poll() is None, f"the server did not outlive its tests:\n{process.log_text}"
        assert "Traceback" not in "".join(process.log)


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """An ordinary server. After the test, it must serve the next request."""
    yield shared_server
    shared_server.assert_serves()


def start_gated(phase: str) -> ServerProcess:
    return ServerProcess(
        phase,
        *("--max-batch-size", str(BATCH), "--max-waiting-requests", str(QUEUE), "--send-timeout", "2"),
        *called_from_python(phase),
        module="tests.support.gated_server",
    )


@pytest.fixture(scope="session")
def shared_gated(phase: str) -> Iterator[ServerProcess]:
    with start_gated(phase) as process:
        yield process


@pytest.fixture
def gated(shared_gated: ServerProcess) -> Iterator[ServerProcess]:
    """A server whose forward passes the test can hold and break. After the test, it must serve the next request."""
    shared_gated.begin_test()
    yield shared_gated
    shared_gated.order("heal")
    shared_gated.order("open")
    shared_gated.assert_serves()


@pytest.fixture
def mortal(phase: str) -> Iterator[ServerProcess]:
    """A gated server for one test only, which may end it."""
    with start_gated(phase) as process:
        yield process


#: Qwen 3's: thoughts of earlier turns are left out, and `enable_thinking` false puts an empty thought before the
#: answer. Its variable `reasoning_effort` is not Qwen's.
THINKING_TEMPLATE = """\
{%- if reasoning_effort %}{{ '<|im_start|>system\\nEffort: ' + reasoning_effort + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content and loop.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- if opens_thought %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model whose template knows thoughts. Grammars make the model write them."""
    folder = Path(shutil.copytree(ZOO / "llama-tiny", tmp_path_factory.mktemp("thinker") / "model"))
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    with ServerProcess("phase9_pipelined", "--model", str(folder), "--max-seq-len", "512") as process:
        yield process
        assert "Traceback" not in process.log_text
