"""The table of the token identity suite: models, phases with their options, and the pairs of the ordinary run.

A phase without a line in `VARIANTS` runs with its defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.startup.phases import phase_names
from tests.support.engines import Variant

#: `zoo:` trained weights; `random:` random weights, under which small errors show; `int8:` quantized weights;
#: `gguf:` weights of four and eight bits in groups; `gptq:` groups whose inputs do not lie side by side.
#: `bf16` computes in bfloat16, whose bits are compared where the model is batch invariant.
MODELS = (
    "zoo:llama-tiny",
    "zoo:qwen3-tiny",
    "zoo:gemma3-tiny",
    "random:llama",
    "random:gemma3",
    "int8:gemma3-tiny",
    "bf16:llama-tiny",
    "bf16:gemma3-tiny",
    "int8-bf16:llama-tiny",
    "gguf-bf16:qwen3-tiny",
    "gptq:qwen3-tiny",
)
VARIANTS = [
    Variant("phase4_static", {"batch_wait_timeout_s": 0.0}),
    Variant("phase5_continuous"),
    Variant("phase5_continuous", {"max_prefill_pass_tokens": 40}),
    Variant("phase6_paged"),
    Variant("phase6_paged", {"kv_cache_backend": "contiguous"}),
    Variant("phase6_paged", {"block_size": 1}),
    Variant("phase6_paged", {"block_size": 64, "num_blocks": 12}),
    Variant("phase7_chunked", {"prefill_chunk_size": 16}),
    Variant(
        "phase7_chunked",
        {"prefill_chunk_size": 7, "prefill_token_budget": None, "max_prefill_pass_tokens": 16},
    ),
    Variant(
        "phase7_chunked",
        {"prefill_chunk_size": 1, "prefill_token_budget": None, "max_prefill_chunks_per_step": 3},
    ),
    Variant("phase7_chunked", {"mixed_batches": False, "prefill_chunk_size": 16, "num_blocks": 48}),
    Variant("phase7_chunked", {"kv_cache_backend": "contiguous", "prefill_chunk_size": 7}),
    Variant("phase7_chunked", {"use_chunked_prefill": False}),
    Variant("phase8_prefix", {"prefill_chunk_size": 16}),
    Variant("phase8_prefix", {"block_size": 1, "prefill_chunk_size": 7, "prefill_token_budget": None}),
    Variant("phase8_prefix", {"block_size": 4, "num_blocks": 150, "mixed_batches": False}),
    Variant("phase8_prefix", {"use_chunked_prefill": False, "block_size": 4}),
    Variant("phase8_prefix", {"enable_prefix_caching": False}),
    Variant("phase9_pipelined", {"prefill_chunk_size": 16}),
    Variant("phase9_pipelined", {"pipeline_depth": 1, "block_size": 4, "num_blocks": 150}),
    Variant("phase9_pipelined", {"pipeline_depth": 0, "mixed_batches": False, "prefill_chunk_size": 7}),
    Variant("phase9_pipelined", {"prefill_mode": "drained", "captured_steps": False}),
    Variant("phase10_speculative", {"draft_rows": 64, "draft_length": 15, "block_size": 4}),
    Variant("phase10_speculative", {"draft_rows": 12, "draft_length": 1, "prefill_chunk_size": 16}),
    Variant("phase10_speculative", {"draft_rows": 40, "pipeline_depth": 1, "num_blocks": 30}),
    Variant("phase10_speculative", {"draft_rows": 64, "pipeline_depth": 0, "mixed_batches": False}),
    Variant("phase10_speculative", {"draft_rows": 64, "draft_from_finished": True, "captured_steps": False}),
]
VARIANTS += [Variant(name) for name in phase_names() if name not in {variant.phase for variant in VARIANTS}]

#: The first variant of each phase.
PLAIN = list({variant.phase: variant for variant in reversed(VARIANTS)}.values())[::-1]

#: Gemma has the most features that can go wrong: windows, two bases of rotation, norms of queries and keys.
IN_EVERY_VARIANT = "zoo:gemma3-tiny"
#: Models that the ordinary run takes in the first variant of each phase.
IN_EVERY_PHASE = ("random:llama", "bf16:llama-tiny")


def is_ordinary(model: str, variant: Variant) -> bool:
    if model == IN_EVERY_VARIANT:
        return True
    return variant in (PLAIN if model in IN_EVERY_PHASE else PLAIN[-1:])


def table(
    *,
    models: Sequence[str] = MODELS,
    variants: Sequence[Variant] = VARIANTS,
    often: Sequence[Variant] = VARIANTS,
) -> pytest.MarkDecorator:
    """Run a test on Gemma in every variant, and on the other models in the first variant of each phase.

    A variant decides which rows are computed together and where their keys lie. The other models differ in norms,
    weights and types, which do not depend on that. The ordinary run takes most of them in the last phase only.

    Args:
        often: the variants that the ordinary run takes. The others are in the slow suite.
    """
    return pytest.mark.parametrize(
        ("subject", "variant"),
        [
            pytest.param(
                model,
                variant,
                id=f"{model}-{variant}",
                marks=() if is_ordinary(model, variant) and variant in often else pytest.mark.slow,
            )
            for model in models
            for variant in variants
            if model == IN_EVERY_VARIANT or variant in PLAIN
        ],
        indirect=["subject"],
    )
