"""LangGraph: a graph of a model and a tool, streamed, with a memory of earlier turns."""

from typing import Any, Literal

from harness import GIVEN, report
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

called: list[list[Any]] = []


@tool
def find_fox(place: Literal["forest", "river"], brave: bool) -> str:
    """Find a fox."""
    called.append([place, brave])
    return "There is one fox."


model = ChatOpenAI(
    base_url=GIVEN["base_url"],
    api_key=GIVEN["key"],
    model=GIVEN["model"],
    temperature=0,
    max_tokens=GIVEN["call_tokens"],
    max_retries=0,
)


def ask(state: MessagesState) -> Any:
    """Force a call for a question; answer in words once the tool has spoken."""
    has_result = isinstance(state["messages"][-1], ToolMessage)
    bound = model.bind_tools([find_fox], tool_choice="none" if has_result else "find_fox")
    return {"messages": [bound.invoke(state["messages"])]}


def loop() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([find_fox]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    compiled = graph.compile(InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    turns = []
    for question in (GIVEN["question"], "And then?"):
        state = compiled.invoke({"messages": [("user", question)]}, thread)
        turns.append(state["messages"][-1].content)
    return {"turns": turns, "calls": called, "messages": [each.type for each in state["messages"]]}


def streamed() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "model")
    said = graph.compile().stream({"messages": GIVEN["messages"]}, stream_mode="messages")
    pieces = [chunk.content for chunk, _ in said if chunk.content]
    return {"text": "".join(pieces), "pieces": pieces}


report(loop, streamed)
