"""What the pages of the site call between double braces. Numbers on pages come from here, never from a keyboard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs runs as a program of its own, which does not look for modules here

from docs.building import (  # noqa: E402 - needs the path
    code,
    memory,
    options,
    paging,
    pictures,
    pipeline,
    prefix,
    results,
    rounding,
    samples,
    simulation,
)


def define_env(env: Any) -> None:
    """Make every function below callable from a page."""
    for function in (
        code.reference,
        code.source,
        code.solution,
        code.exercise_command,
        memory.memory_table,
        memory.kv_size,
        memory.sliding_share,
        memory.weight_size,
        options.offered_load,
        options.options_table,
        options.phases_table,
        options.request_fields_table,
        options.workloads_table,
        paging.block_size,
        paging.capacity_table,
        paging.chunk_table,
        paging.seats_table,
        pictures.timeline,
        pictures.timeline_table,
        pictures.timeline_steps,
        pictures.visibility,
        pipeline.pipeline_timeline,
        prefix.chat_table,
        prefix.probe,
        prefix.secret_tokens,
        prefix.tree_picture,
        results.headline,
        results.ledger,
        results.plots,
        results.measured_table,
        results.peers_tables,
        results.results_table,
        results.sweep_table,
        results.trade_offs,
        rounding.lone_rows,
        rounding.orders_of_a_sum,
        rounding.three_numbers,
        samples.event_stream,
        samples.zoo_samples,
        simulation.prediction_counts,
        simulation.predictions_table,
        simulation.prices_table,
        simulation.reasons_list,
        simulation.replayed_steps,
        simulation.replicas_figure,
        simulation.replicas_setup,
        simulation.replicas_table,
        simulation.router_limits,
        simulation.what_if_table,
    ):
        env.macro(function)
