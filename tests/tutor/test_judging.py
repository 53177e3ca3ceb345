"""The judge: the original passes, the emptied tree says what it owes, half-right solutions get their hint."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.phases import phase_names
from tutor.emptying import set_up
from tutor.exercise import Exercise, Idea, load_exercise
from tutor.judging import hint_for, judge, report

pytestmark = pytest.mark.slow

PHASES = phase_names()


@dataclass(frozen=True)
class HalfRight:
    """A solution with a mistake: the original, with some of its text replaced, and how its hint begins."""

    phase: str
    file: str
    changes: tuple[tuple[str, str], ...]
    hint: str


HALF_RIGHT = {
    "a timer that is set back": HalfRight(
        "phase4_static",
        "scheduler.py",
        (("        elif self._forming_since is None:\n", "        else:\n"),),
        "The time runs from the first who came",
    ),
    "members that leave one by one": HalfRight(
        "phase4_static",
        "scheduler.py",
        (
            (
                "        if not all(request.is_terminal for request in self.active):\n            return []\n",
                "",
            ),
            ("        done, self.active = self.active, []\n        return done", "        return []"),
        ),
        "A batch leaves whole",
    ),
    "logits of the rectangle's end": HalfRight(
        "phase4_static",
        "runner.py",
        (("else range(chunk.end - 1, chunk.end)", "else range(longest - 1, longest)"),),
        "A row's next token is chosen by the logits of its last real token",
    ),
    "idle rows that wander": HalfRight(
        "phase4_static",
        "runner.py",
        (("column = max(length - 1, 0)", "column = length"),),
        "An idle row stands still",
    ),
    "a full block and one more": HalfRight(
        "phase6_paged",
        "cache.py",
        (("return -(-tokens // self._block_size)", "return tokens // self._block_size + 1"),),
        "Whole blocks, rounded up",
    ),
    "blocks freed twice": HalfRight(
        "phase6_paged",
        "allocator.py",
        (("if wrong or len(set(blocks)) != len(blocks):", "if False:"),),
        "A block that is freed twice",
    ),
    "a refusal that takes what there is": HalfRight(
        "phase6_paged",
        "allocator.py",
        (
            (
                "            raise OutOfBlocksError(",
                "            self._free.clear()\n            raise OutOfBlocksError(",
            ),
        ),
        "All blocks or none",
    ),
    "no reserve": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (("free * (1 - GROWTH_RESERVE)", "free"),),
        "Newcomers leave GROWTH_RESERVE",
    ),
    "a reserve for nobody": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (("(cost > budget and self.active)", "cost > budget"),),
        "With nobody active nobody grows",
    ),
    "some overtake": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (
            (
                "        while request := self.next_waiting():\n",
                "        for request in list(self.waiting)[: self.free_seats]:\n",
            ),
            (
                "                return\n            self.waiting.popleft()",
                "                continue\n            self.waiting.remove(request)",
            ),
        ),
        "First come, first served",
    ),
    "preempted to the back": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (("self.waiting.appendleft(request)", "self.waiting.append(request)"),),
        "Who is preempted arrived before all who wait",
    ),
    "a batch that fills when it is empty": HalfRight(
        "phase5_continuous",
        "scheduler.py",
        (
            (
                "        self._fill_seats(pool)\n",
                "        if not self.active:\n            self._fill_seats(pool)\n",
            ),
        ),
        "A batch is made anew in every step",
    ),
    "room without seats": HalfRight(
        "phase5_continuous",
        "scheduler.py",
        (("return super().queue_room() + self.free_seats", "return super().queue_room()"),),
        "The next step seats as many",
    ),
    "prompts first": HalfRight(
        "phase7_chunked",
        "scheduler.py",
        (
            (
                "decode=tuple(r for r in self.active if r.wants_token)",
                "decode=() if self.prefill_requests() else tuple(r for r in self.active if r.wants_token)",
            ),
        ),
        "Who decodes is in every plan",
    ),
    "newcomers first": HalfRight(
        "phase7_chunked",
        "scheduler.py",
        (("return not request.has_begun,", "return request.has_begun,"),),
        "Who has begun goes on before newcomers",
    ),
    "a budget for each prompt": HalfRight(
        "phase7_chunked",
        "scheduler.py",
        (
            ("min(size, left, len(", "min(size, len("),
            ("            if left == 0:\n", "            if left <= 0:\n"),
        ),
        "The budget is the step's",
    ),
    "two passes": HalfRight(
        "phase7_chunked",
        "runner.py",
        (
            (
                "            yield ForwardPass((*shares, *map(self.prefill_share, chunks)))\n"
                "            shares = ()\n",
                "            yield ForwardPass(tuple(map(self.prefill_share, chunks)))\n",
            ),
        ),
        "One pass for all",
    ),
    "nothing left to compute": HalfRight(
        "phase8_prefix",
        "cache.py",
        (("limit = (len(request.token_ids) - 1) //", "limit = len(request.token_ids) //"),),
        "The next token is chosen by the logits of the last one",
    ),
    "the latest goes first": HalfRight(
        "phase8_prefix",
        "tree.py",
        (("popitem(last=False)", "popitem(last=True)"),),
        "Who was let go first is evicted first",
    ),
    "one look": HalfRight(
        "phase8_prefix",
        "scheduler.py",
        (("if not request.has_begun:", "if False:"),),
        "Those who come together find nothing",
    ),
    "anything is shared": HalfRight(
        "phase8_prefix",
        "cache.py",
        (("if blocks and self._are_finite(blocks):", "if blocks:"),),
        "What is not a number spreads",
    ),
    "one step at a time": HalfRight(
        "phase9_pipelined",
        "runner.py",
        (
            (
                "outputs = self._attempt(self.launch_forward",
                "outputs = self.drain() + self._attempt(self.launch_forward",
            ),
        ),
        "Nothing computes while the host reads",
    ),
    "nobody waits for its token": HalfRight(
        "phase9_pipelined",
        "runner.py",
        (("or launched.waits_for_tokens):", "or False):"),),
        "Grammars and penalties choose by the token before",
    ),
    "memory taken in flight": HalfRight(
        "phase9_pipelined",
        "scheduler.py",
        (("self._out_of_room = self.in_flight", "self._out_of_room = False"),),
        "A step on its way still writes",
    ),
    "a queue that remembers": HalfRight(
        "phase9_pipelined",
        "state.py",
        (
            (
                "        self.steps.clear()\n",
                "",
            ),
        ),
        "After a failure nothing is in flight",
    ),
}


def copy_of(exercise: Exercise, tree: Path) -> Path:
    shutil.copytree(exercise.source, tree / exercise.package)
    return tree


def by_hints(exercise: Exercise) -> Exercise:
    """The same, judged by no more tests than its hints ask for."""
    asked = set().union(*(hint.fails | hint.holds for hint in exercise.hints))
    tests = [test for idea in exercise.ideas for test in idea.tests if test.rpartition("::")[2] in asked]
    return dataclasses.replace(exercise, ideas=(Idea("all that hints ask for", tuple(tests)),))


@pytest.mark.parametrize("phase", PHASES)
def test_the_original_holds(phase: str, tmp_path: Path) -> None:
    exercise = load_exercise(phase)
    judgement = judge(exercise, copy_of(exercise, tmp_path))
    assert judgement.all_hold, report(exercise, judgement)
    assert len(judgement.held) == sum(len(idea.tests) for idea in exercise.ideas)


@pytest.mark.parametrize("phase", PHASES)
def test_the_emptied_tree_says_what_it_owes(phase: str, tmp_path: Path) -> None:
    exercise = load_exercise(phase)
    taken = set_up(exercise, tmp_path / "tree")
    judgement = judge(exercise, tmp_path / "tree")
    methods = [method for each in taken.values() for method in each]
    assert judgement.unwritten
    assert all(why.partition(":")[0] in methods for why in judgement.unwritten.values())
    said = report(exercise, judgement)
    for idea in exercise.ideas:
        assert f"{idea.title} " in said
        assert judgement.unwritten.keys() & set(idea.tests), f"{idea.title} judges nothing that was taken out"
    assert "to be written: " in said


@pytest.mark.parametrize("name", HALF_RIGHT)
def test_a_half_right_solution_gets_its_hint(name: str, tmp_path: Path) -> None:
    half = HALF_RIGHT[name]
    exercise = load_exercise(half.phase)
    path = copy_of(exercise, tmp_path) / exercise.package / half.file
    text = path.read_text()
    for old, new in half.changes:
        assert text.count(old) == 1, f"the original has changed: {old!r}"
        text = text.replace(old, new)
    path.write_text(text)
    judgement = judge(by_hints(exercise), tmp_path)
    assert not judgement.all_hold
    assert hint_for(exercise, judgement).startswith(half.hint), report(exercise, judgement)


def test_every_hint_is_somebodys() -> None:
    for phase in PHASES:
        hints = [hint.says for hint in load_exercise(phase).hints]
        given = [half.hint for half in HALF_RIGHT.values() if half.phase == phase]
        assert [sum(says.startswith(hint) for hint in given) for says in hints] == [1] * len(hints)


def test_a_package_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    exercise = load_exercise("7")
    tree = copy_of(exercise, tmp_path)
    (tree / exercise.package / "scheduler.py").write_text("def broken(:\n")
    judgement = judge(exercise, tree)
    assert judgement.broken.startswith("SyntaxError: ")
    assert "scheduler.py, line 1" in judgement.broken
    assert "cannot be imported" in report(exercise, judgement)


def test_a_loop_without_end_fails_its_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutor.judging.TEST_TIMEOUT_S", 3)
    exercise = load_exercise("8")
    exercise = dataclasses.replace(exercise, ideas=exercise.ideas[:1])
    tree = copy_of(exercise, tmp_path)
    path = tree / exercise.package / "tree.py"
    text = path.read_text()
    old = "        blocks: list[int] = []\n        while self._unused"
    assert text.count(old) == 1
    path.write_text(text.replace(old, "        while count == 0:\n            pass\n" + old))
    judgement = judge(exercise, tree)
    assert any("Timeout" in why for why in judgement.failed.values())
    assert judgement.held
