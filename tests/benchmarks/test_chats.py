"""Workloads of a model that chats: a person's messages, in the model's own template."""

from __future__ import annotations

import pytest

from benchmarks.workloads import CHAT_WORKLOADS, PromptWriter, build
from common.errors import StartupError
from common.models.registry import ZOO
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ZOO / "llama-tiny", vocab_size=2048)


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
