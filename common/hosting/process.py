"""An engine in a process of its own, so that HTTP and text take no time from its steps.

```text
front: HTTP, tokens to text, SSE                           engine's process: an `EngineThread`
  event loop ── submit, cancel, call, abort, stop ───────> main thread ─> inbox ─┐
             <─ planned: a step begins ───────────────────  engine thread        ├─> step ─> step ─> …
             <─ stepped: token ids and log-probabilities ─  engine thread <──────┘
             ── compile ──────────────────────────────────> main thread ─> compiling threads
             <─ compiled: the number of a matcher ────────  compiling threads
```

Each message is a pickled tuple, with its length before it, on a pair of sockets. A step sends a few messages,
whatever the number of its requests. The engine's process has no detokenizers: the front makes the text, finds stop
strings, and then cancels the request. So the engine may compute a few tokens that no client gets.

A thread of the front that needs a matcher waits until the engine's process has compiled the grammar. That process
keeps the matcher until the request that needs it is submitted, or will not come any more.

If the engine's process ends, its requests fail and the engine is dead. If the front ends, in whatever way, its
socket closes, and the engine's process ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from common.constrained.grammar import Grammar, GrammarCompiler, Matcher, Verdict
from common.engine.commit import decode, fail
from common.engine.engine import Engine
from common.engine.requests import EngineFront
from common.engine.telemetry import Counters, StepRecord, Telemetry
from common.errors import EngineDeadError, ShuttingDownError, StartupError
from common.hosting.calls import EngineCalls
from common.hosting.child import LENGTH, Facts, Model, RemoteMatcher, State, new_request, packed, receive
from common.hosting.thread import STOPPED, Deliver
from common.models.registry import open_checkpoint
from common.observing.frames import Frame
from common.request import FinishReason, Request, StepOutput
from common.text.tokenizer import Tokenizer
from kernels.dispatch import Kernels

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


#: Has the engine's process compile a grammar. Returns the matcher, and the seconds of processor time of compiling.
CompileThere = Callable[[Grammar], tuple[RemoteMatcher, float]]


class RemoteCompiler(GrammarCompiler):
    """Checks grammars in the HTTP process. The engine's process compiles them.

    Args:
        tokenizer, eos_token_ids: as for `GrammarCompiler`.
        compile_there: compiles a checked grammar in the engine's process.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Collection[int], compile_there: CompileThere
    ) -> None:
        super().__init__(tokenizer, eos_token_ids)
        self._compile_there = compile_there

    def compile(self, grammar: Grammar) -> RemoteMatcher:
        matcher, compile_s = self._compile_there(grammar)
        self._verdicts.put(grammar, Verdict(None, compile_s))
        return matcher


class RemoteEngine(EngineFront):
    """Prepares requests for an engine in another process.

    Args:
        facts: the properties of that engine.
        compile_there: compiles a checked grammar in the engine's process.
    """

    def __init__(self, facts: Facts, compile_there: CompileThere) -> None:
        checkpoint = open_checkpoint(facts.config.model)
        tokenizer = checkpoint.tokenizer(facts.config.chat_template)
        if facts.config.escape_special_tokens:
            tokenizer.escape_special_tokens()
        super().__init__(
            phase=facts.phase,
            config=facts.config,
            tokenizer=tokenizer,
            grammars=RemoteCompiler(tokenizer, facts.model.config.eos_token_ids, compile_there),
            telemetry=Telemetry(),
            default_params=facts.default_params,
            clock=time.monotonic,
        )
        self._facts = facts

    @property
    def model(self) -> Model:
        return self._facts.model

    @property
    def kernels(self) -> Kernels:
        return self._facts.kernels

    @property
    def has_priorities(self) -> bool:
        return self._facts.has_priorities

    @property
    def pool_limit(self) -> int | None:
        return self._facts.pool_limit

    def new_matcher(self, grammar: Grammar) -> Matcher:
        return self.grammars.new_matcher(grammar)


class EngineProcess:
    """Builds an engine in a process of its own and runs it there. The methods are those of `EngineThread`.

    After `start`, call them in the event loop's thread only, except for `compile` and `join`.

    Args:
        make_engine: builds the engine. It is pickled: a function of a module, or a `functools.partial` of one.
        prepare: called in the new process before `make_engine`, to set up its log.
    """

    def __init__(self, make_engine: Callable[[], Engine], prepare: Callable[[], None]) -> None:
        self._work = make_engine, prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._engine: RemoteEngine | None = None
        self._state = State()
        self._began_s: float | None = None  # when the present step began, on the clock of `time.monotonic`
        self._submitted = 0
        # For each submission that the engine's process has not taken: `_submitted` after it, and its time.
        self._untaken: deque[tuple[int, float]] = deque()
        self._requests: dict[str, Request] = {}
        self._outcomes: dict[
            int, tuple[float, Future[Any]]
        ] = {}  # the time of asking, and the answer to come
        self._numbers = itertools.count()
        self._unused: deque[int] = deque()  # numbers of matchers that no request needs any more
        self._unsent: list[bytes] = []  # messages from before the event loop had the socket
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = False

    def build(self) -> RemoteEngine:
        """Start the process and block until it has built its engine. Returns the front of this engine.

        Raises:
            StartupError: the engine cannot be built, or its process has ended.
        """
        self._link, theirs = socket.socketpair()
        # As in `multiprocessing`, modules are found where this process finds them.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from common.hosting.child import serve; serve({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's Ctrl-C goes to the front only
            )
        try:
            self._link.sendall(packed(self._work))
            built, self._state = receive(self._link)
        except (EOFError, OSError):
            raise StartupError(f"the engine's process {self._ending()} before the engine was built") from None
        if isinstance(built, Exception):
            raise built
        self._engine = RemoteEngine(built, self.compile)
        return self._engine

    @property
    def engine(self) -> RemoteEngine:
        assert self._engine is not None, "`build` was called"
        return self._engine

    @property
    def running(self) -> bool:
        """Whether the engine's process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def step_s(self) -> float:
        """Seconds for which the engine's process owes an answer: since its present step began, or since it was sent
        the oldest request or call that it has not taken. A process that was stopped while it was idle begins no
        step."""
        sent = [each for _, each in itertools.islice(self._untaken, 1)]
        asked = [each for each, _ in itertools.islice(self._outcomes.values(), 1)]
        now = time.monotonic()
        return now - min(now if self._began_s is None else self._began_s, *sent, *asked, now)

    def start(self, deliver: Deliver, publish: Callable[[Frame | None], None]) -> None:
        self._loop, self._deliver, self._publish = asyncio.get_running_loop(), deliver, publish
        self._reading = self._loop.create_task(self._read())

    def queue_room(self) -> int:
        return self._state.queue_room - self._in_inbox

    def num_waiting(self) -> int:
        return self._state.waiting + self._in_inbox

    @property
    def _in_inbox(self) -> int:
        return self._submitted - self._state.taken

    # ------------------------------------------------------------------ to the engine's process

    def submit(self, requests: Sequence[Request]) -> None:
        dead = self.engine.dead
        if dead is not None:
            self._loop.call_soon(self._deliver, [fail(request, dead) for request in requests])
            return
        self._requests |= {request.request_id: request for request in requests}
        self._submitted += len(requests)
        self._untaken.append((self._submitted, time.monotonic()))
        self._send("submit", [new_request(request) for request in requests])

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        self._send("cancel", request_id, reason)

    def call(
        self, function: Callable[Concatenate[EngineCalls, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        if self._stopping:
            raise ShuttingDownError(STOPPED)
        outcome: Future[T] = Future()
        self._ask(outcome, "call", function, args, kwargs)
        return outcome

    def compile(self, grammar: Grammar) -> tuple[RemoteMatcher, float]:
        """Compile a grammar in the engine's process. Blocks. Any thread but the event loop's may call this.

        Args:
            grammar: a grammar that was checked.

        Returns:
            The matcher for one request, and the processor time of compiling it, in seconds.

        Raises:
            InvalidGrammarError: the grammar cannot be compiled.
            EngineDeadError: the engine's process has ended.
        """
        outcome: Future[tuple[RemoteMatcher, float]] = Future()
        self._loop.call_soon_threadsafe(self._ask_to_compile, outcome, grammar)
        matcher, compile_s = outcome.result()
        # Its request may never be submitted. So when this object ends, the other process's matcher is not needed.
        weakref.finalize(matcher, self._unused.append, matcher.number).atexit = False
        return matcher, compile_s

    def _ask_to_compile(self, outcome: Future[Any], grammar: Grammar) -> None:
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        self._ask(outcome, "compile", grammar, unused)

    def _ask(self, outcome: Future[Any], kind: str, *content: object) -> None:
        """Send a message to the engine's process. The answer will be the result or the error of `outcome`."""
        if self.engine.dead is not None and not self.running:
            outcome.set_exception(self.engine.dead)
            return
        number = next(self._numbers)
        self._outcomes[number] = time.monotonic(), outcome
        self._send(kind, number, *content)

    def abort(self, error: Exception) -> None:
        self._requests.clear()
        self._send("abort", error)

    def stop(self) -> None:
        self._stopping = True
        self._send("stop")

    def join(self, timeout_s: float | None = None) -> None:
        """Block until the process has ended. Kill it after `timeout_s` seconds.

        A process that was stopped, or hangs in a driver, does not see its front's end, and would keep its memory.
        """
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the engine's process did not end within %g s, and was killed", timeout_s)
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)

    def _send(self, *message: object) -> None:
        if self._writer is None:
            self._unsent.append(packed(message))
        elif not self._writer.is_closing():
            self._writer.write(packed(message))

    # ------------------------------------------------------------------ from the engine's process

    async def _read(self) -> None:
        assert self._process is not None
        reader, self._writer = await asyncio.open_connection(sock=self._link, limit=2**22)
        self._writer.writelines(self._unsent)
        self._unsent.clear()
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._take(*pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended
        except Exception:  # a bug: the engine's outputs can no longer be followed
            logger.exception("a message of the engine's process failed")
            self._process.kill()
        self._writer.close()
        if not self._stopping:
            await asyncio.to_thread(self._process.wait)
            self._fail_all()

    def _take(self, kind: str, *content: Any) -> None:
        if kind == "frame":
            self._publish(*content)
            return
        if kind == "compiled":
            self._settle(*content)
            return
        self._state, *rest = content
        while self._untaken and self._untaken[0][0] <= self._state.taken:
            self._untaken.popleft()
        self.engine.paused, self.engine.dead = self._state.paused, self._state.dead
        if kind == "planned":
            self._began_s, begun = rest
            for request in filter(None, map(self._requests.get, begun)):
                request.scheduled_s = self._began_s
        elif kind == "stepped":
            self._take_step(*rest)
        else:
            self._settle(*rest)

    def _settle(self, number: int, result: object, error: Exception | None) -> None:
        _, outcome = self._outcomes.pop(number)
        if not outcome.set_running_or_notify_cancel():  # its client has left
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def _take_step(
        self, rows: Iterable[Sequence[Any]], step: Sequence[Any] | None, next_begins_s: float | None
    ) -> None:
        self._began_s = next_begins_s
        if step is not None:
            record, counters, accepted_at = step
            telemetry = self.engine.telemetry
            telemetry.counters, telemetry.accepted_at = Counters(*counters), accepted_at
            telemetry.keep(StepRecord(*record))
        outputs = [output for row in rows if (output := self._with_text(*row)) is not None]
        if outputs:
            self._deliver(outputs)

    def _with_text(
        self,
        request_id: str,
        token_id: int | None,
        _text: str,
        _offset: int,
        ended: bool,
        reason: FinishReason | None,
        *rest: Any,
    ) -> StepOutput | None:
        """Return an output of the engine's process with its text. Arguments: the fields of `StepOutput`, in order.

        Returns None if the request has ended in this process already, for example by a stop string. If the text
        cannot be made, fails the request and returns its terminal output.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        text, offset = "", 0
        if token_id is not None:
            try:
                text, offset, reason = decode(request, token_id, reason)
            except Exception as error:
                logger.exception("request %s failed", request_id)
                self.cancel(request_id)
                del self._requests[request_id]
                return fail(request, error)
            if reason is not None and not ended:
                self.cancel(request_id, reason)
        ended = ended or reason is not None
        if ended:
            del self._requests[request_id]
        return StepOutput(request_id, token_id, text, offset, ended, reason, *rest)

    def _fail_all(self) -> None:
        """Fail all requests and calls that wait for the engine's process, which has ended without being told to."""
        error = EngineDeadError(f"the engine's process {self._ending()}; restart the server")
        logger.error(error)
        self.engine.dead, self._began_s = error, None
        self._untaken.clear()
        self._state = State(taken=self._submitted, dead=error)
        outputs = [fail(request, error) for request in self._requests.values()]
        self.engine.telemetry.counters.requests_failed += len(outputs)
        self._requests.clear()
        self._deliver(outputs)
        for number in list(self._outcomes):
            self._settle(number, None, error)

    def _ending(self) -> str:
        """Block until the engine's process has ended. Returns how it ended, as words for a message."""
        assert self._process is not None
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
