"""The command `llm`, and its Python library."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import yaml
from harness import GIVEN, caught, joined, report

USER = pathlib.Path.cwd()
os.environ["LLM_USER_PATH"] = str(USER)
OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", str(GIVEN["max_tokens"]))
SYSTEM, QUESTION = (message["content"] for message in GIVEN["messages"])
SERVED = {"model_name": GIVEN["model"], "api_base": GIVEN["base_url"], "api_key_name": "served"}
USER.joinpath("extra-openai-models.yaml").write_text(
    yaml.safe_dump(
        [
            SERVED | {"model_id": "served", "supports_schema": True, "supports_tools": True},
            SERVED | {"model_id": "served-text", "completion": True},
            SERVED | {"model_id": "absent", "model_name": "another"},
        ]
    )
)
USER.joinpath("keys.json").write_text(json.dumps({"served": GIVEN["key"]}))


def llm(*arguments: str) -> dict[str, Any]:
    """Run the command as its users do."""
    command = pathlib.Path(sys.executable).parent / "llm"
    ran = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return {"text": ran.stdout.removesuffix("\n"), "log": ran.stderr}


def chat() -> Any:
    return llm("-m", "served", *OPTIONS, "--system", SYSTEM, QUESTION)


def chat_at_once() -> Any:
    said = llm("-m", "served", "--no-stream", *OPTIONS, "--usage", "--system", SYSTEM, QUESTION)
    prompt, output, _ = library()["usage"]
    assert f"{prompt} input, {output} output" in said["log"]
    return said


def text() -> Any:
    return llm("-m", "served-text", *OPTIONS, GIVEN["prompt"])


def text_at_once() -> Any:
    return llm("-m", "served-text", "--no-stream", *OPTIONS, GIVEN["prompt"])


def continued() -> Any:
    """Continue a conversation: the tool sends its log of the first question and answer with the second question."""
    first = llm("-m", "served", *OPTIONS, "--system", SYSTEM, QUESTION)
    talk = [
        *GIVEN["messages"],
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And then?"},
    ]
    return [first, llm("--continue", *OPTIONS, "And then?") | {"asked": {"messages": talk}}]


def schema() -> Any:
    said = json.loads(
        llm("-m", "served", "-o", "temperature", "0", "--schema", "brave bool", QUESTION)["text"]
    )
    assert "brave" in said
    return said


def library() -> Any:
    import llm

    model = llm.get_model("served")
    answer = model.prompt(QUESTION, system=SYSTEM, temperature=0, max_tokens=GIVEN["max_tokens"])
    pieces = joined(answer)
    usage = answer.usage()
    return pieces | {"usage": [usage.input, usage.output, usage.input + usage.output]}


def tools() -> Any:
    """Run a chain with a function: the chain goes on as long as the model calls it."""
    import llm

    asked: list[str] = []

    def find_fox(place: str) -> str:
        """Find a fox."""
        asked.append(place)
        return "There is one fox."

    model = llm.get_model("served")
    options = {"temperature": 0, "max_tokens": GIVEN["max_tokens"]}
    chain = model.chain(QUESTION, system=SYSTEM, tools=[find_fox], options=options)
    answers = list(chain.responses())
    assert answers[0].usage().input > library()["usage"][0], "the model is told of the function"
    call = llm.ToolResult(name="find_fox", output="There is one fox.", tool_call_id="call_1")
    told = model.prompt("Go on.", tools=[find_fox], tool_results=[call], **options)
    return all(answer.text() for answer in answers) and told.text()


def refusals() -> Any:
    import llm as package

    said = caught(lambda: package.get_model("served").prompt(QUESTION, max_tokens=0).text())
    assert "BadRequestError" in said["types"]
    assert "another" in caught(lambda: llm("-m", "absent", QUESTION))["message"]
    assert "key" in caught(lambda: llm("-m", "served", "--key", "wrong", QUESTION))["message"]
    return said["message"]


report(
    said=[refusals, schema, tools],
    chat=[chat, chat_at_once, continued, library],
    text=[text, text_at_once],
)
