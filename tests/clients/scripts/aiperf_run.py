"""The command `aiperf profile` by chat, with the tokenizer of the folder that is served."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from harness import GIVEN, report

REQUESTS = 6


def chat() -> Any:
    """Send requests, two at a time, and check the tokens that the tool counted of each."""
    folder = pathlib.Path("aiperf").absolute()
    command = [str(pathlib.Path(sys.executable).parent / "aiperf"), "profile", "--ui", "none"]
    command += ["--model", GIVEN["model"], "--url", GIVEN["url"], "--api-key", GIVEN["key"]]
    command += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count"]
    command += ["--tokenizer", GIVEN["tokenizer"], "--isl", "32", "--osl", str(GIVEN["max_tokens"])]
    command += ["--concurrency", "2", "--request-count", str(REQUESTS)]
    command += [
        "--extra-inputs",
        "ignore_eos:true",
        "--export-level",
        "records",
        "--artifact-dir",
        str(folder),
    ]
    # Offline, the tool takes a folder for the name of a repository. It downloads nothing for a folder.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    records = folder / "profile_export.jsonl"
    if not records.is_file():
        raise AssertionError(ran.stdout + ran.stderr)
    known = [json.loads(line)["metrics"] for line in records.read_text().splitlines()]
    tokens = [each["output_sequence_length"]["value"] for each in known]
    assert tokens == [GIVEN["max_tokens"]] * REQUESTS
    return tokens


report(said=[chat])
