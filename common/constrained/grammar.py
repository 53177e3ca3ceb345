"""Grammars: constrain an answer's format by masks of the allowed tokens.

```text
Grammar ──compile──> Matcher ──mask──> a bit for each token: may it come next?
                        ^                        │
                        └──── advance <──── token sampled from the allowed ones
```

A matcher's state depends only on the tokens it has advanced by. So its mask may be read any number of times, and a
preemption between two tokens does not change the mask. The library llguidance computes the masks: its parser walks
a grammar and a trie of the vocabulary together.

Masks are computed by a few threads while the engine's thread does other work. The native call that computes a mask
releases the interpreter's lock, so both run in parallel:

```text
engine's thread   [commit token 7][plan][ forward pass of token 8 ......... ][wait][sample]
mask thread                  [ mask of token 8 ... ]
```
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import llguidance
import numpy as np
from pydantic_core import from_json

from common.constrained import schemas
from common.constrained import trial as grammar_trial
from common.constrained.allowed_tokens import Mask, without_tokens
from common.constrained.trial import MaskBudget, OverBudgetError
from common.errors import GrammarFailedError, InvalidGrammarError, ShuttingDownError
from common.text.tokenizer import Tokenizer

#: The longest text of a grammar. The compiled grammar takes about a hundred times as many bytes.
MAX_GRAMMAR_CHARACTERS = 65_536

#: Number of threads that compute masks.
MASK_THREADS = min(4, os.cpu_count() or 1)

#: Number of verdicts that are cached: clients send the same few grammars again and again, valid or not.
VERDICTS_KEPT = 1024

CLOSED = "the server is shutting down; no grammar is compiled any more"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of texts; the answer must be one of them. Created by the class methods."""

    kind: Literal["json_schema", "regex", "choice", "lark", "gbnf"]
    text: str

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """Return the grammar of JSON that matches a JSON Schema, given as an object or as JSON text.

        An object has only properties that the schema lists, unless the schema says more about others.

        Raises:
            InvalidGrammarError: the schema is too long, or has an integer that is too long.
        """
        given = _object_of(schema) if isinstance(schema, str) else schema
        if given is None:  # no schema, which the compiler says better
            return cls("json_schema", str(schema))
        check_length(schemas.size(given))
        return cls("json_schema", json.dumps(schemas.closed(schemas.asked(given)), ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        r"""Return the grammar of texts that a regular expression matches as a whole.

        The syntax is that of Rust's `regex`, without look-around. But `\d`, `\w` and `\s` match ASCII only.
        """
        return cls("regex", _in_ascii(pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Return the grammar of exactly these texts: the answer is one of them."""
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def context_free(cls, text: str) -> Grammar:
        """Return a grammar with rules, written in the notation of Lark or of llama.cpp (GBNF). Regular expressions
        in it are as in `regex`."""
        if _GBNF_RULE.search(text):
            return cls("gbnf", _ESCAPE.sub(_spelled, text))
        return cls("lark", _in_ascii(text))


def check_length(characters: int) -> None:
    """Raise InvalidGrammarError if a grammar of so many characters is not compiled."""
    if characters > MAX_GRAMMAR_CHARACTERS:
        raise InvalidGrammarError(
            f"{characters} characters are too many; at most {MAX_GRAMMAR_CHARACTERS} are compiled"
        )


def _object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None if it is none, or nested too deeply."""
    check_length(len(text))
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


#: The classes of characters that Rust's `regex` extends to all of Unicode, in ASCII.
_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[ \t\n\r\f\x0b]"}
_ASCII |= {name.upper(): f"[^{characters[1:]}" for name, characters in _ASCII.items()}


def _in_ascii(pattern: str) -> str:
    """Return a regular expression in which `\\d`, `\\w`, `\\s` and their opposites mean characters of ASCII."""
    return re.sub(r"\\(.)", lambda escape: _ASCII.get(escape[1], escape[0]), pattern, flags=re.DOTALL)


#: The beginning of a rule in GBNF, which no line of a Lark grammar begins with.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

#: An escape in GBNF. Its groups, at most one: a code point in hexadecimal.
_ESCAPE = re.compile(r"\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|.)", re.DOTALL | re.ASCII)


def _spelled(escape: re.Match[str]) -> str:
    """Return an escape in GBNF so that the library's converter, which misreads most code points, reads it."""
    code = int(escape[escape.lastindex], 16) if escape.lastindex else 0xD800
    if code < 0x80:
        return f"\\x{code:02x}"
    return escape[0] if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code)


class Matcher:
    """One request's position in its grammar: advances by the tokens of the answer, and computes the mask of the
    next token. Used by one thread at a time.

    Attributes:
        words: number of 32-bit words in a mask.
        complete: True if no token can follow the tokens so far.
    """

    def __init__(self, backend: llguidance.LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._forced: deque[int] = deque()  # tokens known to be forced, from the next one on
        self._looks_for_forced = True
        self.words = -(-vocab_size // 32)
        self.complete = backend.is_stopped()
        self._backend = backend
        self._threads = threads
        self._budget = MaskBudget(vocab_size)
        self._mask_s = 0.0  # processor time of the latest mask
        self._mask = np.zeros(self.words, dtype=np.uint32)
        self._filling: Future[float] | None = None  # computes `_mask`; owns the backend while it runs
        self._failure: str | None = None

    def begin_mask(self) -> None:
        """Start computing the next token's mask in another thread, unless it was started before."""
        if self._filling is None and self._failure is None:
            self._filling = self._threads.submit(_timed, self._fill)

    def mask(self) -> Mask:
        """Return the mask of allowed next tokens: [words], valid until `advance`. Blocks until it is computed.

        Token i is allowed if bit i % 32 of word i // 32 is set.

        Raises:
            GrammarFailedError: the grammar has exceeded its limits, or has failed before. From then on `advance`
                raises the same error.
        """
        self.begin_mask()
        self._wait()
        return self._mask

    def revise(self, guesses: list[int], limit: int) -> tuple[list[int], bool]:
        """Correct guesses of the next tokens. Returns the new guesses, and whether they are forced tokens.

        Forced tokens spell text that the grammar requires next. If there are any, and `guesses` do not begin with
        these, return the forced tokens. Otherwise return the `guesses` before the first guess that the grammar does
        not allow.

        At most `limit` guesses are returned. Each guess needs a mask. So if the time of the latest mask is known,
        there are also no more guesses than masks that fit into one token's share of the budget.

        Raises:
            GrammarFailedError: as `mask`.
        """
        if self._mask_s > 0.0:
            limit = min(limit, int(self._budget.mean_s / self._mask_s))
        forced, guesses = self.forced(limit), guesses[:limit]
        if forced != guesses[: len(forced)]:
            return forced, True
        return guesses[: self._backend.validate_tokens(guesses)], False

    def forced(self, limit: int | None = None) -> list[int]:
        """Return at most `limit` tokens that spell the text that the grammar requires next; [] if it requires none.
        A model may spell this text with other tokens. Raises as `mask`.

        Forced tokens are computed again only after all of them have come, and never again if this has taken longer
        than a token may: a long text would be computed again for each of its tokens.
        """
        self._wait()
        if not self._forced and self._looks_for_forced:
            taken_s = _timed(lambda: self._forced.extend(self._backend.compute_ff_tokens()))
            self._looks_for_forced = taken_s <= self._budget.mean_s
        return list(itertools.islice(self._forced, limit))

    def guessed_masks(self, guesses: Sequence[int]) -> Sequence[Mask]:
        """Compute and return a mask for the token after each of these guesses: [words] each. The list ends before a
        guess that completes the text. The matcher's state does not change.

        The masks' time is not charged to the budget: an answer must not depend on guesses.

        Args:
            guesses: the next tokens, each of them allowed after those before it.

        Raises:
            GrammarFailedError: as `mask`.
        """
        masks: list[Mask] = []
        if guesses:
            self._wait()
            try:
                self._mask_s = _timed(functools.partial(self._fill_guessed, guesses, masks)) / len(guesses)
            except ValueError as error:
                self._fail(error)
        return masks

    def advance(self, token_id: int) -> None:
        """Advance the state by the next token.

        Raises:
            GrammarFailedError: the token is not allowed here, the grammar has exceeded its limits or its budget of
                processor time, or it has failed before.
        """
        mask_s = self._wait()
        began_s = time.thread_time()
        if not self._backend.consume_token(token_id):
            self._fail(_error_of(self._backend))
        self.complete = self._backend.is_stopped()
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()
        try:
            self._budget.charge(mask_s + time.thread_time() - began_s)
        except OverBudgetError as error:
            self._fail(error)
        self._filling = None

    def _fill(self) -> None:
        self._backend.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._backend.is_error():
            raise _error_of(self._backend)

    def _fill_guessed(self, guesses: Sequence[int], masks: list[Mask]) -> None:
        # A copy takes microseconds. Taking tokens back (`rollback`) fails in grammars with `max_tokens` or `stop`.
        ahead = self._backend.deep_copy()
        for guess in guesses:
            ahead.consume_token(guess)
            if ahead.is_stopped():
                break
            masks.append(np.zeros(self.words, dtype=np.uint32))
            ahead.unsafe_compute_mask_ptr(masks[-1].ctypes.data, masks[-1].nbytes)
        if ahead.is_error():
            raise _error_of(ahead)

    def _wait(self) -> float:
        """Block until the mask is computed. Returns its processor time in seconds; 0 if no mask was started.

        Raises:
            GrammarFailedError: as `mask`.
        """
        if self._failure is not None:
            raise GrammarFailedError(self._failure)
        if self._filling is None:
            return 0.0
        try:
            self._mask_s = self._filling.result()
        except Exception as error:
            self._fail(error)
        return self._mask_s

    def _fail(self, reason: Exception) -> NoReturn:
        self._failure = f"the answer's grammar could not be followed any further: {reason}"
        raise GrammarFailedError(self._failure)


def _error_of(backend: llguidance.LLMatcher) -> ValueError:
    return ValueError((backend.get_error().splitlines() or ["no more is known"])[0])


def _timed(function: Callable[[], None]) -> float:
    """Call a function. Returns the seconds of processor time that it took."""
    began_s = time.thread_time()
    function()
    return time.thread_time() - began_s


def without(mask: Mask, held_back: Collection[int]) -> Mask:
    """Return a mask [words] in which the tokens `held_back` are not allowed. If `mask` allows no tokens except
    these, return it as it is."""
    if not held_back:
        return mask
    others = without_tokens(mask, held_back)
    return others if others.any() else mask


class GrammarCompiler:
    """Makes matchers for one tokenizer. Any thread may call the methods.

    A grammar is first tried in another process (`common.constrained.trial`), and the verdict is cached. The grammar
    is then compiled again for each matcher. Copies of a compiled grammar would share the lexer, its lock and its
    limits, so one answer could block or fail others.

    Args:
        tokenizer: the model's tokenizer.
        eos_token_ids: the model's EOS tokens; allowed only after a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._verdicts = _Verdicts()
        self._trying = threading.Lock()  # a trial has one grammar at a time
        self._trial = _Trial()
        self._threads = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="masks")

    def new_matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of its text.

        Raises: as `check`, which is called first, and `compile`.
        """
        self.check(grammar)
        return self.compile(grammar)

    def check(self, grammar: Grammar) -> None:
        """Raise an error if a grammar cannot be used. A grammar without a cached verdict is tried first.

        A trial compiles the grammar and generates some tokens, in another process. Blocks until the trial has
        ended. Grammars are tried one at a time.

        Raises:
            InvalidGrammarError: the grammar is malformed, too large or too slow, or matches no text. Or the model's
                tokenizer allows no grammars, or the trial was ended from outside.
            ShuttingDownError: `close` was called before the grammar had been tried.
        """
        check_length(len(grammar.text))
        try:
            _ = self._backend  # else a tokenizer that llguidance refuses would fail in the trial
        except ValueError as error:
            raise InvalidGrammarError(str(error)) from None
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            with self._trying:
                verdict = self._verdicts.get(grammar)  # tried while this thread waited?
                if verdict is None:
                    verdict = self._trial.run(grammar, self._options)
                    self._verdicts.put(grammar, verdict)
        if verdict.reason is not None:
            raise InvalidGrammarError(verdict.reason)

    def accepts(self, grammar: Grammar) -> bool:
        """Return whether a grammar is known to be usable, without trying it."""
        verdict = self._verdicts.get(grammar)
        return verdict is not None and verdict.reason is None

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher of a grammar that was checked, in this process or in another.

        Raises:
            InvalidGrammarError: the grammar cannot be compiled.
        """
        try:
            backend = self._backend
            began_s = time.thread_time()
            compiled = grammar_trial.compile_grammar(backend, grammar.kind, grammar.text)
        except ValueError as error:
            raise InvalidGrammarError(str(error)) from None
        self._verdicts.put(grammar, Verdict(None, time.thread_time() - began_s))
        return Matcher(compiled, backend.vocab_size, self._threads)

    def compile_s(self, grammar: Grammar) -> float | None:
        """Estimate the processor time that the next matcher of a grammar takes to compile, in seconds.

        The estimate is the time of the latest matcher; 0 for a refused grammar. None: the grammar was not compiled
        before, or its verdict is no longer cached.
        """
        verdict = self._verdicts.get(grammar)
        return None if verdict is None else verdict.compile_s

    def close(self) -> None:
        """End the running trial, and try no more grammars. Existing matchers still work.

        Any thread may call this, any number of times. Does not wait for the end of the trial.
        """
        self._trial.close()

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        """The arguments of `llguidance.LLTokenizer`. Raises InvalidGrammarError if the model has no EOS token."""
        if not self._eos_token_ids:
            raise InvalidGrammarError("this model has no EOS token for an answer to end with")
        return {
            "tokenizer": self._tokenizer.backend.to_str(),
            "n_vocab": self._tokenizer.num_ids,
            "eos_token": self._eos_token_ids,
        }

    @functools.cached_property
    def _backend(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(**self._options)


class Verdict(NamedTuple):
    """Says whether a grammar may be used, and how long compiling it takes.

    Attributes:
        reason: why the grammar is refused; None: it may be used.
        compile_s: processor time of the latest compilation for a matcher, in seconds; 0 if the grammar is refused;
            None: the grammar was tried, but not compiled for a matcher yet.
    """

    reason: str | None
    compile_s: float | None


class _Verdicts:
    """A cache of verdicts, of the `VERDICTS_KEPT` grammars that were used last. Any thread may use it."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, grammar: Grammar) -> Verdict | None:
        """Return a grammar's verdict, or None if none is cached."""
        key = self._key(grammar)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def put(self, grammar: Grammar, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts[self._key(grammar)] = verdict
            if len(self._verdicts) > VERDICTS_KEPT:
                self._verdicts.popitem(last=False)

    @staticmethod
    def _key(grammar: Grammar) -> bytes:
        text = grammar.text.encode(errors="surrogatepass")
        return hashlib.sha256(grammar.kind.encode() + b" " + text).digest()


class _Trial:
    """Runs the process of `grammar_trial`: starts the process for the first grammar, and again for the next grammar
    if the process has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._end_process: Callable[..., object] = lambda: None
        self._closed = False
        self._lock = threading.Lock()  # nothing is started after `close`

    def run(self, grammar: Grammar, options: Mapping[str, Any]) -> Verdict:
        """Try a grammar, and return the verdict. Used by one thread at a time.

        Args:
            grammar: the grammar to try.
            options: the arguments of llguidance's tokenizer; always the same.

        Raises:
            InvalidGrammarError: the process was killed from outside, so the trial has no result.
            ShuttingDownError: `close` has been called.
        """
        with self._lock:
            if self._closed:
                raise ShuttingDownError(CLOSED)
            if self._process is None or self._process.poll() is not None:
                self._end_process()
                self._process = self._start(options)
                self._end_process = weakref.finalize(self, _end, self._process)
            process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: `readline` returns nothing
            process.stdin.write(json.dumps([grammar.kind, grammar.text]) + "\n")
            process.stdin.flush()
        if line := process.stdout.readline():
            reason = json.loads(line)
            return Verdict(reason, None if reason is None else 0.0)
        ended_by = -process.wait()
        if self._closed:
            raise ShuttingDownError(CLOSED)
        if ended_by in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):  # a grammar causes none of these
            raise InvalidGrammarError("the process that tries grammars was ended; send the request again")
        return Verdict(
            "it is too large or too deep: compiling it takes too much time, or more stack than there is", 0.0
        )

    def close(self) -> None:
        """End the process, and start no new one. Any thread may call this."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    @staticmethod
    def _start(options: Mapping[str, Any]) -> subprocess.Popen[str]:
        # -P: do not import packages from the script's folder.
        command = [sys.executable, "-P", grammar_trial.__file__]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(options) + "\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
