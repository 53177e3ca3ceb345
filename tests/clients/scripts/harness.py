"""Functions that the scripts share. Scripts run in a client's environment, which lacks the project's modules."""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: Values from the test: `base_url`, `url`, `key`, `model`, `tokenizer`, `prompt`, `messages`, `max_tokens`.
GIVEN: dict[str, Any] = json.loads(sys.argv[1])

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def usage_of(usage: Any) -> list[int]:
    return [getattr(usage, name) for name in USAGE]


def described(error: BaseException) -> dict[str, Any]:
    """Return an exception's types, status and message, for a test to check."""
    return {
        "types": [kind.__name__ for kind in type(error).__mro__],
        "status": getattr(error, "status_code", None),
        "message": str(error),
    }


def caught(ask: Callable[[], Any]) -> dict[str, Any]:
    """Return the description of the exception that a call must raise."""
    try:
        answer = ask()
    except Exception as error:
        return described(error)
    raise AssertionError(f"it was answered: {answer}")


def report(*parts: Callable[[], Any]) -> None:
    """Run every part, and print what each returned or raised."""
    said: dict[str, Any] = {}
    for each in parts:
        try:
            said[each.__name__] = {"returned": each()}
        except Exception:
            said[each.__name__] = {"raised": traceback.format_exc()}
    print("\n" + json.dumps(said))
