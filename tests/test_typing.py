"""The packages' types, as a program that uses the installed project as a library sees them."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CLIENT = """
from common.llm import LLM, Completion
from common.request import SamplingParams
from phase9_pipelined import Config, build_engine

llm = LLM("zoo:llama-tiny", phase=9, max_batch_size=4)
answers: list[Completion] = llm.generate(["Once upon a time"], SamplingParams(max_new_tokens=8))
text: str = answers[0].text
engine = build_engine(Config(model="zoo:llama-tiny", max_batch_size=4))
request = engine.maker.create("Once upon a time", SamplingParams(temperature=0.0))
engine.add_request(request)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the project's wheel. Its requirements come from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(("tests/", "docs/", "benchmarks/results/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", symlinks=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "required.pth").write_text(sysconfig.get_path("purelib"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return folder / "env/bin/python"


@pytest.mark.slow
def test_a_client_program_has_types(python: Path, tmp_path: Path) -> None:
    """mypy reports only the wrong line. Torch's own types are skipped, because mypy takes long to read them."""
    (tmp_path / "client.py").write_text(CLIENT + "number: int = answers[0].text\n")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "client.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert 'expression has type "str", variable has type "int"' in said
    assert "Found 1 error in 1 file" in said, said
