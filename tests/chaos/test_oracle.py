"""Whoever judges has to be judged first: what is false is called false, and what is true is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.oracle import APART, Answer, Oracle, Seen

TTL = 3.0
SLACK = 0.5
KEY = ("east", "pool")


def told() -> Oracle:
    """East said one number from 10 to 20 and another one since then; west said one."""
    oracle = Oracle(TTL)
    for cluster, since, until in (("east", 10.0, 10.0), ("east", 19.9, 20.0), ("west", 10.0, 10.0)):
        oracle.next_value(cluster)
        oracle.said(cluster, since, until)
    return oracle


def kinds(oracle: Oracle, seen: Seen, at: float, *, took: float = 0.0, key: tuple[str, str] = KEY) -> list[str]:
    answer = Answer("west", at, at + took, {key: seen})
    return [breach.kind for breach in oracle.breaches(answer, SLACK)]


FIRST, SECOND = APART, APART + 1


def test_numbers_of_clusters_never_meet() -> None:
    oracle = told()
    assert oracle.next_value("east") == APART + 2
    assert oracle.next_value("west") == 2 * APART + 1


@pytest.mark.parametrize(
    "at, age, wanted",
    [
        (15.0, 0.0, []),  # true now
        (23.4, 3.0, []),  # over for longer than a TTL, but within what cannot be told
        (23.6, 3.2, ["old"]),
        (22.0, 1.6, []),
        (22.0, 1.4, ["younger"]),
        (24.0, 0.0, ["old", "younger"]),
    ],
)
def test_what_was_true_once_may_be_shown_for_a_ttl_and_has_to_say_how_old_it_is(
    at: float, age: float, wanted: list[str]
) -> None:
    assert kinds(told(), Seen(FIRST, age), at) == wanted


@pytest.mark.parametrize("value", [FIRST - 1, APART + 2, 2 * APART, 0, -1])
def test_a_number_that_was_never_said_is_caught(value: int) -> None:
    assert kinds(told(), Seen(value, 0.0), 30.0) == ["unsaid"]


def test_a_number_that_comes_before_it_is_said_is_caught() -> None:
    assert kinds(told(), Seen(SECOND, 0.0), 19.0, took=0.8) == ["unsaid"]
    assert kinds(told(), Seen(SECOND, 0.0), 19.0, took=0.9) == []


def test_a_cluster_that_nobody_knows_is_caught() -> None:
    assert kinds(told(), Seen(FIRST, 0.0), 15.0, key=("north", "pool")) == ["unsaid"]


def test_a_record_of_a_dead_cluster_is_caught_once_its_ttl_is_over() -> None:
    oracle = told()
    oracle.died("east", 21.0)
    assert kinds(oracle, Seen(SECOND, 3.0), 24.4) == []
    assert kinds(oracle, Seen(SECOND, 3.0), 24.6) == ["dead"]
    oracle.lives("east")
    assert kinds(oracle, Seen(SECOND, 3.0), 24.6) == []


@pytest.mark.parametrize(
    "value, at, since, wanted",
    [
        (FIRST, 20.5, 0.0, True),
        (FIRST, 21.5, 0.0, False),
        (SECOND, 99.0, 19.0, True),
        (SECOND, 99.0, 21.0, False),
        (0, 20.0, 0.0, False),
    ],
)
def test_what_is_current_was_true_a_moment_ago_and_is_new(value: int, at: float, since: float, wanted: bool) -> None:
    answer = Answer("west", at, at, {KEY: Seen(value, 0.0)})
    assert told().is_current(answer, *KEY, within=1.0, since=since) is wanted
    assert not told().is_current(answer, "west", "pool", within=1.0, since=since)


@given(
    ends=st.lists(st.floats(0.05, 2.0), min_size=1, max_size=30),
    observed=st.floats(0.0, 1.0),
    age=st.floats(0.0, TTL),
)
def test_an_honest_registry_is_never_blamed(ends: list[float], observed: float, age: float) -> None:
    """Whatever was read at its source at some moment, and is shown within a TTL, with its age."""
    oracle = Oracle(TTL)
    at = 0.0
    said: list[tuple[int, float]] = []
    for length in ends:
        said.append((oracle.next_value("east"), at))
        oracle.said("east", at, at)
        at += length
    read_at = observed * at
    value = [value for value, since in said if since <= read_at][-1]
    answer = Answer("west", read_at + age, read_at + age, {KEY: Seen(value, age)})
    assert oracle.breaches(answer, 1e-6) == []
    assert oracle.youngest <= 1e-6
