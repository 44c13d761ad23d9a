"""The engine of the placement benchmark: nothing gets lost, views are as late as they are said to be, the same seed
gives the same bytes, and what has to lose loses."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement_fleet import (
    ANSWER,
    ENV,
    NAMESPACE,
    REPORT_LATENCY,
    TRIP,
    ClusterPlan,
    Counts,
    Decision,
    Engine,
    PolicyMaker,
    PoolPlan,
    Truth,
    arrivals,
)
from benchmarks.placement_policies import ALL_KNOWING, OURS, OURS_BY_SHARE, POLICIES, policy
from benchmarks.placement_shapes import SHAPES, loaded, plans, sustained
from trio_federation.registry import Registry

ROOT = Path(__file__).resolve().parents[2]


def nobody(at: float) -> float:
    return 0.0


def quiet(*warm: int, spare: int = 10) -> ClusterPlan:
    """A cluster at which no create arrives."""
    return ClusterPlan(tuple(PoolPlan(number, number + spare) for number in warm), nobody, 0.0)


def dry(rate: float) -> ClusterPlan:
    """A cluster that has nothing and cannot grow, and at which creates arrive."""
    return ClusterPlan((PoolPlan(0, 0),), lambda at: rate, rate)


class Watched(Engine):
    """Checks the books after everything that happens."""

    def step(self) -> None:
        super().step()
        self.check()

    def check(self) -> None:
        for pool in self.pools.values():
            assert min(pool.idle, pool.running, pool.starting, pool.promised, pool.ended) >= 0
            assert pool.started == pool.idle + pool.running + pool.ended
            assert pool.idle + pool.running + pool.starting <= pool.ceiling
        for cluster in self.clusters:
            assert not (cluster.waiting and cluster.idle), "one waits although one is idle"
        served = sum(create.served_at >= 0 for create in self.creates)
        assert served == sum(pool.running + pool.ended for pool in self.pools.values())
        waiting = sum(len(cluster.waiting) for cluster in self.clusters)
        under_way = sum(pool.promised for pool in self.pools.values())
        assert self.counts.creates == len(self.creates) == served + waiting + under_way + self.coming_back
        counts = self.counts
        assert counts.creates == counts.local + counts.forwarded + counts.parked
        assert counts.foreseeable <= counts.avoidable <= counts.misplaced <= counts.forwarded
        assert counts.parked_with_room <= counts.parked <= counts.waited


@pytest.mark.parametrize("name", POLICIES)
@given(shape=st.sampled_from(sorted(SHAPES)), seed=st.integers(0, 1000), interval=st.sampled_from((1.0, 5.0)))
@settings(max_examples=5)
def test_no_sandbox_and_no_create_is_lost(name: str, shape: str, seed: int, interval: float) -> None:
    fleet = plans(shape, seed=seed, clusters=4)
    engine = Watched(fleet, policy(name, interval), interval=interval, length=75.0, seed=str(seed))
    counts = engine.run()
    assert counts.creates == len(arrivals(fleet, 75.0, str(seed)))


@given(seed=st.integers(0, 1000), load=st.sampled_from((0.4, 0.9)))
@settings(max_examples=2)
def test_creates_are_the_same_for_every_policy_and_interval(seed: int, load: float) -> None:
    fleet = loaded(4, random.Random(seed), load)
    creates = set()
    for name in POLICIES:
        for interval in (1.0, 15.0):
            engine = Engine(fleet, policy(name, interval), interval=interval, length=40.0, seed=str(seed))
            engine.run()
            creates.add(tuple((each.origin.id, each.arrived_at, each.lifetime, each.trips) for each in engine.creates))
    assert len(creates) == 1


PRINTED = """
from benchmarks.placement import Run, simulate
from benchmarks.placement_policies import POLICIES
for name in POLICIES:
    for shape, load in (("moving bursts", None), ("slow autoscaler", None), ("load", 0.9)):
        print(name, shape, simulate(Run(shape, 5.0, name, 3, 60.0, 6, load)))
"""


@pytest.mark.slow
def test_a_seed_gives_the_same_bytes_in_every_process() -> None:
    def printed(hash_seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", PRINTED], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE
        ).stdout

    first = printed("1")
    assert first.count(b"Counts(") == 3 * len(POLICIES)
    assert printed("2") == first


def test_another_seed_gives_another_run() -> None:
    def counts(seed: str) -> Counts:
        fleet = plans("moving bursts", seed=1, clusters=6)
        return Engine(fleet, policy(OURS, 5.0), interval=5.0, length=60.0, seed=seed).run()

    assert counts("1") == counts("1")
    assert counts("1") != counts("2")


# --- what is known, and when -----------------------------------------------------------------------------------------


class Spy:
    """Keeps everything at home, and writes down what it is told."""

    def __init__(self, registry: Registry, chance: random.Random, truth: Truth) -> None:
        self.registry = registry

    def place(self, not_these: Sequence[str], not_here: bool) -> Decision:
        return Decision(None, False)

    def outcome(self, decision: Decision, outcome: str) -> None:
        pass


def test_others_know_after_a_report_and_its_way_and_the_cluster_itself_at_once() -> None:
    taking = ClusterPlan((PoolPlan(8, 8),), lambda at: 1.0, 1.0, start_up=1000.0, lifetime=10_000.0)
    engine = Engine([taking, quiet(3)], Spy, interval=5.0, length=40.0, seed="1")
    known: list[tuple[float, int, int, int]] = []

    def look() -> None:
        [here] = [r for r in engine.clusters[0].registry.records(NAMESPACE, ENV) if r.cluster_id == "c00"]
        [there] = [r for r in engine.clusters[1].registry.records(NAMESPACE, ENV) if r.cluster_id == "c00"]
        known.append((engine.now, engine.pools["c00::p1"].idle, here.idle, there.idle))
        engine.at(engine.now + 0.01, look)

    engine.at(0.0, look)
    engine.run()
    truth = [(at, idle) for at, idle, _, _ in known]

    def at_some_time(idle: int, since: float, until: float) -> bool:
        return any(idle == was for at, was in truth if since <= at <= until)

    assert all(at_some_time(here, at - 0.23, at) for at, _, here, _ in known)
    latest = 5.0 + REPORT_LATENCY[1] + 0.03
    assert all(
        at_some_time(there, at - latest, at - REPORT_LATENCY[0] + 0.01) for at, _, _, there in known if at > latest
    )
    assert any(there != idle for _, idle, _, there in known)
    # Each change of the view is a report: they do not come more often than that.
    changes = [at for (at, *_, there), (*_, before) in zip(known[1:], known, strict=False) if there != before]
    assert all(later - earlier > 4.9 for earlier, later in pairwise(changes))


# --- what is counted -------------------------------------------------------------------------------------------------


def always(target: str) -> PolicyMaker:
    """A policy that sends everything to one pool."""

    class Always:
        def __init__(self, registry: Registry, chance: random.Random, truth: Truth) -> None:
            pass

        def place(self, not_these: Sequence[str], not_here: bool) -> Decision:
            return Decision(None, False) if target in not_these else Decision(target, True)

        def outcome(self, decision: Decision, outcome: str) -> None:
            outcomes[outcome] += 1

    outcomes: Counter[str] = Counter()
    return Always


def run(fleet: Sequence[ClusterPlan], maker: PolicyMaker, *, length: float = 60.0, interval: float = 5.0) -> Counts:
    return Watched(fleet, maker, interval=interval, length=length, seed="7").run()


def test_misplaced_is_what_finds_none_idle_and_avoidable_what_another_pool_could_have_taken() -> None:
    # Nothing is added within the time, and nothing ends: 5 of the creates find one idle, whoever comes later does not.
    def still(*warm: int) -> ClusterPlan:
        return ClusterPlan(tuple(PoolPlan(each, each) for each in warm), nobody, 0.0, start_up=1000.0)

    origin = ClusterPlan((PoolPlan(0, 0),), lambda at: 1.0, 1.0, lifetime=10_000.0)
    full = run([origin, still(5), still(0)], always("c01::p1"))
    assert full.creates > 20
    assert full.creates == full.forwarded
    assert full.misplaced >= full.creates - 5 - 1  # one may be under way at the end
    assert full.avoidable == 0
    assert full.local == full.parked == 0
    assert full.unlucky >= full.misplaced - 1

    roomy = run([origin, still(5), still(1)], always("c01::p1"))
    assert roomy.avoidable == roomy.foreseeable == roomy.misplaced == full.misplaced

    # One that is idle and promised to another create does not count as room; there is always one under way to it.
    both = run(
        [origin, ClusterPlan((PoolPlan(0, 0),), lambda at: 20.0, 20.0), still(5), still(1000)], always("c02::p1")
    )
    assert both.avoidable > 0


def test_room_that_is_promised_is_no_room() -> None:
    engine = Engine([quiet(0, 2), quiet(1)], Spy, interval=5.0, length=1.0, seed="1")
    engine.pools["c01::p1"].promised = 1
    assert dict(engine.unpromised()) == {"c00::p1": 0, "c00::p2": 2, "c01::p1": 0}
    assert not engine.room_but_in(engine.pools["c00::p2"])
    assert engine.room_but_in(engine.pools["c00::p1"])
    assert not engine.room_but_in(None, engine.clusters[0])


def test_parked_creates_are_served_in_their_order_when_a_sandbox_is_added() -> None:
    slow = ClusterPlan((PoolPlan(1, 500),), lambda at: 1.0, 1.0, start_up=10.0, lifetime=10_000.0)
    engine = Watched([slow], Spy, interval=5.0, length=100.0, seed="1")
    counts = engine.run()
    assert counts.parked > 10
    assert counts.parked_with_room == 0
    served = [create.served_at for create in engine.creates if create.served_at >= 0]
    assert served == sorted(served)
    # A look at the pool every second, and a start-up of 8 to 12 s.
    assert counts.wait_p99 <= 1.0 + 12.0 + 0.01
    assert counts.unserved < 15


def test_a_turned_away_create_is_placed_once_more_and_then_waits_where_it_is() -> None:
    class Both(Spy):
        def place(self, not_these: Sequence[str], not_here: bool) -> Decision:
            asked.append(tuple(not_these))
            return Decision("c02::p1" if not_these else "c01::p1", True)

    asked: list[tuple[str, ...]] = []
    origin = ClusterPlan((PoolPlan(0, 0),), lambda at: 0.2, 0.2, lifetime=10_000.0)
    nothing = ClusterPlan((PoolPlan(0, 0),), nobody, 0.0)
    growing = ClusterPlan((PoolPlan(0, 90),), nobody, 0.0, start_up=5.0)
    engine = Watched([origin, nothing, growing], Both, interval=5.0, length=60.0, seed="1")
    counts = engine.run()
    assert counts.creates > 3
    assert set(asked) == {(), ("c01::p1",)}
    assert asked.count(()) == counts.creates
    assert counts.misplaced == counts.forwarded - sum(
        create.served_at < 0 and not create.tried for create in engine.creates
    )
    served = [create.served_at - create.arrived_at for create in engine.creates if create.served_at >= 0]
    assert served
    assert all(2 * TRIP[0] + ANSWER[0] + 4.0 <= wait <= 2 * TRIP[1] + ANSWER[1] + 1.0 + 6.0 + 0.01 for wait in served)


# --- who loses -------------------------------------------------------------------------------------------------------


def test_a_policy_that_sends_everything_to_one_pool_loses() -> None:
    fleet = (dry(2.0), *(quiet(5, 5) for _ in range(5)))
    lost = run(fleet, always("c01::p1"))
    ours = run(fleet, policy(OURS, 5.0))
    assert lost.avoidable > 50
    assert ours.avoidable * 20 < lost.avoidable


def test_the_best_idle_herds_and_reservations_do_not() -> None:
    fleet = (dry(2.0), quiet(20), *(quiet(10) for _ in range(7)))
    herding = run(fleet, policy("best idle", 15.0), interval=15.0)
    assert herding.avoidable > 10
    for name in (OURS, OURS_BY_SHARE):
        assert run(fleet, policy(name, 15.0), interval=15.0).avoidable == 0


def test_to_fill_up_what_stands_out_herds_where_several_do_it_and_to_spread_by_share_does_not() -> None:
    fleet = (*(dry(0.5) for _ in range(8)), quiet(16, spare=400), *(quiet(8, spare=400) for _ in range(16)))
    left, share = (run(fleet, policy(name, 15.0), interval=15.0) for name in (OURS, OURS_BY_SHARE))
    assert left.avoidable > 10
    assert share.avoidable * 3 < left.avoidable


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_who_knows_everything_misplaces_nothing_avoidably(shape: str) -> None:
    counts = Engine(plans(shape, seed=2), policy(ALL_KNOWING, 15.0), interval=15.0, length=120.0, seed="2").run()
    assert counts.forwarded > 0
    assert counts.avoidable == counts.parked_with_room == 0


@pytest.mark.parametrize("load", [0.4, 0.6, 0.9])
def test_a_load_is_that_share_of_what_the_fleet_can_sustain(load: float) -> None:
    fleet = loaded(20, random.Random(1), load)
    own = [sustained(plan.pools, plan.start_up) for plan in fleet]
    wanted = [plan.rate(0.0) / one for plan, one in zip(fleet, own, strict=True)]
    assert sum(wanted) / len(wanted) == pytest.approx(load)
    assert any(each > 1 for each in wanted)
