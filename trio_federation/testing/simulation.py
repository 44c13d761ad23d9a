"""A whole federation in memory: real agents, real hubs, the real gRPC stack over in-memory links. Meant for trio's
MockClock (`autojump_clock`), where an hour passes in moments; on a real clock it runs in real time. Here it is put
together, and what is done to it as a whole; what a network, a hub and a cluster are is in rooms of their own. Nothing
here decides what is right; that is up to tests, and to the invariants that they switch on."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, TypeVar

import msgspec
import trio
from trio.testing import MockClock

from trio_federation.capacity import Capacity, Change, same_value
from trio_federation.config import Endpoint, Federation, HubSettings, Secret
from trio_federation.identity import call_metadata
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import HubConnection, MemoryLink, open_bridge
from trio_federation.testing.clusters import SECRET, AgentProcess, SimulatedCluster, credential_for
from trio_federation.testing.eventlog import EventLog
from trio_federation.testing.hubs import SimulatedHub
from trio_federation.testing.invariants import Invariant, InvariantBroken
from trio_federation.testing.ledger import Ledger, Statement
from trio_federation.testing.network import HubEnd, OtherHub, Route, tell_carried
from trio_federation.testing.scheduling import seeded_scheduling

T = TypeVar("T")

#: seconds of its own time after which a simulated federation is given up
LONGEST = 7200.0
#: seconds between two looks of `settle` at what is known where
_GLANCE = 0.25


class Simulation:
    """What `simulated_federation` gives.

    `settings`: those of every agent; `hub_settings`: of every hub. `seed`: everything that is drawn by lot follows from
    it. `nursery`: where agents and hubs live."""

    def __init__(
        self,
        settings: Federation,
        hub_settings: HubSettings,
        seed: int,
        nursery: trio.Nursery,
        log: EventLog,
        invariants: Sequence[Invariant],
    ) -> None:
        self.settings = settings
        self.hub_settings = hub_settings
        self.seed = seed
        self.nursery = nursery
        self.log = log
        self.hubs: list[SimulatedHub] = []
        #: hubs of the test's own making
        self.other_hubs: list[OtherHub] = []
        self.clusters: dict[str, SimulatedCluster] = {}
        #: Trio's time at which it began
        self.began = trio.current_time()
        self.invariants = list(invariants)
        #: what is true, for the invariants; None where there are none
        self.ledger: Ledger | None = None
        if self.invariants:
            # What a source has said may be held, or sit at a hub, and be told after that.
            self.ledger = Ledger(self, remembered=settings.ttl + hub_settings.ttl + 2 * settings.silence_limit)
        #: the first invariant that did not hold, or what has gone wrong in one
        self.broken: Exception | None = None
        #: how many lines the event log had then; what follows is how the federation ends
        self.broken_at_line: int | None = None

    def every_hub(self) -> Iterator[HubEnd]:
        """The hubs, in the order of their names."""
        yield from self.hubs
        yield from self.other_hubs

    def generator(self, *names: str) -> random.Random:
        """A generator of its own for whoever is called so, the same in every run with the same seed."""
        return random.Random("/".join([str(self.seed), *names]))

    def add(self, name: str, *, cluster_id: str | None = None) -> SimulatedCluster:
        """One more cluster, not started yet."""
        cluster = self.clusters[name] = SimulatedCluster(name, cluster_id or name, self)
        return cluster

    def __getitem__(self, name: str) -> SimulatedCluster:
        return self.clusters[name]

    # Waiting.

    async def settle(self) -> None:
        """Until every source was asked again, and every live link has carried the answer: until each cluster that runs
        knows the same of every other as that one itself, as far as a healthy way leads from the one to the other. For
        one round of reports at least, and for no longer than two resyncs and the longest backoff take."""
        await trio.sleep(self.settings.report_interval + 1.0)
        limit = 2 * self.settings.resync_interval + 10.0 + 4 * self._longest_transit()
        with trio.move_on_after(limit):
            # Looked at now and then, as what is waited for is spread over every registry.
            while not self._agree():  # noqa: ASYNC110
                await trio.sleep(_GLANCE)

    def _longest_transit(self) -> float:
        return max((route.longest_transit for route in self._routes()), default=0.0)

    def _agree(self) -> bool:
        running = [cluster for cluster in self.clusters.values() if cluster.is_running]
        # Each registry is looked at once, whatever the number of those that are to agree with it.
        views = [(cluster, _by_cluster(cluster.registry.snapshot())) for cluster in running]
        return all(
            _same(known.get(of.cluster_id, []), truth.get(of.cluster_id, []))
            for of, truth in views
            for observer, known in views
            if observer is not of and observer.cluster_id != of.cluster_id and self.connected(of, observer)
        )

    def connected(self, one: SimulatedCluster, other: SimulatedCluster) -> bool:
        """Whether a healthy way leads from one cluster to another, over a hub that is up."""
        return any(hub.is_up and one.routes[hub.name].healthy and other.routes[hub.name].healthy for hub in self.hubs)

    # Faults.

    def partition(
        self,
        name: str,
        *,
        hub: int | None = None,
        one_way: Literal["to_hub", "to_cluster"] | None = None,
        silently: bool = False,
    ) -> None:
        """The cluster's connections break, and it cannot connect again until `heal`: to any hub, or to that one.

        `silently`: who dials gets no answer, instead of a refusal. `one_way`: nothing breaks and nobody is told; what
        is said in this direction does not arrive before `heal`. Raises ValueError for both at once."""
        if one_way is not None and silently:
            raise ValueError("a partition one way tells nobody anything; leave out silently")
        for route in self._routes(name, hub):
            if one_way is not None:
                route.hold(to_hub=one_way == "to_hub", to_cluster=one_way == "to_cluster")
            else:
                route.partition(silently=silently)

    def heal(self, name: str, *, hub: int | None = None) -> None:
        """The network of the cluster is as it was at first, to all hubs or to one: no partition, no delay, nothing
        held, and nothing that breaks now and then. A machine that is suspended stays so."""
        for route in self._routes(name, hub):
            route.heal()

    def black_hole(self, name: str, *, hub: int | None = None) -> None:
        """What the cluster and its hubs say to each other stays on its way until `heal`, and nobody is told."""
        for route in self._routes(name, hub):
            route.hold()

    def cut(self, name: str, *, hub: int | None = None) -> None:
        """The cluster's connections break; it can connect again at once."""
        for route in self._routes(name, hub):
            route.cut()

    def delay(self, name: str, seconds: float, *, jitter: float = 0.0, hub: int | None = None) -> None:
        """What travels between the cluster and its hubs, or one of them, takes so many seconds each way, and up to
        `jitter` more, until `heal`. Bytes do not overtake each other, as on TCP."""
        for route in self._routes(name, hub):
            route.delay(seconds, jitter=jitter)

    def flaky(self, name: str, *, every: float = 30.0, hub: int | None = None) -> None:
        """The cluster's connections break at random moments, each one every so many seconds on average, until `heal`.
        It can connect again at once. Raises ValueError where `every` is no positive number of seconds."""
        for route in self._routes(name, hub):
            route.flaky(every, self.nursery)

    async def restart_hub(self, number: int, *, down_for: float = 0.0) -> None:
        """The hub dies, and another one that knows nothing takes its place after so many seconds."""
        self.hubs[number].stop()
        await trio.sleep(down_for)
        await self.hubs[number].start()

    def tell_carried(self) -> None:
        """Note what every connection has carried that is not noted yet."""
        for route in self._routes():
            route.tell_carried()

    def _routes(self, name: str | None = None, hub: int | None = None) -> list[Route]:
        clusters = list(self.clusters.values()) if name is None else [self[name]]
        if hub is None:
            return [route for cluster in clusters for route in cluster.routes.values()]
        return [cluster.routes[self.hubs[hub].name] for cluster in clusters]

    # Peers that do what our agents never do.

    @asynccontextmanager
    async def connection(
        self,
        cluster_id: str,
        *,
        hub: int = 0,
        instance: str | None = None,
        credential: str | None = None,
        uid: str | None = None,
        link: MemoryLink | None = None,
    ) -> AsyncIterator[HubConnection]:
        """A connection to a hub that makes no calls by itself: for peers that do what our agents never do. Without
        `instance` it is one that knows nothing of origins. `credential`: by default the one that an agent of that
        cluster has; "" is none. `uid`: what it says that tells its cluster from others. `link`: what it goes over, to
        be held or cut."""
        link = link or MemoryLink(client=f"{cluster_id} (test)", server=self.hubs[hub].name)
        self.hubs[hub].serve(link.server)
        if credential is None:
            credential = credential_for(cluster_id, self.hub_settings)
        metadata = [pair for pair in call_metadata(cluster_id, instance or "", credential or None, uid) if pair[1]]
        note = self.log.of(f"{cluster_id}~{self.hubs[hub].name}")
        note("connected", by="test")
        try:
            async with trio.open_nursery() as nursery:
                yield await HubConnection.open(nursery, link.client, peer=self.hubs[hub].name, metadata=metadata)
                nursery.cancel_scope.cancel()
        finally:
            tell_carried(link, note)

    @asynccontextmanager
    async def stalled_watcher(self, cluster_id: str = "stalled", *, hub: int = 0) -> AsyncIterator[None]:
        """Inside, somebody watches that hub, answers its pings, and takes in nothing of what it relays."""
        async with self.connection(cluster_id, hub=hub) as connection, connection.watch(WatchFederationRequest()):
            self.log.note(cluster_id, "stalled", hub=self.hubs[hub].name)
            yield

    # What the nodes tell, for the event log and the invariants.

    def said(self, process: AgentProcess, statement: Statement) -> None:
        """A source of an agent has said this."""
        if process.notes.on:
            process.notes.said(statement.source, statement.changes, whole=statement.whole)
        if self.ledger is not None:
            ledger = self.ledger
            self._check(lambda: ledger.said(process, statement))
            for invariant in self.invariants:
                self._check(partial(invariant.said, process, statement))

    def applied(self, process: AgentProcess, changes: Sequence[Change]) -> None:
        """The registry of a process was told of these changes."""
        if process.notes.on:
            process.notes.took(process.agent.registry, changes)
        if (
            self.ledger is not None
            and (news := self._check(partial(self.ledger.applied, process, changes))) is not None
        ):
            for invariant in self.invariants:
                self._check(partial(invariant.applied, process, changes, news))

    def look(self) -> None:
        """Have every invariant look at every registry."""
        self._look(everything=True)

    def _look(self, *, everything: bool = False) -> None:
        if self.ledger is not None:
            self._check(partial(self.ledger.begin_look, everything=everything))
            for invariant in self.invariants:
                self._check(invariant.look)

    def _check(self, check: Callable[[], T]) -> T | None:
        if self.broken is None:
            try:
                return check()
            except Exception as error:
                # Raised here it would look like a fault of whoever has told; the whole simulation ends with it instead.
                self.broken = error
                self.log.note("invariant", "broken" if isinstance(error, InvariantBroken) else "failed", error=error)
                self.broken_at_line = len(self.log.lines)
                self.nursery.cancel_scope.cancel()
        return None

    async def keep_looking(self, every: float) -> None:
        """Have the invariants look every so many seconds, and whenever they have asked for it."""
        assert self.ledger is not None
        while True:
            at = trio.current_time() + every
            while trio.current_time() < at:
                await self.ledger.wait_until_due(at)
                self._look()


def _by_cluster(records: Iterable[Capacity]) -> dict[str, list[Capacity]]:
    found: dict[str, list[Capacity]] = {}
    for record in records:
        found.setdefault(record.cluster_id, []).append(record)
    return found


def _same(known: Sequence[Capacity], truth: Sequence[Capacity]) -> bool:
    """Whether two sorted lists of records say the same, whenever they were observed."""
    return len(truth) == len(known) and all(
        one.identity == other.identity and same_value(one, other) for one, other in zip(truth, known, strict=True)
    )


@asynccontextmanager
async def simulated_federation(
    *names: str,
    hubs: int = 1,
    ttl: float = 30.0,
    seed: int = 0,
    hub_ttl: float = 60.0,
    grace: float = 10.0,
    hub_settings: HubSettings | None = None,
    invariants: Sequence[Invariant] = (),
    check_every: float = 1.0,
    start: bool = True,
    longest: float = LONGEST,
    scripted_hubs: Sequence[OtherHub] = (),
    events: bool = True,
) -> AsyncIterator[Simulation]:
    """Clusters by name, each with an agent, and `hubs` hubs that every agent is connected to. Times in seconds.

    `ttl`: of the agents' registries; `hub_ttl`, `grace`: of the hubs. `hub_settings`: all else that is to be different
    there, for instance what they accept; agents have tokens of their own where the shared secret does not count.
    `seed`: the same one makes the same run, to the last byte, where it begins at the same moment of virtual time.
    `invariants`: what is checked all the time, and
    looked at every `check_every`; new ones for each federation, say those of `every_invariant()`. Without `start` the
    hubs run and the agents do not yet: `await federation["west"].start()`. `longest`: seconds after which it is given
    up.
    `scripted_hubs`: further hubs, which do what a test says. `events`: whether the event log is kept, `Simulation.log`.

    Raises InvariantBroken, whatever else was raised inside, where an invariant did not hold, and trio.TooSlowError
    where it took too long."""
    began = trio.current_time()
    every_name = [f"hub-{number}" for number in range(hubs)]
    settings = Federation(
        hubs=tuple(Endpoint(name, 7443) for name in [*every_name, *(hub.name for hub in scripted_hubs)]),
        secret=Secret(SECRET),
        ttl=ttl,
    )
    hub_settings = msgspec.structs.replace(
        hub_settings if hub_settings is not None else HubSettings(), secret=Secret(SECRET), ttl=hub_ttl, grace=grace
    )
    log = EventLog(lambda: trio.current_time() - began, on=events, secrets=[SECRET])
    failure: BaseException | None = None
    with seeded_scheduling(seed), log.listening():
        async with open_bridge(), trio.open_nursery() as nursery:
            # A test that waits for what never comes must fail; on virtual time it would go on until somebody ends it.
            nursery.cancel_scope.deadline = began + longest
            simulation = Simulation(settings, hub_settings, seed, nursery, log, invariants)
            simulation.hubs = [SimulatedHub(name, hub_settings, nursery, log.of(name)) for name in every_name]
            simulation.other_hubs = list(scripted_hubs)
            for other in scripted_hubs:
                other.nursery = nursery
            for invariant in invariants:
                invariant.started(simulation)
            for name in names:
                simulation.add(name)
            for hub in simulation.hubs:
                await hub.start()
            if start:
                for cluster in simulation.clusters.values():
                    await cluster.start()
            if invariants:
                # With an order of its own: whether anybody looks must not change what there is to be seen.
                with seeded_scheduling(f"{seed}/invariants"):
                    nursery.start_soon(simulation.keep_looking, check_every)
            try:
                yield simulation
            except BaseException as error:
                if _holds_cancelled(error):
                    raise
                failure = error  # raised below, by itself and not in a group
            else:
                simulation.look()
            finally:
                # First of all nobody can connect any more: agents may try to until they have ended.
                for hub in simulation.hubs:
                    hub.stop()
            nursery.cancel_scope.cancel()
        simulation.tell_carried()
    if simulation.broken is not None:
        raise simulation.broken from failure
    if failure is not None:
        raise failure
    if trio.current_time() >= began + longest:
        raise trio.TooSlowError(f"the test took more than {longest:g} simulated seconds")


def _holds_cancelled(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[0] is not None
    return isinstance(error, trio.Cancelled)


def run_simulated(test: Callable[..., Awaitable[T]], *args: object, seed: int = 0) -> T:
    """Run an async function to its end on virtual time, as `trio.run` would on real time, with every order that Trio
    draws by lot made to follow from `seed`. For programs, and for test runners that know nothing of Trio. Returns what
    the function returns."""

    async def seeded() -> T:
        with seeded_scheduling(seed):
            return await test(*args)

    return trio.run(seeded, clock=MockClock(autojump_threshold=0))
