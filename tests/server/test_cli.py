"""The command line: each mistake gives an exit code and one line on stderr that names the option and the remedy."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from common import zoo
from common.server import run as serve
from common.server.options import ServerOptions, UsageError, read_options
from common.startup.phases import find_phase
from tests.support.forked import Forked
from tests.support.servers import ServerProcess

Fail = Callable[..., str]
TLS = Path(__file__).parent / "tls"


@pytest.fixture
def fail(phase: str) -> Fail:
    """Return a function that runs the command, which must refuse to serve, and returns its error line."""

    def run(code: int, *argv: str) -> str:
        ended, printed, log = Forked(serve.__name__, phase, argv).finish()
        (line,) = [line for line in log.splitlines() if " INFO " not in line]
        assert line.startswith("error: ")
        assert (printed, ended) == ("", code)
        assert "unable to parse" not in line, "words of a library"
        assert "Input should" not in line
        return line

    return run


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--bogus"], "unknown option --bogus: --help lists"),
        (["--max-batchsize", "4"], "unknown option --max-batchsize: did you mean --max-batch-size?"),
        (["--max_batch_size=4"], "did you mean --max-batch-size?"),
        (["serve"], "unknown option serve"),
        (["--max-batch-size"], "--max-batch-size"),
        (["--max-batch-size", "many"], "(or INFER_MAX_BATCH_SIZE): must be a whole number, not 'many'"),
        (["--max-batch-size", "1.5"], "(or INFER_MAX_BATCH_SIZE): must be a whole number, not '1.5'"),
        (["--device", "tpu"], "(or INFER_DEVICE): must be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--send-timeout", "soon"], "(or INFER_SEND_TIMEOUT): must be a number, not 'soon'"),
        (["--live-view=perhaps"], "--live-view"),
        (["--api-key", "a,"], "(or INFER_API_KEY): must be a text of at least one character, not ''"),
        (["--served-model-name", ","], "--served-model-name"),
        (["--seed", "-1"], "--seed"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile has no meaning without --ssl-certfile"),
        (["--forwarded-allow-ips", "proxy"], "(or INFER_FORWARDED_ALLOW_IPS): 'proxy' does not appear to be"),
        *(
            (["--cors-origin", f"https://a.example,{value}"], f"no browser sends the origin '{value}'")
            for value in (
                *("https://b.example/", "https://B.example", "https://b.example:443", "https://*.b.example"),
                *("chrome-extension://*", "b.example", "https://b.example/a", "http://u@b.example"),
            )
        ),
        *((["--root-path", value], "--root-path") for value in ("llm", "/llm/", "/", "/a?b", "http://x")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options(fail: Fail, argv: list[str], says: str) -> None:
    assert says in fail(2, *argv)


def test_a_wrong_value_in_the_environment(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_MAX_WAITING_REQUESTS", "none")
    line = fail(2, "--port", "0")
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
def test_models_and_addresses_that_cannot_be_served(fail: Fail, argv: list[str], says: str) -> None:
    assert says in fail(1, "--port", "0", "--device", "cpu", *argv)


def test_a_port_in_use_is_found_before_the_model_is_loaded(fail: Fail) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} of 127.0.0.1 is in use" in fail(1, "--port", port, "--model", "zoo:no-such")


def zoo_copy(folder: Path) -> Path:
    return Path(shutil.copytree(Path(zoo.__file__).parent / "llama-tiny", folder / "broken"))


@pytest.mark.parametrize(
    ("name", "kept_bytes"),
    [
        *(("model.safetensors", kept) for kept in (None, 0, 4, 2000, 100_000)),
        *(("config.json", kept) for kept in (None, 1)),
        ("tokenizer.json", None),
    ],
)
def test_a_file_of_the_model_that_is_broken_or_missing(
    fail: Fail, tmp_path: Path, name: str, kept_bytes: int | None
) -> None:
    folder = zoo_copy(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if kept_bytes is not None:
        (folder / name).write_bytes(content[:kept_bytes])
    says = name if kept_bytes is not None else name.partition(".")[0]
    assert says in fail(1, "--model", str(folder), "--port", "0", "--device", "cpu")


def test_files_that_cannot_be_used(fail: Fail, tmp_path: Path) -> None:
    notes, none, empty = tmp_path / "notes.txt", tmp_path / "no" / "file", tmp_path / "empty.pem"
    notes.write_text("mine")
    empty.write_text("")
    certificate, key = TLS / "certificate.pem", TLS / "key.pem"
    for path in (notes, none):
        assert f"--uds {path}: " in fail(1, "--uds", str(path))
    assert notes.read_text() == "mine"
    assert str(none) in fail(1, "--port", "0", "--chat-template", str(none))
    for first, second in ((none, key), (empty, key), (certificate, certificate)):
        files = ("--ssl-certfile", str(first), "--ssl-keyfile", str(second))
        assert " ".join(files) + ": " in fail(1, "--port", "0", *files)


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


def test_service_variables_of_kubernetes_are_ignored(
    phase: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service named infer puts these variables into the environment of every pod beside it."""
    package = find_phase(phase)
    for name, value in (("", "tcp://10.0.0.1:80"), ("_80_TCP", "tcp://10.0.0.1:80"), ("_80_TCP_PORT", "80")):
        monkeypatch.setenv(f"INFER_PORT{name}", value)
    monkeypatch.setenv("INFER_SERVICE_HOST", "10.0.0.1")
    assert read_options(package, [])[0].port == package.PHASE.default_port
    (line,) = caplog.messages
    assert line.startswith("INFER_PORT=tcp://10.0.0.1:80 is ignored")
    monkeypatch.setenv("INFER_PORT", "8123")
    assert read_options(package, [])[0].port == 8123


def test_a_misspelt_variable_is_named(
    phase: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a server that should have keys is open."""
    monkeypatch.setenv("INFER_API_KEYS", "secret")
    monkeypatch.setenv("INFER_CLIENTS", "/tmp")
    assert read_options(find_phase(phase), [])[0].api_key == []
    assert caplog.messages == [
        "INFER_API_KEYS is ignored, since it is no option here: did you mean INFER_API_KEY?"
    ]


def test_spaces_around_keys_are_no_part_of_them(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_API_KEY", "old, new\n")  # a file's last line has an end
    assert read_options(find_phase(phase), [])[0].api_key == ["old", "new"]
    monkeypatch.setenv("INFER_API_KEY", "old, ")
    with pytest.raises(UsageError, match="at least one character"):
        read_options(find_phase(phase), [])


@pytest.mark.parametrize(
    "argv",
    [
        ["--served-model-name", "a", "b", "--port", "5"],
        ["--port", "5", "--served-model-name=a", "b"],
        ["--served-model-name", "a", "--port", "5", "--served-model-name", "b"],
        ["--served-model-name", "a, b", "--port", "5"],
    ],
)
def test_an_option_may_have_several_values(phase: str, argv: list[str]) -> None:
    options, _ = read_options(find_phase(phase), argv)
    assert (options.served_model_name, options.port) == (["a", "b"], 5)


@pytest.mark.parametrize("argv", [["--num-gpu-blocks", "77"], ["--num-gpu-blocks=77"]])
def test_blocks_have_a_second_name(argv: list[str]) -> None:
    assert read_options(find_phase("phase6_paged"), argv)[1].num_blocks == 77  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="--num-gpu-blocks"):
        read_options(find_phase("phase5_continuous"), argv)


def test_without_a_seed_each_start_is_random() -> None:
    package = find_phase("phase4_static")
    seeds = {read_options(package, argv)[1].seed for argv in [["--seed", "none"], ["--seed=none"], []]}
    assert len(seeds) == 3
    assert 0 in seeds, "the default"


def test_none_is_a_value_where_an_option_may_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    package = find_phase("phase7_chunked")
    name = "prefill_token_budget"
    assert getattr(read_options(package, [])[1], name) == 256
    assert getattr(read_options(package, ["--prefill-token-budget", "none"])[1], name) is None
    monkeypatch.setenv("INFER_PREFILL_TOKEN_BUDGET", "none")
    assert getattr(read_options(package, [])[1], name) is None


def test_a_default_that_follows_another_option(capsys: pytest.CaptureFixture[str]) -> None:
    """The budget's default is the chunk size. The error for a wrong chunk size names the chunk size only."""
    package, name = find_phase("phase7_chunked"), "prefill_token_budget"
    assert getattr(read_options(package, ["--prefill-chunk-size", "512"])[1], name) == 512
    with pytest.raises(UsageError, match=r"--prefill-chunk-size .*greater than or equal to 1, not '0'"):
        read_options(package, ["--prefill-chunk-size", "0"])
    read_options(package, ["--no-use-chunked-prefill"])
    with pytest.raises(SystemExit):
        read_options(package, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "most prompt tokens computed in a step; default: one chunk; none: no limit" in text
    assert "lambda" not in text


def test_a_folders_path_is_not_shown(phase: str, tmp_path: Path) -> None:
    with ServerProcess(phase, "--model", str(zoo_copy(tmp_path)), "--max-seq-len", "64") as server:
        assert server.model == "broken"
        for path in ("/v1/models", "/openapi.json", "/version", "/health", "/telemetry"):
            assert str(tmp_path) not in server.client.get(path).text
        assert str(tmp_path) not in server.post(model="other").text
        assert server.complete()["model"] == "broken"
