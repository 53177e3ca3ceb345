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
    said = json.loads(pathlib.Path("result.json").read_text())
    names = ("completed", "failed", "total_input_tokens", "total_output_tokens")
    return {name: said[name] for name in names} | {
        "prompts": PROMPTS,
        "texts": said["generated_texts"],
        "gaps": [len(each) for each in said["itls"]],
        "errors": said["errors"],
    }


def completions() -> Any:
    return bench("/openai/v1/completions", "--backend", "openai")


def chat() -> Any:
    return bench("/openai/v1/chat/completions", "--backend", "openai-chat")


def refused() -> Any:
    return bench(
        "/openai/v1/completions", "--backend", "openai", "--top-p", "2", "--ready-check-timeout-sec", "0"
    )


report(completions, chat, refused)
