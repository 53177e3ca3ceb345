"""`pydantic-ai`: an agent with one tool and a typed answer, over chat and over responses."""

from typing import Any

from fox import Fox, find_fox
from harness import GIVEN, report
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=GIVEN["base_url"], api_key=GIVEN["key"])
settings: Any = {"temperature": 0, "max_tokens": GIVEN["call_tokens"]}


def typed(model: Any) -> Any:
    """The answer's type is a tool, which must be called; then the history is sent with another question."""
    agent = Agent(model, output_type=Fox, model_settings=settings, retries=0)
    first = agent.run_sync(GIVEN["question"])
    second = agent.run_sync("And then?", message_history=first.all_messages())
    return [first.output.model_dump(), second.output.model_dump()]


def by_chat() -> Any:
    return typed(OpenAIChatModel(GIVEN["model"], provider=provider))


def by_responses() -> Any:
    return typed(OpenAIResponsesModel(GIVEN["model"], provider=provider))


def native() -> Any:
    model = OpenAIChatModel(GIVEN["model"], provider=provider)
    agent = Agent(model, output_type=NativeOutput(Fox), model_settings=settings, retries=0)
    return agent.run_sync(GIVEN["question"]).output.model_dump()


def loop() -> Any:
    """A tool beside the typed answer: the model may call either, and the loop runs to the answer."""
    model = OpenAIChatModel(GIVEN["model"], provider=provider)
    agent = Agent(model, tools=[find_fox], output_type=Fox, model_settings=settings, retries=0)
    return agent.run_sync(GIVEN["question"]).output.model_dump()


report(fox=[by_chat, by_responses, native, loop])
