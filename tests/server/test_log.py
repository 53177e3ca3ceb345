"""The log has one line for each request, without any text that a client wrote."""

from __future__ import annotations

import re
import time
import uuid

import pytest

from tests.support.servers import (
    HANG_S,
    QUEUE,
    ServerProcess,
    assert_error,
    eventually,
    hold_a_full_batch,
    in_background,
)

WROTE = "Xylophone"  # a client's prompt, which no log may contain
LINE = re.compile(
    r"^\d\d:\d\d:\d\d (?P<level>\w+) +cmpl-[0-9a-f]{32}: (?:(?P<choices>\d+) choices, )?"
    r"(?P<prompt>\d+) prompt and (?P<new>\d+) new tokens, "
    r"(?:the first after (?P<first>\d+\.\d{3}) s, longest gap (?P<gap>\d+\.\d{3}) s, )?"
    r"(?:(?P<rate>\d+\.\d) tokens/s, )?from (?P<client>\S+), "
    r"(?:user (?P<user>'.*'), )?ended: (?P<ended>.*)\n$"
)


@pytest.fixture(autouse=True)
def nothing_older(gated: ServerProcess) -> None:
    begin(gated)


def begin(server: ServerProcess) -> None:
    """Wait until all lines of earlier requests are logged: the line of a new request must be the last."""
    label = uuid.uuid4().hex
    server.complete(max_tokens=1, user=label)
    eventually(lambda: label in server.log[-1])
    server.begin_test()


def lines(server: ServerProcess, count: int) -> list[str]:
    """Wait until `count` lines were logged since the test began, and return them. More lines fail."""
    eventually(lambda: len(server.log) - server.logged >= count)
    said = server.log[server.logged :]
    assert len(said) == count, "".join(said)
    assert WROTE not in "".join(said)
    return said


def ends(server: ServerProcess, count: int) -> list[dict[str, str]]:
    matches = [LINE.match(line) for line in lines(server, count)]
    assert all(matches), server.log_text
    return [match.groupdict() for match in matches if match is not None]


def test_each_answer_is_logged_at_its_end(gated: ServerProcess) -> None:
    usages = [
        gated.complete(prompt=WROTE, max_tokens=5, ignore_eos=True)["usage"],
        gated.events(prompt=WROTE, max_tokens=7, ignore_eos=True, user="a\nb")[-1][1]["usage"],
        gated.events(prompt=WROTE, max_tokens=1, ignore_eos=True)[-1][1]["usage"],
    ]
    whole, stream, single = ends(gated, 3)
    for line, usage in zip((whole, stream, single), usages, strict=True):
        assert (line["level"], line["ended"], line["choices"]) == ("INFO", "length", None)
        assert (int(line["prompt"]), int(line["new"])) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert float(line["first"]) >= 0
        assert line["client"] == "127.0.0.1"
    assert (whole["user"], stream["user"]) == (None, r"'a\nb'")
    assert min(float(whole["rate"]), float(stream["rate"])) > 0
    assert single["rate"] is None, "its only token came after the time that is said apart"
    assert float(single["gap"]) == 0


def test_several_choices_have_one_line(gated: ServerProcess) -> None:
    text = gated.complete(max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    begin(gated)
    answer = gated.complete(
        prompt=["Once upon a time", WROTE], n=2, max_tokens=8, ignore_eos=True, stop=[text[4:9]]
    )
    (line,) = ends(gated, 1)
    assert line["choices"] == "4"
    assert int(line["prompt"]) == answer["usage"]["prompt_tokens"], "a prompt counts once"
    assert int(line["new"]) == answer["usage"]["completion_tokens"]
    assert line["ended"] == "2 stop and 2 length"


def test_a_client_that_leaves_is_logged(gated: ServerProcess) -> None:
    for stream in (True, False):
        gated.begin_test()
        batch = hold_a_full_batch(gated)
        connection = gated.raw(prompt=WROTE, stream=stream, max_tokens=1000, ignore_eos=True)
        eventually(lambda: gated.queue_room() == QUEUE - 1)
        time.sleep(0.5)  # until it is tokenized: leaving before that gives another line
        connection.close()
        eventually(lambda: "(the client left)" in gated.log_text)
        (line,) = ends(gated, 1)
        assert (line["level"], line["ended"]) == ("INFO", "cancelled (the client left)")
        assert (line["new"], line["first"]) == ("0", None)
        gated.order("open")
        assert batch.result(HANG_S).status_code == 200
        eventually(lambda: gated.counters()["requests_cancelled"] == 1)
        lines(gated, 2)


def test_a_refusal_says_why_and_is_a_warning_if_the_server_is_the_reason(gated: ServerProcess) -> None:
    batch = hold_a_full_batch(gated)
    waiting = in_background(QUEUE, lambda _: gated.post())
    eventually(lambda: gated.queue_room() == 0)
    answer = gated.post(prompt=WROTE)
    assert_error(answer, 503, None, "queue_full")
    (full,) = lines(gated, 1)
    origin = rf", from 127\.0\.0\.1, request '{answer.headers['x-request-id']}'$"
    assert re.search(r" WARNING refused: 503 queue_full: .*--max-waiting-requests.*" + origin, full)
    gated.order("open")
    for each in (batch, *waiting):
        assert each.result(HANG_S).status_code == 200
    lines(gated, 1 + 1 + QUEUE)
    gated.begin_test()
    for fields, says in (
        ({"temperature": "hot"}, "400 invalid_type: 'temperature: "),
        ({"temperature": -1}, "422 invalid_value: 'temperature: "),
        ({"max_tokens": 100_000}, "422 invalid_value: 'max_tokens 100000 leaves no room "),
        ({"suffix": "\x1b\nERROR"}, r"""422 invalid_value: 'suffix: "\\u001b\\nERROR" is refused"""),
    ):
        assert gated.post(prompt=WROTE, **fields).status_code in (400, 422)
        (line,) = lines(gated, 1)
        assert f" INFO    refused: {says}" in line
        gated.begin_test()
    assert gated.client.get("/nowhere").status_code == 404
    assert gated.client.get("/health").status_code == 200
    assert gated.complete(max_tokens=1)
    lines(gated, 1)


def test_a_failed_pass_is_logged_as_a_warning(gated: ServerProcess) -> None:
    gated.order("nan")
    for stream in (False, True):
        gated.post(prompt=WROTE, stream=stream)
        eventually(lambda: "ended: " in gated.log_text)
        (line,) = (match for line in gated.log[gated.logged :] if (match := LINE.match(line)))
        assert (line["level"], line["ended"]) == ("WARNING", "error nan_logits")
        assert WROTE not in gated.log_text
        gated.begin_test()
