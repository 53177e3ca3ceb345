"""LangGraph: a graph of a model and a tool, streamed, with a memory of earlier turns."""

from typing import Any

from fox import called, find_fox
from harness import GIVEN, joined, report
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

fox_tool = tool(find_fox)
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
    bound = model.bind_tools([fox_tool], tool_choice="none" if has_result else "find_fox")
    return {"messages": [bound.invoke(state["messages"])]}


def loop() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([fox_tool]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    compiled = graph.compile(InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    turns = []
    for question in (GIVEN["question"], "And then?"):
        state = compiled.invoke({"messages": [("user", question)]}, thread)
        turns.append(state["messages"][-1].content)
    assert [each.type for each in state["messages"]] == ["human", "ai", "tool", "ai"] * 2
    assert all(turns)
    assert len(called) == 2
    return {"calls": called, "text": turns[0]}


def streamed() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "model")
    said = graph.compile().stream({"messages": GIVEN["messages"]}, stream_mode="messages")
    return joined(chunk.content for chunk, _ in said) | {"asked": {"max_tokens": GIVEN["call_tokens"]}}


report(loop=[loop], chat=[streamed])
