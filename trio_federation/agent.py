"""The agent of one cluster: asks its sources, keeps the Registry, reports to every hub and watches it, under one
nursery. Supervision only: what a record means, what is newer and what is tried again is decided in the rooms below.
Without a cluster id, a credential or a hub it runs for its own cluster alone, and starts no stream (semantics.md,
"Agent").

    source ──batches──▶ intake ──▶ LocalTruth ──▶ Registry, and each hub's Reporter
    each hub's Watcher ──changes──▶ feed ──▶ Registry

Both channels are bounded. Overflow: a source, or a watcher, waits until there is room; nothing is dropped, and a hub
conflates meanwhile what waits for us."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, NoReturn

import structlog
import trio

from trio_federation.capacity import Capacity, Change, Fault
from trio_federation.clock import Clock, trio_clock
from trio_federation.config import Federation, HubSettings
from trio_federation.hookspecs import CapacitySink, CapacitySource
from trio_federation.identity import call_metadata
from trio_federation.link import HubLink
from trio_federation.local import LocalTruth
from trio_federation.metrics import FederationMetrics
from trio_federation.plugins import plugins_failure
from trio_federation.registry import Registry
from trio_federation.reporter import Reporter
from trio_federation.router import Router
from trio_federation.rpc import Dialer, open_bridge
from trio_federation.watcher import Watcher

log = structlog.get_logger("trio_federation.agent")

#: Seconds for which a hub keeps records by default, and so for which a withdrawal has to be remembered at the least.
HUB_TTL = HubSettings().ttl
#: Batches that may wait on their way from the sources, and from the hubs.
BATCHES = 16
#: Seconds that hubs get, together, to take the withdrawal when the agent stops.
GOODBYE_DEADLINE = 2.0
#: Seconds that one source or sink gets to let go of what it holds.
CLOSE_DEADLINE = 1.0
#: Seconds that a sink gets to take one snapshot.
SINK_DEADLINE = 10.0
#: Seconds between looks at whether a sink has anything new to be told.
SINK_INTERVAL = 1.0


class _Collected(NamedTuple):
    """A source's whole truth."""

    source: str
    records: Sequence[Capacity]
    observed_at: float


class _Pushed(NamedTuple):
    """What a source says has changed."""

    source: str
    changes: Sequence[Change]


_Batch = _Collected | _Pushed


class Agent:
    """One cluster's agent.

    `cluster_id`: the local cluster; None runs an empty registry.
    `settings`: the `[federation]` table. `sources`, `sinks`: by the name that logs and metrics use.
    `hubs`: how to dial each hub, by the name that the configuration gives it.
    `credential`: what proves the cluster to a hub; None where a client certificate does.
    `clock`: seconds; by default that of the Trio loop in which the agent is made. `generator`: for ids and jitter."""

    def __init__(
        self,
        cluster_id: str | None,
        settings: Federation,
        *,
        sources: Mapping[str, CapacitySource] | None = None,
        sinks: Mapping[str, CapacitySink] | None = None,
        hubs: Mapping[str, Dialer] | None = None,
        credential: str | None = None,
        clock: Clock | None = None,
        generator: random.Random | None = None,
        metrics: FederationMetrics | None = None,
    ) -> None:
        self.cluster_id = cluster_id
        self.settings = settings
        self.metrics = metrics if metrics is not None else FederationMetrics()
        self._sources = dict(sources or {})
        self._sinks = dict(sinks or {})
        self._random = generator if generator is not None else random.SystemRandom()
        #: this process, to everybody else
        self.instance = f"{self._random.getrandbits(128):032x}"
        #: whether `run` was called
        self.started = False
        #: set when `run` has said goodbye and given up its streams
        self.ended = trio.Event()
        self._clock = clock if clock is not None else trio_clock()
        # One hub TTL, which the agent does not know; what it can know is that its own is no longer.
        remember = max(HUB_TTL, settings.ttl)
        self.registry = Registry(
            cluster_id if cluster_id is not None else "local",
            ttl=settings.ttl,
            clock=self._clock,
            tombstone_ttl=remember,
            silence_limit=settings.silence_limit,
        )
        self.router = Router(self.registry, random=self._random)
        self._truth = LocalTruth(
            self.registry.local_cluster_id,
            instance=self.instance,
            started_at=self._clock(),
            ttl=settings.ttl,
            remember=remember,
        )
        self._told: set[tuple[str, str]] = set()
        #: what of which plugin fails, so that it is told once: ("source[0]:fixtures", "collect")
        self._failing: set[tuple[str, str]] = set()
        self._pushing: set[str] = set()
        self._to_intake, self._at_intake = trio.open_memory_channel[_Batch](BATCHES)
        self._to_registry, self._at_registry = trio.open_memory_channel[list[Change]](BATCHES)
        self.links = self._make_links(hubs or {}, credential) if cluster_id is not None else []

    def _make_links(self, hubs: Mapping[str, Dialer], credential: str | None) -> list[HubLink]:
        assert self.cluster_id is not None
        links = []
        for name, dial in hubs.items():
            reporter = Reporter(self._truth, self._clock, self.settings)
            watcher = Watcher(
                self.cluster_id, self._clock, self._to_registry.clone(), partial(self._refused, f"hub:{name}")
            )
            links.append(
                HubLink(
                    name,
                    dial,
                    reporter,
                    watcher,
                    metadata=call_metadata(self.cluster_id, self.instance, credential),
                    keepalive=self.settings.keepalive,
                    silence_limit=self.settings.silence_limit,
                    generator=self._random,
                    metrics=self.metrics,
                )
            )
        return links

    def exposition(self) -> bytes:
        """The metrics as Prometheus reads them, from memory."""
        return self.metrics.exposition(self.registry.snapshot(), now=self._clock())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Then the sources stop, every hub is told that all records are withdrawn, for at most
        GOODBYE_DEADLINE, and the streams are closed. Once only."""
        self.started = True
        async with open_bridge(), trio.open_nursery() as nursery:
            scopes = [trio.CancelScope(shield=True) for _ in self.links]
            sources_ended = trio.Event()
            try:
                for link, scope in zip(self.links, scopes, strict=True):
                    nursery.start_soon(_run_shielded, link, scope)
                nursery.start_soon(self._run_local, sources_ended)
                if not self.links:
                    log.info("single_cluster", cluster=self.cluster_id)
                task_status.started()
                await trio.sleep_forever()
            finally:
                nursery.cancel_scope.cancel()
                # The links are shielded, so that a cancellation does not take the streams away before the goodbye. A
                # source that does not let itself be cancelled is not waited for: what it says is not taken in any more.
                with trio.move_on_after(CLOSE_DEADLINE, shield=True):
                    await sources_ended.wait()
                with trio.move_on_after(GOODBYE_DEADLINE, shield=True):
                    await self._say_goodbye()
                for scope in scopes:
                    scope.cancel()
                self.ended.set()

    async def _run_local(self, ended: trio.Event) -> None:
        """Everything of the agent but its links."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_batches)
                nursery.start_soon(self._feed_registry)
                for name, source in self._sources.items():
                    nursery.start_soon(self._run_source, name, source)
                for name, sink in self._sinks.items():
                    nursery.start_soon(self._run_sink, name, sink)
        finally:
            ended.set()

    async def _say_goodbye(self) -> None:
        for link in self.links:
            link.stop()
        for link in self.links:
            await link.said_goodbye.wait()

    # Sources.

    async def _run_source(self, name: str, source: CapacitySource) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_pushed, name, source)
                await self._poll(name, source)
        finally:
            await _close(source)

    async def _poll(self, name: str, source: CapacitySource) -> NoReturn:
        """Ask for everything: at once, and then every report interval, or, of a source that pushes, at every resync at
        which it can vouch for what it has pushed."""
        while True:
            began = trio.current_time()
            await self._collect(name, source)
            settings = self.settings
            interval = settings.resync_interval if name in self._pushing else settings.report_interval
            await trio.sleep_until(began + interval)

    async def _take_pushed(self, name: str, source: CapacitySource) -> None:
        """Take what a source pushes, for as long as it does; one that does not is only polled."""
        while True:
            try:
                changes = source.changes()
                if changes is None:
                    return
                self._pushing.add(name)
                async with _closing(changes):
                    async for batch in changes:
                        await self._to_intake.send(_Pushed(name, tuple(batch)))
                        self._works(name, "push")
                failure = "it stopped pushing changes"
            except BaseException as error:
                failure = plugins_failure(error)
            self._pushing.discard(name)
            self._source_failed(name, "push", failure)
            await trio.sleep(self.settings.report_interval)

    async def _collect(self, name: str, source: CapacitySource) -> None:
        began = self._clock()
        deadline = self.settings.ttl / 2
        records: tuple[Capacity, ...] | None = None
        try:
            if not source.is_live():
                self._fails(name, "live", "source_not_live", records="not refreshed while it cannot vouch for them")
                return
            with trio.move_on_after(deadline):
                records = tuple(await source.collect())
        except BaseException as error:
            self._source_failed(name, "collect", plugins_failure(error))
            return
        if records is None:
            self._source_failed(name, "collect", f"no answer within {deadline:g} s")
            return
        self._works(name, "live")
        self._works(name, "collect")
        await self._to_intake.send(_Collected(name, records, began))

    def _source_failed(self, name: str, what: str, failure: str) -> None:
        self.metrics.source_failed(name)
        self._fails(name, what, "source_failed", error=failure, records="kept until they are older than the TTL")

    def _fails(self, name: str, what: str, event: str, **details: str) -> None:
        """Something of a plugin does not work: a line when that begins."""
        tell = log.debug if (name, what) in self._failing else log.warning
        self._failing.add((name, what))
        tell(event, **{_kind(what): name}, what=what, **details)

    def _works(self, name: str, what: str) -> None:
        if (name, what) in self._failing:
            self._failing.discard((name, what))
            log.info(f"{_kind(what)}_works", **{_kind(what): name}, what=what)

    async def _take_batches(self) -> None:
        """Where batches of the sources become local truth, one at a time."""
        async for batch in self._at_intake:
            now = self._clock()
            if isinstance(batch, _Collected):
                update = self._truth.collected(batch.source, batch.records, batch.observed_at, now)
            else:
                update = self._truth.pushed(batch.source, batch.changes, now)
            if update.refused:
                self._refused(f"source:{batch.source}", update.refused)
            self.registry.apply(update.samples)
            for link in self.links:
                link.reporter.offer(update.news)

    # Hubs.

    async def _feed_registry(self) -> None:
        async for changes in self._at_registry:
            self.registry.apply(changes)

    def _refused(self, origin: str, faults: Sequence[Fault]) -> None:
        """Count what was dropped, and tell once for each origin and reason."""
        for reason, count in Counter(fault.reason for fault in faults).items():
            self.metrics.record_dropped(origin, reason, count)
        for fault in faults:
            if (origin, fault.reason) not in self._told:
                self._told.add((origin, fault.reason))
                log.warning("record_dropped", origin=origin, reason=fault.reason, detail=fault.detail, told="once")

    # Sinks.

    async def _run_sink(self, name: str, sink: CapacitySink) -> None:
        """Tell a sink of the newest snapshot, whenever there is one that it does not have."""
        told: list[Capacity] = []
        try:
            while True:
                snapshot = self.registry.snapshot()
                if snapshot != told and await self._tell_sink(name, sink, snapshot):
                    told = snapshot
                await trio.sleep(SINK_INTERVAL)
        finally:
            await _close(sink)

    async def _tell_sink(self, name: str, sink: CapacitySink, snapshot: Sequence[Capacity]) -> bool:
        failure = f"not done within {SINK_DEADLINE:g} s"
        try:
            with trio.move_on_after(SINK_DEADLINE) as scope:
                await sink.update(snapshot)
            if not scope.cancelled_caught:
                self._works(name, "update")
                return True
        except BaseException as error:
            failure = plugins_failure(error)
        self.metrics.sink_failed(name)
        self._fails(name, "update", "sink_failed", error=failure)
        return False


def _kind(what: str) -> str:
    return "sink" if what == "update" else "source"


@asynccontextmanager
async def _closing(changes: AsyncIterator[Sequence[Change]]) -> AsyncIterator[None]:
    """Close an iterator that can be closed, which generators can, in the task that uses it and in bounded time."""
    try:
        yield
    finally:
        close = getattr(changes, "aclose", None)
        if close is not None:
            with trio.move_on_after(CLOSE_DEADLINE, shield=True):
                await close()


async def _run_shielded(link: HubLink, scope: trio.CancelScope) -> None:
    with scope:
        await link.run()


async def _close(plugin: CapacitySource | CapacitySink) -> None:
    with trio.move_on_after(CLOSE_DEADLINE, shield=True):
        try:
            await plugin.aclose()
        except BaseException as error:
            log.warning("close_failed", plugin=type(plugin).__name__, error=plugins_failure(error))
