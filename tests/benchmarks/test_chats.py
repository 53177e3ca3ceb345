"""Workloads of a model that chats: a person's messages, in the model's own template."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from benchmarks.chats import CHATS
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
    ids, _ = writer.message("Why is the sky blue?")
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
    ids, _ = writer.message(said[0])
    for each in said[1:]:
        ids += tokenizer.encode(f"{answer}<|eot_id|>", add_special_tokens=False)
        ids += writer.message(each, continues=True)[0]
    asked = [{"role": "user", "content": text} for text in said]
    answered = {"role": "assistant", "content": answer}
    messages = [asked[0], answered, asked[1], answered, asked[2]]
    assert ids == tokenizer.encode(template.render(messages), add_special_tokens=False)


@pytest.mark.parametrize("name", CHAT_WORKLOADS)
@pytest.mark.parametrize("model", ["gemma3-tiny", "llama-tiny", "qwen3-tiny"])
def test_prompts_as_text_are_tokenized_to_the_conversation(model: str, name: str) -> None:
    """A server adds its BOS to a text. An answer's text lacks the token that ended it."""
    tokenizer, workload = Tokenizer.from_folder(ZOO / model, vocab_size=2048), CHAT_WORKLOADS[name]
    plan = build(workload, PromptWriter(tokenizer), quick=True, text=True)
    clients = len(plan) // workload.turns
    assert workload.chats is not None
    chats = CHATS[workload.chats](random.Random(f"{name}:0:texts"), clients, workload.turns)
    theirs = AutoTokenizer.from_pretrained(ZOO / model)
    prompts = [""] * clients
    messages: list[list[dict[str, str]]] = [[] for _ in range(clients)]
    for request in plan:
        turn, client = divmod(request.index, clients)
        messages[client].append({"role": "user", "content": chats[client][turn]})
        assert isinstance(request.prompt, str)
        prompts[client] += request.prompt
        wanted = theirs.apply_chat_template(messages[client], add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(prompts[client]) == wanted
        messages[client].append({"role": "assistant", "content": "Yes, I can."})
        prompts[client] += "Yes, I can."


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
    assert tokenizer.decode(writer.message("Hello.")[0]) == "[Be kind.]<user>Hello.</s>\n<assistant>"
    ids, text = writer.message("More.", continues=True)
    assert tokenizer.decode(ids) == "\n<user>More.</s>\n<assistant>"
    assert text == "</s>\n<user>More.</s>\n<assistant>"


def test_a_model_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    class Plain:
        chat_template = None
        encode = staticmethod(tokenizer.encode)
        decode = staticmethod(tokenizer.decode)

    with pytest.raises(StartupError, match="needs a model that chats"):
        build(CHAT_WORKLOADS["questions"], PromptWriter(Plain()))  # type: ignore[arg-type]
