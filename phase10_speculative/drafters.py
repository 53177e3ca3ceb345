"""Guesses the next tokens of a text by looking its last tokens up in the text so far (Saxena 2023).

```text
text      … the quick brown fox … … … the quick        the latest place behind the same last tokens:
                      └ at                    └ now    the tokens that followed there are the draft
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.request import Request

SHORTEST, LONGEST = 1, 4  # how many last tokens are looked up
SHARED_TOKENS = 32_768  # of finished requests that a dictionary holds, at 0.4 kB each; then it begins anew
SHARED_SALTS = 8  # cache salts with a dictionary


class Drafter(Protocol):
    """Guesses the next tokens of one request."""

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` guesses of the tokens that follow `token_ids`, the request's tokens so far."""

    @property
    def matched(self) -> int:
        """How many of the last tokens the latest guesses go on from: the more, the likelier they come true."""


class Dictionary:
    """A text, and for every run of 1 to 4 tokens in it the latest place behind that run. O(1) a token."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def append(self, token_id: int) -> None:
        """Add a token to the text, and note the place behind each run that it ends."""
        self.text.append(token_id)
        for n in range(SHORTEST, LONGEST + 1):
            self._places[tuple(self.text[-n:])] = len(self.text)

    def find(self, last: Sequence[int], longer_than: int = 0) -> tuple[int, int] | None:
        """Return the latest place behind the longest run that ends `last`, and the run's length."""
        for n in range(min(LONGEST, len(last)), max(SHORTEST - 1, longer_than), -1):
            if (at := self._places.get(tuple(last[-n:]))) is not None:
                return at, n
        return None


class NgramDrafter:
    """Goes on from the latest earlier place of a request's last tokens.

    While the text goes on as it did there, the match grows, whether its guesses are computed or not.

    Args:
        prompt: the request's prompt.
        prediction: tokens that the answer is expected to begin with.
        shared: the texts of other requests, for tokens that the request's own text does not contain.
    """

    def __init__(
        self, prompt: Sequence[int], prediction: Sequence[int] = (), shared: Dictionary | None = None
    ) -> None:
        self.matched = 0
        self._own = Dictionary()
        self._shared = shared
        self._source, self._at = self._own.text, 0
        self._seen = 0
        self._read_on(prompt)
        if prediction:
            self._source, self._at, self.matched = self._own.text, len(prompt), LONGEST
            for token_id in prediction:
                self._own.append(token_id)

    def _read_on(self, token_ids: Sequence[int]) -> None:
        for end in range(self._seen + 1, len(token_ids) + 1):
            self._follow(token_ids[end - 1], token_ids[max(0, end - LONGEST) : end])
        self._seen = len(token_ids)

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` guesses: the tokens that followed at the place of the match."""
        self._read_on(token_ids)
        if not self.matched:
            return []
        guesses = self._source[self._at : self._at + limit]
        period = len(self._source) - self._at
        while (
            len(guesses) < limit and self._source is self._own.text
        ):  # the text repeats itself up to its end
            guesses.append(guesses[-period])
        return guesses

    def _follow(self, token_id: int, last: Sequence[int]) -> None:
        """Read the next token. `last`: the latest tokens, this one included. The match goes on or is found anew."""
        if self.matched and self._at < len(self._source) and self._source[self._at] == token_id:
            self._at, self.matched = self._at + 1, self.matched + 1
        else:
            self.matched = 0
        if self.matched < LONGEST:
            for each in (self._own, self._shared):
                if each is not None and (found := each.find(last, self.matched)):
                    self._source, (self._at, self.matched) = each.text, found
        self._own.append(token_id)


class SharedTexts:
    """The texts of finished requests, a dictionary for each cache salt."""

    def __init__(self) -> None:
        self._dictionaries: dict[str, Dictionary] = {}

    def of(self, request: Request) -> Dictionary:
        """Return the dictionary of a request's cache salt."""
        dictionary = self._dictionaries.pop(request.cache_salt, None)
        if dictionary is None or len(dictionary.text) > SHARED_TOKENS:
            dictionary = Dictionary()
        self._dictionaries[request.cache_salt] = dictionary  # the latest used is last
        while len(self._dictionaries) > SHARED_SALTS:
            del self._dictionaries[next(iter(self._dictionaries))]
        return dictionary

    def add(self, request: Request) -> None:
        """Add the text of a finished request."""
        dictionary = self.of(request)
        for token_id in request.token_ids:
            dictionary.append(token_id)
