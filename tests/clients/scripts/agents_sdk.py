"""`openai-agents`: an agent with one tool, whole and streamed."""

import asyncio
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from fox import called, find_fox
from harness import GIVEN, caught, report
from openai import AsyncOpenAI

set_tracing_disabled(True)


def agent(**settings: Any) -> Agent:
    client = AsyncOpenAI(base_url=GIVEN["base_url"], api_key=GIVEN["key"], max_retries=0)
    return Agent(
        name="storyteller",
        instructions="You tell short stories.",
        model=OpenAIResponsesModel(GIVEN["model"], client),
        tools=[function_tool(find_fox)],
        model_settings=ModelSettings(**{"temperature": 0, "tool_choice": "required"} | settings),
    )


def described(result: Any) -> dict[str, Any]:
    """Check a run's items and usage: a call, its output, and an answer that has read it."""
    items = [item.type for item in result.new_items]
    assert items == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    return {"calls": called.copy(), "text": result.final_output}


def whole() -> Any:
    called.clear()
    return described(asyncio.run(Runner.run(agent(), GIVEN["question"], max_turns=3)))


def streamed() -> Any:
    async def run() -> dict[str, Any]:
        called.clear()
        result = Runner.run_streamed(agent(), GIVEN["question"], max_turns=3)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert len(pieces) > 3, "it came at once"
        assert "".join(pieces) == result.final_output
        return described(result)

    said = asyncio.run(run())
    assert said == whole()
    return said


def refusals() -> Any:
    refused = agent(top_p=2)
    return {"value": caught(lambda: asyncio.run(Runner.run(refused, GIVEN["question"], max_turns=3)))}


report(refusal=[refusals], loop=[whole, streamed])
