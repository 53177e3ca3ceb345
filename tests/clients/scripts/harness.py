"""Functions that the scripts share. Scripts run in a client's environment, which lacks the project's modules."""

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

#: Values from the test: `base_url`, `url`, `key`, `model`, `tokenizer`, `prompt`, `messages`, `question`,
#: `max_tokens`, `call_tokens` (enough for a call).
GIVEN: dict[str, Any] = json.loads(sys.argv[1])


def usage_of(usage: Any) -> list[int]:
    """Return the numbers of a usage that has OpenAI's names for chat."""
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]


def joined(pieces: Iterable[str | None]) -> dict[str, Any]:
    """Return a streamed text, and its pieces that are not empty."""
    full = [piece for piece in pieces if piece]
    return {"text": "".join(full), "pieces": full}


def caught(ask: Callable[[], Any]) -> dict[str, Any]:
    """Return the types and the message of the exception that a call must raise."""
    try:
        answer = ask()
    except Exception as error:
        return {"types": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
    raise AssertionError(f"it was answered: {answer}")


def report(**kinds: list[Callable[[], Any]]) -> None:
    """Run every part, and print what each returned or raised. The kinds are those of `test_clients.py`."""
    said: dict[str, dict[str, Any]] = {}
    for kind, parts in kinds.items():
        said[kind] = {}
        for part in parts:
            try:
                said[kind][part.__name__] = {"returned": part()}
            except Exception:
                said[kind][part.__name__] = {"raised": traceback.format_exc()}
    print("\n" + json.dumps(said))
