"""The agent of one cluster: runs its sources, keeps the Registry, reports to every hub and watches it, tells its sinks,
under one nursery. Supervision only: what a record means, what is newer and what is tried again is decided in the rooms
below. Without a cluster id, a credential or a hub it runs for its own cluster alone, and starts no stream
(semantics.md, "Agent").

    each source ──batches──▶ intake ──▶ LocalTruth ──▶ Registry, and each hub's Reporter
    each hub's Watcher ──changes──▶ feed ──▶ Registry ──▶ each sink

Sources and sinks run where plugins run: in threads of their own, or, in simulations, on the agent's loop. Both channels
are bounded. Overflow: a source, or a watcher, waits until there is room; nothing is dropped, and a hub conflates
meanwhile what waits for us."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog
import trio

from trio_federation.capacity import Change, Fault
from trio_federation.clock import BootClock, Clock, trio_clock
from trio_federation.config import Federation, HubSettings, PlacementSettings
from trio_federation.health import why_not_ready
from trio_federation.hookspecs import CapacityFilter, CapacitySink, CapacitySource
from trio_federation.identity import OwnIdentity
from trio_federation.isolation import Body, Watch, on_own_loop, on_this_loop
from trio_federation.link import HubLink
from trio_federation.local import LocalTruth, Update
from trio_federation.metrics import FederationMetrics
from trio_federation.plugins import in_one_line
from trio_federation.registry import Registry
from trio_federation.reporter import Reporter
from trio_federation.reservations import Outcome
from trio_federation.retry import failures_of
from trio_federation.router import Placed, Placement, Router
from trio_federation.rpc import Dialer, open_bridge
from trio_federation.sinks import SinkAccount, SinkRunner
from trio_federation.sources import Batch, Collected, SourceAccount, SourceRunner, remake_backoff
from trio_federation.standing import Standing
from trio_federation.watcher import Watcher

log = structlog.get_logger("trio_federation.agent")

#: Seconds for which a hub keeps records by default, and so for which a withdrawal has to be remembered at the least.
HUB_TTL = HubSettings().ttl
#: Batches that may wait on their way from the sources, and from the hubs.
BATCHES = 16
#: Seconds that hubs get, together, to take the withdrawal when the agent stops.
GOODBYE_DEADLINE = 2.0
#: Seconds that sources and sinks get to end before the hubs are told that all is withdrawn.
PLUGINS_DEADLINE = 1.0


class Agent:
    """One cluster's agent.

    `cluster_id`: the local cluster; None runs an empty registry.
    `settings`: the `[federation]` table.
    `sources`, `sinks`, `filters`: what makes each of them, by the name that logs and metrics use. They are made in
    `run`, where they run, and made anew after they have failed. Every source has filters of its own.
    `isolated`: whether each source and each sink has a thread and a loop of its own; they then follow the time since
    boot, as `clock` has to.
    `hubs`: how to dial each hub, by the name that the configuration gives it.
    `credential`: what proves the cluster to a hub, or what gives it at each call; None where a client certificate does.
    `renewals`: how often it, or the certificate, was replaced so far.
    `clock`: seconds; by default that of the Trio loop in which the agent is made. `generator`: for ids and jitter.
    `standing`: kept by the agent, for its sinks to ask whether it is the one that reports for its cluster; it is made
    outside where they are, and must be no other agent's. `placement`: the `[placement]` table.
    `applied`: told of every batch of changes that the registry has taken in; for simulations."""

    def __init__(
        self,
        cluster_id: str | None,
        settings: Federation,
        *,
        sources: Mapping[str, Callable[[], CapacitySource]] | None = None,
        sinks: Mapping[str, Callable[[], CapacitySink]] | None = None,
        filters: Mapping[str, Callable[[], CapacityFilter]] | None = None,
        isolated: bool = False,
        hubs: Mapping[str, Dialer] | None = None,
        credential: str | Callable[[], str | None] | None = None,
        renewals: Callable[[], int] = lambda: 0,
        clock: Clock | None = None,
        generator: random.Random | None = None,
        metrics: FederationMetrics | None = None,
        standing: Standing | None = None,
        placement: PlacementSettings | None = None,
        applied: Callable[[Sequence[Change]], None] | None = None,
    ) -> None:
        self.cluster_id = cluster_id
        self.settings = settings
        self._applied = applied
        #: what the hubs say of its reports
        self.standing = standing if standing is not None else Standing()
        self.metrics = metrics if metrics is not None else FederationMetrics()
        self._isolated = isolated
        self._random = generator if generator is not None else random.SystemRandom()
        #: this process, to everybody else
        self.instance = f"{self._random.getrandbits(128):032x}"
        #: whether `run` was called
        self.started = False
        #: set when `run` has said goodbye and given up its streams
        self.ended = trio.Event()
        self._clock = clock if clock is not None else trio_clock()
        self._made_at = self._clock()
        # One hub TTL, which the agent does not know; what it can know is that its own is no longer.
        remember = max(HUB_TTL, settings.ttl)
        self.registry = Registry(
            cluster_id if cluster_id is not None else "local",
            ttl=settings.ttl,
            clock=self._clock,
            tombstone_ttl=remember,
            silence_limit=settings.silence_limit,
        )
        placement = placement if placement is not None else PlacementSettings()
        self.router = Router(
            self.registry,
            settle_time=placement.settle_time,
            reservation_ttl=placement.reservation_ttl,
            ranking=placement.ranking,
            # A generator of its own: who only asks where a create would go must not change when something is retried.
            random=random.Random(self._random.getrandbits(64)),
            placed=self._placed,
            reported=self._reported,
        )
        self._truth = LocalTruth(
            self.registry.local_cluster_id,
            instance=self.instance,
            started_at=self._made_at,
            ttl=settings.ttl,
            remember=remember,
        )
        self._told: set[tuple[str, str]] = set()
        #: records refused since the start, by origin and then by reason
        self._dropped: dict[str, Counter[str]] = {}
        self._was_ready = False
        self._to_intake, self._at_intake = trio.open_memory_channel[Batch](BATCHES)
        self._to_registry, self._at_registry = trio.open_memory_channel[list[Change]](BATCHES)
        #: by name, what is known of each source and sink
        self.source_accounts: dict[str, SourceAccount] = {}
        self.sink_accounts: dict[str, SinkAccount] = {}
        self._plugins = [
            *self._make_sources(sources or {}, filters or {}),
            *self._make_sinks(sinks or {}),
        ]
        #: by source, the uid of the cluster that it reads, where it says one
        self._uids: dict[str, str] = {}
        self._uids_differ = False
        #: what hubs are told of it
        self.identity = OwnIdentity(
            self.registry.local_cluster_id,
            self.instance,
            credential if callable(credential) else lambda: credential,
            renewals,
        )
        self.links = self._make_links(hubs or {}) if cluster_id is not None else []
        self.metrics.configured(
            hubs=[link.name for link in self.links],
            sources=list(self.source_accounts),
            sinks=list(self.sink_accounts),
            filters=list(filters or {}),
        )
        self.metrics.reservations(self.router.held)
        self.metrics.queue("intake", lambda: self._at_intake.statistics().current_buffer_used)
        self.metrics.queue("feed", lambda: self._at_registry.statistics().current_buffer_used)

    # What the agent is made of.

    def _make_sources(
        self,
        sources: Mapping[str, Callable[[], CapacitySource]],
        filters: Mapping[str, Callable[[], CapacityFilter]],
    ) -> list[tuple[str, Body, Watch]]:
        made: list[tuple[str, Body, Watch]] = []
        for name, make in sources.items():
            account = self.source_accounts[name] = SourceAccount(name, self._clock, self.metrics)
            runner = SourceRunner(
                name,
                make,
                filters=filters,
                settings=self.settings,
                clock=self._clock,
                generator=random.Random(self._random.getrandbits(64)),
                account=account,
                deliver=self._to_intake.send,
            )
            made.append((name, runner.run, account))
        return made

    def _make_sinks(self, sinks: Mapping[str, Callable[[], CapacitySink]]) -> list[tuple[str, Body, Watch]]:
        made: list[tuple[str, Body, Watch]] = []
        for name, make in sinks.items():
            account = self.sink_accounts[name] = SinkAccount(name, self._clock, self.metrics)
            runner = SinkRunner(
                name,
                make,
                registry=self.registry,
                clock=self._clock,
                generator=random.Random(self._random.getrandbits(64)),
                account=account,
            )
            made.append((name, runner.run, account))
        return made

    def _make_links(self, hubs: Mapping[str, Dialer]) -> list[HubLink]:
        assert self.cluster_id is not None
        links = []
        for name, dial in hubs.items():
            reporter = Reporter(self._truth, self._clock, self.settings)
            watcher = Watcher(
                self.cluster_id,
                self._clock,
                self._to_registry.clone(),
                partial(self._refused, f"hub:{name}"),
                beat=self.settings.keepalive,
                silence_limit=self.settings.silence_limit,
                ttl=self.settings.ttl,
            )
            links.append(
                HubLink(
                    name,
                    dial,
                    reporter,
                    watcher,
                    identity=self.identity,
                    keepalive=self.settings.keepalive,
                    silence_limit=self.settings.silence_limit,
                    clock=self._clock,
                    generator=self._random,
                    metrics=self.metrics,
                    standing=self.standing,
                    clusters=self.registry.clusters,
                )
            )
        return links

    # What it says of itself.

    def exposition(self) -> AsyncIterator[bytes]:
        """The metrics as Prometheus reads them, from memory, in slices."""
        return self.metrics.exposition(self.registry.by_env(), now=self._clock(), held=self.registry.held)

    def health(self) -> dict[str, Any]:
        """How it is doing, for `/readyz`; "why_not" is empty once it is ready, and stays so until it stops."""
        now = self._clock()
        sources = [account.health for account in self.source_accounts.values()]
        hubs = [link.health for link in self.links]
        why_not = [] if self._was_ready else why_not_ready(sources, hubs, now - self._made_at)
        self._was_ready = not why_not
        if self.ended.is_set():
            why_not = ["it has stopped"]
        return {
            "why_not": why_not,
            "cluster_id": self.cluster_id,
            "mode": "federated" if self.links else "single-cluster",
            "uptime": round(now - self._made_at, 3),
            "sources": [
                account.health.shown(now)
                | {"records": account.records, "dropped": self._dropped_of(f"source:{account.name}")}
                for account in self.source_accounts.values()
            ],
            "sinks": [account.health.shown(now) for account in self.sink_accounts.values()],
            "hubs": [hub.shown(now) | {"dropped": self._dropped_of(f"hub:{hub.name}")} for hub in hubs],
        }

    def _dropped_of(self, origin: str) -> dict[str, int]:
        return dict(sorted(self._dropped.get(origin, Counter()).items()))

    def place(
        self,
        namespace: str,
        env_name: str,
        group: str = "",
        reserve: bool = True,
        not_these: Sequence[str] = (),
        forwarded: bool = False,
    ) -> Placement:
        """What the router decides; a line for those who debug, with all that was known."""
        placement = self.router.place(
            namespace, env_name, group, reserve=reserve, not_these=not_these, forwarded=forwarded
        )
        if not reserve:
            self._tell_placement(Placed(placement, namespace, env_name, group, self._clock()), reserved=False)
        return placement

    def placed(self, placement_id: str) -> Placed | None:
        """A placement of the past that reserved, by its id; None where it is not among the last PLACEMENTS_KEPT."""
        return self.router.recent(placement_id)

    def report_outcome(self, placement_id: str, outcome: str) -> Outcome | None:
        """Say what came of a placement. Returns the outcome that counts, which is the first one that was said, or None
        where the placement is not remembered. Raises ValueError for a word that is no outcome."""
        if not self.router.report_outcome(placement_id, outcome):
            return None
        return self.router.outcome(placement_id) or Outcome(outcome)

    def _placed(self, placed: Placed) -> None:
        placement = placed.placement
        self.metrics.placed("local" if placement.local else "foreign", str(placement.rule))
        self._tell_placement(placed, reserved=True)

    def _reported(self, placement_id: str, word: str) -> None:
        self.metrics.outcome(word)
        placed = self.router.recent(placement_id)
        target = placed.placement.target if placed is not None else None
        log.debug("outcome", id=placement_id[:80], outcome=word, target=target)

    def _tell_placement(self, placed: Placed, *, reserved: bool) -> None:
        if not log.is_enabled_for(logging.DEBUG):
            return  # to explain every candidate costs more than to choose one
        placement = placed.placement
        log.debug(
            "placed" if reserved else "asked",
            id=placement.id,
            namespace=placed.namespace,
            env=placed.env_name,
            group=placed.group,
            target=placement.target,
            rule=str(placement.rule),
            reason=placement.reason,
            candidates=[candidate.explanation for candidate in placement.candidates],
        )

    # Its life.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Then the sources stop, every hub is told that all records are withdrawn, for at most
        GOODBYE_DEADLINE, and the streams are closed. Once only."""
        self.started = True
        async with open_bridge(), trio.open_nursery() as nursery:
            scopes = [trio.CancelScope(shield=True) for _ in self.links]
            plugins_ended = trio.Event()
            try:
                for link, scope in zip(self.links, scopes, strict=True):
                    nursery.start_soon(_run_shielded, link, scope)
                nursery.start_soon(self._run_local, plugins_ended)
                if not self.links:
                    log.info("single_cluster", cluster=self.cluster_id)
                task_status.started()
                await trio.sleep_forever()
            finally:
                nursery.cancel_scope.cancel()
                # The links are shielded, so that a cancellation does not take the streams away before the goodbye. A
                # source that does not let itself be cancelled is not waited for: what it says is not taken in any more.
                with trio.move_on_after(PLUGINS_DEADLINE, shield=True):
                    await plugins_ended.wait()
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
                for name, body, watch in self._plugins:
                    if self._isolated:
                        nursery.start_soon(self._run_isolated, name, body, watch)
                    else:
                        nursery.start_soon(on_this_loop, body, watch)
        finally:
            ended.set()

    async def _run_isolated(self, name: str, body: Body, watch: Watch) -> None:
        """A plugin on loops of its own: one that breaks, which is what happens to a Trio loop where a callback raises,
        is replaced."""
        backoff = remake_backoff(random.Random(self._random.getrandbits(64)))
        while True:
            began = trio.current_time()
            broke: list[trio.TrioInternalError] = []
            try:
                await on_own_loop(name, BootClock, body, watch)
            except* trio.TrioInternalError as group:
                broke = failures_of(group, trio.TrioInternalError)
            if not broke:
                return
            delay = backoff.again(trio.current_time() - began)
            watch.failed("run", f"its loop broke: {in_one_line(broke[0].__cause__ or broke[0])}", self._clock() + delay)
            await trio.sleep(delay)

    async def _say_goodbye(self) -> None:
        for link in self.links:
            link.stop()
        for link in self.links:
            await link.said_goodbye.wait()

    async def _take_batches(self) -> None:
        """Where batches of the sources become local truth, one at a time."""
        async for batch in self._at_intake:
            now, source = self._clock(), batch.source
            if isinstance(batch, Collected):
                if batch.cluster_uid is not None:
                    self._take_uid(source, batch.cluster_uid)
                for update in self._truth.collecting(
                    source, batch.records, batch.observed_at, now, batch.reports, unknown=batch.unknown
                ):
                    self._take(source, update)
                    # A cluster of ten thousand envs must not keep streams and scrapes waiting.
                    await trio.lowlevel.checkpoint()
            else:
                reports, observed_at = batch.reports, batch.observed_at
                self._take(source, self._truth.pushed(source, batch.changes, now, reports, observed_at=observed_at))

    def _take_uid(self, source: str, uid: str) -> None:
        """A source says which cluster it reads. Of several that differ, the first in the configuration counts."""
        self._uids[source] = uid
        first, *others = (name for name in self.source_accounts if name in self._uids)
        other = next((name for name in others if self._uids[name] != self._uids[first]), None)
        if other is not None and not self._uids_differ:
            log.warning("cluster_uids_differ", source=first, other=other)
        self._uids_differ = other is not None
        self.identity.uid = self._uids[first]

    def _take(self, source: str, update: Update) -> None:
        """What a step of a source came to, for all who have to know."""
        if update.refused:
            self._refused(f"source:{source}", update.refused)
        self.source_accounts[source].records = self._truth.count(source)
        self._apply(update.samples)
        for link in self.links:
            link.reporter.offer(update.news)

    async def _feed_registry(self) -> None:
        async for changes in self._at_registry:
            self._apply(changes)

    def _apply(self, changes: Sequence[Change]) -> None:
        # Whatever comes here was checked where it came in, by `wire.changes_of` or by `LocalTruth`.
        self.registry.apply_checked(changes)
        if self._applied is not None:
            self._applied(changes)

    def _refused(self, origin: str, faults: Sequence[Fault]) -> None:
        """Count what was dropped, and tell once for each origin and reason."""
        counts = Counter(fault.reason for fault in faults)
        self._dropped.setdefault(origin, Counter()).update(counts)
        for reason, count in counts.items():
            self.metrics.record_dropped(origin, reason, count)
        for fault in faults:
            if (origin, fault.reason) not in self._told:
                self._told.add((origin, fault.reason))
                log.warning("record_dropped", origin=origin, reason=fault.reason, detail=fault.detail, told="once")


async def _run_shielded(link: HubLink, scope: trio.CancelScope) -> None:
    with scope:
        await link.run()
