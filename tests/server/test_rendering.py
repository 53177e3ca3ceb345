"""How conversations are rendered: what clients send back, and that the time follows from their length."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers.models import WordLevel

from common.models.registry import ZOO, open_checkpoint
from common.server.api.bodies import Body, Limits, parse
from common.server.api.chat import ChatRequest
from common.server.api.messages import MessagesRequest
from common.server.api.responses import ResponsesRequest
from common.text.chat_template import ChatTemplate
from common.text.dialect import Dialect

QUESTION: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"id": "a", "function": {"name": "f", "arguments": "{}"}}


@functools.cache
def dialect(model: str = "llama-tiny") -> Dialect:
    return Dialect.of(open_checkpoint(f"zoo:{model}").tokenizer())


def prompts(form: type[Body], field: str, turns: list[dict[str, Any]], model: str = "llama-tiny") -> Any:
    limits = Limits(models=("m",), max_choices=64, vocab_size=1024)
    length = {"max_tokens": 9} if form is MessagesRequest else {}
    request: Any = parse(json.dumps({field: turns} | length).encode(), form, limits)
    return request.prompts(dialect(model))


def test_a_template_for_tools_is_used_where_there_are_some() -> None:
    """As in `transformers`. The template of Hermes, say, fails without tools."""
    source = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}"
    for_tools = "{% for tool in tools %}{{ tool.function.name }}<tool_call>arguments{% endfor %}" + source
    both = {"default": source, "tool_use": for_tools}
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(WordLevel({"a": 0})), chat_template=both
    )
    template = ChatTemplate(source, {}, ChatTemplate(for_tools, {}))
    known = Dialect(template, "hermes", knows_tools=True)
    system = {"role": "system", "content": "Be brief."}
    late = [system, QUESTION, {"role": "assistant", "content": "Hm."}, {**system, "content": "Or not."}]
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    told = [
        QUESTION,
        {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    for sent, read, tools in ((late, late, [tool]), ([QUESTION, calls], told, None)):
        request: Any = ChatRequest.model_validate({"messages": sent, "tools": tools})
        expected = oracle.apply_chat_template(read, tools=tools, tokenize=False)
        assert request.prompts(known) == [expected]


def test_a_result_and_words_are_one_turn_where_turns_alternate() -> None:
    """Chats and Anthropic's messages, beside `transformers`' text of turns that the template takes."""
    chat = [
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "20"},
        {"role": "user", "content": "And then?"},
    ]
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "20"}
    messages = [
        QUESTION,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And then?"}]},
    ]
    plain = [
        QUESTION,
        {"role": "assistant", "content": "[f()]"},
        {"role": "user", "content": "<tool_response>\n20\n</tool_response>\n\nAnd then?"},
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(ZOO / "gemma3-tiny")
    expected = [theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)]
    assert prompts(ChatRequest, "messages", chat, "gemma3-tiny") == expected
    assert prompts(MessagesRequest, "messages", messages, "gemma3-tiny") == expected


@pytest.mark.parametrize(("model", "role"), [("llama-tiny", "system"), ("gemma3-tiny", "user")])
def test_a_system_message_alone_is_shown(model: str, role: str) -> None:
    """Gemma's template only shows a system message at the beginning of the user's."""
    theirs = transformers.AutoTokenizer.from_pretrained(ZOO / model)
    plain = [{"role": role, "content": "Be brief."}]
    expected = [theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)]
    for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        alone = [{"role": "system", "content": content}]
        assert prompts(ChatRequest, "messages", alone, model) == expected


@pytest.mark.parametrize("model", ["llama-tiny", "gemma3-tiny"])
def test_items_of_an_answer_are_one_message_in_any_order(model: str) -> None:
    call: dict[str, Any] = {"type": "function_call", "call_id": "a", **CALL["function"]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    result = {"type": "function_call_output", "call_id": "a", "output": "20"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    for answer, text in (
        ([call, said], "I look."),
        ([said, call], "I look."),
        ([said, call, said], "I look.I look."),
        ([thought, call, thought, said], "I look."),
    ):
        chat = [
            QUESTION,
            {"role": "assistant", "content": text, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "20"},
        ]
        expected = prompts(ChatRequest, "messages", chat, model)
        assert prompts(ResponsesRequest, "input", [QUESTION, *answer, result], model) == expected


#: Turns as clients' libraries send them back, and the same turns without the fields that the libraries add.
SENT_BACK: dict[str, tuple[type[Body], str, dict[str, Any], dict[str, Any]]] = {
    "openai's parse": (
        ChatRequest,
        "messages",
        {"role": "assistant", "content": "Hi.", "parsed": {"a": 1}, "refusal": None},
        {"role": "assistant", "content": "Hi."},
    ),
    "openai's parse with a tool": (
        ChatRequest,
        "messages",
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": CALL["function"] | {"parsed_arguments": {}}}],
        },
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    "huggingface_hub": (
        ChatRequest,
        "messages",
        {"role": "assistant", "tool_calls": [{**CALL, "function": CALL["function"] | {"description": None}}]},
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    "LangGraph": (
        ChatRequest,
        "messages",
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": ["ä", 1.5]}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": ["ä", 1.5]}'}}]},
    ),
    "a call that another model made": (
        ChatRequest,
        "messages",
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "multi_tool_use.parallel", "arguments": "{}"}}],
        },
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "multi_tool_use.parallel", "arguments": {}}\n</tool_call>',
        },
    ),
    "a call without arguments": (
        ChatRequest,
        "messages",
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    "an item with arguments of null": (
        ResponsesRequest,
        "input",
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": None},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    ),
    "the Agents SDK in JavaScript": (
        ResponsesRequest,
        "input",
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi.", "role": "assistant"}]},
        {"role": "assistant", "content": "Hi."},
    ),
    "reasoning of another server": (
        ResponsesRequest,
        "input",
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo"},
        {"type": "reasoning", "content": []},
    ),
    "reasoning that was cut": (
        ResponsesRequest,
        "input",
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "infer:SG0"},
        {"type": "reasoning", "content": []},
    ),
    "reasoning without text": (
        ResponsesRequest,
        "input",
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "reasoning", "content": []},
    ),
}


@pytest.mark.parametrize("client", SENT_BACK)
def test_turns_come_back_as_clients_change_them(client: str) -> None:
    form, field, sent, plain = SENT_BACK[client]
    rendered = prompts(form, field, [QUESTION, sent, QUESTION])
    assert rendered == prompts(form, field, [QUESTION, plain, QUESTION])
    if client.startswith("reasoning"):
        assert rendered == prompts(form, field, [QUESTION, QUESTION])
