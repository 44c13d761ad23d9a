"""publish_metrics: what a scrape shows of a snapshot, and what it no longer shows of the one before."""

from __future__ import annotations

import gc
import math
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trio_federation.capacity import INT32_MAX, Capacity, is_group
from trio_federation.metrics import publish_metrics
from trio_federation.registry import Registry

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

ENV = "agentbox_federation_env_"
MEMBER = "trio_federation_member_"


def scrape(registry: CollectorRegistry) -> Series:
    """Every series that a scrape of `registry` shows, by name and sorted labels, as prometheus' own parser reads it."""
    series: Series = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in series, "one series, exported twice"
            series[key] = sample.value
    return series


def env(name: str, cluster: str, group: str = "", env_name: str = "py") -> tuple[str, tuple[tuple[str, str], ...]]:
    return (ENV + name, (("cluster", cluster), ("env", env_name), ("group", group), ("namespace", "agents")))


def member(name: str, cluster: str, pool: str, group: str = "") -> tuple[str, tuple[tuple[str, str], ...]]:
    labels = (("cluster", cluster), ("env", "py"), ("group", group), ("namespace", "agents"), ("pool", pool))
    return (MEMBER + name, labels)


def published(snapshot: Iterable[Capacity], now: float | None = None) -> Series:
    registry = CollectorRegistry()
    publish_metrics(snapshot, registry, now=now)
    return scrape(registry)


def test_one_series_for_each_group_and_one_for_the_whole_env() -> None:
    series = published(
        [
            Capacity("west", "agents", "py", "p1", "gpu", idle=1, running=10, desired=100),
            Capacity("west", "agents", "py", "p2", "gpu", idle=2, running=20, desired=200),
            Capacity("west", "agents", "py", "p3", "cpu", idle=4, running=40, desired=400),
            Capacity("west", "agents", "py", "p4", idle=8, running=80, desired=800),
            Capacity("east", "agents", "py", "p1", idle=16, running=160, desired=1600),
        ]
    )
    expected = {("west", "gpu"): 3, ("west", "cpu"): 4, ("west", ""): 15, ("east", ""): 16}
    assert {key: value for key, value in series.items() if key[0].startswith(ENV)} == {
        env(name, cluster, group): value * factor
        for (cluster, group), value in expected.items()
        for name, factor in (("idle", 1), ("running", 10), ("desired", 100))
    }


def test_what_left_the_snapshot_is_gone_at_the_next_scrape() -> None:
    registry = CollectorRegistry()
    stays = Capacity("west", "agents", "py", "p2", "gpu", idle=2)
    publish_metrics([Capacity("west", "agents", "py", "p1", "cpu", idle=1), stays, Capacity("b", "n", "e")], registry)
    assert env("idle", "west", "cpu") in scrape(registry)
    publish_metrics([stays], registry)
    assert scrape(registry) == published([stays])
    publish_metrics([], registry)
    assert scrape(registry) == {}


def test_an_expired_record_is_gone_and_the_others_stay() -> None:
    now = 100.0
    capacities = Registry("a", ttl=30.0, clock=lambda: now)
    registry = CollectorRegistry()
    capacities.upsert([Capacity("b", "agents", "py", "p1", idle=5), Capacity("a", "agents", "py", "p2", idle=7)])
    now = 130.0
    capacities.upsert([Capacity("a", "agents", "py", "p2", idle=8)])
    publish_metrics(capacities.snapshot(), registry)
    assert scrape(registry)[env("idle", "b")] == 5
    now = 130.5
    publish_metrics(capacities.snapshot(), registry)
    series = scrape(registry)
    assert series[env("idle", "a")] == 8
    assert not [key for key in series if ("cluster", "b") in key[1]]


def test_any_number_of_registries_any_number_of_times() -> None:
    registries = [CollectorRegistry(auto_describe=choice) for choice in (False, True)]
    for idle in range(3):
        for number, registry in enumerate(registries):
            publish_metrics([Capacity("west", "agents", "py", "p", idle=10 * number + idle)], registry)
    assert [scrape(registry)[env("idle", "west")] for registry in registries] == [2, 12]


def test_without_a_registry_the_global_one_is_used() -> None:
    try:
        publish_metrics([Capacity("west", "agents", "py", "p", idle=3)])
        publish_metrics(iter([Capacity("west", "agents", "py", "p", idle=4)]), None)
        labels = {"cluster": "west", "namespace": "agents", "env": "py", "group": ""}
        assert REGISTRY.get_sample_value(ENV + "idle", labels) == 4
    finally:
        publish_metrics([])


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Python switches between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_first_publications_from_many_threads_at_once_register_once() -> None:
    registries = [CollectorRegistry() for _ in range(100)]
    gate, errors = threading.Barrier(4), []

    def publish() -> None:
        for registry in registries:
            gate.wait()
            try:
                publish_metrics([Capacity("west", "agents", "py", "p", idle=1)], registry)
            except ValueError as error:
                errors.append(error)

    threads = [threading.Thread(target=publish) for _ in range(gate.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(scrape(registry)[env("idle", "west")] == 1 for registry in registries)


def test_a_name_that_something_else_uses_is_an_error_and_nothing_is_half_registered() -> None:
    registry = CollectorRegistry()
    other = Gauge(ENV + "idle", "somebody else's", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        publish_metrics([Capacity("west", "agents", "py", "p", idle=3)], registry)
    registry.unregister(other)
    publish_metrics([Capacity("west", "agents", "py", "p", idle=4)], registry)
    assert scrape(registry)[env("idle", "west")] == 4


def test_a_registry_is_not_kept_alive() -> None:
    registry = CollectorRegistry()
    publish_metrics([Capacity("west", "agents", "py", "p")], registry)
    gone = weakref.ref(registry)
    del registry
    gc.collect()
    assert gone() is None


def test_members_have_series_of_their_own_and_aggregate_rows_have_none() -> None:
    series = published(
        [
            Capacity("west", "agents", "py", "p1", "gpu", idle=1, running=2, pending=3, desired=4),
            Capacity("east", "agents", "py", idle=9),
            Capacity("east", "agents", "py", scaling_group="gpu", idle=9),
        ]
    )
    assert {key: value for key, value in series.items() if key[0].startswith(MEMBER)} == {
        member("idle", "west", "p1", "gpu"): 1,
        member("running", "west", "p1", "gpu"): 2,
        member("pending", "west", "p1", "gpu"): 3,
        member("desired", "west", "p1", "gpu"): 4,
        member("headroom", "west", "p1", "gpu"): 0,
    }


@pytest.mark.parametrize("enabled, capacity, shown", [(True, -1, math.inf), (True, 0, 0), (True, 7, 7), (False, 7, 0)])
def test_headroom_counts_only_where_there_is_autoscaling(enabled: bool, capacity: int, shown: float) -> None:
    record = Capacity("west", "agents", "py", "p1", autoscaling_enabled=enabled, capacity=capacity)
    assert published([record])[member("headroom", "west", "p1")] == shown


def test_ages_are_shown_where_the_time_is_given_and_the_observation_is_known() -> None:
    records = [
        Capacity("west", "agents", "py", "p1", observed_at=10.0),
        Capacity("west", "agents", "py", "p2", observed_at=13.0),
        Capacity("west", "agents", "py", "p3"),
    ]
    ages = {key: value for key, value in published(records, now=12.5).items() if key[0] == MEMBER + "age_seconds"}
    assert ages == {member("age_seconds", "west", "p1"): 2.5, member("age_seconds", "west", "p2"): 0}
    assert not [key for key in published(records) if key[0] == MEMBER + "age_seconds"]


NAMES = st.sampled_from(["a", "b"])
GROUPS = st.sampled_from(["", "gpu", "cpu", 'quo"te', "back\\slash", "back\\n", "größe 大", "a=b,c}"])
COUNTS = st.integers(0, INT32_MAX)
RECORDS = st.builds(
    Capacity,
    NAMES,
    NAMES,
    NAMES,
    st.sampled_from(["", "", "p1", "p2", "p3"]),
    GROUPS,
    idle=COUNTS,
    running=COUNTS,
    pending=COUNTS,
    desired=COUNTS,
    autoscaling_enabled=st.booleans(),
    capacity=st.integers(-1, INT32_MAX),
)
SNAPSHOTS = st.lists(RECORDS, max_size=12, unique_by=lambda record: record.identity)


def expected_envs(snapshot: list[Capacity], count: str) -> dict[tuple[str, str, str, str], int]:
    """One gauge, worked out plainly: what each group and each whole env holds, by cluster, namespace, env, group."""
    result: dict[tuple[str, str, str, str], int] = {}
    for place in {(record.cluster_id, record.namespace, record.env_name) for record in snapshot}:
        records = [record for record in snapshot if (record.cluster_id, record.namespace, record.env_name) == place]
        members = [record for record in records if record.member_pool]
        for group in {record.scaling_group for record in members or records} - {""}:
            result[(*place, group)] = sum(getattr(r, count) for r in members or records if r.scaling_group == group)
        whole = [record for record in records if not record.scaling_group]
        result[(*place, "")] = sum(getattr(record, count) for record in members or whole or records)
    return result


@given(SNAPSHOTS)
def test_the_env_gauges_are_what_the_records_add_up_to(snapshot: list[Capacity]) -> None:
    series = published(snapshot)
    for count in ("idle", "running", "desired"):
        shown = {}
        for (name, labels), value in series.items():
            if name == ENV + count:
                by = dict(labels)
                shown[(by["cluster"], by["namespace"], by["env"], by["group"])] = value
        assert shown == expected_envs(snapshot, count)


@given(SNAPSHOTS, SNAPSHOTS)
def test_nothing_is_left_of_an_earlier_snapshot(earlier: list[Capacity], later: list[Capacity]) -> None:
    registry = CollectorRegistry()
    publish_metrics(earlier, registry, now=1.0)
    generate_latest(registry)
    publish_metrics(later, registry)
    fresh = CollectorRegistry()
    publish_metrics(later, fresh)
    assert generate_latest(registry) == generate_latest(fresh)


@given(st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=63).filter(is_group))
def test_every_valid_group_survives_the_text_format(group: str) -> None:
    series = published([Capacity("west", "agents", "py", "p1", group, idle=3)])
    assert series[env("idle", "west", group)] == 3
    assert series[member("idle", "west", "p1", group)] == 3


@pytest.mark.usefixtures("hasty_threads")
def test_a_scrape_sees_one_snapshot_and_never_parts_of_two() -> None:
    """1,000 scrapes while another thread publishes: groups add up to the whole, and all gauges tell the same story."""
    registry = CollectorRegistry()
    # Snapshots of different sizes and values; in each, every count of every member is the snapshot's number.
    snapshots = [
        [
            Capacity("west", "agents", f"env-{e}", f"p{p}", f"g{p % 3}", idle=n, running=n, pending=n, desired=n)
            for e in range(3)
            for p in range(1 + n)
        ]
        for n in range(1, 5)
    ]
    publish_metrics(snapshots[0], registry)
    done = threading.Event()
    publications = 0

    def publish() -> None:
        nonlocal publications
        while not done.is_set():
            publish_metrics(snapshots[publications % len(snapshots)], registry)
            publications += 1

    publisher = threading.Thread(target=publish)
    seen = set()
    try:
        publisher.start()
        for _ in range(1000):
            wholes: dict[tuple[str, str], float] = {}
            sums: dict[tuple[str, str], float] = {}
            members: set[float] = set()
            for family in registry.collect():
                for sample in family.samples:
                    if sample.name.startswith(ENV):
                        totals = sums if sample.labels["group"] else wholes
                        key = (sample.name, sample.labels["env"])
                        totals[key] = totals.get(key, 0) + sample.value
                    elif sample.name != MEMBER + "headroom":
                        members.add(sample.value)
            assert sums == wholes
            assert len(members) == 1
            (number,) = members
            assert set(wholes.values()) == {number * (1 + number)}
            assert len(wholes) == 9
            seen.add(number)
    finally:
        done.set()
        publisher.join()
    assert publications > 1
    assert len(seen) > 1
