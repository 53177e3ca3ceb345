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
import threading
import time
from collections.abc import Callable
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
    signals = Signals()
    address, port = where(plan)
    start_ray(plan)
    signals.listen()
    try:
        if not deploy(plan, port, given_up=lambda: signals.came):
            return 0
        options = plan.options
        names = options.served_model_name
        logger.info(
            "ready: %d × %s, routing %s, serve %s at %s",
            options.replicas,
            plan.package.PHASE.slug,
            plan.routing,
            names[0] if names else served_model_name(plan.config.model),
            address,
        )
        name = signals.wait()
        logger.info(
            "%s: finishing what runs, for up to %g s; a second signal ends it at once",
            name,
            options.shutdown_timeout,
        )
        asyncio.run(drain(options.shutdown_timeout))
    finally:
        take_down(plan)
    return 0


def where(plan: Plan) -> tuple[str, int]:
    """Return the address for clients, and its port. The front listens there once it is started.

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


class Signals:
    """Waits for the first SIGINT or SIGTERM. The second one ends the process, and Ray's processes with it."""

    def __init__(self) -> None:
        self._name = ""
        self._came = threading.Event()
        self.listen()

    def listen(self) -> None:
        """Install the handlers. Called again after Ray has installed its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if self._came.is_set():
            exit_at_once(1)
        self._name = signal.Signals(number).name
        self._came.set()

    @property
    def came(self) -> bool:
        return self._came.is_set()

    def wait(self) -> str:
        """Block until a signal comes. Returns its name."""
        self._came.wait()
        return self._name


def start_ray(plan: Plan) -> None:
    """Join a cluster, or start one on this machine.

    Raises:
        StartupError: no cluster answers at the address, or this machine has too few CPUs or GPUs.
    """
    options = plan.options
    quiet: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        if options.address is not None:
            ray.init(address=options.address, namespace=NAME, **quiet)
        else:
            ray.init(
                address="local",
                namespace=NAME,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
    except ConnectionError as error:
        raise StartupError(f"--address {options.address}: no Ray cluster answers there ({error})") from None
    there = ray.cluster_resources()
    for flag, name, each in (("--cpus", "CPU", options.cpus), ("--gpus", "GPU", options.gpus)):
        if options.replicas * each > there.get(name, 0.0) and options.address is None:
            ray.shutdown()
            raise StartupError(
                f"{options.replicas} replicas of {flag} {each:g} need {options.replicas * each:g} {name}s, this "
                f"machine has {there.get(name, 0.0):g}: lower --replicas or {flag}"
            )


def deploy(plan: Plan, port: int, given_up: Callable[[], bool]) -> bool:
    """Start Serve and the application, and wait until every replica is ready. Returns False if a signal came first.

    Raises:
        StartupError: a replica cannot be built.
    """
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_serve.start(proxy_location="Disabled", logging_config=quiet)
    app = application(plan, listen_at=(plan.options.host, port))
    ray_serve._run(app, _blocking=False, name=NAME, logging_config=quiet)
    while True:
        status = ray_serve.status().applications[NAME]
        if status.status == "RUNNING":
            return True
        if status.status == "DEPLOY_FAILED":
            reasons = [status.message, *(each.message for each in status.deployments.values())]
            raise StartupError(_reason(" ".join(reasons)))
        if given_up():
            return False
        time.sleep(0.1)


def _reason(message: str) -> str:
    """Return the message of our own StartupError within a message of Serve's; else the whole message."""
    own = re.search(r"StartupError: (.+)", message)
    return own[1] if own else message


def take_down(plan: Plan) -> None:
    """Stop Ray if it was started here; delete the application from a cluster that was joined."""
    if plan.options.address is not None:
        ray_serve.delete(NAME)
    ray.shutdown()


async def drain(timeout_s: float) -> None:
    """Refuse new requests with 503 and wait until the running ones are answered, at most `timeout_s`."""
    front = ray_serve.get_app_handle(NAME)
    await front.stop_accepting.remote()
    deadline = time.monotonic() + timeout_s
    while await front.num_running.remote() > 0:
        if time.monotonic() > deadline:
            logger.warning("some requests were not done in time and have been cut off")
            return
        await asyncio.sleep(0.1)
