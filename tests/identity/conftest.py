"""The model that a test of the identity suite names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.identity.support import MODELS, RARE, Subject, subject_of


@pytest.fixture(
    scope="session", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in RARE)) for name in MODELS]
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield subject_of(request.param)
    torch.set_num_threads(threads)
