"""What Prometheus sees: capacity as gauges, rewritten from a full snapshot, and the health of one agent or hub. Only
this module imports prometheus_client. How the text is served is in `admin/`, how records add up in `capacity.py`.

Every family is declared once, in `CATALOGUE`: collectors are made from it, and docs/metrics.md is written from it.

The capacity gauges of a scrape have a writer of their own, because of what prometheus_client costs: a dict for each
series and two dozen calls for each line, about 0.1 ms for each member. Of 100,000 records that is more than ten
seconds, in one piece, in which an agent hears nothing and says nothing. The writer here takes a twentieth of that, and
gives way after about every millisecond (`make bench ARGS=exposition`). It writes the same bytes, which the tests hold
it to, and nothing but these gauges; the text of everything else is prometheus_client's."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import trio
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trio_federation.capacity import Capacity, rollup
from trio_federation.registry import RegistryHeld

#: The media type of what `FederationMetrics.exposition` gives.
CONTENT_TYPE = CONTENT_TYPE_LATEST

#: How many origins of one kind, and how many reasons, get series of their own; the rest are counted together. Sources
#: and hubs come from the configuration, but cluster ids are claimed by peers, who must not make the exporter grow.
ORIGINS_PER_KIND = 128
REASONS = 32
#: How many kinds of failures, rules of placement and statuses get series of their own. All of them are fixed words of
#: this project; a bound stands here so that a mistake in one place does not become a leak in another.
WORDS = 32

#: Stands for all that came after a limit was reached. No cluster id and no field of a record can have this name.
OTHERS = "*"

#: What is exported at 0 from the start, because it can be known: a rate needs a first value to rise from.
SOURCE_FAILURES = ("collect", "push", "run", "create", "blocked")
SINK_FAILURES = ("update", "run", "create", "blocked")
PLACEMENTS = (
    ("local", "local_idle"),
    ("local", "local_growth"),
    ("local", "nothing_anywhere"),
    ("foreign", "foreign_idle"),
    ("foreign", "foreign_growth"),
)
REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "ALREADY_EXISTS")

#: Upper bounds, in seconds, of what is counted together in the histograms: from an answer out of memory to more than
#: the deadlines of sources and sinks, which are 10 to 15 s.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0)

#: How many records are gathered, and how many lines are written, before others get their turn: about a millisecond of
#: work. A chunk of the answer has that many lines of some 100 bytes, or, at the end of a cluster, up to twice as many.
RECORDS_PER_SLICE = 250
LINES_PER_SLICE = 2000
#: How many different numbers a scrape remembers the text of.
_NUMBERS = 16384


# What there is.


class Kind(StrEnum):
    """How a family counts."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Family:
    """One family of series, as it is declared: `name` as in a query (of a histogram without its suffixes), `text`: what
    a value means, also told to Prometheus; `alert`: when to wake somebody, "" where that is seldom right."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    alert: str = ""


class Group(NamedTuple):
    """Families that are read together; `text` introduces them."""

    title: str
    text: str
    families: tuple[Family, ...]


_ENV = ("cluster", "namespace", "env", "group")
_MEMBER = ("cluster", "namespace", "env", "pool", "group")
_WHOLE = 'group="" is the whole env.'

_ENV_IDLE = Family(
    "agentbox_federation_env_idle",
    Kind.GAUGE,
    _ENV,
    f"Sandboxes of an env that are ready now; {_WHOLE}",
    '`sum by (namespace, env) (agentbox_federation_env_idle{group=""}) == 0` for 5 minutes: no cluster has one ready.',
)
_ENV_RUNNING = Family(
    "agentbox_federation_env_running", Kind.GAUGE, _ENV, f"Sandboxes of an env that are in use; {_WHOLE}"
)
_ENV_DESIRED = Family("agentbox_federation_env_desired", Kind.GAUGE, _ENV, f"Sandboxes wanted for an env; {_WHOLE}")

_MEMBER_IDLE = Family(
    "trio_federation_member_idle", Kind.GAUGE, _MEMBER, "Sandboxes of a member pool that are ready now."
)
_MEMBER_RUNNING = Family(
    "trio_federation_member_running", Kind.GAUGE, _MEMBER, "Sandboxes of a member pool that are in use."
)
_MEMBER_PENDING = Family(
    "trio_federation_member_pending",
    Kind.GAUGE,
    _MEMBER,
    "Requests that wait for a sandbox of a pool.",
    "`trio_federation_member_pending > 0` for 10 minutes: requests wait, and the pool does not grow.",
)
_MEMBER_DESIRED = Family("trio_federation_member_desired", Kind.GAUGE, _MEMBER, "Sandboxes wanted for a member pool.")
_MEMBER_HEADROOM = Family(
    "trio_federation_member_headroom",
    Kind.GAUGE,
    _MEMBER,
    "Sandboxes that a pool's autoscaler may still add: +Inf without a ceiling, 0 where it does not autoscale.",
)
_MEMBER_AGE = Family(
    "trio_federation_member_age_seconds",
    Kind.GAUGE,
    _MEMBER,
    "Seconds since a member pool's values were last known to be true at their source.",
    "`max by (cluster) (trio_federation_member_age_seconds) > 20`: what is older than `ttl`, 30 s by default, is gone.",
)

_HUB = ("hub",)
_HUB_CONNECTED = Family(
    "trio_federation_hub_connected",
    Kind.GAUGE,
    ("hub", "stream"),
    "1 while this agent's stream to a hub is up, else 0; streams are report and watch.",
    "`max by (stream) (trio_federation_hub_connected) == 0` for 1 minute: the agent is alone. With several hubs, also "
    "`trio_federation_hub_connected == 0` for 10 minutes: one of them is lost.",
)
_HUB_RECONNECTS = Family(
    "trio_federation_hub_reconnects_total",
    Kind.COUNTER,
    _HUB,
    "Times that the connection to a hub was opened again after one that had worked broke.",
    "`increase(trio_federation_hub_reconnects_total[15m]) > 5`: a network, a proxy or a hub that does not hold.",
)
_HUB_BATCH_AGE = Family(
    "trio_federation_hub_last_batch_age_seconds",
    Kind.GAUGE,
    _HUB,
    "Seconds since a hub last sent a batch of records; absent until there was one.",
    "`min(trio_federation_hub_last_batch_age_seconds) > 30` where others report: what is known of them runs out.",
)
_HUB_RECORDS_IN = Family(
    "trio_federation_hub_received_records_total",
    Kind.COUNTER,
    _HUB,
    "Records and withdrawals that came from a hub, refused ones included.",
)
_HUB_RECORDS_OUT = Family(
    "trio_federation_hub_reported_records_total",
    Kind.COUNTER,
    _HUB,
    "Records and withdrawals that were reported to a hub.",
    "`rate(trio_federation_hub_reported_records_total[2m]) == 0` of an agent with sources: others lose sight of it.",
)
_HUB_BYTES_OUT = Family(
    "trio_federation_hub_sent_bytes_total", Kind.COUNTER, _HUB, "Bytes that were sent to a hub, before encryption."
)
_HUB_BYTES_IN = Family(
    "trio_federation_hub_received_bytes_total",
    Kind.COUNTER,
    _HUB,
    "Bytes that were received from a hub, after decryption.",
)

_SOURCE = ("source",)
_SOURCE_LIVE = Family(
    "trio_federation_source_live",
    Kind.GAUGE,
    _SOURCE,
    "1 while a capacity source works and vouches for what it says, else 0.",
    "`trio_federation_source_live == 0` for 1 minute: its records are not refreshed, and run out.",
)
_SOURCE_AGE = Family(
    "trio_federation_source_last_success_age_seconds",
    Kind.GAUGE,
    _SOURCE,
    "Seconds since a source last said all that it has; absent until it did.",
    "`trio_federation_source_last_success_age_seconds > 20`: its records run out at `ttl`, 30 s by default.",
)
_SOURCE_RECORDS = Family(
    "trio_federation_source_records",
    Kind.GAUGE,
    _SOURCE,
    "Records that a source has told when it last said all that it has; absent until it did.",
    "`trio_federation_source_records == 0` where there are pools: the source looks in the wrong place.",
)
_SOURCE_FAILURES = Family(
    "trio_federation_source_failures_total",
    Kind.COUNTER,
    ("source", "kind"),
    "Failures of a source, by what failed: collect, push, run, create, or blocked, when it did not give way.",
    "`increase(trio_federation_source_failures_total[10m]) > 3`: it fails again and again.",
)
_SOURCE_SECONDS = Family(
    "trio_federation_source_collect_duration_seconds",
    Kind.HISTOGRAM,
    _SOURCE,
    "Seconds that a source took to say all that it has, where it did.",
    "`histogram_quantile(0.9, rate(trio_federation_source_collect_duration_seconds_bucket[10m])) > 5`: it is slow, and "
    "given up at half of `ttl`.",
)

_SINK = ("sink",)
_SINK_AGE = Family(
    "trio_federation_sink_last_success_age_seconds",
    Kind.GAUGE,
    _SINK,
    "Seconds since a sink last took what it was told; absent until it did. It is told when something has changed.",
)
_SINK_SECONDS = Family(
    "trio_federation_sink_update_duration_seconds",
    Kind.HISTOGRAM,
    _SINK,
    "Seconds that a sink took to take what it was told, where it did.",
)
_SINK_FAILURES = Family(
    "trio_federation_sink_failures_total",
    Kind.COUNTER,
    ("sink", "kind"),
    "Failures of a sink, by what failed: update, run, create, or blocked, when it did not give way.",
    "`increase(trio_federation_sink_failures_total[10m]) > 3`: what it mirrors is stale.",
)
_FILTER = ("filter",)
_FILTER_FAILURES = Family(
    "trio_federation_filter_failures_total",
    Kind.COUNTER,
    _FILTER,
    "Records on which a report filter failed, each time that it did.",
    "`increase(trio_federation_filter_failures_total[10m]) > 0`: those records are not reported anew.",
)
_FILTER_WITHHELD = Family(
    "trio_federation_filter_withheld_records_total",
    Kind.COUNTER,
    _FILTER,
    "Records that a report filter kept from others, each time that it did.",
)

_PLACEMENTS = Family(
    "trio_federation_placements_total",
    Kind.COUNTER,
    ("outcome", "rule"),
    "Creates that were placed, by outcome, local or foreign, and by the rule that decided: local_idle, local_growth, "
    "nothing_anywhere, foreign_idle, foreign_growth.",
    '`rate(trio_federation_placements_total{rule="nothing_anywhere"}[5m]) > 0` for 5 minutes: creates wait, and no '
    "cluster has room.",
)

_REGISTRY_RECORDS = Family(
    "trio_federation_registry_records",
    Kind.GAUGE,
    (),
    "Records that count now: fresh, and not shadowed by more exact ones.",
)
_REGISTRY_HELD = Family(
    "trio_federation_registry_held_records",
    Kind.GAUGE,
    (),
    "Records in memory: also shadowed ones, and those that have run out and are not freed yet.",
    "It grows, and trio_federation_registry_records does not, for an hour: a leak, please report it.",
)
_REGISTRY_TOMBSTONES = Family(
    "trio_federation_registry_tombstones",
    Kind.GAUGE,
    (),
    "Withdrawn records that are remembered for a while, so that an older copy does not bring them back.",
)
_REGISTRY_INSTANCES = Family(
    "trio_federation_registry_instances", Kind.GAUGE, (), "Clusters of which the agent that reports is known."
)
_DROPPED = Family(
    "trio_federation_records_dropped_total",
    Kind.COUNTER,
    ("origin", "reason"),
    "Capacity records that were refused, by where they came from (source:NAME, hub:HOST:PORT, cluster:ID) and why: the "
    "field that breaks a rule, or a fixed word.",
    "`increase(trio_federation_records_dropped_total[10m]) > 0`: somebody sends what breaks a rule; the log has an "
    "example of each.",
)
_QUEUE_DEPTH = Family(
    "trio_federation_queue_depth",
    Kind.GAUGE,
    ("queue",),
    "Batches or changes that wait in a queue now.",
    'At a queue\'s bound (docs/design.md, "Data, on its way") for 1 minute: whoever empties it is stuck or too slow.',
)
_QUEUE_CONFLATIONS = Family(
    "trio_federation_queue_conflations_total",
    Kind.COUNTER,
    ("queue",),
    "Changes that gave way to a newer one of the same record while they waited; nothing is lost by that.",
)

_WATCHERS = Family("trio_federation_hub_watchers", Kind.GAUGE, (), "Agents that watch this hub now.")
_REPORTERS = Family(
    "trio_federation_hub_reporters",
    Kind.GAUGE,
    (),
    "Agents that report to this hub now.",
    "Fewer than there are clusters, for 5 minutes.",
)
_REFUSED = Family(
    "trio_federation_hub_calls_refused_total",
    Kind.COUNTER,
    ("status",),
    "Calls that this hub refused, by gRPC status.",
    "`increase(trio_federation_hub_calls_refused_total[10m]) > 0`: a wrong secret or cluster id, or two agents that "
    "report for one cluster; the log has the cluster.",
)

_BUILD = Family(
    "trio_federation_build_info",
    Kind.INFO,
    ("version", "python", "trio", "grpclib"),
    "1, with the versions of this program, of Python and of the libraries under it as labels.",
)
_UPTIME = Family(
    "trio_federation_uptime_seconds",
    Kind.GAUGE,
    (),
    "Seconds since this agent or hub was started.",
    "`resets(trio_federation_uptime_seconds[1h]) > 3`: it is restarted again and again.",
)

#: Everything that is ever exported, in the order of docs/metrics.md.
CATALOGUE = (
    Group(
        "Capacity of an env",
        "What each cluster has of each env, the own one included: one series for each scaling group, and one for the "
        "whole env. A series is gone with its records: nothing here keeps the last value of what has vanished.",
        (_ENV_IDLE, _ENV_RUNNING, _ENV_DESIRED),
    ),
    Group(
        "Member pools",
        "What each pool of each cluster has. Clusters that tell no pools, only sums, are in the table above alone.",
        (_MEMBER_IDLE, _MEMBER_RUNNING, _MEMBER_PENDING, _MEMBER_DESIRED, _MEMBER_HEADROOM, _MEMBER_AGE),
    ),
    Group(
        "Hubs, as an agent sees them",
        "Label hub is host:port as the configuration has it.",
        (
            _HUB_CONNECTED,
            _HUB_RECONNECTS,
            _HUB_BATCH_AGE,
            _HUB_RECORDS_IN,
            _HUB_RECORDS_OUT,
            _HUB_BYTES_IN,
            _HUB_BYTES_OUT,
        ),
    ),
    Group(
        "Sources",
        "Label source is the place in the configuration and the type, as in the log: source[0]:fixtures.",
        (_SOURCE_LIVE, _SOURCE_AGE, _SOURCE_RECORDS, _SOURCE_FAILURES, _SOURCE_SECONDS),
    ),
    Group(
        "Sinks and filters",
        "Labels sink and filter are named like sources.",
        (_SINK_AGE, _SINK_SECONDS, _SINK_FAILURES, _FILTER_FAILURES, _FILTER_WITHHELD),
    ),
    Group("Placements", "Where creates were sent, and why.", (_PLACEMENTS,)),
    Group(
        "Registry and queues",
        "What is held, what waits, and what was refused. Of a process that is a hub and no agent, the registry is what "
        "the hub holds.",
        (
            _REGISTRY_RECORDS,
            _REGISTRY_HELD,
            _REGISTRY_TOMBSTONES,
            _REGISTRY_INSTANCES,
            _DROPPED,
            _QUEUE_DEPTH,
            _QUEUE_CONFLATIONS,
        ),
    ),
    Group("Hub side", "Of a process that is a hub, and of no other.", (_WATCHERS, _REPORTERS, _REFUSED)),
    Group("Build", "Which program this is, and for how long it runs.", (_BUILD, _UPTIME)),
)


# Capacity.


class _Table(NamedTuple):
    """Families with the same labels, and what a record gives each of them, in their order."""

    families: tuple[Family, ...]
    values: Callable[[Capacity], tuple[float, ...]]


def _of_member(record: Capacity) -> tuple[float, ...]:
    headroom: float = 0
    if record.autoscaling_enabled:
        headroom = math.inf if record.capacity == -1 else record.capacity
    return record.idle, record.running, record.pending, record.desired, headroom


_ENVS = _Table((_ENV_IDLE, _ENV_RUNNING, _ENV_DESIRED), attrgetter("idle", "running", "desired"))
_MEMBERS = _Table((_MEMBER_IDLE, _MEMBER_RUNNING, _MEMBER_PENDING, _MEMBER_DESIRED, _MEMBER_HEADROOM), _of_member)
_CAPACITY = (*_ENVS.families, *_MEMBERS.families, _MEMBER_AGE)


def _ages(now: float) -> _Table:
    """The table of ages, for records with an observed_at."""

    def values(record: Capacity) -> tuple[float, ...]:
        assert record.observed_at is not None
        return (max(0.0, now - record.observed_at),)

    return _Table((_MEMBER_AGE,), values)


_Row = tuple[tuple[str, ...], Capacity]


class _Published(NamedTuple):
    """One snapshot, ready to be exported. Never changed, only replaced as a whole."""

    envs: tuple[_Row, ...]
    members: tuple[_Row, ...]
    #: when it was published, in seconds on the clock of the records' observed_at; None = no ages
    now: float | None


def _filled(table: _Table, rows: Sequence[_Row]) -> Iterator[Metric]:
    for column, family in enumerate(table.families):
        metric = _empty(family)
        for labels, record in rows:
            metric.add_metric(labels, table.values(record)[column])
        yield metric


def _empty(family: Family) -> GaugeMetricFamily:
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
        yield from _filled(_ENVS, published.envs)
        yield from _filled(_MEMBERS, published.members)
        if published.now is not None:
            known = [row for row in published.members if row[1].observed_at is not None]
            yield from _filled(_ages(published.now), known)

    def describe(self) -> Iterator[Metric]:
        """The names that are taken, so that a second collector for them is refused; asked for once, by the registry."""
        for family in _CAPACITY:
            yield _empty(family)


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


# The writer. Work is done in generators that yield a chunk of the answer, or b"" where there is nothing to send yet and
# others should get their turn.

_Slices: TypeAlias = Generator[bytes, None, None]


class _Only(Collector):
    """A collector of one family, for the text of that family alone."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        yield self._metric


class _Numbers(dict[float, bytes]):
    """Counts as they end a line. Most of them are small and come often, so they are remembered."""

    def __missing__(self, number: float) -> bytes:
        end = _end_of_line(number)
        if len(self) < _NUMBERS:
            self[number] = end
        return end


_like_go: Callable[[float], str] = floatToGoString


def _end_of_line(number: float) -> bytes:
    """A number as prometheus_client writes it: like Python, and from a million on like Go."""
    number = float(number)
    return b"%r\n" % number if -1e6 < number < 1e6 else f"{_like_go(number)}\n".encode()


def _escaped(value: str) -> str:
    """A label's value as the text format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class _Labels(dict[str, bytes]):
    """A part of the labels, by the one name in it that changes; each is made once."""

    def __init__(self, before: str, after: str) -> None:
        self._before = before
        self._after = after

    def __missing__(self, name: str) -> bytes:
        part = self[name] = f"{self._before}{_escaped(name)}{self._after}".encode()
        return part


class _Rows:
    """Rows of one cluster for the families of one table. A line is a family's name, the cluster, the row's `middle` and
    `tail`, and the row's end for that family; the ends of all families take turns in one list.

    Three lists, whose items many rows share, instead of one of rows: that takes little memory, and does not call
    Python's garbage collector, which looks at every container, at no bytes, and makes everybody wait."""

    __slots__ = ("ends", "middles", "tails")

    def __init__(self) -> None:
        self.middles: list[bytes] = []
        self.tails: list[bytes] = []
        self.ends: list[bytes] = []

    def __len__(self) -> int:
        return len(self.middles)

    def add(self, middle: bytes, tail: bytes, ends: Iterable[bytes]) -> None:
        """One more row."""
        self.middles.append(middle)
        self.tails.append(tail)
        self.ends.extend(ends)

    def lines(self, head: bytes, column: int, columns: int, start: int) -> list[bytes]:
        """Up to LINES_PER_SLICE lines from row `start` on, in pieces, for the family in `column` of so many `columns`;
        `head`: its name and the cluster."""
        stop = start + LINES_PER_SLICE
        middles = self.middles[start:stop]
        pieces = [head] * (4 * len(middles))
        pieces[1::4] = middles
        pieces[2::4] = self.tails[start:stop]
        pieces[3::4] = self.ends[start * columns + column : stop * columns : columns]
        return pieces


class _Cluster(NamedTuple):
    """All rows of one cluster; `head`: how their labels begin."""

    head: bytes
    envs: _Rows
    members: _Rows
    ages: _Rows


class _CapacityWriter:
    """The capacity gauges of one scrape: gathered env by env, and then written family by family, as Prometheus wants
    it, and in the order of a snapshot.

    Nothing is kept for the next scrape. Lines are put together from parts that many of them share, and that costs less
    than to look for the labels of the scrape before."""

    def __init__(self, now: float) -> None:
        #: how many records were gathered
        self.records = 0
        self._ages = _ages(now)
        self._clusters: dict[str, _Cluster] = {}
        self._pools = _Labels(',pool="', '"} ')
        self._count = _Numbers().__getitem__

    def gather(self, envs: Iterable[Sequence[Capacity]]) -> _Slices:
        """Take in everything. Whatever can fail does so here."""
        pause_at = RECORDS_PER_SLICE
        for records in envs:
            namespace, env_name = records[0].namespace, records[0].env_name
            groups = _Labels(f',env="{_escaped(env_name)}",group="', f'",namespace="{_escaped(namespace)}"')
            by_cluster: dict[str, list[Capacity]] = {}
            for record in records:
                by_cluster.setdefault(record.cluster_id, []).append(record)
            for cluster_id, found in by_cluster.items():
                self._add(cluster_id, found, groups)
                self.records += len(found)
                if self.records >= pause_at:
                    pause_at = self.records + RECORDS_PER_SLICE
                    yield b""

    def _add(self, cluster_id: str, records: list[Capacity], groups: _Labels) -> None:
        """Take in what one cluster has of one env."""
        cluster = self._clusters.get(cluster_id)
        if cluster is None:
            head = f'{{cluster="{_escaped(cluster_id)}"'.encode()
            cluster = self._clusters[cluster_id] = _Cluster(head, _Rows(), _Rows(), _Rows())
        if len(records) > 1:
            records.sort(key=_POOL_AND_GROUP)
        count = self._count
        for group, sums in _sums(records):
            cluster.envs.add(groups[group], b"} ", map(count, _ENVS.values(sums)))
        for record in records:
            if record.member_pool:
                middle, tail = groups[record.scaling_group], self._pools[record.member_pool]
                cluster.members.add(middle, tail, map(count, _MEMBERS.values(record)))
                if record.observed_at is not None:
                    cluster.ages.add(middle, tail, map(_end_of_line, self._ages.values(record)))

    def text(self) -> _Slices:
        """What was gathered. Cannot fail."""
        clusters = [self._clusters[cluster_id] for cluster_id in sorted(self._clusters)]
        yield from _text(_ENVS, [(cluster.head, cluster.envs) for cluster in clusters])
        yield from _text(_MEMBERS, [(cluster.head, cluster.members) for cluster in clusters])
        yield from _text(self._ages, [(cluster.head, cluster.ages) for cluster in clusters])


def _text(table: _Table, clusters: Sequence[tuple[bytes, _Rows]]) -> _Slices:
    """A table, family by family: of each cluster the head of its labels and its rows."""
    for column, family in enumerate(table.families):
        name = family.name.encode()
        pieces = [_HEADERS[family.name]]
        for head, rows in clusters:
            for start in range(0, len(rows), LINES_PER_SLICE):
                pieces += rows.lines(name + head, column, len(table.families), start)
                if len(pieces) > 4 * LINES_PER_SLICE:
                    yield b"".join(pieces)
                    pieces = []
        yield b"".join(pieces)


_POOL_AND_GROUP = attrgetter("member_pool", "scaling_group")
_HEADERS = {family.name: generate_latest(_Only(_empty(family))) for family in _CAPACITY}


def _sums(records: Sequence[Capacity]) -> Iterable[tuple[str, Capacity]]:
    """The rows that `rollup` makes of what one cluster has of one env, each with its group. A single record adds up to
    itself, and most clusters have but one."""
    if len(records) > 1:
        return [(row.scaling_group, row) for row in rollup(records)]
    (record,) = records
    return [("", record), (record.scaling_group, record)] if record.scaling_group else [("", record)]


class _Exposition(AsyncIterator[bytes]):
    """Does slices of work until there is a chunk to give; between any two of them all other tasks get their turn.

    A class, because an async generator that is not used up has to be closed by whoever stops, and servers do not."""

    def __init__(self, slices: _Slices) -> None:
        self._slices = slices

    async def __anext__(self) -> bytes:
        while True:
            await trio.lowlevel.checkpoint()
            chunk = next(self._slices, None)
            if chunk is None:
                raise StopAsyncIteration
            if chunk:
                return chunk


# Health.


class _Reserved(Collector):
    """Exports nothing, and takes the names of what is only written at a scrape, so that nobody else can."""

    def collect(self) -> Iterator[Metric]:
        """Nothing."""
        return iter(())

    def describe(self) -> Iterator[Metric]:
        """The names that are taken."""
        for family in (*_CAPACITY, *_AT_SCRAPE):
            yield _at_scrape(family)


_AT_SCRAPE = (
    _HUB_BATCH_AGE,
    _SOURCE_AGE,
    _SINK_AGE,
    _REGISTRY_RECORDS,
    _REGISTRY_HELD,
    _REGISTRY_TOMBSTONES,
    _REGISTRY_INSTANCES,
    _QUEUE_DEPTH,
    _QUEUE_CONFLATIONS,
    _UPTIME,
)


def _at_scrape(family: Family, values: Iterable[tuple[str, float]] = ()) -> Metric:
    """A family with at most one label, and its value for each value of that label ("" where there is no label)."""
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(family.name, family.text, labels=family.labels)
    for label, value in values:
        metric.add_metric([label] if family.labels else [], value)
    return metric


class _Queue(NamedTuple):
    depth: Callable[[], int]
    conflated: Callable[[], int] | None


class FederationMetrics:
    """The metrics of one agent or one hub, in a registry of their own, so that several can live in one process.

    Hubs, streams, sources, sinks, filters, queues and statuses come from the configuration and the code, and are taken
    as they are; names that peers choose are bounded (`ORIGINS_PER_KIND`). A name's series begin, at 0, when it is first
    mentioned, in whatever method; what nobody can know yet, such as the age of something that has never been, is
    absent. Recording is cheap, never raises for a name, and belongs on the thread of the agent's or hub's loop.

    `started_at`: when the agent or hub was started, in seconds on the clock of every `now`; None: no uptime is told."""

    def __init__(self, *, started_at: float | None = None) -> None:
        #: everything but what is only written at a scrape; add collectors of your own if you like
        self.registry = CollectorRegistry()
        self._started_at = started_at
        self._names: dict[str, set[str]] = {}
        self._origins: dict[str, set[str]] = {}
        self._reasons: set[str] = set()
        self._kinds: dict[str, set[str]] = {"source": set(SOURCE_FAILURES), "sink": set(SINK_FAILURES)}
        self._rules = {rule for _, rule in PLACEMENTS}
        self._statuses = set(REFUSALS)
        self._batches: dict[str, float] = {}
        self._collects: dict[str, float] = {}
        self._updates: dict[str, float] = {}
        self._queues: dict[str, _Queue] = {}
        self.registry.register(_Reserved())
        self._connected = self._gauge(_HUB_CONNECTED)
        self._reconnects = self._counter(_HUB_RECONNECTS)
        self._records_in = self._counter(_HUB_RECORDS_IN)
        self._records_out = self._counter(_HUB_RECORDS_OUT)
        self._bytes_in = self._counter(_HUB_BYTES_IN)
        self._bytes_out = self._counter(_HUB_BYTES_OUT)
        self._source_live = self._gauge(_SOURCE_LIVE)
        self._source_records = self._gauge(_SOURCE_RECORDS)
        self._source_failures = self._counter(_SOURCE_FAILURES)
        self._source_seconds = self._histogram(_SOURCE_SECONDS)
        self._sink_seconds = self._histogram(_SINK_SECONDS)
        self._sink_failures = self._counter(_SINK_FAILURES)
        self._filter_failures = self._counter(_FILTER_FAILURES)
        self._withheld = self._counter(_FILTER_WITHHELD)
        self._placements = self._counter(_PLACEMENTS)
        self._dropped = self._counter(_DROPPED)
        self._refused = self._counter(_REFUSED)

    def _gauge(self, family: Family) -> Gauge:
        return Gauge(family.name, family.text, family.labels, registry=self.registry)

    def _counter(self, family: Family) -> Counter:
        return Counter(family.name, family.text, family.labels, registry=self.registry)

    def _histogram(self, family: Family) -> Histogram:
        return Histogram(family.name, family.text, family.labels, registry=self.registry, buckets=BUCKETS)

    # Made at first use: an agent that is no hub should not export that nobody watches it.
    @cached_property
    def _watchers(self) -> Gauge:
        self._statuses_begin()
        return self._gauge(_WATCHERS)

    @cached_property
    def _reporters(self) -> Gauge:
        self._statuses_begin()
        return self._gauge(_REPORTERS)

    @cached_property
    def _build(self) -> Info:
        return Info(_BUILD.name.removesuffix("_info"), _BUILD.text, registry=self.registry)

    def _is_new(self, what: str, name: str) -> bool:
        names = self._names.setdefault(what, set())
        if name in names:
            return False
        names.add(name)
        return True

    def _hub_begins(self, hub: str) -> None:
        if self._is_new("hub", hub):
            for counter in (
                self._reconnects,
                self._records_in,
                self._records_out,
                self._bytes_in,
                self._bytes_out,
            ):
                counter.labels(hub)

    def _source_begins(self, name: str) -> None:
        if self._is_new("source", name):
            self._source_live.labels(name)
            self._source_seconds.labels(name)
            for kind in SOURCE_FAILURES:
                self._source_failures.labels(name, kind)

    def _sink_begins(self, name: str) -> None:
        if self._is_new("sink", name):
            self._sink_seconds.labels(name)
            for kind in SINK_FAILURES:
                self._sink_failures.labels(name, kind)

    def _filter_begins(self, name: str) -> None:
        if self._is_new("filter", name):
            self._filter_failures.labels(name)
            self._withheld.labels(name)

    def _placements_begin(self) -> None:
        if self._is_new("placements", ""):
            for outcome, rule in PLACEMENTS:
                self._placements.labels(outcome, rule)

    def _statuses_begin(self) -> None:
        if self._is_new("statuses", ""):
            for status in REFUSALS:
                self._refused.labels(status)

    # What an agent records.

    def configured(
        self,
        *,
        hubs: Iterable[str] = (),
        sources: Iterable[str] = (),
        sinks: Iterable[str] = (),
        filters: Iterable[str] = (),
    ) -> None:
        """Say which names an agent's configuration has, so that their series, and the placements, are there from the
        start. Names that are mentioned later begin then."""
        for hub in hubs:
            self._hub_begins(hub)
            for stream in ("report", "watch"):
                self._connected.labels(hub, stream)
        for source in sources:
            self._source_begins(source)
        for sink in sinks:
            self._sink_begins(sink)
        for filter_name in filters:
            self._filter_begins(filter_name)
        self._placements_begin()

    def record_dropped(self, origin: str, reason: str, count: int = 1) -> None:
        """Count records that were refused.

        `origin` is "source:NAME", "hub:ENDPOINT" or "cluster:ID"; `reason` a field's name, as in `capacity.Fault`, or
        another fixed word. Past `ORIGINS_PER_KIND` origins of one kind, further ones count as "cluster:*" and so on."""
        kind, colon, name = origin.partition(":")
        origin = kind + colon + _bounded(self._origins.setdefault(kind, set()), name, ORIGINS_PER_KIND)
        self._dropped.labels(origin, _bounded(self._reasons, reason, REASONS)).inc(count)

    def hub_connected(self, hub: str, stream: str, connected: bool) -> None:
        """Say whether a stream ("report" or "watch") to a hub (host:port) is up."""
        self._hub_begins(hub)
        self._connected.labels(hub, stream).set(int(connected))

    def hub_reconnected(self, hub: str) -> None:
        """Count one connection to a hub (host:port) that was opened again after one broke."""
        self._hub_begins(hub)
        self._reconnects.labels(hub).inc()

    def hub_received(self, hub: str, records: int, now: float) -> None:
        """Count a batch of so many records and withdrawals that came from a hub at `now`, also one of none."""
        self._hub_begins(hub)
        self._records_in.labels(hub).inc(records)
        self._batches[hub] = now

    def hub_reported(self, hub: str, records: int) -> None:
        """Count records and withdrawals that were reported to a hub."""
        self._hub_begins(hub)
        self._records_out.labels(hub).inc(records)

    def hub_bytes(self, hub: str, sent: int, received: int) -> None:
        """Count bytes that went to a hub and came from it since the last time that this was said."""
        self._hub_begins(hub)
        self._bytes_out.labels(hub).inc(sent)
        self._bytes_in.labels(hub).inc(received)

    def source_live(self, name: str, live: bool) -> None:
        """Say whether a source works and vouches for what it says."""
        self._source_begins(name)
        self._source_live.labels(name).set(int(live))

    def source_collected(self, name: str, seconds: float, records: int, now: float) -> None:
        """Count one collect that has, at `now`, told so many records after so many seconds."""
        self._source_begins(name)
        self._source_seconds.labels(name).observe(seconds)
        self._source_records.labels(name).set(records)
        self._collects[name] = now

    def source_failed(self, name: str, kind: str = "collect") -> None:
        """Count one failure of a source; `kind` is what failed, one of `SOURCE_FAILURES` or another fixed word."""
        self._source_begins(name)
        self._source_failures.labels(name, _bounded(self._kinds["source"], kind, WORDS)).inc()

    def sink_told(self, name: str, seconds: float, now: float) -> None:
        """Count one update that a sink has, at `now`, taken after so many seconds."""
        self._sink_begins(name)
        self._sink_seconds.labels(name).observe(seconds)
        self._updates[name] = now

    def sink_failed(self, name: str, kind: str = "update") -> None:
        """Count one failure of a sink; `kind` is what failed, one of `SINK_FAILURES` or another fixed word."""
        self._sink_begins(name)
        self._sink_failures.labels(name, _bounded(self._kinds["sink"], kind, WORDS)).inc()

    def filter_failed(self, name: str, count: int = 1) -> None:
        """Count records on which a report filter failed."""
        self._filter_begins(name)
        self._filter_failures.labels(name).inc(count)

    def records_withheld(self, name: str, count: int) -> None:
        """Count records that the report filter of that name kept from others."""
        self._filter_begins(name)
        self._withheld.labels(name).inc(count)

    def placed(self, outcome: Literal["local", "foreign"], rule: str) -> None:
        """Count one create that was placed; `rule` as in `PLACEMENTS`, or another fixed word."""
        self._placements_begin()
        self._placements.labels(outcome, _bounded(self._rules, rule, WORDS)).inc()

    # What a hub records.

    def call_refused(self, status: str) -> None:
        """Count one call that this hub refused; `status` is the gRPC name of it, such as "UNAUTHENTICATED"."""
        self._statuses_begin()
        self._refused.labels(_bounded(self._statuses, status, WORDS)).inc()

    def watchers(self, count: int) -> None:
        """Say how many agents watch this hub; 0 at its start."""
        self._watchers.set(count)

    def reporters(self, count: int) -> None:
        """Say how many agents report to this hub; 0 at its start."""
        self._reporters.set(count)

    # What both record.

    def queue(self, name: str, depth: Callable[[], int], conflated: Callable[[], int] | None = None) -> None:
        """Export a queue: `depth` says how much waits in it, `conflated`, where it conflates, how many changes gave way
        to newer ones so far. Both are called at each scrape and must not block. A name that is there already is taken
        over."""
        self._queues[name] = _Queue(depth, conflated)

    def build(self, version: str, **versions: str) -> None:
        """Say which version of this program runs, and on what: `python`, `trio`, `grpclib` and so on."""
        self._build.info({"version": version, **versions})

    # Scrapes.

    def exposition(
        self,
        envs: Iterable[Sequence[Capacity]],
        *,
        now: float,
        held: Callable[[], RegistryHeld] | None = None,
    ) -> AsyncIterator[bytes]:
        """All metrics in Prometheus' text format, a chunk at a time: first those of health, and then the capacity in
        `envs`, as `publish_metrics` would export it.

        `envs`: a sequence of records for each env, as `Registry.by_env` gives them, or `by_env` for a snapshot: valid,
        one for each identity, not empty. It is used up before the first chunk comes, a little at a time. `now`: seconds
        on the clock of the records' observed_at and of everything that was recorded. `held`: what else a registry
        holds, `Registry.held`; None where there is no registry.

        Works for about a millisecond at a time, or as long as the lookup of one env takes, and lets all others run in
        between. Whatever can fail fails before the first chunk. Any number of scrapes may go on at once; none waits for
        another, and each keeps, until it ends, some 200 bytes for each member that it has to write."""
        return _Exposition(self._slices(envs, now, held))

    def whole_exposition(
        self,
        envs: Iterable[Sequence[Capacity]],
        *,
        now: float,
        held: Callable[[], RegistryHeld] | None = None,
    ) -> bytes:
        """The same in one piece and at once: for tests and demonstrations, and for wherever nothing else has to go on
        meanwhile."""
        return b"".join(self._slices(envs, now, held))

    def _slices(
        self, envs: Iterable[Sequence[Capacity]], now: float, held: Callable[[], RegistryHeld] | None
    ) -> _Slices:
        capacity = _CapacityWriter(now)
        yield from capacity.gather(envs)
        health = []
        for metric in chain(self.registry.collect(), self._now(now, capacity.records, held)):
            health.append(generate_latest(_Only(metric)))
            yield b""
        yield b"".join(health)
        yield from capacity.text()

    def _now(self, now: float, records: int, held: Callable[[], RegistryHeld] | None) -> Iterator[Metric]:
        """What is only known at a scrape."""
        for family, moments in (
            (_HUB_BATCH_AGE, self._batches),
            (_SOURCE_AGE, self._collects),
            (_SINK_AGE, self._updates),
        ):
            yield _at_scrape(family, [(name, max(0.0, now - moment)) for name, moment in moments.items()])
        yield _at_scrape(_REGISTRY_RECORDS, [("", records)])
        if held is not None:
            kept = held()
            yield _at_scrape(_REGISTRY_HELD, [("", kept.records)])
            yield _at_scrape(_REGISTRY_TOMBSTONES, [("", kept.tombstones)])
            yield _at_scrape(_REGISTRY_INSTANCES, [("", kept.instances)])
        queues = self._queues.items()
        yield _at_scrape(_QUEUE_DEPTH, [(name, queue.depth()) for name, queue in queues])
        conflated = [(name, queue.conflated()) for name, queue in queues if queue.conflated is not None]
        yield _at_scrape(_QUEUE_CONFLATIONS, conflated)
        if self._started_at is not None:
            yield _at_scrape(_UPTIME, [("", max(0.0, now - self._started_at))])


def by_env(snapshot: Iterable[Capacity]) -> list[list[Capacity]]:
    """A snapshot as `FederationMetrics.exposition` takes it, where there is no registry to ask: a list for each env, by
    namespace and env."""
    envs: dict[tuple[str, str], list[Capacity]] = {}
    for record in snapshot:
        envs.setdefault((record.namespace, record.env_name), []).append(record)
    return [envs[env] for env in sorted(envs)]


def _bounded(seen: set[str], name: str, limit: int) -> str:
    """`name` itself if it is known or there is room to remember it, else `OTHERS`."""
    if name not in seen:
        if len(seen) >= limit:
            return OTHERS
        seen.add(name)
    return name
