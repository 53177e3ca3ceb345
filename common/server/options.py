"""Options of the server, beside those of the engine (`common.engine.config`), and how a command reads both.

Every option is a flag and an environment variable. If both are given, the flag wins.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import ipaddress
import logging
import os
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, NoDecode, SettingsConfigDict

from common.engine.config import EngineConfig
from common.server.errors import shorten
from common.startup.phases import PhasePackage
from common.text.dialect import ReasoningParser, ToolCallParser
from common.version import project_version


def _split(value: Any) -> Any:
    return [each.strip() for each in value.split(",")] if isinstance(value, str) else value


#: Type of an option with several texts. The flag is repeated or has several values, or one value has commas, as in
#: the environment.
Names = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode, BeforeValidator(_split)]

#: Type of an option with a time.
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

#: An `Origin` header: scheme, host, and a port that is not the scheme's own.
_ORIGIN = re.compile(
    r"(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
)


class CommonOptions(BaseModel):
    """Options of the server. The text below an option is its help."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(default=8000, ge=0, le=65535)
    """port to listen on; 0 picks a free one"""
    served_model_name: Names = Field(default_factory=list)
    """name by which clients call the model, instead of the name it is loaded by; of several, answers contain the
    first"""
    api_key: Names = Field(default_factory=list)
    """key that clients must send as a bearer token; of several, any; better set in the environment, since other
    users of the machine see the command line; default: no key is needed"""
    cors_origin: Names = Field(default_factory=list)
    """origin such as https://example.org whose pages may call this server from a browser; may be given several
    times; *: all origins; default: only the server's own page"""
    allowed_host: Names = Field(default_factory=list)
    """host name by which clients may call a server without a key, besides its addresses, localhost, the machine's
    name, and names that end in .localhost, .local or .internal; may be given several times; *: all names; default:
    all names if --host is no loopback address"""
    forwarded_allow_ips: Names = Field(default_factory=list)
    """address or network of a proxy whose X-Forwarded-For header is believed, for the client's address in the log;
    may be given several times; *: any; default: the header is ignored"""
    tool_call_parser: ToolCallParser = "auto"
    """format in which the model writes tool calls; auto: found from its chat template; none: requests with tools
    are refused"""
    reasoning_parser: ReasoningParser = "auto"
    """format in which the model marks its thoughts; auto: found from its chat template; none: thoughts are part of
    the answer"""
    strict_fields: bool = False
    """refuse requests with fields that the server does not know, instead of ignoring these fields"""
    max_stored_responses: int = Field(default=1024, ge=0)
    """latest responses of /v1/responses that are kept in memory for previous_response_id; all together take 64 MiB
    at most; 0: none is kept"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least severe messages that are logged; info has a line for each request"""
    log_format: Literal["text", "json"] = "text"
    """json: each line is an object, with a request's numbers as fields"""
    body_timeout: Seconds = 30.0
    """seconds within which a request's headers must arrive, and again its body"""
    step_timeout: Seconds | None = 600.0
    """seconds after which a step counts as hung: /health then answers 503, so that the server is started again;
    none: never"""
    shutdown_timeout: float = Field(default=30.0, ge=0.0, allow_inf_nan=False)
    """seconds after SIGTERM within which running requests may end"""

    @field_validator("cors_origin")
    @classmethod
    def _refuse_what_no_browser_sends(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin not in ("*", "null", "file://") and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"no browser sends the origin {origin!r}; one is https://example.org or "
                    "http://localhost:3000, in lower case, without a path or a final slash, and not a pattern"
                )
        return origins

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _refuse_what_is_no_address(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            if proxy != "*":
                ipaddress.ip_network(proxy)
        return proxies

    def proxy_settings(self) -> dict[str, Any]:
        """Return uvicorn's settings for `forwarded_allow_ips`."""
        proxies = "*" if "*" in self.forwarded_allow_ips else self.forwarded_allow_ips
        return {"proxy_headers": bool(proxies), "forwarded_allow_ips": proxies}


class ServerOptions(CommonOptions):
    """More options of the server."""

    max_connections: int = Field(default=1024, ge=1)
    """most open connections; further ones are answered 503, or closed"""
    max_connections_per_address: int | None = Field(default=None, ge=1)
    """most open connections of one address; default: half of --max-connections; loopback is not limited"""
    keep_alive_timeout: Seconds = 60.0
    """seconds that a connection may stay open without a request"""
    send_timeout: Seconds = 60.0
    """seconds within which a client must read 48 KiB of an answer, if more is waiting for it"""

    uds: Path | None = None
    """path of a Unix socket to listen on instead of an address; an old socket there is replaced, and
    the file PATH.lock keeps a second server away"""
    ssl_certfile: Path | None = None
    """PEM file with the certificate and its chain; with it the server speaks HTTPS"""
    ssl_keyfile: Path | None = None
    """PEM file with the certificate's private key; default: the certificate's file"""

    root_path: str = Field(default="", pattern="^(/[^/?#]+)*$")
    """prefix such as /llm that a proxy adds to every path; paths with and without it are answered"""
    live_view: bool = True
    """the page at / shows the engine's steps live; GET /steps streams them"""
    admin: bool = False
    """answer POST /pause and POST /resume, with which any client stops the requests of all clients"""
    trace: Path | None = None
    """file for a trace of all requests and steps, written while the server runs; an old file is overwritten"""

    @model_validator(mode="after")
    def _refuse_key_without_certificate(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile has no meaning without --ssl-certfile: add it or leave both out")
        return self


logger = logging.getLogger(__name__)

ENV_PREFIX = "INFER_"
#: Variables that are no options: those of the project's tests and benchmarks, and those that Kubernetes sets beside
#: a service named `infer` or `infer-...`.
_OTHER_VARIABLES = re.compile(
    ENV_PREFIX
    + r"(INTERPRET_TRITON|CLIENTS|TEST_MODELS|LLAMA_CPP|CHECKOUT|(\w+_)?(SERVICE_(HOST|PORT)|PORT_\d+_|PORT$).*)"
)
NONE = "none"  # text that a user writes for an option without a value

OptionsT = TypeVar("OptionsT", bound=BaseModel)


class UsageError(Exception):
    """Raised for a wrong option in the flags or the environment. One line names the option and the remedy."""


def version_text() -> str:
    """Return the versions of this package and of torch."""
    return f"infer {project_version()}, torch {importlib.metadata.version('torch')}"


#: Messages that replace pydantic's, which name its own types; by pydantic's error type.
REWORDED = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "string_too_short": "must be a text of at least one character",
    "too_short": "must be one value or several",
}


def read_options(
    package: PhasePackage, argv: Sequence[str], prog: str | None = None
) -> tuple[ServerOptions, EngineConfig]:
    """Return the server's options and the phase's. Flags win over the environment, and both over defaults.

    Raises:
        UsageError: a flag is unknown, an option's value is invalid, or two options contradict each other.
    """
    settings = read_settings(settings_for(package, prog), argv)
    return part_of(settings, ServerOptions), part_of(settings, package.Config)


def read_settings(settings_class: type[BaseSettings], argv: Sequence[str]) -> BaseSettings:
    """Return an instance of a settings class, read from flags, environment and defaults. Raises UsageError.

    If the flags ask for the help or the version, this prints it and exits.
    """
    ignore_kubernetes_port()
    for said in unknown_variables(settings_class):
        logger.warning(said)
    parser = Parser(settings_class)
    flags = CliSettingsSource[Parser](
        settings_class, root_parser=parser, add_argument_method=Parser.add_argument
    )
    try:
        arguments = joined_values(argv, settings_class)
        return CliApp.run(settings_class, cli_args=arguments, cli_settings_source=flags)
    except ValidationError as error:
        raise explain_invalid(error) from None


class Parser(argparse.ArgumentParser):
    """The parser of a settings class's flags. For wrong flags, it raises UsageError."""

    def __init__(self, settings_class: type[BaseSettings]) -> None:
        prog = settings_class.model_config["cli_prog_name"]
        super().__init__(prog, f"{prog} [options]", settings_class.__doc__, allow_abbrev=False)
        self.add_argument(
            "--version", action="version", version=version_text(), help="show the version and exit"
        )
        self._flags = [flag_of(field) for field in settings_class.model_fields]

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add a flag. Its help names no default that is a function, and none after a description that names it."""
        text = re.sub(r" \(default( factory:.*|: )\)$", "", settings["help"])
        settings["help"] = text.removesuffix(" (default: none)") if "default" in text[:-15] else text
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError. For an unknown flag, it names the most similar flag, if one is similar."""
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            raise UsageError(f"{message}; --help lists the options")
        name = unknown[1].partition("=")[0]
        close = difflib.get_close_matches(name, self._flags, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else "--help lists the options"
        raise UsageError(f"unknown option {name}: {hint}")


def ignore_kubernetes_port() -> None:
    """Remove `INFER_PORT` from the environment if Kubernetes set it, and log a warning.

    Beside a service named `infer`, Kubernetes gives pods such a variable with an address: tcp://10.0.0.1:80.
    """
    name = f"{ENV_PREFIX}PORT"
    if "://" in os.environ.get(name, ""):
        address = os.environ.pop(name)
        logger.warning("%s=%s is ignored: Kubernetes sets it for a service of this name", name, address)


def unknown_variables(settings_class: type[BaseSettings]) -> list[str]:
    """Return a line for each environment variable that begins as an option does and is none."""
    known = [ENV_PREFIX + field.upper() for field in settings_class.model_fields]
    lines = []
    for name in sorted(os.environ):
        given = name.upper()  # as pydantic reads names
        if given.startswith(ENV_PREFIX) and given not in known and not _OTHER_VARIABLES.match(given):
            close = difflib.get_close_matches(given, known, n=1, cutoff=0.7)
            hint = f": did you mean {close[0]}?" if close else ""
            lines.append(f"{name} is ignored, since it is no option here{hint}")
    return lines


def joined_values(argv: Sequence[str], settings_class: type[BaseSettings]) -> list[str]:
    """Return the flags with one value each: `--served-model-name a b` (vLLM's) becomes `--served-model-name a,b`.

    Only flags with several texts (`Names`) take further values.
    """
    fields = settings_class.model_fields.items()
    several = {flag_of(name) for name, field in fields if typing.get_origin(field.annotation) is list}
    joined: list[str] = []
    has_value = False  # the latest flag takes several values and has one
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            has_value = bool(equals)
        elif has_value and flag in several:
            joined[-1] += f",{word}"
            continue
        else:
            has_value = True
        joined.append(word)
    return joined


def part_of(settings: BaseSettings, options: type[OptionsT]) -> OptionsT:
    """Return an instance of `options`, a base class of the settings' class, with their values.

    The values are not validated again. The instance's `model_fields_set` has the options that were given.
    """
    values = {name: getattr(settings, name) for name in options.model_fields}
    return options.model_construct(settings.model_fields_set & values.keys(), **values)


def settings_for(
    package: PhasePackage,
    prog: str | None = None,
    *,
    server_options: type[CommonOptions] = ServerOptions,
    default_port: int | None = None,
) -> type[BaseSettings]:
    """Return a settings class of a phase's options and the server's, with flags and environment names.

    Args:
        package: the phase, whose `Config` has the engine's options.
        prog: name of the command in `--help`; `python -m` and the phase if None.
        server_options: the class of the server's options. A cluster has its own.
        default_port: the default of `--port`; the phase's if None.
    """
    return type(
        "Settings",
        (server_options, package.Config, BaseSettings),
        {
            "__module__": __name__,
            "__doc__": f"{package.PHASE.title}: {package.PHASE.idea}. Every option can also be set in the "
            f"environment: {ENV_PREFIX}MAX_BATCH_SIZE for --max-batch-size.",
            "__annotations__": {"port": int},
            "port": Field(
                default=package.PHASE.default_port if default_port is None else default_port,
                ge=0,
                le=65535,
                description=CommonOptions.model_fields["port"].description,
            ),
            "model_config": SettingsConfigDict(
                env_prefix=ENV_PREFIX,
                cli_prog_name=prog or f"python -m {package.PHASE.slug}",
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_hide_none_type=True,
                cli_parse_none_str=NONE,
                env_parse_none_str=NONE,
                cli_avoid_json=True,
                cli_shortcuts={"num-blocks": "num-gpu-blocks"},  # vLLM's name
            ),
        },
    )


def explain_invalid(error: ValidationError) -> UsageError:
    """Return the UsageError for the first invalid value, or for the first options that contradict each other."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # options that contradict each other: the message names them
        return UsageError(first["msg"].removeprefix("Value error, "))
    field = str(first["loc"][0])
    source = f" (or {ENV_PREFIX}{field.upper()})"
    given = NONE if first["input"] is None else first["input"]
    if first["type"] == "value_error":  # raised by a validator of ours, which names the value
        return UsageError(f"{flag_of(field)}{source}: {first['msg'].removeprefix('Value error, ')}")
    said = first["msg"].replace("Input should be", "must be")
    must = REWORDED.get(first["type"], said)
    return UsageError(f"{flag_of(field)}{source}: {must}, not {shorten(repr(given), 100)}")


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")
