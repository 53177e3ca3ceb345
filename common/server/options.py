"""Options of the server, beside those of the engine (`common.config`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator
from pydantic_settings import NoDecode

#: Texts: a flag for each, or one with commas between them, which is how the environment has them.
Names = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode]


def none() -> list[str]:
    """The default of such an option; `--help` shows the name of this function."""
    return []


class ServerOptions(BaseModel):
    """Options of the server, beside those of the engine."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    served_model_name: Names = Field(
        default_factory=none,
        description="what clients call the model, instead of the name it is loaded by; the first of several is "
        "what answers call it",
    )
    api_key: Names = Field(
        default_factory=none,
        description="what clients must send as a bearer token, one of several; better set in the environment, "
        "which other users of the machine do not see; without one, everybody is answered",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="info has a line for each request"
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="seconds that running requests get after SIGTERM",
    )
    trace: Path | None = Field(
        default=None,
        description="file for a trace of all requests and steps, written while the server runs; "
        "what was in it is lost",
    )

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value
