"""A checkpoint's chat template: turns messages into the text format that the model was trained on.

A template is a Jinja program that comes with the weights. It is rendered as `transformers` renders it, in a
sandbox: the program reads only its variables, and cannot change the objects in them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequestError, StartupError
from common.json_file import read_json

Message = Mapping[str, Any]

#: Variables that the server sets for a template. chat_template_kwargs cannot replace them.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

#: Appended to the message that the model continues. If its last space is missing, the template strips messages.
_END = "\ue000the end of the last message\ue000 "


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja program.
        special_tokens: variables such as `bos_token`, by name.

    Attributes:
        source: the Jinja program.

    Raises:
        jinja2.TemplateSyntaxError: `source` is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.source = source
        self._template = environment.from_string(source)
        self._variables = meta.find_undeclared_variables(environment.parse(source))
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """Return the template of a checkpoint, or None if it has none.

        The template is read from `file` if that is given, else from the checkpoint's `chat_template.jinja`, else
        from its `tokenizer_config.json` (of several templates, the one named `default`).

        Raises:
            StartupError: a file cannot be read, or is not a template.
        """
        config_path = folder / "tokenizer_config.json"
        own_file = folder / "chat_template.jinja" if file is None else file
        config = read_json(config_path) if config_path.is_file() else {}
        special_tokens = _special_tokens(config)
        if file is not None or own_file.is_file():
            return cls.from_file(own_file, special_tokens)
        source = _default_of(config.get("chat_template"))
        return None if source is None else cls.compiled(source, special_tokens, origin=config_path)

    @classmethod
    def from_file(cls, file: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Read a Jinja file. StartupError: it cannot be read, or is not a template."""
        try:
            source = file.read_text("utf-8")
        except (OSError, UnicodeError) as error:
            raise StartupError(f"the chat template {file} cannot be read: {error}") from None
        return cls.compiled(source, special_tokens, origin=file)

    @classmethod
    def compiled(cls, source: str, special_tokens: Mapping[str, str], *, origin: Path) -> ChatTemplate:
        """Compile a template that was read from the file `origin`. StartupError: `source` is not a template."""
        try:
            return cls(source, special_tokens)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"{origin}: the chat template cannot be read: line {error.lineno}: {error}"
            ) from None

    def reads(self, variable: str) -> bool:
        """Return whether the program reads the variable named `variable` and does not set it itself."""
        return variable in self._variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return a conversation as text, with all its special tokens.

        Args:
            messages: each with its `role`, and a text as its `content`.
            add_generation_prompt: end with the tokens that precede an answer.
            continue_final_message: end within the last message, so that the model continues it.
            variables: further variables of the template.
            tools: functions that the model may call, as OpenAI's field has them.

        Raises:
            InvalidRequestError: the template rejects the messages, fails on them, or changes the last one.
        """
        messages = list(messages)
        last = messages[-1]["content"]
        if continue_final_message:
            messages[-1] = {**messages[-1], "content": last + _END}
        given = {**self._special_tokens, **(variables or {})}
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the model's chat template says: {error}", param="messages") from None
        except Exception as error:  # a template may raise anything on values that it did not expect
            raise InvalidRequestError(
                f"the model's chat template fails on these messages ({type(error).__name__})",
                param="messages",
            ) from error
        return _cut(text, last) if continue_final_message else text


def _cut(text: str, last: str) -> str:
    """Cut a rendered conversation at the end of its last message.

    Args:
        text: the conversation, rendered with `_END` after the last message's content.
        last: the content of that message.

    Raises:
        InvalidRequestError: the template has left out or changed the last message.
    """
    end = text.rfind(_END.strip())
    if end < 0 or last.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not show the last message as it is",
            param="messages",
        )
    stripped = not text.startswith(_END, end)
    text = text[:end].replace(_END, "")  # a template may show a message more than once
    return text.rstrip() if stripped else text


def _default_of(templates: Any) -> str | None:
    """Return the template in a config's `chat_template`: the text, or the one called `default` of several.

    Returns None if there is neither.
    """
    if isinstance(templates, list):
        named = [each for each in templates if isinstance(each, dict)]
        templates = {each.get("name"): each.get("template") for each in named}
    if isinstance(templates, dict):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in a tokenizer's config, by name (`bos_token` and so on)."""
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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


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
