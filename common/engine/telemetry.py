"""Telemetry: a ring buffer of the engine's steps, counters since its start, and histograms of requests."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from common.request import FinishReason, StepOutput

PAGE_STEPS = 256  # most steps in one page of a `snapshot`: making it delays the engine's thread


@dataclass(slots=True)
class StepRecord:
    """The numbers of one engine step."""

    step: int
    started_s: float  # the engine's clock
    duration_s: float = 0.0
    waiting: int = 0  # requests in the queue after admission
    active: int = 0  # requests that hold KV memory during the step
    passes: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    padded_tokens: int = 0  # padding that is computed to make all prompts of a pass equally long
    idle_rows: int = 0  # decode rows of requests that are done already
    kv_used_tokens: int = 0
    kv_reserved_tokens: int = 0
    prompt_tokens: int = 0  # of requests whose prefill begins
    cached_tokens: int = 0  # of these prompt tokens: prefix hits
    drafts: int = 0  # requests whose next tokens are guessed
    draft_tokens: int = 0  # guesses that are computed
    accepted_tokens: int = 0  # guesses of this or an earlier step that this step committed as accepted


class Part(NamedTuple):
    """One part of a step with its times, in seconds on the engine's clock.

    Attributes:
        lane: `host` or `stream`, whichever ran the part.
        what: `plan`, `pass`, `commit` and so on.
    """

    lane: str
    what: str
    began_s: float
    ended_s: float


class PartTimer:
    """Times the parts of steps, on the engine's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: list[Part] = []

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self._ended.append(Part("host", what, began_s, self._clock()))

    def take(self) -> list[Part]:
        """Return the parts that have ended since the last call, in order; an outer part before its inner parts."""
        ended, self._ended = self._ended, []
        return sorted(ended, key=lambda part: (part.began_s, -part.ended_s))


_UNTIMED = nullcontext()


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    steps: int = 0
    requests_added: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    passes: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    padded_tokens: int = 0
    idle_rows: int = 0
    failed_passes: int = 0
    reclaimed_slots: int = 0  # leaked slots or blocks, found after a failed pass; 0 in a healthy engine
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # divided by prompt_tokens: the prefix cache's hit rate
    evictions: int = 0  # blocks evicted from the prefix cache
    drafts: int = 0  # requests with guesses, counted in each step
    draft_tokens: int = 0
    accepted_tokens: int = 0  # divided by draft_tokens: the acceptance rate
    tier_hits: int = 0  # blocks that were read from the file of phase 11
    tier_declined: int = 0  # blocks that the file had, and that were computed, since that takes less time
    tier_skipped: int = 0  # blocks that were not written, since the disk was behind
    tier_failures: int = 0  # blocks that could not be read or written, or came too late
    tier_read_bytes: int = 0
    tier_written_bytes: int = 0
    tier_saved_s: float = 0.0  # time to compute what was read, minus the time of reading
    failed_drafters: int = 0  # times that a drafter raised; its request got no guesses in that step
    busy_s: float = 0.0


@dataclass(slots=True)
class Telemetry:
    """The latest `capacity` steps and the totals. Written by one thread only: the engine's, or the event
    loop's in a server's process.

    Attributes:
        timer: times the parts of each step; None: parts are not timed.
        accepted_at: number of accepted guesses, by their place in the draft: index 0 counts first guesses, index 1
            second guesses, and so on.
    """

    capacity: int = 4096
    timer: PartTimer | None = None
    counters: Counters = field(default_factory=Counters)
    records: deque[StepRecord] = field(init=False)
    current: StepRecord = field(init=False)
    accepted_at: list[int] = field(default_factory=list)
    #: Prompt and new tokens of each step.
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def __post_init__(self) -> None:
        self.records = deque(maxlen=self.capacity)
        self.current = StepRecord(0, 0.0)

    def begin_step(self, now: float) -> StepRecord:
        self.current = StepRecord(step=self.counters.steps, started_s=now)
        return self.current

    def part(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager that times one part of the step, if there is a timer. `what`: see `Part`."""
        return _UNTIMED if self.timer is None else self.timer.part(what)

    def end_step(self, now: float) -> None:
        record, counters = self.current, self.counters
        record.duration_s = now - record.started_s
        counters.steps += 1
        counters.busy_s += record.duration_s
        for name in _SUMMED:
            setattr(counters, name, getattr(counters, name) + getattr(record, name))
        self.keep(record)

    def keep(self, record: StepRecord) -> None:
        """Add the record of a step that has ended."""
        self.records.append(record)
        self.step_tokens.observe(record.decode_tokens + record.prefill_tokens)

    def count_accepted(self, position: int) -> None:
        """Count an accepted guess. `position`: 1 for the first guess of a request in a step, 2 for the second, …"""
        self.current.accepted_tokens += 1
        self.accepted_at += [0] * (position - len(self.accepted_at))
        self.accepted_at[position - 1] += 1

    @property
    def latest(self) -> StepRecord:
        """The latest step that has ended; before the first has ended, `current`."""
        return self.records[-1] if self.records else self.current

    def snapshot(self, *, since_step: int | None = None) -> dict[str, Any]:
        """Return the counters and a page of the kept steps, as plain values. Fast, and any thread may call it.

        Args:
            since_step: first step of the page, or the oldest kept step if that is newer; None: the latest page.

        Returns:
            `counters`; `steps`, at most `PAGE_STEPS`; `next_step`, the first step of the next page. If it is less
            than the number of steps counted, that page is available already.
        """
        kept = tuple(self.records)  # read before the counters, so that they include every step on the page
        oldest = kept[0].step if kept else 0
        latest_page = max(oldest, oldest + len(kept) - PAGE_STEPS)
        first = latest_page if since_step is None else max(since_step, oldest)
        page = kept[first - oldest :][:PAGE_STEPS]  # steps have consecutive numbers
        return {
            "counters": _values(self.counters, _COUNTERS),
            "steps": [_values(record, _COLUMNS) for record in page],
            "next_step": first + len(page),
        }


# ---------------------------------------------------------------------- requests, as their clients see them


#: Bounds of a histogram's buckets for durations, in seconds: from less than a step to more than any client waits.
SECONDS: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0),
)

#: Bounds of a histogram's buckets for lengths, in tokens.
TOKENS: tuple[float, ...] = tuple(digit * 10.0**power for power in range(6) for digit in (1.0, 2.0, 5.0))


#: Bounds of a histogram's buckets for the choices of a prompt.
CHOICES: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts values in buckets. Each bucket has an inclusive upper bound, but for the last, which has none.

    Attributes:
        bounds: in ascending order; a value counts in the first bucket whose bound is not below the value.
        total: the sum of all values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return for each bound the number of values not above the bound, and last the number of all values."""
        return list(itertools.accumulate(self._counts))


#: The name in metrics of each reason why a request ended.
ENDINGS: dict[FinishReason | None, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    None: "error",
}


class RequestTimes(NamedTuple):
    """When an ended request reached each stage, in seconds on one clock; None: it never did."""

    submitted_s: float
    scheduled_s: float | None  # its prefill was planned
    first_token_s: float | None
    latest_token_s: float  # 0 without a token
    ended_s: float


def _durations() -> Histogram:
    return Histogram(SECONDS)


def _lengths() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class RequestTelemetry:
    """Endings, durations and lengths of requests. Written only by the thread that delivers outputs to clients."""

    generation_tokens: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDINGS.values(), 0))
    time_to_first_token_s: Histogram = field(default_factory=_durations)
    inter_token_latency_s: Histogram = field(default_factory=_durations)
    end_to_end_s: Histogram = field(default_factory=_durations)
    queue_s: Histogram = field(default_factory=_durations)  # until it was scheduled, or left the queue
    prefill_s: Histogram = field(default_factory=_durations)  # from scheduling to the first token
    decode_s: Histogram = field(default_factory=_durations)  # from the first token to the last
    prompt_lengths: Histogram = field(default_factory=_lengths)
    answer_lengths: Histogram = field(default_factory=_lengths)
    computed_lengths: Histogram = field(default_factory=_lengths)  # prompt tokens without prefix hits
    inference_s: Histogram = field(default_factory=_durations)  # from scheduling to the last token
    between_tokens_s: Histogram = field(default_factory=_durations)  # decode_s by tokens after the first
    longest_choices: Histogram = field(default_factory=_lengths)  # of each prompt's choices, the longest
    choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))  # of each prompt
    most_new_tokens: Histogram = field(default_factory=_lengths)  # `max_new_tokens` of each choice

    def end(self, output: StepOutput, times: RequestTimes) -> None:
        """Count a request by its terminal output and its times."""
        self.ended[ENDINGS[output.finish_reason]] += 1
        self.prompt_lengths.observe(output.prompt_tokens)
        self.answer_lengths.observe(output.completion_tokens)
        self.end_to_end_s.observe(times.ended_s - times.submitted_s)
        scheduled_s = times.ended_s if times.scheduled_s is None else times.scheduled_s
        self.queue_s.observe(scheduled_s - times.submitted_s)
        if times.first_token_s is not None:
            self.prefill_s.observe(times.first_token_s - scheduled_s)
            decode_s = times.latest_token_s - times.first_token_s
            self.decode_s.observe(decode_s)
            self.inference_s.observe(times.latest_token_s - scheduled_s)
            if output.completion_tokens > 1:
                self.between_tokens_s.observe(decode_s / (output.completion_tokens - 1))
            self.computed_lengths.observe(output.prompt_tokens - output.cached_tokens)


_SUMMED = (
    "passes",
    "decode_tokens",
    "prefill_tokens",
    "padded_tokens",
    "idle_rows",
    "prompt_tokens",
    "cached_tokens",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
)
_COUNTERS = tuple(each.name for each in fields(Counters))
_COLUMNS = tuple(each.name for each in fields(StepRecord))


def _values(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return a record's fields by name. Ten times as fast as `dataclasses.asdict`, which copies each value."""
    return {name: getattr(record, name) for name in names}
