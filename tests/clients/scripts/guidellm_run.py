"""The command `guidellm run`, with the tokenizer of the folder that is served."""

import json
import pathlib
import subprocess
import sys
from typing import Any

from harness import GIVEN, report

REQUESTS = 6


def guidellm(name: str, backend: dict[str, Any], body: dict[str, Any]) -> Any:
    """Send requests, two at a time, and return the tool's records, by outcome."""
    served = {
        "kind": "openai_http",
        "model": GIVEN["model"],
        "api_key": GIVEN["key"],
        "extras": {"body": body},
    }
    result = pathlib.Path(f"{name}.json").absolute()
    command = [pathlib.Path(sys.executable).parent / "guidellm", "run", "--disable-console"]
    command += ["--backend", json.dumps(served | backend)]
    command += ["--tokenizer", f"kind=huggingface_auto,model={GIVEN['tokenizer']}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={GIVEN['max_tokens']}"]
    command += [
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
    ]
    command += ["--output", f"kind=json,path={result}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.is_file():
        raise AssertionError(ran.stdout + ran.stderr)
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    return benchmark["requests"]


def answers_of(requests: Any) -> Any:
    assert len(requests["successful"]) == REQUESTS, requests["errored"]
    return [answer_of(request) for request in requests["successful"]]


def answer_of(request: Any) -> Any:
    """Return what was asked, the text, the usage and the number of pieces."""
    body = json.loads(request["request_args"])["body"]
    asked = {name: body[name] for name in ("prompt", "messages") if name in body}
    for message in asked.get("messages", ()):
        message["content"] = "\n".join(piece["text"] for piece in message["content"])
    tokens = [request[name]["text_tokens"] for name in ("input_metrics", "output_metrics")]
    assert tokens[1] == GIVEN["max_tokens"]
    return {
        "asked": asked | {"ignore_eos": True},
        "text": request["output"],
        "usage": [*tokens, sum(tokens)],
        "gaps": request["info"]["timings"]["token_iterations"],
    }


def refused() -> Any:
    requests = guidellm("refused", {"target": GIVEN["url"]}, {"top_p": 2})
    assert requests["errored"]
    assert not requests["successful"]
    return "refused"


def chat() -> Any:
    return answers_of(guidellm("chat", {"target": GIVEN["url"]}, {"temperature": 0}))


def completions() -> Any:
    # The tool asks for /health below its target, but `/openai` has only OpenAI's routes.
    strict = {"target": GIVEN["url"] + "/openai", "validate_backend": False}
    form = strict | {"request_format": "/v1/completions"}
    return answers_of(guidellm("completions", form, {"temperature": 0}))


report(said=[refused], chat=[chat], text=[completions])
