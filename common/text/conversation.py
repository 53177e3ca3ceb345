"""Conversations in the form that a model's chat template reads.

Some templates read a message's content as a text, others as a list of parts. Some refuse a second system message,
two messages of the user in a row, a second call in one message, or the role `developer`. `Accepts.of` renders short
conversations to find out what a template accepts. `adapted` rewrites a conversation accordingly, so that none of
its words are refused or left out.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError

Message = Mapping[str, Any]
#: The content of a message: a text, or parts such as `{"type": "text", "text": "…"}`.
Content = str | Sequence[Mapping[str, Any]]
#: Renders messages and tools with a template, as they are. Raises InvalidRequestError.
Write = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str]

ROLES = ("system", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")

#: Two texts. Messages with them were read by the template if the rendered conversation has both.
_FIRST, _SECOND = "Needle1", "Needle2"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look for a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "The text."}},
            "required": ["text"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Accepts:
    """What a chat template accepts.

    Attributes:
        texts: the roles whose content may be a text.
        parts: the roles whose content may be a list of parts.
        alone: whether the template shows a system message that no other message follows.
        developers: whether the template names the role `developer`.
        later: the roles, `system` and `developer`, of which the template shows messages after the first message.
        alternating: the roles, `user` and `assistant`, of which the template shows a message, but not two in a row.
        one_call_each: whether the template shows one call in a message, and refuses or drops a second one.
        argument_texts: whether the template reads a call's arguments as a JSON text, and not as an object.
    """

    texts: frozenset[str]
    parts: frozenset[str]
    alone: bool
    developers: bool
    later: frozenset[str]
    alternating: frozenset[str]
    one_call_each: bool
    argument_texts: bool

    @classmethod
    def of(cls, source: str, write: Write) -> Accepts:
        """Return what a template accepts, found by rendering short conversations.

        Args:
            source: the template's program.
            write: renders messages with it.
        """
        always = None
        try:
            write(_talk("user", _text), None)
        except InvalidRequestError:  # perhaps it is for conversations with tools alone
            always = [_TOOL]

        def shown(messages: Sequence[Message]) -> str | None:
            """Return the text from the first needle to the second; None if the template does not show both."""
            try:
                text = write(messages, [_TOOL] if messages[-1]["role"] == "tool" else always)
            except InvalidRequestError:
                return None
            first, second = text.find(_FIRST), text.find(_SECOND)
            return text[first:second] if min(first, second) >= 0 else None

        def taken(content: Callable[..., Content]) -> frozenset[str]:
            """Return the roles whose content may have this form."""
            between = {role: shown(_talk(role, content)) for role in ROLES}
            # A template that does not read lists may write them down, as JSON or as Python.
            return frozenset(
                role for role, text in between.items() if text is not None and "type" not in text
            )

        one, two = (_FIRST + _SECOND,), (_FIRST, _SECOND)
        takes_objects = shown(_calls(*one, as_text=False)) is not None
        takes_texts = not takes_objects and shown(_calls(*one, as_text=True)) is not None
        takes_two = shown(_calls(*two, as_text=takes_texts)) is not None
        texts, parts = taken(_text), taken(_parts)
        return cls(
            texts=texts,
            parts=parts,
            alone=any(shown(_talk("system", content)[:1]) is not None for content in (_text, _parts)),
            developers=re.search("""['"]developer['"]""", source) is not None,
            later=frozenset(role for role in SYSTEM_ROLES if shown(_later(role)) is not None),
            alternating=frozenset(
                role
                for role in {"user", "assistant"} & (texts | parts)  # it may fail on any conversation
                if all(shown(_in_a_row(role, content)) is None for content in (_text, _parts))
            ),
            one_call_each=(takes_objects or takes_texts) and not takes_two,
            argument_texts=takes_texts,
        )


def joined(content: Content) -> str:
    """Return the text of a message's content: the text itself, or the texts of its parts with nothing between."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def continues(
    role: str, has_calls: bool, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> bool:
    """Return whether the model continues the last message of a conversation, instead of beginning one of its own.

    If neither option is given, it continues an assistant's message without calls, as with llama.cpp's server.

    Args:
        role: the role of the last message.
        has_calls: whether the last message has calls.
        add_generation_prompt, continue_final_message: as for `ChatTemplate.render`.
    """
    if continue_final_message is not None or add_generation_prompt is not None:
        return bool(continue_final_message)
    return role == "assistant" and not has_calls


def adapted(messages: Sequence[Message], accepts: Accepts) -> list[dict[str, Any]]:
    """Return a conversation as a template with the properties `accepts` reads it.

    A developer's message becomes a system message, unless the template names that role. It joins the system message
    before it. If the template does not show later messages of its role, it joins the first message, as do later
    system messages. If the template shows no system message, its text begins the user's first message, as in
    llama.cpp's server. If it shows none without another message behind it, a system message alone is the user's. If
    the template does not show two messages of the user in a row, they become one, as in Anthropic's API. So do
    those of the assistant, except for messages with calls. Where a message has more calls than the template shows,
    each call gets a message, followed by its result.
    """
    told = _with_joined(messages, accepts)
    if accepts.one_call_each:
        told = _with_one_call_each(told)
    return [_in_form(message, accepts) for message in told]


def _with_joined(messages: Sequence[Message], accepts: Accepts) -> list[Message]:
    groups: list[list[Message]] = []  # the messages of each group become one message
    for message in messages:
        is_developer = message["role"] == "developer" and not accepts.developers
        if is_developer:
            message = {**message, "role": "system"}
        role = message["role"]
        if groups and role in accepts.alternating and _can_be_one(groups[-1][-1], message):
            groups[-1].append(message)
        elif not groups or role not in SYSTEM_ROLES:
            groups.append([message])
        elif role not in accepts.later:
            if groups[0][0]["role"] not in SYSTEM_ROLES:
                groups.insert(0, [])
            groups[0].append(message)
        elif is_developer and groups[-1][0]["role"] == "system":
            groups[-1].append(message)
        else:
            groups.append([message])
    shown = accepts.texts | accepts.parts  # nothing, if the template fails on every trial
    is_shown = "system" in shown and (accepts.alone or len(groups) > 1)
    if groups and groups[0][0]["role"] == "system" and "user" in shown and not is_shown:
        said: list[Message] = [{"role": "user", "content": each["content"]} for each in groups.pop(0)]
        if not groups or groups[0][0]["role"] != "user":
            groups.insert(0, [])
        groups[0][:0] = said
    return [group[0] if len(group) == 1 else _one_of(group) for group in groups]


def _can_be_one(message: Message, following: Message) -> bool:
    has_calls = message.get("tool_calls") or following.get("tool_calls")
    return message["role"] == following["role"] and not has_calls


def _one_of(group: Sequence[Message]) -> Message:
    """Return a message with the texts and thoughts of several. The other fields are those of the first message that
    has them."""
    told: dict[str, Any] = {}
    for message in reversed(group):
        told |= message
    for field in {"content", "reasoning_content"} & told.keys():
        told[field] = "\n\n".join(filter(None, (joined(each.get(field, "")) for each in group)))
    return told


def _with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    told: list[Message] = []
    following = iter([*messages, None])
    message = next(following)
    while message is not None:
        calls = message.get("tool_calls") or ()
        turn, message = message, next(following)
        if len(calls) < 2:
            told.append(turn)
            continue
        results: dict[str, list[Message]] = {}
        while message is not None and message["role"] == "tool":
            results.setdefault(message.get("tool_call_id", ""), []).append(message)
            message = next(following)
        for number, call in enumerate(calls):
            begun = {"role": "assistant", "content": ""} if number else turn
            told += [{**begun, "tool_calls": [call]}, *results.pop(call["id"], ())]
        told += itertools.chain.from_iterable(results.values())  # results of other calls
    return told


def _in_form(message: Message, accepts: Accepts) -> dict[str, Any]:
    told, content = dict(message), message["content"]
    role = "system" if message["role"] == "developer" else message["role"]
    if isinstance(content, str):
        if role in accepts.parts and role not in accepts.texts:
            told["content"] = _parts(content)
    elif role not in accepts.parts:
        told["content"] = joined(content)
    if accepts.argument_texts and message.get("tool_calls"):
        told["tool_calls"] = [_with_argument_text(call) for call in message["tool_calls"]]
    return told


def _with_argument_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


# ---------------------------------------------------------------------- conversations that a template is tried with


def _text(*texts: str) -> Content:
    return "".join(texts)


def _parts(*texts: str) -> Content:
    return [{"type": "text", "text": text} for text in texts]


def _talk(role: str, content: Callable[..., Content]) -> list[Message]:
    """Return a short conversation in which a message of `role` has both needles."""
    asked: Message = {"role": "user", "content": content("?")}
    message: Message = {"role": role, "content": content(_FIRST, _SECOND)}
    if role == "system":
        return [message, asked]
    if role == "tool":
        called = {"role": "assistant", "content": content(""), "tool_calls": [_call("", as_text=False)]}
        return [asked, called, {**message, "tool_call_id": "call00000", "name": "look"}]
    return [message] if role == "user" else [asked, message]


def _calls(*texts: str, as_text: bool) -> list[Message]:
    """Return a conversation with a message that has a call for each text. The texts are in the arguments."""
    calls = [_call(text, as_text=as_text, number=number) for number, text in enumerate(texts)]
    results = [
        {"role": "tool", "content": "Found.", "tool_call_id": call["id"], "name": "look"} for call in calls
    ]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    return [{"role": "user", "content": "?"}, called, *results]


def _in_a_row(role: str, content: Callable[..., Content]) -> list[Message]:
    """Return a conversation that ends with two messages of `role`."""
    told: list[Message] = [{"role": role, "content": content(needle)} for needle in (_FIRST, _SECOND)]
    return told if role == "user" else [{"role": "user", "content": content("?")}, *told]


def _later(role: str) -> list[Message]:
    """Return a conversation in which a message of `role` comes first, and another one later."""
    asked = {"role": "user", "content": "?"}
    first, second = ({"role": role, "content": needle} for needle in (_FIRST, _SECOND))
    return [first, asked, {"role": "assistant", "content": "!"}, second, asked]


def _call(text: str, *, as_text: bool, number: int = 0) -> dict[str, Any]:
    arguments = {"text": text}
    function = {"name": "look", "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}
