"""What Prometheus sees: capacity as gauges, rewritten from a full snapshot, and the health counters of one agent or
hub. Only this module imports prometheus_client. How the text is served is in `admin/`, how records add up in
`capacity.py`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trio_federation.capacity import Capacity, rollup

#: The media type of what `FederationMetrics.exposition` returns.
CONTENT_TYPE = CONTENT_TYPE_LATEST

#: How many origins of one kind, and how many reasons, get series of their own; the rest are counted together. Sources
#: and hubs come from the configuration, but cluster ids are claimed by peers, who must not make the exporter grow.
ORIGINS_PER_KIND = 128
REASONS = 32

#: Stands for all that came after a limit was reached. No cluster id and no field of a record can have this name.
OTHERS = "*"


class _Family(NamedTuple):
    """One gauge: its name, its help, and how a record gives its value."""

    name: str
    text: str
    value: Callable[[Capacity], float]


def _headroom(record: Capacity) -> float:
    if not record.autoscaling_enabled:
        return 0
    return math.inf if record.capacity == -1 else record.capacity


_WHOLE = 'group="" is the whole env.'
_ENV_LABELS = ("cluster", "namespace", "env", "group")
_ENV_FAMILIES = (
    _Family("agentbox_federation_env_idle", f"Sandboxes of an env that are ready now; {_WHOLE}", attrgetter("idle")),
    _Family("agentbox_federation_env_running", f"Sandboxes of an env that are in use; {_WHOLE}", attrgetter("running")),
    _Family("agentbox_federation_env_desired", f"Sandboxes wanted for an env; {_WHOLE}", attrgetter("desired")),
)
_MEMBER_LABELS = ("cluster", "namespace", "env", "pool", "group")
_MEMBER_FAMILIES = (
    _Family("trio_federation_member_idle", "Sandboxes of a member pool that are ready now.", attrgetter("idle")),
    _Family("trio_federation_member_running", "Sandboxes of a member pool that are in use.", attrgetter("running")),
    _Family("trio_federation_member_pending", "Requests that wait for a sandbox of a pool.", attrgetter("pending")),
    _Family("trio_federation_member_desired", "Sandboxes wanted for a member pool.", attrgetter("desired")),
    _Family(
        "trio_federation_member_headroom",
        "Sandboxes that a pool's autoscaler may still add: +Inf without a ceiling, 0 where it does not autoscale.",
        _headroom,
    ),
)
_AGE_NAME = "trio_federation_member_age_seconds"
_AGE_TEXT = "Seconds since a member pool's values were last known to be true at their source."

_Row = tuple[tuple[str, ...], Capacity]


class _Published(NamedTuple):
    """One snapshot, ready to be exported. Never changed, only replaced as a whole."""

    envs: tuple[_Row, ...]
    members: tuple[_Row, ...]
    #: when it was published, in seconds on the clock of the records' observed_at; None = no ages
    now: float | None


def _family(family: _Family, labels: tuple[str, ...], rows: Iterable[_Row]) -> Metric:
    metric = GaugeMetricFamily(family.name, family.text, labels=labels)
    for values, record in rows:
        metric.add_metric(values, family.value(record))
    return metric


class _SnapshotCollector(Collector):
    """Exports the snapshot that it was last given.

    Gauges that are set one by one would keep the last value of a record that is gone, and a scrape could fall between
    two of them. Here a publication replaces one reference, and a scrape reads that reference once."""

    def __init__(self, published: _Published) -> None:
        self.published = published

    def collect(self) -> Iterator[Metric]:
        """Every gauge of one snapshot, whatever is published meanwhile."""
        published = self.published
        for family in _ENV_FAMILIES:
            yield _family(family, _ENV_LABELS, published.envs)
        for family in _MEMBER_FAMILIES:
            yield _family(family, _MEMBER_LABELS, published.members)
        if published.now is not None:
            yield _family(
                _Family(_AGE_NAME, _AGE_TEXT, _age(published.now)),
                _MEMBER_LABELS,
                (row for row in published.members if row[1].observed_at is not None),
            )

    def describe(self) -> Iterator[Metric]:
        """The names that are taken, so that a second collector for them is refused; asked for once, by the registry."""
        for family in _ENV_FAMILIES:
            yield _family(family, _ENV_LABELS, ())
        for family in _MEMBER_FAMILIES:
            yield _family(family, _MEMBER_LABELS, ())
        yield GaugeMetricFamily(_AGE_NAME, _AGE_TEXT, labels=_MEMBER_LABELS)


def _age(now: float) -> Callable[[Capacity], float]:
    def age(record: Capacity) -> float:
        return 0.0 if record.observed_at is None else max(0.0, now - record.observed_at)

    return age


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


class FederationMetrics:
    """The metrics of one agent or one hub, in a registry of their own, so that several can live in one process.

    Hubs, streams, sources and statuses come from the configuration and the code, and are taken as they are; names that
    peers choose are bounded (`ORIGINS_PER_KIND`). Counting is cheap and never raises for a name."""

    def __init__(self) -> None:
        #: everything this agent or hub exports; add collectors of your own if you like
        self.registry = CollectorRegistry()
        self._origins: dict[str, set[str]] = {}
        self._reasons: set[str] = set()
        self._dropped = Counter(
            "trio_federation_records_dropped_total",
            "Capacity records that were refused, by where they came from and why.",
            ("origin", "reason"),
            registry=self.registry,
        )
        self._source_failures = Counter(
            "trio_federation_source_failures_total",
            "Times that a capacity source failed to say what it has.",
            ("source",),
            registry=self.registry,
        )
        self._sink_failures = Counter(
            "trio_federation_sink_failures_total",
            "Times that a sink failed to take what it was told.",
            ("sink",),
            registry=self.registry,
        )
        self._hub_connected = Gauge(
            "trio_federation_hub_connected",
            "1 while this agent's stream to a hub is up, else 0.",
            ("hub", "stream"),
            registry=self.registry,
        )
        self._hub_reconnects = Counter(
            "trio_federation_hub_reconnects_total",
            "Times that the connection to a hub was opened again after one that had worked broke.",
            ("hub",),
            registry=self.registry,
        )
        self._calls_refused = Counter(
            "trio_federation_hub_calls_refused_total",
            "Calls that this hub refused, by gRPC status.",
            ("status",),
            registry=self.registry,
        )

    # Made at first use: an agent that is no hub should not export that nobody watches it.
    @cached_property
    def _watchers(self) -> Gauge:
        return Gauge("trio_federation_hub_watchers", "Agents that watch this hub now.", registry=self.registry)

    @cached_property
    def _reporters(self) -> Gauge:
        return Gauge("trio_federation_hub_reporters", "Agents that report to this hub now.", registry=self.registry)

    def record_dropped(self, origin: str, reason: str, count: int = 1) -> None:
        """Count records that were refused.

        `origin` is "source:NAME", "hub:ENDPOINT" or "cluster:ID"; `reason` a field's name, as in `capacity.Fault`, or
        another fixed word. Past `ORIGINS_PER_KIND` origins of one kind, further ones count as "cluster:*" and so on."""
        kind, colon, name = origin.partition(":")
        origin = kind + colon + _bounded(self._origins.setdefault(kind, set()), name, ORIGINS_PER_KIND)
        self._dropped.labels(origin, _bounded(self._reasons, reason, REASONS)).inc(count)

    def source_failed(self, name: str) -> None:
        """Count one failure of the source of that name to collect or to push."""
        self._source_failures.labels(name).inc()

    def sink_failed(self, name: str) -> None:
        """Count one failure of the sink of that name to take a snapshot."""
        self._sink_failures.labels(name).inc()

    def hub_connected(self, hub: str, stream: str, connected: bool) -> None:
        """Say whether a stream ("report" or "watch") to a hub (host:port) is up."""
        self._hub_connected.labels(hub, stream).set(int(connected))
        self._hub_reconnects.labels(hub)  # exported from the start, so that its first increase can be seen as one

    def hub_reconnected(self, hub: str) -> None:
        """Count one connection to a hub (host:port) that was opened again after one broke."""
        self._hub_reconnects.labels(hub).inc()

    def call_refused(self, status: str) -> None:
        """Count one call that this hub refused; `status` is the gRPC name of it, such as "UNAUTHENTICATED"."""
        self._calls_refused.labels(status).inc()

    def watchers(self, count: int) -> None:
        """Say how many agents watch this hub."""
        self._watchers.set(count)

    def reporters(self, count: int) -> None:
        """Say how many agents report to this hub."""
        self._reporters.set(count)

    def exposition(self, snapshot: Iterable[Capacity], *, now: float | None = None) -> bytes:
        """Publish a full snapshot, and return all of this agent's or hub's metrics in Prometheus' text format.

        `now` as for `publish_metrics`. No I/O; the time it takes grows with the snapshot, about 0.1 ms for each member,
        most of it in prometheus_client."""
        publish_metrics(snapshot, self.registry, now=now)
        return generate_latest(self.registry)


def _bounded(seen: set[str], name: str, limit: int) -> str:
    """`name` itself if it is known or there is room to remember it, else `OTHERS`."""
    if name not in seen:
        if len(seen) >= limit:
            return OTHERS
        seen.add(name)
    return name
