"""Parts of an answer: a model's text, cut into answer, reasoning and tool calls as it arrives.

A model writes its thoughts and its calls of tools into the same text as its answer, between markers:

```text
<think>               Hermes, Qwen 2.5, Qwen 3    <tool_call>
I need the weather.                               {"name": "weather", "arguments": {"city": "Rome"}}
</think>                                          </tool_call>
I will look it up.    Llama 3                     {"name": "weather", "parameters": {"city": "Rome"}}
                      Gemma, written as Python    [weather(city="Rome")]
```

A reader takes the text in deltas (the new text of one output each) and returns typed parts. It holds text back
only while that text may still become a marker or a call. Text that only looks like a call, or calls none of the
request's tools, stays answer text. White space next to a marker belongs to the marker.

The wire formats consume the parts. Completions have no reader and pay nothing, and so do requests without tools on
a model without thoughts.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.text.dialect import THOUGHT_MARKERS

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


class PartsReader:
    """Cuts the text of one choice into thoughts, answer text and (in the subclasses of `call_readers`) tool calls.

    The reader is a state machine. A state is a method that consumes as much of the held text as it can, and may
    set the next state. It returns True if the reader should go on at once with the state that is set. A state that
    returns False leaves no more text held than a marker is long, so the work grows with the text and not with its
    square.

    Args:
        thinks: the model may think, so the text may begin with `<think>`.
        thinking: the prompt has opened `<think>` already, so the text begins inside a thought.
        names: names of the tools that may be called; a call of another name stays text.

    Attributes:
        calls: number of calls so far.
        in_call: True while a call's arguments are returned in pieces and their end has not come.
        thinks: True if the argument `thinks` or `thinking` is.
        thoughts: number of deltas from the beginning of the text to the end of the thoughts; 0 if none began.
    """

    def __init__(self, *, thinks: bool = False, thinking: bool = False, names: Collection[str] = ()) -> None:
        self.thinks = thinks or thinking
        self.thoughts = 0
        self.calls = 0
        self.in_call = False
        self._deltas = 0
        self._names = frozenset(names)
        self._held = ""  # text that no state has consumed yet
        self._space: list[
            str
        ] = []  # consumed white space, which belongs to the answer unless a marker follows
        self._behind_call = False
        self._parts: list[Part] = []
        self._final = False
        self._state: Callable[[], bool] = self._begin_thought
        if not thinking:
            self._state = self._begin if thinks else self._answer

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
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return the parts in the text that is still held. Call this once, after the last delta."""
        self._final = True
        return self.add("")

    # ------------------------------------------------------------------ thoughts

    def _begin(self) -> bool:
        text, marker = self._without_space(), THOUGHT_MARKERS[0]
        if text.startswith(marker):
            self._taken_space()
            self._held, self._state = text.removeprefix(marker), self._begin_thought
            return True
        if marker.startswith(text) and not self._final:
            return False
        self._held, self._state = self._taken_space() + text, self._answer
        return True

    def _begin_thought(self) -> bool:
        self.thoughts = self._deltas
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._thought
        return bool(self._held)

    def _thought(self) -> bool:
        self.thoughts = self._deltas
        thought, marker = self._text_before(THOUGHT_MARKERS[1])
        if thought:
            self._parts.append(ReasoningPart(thought))
        if marker:
            self._taken_space()
            self._state = self._end_thought
        return bool(marker)

    def _end_thought(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._answer
        return bool(self._held)

    # ------------------------------------------------------------------ the answer

    def _answer(self) -> bool:
        """State after the thoughts: all of the text belongs to the answer. Subclasses look for calls instead."""
        return self._text()

    def _text(self) -> bool:
        """State in answer text that no call follows."""
        self._say(self._held)
        self._held = ""
        return False

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

    def _without_space(self, space: re.Pattern[str] = _SPACE) -> str:
        """Move what `space` matches from the beginning of the held text to the consumed white space. Return the
        rest of the held text."""
        found = space.match(self._held)
        if found is not None and found.end():
            self._space.append(found[0])
            self._held = self._held[found.end() :]
        return self._held

    def _taken_space(self) -> str:
        """Return the consumed white space, and forget it."""
        space, self._space = "".join(self._space), []
        return space

    def _text_before(self, *markers: str) -> tuple[str, str]:
        """Consume the held text up to and including the first of `markers`.

        Returns the text that is certain, and the marker: "" if none has come. White space at the end of the text is
        not certain, since it belongs to a marker that may follow, and an end that may become a marker stays held.
        In `finish`, all of the text is certain.
        """
        held, at, marker = self._held, len(self._held), ""
        places = [(place, each) for each in markers if (place := held.find(each)) >= 0]
        if places:
            at, marker = min(places)
        elif not self._final:
            longest = min(max(map(len, markers)) - 1, len(held))
            ends = (n for n in range(longest, 0, -1) if any(m.startswith(held[-n:]) for m in markers))
            at -= next(ends, 0)
        self._held = held[at + len(marker) :]
        if self._final and not marker:
            return self._taken_space() + held, ""
        text = held[:at].rstrip()
        before = self._taken_space() if text else ""
        self._space.append(held[len(text) : at])
        return before + text, marker
