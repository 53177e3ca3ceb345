"""Readers of tool calls, one for each syntax of `common.text.dialect`."""

from __future__ import annotations

import itertools
import json
import re
import sys
from ast import literal_eval
from collections.abc import Collection
from typing import Any, ClassVar

from pydantic_core import from_json

from common.server.api.parts import Part, PartsReader
from common.text.dialect import HERMES_MARKERS, PYTHON_TAG, CallSyntax, Dialect


class End:
    """Finds the end of a JSON object or of a call's arguments in text that comes in pieces.

    It reads each character once.

    Args:
        depth: number of brackets that are open already.
        in_python: the text is Python: strings may have single quotes, and brackets may be round.

    Attributes:
        inner: the index, in all pieces joined, of the first bracket inside the outermost one; None: none has come.
        commas: the indices, in all pieces joined, of the commas directly inside the outermost bracket.
    """

    def __init__(self, depth: int = 0, *, in_python: bool = False) -> None:
        self.inner: int | None = None
        self.commas: list[int] = []
        self._read = 0  # characters of earlier pieces
        self._depth = depth
        self._in_python = in_python
        self._quotes = "\"'" if in_python else '"'
        self._openers, self._closers = ("{[(", "}])") if in_python else ("{[", "}]")
        self._quote = ""  # opened the string that is being read; "": outside of strings
        self._escaped = False

    def find(self, piece: str) -> int | None:
        """Read the next piece. Return the index in it after the bracket that closes the outermost bracket; None if
        that bracket has not come.

        JSON has no `<` outside of strings, so a JSON object that is not closed ends before a `<`.
        """
        for at, character in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in self._quotes:
                self._quote = character
            elif character in self._openers:
                self._depth += 1
                if self._depth == 2 and self.inner is None:
                    self.inner = self._read + at
            elif character in self._closers:
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
            elif character == "," and self._depth == 1:
                self.commas.append(self._read + at)
            elif character == "<" and not self._in_python:
                return at
        self._read += len(piece)
        return None


class _CallReader(PartsReader):
    """Base class of the readers: collects text up to the end of a bracket."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._begin_collecting("", End())

    def _begin_collecting(self, before: str, end: End) -> None:
        """Collect text up to `end`. `before` is the text in front of it: answer text, if no call follows."""
        self._before, self._end = before, end
        self._pieces: list[str] = []

    def _collected(self) -> tuple[str, bool] | None:
        """Consume held text up to the end. Returns all text up to there, and whether the end has come. None: the
        end may still come."""
        end = self._end.find(self._held)
        self._pieces.append(self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is None and not self._final:
            return None
        return "".join(self._pieces), end is not None


# ---------------------------------------------------------------------- calls written as JSON

#: The beginning of a call whose name comes first, so that its arguments can be streamed.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

#: White space before a call's object. Some models write a list of calls.
_LIST = re.compile(r"[\s\[]*")

#: White space and separators behind a call's object.
_SEPARATORS = re.compile(r"[\s,;\]]*")

#: Text that looked like a call and was none is searched again for calls inside it, as long as all text that was
#: searched in vain is at most so many times as long as the answer. This bounds the work for an answer full of
#: beginnings of calls.
MOST_SEARCHES = 4


class _JsonReader(_CallReader):
    """Reads calls that are JSON objects with a name and arguments."""

    markers: ClassVar[tuple[str, ...]]  # before calls and, if there is one, behind them
    takes_none: ClassVar[bool]  # whether a call may lack the field of its arguments

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._markers = self.markers[:1]  # those that text is searched for: the second only behind calls
        self._read = 0  # characters of the answer so far
        self._in_vain = 0  # characters that were searched for the end of a call, and were none
        self._tried_head = False

    def add(self, delta: str) -> list[Part]:
        self._read += len(delta)
        return super().add(delta)

    def _open(self) -> bool:
        """State of answer text: look for the opener of a call."""
        text, marker = self._text_before(*self._markers)
        self._say(text)
        if marker == self.markers[0]:
            self._begin_object(self._taken_space() + marker)
        elif marker:
            self._taken_space()
            self._markers = self.markers[:1]
        return bool(marker)

    def _begin_call(self, name: str) -> None:
        super()._begin_call(name)
        self._markers = self.markers

    def _begin_object(self, before: str) -> None:
        self._begin_collecting(before, End())
        self._tried_head = False
        self._state = self._object

    def _object(self) -> bool:
        """State in a JSON object that may be a call: wait for the call's name, or for the object's end."""
        if not self._pieces:
            text = self._without_space(_LIST)
            if not text and not self._final:
                return False
            self._before += self._taken_space()
            if not text.startswith("{"):
                return self._no_call("")
        found = self._collected()
        if self._end.inner is not None and not self._tried_head:
            self._tried_head = True
            text = "".join(self._pieces)
            head = _HEAD.match(text)
            if head is not None and _loaded(head[1]) in self._names:
                self._begin_call(_loaded(head[1]))
                self._held = text[head.end() :] + self._held
                self._end, self._state, self.in_call = End(), self._arguments, True
                return True
        if found is None:
            return False
        text, is_whole = found
        call = self._call_of(_loaded(text)) if is_whole else None
        if call is None:
            return self._no_call(text)
        self._begin_call(call[0])
        self._add_arguments(json.dumps(call[1], ensure_ascii=False))
        self._state = self._close
        return True

    def _no_call(self, text: str) -> bool:
        """Return to answer text from `text`, which was searched in vain for a call, and the text in front of it."""
        self._in_vain += len(text)
        self._say(self._before)
        if self._in_vain <= MOST_SEARCHES * (self._read - len(self._held)):
            self._held = text + self._held
        else:
            self._say(text)
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
        if self._held[:end]:
            self._add_arguments(self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self._begin_collecting("", End(depth=1))
        self.in_call, self._state = False, self._rest
        return True

    def _rest(self) -> bool:
        """State after a call's arguments: leave out the end of the call's object, perhaps with more members.

        If the object is not closed, the text behind the arguments is answer text.
        """
        if not self._pieces:
            text = self._without_space()
            if not text and not self._final:
                return False
            if text[:1] in ("}", ","):
                self._before = self._taken_space()
            else:
                self._state = self._close
                return True
        found = self._collected()
        if found is None:
            return False
        text, is_whole = found
        if not is_whole or _loaded('{"": 0' + text) is None:
            return self._no_call(text)
        self._state = self._close
        return True

    def _close(self) -> bool:
        """State after a call's object: look for the next call, or return to answer text."""
        text = self._without_space(_SEPARATORS)
        if text.startswith("{"):
            self._begin_object(self._taken_space())
            return True
        if not self._final and any(marker.startswith(text) for marker in self._markers):
            return False
        between = self._taken_space()
        if text and not text.startswith(self._markers):
            self._held = between + text
        self._state = self._open
        return True


class HermesReader(_JsonReader):
    """Reads `<tool_call>{"name": …, "arguments": …}</tool_call>`, anywhere in the answer, any number of times.

    Several calls may stand between the markers. The closing marker may be missing.
    """

    markers = HERMES_MARKERS
    takes_none = True

    def _answer(self) -> bool:
        return self._open()


class LlamaReader(_JsonReader):
    """Reads `{"name": …, "parameters": …}` at the beginning of an answer, or after `<|python_tag|>` anywhere.

    Further calls may follow, separated by semicolons, commas or white space.
    """

    markers = (PYTHON_TAG,)
    takes_none = False

    def _answer(self) -> bool:
        text = self._without_space()
        if text.startswith("{"):
            self._begin_object(self._taken_space())
        elif self._final or text == PYTHON_TAG or not PYTHON_TAG.startswith(text):
            self._held, self._state = self._taken_space() + text, self._open
        else:
            return False
        return True


def _loaded(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not JSON, is `null`, or is nested too deeply."""
    try:
        return _parsed(text)
    except ValueError:
        return None


# ---------------------------------------------------------------------- calls written as Python


class PythonReader(_CallReader):
    """Reads `[f(a=1), g(b="x")]` at the beginning of an answer. After ```` ```tool_code ````, the square brackets
    may be missing.

    A call is returned once all of it has come. Values are Python literals or JSON.
    """

    _FENCE: ClassVar[str] = "```tool_code"
    _SEPARATORS: ClassVar[re.Pattern[str]] = re.compile(r"[\s,;]*")
    _NAME: ClassVar[re.Pattern[str]] = re.compile(r"[\w.-]*")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._called = ""  # the name of the call whose arguments are being read
        self._closers = ["]", "```"]  # those that may still end the calls

    def _answer(self) -> bool:
        text = self._without_space()
        if text.startswith(("[", self._FENCE)):
            opener = "[" if text.startswith("[") else self._FENCE
            self._before, self._held = self._taken_space() + opener, text.removeprefix(opener)
            self._state = self._name if opener == "[" else self._bracket_of_list
        elif self._FENCE.startswith(text) and not self._final:
            return False
        else:
            self._held, self._state = self._taken_space() + text, self._text
        return True

    def _bracket_of_list(self) -> bool:
        """State after the fence: a square bracket may come."""
        text = self._without_space()
        if text.startswith("["):
            self._before += self._taken_space() + "["
            self._held = text[1:]
        elif not text and not self._final:
            return False
        self._state = self._name
        return True

    def _name(self) -> bool:
        """State where a call may begin: look for a tool's name."""
        text = self._without_space()
        found = self._NAME.match(text)
        assert found is not None, "it matches nothing, too"
        name = found[0]
        if name == text and not self._final and any(each.startswith(name) for each in self._names):
            return False
        if name not in self._names:
            return self._no_call("")
        self._called, self._held = name, text[len(name) :]
        self._before += self._taken_space() + name
        self._state = self._bracket
        return True

    def _bracket(self) -> bool:
        """State after a tool's name: look for the round bracket."""
        text = self._without_space()
        if not text and not self._final:
            return False
        if not text.startswith("("):
            return self._no_call("")
        self._held = text[1:]
        self._begin_collecting(self._before + self._taken_space() + "(", End(depth=1, in_python=True))
        self._state = self._call
        return True

    def _call(self) -> bool:
        """State after a call's opening bracket: wait for the closing bracket, and read the arguments."""
        found = self._collected()
        if found is None:
            return False
        text, is_whole = found
        arguments = self._values(text[:-1]) if is_whole and text.endswith(")") else None
        if arguments is None:
            return self._no_call(text)
        self._begin_call(self._called)
        self._add_arguments(json.dumps(arguments, ensure_ascii=False))
        self._before, self._state = "", self._next
        return True

    def _values(self, text: str) -> dict[str, Any] | None:
        """Return the values of the arguments in `text` by name; None as in `_named_values`."""
        cuts = [-1, *self._end.commas, len(text)]
        arguments = [text[begin + 1 : at] for begin, at in itertools.pairwise(cuts)]
        return _named_values([each for each in arguments if each.strip()])

    def _no_call(self, text: str) -> bool:
        """Return to answer text: all text since the last call is none."""
        self._held = self._before + self._taken_space() + text + self._held
        self._state = self._text
        return True

    def _next(self) -> bool:
        """State after a call: look for another, or for the end of the list."""
        text = self._without_space(self._SEPARATORS)
        if not text and not self._final:
            return False
        self._state = self._name
        if text[:1] in ("", "]", "`"):
            self._taken_space()
            self._state = self._close
        return True

    def _close(self) -> bool:
        """State after the last call: leave out a square bracket and the end of the fence."""
        while self._closers:
            text, closer = self._without_space(), self._closers[0]
            if closer.startswith(text) and text != closer and not self._final:
                return False
            if text.startswith(closer):
                self._taken_space()
                self._held = text.removeprefix(closer)
            del self._closers[0]
        self._held, self._state = self._taken_space() + self._held, self._text
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


#: The least integer with more digits than `json.dumps` writes.
_TOO_LONG = 10**sys.int_info.default_max_str_digits


def _parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON."""
    return _finite(from_json(text, allow_inf_nan=False))


def _finite(value: Any) -> Any:
    """Return a value with the largest float in place of numbers that no float can hold.

    `1e999` is valid in JSON and in Python. It is read as infinity, which JSON cannot express.

    Raises:
        ValueError: the value has an integer with more digits than Python writes.
    """
    match value:
        case int() if abs(value) >= _TOO_LONG:
            raise ValueError("an integer has too many digits")
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
        pass
    try:
        value = _finite(literal_eval(text))
        return from_json(json.dumps(value))  # joins a pair of surrogates, such as '\ud83d\ude00'
    except TypeError as error:  # bytes, sets, complex numbers, a dict as a key
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
        thinking: the prompt ends within a thought (`common.text.dialect.opens_thought`).
    """
    if names and dialect.calls is not None:
        reader = _READERS[dialect.calls]
    elif dialect.thinks:
        reader = PartsReader
    else:
        return None
    return reader(thinks=dialect.thinks, thinking=dialect.thinks and thinking, names=names)
