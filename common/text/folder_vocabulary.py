"""Reads the tokenizer of a Hugging Face folder.

It is spread over several files. `tokenizer.json` has the vocabulary and the rules. `tokenizer_config.json` and, in
older checkpoints, `added_tokens.json` may name tokens that were added later. `tokenizer_config.json` and, in older
checkpoints, `special_tokens_map.json` also say which token ends an answer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from common.errors import StartupError
from common.json_file import read_json_if_there
from common.text.chat_template import ChatTemplate, special_tokens_of

_CONFIG, _ADDED, _DECODER = "tokenizer_config.json", "added_tokens.json", "added_tokens_decoder"


class FolderVocabulary:
    """The tokenizer of a Hugging Face folder.

    Args:
        folder: the checkpoint's folder.

    Attributes:
        unused: tokens that the files name and that texts cannot have, in words.

    Raises:
        StartupError: a file cannot be read, or an entry has a wrong type.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_json_if_there(folder / _CONFIG)
        self._names_flags = _DECODER in self._config  # of tokens that tokenizer.json has, too
        self._special = special_tokens_of(folder)
        self.unused: list[str] = []

    @functools.cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer, with all added tokens.

        Truncation and padding, which `tokenizer.json` may set, are switched off: prompts are taken as sent.
        """
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(
                f"{self._folder} has no tokenizer.json: convert its tokenizer to the fast format"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text("utf-8-sig"))
            backend.encode("a")  # some faults show at the first text only
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are no Exception
            raise StartupError(f"{path} cannot be read: {error!s:.300}") from None
        backend.no_truncation()
        backend.no_padding()
        there = backend.get_added_tokens_decoder()
        for token_id, token in sorted(self._added_tokens().items()):
            known = backend.token_to_id(token.content)
            free = known is None and token_id == backend.get_vocab_size()
            if known != token_id and not free:
                self.unused.append(f"the token {token.content!r} with the id {token_id}")
            elif token_id not in there or (self._names_flags and there[token_id] != token):
                backend.add_tokens([token])
        for name, text in self._special.items():
            known = backend.token_to_id(text)
            if known is None:
                self.unused.append(f"{name} {text!r}, which is not in the vocabulary")
                continue
            token = backend.get_added_tokens_decoder().get(known) or AddedToken(text, special=True)
            token.special = True
            backend.add_tokens([token])
        return backend

    def _added_tokens(self) -> dict[int, AddedToken]:
        """Return the tokens that files beside `tokenizer.json` name, by id.

        As in `transformers`, `added_tokens.json` counts if the config has no `added_tokens_decoder`.

        Raises:
            StartupError: an entry has a wrong type.
        """
        found: dict[int, AddedToken] = {}
        by_text = {} if self._names_flags else read_json_if_there(self._folder / _ADDED)
        entries: list[tuple[Any, Any]] = [(token_id, {"content": text}) for text, token_id in by_text.items()]
        entries += _object(self._config, _DECODER, self._folder / _CONFIG).items()
        for token_id, entry in entries:
            try:
                special = entry["content"] in self._special.values() or entry.get("special", False)
                settings: dict[str, Any] = {"normalized": not special, "special": special, **entry}
                found[int(token_id)] = AddedToken(settings.pop("content") + "", **settings)
            except (TypeError, ValueError, KeyError):
                raise StartupError(
                    f"{self._folder}: {_CONFIG} or {_ADDED} has an invalid token: {token_id!r:.80}: {entry!r:.80}"
                ) from None
        return found

    def end_token_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that end an answer: EOS, and the one that the chat template writes after it.

        Raises:
            StartupError: `tokenizer.json` cannot be read, or an entry has a wrong type.
        """
        ends = [self._special.get("eos_token")]
        with contextlib.suppress(StartupError):  # another template may replace an invalid one
            template = ChatTemplate.from_folder(self._folder)
            added = (token.content for token in self.backend.get_added_tokens_decoder().values())
            ends.append(None if template is None else template.end_of_turn(added))
        ids = (self.backend.token_to_id(end) for end in ends if end is not None)
        return frozenset(token_id for token_id in ids if token_id is not None)


def _object(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """Return an entry that is an object, or an empty one if it is absent. StartupError: it has another type."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise StartupError(f"{path}: {key} must be an object, not {value!r:.80}")
    return value or {}
