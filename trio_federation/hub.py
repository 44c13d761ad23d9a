"""The hub: takes in what every cluster reports, keeps the newest of it for a while, and relays it to everybody who
watches. Supervision and fan-out only: which sample is newer is `samples.py`, who may report `sessions.py`, who is who
`identity.py`.

    report call ──bytes──▶ changes, stamped with the caller ──▶ SampleTable ──news──▶ each watcher's Outbox ──▶ its call

A watcher's outbox holds the newest change per identity and no more; a slow watcher waits in its own task, and costs the
others nothing."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import structlog
import trio

from trio_federation.capacity import Capacity, Change, Fault, Identity
from trio_federation.clock import Clock, trio_clock
from trio_federation.config import HubSettings
from trio_federation.errors import AlreadyExists, RpcError, Unavailable
from trio_federation.identity import CLUSTER_KEY, Caller, authenticate
from trio_federation.metrics import FederationMetrics
from trio_federation.outbox import Outbox, newest, without_cluster
from trio_federation.pb.sandbox.sync.v1 import FederationBroadcast
from trio_federation.rpc import (
    ConnectionSettings,
    FederationServer,
    IncomingReport,
    IncomingWatch,
    accept_tls,
    open_bridge,
    peer_name,
)
from trio_federation.samples import SampleTable
from trio_federation.sessions import Session, Sessions
from trio_federation.wire import AT_ONCE, BroadcastEncoder, EncodedBroadcast, changes_of

log = structlog.get_logger("trio_federation.hub")

#: Bytes in flight from one reporter: a cluster with many pools should not have to wait for the network's round trips.
_REPORT_WINDOW = 256 * 1024
#: Pairs of cluster and reason for which a dropped record or a refused call is told in the log.
_MOST_TOLD = 1000


#: Records that are grouped in one go.
_PAUSE_EVERY = 500


class _Watcher:
    """Somebody who watches: what waits for them, and how to wake the task that sends it."""

    def __init__(self, spared_cluster: str | None) -> None:
        self._spared_cluster = spared_cluster
        self.outbox = Outbox()
        self.something = trio.Event()

    def offer(self, changes: Sequence[Change]) -> None:
        """Changes of any clusters."""
        if self._spared_cluster is not None:
            changes = without_cluster(changes, self._spared_cluster)
        if changes:
            self.outbox.offer(changes)
            self.something.set()

    def offer_newest(self, cluster_id: str, changes: Mapping[Identity, Change], offered: int) -> None:
        """Changes of one cluster, as an outbox takes them that are for many."""
        if cluster_id != self._spared_cluster:
            self.outbox.offer_newest(changes, offered)
            self.something.set()


class Hub:
    """One hub process.

    `settings`: the `[hub]` table, with a secret. `clock`: seconds, trio's own by default. Calls are served inside
    `run`; streams come from listeners (`listen`) or from anywhere else (`serve`)."""

    def __init__(
        self, settings: HubSettings, *, clock: Clock | None = None, metrics: FederationMetrics | None = None
    ) -> None:
        if settings.secret is None:
            raise ValueError("a hub needs a secret")
        self.settings = settings
        self.metrics = metrics if metrics is not None else FederationMetrics()
        self._secret = settings.secret
        self._clock = clock if clock is not None else trio_clock()
        self._store = SampleTable(ttl=settings.ttl, tombstone_ttl=settings.ttl, silence_limit=settings.silence_limit)
        self._sessions = Sessions(silence_limit=settings.silence_limit, grace=settings.grace, forget_after=settings.ttl)
        self._report_scopes: dict[Session, trio.CancelScope] = {}
        # In the order of their coming: a dict, since a set's order differs from run to run.
        self._watchers: dict[_Watcher, None] = {}
        self._encoder = BroadcastEncoder()
        #: changes conflated for watchers that have left
        self._conflated = 0
        self.metrics.watchers(0)
        self.metrics.reporters(0)
        self.metrics.queue("watchers", self._waiting, self._all_conflated)
        self._told: set[tuple[str, str]] = set()
        self._server = FederationServer(
            self._report,
            self._watch,
            ConnectionSettings(
                keepalive=settings.keepalive, silence_limit=settings.silence_limit, stream_window=_REPORT_WINDOW
            ),
        )

    async def run(
        self,
        listeners: Sequence[trio.SocketListener] = (),
        tls: ssl.SSLContext | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled; every call has ended then."""
        async with open_bridge(), trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._forget)
            if listeners:
                handler = partial(self._accept, tls)
                await nursery.start(partial(trio.serve_listeners, handler, list(listeners), handler_nursery=nursery))
            task_status.started()
            await trio.sleep_forever()

    def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one more connection, in a task of the hub's own. Only while `run` runs."""
        self._nursery.start_soon(self._serve, stream)

    def snapshot(self) -> list[Capacity]:
        """Every record that a new watcher would be told, sorted."""
        return sorted(self._shown(self._clock()), key=lambda record: record.sort_key)

    def by_env(self) -> Iterator[Sequence[Capacity]]:
        """The same, env by env, unsorted; nothing now and then, where a consumer may let others have their turn."""
        now = self._clock()
        envs: dict[tuple[str, str], list[Capacity]] = {}
        for number, record in enumerate(self._store.held_records()):
            if number % _PAUSE_EVERY == 0:
                yield ()
            if self._store.is_fresh(record, now) and not self._sessions.hides(record.cluster_id, now):
                envs.setdefault((record.namespace, record.env_name), []).append(record)
        yield from envs.values()

    def health(self) -> dict[str, Any]:
        """What it has to do, for `/readyz`."""
        return {
            "clusters": self._sessions.live_clusters(),
            "reporters": self._sessions.live(),
            "watchers": len(self._watchers),
            "records": self._store.held()["records"],
        }

    def _waiting(self) -> int:
        return sum(len(watcher.outbox) for watcher in self._watchers)

    def _all_conflated(self) -> int:
        return self._conflated + sum(watcher.outbox.conflated for watcher in self._watchers)

    # Connections.

    async def _accept(self, tls: ssl.SSLContext | None, stream: trio.SocketStream) -> None:
        if tls is None:
            await self._serve(stream)
            return
        peer = peer_name(stream)
        try:
            over_tls = await accept_tls(stream, tls, peer)
        except Unavailable as error:
            log.info("handshake_failed", peer=peer, error=error.message)
            return
        await self._serve(over_tls)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        try:
            await self._server.serve(stream)
        except Exception:
            # A fault of ours that one peer has hit: it must not take the hub away from the others.
            log.exception("connection_failed", peer=peer_name(stream))

    async def _forget(self) -> None:
        """Free what has run out, also while nothing comes in."""
        while True:
            await trio.sleep(self.settings.ttl / 4)
            now = self._clock()
            self._store.expire(now)
            self._sessions.forget(now)

    def _caller(self, call: IncomingReport | IncomingWatch) -> Caller:
        try:
            return authenticate(call.metadata, self._secret.reveal())
        except RpcError as error:
            self._refuse(call, error)
            raise

    def _refuse(self, call: IncomingReport | IncomingWatch, error: RpcError) -> None:
        """Count a refusal; a line for the first of its kind, as a refused agent comes again and again."""
        self.metrics.call_refused(error.status)
        cluster_id = call.metadata.get(CLUSTER_KEY, "")[:63]
        tell = log.info if self._first_time(cluster_id, error.status) else log.debug
        tell("call_refused", cluster=cluster_id, peer=call.peer, status=error.status, error=error.message)

    # Reports.

    async def _report(self, call: IncomingReport) -> None:
        caller = self._caller(call)
        session = self._open_session(call, caller)
        said_goodbye = False
        try:
            with trio.CancelScope() as scope:
                self._report_scopes[session] = scope
                self.metrics.reporters(self._sessions.live())
                log.info("reporter_came", cluster=caller.cluster_id, instance=caller.instance, peer=call.peer)
                await call.accept()
                while (message := await call.receive()) is not None:
                    now = self._clock()
                    received = changes_of(message, now, caller.cluster_id)
                    if received.refused:
                        self._refused(caller.cluster_id, received.refused)
                    if not self._sessions.is_current(session):
                        break  # replaced in this very moment: late data changes nothing
                    self._relay(caller.cluster_id, self._store.apply(received.changes, now))
                else:
                    said_goodbye = True
                    await call.answer()
            if not said_goodbye:
                raise AlreadyExists(f"cluster {caller.cluster_id!r} is reported by a newer call")
        finally:
            del self._report_scopes[session]
            replaced = not self._sessions.is_current(session)
            self._sessions.close(session, self._clock(), said_goodbye=said_goodbye)
            self.metrics.reporters(self._sessions.live())
            log.info(
                "reporter_left", cluster=caller.cluster_id, peer=call.peer, said_goodbye=said_goodbye, replaced=replaced
            )

    def _open_session(self, call: IncomingReport, caller: Caller) -> Session:
        # Sessions think in the hub's clock, connections in trio's; what counts is how long ago it was.
        def heard() -> float:
            return self._clock() - (trio.current_time() - call.last_received)

        hidden = self._sessions.hides(caller.cluster_id, self._clock())
        try:
            opened = self._sessions.open(caller.cluster_id, caller.instance, call.peer, heard, self._clock())
        except AlreadyExists as error:
            self._refuse(call, error)
            raise
        if opened.replaced is not None:
            self._report_scopes[opened.replaced].cancel()
        if hidden:
            # Whoever came to watch while it was gone was not shown its records.
            now = self._clock()
            again = [record for record in self._store.fresh(now) if record.cluster_id == caller.cluster_id]
            self._relay(caller.cluster_id, again)
        return opened.session

    def _relay(self, cluster_id: str, news: Sequence[Change]) -> None:
        """Tell everybody who watches, and is not spared it, of news of one cluster."""
        if news:
            by_identity = newest(news)
            for watcher in self._watchers:
                watcher.offer_newest(cluster_id, by_identity, len(news))

    def _refused(self, cluster_id: str, faults: Sequence[Fault]) -> None:
        for reason, count in Counter(fault.reason for fault in faults).items():
            self.metrics.record_dropped(f"cluster:{cluster_id}", reason, count)
        for fault in faults:
            if self._first_time(cluster_id, fault.reason):
                log.warning("record_dropped", cluster=cluster_id, reason=fault.reason, detail=fault.detail, told="once")

    def _first_time(self, cluster_id: str, what: str) -> bool:
        """Whether something about a cluster is told for the first time; bounded, as ids may be anything."""
        if (cluster_id, what) in self._told or len(self._told) >= _MOST_TOLD:
            return False
        self._told.add((cluster_id, what))
        return True

    # Watches.

    async def _watch(self, call: IncomingWatch) -> None:
        caller = self._caller(call)
        request = await call.request()
        watcher = _Watcher(caller.cluster_id if request.spare_own_cluster else None)
        # Both in one step: nothing that comes in can fall between the snapshot and what follows it.
        self._watchers[watcher] = None
        watcher.offer(self._everything())
        self.metrics.watchers(len(self._watchers))
        log.info("watcher_came", cluster=caller.cluster_id, peer=call.peer)
        try:
            if not watcher.outbox:
                # A snapshot all the same, so that the watcher knows that it has everything there is.
                await self._send(call, FederationBroadcast())
            while True:
                if not watcher.outbox:
                    watcher.something = trio.Event()
                    await watcher.something.wait()
                changes = watcher.outbox.take(AT_ONCE)
                for message in self._encoder.messages(changes, self._clock()):
                    await self._send(call, message)
        finally:
            del self._watchers[watcher]
            self._conflated += watcher.outbox.conflated
            self.metrics.watchers(len(self._watchers))
            log.info("watcher_left", cluster=caller.cluster_id, peer=call.peer, conflated=watcher.outbox.conflated)

    async def _send(self, call: IncomingWatch, message: FederationBroadcast | EncodedBroadcast) -> None:
        """Send a message, or end a watch that takes none for a whole TTL, in which everything of it has run out.
        Whoever is cut off gets what is there when it comes back."""
        limit = self.settings.ttl
        with trio.move_on_after(limit) as scope:
            await call.send(message)
        if scope.cancelled_caught:
            raise Unavailable(f"this watch took no message for {limit:g} s; open it again to get what is there now")

    def _everything(self) -> list[Change]:
        """What a new watcher is told first: also withdrawals, which it may have missed while it was not connected."""
        now = self._clock()
        return [*self._store.withdrawals(now), *self._shown(now)]

    def _shown(self, now: float) -> Iterator[Capacity]:
        """Records that newcomers are told: those of a reporter that has vanished only during the grace."""
        return (record for record in self._store.fresh(now) if not self._sessions.hides(record.cluster_id, now))
