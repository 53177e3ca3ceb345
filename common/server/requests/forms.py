"""Fields that take values of several forms. The form of a value decides which type it is validated as.

Otherwise pydantic would try all types, and an error would name each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Discriminator

from common.server.bodies import refused
from common.server.errors import shorten


class Other(BaseModel):
    """An item, a part or a tool of another type, such as an image. `refuse_other` refuses it by its type's name."""

    type: str


def by_type(forms: Mapping[type, str], error: str, expected: str) -> Discriminator:
    """Return a discriminator that tags a value by its Python type.

    Args:
        forms: the tag of each type.
        error: pydantic's error type for a value of another type.
        expected: the values that are taken, for that error's message.
    """
    return Discriminator(
        lambda value: forms.get(type(value)),
        custom_error_type=error,
        custom_error_message=f"Input should be {expected}",
    )


def by_kind(known: Mapping[str, str], default: str | None = None) -> Discriminator:
    """Return a discriminator that tags an object by its field `type`.

    Args:
        known: the tag of each type; other types have the tag "as another". A value without a type gets the first
            tag, so its errors are those of the first type.
        default: the type of an object without the field.
    """

    def form(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return known.get(kind, "as another") if isinstance(kind, str) else next(iter(known.values()))

    return Discriminator(form)


def refuse_other(name: str, value: object, rule: str) -> None:
    """Refuse a value of a type that is not implemented (`Other`).

    Args:
        name: the value's place in the body.
        value: a validated value.
        rule: the values that are taken instead.

    Raises:
        ApiError: 422.
    """
    if isinstance(value, Other):
        raise refused(f"{name}.type", f"{shorten(value.type, 40)!r} is refused: {rule}")


def refuse_other_parts(name: str, content: Any, rule: str) -> None:
    """Refuse a content with parts that are not text. See `refuse_other`."""
    for number, part in enumerate(content or ()):
        refuse_other(f"{name}[{number}]", part, rule)


def text_of(content: Any) -> str:
    """Return the text of a validated content: a text, parts (a line each), or None (no text)."""
    return (
        content or "" if content is None or isinstance(content, str) else "\n".join(p.text for p in content)
    )
