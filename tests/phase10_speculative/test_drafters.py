"""Prompt lookup: the tokens that are guessed for a text."""

from __future__ import annotations

import random

import pytest

from common.engine.requests import Handling
from common.request import Request, SamplingParams
from phase10_speculative.drafters import MOST_TOKENS, Dictionary, NgramDrafter
from phase10_speculative.scheduler import MOST_SALTS
from phase10_speculative.scheduler import SpeculativeScheduler as Scheduler
from tests.support.engines import build, greedy, run


def test_a_guess_continues_the_text_as_it_went_on_before() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert drafter.propose([1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == []
    assert drafter.propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4], 4) == [5, 6, 7, 8]
    assert drafter.matched == 2


def test_the_match_grows_while_the_text_goes_on_as_guessed_and_ends_with_the_first_other_token() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4]
    drafter = NgramDrafter(text)
    for matched, token in enumerate([5, 6, 7], start=3):
        text.append(token)
        assert drafter.propose(text, 1) == [token + 1]
        assert drafter.matched == matched
    assert drafter.propose([*text, 90], 3) == []
    assert drafter.matched == 0


def test_a_prediction_is_guessed_first_and_found_again_after_a_change() -> None:
    prompt, prediction = [1, 2, 3], [10, 11, 12, 13, 14, 15, 16]
    drafter = NgramDrafter(prompt, prediction)
    assert drafter.propose(prompt, 3) == [10, 11, 12]
    assert drafter.propose([*prompt, 10, 99], 3) == []
    assert drafter.propose([*prompt, 10, 99, 12, 13], 3) == [14, 15, 16]


@pytest.mark.parametrize(
    ("answer", "guess"),
    [
        ([1, 2, 3, 90, 5], [6, 7]),
        ([1, 2, 3, 90, 91, 4], [5, 6]),
        ([1, 2, 3, 6], [7, 8]),
    ],
    ids=["other", "more", "fewer"],
)
def test_after_a_change_in_the_text_a_match_continues_soon_after_it(
    answer: list[int], guess: list[int]
) -> None:
    """The match does not jump to the latest place of a single token."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, *range(100, 200), 4, 70, 5, 71, 6, 72, 0]
    assert NgramDrafter(prompt).propose([*prompt, *answer], 2) == guess


@pytest.mark.parametrize("seed", range(20))
def test_a_match_equals_a_search_of_the_whole_text(seed: int) -> None:
    """This holds for a new match. A match that goes on keeps its place."""
    draw = random.Random(seed)
    text = [draw.randrange(3) for _ in range(60)]
    dictionary = Dictionary()
    for end in range(1, len(text)):
        dictionary.append(text[end - 1])
        last = text[:end]
        found = dictionary.find([*last, text[end]])
        runs = [([*last, text[end]])[-n:] for n in (4, 3, 2, 1) if n <= end + 1]
        expected = next(
            (
                (at, len(run))
                for run in runs
                for at in range(end, len(run) - 1, -1)
                if text[at - len(run) : at] == run
            ),
            None,
        )
        assert found == expected


def test_behind_a_change_the_latest_place_of_another_text_is_taken() -> None:
    """The place where a match ended in the request's own text means nothing in the texts of other requests."""
    shared = Dictionary()
    shared.add([9, 9, 9, 9, 90, 50, 8, 8, 90, 60])
    drafter = NgramDrafter([1, 2, 3, 4, 5], shared=shared)
    assert drafter.propose([1, 2, 3, 4, 5, 1, 2, 3], 1) == [4]
    assert drafter.propose([1, 2, 3, 4, 5, 1, 2, 3, 90], 1) == [60]


def test_texts_of_finished_requests_are_shared_under_the_same_salt_alone() -> None:
    engine = build("phase10_speculative", draft_from_finished=True)
    scheduler = engine.scheduler
    assert isinstance(scheduler, Scheduler)

    def guesses(salt: str) -> list[int]:
        asking = Request("asking", [9, 2, 3], SamplingParams(), cache_salt=salt)
        return scheduler.new_drafter(asking).propose([9, 2, 3], 2)

    finished = engine.maker.create([1, 2, 3, 4, 5], greedy(3), handling=Handling(cache_salt="a"))
    engine.add_request(finished)
    assert guesses("a") == []
    run(engine)
    assert finished.is_terminal
    assert [guesses(salt) for salt in ("a", "b", "")] == [[4, 5], [], []]
    for number in range(MOST_SALTS):
        guesses(f"tenant {number}")
    assert guesses("a") == [], "the longest unused texts are dropped"


def test_a_dictionary_of_finished_texts_is_bounded() -> None:
    shared = Dictionary()
    shared.add(list(range(MOST_TOKENS + 1)))
    reading = NgramDrafter([7, 8], shared=shared)
    assert reading.propose([7, 8], 2) == [9, 10]
    shared.add([1, 2, 3])
    assert shared.text == [1, 2, 3], "it begins anew"
    assert reading.propose([7, 8, 9], 2) == [10, 11], "a drafter that reads the old texts continues"
