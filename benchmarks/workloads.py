"""The workloads: lengths of prompts and answers, and times at which requests are sent.

A workload is a table of `workloads.toml`: one of `WORKLOADS`, or of `CHAT_WORKLOADS` for models that chat. `build`
turns it into a plan, one `PlannedRequest` per request, each with its prompt and its send time. The same name and
seed give the same plan on every machine, so all servers get exactly the same requests.

```text
uniform     |  |  |  |  |  |      one every 1 / rate seconds
poisson     | ||   |  |    ||     independent clients: bursts and gaps, the same rate on average
burst       |||||||               all requests at once
sequential  |----||----||----|    one client, who waits for each answer before asking again
turns       |----||------||--|    several such clients; each prompt continues the conversation
            |------||----||----|
```
"""

from __future__ import annotations

import itertools
import random
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from benchmarks.chats import CHATS
from common.errors import StartupError
from common.text.tokenizer import Tokenizer
from zoo.text import plain_document

Arrivals = Literal["burst", "sequential", "uniform", "poisson", "turns"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload of `workloads.toml`.

    Attributes:
        requests: the number of requests.
        prompts: pairs of a share of the requests and the lengths of their prompts; the shares sum to 1.
        new_tokens: tokens asked for. A server that knows `ignore_eos` generates exactly as many.
        arrivals: the pattern of send times.
        rate: requests per second before scaling; None where the pattern has no rate.
        shared_prefix: tokens that every prompt begins with, in addition to `prompts`.
        turns: the number of requests of a conversation. Each prompt has the prompt before it, the answer to that
            prompt, and new tokens, as many as `prompts` says.
        phase: number of the phase whose gain over the previous phase this workload shows; 0 if it was made for no
            phase.
        chats: the kind of chats that prompts come from, in `benchmarks.chats`. Then answers may end early,
            `new_tokens` are limits, and `prompts` are rough lengths. None: texts of exactly these lengths.
    """

    name: str
    requests: int
    prompts: Sequence[tuple[float, Lengths]]
    new_tokens: Lengths
    arrivals: Arrivals
    rate: float | None = None
    shared_prefix: int = 0
    turns: int = 1
    phase: int = 0
    chats: str | None = None

    @property
    def mean_prompt_tokens(self) -> float:
        own = sum(share * lengths.mean for share, lengths in self.prompts)
        turns_before = (self.turns - 1) / 2
        return self.shared_prefix + own + turns_before * (own + self.new_tokens.mean)

    def count(self, *, quick: bool) -> int:
        """Return the number of requests. A quick run sends a quarter of them, but at least four (or all, if there
        are fewer)."""
        return max(min(self.requests, 4), self.requests // 4) if quick else self.requests


def _read(path: Path) -> dict[str, Workload]:
    found = {}
    for name, fields in tomllib.loads(path.read_text("utf-8")).items():
        prompts = [(share, Lengths(low, high)) for share, low, high in fields.pop("prompts")]
        new_tokens = Lengths(*fields.pop("new_tokens"))
        found[name] = Workload(name, prompts=prompts, new_tokens=new_tokens, **fields)
    return found


_ALL = _read(Path(__file__).with_suffix(".toml"))
WORKLOADS = {name: workload for name, workload in _ALL.items() if workload.chats is None}
CHAT_WORKLOADS = {name: workload for name, workload in _ALL.items() if workload.chats is not None}


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send.

    Attributes:
        send_at_s: seconds after the run's start. The sequential pattern and requests with `follows` ignore it.
        prompt: token ids, or text.
        prompt_tokens: length of the prompt (of a text: as our tokenizer counts).
        max_tokens: the most tokens to generate.
        follows: index of the request before this one in a conversation; None: there is none. This request is sent
            when the answer to that request has ended. `prompt` has the new tokens only; `prompt_tokens` also counts
            the earlier prompts and answers.
    """

    index: int
    send_at_s: float
    prompt: list[int] | str
    prompt_tokens: int
    max_tokens: int
    follows: int | None = None

    @property
    def token_ids(self) -> list[int]:
        """Return the prompt, which must be token ids."""
        assert not isinstance(self.prompt, str)
        return self.prompt


# ---------------------------------------------------------------------------------------------- prompts


_BEFORE = "\ue000"  # stands for the messages before, whose text does not matter


class PromptWriter:
    """Writes the token ids of prompts: English-like text of an exact number of tokens, or a user's messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def write(self, rng: random.Random, tokens: int, *, continues: bool = False) -> list[int]:
        """Write a text of exactly `tokens` tokens. Returns its token ids.

        Args:
            continues: the text follows another one, so it gets no beginning-of-text token.
        """
        documents: list[str] = []
        while True:
            documents += (plain_document(rng) for _ in range(1 + tokens // 200))
            ids = self._tokenizer.encode("\n\n".join(documents), add_special_tokens=not continues)
            if len(ids) > tokens:  # one more than needed: the last may be a token that ends every text
                return ids[:tokens]

    def message(self, text: str, *, continues: bool = False) -> tuple[list[int], str]:
        """Return a user's message in the model's chat template, up to where the answer begins: as token ids that
        follow an answer's token ids, and as a text that follows an answer's text.

        The ids begin after the token that ended the answer, which the model has generated. The text begins with
        this token, as no answer's text has it. A text that begins a chat has no BOS: the server adds it.

        Args:
            continues: the message follows an answer.

        Raises:
            StartupError: the model has no chat template.
        """
        template, tokenizer = self._tokenizer.chat_template, self._tokenizer
        if template is None:
            raise StartupError("this workload needs a model that chats: its checkpoint has no chat template")
        message = {"role": "user", "content": text}
        if not continues:
            rendered = template.render([message])
            added = tokenizer.decode(tokenizer.encode(""), skip_special_tokens=False)
            return tokenizer.encode(rendered, add_special_tokens=False), rendered.removeprefix(added)
        before = [{"role": "user", "content": _BEFORE}, {"role": "assistant", "content": _BEFORE}]
        _, _, rendered = template.render([*before, message]).split(_BEFORE, 2)
        ended = template.render(before, add_generation_prompt=False).rstrip().rpartition(_BEFORE)[2]
        return tokenizer.encode(rendered.removeprefix(ended), add_special_tokens=False), rendered

    def as_text(self, token_ids: list[int]) -> str:
        """Return the text of a prompt. A server that tokenizes it may count one token more or less at its end."""
        return self._tokenizer.decode(token_ids).rstrip("\N{REPLACEMENT CHARACTER}")


# ---------------------------------------------------------------------------------------------- arrivals


def send_times(arrivals: Arrivals, count: int, rate: float | None, rng: random.Random) -> list[float]:
    """Return the times at which requests are sent, in seconds after the start, in order.

    `poisson` is a Poisson process, given that `count` requests come in `count / rate` seconds: all gaps are
    stretched by one factor that makes their mean exact. Without it, forty-eight requests would come up to a third
    too fast or too slow, depending on the seed.

    Args:
        rate: requests per second; patterns without a rate ignore it.
    """
    rate = rate or 1.0
    if arrivals == "uniform":
        return [index / rate for index in range(count)]
    if arrivals == "poisson":
        gaps = [rng.expovariate(1.0) for _ in range(count)]
        stretch = count / (rate * sum(gaps))
        return list(itertools.accumulate((gap * stretch for gap in gaps[1:]), initial=0.0))
    return [0.0] * count


# ---------------------------------------------------------------------------------------------- plans


class Write(Protocol):
    """The signature of `PromptWriter.write`."""

    def __call__(self, rng: random.Random, tokens: int, *, continues: bool = False) -> list[int]: ...


def build(
    workload: Workload,
    writer: PromptWriter,
    *,
    seed: int = 0,
    factor: float = 1.0,
    quick: bool = False,
    text: bool = False,
) -> list[PlannedRequest]:
    """Build the requests of a workload, in the order of their `index`.

    Args:
        seed: another seed draws other lengths, texts and arrivals.
        factor: arrival rates are multiplied by this; the pattern stays the same.
        quick: whether to build a quarter of the requests (`Workload.count`).
        text: whether prompts are text instead of token ids.

    Raises:
        StartupError: the workload has chats, and the model has no chat template.
    """
    if workload.chats is not None:
        return list(
            _planned_chats(workload, workload.chats, writer, seed=seed, factor=factor, quick=quick, text=text)
        )
    plan = planned_requests(workload, writer.write, seed=seed, factor=factor, quick=quick)
    return [replace(each, prompt=writer.as_text(each.token_ids)) if text else each for each in plan]


def planned_requests(
    workload: Workload, write: Write, *, seed: int = 0, factor: float = 1.0, quick: bool = False
) -> Iterator[PlannedRequest]:
    """Yield the requests of a workload, with prompts as token ids. A prompt is written when its request is yielded,
    so there may be millions of requests."""
    count = workload.count(quick=quick)
    # Each kind of draw has its own generator, so that a longer prompt does not move the arrivals.
    lengths = random.Random(f"{workload.name}:{seed}:lengths")
    texts = random.Random(f"{workload.name}:{seed}:texts")
    times = _times_of(workload, count, seed, factor)
    prompt_lengths = _draw_prompt_lengths(workload, count, lengths)
    new_lengths = [workload.new_tokens.draw(lengths) for _ in range(count)]
    shared = write(texts, workload.shared_prefix) if workload.shared_prefix else []

    clients = count // workload.turns
    lengths_before: deque[int] = deque()  # of each client's previous turn, prompt and answer
    for index, (send_at_s, own, new) in enumerate(zip(times, prompt_lengths, new_lengths, strict=True)):
        is_first = index < clients  # first turns of all clients come first, then second turns, …
        begin = shared if is_first else []
        ids = begin + write(texts, own, continues=bool(shared) or not is_first)
        tokens = len(ids) + (0 if is_first else lengths_before.popleft())
        if workload.turns > 1:
            lengths_before.append(tokens + new)
        yield PlannedRequest(
            index, send_at_s, ids, tokens, new, follows=None if is_first else index - clients
        )


def _planned_chats(
    workload: Workload, kind: str, writer: PromptWriter, *, seed: int, factor: float, quick: bool, text: bool
) -> Iterator[PlannedRequest]:
    """Yield the requests of a workload of chats. Each prompt is a user's message, and its length is that of its
    text."""
    clients = workload.count(quick=quick) // workload.turns
    chats = CHATS[kind](random.Random(f"{workload.name}:{seed}:texts"), clients, workload.turns)
    lengths = random.Random(f"{workload.name}:{seed}:lengths")
    times = _times_of(workload, clients * workload.turns, seed, factor)
    tokens = [0] * clients  # of each client's chat so far; an answer that ends early makes it shorter
    for index, send_at_s in enumerate(times):
        turn, client = divmod(index, clients)  # the first turns of all clients come first
        ids, rendered = writer.message(chats[client][turn], continues=turn > 0)
        most = workload.new_tokens.draw(lengths)
        yield PlannedRequest(
            index,
            send_at_s,
            rendered if text else ids,
            tokens[client] + len(ids),
            most,
            follows=index - clients if turn else None,
        )
        tokens[client] += len(ids) + most


def _times_of(workload: Workload, count: int, seed: int, factor: float) -> list[float]:
    rate = None if workload.rate is None else workload.rate * factor
    return send_times(workload.arrivals, count, rate, random.Random(f"{workload.name}:{seed}:arrivals"))


def _draw_prompt_lengths(workload: Workload, count: int, rng: random.Random) -> list[int]:
    """Draw prompt lengths in random order. Each entry of `workload.prompts` gets its share of requests, rounded."""
    drawn: list[int] = []
    due = 0.0
    for share, lengths in workload.prompts:
        due += share * count
        drawn += [lengths.draw(rng) for _ in range(round(due) - len(drawn))]
    rng.shuffle(drawn)
    return drawn


def identical_requests(
    writer: PromptWriter, *, count: int, prompt_tokens: int, new_tokens: int, seed: str
) -> list[PlannedRequest]:
    """Build a burst of equally long requests with different texts, for warm-ups and calibrations."""
    rng = random.Random(seed)
    return [
        PlannedRequest(index, 0.0, writer.write(rng, prompt_tokens), prompt_tokens, new_tokens)
        for index in range(count)
    ]
