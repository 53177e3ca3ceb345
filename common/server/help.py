"""The text of `--help`: every option once, in groups, with its default."""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings


def help_text(settings: type[BaseSettings]) -> str:
    """Return the help for a command's settings."""
    prog = settings.model_config["cli_prog_name"]
    parser = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} [options]", description=settings.__doc__, add_help=False
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in settings.model_fields.items():
        title = _group_of(name, settings)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        help_line = f"{field.description}{_default_of(field)}".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            flags = (flag, flag.replace("--", "--no-", 1))
            groups[title].add_argument(*flags, action="store_true", help=help_line)
        else:
            groups[title].add_argument(flag, metavar=_value_of(field), help=help_line)
    last = parser.add_argument_group("Help")
    last.add_argument("-h", "--help", action="store_true", help="show this text and exit")
    last.add_argument("--version", action="store_true", help="show the version and exit")
    return parser.format_help()


def _group_of(name: str, settings: type[BaseSettings]) -> str:
    """Return the title of an option's group: the phase that added it, or its class's docstring."""
    definer = next(each for each in reversed(settings.__mro__) if name in inspect.get_annotations(each))
    phase = re.match(r"phase(\d+)_", definer.__module__)
    if phase is not None:
        return f"Phase {phase[1]} adds"
    return (definer.__doc__ or "").partition("\n")[0].rstrip(".")


def _default_of(field: FieldInfo) -> str:
    """Return an option's default in brackets, unless the description has it or there is nothing to say."""
    default = field.default
    if field.default_factory is not None or default in (None, "") or "default:" in (field.description or ""):
        return ""
    if field.annotation is bool:
        default = "on" if default else "off"
    elif field.annotation is float:
        default = f"{default:g}"
    return f" (default: {default})"


def _value_of(field: FieldInfo) -> str:
    """Return what stands for an option's value."""
    types = list(_plain_types(field.annotation))
    if typing.get_origin(types[0]) is typing.Literal:
        return "{" + ",".join(typing.get_args(types[0])) + "}"
    return {int: "N", float: "X", Path: "FILE"}.get(types[0], "TEXT")


def _plain_types(annotation: object) -> Iterator[typing.Any]:
    """Yield the types of a union but None, or the one type."""
    if type(None) in typing.get_args(annotation):
        yield from (each for each in typing.get_args(annotation) if each is not type(None))
    else:
        yield annotation
