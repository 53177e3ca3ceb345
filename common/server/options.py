"""Options of the server, beside those of the engine (`common.config`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_settings import NoDecode

#: Texts: a flag for each, or one with commas between them, which is how the environment has them.
Names = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode]


class CommonOptions(BaseModel):
    """Options of the server."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    served_model_name: Names = Field(
        default_factory=list,
        description="what clients call the model, instead of the name it is loaded by; the first of several is "
        "what answers call it",
    )
    api_key: Names = Field(
        default_factory=list,
        description="what clients must send as a bearer token, one of several; better set in the environment, "
        "which other users of the machine do not see; without one, everybody is answered",
    )
    cors_origin: Names = Field(
        default_factory=list,
        description="whose pages a browser lets talk to this server, such as https://example.org; one of several, "
        "* for all; without one, none but its own",
    )
    allowed_host: Names = Field(
        default_factory=list,
        description="name by which clients may call a server without a key, beside its addresses, localhost and "
        "the machine's own; one of several, * for all",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="info has a line for each request"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="json: an object a line, with a request's numbers as fields"
    )
    body_timeout: float = Field(
        default=30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds within which the head of a request must come, and then its body",
    )
    step_timeout: float | None = Field(
        default=600.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds in one step after which /health is 503: the device hangs, and the server must be "
        "started again; none: never",
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="seconds that running requests get after SIGTERM",
    )

    @field_validator("served_model_name", "api_key", "cors_origin", "allowed_host", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


class LimitOptions(BaseModel):
    """Limits of what clients may take."""

    max_connections: int = Field(
        default=1024, ge=1, description="connections at a time; more are answered 503, or closed"
    )
    max_connections_per_address: int | None = Field(
        default=None,
        ge=1,
        description="connections at a time of one address; default: half of all. Loopback has no such bound",
    )
    keep_alive_timeout: float = Field(
        default=60.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds that a connection may stay open without a request",
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
        default=64 * 2**20, ge=2**16, description="of all answers together, what their clients have not taken"
    )


class ServerOptions(LimitOptions, CommonOptions):
    """More options of the server."""

    uds: Path | None = Field(
        default=None,
        description="Unix socket to listen on, instead of an address; its file is made, and replaced",
    )
    ssl_certfile: Path | None = Field(
        default=None, description="certificate, and those it rests on, in PEM format: the server speaks HTTPS"
    )
    ssl_keyfile: Path | None = Field(
        default=None, description="private key of the certificate; default: it is in the same file"
    )

    root_path: str = Field(
        default="",
        pattern="^(/[^/?#]+)*$",
        description="what a proxy puts before every path, such as /llm; it may take it away or leave it",
    )
    live_view: bool = Field(
        default=True, description="the page at / shows the engine's steps as they come; GET /steps has them"
    )
    admin: bool = Field(
        default=False,
        description="answer POST /pause and POST /resume, too, which act on everybody's requests; a server with "
        "--api-key answers them anyway",
    )
    trace: Path | None = Field(
        default=None,
        description="file for a trace of all requests and steps, written while the server runs; "
        "what was in it is lost",
    )

    @model_validator(mode="after")
    def _refuse_key_without_certificate(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile has no meaning without --ssl-certfile: add it or leave both out")
        return self
