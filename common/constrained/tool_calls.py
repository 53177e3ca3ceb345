"""Tool calls: the functions that a request names, their description for the model, and the grammar of its calls.

```text
functions ──┬─> chat template: `tools`, if it knows tools         ─┐
            │   messages: `told_in_messages`, if it does not      ─┴─> the prompt
            └─> `ToolUse.grammar`: text, or calls that follow their schemas ──> masks of the next token
```

A call is written in the syntax of the model's dialect (`common.text.dialect`). In the grammar of a call, the
JSON Schema of its arguments usually stands between the fixed texts of that syntax. (In `pythonic`, each argument
has one.)

| syntax | one call | several |
| --- | --- | --- |
| `hermes` | `<tool_call>`, `{"name": "f", "arguments": {"a": 1}}`, `</tool_call>`: a line each | a line each |
| `llama3_json` | `{"name": "f", "parameters": {"a": 1}}`, perhaps after `<\\|python_tag\\|>` | `; ` between them |
| `mistral` | `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]` | `, ` between them, inside the brackets |
| | `[TOOL_CALLS]f[ARGS]{"a": 1}`, if the model has the token `[ARGS]` | nothing between them |
| `pythonic` | `[f(a=1)]` | `, ` between them, inside the brackets |
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from common.constrained.grammar import Grammar, check_length
from common.constrained.schemas import LABELS, asked, closed_arguments, objects_in, size
from common.constrained.trial import JSON_OPTIONS
from common.errors import InvalidGrammarError
from common.text.dialect import (
    ARGS,
    CALL_MARKERS,
    HERMES_MARKERS,
    MISTRAL_MARKER,
    PYTHON_TAG,
    THOUGHT_MARKERS,
    CallSyntax,
    Dialect,
)

#: Most calls in one constrained answer. Small models do not know when to stop.
MAX_CALLS = 16

#: Most seconds in which the functions of a request are tried one by one, to find those that no grammar can follow.
MOST_TRIALS_S = 2.0

#: The schema of the arguments if a function has no schema, or if its schema need not be followed.
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call.

    Attributes:
        parameters: the JSON Schema of its arguments, which are an object.
        strict: whether the grammar makes the arguments follow the schema in every answer. If False, it does so only
            if the request requires a call.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False

    def as_tool(self) -> dict[str, Any]:
        """Return the function in the form in which chat templates read it: an entry of OpenAI's `tools`."""
        described = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": dict(self.parameters)},
        }


def call_for_template(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of an earlier message in the form in which chat templates read it: as in OpenAI's `tool_calls`,
    but with the arguments as an object.

    The arguments stay a text if they are no JSON object (say, the model broke the call off), are nested too deeply,
    or have a lone surrogate (half of a UTF-16 pair).

    Args:
        call_id: the call's id.
        name: the function's name.
        arguments: the JSON text of the arguments. An empty text means no arguments.
    """
    try:
        value = from_json(arguments or "{}")
    except ValueError:
        value = arguments
    told = value if isinstance(value, dict) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": told}}


def with_short_ids(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages, as chat templates read them, with ids of calls that Mistral's templates accept: nine letters
    and digits. Any other id becomes a hash of it."""

    def short(call_id: str) -> str:
        fits = re.fullmatch("[A-Za-z0-9]{9}", call_id)
        return call_id if fits else hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]

    told = []
    for message in messages:
        plain = dict(message)
        if "tool_calls" in plain:
            plain["tool_calls"] = [{**call, "id": short(call["id"])} for call in plain["tool_calls"]]
        if "tool_call_id" in plain:
            plain["tool_call_id"] = short(plain["tool_call_id"])
        told.append(plain)
    return told


# ---------------------------------------------------------------------- the prompt of a template without tools


def written(syntax: CallSyntax, calls: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of calls in a syntax, as a model of that syntax would generate it.

    `calls` has them as `call_for_template` returns them.
    """
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    if syntax == "hermes":
        opener, closer = HERMES_MARKERS
        objects = ({"name": name, "arguments": arguments} for name, arguments in named)
        return "\n".join(f"{opener}\n{_json(each)}\n{closer}" for each in objects)
    if syntax == "mistral":
        return MISTRAL_MARKER + _json([{"name": name, "arguments": arguments} for name, arguments in named])
    if syntax == "llama3_json":
        return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in named)
    return "[" + ", ".join(f"{name}({_keywords(arguments)})" for name, arguments in named) + "]"


def _keywords(arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return arguments
    if all(name.isidentifier() for name in arguments):
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"**{_json(arguments)}"


_HOW_TO_CALL: dict[CallSyntax, str] = {
    "hermes": "To call a function, answer with a JSON object of its name and arguments within "
    '<tool_call></tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n'
    "</tool_call>\nThe result comes within <tool_response></tool_response> tags.",
    "llama3_json": 'To call a function, answer with nothing but JSON in the format {"name": function name, '
    '"parameters": dictionary of argument name and its value}.',
    "mistral": f"To call functions, answer with nothing but {MISTRAL_MARKER} and a JSON list:\n"
    f'{MISTRAL_MARKER}[{{"name": <function-name>, "arguments": <arguments-object>}}]',
    "pythonic": "To call a function, answer with nothing but "
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)].",
}


def told_in_messages(
    syntax: CallSyntax, messages: Sequence[Mapping[str, Any]], functions: Sequence[Function]
) -> list[dict[str, Any]]:
    """Rewrite a conversation with tools as plain messages, for a chat template that does not support tools.

    The system message describes the functions and how to call one. Calls become text of the assistant's message.
    Consecutive results of calls become one user message.

    Args:
        syntax: the syntax of calls.
        messages: as chat templates read them, with `tool_calls` as `call_for_template` returns them.
        functions: the functions that the system message describes. If empty, it describes none.
    """
    told: list[dict[str, Any]] = []
    for is_result, run in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in run)
            told.append({"role": "user", "content": "\n".join(results)})
            continue
        for message in run:
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            if message.get("tool_calls"):
                calls = written(syntax, message["tool_calls"])
                plain["content"] = "\n".join(filter(None, [message["content"], calls]))
            told.append(plain)
    if functions:
        lines = "\n".join(_json(each.as_tool()) for each in functions)
        text = f"You may call these functions:\n<tools>\n{lines}\n</tools>\n{_HOW_TO_CALL[syntax]}"
        if told and told[0]["role"] in ("system", "developer"):
            told[0]["content"] = f"{told[0]['content']}\n\n{text}"
        else:
            told.insert(0, {"role": "system", "content": text})
    return told


# ---------------------------------------------------------------------- grammars


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        shown: the functions that the prompt describes.
        callable: the functions among `shown` that the answer may call.
        required: whether the answer must consist of calls, one or more.
        parallel: whether one answer may have several calls.
    """

    shown: tuple[Function, ...]
    callable: tuple[Function, ...]
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions that may be called."""
        return frozenset(function.name for function in self.callable)

    @property
    def followed(self) -> tuple[Function, ...]:
        """The functions whose schemas the grammar makes calls follow."""
        return tuple(function for function in self.callable if self.required or function.strict)

    def without_schemas(self, names: Collection[str]) -> ToolUse:
        """Return these tools. Calls of the functions with these names follow no schema, unless one is required."""
        functions = (
            dataclasses.replace(each, strict=each.strict and each.name not in names) for each in self.callable
        )
        return dataclasses.replace(self, callable=tuple(functions))

    def refusals(self, dialect: Dialect, check: Callable[[Grammar], None]) -> dict[str, str]:
        """Return the functions in `followed` whose schema alone no grammar can follow: the reason by name.

        Blocks. After `MOST_TRIALS_S` seconds, the rest of the functions are not tried.

        Args:
            dialect: the model's dialect.
            check: raises InvalidGrammarError for a grammar that cannot be used.
        """
        reasons: dict[str, str] = {}
        until_s = time.monotonic() + MOST_TRIALS_S
        for function in self.followed:
            try:
                grammar = ToolUse((), (function,), required=True).grammar(dialect)
                assert grammar is not None, "a required call has a grammar"
                check(grammar)
            except InvalidGrammarError as error:
                reasons[function.name] = str(error)
            if time.monotonic() > until_s:
                break
        return reasons

    def grammar(
        self, dialect: Dialect, *, thinking: bool = False, otherwise: Mapping[str, Any] | None = None
    ) -> Grammar | None:
        """Return the grammar of the answer; None if any text is allowed, so that no grammar is needed.

        In the grammar, required calls and calls of strict functions follow their schemas. Without `parallel` there
        is one call at most.

        Args:
            dialect: the model's dialect. It must have a syntax of calls.
            thinking: whether the prompt ends within a thought, which the answer continues.
            otherwise: the JSON Schema of an answer that is not a call; None: any text.

        Raises:
            InvalidGrammarError: the grammar would be too long.
        """
        if not self.followed and self.parallel and otherwise is None:
            return None
        check_length(sum(size(function.parameters) for function in self.followed))
        return Grammar.context_free(_Writer(self, dialect, thinking, otherwise).text())


def behind_thought(schema: Mapping[str, Any], dialect: Dialect, *, thinking: bool) -> Grammar:
    """Return the grammar of a thought, followed by an answer in JSON that matches a schema.

    Args:
        schema: the JSON Schema of the answer after the thought.
        dialect: the dialect of a model that writes thoughts.
        thinking: whether the prompt ends within the thought. If False, the thought is optional.
    """
    return Grammar.context_free(_Writer(ToolUse((), ()), dialect, thinking, schema).text())


class _Writer:
    """Writes a grammar in llguidance's form of Lark. In this form, a JSON Schema follows `%json`, and `<[7]>` is
    the token with id 7.

    Each private method returns an expression that matches the text in the method's name, and may add rules that the
    expression needs.

    ```text
    start: thought (opening call (separator call){0,15} closing | free text)
    ```
    """

    def __init__(
        self, use: ToolUse, dialect: Dialect, thinking: bool, otherwise: Mapping[str, Any] | None
    ) -> None:
        self._use = use
        self._dialect = dialect
        self._syntax = dialect.calls
        self._call_marker = None if dialect.calls is None else CALL_MARKERS.get(dialect.calls)
        self._name_first = dialect.calls == "mistral" and ARGS in dialect.special
        self._thinking = thinking
        self._otherwise = otherwise
        self._takes_text = otherwise is None and not use.required
        self._rules: list[str] = ["%llguidance {}", r"ANY: /(.|\n)*/"]

    def text(self) -> str:
        """Return the grammar of an answer: calls or, if the request allows it, text or JSON (`otherwise`)."""
        answers = []
        if self._use.callable:
            calls = [self._call(number, function) for number, function in enumerate(self._use.callable)]
            self._rules.append(f"call: {' | '.join(calls)}")
            answers.append(self._calls())
        if self._otherwise is not None:
            answers.append(_schema(self._otherwise))
        elif self._takes_text:
            answers.append(self._free_text())
        self._rules.append(f"start: {self._thought()} ({' | '.join(answers)})")
        return "\n".join(self._rules)

    def _calls(self) -> str:
        opening, separator, closing = "", '"; "', ""
        if self._call_marker is not None:
            marker = self._marker(self._call_marker)
            opening = self._text_and(self._call_marker) if self._takes_text else marker
            if self._syntax == "hermes":
                separator = rf'"\n" {marker}'
            elif self._name_first:
                separator = marker
            else:
                opening, separator, closing = rf'{opening} " "? "["', '", "', '"]"'
        elif self._syntax == "pythonic":
            opening, separator, closing = '"["', '", "', '"]"'
        elif PYTHON_TAG in self._dialect.special:
            opening = f"{self._marker(PYTHON_TAG)}?"
        more = f"({separator} call){{0,{MAX_CALLS - 1}}}" if self._use.parallel else ""
        return f"{opening} call {more} {closing}"

    def _call(self, number: int, function: Function) -> str:
        """Return an expression for one call of a function, without the opening marker or bracket before it.

        Args:
            number: the function's index, for unique names of rules.
            function: the called function.
        """
        is_strict = self._use.required or function.strict
        schema = closed_arguments(asked(function.parameters)) if is_strict else dict(ANY_OBJECT)
        schema["type"] = "object"  # the schema may allow other types, such as null
        if self._syntax == "pythonic":
            arguments = self._keywords(number, schema) if is_strict else self._any_keywords()
            arguments = arguments or f'"**" {_schema(schema)}'
            return f'{_literal(function.name + "(")} {arguments} ")"'
        if self._syntax == "llama3_json" and self._otherwise is not None:
            # One schema around the call: an answer that is no call may begin with the same letters.
            return _schema(
                _object(name={"const": function.name}, parameters={"$id": f"call:{number}"} | schema)
            )
        if self._name_first:
            return f"{_literal(function.name)} {self._marker(ARGS)} {_arguments(schema)}"
        key = "parameters" if self._syntax == "llama3_json" else "arguments"
        begin = f'{{"name": {_json(function.name)}, "{key}": '
        if self._syntax != "hermes":
            return f'{_literal(begin)} {_arguments(schema)} "}}"'
        closing = self._marker(HERMES_MARKERS[1])
        return f'{_literal(chr(10) + begin)} {_arguments(schema)} "}}\\n" {closing}'

    def _keywords(self, number: int, schema: Mapping[str, Any]) -> str:
        """Return an expression for arguments as `a=1, b=2`. Returns "" if this form cannot express the schema.

        Args:
            number: the function's index, for unique names of rules.
            schema: the JSON Schema of the arguments.

        Raises:
            InvalidGrammarError: the rules so far are longer than any grammar that is compiled.
        """
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return ""
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        says_more = schema.keys() - _PLAIN_KEYS or any(
            not isinstance(name, str) or name not in properties for name in required
        )
        if not properties and schema.get("additionalProperties") is not False:
            return ""
        if says_more or not all(
            name.isidentifier() and isinstance(value, dict) and not value.keys() & shared.keys()
            for name, value in properties.items()
        ):
            return ""
        references = (each["$ref"] for each in objects_in(schema) if isinstance(each.get("$ref"), str))
        if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
            return ""
        # `first` before the first argument, `more` after it, where a comma comes first.
        self._rules += [f'{kind}_{number}_{len(properties)}: ""' for kind in ("first", "more")]
        needed, characters = set(required), sum(map(len, self._rules))
        for place, (name, value) in enumerate(properties.items()):
            here, following = f"{number}_{place}", f"{number}_{place + 1}"
            rules = [f"value_{here}: {_literal(name + '=')} {_schema(value | shared)}"]
            chosen = {"first": f"value_{here}", "more": f'", " value_{here}'}
            for kind, argument in chosen.items():
                skipped = "" if name in needed else f" | {kind}_{following}"
                rules.append(f"{kind}_{here}: {argument} more_{following}{skipped}")
            self._rules += rules
            characters += sum(map(len, rules))
            check_length(characters)  # every argument's rule repeats the shared schemas
        return f"first_{number}_0"

    def _any_keywords(self) -> str:
        """Return an expression for keyword arguments with any names and any JSON values."""
        rules = [r"NAME: /[A-Za-z_][A-Za-z_0-9]*/", f'any: NAME "=" {_schema({})}']
        self._rules += [rule for rule in rules if rule not in self._rules]
        return '(any (", " any)*)?'

    # ------------------------------------------------------------------ text and thoughts

    def _text_and(self, marker: str) -> str:
        """Return a grammar expression for text up to and including the first `marker`. May add a rule."""
        if marker in self._dialect.special:
            return f"{self._free_text()} {self._marker(marker)}"
        name = f"to_{marker.strip('</>[]').lower()}"
        self._rules.append(f"{name}[lazy]: ANY {self._marker(marker)}")
        return name

    def _free_text(self) -> str:
        """Return an expression for an answer that is text, not calls.

        If calls have no marker, the text must not begin like a call, or like a thought
        that could come before the text. If the marker of calls is a token, the text must not spell the marker.
        """
        if self._call_marker is None:
            opening = r"[\[{]" if self._syntax == "llama3_json" else r"\[|```tool_code"
            thought = f"|{THOUGHT_MARKERS[0]}" if self._dialect.thinks and not self._thinking else ""
            no_call = rf"[\p{{White_Space}}\x1c-\x1f]*({opening}{thought})(.|\n)*"
        elif self._call_marker in self._dialect.special:
            no_call = (
                rf"(.|\n)*{re.escape(self._call_marker)}(.|\n)*"  # its letters are not the marker's token
            )
        else:
            return "ANY"
        rule = f"FREE: ANY & ~/{no_call}/"
        if rule not in self._rules:
            self._rules.append(rule)
        return "FREE"

    def _thought(self) -> str:
        """Return an expression for the thought before the answer; "" if there is none or free text includes it."""
        opener, closer = THOUGHT_MARKERS
        is_text = self._takes_text and self._call_marker is not None and closer not in self._dialect.special
        if is_text or not self._dialect.thinks:
            return ""
        self._rules.append(r"GAP: /\n{0,2}/")
        inside = f"ANY {self._marker(closer)}" if closer in self._dialect.special else self._text_and(closer)
        return f"{inside} GAP" if self._thinking else f"({self._marker(opener)} {inside} GAP)?"

    def _marker(self, text: str) -> str:
        token_id = self._dialect.special.get(text)
        return _literal(text) if token_id is None else f"<[{token_id}]>"


#: Keys that a schema may have if its arguments are written as keywords.
_PLAIN_KEYS = LABELS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schema(schema: Mapping[str, Any]) -> str:
    return f"%json {_json({**schema, 'x-guidance': JSON_OPTIONS})}"


def _arguments(schema: Mapping[str, Any]) -> str:
    """Return an expression for the arguments of a call, in JSON: `{}`, without space, if there are none."""
    says = {name: value for name, value in schema.items() if name not in LABELS}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return '"{}"' if says == nothing else _schema(schema)


def _literal(text: str) -> str:
    return _json(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
