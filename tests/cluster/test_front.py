"""The front, with stand-ins for the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.types import Message

from cluster.forwarding import Forwarded, call, collect, replica_lost
from common.engine.engine import Engine
from common.errors import EngineDeadError
from common.hosting.local import LocalEngine
from common.server.api.stream import event
from common.server.app import create_app
from common.server.errors import unavailable
from common.server.options import CommonOptions
from common.startup.phases import find_phase

pytest.importorskip("ray")
from ray.exceptions import RayError

pytestmark = [pytest.mark.cluster, pytest.mark.anyio]

JSON = (b"content-type", b"application/json")
LOST = unavailable("lost", code="replica_lost", retry_after_s=1)


def start(status: int = 200, **fields: Any) -> Message:
    headers = [JSON, (b"x-request-id", b"1")]
    return {"type": "http.response.start", "status": status, "headers": headers, **fields}


def part(body: bytes, **fields: Any) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True, **fields}


def refusal(code: str) -> list[Any]:
    return [[start(503), part(orjson.dumps(unavailable("no", code=code, retry_after_s=1).body()))]]


def scope_of(
    path: str, method: str = "POST", headers: Sequence[tuple[bytes, bytes]] = (JSON,)
) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": list(headers),
        "client": ("127.0.0.1", 5),
    }


#: An answer of a replica: lists of messages that come together; the replica is lost at an exception.
Script = list[Any]


class Reply:
    """Stands for Serve's response: an iterator that can be cancelled."""

    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self._parts = parts
        self.cancelled = False

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._parts)

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """Stands for Serve's handle of the replicas `a` and `b`.

    Attributes:
        scripts: the answer of each replica.
        whole: what each replica answers to a broadcast, or the exception that it raises.
        asked: the replica that each request went to.
        requests: the requests as they went there.
        replies: the answers that were begun.
    """

    def __init__(self) -> None:
        answer = [[start(), part(b"{}", more_body=False)]]
        self.scripts: dict[str, Script] = {"a": answer, "b": answer}
        self.whole: dict[str, Callable[[], Any]] = {}
        self.asked: list[str] = []
        self.requests: list[Forwarded] = []
        self.replies: list[Reply] = []

    def options(self, **_: Any) -> Replicas:
        return self

    def remote(self, request: Forwarded) -> Reply:
        name = next((name for name in "ab" if name not in request.avoid), "a")  # the router's choice
        self.asked.append(name)
        self.requests.append(request)
        self.replies.append(Reply(self._answer(name)))
        return self.replies[-1]

    async def _answer(self, name: str) -> AsyncIterator[Any]:
        yield name
        for each in self.scripts[name]:
            if isinstance(each, Exception):
                raise each
            yield each

    def broadcast(self, _: str, __: Forwarded) -> Any:
        async def results() -> list[Any]:
            return [SimpleNamespace(get_async=self._one(name)) for name in self.whole]

        return SimpleNamespace(_fetch_replica_results_async=results)

    def _one(self, name: str) -> Any:
        async def answer() -> Any:
            body = self.whole[name]()
            return name, *(body if isinstance(body, tuple) else (start(), orjson.dumps(body)))

        return answer


class Client:
    """Asks a front. `headers` is the status line and the headers of the last answer."""

    def __init__(self, replicas: Replicas, **options: Any) -> None:
        from cluster.front import Front

        plain = Front.__mro__[1]  # without Serve's wrapper, which needs a running cluster
        self.front = plain.__new__(plain)
        plain.__init__(self.front, replicas, CommonOptions(**options).model_dump(), wanted=2)
        self.status = 0
        self.headers: dict[bytes, bytes] = {}

    async def ask(
        self,
        *headers: tuple[bytes, bytes],
        method: str = "POST",
        path: str = "/v1/completions",
        fields: dict[str, Any] | None = None,
    ) -> bytes:
        """Return the body of the answer."""
        sent = [
            {"type": "http.request", "body": orjson.dumps(fields or {"prompt": "Once"}), "more_body": False}
        ]
        received = b""

        async def receive() -> Message:
            if not sent:
                await asyncio.Event().wait()
            return sent.pop()

        async def send(message: Message) -> None:
            nonlocal received
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], dict(message["headers"])
            received += message.get("body", b"")

        scope = scope_of(path, method, [JSON, *headers])
        await self.front.guarded(scope, receive, send)
        return received


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


# ---------------------------------------------------------------------- which replica answers


async def test_a_request_that_a_full_replica_refuses_goes_to_another(replicas: Replicas) -> None:
    client = Client(replicas)
    replicas.scripts["a"] = refusal("queue_full")
    assert await client.ask() == b"{}"
    assert (replicas.asked, client.status) == (["a", "b"], 200)
    replicas.scripts["b"] = refusal("queue_full")
    assert b"queue_full" in await client.ask()
    assert client.status == 503


async def test_the_replica_that_has_a_response_is_the_only_one_asked_for_it(replicas: Replicas) -> None:
    client = Client(replicas)
    replicas.scripts["a"] = refusal("queue_full")
    await client.ask(path="/v1/responses/resp_a_1")
    assert (replicas.asked, client.status) == (["a"], 503)


@pytest.mark.parametrize("before", [[], [[start(lost=b"end")]]], ids=["at once", "after the head"])
async def test_a_replica_that_is_lost_before_the_first_byte_is_replaced_once(
    replicas: Replicas, before: list[Any]
) -> None:
    client = Client(replicas)
    replicas.scripts["a"] = [*before, RayError()]
    assert await client.ask() == b"{}"
    assert replicas.asked == ["a", "b"]
    replicas.scripts["b"] = replicas.scripts["a"]
    assert orjson.loads(await client.ask())["error"]["code"] == "replica_lost"
    assert (client.status, client.headers[b"retry-after"]) == (503, b"1")
    replicas.scripts["b"] = [EngineDeadError("dead")]
    assert orjson.loads(await client.ask())["error"]["code"] == "engine_dead"
    assert len(replicas.asked) == 6, "a request that kills engines does not reach all of them"


async def test_a_requests_id_reaches_the_replica_and_serve_adds_it_to_the_answer(replicas: Replicas) -> None:
    client = Client(replicas)
    await client.ask((b"x-request-id", b"job-5"))
    assert dict(replicas.requests[0].scope["headers"])[b"x-request-id"] == b"job-5"
    assert b"x-request-id" not in client.headers


async def test_keys_hosts_and_sites_are_checked_by_the_front(replicas: Replicas) -> None:
    client = Client(replicas)
    for headers in [
        [(b"host", b"elsewhere.example")],
        [(b"host", b"localhost"), (b"sec-fetch-site", b"cross-site")],
    ]:
        await client.ask(*headers)
        assert client.status == 403
    await client.ask((b"host", b"localhost"))
    assert client.status == 200
    locked = Client(replicas, api_key=["mine"])
    await locked.ask()
    assert locked.status == 401
    await locked.ask((b"authorization", b"Bearer mine"))
    assert locked.status == 200
    assert len(replicas.asked) == 2


async def test_a_drained_front_finishes_what_runs_and_refuses_the_rest(replicas: Replicas) -> None:
    client = Client(replicas)
    answering, over = asyncio.Event(), asyncio.Event()

    async def slow(_: str) -> AsyncIterator[Any]:
        yield "a"
        yield [start(), part(b"1")]
        answering.set()
        await over.wait()
        yield [part(b"2", more_body=False)]

    replicas._answer = slow  # type: ignore[method-assign]
    running = asyncio.create_task(client.ask())
    await answering.wait()
    drained = asyncio.create_task(client.front.drain())
    await asyncio.sleep(0)
    late = Client.__new__(Client)
    late.front = client.front
    assert orjson.loads(await late.ask())["error"]["code"] == "shutting_down"
    assert not drained.done()
    over.set()
    assert await running == b"12"
    await asyncio.wait_for(drained, 5)


# ---------------------------------------------------------------------- a stream that is cut off

TOKEN = event({"choices": [{"index": 0}], "token": "event: done"}, "token")
END = event(LOST.body(), "error")


@pytest.mark.parametrize(
    ("messages", "body"),
    [
        ([start(lost=END), part(TOKEN), part(TOKEN)], TOKEN + TOKEN + END),
        ([start(), part(b'{"id')], b'{"id'),
    ],
    ids=["a stream", "not a stream"],
)
async def test_a_stream_that_is_lost_gets_the_end_that_the_replica_wrote(
    replicas: Replicas, messages: list[Message], body: bytes
) -> None:
    client = Client(replicas)
    replicas.scripts["a"] = [messages[:2], *([each] for each in messages[2:]), RayError()]
    assert await client.ask() == body
    assert client.status == 200
    assert replicas.asked == ["a"]
    assert replicas.replies[0].cancelled


@pytest.fixture(scope="module")
def engine() -> Engine:
    package = find_phase("8")
    return package.build_engine(
        package.Config(model="zoo:llama-tiny", device="cpu", dtype="float32", max_batch_size=32)
    )


async def cut_anywhere(engine: Engine, replicas: Replicas, path: str, fields: dict[str, Any]) -> list[bytes]:
    """Return a stream of the real app as clients get it: cut after each of its messages, and last the whole."""
    app = create_app(LocalEngine(engine))
    body = orjson.dumps({"model": "zoo:llama-tiny", "stream": True, **fields})
    request = Forwarded(scope_of(path), body)
    async with app.router.lifespan_context(app):
        messages = [each async for ready in call(app, request) for each in ready]
    client, bodies = Client(replicas), []
    for end in range(2, len(messages) + 1):
        replicas.scripts["a"] = [[each] for each in messages[:end]]
        if end < len(messages):
            replicas.scripts["a"].append(RayError())
        bodies.append(await client.ask(path=path, fields=fields))
    return bodies


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [f"Once, {i}" for i in range(32)], "logprobs": 20}),
        ("/openai/v1/completions", {"prompt": "Once", "n": 16}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "n": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
async def test_a_stream_ends_with_an_error_wherever_it_is_cut(
    engine: Engine, replicas: Replicas, path: str, fields: dict[str, Any]
) -> None:
    *cut, whole = await cut_anywhere(engine, replicas, path, {"max_tokens": 4, **fields})
    strict = path in ("/openai/v1/completions", "/v1/chat/completions")
    for body in cut:
        *_, last = [line for line in body.splitlines() if line.startswith(b"data: {")]
        assert orjson.loads(last.removeprefix(b"data: "))["error"]["message"] == replica_lost().message
        assert body.endswith(b"data: [DONE]\n\n") is strict
    assert b"error" not in whole


async def test_a_response_cut_anywhere_ends_failed_with_a_number_after_all(
    engine: Engine, replicas: Replicas
) -> None:
    fields = {"input": "Hello", "max_output_tokens": 6, "ignore_eos": True}
    *cut, whole = await cut_anywhere(engine, replicas, "/v1/responses", fields)
    for body in cut:
        events = [orjson.loads(line.removeprefix(b"data: ")) for line in body.splitlines()[1::3]]
        names, numbers = ([event[name] for event in events] for name in ("type", "sequence_number"))
        assert numbers == sorted(set(numbers))
        assert names[:2] == ["response.created", "response.in_progress"]
        assert names[-2:] == ["error", "response.failed"]
        assert (events[-2]["code"], events[-1]["response"]["status"]) == ("replica_lost", "failed")
        assert events[-1]["response"]["id"] == events[0]["response"]["id"]
    assert b"response.incomplete" in whole
    assert b"response.failed" not in whole


# ---------------------------------------------------------------------- answers of all replicas


def dead() -> tuple[Message, bytes]:
    return start(503), orjson.dumps(unavailable("dead", code="engine_dead", retry_after_s=30).body())


def lost() -> None:
    raise RayError


def well() -> dict[str, str]:
    return {"status": "ok", "phase": "p"}


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ({"a": well, "b": well}, ("ok", {"a": "ok", "b": "ok"})),
        ({"a": well, "b": dead}, ("degraded", {"a": "ok", "b": "engine_dead"})),
        ({"a": well, "b": dead, "c": well}, ("degraded", {"a": "ok", "b": "engine_dead", "c": "ok"})),
        ({"a": well, "b": lost}, ("degraded", {"a": "ok"})),
        ({"a": well}, ("degraded", {"a": "ok"})),  # Serve is starting the second replica
    ],
)
async def test_a_cluster_is_well_enough_while_a_replica_lives(
    replicas: Replicas, whole: dict[str, Any], said: tuple[str, dict[str, str]]
) -> None:
    client = Client(replicas)
    replicas.whole = whole
    health = orjson.loads(await client.ask(method="GET", path="/health"))
    assert (client.status, health) == (200, {"status": said[0], "phase": "p", "replicas": said[1]})


async def test_a_cluster_whose_replicas_are_dead_or_gone_is_not_well(replicas: Replicas) -> None:
    for whole, code in (({"a": dead, "b": dead}, b"engine_dead"), ({"a": lost}, b"no_replica")):
        client = Client(replicas)
        replicas.whole = whole
        assert code in await client.ask(method="GET", path="/health")
        assert client.status == 503


async def test_telemetry_is_summed_and_each_replicas_own_is_there(replicas: Replicas) -> None:
    one = {"phase": "p", "max_batch_size": 8, "max_seq_len": 64, "queue_room": 3, "next_step": 2}
    replicas.whole = {
        "a": lambda: one | {"counters": {"steps": 2, "busy_s": 0.5}, "steps": [1, 2]},
        "b": lambda: one | {"counters": {"steps": 5, "busy_s": 0.25}, "steps": []},
    }
    said = orjson.loads(await Client(replicas).ask(method="GET", path="/telemetry"))
    assert said["counters"] == {"steps": 7, "busy_s": 0.75}
    assert (said["queue_room"], said["max_batch_size"], said["max_seq_len"]) == (6, 16, 64)
    assert said["replicas"]["a"]["steps"] == [1, 2]
    assert said["next_step"] == 7  # the end, so readers ask for no other page


async def test_metrics_have_a_family_once_and_a_sample_for_each_replica(replicas: Replicas) -> None:
    page = b'# HELP vllm:x_total Text\n# TYPE vllm:x_total counter\nvllm:x_total{phase="p"} %d\n'
    replicas.whole = {"a": lambda: (start(), page % 1), "b": lambda: (start(), page % 2)}
    said = (await Client(replicas).ask(method="GET", path="/openai/metrics")).decode()
    assert said.count("# TYPE vllm:x_total counter") == 1
    assert 'vllm:x_total{phase="p",replica="a"} 1.0' in said
    assert 'vllm:x_total{phase="p",replica="b"} 2.0' in said


async def test_the_caches_of_all_living_replicas_are_reset_unless_one_refuses(replicas: Replicas) -> None:
    client = Client(replicas)
    four = {"dropped_blocks": 4}
    replicas.whole = {"a": dead, "b": lambda: four, "c": lambda: four}
    assert orjson.loads(await client.ask(path="/reset_prefix_cache")) == {"dropped_blocks": 8}
    assert int(client.headers[b"content-length"]) == len(b'{"dropped_blocks":8}')
    replicas.whole["b"] = lambda: (start(400), b"wrong")
    assert await client.ask(path="/reset_prefix_cache") == b"wrong"
    assert client.status == 400


# ---------------------------------------------------------------------- a call in the replica's process


async def test_an_answer_comes_as_it_is_made_and_leaving_early_is_heard() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        first = await receive()
        await send(start())
        await send(part(scope["path"].encode() + first["body"]))
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await send(part(b"."))
            await asyncio.sleep(0)
        seen.append(leaving.result()["type"])

    answer = call(app, Forwarded(scope_of("/v1/completions"), b"{}"))
    messages = await anext(answer)
    while len(messages) < 20:
        messages += await anext(answer)
    assert messages[:2] == [start(), part(b"/v1/completions{}")]
    assert {each["body"] for each in messages[2:]} == {b"."}
    await answer.aclose()
    assert seen == ["http.disconnect"]


async def test_an_app_that_raises_ends_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def failing(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(500))
        await send(part(b"sorry"))
        raise RuntimeError("inside")

    request = Forwarded(scope_of("/v1/completions"), b"{}")
    assert await collect(failing, request) == (start(500), b"sorry")
    assert "inside" in caplog.text
