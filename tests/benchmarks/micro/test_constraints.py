"""The cost of a grammar: answers are complete, each token has a mask, and timed steps are inside a string."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import constraints
from benchmarks.micro.constraints import ANSWERS, IN_A_STRING, NEW_TOKENS, of_answer, step_ms
from benchmarks.micro.engines import build_engine
from common.constrained.grammar import GrammarCompiler
from common.engine.engine import Engine
from common.models.registry import open_checkpoint

MODEL = "zoo:llama-tiny"


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_whole_and_gets_a_mask_for_each_token(name: str) -> None:
    checkpoint = open_checkpoint(MODEL)
    compiler = GrammarCompiler(checkpoint.tokenizer(), checkpoint.config.eos_token_ids)
    grammar, text = ANSWERS[name]
    token_ids = checkpoint.tokenizer().encode(text, add_special_tokens=False)
    try:
        compiled, masks = of_answer(compiler, grammar, token_ids)
        matcher = compiler.new_matcher(grammar)
        for token_id in token_ids:
            matcher.advance(token_id)
        assert matcher.complete
    finally:
        compiler.close()
    assert compiled > 0
    assert len(masks) == len(token_ids)


def test_constrained_steps_are_inside_a_string(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine("8", model=MODEL, max_batch_size=2, max_seq_len=2 * NEW_TOKENS)
    texts: dict[str, str] = {}
    step = Engine.step

    def noted(self: Engine) -> list[object]:
        outputs = step(self)
        for output in outputs:
            texts[output.request_id] = texts.get(output.request_id, "") + output.text_delta
        return list(outputs)

    monkeypatch.setattr(Engine, "step", noted)
    try:
        assert step_ms(engine, 2, IN_A_STRING) > 0
    finally:
        engine.grammars.close()
    assert len(texts) == 2
    assert all(text.startswith('"') and not text.endswith('"') for text in texts.values())


def test_the_tables_have_a_row_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "in_new_process", lambda *_: [2.0, 3.0])
    options = ["--models", MODEL, "--sequences", "1", "4", "--repeats", "1", "--out", str(tmp_path)]
    assert command_line.main(["micro", "constraints", *options]) == 0
    masks, steps = (
        json.loads((tmp_path / "tables" / f"constraint_{name}.json").read_text())["rows"]
        for name in ("masks", "steps")
    )
    assert [row[0] for row in masks] == list(ANSWERS)
    assert all(row[4] <= row[5] for row in masks)
    assert [row[1:] for row in steps] == [
        [count, f"phase {phase}", 2.0, 3.0, 1.5] for count in (1, 4) for phase in (8, 9)
    ]
