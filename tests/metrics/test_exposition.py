"""FederationMetrics.exposition: the same bytes as prometheus_client's, in slices, whatever goes on meanwhile."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tests.metrics.reading import ENV, MEMBER, NOW, Series, series_of
from trio_federation.capacity import INT32_MAX, Capacity
from trio_federation.metrics import FederationMetrics, by_env, publish_metrics, writer
from trio_federation.registry import Registry, RegistryHeld


@contextmanager
def slices(records: int, lines: int) -> Iterator[None]:
    """Slices so small that also a few records take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "RECORDS_PER_SLICE", records)
        patch.setattr(writer, "LINES_PER_SLICE", lines)
        yield


async def joined(exposition: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in exposition])


def prometheus_clients(snapshot: Sequence[Capacity], now: float = NOW) -> bytes:
    """What prometheus_client itself makes of a snapshot."""
    registry = CollectorRegistry()
    publish_metrics(sorted(snapshot, key=lambda record: record.sort_key), registry, now=now)
    return generate_latest(registry)


def capacity_of(text: bytes) -> Series:
    """The series of capacity in a scrape."""
    return {key: value for key, value in series_of(text).items() if key[0].startswith((ENV, MEMBER))}


# The bytes.

NASTY = st.text(
    st.sampled_from("ab\\\"'={},# \nnäß大\U0001f600\u2028\x7f") | st.characters(exclude_categories=["Cs"]), max_size=6
)
NAMES = st.sampled_from(["a", "b", "a-b"]) | NASTY
COUNTS = st.integers(0, 300) | st.sampled_from([999_999, 1_000_000, 1_000_001, 12_345_678, INT32_MAX])
MOMENTS = st.none() | st.floats(-1e9, 1e9) | st.floats(NOW - 30, NOW + 1) | st.integers(-100, 100)


def records(*names: st.SearchStrategy[str]) -> st.SearchStrategy[Capacity]:
    return st.builds(
        Capacity,
        *names,
        idle=COUNTS,
        running=COUNTS,
        pending=COUNTS,
        desired=COUNTS,
        autoscaling_enabled=st.booleans(),
        capacity=st.just(-1) | COUNTS,
        observed_at=MOMENTS,
    )


#: any names; and few names, so that clusters share envs, and pools and groups a cluster
ANY = records(NAMES, NAMES, NAMES, st.just("") | NAMES, st.just("") | NAMES)
FEW = records(*map(st.sampled_from, ["ab", "ab", "ab", ["", "p1", "p2", "p3", "p4"], ["", "gpu", 'q"\\\n大']]))
SNAPSHOTS = st.one_of(
    *[st.lists(record, max_size=15, unique_by=lambda record: record.identity) for record in (ANY, FEW)]
)


@given(SNAPSHOTS, st.sampled_from([NOW, 100, 0.1, 1e9]), st.integers(1, 5), st.integers(1, 5))
@example([], NOW, 1, 1)
def test_the_bytes_are_prometheus_clients_own(snapshot: list[Capacity], now: float, records: int, lines: int) -> None:
    """In whatever order an env's records come, and however the work is cut up."""
    with slices(records, lines):
        text = FederationMetrics().whole_exposition(by_env(snapshot), now=now)
    begin = text.index(b"# HELP agentbox_federation_env_idle ")
    assert text[begin:] == prometheus_clients(snapshot, now)
    assert text[:begin].count(b"agentbox") == text[:begin].count(b"member_") == 0


@given(SNAPSHOTS)
def test_prometheus_parser_reads_it(snapshot: list[Capacity]) -> None:
    shown = capacity_of(FederationMetrics().whole_exposition(by_env(snapshot), now=NOW))
    members = [record for record in snapshot if record.member_pool]
    by_name = Tally(name for name, _ in shown)
    assert by_name[MEMBER + "idle"] == by_name[MEMBER + "headroom"] == len(members)
    assert by_name[MEMBER + "age_seconds"] == sum(record.observed_at is not None for record in members)
    for record in members:
        labels = {
            "cluster": record.cluster_id,
            "namespace": record.namespace,
            "env": record.env_name,
            "pool": record.member_pool,
            "group": record.scaling_group,
        }
        assert shown[MEMBER + "idle", tuple(sorted(labels.items()))] == record.idle


@given(st.floats() | st.integers(-(2**70), 2**70))
def test_numbers_are_written_as_prometheus_client_writes_them(number: float) -> None:
    family = Metric("x", "", "gauge")
    family.add_sample("x", {}, number)
    lines = writer.text_of(family).splitlines(keepends=True)
    assert lines[-1] == b"x " + writer.end_of_line(number)
    assert writer.Numbers()[number] == writer.end_of_line(number)


def test_without_a_ceiling_the_headroom_is_infinite() -> None:
    record = Capacity("west", "ns", "a", "p", autoscaling_enabled=True, capacity=-1)
    text = FederationMetrics().whole_exposition([[record]], now=NOW)
    assert b'\ntrio_federation_member_headroom{cluster="west",env="a",group="",namespace="ns",pool="p"} +Inf\n' in text
    assert math.inf in capacity_of(text).values()


def test_more_different_numbers_than_are_remembered_are_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "NUMBERS_REMEMBERED", 3)
    snapshot = [Capacity("west", "ns", "a", f"p{number:02}", idle=number * 1000) for number in range(40)]
    text = FederationMetrics().whole_exposition([snapshot], now=NOW)
    assert text.endswith(prometheus_clients(snapshot))


def test_health_comes_first_and_is_prometheus_clients_text() -> None:
    metrics = FederationMetrics()
    metrics.configured(hubs=["hub-a:7443"], sources=["source[0]:x"], sinks=["sink[0]:x"], filters=["filter[0]:x"])
    metrics.source_collected("source[0]:x", 0.2, 3, NOW)
    health = generate_latest(metrics.registry)
    assert metrics.whole_exposition([[Capacity("west", "ns", "a", "p")]], now=NOW).startswith(health)


async def test_chunks_make_up_the_whole() -> None:
    snapshot = [Capacity("west", "ns", f"env-{number}", "p", idle=number) for number in range(50)]
    metrics = FederationMetrics()
    with slices(7, 11):
        chunks = [chunk async for chunk in metrics.exposition(by_env(snapshot), now=NOW)]
    assert all(chunks), "an empty chunk ends an answer in some servers"
    assert max(chunk.count(b"\n") for chunk in chunks[1:]) <= 2 + 2 * 11
    assert b"".join(chunks) == metrics.whole_exposition(by_env(snapshot), now=NOW)


# Slices.


async def test_others_get_their_turn_all_the_time() -> None:
    """Between two looks at what goes on, no more than a slice of records is gathered, or of lines written."""
    size, looks = 200, 0
    per_look: Tally[int] = Tally()

    def envs() -> Iterator[list[Capacity]]:
        for number in range(size):
            per_look[looks] += 1
            yield [Capacity("west", "ns", f"env-{number}", "p", idle=number)]

    async def look() -> None:
        nonlocal looks
        while True:
            await trio.lowlevel.checkpoint()
            looks += 1

    with slices(10, 10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await joined(FederationMetrics().exposition(envs(), now=NOW))
            nursery.cancel_scope.cancel()
    # Trio runs what is due in random order, so another task may have its turn first or last in two rounds.
    assert max(per_look.values()) <= 2 * 10
    assert looks >= size / 10 + 9 * size / (2 * 10) - 2


async def test_a_large_env_is_cut_up_too() -> None:
    pauses = 0

    async def look() -> None:
        nonlocal pauses
        while True:
            await trio.lowlevel.checkpoint()
            pauses += 1

    env = [Capacity(f"cluster-{number:03}", "ns", "a", "p") for number in range(1000)]
    with slices(10, 10_000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await joined(FederationMetrics().exposition([env], now=NOW))
            nursery.cancel_scope.cancel()
    assert pauses >= 1000 / 10 - 2


async def test_it_can_be_cancelled_and_forgotten_at_any_step() -> None:
    metrics = FederationMetrics()
    snapshot = [Capacity("west", "ns", f"env-{number}", "p", idle=number) for number in range(20)]
    whole = metrics.whole_exposition(by_env(snapshot), now=NOW)
    with slices(3, 3):
        ended = False
        steps = 0
        while not ended:
            steps += 1
            with trio.CancelScope() as scope:
                got = 0
                exposition = metrics.exposition(by_env(snapshot), now=NOW)
                async for _ in exposition:
                    got += 1
                    if got == steps:
                        scope.cancel()
            ended = not scope.cancelled_caught
            abandoned = metrics.exposition(by_env(snapshot), now=NOW)
            await anext(abandoned)
            del abandoned
        gc.collect()
        assert steps > 20
        assert await joined(metrics.exposition(by_env(snapshot), now=NOW)) == whole


def test_memory_is_a_fraction_of_the_answer_and_given_back() -> None:
    metrics = FederationMetrics()
    registry = Registry("a", clock=lambda: 0.0)
    registry.upsert(Capacity(f"cluster-{c}", "ns", f"env-{e}", "pool") for e in range(250) for c in range(20))

    def scrape() -> int:
        return sum(map(len, metrics._slices(registry.by_env(), NOW, registry.held)))

    with slices(500, 200):
        size = scrape()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(3):
                scrape()
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak - before < size / 3
    assert after - before < size / 50


# Failures.


class _Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        """Fails."""
        raise RuntimeError("broken")


def _envs_that_end_badly() -> Iterator[list[Capacity]]:
    for number in range(5):
        yield [Capacity("west", "ns", f"env-{number}", "p")]
    raise RuntimeError("broken")


def _broken() -> int:
    raise RuntimeError("broken")


def _held_broken() -> RegistryHeld:
    raise RuntimeError("broken")


def _with_value(field: str, metrics: FederationMetrics) -> AsyncIterator[bytes]:
    values: dict[str, Any] = {field: "no number"}
    return metrics.exposition([GOOD, [Capacity("w", "ns", "b", "p", **values)]], now=NOW)


GOOD = [Capacity("west", "ns", "a", "p")]


@pytest.mark.parametrize(
    "scrape",
    [
        lambda metrics: metrics.exposition(_envs_that_end_badly(), now=NOW),
        lambda metrics: metrics.exposition([GOOD], now=NOW, held=_held_broken),
        lambda metrics: (metrics.queue("q", _broken), metrics.exposition([GOOD], now=NOW))[1],
        lambda metrics: (metrics.queue("q", lambda: 0, _broken), metrics.exposition([GOOD], now=NOW))[1],
        lambda metrics: (metrics.registry.register(_Broken()), metrics.exposition([GOOD], now=NOW))[1],
        lambda metrics: metrics.exposition([GOOD, [Capacity("w", "ns", "b", "p", "\ud800")]], now=NOW),
        lambda metrics: metrics.exposition([GOOD, [Capacity("\ud800", "ns", "b", "p")]], now=NOW),
        lambda metrics: metrics.exposition([GOOD, [Capacity("w", "ns", "b", "\ud800")]], now=NOW),
        lambda metrics: metrics.exposition([GOOD, [Capacity("w", "\ud800", "b")]], now=NOW),
        lambda metrics: metrics.exposition([GOOD, [Capacity("w", "ns", "\ud800")]], now=NOW),
        *[partial(_with_value, field) for field in ("idle", "running", "pending", "desired", "observed_at")],
    ],
)
async def test_whatever_fails_does_so_before_the_first_chunk(
    scrape: Callable[[FederationMetrics], AsyncIterator[bytes]],
) -> None:
    with slices(1, 1), pytest.raises((RuntimeError, ValueError, TypeError)):
        await anext(scrape(FederationMetrics()))


async def test_after_a_failure_the_next_scrape_is_whole() -> None:
    metrics = FederationMetrics()
    with pytest.raises(RuntimeError, match="broken"):
        await joined(metrics.exposition(_envs_that_end_badly(), now=NOW))
    text = await joined(metrics.exposition([GOOD], now=NOW))
    assert text.endswith(prometheus_clients(GOOD))


# Vanished series, several agents, scrapes during updates.


def label_values(text: bytes, label: str) -> set[str]:
    return {dict(labels)[label] for _, labels in capacity_of(text) if label in dict(labels)}


def test_the_series_of_what_expired_and_what_was_deleted_are_gone_at_the_next_scrape() -> None:
    now = 0.0
    metrics = FederationMetrics()
    registry = Registry("a", ttl=30.0, clock=lambda: now)

    def scrape() -> bytes:
        return metrics.whole_exposition(registry.by_env(), now=now, held=registry.held)

    registry.upsert(
        [
            Capacity("a", "ns", "e", "p1", "gpu", idle=1),
            Capacity("a", "ns", "e", "p2", idle=2),
            Capacity("b", "ns", "e", "p1", idle=3),
        ]
    )
    first = capacity_of(scrape())
    assert {dict(labels)["cluster"] for _, labels in first} == {"a", "b"}
    registry.withdraw([("a", "ns", "e", "p1")])
    now = 30.0
    registry.upsert([Capacity("a", "ns", "e", "p2", idle=4)])
    second = scrape()
    assert label_values(second, "pool") == {"p1", "p2"}, "b is just fresh enough"
    now = 30.5
    third = scrape()
    assert label_values(third, "cluster") == {"a"}
    assert label_values(third, "pool") == {"p2"}
    assert label_values(third, "group") == {""}
    assert third.endswith(prometheus_clients([Capacity("a", "ns", "e", "p2", idle=4, observed_at=30.0)], now))


async def test_two_agents_in_a_process_share_nothing_and_leave_the_global_registry_alone() -> None:
    before = {family.name for family in REGISTRY.collect()}
    west, east = FederationMetrics(), FederationMetrics()
    west.source_failed("fixtures")
    snapshots = {
        west: [Capacity("west", "ns", f"env-{number}", "p", idle=1) for number in range(30)],
        east: [Capacity("east", "ns", f"env-{number}", "p", idle=2) for number in range(30)],
    }
    texts: dict[FederationMetrics, bytes] = {}

    async def scrape(metrics: FederationMetrics) -> None:
        texts[metrics] = await joined(metrics.exposition(by_env(snapshots[metrics]), now=NOW))

    with slices(3, 5):
        async with trio.open_nursery() as nursery:
            for metrics in (west, east):
                nursery.start_soon(scrape, metrics)
    for metrics, text in texts.items():
        assert text.endswith(prometheus_clients(snapshots[metrics]))
    assert b'source="fixtures"' in texts[west]
    assert b'source="fixtures"' not in texts[east]
    assert {family.name for family in REGISTRY.collect()} == before


ENVS = [f"env-{number}" for number in range(4)]
CLUSTERS = ("a", "b", "c")
POOLS = {"p1": "gpu", "p2": "gpu", "p3": ""}


def told(registry: Registry, env: str, number: int) -> None:
    """Every count of every member of an env is `number` from now on."""
    values: dict[str, Any] = dict.fromkeys(("idle", "running", "pending", "desired", "capacity"), number)
    registry.upsert(
        Capacity(cluster, "ns", env, pool, group, autoscaling_enabled=True, **values)
        for cluster in CLUSTERS
        for pool, group in POOLS.items()
    )


class Expected:
    """Every series that a scrape of the envs has to have. Read with Prometheus' parser once, and then, as there are
    many scrapes, by their text."""

    def __init__(self) -> None:
        registry = Registry("a", clock=lambda: 0.0)
        for env in ENVS:
            told(registry, env, 1)
        text = FederationMetrics().whole_exposition(registry.by_env(), now=0.0)
        shown = capacity_of(text)
        assert len(shown) == len(ENVS) * len(CLUSTERS) * (len(POOLS) * 6 + 2 * 3)
        #: by the text of a series, its env, and how many times the env's number its value is
        self.times: dict[bytes, tuple[str, float]] = {}
        for (_, labels), value, (line, _) in zip(shown, shown.values(), _lines(text), strict=True):
            self.times[line] = (dict(labels)["env"], value)
        assert {value for _, value in self.times.values()} == {0, 1, 2, 3}

    def check(self, text: bytes) -> dict[str, float]:
        """That a scrape has every series of every env, and all of an env from one moment. Returns the number that each
        env was at."""
        lines = dict(_lines(text))
        assert lines.keys() == self.times.keys()
        numbers: dict[str, set[float]] = {env: set() for env in ENVS}
        for line, value in lines.items():
            env, times = self.times[line]
            if times:
                numbers[env].add(float(value) / times)
            else:
                assert float(value) == 0  # an age
        assert {env: len(found) for env, found in numbers.items()} == dict.fromkeys(ENVS, 1)
        return {env: found.pop() for env, found in numbers.items()}


def _lines(text: bytes) -> list[tuple[bytes, bytes]]:
    """The lines of capacity in a scrape: series, value."""
    prefixes = (ENV.encode(), MEMBER.encode())
    found = [line.rpartition(b" ") for line in text.splitlines() if line.startswith(prefixes)]
    return [(series, value) for series, _, value in found]


@pytest.mark.slow
async def test_1000_scrapes_during_updates_miss_nothing_and_show_no_env_half_updated() -> None:
    """Ten at a time, of one agent, with updates between their slices."""
    registry = Registry("a", clock=lambda: 0.0)
    metrics = FederationMetrics()
    expected = Expected()
    numbers = dict.fromkeys(ENVS, 1)
    for env in ENVS:
        told(registry, env, 1)
    mixed = scrapes = 0

    async def update() -> None:
        turn = 0
        while True:
            env = ENVS[turn % len(ENVS)]
            turn += 1
            numbers[env] += 1
            told(registry, env, numbers[env])
            for _ in range(3):
                await trio.lowlevel.checkpoint()

    async def scrape() -> None:
        nonlocal mixed, scrapes
        earlier: dict[str, float] = dict.fromkeys(ENVS, 0)
        for _ in range(100):
            shown = expected.check(await joined(metrics.exposition(registry.by_env(), now=0.0, held=registry.held)))
            assert all(shown[env] >= earlier[env] for env in ENVS), "a scrape went back in time"
            earlier = shown
            mixed += len(set(shown.values())) > 1
            scrapes += 1

    with slices(4, 10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(update)
            async with trio.open_nursery() as scrapers:
                for _ in range(10):
                    scrapers.start_soon(scrape)
            nursery.cancel_scope.cancel()
    assert scrapes == 1000
    assert mixed > 100, "no updates came between the slices, so nothing was tested"


async def test_what_happens_between_two_slices_is_not_half_shown() -> None:
    """An env that was gathered stays as it was; one whose turn comes later is shown as it is then, or not at all."""
    registry = Registry("a", clock=lambda: 0.0)
    registry.upsert(Capacity("a", "ns", env, "p", idle=1) for env in ("e1", "e2", "e3"))
    met = []

    def envs() -> Iterator[list[Capacity]]:
        for records in registry.by_env():
            met.append(records[0].env_name)
            yield records
            if met == ["e1"]:
                registry.upsert([Capacity("a", "ns", env, "p", idle=2) for env in ("e0", "e1", "e2")])
                registry.withdraw([("a", "ns", "e3", "p")])

    shown = capacity_of(await joined(FederationMetrics().exposition(envs(), now=0.0)))
    idle = {dict(labels)["env"]: value for (name, labels), value in shown.items() if name == MEMBER + "idle"}
    assert idle == {"e1": 1, "e2": 2}


async def test_scrapes_while_another_thread_updates() -> None:
    registry = Registry("a", clock=lambda: 0.0)
    for env in ENVS:
        told(registry, env, 1)
    metrics = FederationMetrics()
    expected = Expected()
    done = threading.Event()

    def update() -> None:
        number = 1
        while not done.is_set():
            number += 1
            for env in ENVS:
                told(registry, env, number)

    updater = threading.Thread(target=update)
    seen = set()
    with slices(4, 10):
        try:
            updater.start()
            for _ in range(100):
                shown = expected.check(await joined(metrics.exposition(registry.by_env(), now=0.0)))
                seen |= set(shown.values())
        finally:
            done.set()
            updater.join()
    assert len(seen) > 1


# Names.


def test_names_that_are_only_written_at_a_scrape_are_taken() -> None:
    metrics = FederationMetrics()
    for name in ("trio_federation_uptime_seconds", "trio_federation_queue_depth", MEMBER + "age_seconds"):
        with pytest.raises(ValueError, match="Duplicated"):
            Gauge(name, "somebody else's", registry=metrics.registry)
    with pytest.raises(ValueError, match="Duplicated"):
        publish_metrics(GOOD, metrics.registry)


def test_collectors_of_ones_own_are_exported_with_the_rest() -> None:
    metrics = FederationMetrics()
    Gauge("mine", "Somebody's own.", registry=metrics.registry).set(3)
    assert series_of(metrics.whole_exposition([], now=NOW))["mine", ()] == 3


# by_env.


@given(SNAPSHOTS)
def test_by_env_puts_a_snapshot_in_order_env_by_env(snapshot: list[Capacity]) -> None:
    envs = by_env(snapshot)
    keys = [(records[0].namespace, records[0].env_name) for records in envs]
    assert keys == sorted(set(keys))
    assert sorted((r for records in envs for r in records), key=lambda r: r.sort_key) == sorted(
        snapshot, key=lambda r: r.sort_key
    )
