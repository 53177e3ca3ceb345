"""`lm-eval`: log-likelihoods of prompts, which are `echo` with `logprobs`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support import LM_EVAL, ON_TWO_PHASES, completed, part
from tests.server.support import ServerProcess

TOOL = LM_EVAL
SCRIPT = "lm_eval_task.py"
pytestmark = [pytest.mark.clients, ON_TWO_PHASES]


def test_likelihoods(report: dict[str, Any], server: ServerProcess) -> None:
    """A multiple-choice task by `local-completions`: log-likelihoods within 1e-4 of `transformers`."""
    served, computed = part(report, "served"), part(report, "computed")
    assert len(served["likelihoods"]) == 6
    for ours, theirs in zip(served["likelihoods"], computed["likelihoods"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert served["greedy"] == computed["greedy"]
    assert served["greedy"][0] == [True, False]
    assert served["accuracy"] == computed["accuracy"]
    assert completed(server)["text"]
