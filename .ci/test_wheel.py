"""Installs a wheel into an empty environment outside of the tree, and runs its commands and servers there.

`make test-wheel` runs it. `venv` and `pip` install the wheel and the packages that it requires. The words in the
variable `PIP_ARGS` are passed to pip. Needs curl and a C++ compiler. Stops at the first failed check.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("llama-tiny", "qwen3-tiny", "gemma3-tiny")
LARGEST = 12e6  # bytes
SLOWER = "no native CPU kernels, torch computes instead (slower): there is no C++ compiler here"
REQUEST = '{"model": "zoo:llama-tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}'


def check_files(wheel: Path) -> None:
    """Check that a wheel is at most `LARGEST` bytes, has models and types, and no tests, pages or results."""
    size = wheel.stat().st_size
    assert size <= LARGEST, f"{wheel.name} has {size / 1e6:.1f} MB"
    names = zipfile.ZipFile(wheel).namelist()
    unwanted = [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/results/"))]
    assert not unwanted, unwanted
    missing = {f"common/zoo/{model}/model.safetensors" for model in MODELS}.difference(names)
    packages = {name.partition("/")[0] for name in names if name.endswith("/__init__.py")}
    missing |= {f"{package}/py.typed" for package in packages}.difference(names)
    assert not missing, missing
    print(f"{wheel.name}: {len(names)} files, {size / 1e6:.1f} MB")


class Installed:
    """A wheel that is installed in a new virtual environment, which lies in a new home folder.

    Args:
        folder: an empty folder, which becomes the home folder.
        wheel: the wheel to install.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.bin = folder / "env/bin"
        # The caller's variables are not inherited: they may set options of a server, or the Python path.
        self.environment = {"HOME": str(folder), "PATH": f"{self.bin}:{os.defpath}", "LANG": "C.UTF-8"}
        venv.create(folder / "env", with_pip=True)
        arguments = shlex.split(os.environ.get("PIP_ARGS", ""))
        pip = [self.bin / "pip", "install", "--quiet", "--no-compile", *arguments]
        pip += ["-c", ROOT / "constraints.txt", wheel]
        subprocess.run(pip, check=True)

    def infer(self, *words: str) -> str:
        """Run the command `infer` to its end. Returns its output."""
        command = [self.bin / "infer", *words]
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def stream(self, phase: str) -> str:
        """Start a server of a phase, check the stream that curl gets for one request, and stop the server.

        Returns:
            The server's log.
        """
        socket, log = self.folder / f"{phase}.sock", self.folder / "log"
        serve = [self.bin / "infer", "serve", phase, "--uds", socket]
        curl = ["curl", "--silent", "--fail-with-body", "--no-buffer", "--unix-socket", socket]
        curl += ["--header", "Content-Type: application/json", "--data", REQUEST]
        with log.open("w") as output:
            server = subprocess.Popen(
                serve, env=self.environment, cwd=self.folder, stdout=output, stderr=output
            )
        try:
            while "ready: " not in log.read_text():
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
            answer = subprocess.run(
                [*curl, "http://localhost/v1/completions"], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        finally:
            server.terminate()
            server.wait()
        assert answer.count("event: token\n") == 8, answer
        return log.read_text()

    def hide_the_compiler(self) -> None:
        """Reduce PATH to the programs of the virtual environment, so that no C++ compiler is found."""
        self.environment["PATH"] = str(self.bin)


def main(wheel: Path) -> None:
    check_files(wheel)
    with tempfile.TemporaryDirectory() as folder:
        installed = Installed(Path(folder), wheel)
        version = installed.infer("--version")
        assert version.startswith(f"infer {wheel.name.split('-')[1]}, torch "), version
        print(version, end="")
        phases = [line.split()[0] for line in installed.infer("phases").splitlines()]
        kernels = Path(folder) / ".cache/infer-phases"
        assert not kernels.exists(), "native kernels are built before the first use"
        for phase in (phases[0], phases[-1]):
            log = installed.stream(phase)
            assert SLOWER not in log, log
            assert list(kernels.glob("*/*.so")), log
            print(f"phase {phase}: a stream, native kernels")
        texts = f"from common.llm import LLM\nfor phase in {phases}:"
        texts += " assert LLM('zoo:llama-tiny', phase=phase).generate('Once upon a time')[0].text"
        subprocess.run(
            [installed.bin / "python", "-c", texts], env=installed.environment, cwd=folder, check=True
        )
        print("every phase: a text")
        print(installed.infer("doctor"), end="")
        demo = installed.infer("demo", "--phases", "4")
        assert "tokens/s" in demo, demo
        print("the demo ran")
        installed.hide_the_compiler()
        log = installed.stream(phases[-1])  # one suffices: kernels are chosen before a phase is loaded
        assert SLOWER in log, log
        print(f"phase {phases[-1]}: a stream, no compiler")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
