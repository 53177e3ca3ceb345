"""Routing policies: functions of a request's keys and the replicas' loads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.policy import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    POLICIES,
    HolderTable,
    LeastLoaded,
    Load,
    LoadTable,
    Policy,
    Prefix,
    RoundRobin,
    prefix_keys,
)
from cluster.scaling import replicas_for

LOADS = st.builds(
    Load,
    seats=st.integers(1, 8),
    active=st.integers(0, 8),
    waiting=st.integers(0, 8),
    queue_room=st.integers(0, 8),
    kv_use=st.floats(0, 1),
)
REPLICAS = st.dictionaries(st.sampled_from("abcdef"), LOADS, min_size=1)
PROMPTS = st.lists(st.sampled_from([b"x" * BLOCK_BYTES, b"y" * BLOCK_BYTES]), max_size=6).map(b"".join)

IDLE = Load(seats=8, queue_room=64)


def idle(names: str) -> dict[str, Load]:
    return dict.fromkeys(names, IDLE)


@pytest.mark.parametrize("name", POLICIES)
@given(asked=st.lists(st.tuples(PROMPTS, REPLICAS), max_size=12), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_the_same_questions_get_the_same_answers(
    name: str, asked: list[tuple[bytes, dict[str, Load]]], seed: int
) -> None:
    def answers(policy: Policy) -> list[str]:
        return [policy.choose(prefix_keys(prompt), loads) for prompt, loads in asked]

    chosen = answers(POLICIES[name](seed))
    assert chosen == answers(POLICIES[name](seed))
    for replica, (_, loads) in zip(chosen, asked, strict=True):
        assert replica in loads
        assert not loads[replica].is_full or all(load.is_full for load in loads.values())


@given(loads=REPLICAS)
@settings(max_examples=100)
def test_the_least_loaded_is_just_that(loads: dict[str, Load]) -> None:
    chosen = loads[LeastLoaded().choose([], loads)]
    assert (chosen.is_full, chosen.value) == min((load.is_full, load.value) for load in loads.values())


def test_memory_counts_where_requests_do_not() -> None:
    few_but_long = Load(seats=8, active=2, queue_room=64, kv_use=0.9)
    many_but_short = Load(seats=8, active=5, queue_room=64, kv_use=0.1)
    assert LeastLoaded().choose([], {"a": few_but_long, "b": many_but_short}) == "b"


def test_a_turn_for_everybody() -> None:
    policy = RoundRobin()
    assert [policy.choose([], idle("bca")) for _ in range(5)] == ["a", "b", "c", "a", "b"]


@given(prompts=st.lists(PROMPTS, min_size=1, max_size=20), seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_equal_prompts_go_together(prompts: list[bytes], seed: int) -> None:
    """A prompt goes to the replica that served it first, whatever prompts came between."""
    policy, first = Prefix(seed), {}
    for prompt in prompts:
        chosen = policy.choose(prefix_keys(prompt), idle("abc"))
        if prompt:  # an empty prompt has no block to remember
            assert first.setdefault(prompt, chosen) == chosen


@given(load=LOADS, margin=st.floats(0, 4))
@settings(max_examples=100)
def test_a_loaded_favourite_is_passed_over(load: Load, margin: float) -> None:
    policy = Prefix(margin=margin)
    keys = prefix_keys(b"x" * 3 * BLOCK_BYTES)
    favourite = policy.choose(keys, idle("ab"))
    other = "ab".replace(favourite, "")
    stays = not load.is_full and load.value <= margin
    assert policy.choose(keys, {favourite: load, other: IDLE}) == (favourite if stays else other)


def test_who_stood_in_for_a_favourite_has_the_prompt_too() -> None:
    policy = Prefix()
    keys = prefix_keys(b"x" * BLOCK_BYTES)
    favourite = policy.choose(keys, idle("ab"))
    other = "ab".replace(favourite, "")
    busy = Load(seats=8, active=8, queue_room=64)
    assert policy.choose(keys, {favourite: busy, other: IDLE}) == other
    assert (
        policy.choose(keys, {favourite: busy.plus(-4), other: IDLE}) == other
    )  # both replicas have the prompt, so the load decides


def test_a_replica_that_is_gone_is_nobodys_favourite() -> None:
    policy = Prefix(seed=3)
    keys = prefix_keys(b"x" * 3 * BLOCK_BYTES)
    favourite = policy.choose(keys, idle("ab"))
    policy.forget(favourite)
    assert len(policy.holders) == 0
    assert policy.choose(keys, idle("ab".replace(favourite, ""))) != favourite


# ---------------------------------------------------------------------- keys


@given(shared=PROMPTS, one=st.binary(max_size=200), two=st.binary(max_size=200))
@settings(max_examples=100)
def test_prompts_share_keys_as_far_as_they_share_blocks(shared: bytes, one: bytes, two: bytes) -> None:
    a, b = shared + one, shared + two
    same = 0
    while a[: (same + 1) * BLOCK_BYTES] == b[: (same + 1) * BLOCK_BYTES] and (same + 1) * BLOCK_BYTES <= min(
        len(a), len(b)
    ):
        same += 1
    keys_a, keys_b = prefix_keys(a), prefix_keys(b)
    assert keys_a[:same] == keys_b[:same]
    assert not set(keys_a[same:]) & set(keys_b[same:])
    assert len(keys_a) == len(a) // BLOCK_BYTES


def test_a_salt_keeps_prompts_apart_and_long_ones_have_no_more_keys() -> None:
    prompt = b"x" * BLOCK_BYTES * (MAX_BLOCKS + 9)
    assert len(prefix_keys(prompt)) == MAX_BLOCKS
    assert not set(prefix_keys(prompt, b"mine")) & set(prefix_keys(prompt))


@given(
    orders=st.lists(
        st.tuples(PROMPTS, st.sampled_from("abcdef"), st.sampled_from(["add", "add", "add", "forget"])),
        max_size=60,
    ),
    capacity=st.integers(0, 12),
)
@settings(max_examples=100)
def test_the_table_is_bounded_and_counts_right(orders: list[tuple[bytes, str, str]], capacity: int) -> None:
    table = HolderTable(capacity)
    for prompt, replica, order in orders:
        table.add(prefix_keys(prompt), replica) if order == "add" else table.forget(replica)
        assert len(table) <= capacity
        assert all(table._holders.values())


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    table = HolderTable(4)
    old, new = prefix_keys(b"o" * 4 * BLOCK_BYTES), prefix_keys(b"n" * 2 * BLOCK_BYTES)
    table.add(old, "a")
    table.add(new, "b")
    assert table.longest(old[:2], "ab") == ["a"]
    assert table.longest(new, "ab") == ["b"]
    assert old[2] not in table._holders
    assert old[3] not in table._holders


# ---------------------------------------------------------------------- loads


@given(load=LOADS, more=st.integers(0, 12))
@settings(max_examples=100)
def test_requests_fill_seats_first_and_are_never_lost(load: Load, more: int) -> None:
    fuller = load.plus(more)
    assert fuller.active + fuller.waiting == load.active + load.waiting + more
    assert fuller.queue_room == load.queue_room - more
    assert fuller.value >= load.value
    emptier = fuller.plus(-more)
    assert emptier.active + emptier.waiting == load.active + load.waiting
    assert load.plus(-1000).active == load.plus(-1000).waiting == 0


def test_a_burst_is_spread_before_any_report_of_it() -> None:
    table, policy = LoadTable(), LeastLoaded()
    for name in "abcd":
        table.report(name, IDLE, 1)
    sent = []
    for _ in range(16):
        sent.append(policy.choose([], {name: table.load(name) for name in "abcd"}))
        table.count(sent[-1], 1)
    assert {sent.count(name) for name in "abcd"} == {4}


def test_a_report_replaces_what_was_counted_before_it() -> None:
    table = LoadTable()
    table.report("a", IDLE, 1)
    table.count("a", 1)
    table.count("a", 1)
    assert table.load("a").active == 2
    busy = Load(seats=8, active=5, queue_room=64)
    table.report("a", busy, 2)  # two of this router's requests, three others
    assert table.load("a").active == 5
    table.count("a", -1)
    table.report("a", busy, 2)  # the same report, seen again
    assert table.load("a").active == 4
    table.report("a", busy, 3)
    assert table.load("a").active == 5
    table.keep([])
    table.count("a", -1)  # it ended with its replica
    assert table.load("a").active == 0
    table.keep([])
    assert not table._since


def test_a_replica_without_a_report_is_not_full() -> None:
    table = LoadTable()
    table.count("new", 1)
    assert not table.load("new").is_full
    assert table.load("new").value > 0


# ---------------------------------------------------------------------- number of replicas


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([0.0, 0.0], 1), ([0.7], 1), ([0.71], 2), ([1.0, 1.0, 0.4], 4), ([0.3] * 4, 2), ([6], 9)],
)
def test_replicas_follow_the_sum_of_loads(loads: list[float], wanted: int) -> None:
    assert replicas_for(loads) == wanted
    shared = sum(loads) / wanted  # with the load spread evenly, the number stays
    assert replicas_for([shared] * wanted) == wanted
