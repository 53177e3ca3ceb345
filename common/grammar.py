"""Grammars: what an answer must look like, and which tokens keep it so.

```text
Grammar ──compile──> Matcher ──fill_mask──> a bit for each token: may it come next?
                        ^                        │
                        └──── advance <──── token sampled among those
```

A matcher stands where the tokens it was told of have led it: it may be asked for a mask any number of times, and
what happens to a request between two tokens is nothing to it. The work is done by llguidance, whose parser walks a
grammar and a trie of the vocabulary side by side.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llguidance
import numpy as np
import numpy.typing as npt

from common import grammar_trial
from common.errors import GrammarFailedError, InvalidGrammarError
from common.text import Tokenizer

#: Of a grammar's text. What it becomes takes a hundred times as many bytes.
MAX_GRAMMAR_CHARACTERS = 65_536

#: Compiled grammars that are kept: clients ask with the same few again and again.
GRAMMARS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of texts, of which an answer must be one. Made by its class methods."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """JSON that a JSON Schema describes; the schema itself, or its JSON text."""
        return cls(
            "json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        )

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """What the whole of a regular expression matches, in the syntax of Rust's `regex`: no look-around."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these."""
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def context_free(cls, text: str) -> Grammar:
        """A grammar with rules, in the notation of Lark or of llama.cpp (GBNF)."""
        return cls("grammar", text)


class Matcher:
    """Where one request's answer stands in its grammar."""

    def __init__(self, backend: llguidance.LLMatcher, words: int) -> None:
        self._backend = backend
        self.words = words  # that a mask has

    def fill_mask(self, mask: npt.NDArray[np.uint32], held_back: Collection[int] = ()) -> None:
        """Write which tokens may come next.

        Args:
            mask: [words], contiguous. Token i may come if bit i % 32 of word i // 32 is set.
            held_back: tokens that may not, unless nothing else may.

        Raises:
            GrammarFailedError: the grammar has become more than its limits allow for.
        """
        self._backend.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._backend.is_error():
            raise self._failure()
        if held_back:
            others = mask.copy()
            for token_id in held_back:
                others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            if others.any():
                mask[:] = others

    def advance(self, token_id: int) -> None:
        """Take in the next token.

        Raises:
            GrammarFailedError: it may not come here, or the grammar has become too much.
        """
        if not self._backend.consume_token(token_id):
            raise self._failure()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow what has come."""
        return self._backend.is_stopped()

    def _failure(self) -> GrammarFailedError:
        reason = (self._backend.get_error().splitlines() or ["no more is known"])[0]
        return GrammarFailedError(f"the answer's grammar could not be followed any further: {reason}")


class GrammarCompiler:
    """Makes matchers for one tokenizer. Any thread may ask; what is made is used by one thread.

    Args:
        tokenizer: of the model.
        eos_token_ids: the model's; they may follow a text that is complete, and no other.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()  # a trial has one grammar at a time
        self._compiled = functools.lru_cache(GRAMMARS_KEPT)(self._compile)

    def new_matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of its text.

        Raises:
            InvalidGrammarError: there is no such grammar, nothing matches it, or it is too large.
        """
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidGrammarError(
                f"{len(grammar.text)} characters are too many; at most {MAX_GRAMMAR_CHARACTERS} are compiled"
            )
        with self._lock:
            return Matcher(self._compiled(grammar).deep_copy(), -(-self._backend.vocab_size // 32))

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        try:
            backend = self._backend
            self._trial.run(grammar)
            return grammar_trial.compile_grammar(backend, grammar.kind, grammar.text)
        except ValueError as error:
            raise InvalidGrammarError(str(error)) from None

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        """How the tokenizer is made."""
        if not self._eos_token_ids:
            raise InvalidGrammarError("this model has no EOS token for an answer to end with")
        return {
            "tokenizer": self._tokenizer.backend.to_str(),
            # It may have more tokens than the model, or fewer.
            "n_vocab": max(self._tokenizer.vocab_size, self._tokenizer.foreign_from),
            "eos_token": self._eos_token_ids,
        }

    @functools.cached_property
    def _backend(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(**self._options)

    @functools.cached_property
    def _trial(self) -> _Trial:
        return _Trial(self._options)


class _Trial:
    """The process of `grammar_trial`: started for the first grammar, and again after one that ended it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = json.dumps(options)
        self._process: subprocess.Popen[str] | None = None
        self._end_process: Callable[..., object] = lambda: None

    def run(self, grammar: Grammar) -> None:
        """InvalidGrammarError: the process ended over it."""
        if self._process is None or self._process.poll() is not None:
            self._end_process()
            self._process = self._start()
            self._end_process = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([grammar.kind, grammar.text]) + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            self._process.wait()
            raise InvalidGrammarError(
                "it is too large or too deep: compiling it takes too much time, or more stack than there is"
            )

    def _start(self) -> subprocess.Popen[str]:
        # -P: the script's folder is no place to look for packages.
        command = [sys.executable, "-P", grammar_trial.__file__]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdin is not None
        process.stdin.write(self._options + "\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
