"""A checkpoint's chat template: messages to the one text that the model was trained to answer.

A template is a Jinja program that comes with the weights. It is rendered as `transformers` renders it, in a sandbox
that lets it change nothing and reach nothing but what it is given.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequestError, StartupError

Message = Mapping[str, Any]

#: What a template finds under a name of its own: chat_template_kwargs cannot stand in for it.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

#: Marks where a message ends that is to be continued. The space tells whether the template strips what it is given.
_END = "\ue000the end of the last message\ue000 "


class ChatTemplate:
    """One template, compiled.

    Args:
        source: the Jinja program.
        special_tokens: what it may call by name, such as `bos_token`.

    Raises:
        jinja2.TemplateSyntaxError: it is none.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """Return the template of a checkpoint, or None if it has none.

        It is the one in `file` if that is given, else in the checkpoint's `chat_template.jinja`, else in its
        `tokenizer_config.json` (of several, the one called `default`).

        Raises:
            StartupError: a file cannot be read, or is no template.
        """
        config_path = folder / "tokenizer_config.json"
        own_file = folder / "chat_template.jinja" if file is None else file
        try:
            config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        except ValueError as error:
            raise StartupError(f"{config_path} is no JSON: {error}") from None
        own = file is not None or own_file.is_file()
        try:
            source = own_file.read_text("utf-8") if own else _default_of(config.get("chat_template"))
        except (OSError, UnicodeError) as error:
            raise StartupError(f"the chat template {own_file} cannot be read: {error}") from None
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(config))
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"{own_file if own else config_path}: "
                f"the chat template cannot be read: line {error.lineno}: {error}"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. It has all special tokens that belong to it.

        Args:
            messages: each with its `role`, and a text as its `content`.
            add_generation_prompt: end with what an answer begins after.
            continue_final_message: end within the last message instead, which the model then continues.
            variables: what else the template may look at.

        Raises:
            InvalidRequestError: the template takes no such messages, or does not show the one to continue.
        """
        messages = list(messages)
        last = messages[-1]["content"]
        if continue_final_message:
            messages[-1] = {**messages[-1], "content": last + _END}
        given = {**self._special_tokens, **(variables or {})}
        try:
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the model's chat template says: {error}", param="messages") from None
        except Exception as error:  # the program's: what it does with values that it did not expect
            raise InvalidRequestError(
                f"the model's chat template fails on these messages ({type(error).__name__})",
                param="messages",
            ) from error
        return _cut(text, last) if continue_final_message else text


def _cut(text: str, last: str) -> str:
    """A text up to where its last message ends."""
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
    """The text of `chat_template` in a tokenizer's config: one template, or a list of named ones."""
    if isinstance(templates, list):
        templates = {each["name"]: each["template"] for each in templates}
    if isinstance(templates, dict):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like: texts, or objects that hold one."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


# ---------------------------------------------------------------------- the language, as transformers has it


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what an assistant said, for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 - how an extension says so

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
    """JSON as it is; Jinja's own filter escapes what HTML would mind."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
