"""Guesses the next tokens of a text by looking its last tokens up in the text so far (Saxena 2023).

```text
text      … the quick brown fox … … … the quick        the latest place after the same last tokens:
                      └ at                    └ now    the tokens that followed there are the draft
```
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

LONGEST = 4  # how many last tokens are looked up, at most
NEAR = 64  # tokens after the end of the latest match that are searched first: often only a few words differ
MOST_TOKENS = 32_768  # a dictionary with more (0.4 kB each) is emptied before a text is added


class Drafter(Protocol):
    """Guesses the next tokens of one request."""

    matched: int  # length of the match before the latest guesses: the longer, the likelier they are right

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` guesses of the tokens that follow `token_ids`, the request's tokens so far."""


class Dictionary:
    """A text of tokens, and an index of every run of 1 to 4 successive tokens in it.

    The index maps a run to the *place* after its latest occurrence: the position in the text at which the
    next token stands, or will stand. A lookup and the addition of a token are O(1).
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def append(self, token_id: int) -> None:
        """Add a token to the text, and record the place after each run of 1 to 4 tokens that ends with it."""
        self.text.append(token_id)
        for n in range(1, LONGEST + 1):
            self._places[tuple(self.text[-n:])] = len(self.text)

    def find(self, last: Sequence[int], longer_than: int = 0) -> tuple[int, int] | None:
        """Return the place after the latest occurrence of a run in the text, and the run's length.

        The run is the longest of at most 4 tokens that stands at the end of `last` and occurs in the text.
        None: no run of more than `longer_than` tokens does.
        """
        for n in range(min(LONGEST, len(last)), longer_than, -1):
            if (at := self._places.get(tuple(last[-n:]))) is not None:
                return at, n
        return None

    def add(self, text: Sequence[int]) -> None:
        """Add the text of a request that has ended, for later requests to look up.

        If the dictionary has more than `MOST_TOKENS` tokens already, it forgets all earlier texts first.
        """
        if len(self.text) > MOST_TOKENS:
            self.text, self._places = [], {}
        for token_id in text:
            self.append(token_id)


class NgramDrafter:
    """Guesses that a text continues as it did after an earlier occurrence of its last tokens.

    The *match* is the longest run of up to 4 last tokens that occurred before: its latest occurrence, or one
    shortly after the place where the previous match ended. While new tokens equal the tokens that follow the
    match, the match grows, whether or not the guesses are computed.

    Args:
        prompt: the request's prompt.
        prediction: tokens that the answer may contain. At first it is expected to begin with them.
        shared: the texts of other requests. They are used if they contain more of the last tokens than the
            request's own text does.
    """

    def __init__(
        self, prompt: Sequence[int], prediction: Sequence[int] = (), shared: Dictionary | None = None
    ) -> None:
        self.matched, self._seen, self._at = 0, 0, 0
        self._own, self._shared = Dictionary(), shared
        self._source = self._own.text
        self._broken: tuple[list[int], int] = ([], 0)  # text and place where the latest match ended
        self.propose(prompt, 0)
        if prediction:
            self._source, self._at, self.matched = self._own.text, len(prompt), LONGEST
            for token_id in prediction:
                self._own.append(token_id)

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Look up the tokens that came since the last call, and return up to `limit` guesses.

        The guesses are the tokens after the match, in the text that contains it. If that text ends before
        there are `limit` guesses, they repeat from the first token after the match. Without a match, or if
        nothing follows it, the result is empty.
        """
        for end in range(self._seen + 1, len(token_ids) + 1):
            self._follow(token_ids[max(0, end - LONGEST) : end])
        self._seen = len(token_ids)
        run = self._source[self._at : self._at + limit] if self.matched else []
        return list(itertools.islice(itertools.cycle(run), limit))  # a text that repeats itself is repeated

    def _follow(self, last: Sequence[int]) -> None:
        """Extend the match if the newest token, `last[-1]`, follows the match, else drop the match. If the
        match is now shorter than `LONGEST`, search for a longer match. Then append the token to the text."""
        if self.matched and self._at < len(self._source) and self._source[self._at] == last[-1]:
            self._at, self.matched = self._at + 1, self.matched + 1
        else:
            if self.matched > 1:  # a match of one token is often chance
                self._broken = self._source, self._at
            self.matched = 0
        if self.matched < LONGEST:
            for each in (self._own, self._shared):
                if each is not None and (found := each.find(last, self.matched)):
                    self._source, (self._at, self.matched) = each.text, found
                    self._at = self._behind_break(last[-self.matched :]) or self._at
        self._own.append(last[-1])

    def _behind_break(self, run: Sequence[int]) -> int | None:
        """Return the first place after an occurrence of `run` within the `NEAR` tokens after the place where
        the latest match ended.

        None: there is no such place, or that match was in another text than the present match.
        """
        text, broken_at = self._broken
        if text is not self._source:
            return None
        n, run = len(run), list(run)
        places = range(max(n, broken_at + 1), min(broken_at + NEAR, len(text)) + 1)
        return next((at for at in places if text[at - n : at] == run), None)
