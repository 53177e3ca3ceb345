"""`smolagents`: an agent that calls tools, over chat. It requires a call in every step."""

from typing import Any

from fox import find_fox
from harness import GIVEN, report
from smolagents import OpenAIModel, ToolCallingAgent, tool


def loop() -> Any:
    model = OpenAIModel(
        GIVEN["model"],
        api_base=GIVEN["base_url"],
        api_key=GIVEN["key"],
        temperature=0,
        max_tokens=GIVEN["call_tokens"],
    )
    agent = ToolCallingAgent([tool(find_fox)], model, max_steps=2, verbosity_level=0)
    answer = agent.run(GIVEN["question"])
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    calls = {call.name for step in steps for call in step.tool_calls}
    assert calls
    assert calls <= {"find_fox", "final_answer"}
    assert agent.monitor.get_total_token_counts().total_tokens > 0
    return str(answer)


report(said=[loop])
