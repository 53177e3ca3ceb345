"""A line of arithmetic beside a phase's headline figure: it predicts the figure from other measured quantities.

The prices of a pass come from the simulator's table, the number of sequences and columns from the engine's
telemetry, and the headline from the clients' clocks. (The prices were fitted to the times of steps in many runs,
including the runs of these comparisons. A headline figure is not the time of a step.) If prediction and measurement
differ by more than `FACTOR`, the build of the site fails. Then the arithmetic leaves out something that matters, or
something else was measured than the page says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import LINES, columns_of, median_of
from benchmarks.results import Run
from benchmarks.tables import load_tables
from benchmarks.workloads import WORKLOADS
from docs.building.results import RESULTS
from docs.building.stories import newest_groups
from phase7_chunked.config import Config as ChunkedConfig

FACTOR = 1.5  # the most by which prediction and measurement may differ
MODEL = "dummy:llama-60m"
PASS_PRICES = "[prices of a pass](../simulator.md#what-a-pass-costs)"
TINY = "zoo:llama-tiny"
CHUNK: int = ChunkedConfig.model_fields["prefill_chunk_size"].default  # tokens
PRICED = ("pass_base", "row", "column", "held", "token", "pair")  # columns of the simulator's table


class WrongPredictionError(ValueError):
    """A line of arithmetic does not predict the measurement that it stands beside."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a forward pass on the measured machine, in milliseconds (the page Simulator explains the fit).

    Attributes:
        base: for each pass, whatever it computes.
        row: for each sequence that decodes.
        column: for each cached token that a decoding sequence sees and shares with no other sequence.
        token: for each prompt token.
        pair: for each pair of a prompt token's query and a key that the query sees.
    """

    base: float
    row: float
    column: float
    token: float
    pair: float

    def decode_ms(self, batch: float, columns: float) -> float:
        """Return the time of a step that decodes `batch` sequences with `columns` cached tokens in all."""
        return self.base + self.row * batch + self.column * columns

    def prompt_ms(self, tokens: float, before: float = 0) -> float:
        """Return the time that a pass spends on `tokens` tokens of a prompt, after its first `before` tokens."""
        return self.token * tokens + self.pair * tokens * (before + tokens / 2)


@dataclass(frozen=True, slots=True)
class Server:
    """Medians of one server in a comparison, and the mean lengths of its requests."""

    runs: Sequence[Run]

    def median(self, title: str) -> float:
        found = median_of(self.runs, next(line for line in LINES if line.title == title))
        assert found is not None, f"{self.runs[0].server.label} has no {title}"
        return found

    @property
    def batch(self) -> float:
        return self.median("mean batch")

    @property
    def columns(self) -> float:
        return self.median("KV used, mean tokens")

    def mean_tokens(self) -> tuple[float, float]:
        """Return the mean tokens of a prompt and of an answer."""
        metrics = self.runs[0].metrics
        assert metrics is not None
        return metrics.prompt_tokens / metrics.completed, metrics.output_tokens / metrics.completed


def arithmetic(phase: int, results: Path = RESULTS) -> str:
    """Return the line of arithmetic for a phase's page; "" if the comparison or the prices were not measured.

    Raises:
        WrongPredictionError: prediction and measurement differ by more than `FACTOR`.
    """
    line = {4: _static, 5: _continuous, 6: _paged, 7: _chunked, 8: _prefix, 9: _pipelined}[phase]
    found = line(results)
    if found is None:
        return ""
    headline, sentence, predicted, measured = found
    verdict = checked(headline, predicted, measured)
    bound = f"The site is not built if the two differ by more than a factor of {FACTOR}."
    return f"*Does this add up?* {sentence} Predicted {headline}: {verdict}. {bound}\n"


def second_pass(results: Path = RESULTS) -> str:
    """Return a sentence with the price of a second pass in a step of phase 7; "" if nothing was measured."""
    found = _servers(results, "chunked_prefill", "phase 6", "phase 7")
    if found is None:
        return ""
    _, server, prices = found
    step = prices.decode_ms(server.batch, server.columns) + prices.prompt_ms(CHUNK)
    return (
        f"By the {PASS_PRICES}, it costs {prices.base:.0f} ms, most of it for reading the weights again. A step "
        f"of one pass, with a chunk of {CHUNK} tokens and {server.batch:.0f} sequences that decode, takes "
        f"{step:.0f} ms."
    )


def checked(headline: str, predicted: float, measured: float) -> str:
    """Compare a prediction with a measurement. Returns both as text, such as `×3.02; measured: ×2.81`.

    Args:
        headline: the quantity's name, for the error message.
        predicted: the ratio that the page's arithmetic gives.
        measured: the ratio in the results.

    Raises:
        WrongPredictionError: they differ by more than `FACTOR`.
    """
    if not 1 / FACTOR <= predicted / measured <= FACTOR:
        raise WrongPredictionError(
            f"{headline}: the arithmetic of the page gives ×{predicted:.2f}, the results give "
            f"×{measured:.2f}, and "
            f"they may differ by a factor of {FACTOR}. Look for what the arithmetic leaves out, or for what "
            "was "
            "really measured"
        )
    return f"×{predicted:.2f}; measured: ×{measured:.2f}"


# ---------------------------------------------------------------------- one line for each phase

Found = tuple[str, str, float, float] | None  # headline, sentence, predicted, measured


def _static(results: Path) -> Found:
    def line(generate: Server, static: Server, prices: Prices) -> Found:
        prompt, answer = static.mean_tokens()
        padded = static.median("wasted work")
        alone = prices.decode_ms(1, prompt + answer / 2) + prices.prompt_ms(prompt) / answer
        step = prices.decode_ms(static.batch, static.columns)
        prompts = prices.prompt_ms(prompt) / answer / (1 - padded)
        together = step / static.batch + prompts
        sentence = (
            f"By the {PASS_PRICES}, one request at a time takes {alone:.1f} ms a token, its prompt included. "
            f"A step of {static.batch:.1f} sequences takes {step:.1f} ms: {step / static.batch:.1f} ms a token. "
            f"The prompts add {prompts:.1f} ms a token, since {padded:.0%} of the work is padding and idle rows."
        )
        return "throughput", sentence, alone / together, _measured(generate, static, "output tokens / s")

    return _compared(results, "mixed", "generate()", "phase 4", line)


def _continuous(results: Path) -> Found:
    def line(before: Server, after: Server, _: Prices) -> Found:
        sentence = (
            f"{before.batch:.2f} sequences a step in phase 4, {after.batch:.2f} in phase 5, whose seats stay "
            "full. If a step "
            "takes the same time with more of its rows in use, tokens a second grow as much. (Left out: "
            "phase 4's "
            "padding, and the time that prompts take.)"
        )
        predicted = after.batch / before.batch
        return "throughput", sentence, predicted, _measured(before, after, "output tokens / s")

    return _compared(results, "continuous_batching", "phase 4", "phase 5", line)


def _paged(results: Path) -> Found:
    def line(before: Server, after: Server, prices: Prices) -> Found:
        prompt, answer = after.mean_tokens()
        prompts = prices.prompt_ms(prompt) / answer
        short, long = (prices.decode_ms(each.batch, each.columns) for each in (before, after))
        predicted = (short / before.batch + prompts) / (long / after.batch + prompts)
        sentence = (
            f"{after.batch:.1f} sequences a step instead of {before.batch:.1f}, but each brings a row and "
            "its columns. By "
            f"the {PASS_PRICES}, the step takes {long:.1f} ms instead of {short:.1f}. That is "
            f"{long / after.batch:.2f} ms a token instead of {short / before.batch:.2f}, and {prompts:.2f} "
            "ms for the "
            "prompts in both."
        )
        return "throughput", sentence, predicted, _measured(before, after, "output tokens / s")

    return _compared(results, "paged_attention", "phase 5", "phase 6", line)


def _chunked(results: Path) -> Found:
    def line(before: Server, after: Server, prices: Prices) -> Found:
        longest = max(lengths.high for _, lengths in WORKLOADS["chunked_prefill"].prompts)
        whole = prices.decode_ms(before.batch, before.columns) + prices.prompt_ms(longest)
        chunk = prices.decode_ms(after.batch, after.columns) + prices.prompt_ms(CHUNK, longest - CHUNK)
        sentence = (
            f"The slowest step sets the longest stall. In phase 6 it computes a prompt of {longest} tokens: "
            "by the "
            f"{PASS_PRICES}, {whole:.0f} ms. In phase 7 it computes the last {CHUNK} of them: {chunk:.0f} "
            "ms. (Left "
            "out: two long prompts in one step of phase 6.)"
        )
        return "longest stall", sentence, chunk / whole, _measured(before, after, "longest stall")

    return _compared(results, "chunked_prefill", "phase 6", "phase 7", line)


def _prefix(results: Path) -> Found:
    def line(before: Server, after: Server, prices: Prices) -> Found:
        prompt, _ = after.mean_tokens()
        rest = prompt * (1 - after.median("prompt tokens found in cache"))
        steps = math.ceil(prompt / CHUNK)
        whole = steps * prices.decode_ms(before.batch, before.columns) + prices.prompt_ms(prompt)
        short = prices.decode_ms(after.batch, after.columns) + prices.prompt_ms(rest, prompt - rest)
        sentence = (
            f"Phase 7 computes a prompt of {prompt:.0f} tokens in {steps} steps, beside {before.batch:.1f} "
            "sequences that "
            f"decode: by the {PASS_PRICES}, {whole:.0f} ms. Phase 8 computes the {rest:.0f} tokens that are "
            "not in its "
            f"cache in one step: {short:.0f} ms. (Left out: waiting for a seat and for the step that runs.)"
        )
        return "TTFT p50", sentence, short / whole, _measured(before, after, "TTFT p50")

    return _compared(results, "prefix_caching", "phase 7", "phase 8", line)


def _pipelined(results: Path) -> Found:
    before, after = "phase 9, pipeline-depth=0", "phase 9"
    group = newest_groups("baseline", before, after, results).get(TINY)
    table = next((each for each in load_tables(results) if each.name == "pipeline" and not each.local), None)
    if group is None or table is None:
        return None
    row = dict(zip(table.columns, next(row for row in table.rows if row[:2] == [TINY, 1]), strict=True))
    depth_0, depth_2 = _number(row["depth 0, played, ms"]), _number(row["depth 2, played, ms"])
    same_machine = table.environment.get("cpu") == group.first.environment.get("cpu")
    machine = "" if same_machine else ", on another machine"
    sentence = (
        f"Without a server, a step of the tiny model with one sequence takes {depth_0:.2f} ms one at a time "
        f"and {depth_2:.2f} ms with two in flight (in the picture above{machine}). If the server makes both "
        "longer by the same share, its tokens a second grow as much."
    )
    servers = {runs[0].server.label: Server(runs) for runs in columns_of(group.runs)}
    measured = _measured(servers[before], servers[after], "output tokens / s")
    return "throughput", sentence, depth_0 / depth_2, measured


# ---------------------------------------------------------------------- results


def _compared(
    results: Path,
    workload: str,
    before: str,
    after: str,
    line: Callable[[Server, Server, Prices], Found],
) -> Found:
    """Return the result of `line`, called with both servers of the newest comparison and the prices of its machine;
    None if the comparison or the prices are missing."""
    found = _servers(results, workload, before, after)
    return None if found is None else line(*found)


def _servers(results: Path, workload: str, before: str, after: str) -> tuple[Server, Server, Prices] | None:
    """Return both servers of the newest comparison and the prices of its machine; None if either is missing."""
    group = newest_groups(workload, before, after, results).get(MODEL)
    prices = None if group is None else prices_on(group.first.environment.get("cpu"), results)
    if group is None or prices is None:
        return None
    servers = {runs[0].server.label: Server(runs) for runs in columns_of(group.runs)}
    return servers[before], servers[after], prices


def prices_on(machine: object, results: Path = RESULTS) -> Prices | None:
    """Return the published prices of `MODEL` on a machine (native kernels, no pipeline); None if there are none.

    Of several fits in a table, the one with the most runs counts.
    """
    for table in load_tables(results):
        if table.name == "simulator_costs" and not table.local:
            rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            kind = {"machine": machine, "model": MODEL, "kernels": "native", "steps": "synchronous"}
            fits = [row for row in rows if kind.items() <= row.items()]
            if fits:
                best = max(fits, key=lambda row: _number(row["runs"]))
                base, row, column, held, token, pair = (
                    _number(best[f"{name}, µs"]) / 1000 for name in PRICED
                )
                return Prices(base, row, column + held, token, pair)
    return None


def _measured(before: Server, after: Server, title: str) -> float:
    return after.median(title) / before.median(title)


def _number(cell: object) -> float:
    assert isinstance(cell, int | float), cell
    return float(cell)
