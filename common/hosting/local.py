"""An engine in this process, for tests, notebooks and the tutor, which look into the engine or change it."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import cast

from common.engine.engine import Engine
from common.engine.requests import EngineFacts, RequestMaker
from common.hosting.async_engine import AsyncEngine
from common.hosting.child import EngineLoop
from common.hosting.process import SPAWN, EngineProcess


class EngineThread(EngineProcess):
    """An `EngineProcess` with a thread of this process instead of a process. The same messages go to and fro. An
    error of building the engine is raised as it is."""

    def _launch(self) -> tuple[BaseProcess, Connection]:
        make_engine, _ = self._work
        ours, theirs = SPAWN.Pipe()
        thread = _Thread(EngineLoop(theirs, make_engine()), theirs)
        thread.start()
        return cast(BaseProcess, thread), ours


class LocalEngine(AsyncEngine):
    """An `AsyncEngine` around a ready engine. It is built."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(EngineThread(lambda: engine, lambda: None))
        self.engine = engine
        self.build()

    def _new_maker(self, facts: EngineFacts) -> RequestMaker:
        tokenizer = self.engine.maker.tokenizer
        return RequestMaker(facts, tokenizer, self.compiler(tokenizer))


class _Thread(threading.Thread):
    """A thread with the interface of a process, as far as `EngineProcess` uses it."""

    exitcode = 1  # a thread that was not told to end has failed

    def __init__(self, loop: EngineLoop, connection: Connection) -> None:
        super().__init__(name="engine", daemon=True)
        self._loop = loop
        self._connection = connection

    def run(self) -> None:
        with self._connection, contextlib.suppress(EOFError, ConnectionError):
            self._loop.run()

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""
