"""Chat templates compared with `transformers`: the texts are equal, or both refuse."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from jinja2 import TemplateError
from packaging.version import Version
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from common.constrained.tool_calls import Function, told_in_messages
from common.errors import InvalidRequestError, StartupError
from common.models.registry import ZOO
from common.text.chat_template import ChatTemplate

TEMPLATES = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "templates").iterdir()}
QUESTION = {"role": "user", "content": " What <b>is</b> “this”, & why?\n"}
ANSWER = {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nA fox 🦊.  "}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "system": [{"role": "system", "content": "Speak \\n plainly. "}, QUESTION],
    "developer": [{"role": "developer", "content": "Be kind."}, QUESTION],
    "turns": [QUESTION, ANSWER, {"role": "user", "content": "{{ bos_token }}", "name": "Zoë"}],
    "continued": [QUESTION, ANSWER],
    "twice the same": [QUESTION, ANSWER, QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": ""}],
    "out of turn": [QUESTION, QUESTION],
    "parts": [
        {"role": "system", "content": parts("Be ", "brief.")},
        {"role": "user", "content": parts("One", " and ", "two?\n")},
        {"role": "assistant", "content": parts("Three, ", "four")},
    ],
}
#: Templates that read some content as a list of parts: the roles whose texts become parts, and the roles whose
#: parts stay parts. All other content is a text.
READ_PARTS = {
    "parts": ({"system", "user", "assistant"}, {"system", "user", "assistant"}),
    "vision": (set(), {"user", "assistant"}),
}
OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.24")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source: str | dict[str, str]) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(WordLevel({"<s>": 0, "</s>": 1}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **SPECIAL)


def as_read(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as a user of `transformers` would write them for a template."""
    from_text, from_parts = READ_PARTS.get(name, (set(), set()))
    told = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "developer" and "'developer'" not in TEMPLATES[name]:
            role = "system"
        if role == "system" and name == "pairs":
            role = "user"
        if isinstance(content, str):
            content = parts(content) if role in from_text else content
        elif role not in from_parts:
            content = "".join(part["text"] for part in content)
        if name in ("pairs", "turns") and told and told[-1]["role"] == role:
            told[-1]["content"] += f"\n\n{content}"
        else:
            told.append({**message, "role": role, "content": content})
    return told


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
    told = {"enable_thinking": False, "date_string": "1 May", "colours": ["red", "blue"]}
    for variables in ({}, told) if end == "generation" else ({},):
        expected = text = None
        with contextlib.suppress(TemplateError, ValueError):
            expected = theirs(source).apply_chat_template(
                as_read(name, messages), tokenize=False, **ends, **variables
            )
            expected = expected.replace("CONTINUE_FINAL_MESSAGE_TAG ", "")  # of a message shown twice
        with contextlib.suppress(InvalidRequestError):
            text = ChatTemplate(source, SPECIAL).render(messages, variables=variables, **ends)
        assert text == expected


# ---------------------------------------------------------------------- what a template accepts

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def call(number: int, arguments: Any = None) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": "a fox"} if arguments is None else arguments}
    return {"id": f"call{number}", "type": "function", "function": function}


def called(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"result {number}", "tool_call_id": f"call{number}"}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def developer(text: str) -> dict[str, Any]:
    return {"role": "developer", "content": text}


ONE_BY_ONE = [QUESTION, called(call(1), content="Hm."), result(1), called(call(2)), result(2)]
WRITTEN = '{"at": "a fox"}'
TOLD = told_in_messages("hermes", [], [Function("look", None, {})])[0]["content"]


@pytest.mark.parametrize(
    ("name", "sent", "read"),
    [
        ("one_call", [QUESTION, called(call(1), call(2), content="Hm."), result(2), result(1)], ONE_BY_ONE),
        ("one_call", ONE_BY_ONE, ONE_BY_ONE),
        (
            "one_call",
            [QUESTION, called(call(1), call(2)), result(3)],
            [QUESTION, called(call(1)), called(call(2)), result(3)],
        ),
        (
            "written_arguments",
            [QUESTION, called(call(1), call(2))],
            [QUESTION, called(call(1, WRITTEN), call(2, WRITTEN))],
        ),
        (
            "strict",
            [system("a"), developer("b"), QUESTION, developer("c")],
            [system("a\n\nb\n\nc"), QUESTION],
        ),
        (
            "strict",
            [QUESTION, developer("late"), ANSWER, QUESTION],
            [system("late"), QUESTION, ANSWER, QUESTION],
        ),
        ("strict", [system("a"), system("b"), QUESTION], [system("a\n\nb"), QUESTION]),
        (
            "chatml",
            [system("a"), developer("b"), QUESTION, developer("c"), QUESTION],
            [system("a\n\nb"), QUESTION, system("c"), QUESTION],
        ),
        ("chatml", [system("a"), system("b"), QUESTION], [system("a"), system("b"), QUESTION]),
        ("headers", [developer("b"), QUESTION], [developer("b"), QUESTION]),
        (
            "developers",
            [system("a"), developer("b"), QUESTION, developer("c")],
            [system("a\n\nb\n\nc"), QUESTION],
        ),
        (
            "parts",
            [system("a"), {"role": "user", "content": []}],
            [{"role": "system", "content": parts("a")}, {"role": "user", "content": []}],
        ),
        ("chatml", [{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        (
            "pairs",
            [system("a"), developer("b"), QUESTION, ANSWER, system("c"), QUESTION],
            [QUESTION | {"content": f"a\n\nb\n\nc\n\n{QUESTION['content']}"}, ANSWER, QUESTION],
        ),
        ("pairs", [system("a"), ANSWER], [QUESTION | {"content": "a"}, ANSWER]),
        (
            "pairs",
            [
                system("a") | {"name": "guide"},
                QUESTION,
                {"role": "assistant", "content": "b", "reasoning_content": "Well."},
                {"role": "assistant", "content": "c", "reasoning_content": "Hm."},
            ],
            [
                QUESTION | {"content": f"a\n\n{QUESTION['content']}"},
                {"role": "assistant", "content": "b\n\nc", "reasoning_content": "Well.\n\nHm."},
            ],
        ),
        (
            "pairs",
            told_in_messages("hermes", [QUESTION], [Function("look", None, {})]),
            [QUESTION | {"content": f"{TOLD}\n\n{QUESTION['content']}"}],
        ),
        (
            "turns",
            [QUESTION, ANSWER, {"role": "assistant", "content": parts("b", "c")}, QUESTION, QUESTION],
            [
                QUESTION,
                ANSWER | {"content": f"{ANSWER['content']}\n\nbc"},
                QUESTION | {"content": "\n\n".join([QUESTION["content"]] * 2)},
            ],
        ),
    ],
)
def test_a_conversation_becomes_what_the_template_accepts(
    name: str, sent: list[dict[str, Any]], read: list[dict[str, Any]]
) -> None:
    """Templates that would refuse a conversation, or leave words out, get it as `transformers`' users write it."""
    tools: list[Any] | None = [TOOL] if any("tool_calls" in message for message in sent) else None
    expected = theirs(TEMPLATES[name]).apply_chat_template(
        read, tools=tools, tokenize=False, add_generation_prompt=True
    )
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert template.render(sent, tools=tools, add_generation_prompt=True) == expected


def test_an_assistants_last_message_is_continued_unless_told_otherwise() -> None:
    template = ChatTemplate(TEMPLATES["chatml"], SPECIAL)
    begun = [QUESTION, {"role": "assistant", "content": "A fox"}]
    continued = template.render(begun, add_generation_prompt=False, continue_final_message=True)
    answered = template.render(begun, add_generation_prompt=True, continue_final_message=False)
    closed = template.render(begun, add_generation_prompt=False, continue_final_message=False)
    assert len({continued, answered, closed}) == 3
    assert template.render(begun) == continued
    assert template.render(begun, add_generation_prompt=True) == answered
    assert template.render(begun, continue_final_message=False) == answered
    assert template.render(begun, add_generation_prompt=False) == closed
    for last in (QUESTION, called(call(1))):
        assert template.render([QUESTION, last]).endswith("<|im_start|>assistant\n")
    hidden = ChatTemplate("{{ messages[0].content }}{{ '>' if add_generation_prompt }}", {})
    assert hidden.render([QUESTION, ANSWER]) == QUESTION["content"] + ">"


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_to_continue_an_empty_answer_is_to_begin_one(name: str) -> None:
    def expected(messages: list[dict[str, Any]], **end: bool) -> Any:
        text = theirs(TEMPLATES[name]).apply_chat_template(as_read(name, messages), tokenize=False, **end)
        return text.replace("CONTINUE_FINAL_MESSAGE_TAG ", "")  # of a message shown twice

    template, answer = ChatTemplate(TEMPLATES[name], SPECIAL), {"role": "assistant", "content": ""}
    begun = expected([QUESTION], add_generation_prompt=True)
    for content in ("", []):
        assert template.render([QUESTION, answer | {"content": content}]) == begun
    for words in ({"content": parts("A fox", "")}, {"reasoning_content": "Well."}):
        told = [QUESTION, answer | words]
        shown = "content" in words or "reasoning_content" in template.source
        assert template.render(told) == (expected(told, continue_final_message=True) if shown else begun)


@pytest.mark.slow
def test_a_template_that_takes_too_long_is_ended() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(StartupError, match="takes over 1 s for these messages, although"):
        ChatTemplate(endless, {})
    recursive = (
        "{% macro again() %}{{ again() }}{{ again() }}{% endmacro %}{{ again() if messages | length > 9 }}"
    )
    for slow in ("{% if messages | length > 9 %}" + endless + "{% endif %}", recursive):
        template = ChatTemplate(slow, {})
        began_s = time.thread_time()
        with pytest.raises(InvalidRequestError, match="the model's chat template"):
            template.render([QUESTION] * 10)
        assert time.thread_time() - began_s < 2
        assert template.render([QUESTION]) == ""


# ---------------------------------------------------------------------- refusals


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
def test_a_template_may_not_reach_python_or_loop_for_ever(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source, {}).render([QUESTION])


# ---------------------------------------------------------------------- files with templates


def write(folder: Path, config: dict[str, Any] | None, own_file: str | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if own_file is not None:
        (folder / "chat_template.jinja").write_text(own_file, "utf-8")
    return folder


@pytest.mark.parametrize("as_files", [False, True])
def test_the_template_for_tools(as_files: bool, tmp_path: Path) -> None:
    reference = theirs(
        {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["one_call"], "rag": "documents"}
    )
    reference.save_pretrained(tmp_path, save_jinja_files=as_files)
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    for tools, chosen in ((None, template), ([TOOL], template.for_tools)):
        expected = reference.apply_chat_template(
            [QUESTION], tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert chosen.render([QUESTION], tools=tools) == expected
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    mine = ChatTemplate.from_folder(tmp_path, file)
    assert mine is not None
    assert mine.for_tools is mine


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
def test_a_broken_template_file_is_refused_with_its_line(tmp_path: Path, source: str) -> None:
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
