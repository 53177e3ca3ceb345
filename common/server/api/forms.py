"""Fields whose value may have one of several types, such as a text or a list.

A discriminator chooses the type that a value is validated as. Otherwise pydantic would try all types, and an error
would name each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Discriminator

from common.server.api.bodies import refused
from common.server.errors import shorten


class Other(BaseModel):
    """An item, a part or a tool of a type that is not implemented, such as an image.

    Validation accepts it, so that `refuse_other` can refuse it with an error that names its type.
    """

    type: str


def by_type(forms: Mapping[type, str], error: str, expected: str) -> Discriminator:
    """Return a discriminator that tags a value by its Python type.

    Args:
        forms: the tag of each type.
        error: pydantic's error type for a value of another type.
        expected: the types that are accepted, for that error's message.
    """
    return Discriminator(
        lambda value: forms.get(type(value)),
        custom_error_type=error,
        custom_error_message=f"Input should be {expected}",
    )


def by_kind(known: Mapping[str, str], default: str | None = None) -> Discriminator:
    """Return a discriminator that tags an object by its field `type`.

    Args:
        known: the tag of each type. An object of another type gets the tag "as another". A value without a type
            gets the first tag, so its errors are those of the first type.
        default: the type that an object has if it lacks the field `type`; None: it has no type.
    """

    def form(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return known.get(kind, "as another") if isinstance(kind, str) else next(iter(known.values()))

    return Discriminator(form)


def refuse_other(name: str, value: object, rule: str) -> None:
    """Refuse a value whose type is not implemented, which validation has made an `Other`.

    Args:
        name: the path of the value in the body, such as `tools[0]`.
        value: a validated value.
        rule: the types that are accepted instead, for the error's message.

    Raises:
        ApiError: 422.
    """
    if isinstance(value, Other):
        raise refused(f"{name}.type", f"{shorten(value.type, 40)!r} is refused: {rule}")


def refuse_other_parts(name: str, content: Any, rule: str) -> None:
    """Refuse validated content, such as a message's, if one of its parts is not text.

    `name` is the path of the content in the body. See `refuse_other` for `rule` and the error.
    """
    if isinstance(content, list):
        for number, part in enumerate(content):
            refuse_other(f"{name}[{number}]", part, rule)


def text_of(content: Any) -> str:
    """Return the text of validated content, such as a message's.

    The content is a text, a list of parts (their texts are joined with nothing between), or None (an empty text).
    """
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
