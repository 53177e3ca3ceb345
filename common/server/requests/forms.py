"""Fields that take values of several forms. The form of a value decides which type it is validated as.

pydantic would try all types, and an error would then name each of them.
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
    """Tag a value by its Python type.

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
    """Choose by the field `type` of an object. Without one it has the type `default`.

    Args:
        known: the tag of each type. Another type's tag is "as another". The first tag is also taken for a value
            that has no type, whose errors are then those of that form.
        default: the type of an object without one.
    """

    def form(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return known.get(kind, "as another") if isinstance(kind, str) else next(iter(known.values()))

    return Discriminator(form)


def refuse_other(name: str, value: object, rule: str) -> None:
    """Refuse a value of another type.

    Args:
        name: the value's place in the body.
        value: a checked value.
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
    """Return the text of a checked content, which is a text, parts, or None. Parts stand on lines of their own."""
    return (
        content or "" if content is None or isinstance(content, str) else "\n".join(p.text for p in content)
    )
