"""A fox, as a tool and as the type of an answer: what the scripts ask models for."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

#: The arguments of every call of the tool.
called: list[list[Any]] = []


class Fox(BaseModel):
    """A fox of a story."""

    model_config = ConfigDict(extra="forbid")  # a tiny model would invent properties without end

    place: Literal["forest", "river"]
    brave: bool


def find_fox(place: Literal["forest", "river"], brave: bool) -> str:
    """Find a fox.

    Args:
        place: where to look.
        brave: whether it has to be brave.
    """
    called.append([place, brave])
    return "There is one fox."
