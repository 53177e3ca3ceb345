"""Chat templates against `transformers`, which decides what they mean: equal texts, or both refuse."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from jinja2 import TemplateError
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from common.chat_template import ChatTemplate
from common.errors import InvalidRequestError, StartupError
from common.models.registry import ZOO

CHATML = """
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role }}
    {%- if message.name is defined %} ({{ message.name }}){% endif %}
    {{- '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """{{ bos_token }}
{%- macro header(role) -%}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{%- set today = strftime_now('%d %b %Y') if not date_string is defined else date_string %}
{%- if messages[0]['role'] in ('system', 'developer') %}
    {%- set opening, messages = messages[0]['content'] | trim, messages[1:] %}
{%- else %}
    {%- set opening = '' %}
{%- endif %}
{{- header('system') }}Today: {{ today }}

{{ opening + eos_token }}
{%- for message in messages %}
    {{- header(message['role']) + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""

TURNS = """{{ bos_token }}
{%- set first = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set first.system = messages[0].content ~ '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 is even) %}
        {{- raise_exception("roles must take turns, not " ~ message.role ~ " at " ~ loop.index) }}
    {%- endif %}
    {{- '<start_of_turn>' ~ {'assistant': 'model'}.get(message.role, message.role) ~ '\\n' }}
    {{- first.system if loop.first }}
    {%- if message.content is string %}{{ message.content | trim }}{% endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}
"""

THINKING = """
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and not loop.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LOOPS = """{% for message in messages %}
  {% if message.role == 'developer' %}{% continue %}{% endif %}
  {% if loop.index > 4 %}
[…]
    {% break %}
  {% endif %}
  {% generation %}
[{{ message | tojson }}|{{ message.content | tojson(indent=2) }}|{{ [tools, documents] | tojson }}]
  {% endgeneration %}
{% endfor %}
{{ colours | default(['none'], true) | join(' ') | upper }}
{{ dict(a=1)['a'] }}{{ unheard_of }}{# nothing #}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "thinking": THINKING, "loops": LOOPS}

QUESTION = {"role": "user", "content": " What <b>is</b> “this”, & why?\n"}
ANSWER = {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nA fox 🦊.  "}
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "question": [QUESTION],
    "system": [{"role": "system", "content": "Speak \\n plainly. "}, QUESTION],
    "developer": [{"role": "developer", "content": "Be kind."}, QUESTION],
    "turns": [QUESTION, ANSWER, {"role": "user", "content": "{{ bos_token }}", "name": "Zoë"}],
    "continued": [QUESTION, ANSWER],
    "twice the same": [QUESTION, ANSWER, QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": ""}],
    "out of turn": [QUESTION, QUESTION],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source: str) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(WordLevel({"<s>": 0, "</s>": 1}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("end", ["generation", "nothing", "continued"])
def test_texts_are_those_of_transformers(name: str, conversation: str, end: str) -> None:
    messages, source = CONVERSATIONS[conversation], TEMPLATES[name]
    ends: dict[str, Any] = {
        "add_generation_prompt": end == "generation",
        "continue_final_message": end == "continued",
    }
    for variables in ({}, {"enable_thinking": False, "date_string": "1 May", "colours": ["red", "blue"]}):
        expected = text = None
        with contextlib.suppress(TemplateError, ValueError):
            expected = theirs(source).apply_chat_template(messages, tokenize=False, **ends, **variables)
            expected = expected.replace("CONTINUE_FINAL_MESSAGE_TAG ", "")  # of a message shown twice
        with contextlib.suppress(InvalidRequestError):
            text = ChatTemplate(source, SPECIAL).render(messages, variables=variables, **ends)
        assert text == expected


def test_the_list_tries_what_it_should() -> None:
    """Texts are refused where a template says so, and differ where a variable or the end differs."""
    template = ChatTemplate(TURNS, SPECIAL)
    with pytest.raises(InvalidRequestError, match="says: roles must take turns, not user at 2"):
        template.render(CONVERSATIONS["out of turn"])
    thinking = ChatTemplate(THINKING, SPECIAL)
    texts = {
        thinking.render(CONVERSATIONS["turns"]),
        thinking.render(CONVERSATIONS["turns"], variables={"enable_thinking": False}),
        thinking.render(CONVERSATIONS["turns"], add_generation_prompt=False),
    }
    assert len(texts) == 3
    continued = ChatTemplate(CHATML, SPECIAL).render(
        CONVERSATIONS["continued"], add_generation_prompt=False, continue_final_message=True
    )
    assert continued.endswith("A fox 🦊.  ")


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny", "gemma3-tiny"])
def test_the_zoos_own(name: str) -> None:
    template = ChatTemplate.from_folder(ZOO / name)
    assert template is not None
    reference = PreTrainedTokenizerFast.from_pretrained(ZOO / name)
    for messages in (CONVERSATIONS["system"], CONVERSATIONS["turns"]):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected


# ---------------------------------------------------------------------- what cannot be rendered


def test_a_template_that_does_not_show_the_message_to_continue() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequestError, match="does not show the last message"):
        template.render([QUESTION, ANSWER], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source, {}).render([QUESTION])


# ---------------------------------------------------------------------- where it is found


def write(folder: Path, config: dict[str, Any] | None, own_file: str | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if own_file is not None:
        (folder / "chat_template.jinja").write_text(own_file, "utf-8")
    return folder


def rendered(folder: Path) -> str:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template.render([QUESTION])


def test_in_the_tokenizers_config(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}",
        "bos_token": {"content": "<s>"},
    }
    assert rendered(write(tmp_path, config | {"eos_token": "</s>", "pad_token": None})) == "<s>|</s>|"


def test_one_of_several(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    assert rendered(write(tmp_path, {"chat_template": named})) == "chat"
    assert ChatTemplate.from_folder(write(tmp_path, {"chat_template": named[:1]})) is None


def test_in_a_file_of_its_own_which_wins(tmp_path: Path) -> None:
    assert (
        rendered(write(tmp_path, {"chat_template": "config's", "bos_token": "<s>"}, "{{ bos_token }}"))
        == "<s>"
    )


def test_nowhere(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    assert ChatTemplate.from_folder(write(tmp_path, {"bos_token": "<s>"})) is None


@pytest.mark.parametrize("source", ["{% for %}", "{{ unclosed", "{% unheard_of %}"])
def test_what_is_no_template(tmp_path: Path, source: str) -> None:
    with pytest.raises(StartupError, match=r"chat_template\.jinja: the chat template cannot be read: line 1"):
        ChatTemplate.from_folder(write(tmp_path, None, source))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: the chat template"):
        ChatTemplate.from_folder(write(tmp_path, {"chat_template": source}))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartupError, match="is no JSON"):
        ChatTemplate.from_folder(tmp_path)


def test_a_file_replaces_the_checkpoints_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}")
    for folder in (ZOO / "llama-tiny", tmp_path):  # which has one, and which has none
        template = ChatTemplate.from_folder(folder, file)
        assert template is not None
        assert template.render([{"role": "user", "content": "Hi"}]).startswith("[user] Hi")
    for wrong in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(StartupError, match=f"the chat template {wrong} cannot be read"):
            ChatTemplate.from_folder(tmp_path, wrong)
    file.write_text("{% for %}")
    with pytest.raises(StartupError, match=r"mine\.jinja: the chat template cannot be read: line 1"):
        ChatTemplate.from_folder(tmp_path, file)
