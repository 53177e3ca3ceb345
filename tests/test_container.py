"""The container's steps without a container: the commands of its Dockerfile, run on this machine."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import ServerProcess, engine_of

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")


def words(instruction: str) -> list[str]:
    """Return the words of an instruction in JSON form, from the last stage."""
    return json.loads(re.findall(rf"^{instruction} (\[.*\])$", TEXT.split("\nFROM ")[-1], re.MULTILINE)[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux")
@pytest.mark.slow
def test_the_server_starts_with_its_words_and_is_healthy() -> None:
    program, command, phase, *options = words("ENTRYPOINT") + words("CMD")
    assert (program, command) == ("infer", "serve")
    infer = str(Path(sys.executable).with_name(program))
    process = ServerProcess(phase, *options, command=(infer, command, phase))
    check = [sys.executable, *words("HEALTHCHECK .* CMD")[1:]]
    here = [word.replace(":8009/", f":{process.client.base_url.port}/") for word in check]
    behind_a_proxy = os.environ | {"http_proxy": "http://127.0.0.1:9"}
    try:
        assert here != check
        assert subprocess.run(here, env=behind_a_proxy, check=False).returncode == 0
        process.complete(max_tokens=8, temperature=1, seed=3, logit_bias={"5": 1}, logprobs=1)
        front, engine = process.process.pid, engine_of(process.process.pid).pid
        loaded = [b"libtorch" in Path(f"/proc/{number}/maps").read_bytes() for number in (front, engine)]
        assert loaded == [False, True], "only the engine's process needs torch"
        process.signal()
        assert process.wait() == 0
    finally:
        process.close()
    assert subprocess.run(here, capture_output=True, check=False).returncode != 0


def test_the_builder_gets_every_file_of_the_wheel_and_no_other() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    def sent(name: str) -> bool:
        parents = [name, *map(str, Path(name).parents)]
        verdict = False
        for rule in rules[1:]:
            if any(fnmatch.fnmatchcase(each, rule.removeprefix("!")) for each in parents):
                verdict = rule.startswith("!")
        return verdict

    found = {name for name in listed.splitlines() if sent(name)}
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert {name.split("/")[0] for name in found if "/" in name} == packages
    assert {name for name in found if "/" not in name} == {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml",
    }  # fmt: skip
    assert not [name for name in found if name.startswith("benchmarks/results/")]
