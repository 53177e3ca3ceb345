"""Options of a cluster, beside those of a phase and of the server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from common.engine.config import EngineConfig
from common.server import options as server_options
from common.server.options import CommonOptions
from common.startup.phases import PhasePackage, find_phase, phase_names

DEFAULT_PORT = 9000

#: The first phase with a prefix cache. From this phase on, it matters which replica gets a request.
FIRST_CACHING_PHASE = 8


class ClusterOptions(CommonOptions):
    """Options of a cluster, beside those of a phase."""

    phase: str = "9"
    """phase of the replicas, by number or name"""
    replicas: int = Field(default=2, ge=1)
    """number of engines, each with the model in its own memory"""
    max_replicas: int | None = Field(default=None, ge=1)
    """most replicas: more are started when all are busy; default: as many as --replicas"""
    routing: Literal["auto", "prefix", "least_loaded", "round_robin", "random"] = "auto"
    """how requests are distributed; auto: prefix from phase 8 on, else least_loaded"""
    routing_margin: float = Field(default=0.5, ge=0.0, allow_inf_nan=False)
    """a replica is not preferred for its cache if its load exceeds the least load by more than this; a load of 1 is
    a full batch"""
    threads: int | None = Field(default=None, ge=1)
    """threads with which a replica computes; default: its CPUs, at least one"""
    cpus: float = Field(default=1.0, ge=0.0)
    """CPUs that Ray reserves for each replica"""
    gpus: float = Field(default=0.0, ge=0.0)
    """GPUs that Ray reserves for each replica"""
    address: str | None = None
    """address of a Ray cluster to join; default: start one on this machine"""

    @model_validator(mode="after")
    def _refuse_fewer_at_the_most(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is less than replicas {self.replicas}: raise it or leave it out"
            )
        return self

    @property
    def threads_each(self) -> int:
        return max(math.floor(self.cpus), 1) if self.threads is None else self.threads


@dataclass(frozen=True, slots=True)
class Plan:
    """The checked options of a cluster and its phase."""

    package: PhasePackage
    options: ClusterOptions
    config: EngineConfig

    @property
    def routing(self) -> str:
        if self.options.routing != "auto":
            return self.options.routing
        return "prefix" if self.package.PHASE.number >= FIRST_CACHING_PHASE else "least_loaded"


def read_flags(argv: Sequence[str], prog: str = "python -m cluster") -> Plan:
    """Return the plan that the command line and the environment describe.

    Raises:
        UsageError: an option is unknown, or its value is invalid.
        StartupError: there is no such phase.
    """
    package = find_phase(_phase_of(argv))
    settings = server_options.settings_for(
        package, prog, server_options=ClusterOptions, default_port=DEFAULT_PORT
    )
    return _plan(package, server_options.read_settings(settings, argv))


def read_mapping(args: Mapping[str, Any]) -> Plan:
    """Return the plan that the `args` of a Serve config file describe: the same options, with underscores.

    Raises:
        UsageError, StartupError: as `read_flags`.
    """
    package = find_phase(str(args.get("phase", _default_phase())))
    settings = server_options.settings_for(package, server_options=ClusterOptions, default_port=DEFAULT_PORT)
    given = dict(args) | ({"phase": str(args["phase"])} if "phase" in args else {})
    unknown = sorted(given.keys() - settings.model_fields.keys())
    if unknown:
        raise server_options.UsageError(f"args: there is no option {unknown[0]!r}")
    try:
        return _plan(package, settings(**given))
    except ValidationError as error:
        raise server_options.explain_invalid(error) from None


def _plan(package: PhasePackage, settings: Any) -> Plan:
    if settings.device == "cuda" and not settings.gpus:
        raise server_options.UsageError(
            "--device cuda: replicas see no GPU that they have not asked for; add --gpus 1"
        )
    return Plan(
        package,
        server_options.part_of(settings, ClusterOptions),
        server_options.part_of(settings, package.Config),
    )


def _default_phase() -> str:
    return os.environ.get(
        f"{server_options.ENV_PREFIX}PHASE", str(ClusterOptions.model_fields["phase"].default)
    )


def _phase_of(argv: Sequence[str]) -> str:
    """Return the phase that the flags name, or the default phase. The phase decides which other flags exist."""
    for flag, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, value = flag.partition("=")
        if name == "--phase":
            if not equals and following is None:
                raise server_options.UsageError(
                    f"--phase takes a phase; there are {', '.join(phase_names())}"
                )
            return value if equals else str(following)
    return _default_phase()
