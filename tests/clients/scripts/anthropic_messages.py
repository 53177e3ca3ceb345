"""`anthropic`: messages whole and streamed, a loop with a tool, tokens counted, refusals."""

from typing import Any

from anthropic import Anthropic, beta_tool
from fox import Fox, called, find_fox
from harness import GIVEN, caught, joined, report

client = Anthropic(base_url=GIVEN["url"], api_key=GIVEN["key"], max_retries=0)
system, *messages = GIVEN["messages"]
asked: dict[str, Any] = {
    "model": GIVEN["model"],
    "system": system["content"],
    "messages": messages,
    "max_tokens": GIVEN["max_tokens"],
    "extra_body": {"temperature": 0},  # the library has no argument of this name any more
}
FIND_FOX: Any = {
    "name": "find_fox",
    "description": "Find a fox.",
    "input_schema": Fox.model_json_schema(),
}


def usage_of(message: Any) -> list[int]:
    said = message.usage
    prompt = said.input_tokens + said.cache_read_input_tokens  # apart in this API
    return [prompt, said.output_tokens, prompt + said.output_tokens]


def whole() -> Any:
    message = client.messages.create(**asked)
    (block,) = message.content
    assert message.stop_reason in ("max_tokens", "end_turn")
    return {"text": block.text, "usage": usage_of(message)}


def streamed() -> Any:
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    (block,) = message.content
    assert block.text == "".join(pieces)
    return joined(pieces) | {"usage": usage_of(message)}


def loop() -> Any:
    """A forced call, streamed; its result; an answer that has read it."""
    more = asked | {"max_tokens": GIVEN["call_tokens"], "tools": [FIND_FOX]}
    with client.messages.stream(**more, tool_choice={"type": "tool", "name": "find_fox"}) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "There is one fox."}
    turns = [
        *messages,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**more | {"messages": turns, "tool_choice": {"type": "none"}})
    return {
        "calls": [[call.input["place"], call.input["brave"]]],
        "text": "".join(block.text for block in second.content),
    }


def runner() -> Any:
    """The library's own loop; its bound ends it, since the call stays forced."""
    more = asked | {"max_tokens": GIVEN["call_tokens"]}
    forced: Any = {"type": "tool", "name": "find_fox"}
    loop = client.beta.messages.tool_runner(
        **more, tools=[beta_tool(find_fox)], tool_choice=forced, max_iterations=2
    )
    for _ in loop:
        pass
    place, brave = called[0]
    return {"place": place, "brave": brave}


def counted() -> Any:
    count = client.messages.count_tokens(
        model=asked["model"], system=asked["system"], messages=asked["messages"]
    )
    assert count.input_tokens == usage_of(client.messages.create(**asked))[0]
    return count.input_tokens


def refusals() -> Any:
    wrong_key = Anthropic(base_url=GIVEN["url"], api_key="wrong", max_retries=0)
    return {
        "key": caught(lambda: wrong_key.messages.create(**asked)),
        "value": caught(lambda: client.messages.create(**asked | {"extra_body": {"top_p": 2}})),
        "model": caught(lambda: client.messages.create(**asked | {"model": "another"})),
    }


report(refusal=[refusals], chat=[whole, streamed], loop=[loop], fox=[runner], said=[counted])
