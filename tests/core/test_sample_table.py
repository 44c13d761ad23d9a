"""SampleTable: which sample is news, how instances follow each other, what a tombstone keeps out, and that what has run
out is freed without looking at the rest. That it agrees with a naive model is shown in `test_registry_model.py`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.guarded import Guarded
from tests.core.naive import seen
from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal
from trio_federation.samples import START_TOLERANCE, SampleTable

TTL = 30.0
TOMBSTONE_TTL = 60.0
SILENCE_LIMIT = 15.0
IDENTITY = ("east", "ns", "a", "p1")


def table() -> SampleTable:
    return SampleTable(ttl=TTL, tombstone_ttl=TOMBSTONE_TTL, silence_limit=SILENCE_LIMIT)


def sample(observed_at: float | None, origin: Origin | None = None, pool: str = "p1", **values: Any) -> Capacity:
    return Capacity("east", "ns", "a", pool, observed_at=observed_at, origin=origin, **values)


def held(samples: SampleTable, now: float) -> dict[Identity, tuple[float | None, Origin | None]]:
    return {record.identity: (record.observed_at, record.origin) for record in samples.fresh(now)}


# What is news.


def test_a_sample_that_was_not_known_is_news_with_its_time_filled_in() -> None:
    samples = table()
    given_without_time = sample(None, idle=3)
    assert samples.apply([given_without_time], 100.0) == [replace(given_without_time, observed_at=100.0)]
    assert given_without_time.observed_at is None, "what the caller holds is left alone"


def test_a_time_in_the_future_is_now() -> None:
    samples = table()
    assert samples.apply([sample(1e9)], 100.0) == [sample(100.0)]
    assert samples.apply([sample(101.0)], 101.0) == [sample(101.0)], "it does not outrank what is observed after it"


def test_without_origins_the_newer_observation_counts_and_an_equal_one_replaces() -> None:
    samples = table()
    samples.apply([sample(100.0, idle=1)], 100.0)
    assert samples.apply([sample(math.nextafter(100.0, 0.0), idle=2)], 101.0) == []
    assert [record.idle for record in samples.fresh(101.0)] == [1]
    assert samples.apply([sample(100.0, idle=3)], 101.0) == [sample(100.0, idle=3)]
    assert [record.idle for record in samples.fresh(101.0)] == [3]


def test_of_one_instance_the_higher_seq_counts_whatever_the_ages() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 5, 0.0), idle=5)], 100.0)
    assert samples.apply([sample(101.0, Origin("a", 4, 0.0), idle=4)], 101.0) == [], "a lower one, observed later"
    assert samples.apply([sample(101.0, Origin("a", 5, 0.0), idle=9)], 101.0) == [], "an equal one changes nothing"
    assert held(samples, 101.0) == {IDENTITY: (100.0, Origin("a", 5, 0.0))}
    newer = sample(90.0, Origin("a", 6, 0.0), idle=6)
    assert seen(samples.apply([newer], 101.0)) == seen([newer]), "a higher one, observed earlier"


def test_a_sample_without_origin_is_measured_by_its_time_against_one_that_has_an_origin() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 5, 0.0))], 100.0)
    assert samples.apply([sample(99.0)], 101.0) == []
    assert samples.apply([sample(100.0)], 101.0) == [sample(100.0)]
    assert samples.apply([sample(99.0, Origin("a", 6, 0.0))], 101.0) == []


def test_a_batch_is_taken_in_its_order_and_only_news_come_back() -> None:
    samples = table()
    first, second = sample(90.0, Origin("a", 1, 0.0)), sample(91.0, Origin("a", 2, 0.0))
    other = sample(90.0, Origin("a", 1, 0.0), "p2")
    gone = Withdrawal(IDENTITY, Origin("a", 3, 0.0))
    batch: list[Change] = [first, first, second, first, other, gone, second, gone]
    assert seen(samples.apply(batch, 100.0)) == seen([first, second, other, gone])
    assert samples.apply(batch, 100.0) == [], "all of it is known"


def test_a_sample_that_is_too_old_on_arrival_is_not_news_but_ends_what_was_older() -> None:
    samples = table()
    assert samples.apply([sample(math.nextafter(70.0, 0.0))], 100.0) == []
    samples.apply([sample(99.0, Origin("a", 1, 0.0))], 100.0)
    assert samples.apply([sample(69.0, Origin("a", 2, 0.0))], 100.0) == []
    assert len(samples) == 0


def test_a_withdrawal_is_news_also_of_what_was_not_known() -> None:
    samples = table()
    gone = Withdrawal(IDENTITY, Origin("a", 3, 0.0))
    assert samples.apply([gone], 100.0) == [gone]
    assert list(samples.withdrawals(100.0)) == [gone]
    assert samples.apply([gone], 100.0) == []
    assert samples.apply([Withdrawal(IDENTITY, Origin("a", 2, 0.0))], 100.0) == []


def test_an_older_withdrawal_ends_nothing() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 5, 0.0))], 100.0)
    for seq in (4, 5):
        assert samples.apply([Withdrawal(IDENTITY, Origin("a", seq, 0.0))], 100.0) == []
    assert len(samples) == 1


# Tombstones.


def test_a_slower_copy_does_not_bring_a_withdrawn_record_back() -> None:
    samples = table()
    for seq in (1, 2, 3):
        samples.apply([sample(100.0, Origin("a", seq, 0.0))], 100.0)
    samples.apply([Withdrawal(IDENTITY, Origin("a", 4, 0.0))], 101.0)
    for seq in (1, 2, 3, 4):
        # However fresh it claims to be.
        assert samples.apply([sample(None, Origin("a", seq, 0.0))], 102.0) == []
    again = sample(102.0, Origin("a", 5, 0.0))
    assert samples.apply([again], 102.0) == [again]
    assert samples.held()["tombstones"] == 0


def test_a_withdrawal_is_remembered_for_exactly_its_time() -> None:
    until = 100.0 + TOMBSTONE_TTL
    for now, remembered in ((until, True), (math.nextafter(until, math.inf), False)):
        samples = table()
        samples.apply([Withdrawal(IDENTITY, Origin("a", 4, 0.0))], 100.0)
        assert (samples.apply([sample(now, Origin("a", 3, 0.0))], now) == []) is remembered
        assert len(list(samples.withdrawals(now))) == int(remembered)


def test_a_withdrawal_without_origin_keeps_the_place_in_history_of_what_it_ended() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 4, 0.0))], 100.0)
    assert samples.apply([Withdrawal(IDENTITY)], 101.0) == [Withdrawal(IDENTITY)]
    assert list(samples.withdrawals(101.0)) == [Withdrawal(IDENTITY, Origin("a", 4, 0.0))]
    assert samples.apply([sample(101.0, Origin("a", 4, 0.0))], 101.0) == []
    again = sample(99.0, Origin("a", 5, 0.0))
    assert samples.apply([again], 101.0) == [again]


def test_a_withdrawal_without_origin_of_nothing_known_keeps_out_what_was_observed_before_it() -> None:
    samples = table()
    samples.apply([Withdrawal(IDENTITY)], 100.0)
    assert samples.apply([sample(99.0)], 101.0) == []
    assert samples.apply([sample(99.0, Origin("a", 7, 0.0))], 101.0) == []
    assert samples.apply([sample(100.0)], 101.0) == [sample(100.0)]


def test_a_withdrawal_lets_a_later_instance_report_the_identity_again_at_once() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 4, 0.0))], 100.0)
    samples.apply([Withdrawal(IDENTITY, Origin("a", 5, 0.0))], 101.0)
    # Its first sample was taken before the withdrawal arrived here.
    again = sample(100.5, Origin("b", 1, 100.0))
    assert samples.apply([again], 102.0) == [again]


def test_a_copy_that_is_too_old_to_count_leaves_the_tombstone_in_place() -> None:
    samples = table()
    samples.apply([Withdrawal(IDENTITY, Origin("a", 5, 0.0))], 100.0)
    assert samples.apply([sample(60.0, Origin("a", 6, 0.0))], 100.0) == []
    assert samples.apply([sample(100.0, Origin("a", 4, 0.0))], 100.0) == []
    assert samples.held()["tombstones"] == 1


def test_no_tombstones_are_kept_where_they_live_for_no_time() -> None:
    samples = SampleTable(ttl=TTL, tombstone_ttl=0.0)
    samples.apply([sample(100.0), Withdrawal(IDENTITY)], 100.0)
    assert samples.held()["tombstones"] == 0
    assert samples.apply([sample(99.0)], 100.0) == [sample(99.0)]


# Instances.


def test_an_instance_that_started_later_replaces_the_current_one_and_late_data_of_that_is_ignored() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 900, 0.0)), sample(100.0, Origin("a", 900, 0.0), "p2")], 100.0)
    later = sample(99.0, Origin("b", 1, 50.0))
    assert seen(samples.apply([later], 100.0)) == seen([later]), "although its seq is lower, and its age higher"
    late: list[Change] = [sample(101.0, Origin("a", 901, 0.0)), Withdrawal(IDENTITY, Origin("a", 902, 0.0))]
    assert samples.apply(late, 101.0) == []
    assert held(samples, 101.0)[IDENTITY] == (99.0, Origin("b", 1, 50.0))
    assert len(samples) == 2, "what the replaced one said last ages out by itself"


@pytest.mark.parametrize("apart", [-START_TOLERANCE, -1.0, 0.0, 1.0, START_TOLERANCE])
def test_of_instances_that_started_together_the_current_one_stays_until_it_is_silent(apart: float) -> None:
    for waited, taken in ((SILENCE_LIMIT, False), (math.nextafter(100.0 + SILENCE_LIMIT, math.inf) - 100.0, True)):
        samples = table()
        samples.apply([sample(100.0, Origin("a", 1, 50.0))], 100.0)
        now = 100.0 + waited
        rival = sample(now, Origin("b", 1, 50.0 + apart))
        assert samples.apply([rival], now) == ([rival] if taken else [])


def test_a_start_that_is_a_little_more_apart_is_told_from_the_current_one() -> None:
    beyond = math.nextafter(50.0 + START_TOLERANCE, math.inf)
    samples = table()
    samples.apply([sample(100.0, Origin("a", 1, 50.0))], 100.0)
    assert len(samples.apply([sample(100.0, Origin("b", 1, beyond))], 100.0)) == 1
    # And the other way about: it started too early to be anything but the older one, however silent the current one is.
    assert samples.apply([sample(116.0, Origin("a", 2, math.nextafter(50.0, 0.0)))], 116.0) == []


def test_a_current_instance_that_holds_nothing_any_more_makes_room_for_one_that_started_together_with_it() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 1, 99.0))], 100.0)
    successor = sample(102.0, Origin("b", 1, 101.0))
    assert samples.apply([successor], 102.0) == []
    samples.apply([Withdrawal(IDENTITY, Origin("a", 2, 99.0))], 102.0)
    assert samples.apply([successor], 102.0) == [successor]


def withdrawn_by_a_newcomer() -> tuple[SampleTable, Origin, Withdrawal, float]:
    """A table with p1 and p2 of an instance that has been silent for too long, the origin of one that started together
    with it, that one's withdrawal of p2, which alone is no news, and when it has come."""
    samples = table()
    old, new = Origin("old", 5, 0.0), Origin("new", 2, 1.0)
    samples.apply([sample(10.0, old, "p1"), sample(10.0, old, "p2")], 10.0)
    gone = Withdrawal(("east", "ns", "a", "p2"), new)
    later = 10.0 + SILENCE_LIMIT + 1.0
    assert samples.apply([gone], later) == []
    return samples, new, gone, later


@pytest.mark.parametrize("first", ["withdrawal", "sample"])
def test_what_an_instance_withdraws_counts_from_the_batch_on_that_makes_it_current(first: str) -> None:
    """Of instances that started together it is a sample that settles who is current; a withdrawal in front of it is
    looked at once more. Alone it changes nothing."""
    samples, new, gone, later = withdrawn_by_a_newcomer()
    batch: list[Change] = [gone, sample(later, new, "p1")]
    news = samples.apply(batch if first == "withdrawal" else batch[::-1], later)
    assert seen(news) == seen([sample(later, new, "p1"), gone])
    assert held(samples, later) == {("east", "ns", "a", "p1"): (later, new)}
    assert samples.apply(batch, later) == []


def test_a_report_may_come_in_several_batches_of_one_moment() -> None:
    """As it does at a hub that looks at it step by step; what came a moment earlier is not looked at again."""
    for pause in (0.0, 0.001):
        samples, new, gone, later = withdrawn_by_a_newcomer()
        taken = samples.apply([sample(later, new, "p1")], later + pause)
        assert taken == [sample(later, new, "p1"), *([] if pause else [gone])]


def test_a_repetition_is_not_looked_at_again() -> None:
    """It was no news because of what is known, and not because of who has sent it."""
    samples = table()
    old, new = Origin("old", 5, 0.0), Origin("new", 2, 100.0)
    gone = Withdrawal(("east", "ns", "a", "p2"), old)
    samples.apply([sample(10.0, old, "p1"), gone], 10.0)
    batch: list[Change] = [gone, sample(11.0, new, "p1"), sample(11.0, new, "p2")]
    assert samples.apply(batch, 11.0) == batch[1:]


def test_a_withdrawal_by_who_is_current_no_more_changes_nothing() -> None:
    samples = table()
    old, new = Origin("old", 5, 0.0), Origin("new", 2, 100.0)
    samples.apply([sample(10.0, old, "p1"), sample(10.0, old, "p2")], 10.0)
    late = Withdrawal(("east", "ns", "a", "p2"), Origin("old", 4, 0.0))
    assert samples.apply([late, sample(11.0, new, "p1"), late], 11.0) == [sample(11.0, new, "p1")]
    assert ("east", "ns", "a", "p2") in held(samples, 11.0)


def test_an_old_sample_on_a_slow_way_does_not_displace_a_silent_instance_that_was_heard_of_later() -> None:
    samples = SampleTable(ttl=60.0, silence_limit=SILENCE_LIMIT)
    newest = sample(100.0, Origin("b", 1, 53.0), idle=1)
    samples.apply([newest], 100.0)
    assert samples.apply([sample(80.0, Origin("a", 9, 50.0), idle=9)], 116.0) == []
    assert samples.apply([Withdrawal(IDENTITY, Origin("a", 10, 50.0))], 116.0) == []
    assert list(samples.fresh(116.0)) == [newest]


def test_an_instance_that_holds_nothing_makes_no_room_for_one_that_was_heard_of_earlier() -> None:
    samples = table()
    samples.apply([sample(101.0, Origin("b", 1, 100.0))], 101.0)
    samples.apply([Withdrawal(IDENTITY, Origin("b", 2, 100.0))], 102.0)
    # All that "a" ever said, on a slow way, its newest sample last.
    late: list[Change] = [
        sample(98.0, Origin("a", 1, 97.0), "p2"),
        Withdrawal(IDENTITY, Origin("a", 2, 97.0)),
        sample(99.0, Origin("a", 3, 97.0)),
    ]
    assert samples.apply(late, 110.0) == []
    assert list(samples.withdrawals(110.0)) == [Withdrawal(IDENTITY, Origin("b", 2, 100.0))]


def test_of_instances_that_started_together_a_late_sample_revives_only_what_it_observed_after_the_withdrawal() -> None:
    samples = table()
    samples.apply([sample(100.5, Origin("a", 1, 100.0))], 100.5)
    samples.apply([Withdrawal(IDENTITY, Origin("a", 2, 100.0))], 102.0)
    # The other one is current already when its first word comes, on a slow way.
    assert len(samples.apply([sample(103.0, Origin("b", 2, 101.0), "p2")], 103.0)) == 1
    assert samples.apply([sample(101.5, Origin("b", 1, 101.0))], 104.0) == []
    again = sample(104.0, Origin("b", 3, 101.0))
    assert samples.apply([again], 104.0) == [again]


def test_an_instance_that_started_before_the_one_that_withdrew_does_not_bring_a_record_back() -> None:
    samples = table()
    samples.apply([Withdrawal(IDENTITY, Origin("b", 2, 90.0))], 100.0)
    now = 131.0  # when the withdrawal is remembered, and the instance is not
    samples.expire(now)
    assert samples.held()["instances"] == 0
    late: list[Change] = [sample(now, Origin("a", 9, 80.0)), sample(now, Origin("a", 9, 80.0), "p2")]
    assert seen(samples.apply(late, now)) == seen(late[1:])


def test_an_instance_whose_only_word_ran_out_on_its_way_keeps_nobody_out() -> None:
    samples = table()
    stale = sample(60.0, Origin("b", 1, 90.0))
    alive = sample(100.0, Origin("a", 1, 0.0))
    assert samples.apply([stale, alive], 100.0) == [alive], "not even within one batch"


def test_an_instance_lives_as_long_as_its_newest_sample() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("b", 1, 90.0))], 100.0)
    samples.apply([sample(120.0, Origin("b", 2, 90.0)), sample(119.0, Origin("b", 3, 90.0))], 120.0)
    rival = Origin("a", 1, 0.0)
    for now in (140.0, 150.0):
        assert samples.apply([sample(now, rival)], now) == []
    now = math.nextafter(150.0, math.inf)
    assert len(samples.apply([sample(now, rival)], now)) == 1


def test_an_old_sample_does_not_come_back_after_one_that_started_together_with_it_withdrew_it() -> None:
    samples = table()
    samples.apply([sample(101.0, Origin("b", 1, 100.0))], 101.0)
    samples.apply([Withdrawal(IDENTITY, Origin("b", 2, 100.0))], 102.0)
    assert samples.apply([sample(98.0, Origin("a", 9, 97.0))], 103.0) == [], "observed before the withdrawal"
    again = sample(103.0, Origin("c", 1, 103.0))
    assert samples.apply([again], 103.0) == [again], "observed after it"


def test_an_instance_is_forgotten_when_it_was_silent_for_longer_than_a_record_lives() -> None:
    for now, known in ((100.0 + TTL, True), (math.nextafter(100.0 + TTL, math.inf), False)):
        samples = table()
        samples.apply([sample(100.0, Origin("b", 1, 90.0))], 100.0)
        earlier = sample(now, Origin("a", 1, 0.0))
        assert samples.apply([earlier], now) == ([] if known else [earlier])


def test_a_replay_does_not_keep_a_dead_instance_current() -> None:
    samples = table()
    last_word = sample(100.0, Origin("b", 7, 90.0))
    gone = Withdrawal((*IDENTITY[:3], "p2"), Origin("b", 8, 90.0))
    samples.apply([last_word, gone], 100.0)
    for now in (110.0, 120.0, 130.0, 131.0, 140.0):
        assert samples.apply([last_word, gone], now) == []
    samples.expire(140.0)
    assert samples.held()["instances"] == 0
    survivor = sample(140.0, Origin("a", 1, 0.0))
    assert samples.apply([survivor], 140.0) == [survivor]


def test_the_earliest_estimate_of_a_start_is_the_one_that_counts() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 1, 80.0)), sample(100.0, Origin("a", 2, 60.0))], 100.0)
    samples.apply([sample(100.0, Origin("a", 3, 90.0))], 100.0)
    later = sample(100.0, Origin("b", 1, 66.0))
    assert samples.apply([later], 100.0) == [later]


def test_in_one_batch_an_instance_may_give_way_to_a_later_one_and_not_come_back() -> None:
    """Samples of one report are admitted together, but only as long as nothing else came in between."""
    old, new = Origin("a", 5, 0.0), Origin("b", 1, 50.0)
    later: tuple[Change, ...] = (sample(100.0, new, "p3"), Withdrawal((*IDENTITY[:3], "p3"), new))
    for between in later:
        samples = table()
        batch: list[Change] = [sample(100.0, old, "p1"), sample(100.0, old, "p2"), between, sample(100.0, old, "p4")]
        assert samples.apply(batch, 100.0) == batch[:3]
    samples = table()
    assert samples.apply([sample(100.0, old)], 100.0) == [sample(100.0)]
    assert samples.apply([sample(100.0, new)], 100.0) == [sample(100.0)]
    assert samples.apply([sample(100.0, old, "p2")], 100.0) == []


def test_what_is_admitted_of_one_cluster_is_not_of_another() -> None:
    samples = table()
    north = ("north", "ns", "a")
    shared, newer = Origin("a", 1, 0.0), Origin("b", 1, 50.0)
    samples.apply([Capacity(*north, "p1", observed_at=100.0, origin=newer)], 100.0)
    batch = [sample(100.0, shared), Capacity(*north, "p2", observed_at=100.0, origin=shared)]
    assert samples.apply(batch, 100.0) == batch[:1]


def test_every_sample_of_a_report_is_evidence_of_life() -> None:
    samples = table()
    origin = Origin("a", 1, 0.0)
    samples.apply([sample(90.0, origin, "p1"), sample(100.0, origin, "p2"), sample(95.0, origin, "p3")], 100.0)
    together = Origin("b", 1, 1.0)
    now = 90.0 + SILENCE_LIMIT + 5.0
    assert samples.apply([sample(now, together)], now) == [], "it was heard of at 100"
    now = 100.0 + SILENCE_LIMIT + 1.0
    assert samples.apply([sample(now, together)], now) == [sample(now)]


def test_each_cluster_has_an_instance_of_its_own() -> None:
    samples = table()
    east, north = (
        Capacity(cluster_id, "ns", "a", "p1", observed_at=100.0, origin=Origin("same", seq, started_at))
        for cluster_id, seq, started_at in (("east", 9, 90.0), ("north", 1, 0.0))
    )
    assert samples.apply([east, north], 100.0) == [east, north]
    assert samples.held()["instances"] == 2


@st.composite
def honest_deliveries(draw: st.DrawFn) -> list[tuple[float, tuple[int, int], Change]]:
    """What true histories look like from afar: a cluster's agent is started again a few times, often at once, each
    process telling the truth of two pools; every word arrives once or twice, late by up to half a minute. Each delivery
    is (moment, (number of the instance, seq), change)."""
    now = 1000.0
    deliveries: list[tuple[float, tuple[int, int], Change]] = []
    for number in range(draw(st.integers(2, 3), "instances")):
        now += draw(st.sampled_from((0.5, 0.5, 2.0, 20.0)), "gap")
        started_at = now
        for seq in range(1, draw(st.sampled_from((1, 1, 2, 3)), "words") + 1):
            now += draw(st.sampled_from((0.5, 0.5, 0.5, 16.0)), "pause")
            origin = Origin(f"i{number}", seq, started_at)
            record = sample(now, origin, draw(st.sampled_from(("p1", "p1", "p2")), "pool"))
            word: Change = record if draw(st.integers(0, 2), "is there") else Withdrawal(record.identity, origin)
            delays = st.lists(st.sampled_from((0.0, 0.25, 1.0, 18.0, 20.0, 29.0)), min_size=1, max_size=2)
            deliveries += [(now + delay, (number, seq), word) for delay in draw(delays, "delays")]
    deliveries.sort(key=lambda delivery: delivery[0])
    return deliveries


@given(honest_deliveries())
@settings(max_examples=500)
def test_in_an_honest_history_nothing_that_is_shown_is_older_than_what_was_known(
    deliveries: list[tuple[float, tuple[int, int], Change]],
) -> None:
    samples = table()
    newest: dict[Identity, tuple[int, int]] = {}
    for now, position, change in deliveries:
        for _ in samples.apply([change], now):
            if isinstance(change, Capacity):
                assert position > newest.get(change.identity, (-1, 0)), f"at {now}: {change}"
            newest[change.identity] = max(position, newest.get(change.identity, (-1, 0)))


# Time to live.


@pytest.mark.parametrize("origin", [None, Origin("a", 1, 0.0)])
def test_an_age_of_exactly_the_time_to_live_counts_and_not_one_step_of_a_float_more(origin: Origin | None) -> None:
    samples = table()
    samples.apply([sample(100.0, origin)], 100.0)
    end = 100.0 + TTL
    assert len(list(samples.fresh(end))) == 1
    assert list(samples.fresh(math.nextafter(end, math.inf))) == []
    samples.expire(end)
    assert samples.held() == {
        "records": 1,
        "tombstones": 0,
        "instances": int(origin is not None),
        "entries": 1 + int(origin is not None),
    }
    samples.expire(math.nextafter(end, math.inf))
    assert samples.held() == {"records": 0, "tombstones": 0, "instances": 0, "entries": 0}


@given(st.floats(0.001, 1e7), st.floats(0.001, 1e4), st.integers(-3, 3))
@example(2.0**-48, 32.0, 1)  # looked at before it runs out: half a step of a float is lost in the sum
def test_times_that_no_float_adds_up_exactly_free_what_does_not_count_any_more(
    observed_at: float, ttl: float, steps: int
) -> None:
    samples = SampleTable(ttl=ttl)
    samples.apply([sample(observed_at)], observed_at)
    now = observed_at + ttl
    for _ in range(abs(steps)):
        now = math.nextafter(now, math.copysign(math.inf, steps))
    samples.expire(now)  # and it ends
    assert len(list(samples.fresh(now))) == int(now - observed_at <= ttl)
    samples.expire(now + 1.0)
    assert samples.held()["entries"] == len(samples) == 0


def test_a_record_that_was_refreshed_lives_on_from_its_new_time() -> None:
    samples = table()
    for observed_at in (100.0, 110.0, 125.0):
        samples.apply([sample(observed_at)], observed_at)
    samples.expire(155.0)
    assert len(samples) == 1
    samples.expire(155.5)
    assert len(samples) == 0


def test_a_record_whose_newer_sample_is_older_in_time_runs_out_earlier() -> None:
    samples = table()
    samples.apply([sample(100.0, Origin("a", 1, 0.0)), sample(80.0, Origin("a", 2, 0.0))], 100.0)
    samples.expire(110.5)
    assert len(samples) == 0
    assert samples.held()["entries"] <= 2


@pytest.mark.parametrize(
    "bad",
    [
        {"ttl": 0.0},
        {"ttl": -1.0},
        {"ttl": math.inf},
        {"ttl": math.nan},
        {"ttl": 1.0, "tombstone_ttl": -0.5},
        {"ttl": 1.0, "tombstone_ttl": math.inf},
        {"ttl": 1.0, "tombstone_ttl": math.nan},
        {"ttl": 1.0, "silence_limit": -0.5},
        {"ttl": 1.0, "silence_limit": math.inf},
        {"ttl": 1.0, "silence_limit": math.nan},
    ],
)
def test_times_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        SampleTable(**bad)


# Memory, and work.


def heap_bound(samples: SampleTable) -> int:
    kept = samples.held()
    return 2 * (kept["records"] + kept["tombstones"] + kept["instances"]) + 64


class Counted:
    """Counts the entries of calendars that are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        look = SampleTable._look_at

        def count(*arguments: Any) -> None:
            self.looks += 1
            look(*arguments)

        monkeypatch.setattr(SampleTable, "_look_at", count)


def test_a_refresh_costs_no_heap_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = table()
    pools = [f"p{number}" for number in range(50)]
    samples.apply([sample(100.0, pool=pool) for pool in pools], 100.0)
    looked = Counted(monkeypatch)
    for step in range(1, 100):
        now = 100.0 + step * TTL / 100
        samples.apply([sample(now, pool=pool) for pool in pools], now)
    assert looked.looks == 0
    assert samples.held() == {"records": 50, "tombstones": 0, "instances": 0, "entries": 50}


def test_in_a_storm_of_refreshes_every_record_is_put_back_once_per_time_to_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = table()
    looked = Counted(monkeypatch)
    pools = [f"p{number}" for number in range(50)]
    lives = 20
    for step in range(lives * 30):
        now = 100.0 + step
        samples.apply([sample(now, Origin("a", step, 0.0), pool=pool) for pool in pools], now)
        assert samples.held() == {"records": 50, "tombstones": 0, "instances": 1, "entries": 51}
    assert looked.looks <= 51 * lives


def test_flapping_records_leave_no_heap_behind() -> None:
    samples = table()
    pools = [f"p{number}" for number in range(20)]
    now = 100.0
    for step in range(500):
        now += 0.01
        origin = Origin("a", 2 * step, 0.0)
        samples.apply([sample(now, origin, pool) for pool in pools], now)
        assert samples.held()["entries"] <= heap_bound(samples)
        samples.apply([Withdrawal((*IDENTITY[:3], pool), origin._replace(seq=2 * step + 1)) for pool in pools], now)
        assert samples.held()["entries"] <= heap_bound(samples)
    assert samples.held()["tombstones"] == 20
    samples.expire(math.nextafter(now + TOMBSTONE_TTL, math.inf))
    assert samples.held() == {"records": 0, "tombstones": 0, "instances": 0, "entries": 0}


def test_times_that_go_backwards_leave_no_heap_behind() -> None:
    samples = table()
    now = 100.0
    for step in range(2000):
        # Each newer sample is a little older in time than the one before, then they start again.
        samples.apply([sample(now - step % 200 * 0.1, Origin("a", step, 0.0))], now)
        assert samples.held()["entries"] <= heap_bound(samples)
        assert len(samples) == 1
    samples.expire(now + TTL + 1)
    assert samples.held()["entries"] == 0


def test_many_instances_of_one_cluster_leave_no_heap_behind() -> None:
    samples = table()
    for step in range(500):
        now = 100.0 + step * 0.01
        # Each started long after the one before.
        samples.apply([sample(now, Origin(f"i{step}", 1, -10.0 * (500 - step)))], now)
        assert samples.held()["instances"] == 1
        assert samples.held()["entries"] <= heap_bound(samples)


def test_expiry_looks_only_at_what_has_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = table()
    samples.apply([sample(100.0 + number / 100, pool=f"p{number}") for number in range(1000)], 110.0)
    samples._slots = Guarded(samples._slots)
    looked = Counted(monkeypatch)
    samples.expire(130.0)
    assert (looked.looks, len(samples)) == (0, 1000)
    samples.expire(130.095)  # p0 to p9 were observed at up to 100.09
    assert (looked.looks, len(samples)) == (10, 990)
    samples.apply([sample(110.0, pool="p999")], 130.095)
    assert looked.looks == 10


def test_expiry_goes_on_in_the_heap_that_it_makes_smaller() -> None:
    samples = table()
    pools = [f"p{number}" for number in range(100)]
    # Two tombstones' entries for each that outlast the records, of no use any more.
    for _ in range(2):
        samples.apply([Withdrawal((*IDENTITY[:3], pool)) for pool in pools[:40]], 100.0)
        samples.apply([sample(100.0, pool=pool) for pool in pools], 100.0)
    samples.apply([sample(125.0, pool=pool) for pool in pools[30:40]], 125.0)
    samples.expire(131.0)
    assert len(samples) == 10
    assert min(samples._moments) >= 131.0, "nothing that was due is left for another time"
    assert samples.held()["entries"] <= heap_bound(samples)


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_expiry_with_a_limit_frees_no_more_than_that(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = table()
    samples.apply([sample(100.0, pool=f"p{number}") for number in range(20)], 100.0)
    looked = Counted(monkeypatch)
    samples.expire(1000.0, limit)
    assert (looked.looks, len(samples)) == (limit, 20 - limit)
    assert list(samples.fresh(1000.0)) == [], "what is not freed yet does not count all the same"


# What a subclass sees.


class Mirror(SampleTable):
    """An index of its own, of records and of what is remembered as withdrawn, kept by the five calls."""

    def __init__(self) -> None:
        super().__init__(ttl=TTL, tombstone_ttl=TOMBSTONE_TTL, silence_limit=SILENCE_LIMIT)
        self.mirror: dict[Identity, Capacity] = {}
        self.withdrawn: list[Identity] = []

    def record_added(self, record: Capacity) -> None:
        assert record.identity not in self.mirror
        self.mirror[record.identity] = record

    def record_replaced(self, old: Capacity, new: Capacity) -> None:
        assert self.mirror[new.identity] is old
        self.mirror[new.identity] = new

    def record_removed(self, record: Capacity) -> None:
        assert self.mirror.pop(record.identity) is record

    def tombstone_added(self, identity: Identity) -> None:
        assert identity not in self.withdrawn
        self.withdrawn.append(identity)

    def tombstone_removed(self, identity: Identity) -> None:
        self.withdrawn.remove(identity)


origins = st.none() | st.builds(
    Origin, st.sampled_from(("a", "b")), st.integers(1, 6), st.sampled_from((950.0, 953.0, 980.0))
)
changes = st.builds(
    lambda pool, group, age, origin: Capacity(
        "east", "ns", "a", pool, group, observed_at=None if age is None else 1000.0 - age, origin=origin
    ),
    st.sampled_from(("", "p1")),
    st.sampled_from(("", "gpu")),
    st.sampled_from((None, 0.0, 10.0, 29.0, 31.0)),
    origins,
) | st.builds(Withdrawal, st.sampled_from((IDENTITY, ("east", "ns", "a", "", "gpu"))), origins)
#: every identity that these are about, and the one above, which has no group
SAMPLED: tuple[Identity, ...] = (
    *(("east", "ns", "a", pool, group) for pool in ("", "p1") for group in ("", "gpu")),
    IDENTITY,
)


@given(st.lists(st.tuples(st.sampled_from((0.0, 1.0, 20.0, 31.0)), st.lists(changes, max_size=4)), max_size=8))
def test_a_subclass_is_told_of_every_record_and_withdrawal_that_comes_changes_or_goes(
    steps: list[tuple[float, list[Change]]],
) -> None:
    mirror = Mirror()
    now = 1000.0
    for pause, batch in steps:
        now += pause
        news = mirror.apply(batch, now)
        assert mirror.mirror == {identity: slot.record for identity, slot in mirror._slots.items()}
        of_instances = Counter(
            (r.cluster_id, r.origin.instance) for r in mirror.mirror.values() if r.origin is not None
        )
        assert mirror._held == of_instances, "who still has something to say"
        assert sorted(mirror.withdrawn) == sorted(mirror._tombstones)
        assert {identity for identity in SAMPLED if mirror.remembers(identity)} == set(mirror.withdrawn)
        assert {gone.identity for gone in mirror.withdrawals(now)} <= set(mirror.withdrawn)
        for change in news:
            assert change in batch or (isinstance(change, Capacity) and change.observed_at == now)
    mirror.expire(now + TTL + 1)
    assert mirror.mirror == {}
    mirror.expire(now + TOMBSTONE_TTL + 1)
    assert mirror.withdrawn == []
    assert not any(mirror.remembers(identity) for identity in SAMPLED)
