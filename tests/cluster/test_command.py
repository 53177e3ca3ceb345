"""`python -m cluster` without Ray: its options, and its error if Ray is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import cluster
import infer
from cluster.environment import prepare
from cluster.options import Plan, read_flags, read_mapping
from common.errors import StartupError
from common.server.options import UsageError


def test_a_phases_options_are_passed_through() -> None:
    plan = read_flags(["--phase", "7", "--replicas=3", "--max-batch-size", "5", "--api-key", "a,b"])
    assert plan.package.PHASE.number == 7
    assert (plan.options.replicas, plan.options.port, plan.options.api_key) == (3, 9000, ["a", "b"])
    assert plan.config.max_batch_size == 5
    assert type(plan.config) is plan.package.Config


def test_a_config_file_has_the_same_options() -> None:
    assert read_mapping({"phase": 7, "replicas": 3, "max_batch_size": 5}) == read_flags(
        ["--phase", "7", "--replicas=3", "--max-batch-size", "5"]
    )


@pytest.mark.parametrize(
    ("phase", "routing"), [("4", "least_loaded"), ("7", "least_loaded"), ("8", "prefix"), ("9", "prefix")]
)
def test_prompts_go_where_they_went_before_in_phases_that_remember(phase: str, routing: str) -> None:
    assert read_flags(["--phase", phase]).routing == routing
    assert read_flags(["--phase", phase, "--routing", "random"]).routing == "random"


def test_threads_follow_from_cpus() -> None:
    def threads(*flags: str) -> int:
        plan: Plan = read_flags(flags)
        return plan.options.threads_each

    assert [threads("--cpus", "0.5"), threads("--cpus", "3"), threads("--cpus", "3", "--threads", "2")] == [
        1,
        3,
        2,
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--phase", "7", "--replicsa", "2"], "did you mean --replicas?"),
        (["--phase", "7", "--replicas", "0"], "--replicas"),
        (["--replicas", "3", "--max-replicas", "2"], "max_replicas 2 is less than replicas 3"),
        (["--phase", "8", "--kv-cache-backend", "contiguous"], "kv_cache_backend"),
        (["--phase"], "--phase takes a phase"),
        (["--device", "cuda"], "add --gpus 1"),
    ],
)
def test_wrong_options_are_named(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        read_flags(flags)


def test_a_wrong_config_file_is_told_so() -> None:
    with pytest.raises(UsageError, match="'max_batch'"):
        read_mapping({"phase": 7, "max_batch": 5})
    with pytest.raises(UsageError, match="--max-batch-size"):
        read_mapping({"phase": 7, "max_batch_size": "many"})
    with pytest.raises(StartupError, match="no phase '77'"):
        read_mapping({"phase": 77})


def test_ray_is_not_opened_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "Disabled")
    with pytest.raises(StartupError, match=r"RAY_AUTH_MODE=disabled .* unset it"):
        prepare()


def test_the_example_is_for_this_machine_or_has_a_key() -> None:
    example = yaml.safe_load((Path(cluster.__file__).parent / "example.yaml").read_text())
    for application in example["applications"]:
        read_mapping(application["args"])
        assert example["http_options"]["host"] == "127.0.0.1" or application["args"].get("api_key")


def test_the_command_infer_has_a_word_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        infer.main(["cluster", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: infer cluster [options]\n")
    with pytest.raises(SystemExit) as ended:
        infer.main(["cluster", "--replicsa", "2"])
    assert ended.value.code == 2
    assert "--replicas" in capsys.readouterr().err


@pytest.mark.slow
def test_without_ray_one_line_says_how_to_get_it() -> None:
    """Ray is hidden, so the test also works if it is installed."""
    hide = "import sys; sys.modules['ray'] = None; from cluster.__main__ import main; main(['--phase', '7'])"
    ran = subprocess.run(
        [sys.executable, "-c", hide], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert ran.returncode == 1
    assert ran.stderr == ("error: a cluster needs Ray, which is not installed: pip install -e '.[cluster]'\n")
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("flags", "seats", "given"),
    [([], 256, set()), (["--max-batch-size", "5"], 5, {"max_batch_size"})],
    ids=["by device", "given"],
)
def test_a_replica_sets_its_seats_by_its_own_device(flags: list[str], seats: int, given: set[str]) -> None:
    """The front does not know the device. Serve must let in as many requests as any engine takes."""
    pytest.importorskip("ray")
    from cluster.app import SPARE, application

    plan = read_flags(["--phase", "9", *flags])
    front = application(plan)._bound_deployment
    replica = front.init_args[0]._bound_deployment
    assert replica.max_ongoing_requests == seats + plan.config.max_waiting_requests + SPARE
    phase, config = replica.init_args[:2]
    assert phase == "phase9_pipelined"
    assert plan.package.Config(**config).model_fields_set == given
