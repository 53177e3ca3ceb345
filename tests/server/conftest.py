"""Every test of the API runs against every registered phase."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.phases import find_phase, phase_names
from tests.server.support import ServerProcess

PHASES = phase_names()


def with_option(name: str) -> set[str]:
    """Return the phases that have an option of this name."""
    return {phase for phase in PHASES if name in find_phase(phase).Config.model_fields}


#: Phases that find again what they have computed.
CACHING = with_option("enable_prefix_caching")


def called_from_python(phase: str) -> tuple[str, ...]:
    """Options for a server whose passes a test is to hold and break: none of them may be a recording."""
    return ("--no-captured-steps",) if phase in with_option("captured_steps") else ()


#: What later phases run in the ordinary suite; the rest of theirs is slow, for there are many of them.
EVERY_PHASE = {"test_traffic"}
#: What of the phases between the first and the last is slow, too.
FIRST_AND_LAST = {"test_completions", "test_constrained", "test_errors"}
#: Of those modules, what takes long and tests nothing that a phase has a part in.
ONE_PHASE = {
    "test_two_megabytes_of_nonsense_cost_one_error_each",
    "test_refusals_name_the_field_and_come_before_the_stream",
    "test_wrong_types",
    "test_a_grammar_that_takes_long_holds_up_nobody_else",
    "test_each_architecture_over_http",
    "test_a_cut_to_what_fits",
    "test_the_compilers_process_ends_with_the_server",
}


#: Minutes of requests that no phase has a part in: each for one of them.
FUZZED = {"test_fuzzing_finds_nothing": PHASES[0], "test_much_fuzzing_finds_nothing": PHASES[-1]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [
        item
        for item in items
        if not isinstance(item, pytest.Function)
        or item.originalname not in FUZZED
        or item.callspec.params["phase"] == FUZZED[item.originalname]
    ]
    here = [item for item in items if Path(__file__).parent in item.path.parents]  # others have phases, too
    for item in here:
        if isinstance(item, pytest.Function) and "phase" in item.fixturenames:
            phase, module = item.callspec.params["phase"], item.module.__name__.rpartition(".")[2]
            here_too = module in EVERY_PHASE or (module in FIRST_AND_LAST and phase == PHASES[-1])
            if phase != PHASES[0] and (not here_too or item.originalname in ONE_PHASE):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=PHASES)
def phase(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def server(phase: str) -> Iterator[ServerProcess]:
    """An ordinary server. Tests leave it as they find it, and say so by their next request."""
    process = ServerProcess(phase, "--max-seq-len", "1024")
    yield process
    assert process.process.poll() is None, f"the server did not outlive its tests:\n{process.log_text}"
    assert "Traceback" not in process.log_text
    process.close()


def start_gated(phase: str) -> ServerProcess:
    return ServerProcess(
        phase,
        *("--max-batch-size", "4", "--max-waiting-requests", "6", "--shutdown-timeout", "30"),
        *("--send-timeout", "2"),
        *called_from_python(phase),
        module="tests.server.gated_server",
    )


@pytest.fixture(scope="session")
def shared_gated(phase: str) -> Iterator[ServerProcess]:
    process = start_gated(phase)
    yield process
    process.close()


@pytest.fixture
def gated(shared_gated: ServerProcess) -> Iterator[ServerProcess]:
    """A server whose forward passes the test holds and breaks, and which must be well again at its end."""
    shared_gated.begin_test()
    yield shared_gated
    shared_gated.order("heal")
    shared_gated.order("open")
    assert shared_gated.complete(max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.fixture
def mortal(phase: str) -> Iterator[ServerProcess]:
    """A gated server of the test's own, to bring to its end."""
    process = start_gated(phase)
    yield process
    process.close()
