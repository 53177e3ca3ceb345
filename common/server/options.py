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


class CommonOptions(BaseModel):
    """What one server and many behind one address (`cluster`) can both be told."""

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
    cors_origin: Names = Field(
        default_factory=none,
        description="whose pages a browser lets talk to this server, such as https://example.org; one of several, "
        "* for all; without one, none but its own",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="info has a line for each request"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="json: an object a line, with a request's numbers as fields"
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="seconds that running requests get after SIGTERM",
    )

    @field_validator("served_model_name", "api_key", "cors_origin", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


class ServerOptions(CommonOptions):
    """Options of one server."""

    root_path: str = Field(
        default="",
        pattern="^(/[^/?#]+)*$",
        description="what a proxy puts before every path, such as /llm; it may take it away or leave it",
    )
    live_view: bool = Field(
        default=True, description="the page at / shows the engine's steps as they come; GET /steps has them"
    )
    max_connections: int = Field(
        default=1024, ge=1, description="connections at a time; more are answered 503, or closed"
    )
    keep_alive_timeout: float = Field(
        default=60.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds that a connection may stay open without a request",
    )
    body_timeout: float = Field(
        default=30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds within which the head of a request must come, and then its body",
    )
    send_timeout: float = Field(
        default=60.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds within which a client that is behind with its answer must take 48 KiB of it",
    )
    max_unread_bytes: int = Field(
        default=4 * 2**20, ge=2**16, description="of one stream, what its client has not taken"
    )
    max_total_unread_bytes: int = Field(
        default=64 * 2**20, ge=2**16, description="the same of all streams together"
    )
    trace: Path | None = Field(
        default=None,
        description="file for a trace of all requests and steps, written while the server runs; "
        "what was in it is lost",
    )
