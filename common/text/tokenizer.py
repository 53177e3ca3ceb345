"""Tokenizes prompts, detokenizes answers token by token, and finds stop strings."""

from __future__ import annotations

import codecs
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from common.text.chat_template import BREAK, ChatTemplate
from common.text.folder_vocabulary import FolderVocabulary

# Each text is tokenized by the calling thread, so that its priority applies. The library's own threads help only
# with batches.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Turns texts into token ids and back, by a checkpoint's tokenizer. Holds the checkpoint's chat template, too.

    A model may have more ids than its tokenizer, such as a dummy model that borrows another model's tokenizer. Ids
    beyond the tokenizer's are called foreign, and decode to texts like `<1234>`.

    Attributes:
        chat_template: renders conversations for this model; None if the checkpoint has no template.
        files: the checkpoint's folder or GGUF file, from which it was read; None: from neither.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        chat_template: ChatTemplate | None = None,
        files: Path | None = None,
    ) -> None:
        self.backend = backend
        self.files = files
        self.chat_template = chat_template
        self.vocab_size = vocab_size  # the model's
        known = backend.get_vocab_size(with_added_tokens=True)
        self.foreign_from = known
        self.num_ids = max(vocab_size, known)  # the tokenizer may have more tokens than the model, or fewer
        self._longest_token = max((len(token) for token in backend.get_vocab()), default=1)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._escapes = False
        self.letter: int | None = backend.token_to_id("a")
        self._token_texts: dict[int, str] = {}  # a cache: at most one entry for each id

    @classmethod
    def from_folder(cls, folder: Path, *, vocab_size: int, chat_template: Path | None = None) -> Tokenizer:
        """Read a checkpoint's tokenizer. The file `chat_template` replaces the checkpoint's template.

        Raises:
            StartupError: a file of the tokenizer cannot be read, or the chat template is invalid.
        """
        template = ChatTemplate.from_folder(folder, chat_template)
        backend = FolderVocabulary(folder).backend
        return cls(backend, vocab_size=vocab_size, chat_template=template, files=folder)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, without tokenizing it.

        The bound holds for tokenizers in which each character of a text belongs to a token.
        """
        return len(text) // self._longest_token

    def escape_special_tokens(self) -> None:
        """From now on, encode a special token that a message spells as plain text. The chat template's own special
        tokens stay special."""
        self._escapes = True
        if self.chat_template is not None:
            self.chat_template.escape(map(self.spelled, self.special_ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Unless `add_special_tokens` is False, they include the tokens that the
        checkpoint adds to every text (BOS, say).

        The library releases the GIL for batches only. So the text is a batch of one, and other threads can run.
        """
        pieces = text.split(BREAK) if self._escapes else [text]
        whole = len(pieces) == 1
        encodings = self.backend.encode_batch_fast(pieces, add_special_tokens=whole and add_special_tokens)
        if not whole:
            merged = tokenizers.Encoding.merge(encodings, growing_offsets=False)
            encodings = [self.backend.post_process(merged, add_special_tokens=add_special_tokens)]
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        parts: list[str] = []
        for foreign, run in itertools.groupby(token_ids, key=self.is_foreign):
            ids = list(run)
            parts.append(
                "".join(self.foreign_text(i) for i in ids)
                if foreign
                else self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            )
        return "".join(parts)

    def token_text(self, token_id: int, *, first: bool = False) -> str:
        """Return the text of one token, or the name of a special token (such as `<eos>`). Cached.

        Args:
            token_id: the token's id.
            first: whether no text is before the token. Some decoders (SentencePiece's) drop the space that begins a
                text.
        """
        if first and token_id not in self.special_ids:
            return self.decode([token_id])
        text = self._token_texts.get(token_id)
        if text is None:
            special = token_id in self.special_ids
            text = str(self.backend.id_to_token(token_id)) if special else self._text_within(token_id)
            self._token_texts[token_id] = text
        return text

    def _text_within(self, token_id: int) -> str:
        """Return the text of one token that has text before it."""
        if self.letter is None or self.is_foreign(token_id):
            return self.decode([token_id])
        return self.decode([self.letter, token_id]).removeprefix("a")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Return the bytes of one token's text (see `token_text`).

        If the token is only a part of a character, return the bytes of this part. If the vocabulary does not spell
        tokens by bytes, these bytes are unknown: return the bytes of U+FFFD.
        """
        text = self.token_text(token_id, first=first)
        if REPLACEMENT not in text:
            return text.encode()
        spelled = self.spelled(token_id)
        if _BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(spelled[3:5], 16)])
        known = [_BYTE_LEVEL[character] for character in spelled if character in _BYTE_LEVEL]
        return bytes(known) if len(known) == len(spelled) else text.encode()

    def spelled(self, token_id: int) -> str:
        """Return a token as it is spelled in the tokenizer's vocabulary, where a space may be a `Ġ`."""
        return str(self.backend.id_to_token(token_id))

    def is_foreign(self, token_id: int) -> bool:
        """Return whether an id is beyond the tokenizer's ids."""
        return token_id >= self.foreign_from

    @staticmethod
    def foreign_text(token_id: int) -> str:
        return f"<{token_id}>"


REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that form no character

#: A vocabulary's token for one byte, if its other tokens are texts.
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _byte_level() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary (GPT-2's): visible characters stand for their
    own bytes, and characters from U+0100 on stand for the other bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)).difference(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()


class IncrementalDetokenizer:
    """Turns one request's tokens into text as they arrive, and cuts the text off at a stop string.

    `common.engine.commit.decode` calls `add`: in the engine's thread, or in the HTTP process if the engine has
    a process of its own.

    Text is held back in two cases. A character's bytes may be spread over several tokens. Then nothing is decoded
    before the character is whole, or known to be broken. And decoded text that may be the start of a stop string is
    held back:

    ```text
    stop = "END"      decoded so far   "the E"  ->  return "the ", hold "E"
                      then             "N"      ->  return "",     hold "EN"
                      then             "D"      ->  return "",     stopped; held text is dropped
                      or then          "J"      ->  return "ENJ"
    ```

    A stop string that one of the first `min_tokens` tokens completes is ignored.

    Args:
        tokenizer: the model's.
        prompt_token_ids: the tokens before the text.
        stop: stop strings.
        min_tokens: stop strings are ignored for this many tokens.
        include_stop: whether the text includes the stop string that ends it.
        skip_special_tokens: leave special tokens out of the text.

    Attributes:
        stopped_by: the stop string that is complete; None: none is.
        length: number of characters that `add` has decoded so far, with those held back or dropped for a stop
            string.
        begins_text: whether no text was before the first token that `add` decodes.
    """

    #: After this many tokens in a row without decoded text, broken bytes among them are shown. UTF-8 needs at most
    #: four bytes a character.
    MAX_UNFINISHED = 4

    #: How many last tokens of the prompt are decoded as context. They decide if the answer begins with a space.
    CONTEXT = 8

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._unstoppable = min_tokens  # how many more tokens ignore stop strings
        self._stop = tuple(stop)
        self._longest_stop = max((len(text) for text in self._stop), default=0)
        self._held = ""
        self._unfinished: list[int] = []
        self.stopped_by: str | None = None
        self.length = 0
        self._context: list[int] = []  # the tokens of the latest full character
        self._stream = self._new_stream(())
        self.begins_text = not "".join([self._decode(token_id) for token_id in self._tail(prompt_token_ids)])

    def _tail(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """Return the last tokens of a prompt, at most `CONTEXT`, without foreign ones (ids that the tokenizer does
        not know). They begin at a whole character: a part of a character would appear in the answer."""
        tail = [i for i in prompt_token_ids[-self.CONTEXT :] if not self._tokenizer.is_foreign(i)]
        while tail and self._decoded(tail).startswith(REPLACEMENT):
            tail = tail[1:]
        return tail

    def _new_stream(self, context: Sequence[int]) -> DecodeStream:
        """Return a decode stream that has decoded `context`, so that the next token is spaced correctly."""
        stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        for token_id in context:
            try:
                stream.step(self._tokenizer.backend, token_id)
            except Exception:
                stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return stream

    def add(self, token_id: int) -> str:
        """Add a token. Returns the text that can be delivered now. A complete stop string sets `stopped_by`."""
        text = self._decode(token_id)
        self.length += len(text)
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return self._release(text, stoppable=False)
        return self._release(text)

    def finish(self) -> str:
        """Return the text that is still held back, at the end of the answer. Drops an unfinished character."""
        held, self._held = self._held, ""
        return held if self.stopped_by is None else ""

    # ------------------------------------------------------------------ tokens to characters

    def _decode(self, token_id: int) -> str:
        if self._tokenizer.is_foreign(token_id):
            return self._flush_broken() + self._tokenizer.foreign_text(token_id)
        broken = ""
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:
            # The library's "invalid prefix": with this token, earlier ones decode differently (byte fallback).
            # The unfinished character is broken. Start again with this token.
            broken = self._flush_broken()
            self._stream = self._new_stream(self._context)
            text = self._stream.step(self._tokenizer.backend, token_id)
        if text is not None:
            self._context = [*self._unfinished, token_id]
            self._unfinished.clear()
            return broken + text
        if token_id not in self._tokenizer.special_ids:
            self._unfinished.append(token_id)
        return broken + self._settled()

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _settled(self) -> str:
        """Return the text of the unfinished tokens if no later token can change it, else no text.

        It is settled if it ends with a U+FFFD of its own, or if a character before its last one is broken. Tokens
        that each end one character and begin the next are unfinished, not broken, however many they are.
        """
        begins = not self._context
        data = b"".join(
            self._tokenizer.token_bytes(token_id, first=begins and place == 0)
            for place, token_id in enumerate(self._unfinished)
        )
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(data)
        except UnicodeDecodeError:
            return self._flush_broken() if len(self._unfinished) >= self.MAX_UNFINISHED else ""
        if not data.endswith(REPLACEMENT.encode()):
            return ""
        self._flush_broken()
        return text

    def _flush_broken(self) -> str:
        """Drop the unfinished tokens, which will never form a character, so that later tokens can be decoded.

        Returns their text, with U+FFFD for the broken characters.
        """
        if not self._unfinished:
            return ""
        text = self._decoded(self._unfinished)
        self._unfinished.clear()
        if not self._context and self._tokenizer.letter is not None:  # some text is before the next token
            self._context = [self._tokenizer.letter]
        self._stream = self._new_stream(self._context)
        return text

    # ------------------------------------------------------------------ stop strings

    def _release(self, text: str, *, stoppable: bool = True) -> str:
        """Search new text for stop strings. Returns the text that can be delivered, and holds back the rest.

        `stoppable`: whether a complete stop string ends the text. Then the rest is dropped.
        """
        if not self._stop:
            return text
        before = len(self._held)
        self._held += text
        # The stop string that is complete first wins. Of several that end at the same character, the longest wins
        # (it begins first). Only matches that end in the new text count.
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self._held.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if ends and stoppable:
            end, start, self.stopped_by = min(ends)
            said, self._held = self._held[: end if self._include_stop else start], ""
            return said
        keep = self._longest_unfinished_stop()
        cut = len(self._held) - keep
        said, self._held = self._held[:cut], self._held[cut:]
        return said

    def _longest_unfinished_stop(self) -> int:
        """Return the length of the longest suffix of the held text that a stop string begins with."""
        for length in range(min(self._longest_stop - 1, len(self._held)), 0, -1):
            suffix = self._held[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
