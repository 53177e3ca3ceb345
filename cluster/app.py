"""The Serve application: a front and its replicas. A Serve config file names `build`.

```yaml
applications:
  - name: infer
    import_path: cluster.app:build
    args: {phase: 8, replicas: 2, model: zoo:llama-tiny}
```
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig

from cluster.environment import settings
from cluster.front import Front
from cluster.options import Plan, read_mapping
from cluster.replica import Replica
from cluster.router import PolicyRouter
from cluster.scaling import replicas_for
from common.server.options import CommonOptions, UsageError

NAME = "infer"  # of the application

REPORT_S = 0.5  # seconds between a replica's reports to routers
HEALTH_S = 2.0  # seconds between two health checks of a replica
SPARE = 32  # extra requests for each replica: refused by its engine, or only reading its state

#: A resource that Ray gives to one node of each cluster. The front runs there, beside Serve's proxy: if another
#: node dies, no client loses its connection.
HEAD_NODE = "node:__internal_head__"


def build(args: Mapping[str, Any]) -> Application:
    """Return the application that `args` describe: options as on the command line, with underscores.

    Raises:
        ValueError: an option is unknown, or its value is invalid.
        StartupError: there is no such phase.
    """
    try:
        return application(read_mapping(args))
    except UsageError as error:
        raise ValueError(str(error)) from None


def application(plan: Plan) -> Application:
    """Return the application of a plan: the front's deployment and the replicas'."""
    options = plan.options
    # An engine refuses requests that its queue cannot take, and the front asks another replica. Serve's own limit
    # is higher than that: requests above it would queue inside Serve, where no metric counts them. A replica sets
    # its seats by its own device, which is not known here.
    max_ongoing = plan.config.most_seats + plan.config.max_waiting_requests + SPARE
    replicas = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=max_ongoing,
        ray_actor_options={
            "num_cpus": options.cpus,
            "num_gpus": options.gpus,
            "runtime_env": {"env_vars": settings() | {"OMP_NUM_THREADS": str(options.threads_each)}},
        },
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=30.0,
        request_router_config=RequestRouterConfig(
            request_router_class=PolicyRouter,
            request_router_kwargs={
                "policy": plan.routing,
                "seed": plan.config.seed,
                "margin": options.routing_margin,
            },
            request_routing_stats_period_s=REPORT_S,
        ),
        **_number(plan),
    )
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=1,
        max_ongoing_requests=1 << 16,  # streams that it forwards; engines refuse requests beyond their queues
        ray_actor_options={
            "num_cpus": 0,
            "resources": {HEAD_NODE: 0.001},
            "runtime_env": {"env_vars": settings()},
        },
        graceful_shutdown_timeout_s=options.shutdown_timeout + 2.0,
        graceful_shutdown_wait_loop_s=0.2,
    )
    server_options = {name: getattr(options, name) for name in CommonOptions.model_fields}
    # Only options that were given: each replica sets the others by its device.
    config = plan.config.model_dump(exclude_unset=True)
    engines = replicas.bind(plan.package.PHASE.slug, config, server_options, created=int(time.time()))
    return front.bind(engines, server_options, wanted=options.replicas)


def _number(plan: Plan) -> dict[str, Any]:
    """Return the deployment's options for the number of replicas: fixed, or scaled with the load."""
    options = plan.options
    if options.max_replicas is None:
        return {"num_replicas": options.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.replicas,
            max_replicas=options.max_replicas,
            policy=AutoscalingPolicy(policy_function=scale),
            upscale_delay_s=5.0,
            downscale_delay_s=60.0,
        )
    }


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas to run for the reported loads (`replicas_for`), and {}, in which Ray Serve
    would keep a policy's state.

    Ray Serve calls this. While some replicas have not reported, the number stays as it is.
    """
    loads = (context.aggregated_metrics or {}).get("load", {})
    if len(loads) < context.current_num_replicas:  # some replicas have not reported yet
        return context.target_num_replicas, {}
    return replicas_for(list(loads.values())), {}
