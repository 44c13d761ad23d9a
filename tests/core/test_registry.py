"""Registry: what enters and what is refused, what each query shows and for how long, what it costs, threads and clocks.
Random histories are in `test_registry_model.py`, the choice of a foreign member in `test_placement.py`."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from tests.core.guarded import Guarded
from trio_federation.capacity import Capacity, Change, Origin, Withdrawal
from trio_federation.registry import ForeignMember, Registry, RegistryStatistics

NOW = 1000.0


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def registry(clock: Hand) -> Registry:
    return Registry("west", 30.0, clock)


def member(cluster_id: str = "east", pool: str = "p1", **values: Any) -> Capacity:
    return Capacity(cluster_id, "ns", "a", pool, **values)


def whole(cluster_id: str = "east", group: str = "", **values: Any) -> Capacity:
    return Capacity(cluster_id, "ns", "a", "", group, **values)


def shown(registry: Registry) -> list[tuple[str, str, str, int]]:
    return [(r.cluster_id, r.member_pool, r.scaling_group, r.idle) for r in registry.snapshot()]


# Time to live.


def test_an_age_of_exactly_the_ttl_counts_in_every_query_and_one_float_step_more_in_none(
    registry: Registry, clock: Hand
) -> None:
    registry.upsert(
        [
            member(idle=3, observed_at=NOW),
            member("west", idle=2, autoscaling_enabled=True, capacity=1, observed_at=NOW),
        ]
    )

    def everything() -> tuple[object, ...]:
        return (
            registry.best_foreign_member("ns", "a"),
            len(registry.foreign_members("ns", "a")),
            registry.local_idle("ns", "a"),
            registry.local_can_grow("ns", "a"),
            len(registry.records("ns", "a")),
            len(registry.snapshot()),
            len(registry),
        )

    clock.now = NOW + 30.0
    assert everything() == (("east", "p1", 3), 1, 2, True, 2, 2, 2)
    clock.now = math.nextafter(NOW + 30.0, math.inf)
    assert everything() == (None, 0, 0, False, 0, 0, 0)
    assert registry.statistics() == RegistryStatistics(0, 0, 0, 0, {})


def test_a_record_that_was_old_when_it_came_lives_for_the_rest_of_its_time(registry: Registry, clock: Hand) -> None:
    registry.upsert([member(observed_at=NOW - 20.0)])
    clock.now = NOW + 10.0
    assert len(registry) == 1
    clock.now = math.nextafter(NOW + 10.0, math.inf)
    assert len(registry) == 0


def test_a_record_that_ran_out_on_its_way_never_shows(registry: Registry) -> None:
    assert (
        registry.upsert([member(observed_at=math.nextafter(NOW - 30.0, 0.0)), member(pool="p2", observed_at=-1e9)])
        == []
    )
    assert registry.snapshot() == []


async def test_under_a_mock_clock_the_ttl_is_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    registry = Registry("west", clock=autojump_clock)
    registry.upsert([member()])
    assert [record.observed_at for record in registry.snapshot()] == [trio.current_time()]
    await trio.sleep(30.0)
    assert len(registry) == 1
    await trio.sleep(0.001)
    assert len(registry) == 0


def test_what_was_checked_already_is_taken_in_the_same_way(
    registry: Registry, clock: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Registry("west", clock=clock)
    batch: list[Change] = [member(idle=1), member(pool="p2"), Withdrawal(member(pool="p2").identity), member(idle=3)]
    assert other.apply(batch) == []

    def check(change: object) -> None:
        raise AssertionError("that is what it is spared")

    monkeypatch.setattr("trio_federation.registry.change_fault", check)
    registry.apply_checked(batch)
    assert registry.snapshot() == other.snapshot() == [member(idle=3, observed_at=NOW)]
    assert registry.statistics() == other.statistics()
    assert registry.version() == other.version()


# What overwrites what.


def test_an_older_sample_never_overwrites(registry: Registry, clock: Hand) -> None:
    registry.upsert([member(idle=1, observed_at=NOW)])
    registry.upsert([member(idle=2, observed_at=math.nextafter(NOW, 0.0)), member(idle=3, observed_at=NOW - 29.0)])
    assert shown(registry) == [("east", "p1", "", 1)]
    clock.now = NOW + 20.0
    registry.upsert([member(idle=4, observed_at=NOW - 1.0)])
    clock.now = NOW + 30.0
    assert shown(registry) == [("east", "p1", "", 1)], "nor makes it live longer, or shorter"


def test_the_later_one_of_a_batch_wins_where_both_have_the_same_time(registry: Registry) -> None:
    registry.upsert([member(idle=1), member(idle=2), member(idle=3)])
    assert shown(registry) == [("east", "p1", "", 3)]


def test_a_member_that_changes_its_group_is_one_member(registry: Registry) -> None:
    registry.upsert([member(scaling_group="cpu", idle=1)])
    registry.upsert([member(scaling_group="gpu", idle=2)])
    assert shown(registry) == [("east", "p1", "gpu", 2)]
    assert registry.best_foreign_member("ns", "a", "cpu") is None
    assert registry.best_foreign_member("ns", "a", "gpu") == ("east", "p1", 2)


def test_a_future_time_is_now(registry: Registry, clock: Hand) -> None:
    registry.upsert([member(observed_at=NOW + 86400.0)])
    assert [record.observed_at for record in registry.snapshot()] == [NOW]
    clock.now = NOW + 30.5
    assert len(registry) == 0


def test_withdraw_removes_at_once_and_keeps_older_copies_out(registry: Registry, clock: Hand) -> None:
    registry.upsert(
        [member(origin=Origin("a", 3, 0.0)), member(pool="p2"), whole("north", "gpu"), whole("north", "cpu")]
    )
    clock.now = NOW + 1.0
    registry.withdraw([member().identity, whole("north", "gpu").identity, ("nowhere", "ns", "a", "p1")])
    assert shown(registry) == [("east", "p2", "", 0), ("north", "", "cpu", 0)]
    assert registry.statistics().tombstones == 3
    registry.upsert([member(origin=Origin("a", 3, 0.0)), whole("north", "gpu", observed_at=NOW)])
    assert len(registry) == 2
    registry.upsert([member(origin=Origin("a", 4, 0.0)), whole("north", "gpu", observed_at=NOW + 1.0)])
    assert len(registry) == 4


def test_withdraw_takes_withdrawals_with_their_origin(registry: Registry) -> None:
    registry.upsert([member(origin=Origin("a", 3, 0.0))])
    registry.withdraw([Withdrawal(member().identity, Origin("a", 2, 0.0))])
    assert len(registry) == 1, "an older one"
    registry.withdraw([Withdrawal(member().identity, Origin("a", 4, 0.0))])
    assert len(registry) == 0


def test_apply_goes_in_order(registry: Registry) -> None:
    gone = Withdrawal(member().identity)
    registry.apply([member(idle=1), gone, member(idle=2), member(pool="p2"), Withdrawal(member(pool="p2").identity)])
    assert shown(registry) == [("east", "p1", "", 2)]


# Replays (cases C33, C35).


def test_a_replay_with_a_grown_age_never_freshens(registry: Registry, clock: Hand) -> None:
    """The watch reconnects every 5 s, and each time the hub tells again what it heard once, with its age by now."""
    origin = Origin("a", 1, NOW - 100.0)
    rounding = 0.001  # ages are whole milliseconds, rounded down
    for pool, with_origin in (("p1", None), ("p2", origin)):
        registry.upsert([member(pool=pool, origin=with_origin, observed_at=NOW)])
    for step in range(1, 12):
        clock.now = NOW + 5.0 * step
        for pool, with_origin in (("p1", None), ("p2", origin)):
            registry.upsert([member(pool=pool, origin=with_origin, observed_at=NOW - rounding)])
        expected = 2 if clock.now <= NOW + 30.0 else 0
        assert len(registry) == expected, f"after {clock.now - NOW} s"


def test_a_registry_that_starts_anew_takes_a_replay_with_the_age_it_has(clock: Hand) -> None:
    clock.now = NOW + 20.0
    registry = Registry("west", 30.0, clock)
    registry.upsert([member(observed_at=NOW, origin=Origin("a", 1, NOW - 100.0))])
    clock.now = NOW + 30.0
    assert len(registry) == 1
    clock.now = NOW + 30.5
    assert len(registry) == 0


def test_an_equal_seq_changes_nothing_however_fresh_it_looks(registry: Registry, clock: Hand) -> None:
    """The copy of a second hub, one that has lost the time that the record sat there."""
    registry.upsert([member(idle=1, origin=Origin("a", 7, 0.0))])
    clock.now = NOW + 29.0
    registry.upsert([member(idle=2, origin=Origin("a", 7, 0.0))])
    assert [(record.idle, record.observed_at) for record in registry.snapshot()] == [(1, NOW)]
    clock.now = NOW + 30.5
    assert len(registry) == 0


def test_one_case_rule_an_upper_case_name_is_refused_everywhere(registry: Registry) -> None:
    registry.upsert([member("east", idle=1)])
    refused = registry.upsert(
        [member("East", idle=9), member(pool="P1", idle=9), Capacity("east", "Ns", "a", "p1", idle=9)]
    )
    assert [bad.reason for bad in refused] == ["cluster_id", "member_pool", "namespace"]
    assert shown(registry) == [("east", "p1", "", 1)]
    with pytest.raises(ValueError, match="'West'"):
        Registry("West")


def test_a_cluster_that_was_rebuilt_is_taken_in_after_the_old_one_ran_out(registry: Registry, clock: Hand) -> None:
    registry.upsert([member(idle=1, origin=Origin("old", 500, NOW - 9000.0))])
    clock.now = NOW + 31.0
    registry.upsert([member(idle=2, origin=Origin("new", 1, NOW + 25.0))])
    assert shown(registry) == [("east", "p1", "", 2)]


# Bad input.


@pytest.mark.parametrize("bad", ["", "West", "a.b", "-a", "x" * 64, "a::b", None, 3])
def test_a_bad_local_cluster_id_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^local cluster_id .* is not a lower-case RFC 1123 label"):
        Registry(bad)


@pytest.mark.parametrize(
    "bad", [{"ttl": 0.0}, {"ttl": math.nan}, {"tombstone_ttl": -1.0}, {"silence_limit": math.inf}, {"clock": "noon"}]
)
def test_bad_times_and_clocks_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match="seconds"):
        Registry("west", **bad)


def test_bad_records_are_refused_with_reasons_and_counted_and_the_rest_of_the_batch_goes_on(registry: Registry) -> None:
    batch = [
        member(pool="p1"),
        member(pool="p2", idle=-1),
        member(pool="p3"),
        member(pool="Bad Name"),
        member(pool="p4", scaling_group="a::b"),
        member(pool="p5", observed_at=math.nan),
        member(pool="p6", idle=-7),
        member(pool="p7"),
    ]
    refused = registry.upsert(batch)
    assert [bad.reason for bad in refused] == ["idle", "member_pool", "scaling_group", "observed_at", "idle"]
    assert [pool for _, pool, _, _ in shown(registry)] == ["p1", "p3", "p7"]
    registry.upsert([member(idle=-1)])
    assert registry.statistics().refused == {"idle": 3, "member_pool": 1, "observed_at": 1, "scaling_group": 1}


def test_what_is_no_record_at_all_is_refused_like_a_bad_one(registry: Registry) -> None:
    batch: list[Any] = [member(pool="p1"), None, {"idle": 3}, ("east", "ns", "a", "p1"), member(pool="p2")]
    assert [bad.reason for bad in registry.upsert(batch)] == ["type", "type", "type"]
    assert [pool for _, pool, _, _ in shown(registry)] == ["p1", "p2"]
    assert registry.statistics().refused == {"type": 3}


def test_what_is_no_identity_withdraws_nothing_and_does_not_keep_the_others_from_being_withdrawn(
    registry: Registry,
) -> None:
    registry.upsert([member(), whole("north")])
    # An aggregate row's identity ends with its group, also where that is "".
    bad: list[Any] = [None, "east", ("east",), ("north", "ns", "a", ""), ("east", ["ns"], "a", "p1"), (1, 2, 3, 4)]
    registry.withdraw([*bad, member().identity])
    assert shown(registry) == [("north", "", "", 0)]
    statistics = registry.statistics()
    assert statistics.tombstones == 1
    assert sum(statistics.refused.values()) == len(bad)


def test_a_batch_that_breaks_off_is_not_taken_in(registry: Registry) -> None:
    def records() -> Iterator[Capacity]:
        yield member()
        raise OSError("the source broke off")

    with pytest.raises(OSError, match="broke off"):
        registry.upsert(records())
    assert len(registry) == 0
    registry.upsert([member()])
    assert len(registry) == 1


# What queries show.


def test_aggregate_rows_show_only_while_their_cluster_has_no_live_member_of_the_env(
    registry: Registry, clock: Hand
) -> None:
    registry.upsert(
        [whole(idle=10), whole(group="gpu", idle=5), whole("north", idle=7), member(idle=1, observed_at=NOW - 20.0)]
    )
    assert shown(registry) == [("east", "p1", "", 1), ("north", "", "", 7)]
    assert len(registry) == 2
    assert registry.statistics().records == 4
    assert [record.member_pool for record in registry.foreign_members("ns", "a")] == ["p1", ""]
    clock.now = math.nextafter(NOW + 10.0, math.inf)  # the member has run out
    assert shown(registry) == [("east", "", "", 10), ("east", "", "gpu", 5), ("north", "", "", 7)]
    registry.upsert([member(idle=2)])
    assert shown(registry) == [("east", "p1", "", 2), ("north", "", "", 7)]
    registry.withdraw([member().identity])
    assert len(registry) == 3


def test_a_member_of_another_env_or_cluster_shadows_nothing(registry: Registry) -> None:
    registry.upsert(
        [whole(idle=10), Capacity("east", "ns", "b", "p1"), Capacity("east", "other", "a", "p1"), member("north")]
    )
    assert ("east", "", "", 10) in shown(registry)
    assert len(registry) == 4


def test_local_questions_of_members(registry: Registry) -> None:
    registry.upsert(
        [
            member("west", "p1", idle=1),
            member("west", "p2", scaling_group="gpu", idle=10, autoscaling_enabled=True, capacity=0),
            member("west", "p3", scaling_group="cpu", idle=100, autoscaling_enabled=True, capacity=-1),
            member("east", "p4", scaling_group="gpu", idle=1000, autoscaling_enabled=True, capacity=-1),
            whole("west", idle=5000),
        ]
    )
    assert [registry.local_idle("ns", "a", group) for group in ("", "gpu", "cpu", "none")] == [111, 10, 100, 0]
    assert [registry.local_can_grow("ns", "a", group) for group in ("", "gpu", "cpu", "none")] == [
        True,
        False,
        True,
        False,
    ]
    assert registry.local_idle("ns", "b") == registry.local_idle("other", "a") == 0


def test_local_questions_of_aggregate_rows(registry: Registry) -> None:
    registry.upsert([whole("west", "gpu", idle=10), whole("west", "cpu", idle=1, autoscaling_enabled=True, capacity=2)])
    assert [registry.local_idle("ns", "a", group) for group in ("", "gpu", "cpu", "none")] == [11, 10, 1, 0]
    assert [registry.local_can_grow("ns", "a", group) for group in ("", "gpu", "cpu")] == [True, False, True]
    registry.upsert([whole("west", idle=50)])
    assert [registry.local_idle("ns", "a", group) for group in ("", "gpu", "cpu", "none")] == [50, 10, 1, 0]
    assert [registry.local_can_grow("ns", "a", group) for group in ("", "gpu", "cpu")] == [False, False, True]


def test_answers_are_sorted(registry: Registry) -> None:
    records = [
        Capacity(cluster_id, namespace, env, pool, group)
        for cluster_id in ("north", "east", "west")
        for namespace in ("ns", "a-ns")
        for env in ("b", "a")
        for pool, group in (("p2", ""), ("p1", "z"), ("p10", "a"))
    ]
    records += [Capacity("north", "ns", "c", "", group) for group in ("z", "", "a")]
    registry.upsert(records)
    stamped = [replace(record, observed_at=NOW) for record in records]

    def key(r: Capacity) -> tuple[str, str, str, str, str]:
        return (r.cluster_id, r.namespace, r.env_name, r.member_pool, r.scaling_group)

    assert registry.snapshot() == sorted(stamped, key=key)
    foreign = [r for r in stamped if (r.namespace, r.env_name) == ("ns", "a") and r.cluster_id != "west"]
    assert registry.foreign_members("ns", "a") == sorted(foreign, key=key)
    assert [record.scaling_group for record in registry.foreign_members("ns", "c")] == ["", "a", "z"]


def test_what_a_query_returns_is_the_callers_own(registry: Registry) -> None:
    registry.upsert([member()])
    registry.snapshot().clear()
    registry.foreign_members("ns", "a").clear()
    registry.records("ns", "a").clear()
    registry.statistics().refused["idle"] = 99
    assert len(registry.snapshot()) == len(registry.foreign_members("ns", "a")) == len(registry.records("ns", "a")) == 1
    assert registry.statistics().refused == {}


def test_a_foreign_member_is_a_target_to_pin_to() -> None:
    best = ForeignMember("east", "p1", 3)
    assert best.target == "east::p1"
    assert best == ("east", "p1", 3)


def test_its_repr_says_whose_and_how_much(registry: Registry) -> None:
    registry.upsert([member(), member(pool="p2")])
    assert repr(registry) == "<Registry of west: 2 records>"


# What it costs, and keeps.


def test_a_query_touches_only_its_one_env(registry: Registry) -> None:
    registry.upsert([Capacity("east", "ns", f"env{number}", "p1", idle=1) for number in range(200)])
    registry.upsert([member(idle=3), member("west", idle=2)])
    registry._table.envs = Guarded(registry._table.envs, frozenset({("ns", "a")}))
    registry._table._slots = Guarded(registry._table._slots, frozenset())  # no query needs a single slot
    assert registry.local_idle("ns", "a") == 2
    assert registry.local_can_grow("ns", "a") is False
    assert registry.best_foreign_member("ns", "a") == ("east", "p1", 3)
    assert len(registry.foreign_members("ns", "a")) == 1
    assert len(registry.records("ns", "a")) == 2


def test_a_query_frees_a_few_of_what_has_run_out_elsewhere_and_many_queries_all_of_it(
    registry: Registry, clock: Hand
) -> None:
    registry.upsert([Capacity("east", "ns", f"env{number}", "p1", idle=1) for number in range(100)])
    clock.now = NOW + 31.0
    held = [100]
    while held[-1]:
        assert registry.best_foreign_member("ns", "env99") is None, "although it may not be freed yet"
        held.append(registry._table.held()["records"])
        assert 0 < held[-2] - held[-1] <= 10
    assert registry._table.held() == {"records": 0, "tombstones": 0, "instances": 0, "entries": 0}
    assert registry._table.envs == {}


def test_a_registry_that_hears_nothing_for_long_enough_holds_nothing(registry: Registry, clock: Hand) -> None:
    origin = Origin("a", 1, 0.0)
    registry.upsert([member(pool=f"p{number}", origin=origin, observed_at=NOW - number) for number in range(20)])
    registry.upsert([whole("west"), member("north")])
    registry.withdraw([member(pool="p3").identity, member(pool="unheard-of").identity])
    assert registry.statistics() == RegistryStatistics(21, 21, 2, 1, {})
    clock.now = math.nextafter(NOW + 30.0, math.inf)
    assert registry.statistics() == RegistryStatistics(0, 0, 2, 0, {})
    clock.now = math.nextafter(NOW + 60.0, math.inf)
    assert registry.statistics() == RegistryStatistics(0, 0, 0, 0, {})
    assert registry._table.held()["entries"] == 0


# Clocks (case C31).


def test_set_clock_changes_what_now_is_and_leaves_the_stamps(registry: Registry, clock: Hand) -> None:
    registry.upsert([member()])
    other = trio.testing.MockClock()
    other.jump(NOW + 10.0 - other.current_time())
    registry.set_clock(other)
    assert registry.now() == NOW + 10.0
    assert [record.observed_at for record in registry.snapshot()] == [NOW]
    clock.now = NOW + 500.0
    assert len(registry) == 1, "the clock it had is not read any more"
    other.jump(20.0)
    assert len(registry) == 1
    other.jump(0.5)
    assert len(registry) == 0
    with pytest.raises(TypeError, match="a clock is a function"):
        registry.set_clock("noon")  # type: ignore[arg-type]


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time since boot; the monotonic clock stands still, as it does while a machine is suspended."""

    def set_boot_time(seconds: float) -> None:
        monkeypatch.setattr(
            time, "clock_gettime", {time.CLOCK_BOOTTIME: seconds, time.CLOCK_MONOTONIC: 77.0}.__getitem__
        )

    monkeypatch.setattr(time, "monotonic", lambda: 77.0)
    return set_boot_time


@pytest.mark.parametrize("step", [86400.0, -86400.0, 3600.0, -3600.0])
def test_a_step_of_the_wall_clock_changes_nothing(
    step: float, boot: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot(5000.0)
    wall = 1.7e9
    monkeypatch.setattr(time, "time", lambda: wall)
    registry = Registry("west", 60.0)
    registry.upsert([member(idle=3, observed_at=registry.now() - 5.0)])
    before = registry.snapshot()
    wall += step
    assert registry.snapshot() == before
    assert registry.best_foreign_member("ns", "a") == ("east", "p1", 3)
    registry.upsert([member(pool="p2")])
    assert [registry.now() - (record.observed_at or 0.0) for record in registry.snapshot()] == [5.0, 0.0]
    boot(5055.0)
    assert len(registry) == 2
    boot(5055.5)
    assert len(registry) == 1


def test_after_an_hour_of_suspend_nothing_is_left_at_the_first_query(boot: Callable[[float], None]) -> None:
    boot(5000.0)
    queries: list[Callable[[Registry], object]] = [
        lambda registry: registry.best_foreign_member("ns", "a") is None,
        lambda registry: registry.foreign_members("ns", "a") == [],
        lambda registry: registry.local_idle("ns", "a") == 0,
        lambda registry: not registry.local_can_grow("ns", "a"),
        lambda registry: registry.snapshot() == [],
        lambda registry: len(registry) == 0,
    ]
    registries = [Registry("west", 60.0) for _ in queries]
    for registry in registries:
        local = member("west", idle=2, autoscaling_enabled=True, capacity=1)
        registry.upsert([member(idle=3, observed_at=registry.now() - 5.0), local])
        assert len(registry) == 2
    boot(8600.0)
    for registry, query in zip(registries, queries, strict=True):
        assert query(registry)


# Threads.


@pytest.fixture
def restless() -> Iterator[None]:
    """Makes threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_together(*bodies: Callable[[], None]) -> None:
    """Run all of them in threads of their own, from the same moment; what one raises is raised here."""
    barrier = threading.Barrier(len(bodies))
    raised: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            barrier.wait(timeout=30)
            body()
        except BaseException as problem:
            raised.append(problem)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@pytest.mark.usefixtures("restless")
def test_threads_may_write_and_ask_at_once_and_never_see_half_a_batch(registry: Registry, clock: Hand) -> None:
    pools = [f"p{number}" for number in range(8)]
    rounds = 60
    writing_is_over = threading.Event()

    def write(cluster_id: str) -> Callable[[], None]:
        def body() -> None:
            try:
                for seq in range(1, rounds + 1):
                    origin = Origin(cluster_id, seq, 0.0)
                    registry.upsert([member(cluster_id, pool, idle=seq, running=seq, origin=origin) for pool in pools])
            finally:
                writing_is_over.set()

        return body

    def withdraw_and_revive() -> None:
        for _ in range(rounds):
            registry.upsert([member("north", "p1"), member("north", "p2")])
            registry.withdraw([member("north", "p1").identity, member("north", "p2").identity])

    def let_time_pass() -> None:
        for _ in range(20_000):  # at most 20 s, so that nothing runs out
            clock.now += 0.001

    def ask() -> None:
        while not writing_is_over.is_set():
            found = registry.foreign_members("ns", "a")
            for cluster_id in ("east", "south"):
                assert len({record.running for record in found if record.cluster_id == cluster_id}) <= 1
            assert len([record for record in found if record.cluster_id == "north"]) in (0, 2)
            assert len(registry.snapshot()) in (len(pools) * count + extra for count in range(4) for extra in (0, 2))
            best = registry.best_foreign_member("ns", "a")
            assert best is None or best.member_pool == "p0"
            assert registry.local_idle("ns", "a") % len(pools) == 0

    run_together(write("east"), write("south"), write("west"), withdraw_and_revive, let_time_pass, ask, ask)
    assert [record.idle for record in registry.snapshot()] == [rounds] * len(pools) * 3
    assert registry.statistics().tombstones == 2


@pytest.mark.usefixtures("restless")
def test_what_threads_say_of_the_same_members_ends_with_the_newest(registry: Registry) -> None:
    words = 400

    def say(first: int) -> Callable[[], None]:
        # Each says every fourth word, all of them together every one.
        def body() -> None:
            for seq in range(first, words + 1, 4):
                registry.upsert([member(pool=pool, idle=seq, origin=Origin("a", seq, 0.0)) for pool in ("p1", "p2")])
                registry.upsert([member(pool="p1", idle=-1)])

        return body

    run_together(*(say(first) for first in (1, 2, 3, 4)))
    assert shown(registry) == [("east", "p1", "", words), ("east", "p2", "", words)]
    assert registry.statistics().refused == {"idle": words}
