"""Capacity as prometheus_client exports it: tables of what a record gives each gauge, and `publish_metrics`, which
makes a registry show one snapshot and nothing of an earlier one. The names and texts of the gauges are in
`catalogue.py`, and how records add up is in `trio_federation/capacity.py`. The answer to a scrape of
`FederationMetrics` has the same gauges, but is written in `writer.py`, out of the tables here."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trio_federation.capacity import Capacity, rollup
from trio_federation.metrics.catalogue import (
    ENV_DESIRED,
    ENV_IDLE,
    ENV_RUNNING,
    MEMBER_AGE_SECONDS,
    MEMBER_DESIRED,
    MEMBER_HEADROOM,
    MEMBER_IDLE,
    MEMBER_PENDING,
    MEMBER_RUNNING,
    Family,
)


class Table(NamedTuple):
    """Families with the same labels, and what a record gives each of them, in their order."""

    families: tuple[Family, ...]
    values: Callable[[Capacity], tuple[float, ...]]


def _of_member(record: Capacity) -> tuple[float, ...]:
    headroom: float = 0
    if record.autoscaling_enabled:
        headroom = math.inf if record.capacity == -1 else record.capacity
    return record.idle, record.running, record.pending, record.desired, headroom


#: Of the rows of `rollup`.
ENV_TABLE = Table((ENV_IDLE, ENV_RUNNING, ENV_DESIRED), attrgetter("idle", "running", "desired"))
#: Of records with a member pool.
MEMBER_TABLE = Table((MEMBER_IDLE, MEMBER_RUNNING, MEMBER_PENDING, MEMBER_DESIRED, MEMBER_HEADROOM), _of_member)
#: All gauges of capacity, in the order in which they are exported.
CAPACITY_FAMILIES = (*ENV_TABLE.families, *MEMBER_TABLE.families, MEMBER_AGE_SECONDS)


def age_table(now: float) -> Table:
    """The table of ages at `now`, in seconds on the clock of the records' observed_at: for members that have one."""

    def values(record: Capacity) -> tuple[float, ...]:
        assert record.observed_at is not None
        return (max(0.0, now - record.observed_at),)

    return Table((MEMBER_AGE_SECONDS,), values)


_Row = tuple[tuple[str, ...], Capacity]


class _Published(NamedTuple):
    """One snapshot, ready to be exported. Never changed, only replaced as a whole."""

    envs: tuple[_Row, ...]
    members: tuple[_Row, ...]
    #: when it was published, in seconds on the clock of the records' observed_at; None = no ages
    now: float | None


def _filled(table: Table, rows: Sequence[_Row]) -> Iterator[Metric]:
    for column, family in enumerate(table.families):
        metric = empty_gauge(family)
        for labels, record in rows:
            metric.add_metric(labels, table.values(record)[column])
        yield metric


def empty_gauge(family: Family) -> GaugeMetricFamily:
    """A family of gauges without any series yet."""
    return GaugeMetricFamily(family.name, family.text, labels=family.labels)


class _SnapshotCollector(Collector):
    """Exports the snapshot that it was last given.

    Gauges that are set one by one would keep the last value of a record that is gone, and a scrape could fall between
    two of them. Here a publication replaces one reference, and a scrape reads that reference once."""

    def __init__(self, published: _Published) -> None:
        self.published = published

    def collect(self) -> Iterator[Metric]:
        """Every gauge of one snapshot, whatever is published meanwhile."""
        published = self.published
        yield from _filled(ENV_TABLE, published.envs)
        yield from _filled(MEMBER_TABLE, published.members)
        if published.now is not None:
            known = [row for row in published.members if row[1].observed_at is not None]
            yield from _filled(age_table(published.now), known)

    def describe(self) -> Iterator[Metric]:
        """The names that are taken, so that a second collector for them is refused; asked for once, by the registry."""
        for family in CAPACITY_FAMILIES:
            yield empty_gauge(family)


# One collector for each registry, for as long as that registry lives: the same registry is published to again and
# again, and registering a second collector for the same names is an error in prometheus_client. The lock is for
# first publications from several threads at once.
_collectors: WeakKeyDictionary[CollectorRegistry, _SnapshotCollector] = WeakKeyDictionary()
_collectors_lock = threading.Lock()


def publish_metrics(
    snapshot: Iterable[Capacity], registry: CollectorRegistry | None = None, *, now: float | None = None
) -> None:
    """Make `registry` (None: prometheus_client's global one) export this snapshot and nothing of any earlier one.

    `snapshot` is all that is known, as `Registry.snapshot()` returns it: valid records, one for each identity. From it
    come `agentbox_federation_env_{idle,running,desired}` by cluster, namespace, env and group, one series for each
    non-empty scaling group and one, group "", for the whole env; and `trio_federation_member_…` by pool. `now`, in
    seconds on the clock of the records' `observed_at`, adds the members' ages.

    May be called any number of times, for any number of registries, from any thread; a scrape sees either the whole of
    one snapshot or the whole of another. Raises ValueError where something else in `registry` already uses one of the
    names. Source of the env gauges: semantics.md, "Metrics"."""
    records = tuple(snapshot)
    published = _Published(
        envs=tuple(((row.cluster_id, row.namespace, row.env_name, row.scaling_group), row) for row in rollup(records)),
        members=tuple(
            ((record.cluster_id, record.namespace, record.env_name, record.member_pool, record.scaling_group), record)
            for record in records
            if record.member_pool
        ),
        now=now,
    )
    if registry is None:
        registry = REGISTRY
    with _collectors_lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _SnapshotCollector(published)
            registry.register(collector)
            _collectors[registry] = collector
        else:
            collector.published = published
