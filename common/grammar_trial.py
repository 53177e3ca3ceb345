"""A process in which a grammar is compiled before the server's own compiles it.

The compiler is native code that nobody can interrupt. An integer that must be a multiple of 999,999 keeps it busy
for minutes; thousands of rules of which each names the next overflow its stack, and the process is gone. So it runs
here first, with a limit on its time and on its stack. Whatever goes wrong, goes wrong here.

```text
stdin    a JSON line that says how the tokenizer is made, then one for each grammar: ["regex", "[a-z]+"]
stdout   a line for each grammar that the compiler came to an end with, whether it took it or refused it
```

Run as a script, so it must not import its neighbours.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from typing import Any

import llguidance

#: Seconds of computing. A schema of 64 kB takes a tenth of one.
TIME_LIMIT_S = 2.0

#: Of the compiling thread, in bytes: less than any thread of a server has, so that what fits here fits there.
STACK_SIZE = 2**20

#: What may stand between the parts of a JSON text: a space, or a new line and its indentation. Were more allowed,
#: small models would go on with nothing else (llama.cpp's grammar for JSON has this rule, too).
WHITESPACE = r" |\n[ \t]{0,20}"

_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


def compile_grammar(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of its text.

    Raises:
        ValueError: there is no such grammar, or nothing matches it.
    """
    if kind == "json_schema":
        source = llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
    else:
        source = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]  # a kind is one of its names
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some grammars turn out only now to match nothing
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    return matcher


def _reason(message: str) -> str:
    """The line of the compiler's message that says what is wrong; the others show where."""
    lines = [line.strip() for line in message.splitlines()] or [message]
    named = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return next(named, lines[0]).replace("NoExtensionBias", "no text matches it")


def _try(tokenizer: llguidance.LLTokenizer, kind: str, text: str, ended: threading.Event) -> None:
    with contextlib.suppress(ValueError):
        compile_grammar(tokenizer, kind, text)
    ended.set()  # not where anything else was raised


def main() -> None:
    options: dict[str, Any] = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(**options)
    threading.stack_size(STACK_SIZE)
    for line in iter(sys.stdin.readline, ""):
        kind, text = json.loads(line)
        ended = threading.Event()
        thread = threading.Thread(target=_try, args=(tokenizer, kind, text, ended))
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)  # whose signal, left alone, ends the process
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if not ended.is_set():
            return
        print("ended", flush=True)


if __name__ == "__main__":
    main()
