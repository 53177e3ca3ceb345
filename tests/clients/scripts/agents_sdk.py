"""`openai-agents`: an agent with one tool, whole and streamed."""

import asyncio
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from harness import GIVEN, caught, report
from openai import AsyncOpenAI

set_tracing_disabled(True)
called: list[list[Any]] = []


@function_tool
def find_fox(place: Literal["forest", "river"], brave: bool) -> str:
    """Find a fox.

    Args:
        place: where to look.
        brave: whether it has to be brave.
    """
    called.append([place, brave])
    return "There is one fox."


def agent(**settings: Any) -> Agent:
    client = AsyncOpenAI(base_url=GIVEN["base_url"], api_key=GIVEN["key"], max_retries=0)
    return Agent(
        name="storyteller",
        instructions="You tell short stories.",
        model=OpenAIResponsesModel(GIVEN["model"], client),
        tools=[find_fox],
        model_settings=ModelSettings(**{"temperature": 0, "tool_choice": "required"} | settings),
    )


def described(result: Any) -> dict[str, Any]:
    usage = result.context_wrapper.usage
    return {
        "calls": called.copy(),
        "items": [item.type for item in result.new_items],
        "text": result.final_output,
        "requests": usage.requests,
        "usage": [usage.input_tokens, usage.output_tokens, usage.total_tokens],
    }


def loop() -> Any:
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
        return described(result) | {"pieces": pieces}

    return asyncio.run(run())


def refusals() -> Any:
    def ask(**settings: Any) -> Any:
        return asyncio.run(Runner.run(agent(**settings), GIVEN["question"], max_turns=3))

    return {"value": caught(lambda: ask(top_p=2)), "next": loop()}


report(loop, streamed, refusals)
