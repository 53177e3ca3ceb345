"""Workloads of a model that chats: a person's messages, in the model's own template."""

from __future__ import annotations

import random

import pytest

from benchmarks.chats import CHATS, read
from benchmarks.workloads import CHAT_WORKLOADS, PlannedRequest, PromptWriter, build
from common.errors import StartupError
from common.models.registry import ZOO
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ZOO / "llama-tiny", vocab_size=2048)


def texts(writer: PromptWriter, plan: list[PlannedRequest]) -> list[str]:
    return [writer.as_text(request.token_ids) for request in plan]


@pytest.mark.parametrize("name", CHAT_WORKLOADS)
def test_the_seed_alone_decides(name: str, writer: PromptWriter) -> None:
    workload = CHAT_WORKLOADS[name]
    assert build(workload, writer, seed=5) == build(workload, writer, seed=5)
    assert build(workload, writer, seed=5) != build(workload, writer, seed=6)


@pytest.mark.parametrize("name", sorted(CHAT_WORKLOADS.keys() - {"chats"}))
def test_no_prompt_comes_twice(name: str, writer: PromptWriter) -> None:
    plan = build(CHAT_WORKLOADS[name], writer)
    assert len({tuple(request.token_ids) for request in plan}) == len(plan)


def test_a_prompt_is_the_message_in_the_models_template(writer: PromptWriter, tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    assert template is not None
    ids = writer.message("Why is the sky blue?")
    rendered = template.render([{"role": "user", "content": "Why is the sky blue?"}])
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)


def test_prompts_and_answers_of_a_chat_make_the_whole_conversation(
    writer: PromptWriter, tokenizer: Tokenizer
) -> None:
    """The load generator appends each answer with the token that ended it."""
    template = tokenizer.chat_template
    assert template is not None
    said = ["Hello.", "Can you say that again?", "And once more?"]
    answer = "Yes, I can."
    ids = writer.message(said[0])
    for each in said[1:]:
        ids += tokenizer.encode(f"{answer}<|eot_id|>", add_special_tokens=False)
        ids += writer.message(each, continues=True)
    asked = [{"role": "user", "content": text} for text in said]
    answered = {"role": "assistant", "content": answer}
    messages = [asked[0], answered, asked[1], answered, asked[2]]
    assert ids == tokenizer.encode(template.render(messages), add_special_tokens=False)


def test_the_template_writes_a_system_prompt_once(tokenizer: Tokenizer) -> None:
    """Like SmolLM2's, the template adds a system prompt if the first message is a user's."""
    source = (
        "{% if messages[0]['role'] != 'system' %}[Be kind.]{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    class WithSystemPrompt:
        chat_template = ChatTemplate(source, {})
        encode = staticmethod(tokenizer.encode)
        decode = staticmethod(tokenizer.decode)

    writer = PromptWriter(WithSystemPrompt())  # type: ignore[arg-type]  # it has what a writer needs
    assert tokenizer.decode(writer.message("Hello.")) == "[Be kind.]<user>Hello.</s>\n<assistant>"
    later = tokenizer.decode(writer.message("More.", continues=True))
    assert later == "\n<user>More.</s>\n<assistant>"


def test_a_model_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    class Plain:
        chat_template = None
        encode = staticmethod(tokenizer.encode)
        decode = staticmethod(tokenizer.decode)

    with pytest.raises(StartupError, match="needs a model that chats"):
        build(CHAT_WORKLOADS["questions"], PromptWriter(Plain()))  # type: ignore[arg-type]


def test_three_of_four_bring_a_document_of_their_own_order(writer: PromptWriter) -> None:
    plan = texts(writer, build(CHAT_WORKLOADS["long_documents"], writer))
    documents = [text for text in plan if "Handbook of the harbour library" in text]
    assert len(documents) == 24
    assert any(text not in documents for text in plan[:16]), "mixed, not sorted"
    assert len({text.split("##")[1] for text in documents}) > 6, "few share the beginning of their document"


def test_a_shared_document_stands_before_every_question(writer: PromptWriter) -> None:
    document = read("handbook.md").strip()
    for text in texts(writer, build(CHAT_WORKLOADS["shared_document"], writer)):
        before, found, question = text.partition(document)
        assert found
        assert "Quote the sentences" not in before
        assert "Quote the sentences" in question


@pytest.mark.parametrize("kind", CHATS)
def test_every_kind_draws_as_many_messages_as_asked(kind: str) -> None:
    turns = 8 if kind == "chats" else 1
    drawn = CHATS[kind](random.Random(0), 4, turns)
    assert [len(chat) for chat in drawn] == [turns] * 4
    assert all(message.strip() for chat in drawn for message in chat)
