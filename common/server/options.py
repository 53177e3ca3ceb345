"""Options of the server, beside those of the engine (`common.config`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ServerOptions(BaseModel):
    """Options of the server, beside those of the engine."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="info has a line for each request"
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="seconds that running requests get after SIGTERM",
    )
