"""Answers of the bundled model that pages show. Those of `smollm2` are in `tests/checkpoints`."""

from __future__ import annotations

import pytest

from tests.docs.transcripts import Transcript, transcripts
from tests.support.servers import ServerProcess


@pytest.mark.parametrize(
    "transcript", transcripts("zoo:llama-tiny"), ids=lambda each: f"{each.page}{each.route}"
)
def test_the_answer_is_the_one_that_is_shown(server: ServerProcess, transcript: Transcript) -> None:
    transcript.check(server.url)
