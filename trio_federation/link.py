"""Keeps one hub connected: dials, runs the report and the watch call on the connection, and tries again what fails. The
only place that decides what follows an error. One link's failure is never another's."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NoReturn

import structlog
import trio

from trio_federation.clock import Clock
from trio_federation.errors import (
    AlreadyExists,
    Late,
    PermissionDenied,
    RpcError,
    TooManyPings,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from trio_federation.health import HubHealth, Tell
from trio_federation.identity import OwnIdentity
from trio_federation.logs import tell_failure
from trio_federation.metrics import FederationMetrics
from trio_federation.reporter import Reporter
from trio_federation.retry import FIRST, Backoff, failures_of, first_window, share
from trio_federation.rpc import CONNECT_DEADLINE, ConnectionSettings, Cut, Dialer, HubConnection, ReportCall, WatchCall
from trio_federation.standing import Standing
from trio_federation.watcher import Watcher

log = structlog.get_logger("trio_federation.link")

#: A hub that forbids our pings gets them this many times less often, each time that it says so, up to the interval that
#: every gRPC server allows.
_CALMER = 2
_CALMEST = 330.0
#: Seconds after which a call that the hub has not objected to counts as working: hubs need not say that it does.
_OBJECTION_TIME = 2.0
#: The part of the clusters that report to a hub of which an agent has to know to know its own place among them.
_MOST_OF = 0.9


class _Trouble:
    """What goes wrong with one thing that is tried again and again: when to try next, and what the log and the hub's
    health are told of it. `first`, `part`: as for a Backoff."""

    def __init__(
        self,
        health: HubHealth,
        what: str,
        clock: Clock,
        generator: random.Random,
        first: Callable[[], float],
        part: Callable[[], tuple[float, float]],
    ) -> None:
        self.what = what
        #: whether a failure was worth a line since this was last reset
        self.told = False
        self._health = health
        self._clock = clock
        self._backoff = Backoff(generator, first=first, part=part)
        #: Trio's time from which it works; infinite while it does not
        self._works_since = math.inf

    def begin(self) -> None:
        """Another try: it does not work yet."""
        self._works_since = math.inf

    def delay(self, failure: RpcError) -> float:
        """Seconds until the next try."""
        # What was tried for long, and never worked, has not lived.
        delay = self._backoff.delay(failure, max(0.0, trio.current_time() - self._works_since))
        now = self._clock()
        noted = self._health.failed(self.what, failure.message, now, kind=failure.kind)
        self._health.next_try = now + delay
        event = "hub_failed"
        if isinstance(failure, Unimplemented):
            event = "hub_is_older"
            if noted.tell is Tell.SUMMARY:  # it will be older tomorrow, too
                noted = noted._replace(tell=Tell.AGAIN)
        details = {"hub": self._health.name, "call": self.what, "error": failure.message, "retry_in": round(delay, 1)}
        tell_failure(log, noted, event, details)
        self.told = self.told or noted.tell is not Tell.AGAIN
        return delay

    def worked(self) -> int:
        """It works now. Returns how many failures that ends."""
        self._works_since = min(self._works_since, trio.current_time())
        return self._health.worked(self.what, self._clock()).in_a_row

    def over(self) -> int:
        """It is no trouble any more. Returns as `worked`."""
        self._works_since = min(self._works_since, trio.current_time())
        return self._health.over(self.what, self._clock()).in_a_row


class HubLink:
    """One hub, for as long as the agent lives.

    `name`: the hub as the configuration names it. `dial`: opens a stream to it. `identity`: what each call says.
    `clock`: seconds. `standing`: told what the hub says of our reports. `clusters`: which clusters are known, which are
    about those that will come back together with us when the hub has been away."""

    def __init__(
        self,
        name: str,
        dial: Dialer,
        reporter: Reporter,
        watcher: Watcher,
        *,
        identity: OwnIdentity,
        keepalive: float,
        silence_limit: float,
        clock: Clock,
        generator: random.Random,
        metrics: FederationMetrics,
        standing: Standing,
        clusters: Callable[[], Collection[str]],
    ) -> None:
        self.name = name
        self.health = HubHealth(name, clock())
        self.reporter = reporter
        self.watcher = watcher
        self._dial = dial
        self._identity = identity
        identity.changed.append(self._introduce_again)
        #: how often our credential had been renewed when this connection was dialled
        self._renewals = 0
        #: of the open report call, where there is one
        self._introduction: trio.CancelScope | None = None
        self._keepalive = keepalive
        self._silence_limit = silence_limit
        #: whether the log has said that the hub forbids our pings
        self._told_to_calm = False
        self._clock = clock
        self._metrics = metrics
        self._standing = standing
        #: Trio's time from which the hub's next word means that it takes the open report call; infinite where there is
        #: none, or the hub has said what it does
        self._takes_reports_from = math.inf
        #: whether a call has worked on this connection, and whether that could be said of an earlier one, which broke
        self._worked = False
        self._broke = False
        #: how a call on this connection was refused for who we are
        self._refused: RpcError | None = None
        #: records that were sent on a report call which the hub has not accepted yet
        self._unheeded = 0
        #: the calls that have ever worked, and how often connecting failed before they did this time
        self._seen_working: set[str] = set()
        self._failures_before = 0
        self._stopping = trio.Event()
        self._stopped_at = 0.0

        def first() -> float:
            # A policy may show us only some of those who will come back together with us.
            return first_window(max(len(clusters()), watcher.clusters))

        def part() -> tuple[float, float]:
            known = clusters()
            # A small fleet needs none. Who is shown only some of the others does not know its own; those without
            # records are known to nobody.
            if first() <= FIRST or len(known) < _MOST_OF * watcher.clusters:
                return 0.0, 1.0
            return share(identity.cluster_id, known, name)

        self._connecting = _Trouble(self.health, "connection", clock, generator, first, part)
        self._reporting = _Trouble(self.health, "report", clock, generator, first, part)
        self._watching = _Trouble(self.health, "watch", clock, generator, first, part)
        #: set when the hub has taken the withdrawal of everything, or nothing more can be done about it
        self.said_goodbye = trio.Event()
        for call in (self._reporting, self._watching):  # exported from the start, also of a hub that is never reached
            metrics.hub_connected(name, call.what, False)
        standing.lost(name)
        metrics.queue(f"hub:{name}", lambda: reporter.waiting, lambda: reporter.conflated)

    async def run(self) -> NoReturn:
        """Keep the hub connected until cancelled."""
        while True:
            self._worked = False
            self._refused = None
            began = trio.current_time()
            self._connecting.begin()
            try:
                await self._connect_once()
            except (RpcError, BaseExceptionGroup) as error:
                failure = _most_telling(failures_of(error, RpcError))
                if type(failure) is Unavailable and self._refused is not None and not self._worked:
                    # A hub ends a connection of which it takes nothing; why it takes nothing tells more.
                    failure = self._refused
            finally:
                self._stands_now(self._standing.lost)
            self._broke = self._broke or self._worked
            if isinstance(failure, TooManyPings):
                self._calm_down()
            await self._wait(self._connecting, failure, began)

    async def _wait(self, trouble: _Trouble, failure: RpcError, began: float) -> None:
        """Wait until it is time for another try of something that began at `began`. When the agent stops, there is one
        more at once, to say goodbye, and none after that."""
        if self._stopping.is_set() and (began >= self._stopped_at or trouble is self._watching):
            if trouble is not self._watching:
                self.said_goodbye.set()
            await trio.sleep_forever()
        with trio.move_on_after(trouble.delay(failure)):
            await self._stopping.wait()

    async def _connect_once(self) -> NoReturn:
        """One connection, from dialling to its end, which is always an RpcError, alone or in a group."""
        self._renewals = self._identity.renewals()
        stream = await self._dial()
        settings = ConnectionSettings(keepalive=self._keepalive, silence_limit=self._silence_limit)
        async with trio.open_nursery() as nursery:
            connection = await HubConnection.open(
                nursery,
                stream,
                peer=self.name,
                metadata=self._identity.metadata,
                settings=settings,
                traffic=self._traffic,
            )
            try:
                await connection.wait_heard(min(CONNECT_DEADLINE, self._silence_limit))
                async with trio.open_nursery() as calls:
                    calls.start_soon(self._keep, self._reporting, connection, self._report)
                    calls.start_soon(self._keep, self._watching, connection, self._watch)
                    raise await connection.wait_closed()
            finally:
                await connection.aclose()
        raise AssertionError("a connection ended without an error")

    async def _keep(
        self, trouble: _Trouble, connection: HubConnection, use_call: Callable[[HubConnection], Awaitable[None]]
    ) -> None:
        """Keep one call open on a connection. When it is the connection that has failed, the trouble is another's."""
        while True:
            began = trio.current_time()
            trouble.begin()
            try:
                await use_call(connection)
                return  # only a report ends well, when the agent stops
            except (RpcError, BaseExceptionGroup) as error:
                failure = _most_telling(failures_of(error, RpcError))
                if trouble is self._reporting:
                    refused = isinstance(failure, AlreadyExists)
                    self._stands_now(self._standing.refused if refused else self._standing.lost)
            finally:
                self._show(trouble, False)
            limit = self.watcher.silence_limit
            if self.watcher.hub_beats and trio.current_time() >= connection.transport.last_received + limit:
                # Where pings are rare, the connection's own limit is long. The signs of life on a watch come as often
                # as ever: without them, and without any other byte, it is the line that is dead.
                connection.transport.abort(f"silent for {limit:g} s", Cut.SILENT)
            if connection.transport.is_closing() or isinstance(failure, Late):
                raise failure
            if isinstance(failure, Unauthenticated | PermissionDenied):
                self._refused = failure
                if self._renewals != self._identity.renewals():
                    # A certificate is shown when a connection begins, so a new one needs a new connection.
                    raise failure
            await self._wait(trouble, failure, began)

    async def _report(self, connection: HubConnection) -> None:
        while True:
            self._unheeded = 0
            with trio.CancelScope() as self._introduction:
                async with connection.report() as call, trio.open_nursery() as nursery:
                    # A hub answers before the end only to refuse, and that has to be noticed while nothing is being
                    # sent.
                    nursery.start_soon(self._wait_answered, call)
                    await self.reporter.report(call, self._reported)
                self.said_goodbye.set()
                return

    def _introduce_again(self) -> None:
        """Who we are is known better now: an open report call is replaced by another one that says so."""
        if self._introduction is not None and not self._stopping.is_set():
            self._introduction.cancel()

    async def _wait_answered(self, call: ReportCall) -> None:
        if not await self._wait_accepted(self._reporting, call):
            # Nobody objects on a line that has gone dead, in one direction or both; and who was refused a moment ago
            # must not pass for the reporter then. A hub that still talks to us after the silence limit hears us.
            self._takes_reports_from = trio.current_time() + self._silence_limit
            await call.wait_accepted()
        self.reporter.accepted()
        self._stands_now(self._standing.accepted)
        await call.wait_answered()
        if not self.reporter.stopping:
            raise Unavailable("the hub ended the report", peer=self.name)

    async def _watch(self, connection: HubConnection) -> None:
        async with connection.watch(self.watcher.request) as call, trio.open_nursery() as nursery:
            nursery.start_soon(self.watcher.notice_silence, call)
            await self._wait_accepted(self._watching, call)
            await self.watcher.watch(call, self._received, self._waited)

    async def _wait_accepted(self, trouble: _Trouble, call: ReportCall | WatchCall) -> bool:
        """Tell log and metrics that a call works: the hub says so, or, if it is one that does not, raises no
        objection. Returns whether the hub has said so."""
        limit = self.watcher.silence_limit
        given_up_at = trio.current_time() + limit
        while True:
            with trio.move_on_at(min(trio.current_time() + _OBJECTION_TIME, given_up_at)) as waiting:
                await call.wait_accepted()
            # A hub that gives signs of life also says at once that it takes a call.
            if not waiting.cancelled_caught or not self.watcher.hub_beats:
                break
            if trio.current_time() >= given_up_at:
                raise Unavailable(f"the {trouble.what} was not answered for {limit:g} s", peer=self.name)
        if trouble is self._reporting and not waiting.cancelled_caught:
            self._unheeded = 0  # what was told before this is told again
        self._worked = True
        if self._broke:
            self._broke = False
            self._metrics.hub_reconnected(self.name)
        self._failures_before = self._connecting.over() or self._failures_before
        failures = trouble.worked() + self._failures_before
        # Of a hub that comes and goes, what was not told as lost is not told as found.
        told = any(each.told for each in (self._connecting, self._reporting, self._watching))
        tell = log.info if told or trouble.what not in self._seen_working else log.debug
        self._seen_working.add(trouble.what)
        tell("hub_works", hub=self.name, call=trouble.what, failures_before=failures)
        self.health.next_try = None
        self._show(trouble, True)
        if trouble is self._reporting:
            self._reported(0)
        if self.health.state == "connected":
            self._failures_before = 0
            for each in (self._connecting, self._reporting, self._watching):
                each.told = False
        return not waiting.cancelled_caught

    def _stands_now(self, stands: Callable[[str], None]) -> None:
        """Say what the hub says of our reports: `stands` is how."""
        self._takes_reports_from = math.inf
        stands(self.name)

    def _show(self, trouble: _Trouble, up: bool) -> None:
        """Say whether a call is up."""
        self.health.stream(trouble.what, up, self._clock())
        self._metrics.hub_connected(self.name, trouble.what, up)

    def _traffic(self, sent: int, received: int) -> None:
        if received:
            if trio.current_time() >= self._takes_reports_from:
                self._stands_now(self._standing.accepted)
            if self.health.any_up:
                self.health.last_success = self._clock()
        self._metrics.hub_bytes(self.name, sent, received)

    def _received(self, records: int) -> None:
        now = self._clock()
        self.health.last_success = self.health.last_batch = now
        self._metrics.hub_received(self.name, records, now)

    def _waited(self, seconds: float) -> None:
        self._metrics.hub_batch_wait(self.name, seconds)

    def _reported(self, records: int) -> None:
        """So many records were sent. They count once the hub has not objected to the call."""
        self._unheeded += records
        if self.health.is_up("report"):
            self._metrics.hub_reported(self.name, self._unheeded)
            self._unheeded = 0

    def stop(self) -> None:
        """The agent stops: the hub is told that everything is withdrawn, on an open call, or in one more try where
        there is none. `said_goodbye` tells the end of that; it is set at once where the hub was never told anything."""
        self._stopped_at = trio.current_time()
        self._stopping.set()
        self.reporter.stop()
        if not (self.reporter.reporting or self.reporter.has_reported):
            self.said_goodbye.set()

    def _calm_down(self) -> None:
        self._keepalive = min(self._keepalive * _CALMER, _CALMEST)
        self._silence_limit = max(self._silence_limit, self._keepalive * 2)
        tell = log.debug if self._told_to_calm else log.warning
        tell("hub_forbids_pings", hub=self.name, keepalive=self._keepalive, silence_limit=self._silence_limit)
        self._told_to_calm = True


def _most_telling(failures: Sequence[RpcError]) -> RpcError:
    """Of failures that came together: a refusal tells more than the end of the connection that follows it."""
    return next((failure for failure in failures if type(failure) is not Unavailable), failures[0])
