"""The command `guidellm run`, with the tokenizer of the folder that is served."""

import json
import pathlib
import subprocess
import sys
from typing import Any

from harness import GIVEN, report

REQUESTS = 6


def guidellm(name: str, backend: dict[str, Any], body: dict[str, Any]) -> Any:
    """Send requests, two at a time, and return the tool's record of each."""
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
    return {
        "sent": REQUESTS,
        "errors": [each["info"]["error"] for each in benchmark["requests"]["errored"]],
        "successful": [
            {
                "body": json.loads(each["request_args"])["body"],
                "text": each["output"],
                "tokens": [each["input_metrics"]["text_tokens"], each["output_metrics"]["text_tokens"]],
                "pieces": each["info"]["timings"]["token_iterations"],
            }
            for each in benchmark["requests"]["successful"]
        ],
    }


def chat() -> Any:
    return guidellm("chat", {"target": GIVEN["url"]}, {"temperature": 0})


def completions() -> Any:
    # The tool asks for /health below its target, but `/openai` has only OpenAI's routes.
    strict = {"target": GIVEN["url"] + "/openai", "validate_backend": False}
    return guidellm("completions", strict | {"request_format": "/v1/completions"}, {"temperature": 0})


def refused() -> Any:
    return guidellm("refused", {"target": GIVEN["url"]}, {"top_p": 2})


report(chat, completions, refused)
