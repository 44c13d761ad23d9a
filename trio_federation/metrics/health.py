"""The health of one agent or hub: `FederationMetrics`, which is told what happens, counts it, and answers scrapes. What
it counts is declared in `catalogue.py`, and how the capacity in an answer is written is in `writer.py`. What `/readyz`
tells is kept in `trio_federation/health.py`, and how either is served is in `admin/`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import trio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trio_federation.capacity import Capacity
from trio_federation.metrics import catalogue
from trio_federation.metrics.capacity import CAPACITY_FAMILIES
from trio_federation.metrics.catalogue import (
    BUCKETS,
    OUTCOMES,
    PLACEMENTS,
    REFUSALS,
    RELOADS,
    SINK_FAILURES,
    SOURCE_FAILURES,
    Family,
    Kind,
)
from trio_federation.metrics.writer import CapacityWriter, Exposition, Slices, text_of
from trio_federation.policy import REASONS as BREACH_REASONS
from trio_federation.registry import RegistryHeld

#: The media type of what `FederationMetrics.exposition` gives.
CONTENT_TYPE = CONTENT_TYPE_LATEST

#: How many origins of one kind, and how many reasons, get series of their own; the rest are counted together. Sources
#: and hubs come from the configuration, but cluster ids are claimed by peers, who must not make the exporter grow.
ORIGINS_PER_KIND = 128
REASONS = 32
#: How many kinds of failures, rules and outcomes of placement and statuses get series of their own. All of them are
#: fixed words of this project; a bound stands here so that a mistake in one place does not become a leak in another.
WORDS = 32
#: How many of those who are involved in a sink's troubles get series of their own, for each sink and reason, and what
#: stands for the rest. A plugin says that they are few.
PARTIES = 20
OTHER_PARTIES = "other"

#: Stands for all that came after a limit was reached. No cluster id and no field of a record can have this name.
OTHERS = "*"


class _Reserved(Collector):
    """Exports nothing, and takes the names of what is only written at a scrape, so that nobody else can."""

    def collect(self) -> Iterator[Metric]:
        """Nothing."""
        return iter(())

    def describe(self) -> Iterator[Metric]:
        """The names that are taken."""
        for family in (*CAPACITY_FAMILIES, *_AT_SCRAPE):
            yield _at_scrape(family)


_AT_SCRAPE = (
    catalogue.HUB_LAST_BATCH_AGE_SECONDS,
    catalogue.SOURCE_LAST_SUCCESS_AGE_SECONDS,
    catalogue.SINK_LAST_SUCCESS_AGE_SECONDS,
    catalogue.PLACEMENT_RESERVATIONS,
    catalogue.REGISTRY_RECORDS,
    catalogue.REGISTRY_HELD_RECORDS,
    catalogue.REGISTRY_TOMBSTONES,
    catalogue.REGISTRY_INSTANCES,
    catalogue.QUEUE_DEPTH,
    catalogue.QUEUE_CONFLATIONS_TOTAL,
    catalogue.UPTIME_SECONDS,
    catalogue.LOG_LINES_LOST_TOTAL,
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


class _Hub(NamedTuple):
    """The counters of one hub, or, before a hub was named, of all. Those of each hub are kept: they count at each read
    and write of a connection, and finding them by their label takes longer than that."""

    reconnects: Counter
    records_in: Counter
    records_out: Counter
    bytes_in: Counter
    bytes_out: Counter


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
        self._turn = trio.Lock()
        self._started_at = started_at
        self._names: dict[str, set[str]] = {}
        self._origins: dict[str, set[str]] = {}
        self._reasons: set[str] = set()
        self._kinds: dict[str, set[str]] = {"source": set(SOURCE_FAILURES), "sink": set(SINK_FAILURES)}
        self._rules = {rule for _, rule in PLACEMENTS}
        self._outcomes_known = set(OUTCOMES)
        self._reserved: Callable[[], int] | None = None
        self._statuses = set(REFUSALS)
        self._lines_lost: Callable[[], int] | None = None
        self._batches: dict[str, float] = {}
        self._collects: dict[str, float] = {}
        self._updates: dict[str, float] = {}
        self._queues: dict[str, _Queue] = {}
        self.registry.register(_Reserved())
        self._connected = self._gauge(catalogue.HUB_CONNECTED)
        self._hub_counters = _Hub(
            reconnects=self._counter(catalogue.HUB_RECONNECTS_TOTAL),
            records_in=self._counter(catalogue.HUB_RECEIVED_RECORDS_TOTAL),
            records_out=self._counter(catalogue.HUB_REPORTED_RECORDS_TOTAL),
            bytes_in=self._counter(catalogue.HUB_RECEIVED_BYTES_TOTAL),
            bytes_out=self._counter(catalogue.HUB_SENT_BYTES_TOTAL),
        )
        self._hubs: dict[str, _Hub] = {}
        self._batch_waits = self._histogram(catalogue.HUB_BATCH_WAIT_SECONDS)
        self._source_live = self._gauge(catalogue.SOURCE_LIVE)
        self._source_trouble = self._gauge(catalogue.SOURCE_TROUBLE)
        #: by source, the reasons that have series
        self._troubles: dict[str, set[str]] = {}
        self._source_records = self._gauge(catalogue.SOURCE_RECORDS)
        self._source_failures = self._counter(catalogue.SOURCE_FAILURES_TOTAL)
        self._source_seconds = self._histogram(catalogue.SOURCE_COLLECT_DURATION_SECONDS)
        self._sink_trouble = self._gauge(catalogue.SINK_TROUBLE)
        #: by sink, the reasons and parties that have series
        self._sink_troubles: dict[str, dict[str, set[str]]] = {}
        self._sink_seconds = self._histogram(catalogue.SINK_UPDATE_DURATION_SECONDS)
        self._sink_failures = self._counter(catalogue.SINK_FAILURES_TOTAL)
        self._filter_failures = self._counter(catalogue.FILTER_FAILURES_TOTAL)
        self._withheld = self._counter(catalogue.FILTER_WITHHELD_RECORDS_TOTAL)
        self._placements = self._counter(catalogue.PLACEMENTS_TOTAL)
        self._outcomes = self._counter(catalogue.PLACEMENT_OUTCOMES_TOTAL)
        self._dropped = self._counter(catalogue.RECORDS_DROPPED_TOTAL)
        self._refused = self._counter(catalogue.HUB_CALLS_REFUSED_TOTAL)
        self._breached: set[str] = set()
        self._breach_reasons = set(BREACH_REASONS)
        #: the credentials that reporters had so far
        self._credentials: set[str] = set()
        self._certificates = self._gauge(catalogue.CERTIFICATE_EXPIRES_TIMESTAMP_SECONDS)
        self._reloads = self._counter(catalogue.RELOADS_TOTAL)
        self._plugin_failures = self._gauge(catalogue.PLUGIN_FAILURES)

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
        return self._gauge(catalogue.HUB_WATCHERS)

    @cached_property
    def _reporters(self) -> Gauge:
        self._statuses_begin()
        return self._gauge(catalogue.HUB_REPORTERS)

    @cached_property
    def _reporters_by_credential(self) -> Gauge:
        return self._gauge(catalogue.HUB_REPORTERS_BY_CREDENTIAL)

    @cached_property
    def _handshakes_failed(self) -> Counter:
        return self._counter(catalogue.HUB_HANDSHAKES_FAILED_TOTAL)

    @cached_property
    def _cut(self) -> Counter:
        return self._counter(catalogue.HUB_CONNECTIONS_CUT_TOTAL)

    @cached_property
    def _breaches(self) -> Counter:
        return self._counter(catalogue.HUB_POLICY_BREACHES_TOTAL)

    @cached_property
    def _build(self) -> Info:
        return Info(catalogue.BUILD_INFO.name.removesuffix("_info"), catalogue.BUILD_INFO.text, registry=self.registry)

    def _is_new(self, what: str, name: str) -> bool:
        names = self._names.setdefault(what, set())
        if name in names:
            return False
        names.add(name)
        return True

    def _hub(self, hub: str) -> _Hub:
        counters = self._hubs.get(hub)
        if counters is None:
            counters = self._hubs[hub] = _Hub(*[counter.labels(hub) for counter in self._hub_counters])
            self._batch_waits.labels(hub)
        return counters

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
            for word in OUTCOMES:
                self._outcomes.labels(word)

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
            self._hub(hub)
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
        self._hub(hub)
        self._connected.labels(hub, stream).set(int(connected))

    def hub_reconnected(self, hub: str) -> None:
        """Count one connection to a hub (host:port) that was opened again after one broke."""
        self._hub(hub).reconnects.inc()

    def hub_received(self, hub: str, records: int, now: float) -> None:
        """Count a batch of so many records and withdrawals that came from a hub at `now`, also one of none."""
        self._hub(hub).records_in.inc(records)
        self._batches[hub] = now

    def log_lines(self, lost: Callable[[], int]) -> None:
        """Say how to find out how many lines of the log could not be written; asked at each scrape."""
        self._lines_lost = lost

    def hub_batch_wait(self, hub: str, seconds: float) -> None:
        """Note for how many seconds a message of a hub had waited on its way."""
        self._batch_waits.labels(hub).observe(seconds)

    def hub_reported(self, hub: str, records: int) -> None:
        """Count records and withdrawals that were reported to a hub."""
        self._hub(hub).records_out.inc(records)

    def hub_bytes(self, hub: str, sent: int, received: int) -> None:
        """Count bytes that went to a hub and came from it since the last time that this was said."""
        counters = self._hub(hub)
        counters.bytes_out.inc(sent)
        counters.bytes_in.inc(received)

    def source_live(self, name: str, live: bool) -> None:
        """Say whether a source works and vouches for what it says."""
        self._source_begins(name)
        self._source_live.labels(name).set(int(live))

    def source_troubles(self, name: str, reasons: Iterable[str]) -> None:
        """Say what keeps a source from telling everything, by its own words; none: nothing any more."""
        self._source_begins(name)
        known = self._troubles.setdefault(name, set())
        now = {_bounded(known, reason, WORDS) for reason in reasons}
        for reason in known | now:
            self._source_trouble.labels(name, reason).set(int(reason in now))

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

    def sink_troubles(self, name: str, troubles: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Say what keeps a sink from showing everything: each trouble's reason, by its own word, and its party, "" for
        none; no troubles: nothing any more. Returns the labels that stand for them, sorted."""
        self._sink_begins(name)
        known = self._sink_troubles.setdefault(name, {})
        now = set()
        for reason, party in troubles:
            if reason not in known and len(known) >= WORDS:
                reason = OTHERS
            parties = known.setdefault(reason, set())
            if party and party not in parties and len(parties - {"", OTHER_PARTIES}) >= PARTIES:
                party = OTHER_PARTIES
            parties.add(party)
            now.add((reason, party))
        for reason, parties in known.items():
            for party in parties:
                self._sink_trouble.labels(name, reason, party).set(int((reason, party) in now))
        return sorted(now)

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

    def outcome(self, word: str) -> None:
        """Count one report of what became of a create; `word` is what it came to, one of `OUTCOMES`, or another fixed
        word."""
        self._placements_begin()
        self._outcomes.labels(_bounded(self._outcomes_known, word, WORDS)).inc()

    def reservations(self, count: Callable[[], int]) -> None:
        """Export how many reservations count now: `count` says it, is called at each scrape and must not block."""
        self._reserved = count

    # What a hub records.

    def call_refused(self, status: str) -> None:
        """Count one call that this hub refused; `status` is the gRPC name of it, such as "UNAUTHENTICATED"."""
        self._statuses_begin()
        self._refused.labels(_bounded(self._statuses, status, WORDS)).inc()

    def handshake_failed(self, count: int = 1) -> None:
        """Count TLS handshakes with this hub that failed; none, at its start."""
        self._handshakes_failed.inc(count)

    def connection_cut(self, reason: str, count: int = 1) -> None:
        """Count connections that this hub ended because of what their peer did; none, at its start. `reason`: one of
        the words that the family names."""
        self._cut.labels(reason).inc(count)

    def watchers(self, count: int) -> None:
        """Say how many agents watch this hub; 0 at its start."""
        self._watchers.set(count)

    def reporters(self, count: int) -> None:
        """Say how many agents report to this hub; 0 at its start."""
        self._reporters.set(count)

    def reporters_by_credential(self, counts: Mapping[str, int]) -> None:
        """Say how many agents report to this hub by each credential ("shared", "token+certificate"); what is left out
        has none."""
        for credential in self._credentials | counts.keys():
            self._credentials.add(credential)
            self._reporters_by_credential.labels(credential).set(counts.get(credential, 0))

    def policy_breach(self, cluster_id: str, reason: str, count: int) -> None:
        """Count records of a cluster that broke a rule of its policy; `reason` is one of `policy.REASONS`, or another
        fixed
        word. Past `ORIGINS_PER_KIND` clusters, further ones count as "*"."""
        cluster_id = _bounded(self._breached, cluster_id, ORIGINS_PER_KIND)
        self._breaches.labels(cluster_id, _bounded(self._breach_reasons, reason, WORDS)).inc(count)

    # What both record.

    def certificate_expires(self, certificate: str, at: float) -> None:
        """Say when the first certificate of a file runs out, in seconds of Unix time; `certificate` is the file's key
        in the configuration, such as "hub.tls.cert_file"."""
        self._certificates.labels(certificate).set(at)

    def reload_begins(self, what: str) -> None:
        """Files that are read again when they change; `what` they are for."""
        for outcome in RELOADS:
            self._reloads.labels(what, outcome)

    def reloaded(self, what: str, outcome: str) -> None:
        """Count files that had changed and were read again: "ok", or "failed"."""
        self._reloads.labels(what, outcome).inc()

    def queue(self, name: str, depth: Callable[[], int], conflated: Callable[[], int] | None = None) -> None:
        """Export a queue: `depth` says how much waits in it, `conflated`, where it conflates, how many changes gave way
        to newer ones so far. Both are called at each scrape and must not block. A name that is there already is taken
        over."""
        self._queues[name] = _Queue(depth, conflated)

    def build(self, version: str, **versions: str) -> None:
        """Say which version of this program runs, and on what: `python`, `trio`, `grpclib`, as in the catalogue. Raises
        ValueError for what is not there."""
        if unknown := versions.keys() - set(catalogue.BUILD_INFO.labels):
            raise ValueError(f"the catalogue has no label {', '.join(sorted(unknown))} for build info")
        self._build.info({"version": version, **versions})

    def plugin_failures(self, plugin: str, package: str, count: int) -> None:
        """Say how many things an installed plugin, of a package with its version, got wrong when it was loaded."""
        self._plugin_failures.labels(plugin, package).set(count)

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
        return Exposition(self._slices(envs, now, held), self._turn)

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
    ) -> Slices:
        capacity = CapacityWriter(now)
        yield from capacity.gather(envs)
        health = []
        for metric in chain(self.registry.collect(), self._now(now, capacity.records, held)):
            health.append(text_of(metric))
            yield b""
        yield b"".join(health)
        yield from capacity.text()

    def _now(self, now: float, records: int, held: Callable[[], RegistryHeld] | None) -> Iterator[Metric]:
        """What is only known at a scrape."""
        for family, moments in (
            (catalogue.HUB_LAST_BATCH_AGE_SECONDS, self._batches),
            (catalogue.SOURCE_LAST_SUCCESS_AGE_SECONDS, self._collects),
            (catalogue.SINK_LAST_SUCCESS_AGE_SECONDS, self._updates),
        ):
            yield _at_scrape(family, [(name, max(0.0, now - moment)) for name, moment in moments.items()])
        if self._reserved is not None:
            yield _at_scrape(catalogue.PLACEMENT_RESERVATIONS, [("", self._reserved())])
        yield _at_scrape(catalogue.REGISTRY_RECORDS, [("", records)])
        if held is not None:
            kept = held()
            yield _at_scrape(catalogue.REGISTRY_HELD_RECORDS, [("", kept.records)])
            yield _at_scrape(catalogue.REGISTRY_TOMBSTONES, [("", kept.tombstones)])
            yield _at_scrape(catalogue.REGISTRY_INSTANCES, [("", kept.instances)])
        queues = self._queues.items()
        yield _at_scrape(catalogue.QUEUE_DEPTH, [(name, queue.depth()) for name, queue in queues])
        conflated = [(name, queue.conflated()) for name, queue in queues if queue.conflated is not None]
        yield _at_scrape(catalogue.QUEUE_CONFLATIONS_TOTAL, conflated)
        if self._started_at is not None:
            yield _at_scrape(catalogue.UPTIME_SECONDS, [("", max(0.0, now - self._started_at))])
        if self._lines_lost is not None:
            yield _at_scrape(catalogue.LOG_LINES_LOST_TOTAL, [("", self._lines_lost())])


def _bounded(seen: set[str], name: str, limit: int) -> str:
    """`name` itself if it is known or there is room to remember it, else `OTHERS`."""
    if name not in seen:
        if len(seen) >= limit:
            return OTHERS
        seen.add(name)
    return name
