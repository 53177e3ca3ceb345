"""Exercise: name the blocks of a text, so that equal names mean equal beginnings.

Write `block_keys`, then run `.venv/bin/pytest docs/exercises/block_keys.py`.
The check compares the keys of texts that have the same beginning, the same middle, or other salts.
"""

from __future__ import annotations

import hashlib


def block_keys(token_ids: list[int], block_size: int, salt: str = "") -> list[bytes]:
    """Return a key of 32 bytes for each full block of a text.

    The keys of two blocks are equal only if their texts have the same salt, and the same tokens from the beginning
    to the end of the block. `hashlib.blake2b(content, digest_size=32).digest()` makes a key of any bytes.

    Args:
        token_ids: the text.
        block_size: number of tokens in a block.
        salt: texts with other salts have no key in common.
    """
    raise NotImplementedError("a block's key depends on its tokens and on the key of the block before it")


# ---------------------------------------------------------------------- the check


def test_each_full_block_has_a_key() -> None:
    keys = block_keys([1, 2, 3, 4, 5], 2)
    assert [len(key) for key in keys] == [32, 32]
    assert block_keys([1], 2) == []


def test_equal_beginnings_have_equal_keys() -> None:
    assert block_keys([1, 2, 3, 4, 5, 6], 2)[:2] == block_keys([1, 2, 3, 4, 7, 8], 2)[:2]


def test_a_block_after_another_beginning_has_another_key() -> None:
    assert block_keys([1, 2, 3, 4], 2)[1] != block_keys([9, 9, 3, 4], 2)[1]
    assert block_keys([3, 4, 3, 4], 2)[0] != block_keys([3, 4, 3, 4], 2)[1]


def test_tokens_are_not_only_written_one_after_another() -> None:
    assert block_keys([1, 23], 2) != block_keys([12, 3], 2)
    assert block_keys([1, 256], 2) != block_keys([257, 0], 2)


def test_salts_have_no_key_in_common() -> None:
    plain, salted = block_keys([1, 2, 3, 4], 2), block_keys([1, 2, 3, 4], 2, "a secret")
    assert not set(plain) & set(salted)


# ---------------------------------------------------------------------- one way to solve it


def solution(token_ids: list[int], block_size: int, salt: str = "") -> list[bytes]:
    """Hash the key before and the block's tokens, four bytes each. The salt stands for a block before the first."""
    keys = [hashlib.blake2b(salt.encode(), digest_size=32).digest()]
    for end in range(block_size, len(token_ids) + 1, block_size):
        tokens = b"".join(token.to_bytes(4, "little") for token in token_ids[end - block_size : end])
        keys.append(hashlib.blake2b(keys[-1] + tokens, digest_size=32).digest())
    return keys[1:]
