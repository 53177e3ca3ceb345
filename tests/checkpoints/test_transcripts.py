"""Answers of a real chat model that pages and README show, and the sampling parameters that it gets by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoints.conftest import RealModel
from tests.docs.transcripts import Transcript, transcripts
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.checkpoints, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server(chat_model: RealModel) -> Iterator[ServerProcess]:
    with ServerProcess("phase9_pipelined", "--model", chat_model.name, "--max-seq-len", "1024") as process:
        yield process


@pytest.mark.parametrize("transcript", transcripts("smollm2"), ids=lambda each: each.page)
def test_the_answer_is_the_one_that_is_shown(server: ServerProcess, transcript: Transcript) -> None:
    transcript.check(server.url)


def test_default_sampling_parameters_are_the_models_own(server: ServerProcess) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["sampling_defaults"]["temperature"], card["sampling_defaults"]["top_p"]) == (0.2, 0.9)
    assert card["sampling_defaults_from"] == "infer fetch"
    assert 'id="temperature" form="compose" type="number" min="0" max="2" step="any" placeholder="0.2"' in (
        server.client.get("/").text
    )
