"""A checkpoint's chat template: turns messages into the text format that the model was trained on.

A template is a Jinja program that comes with the weights. It is rendered as `transformers` renders it, in a
sandbox: the program reads only its variables, and cannot change the objects in them.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequestError, StartupError
from common.json_file import read_json_if_there
from common.text.conversation import Accepts, Message, adapted, continues, joined

#: Variables that the server sets for a template. chat_template_kwargs cannot replace them.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

#: The most processor time for rendering one conversation, in seconds. Ordinary templates take milliseconds.
MAX_RENDER_S = 1.0

#: A mark in rendered text, behind the first character of a special token that a message spells. The tokenizer cuts
#: the text there, so it finds no special token. No text has this code point: Unicode reserves it for such marks.
BREAK = "\ufdd0"

#: The name of the template for conversations with tools, in checkpoints with several templates.
FOR_TOOLS = "tool_use"

#: Appended to the message that the model continues. If its last space is missing, the template strips messages.
_END = "\ue000the end of the last message\ue000 "


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja program.
        special_tokens: variables such as `bos_token`, by name.
        for_tools: the checkpoint's template for conversations with tools, if it has one of its own.

    Attributes:
        source: the Jinja program.
        for_tools: the template for conversations with tools: the one given, or else this one.

    Raises:
        jinja2.TemplateSyntaxError: `source` is not a valid template.
        StartupError: the template takes more than `MAX_RENDER_S` for a short conversation.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], for_tools: ChatTemplate | None = None
    ) -> None:
        self._environment = _Environment()
        program = self._environment.parse(source)
        self.source = source
        self.for_tools = for_tools or self
        self._variables = meta.find_undeclared_variables(program)
        _count_loops(program, self._environment)
        self._template = self._environment.from_string(program)
        self._special_tokens = dict(special_tokens)
        self._first = ""
        self._escaped: re.Pattern[str] | None = None
        self._accepts = Accepts.of(source, self._try)

    @classmethod
    def from_folder(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """Return the template of a checkpoint, or None if it has none.

        The template is read from `file` if that is given. Otherwise, a checkpoint may have several templates, in
        its `tokenizer_config.json` or as files. `default` and `tool_use` are read, the latter as `for_tools`.

        Raises:
            StartupError: a file cannot be read, or is not a template.
        """
        config_path = folder / "tokenizer_config.json"
        config = read_json_if_there(config_path)
        special_tokens = special_tokens_of(folder)
        if file is not None:
            return cls.from_file(file, special_tokens)
        own_file = folder / "chat_template.jinja"
        if own_file.is_file():  # then the config's are not read, as in `transformers`
            tools_file = folder / "additional_chat_templates" / f"{FOR_TOOLS}.jinja"
            for_tools = cls.from_file(tools_file, special_tokens) if tools_file.is_file() else None
            return cls.from_file(own_file, special_tokens, for_tools)
        named = _named(config.get("chat_template"))
        if "default" not in named:
            return None
        for_tools = None
        if FOR_TOOLS in named:
            for_tools = cls.compiled(named[FOR_TOOLS], special_tokens, origin=config_path)
        return cls.compiled(named["default"], special_tokens, for_tools, origin=config_path)

    @classmethod
    def from_file(
        cls, file: Path, special_tokens: Mapping[str, str], for_tools: ChatTemplate | None = None
    ) -> ChatTemplate:
        """Read a Jinja file. StartupError: it cannot be read, or is not a template."""
        try:
            source = file.read_text("utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise StartupError(f"the chat template {file} cannot be read: {error}") from None
        return cls.compiled(source, special_tokens, for_tools, origin=file)

    @classmethod
    def compiled(
        cls,
        source: str,
        special_tokens: Mapping[str, str],
        for_tools: ChatTemplate | None = None,
        *,
        origin: Path,
    ) -> ChatTemplate:
        """Compile a template that was read from the file `origin`. StartupError: `source` is not a template, or it
        takes too long."""
        try:
            return cls(source, special_tokens, for_tools)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"{origin}: the chat template cannot be read: line {error.lineno}: {error}"
            ) from None
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise StartupError(
                f"{origin}: the chat template cannot be compiled ({type(error).__name__})"
            ) from None
        except StartupError as error:
            raise StartupError(f"{origin}: {error}") from None

    def reads(self, variable: str) -> bool:
        """Return whether the program reads the variable named `variable` and does not set it itself."""
        return variable in self._variables

    def begin_with(self, token: str) -> None:
        """From now on, put `token` before each text that does not begin with it."""
        self._first = self.for_tools._first = token

    def escape(self, special_tokens: Iterable[str]) -> None:
        """From now on, mark these special tokens with `BREAK` where messages, tools or variables spell them."""
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._escaped = re.compile("|".join(re.escape(each) for each in longest_first if len(each) > 1))
        if self.for_tools is not self:
            self.for_tools.escape(longest_first)

    def _with_breaks(self, value: Any) -> Any:
        """Return a JSON value in which all special tokens that texts spell have a `BREAK`."""
        if isinstance(value, str) and self._escaped is not None:
            return self._escaped.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._with_breaks(name): self._with_breaks(each) for name, each in value.items()}
        return [self._with_breaks(each) for each in value] if isinstance(value, list) else value

    def end_of_turn(self, tokens: Iterable[str]) -> str | None:
        """Return the token that the program writes right after an answer; None if it is not one of `tokens`.

        Some programs write no token after the last answer. Then the one before the next message counts.
        """
        answer = "\ue000an answer\ue000"
        asked = {"role": "user", "content": "?"}
        messages = [asked, {"role": "assistant", "content": answer}, asked]
        known = set(filter(None, tokens))
        for told in (messages[:2], messages):
            try:
                text = self.render(told, add_generation_prompt=False)
            except InvalidRequestError:
                break
            after = text.partition(answer)[2].strip()
            if ends := [token for token in known if after.startswith(token)]:
                return max(ends, key=len)
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return a conversation as text, with all its special tokens.

        Args:
            messages: each with its `role`, and a text or a list of text parts as its `content`. They are changed
                to what the template accepts (`common.text.conversation.adapted`).
            add_generation_prompt: end with the tokens that precede an answer.
            continue_final_message: end within the last message, so that the model continues it. If both are None,
                a last message of the assistant is continued, and any other one is answered. To continue an empty
                message, without thoughts that the template shows, is to begin one.
            variables: further variables of the template.
            tools: functions that the model may call, as OpenAI's field has them.

        Raises:
            InvalidRequestError: the template rejects the messages, fails on them, takes longer than `MAX_RENDER_S`,
                or changes the last message although it is to be continued.
        """
        role, has_calls = messages[-1]["role"], bool(messages[-1].get("tool_calls"))
        goes_on = continues(role, has_calls, add_generation_prompt, continue_final_message)
        begins = not goes_on if add_generation_prompt is None else add_generation_prompt
        told = adapted(messages, self._accepts)
        if self._escaped is not None:
            told, tools, variables = map(self._with_breaks, (told, tools, variables))
        if not goes_on:
            return self._write(told, begins, variables, tools)
        last, marked = _marked(told[-1])
        said, thoughts = joined(told[-1]["content"]), told[-1].get("reasoning_content")
        empty = not (said.strip() or (thoughts and "reasoning_content" in self.source))
        if continue_final_message is None and empty and len(told) > 1:
            return self._write(told[:-1], True, variables, tools) + said
        text = _cut(self._write([*told[:-1], marked], begins, variables, tools), last)
        if text is not None:
            return text
        if continue_final_message is None:
            return self._write(told, True, variables, tools)
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not show the last message as it is",
            param="messages",
        )

    def _try(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Render a short conversation, which shows what the template accepts.

        Raises:
            InvalidRequestError: the template rejects the messages, or fails on them.
            StartupError: the template takes longer than `MAX_RENDER_S`.
        """
        try:
            return self._write(messages, False, None, tools)
        except _TooSlowError as error:
            raise StartupError(f"{error}, although they are few and short") from None

    def _write(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Render messages as they are. Raises InvalidRequestError."""
        given = {**self._special_tokens, **(variables or {})}
        try:
            self._environment.start_clock()
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
            return text if text.startswith(self._first) else self._first + text
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the model's chat template says: {error}", param="messages") from None
        except _TooSlowError:
            raise
        except Exception as error:  # a template may raise anything on values that it did not expect
            raise InvalidRequestError(
                f"the model's chat template fails on these messages ({type(error).__name__})",
                param="messages",
            ) from error


def _marked(message: Message) -> tuple[str, Message]:
    """Return the last text of a message's content, and the message with `_END` behind that text."""
    content = message["content"]
    if isinstance(content, str):
        return content, {**message, "content": content + _END}
    *before, last = content or [{"type": "text", "text": ""}]
    return last["text"], {**message, "content": [*before, {**last, "text": last["text"] + _END}]}


def _cut(text: str, last: str) -> str | None:
    """Cut a rendered conversation at the end of its last message.

    Returns None if the template has left out or changed the last message.

    Args:
        text: the conversation, rendered with `_END` after the last message's content.
        last: the content of that message.
    """
    end = text.rfind(_END.strip())
    if end < 0 or last.strip() not in text:
        return None
    stripped = not text.startswith(_END, end)
    text = text[:end].replace(_END, "")  # a template may show a message more than once
    return text.rstrip() if stripped else text


def _named(templates: Any) -> dict[str, str]:
    """Return the templates in a config's `chat_template` by name. A text alone is the one named `default`."""
    if isinstance(templates, list):
        entries = [each for each in templates if isinstance(each, dict)]
        templates = {str(each.get("name")): each.get("template") for each in entries}
    if not isinstance(templates, dict):
        templates = {"default": templates}
    return {str(name): text for name, text in templates.items() if isinstance(text, str)}


def special_tokens_of(folder: Path) -> dict[str, str]:
    """Return the texts of a checkpoint's special tokens by name (`bos_token` and so on).

    As in `transformers`, `special_tokens_map.json` counts if the config has no `added_tokens_decoder`.

    Raises:
        StartupError: a file cannot be read.
    """
    config = read_json_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json_if_there(folder / "special_tokens_map.json")
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


# ---------------------------------------------------------------------- Jinja, with the extensions of transformers


class _Generation(Extension):
    """Renders the content of `{% generation %} … {% endgeneration %}`, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads this attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TooSlowError(InvalidRequestError):
    """Rendering has taken too long."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` sets it up, with a limit of processor time for one rendering.

    The time is checked in loops and at calls, since a program without loops and calls ends soon.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._limit = threading.local()  # several threads render with one environment
        self.filters |= {"tojson": _tojson, _COUNTED: self._counted}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def start_clock(self) -> None:
        """Let this thread render for `MAX_RENDER_S` from now on."""
        self._limit.ends_s = time.thread_time() + MAX_RENDER_S

    def _check_time(self) -> None:
        if time.thread_time() > self._limit.ends_s:
            raise _TooSlowError(
                f"the model's chat template takes over {MAX_RENDER_S:g} s for these messages",
                param="messages",
            )

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number % 64 == 0:  # reading the clock costs as much as a short step
                self._check_time()
            yield item

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        self._check_time()
        return super().call(context, function, *args, **named)


#: The name of the filter that checks the time, which no template can spell.
_COUNTED = "(counted)"


def _count_loops(program: nodes.Template, environment: _Environment) -> None:
    """Change a program so that its loops check the time."""
    for loop in list(program.find_all(nodes.For)):
        counted = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        loop.iter = counted.set_environment(environment)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as plain JSON. Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
