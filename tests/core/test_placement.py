"""Where a create goes: Registry.best_foreign_member, which is pure ranking, and Router.place, rules 1 to 4 of
semantics.md ("Placement"), each as a property over random envs."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.guarded import Guarded
from tests.core.naive import NaiveRegistry
from trio_federation.capacity import Capacity
from trio_federation.registry import ForeignMember, Registry
from trio_federation.router import Candidate, Placement, Router, Rule, Tier

NOW = 1000.0
GROUPS = ("", "cpu", "gpu")


def records_of(cluster_ids: tuple[str, ...], pools: tuple[str, ...], **fixed: Any) -> st.SearchStrategy[list[Capacity]]:
    """What those clusters say of one env, no identity twice."""
    values: dict[str, st.SearchStrategy[Any]] = {
        "idle": st.sampled_from((0, 0, 0, 1, 2)),
        "autoscaling_enabled": st.booleans(),
        "capacity": st.sampled_from((-1, 0, 0, 1, 2)),
        "saturated_for": st.sampled_from((0.0, 0.0, 2.0, 5.0, 100.0)),
        "observed_at": st.sampled_from((NOW, NOW - 2.0, NOW - 5.0)),
    }
    values |= {name: st.just(value) for name, value in fixed.items()}
    one = st.builds(
        lambda cluster_id, pool, group, **values: Capacity(cluster_id, "ns", "a", pool, group, **values),
        st.sampled_from(cluster_ids),
        st.sampled_from(pools),
        st.sampled_from(GROUPS),
        **values,
    )
    return st.lists(one, max_size=8, unique_by=lambda record: record.identity)


CLUSTERS = ("west", "east", "north", "south")
anything = records_of(CLUSTERS, ("", "p1", "p2", "p3"))
never_saturated = records_of(CLUSTERS, ("", "p1", "p2", "p3"), saturated_for=0.0)
groups = st.sampled_from(GROUPS)


def registry_of(records: list[Capacity], local_cluster_id: str = "west") -> Registry:
    registry = Registry(local_cluster_id, 30.0, lambda: NOW)
    assert registry.upsert(records) == []
    return registry


def naive_of(records: list[Capacity]) -> NaiveRegistry:
    naive = NaiveRegistry("west", ttl=30.0, tombstone_ttl=60.0, silence_limit=15.0)
    naive.apply(records, NOW)
    return naive


def place(records: list[Capacity], group: str = "", local_cluster_id: str = "west") -> Placement:
    return Router(registry_of(records, local_cluster_id), random=random.Random(0)).place("ns", "a", group)


def member(cluster_id: str, pool: str, **values: Any) -> Capacity:
    return Capacity(cluster_id, "ns", "a", pool, **values)


def grows(record: Capacity) -> bool:
    """Whether it can grow at NOW, what is known to fail for a while set aside."""
    assert record.observed_at is not None
    saturated = record.observed_at + record.saturated_for > NOW
    return record.autoscaling_enabled and record.capacity != 0 and not saturated


def offer(record: Capacity) -> tuple[int, float] | None:
    """What a member can give, comparable: more is better; None for nothing."""
    if record.idle:
        return (1, record.idle)
    if grows(record):
        return (0, float("inf") if record.capacity == -1 else record.capacity)
    return None


def foreign_members(records: list[Capacity], group: str) -> list[Capacity]:
    return [
        record
        for record in naive_of(records).foreign_members("ns", "a", NOW)
        if record.member_pool and group in ("", record.scaling_group)
    ]


# The pure ranking.


@given(anything, groups)
def test_the_best_foreign_member_is_the_one_that_the_rules_name(records: list[Capacity], group: str) -> None:
    expected = naive_of(records).best_foreign_member("ns", "a", group, NOW)
    assert registry_of(records).best_foreign_member("ns", "a", group) == expected


@given(anything, groups, st.randoms(use_true_random=False))
def test_the_best_foreign_member_does_not_depend_on_the_order_of_arrival(
    records: list[Capacity], group: str, order: Any
) -> None:
    shuffled = list(records)
    order.shuffle(shuffled)
    one, other = (registry_of(found).best_foreign_member("ns", "a", group) for found in (records, shuffled))
    assert one == other


@pytest.mark.parametrize(
    "better, worse",
    [
        ({"idle": 1}, {"autoscaling_enabled": True, "capacity": -1}),
        ({"idle": 2}, {"idle": 1, "autoscaling_enabled": True, "capacity": -1}),
        ({"autoscaling_enabled": True, "capacity": -1}, {"autoscaling_enabled": True, "capacity": 2**31 - 1}),
        ({"autoscaling_enabled": True, "capacity": 2}, {"autoscaling_enabled": True, "capacity": 1}),
        ({"autoscaling_enabled": True, "capacity": 1}, {"autoscaling_enabled": True, "capacity": 0}),
        ({"autoscaling_enabled": True, "capacity": 1}, {"autoscaling_enabled": False, "capacity": -1}),
        ({"idle": 1, "running": 99, "pending": 99}, {"idle": 0}),
    ],
)
def test_what_is_better_wins_whatever_it_is_called(better: dict[str, Any], worse: dict[str, Any]) -> None:
    for good, bad in ((("b", "p1"), ("c", "p1")), (("c", "p1"), ("b", "p1")), (("b", "p2"), ("b", "p1"))):
        records = [member(*bad, **worse), member(*good, **better)]
        found = registry_of(records).best_foreign_member("ns", "a")
        assert found == (*good, better.get("idle", 0))
        assert place(records).target == "::".join(good)


def test_ties_of_the_pure_ranking_go_to_the_first_name() -> None:
    same: dict[str, Any] = {"idle": 3, "autoscaling_enabled": True, "capacity": 5}
    records = [member(*name, **same) for name in (("c", "p0"), ("b", "p10"), ("b", "p2"), ("d", "p0"))]
    assert registry_of(records).best_foreign_member("ns", "a") == ("b", "p10", 3)
    # Within idle, headroom makes no difference.
    assert registry_of(
        [*records, member("e", "p0", idle=3, autoscaling_enabled=True, capacity=-1)]
    ).best_foreign_member("ns", "a") == ("b", "p10", 3)


def test_saturation_is_no_part_of_the_pure_ranking() -> None:
    saturated = member("east", "p1", autoscaling_enabled=True, capacity=-1, saturated_for=60.0)
    assert registry_of([saturated]).best_foreign_member("ns", "a") == ("east", "p1", 0)


def test_only_a_pool_can_be_pinned_to() -> None:
    aggregate = [Capacity("east", "ns", "a", "", group, idle=9) for group in GROUPS]
    assert registry_of(aggregate).best_foreign_member("ns", "a") is None
    assert place(aggregate).local
    assert place(aggregate).candidates == ()


@pytest.mark.parametrize("group, pool", [("", "p3"), ("cpu", "p1"), ("gpu", "p2"), ("none", None)])
def test_a_group_matches_equal_groups_only_and_no_group_all(group: str, pool: str | None) -> None:
    records = [
        member("east", "p1", scaling_group="cpu", idle=1),
        member("east", "p2", scaling_group="gpu", idle=2),
        member("east", "p3", idle=3),
    ]
    best = registry_of(records).best_foreign_member("ns", "a", group)
    assert (best and best.member_pool) == pool
    assert place(records, group).target == (pool and f"east::{pool}")


# Rules 1 to 4.


@given(anything, groups)
def test_rule_1_local_idle_stays_local(records: list[Capacity], group: str) -> None:
    idle = naive_of(records).local_idle("ns", "a", group, NOW)
    assume(idle > 0)
    placed = place(records, group)
    assert placed.local
    assert placed.reason.startswith(f"west has {idle} idle")


@given(anything, groups)
def test_rule_2_without_a_schedulable_foreign_member_it_stays_local(records: list[Capacity], group: str) -> None:
    records = [
        record if record.cluster_id == "west" or offer(record) is None else replace(record, idle=0, capacity=0)
        for record in records
    ]
    placed = place(records, group)
    assert placed.local
    assert placed.target is None


@given(anything, groups)
def test_rules_3_and_4_decide_between_growing_here_and_the_best_elsewhere(records: list[Capacity], group: str) -> None:
    naive = naive_of(records)
    assume(naive.local_idle("ns", "a", group, NOW) == 0)
    offers = {
        f"{record.cluster_id}::{record.member_pool}": found
        for record in foreign_members(records, group)
        if (found := offer(record)) is not None
    }
    assume(offers)
    best = max(offers.values())
    placed = place(records, group)
    if best[0] == 0 and any(grows(row) for row in naive._local("ns", "a", group, NOW)):
        assert placed.local
        assert "can grow" in placed.reason
    else:
        assert placed.target in [target for target, found in offers.items() if found == best]
        assert placed.target in placed.reason


@given(anything, groups)
def test_a_placement_is_whole_and_consistent(records: list[Capacity], group: str) -> None:
    placed = place(records, group)
    assert placed.local is (placed.target is None)
    assert placed.reason.isprintable()
    assert placed.reason
    assert "ns/a" in placed.reason
    assert group in placed.reason
    expected = {(record.cluster_id, record.member_pool): record for record in foreign_members(records, group)}
    assert {(c.cluster_id, c.member_pool) for c in placed.candidates} == set(expected)
    assert len(placed.candidates) == len(expected)
    for candidate in placed.candidates:
        record = expected[candidate.cluster_id, candidate.member_pool]
        assert record.observed_at is not None
        assert candidate == Candidate(
            record.cluster_id,
            record.member_pool,
            tier_of(record),
            idle=record.idle,
            reserved=0,
            headroom=record.capacity if grows(record) else 0,
            age=NOW - record.observed_at,
            state=record.state,
            verdict=candidate.verdict,
        )
        assert candidate.verdict
        assert (candidate.verdict == "chosen") is (candidate.target == placed.target)
    offered = [(list(Tier).index(c.tier), -size(c)) for c in placed.candidates]
    assert offered == sorted(offered), "best first"
    if not placed.local:
        assert placed.candidates[0].target == placed.target


def size(candidate: Candidate) -> float:
    if candidate.tier is Tier.IDLE:
        return candidate.idle
    return float("inf") if candidate.headroom == -1 else candidate.headroom


def tier_of(record: Capacity) -> Tier:
    if record.idle:
        return Tier.IDLE
    if grows(record):
        return Tier.GROW
    return Tier.SATURATED if record.autoscaling_enabled and record.capacity != 0 else Tier.FULL


@given(never_saturated, groups)
def test_without_saturation_placement_and_pure_ranking_agree_on_tier_and_offer(
    records: list[Capacity], group: str
) -> None:
    registry = registry_of(records)
    placed = Router(registry).place("ns", "a", group)
    best = registry.best_foreign_member("ns", "a", group)
    offered = [candidate for candidate in placed.candidates if candidate.tier in (Tier.IDLE, Tier.GROW)]
    assert (best is None) is (not offered)
    if best is not None:
        first = offered[0]
        assert first.idle == best.idle
        assert (first.tier is Tier.IDLE) is (best.idle > 0)
        ranked = next(c for c in offered if (c.cluster_id, c.member_pool) == best[:2])
        assert first.tier is ranked.tier
        assert first.tier is Tier.IDLE or first.headroom == ranked.headroom
    if not registry.local_idle("ns", "a", group) and not registry.local_can_grow("ns", "a", group):
        assert placed.local is (best is None)


@given(anything, groups, st.randoms(use_true_random=False))
def test_a_placement_does_not_depend_on_the_order_of_arrival(records: list[Capacity], group: str, order: Any) -> None:
    shuffled = list(records)
    order.shuffle(shuffled)
    assert place(shuffled, group) == place(records, group)


@given(anything, groups, st.text(max_size=20), st.integers(0, 5))
def test_what_the_owner_says_of_a_member_and_who_waits_there_changes_nothing(
    records: list[Capacity], group: str, state: str, waiting: int
) -> None:
    """The state is for people (case C21): one that nobody has heard of yet, from a newer version, makes no member
    unroutable, and none routable."""
    assume(state.isprintable())
    said = [replace(record, state=state, pending=waiting, desired=waiting, running=waiting) for record in records]
    one, other = place(records, group), place(said, group)
    assert (one.target, one.reason) == (other.target, other.reason)
    assert [c.verdict for c in one.candidates] == [c.verdict for c in other.candidates]
    assert {c.state for c in other.candidates} <= {state}
    best_of = [registry_of(found).best_foreign_member("ns", "a", group) for found in (records, said)]
    assert best_of[0] == best_of[1]


# Rules, one by one, in words.


def test_an_env_that_nobody_has_stays_local_with_a_reason() -> None:
    placed = place([])
    assert (placed.local, placed.target, placed.candidates) == (True, None, ())
    assert placed.rule is Rule.UNKNOWN_ENV
    assert "ns/a" in placed.reason
    placed = place([member("east", "p1")])
    assert (placed.local, placed.target, placed.rule) == (True, None, Rule.NOTHING_ANYWHERE)
    assert placed.reason == "west does not have ns/a and no pool elsewhere has room: wait for the local autoscaler"


@pytest.mark.parametrize("group", ["", "gpu"])
def test_aggregate_local_rows_answer_for_their_cluster(group: str) -> None:
    foreign = member("east", "p1", scaling_group="gpu", idle=5)
    growing = Capacity("west", "ns", "a", "", group, autoscaling_enabled=True, capacity=1)
    assert place([foreign, replace(growing, idle=1)], group).local
    assert place([foreign, growing], group).target == "east::p1"
    assert place([replace(foreign, idle=0, autoscaling_enabled=True, capacity=-1), growing], group).local
    # In the whole env the sum of the groups counts; in a group that the cluster has no row for, nothing does.
    assert place([foreign, replace(growing, scaling_group="cpu", idle=1)], group).local is (group == "")


def test_the_local_row_of_the_whole_env_counts_before_the_rows_of_groups() -> None:
    rows = [Capacity("west", "ns", "a", "", group, idle=idle) for group, idle in (("", 0), ("gpu", 5))]
    foreign = member("east", "p1", idle=1)
    assert place([*rows, foreign]).target == "east::p1"
    assert place([*rows, foreign], "gpu").local


@pytest.mark.parametrize(
    "saturated_for, observed_at, saturated",
    [(0.0, NOW, False), (5.0, NOW, True), (5.0, NOW - 4.5, True), (5.0, NOW - 5.0, False), (5.0, NOW - 20.0, False)],
)
def test_saturation_ends_at_its_time(saturated_for: float, observed_at: float, saturated: bool) -> None:
    growing: dict[str, Any] = {"autoscaling_enabled": True, "capacity": 3}
    known: dict[str, Any] = {"saturated_for": saturated_for, "observed_at": observed_at}
    # A foreign one.
    placed = place([member("east", "p1", **growing, **known)])
    assert placed.local is saturated
    assert placed.candidates[0].tier is (Tier.SATURATED if saturated else Tier.GROW)
    # A local one: it keeps a create here only while it can grow.
    placed = place([member("west", "p1", **growing, **known), member("east", "p1", **growing)])
    assert placed.target == ("east::p1" if saturated else None)
    # What is idle is not saturated.
    assert place([member("east", "p1", idle=1, **growing, **known)]).target == "east::p1"


def test_a_saturated_member_loses_to_one_with_less_headroom() -> None:
    wide = member("east", "p1", autoscaling_enabled=True, capacity=-1, saturated_for=5.0)
    narrow = member("north", "p1", autoscaling_enabled=True, capacity=1)
    placed = place([wide, narrow])
    assert placed.target == "north::p1"
    assert [(c.target, c.verdict) for c in placed.candidates] == [
        ("north::p1", "chosen"),
        ("east::p1", "nothing idle, and scale-up is known to fail for now"),
    ]


def test_every_verdict_says_why() -> None:
    records = [
        member("east", "p1", idle=5),
        member("east", "p2", idle=2),
        member("east", "p3", autoscaling_enabled=True, capacity=5),
        member("east", "p4"),
    ]
    assert [(c.member_pool, c.verdict) for c in place(records).candidates] == [
        ("p1", "chosen"),
        ("p2", "less idle"),
        ("p3", "nothing idle, east::p1 has"),
        ("p4", "nothing idle, cannot grow"),
    ]
    assert {c.verdict for c in place([*records, member("west", "p1", idle=1)]).candidates} == {
        "not needed",
        "nothing idle, cannot grow",
    }
    growing = [member(*name, autoscaling_enabled=True, capacity=2) for name in (("east", "p1"), ("north", "p1"))]
    growing.append(member("east", "p2", autoscaling_enabled=True, capacity=1))
    verdicts = [c.verdict for c in place(growing).candidates]
    assert verdicts == ["chosen", "as much headroom, the tie went elsewhere", "less headroom"]
    verdicts = [
        c.verdict for c in place([*growing, member("west", "p9", autoscaling_enabled=True, capacity=1)]).candidates
    ]
    assert verdicts == ["no idle, and the local cluster can grow"] * 3
    equal = [member(*name, idle=2) for name in (("east", "p1"), ("north", "p1"))]
    assert [c.verdict for c in place(equal).candidates] == ["chosen", "as much idle, the tie went elsewhere"]


def test_who_only_asks_gets_the_answer_that_a_placement_then_is() -> None:
    records = [member("east", "p1", idle=1), member("north", "p1", idle=1)]
    router = Router(registry_of(records))
    asked, placed = (router.place("ns", "a", reserve=reserve) for reserve in (False, True))
    assert replace(asked, id="") == replace(placed, id="")


def test_placements_have_ids_of_their_own_from_the_generator_that_was_given() -> None:
    registry = registry_of([member("east", "p1", idle=1)])
    assert len({Router(registry).place("ns", "a").id for _ in range(100)}) == 100
    drawn = []
    for _ in range(2):
        router = Router(registry, random=random.Random(7))
        drawn.append([router.place("ns", "a").id for _ in range(3)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
    assert all(len(found) == 16 and int(found, 16) >= 0 for found in drawn[0])


# Ties.

LEANING = """
import random
from trio_federation.capacity import Capacity
from trio_federation.registry import Registry
from trio_federation.router import Router

names = {(f"c{c}", f"p{p}") for c in range(5) for p in range(4)}  # a set: its order is another one with every seed
for local in (f"local{number}" for number in range(20)):
    registry = Registry(local, clock=lambda: 1000.0)
    registry.upsert(Capacity(cluster, "ns", "a", pool, idle=3) for cluster, pool in names)
    placed = Router(registry, random=random.Random(0)).place("ns", "a")
    print(placed.target, [candidate.target for candidate in placed.candidates])
    print(registry.best_foreign_member("ns", "a"))
"""


def test_ties_are_decided_alike_in_every_process() -> None:
    printed = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", LEANING],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.append(run.stdout)
    assert printed[0] == printed[1]
    assert len(set(printed[0].splitlines()[::2])) > 10, "local clusters lean differently"
    assert set(printed[0].splitlines()[1::2]) == {str(ForeignMember("c0", "p0", 3))}


@pytest.mark.parametrize("values", [{"idle": 4}, {"autoscaling_enabled": True, "capacity": -1}])
def test_clusters_that_see_the_same_lean_to_different_pools(values: dict[str, Any]) -> None:
    records = [member(f"c{number}", "p1", **values) for number in range(10)]
    chosen = Counter(place(records, local_cluster_id=f"local{number}").target for number in range(500))
    assert len(chosen) == 10
    # 50 each on average; with an even hash a count outside of this has a chance below one in a million.
    assert all(15 <= count <= 100 for count in chosen.values())
    # Who is best in one pair says nothing of who is best in another: the whole order differs.
    orders = {
        tuple(c.target for c in place(records, local_cluster_id=f"local{number}").candidates) for number in range(50)
    }
    assert len(orders) == 50


def test_a_leaning_never_beats_a_better_offer() -> None:
    records = [member(f"c{number}", "p1", idle=1) for number in range(10)]
    for number in range(50):
        assert place([*records, member("best", "p1", idle=2)], local_cluster_id=f"local{number}").target == "best::p1"


# What is reserved (when, and for how long, is in test_reservations.py).


def with_reserved(taken: dict[str, int], here: int, *records: Capacity) -> Router:
    """A router that has placed so many creates at each target, and so many here. Since then it is known, by a report
    that was under way when it placed them, that there is no more than `records`."""
    registry = Registry("west", 30.0, lambda: NOW)
    router = Router(registry)
    for target, number in {"west::p1": here, **taken}.items():
        cluster_id, pool = target.split("::")
        registry.upsert([member(cluster_id, pool, idle=number)])
        placed = {router.place("ns", "a").target for _ in range(number)}
        assert placed <= {None if cluster_id == "west" else target}
        registry.withdraw([member(cluster_id, pool).identity])
    registry.upsert(replace(record, observed_at=NOW) for record in records)
    assert router.reserved() == here + sum(taken.values())
    return router


@pytest.mark.parametrize(
    "idle, capacity, taken, tier, left, headroom",
    [
        (3, 5, 0, Tier.IDLE, 3, 5),
        (3, 5, 2, Tier.IDLE, 1, 5),
        (3, 5, 3, Tier.GROW, 0, 5),
        (3, 5, 5, Tier.GROW, 0, 3),
        (3, 5, 8, Tier.FULL, 0, 0),
        (3, 5, 99, Tier.FULL, 0, 0),
        (3, -1, 99, Tier.GROW, 0, -1),
        (0, 1, 1, Tier.FULL, 0, 0),
        (3, 0, 3, Tier.FULL, 0, 0),
    ],
)
def test_what_is_taken_uses_up_what_is_idle_and_then_the_headroom(
    idle: int, capacity: int, taken: int, tier: Tier, left: int, headroom: int
) -> None:
    growing = member("east", "p1", idle=idle, autoscaling_enabled=True, capacity=capacity)
    placed = with_reserved({"east::p1": taken}, 0, growing).place("ns", "a")
    (candidate,) = placed.candidates
    assert (candidate.tier, candidate.idle, candidate.headroom, candidate.reserved) == (tier, left, headroom, taken)
    assert placed.local is (tier is Tier.FULL)


def test_members_are_ranked_by_what_is_left_of_them() -> None:
    records = [member("east", "p1", idle=5), member("north", "p1", idle=3)]
    assert with_reserved({"east::p1": 2, "north::p1": 1}, 0, *records).place("ns", "a").target == "east::p1"
    assert with_reserved({"east::p1": 3}, 0, *records).place("ns", "a").target == "north::p1"


def test_what_was_placed_here_counts_against_what_is_idle_here() -> None:
    for here, target in ((0, None), (1, None), (2, "east::p1"), (3, "east::p1")):
        router = with_reserved({}, here, member("west", "p1", idle=2), member("east", "p1", idle=1))
        assert router.place("ns", "a").target == target


# Cost.


def test_a_placement_touches_only_its_own_env_and_reads_the_clock_a_fixed_number_of_times() -> None:
    reads = []
    for others in (0, 300):
        read = 0

        def clock() -> float:
            nonlocal read
            read += 1
            return NOW

        registry = Registry("west", clock=clock)
        registry.upsert(Capacity("east", "ns", f"env{number}", "p1", idle=9) for number in range(others))
        registry.upsert([member("east", "p1", idle=1), member("north", "p1", idle=2)])
        registry._table.envs = Guarded(registry._table.envs, frozenset({("ns", "a")}))
        read = 0
        placed = Router(registry).place("ns", "a")
        assert (placed.target, len(placed.candidates)) == ("north::p1", 2)
        reads.append(read)
    assert reads[0] == reads[1]
