"""Scripted load: the arithmetic from a scenario, a cluster id and a time to records."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_federation import Capacity
from trio_federation.capacity import fault
from trio_federation_fixtures import load
from trio_federation_fixtures.options import (
    Burst,
    Constant,
    Member,
    Outage,
    Ramp,
    Scenario,
    Shape,
    Wave,
    seconds,
)

# Multiples of 1/8 second, which floats hold exactly, so that no test rests on how a sum was rounded.
eighths = st.integers(0, 80).map(lambda count: f"{count / 8}s")
longer = st.integers(1, 80).map(lambda count: f"{count / 8}s")
levels = st.integers(0, 20) | st.floats(0, 20)
times = st.integers(0, 500).map(lambda count: count / 8)


@st.composite
def waves(draw: st.DrawFn) -> Wave:
    low, high = sorted((draw(levels), draw(levels)))
    return Wave(low=low, high=high, period=draw(longer), phase=draw(eighths))


@st.composite
def outages(draw: st.DrawFn) -> Outage:
    begin, length = draw(st.integers(0, 80)), draw(st.integers(1, 80))
    every = draw(st.none() | st.integers(length, 160).map(lambda count: f"{count / 8}s"))
    return Outage(begin=f"{begin / 8}s", end=f"{(begin + length) / 8}s", every=every)


shapes: st.SearchStrategy[Shape] = st.one_of(
    st.builds(Constant, level=levels),
    st.builds(Ramp, first=levels, last=levels, begin=eighths, length=eighths),
    waves(),
    st.builds(Burst, height=levels, every=longer, length=eighths),
)


@st.composite
def members(draw: st.DrawFn, index: int = 0) -> Member:
    size = draw(st.integers(0, 10))
    autoscaling = draw(st.booleans())
    ceiling = draw(st.none() | st.integers(size, 20)) if autoscaling else None
    return Member(
        namespace="agents",
        env_name=draw(st.sampled_from(["python-3-12", "browser"])),
        member_pool=f"pool-{index}",
        scaling_group=draw(st.sampled_from(["", "gpu"])),
        size=size,
        autoscaling=autoscaling,
        ceiling=ceiling,
        growth_delay=draw(eighths),
        load=tuple(draw(st.lists(shapes, max_size=3))),
        outage=tuple(draw(st.lists(outages(), max_size=2))),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    count = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 3) | st.sampled_from(["", "a seed"]))
    return Scenario(seed=seed, member=tuple(draw(members(index)) for index in range(count)))


# --- records


@settings(max_examples=50)
@given(scenarios(), times)
def test_every_record_is_good_and_adds_up(scenario: Scenario, elapsed: float) -> None:
    for record in load.records(scenario, "west", elapsed):
        assert fault(record) is None
        assert record.cluster_id == "west"
        assert (record.observed_at, record.origin) == (None, None)
        member = next(member for member in scenario.member if member.member_pool == record.member_pool)
        # what exists is between the pool's own size and its ceiling
        exists = record.idle + record.running
        assert exists >= member.size
        assert record.desired >= member.size
        if not member.autoscaling:
            assert exists == record.desired == member.size
            assert record.capacity == 0
        elif member.ceiling is None:
            assert record.capacity == -1
        else:
            assert exists <= member.ceiling
            assert record.capacity == member.ceiling - record.desired
        # every request is served or waits, and none waits beside something idle
        assert record.running + record.pending == load.demand(member, elapsed, f"{scenario.seed}\nwest")
        assert record.pending == 0 or record.idle == 0
        assert record.autoscaling_enabled is member.autoscaling
        assert record.state == ("Saturated" if record.pending and not record.can_grow else "Active")


@settings(max_examples=50)
@given(scenarios(), times)
def test_the_same_question_has_the_same_answer(scenario: Scenario, elapsed: float) -> None:
    first = load.records(scenario, "west", elapsed)
    load.records(scenario, "east", elapsed + 1)
    assert load.records(scenario, "west", elapsed) == first


@settings(max_examples=50)
@given(scenarios(), times)
def test_a_pool_is_missing_exactly_while_it_is_out(scenario: Scenario, elapsed: float) -> None:
    present = [record.member_pool for record in load.records(scenario, "west", elapsed)]
    assert present == [each.member_pool for each in scenario.member if not load.is_out(each.outage, elapsed)]


@settings(max_examples=50)
@given(members(), times)
def test_growth_follows_the_load_by_its_delay(member: Member, elapsed: float) -> None:
    then = load.record(member, "west", max(0.0, elapsed - seconds(member.growth_delay)), "seed")
    now = load.record(member, "west", elapsed, "seed")
    assert now.idle + now.running == then.desired


def pool(**options: object) -> Member:
    return Member(namespace="agents", env_name="browser", member_pool="a", scaling_group="gpu", **options)  # type: ignore[arg-type]


def counts(record: Capacity) -> tuple[int, int, int, int, int, str]:
    return record.idle, record.running, record.pending, record.desired, record.capacity, record.state


def constant(level: float) -> tuple[Shape, ...]:
    return (Constant(level=level),)


@pytest.mark.parametrize(
    "member, wanted",
    [
        (pool(size=5), (5, 0, 0, 5, 0, "Active")),
        (pool(size=5, load=constant(2)), (3, 2, 0, 5, 0, "Active")),
        (pool(size=5, load=constant(5)), (0, 5, 0, 5, 0, "Active")),
        (pool(size=5, load=constant(7)), (0, 5, 2, 5, 0, "Saturated")),
        (pool(size=5, autoscaling=True, load=constant(7)), (0, 7, 0, 7, -1, "Active")),
        (pool(size=5, autoscaling=True, ceiling=6, load=constant(2)), (3, 2, 0, 5, 1, "Active")),
        (pool(size=5, autoscaling=True, ceiling=6, load=constant(7)), (0, 6, 1, 6, 0, "Saturated")),
        (pool(size=0, autoscaling=True, ceiling=0, load=constant(1)), (0, 0, 1, 0, 0, "Saturated")),
        (pool(size=5, load=(Constant(level=1.4), Constant(level=1.2))), (2, 3, 0, 5, 0, "Active")),
    ],
)
def test_what_a_pool_makes_of_its_load(member: Member, wanted: tuple[int, int, int, int, int, str]) -> None:
    record = load.record(member, "west", 3.0, "seed")
    assert counts(record) == wanted
    assert record.identity == ("west", "agents", "browser", "a")
    assert record.scaling_group == "gpu"


def test_what_waits_while_growth_lags_behind() -> None:
    ramp = (Ramp(first=2, last=10, begin="4s", length="0s"),)
    member = pool(size=4, autoscaling=True, ceiling=12, growth_delay="2s", load=ramp)
    told = [counts(load.record(member, "west", elapsed, "seed")) for elapsed in (0, 3.9, 4, 5.9, 6)]
    assert told == [
        (2, 2, 0, 4, 8, "Active"),
        (2, 2, 0, 4, 8, "Active"),
        (0, 4, 6, 10, 2, "Active"),
        (0, 4, 6, 10, 2, "Active"),
        (0, 10, 0, 10, 2, "Active"),
    ]


@settings(max_examples=50)
@given(members(), times)
def test_an_aggregate_row_is_as_good_as_a_member(member: Member, elapsed: float) -> None:
    row = Member(namespace="agents", env_name="browser", scaling_group="gpu", size=member.size, load=member.load)
    record = load.record(row, "west", elapsed, "seed")
    assert fault(record) is None
    assert record.identity == ("west", "agents", "browser", "", "gpu")


def test_at_the_start_everything_has_grown_for_the_load_of_the_start() -> None:
    wave = (Wave(high=10, period="8s", phase="2s"),)
    member = pool(size=0, autoscaling=True, growth_delay="1s", load=wave)
    assert counts(load.record(member, "west", 0.0, "seed")) == (0, 5, 0, 5, -1, "Active")
    assert counts(load.record(member, "west", 1.0, "seed")) == (0, 5, 4, 9, -1, "Active")


# --- shapes


@given(levels, levels, eighths, eighths, times, times)
def test_a_ramp(first: float, last: float, begin: str, length: str, one: float, two: float) -> None:
    ramp = Ramp(first=first, last=last, begin=begin, length=length)
    end = seconds(begin) + seconds(length)
    earlier, later = sorted((one, two))
    early, late = load.level(ramp, earlier, ""), load.level(ramp, later, "")
    # it never turns back, starts and ends where it says, and is half-way at half time
    sign = 1 if last >= first else -1
    assert early * sign <= late * sign + 1e-9
    assert load.level(ramp, seconds(begin) - 1 / 8, "") == first
    assert load.level(ramp, end, "") == last
    assert load.level(ramp, end + one, "") == last
    if seconds(length):
        assert load.level(ramp, (seconds(begin) + end) / 2, "") == pytest.approx((first + last) / 2)


@given(waves(), times, st.integers(1, 5))
def test_a_wave(wave: Wave, elapsed: float, turns: int) -> None:
    level = load.level(wave, elapsed, "")
    assert wave.low - 1e-9 <= level <= wave.high + 1e-9
    period, phase = seconds(wave.period), seconds(wave.phase)
    assert load.level(wave, elapsed + turns * period, "") == pytest.approx(level, abs=1e-6)
    assert load.level(wave, turns * period - phase, "") == pytest.approx(wave.low, abs=1e-6)
    assert load.level(wave, (turns + 0.5) * period - phase, "") == pytest.approx(wave.high, abs=1e-6)


def begins(burst: Burst, seed: str, until: float) -> list[float]:
    """When bursts begin up to a time, drawn slot after slot as load.py says that they are."""
    every = seconds(burst.every)
    found = []
    for slot in range(math.floor(until / every) + 1):
        draws = Random(f"{seed}\n{slot}")
        place = draws.expovariate(1.0)
        while place < 1:
            found.append((slot + place) * every)
            place += draws.expovariate(1.0)
    return [begin for begin in found if begin <= until]


@given(st.builds(Burst, height=st.just(3), every=longer, length=eighths), st.integers(0, 99), times)
def test_bursts_are_those_that_began_within_their_length(burst: Burst, seed: int, elapsed: float) -> None:
    on = [begin for begin in begins(burst, str(seed), elapsed) if elapsed - begin < seconds(burst.length)]
    assert load.level(burst, elapsed, str(seed)) == 3 * len(on)


def test_bursts_come_as_often_as_they_should_and_differ_between_seeds() -> None:
    burst = Burst(height=1, every="2s", length="3s")
    levels = {seed: [load.level(burst, step / 4, seed) for step in range(8000)] for seed in ("a", "b")}
    for told in levels.values():
        # on average length / every are on at a time; 2,000 s hold about 1,000 bursts
        assert sum(told) / len(told) == pytest.approx(1.5, rel=0.1)
        # and as a Poisson process is: with a share of exp(-1.5) of the time without any
        assert told.count(0) / len(told) == pytest.approx(math.exp(-1.5), rel=0.15)
    assert levels["a"] != levels["b"]


def test_bursts_are_the_same_in_every_process() -> None:
    burst = Burst(height=1, every="2s", length="3s")
    member = pool(size=1, load=(burst,))
    assert [load.demand(member, elapsed, "1\nwest") for elapsed in range(20)] == GOLDEN_WEST
    assert [load.demand(member, elapsed, "1\neast") for elapsed in range(20)] == GOLDEN_EAST


GOLDEN_WEST = [0, 1, 1, 1, 1, 2, 3, 2, 3, 2, 3, 1, 1, 0, 0, 0, 0, 1, 3, 3]
GOLDEN_EAST = [0, 0, 1, 2, 2, 5, 4, 6, 3, 5, 3, 2, 1, 3, 4, 5, 3, 2, 2, 2]


def test_pools_clusters_and_seeds_have_bursts_of_their_own() -> None:
    bursts = (Burst(height=1, every="2s", length="3s"), Burst(height=100, every="2s", length="3s"))
    pools = tuple(
        Member(namespace="agents", env_name="browser", member_pool=name, size=1000, load=bursts) for name in ("a", "b")
    )

    def story(seed: int | str, cluster_id: str) -> list[list[int]]:
        scenario = Scenario(seed=seed, member=pools)
        told = [load.records(scenario, cluster_id, float(elapsed)) for elapsed in range(60)]
        return [[records[index].running for records in told] for index in range(2)]

    west = story(1, "west")
    assert story(1, "west") == west
    assert west[0] != west[1]
    assert story(1, "east") != west
    assert story(2, "west") != west
    # nor do the two shapes of one pool draw alike
    assert any(running % 100 != running // 100 for running in west[0])


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_a_long_run_costs_no_more_than_a_short_one(elapsed: int) -> None:
    burst = Burst(height=1, every="1ms", length="100ms")
    slots = []

    class Counting(Random):
        def __init__(self, seed: str) -> None:
            slots.append(seed)
            super().__init__(seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "Random", Counting)
        load.level(burst, float(elapsed), "seed")
    assert len(slots) <= 102


# --- outages


@given(outages(), times)
def test_an_outage(outage: Outage, elapsed: float) -> None:
    begin, end = seconds(outage.begin), seconds(outage.end)
    every = math.inf if outage.every is None else seconds(outage.every)
    starts = [begin]
    while starts[-1] + every <= elapsed:
        starts.append(starts[-1] + every)
    assert load.is_out([outage], elapsed) == any(start <= elapsed < start + end - begin for start in starts)


def test_an_outage_begins_at_once_and_ends_before_its_end() -> None:
    outage = Outage(begin="2s", end="5s")
    assert [load.is_out([outage], elapsed) for elapsed in (0, 1.999, 2, 4.999, 5)] == [False, False, True, True, False]
    assert load.is_out([], 3) is False
    assert load.is_out([Outage(begin="8s", end="9s"), outage], 3) is True
