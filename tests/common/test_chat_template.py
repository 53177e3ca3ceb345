"""Chat templates compared with `transformers`: the texts are equal, or both refuse."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from jinja2 import TemplateError
from packaging.version import Version
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from common.chat_template import ChatTemplate
from common.errors import InvalidRequestError, StartupError
from common.models.registry import ZOO
from tests.helpers import ZOO_NAMES

TEMPLATES = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "templates").iterdir()}
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
OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.24")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source: str) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(WordLevel({"<s>": 0, "</s>": 1}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **SPECIAL)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("end", ["generation", "nothing", "continued"])
def test_texts_are_those_of_transformers(name: str, conversation: str, end: str) -> None:
    messages, source = CONVERSATIONS[conversation], TEMPLATES[name]
    if (name, conversation, end) == ("headers", "out of turn", "continued") and OLD_TRANSFORMERS:
        pytest.skip("transformers before 5.24 renders this continued message otherwise")
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
    """The cases above include a refusal by a template, and texts that differ by a variable or at the end."""
    template = ChatTemplate(TEMPLATES["turns"], SPECIAL)
    with pytest.raises(InvalidRequestError, match="says: roles must take turns, not user at 2"):
        template.render(CONVERSATIONS["out of turn"])
    thinking = ChatTemplate(TEMPLATES["thinking"], SPECIAL)
    texts = {
        thinking.render(CONVERSATIONS["turns"]),
        thinking.render(CONVERSATIONS["turns"], variables={"enable_thinking": False}),
        thinking.render(CONVERSATIONS["turns"], add_generation_prompt=False),
    }
    assert len(texts) == 3
    continued = ChatTemplate(TEMPLATES["chatml"], SPECIAL).render(
        CONVERSATIONS["continued"], add_generation_prompt=False, continue_final_message=True
    )
    assert continued.endswith("A fox 🦊.  ")


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_the_zoos_own(name: str) -> None:
    template = ChatTemplate.from_folder(ZOO / name)
    assert template is not None
    reference = PreTrainedTokenizerFast.from_pretrained(ZOO / name)
    for messages in (CONVERSATIONS["system"], CONVERSATIONS["turns"]):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected


# ---------------------------------------------------------------------- refusals


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


# ---------------------------------------------------------------------- files with templates


def write(folder: Path, config: dict[str, Any] | None, own_file: str | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if own_file is not None:
        (folder / "chat_template.jinja").write_text(own_file, "utf-8")
    return folder


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
TOKENS = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}


@pytest.mark.parametrize(
    ("config", "own_file", "text"),
    [
        (TOKENS | {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"}, None, "<s>|</s>|"),
        ({"chat_template": NAMED}, None, "chat"),
        ({"chat_template": NAMED[:1]}, None, None),
        ({"chat_template": ["a text", {"template": "nameless"}]}, None, None),
        (TOKENS | {"chat_template": "config's"}, "{{ bos_token }}", "<s>"),
        (TOKENS, None, None),
        (None, None, None),
    ],
    ids=[
        "config",
        "one of several",
        "none by default",
        "none with a name",
        "a file of its own wins",
        "no template",
        "nothing",
    ],
)
def test_where_a_template_is_found(
    config: dict[str, Any] | None, own_file: str | None, text: str | None, tmp_path: Path
) -> None:
    template = ChatTemplate.from_folder(write(tmp_path, config, own_file))
    assert (template and template.render([QUESTION])) == text


@pytest.mark.parametrize("source", ["{% for %}", "{{ unclosed", "{% unheard_of %}"])
def test_what_is_no_template(tmp_path: Path, source: str) -> None:
    with pytest.raises(StartupError, match=r"chat_template\.jinja: the chat template cannot be read: line 1"):
        ChatTemplate.from_folder(write(tmp_path, None, source))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: the chat template"):
        ChatTemplate.from_folder(write(tmp_path, {"chat_template": source}))
    for text, message in (("{", "cannot be read"), ("[]", "must hold a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(StartupError, match=f"tokenizer_config.json {message}"):
            ChatTemplate.from_folder(tmp_path)


def test_a_file_replaces_the_checkpoints_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}")
    for folder in (ZOO / "llama-tiny", tmp_path):  # with a template of its own, and without
        template = ChatTemplate.from_folder(folder, file)
        assert template is not None
        assert template.render([{"role": "user", "content": "Hi"}]).startswith("[user] Hi")
    for wrong in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(StartupError, match=f"the chat template {wrong} cannot be read"):
            ChatTemplate.from_folder(tmp_path, wrong)
    file.write_text("{% for %}")
    with pytest.raises(StartupError, match=r"mine\.jinja: the chat template cannot be read: line 1"):
        ChatTemplate.from_folder(tmp_path, file)
