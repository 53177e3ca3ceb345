"""A cluster's life, from Ray's start to its end.

```text
port free? ─> Ray here, or joined ─> replicas built ─> ready ─> signal: new requests 503 ─> idle or timeout
  exit 1        exit 1                 exit 1                     second signal: exit 1       exit 0
```
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray
from ray import serve as ray_serve

from cluster.app import NAME, application
from cluster.options import Plan
from common.errors import StartupError
from common.server.http.sockets import bind, url_of
from common.server.run import exit_at_once
from common.server.service import served_model_name

logger = logging.getLogger("cluster")

#: Size of Ray's store for objects shared between processes. Our messages are too small to go through it.
OBJECT_STORE_BYTES = 80 * 2**20


def serve(plan: Plan) -> int:
    """Serve until a signal. Returns the exit code.

    Raises:
        StartupError: the port is taken, there are too few CPUs or GPUs, or a replica cannot be built.
    """
    options = plan.options
    url, port = where(plan)
    ready = False
    on_signals(signal.default_int_handler)
    try:
        start_ray(plan)
        on_signals(signal.default_int_handler)  # again: Ray has installed its own
        deploy(plan, port)
        ready = True
        names = options.served_model_name
        logger.info(
            "ready: %d × %s, routing %s, serve %s at %s",
            options.replicas,
            plan.package.PHASE.slug,
            plan.routing,
            names[0] if names else served_model_name(plan.config.model),
            url,
        )
        while True:
            signal.pause()
    except KeyboardInterrupt:
        on_signals(lambda *_: exit_at_once(1))
        if ready:
            asyncio.run(drain(options.shutdown_timeout))
    finally:
        take_down(plan)
    return 0


def on_signals(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Call `handler` at SIGINT and SIGTERM from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def where(plan: Plan) -> tuple[str, int]:
    """Return the address for clients, and its port. Serve's proxy listens there once it is started.

    Raises:
        StartupError: the port is taken, or it is 0 with `--address`.
    """
    options = plan.options
    if options.address is None:
        with bind(options.host, options.port) as listener:
            return url_of(listener), listener.getsockname()[1]
    if options.port == 0:
        raise StartupError("--port 0 finds a free port of this machine, not of --address: name one")
    return f"http://{options.host}:{options.port} of the head node", options.port


def start_ray(plan: Plan) -> None:
    """Join a cluster, or start one on this machine.

    Raises:
        StartupError: no cluster answers at the address, or this machine has too few CPUs or GPUs.
    """
    options = plan.options
    settings: dict[str, Any] = {"address": options.address}
    if options.address is None:
        settings = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(
            namespace=NAME,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
            **settings,
        )
    except ConnectionError as error:
        raise StartupError(f"--address {options.address}: no Ray cluster answers there ({error})") from None
    there = ray.cluster_resources()
    for flag, name, each in (("--cpus", "CPU", options.cpus), ("--gpus", "GPU", options.gpus)):
        if options.replicas * each > there.get(name, 0.0) and options.address is None:
            raise StartupError(
                f"{options.replicas} replicas of {flag} {each:g} need {options.replicas * each:g} {name}s, this "
                f"machine has {there.get(name, 0.0):g}: lower --replicas or {flag}"
            )


def deploy(plan: Plan, port: int) -> None:
    """Start Serve and the application. Returns once every replica is ready.

    Raises:
        StartupError: a replica cannot be built.
    """
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_serve.start(
        proxy_location="HeadOnly",
        http_options={"host": plan.options.host, "port": port},
        logging_config=quiet,
    )
    try:
        ray_serve.run(application(plan), name=NAME, logging_config=quiet)
    except RuntimeError as error:
        deployments = ray_serve.status().applications[NAME].deployments.values()
        said = " ".join([str(error), *(each.message for each in deployments)])
        own = re.search(r"StartupError: (.+)", said)
        raise StartupError(own[1] if own else said) from None


async def drain(timeout_s: float) -> None:
    """Refuse new requests with 503 and wait until the running ones are answered, at most `timeout_s`."""
    logger.info("finishing what runs, for up to %g s; a second signal ends it at once", timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await ray_serve.get_app_handle(NAME).drain.remote()
    except TimeoutError:
        logger.warning("some requests were not done in time and have been cut off")


def take_down(plan: Plan) -> None:
    """Stop Ray if it was started here; delete the application from a cluster that was joined."""
    if plan.options.address is not None and ray.is_initialized():
        ray_serve.delete(NAME)
    ray.shutdown()
