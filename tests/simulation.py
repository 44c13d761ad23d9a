"""A whole federation in memory, for tests: real agents, real hubs, the real gRPC stack over in-memory links. Meant for
trio's MockClock (`autojump_clock`), where an hour passes in moments. What the network does is a `Route`'s business, one
for each cluster and hub. Nothing here decides what is right; that is up to the tests. Not public."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol, TypedDict, TypeVar, Unpack

import trio

from trio_federation.agent import Agent
from trio_federation.capacity import Capacity, Change
from trio_federation.clock import Clock, trio_clock
from trio_federation.config import Endpoint, Federation, HubSettings, Secret
from trio_federation.errors import Unavailable
from trio_federation.hookspecs import CapacityFilter, CapacitySink, CapacitySource
from trio_federation.hub import Hub
from trio_federation.identity import call_metadata
from trio_federation.registry import Registry
from trio_federation.router import Router
from trio_federation.rpc import (
    FederationServer,
    HubConnection,
    IncomingReport,
    IncomingWatch,
    MemoryLink,
    open_bridge,
)
from trio_federation.standing import Standing

T = TypeVar("T")

#: seconds of its own time after which a simulated federation is given up
LONGEST = 7200.0
#: the shared secret of every simulated federation; no log may ever show it
SECRET = "simulated-secret-4711"


class Values(TypedDict, total=False):
    """The fields of a record that have defaults."""

    idle: int
    running: int
    pending: int
    desired: int
    autoscaling_enabled: bool
    capacity: int
    saturated_for: float
    state: str
    observed_at: float | None
    scaling_group: str


def member(
    cluster: str, pool: str = "p1", *, env: str = "env", namespace: str = "ns", **values: Unpack[Values]
) -> Capacity:
    """A member record of `cluster`."""
    return Capacity(cluster, namespace, env, pool, **values)


async def sampled(seconds: float, look: Callable[[], T], *, step: float = 0.1) -> list[T]:
    """What `look` tells now and after every `step`, for so many seconds."""
    ends_at = trio.current_time() + seconds
    found = [look()]
    while trio.current_time() + step <= ends_at:
        await trio.sleep(step)
        found.append(look())
    return found


# --- sources ---------------------------------------------------------------------------------------------------------


class ScriptedSource(CapacitySource):
    """A polled source that says what it was told to say."""

    def __init__(self) -> None:
        self._records: tuple[Capacity, ...] = ()
        self._frozen = False
        #: raised by every collect while it is set
        self.failure: BaseException | None = None
        #: seconds that a collect takes
        self.slowness = 0.0
        #: how many collects were begun
        self.collects = 0
        #: how often it was closed
        self.closed = 0

    def set(self, *records: Capacity, frozen: bool = False) -> None:
        """From now on this is the whole truth, stamped anew at every report unless `frozen`."""
        self._records, self._frozen = records, frozen

    async def collect(self) -> Sequence[Capacity]:
        """What `set` was told last, after `slowness` seconds; raises `failure` where there is one."""
        self.collects += 1
        await trio.sleep(self.slowness)
        if self.failure is not None:
            raise self.failure
        if self._frozen:
            return self._records
        return [replace(record, observed_at=None) for record in self._records]

    async def aclose(self) -> None:
        """Counts that it was closed."""
        self.closed += 1
        await trio.lowlevel.checkpoint()


class PushingSource(ScriptedSource):
    """A source that pushes batches as the test hands them in, and answers a collect like a polled one."""

    def __init__(self) -> None:
        super().__init__()
        #: what `is_live` says
        self.live = True
        self._to_agent, self._pushed = trio.open_memory_channel[Sequence[Change]](float("inf"))

    def push(self, *changes: Change) -> None:
        """Push one batch. Does not wait until the agent has taken it."""
        self._to_agent.send_nowait(changes)

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        """Every batch that was pushed."""
        async for batch in self._pushed:
            yield batch

    def is_live(self) -> bool:
        """What `live` was set to."""
        return self.live


# --- hubs and the network --------------------------------------------------------------------------------------------


class HubEnd(Protocol):
    """What a route leads to."""

    @property
    def name(self) -> str:
        """The hub, as agents call it."""

    @property
    def routes(self) -> list[Route]:
        """Every route to it."""

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection. Raises Unavailable while the hub is down."""


class Route:
    """The network between one cluster and one hub. What is done to it also holds for connections that come later."""

    def __init__(self, cluster: str, hub: HubEnd) -> None:
        self._cluster = cluster
        self._hub = hub
        self._links: list[tuple[object, MemoryLink]] = []
        self._open = True
        self._answers = True
        self._hub_hears = True
        self._cluster_hears = True
        #: how many connections were tried
        self.dialled = 0
        hub.routes.append(self)

    def dialer(self, owner: object) -> Callable[[], Awaitable[trio.abc.Stream]]:
        """How an agent, the `owner` of what it dials, gets to the hub."""

        async def dial() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            self.dialled += 1
            if not self._answers:
                await trio.sleep_forever()
            if not self._open:
                raise Unavailable("no route (simulated)", peer=self._hub.name)
            link = MemoryLink(client=self._cluster, server=self._hub.name)
            self._hub.serve(link.server)
            link.hold(to_server=not self._hub_hears, to_client=not self._cluster_hears)
            self._links.append((owner, link))
            return link.client

        return dial

    def hold(self, *, to_hub: bool = True, to_cluster: bool = True) -> None:
        """What travels in these directions stays on its way, until `release`, and nobody is told."""
        self._hub_hears, self._cluster_hears = not to_hub, not to_cluster
        for _, link in self._links:
            link.hold(to_server=to_hub, to_client=to_cluster)

    def release(self) -> None:
        """Let go of everything that was held."""
        self.hold(to_hub=False, to_cluster=False)

    def cut(self, owner: object = None) -> None:
        """Break every connection, or those of one owner; new ones can be made."""
        for of, link in self._links:
            if owner is None or of is owner:
                link.cut()
        self._links = [(of, link) for of, link in self._links if owner is not None and of is not owner]

    def partition(self, *, silently: bool = False) -> None:
        """Break every connection; no new one can be made until `heal`. `silently`: who dials then gets no answer."""
        self._open = False
        self._answers = not silently
        self.cut()

    def heal(self) -> None:
        """Connections can be made again; who still waits for an answer does so for ever."""
        self._open = self._answers = True


class SimulatedHub:
    """A real hub that can be stopped and started again."""

    def __init__(self, name: str, settings: HubSettings, nursery: trio.Nursery) -> None:
        self.name = name
        self.settings = settings
        self.routes: list[Route] = []
        #: seconds by which the hub's clock is ahead of everybody else's
        self.clock_offset = 0.0
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self._hub: Hub | None = None

    @property
    def hub(self) -> Hub:
        """The hub, which must be up."""
        assert self._hub is not None
        return self._hub

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection. Raises Unavailable while the hub is down."""
        if self._hub is None:
            raise Unavailable("nobody listens (simulated)", peer=self.name)
        self._hub.serve(stream)

    async def start(self) -> None:
        """Start a hub that knows nothing."""
        self._scope = trio.CancelScope()
        await self._nursery.start(self._run)

    def stop(self) -> None:
        """The hub dies: everything it knew is gone, and every connection to it breaks."""
        self._hub = None
        for route in self.routes:
            route.cut()
        self._scope.cancel()

    async def _run(self, *, task_status: trio.TaskStatus[None]) -> None:
        base = trio_clock()
        with self._scope:
            self._hub = Hub(self.settings, clock=lambda: base() + self.clock_offset)
            await self._hub.run(task_status=task_status)


class ScriptedHub:
    """A hub whose calls do what the test says, on the real server: for hubs that are older than ours, or worse."""

    def __init__(
        self,
        name: str,
        report: Callable[[IncomingReport], Awaitable[None]],
        watch: Callable[[IncomingWatch], Awaitable[None]],
    ) -> None:
        self.name = name
        self.routes: list[Route] = []
        #: set by the simulation that it is part of
        self.nursery: trio.Nursery | None = None
        self._server = FederationServer(report, watch)

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection."""
        assert self.nursery is not None
        self.nursery.start_soon(self._server.serve, stream)


def always(plugin: T) -> Callable[[], T]:
    """What "makes" a plugin that the test holds on to: the same one every time."""
    return lambda: plugin


# --- clusters --------------------------------------------------------------------------------------------------------


class AgentProcess:
    """One start of one cluster's agent."""

    def __init__(self, cluster: SimulatedCluster, generator: random.Random) -> None:
        simulation = cluster.simulation
        self.cluster = cluster
        self.agent = Agent(
            cluster.cluster_id,
            simulation.settings,
            sources={name: always(source) for name, source in {"set": cluster.source, **cluster.more_sources}.items()},
            sinks={name: always(sink) for name, sink in cluster.sinks.items()},
            filters={name: always(each) for name, each in cluster.filters.items()},
            hubs={name: self._unless_dead(route.dialer(self)) for name, route in cluster.routes.items()},
            credential=cluster.credential,
            clock=cluster.clock,
            generator=generator,
            standing=cluster.standing,
        )
        #: set when it has ended
        self.ended = trio.Event()
        self._dead = False
        self._scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the agent to its end."""
        try:
            with self._scope:
                await self.agent.run(task_status=task_status)
        finally:
            self.ended.set()

    async def stop(self) -> None:
        """A clean stop; returns when the agent has ended."""
        self._scope.cancel()
        await self.ended.wait()

    async def kill(self) -> None:
        """It dies without a word; its connections break."""
        self._dead = True
        for route in self.cluster.routes.values():
            route.cut(self)
        await self.stop()

    def _unless_dead(self, dial: Callable[[], Awaitable[trio.abc.Stream]]) -> Callable[[], Awaitable[trio.abc.Stream]]:
        async def dial_unless_dead() -> trio.abc.Stream:
            if self._dead:
                raise Unavailable("the machine is off (simulated)")
            return await dial()

        return dial_unless_dead


class SimulatedCluster:
    """One cluster: its sources, its agent, and its routes to the hubs.

    `name`: what the test calls it. `cluster_id`: what it calls itself, mostly the same."""

    def __init__(self, name: str, cluster_id: str, simulation: Simulation) -> None:
        self.name = name
        self.cluster_id = cluster_id
        self.simulation = simulation
        self.source = ScriptedSource()
        #: taken in at the next start, by name
        self.more_sources: dict[str, CapacitySource] = {}
        self.sinks: dict[str, CapacitySink] = {}
        self.filters: dict[str, CapacityFilter] = {}
        #: by the hub's name
        self.routes = {hub.name: Route(name, hub) for hub in simulation.every_hub()}
        self.credential: str | None = SECRET
        #: what the hubs say of the reports of the agent that was started last
        self.standing = Standing()
        #: seconds by which this cluster's clock is ahead of everybody else's
        self.clock_offset = 0.0
        self._base = trio_clock()
        #: the process that was started last
        self.process: AgentProcess

    @property
    def agent(self) -> Agent:
        """The agent that was started last."""
        return self.process.agent

    @property
    def registry(self) -> Registry:
        """That agent's registry."""
        return self.agent.registry

    @property
    def router(self) -> Router:
        """That agent's router."""
        return self.agent.router

    @property
    def clock(self) -> Clock:
        """This cluster's own clock."""
        return self._now

    def _now(self) -> float:
        return self._base() + self.clock_offset

    def is_reporter(self) -> bool | None:
        """Whether the agent that was started last is the one that reports, for the contexts of its sinks."""
        return self.standing.is_reporter()

    async def start(self) -> AgentProcess:
        """Start an agent, also beside one that runs."""
        self.standing = Standing()
        process = AgentProcess(self, self.simulation.generator(self.name))
        await self.simulation.nursery.start(process.run)
        self.process = process
        return process

    async def stop(self) -> None:
        """Stop the latest process cleanly; returns when it has ended."""
        await self.process.stop()

    async def kill(self) -> None:
        """The latest process dies without a word."""
        await self.process.kill()

    def known(self, of: str) -> list[Capacity]:
        """The fresh records of cluster id `of` that this cluster's registry has."""
        return [record for record in self.registry.snapshot() if record.cluster_id == of]

    def idle(self, of: str) -> list[int]:
        """Their idle counts."""
        return [record.idle for record in self.known(of)]

    def ages(self, of: str) -> list[float]:
        """Their ages in seconds."""
        found = []
        for record in self.known(of):
            assert record.observed_at is not None
            found.append(self.clock() - record.observed_at)
        return found


class Simulation:
    """What `simulated_federation` gives."""

    def __init__(
        self,
        settings: Federation,
        hubs: Sequence[SimulatedHub],
        scripted_hubs: Sequence[ScriptedHub],
        seed: int,
        nursery: trio.Nursery,
    ) -> None:
        self.settings = settings
        self.hubs = list(hubs)
        self.scripted_hubs = list(scripted_hubs)
        self.clusters: dict[str, SimulatedCluster] = {}
        self.nursery = nursery
        self._seed = seed
        self._drawn = 0

    def every_hub(self) -> Iterator[HubEnd]:
        """The hubs, in the order of their names."""
        yield from self.hubs
        yield from self.scripted_hubs

    def generator(self, name: str) -> random.Random:
        """A generator that is the same in every run with the same seed, and another one at every call."""
        self._drawn += 1
        return random.Random(f"{self._seed}:{name}:{self._drawn}")

    def add(self, name: str, *, cluster_id: str | None = None) -> SimulatedCluster:
        """One more cluster, not started yet."""
        cluster = self.clusters[name] = SimulatedCluster(name, cluster_id or name, self)
        return cluster

    def __getitem__(self, name: str) -> SimulatedCluster:
        return self.clusters[name]

    async def settle(self) -> None:
        """Until every source was asked again, and every live link has carried the answer."""
        await trio.sleep(self.settings.report_interval + 1.0)

    def partition(self, name: str) -> None:
        """The cluster's connections break, and it cannot connect again until `heal`."""
        for route in self[name].routes.values():
            route.partition()

    def heal(self, name: str) -> None:
        """The cluster can connect again."""
        for route in self[name].routes.values():
            route.heal()

    def black_hole(self, name: str) -> None:
        """What the cluster and its hubs say to each other stays on its way, and nobody is told."""
        for route in self[name].routes.values():
            route.hold()

    async def restart_hub(self, number: int, *, down_for: float = 0.0) -> None:
        """The hub dies, and another one that knows nothing takes its place after so many seconds."""
        self.hubs[number].stop()
        await trio.sleep(down_for)
        await self.hubs[number].start()

    @asynccontextmanager
    async def connection(
        self,
        cluster_id: str,
        *,
        hub: int = 0,
        instance: str | None = None,
        credential: str = SECRET,
        link: MemoryLink | None = None,
    ) -> AsyncIterator[HubConnection]:
        """A connection to a hub that makes no calls by itself: for peers that do what our agents never do. Without
        `instance` it is one that knows nothing of origins. `link`: what it goes over, to be held or cut."""
        link = link or MemoryLink(client=f"{cluster_id} (test)", server=self.hubs[hub].name)
        self.hubs[hub].serve(link.server)
        metadata = [pair for pair in call_metadata(cluster_id, instance or "", credential) if pair[1]]
        async with trio.open_nursery() as nursery:
            yield await HubConnection.open(nursery, link.client, peer=self.hubs[hub].name, metadata=metadata)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def simulated_federation(
    *names: str,
    hubs: int = 1,
    ttl: float = 30.0,
    seed: int = 0,
    hub_ttl: float = 60.0,
    grace: float = 10.0,
    scripted_hubs: Sequence[ScriptedHub] = (),
    start: bool = True,
) -> AsyncIterator[Simulation]:
    """Clusters by name, each with an agent, and `hubs` hubs that every agent is connected to. Times in seconds.
    Without `start` the hubs run and the agents do not yet."""
    began = trio.current_time()
    every_name = [f"hub-{number}" for number in range(hubs)]
    settings = Federation(
        hubs=tuple(Endpoint(name, 7443) for name in [*every_name, *(hub.name for hub in scripted_hubs)]),
        secret=Secret(SECRET),
        ttl=ttl,
    )
    hub_settings = HubSettings(secret=Secret(SECRET), ttl=hub_ttl, grace=grace)
    async with open_bridge(), trio.open_nursery() as nursery:
        # A test that waits for what never comes must fail; on virtual time it would go on until somebody ends it.
        nursery.cancel_scope.deadline = trio.current_time() + LONGEST
        real_hubs = [SimulatedHub(name, hub_settings, nursery) for name in every_name]
        for scripted in scripted_hubs:
            scripted.nursery = nursery
        simulation = Simulation(settings, real_hubs, scripted_hubs, seed, nursery)
        for name in names:
            simulation.add(name)
        for hub in real_hubs:
            await hub.start()
        if start:
            for cluster in simulation.clusters.values():
                await cluster.start()
        try:
            yield simulation
        finally:
            # First of all nobody can connect any more: agents may try to until they have ended.
            for hub in real_hubs:
                hub.stop()
        nursery.cancel_scope.cancel()
    if trio.current_time() >= began + LONGEST:
        raise trio.TooSlowError(f"the test took more than {LONGEST:g} simulated seconds")
