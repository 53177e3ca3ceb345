"""Starting and stopping servers, and the options that phases are started with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import benchmarks.servers
from benchmarks.servers import RunningServer, Setup, Target, find_phase_module, phase_target
from common.errors import StartupError

FAKE = Path(__file__).with_name("fake_server.py")

PHASES = ["phase4_static", "phase5_continuous", "phase6_paged", "phase7_chunked", "phase12_later"]


def fake_target(label: str = "fake", order: float = 4, **options: object) -> Target:
    """Return the target of a scripted server in a process of its own."""
    named = {name.replace("_", "-"): str(value) for name, value in options.items()}
    return Target(label, order, None, named, program=(sys.executable, str(FAKE)))


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.servers, "phase_names", lambda: PHASES)


def kv_tokens(options: dict[str, str]) -> int:
    if "num-blocks" in options:
        return int(options["num-blocks"]) * int(options["block-size"])
    return int(options["max-batch-size"]) * int(options["max-seq-len"])


@pytest.mark.usefixtures("phases")
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("4", "phase4_static"),
        ("5", "phase5_continuous"),
        ("paged", "phase6_paged"),
        ("phase7_chunked", "phase7_chunked"),
        ("12", "phase12_later"),
    ],
)
def test_phases_are_found_by_number_word_or_name(name: str, module: str) -> None:
    assert find_phase_module(name) == module


@pytest.mark.usefixtures("phases")
def test_every_phase_has_the_same_memory_model_and_seed() -> None:
    setup = Setup(model="dummy:llama-60m", slots=8, max_seq_len=4096)
    targets = [phase_target(name, setup) for name in ("4", "5", "6", "7", "12")]
    assert {kv_tokens(target.options) for target in targets} == {32_768}
    for key, value in (("model", "dummy:llama-60m"), ("seed", "0"), ("max-seq-len", "4096")):
        assert {target.options[key] for target in targets} == {value}
    assert [target.label for target in targets] == ["phase 4", "phase 5", "phase 6", "phase 7", "phase 12"]
    # An unknown phase is started like the phase before it.
    assert targets[-1].options == targets[-2].options
    assert targets[0].options["max-batch-size"] == "8"
    assert targets[2].options["max-batch-size"] == "24"


@pytest.mark.usefixtures("phases")
def test_options_are_added_for_one_phase_or_for_all() -> None:
    setup = Setup(extra={"all": {"dtype": "float32"}, "6": {"num-blocks": "512"}})
    four, six = phase_target("4", setup), phase_target("6", setup)
    assert four.options["dtype"] == six.options["dtype"] == "float32"
    assert six.options["num-blocks"] == "512"
    assert "num-blocks" not in four.options
    assert six.command[:3] == [sys.executable, "-m", "phase6_paged"]
    assert six.command[six.command.index("--num-blocks") + 1] == "512"


@pytest.mark.usefixtures("phases")
def test_a_variant_is_a_column_of_its_own() -> None:
    setup = Setup(extra={"7": {"prefill-chunk-size": "32"}})
    plain = phase_target("7", setup)
    variants = [
        phase_target("7", setup, {"prefill-chunk-size": "64"}, 1),
        phase_target("7", setup, {"no-mixed-batches": ""}, 2),
    ]
    assert [target.label for target in variants] == [
        "phase 7, prefill-chunk-size=64",
        "phase 7, no-mixed-batches",
    ]
    assert plain.order < variants[0].order < variants[1].order < 8
    assert [target.options["prefill-chunk-size"] for target in (plain, *variants)] == ["32", "64", "32"]
    assert (plain.variant, variants[1].variant) == ({}, {"no-mixed-batches": ""})
    assert variants[1].command[-1] == "--no-mixed-batches"


def test_a_server_is_started_asked_and_stopped() -> None:
    with RunningServer(fake_target()) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert (server.model, server.version, server.exit_code) == ("fake", None, None)
    assert server.exit_code == 0
    assert any("ready" in line for line in server.log)


@pytest.mark.slow
def test_a_server_is_found_whatever_the_shell_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It logs no address, and gets no key, socket or certificate that the shell names for another server."""
    monkeypatch.setenv("INFER_LOG_LEVEL", "error")
    monkeypatch.setenv("INFER_API_KEY", "of another server")
    monkeypatch.setenv("INFER_UDS", str(tmp_path / "socket"))
    monkeypatch.setenv("INFER_SSL_CERTFILE", str(tmp_path / "certificate"))
    target = phase_target("4", Setup(model="zoo:llama-tiny", max_seq_len=128))
    with RunningServer(target, start_timeout_s=60.0) as server:
        assert (server.model, list(server.log)) == ("zoo:llama-tiny", [])


def test_a_server_that_does_not_start_says_why() -> None:
    server = RunningServer(fake_target(exit_at_once=3))
    with pytest.raises(StartupError, match=r"fake ended \(exit 3\)(.|\n)*frobnicate"), server:
        pass
    assert server.exit_code == 3


def test_a_server_that_never_answers_is_stopped() -> None:
    silent = Target("silent", 4, None, {}, program=(sys.executable, "-c", "import time; time.sleep(60)"))
    server = RunningServer(silent, start_timeout_s=0.5)
    with pytest.raises(StartupError, match="did not answer in time"), server:
        pass
    assert server.exit_code is not None


def test_a_server_deaf_to_sigterm_is_killed() -> None:
    with RunningServer(fake_target(deaf=1), stop_timeout_s=0.5) as server:
        assert server.exit_code is None
    assert server.exit_code == -9
