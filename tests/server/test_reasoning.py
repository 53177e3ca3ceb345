"""Models that reason: their thoughts apart from the answer, in chat and in responses, whole and streamed.

A template like Qwen 3's stands beside the bundled model. Grammars make it think.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.models.registry import ZOO, open_checkpoint
from tests.server.support import ServerProcess

#: Qwen 3's: thoughts of earlier turns are left out, and `enable_thinking` false puts an empty thought before the
#: answer. Its variable `reasoning_effort` is not Qwen's.
TEMPLATE = """\
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

ASKED: list[Any] = [{"role": "user", "content": "Is the fox brave?"}]
THOUGHT = "Foxes are brave."
ANSWER = "It is."
#: The texts of a thinking model, and of one whose prompt has opened the thought.
THINKS = {"structured_outputs": {"regex": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}".replace(".", "\\.")}}
GOES_ON = {"structured_outputs": {"regex": f"{THOUGHT}\n</think>\n\n{ANSWER}".replace(".", "\\.")}}
LONG = {"max_tokens": 64}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = Path(shutil.copytree(ZOO / "llama-tiny", tmp_path_factory.mktemp("thinker") / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with ServerProcess("phase9_pipelined", "--model", str(folder), "--max-seq-len", "512") as process:
        yield process
        assert "Traceback" not in process.log_text


@pytest.fixture
def server(thinker: ServerProcess) -> Iterator[ServerProcess]:
    yield thinker
    thinker.assert_serves()


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    response = server.ask("/v1/chat/completions", **{"messages": ASKED, "max_tokens": 64} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def prompt_tokens(text: str) -> int:
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    return len(tokenizer.encode(text, add_special_tokens=False))
