"""Limits on the tokens that a request may sample: its `allowed_token_ids` and `bad_words`.

```text
bad_words = ["fox"]      fox  ->  8 · 9     9 is not sampled after 8
                        _fox  ->  7         7 is never sampled
```

As in vLLM, a word is forbidden both with and without a space before it. Only the token sequence that the tokenizer
makes of the word is forbidden, so a model may still spell the word with other tokens. (vLLM forbids the form with a
space only if this form has as many tokens as the form without.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from common.text.tokenizer import Tokenizer

#: A mask of tokens: [W], words of 32 bits. Token i is allowed if bit i % 32 of word i // 32 is set.
Mask = npt.NDArray[np.uint32]


class AllowedTokens:
    """Makes the mask of the tokens that a request may sample next, from its latest generated tokens. Immutable.

    Args:
        num_ids: number of token ids that a mask covers.
        allowed: tokens that may be sampled; None: all.
        forbidden: token sequences. The last token of a sequence is not allowed directly after its other tokens.

    Attributes:
        context: how many of the latest generated tokens the next token's mask depends on, at most.
    """

    def __init__(
        self,
        num_ids: int,
        allowed: Collection[int] | None = None,
        forbidden: Iterable[Sequence[int]] = (),
    ) -> None:
        bits = np.full(-(-num_ids // 32) * 32, allowed is None)
        bits[list(allowed or ())] = True
        self.context = 0
        # Key: the last token but one of a forbidden sequence. Values: (all tokens but the last, the last token).
        self._ends: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in forbidden:
            if before:
                self.context = max(self.context, len(before))
                self._ends.setdefault(before[-1], []).append((before, last))
            else:
                bits[last] = False
        self._mask: Mask = np.packbits(bits, bitorder="little").view(np.uint32)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, allowed: Collection[int] | None, bad_words: Sequence[str]
    ) -> AllowedTokens | None:
        """Return the tokens that a request's `allowed_token_ids` and `bad_words` allow; None if it has neither."""
        if allowed is None and not bad_words:
            return None
        spelled = [tokens for word in bad_words for tokens in spellings(tokenizer, word)]
        return cls(tokenizer.num_ids, allowed, spelled)

    @property
    def is_empty(self) -> bool:
        """True if no token is allowed, whatever was generated."""
        return not self._mask.any()

    def mask(self, generated: Sequence[int]) -> Mask:
        """Return the mask of the tokens that may come next: [W]. The caller must not change it.

        Args:
            generated: the latest generated tokens: all of them, or at least the last `context`.
        """
        known = self._ends.get(generated[-1], ()) if generated else ()
        ends = [last for before, last in known if list(generated[-len(before) :]) == before]
        return without_tokens(self._mask, ends) if ends else self._mask


def without_tokens(mask: Mask, token_ids: Iterable[int]) -> Mask:
    """Return a copy of a mask in which the tokens `token_ids` are not allowed."""
    others = mask.copy()
    for token_id in token_ids:
        others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return others


def spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Return the token lists that spell a word: without a space before it, and with one.

    The second list is left out if it ends with the first: forbidding the first then forbids both. Returns an empty
    list if the tokenizer drops all characters of the word.
    """
    alone, inside = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
    if not alone:  # a tokenizer may drop characters
        return []
    return [alone] if inside[-len(alone) :] == alone else [alone, inside]
