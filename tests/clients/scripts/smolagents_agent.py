"""`smolagents`: an agent that calls tools, over chat. It requires a call in every step."""

from typing import Any

from harness import GIVEN, report
from smolagents import OpenAIModel, ToolCallingAgent, tool

called: list[list[Any]] = []


@tool
def find_fox(place: str, brave: bool) -> str:
    """Find a fox.

    Args:
        place: where to look.
        brave: whether it has to be brave.
    """
    called.append([place, brave])
    return "There is one fox."


def loop() -> Any:
    model = OpenAIModel(
        GIVEN["model"],
        api_base=GIVEN["base_url"],
        api_key=GIVEN["key"],
        temperature=0,
        max_tokens=GIVEN["call_tokens"],
    )
    agent = ToolCallingAgent([find_fox], model, max_steps=2, verbosity_level=0)
    answer = agent.run(GIVEN["question"])
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    return {
        "answer": str(answer),
        "calls": [call.name for step in steps for call in step.tool_calls],
        "tokens": agent.monitor.get_total_token_counts().total_tokens,
    }


report(loop)
