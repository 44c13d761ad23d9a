"""The hub: takes in what every cluster reports, keeps the newest of it for a while, and relays it to everybody who
watches. Supervision and fan-out only: which sample is newer is `samples.py`, who may report `sessions.py`, who is who
`identity.py`, what they may say and see `policy.py`, how much of it at a time `limits.py`.

    report call ──bytes──▶ changes, stamped with the caller ──▶ what its policy admits ──▶ SampleTable
                ──news──▶ what each watcher's policy shows it ──▶ its Outbox ──▶ its call

A watcher's outbox holds the newest change per identity and no more; a slow watcher waits in its own task, and costs the
others nothing."""

from __future__ import annotations

import math
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import structlog
import trio

from trio_federation.capacity import Capacity, Change, Fault, Identity, Withdrawal
from trio_federation.clock import Clock, trio_clock
from trio_federation.config import HubSettings
from trio_federation.credentials import without_macs
from trio_federation.errors import AlreadyExists, DeadlineExceeded, Late, ResourceExhausted, RpcError, Unavailable
from trio_federation.identity import CLUSTER_KEY, Caller, Part, Trusted, denied_error, identify, is_denied, mixed_up
from trio_federation.limits import Allowance, Limiter
from trio_federation.metrics import FederationMetrics
from trio_federation.outbox import Outbox, cluster_of, newest, without_cluster
from trio_federation.policy import Breach, Policies, Policy
from trio_federation.registry import RegistryHeld
from trio_federation.rpc import (
    ConnectionSettings,
    Cut,
    FederationServer,
    IncomingReport,
    IncomingWatch,
    accept_tls,
    open_bridge,
    peer_name,
)
from trio_federation.samples import SampleTable
from trio_federation.sessions import Session, Sessions
from trio_federation.waits import Waits, microseconds
from trio_federation.wire import AT_ONCE, BroadcastEncoder, EncodedBroadcast, RecordMessage, changes_of, parts_of

log = structlog.get_logger("trio_federation.hub")

_M = TypeVar("_M")
#: A context, or what is asked for one at each handshake.
_Tls: TypeAlias = ssl.SSLContext | Callable[[], ssl.SSLContext]

#: Bytes in flight from one reporter: a cluster with many pools should not have to wait for the network's round trips.
_REPORT_WINDOW = 256 * 1024
#: Pairs of cluster and reason for which a dropped record or a refused call is told in the log.
_MOST_TOLD = 1000
#: Lines a second about those who have proven nothing, and ten times as many at once: they can cause any number.
_STRANGERS_LINES = 2.0
#: The same about who comes and goes: more than a fleet of thousands that is restarted causes.
_CALLERS_LINES = 50.0
#: Connections that are open at once only to be told that they are too many; others are closed without a word.
_MOST_REFUSED = 64
#: Seconds between warnings about addresses with too many connections.
_WARNING_INTERVAL = 60.0

#: Records of a report that are taken in and passed on in one go: more than an agent of ours sends at once.
TAKEN_AT_ONCE = 2 * AT_ONCE
#: Seconds between signs of life on a watch, at the least, whatever its caller asks for.
_QUICKEST_BEAT = 0.1

_UNBOUNDED = Fault(
    "unbounded_age",
    "a record of unknown age: whoever tells its time in sent_us has to tell in opened_us, too, when it first heard the"
    " hub on that call; or no time at all",
)

#: Records that are grouped in one go.
_PAUSE_EVERY = 500


class _News:
    """Changes of one cluster on their way to all watchers: the newest of each identity."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = newest(changes)
        #: how many there were, of which these are the newest
        self.offered = len(changes)
        #: what a policy lets its clusters see is the same for all of them
        self._visible: dict[Policy, Mapping[Identity, Change]] = {}

    def visible(self, policy: Policy) -> Mapping[Identity, Change]:
        """What the clusters of a policy may see of them."""
        if policy.sees_all:
            return self.changes
        found = self._visible.get(policy)
        if found is None:
            found = self._visible[policy] = policy.visible(self.changes)
        return found


class _Watcher:
    """Somebody who watches: what waits for them, and how to wake the task that sends it."""

    def __init__(self, cluster_id: str, policy: Policy, *, spares_own: bool) -> None:
        self.cluster_id = cluster_id
        self._policy = policy
        self._spares_own = spares_own
        self.outbox = Outbox()
        self.something = trio.Event()

    def offer(self, changes: Sequence[Change]) -> None:
        """Changes of any clusters, the newest of each identity."""
        if self._spares_own:
            changes = without_cluster(changes, self.cluster_id)
        if not self._policy.sees_all:
            see = self._policy.may_see
            changes = [each for each in changes if cluster_of(each) == self.cluster_id or see(*each.identity[1:3])]
        if changes:
            self.outbox.offer(changes)
            self.something.set()

    def offer_newest(self, cluster_id: str, news: _News) -> None:
        """Changes of one cluster, as an outbox takes them that are for many."""
        if cluster_id == self.cluster_id:
            changes: Mapping[Identity, Change] = {} if self._spares_own else news.changes
        else:
            changes = news.visible(self._policy)
        if changes:
            offered = news.offered if changes is news.changes else len(changes)
            self.outbox.offer_newest(cluster_id, changes, offered)
            self.something.set()


class _Served:
    """A call that is being served: whose it is, and what ends it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.scope = trio.CancelScope()
        #: why the hub has ended it
        self.ended: RpcError | None = None

    def end(self, why: RpcError) -> None:
        """End it, and tell its caller why."""
        self.ended = why
        self.scope.cancel()


def _one_less(counts: Counter[str], cluster_id: str) -> None:
    counts[cluster_id] -= 1
    if not counts[cluster_id]:
        del counts[cluster_id]


class _Store(SampleTable):
    """The records of every cluster, and how many there are of each."""

    def __init__(self, settings: HubSettings) -> None:
        super().__init__(ttl=settings.ttl, tombstone_ttl=settings.ttl, silence_limit=settings.silence_limit)
        #: by cluster, how many records are held, and withdrawals remembered; no entry for none
        self.records: Counter[str] = Counter()
        self.tombstones: Counter[str] = Counter()

    def record_added(self, record: Capacity) -> None:
        self.records[record.cluster_id] += 1

    def record_removed(self, record: Capacity) -> None:
        _one_less(self.records, record.cluster_id)

    def tombstone_added(self, identity: Identity) -> None:
        self.tombstones[identity[0]] += 1

    def tombstone_removed(self, identity: Identity) -> None:
        _one_less(self.tombstones, identity[0])


class Hub:
    """One hub process.

    `settings`: the `[hub]` table. `trusted`: what it takes for proof; by default what the settings hold, and nobody is
    denied. `clock`: seconds, trio's own by default. Calls are served inside `run`; streams come from listeners
    (`listen`) or from anywhere else (`serve`). Raises ValueError where a secret is missing that its ways need."""

    def __init__(
        self,
        settings: HubSettings,
        *,
        trusted: Trusted | None = None,
        clock: Clock | None = None,
        metrics: FederationMetrics | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics if metrics is not None else FederationMetrics()
        self._trusted = trusted if trusted is not None else trusted_by(settings)
        if not self._trusted.secrets and any(way != "certificate" for way in self._trusted.accept):
            raise ValueError("a hub needs a secret")
        self._clock = clock if clock is not None else trio_clock()
        #: from when on the messages' own times count
        self._began = self._clock()
        self._store = _Store(settings)
        self._sessions = Sessions(silence_limit=settings.silence_limit, grace=settings.grace, forget_after=settings.ttl)
        self._policies = Policies(settings.policy)
        self._limiter = Limiter(settings.limits)
        # Both in the order of their coming: dicts, since a set's order differs from run to run.
        self._served: dict[_Served, None] = {}
        self._reports: dict[Session, _Served] = {}
        self._connections_refused = 0
        self._warned_at = -math.inf
        self._watchers: dict[_Watcher, None] = {}
        self._encoder = BroadcastEncoder()
        #: changes conflated for watchers that have left
        self._conflated = 0
        self.metrics.watchers(0)
        self.metrics.reporters(0)
        self.metrics.handshake_failed(0)
        for each in Cut:
            self.metrics.connection_cut(each, 0)
        self.metrics.queue("watchers", self._waiting, self._all_conflated)
        #: what was told of clusters that have proven themselves
        self._told: set[tuple[str, str]] = set()
        #: what was told of anybody else, the latest last
        self._told_of_strangers: dict[tuple[str, str], None] = {}
        self._lines_on_strangers = Allowance(_STRANGERS_LINES)
        self._lines_on_callers = Allowance(_CALLERS_LINES)
        self._server = FederationServer(
            self._report,
            self._watch,
            ConnectionSettings(
                keepalive=settings.keepalive, silence_limit=settings.silence_limit, stream_window=_REPORT_WINDOW
            ),
            first_call=settings.limits.first_message,
            cut=self._connection_cut,
        )

    def trust(self, trusted: Trusted) -> None:
        """Take something else for proof from now on. Calls that are open go on, whatever has proven them, but for those
        of whoever is denied now; the records of a cluster that is denied altogether are withdrawn. From the hub's own
        task, or before `run`."""
        before, self._trusted = self._trusted, trusted
        for served in list(self._served):
            if served.ended is None and is_denied(served.caller, trusted.denied):
                served.end(denied_error(served.caller, trusted.denied))
        self._withdraw(trusted.denied.clusters - before.denied.clusters)

    def _withdraw(self, clusters: frozenset[str]) -> None:
        """Withdraw what is held of these clusters, for good: it is not for them to say so any more."""
        if clusters.isdisjoint(self._store.records):
            return
        now = self._clock()
        gone: dict[str, list[Change]] = {}
        for record in self._store.fresh(now):
            if record.cluster_id in clusters:
                gone.setdefault(record.cluster_id, []).append(Withdrawal(record.identity, None))
        for cluster_id, withdrawals in gone.items():
            self._relay(cluster_id, self._store.apply(withdrawals, now))

    async def run(
        self,
        listeners: Sequence[trio.SocketListener] = (),
        tls: _Tls | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled; every call has ended then. `tls`: a context, or what is asked for one at each
        handshake; None for plain text."""
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

    def held(self) -> RegistryHeld:
        """What is kept now, without looking for what has run out."""
        held = self._store.held()
        return RegistryHeld(held["records"], held["tombstones"], held["instances"])

    def health(self) -> dict[str, Any]:
        """What it has to do, for `/readyz`."""
        return {
            "clusters": self._sessions.live_clusters(),
            "reporters": self._sessions.live(),
            "watchers": len(self._watchers),
            "records": self._store.held()["records"],
            "credentials": {
                session.cluster_id: served.caller.credential
                for session, served in sorted(self._reports.items(), key=lambda item: item[0].cluster_id)
            },
        }

    def _waiting(self) -> int:
        return sum(len(watcher.outbox) for watcher in self._watchers)

    def _all_conflated(self) -> int:
        return self._conflated + sum(watcher.outbox.conflated for watcher in self._watchers)

    # Connections.

    async def _accept(self, tls: _Tls | None, stream: trio.SocketStream) -> None:
        peer = peer_name(stream)
        address = peer.rpartition(":")[0]
        is_counted = self._limiter.open_connection(address)
        try:
            if is_counted:
                await self._serve_socket(tls, stream)
            else:
                await self._refuse_connection(tls, stream, address)
        except Exception:
            log.exception("connection_failed", peer=peer)
        finally:
            if is_counted:
                self._limiter.close_connection(address)

    async def _refuse_connection(self, tls: _Tls | None, stream: trio.SocketStream, address: str) -> None:
        """Tell a connection that it is one too many: its calls are answered so, for a moment. Even that costs memory,
        so it is done for a few at a time."""
        limit = self.settings.limits.connections
        if trio.current_time() >= self._warned_at + _WARNING_INTERVAL:
            self._warned_at = trio.current_time()
            log.warning("connection_refused", peer=address, connections=limit)
        self.metrics.call_refused(ResourceExhausted.status)
        if self._connections_refused >= _MOST_REFUSED:
            await trio.aclose_forcefully(stream)
            return
        self._connections_refused += 1
        try:
            await self._serve_socket(
                tls,
                stream,
                ResourceExhausted(
                    f"{address} has {limit} connections open, and more are not served; end some, or raise connections "
                    "in the hub's [hub.limits]"
                ),
            )
        finally:
            self._connections_refused -= 1

    async def _serve_socket(
        self,
        tls: _Tls | None,
        stream: trio.SocketStream,
        refusal: RpcError | None = None,
    ) -> None:
        if tls is None:
            await self._serve(stream, refusal)
            return
        peer = peer_name(stream)
        try:
            over_tls = await accept_tls(stream, tls if isinstance(tls, ssl.SSLContext) else tls(), peer)
        except Unavailable as error:
            self.metrics.handshake_failed()
            # Whoever scans the port comes again and again.
            tell = log.info if self._first_of_strangers(peer.rpartition(":")[0], error.message) else log.debug
            tell("handshake_failed", peer=peer, error=error.message)
            return
        await self._serve(over_tls, refusal)

    async def _serve(self, stream: trio.abc.Stream, refusal: RpcError | None = None) -> None:
        try:
            await self._server.serve(stream, refusal)
        except Exception:
            # A fault of ours that one peer has hit: it must not take the hub away from the others.
            log.exception("connection_failed", peer=peer_name(stream))

    def _connection_cut(self, peer: str, cut: Cut, reason: str) -> None:
        """A connection was ended because of what its peer did."""
        self.metrics.connection_cut(cut)
        tell = log.info if self._first_of_strangers(peer.rpartition(":")[0], cut) else log.debug
        tell("connection_cut", peer=peer, reason=cut, error=reason)

    async def _forget(self) -> None:
        """Free what has run out, also while nothing comes in."""
        while True:
            await trio.sleep(self.settings.ttl / 4)
            now = self._clock()
            self._store.expire(now)
            self._sessions.forget(now)
            self._limiter.forget(now)

    @contextmanager
    def _serving(self, call: IncomingReport | IncomingWatch) -> Iterator[_Served]:
        """Let a call in, or refuse it, and keep it until it ends. Whatever ends it against its will is raised."""
        try:
            caller = identify(call.metadata, call.names, self._trusted)
        except RpcError as error:
            self._refuse_stranger(call, error)
            raise
        try:
            self._limiter.open_call(caller.cluster_id)
        except RpcError as error:
            self._refuse(call, caller, error)
            raise
        self._look_for_mistakes(call, caller.cluster_id, self._first_time)
        served = _Served(caller)
        self._served[served] = None
        try:
            with call.let_in(), served.scope:
                yield served
        except (ResourceExhausted, DeadlineExceeded) as error:
            self._tell_ended(call, caller, error)
            raise
        finally:
            del self._served[served]
            self._limiter.close_call(caller.cluster_id)
        if served.scope.cancelled_caught and served.ended is not None:
            self._tell_ended(call, caller, served.ended)
            raise served.ended

    def _tell_ended(self, call: IncomingReport | IncomingWatch, caller: Caller, error: RpcError) -> None:
        if isinstance(error, AlreadyExists):
            return  # replaced, of which the end of its report tells
        self.metrics.call_refused(error.status)
        tell = log.info if self._first_time(caller.cluster_id, f"ended:{error.status}") else log.debug
        tell("call_ended", cluster=caller.cluster_id, peer=call.peer, status=error.status, error=error.message)

    async def _first_message(self, receive: Callable[[], Awaitable[_M]]) -> _M:
        limit = self.settings.limits.first_message
        with trio.move_on_after(limit):
            return await receive()
        raise DeadlineExceeded(
            f"this call had no message within {limit:g} s; send one, or raise first_message in the hub's [hub.limits]"
        )

    def _refuse_stranger(self, call: IncomingReport | IncomingWatch, error: RpcError) -> None:
        """Count the refusal of a call whose cluster is not proven, or is denied; a line for the first of its kind, as
        a refused agent comes again and again, and no more lines than anybody can read."""
        self.metrics.call_refused(error.status)
        cluster_id = without_macs(call.metadata.get(CLUSTER_KEY, ""))[:63]
        tell = log.info if self._first_of_strangers(cluster_id, error.message) else log.debug
        tell("call_refused", cluster=cluster_id, peer=call.peer, status=error.status, error=error.message)
        self._look_for_mistakes(call, cluster_id, self._first_of_strangers)

    def _look_for_mistakes(
        self, call: IncomingReport | IncomingWatch, cluster_id: str, first_time: Callable[[str, str], bool]
    ) -> None:
        """Warn of a credential in the wrong place, also where it was another one that counted."""
        mistake = mixed_up(call.metadata, self._trusted)
        if mistake is not None and first_time(cluster_id, "mixed_up"):
            log.warning("credential_mixed_up", cluster=cluster_id, peer=call.peer, error=mistake)

    def _refuse(self, call: IncomingReport | IncomingWatch, caller: Caller, error: RpcError) -> None:
        """The same of one whose cluster is known."""
        self.metrics.call_refused(error.status)
        tell = log.info if self._first_time(caller.cluster_id, error.status) else log.debug
        tell("call_refused", cluster=caller.cluster_id, peer=call.peer, status=error.status, error=error.message)

    # Reports.

    async def _report(self, call: IncomingReport) -> None:
        with self._serving(call) as served:
            caller = served.caller
            policy = self._policies.of(caller.cluster_id)
            self._limiter.message(caller.cluster_id, 0, self._clock())
            session = self._open_session(call, served)
            said_goodbye = False
            try:
                self._show_reporters()
                self._tell_of_callers(
                    "reporter_came",
                    cluster=caller.cluster_id,
                    instance=caller.instance,
                    peer=call.peer,
                    credential=caller.credential,
                )
                accepted_at = self._clock()
                waits = Waits(accepted_at)
                await call.accept()
                message = await self._first_message(call.receive)
                while message is not None:
                    if served.ended is not None:
                        # In this very moment, when it had been woken already: what it says does not count any more.
                        # Its scope is cancelled, so this is where it ends, as it would have anywhere else.
                        await trio.lowlevel.checkpoint()
                    now = self._clock()
                    # A row that names an origin costs as much as a record.
                    self._limiter.message(caller.cluster_id, len(message.items) + len(message.origins), now)
                    if not self._sessions.is_current(session):
                        # Replaced in this very moment: late data changes nothing.
                        raise _replaced(caller.cluster_id)
                    may_count = waits.is_bounded(message.sent_us, message.opened_us)
                    waited = waits.waited(message.sent_us, message.opened_us, now)
                    if waited >= self.settings.ttl:
                        late = Late(
                            f"what you tell is {waited:.0f} s on its way, and counts for {self.settings.ttl:g} s only"
                        )
                        call.end_connection(late.message, Cut.LATE)
                        raise late
                    if may_count:
                        for part in parts_of(message, TAKEN_AT_ONCE):
                            self._take(caller.cluster_id, policy, part, now, waited)
                            if part is not message:
                                # One that says very much must not hold up the others.
                                await trio.lowlevel.checkpoint()
                                if not self._sessions.is_current(session):
                                    raise _replaced(caller.cluster_id)
                    elif now > accepted_at + self.settings.limits.first_message:
                        # Who had not heard of us tells it once more when it has. By now it should have.
                        self._refused(caller.cluster_id, [_UNBOUNDED] * len(message.items))
                    message = await call.receive()
                said_goodbye = True
                await call.answer()
            finally:
                del self._reports[session]
                replaced = not self._sessions.is_current(session)
                self._sessions.close(session, self._clock(), said_goodbye=said_goodbye)
                self._show_reporters()
                self._tell_of_callers(
                    "reporter_left",
                    cluster=caller.cluster_id,
                    peer=call.peer,
                    said_goodbye=said_goodbye,
                    replaced=replaced,
                )

    def _take(self, cluster_id: str, policy: Policy, message: RecordMessage, now: float, waited: float) -> None:
        """Take in what a cluster says, as far as it may say so, and pass on what is news. `waited`: seconds that the
        message was on its way."""
        received = changes_of(message, now - waited, cluster_id)
        if received.refused:
            self._refused(cluster_id, received.refused)
        if policy.unrestricted:
            self._relay(cluster_id, self._store.apply(received.changes, now))
            return
        store = self._store
        store.expire(now)
        news: list[Change] = []
        for step in policy.steps(received.changes):
            admitted = policy.admit(
                step, store.records[cluster_id], store.holds, store.tombstones[cluster_id], store.remembers
            )
            if admitted.breaches:
                self._breached(cluster_id, admitted.breaches)
            news += store.apply(admitted.changes, now)
        self._relay(cluster_id, news)

    def _open_session(self, call: IncomingReport, served: _Served) -> Session:
        # Sessions think in the hub's clock, connections in trio's; what counts is how long ago it was.
        def heard() -> float:
            return self._clock() - (trio.current_time() - call.last_received)

        caller = served.caller
        hidden = self._sessions.hides(caller.cluster_id, self._clock())
        try:
            opened = self._sessions.open(
                caller.cluster_id, caller.instance, call.peer, heard, self._clock(), caller.uid
            )
        except AlreadyExists as error:
            self._refuse(call, caller, error)
            raise
        for replaced in opened.replaced:
            self._reports[replaced].end(_replaced(replaced.cluster_id))
        self._reports[opened.session] = served
        if opened.formerly is not None and caller.way == Part.SHARED:
            # It is the same cluster, and must not count twice until its old records have run out. A uid is not proven,
            # though: who cannot speak for that id as well, as everybody can who has the shared secret, may not say so.
            self._withdraw(frozenset([opened.formerly]))
        if hidden:
            # Whoever came to watch while it was gone was not shown its records.
            now = self._clock()
            again = [record for record in self._store.fresh(now) if record.cluster_id == caller.cluster_id]
            self._relay(caller.cluster_id, again)
        return opened.session

    def _show_reporters(self) -> None:
        self.metrics.reporters(self._sessions.live())
        self.metrics.reporters_by_credential(Counter(served.caller.way for served in self._reports.values()))

    def _relay(self, cluster_id: str, news: Sequence[Change]) -> None:
        """Tell everybody who watches, and is not spared it, of news of one cluster."""
        if news:
            told = _News(news)
            for watcher in self._watchers:
                watcher.offer_newest(cluster_id, told)

    def _refused(self, cluster_id: str, faults: Sequence[Fault]) -> None:
        for reason, count in Counter(fault.reason for fault in faults).items():
            self.metrics.record_dropped(f"cluster:{cluster_id}", reason, count)
        for fault in faults:
            if self._first_time(cluster_id, fault.reason):
                log.warning("record_dropped", cluster=cluster_id, reason=fault.reason, detail=fault.detail, told="once")

    def _breached(self, cluster_id: str, breaches: Mapping[str, Breach]) -> None:
        for reason, breach in breaches.items():
            self.metrics.policy_breach(cluster_id, reason, breach.count)
            if self._first_time(cluster_id, reason):
                log.warning("policy_breach", cluster=cluster_id, reason=reason, detail=breach.detail, told="once")

    def _tell_of_callers(self, event: str, **details: object) -> None:
        """Say who comes and goes; of more than anybody can read, the rest only to who wants to read everything."""
        tell = log.info if self._lines_on_callers.take(1, self._clock()) else log.debug
        tell(event, **details)

    def _first_time(self, cluster_id: str, what: str) -> bool:
        """Whether something about a cluster is told for the first time; bounded, as ids may be anything where they are
        not proven."""
        if (cluster_id, what) in self._told or len(self._told) >= _MOST_TOLD:
            return False
        self._told.add((cluster_id, what))
        return True

    def _first_of_strangers(self, name: str, what: str) -> bool:
        """Whether something about an id that nobody has proven, or an address, is told for the first time in a while.
        Their lines take nothing from those about others."""
        told = self._told_of_strangers
        if (name, what) in told or not self._lines_on_strangers.take(1, self._clock()):
            return False
        while len(told) >= _MOST_TOLD:
            del told[next(iter(told))]
        told[name, what] = None
        return True

    # Watches.

    async def _watch(self, call: IncomingWatch) -> None:
        with self._serving(call) as served:
            caller = served.caller
            request = await self._first_message(call.request)
            heard = self._clock()
            self._limiter.message(caller.cluster_id, 0, self._clock())
            policy = self._policies.of(caller.cluster_id)
            watcher = _Watcher(caller.cluster_id, policy, spares_own=request.spare_own_cluster)
            # Both in one step: nothing that comes in can fall between the snapshot and what follows it.
            self._watchers[watcher] = None
            watcher.offer(self._everything())
            self.metrics.watchers(len(self._watchers))
            self._tell_of_callers(
                "watcher_came", cluster=caller.cluster_id, peer=call.peer, credential=caller.credential
            )
            try:
                beat = max(_QUICKEST_BEAT, request.beat_ms / 1000) if request.beat_ms else math.inf
                if request.beat_ms:
                    # A first word, as short as can be, so that nothing is quicker; for who does not look for it, it
                    # would pass for an empty snapshot.
                    opened_us = microseconds(heard - self._began)
                    await self._send(call, EncodedBroadcast(), self._clock(), opened_us, self._sessions.live())
                if not watcher.outbox:
                    # A snapshot all the same, so that the watcher knows that it has everything there is.
                    await self._send(call, EncodedBroadcast(), self._clock())
                while True:
                    if not watcher.outbox:
                        watcher.something = trio.Event()
                        with trio.move_on_after(beat):
                            await watcher.something.wait()
                    now = self._clock()
                    changes = watcher.outbox.take(AT_ONCE)
                    messages = self._encoder.messages(changes, now) if changes else (EncodedBroadcast(),)
                    for message in messages:
                        await self._send(call, message, now)
            finally:
                del self._watchers[watcher]
                self._conflated += watcher.outbox.conflated
                self.metrics.watchers(len(self._watchers))
                self._tell_of_callers(
                    "watcher_left", cluster=caller.cluster_id, peer=call.peer, conflated=watcher.outbox.conflated
                )

    async def _send(
        self, call: IncomingWatch, message: EncodedBroadcast, now: float, opened_us: int = 0, clusters: int = 0
    ) -> None:
        """Send a message whose ages are those of `now`; what it waits from here on, the watcher finds out. Ends a watch
        that takes none for a whole TTL, in which everything of it has run out. Whoever is cut off gets what is there
        when it comes back."""
        limit = self.settings.ttl
        with trio.move_on_after(limit) as scope:
            await call.send(message.timed(microseconds(now - self._began), opened_us, clusters))
        if scope.cancelled_caught:
            raise Unavailable(f"this watch took no message for {limit:g} s; open it again to get what is there now")

    def _everything(self) -> list[Change]:
        """What a new watcher is told first: also withdrawals, which it may have missed while it was not connected."""
        now = self._clock()
        return [*self._store.withdrawals(now), *self._shown(now)]

    def _shown(self, now: float) -> Iterator[Capacity]:
        """Records that newcomers are told: those of a reporter that has vanished only during the grace."""
        return (record for record in self._store.fresh(now) if not self._sessions.hides(record.cluster_id, now))


def trusted_by(settings: HubSettings) -> Trusted:
    """What a hub takes for proof by its settings alone, without the files that are read again."""
    secrets = () if settings.secret is None else (settings.secret.reveal(),)
    cluster_san = settings.tls.cluster_san if settings.tls is not None else None
    return Trusted(settings.accept, secrets, cluster_san=cluster_san)


def _replaced(cluster_id: str) -> AlreadyExists:
    return AlreadyExists(f"cluster {cluster_id!r} is reported by a newer call")
