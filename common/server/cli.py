"""`python -m phaseN_x`: a phase's options as flags and environment, and what is said of those that are wrong.

The exit codes of the command: 0 after a signal, 1 where serving could not begin or was cut short
(`common.server.lifecycle`), 2 for wrong options.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from common.config import EngineConfig
from common.errors import StartupError
from common.phases import PhasePackage, find_phase
from common.server.errors import shorten
from common.server.help import help_text
from common.server.lifecycle import exit_at_once, serve
from common.server.log_format import configure_logging
from common.server.options import CommonOptions, ServerOptions

logger = logging.getLogger(__name__)

ENV_PREFIX = "INFER_"
NONE = "none"  # how an option that may have no value says so

OptionsT = TypeVar("OptionsT", bound=BaseModel)


class UsageError(Exception):
    """The command line or the environment cannot be understood: one line that names the option and the mend."""


def main(phase_name: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> NoReturn:
    """Serve a phase until a signal ends it; does not return.

    Args:
        phase_name: as `find_phase` takes it.
        argv: the flags; the process's own if None.
        prog: what `--help` calls this command; `python -m` and the phase if None.
    """
    try:
        package = find_phase(phase_name)
        options, config = read_options(package, sys.argv[1:] if argv is None else argv, prog)
        configure_logging(options.log_level, options.log_format)
        try:
            sys.exit(serve(package, options, config))
        except StartupError as error:
            if options.log_format == "text":
                raise
            logger.error(error)  # noqa: TRY400 - its traceback is of no use
            sys.exit(1)
    except UsageError as error:
        exit_with(f"error: {error}", 2)
    except StartupError as error:
        exit_with(f"error: {error}", 1)
    except KeyboardInterrupt:  # while the engine is being built
        print("interrupted", file=sys.stderr)
        exit_at_once(130)


def exit_with(message: str, code: int) -> NoReturn:
    """Say one line, whatever line ends the message has."""
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def print_version() -> NoReturn:
    """Print the versions of this package and of torch, and exit."""
    print(f"infer {importlib.metadata.version('infer-phases')}, torch {importlib.metadata.version('torch')}")
    sys.exit(0)


# ---------------------------------------------------------------------- options

#: Messages for wrong options, in place of those of pydantic that speak of its own types.
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
    """The options of server and phase from flags, then the environment, then defaults.

    Raises:
        UsageError: an option is unknown, or its value is not one of its values.
    """
    settings = read_settings(settings_for(package, prog), argv)
    return part_of(settings, ServerOptions), part_of(settings, package.Config)


def read_settings(settings_class: type[BaseSettings], argv: Sequence[str]) -> BaseSettings:
    """Return all options of such a class. Prints help or version instead, if asked to, and exits.

    Raises:
        UsageError: as `read_options`.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        print(help_text(settings_class), end="")
        sys.exit(0)
    if "--version" in argv:
        print_version()
    try:
        return settings_class(_cli_parse_args=list(argv))
    except SettingsError as error:
        raise explain_unparsed(str(error), settings_class) from None
    except ValidationError as error:
        raise explain_invalid(error) from None


def part_of(settings: BaseSettings, options: type[OptionsT]) -> OptionsT:
    """The options of one of the classes that settings were put together from."""
    return options(**{name: getattr(settings, name) for name in options.model_fields})


def settings_for(
    package: PhasePackage,
    prog: str | None = None,
    *,
    server_options: type[CommonOptions] = ServerOptions,
    default_port: int | None = None,
) -> type[BaseSettings]:
    """A phase's options and the server's, with flags and environment names.

    Args:
        server_options: the server's, where it is another.
        default_port: the phase's own if None.
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
                cli_exit_on_error=False,
                cli_hide_none_type=True,
                cli_parse_none_str=NONE,
                env_parse_none_str=NONE,
                cli_avoid_json=True,
            ),
        },
    )


def explain_unparsed(message: str, settings_class: type[BaseSettings]) -> UsageError:
    """What the parser of flags could not make sense of, with the option that may have been meant."""
    text = message.removeprefix("error parsing CLI: ")
    unknown = re.match(r"unrecognized arguments: (\S+)", text)
    if unknown is None:
        return UsageError(f"{text}; --help lists the options")
    name = unknown[1].partition("=")[0]
    flags = [flag_of(field) for field in settings_class.model_fields]
    close = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else "--help lists the options"
    return UsageError(f"unknown option {name}: {hint}")


def explain_invalid(error: ValidationError) -> UsageError:
    """The first value that is not one of its option's, or the first options that contradict each other."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # options that contradict each other: the message names them
        return UsageError(first["msg"].removeprefix("Value error, "))
    field = str(first["loc"][0])
    source = f" (or {ENV_PREFIX}{field.upper()})"
    given = NONE if first["input"] is None else first["input"]
    said = first["msg"].replace("Input should be", "must be")
    must = REWORDED.get(first["type"], said)
    return UsageError(f"{flag_of(field)}{source}: {must}, not {shorten(repr(given), 100)}")


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")
