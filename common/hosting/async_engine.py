"""An engine as asyncio sees it: streams of outputs, places in the queue, and the shutdown.

```text
event loop                                                  engine's process
  hold_places ─> submit, cancel ─> `EngineProcess` ───────> EngineLoop ─> step ─> step ─> …
  RequestStream <── token ids, one message for each step <──┘
```

The engine's process has no detokenizers: the event loop makes the text, finds stop strings, and then cancels the
request. So the engine may compute a few tokens that no client gets.

A thread that needs a matcher waits until the engine's process has compiled the grammar. That process keeps the
matcher until the request that needs it is submitted, or will not come any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from common.constrained.grammar import Grammar, GrammarCompiler, Matcher, Verdict
from common.engine.commit import decode, fail, terminal_output
from common.engine.requests import EngineFacts, RequestMaker
from common.engine.telemetry import RequestTelemetry, RequestTimes, StepRecord, Telemetry
from common.errors import EngineDeadError, QueueFullError, ShuttingDownError
from common.hosting.calls import EngineCalls
from common.hosting.messages import (
    SENT,
    Abort,
    Answered,
    Call,
    Cancel,
    Compile,
    EngineState,
    FromEngine,
    Planned,
    Shown,
    Stepped,
    Submit,
)
from common.hosting.process import STOPPED, EngineProcess
from common.models.tokenizer_files import open_tokenizer
from common.observing.frames import Frame
from common.request import FinishReason, Request, StepOutput
from common.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class RequestStream:
    """One request's outputs as they arrive, up to the terminal one. A reader that stops early must call `cancel`.

    Attributes:
        received_tokens: number of tokens that have arrived, read or not.
        first_token_s: when the first token arrived, on the clock of `time.monotonic`; None before.
        latest_token_s: when the latest token arrived; 0 before the first.
        longest_gap_s: the longest time between two successive tokens, in seconds.
        news: set when an output has arrived. Streams that are read together share one.
        last: the terminal output; None before it has arrived.
    """

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self.request = request
        self._engine = engine
        self._outputs: list[StepOutput] = []
        self.news = asyncio.Event()
        self._arrived_s = time.monotonic() if request.arrived_s is None else request.arrived_s
        self.received_tokens = 0
        self.first_token_s: float | None = None
        self.longest_gap_s = 0.0
        self.latest_token_s = 0.0
        self.last: StepOutput | None = None

    def take(self) -> list[StepOutput]:
        """Return the outputs that have arrived and were not read yet, without waiting."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def put(self, output: StepOutput) -> None:
        """Queue an output for the reader, and count its token and times in the telemetry."""
        now, telemetry = time.monotonic(), self._engine.requests
        if output.token_id is not None:
            telemetry.generation_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = now
                telemetry.time_to_first_token_s.observe(now - self._arrived_s)
            else:
                gap = now - self.latest_token_s
                self.longest_gap_s = max(self.longest_gap_s, gap)
                telemetry.inter_token_latency_s.observe(gap)
            self.latest_token_s = now
        # If the engine's process has died, its counts have died with it.
        self.received_tokens = output.completion_tokens = max(output.completion_tokens, self.received_tokens)
        if output.finished:
            self.last = output
            times = RequestTimes(
                self._arrived_s, self.request.scheduled_s, self.first_token_s, self.latest_token_s, now
            )
            telemetry.end(output, times)
        self._outputs.append(output)
        self.news.set()

    def put_error(self, error: Exception) -> None:
        """End the stream with an error at once, without waiting for the engine, which may be inside a step."""
        output = terminal_output(self.request)
        output.finish_reason, output.error = None, error
        self.put(output)

    def cancel(self) -> None:
        """Cancel the request, so that the engine frees its place in the queue or its memory. The stream then ends
        with the terminal output. Does nothing if the terminal output has arrived already."""
        self._engine.cancel(self.request.request_id)


class RemoteMatcher(Matcher):
    """A matcher in the engine's process, as this process knows it: by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


class RemoteCompiler(GrammarCompiler):
    """Checks grammars in this process. The engine's process compiles them.

    Args:
        tokenizer, eos_token_ids: as for `GrammarCompiler`.
        compile_there: compiles a checked grammar in the engine's process. Returns the matcher, and the seconds of
            processor time of compiling.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        compile_there: Callable[[Grammar], tuple[RemoteMatcher, float]],
    ) -> None:
        super().__init__(tokenizer, eos_token_ids)
        self._compile_there = compile_there

    def compile(self, grammar: Grammar) -> RemoteMatcher:
        matcher, compile_s = self._compile_there(grammar)
        self._verdicts.put(grammar, Verdict(None, compile_s))
        return matcher


class AsyncEngine:
    """Serves streams of an engine's outputs on an event loop. The engine runs in a process of its own.

    Call `build` first, then `start` on the event loop. After that, call all methods in the event loop's thread,
    unless they say otherwise.

    Args:
        process: the engine's process.

    Attributes:
        facts: the engine's properties.
        maker: makes requests for the engine.
        telemetry: the engine's telemetry, as of its latest step.
        requests: telemetry of the submitted requests.
        paused: whether the engine plans no steps.
        dead: the error that ended the engine; None while it runs.
        draining: whether new requests are refused, because the server shuts down.
        on_frame: called with each frame of the live view; with None if making frames has failed for good.
    """

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.telemetry = Telemetry()
        self.requests = RequestTelemetry()
        self.draining = False
        self.dead: EngineDeadError | None = None
        self.on_frame: Callable[[Frame | None], None] = lambda _: None
        self._state = EngineState()
        self._began_s: float | None = None  # when the present step began, on the clock of `time.monotonic`
        self._submitted = 0
        # For each submission that the engine has not taken: `_submitted` after it, and its time.
        self._untaken: deque[tuple[int, float]] = deque()
        self._held = 0  # places that are promised to requests which are still being tokenized
        self._streams: dict[str, RequestStream] = {}
        self._unused: deque[int] = deque()  # numbers of matchers that no request needs any more
        self._aborted: ShuttingDownError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def build(self) -> None:
        """Block until the engine is built. Raises StartupError: it cannot be built."""
        built = self.process.build()
        self.facts, self._state = built.facts, built.state
        self.maker = self._new_maker(built.facts)

    def _new_maker(self, facts: EngineFacts) -> RequestMaker:
        assert facts.tokenizer_files is not None, "the engine's process has read it from files"
        tokenizer = open_tokenizer(
            facts.tokenizer_files, vocab_size=facts.vocab_size, chat_template=facts.config.chat_template
        )
        if facts.config.escape_special_tokens:
            tokenizer.escape_special_tokens()
        return RequestMaker(facts, tokenizer, self.compiler(tokenizer))

    def start(self) -> None:
        """Start accepting requests. Call it on the event loop that will read the streams."""
        self._loop = asyncio.get_running_loop()
        self.process.start(self._take, self._fail_all)

    @property
    def paused(self) -> bool:
        return self._state.paused

    @property
    def latest_step(self) -> StepRecord:
        """The record of the latest step; an empty one if the engine is dead, since it has no requests any more."""
        return StepRecord(0, 0.0) if self.dead is not None else self.telemetry.latest

    @property
    def step_s(self) -> float:
        """Seconds for which the engine owes an answer: since its present step began, or since it was sent the
        oldest request or question that it has not taken; 0 if it owes none. An engine whose process was stopped
        while it was idle begins no step."""
        submitted_s = self._untaken[0][1] if self._untaken else None
        since = [each for each in (self._began_s, submitted_s, self.process.asked_s) if each is not None]
        return time.monotonic() - min(since) if since else 0.0

    # ------------------------------------------------------------------ requests

    @contextlib.contextmanager
    def hold_places(self, count: int = 1) -> Iterator[None]:
        """Context manager: hold places in the queue for `count` requests, all or none, while they are tokenized.

        Raises:
            QueueFullError: fewer than `count` places are free for them (see `check_room`).
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        self.check_room(count)
        self._held += count
        self._idle.clear()
        try:
            yield
        finally:
            self._held -= count
            self._mark_idle()

    def check_room(self, count: int) -> None:
        """Check that `count` requests may be queued at once.

        If other requests are in the server, several requests at once must leave a quarter of the queue free: a
        client with 32 choices must not lock out clients with one.

        Raises: as `hold_places`.
        """
        self._check_accepting()
        limit = self.facts.config.max_waiting_requests
        alone = not self._streams and not self._held
        kept = 0 if count == 1 or alone else limit // 4
        if count > self.queue_room() - kept:
            raise QueueFullError.of(limit, count)

    def _check_accepting(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        if self.draining:
            raise ShuttingDownError("the server is shutting down")

    def queue_room(self) -> int:
        """Return how many more requests the queue can take now: places that are neither taken nor held."""
        return self._state.queue_room - self._in_transit - self._held

    def num_waiting(self) -> int:
        """Return how many requests wait to be computed, including those that are still being tokenized."""
        return self._state.waiting + self._in_transit + self._held

    @property
    def _in_transit(self) -> int:
        """The number of requests that were submitted and that the engine has not taken."""
        return self._submitted - self._state.taken

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Submit requests at the end of the block that holds their places. Returns the streams of their outputs.

        Raises:
            ShuttingDownError: the time to drain is over, or the engine was stopped.
        """
        if self._aborted is not None:
            raise self._aborted
        streams = [RequestStream(self, request) for request in requests]
        if self.dead is not None:
            for stream in streams:
                stream.put(fail(stream.request, self.dead))
            return streams
        self._streams |= {stream.request.request_id: stream for stream in streams}
        self._submitted += len(requests)
        self._untaken.append((self._submitted, time.monotonic()))
        self.process.send(Submit([_arguments_of(request) for request in requests]))
        return streams

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Cancel a request, if its stream still runs. The stream gets the terminal output after the next step."""
        if request_id in self._streams:
            self.process.send(Cancel(request_id, reason))

    def compiler(self, tokenizer: Tokenizer) -> GrammarCompiler:
        """Return a compiler that checks grammars here, and has the engine's process compile them."""
        return RemoteCompiler(tokenizer, self.facts.eos_token_ids, self._compile)

    def _compile(self, grammar: Grammar) -> tuple[RemoteMatcher, float]:
        """Compile a grammar in the engine's process. Blocks. Any thread but the event loop's may call this.

        Args:
            grammar: a grammar that was checked.

        Returns:
            The matcher for one request, and the processor time of compiling it, in seconds.

        Raises:
            InvalidGrammarError: the grammar cannot be compiled.
            EngineDeadError, ShuttingDownError: the engine's process has ended, or ends.
        """
        asked: Future[tuple[int, Future[float]]] = Future()

        def ask() -> None:
            unused = [self._unused.popleft() for _ in range(len(self._unused))]
            asked.set_result(self.process.ask(lambda number: Compile(number, grammar, unused)))

        self._loop.call_soon_threadsafe(ask)
        number, compiled = asked.result()
        compile_s = compiled.result()
        matcher = RemoteMatcher(number)
        # Its request may never be submitted. So when this object ends, the other process's matcher is not needed.
        weakref.finalize(matcher, self._unused.append, number).atexit = False
        return matcher, compile_s

    # ------------------------------------------------------------------ administration

    async def reset_prefix_cache(self) -> int:
        """Free the unused cached blocks between two steps. Returns their number.

        Raises:
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        self._check_accepting()
        return await asyncio.wrap_future(self.call(EngineCalls.reset_prefix_cache))

    async def pause(self) -> None:
        """Pause the engine until `resume`, and wait until all outputs in flight are delivered.

        New requests queue during the pause.

        Raises:
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        self._check_accepting()
        await asyncio.wrap_future(self.call(EngineCalls.pause))
        while await asyncio.wrap_future(self.call(EngineCalls.in_flight)):
            pass  # each call waits for a step, and each step delivers a step in flight
        self._check_accepting()

    async def resume(self) -> None:
        """Let the engine plan steps again. Raises as `pause` does."""
        self._check_accepting()
        await asyncio.wrap_future(self.call(EngineCalls.resume))

    def call(
        self, method: Callable[Concatenate[EngineCalls, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Call a method of `EngineCalls` in the engine's process, between two steps. Returns a future of its
        result, which fails with a ShuttingDownError or an EngineDeadError if the process ends. May be called before
        `start`."""
        assert not kwargs, "arguments are sent by position"
        return self.process.ask(lambda number: Call(number, method, args))[1]

    # ------------------------------------------------------------------ messages of the engine's process

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Shown):
            self.on_frame(message.frame)
            return
        if message.state is not None:
            self._state, self.dead = message.state, message.state.dead
        while self._untaken and self._untaken[0][0] <= self._state.taken:
            self._untaken.popleft()
        match message:
            case Planned(_, began_s, begun):
                self._began_s = began_s
                for stream in filter(None, map(self._streams.get, begun)):
                    stream.request.scheduled_s = began_s
            case Stepped():
                self._take_step(message)
            case Answered():
                pass

    def _take_step(self, step: Stepped) -> None:
        self._began_s = step.next_began_s
        self.telemetry.counters, self.telemetry.accepted_at = step.counters, step.accepted_at
        if step.record is not None:
            self.telemetry.keep(step.record)
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else it has ended already, for example by a stop string
                self._deliver(stream, self._with_text(stream.request, output))
        self._mark_idle()

    def _with_text(self, request: Request, output: StepOutput) -> StepOutput:
        """Return an output of the engine's process with its text. If the text ends the request, cancels it there.
        If the text cannot be made, fails the request and returns its terminal output."""
        if output.token_id is None:
            return output
        try:
            text, offset, reason = decode(request, output.token_id, output.finish_reason)
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            self.cancel(request.request_id)
            return fail(request, error)
        if reason is not None and not output.finished:
            self.cancel(request.request_id, reason)
        output.text_delta, output.text_offset, output.finish_reason = text, offset, reason
        output.finished = output.finished or reason is not None
        return output

    def _deliver(self, stream: RequestStream, output: StepOutput) -> None:
        if output.finished:
            del self._streams[output.request_id]
        stream.put(output)

    def _fail_all(self, error: EngineDeadError) -> None:
        """Fail all requests: the engine's process has ended without being told to."""
        self.dead, self._began_s = error, None
        self._state = EngineState(taken=self._submitted, dead=error)
        self._untaken.clear()
        self.telemetry.counters.requests_failed += len(self._streams)
        for stream in list(self._streams.values()):
            self._deliver(stream, fail(stream.request, error))
        self._mark_idle()

    def _mark_idle(self) -> None:
        if not self._streams and not self._held:
            self._idle.set()

    # ------------------------------------------------------------------ ending

    def stop_accepting(self) -> None:
        """Make `hold_places` refuse new requests. Accepted requests go on."""
        self.draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until every accepted one is answered. Returns True.

        After `timeout_s` seconds, fail the unanswered requests and return False.
        """
        self.stop_accepting()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._abort_all(ShuttingDownError("the server was shut down before this request was finished"))
            return False
        return True

    async def stop(self, timeout_s: float | None = None) -> None:
        """Fail the unanswered requests at once, end the engine's process after its present step, and wait for its
        end.

        Args:
            timeout_s: the process is killed after so many seconds; None: never.
        """
        self.stop_accepting()
        self._abort_all(ShuttingDownError(STOPPED))
        self.process.stop()
        await asyncio.to_thread(self.process.join, timeout_s)

    def _abort_all(self, error: ShuttingDownError) -> None:
        """Fail every stream now. The engine drops the requests after its present step, which may never end."""
        self._aborted = error
        for stream in self._streams.values():
            stream.put_error(error)
        self._streams.clear()
        self._mark_idle()
        self.process.send(Abort(error))


def _arguments_of(request: Request) -> dict[str, Any]:
    """Return the arguments of a request that are sent to the engine's process."""
    matcher = request.matcher
    assert matcher is None or isinstance(matcher, RemoteMatcher), "the maker's compiler has made it"
    arguments = {name: getattr(request, name) for name in SENT}
    return arguments | {"matcher": None if matcher is None else matcher.number}
