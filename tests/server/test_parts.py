"""Parts of an answer: any text, cut into any deltas, gives the same parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.models import WordLevel

from common.server.api.parts import (
    ArgumentsPart,
    Brackets,
    CallPart,
    HermesReader,
    LlamaReader,
    MistralReader,
    PartsReader,
    PythonReader,
    ReasoningPart,
    TextPart,
    new_reader,
)
from common.text.chat_template import ChatTemplate
from common.text.dialect import Dialect, opens_thought
from common.text.tokenizer import Tokenizer

NAMES = ("weather", "add")


def read(reader: PartsReader, *deltas: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the text, the reasoning, and name and arguments of each call."""
    parts = [part for delta in deltas for part in reader.add(delta)] + reader.finish()
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallPart):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, ArgumentsPart):
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return text, "".join(part.text for part in parts if isinstance(part, ReasoningPart)), calls


def one_call(**arguments: Any) -> list[tuple[str, str]]:
    return [("weather", json.dumps(arguments, ensure_ascii=False))]


ROME = one_call(city="Rome")


def tagged(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


Case = tuple[str, str, list[tuple[str, str]]]


def no_call(text: str) -> Case:
    """A text that stays as it is."""
    return text, text, []


HERMES = tagged('\n{"name": "weather", "arguments": {"city": "Rome"}}\n')
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
MISTRAL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]'
LISTED = json.dumps([{"name": "weather", "arguments": {"city": "Rome"}}] * 2)
OTHER = '{"name": "w", "arguments": {}}'
BROKEN = HERMES.replace('weather"', "weather")
NESTED = {"city": 'a "}" \\ {[ </tool_call> é', "days": [1, {"a": None}], "sure": True}

#: For each reader, the text of a model, the answer in it, and its calls.
TEXTS: dict[type[PartsReader], dict[str, Case]] = {
    HermesReader: {
        "one": (HERMES, "", ROME),
        "behind text": ("I look it up.\n\n" + HERMES + "\n", "I look it up.", ROME),
        "twice": (HERMES + "\n" + HERMES, "", ROME * 2),
        "then text": (HERMES + " So be it. ", "So be it. ", ROME),
        "two in one tag": (HERMES.replace("\n</", f"\n{LLAMA}\n</"), "", ROME * 2),
        "another name in the same tag": (
            HERMES.replace("\n</", f"\n{OTHER}\n</") + " So.",
            OTHER + " So.",
            ROME,
        ),
        "text in the tag": (HERMES.replace("\n</", "\nSo be it.\n</") + "\nYes.", "So be it.\nYes.", ROME),
        "text behind a tag without an end": (
            HERMES.removesuffix("\n</tool_call>") + "\nNow I < wait.",
            "Now I < wait.",
            ROME,
        ),
        "a broken call": no_call(BROKEN),
        "without an end": (HERMES.removesuffix("\n</tool_call>"), "", ROME),
        "half an end": (HERMES.removesuffix("all>"), "", ROME),
        "twice without an end": (HERMES.removesuffix("</tool_call>") + HERMES, "", ROME * 2),
        "arguments first": (tagged('{"arguments": {"city": "Rome"}, "name": "weather"}'), "", ROME),
        "arguments as text": (tagged(r'{"name": "weather", "arguments": "{\"city\": \"Rome\"}"}'), "", ROME),
        "more keys": (HERMES.replace("}}", '}, "id": {"a": "}"}}'), "", ROME),
        "no arguments": (tagged('{"name": "weather"}'), "", one_call()),
        "hard strings": (
            HERMES.replace('{"city": "Rome"}', json.dumps(NESTED, ensure_ascii=False)),
            "",
            one_call(**NESTED),
        ),
        "broken off in its arguments": (HERMES.replace('"Rome"}}', "12"), "", [("weather", '{"city": 12\n')]),
        "a number that no float holds": no_call(tagged('{"arguments": {"city": 1e999}, "name": "weather"}')),
        "a name of no tool": no_call("So: " + HERMES.replace("weather", "w")),
        "half a character": no_call(tagged(r'{"arguments": {"city": "\ud83d"}, "name": "weather"}')),
        "arguments as no JSON": no_call(tagged('{"name": "weather", "arguments": "Rome"}')),
        "no JSON": no_call("A <tool_call> is a tag, {"),
        "no marker": no_call(" a <tool or <tool_cal"),
    },
    LlamaReader: {
        "one": (LLAMA, "", ROME),
        "tagged": ("<|python_tag|>" + LLAMA, "", ROME),
        "tagged behind text": ("Well. <|python_tag|>" + LLAMA, "Well.", ROME),
        "twice": (f"{LLAMA}; {LLAMA}", "", ROME * 2),
        "then text": (LLAMA + "\n\nSo.", "So.", ROME),
        "a list": (LISTED, "", ROME * 2),
        "a list, then text": (LISTED + "\n\nSo.]", "So.]", ROME * 2),
        "a list of one, tagged": (f"Well. <|python_tag|>[{LLAMA}] So.", "Well.So.", ROME),
        "a list of something else": no_call('[{"name": "Bob"}, [1]] is a list'),
        "JSON that is no call": no_call('{"name": "Bob", "age": 3}'),
        "a list as the name": no_call('{"name": ["add"], "parameters": {}}'),
        "nested deeply": no_call('{"name": ' + "[" * 2000),
        "a call behind text": no_call("Say " + LLAMA),
    },
    MistralReader: {
        "one": (MISTRAL, "", ROME),
        "a space": (MISTRAL.replace("]", "] ", 1), "", ROME),
        "with an id": (MISTRAL.replace("}}", '}, "id": "Abc123xyz"}'), "", ROME),
        "a list": ("[TOOL_CALLS]" + LISTED.replace("parameters", "arguments"), "", ROME * 2),
        "behind text": ("Well. " + MISTRAL, "Well.", ROME),
        "name first": ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "", ROME),
        "name first, twice": ('Well.\n[TOOL_CALLS]weather[ARGS]{"city": "Rome"}' * 2, "Well.Well.", ROME * 2),
        "name first, with an id": ('[TOOL_CALLS]weather[CALL_ID]Abc123xyz[ARGS]{"city": "Rome"}', "", ROME),
        "name first, without its marker": ('[TOOL_CALLS]weather{"city": "Rome"}', "", ROME),
        "name first, broken off": ('[TOOL_CALLS]weather[ARGS]{"city": 12', "", [("weather", '{"city": 12')]),
        "a name of no tool": no_call('[TOOL_CALLS]w[ARGS]{"city": "Rome"}'),
        "a longer name": no_call('[TOOL_CALLS]weathers[ARGS]{"city": "Rome"}'),
        "a name alone": no_call("[TOOL_CALLS]weather"),
        "no list": no_call("[TOOL_CALLS] is a token"),
    },
    PythonReader: {
        "one": ('[weather(city="Rome")]', "", ROME),
        "twice": ("[weather(city='Rome'), weather( city = 'Rome' )]\n", "", ROME * 2),
        "fenced": ('```tool_code\nweather(city="Rome")\n```', "", ROME),
        "fenced lines": (
            '```tool_code\nweather(city="Rome")\nweather(city="Rome")\n```\nSo.',
            "So.",
            ROME * 2,
        ),
        "hard values": (
            "[weather(city='a \"}\" \\\\ {[ </tool_call> é', days=[1, {'a': None}], sure=True)]",
            "",
            one_call(**NESTED),
        ),
        "a dict": ('[weather(**{"city": "Rome"})]', "", ROME),
        "a number that no float holds": no_call("[weather(city=[-1e999])]"),
        "text behind a call": ("[weather(city='Rome')], I say", ", I say", ROME),
        "another name": no_call("[rain(a=1)]"),
        "a dict as a key": no_call("[weather(city={{}})]"),
        "an integer that nothing writes": no_call(f"[weather(city={'1' * 5000})]"),
        "no literal": no_call("[weather(city=rome)]"),
        "broken off": no_call("[weather(city='Ro"),
    },
}
CASES = {
    f"{kind.__name__}, {name}": (kind, *case) for kind, cases in TEXTS.items() for name, case in cases.items()
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("thought", [None, "prompt", "answer"])
def test_text_becomes_the_same_parts_whole_and_letter_by_letter(case: str, thought: str | None) -> None:
    kind, text, answer, calls = CASES[case]
    if thought is not None:
        text = "Hm,\n<th.\n</think>\n\n" + text.lstrip()
        text, answer = (
            ("<think>\n" if thought == "answer" else "") + text,
            answer.lstrip() if not calls else answer,
        )
    expected = (answer, "" if thought is None else "Hm,\n<th.", calls)
    for deltas in ((text,), tuple(text)):
        reader = kind(thinks=thought == "answer", thinking=thought == "prompt", names=NAMES)
        assert read(reader, *deltas) == expected
        assert not reader.in_call or "broken off" in case


@pytest.mark.parametrize("kind", [PartsReader, HermesReader, LlamaReader, MistralReader, PythonReader])
@settings(max_examples=40)
@given(st.data())
def test_any_text_is_the_same_in_any_deltas(kind: type[PartsReader], data: st.DataObject) -> None:
    words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "```tool_code",
        "[TOOL_CALLS]",
        "[ARGS]",
        "weather",
    ]
    words += [*"[](){}\"',;:= \n\\1<`", LLAMA]
    words += ['{"name": "weather", "arguments": ', '"name"', '"arguments"', "[weather(", "add(a=1)"]
    deltas = data.draw(st.lists(st.one_of(st.sampled_from(words), st.text(max_size=2)), max_size=12))
    for options in ({}, {"thinks": True}, {"thinking": True}):
        whole = read(kind(names=NAMES, **options), "".join(deltas))
        assert read(kind(names=NAMES, **options), *deltas) == whole
        assert read(kind(names=NAMES, **options), *"".join(deltas)) == whole


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    reader = HermesReader(thinks=True, names=NAMES)
    assert reader.add(" <th") == []
    assert reader.add("e <too") == [TextPart(" <the")]
    assert reader.add("k") == [TextPart(" <took")]
    assert reader.add(" <tool_call>") == []
    assert [type(part) for part in reader.add('{"name": "add", "arguments": {"a"')] == [
        CallPart,
        ArgumentsPart,
    ]
    assert reader.in_call
    assert reader.add(": 1") == [ArgumentsPart(0, ": 1")]
    assert reader.add("}") == [ArgumentsPart(0, "}")]
    assert not reader.in_call
    assert reader.finish() == []


def count_searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each text that is searched for brackets."""
    searched: list[int] = []
    find = Brackets.find

    def counted(brackets: Brackets, piece: str, *, to_inner: bool = False) -> int | None:
        found = find(brackets, piece, to_inner=to_inner)
        searched.append(len(piece) if found is None else found)
        return found

    monkeypatch.setattr(Brackets, "find", counted)
    return searched


#: Reader and text: a beginning, and a piece that repeats.
ENDLESS: dict[str, tuple[type[PartsReader], str, str]] = {
    "white space before a thought": (PartsReader, "", " "),
    "white space in a thought": (PartsReader, "<think>Hm", "\n"),
    "white space before an object": (HermesReader, "<tool_call>", " "),
    "brackets in a name": (HermesReader, '<tool_call>{"name": "', "{"),
    "beginnings of calls in strings": (HermesReader, "", '<tool_call>{"\\"'),
    "calls without an end": (HermesReader, "<tool_call>", '{"name": "weather", "arguments": {},'),
    "white space in a list": (PythonReader, "[", " "),
    "white space behind a name": (PythonReader, "[weather", " "),
    "commas": (PythonReader, "[weather()", ","),
    "lists": (LlamaReader, "", "["),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_reading_takes_linear_work(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every delta is read together with the text that is still held, so little may be held."""
    kind, beginning, piece = ENDLESS[case]
    searched = count_searched(monkeypatch)
    text = beginning + piece * (6000 // len(piece))
    reader = kind(thinks=True, names=NAMES)
    for letter in text:
        reader.add(letter)
        assert len(reader._held) <= 12
    reader.finish()
    assert sum(searched) <= 2 * len(text)


# ---------------------------------------------------------------------- the choice of a reader

#: Beginning of a template, the dialect's syntax, whether the template knows tools, and whether the model reasons.
TEMPLATES: dict[str, tuple[str, str, bool, bool]] = {
    "qwen 2.5": (
        r'{% if tools %}{{ "<tool_call>\n{\"name\": 1, \"arguments\": 2}" }}{% endif %}',
        "hermes",
        True,
        False,
    ),
    "qwen 3": (
        r"{{ tools }}<tool_call>{{ arguments }}{% if '</think>' in content %}{% endif %}",
        "hermes",
        True,
        True,
    ),
    "qwen 3 coder": ("{{ tools }}<tool_call><function=f>", "hermes", False, False),
    "glm": ("{{ tools }}{{ arguments }}<tool_call>f\n<arg_key>", "hermes", False, False),
    "apriel": ("{{ tools }}<tool_call> {{ arguments }}<tool_calls>[", "hermes", False, False),
    "functionary": ("{{ tools }}parameters<|start_header_id|>>>>all\n", "hermes", False, False),
    "llama 3.1": (
        "{% if not tools is defined %}{% set tools = none %}{% endif %}<|python_tag|>",
        "llama3_json",
        True,
        False,
    ),
    "mistral": ("{{ tools }}[TOOL_CALLS]", "mistral", True, False),
    "gemma": ("<start_of_turn>", "pythonic", False, False),
    "function gemma": ("{{ tools }}<start_of_turn><start_function_call>call:", "hermes", False, False),
    # In words of the templates themselves, which vLLM has among its examples.
    "toolace": (
        "{{ tools }}<|start_header_id|>If it lacks the parameters required by the function, point it out. "
        "You MUST put it in the format of [func_name1(params_name1=params_value1, func_name2(params)]",
        "pythonic",
        True,
        False,
    ),
    "xlam": (
        '{{ tools }}<|im_start|>make calls in a single JSON array: [{"name": "tool_call_name", "arguments": {}}]',
        "llama3_json",
        True,
        False,
    ),
}


def tokenizer_of(source: str | None, special: tuple[str, ...] = ()) -> Tokenizer:
    backend = tokenizers.Tokenizer(WordLevel({"a": 0}))
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    backend.add_special_tokens(list(special))
    template = None if source is None else ChatTemplate(source, {})
    return Tokenizer(backend, vocab_size=backend.get_vocab_size(), chat_template=template)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_dialect_is_told_by_the_template(name: str) -> None:
    source, calls, knows_tools, thinks = TEMPLATES[name]
    dialect = Dialect.of(tokenizer_of(source))
    assert (dialect.calls, dialect.knows_tools, dialect.thinks) == (calls, knows_tools, thinks)
    assert (
        type(new_reader(dialect, names=NAMES))
        is {
            "hermes": HermesReader,
            "llama3_json": LlamaReader,
            "mistral": MistralReader,
            "pythonic": PythonReader,
        }[calls]
    )
    assert type(new_reader(dialect)) is (PartsReader if thinks else type(None))


def test_options_override_what_the_template_tells() -> None:
    tokenizer = tokenizer_of(TEMPLATES["qwen 3"][0])
    assert Dialect.of(tokenizer, "pythonic").calls == "pythonic"
    assert Dialect.of(tokenizer, None).calls is None
    assert not Dialect.of(tokenizer, reasoning=None).thinks
    assert Dialect.of(tokenizer_of("plain"), reasoning="think").thinks
    assert Dialect.of(tokenizer_of(TEMPLATES["qwen 3 coder"][0]), "hermes").knows_tools
    assert new_reader(Dialect.of(tokenizer, None, None), names=NAMES) is None


def test_a_model_without_a_template_has_no_dialect() -> None:
    assert Dialect.of(tokenizer_of(None), "hermes", "think") == Dialect()


def test_a_dialect_names_the_markers_that_are_tokens_of_their_own() -> None:
    tokenizer = tokenizer_of("x", special=("<|python_tag|>",))
    found = Dialect.of(tokenizer).special
    assert "<|python_tag|>" in found
    assert found.keys() & {"<think>", "</think>"} == set()
    assert all(tokenizer.backend.token_to_id(marker) == token_id for marker, token_id in found.items())


def test_an_opened_thought_is_seen_at_the_end_of_a_prompt() -> None:
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
