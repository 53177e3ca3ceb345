"""The timed parts of steps that run ahead, on the host and on the stream."""

from __future__ import annotations

import pytest

from common.constrained.grammar import Grammar
from common.engine.telemetry import Part
from common.observing.step_parts import StepParts
from common.request import SamplingParams
from common.startup.phases import find_phase
from kernels import native

pytestmark = pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")


def parts_of(depth: int, grammar: Grammar | None = None) -> list[Part]:
    """Return the parts of five steps in the middle of two answers."""
    package = find_phase("9")
    engine = package.build_engine(
        package.Config(
            model="zoo:llama-tiny", max_batch_size=2, max_seq_len=160, num_blocks=20, pipeline_depth=depth
        )
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, grammar=grammar)
    for number in range(2):
        engine.add_request(engine.create_request([number + 3] * 64, params))
    for _ in range(10):
        engine.step()
    parts = StepParts(engine)
    parts.start()
    for _ in range(5):
        engine.step()
    return parts.take()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_has_the_hosts_parts_and_the_streams(depth: int) -> None:
    parts = parts_of(depth)
    assert {(part.lane, part.what) for part in parts} == {
        *(("host", what) for what in ("plan", "launch", "wait", "commit")),
        *(("stream", what) for what in ("forward", "sample")),
    }
    assert all(part.began_s <= part.ended_s for part in parts)
    forwards = [part for part in parts if part.what == "forward"]
    # The stream may have run up to `depth` passes more or fewer than the host's steps.
    assert abs(len(forwards) - 5) <= max(1, depth)
    if depth == 0:  # nothing computes while the host reads
        commits = [part.began_s for part in parts if part.what == "commit"]
        assert not any(each.began_s < commit < each.ended_s for each in forwards for commit in commits)


def test_with_a_grammar_masks_are_filled_inside_the_launch_of_the_next_pass() -> None:
    parts = parts_of(2, Grammar.regex("[a-z ]+"))
    launches = [part for part in parts if part.what == "launch"]
    masks = [part for part in parts if part.what == "mask"]
    assert abs(len(masks) - 5) <= 1
    for mask in masks:
        assert any(each.began_s <= mask.began_s <= mask.ended_s <= each.ended_s for each in launches)
