"""Tries a grammar in a process of its own: compiles it and generates some tokens, before the server does.

The compiler is native code that cannot be interrupted. An integer that must be a multiple of 999,999 keeps it busy
for minutes. Thousands of rules that each refer to the next overflow its stack and crash the process. Other grammars
compile in a millisecond, and then every mask takes tens of milliseconds. So a grammar is tried here first, with
limits on time and stack, and a crash does not affect the server.

```text
stdin    a JSON line with the arguments of the tokenizer, then one for each grammar: ["regex", "[a-z]+"]
stdout   a JSON line for each grammar: null if it may be used, or why it is refused
```

Run as a script, so it must not import modules of this package but `gbnf`, which lies beside it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
from time import thread_time
from typing import Any

import llguidance
import numpy as np

if __package__:
    from common.constrained.gbnf import to_lark
else:
    sys.path.append(os.path.dirname(__file__))
    from gbnf import to_lark  # type: ignore[import-not-found, no-redef]

#: Seconds of processor time for the trial of one grammar, random answers included. A schema of 64 kB takes 0.1 s.
TIME_LIMIT_S = 1.0

#: The process's niceness (`nice(1)`), so that the server's threads have priority.
NICENESS = 15

#: Stack of the compiling thread, in bytes. The server's threads have more, so a grammar that fits here fits there.
STACK_SIZE = 2**20

#: Allowed white space between the parts of a JSON text: a space, or a new line and its indentation. If more were
#: allowed, small models would generate nothing else. (llama.cpp's JSON grammar has the same rule.)
WHITESPACE = r" |\n[ \t]{0,20}"

#: The compiler's options for a JSON Schema. `lenient`: it ignores formats that it does not know, as JSON Schema
#: asks, and warns of other keywords that it does not follow (`compile_grammar` refuses these).
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "lenient": True}

#: Number of random answers whose masks are timed, and number of tokens of each.
WALKS, WALK_TOKENS = 2, 32

#: Tokens drawn at each step of a random answer. The longest one is taken, which leads furthest into the grammar.
WALK_DRAWS = 8


#: Words of the compiler, and what they mean.
ONE_OF = (
    "oneOf not fully supported",
    "oneOf is followed only if its alternatives differ in type, or in the constants of a property that all "
    "require; write anyOf",
)


class OverBudgetError(ValueError):
    """An answer's grammar has taken more processor time than its budget allows."""


class MaskBudget:
    """Bounds the processor time that an answer's grammar takes: for each token, computing a mask and advancing.

    The budget is a token bucket. Each token of the answer adds `mean_s` seconds to `left_s` and subtracts the time
    that the token took. `left_s` is at most `BURST_S`.

    Masks of ordinary grammars take 0.02 to 0.6 ms for a vocabulary of 1,024, and up to 2.5 ms for 52,000.

    Args:
        vocab_size: number of tokens in a mask.
    """

    MEAN_S = 2e-3
    MEAN_S_PER_TOKEN = 5e-8  # for each token of the vocabulary
    BURST_S = 0.1  # the first masks of an answer are the slowest: the lexer builds its tables on demand

    def __init__(self, vocab_size: int) -> None:
        self.mean_s = self.MEAN_S + self.MEAN_S_PER_TOKEN * vocab_size
        self.left_s = self.BURST_S
        self._tokens = 0
        self._spent_s = 0.0

    def charge(self, seconds: float) -> None:
        """Subtract the processor time of one token from the budget.

        Raises:
            OverBudgetError: the answer has used up its budget.
        """
        self._tokens += 1
        self._spent_s += seconds
        self.left_s = min(self.left_s + self.mean_s - seconds, self.BURST_S)
        if self.left_s < 0:
            raise OverBudgetError(
                f"its masks took {1e3 * self._spent_s / self._tokens:.3g} ms of processor time a token "
                f"({self._tokens} tokens); the budget is {1e3 * self.mean_s:.3g} ms a token "
                f"and {1e3 * self.BURST_S:g} ms beyond that. Write a less ambiguous grammar: longer terminals, "
                "fewer rules that match the same text"
            )


#: Most Earley items in a row of the parser; the library's default is 2,000. 200 optional properties make 800 items.
MAX_ITEMS_IN_ROW = 1_000

#: Most parser items for one mask, plus half an item for each token of the vocabulary; default 50,000. 200 optional
#: properties take 3,000. Palindromes, with a rule for each letter, take 12,000 in 1 ms.
STEP_MAX_ITEMS = 20_000

#: Most lexer work ("fuel") for one mask; default 200,000, which takes 14 ms. `\p{L}{1,200}` takes 12,500.
STEP_LEXER_FUEL = 100_000

#: Most lexer states for all masks of an answer, at 1 to 2 kB each; default 250,000. 4,000 characters of any kind
#: take 2,000.
MAX_LEXER_STATES = 50_000

#: Largest size of a compiled grammar; default 500,000. 500 optional properties have 8,000.
MAX_GRAMMAR_SIZE = 50_000


def limits(vocab_size: int) -> llguidance.LLParserLimits:
    """Return the library's limits on a grammar and on its parser's states.

    The limits bound memory, and the time of one mask: measured on grammars made to be slow, at most 15 ms for a
    vocabulary of 262 tokens, and 0.3 s for 150,000. `MaskBudget` bounds the time of all masks of an answer.
    """
    return llguidance.LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_max_items=STEP_MAX_ITEMS + vocab_size // 2,
        step_lexer_fuel=STEP_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )


def compile_grammar(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """Return a matcher for a grammar, at the beginning of its text.

    Args:
        tokenizer: the model's tokenizer.
        kind, text: as in `common.constrained.grammar.Grammar`.

    Raises:
        ValueError: the grammar is malformed, exceeds `limits`, or matches no text.
    """
    if kind == "json_schema":
        source = llguidance.LLMatcher.grammar_from_json_schema(text, JSON_OPTIONS)
    elif kind == "choice":  # one terminal for all: with one for each, some hundred texts fill a row
        source = llguidance.grammar_from("regex", "|".join(map(re.escape, json.loads(text))))
    elif kind == "gbnf":
        source = llguidance.LLMatcher.grammar_from_lark(to_lark(text))
    else:
        source = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]  # a kind is one of its names
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits(tokenizer.vocab_size))
    if not matcher.is_error():
        matcher.compute_bitmask()  # for some grammars, only a mask shows that they match nothing
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    ignored = (each for each in matcher.get_grammar_warnings() if not each.startswith("Unknown format: "))
    if warning := next(ignored, None):
        raise ValueError(warning.partition(", falling back")[0].replace(*ONE_OF))
    return matcher


def walk(
    matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, seed: int, budget: MaskBudget
) -> None:
    """Generate a random answer: its first `WALK_TOKENS` tokens, or all of them if it is shorter.

    Raises:
        ValueError: the masks exceed their budget, or the parser exceeds its limits.
    """
    draw = random.Random(seed)
    for taken in range(WALK_TOKENS):
        began_s = thread_time()
        mask = matcher.compute_bitmask()
        mask_s = thread_time() - began_s
        if matcher.is_error():
            raise _failed_after(taken, _reason(matcher.get_error()))
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
        drawn = draw.choices(allowed, k=WALK_DRAWS) if allowed else []
        drawn = [token_id for token_id in drawn if not tokenizer.is_special_token(token_id)]
        if not drawn:  # almost certainly only EOS is allowed
            return
        token_id = max(drawn, key=lambda each: len(tokenizer.decode_bytes([each])))
        began_s = thread_time()
        matcher.consume_token(token_id)
        try:
            budget.charge(mask_s + thread_time() - began_s)
        except OverBudgetError as error:
            raise _failed_after(taken + 1, str(error)) from None


def _failed_after(taken: int, reason: str) -> ValueError:
    return ValueError(f"a trial answer fails after {taken} token{'' if taken == 1 else 's'}: {reason}")


def _reason(message: str) -> str:
    """Return the line of the compiler's message that names the error. Its other lines show where the error is."""
    lines = [line.strip() for line in message.splitlines()] or [message]
    is_pattern = lines[0] == "regex parse error:" or "JSON schema: regex parse error:" in lines[0]
    begin = "pattern: " if is_pattern else ""
    named = (begin + line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return next(named, lines[0]).replace("NoExtensionBias", "no text matches it")


def _try(tokenizer: llguidance.LLTokenizer, kind: str, text: str, verdicts: list[str | None]) -> None:
    """Try a grammar, and append to `verdicts` why it is refused, or None. An error other than ValueError is raised,
    and nothing appended."""
    try:
        matcher = compile_grammar(tokenizer, kind, text)
        for seed in range(WALKS):
            walk(matcher.deep_copy(), tokenizer, seed, MaskBudget(tokenizer.vocab_size))
    except ValueError as error:
        verdicts.append(str(error))
    else:
        verdicts.append(None)


def main() -> None:
    os.nice(max(0, NICENESS - os.nice(0)))
    options: dict[str, Any] = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(**options)
    threading.stack_size(STACK_SIZE)
    for line in iter(sys.stdin.readline, ""):
        kind, text = json.loads(line)
        verdicts: list[str | None] = []
        thread = threading.Thread(target=_try, args=(tokenizer, kind, text, verdicts))
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)  # its signal ends the process
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if not verdicts:
            return
        print(json.dumps(verdicts[0]), flush=True)


if __name__ == "__main__":
    main()
