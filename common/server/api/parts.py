"""Parts of an answer: a model's text, cut into answer, reasoning and tool calls as it arrives.

A model writes its thoughts and its calls of tools into the same text as its answer, between markers:

```text
<think>               Hermes, Qwen 2.5, Qwen 3    <tool_call>
I need the weather.                               {"name": "weather", "arguments": {"city": "Rome"}}
</think>                                          </tool_call>
I will look it up.    Llama 3                     {"name": "weather", "parameters": {"city": "Rome"}}
                      Mistral                     [TOOL_CALLS]weather[ARGS]{"city": "Rome"}
                      Gemma, written as Python    [weather(city="Rome")]
```

A reader takes the text in deltas (the new text of one output each) and returns typed parts. It holds text back
only while that text may still become a marker or a call. Text that only looks like a call, or calls none of the
request's tools, stays answer text. White space next to a marker belongs to the marker.

The wire formats consume the parts. Completions have no reader and pay nothing, and so do requests without tools on
a model without thoughts.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from ast import literal_eval
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic_core import from_json

from common.text.dialect import (
    ARGS,
    CALL_ID,
    HERMES_MARKERS,
    MISTRAL_MARKER,
    PYTHON_TAG,
    THOUGHT_MARKERS,
    CallSyntax,
    Dialect,
)

T = TypeVar("T")

#: A generator that reads text. It yields when it needs the next delta, and returns what it has read.
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """The beginning of a tool call. `index` counts the calls of a choice from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """A piece of a call's arguments. The pieces of a call join to JSON text, unless the model makes a mistake or
    breaks off."""

    index: int
    text: str


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart


class Brackets:
    """Finds where a bracket closes, in text that comes in pieces. Each character is read once.

    Brackets in strings do not count. In Python, strings may have single quotes, and brackets may be round.
    """

    def __init__(self, depth: int = 0, *, python: bool = False) -> None:
        self.depth = depth  # number of open brackets
        self.commas: list[int] = []  # right inside the outermost bracket: indices in all pieces joined
        self._python = python
        self._quotes, self._openers, self._closers = ("\"'", "{[(", "}])") if python else ('"', "{[", "}]")
        self._read = 0  # characters of earlier pieces
        self._quote = ""  # opened the string that is being read; "": outside of strings
        self._escaped = False

    def find(self, piece: str, *, to_inner: bool = False) -> int | None:
        """Read the next piece. Return the length of its beginning that ends with the closing bracket; None if that
        bracket has not come. With `to_inner`, the beginning also ends before a bracket inside the outermost one.

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
                if to_inner and self.depth == 1:
                    return at
                self.depth += 1
            elif character in self._closers:
                self.depth -= 1
                if self.depth == 0:
                    return at + 1
            elif character == "," and self.depth == 1:
                self.commas.append(self._read + at)
            elif character == "<" and not self._python:
                return at
        self._read += len(piece)
        return None


class PartsReader:
    """Cuts the text of one choice into thoughts, answer text and (in its subclasses) tool calls.

    The text is read by one generator, `_read`, which waits for the next delta wherever it cannot go on. While it
    waits, no more text is held than a marker is long, so the work grows with the text and not with its square.

    Args:
        thinks: the model may think, so the text may begin with `<think>`.
        thinking: the prompt has opened `<think>` already, so the text begins inside a thought.
        names: names of the tools that may be called; a call of another name stays text.
    """

    def __init__(self, *, thinks: bool = False, thinking: bool = False, names: Collection[str] = ()) -> None:
        self.thinks = thinks or thinking
        self.calls = 0  # number of calls so far
        self.in_call = False  # a call's arguments are returned in pieces, and their end has not come
        self._names = frozenset(names)
        self._held = ""  # text that was not read yet
        self._final = False  # no delta comes any more
        self._deltas = 0
        self._in_thought = False
        self._thoughts = 0  # see `thoughts`, once the thoughts have ended
        self._behind_call = False
        self._parts: list[Part] = []
        self._reading = self._read(thinking)

    @property
    def thoughts(self) -> int:
        """Number of deltas from the beginning of the text to the end of the thoughts; 0 if none began."""
        return self._deltas if self._in_thought else self._thoughts

    @property
    def may_call(self) -> bool:
        """True if the text may have calls: the request has tools that may be called."""
        return bool(self._names)

    @property
    def has_called(self) -> bool:
        """True if the answer has calls, and the arguments of all of them are complete."""
        return self.calls > 0 and not self.in_call

    def add(self, delta: str) -> list[Part]:
        """Return the parts that are certain now that the next piece of text, `delta`, has come."""
        self._held += delta
        self._deltas += not self._final
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return the parts in the text that is still held. Call this once, after the last delta."""
        self._final = True
        return self.add("")

    # ------------------------------------------------------------------ the text, from its beginning to its end

    def _read(self, thinking: bool) -> Reading[None]:
        """Read the whole text: a thought, if there is one, then the answer."""
        if self.thinks and not thinking:
            space = yield from self._space()
            marker = yield from self._next(THOUGHT_MARKERS[0])
            self._take(len(marker))
            thinking = bool(marker)
            self._give_back("" if marker else space)
        if thinking:
            self._in_thought = True
            yield from self._space()
            yield from self._say_until(
                lambda text: self._parts.append(ReasoningPart(text)), THOUGHT_MARKERS[1]
            )
            self._in_thought, self._thoughts = False, self._deltas
            yield from self._space()
        yield from self._answer()

    def _answer(self) -> Reading[None]:
        """Read the text behind the thoughts: all of it is the answer. Subclasses look for calls, too."""
        while True:
            self._say(self._take())
            if self._final:
                return
            yield

    # ------------------------------------------------------------------ parts

    def _say(self, text: str) -> None:
        """Add `text` to the parts as answer text. White space after a call is left out."""
        if self._behind_call:
            text = text.lstrip()
        if text:
            self._parts.append(TextPart(text))
            self._behind_call = False

    def _begin_call(self, name: str) -> None:
        self._parts.append(CallPart(self.calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.calls += 1
        self._behind_call = True

    def _add_arguments(self, text: str) -> None:
        self._parts.append(ArgumentsPart(self.calls - 1, text))

    # ------------------------------------------------------------------ held text

    def _take(self, length: int | None = None) -> str:
        """Remove so many characters from the held text and return them. None: all of it."""
        taken = self._held[:length]
        self._held = self._held[len(taken) :]
        return taken

    def _give_back(self, text: str) -> None:
        """Put text that was taken in front of the held text again."""
        self._held = text + self._held

    def _space(self, space: re.Pattern[str] = _SPACE) -> Reading[str]:
        """Take all that `space` matches, and return it once another character or the end of the text has come."""
        taken = []
        while True:
            found = space.match(self._held)
            taken.append(self._take(found.end() if found else 0))
            if self._held or self._final:
                return "".join(taken)
            yield

    def _next(self, *markers: str) -> Reading[str]:
        """Return the longest of `markers` that the held text begins with, once that is certain; "": none. The
        marker stays held."""
        while not self._final and any(
            marker.startswith(self._held) and marker != self._held for marker in markers
        ):
            yield
        return max((each for each in markers if self._held.startswith(each)), key=len, default="")

    def _say_until(self, say: Callable[[str], None], *markers: str) -> Reading[tuple[str, str]]:
        """Take text up to and including the first of `markers`, and pass the text before it to `say` in pieces.

        Text that may become a marker waits, and so does white space, which belongs to a marker that follows it.
        Returns the white space before the marker, and the marker; both are empty if none comes.
        """
        spaces: list[str] = []
        while True:
            held = self._held
            at, marker = min(
                ((held.find(each), each) for each in markers if each in held), default=(len(held), "")
            )
            if not marker and not self._final:
                at -= _begun(held, markers)
            text = held[:at] if self._final and not marker else held[:at].rstrip()
            if text:
                say("".join(spaces) + text)
                spaces.clear()
            spaces.append(held[len(text) : at])
            self._held = held[at + len(marker) :]
            if marker:
                return "".join(spaces), marker
            if self._final:
                if rest := "".join(spaces):
                    say(rest)
                return "", ""
            yield

    def _bracketed(
        self, brackets: Brackets, take: Callable[[str], None], *, to_inner: bool = False
    ) -> Reading[None]:
        """Pass text to `take`, in pieces, up to where `brackets` finds its end."""
        while True:
            end = brackets.find(self._held, to_inner=to_inner)
            if piece := self._take(end):
                take(piece)
            if end is not None or self._final:
                return
            yield


def _begun(text: str, markers: Collection[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    longest = min(max(map(len, markers)) - 1, len(text))
    ends = (n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in markers))
    return next(ends, 0)


# ---------------------------------------------------------------------- calls written as JSON

#: The beginning of a call whose name comes first, up to its arguments, so that these can be streamed.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')

#: White space before a call's object. Some models write a list of calls.
_LIST = re.compile(r"[\s\[]*")

#: White space and separators behind a call's object.
_SEPARATORS = re.compile(r"[\s,;\]]*")

#: What may stand between a name and arguments that are not in one object.
_BEHIND_NAME = re.compile(rf"(\s*{re.escape(CALL_ID)}\s*\w+)?\s*({re.escape(ARGS)})?\s*")


class _JsonReader(PartsReader):
    """Reads calls that are JSON objects with a name and arguments."""

    markers: ClassVar[tuple[str, ...]]  # before calls and, if there is one, behind them
    takes_none: ClassVar[bool]  # whether a call may lack the field of its arguments

    def _answer(self) -> Reading[None]:
        opener = self.markers[0]
        called = False  # then the marker behind calls may come
        while True:
            markers = self.markers if called else (opener,)
            space, marker = yield from self._say_until(self._say, *markers)
            if not marker:
                return
            called = marker == opener and (yield from self._calls(space + marker))

    def _calls(self, before: str) -> Reading[bool]:
        """Read calls and the separators between them. Returns whether there was any: if not, the text `before` them
        is answer text."""
        earlier = self.calls
        before += yield from self._space(_LIST)
        lists = before.count("[")  # as many `]` behind the calls belong to them, not to the answer's text
        while (yield from self._call(before)):
            before = yield from self._space(_SEPARATORS)
            if not self._held.startswith("{"):
                marker = yield from self._next(*self.markers)
                if not marker and any(each.startswith(self._held) for each in self.markers):
                    self._take()  # a marker that the answer's end cut off
                elif not marker:
                    self._give_back(before.replace("]", "", lists))
                break
        return self.calls > earlier

    def _call(self, before: str) -> Reading[bool]:
        """Read a call, with `before` in front of it. Returns whether another call may follow it."""
        before += yield from self._space(_LIST)
        if not self._held.startswith("{"):
            self._say(before)
            return False
        pieces: list[str] = []
        brackets = Brackets()
        yield from self._bracketed(brackets, pieces.append, to_inner=True)
        head = _HEAD.fullmatch("".join(pieces))
        if head and self._held.startswith("{") and _loaded(head[1]) in self._names:
            return (yield from self._stream(_loaded(head[1])))
        yield from self._bracketed(brackets, pieces.append)
        text = "".join(pieces)
        call = None if brackets.depth else self._call_of(_loaded(text))
        if call is None:
            self._say(before + text)
            return False
        name, arguments = call
        self._begin_call(name)
        self._add_arguments(arguments)
        return True

    def _stream(self, name: str) -> Reading[bool]:
        """Read a call from its arguments on, and return these piece by piece. Returns as `_call`.

        The rest of the call's object is left out, unless the object is not closed: then it is answer text.
        """
        self._begin_call(name)
        self.in_call = True
        arguments = Brackets()
        yield from self._bracketed(arguments, self._add_arguments)
        self.in_call = arguments.depth > 0 and not self._held  # not if a `<` ends them
        space = yield from self._space()
        if not self._held.startswith(("}", ",")):
            return True
        pieces: list[str] = []
        rest = Brackets(depth=1)
        yield from self._bracketed(rest, pieces.append)
        text = "".join(pieces)
        if rest.depth or _loaded('{"": 0' + text) is None:
            self._say(space + text)
            return False
        return True

    def _call_of(self, value: Any) -> tuple[str, str] | None:
        """Return the name and the arguments of a call; None if `value` is no call of one of the tools."""
        match value:
            case {"name": str(name)} if name in self._names:
                arguments = value.get("arguments", value.get("parameters"))
            case _:
                return None
        if arguments in (None, "") and self.takes_none:
            arguments = {}
        elif isinstance(arguments, str):
            arguments = _loaded(arguments)
        written = _written(arguments)
        return None if written is None else (name, written)


class HermesReader(_JsonReader):
    """Reads `<tool_call>{"name": …, "arguments": …}</tool_call>`, anywhere in the answer, any number of times.

    Several calls may stand between the markers. The closing marker may be missing.
    """

    markers = HERMES_MARKERS
    takes_none = True


class LlamaReader(_JsonReader):
    """Reads `{"name": …, "parameters": …}` at the beginning of an answer, or after `<|python_tag|>` anywhere.

    Further calls may follow, separated by semicolons, commas or white space. Calls may stand in a list.
    """

    markers = (PYTHON_TAG,)
    takes_none = False

    def _answer(self) -> Reading[None]:
        space = yield from self._space()
        if self._held.startswith(("{", "[")):
            yield from self._calls(space)
        else:
            self._give_back(space)
        yield from super()._answer()


class MistralReader(_JsonReader):
    """Reads `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{…}` for each call.

    Between name and arguments, `[CALL_ID]` and an id may stand.
    """

    markers = (MISTRAL_MARKER,)
    takes_none = True

    def _calls(self, before: str) -> Reading[bool]:
        before += yield from self._space()
        name = yield from self._next(*self._names)
        if not name:
            return (yield from super()._calls(before))
        while "{" not in self._held and MISTRAL_MARKER not in self._held and not self._final:
            yield
        head, brace, rest = self._held.partition("{")
        if not brace or not _BEHIND_NAME.fullmatch(head.removeprefix(name)):
            self._say(before)
            return False
        self._held = brace + rest
        return (yield from self._stream(name))


# ---------------------------------------------------------------------- calls written as Python


class PythonReader(PartsReader):
    """Reads `[f(a=1), g(b="x")]` at the beginning of an answer. After ```` ```tool_code ````, the square brackets
    may be missing.

    A call is returned once all of it has come. Values are Python literals or JSON.
    """

    _FENCE: ClassVar[str] = "```tool_code"
    _SEPARATORS: ClassVar[re.Pattern[str]] = re.compile(r"[\s,;]*")

    def _answer(self) -> Reading[None]:
        before = yield from self._space()
        opener = yield from self._next("[", self._FENCE)
        before += self._take(len(opener))
        if opener == self._FENCE:
            before += yield from self._space()
            before += self._take(1 if self._held.startswith("[") else 0)
        if opener:
            before = yield from self._calls(before)
        self._give_back(before)
        yield from super()._answer()

    def _calls(self, before: str) -> Reading[str]:
        """Read calls, with `before` in front of them, and the end of their list. Returns text that turned out to be
        no call."""
        text = before
        while True:
            text += yield from self._space()
            name = yield from self._next(*self._names)
            text += self._take(len(name))
            text += yield from self._space()
            if not name or not self._held.startswith("("):
                return text
            text += self._take(1)
            brackets, pieces = Brackets(depth=1, python=True), list[str]()
            yield from self._bracketed(brackets, pieces.append)
            inside = "".join(pieces)
            is_call = brackets.depth == 0 and inside.endswith(")")
            arguments = _written(_named_values(inside[:-1], brackets.commas)) if is_call else None
            if arguments is None:
                return text + inside
            self._begin_call(name)
            self._add_arguments(arguments)
            text = yield from self._space(self._SEPARATORS)
            if self._held[:1] in ("", "]", "`"):
                break
        for closer in ("]", "```"):
            yield from self._space()
            self._take(len((yield from self._next(closer))))
        return ""


def _named_values(text: str, commas: list[int]) -> dict[str, Any] | None:
    """Return the values of the arguments `name=value` and `**{"name": value}` by name. `commas` are the indices of
    the commas between them. None: an argument has another form, or no value.
    """
    values: dict[str, Any] = {}
    for begin, end in itertools.pairwise([-1, *commas, len(text)]):
        argument = text[begin + 1 : end].strip()
        unpacked = argument.startswith("**")
        name, equals, written = ("", "", argument[2:]) if unpacked else argument.partition("=")
        if not argument:
            continue
        try:
            value = _value(written.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if unpacked and isinstance(value, dict):
            values |= value
        elif equals and name.strip().isidentifier():
            values[name.strip()] = value
        else:
            return None
    return values


# ---------------------------------------------------------------------- values


def _written(arguments: Any) -> str | None:
    """Return arguments as JSON; None if they are no object, or have a number that JSON cannot express."""
    try:
        return (
            json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            if isinstance(arguments, dict)
            else None
        )
    except ValueError:
        return None


def _loaded(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not JSON, is `null`, or is nested too deeply."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def _value(text: str) -> Any:
    """Return the value of a JSON text or a Python literal.

    Raises:
        ValueError, SyntaxError: the text is neither, or is a literal that JSON cannot hold.
        MemoryError, RecursionError: the text is nested too deeply.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        pass
    try:
        return from_json(json.dumps(literal_eval(text)))  # joins a pair of surrogates, such as '\ud83d\ude00'
    except TypeError as error:  # bytes, sets, complex numbers, a dict as a key
        raise ValueError(str(error)) from None


# ---------------------------------------------------------------------- the choice of a reader

_READERS: dict[CallSyntax, type[PartsReader]] = {
    "hermes": HermesReader,
    "llama3_json": LlamaReader,
    "mistral": MistralReader,
    "pythonic": PythonReader,
}


def new_reader(
    dialect: Dialect, *, names: Collection[str] = (), thinking: bool = False
) -> PartsReader | None:
    """Return a reader of one choice's text, or None if all of the text is the answer.

    `names` are those of the tools that may be called. `thinking`: the prompt ends within a thought.
    """
    if names and dialect.calls is not None:
        reader = _READERS[dialect.calls]
    elif dialect.thinks:
        reader = PartsReader
    else:
        return None
    return reader(thinks=dialect.thinks, thinking=dialect.thinks and thinking, names=names)
