"""The rules of Chrome's trace events for the kinds of events that our traces have."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]

ROUNDING_US = 0.01


def read_trace(data: bytes) -> list[Event]:
    """Return a trace's events. The closing bracket may be missing, as in a trace that was cut off."""
    text = data.decode().rstrip()
    events: list[Event] = json.loads(text if text.endswith("]") else text + "]")
    return events


def assert_valid(events: list[Event]) -> None:
    """Assert that events have their fields, that the time of each track only grows, and that every span ends."""
    for event in events:
        assert event["ph"] in {"M", "X", "C", "b", "n", "e"}, event
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0, event
    assert {e["name"] for e in events if e["ph"] == "M"} <= {"process_name", "process_labels", "thread_name"}
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    threads: dict[int, list[Event]] = defaultdict(list)
    counters: dict[str, list[Event]] = defaultdict(list)
    tracks: dict[tuple[str, Any], list[Event]] = defaultdict(list)
    for event in events:
        match event["ph"]:
            case "X":
                threads[event["tid"]].append(event)
            case "C":
                counters[event["name"]].append(event)
            case "b" | "n" | "e":
                tracks[event["cat"], event["id"]].append(event)
    assert threads.keys() <= named
    for spans in threads.values():
        _assert_nested(spans)
    for values in counters.values():
        _assert_one_way(values)
        assert all(isinstance(v, int | float) and v >= 0 for e in values for v in e["args"].values())
    for moments in tracks.values():
        _assert_one_way(moments)
        _assert_matched(moments)


def requests_of(events: list[Event]) -> dict[Any, list[Event]]:
    """Return each request's events, by its track."""
    tracks: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "bne":
            tracks[event["id"]].append(event)
    return tracks


def _assert_one_way(events: list[Event]) -> None:
    times = [event["ts"] for event in events]
    assert times == sorted(times), "time goes back"


def _assert_nested(spans: list[Event]) -> None:
    """Assert that any two spans of a thread follow each other, or one contains the other."""
    _assert_one_way(spans)
    ends: list[float] = []
    for span in spans:
        assert span["dur"] >= 0
        while ends and ends[-1] <= span["ts"] + ROUNDING_US:
            ends.pop()
        end = span["ts"] + span["dur"]
        assert not ends or end <= ends[-1] + ROUNDING_US, f"{span['name']} ends after what it began in"
        ends.append(end)


def _assert_matched(events: list[Event]) -> None:
    """Assert that spans end in the reverse order of their beginnings, all of them within one outer span."""
    open_names: list[str] = []
    for place, event in enumerate(events):
        assert open_names or place == 0, "a track of two spans"
        if event["ph"] == "b":
            open_names.append(event["name"])
        elif event["ph"] == "e":
            assert open_names, "an end without a beginning"
            assert open_names.pop() == event["name"], "ends cross"
    assert not open_names, f"{open_names} never end"
