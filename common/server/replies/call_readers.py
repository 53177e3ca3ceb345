"""Readers of tool calls, one for each syntax of `common.dialect`."""

from __future__ import annotations

import itertools
import json
import re
import sys
from ast import literal_eval
from collections.abc import Collection
from typing import Any, ClassVar

from pydantic_core import from_json

from common.dialect import HERMES_MARKERS, PYTHON_TAG, CallSyntax, Dialect
from common.server.replies.parts import PartsReader


class End:
    """Finds the end of a JSON object or of a call's arguments in text that comes in pieces.

    It reads each character once.

    Args:
        depth: number of brackets that are open already.
        in_python: the text is Python: strings may have single quotes, and brackets may be round.

    Attributes:
        commas: the indices, in the text that `find` searches, of the commas directly inside the outermost bracket.
    """

    def __init__(self, depth: int = 0, *, in_python: bool = False) -> None:
        self.commas: list[int] = []
        self._depth = depth
        self._in_python = in_python
        self._quotes = "\"'" if in_python else '"'
        self._openers, self._closers = ("{[(", "}])") if in_python else ("{[", "}]")
        self._quote = ""  # opened the string that is being read; "": outside of strings
        self._escaped = False

    def find(self, text: str, start: int = 0) -> int | None:
        """Return the index after the bracket that closes the outermost bracket; None if it has not come.

        `text[:start]` was searched by earlier calls.
        JSON has no `<` outside of strings, so a JSON object that is not closed ends before a `<`.
        """
        for at in range(start, len(text)):
            character = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in self._quotes:
                self._quote = character
            elif character in self._openers:
                self._depth += 1
            elif character in self._closers:
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
            elif character == "," and self._depth == 1:
                self.commas.append(at)
            elif character == "<" and not self._in_python:
                return at
        return None


# ---------------------------------------------------------------------- calls written as JSON

#: The beginning of a call whose name comes first, so that its arguments can be streamed.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class _JsonReader(PartsReader):
    """Reads calls that are JSON objects with a name and arguments."""

    opener: ClassVar[str]
    takes_none: ClassVar[bool]  # whether a call may lack the field of its arguments

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._end = End()
        self._searched = 0

    def _open(self) -> bool:
        """State of answer text: look for the opener of a call."""
        text, opener, rest = self._held.partition(self.opener)
        if opener:
            self._say(text.rstrip())
            self._begin_object(text[len(text.rstrip()) :] + opener, rest)
            return True
        text, self._held = self._split(self.opener)
        self._say(text)
        return False

    def _begin_object(self, before: str, text: str) -> None:
        self._before, self._held = before, text
        self._end, self._searched = End(), 0
        self._state = self._object

    def _object(self) -> bool:
        """State in a JSON object that may be a call: wait for the call's name, or for the object's end."""
        text = self._held.lstrip()
        self._before += self._held[: len(self._held) - len(text)]
        self._held = text
        # The head ends before a `{`, so it is searched for only if one has come since the last search.
        head = _HEAD.match(self._held) if self._held.find("{", max(1, self._searched)) > 0 else None
        if head is not None and _loaded(head[1]) in self._names:
            self._begin_call(_loaded(head[1]))
            self._held, self._end = self._held[head.end() :], End()
            self._state, self.in_call = self._arguments, True
            return True
        if not self._held and not self._final:
            return False
        if head is None and self._held.startswith("{"):
            end = self._end.find(self._held, self._searched)
            self._searched = len(self._held)
            if end is None and not self._final:
                return False
            call = self._call_of(_loaded(self._held[:end]))
            if end is not None and call is not None:
                self._begin_call(call[0])
                self._add_arguments(json.dumps(call[1], ensure_ascii=False))
                self._held, self._state = self._held[end:], self._close
                return True
        self._say(self._before)
        self._state = self._open
        return True

    def _call_of(self, value: Any) -> tuple[str, dict[str, Any]] | None:
        """Return the name and the arguments of a call. None if `value` is not a call of one of the tools."""
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if arguments in (None, "") and self.takes_none:
            arguments = {}
        elif isinstance(arguments, str):
            arguments = _loaded(arguments)
        return (value["name"], arguments) if isinstance(arguments, dict) else None

    def _arguments(self) -> bool:
        end = self._end.find(self._held)
        if end != 0 and self._held:
            self._add_arguments(self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self.in_call, self._end, self._state = False, End(depth=1), self._rest
        return True

    def _rest(self) -> bool:
        """State after a call's arguments: drop the text up to the end of the call's object."""
        end = self._end.find(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self._state = self._close
        return True

    def _close(self) -> bool:
        """State after a call's object: look for the next call, or return to answer text."""
        raise NotImplementedError


class HermesReader(_JsonReader):
    """Reads `<tool_call>{"name": …, "arguments": …}</tool_call>`, anywhere in the answer, any number of times."""

    opener = HERMES_MARKERS[0]
    takes_none = True

    def _answer(self) -> bool:
        return self._open()

    def _close(self) -> bool:
        """State after a call's object: skip the text up to the next marker, and the marker if it is a closing one.

        Returns False if no marker has come.
        """
        at = [found for marker in HERMES_MARKERS if (found := self._held.find(marker)) >= 0]
        if not at:
            _, self._held = self._split(*HERMES_MARKERS)
            return False
        self._held = self._held[min(at) :].removeprefix(HERMES_MARKERS[1])
        self._state = self._answer
        return True


class LlamaReader(_JsonReader):
    """Reads `{"name": …, "parameters": …}` at the beginning of an answer, or after `<|python_tag|>` anywhere.

    Further calls may follow, separated by semicolons, commas or white space.
    """

    opener = PYTHON_TAG
    takes_none = False

    def _answer(self) -> bool:
        text = self._held.lstrip()
        if text.startswith("{"):
            self._begin_object("", self._held)
        elif self._final or text == self.opener or not self.opener.startswith(text):
            self._state = self._open
        else:
            return False
        return True

    def _close(self) -> bool:
        text = self._held.lstrip("; \n\t,")
        if text.startswith("{"):
            self._begin_object(self._held[: -len(text)], text)
            return True
        if text or self._final:
            self._state = self._open
        return bool(text) or self._final


def _loaded(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not JSON, is `null`, or is nested too deeply."""
    try:
        return _parsed(text)
    except ValueError:
        return None


# ---------------------------------------------------------------------- calls written as Python


class PythonReader(PartsReader):
    """Reads `[f(a=1), g(b="x")]` at the beginning of an answer. After ```` ```tool_code ````, the square brackets
    may be missing.

    A call is returned once all of it has come. Values are Python literals or JSON.
    """

    _FENCE: ClassVar[str] = "```tool_code"
    _OPENER: ClassVar[re.Pattern[str]] = re.compile(rf"\s*(?:{_FENCE}\s*\[?|\[)\s*")
    _NAME: ClassVar[re.Pattern[str]] = re.compile(r"([\w.-]+)\s*\(")

    _called: str  # the name of the call whose arguments are being read
    _end: End
    _searched: int

    def _answer(self) -> bool:
        opener = self._OPENER.match(self._held)
        if opener is not None:
            return self._name(opener.end())
        text = self._held.lstrip()
        if not self._final and self._FENCE.startswith(text):
            return False
        self._state = self._text
        return True

    def _text(self) -> bool:
        self._say(self._held)
        self._held = ""
        return False

    def _name(self, begin: int) -> bool:
        """Look for a tool's name and a round bracket from `self._held[begin]` on, and set the next state.

        Returns False, and sets no state, if the held text may still become a name with a bracket.
        """
        name = self._NAME.match(self._held, begin)
        if name is not None and name[1] in self._names:
            self._before, self._held = self._held[: name.end()], self._held[name.end() :]
            self._called, self._searched, self._end = name[1], 0, End(depth=1, in_python=True)
            self._state = self._call
            return True
        if not self._final and re.fullmatch(r"[\w.-]*\s*", self._held[begin:]):
            return False
        self._state = self._close if self.calls else self._text
        return True

    def _call(self) -> bool:
        """State after a call's opening bracket: wait for the closing bracket, and read the arguments."""
        end = self._end.find(self._held, self._searched)
        self._searched = len(self._held)
        if end is None and not self._final:
            return False
        arguments = None if end is None or self._held[end - 1] != ")" else self._values(end - 1)
        if arguments is None:
            self._held, self._state = self._before + self._held, self._text
            return True
        self._begin_call(self._called)
        self._add_arguments(json.dumps(arguments, ensure_ascii=False))
        self._held, self._state = self._held[end:], self._next
        return True

    def _values(self, end: int) -> dict[str, Any] | None:
        """Return the values of the arguments in `self._held[:end]` by name; None as in `_named_values`."""
        cuts = [-1, *self._end.commas, end]
        arguments = [self._held[begin + 1 : at] for begin, at in itertools.pairwise(cuts)]
        return _named_values([each for each in arguments if each.strip()])

    def _next(self) -> bool:
        separator = re.match(r"\s*[,;]?\s*", self._held)
        assert separator is not None, "it matches nothing, too"
        return self._name(separator.end())

    def _close(self) -> bool:
        if not self._final and re.fullmatch(r"\s*[,;]?\s*\]?\s*`{0,3}\s*", self._held):
            return False
        self._held = re.sub(r"^\s*[,;]?\s*\]?\s*(```)?\s*", "", self._held)
        self._state = self._text
        return True


def _named_values(arguments: list[str]) -> dict[str, Any] | None:
    """Return the values of `name=value` and `**{"name": value}` by name.

    Returns None if an argument has another form, or a value for which `_value` raises an error.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        unpacked = argument.strip().startswith("**")
        try:
            value = _value(argument.strip().removeprefix("**") if unpacked else text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if unpacked and isinstance(value, dict):
            values |= value
        elif equals and name.strip().isidentifier() and not unpacked:
            values[name.strip()] = value
        else:
            return None
    return values


def _parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON."""
    return _finite(from_json(text, allow_inf_nan=False))


def _finite(value: Any) -> Any:
    """Return a value with the largest float in place of numbers that no float can hold.

    `1e999` is valid in JSON and in Python. It is read as infinity, which JSON cannot express.
    """
    match value:
        case float():
            return max(-sys.float_info.max, min(value, sys.float_info.max))
        case list() | tuple():
            return [_finite(each) for each in value]
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case _:
            return value


def _value(text: str) -> Any:
    """Return the value of a JSON text or a Python literal.

    Raises:
        ValueError, SyntaxError: the text is neither, or is a literal that JSON cannot hold.
        MemoryError, RecursionError: the text is nested too deeply.
    """
    try:
        return _parsed(text)
    except ValueError:
        value = literal_eval(text)
    try:
        return from_json(json.dumps(_finite(value)))  # joins a pair of surrogates, such as '\ud83d\ude00'
    except TypeError as error:  # bytes, sets, complex numbers
        raise ValueError(str(error)) from None


# ---------------------------------------------------------------------- the choice of a reader

_READERS: dict[CallSyntax, type[PartsReader]] = {
    "hermes": HermesReader,
    "llama3_json": LlamaReader,
    "pythonic": PythonReader,
}


def new_reader(
    dialect: Dialect, *, names: Collection[str] = (), thinking: bool = False
) -> PartsReader | None:
    """Return a reader of one choice's text, or None if all of the text is the answer.

    Args:
        dialect: how the model marks thoughts and calls.
        names: names of the tools that may be called; empty: calls are not looked for.
        thinking: the prompt ends within a thought (`common.dialect.opens_thought`).
    """
    if names and dialect.calls is not None:
        reader = _READERS[dialect.calls]
    elif dialect.thinks:
        reader = PartsReader
    else:
        return None
    return reader(thinks=dialect.thinks, thinking=dialect.thinks and thinking, names=names)
