"""vLLM's `bench serve`, called as a function: the command itself requires a package named `vllm`."""

import contextlib
import json
import os
import pathlib
import sys
from typing import Any

from harness import GIVEN, report
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

os.environ["OPENAI_API_KEY"] = GIVEN["key"]
PROMPTS = [GIVEN["prompt"], "The fox", "In the morning", "Ivy said", "A rabbit", "It was late"]


def bench(endpoint: str, *more: str) -> Any:
    """Send the prompts of a file, and return the tool's results."""
    lines = (json.dumps({"prompt": prompt}) for prompt in PROMPTS)
    pathlib.Path("prompts.jsonl").write_text("\n".join(lines) + "\n")
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = ["--base-url", GIVEN["url"], "--endpoint", endpoint, "--model", GIVEN["model"]]
    arguments += ["--tokenizer", GIVEN["tokenizer"], "--num-prompts", str(len(PROMPTS)), "--seed", "1"]
    arguments += ["--dataset-name", "custom", "--dataset-path", "prompts.jsonl", "--disable-shuffle"]
    arguments += ["--custom-output-len", str(GIVEN["max_tokens"])]
    arguments += ["--skip-chat-template", "--temperature", "0", "--ignore-eos", *more]
    arguments += ["--save-result", "--save-detailed", "--result-filename", "result.json"]
    with contextlib.redirect_stdout(sys.stderr):
        main(parser.parse_args(arguments))
    return json.loads(pathlib.Path("result.json").read_text())


def answers_of(said: Any, asked: list[Any]) -> Any:
    assert (said["completed"], said["failed"]) == (len(PROMPTS), 0), said["errors"]
    assert said["total_output_tokens"] == GIVEN["max_tokens"] * len(PROMPTS)
    return [
        {"asked": one | {"ignore_eos": True}, "text": text, "gaps": len(gaps)}
        for one, text, gaps in zip(asked, said["generated_texts"], said["itls"], strict=True)
    ]


def completions() -> Any:
    said = bench("/openai/v1/completions", "--backend", "openai")
    return answers_of(said, [{"prompt": prompt} for prompt in PROMPTS])


def chat() -> Any:
    said = bench("/openai/v1/chat/completions", "--backend", "openai-chat")
    return answers_of(said, [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS])


def refused() -> Any:
    more = ("--backend", "openai", "--top-p", "2", "--ready-check-timeout-sec", "0")
    said = bench("/openai/v1/completions", *more)
    assert (said["completed"], said["failed"]) == (0, len(PROMPTS))
    assert all(said["errors"])
    return said["errors"]


report(said=[refused], text=[completions], chat=[chat])
