"""The command line: every mistake is one line on stderr that names the option and the mend, and an exit code."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import zoo
from common.phases import find_phase
from common.server import serve
from common.server.options import ServerOptions, UsageError, read_options
from tests.server.support import ServerProcess

Fail = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command line sets up logging for a process of its own."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    handlers, levels = root.handlers[:], (root.level, uvicorn.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    uvicorn.setLevel(levels[1])


@pytest.fixture
def fail(phase: str, capsys: pytest.CaptureFixture[str]) -> Fail:
    """Run `main` where it must not get to serving: its exit code and the one line it says."""

    def run(*argv: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            serve.main(phase, argv)
        printed = capsys.readouterr()
        errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        others = [line for line in printed.err.splitlines() if " INFO " not in line]
        assert errors == others, printed.err
        assert len(errors) == 1
        assert printed.out == ""
        assert isinstance(ended.value.code, int)
        return ended.value.code, errors[0]

    return run


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--bogus"], "unknown option --bogus: --help lists"),
        (["--max-batchsize", "4"], "unknown option --max-batchsize: did you mean --max-batch-size?"),
        (["--max_batch_size=4"], "did you mean --max-batch-size?"),
        (["serve"], "unknown option serve"),
        (["--max-batch-size"], "--max-batch-size"),
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--max-batch-size", "many"], "--max-batch-size"),
        (["--max-batch-size", "1.5"], "--max-batch-size"),
        (["--max-seq-len", "1"], "--max-seq-len"),
        (["--dtype", "float8"], "--dtype"),
        (["--device", "tpu"], "--device"),
        (["--port", "70000"], "--port"),
        (["--log-level", "loud"], "--log-level"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--seed", "-1"], "--seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options(fail: Fail, argv: list[str], says: str) -> None:
    code, line = fail(*argv)
    assert code == 2
    assert says in line


def test_a_wrong_value_in_the_environment(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_MAX_WAITING_REQUESTS", "none")
    code, line = fail("--port", "0")
    assert code == 2
    assert "INFER_MAX_WAITING_REQUESTS" in line
    assert "'none'" in line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "no/such/model/anywhere"], "no/such/model/anywhere"),
        (["--model", "zoo:no-such"], "zoo:no-such"),
        (["--model", "dummy:no-such"], "'no-such'"),
        (["--max-seq-len", "1000000"], "--max-seq-len 1000000"),
        (["--host", "203.0.113.7"], "--host 203.0.113.7"),
        (["--max-batch-size", "100000000"], "--max-batch-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served(fail: Fail, argv: list[str], says: str) -> None:
    code, line = fail("--port", "0", "--device", "cpu", *argv)
    assert code == 1
    assert says in line


def test_a_port_in_use_is_found_before_the_model_is_loaded(
    fail: Fail, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(find_phase(phase), "build_engine", loaded.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, line = fail("--port", port)
    assert code == 1
    assert f"port {port} of 127.0.0.1 is in use" in line
    assert not loaded


def zoo_copy(folder: Path) -> Path:
    return Path(shutil.copytree(Path(zoo.__file__).parent / "llama-tiny", folder / "broken"))


@pytest.mark.parametrize("keep", [0, 4, 2000, 100_000])
def test_truncated_weights(fail: Fail, tmp_path: Path, keep: int) -> None:
    folder = zoo_copy(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    code, line = fail("--model", str(folder), "--port", "0", "--device", "cpu")
    assert code == 1
    assert "model.safetensors" in line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file(fail: Fail, tmp_path: Path, name: str) -> None:
    folder = zoo_copy(tmp_path)
    (folder / name).unlink()
    code, line = fail("--model", str(folder), "--port", "0", "--device", "cpu")
    assert code == 1
    assert name.partition(".")[0] in line


def test_a_broken_config(fail: Fail, tmp_path: Path) -> None:
    folder = zoo_copy(tmp_path)
    (folder / "config.json").write_text("{")
    code, line = fail("--model", str(folder), "--port", "0", "--device", "cpu")
    assert code == 1
    assert "config.json" in line


def test_help_lists_every_option(phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(phase, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    package = find_phase(phase)
    for name in [*package.Config.model_fields, *ServerOptions.model_fields]:
        assert f"--{name.replace('_', '-')}" in text
    assert str(package.PHASE.default_port) in text
    assert "default factory" not in text
    groups = [
        "Options of the engine that every phase has:",
        "Options of the server:",
        "Limits of what clients",
    ]
    places = [text.index(group) for group in groups]
    assert places == sorted(places)
    assert text.index(f"Phase {package.PHASE.number} adds:") < places[1]
    lines = " ".join(text.split())
    assert "(default: zoo:llama-tiny)" in lines
    assert "--live-view, --no-live-view" in lines
    assert "(default: None)" not in lines


def test_the_version(phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(phase, ["--version"])
    assert ended.value.code == 0
    version = importlib.metadata.version("infer-phases")
    assert capsys.readouterr().out.startswith(f"infer {version}, torch ")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max-batch-size", "many"], "must be a whole number, not 'many'"),
        (["--max-batch-size", "1.5"], "must be a whole number, not '1.5'"),
        (["--send-timeout", "soon"], "must be a number, not 'soon'"),
        (["--live-view=perhaps"], "--live-view"),
        (["--api-key", "a,"], "must be a text of at least one character, not ''"),
        (["--device", "tpu"], "must be 'auto', 'cpu' or 'cuda', not 'tpu'"),
    ],
)
def test_wrong_values_are_told_in_words_of_the_command_line(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError) as told:
        read_options(find_phase("phase5_continuous"), argv)
    assert says in str(told.value)
    assert "parse" not in str(told.value)
    assert "Input" not in str(told.value)


def test_flags_win_over_the_environment_and_that_over_defaults(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_MAX_BATCH_SIZE", "3")
    monkeypatch.setenv("INFER_SHUTDOWN_TIMEOUT", "4.5")
    package = find_phase(phase)
    options, config = read_options(package, ["--max-waiting-requests", "5", "--log-level=error"])
    assert (config.max_batch_size, config.max_waiting_requests) == (3, 5)
    assert (options.shutdown_timeout, options.log_level) == (4.5, "error")
    assert (options.host, options.port) == ("127.0.0.1", package.PHASE.default_port)
    assert read_options(package, ["--max-batch-size", "7"])[1].max_batch_size == 7


def test_booleans_have_a_no_form(phase: str) -> None:
    """None of the options is one yet; the settings they are made with must know it all the same."""
    package = find_phase(phase)

    class Config(package.Config):  # type: ignore[name-defined, misc]
        caching: bool = True

    class Extended:
        PHASE = package.PHASE

    Extended.Config = Config  # type: ignore[attr-defined]
    for argv, value in (([], True), (["--caching"], True), (["--no-caching"], False)):
        config = read_options(Extended, argv)[1]  # type: ignore[arg-type]
        assert config.caching is value  # type: ignore[attr-defined]


def test_none_is_a_value_where_an_option_may_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    package = find_phase("phase7_chunked")
    name = "prefill_token_budget"
    assert getattr(read_options(package, [])[1], name) == 256
    assert getattr(read_options(package, ["--prefill-token-budget", "none"])[1], name) is None
    monkeypatch.setenv("INFER_PREFILL_TOKEN_BUDGET", "none")
    assert getattr(read_options(package, [])[1], name) is None


def test_a_default_that_follows_another_option(capsys: pytest.CaptureFixture[str]) -> None:
    """A chunk size alone is a budget of as many tokens; what is wrong with it is said of itself."""
    package, name = find_phase("phase7_chunked"), "prefill_token_budget"
    assert getattr(read_options(package, ["--prefill-chunk-size", "512"])[1], name) == 512
    with pytest.raises(UsageError, match=r"--prefill-chunk-size .*greater than or equal to 1, not '0'"):
        read_options(package, ["--prefill-chunk-size", "0"])
    read_options(package, ["--no-use-chunked-prefill"])
    with pytest.raises(SystemExit):
        read_options(package, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "prompt tokens computed in a step; default: one chunk; none: no bound" in text
    assert "lambda" not in text


def test_options_that_contradict_each_other() -> None:
    """They are named as they are, not as values of an option that does not exist."""
    package = find_phase("phase7_chunked")
    with pytest.raises(
        UsageError, match=r"^mixed_batches has no meaning without use_chunked_prefill: .*out$"
    ):
        read_options(package, ["--no-use-chunked-prefill", "--no-mixed-batches"])
    read_options(package, ["--no-use-chunked-prefill"])


def test_a_folders_path_is_not_shown(phase: str, tmp_path: Path) -> None:
    folder = zoo_copy(tmp_path)
    server = ServerProcess(phase, "--model", str(folder), "--max-seq-len", "64")
    try:
        assert server.model == "broken"
        for path in ("/v1/models", "/openapi.json", "/version", "/health", "/telemetry"):
            assert str(tmp_path) not in server.client.get(path).text
        assert str(tmp_path) not in server.post(model="other").text
        assert server.complete()["model"] == "broken"
    finally:
        server.close()


def test_as_a_command(phase: str) -> None:
    """The same, by `python -m`: one line, an exit code, nothing on stdout."""
    command = [sys.executable, "-m", phase, "--dtype", "int3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --dtype")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""
