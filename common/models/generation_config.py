"""The sampling parameters that a checkpoint suggests, in its `generation_config.json` or in a GGUF file's metadata.

For the models of `infer fetch`, whose files have none, the catalogue suggests them (`common.models.fetch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from common.errors import StartupError
from common.models.fetch import FETCHABLE
from common.request import SamplingParams

#: Besides `TOP_K`, the entries that are read. `do_sample` is not read, as in vLLM: transformers' default, False,
#: would make every model greedy whose file leaves `do_sample` out.
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
TOP_K = "top_k"


def suggested_params(raw: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a `generation_config.json` object. Absent entries keep their defaults.

    Raises:
        StartupError: an entry has an invalid value. The message names the entry.
    """
    given = {name: raw[name] for name in (*NUMBERS, TOP_K) if raw.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int if name == TOP_K else int | float):
            raise StartupError(
                f"{name} must be a number, not {value!r:.80}; --generation-config none leaves it out"
            )
    if given.get(TOP_K) in (0, -1):  # all tokens
        del given[TOP_K]
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise StartupError(f"{error}; --generation-config none leaves it out") from None


#: Where default sampling parameters come from.
Origin = Literal["generation_config.json", "GGUF file", "infer fetch", "server"]


def origin_of(params: SamplingParams, model: str, *, is_gguf: bool) -> Origin:
    """Return where the default sampling parameters of the model with this name come from."""
    if params == SamplingParams():
        return "server"
    if model in FETCHABLE:
        return "infer fetch"
    return "GGUF file" if is_gguf else "generation_config.json"


def in_words(params: SamplingParams) -> str:
    """Return sampling parameters as text: the temperature, and other parameters that differ from their defaults.

    Only parameters that `suggested_params` reads are listed.
    """
    usual = SamplingParams()
    values = {name: getattr(params, name) for name in (*NUMBERS, TOP_K)}
    return ", ".join(
        f"{name} {value:g}"
        for name, value in values.items()
        if name == "temperature" or value != getattr(usual, name)
    )
