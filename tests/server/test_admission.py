"""Work of the server beside the engine's steps: each kind of work has a bound, and delays no other kind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from common.constrained.grammar import Grammar
from common.engine.engine import Engine
from common.hosting.async_engine import RemoteCompiler
from common.hosting.local import LocalEngine
from common.server.api import bodies, intake
from common.server.app import create_app
from common.server.options import ServerOptions
from common.server.service import Service
from tests.support.engines import build, tiny_model, until
from tests.support.servers import MODEL

pytestmark = pytest.mark.anyio


class Held:
    """Wraps a function: records the last argument of each call, and holds the call until `open` is set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.open = threading.Event()
        self.calls: list[Any] = []
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append(arguments[-1])
        assert self.open.wait(30)
        return self._function(*arguments, **named)


@pytest.fixture
def hold_grammars(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Held]:
    """Hold the compilation of grammars. Grammars that are compiled already are not held."""

    def hold() -> Held:
        ordinary = RemoteCompiler.new_matcher
        held = Held(ordinary)

        def new_matcher(grammars: RemoteCompiler, grammar: Grammar) -> Any:
            return (held if grammars.compile_s(grammar) is None else ordinary)(grammars, grammar)

        monkeypatch.setattr(RemoteCompiler, "new_matcher", new_matcher)
        return held

    return hold


def hold_tokenizer(engine: Engine) -> Held:
    """Hold every `encode` of an engine's tokenizer."""
    held = Held(engine.maker.tokenizer.encode)
    engine.maker.tokenizer.encode = held
    return held


class Answered:
    """The status, headers and body of an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str]:
        """The status and the code of an error answer."""
        return self.status, str(self.json()["error"]["code"])


class StartedApp:
    """An app in this event loop. Its clients stay connected until their event `left` is set."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.service: Service = app.state.server

    def queue_room(self) -> int:
        return self.service.engine.queue_room()

    async def complete(self, prompt: Any, left: asyncio.Event | None = None, **fields: Any) -> Answered:
        """Request a completion of two tokens that does not stream."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": False} | fields
        return await self.post("/v1/completions", body, left)

    async def post(
        self, path: str, body: dict[str, Any] | bytes, left: asyncio.Event | None = None
    ) -> Answered:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        unread = [{"type": "http.request", "body": sent, "more_body": False}]
        stays = left or asyncio.Event()
        answered = Answered()

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await stays.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answered.status = message["status"]
                answered.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answered.body += message.get("body", b"")

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await self.app(scope, receive, send)
        return answered


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[StartedApp]:
    app = create_app(LocalEngine(engine), ServerOptions(served_model_name=[MODEL]))
    async with app.router.lifespan_context(app):
        yield StartedApp(app)


# ---------------------------------------------------------------------- grammars


def constrained(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"regex": f"[ab]{{{number + 1}}}"}}


async def test_grammars_that_compile_hold_no_places_and_have_a_quota(
    hold_grammars: Callable[[], Held],
) -> None:
    engine = build("continuous", max_waiting_requests=4)
    held = hold_grammars()
    async with started(engine) as app:
        room = app.queue_room()
        slow = [asyncio.create_task(app.complete(f"slow {i}", **constrained(i))) for i in range(8)]
        await until(lambda: app.service.admission.compiling.jobs == 8 and len(held.calls) == 1)
        assert app.queue_room() == room
        refused = await app.complete("one too many", **constrained(8))
        assert refused.refusal == (503, "compiling_busy")
        assert int(refused.headers["retry-after"]) >= 1
        ordinary = await asyncio.gather(*(app.complete(f"ordinary {i}") for i in range(room)))
        assert [answer.status for answer in ordinary] == [200] * room
        assert len(held.calls) == 1, "the compiler was busy all the while"
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        held.open.set()
        await until(lambda: app.service.admission.compiling.jobs == 0)
        assert len(held.calls) == 1, "a grammar whose client has left is not compiled"
        assert (await app.complete("the next", **constrained(9))).status == 200


async def test_a_quick_grammar_does_not_wait_for_one_that_compiles(
    hold_grammars: Callable[[], Held],
) -> None:
    engine = build("continuous")
    async with started(engine) as app:
        assert (await app.complete("first", **constrained(0))).status == 200
        held = hold_grammars()
        slow = asyncio.create_task(app.complete("slow", **constrained(1)))
        await until(lambda: len(held.calls) == 1)
        assert (await app.complete("again", **constrained(0))).status == 200
        assert not slow.done()
        held.open.set()
        assert (await slow).status == 200


# ---------------------------------------------------------------------- prompts that are tokenized

TOKENIZING_THREADS = 2


async def test_few_prompts_are_tokenized_at_once_and_the_others_keep_their_places() -> None:
    engine = build("continuous", max_waiting_requests=8)
    held = hold_tokenizer(engine)
    async with started(engine) as app:
        room = app.queue_room()
        asked = [asyncio.create_task(app.complete(f"prompt {i}")) for i in range(room)]
        await until(lambda: app.queue_room() == 0 and len(held.calls) == TOKENIZING_THREADS)
        assert (await app.complete("one too many")).status == 503
        assert len(held.calls) == TOKENIZING_THREADS < room
        held.open.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * room
        assert sorted(held.calls) == sorted(f"prompt {i}" for i in range(room))
        await until(lambda: app.queue_room() == room)


async def test_a_client_that_leaves_before_its_turn_gives_its_place_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So does a client that leaves while its prompt is tokenized. The thread is free only when that is done."""
    caplog.set_level("INFO", "common.server.logs")
    engine = build("continuous", max_waiting_requests=8)
    held, leaves = hold_tokenizer(engine), asyncio.Event()
    async with started(engine) as app:
        room = app.queue_room()
        running = [asyncio.create_task(app.complete("gone", leaves)) for _ in range(TOKENIZING_THREADS)]
        await until(lambda: len(held.calls) == TOKENIZING_THREADS)
        waiting = asyncio.create_task(app.complete("never", leaves))
        patient = asyncio.create_task(app.complete("patient"))
        await until(lambda: app.queue_room() == room - TOKENIZING_THREADS - 2)
        leaves.set()
        gone = await asyncio.gather(*running, waiting)
        assert [answer.status for answer in gone] == [499] * (TOKENIZING_THREADS + 1)
        dropped = [record for record in caplog.messages if record.startswith("dropped: the client left")]
        assert len(dropped) == TOKENIZING_THREADS + 1
        assert app.queue_room() == room - 1
        assert len(held.calls) == TOKENIZING_THREADS, "the places are free, the threads are not"
        held.open.set()
        assert (await patient).status == 200
        await until(lambda: app.queue_room() == room)
    assert held.calls[TOKENIZING_THREADS:] == ["patient"]
    assert engine.telemetry.counters.requests_added == 1


# ---------------------------------------------------------------------- /tokenize


async def test_tokenizing_for_clients_is_bounded_and_delays_no_completion() -> None:
    engine = build("continuous")
    held = hold_tokenizer(engine)
    async with started(engine) as app:
        leaves = asyncio.Event()
        asked = [
            asyncio.create_task(app.post("/tokenize", {"prompt": f"text {i}"}, leaves)) for i in range(16)
        ]
        await until(lambda: app.service.admission.converting.jobs == 16 and len(held.calls) == 1)
        refused = await app.post("/tokenize", {"prompt": "one too many"})
        assert refused.refusal == (503, "converting_busy")
        refused = await app.post("/detokenize", {"tokens": [1, 2]})
        assert refused.refusal == (503, "converting_busy")
        assert (await app.complete([5, 6, 7])).status == 200, "its threads are others"
        leaves.set()
        await asyncio.gather(*asked)
        held.open.set()
        await until(lambda: app.service.admission.converting.jobs == 0)
        assert len(held.calls) == 1, "texts whose clients have left are not tokenized"
        answer = await app.post("/tokenize", {"prompt": "the next"})
        assert answer.json()["count"] == len("the next")


async def test_a_text_to_tokenize_has_a_longest_length() -> None:
    engine = build("continuous")
    limit = intake.MAX_LENGTHS * engine.maker.facts.max_request_tokens
    async with started(engine) as app:
        held = hold_tokenizer(engine)
        held.open.set()
        least = engine.maker.tokenizer.min_tokens("a" * 1000) / 1000  # tokens per character
        beyond = "a" * int((limit + 1) / least + 1)
        for refused in (
            await app.complete(beyond, truncate_prompt_tokens=4),
            await app.post("/tokenize", {"prompt": beyond}),
        ):
            assert refused.refusal == (422, "invalid_value")
            assert f"at most {limit}" in refused.json()["error"]["message"]
        assert not held.calls
        taken = await app.complete("ab" * engine.maker.facts.max_request_tokens, truncate_prompt_tokens=4)
        assert taken.json()["usage"]["prompt_tokens"] == 4


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    "prompt",
    [[[1]] * (bodies.MAX_CONTAINERS + 1), [1] * (bodies.MAX_VALUES + 1), ["a"] * (bodies.MAX_VALUES + 1)],
    ids=["lists", "ids", "texts"],
)
async def test_bodies_of_very_many_values_are_not_validated(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(build("continuous")) as app:
        with monkeypatch.context() as patched:
            patched.setattr(intake, "parse", lambda *_: pytest.fail("it was validated"))
            body = json.dumps({"model": MODEL, "prompt": prompt}, separators=(",", ":")).encode()
            refused = await app.post("/v1/completions", body)
        assert refused.refusal == (413, "body_too_complex")
        assert (await app.complete("the next")).status == 200


@pytest.mark.parametrize("text", ['a,"b",[c],{d}' * 100_000, '\\",\\\\' * 200_000, ',"\\' * 200_000])
def test_commas_and_brackets_of_a_text_are_no_values(text: str) -> None:
    bodies.refuse_too_many_values(json.dumps({"model": MODEL, "prompt": text, "n": 1}).encode())
    bodies.refuse_too_many_values(json.dumps({"model": MODEL, "prompt": [text], text[:9]: [1, 2]}).encode())


# ---------------------------------------------------------------------- log-probabilities of prompts


async def test_a_prompt_is_scored_once_for_all_its_choices() -> None:
    engine = build("continuous", tiny_model(), max_batch_size=8)
    scored: list[int | None] = []
    add_request = engine.add_request

    def remembering(request: Any) -> bool:
        scored.append(request.params.prompt_logprobs)
        return add_request(request)

    engine.add_request = remembering  # type: ignore[method-assign]
    fields = {"prompt_logprobs": 2, "logprobs": 1, "echo": True, "temperature": 1.0, "seed": 3}
    async with started(engine) as app:
        prompts = ["once upon", "a time"]
        whole = (await app.complete(prompts, n=3, **fields)).json()["choices"]
        assert scored == [2, None, None] * 2
        for prompt, of_prompt in zip(prompts, (whole[:3], whole[3:]), strict=True):
            (alone,) = (await app.complete(prompt, **fields)).json()["choices"]
            for choice in of_prompt:
                assert choice["prompt_logprobs"] == alone["prompt_logprobs"]
                tokens = len(prompt)
                for column, of_alone in zip(
                    choice["logprobs"].values(), alone["logprobs"].values(), strict=True
                ):
                    assert column[:tokens] == of_alone[:tokens]
                assert choice["text"].startswith(prompt)
        streamed = await app.complete(prompts, n=3, stream=True, **fields)
        shown: dict[int, Any] = {}
        for line in streamed.body.decode().splitlines():
            data = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            for choice in data.get("choices", []):
                if "prompt_logprobs" in choice:
                    assert choice["index"] not in shown, "said once"
                    shown[choice["index"]] = choice["prompt_logprobs"]
        assert shown == {choice["index"]: choice["prompt_logprobs"] for choice in whole}


async def test_choices_go_on_when_scoring_their_prompt_fails() -> None:
    """If the choice whose prompt is scored fails, the others go on without the scores."""
    engine = build("continuous", tiny_model(), max_batch_size=8)
    add_request = engine.add_request

    def failing(request: Any) -> bool:
        if request.params.prompt_logprobs is not None:
            raise RuntimeError("injected")
        return add_request(request)

    engine.add_request = failing  # type: ignore[method-assign]
    async with started(engine) as app:
        streamed = await app.complete("once upon", n=3, stream=True, prompt_logprobs=2)
        events = streamed.body.decode().split("\n\n")
        assert sum(event.startswith("event: error") for event in events) == 1
        assert sum(event.startswith("event: done") for event in events) == 2
        assert streamed.body.count(b'"prompt_logprobs":null') == 2
        assert (await app.complete("the next")).status == 200


async def test_log_probabilities_of_a_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_PROMPT_LOGPROBS", 100)
    engine = build("continuous", tiny_model(), max_batch_size=8)
    async with started(engine) as app:
        assert (await app.complete("a" * 10, n=3, prompt_logprobs=2)).status == 200  # 90 entries
        for fields in ({"prompt_logprobs": 3}, {"echo": True, "logprobs": 3}):
            refused = await app.complete("a" * 10, n=3, **fields)
            assert refused.status == 422
            assert "at most 100" in refused.json()["error"]["message"]
        assert (await app.complete("the next")).status == 200
        assert app.queue_room() == engine.scheduler.queue_room()


# ---------------------------------------------------------------------- time


async def test_the_request_timeout_starts_at_arrival(
    hold_grammars: Callable[[], Held],
) -> None:
    engine = build("continuous", request_timeout=0.2)
    held = hold_grammars()
    async with started(engine) as app:
        late = await app.complete("late", **constrained(0))
        assert late.refusal == (504, "request_timeout")
        held.open.set()
        await until(lambda: not app.service.admission.compiling.jobs)
        assert app.queue_room() == engine.scheduler.queue_room()
        assert engine.telemetry.counters.requests_added == 0


# ---------------------------------------------------------------------- one client's many choices


async def test_many_choices_leave_places_for_others() -> None:
    """One request may take the whole queue if it is alone. Beside others, a quarter of the queue stays free."""
    engine = build("continuous", max_waiting_requests=8, max_batch_size=4)
    held = hold_tokenizer(engine)
    async with started(engine) as app:
        room = app.queue_room()
        assert room == 12
        first = asyncio.create_task(app.complete("first"))
        await until(lambda: app.queue_room() == room - 1)
        many = asyncio.create_task(app.complete("many", n=8))
        await until(lambda: app.queue_room() == room - 9)
        refused = await app.complete("too many", n=2)
        assert refused.refusal == (503, "queue_full")
        single = asyncio.create_task(app.complete("single"))
        await until(lambda: app.queue_room() == room - 10)
        held.open.set()
        assert [answer.status for answer in await asyncio.gather(first, many, single)] == [200] * 3
        await until(lambda: app.queue_room() == room)
        assert (await app.complete("alone", n=8)).status == 200
