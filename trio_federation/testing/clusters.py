"""The clusters of a simulated federation: each with its sources, a real agent that can be started, stopped, killed and
suspended, and a clock of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog
import trio

from trio_federation.agent import Agent
from trio_federation.capacity import Capacity
from trio_federation.clock import Clock, trio_clock
from trio_federation.config import HubSettings
from trio_federation.credentials import make_token
from trio_federation.errors import Unavailable
from trio_federation.hookspecs import (
    CapacityFilter,
    CapacitySink,
    CapacitySource,
    FilterContext,
    SinkContext,
    SourceContext,
)
from trio_federation.registry import Registry
from trio_federation.router import Placed, Router
from trio_federation.standing import Standing
from trio_federation.testing.contexts import filter_context, sink_context, source_context
from trio_federation.testing.eventlog import AgentNotes
from trio_federation.testing.network import Direction, Route
from trio_federation.testing.scripted import ScriptedSource, SourceFaults, SourceGate

if TYPE_CHECKING:
    from trio_federation.testing.simulation import Simulation

T = TypeVar("T")
C = TypeVar("C")

#: the shared secret of every simulated federation; no log may ever show it
SECRET = "simulated-secret-4711"  # noqa: S105


def credential_for(cluster_id: str, hub_settings: HubSettings) -> str:
    """What proves a cluster to the hubs of a simulated federation: their secret, or its own token where the secret does
    not count. Raises ValueError for a token of an id that can have none."""
    parts = [part for way in hub_settings.accept for part in way.split("+")]
    return make_token(SECRET, cluster_id) if "token" in parts and "shared" not in parts else SECRET


def always(plugin: T) -> Callable[[], T]:
    """What "makes" a plugin that the test holds on to: the same one every time."""
    return lambda: plugin


class _SimulatedAgent(Agent):
    """An agent that notes what it places, and what became of that."""

    notes: AgentNotes

    def _placed(self, placed: Placed) -> None:
        if self.notes.on:
            self.notes.placed(placed)
        super()._placed(placed)

    def _reported(self, placement_id: str, word: str) -> None:
        if self.notes.on:
            self.notes.outcome(placement_id, word)
        super()._reported(placement_id, word)


class AgentProcess:
    """One start of one cluster's agent."""

    def __init__(self, cluster: SimulatedCluster, generator: random.Random) -> None:
        self.cluster = cluster
        #: for the event log
        self.notes = AgentNotes(cluster.simulation.log, cluster.name, cluster.carried)
        self.agent = _SimulatedAgent(
            cluster.cluster_id,
            cluster.simulation.settings,
            sources={name: self._gated(name, make) for name, make in cluster.source_makers().items()},
            sinks=cluster.sink_makers(),
            filters=cluster.filter_makers(),
            hubs={
                name: self._unless_dead(route.dialer(self, partial(self._open_since, name)))
                for name, route in cluster.routes.items()
            },
            credential=lambda: cluster.credential,
            renewals=lambda: cluster.renewals,
            clock=cluster.clock,
            generator=generator,
            standing=cluster.standing,
            applied=partial(cluster.simulation.applied, self),
        )
        self.agent.notes = self.notes
        #: set when it has ended
        self.ended = trio.Event()
        #: Trio's time at which it was started, at which it was told to stop, and at which it had ended; infinite before
        self.began_at = trio.current_time()
        self.stopping_at = self.ended_at = math.inf
        #: whether it has died without a word
        self.was_killed = False
        self._scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the agent to its end."""
        try:
            # Inherited by every task below: whose line it is, in logs of many nodes.
            with structlog.contextvars.bound_contextvars(node=self.cluster.name), self._scope:
                await self.agent.run(task_status=task_status)
        finally:
            self.ended_at = trio.current_time()
            self.stopping_at = min(self.stopping_at, self.ended_at)
            self.ended.set()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self.ended.is_set()

    async def stop(self) -> None:
        """A clean stop; returns when the agent has ended."""
        self.stopping_at = min(self.stopping_at, trio.current_time())
        self._scope.cancel()
        await self.ended.wait()

    async def kill(self) -> None:
        """It dies without a word; its connections break."""
        self.was_killed = True
        for route in self.cluster.routes.values():
            route.cut(self)
        await self.stop()

    def _gated(self, name: str, make: Callable[[], CapacitySource]) -> Callable[[], CapacitySource]:
        cluster = self.cluster
        said = partial(cluster.simulation.said, self)
        return lambda: SourceGate(name, make(), cluster.source_faults, said)

    def _open_since(self, hub: str, direction: Direction) -> float:
        """Trio's time since which its call is known to be open that carries records from or to a hub."""
        what = "report" if direction == "to_hub" else "watch"
        health = next((link.health for link in self.agent.links if link.name == hub), None)
        if health is None or not health.is_up(what):
            return math.inf
        ago: float = health.shown(self.cluster.clock())["streams"][what]["since"]
        return trio.current_time() - ago

    def _unless_dead(self, dial: Callable[[], Awaitable[trio.abc.Stream]]) -> Callable[[], Awaitable[trio.abc.Stream]]:
        async def dial_unless_dead() -> trio.abc.Stream:
            if self.was_killed:
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
        self.note = simulation.log.of(name)
        self.source = ScriptedSource()
        #: what is done to every source of this cluster
        self.source_faults = SourceFaults()
        #: taken in at the next start, by name
        self.more_sources: dict[str, CapacitySource] = {}
        self.sinks: dict[str, CapacitySink] = {}
        self.filters: dict[str, CapacityFilter] = {}
        self._made_sources: dict[str, Callable[[SourceContext], CapacitySource]] = {}
        self._made_sinks: dict[str, Callable[[SinkContext], CapacitySink]] = {}
        self._made_filters: dict[str, Callable[[FilterContext], CapacityFilter]] = {}
        #: by the hub's name
        self.routes = {
            hub.name: Route(
                name,
                hub,
                simulation.generator("network", name, hub.name),
                partial(simulation.log.note, f"{name}~{hub.name}"),
            )
            for hub in simulation.every_hub()
        }
        self._credential: str | None = credential_for(cluster_id, simulation.hub_settings)
        #: how often `credential` was set
        self.renewals = 0
        #: what the hubs say of the reports of the agent that was started last
        self.standing = Standing()
        #: seconds by which this cluster's clock is ahead of everybody else's
        self.clock_offset = 0.0
        #: Trio's time at which something was done to it last: a start, a stop, a fault of its sources or its clock
        self.touched_at = -float("inf")
        #: whether its machine stands still
        self.is_suspended = False
        #: every agent process that was started here, in the order of the starts
        self.processes: list[AgentProcess] = []
        self._base = trio_clock()
        self._process: AgentProcess | None = None

    # What it is.

    @property
    def process(self) -> AgentProcess:
        """The process that was started last."""
        assert self._process is not None, f"no agent of {self.name} was started yet; await its start()"
        return self._process

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
    def is_running(self) -> bool:
        """Whether the agent that was started last runs."""
        return self._process is not None and self._process.is_running

    @property
    def credential(self) -> str | None:
        """What its agents prove it with: the secret of the hubs, or its token where that does not count. Another one
        counts from the next call on, as a file that is read again does."""
        return self._credential

    @credential.setter
    def credential(self, credential: str | None) -> None:
        self._credential = credential
        self.renewals += 1
        self.note("credential")

    @property
    def clock(self) -> Clock:
        """This cluster's own clock."""
        return self._now

    def _now(self) -> float:
        return self._base() + self.clock_offset

    def is_reporter(self) -> bool | None:
        """Whether the agent that was started last is the one that reports, for the contexts of its sinks."""
        return self.standing.is_reporter()

    # What its agent is made of, from the next start on.

    def use_source(self, name: str, make: Callable[[SourceContext], CapacitySource]) -> None:
        """Add a source of yours. It is made when the agent starts, with a context on this cluster's clock, and anew
        after it has failed. The scripted one, `source`, stays beside it, and says nothing unless it is told to."""
        self._made_sources[name] = make

    def use_sink(self, name: str, make: Callable[[SinkContext], CapacitySink]) -> None:
        """Add a sink of yours, like `use_source`."""
        self._made_sinks[name] = make

    def use_filter(self, name: str, make: Callable[[FilterContext], CapacityFilter]) -> None:
        """Add a filter of yours, like `use_source`."""
        self._made_filters[name] = make

    def source_makers(self) -> dict[str, Callable[[], CapacitySource]]:
        """What makes each of its sources, by name."""
        held = {"set": self.source, **self.more_sources}
        return {name: always(source) for name, source in held.items()} | {
            name: self._maker(make, partial(source_context, ttl=self.simulation.settings.ttl), "source", name)
            for name, make in self._made_sources.items()
        }

    def sink_makers(self) -> dict[str, Callable[[], CapacitySink]]:
        """What makes each of its sinks, by name."""
        context = partial(sink_context, ttl=self.simulation.settings.ttl, is_reporter=self.is_reporter)
        return {name: always(sink) for name, sink in self.sinks.items()} | {
            name: self._maker(make, context, "sink", name) for name, make in self._made_sinks.items()
        }

    def filter_makers(self) -> dict[str, Callable[[], CapacityFilter]]:
        """What makes each of its filters, by name."""
        return {name: always(each) for name, each in self.filters.items()} | {
            name: self._maker(make, filter_context, "filter", name) for name, make in self._made_filters.items()
        }

    @property
    def has_filters(self) -> bool:
        """Whether anything stands between what its sources say and what others are told."""
        return bool(self.filters or self._made_filters)

    def _maker(self, make: Callable[[C], T], context: Callable[..., C], kind: str, name: str) -> Callable[[], T]:
        generator = self.simulation.generator(kind, self.name, name)
        return lambda: make(context(name=name, cluster_id=self.cluster_id, clock=self.clock, random=generator))

    # Its life.

    async def start(self) -> AgentProcess:
        """Start an agent, also beside one that runs. Raises RuntimeError while the machine stands still."""
        self._must_turn("started")
        self.standing = Standing()
        number = len(self.processes) + 1
        process = AgentProcess(self, self.simulation.generator("agent", self.name, str(number)))
        self.processes.append(process)
        self._touched("started", instance=process.agent.instance)
        await self.simulation.nursery.start(process.run)
        self._process = process
        return process

    async def stop(self) -> None:
        """Stop the latest process cleanly; returns when it has ended. Raises RuntimeError while the machine stands
        still."""
        self._must_turn("stopped")
        self._touched("stopping")
        await self.process.stop()
        self._touched("stopped")

    async def kill(self) -> None:
        """The latest process dies without a word, also on a machine that stands still."""
        self._touched("killed")
        await self.process.kill()

    def suspend(self) -> None:
        """The machine stands still until `resume`, and its clock goes on, as boot time does: no byte goes in or out, no
        source answers. What the agent's own timers find meanwhile, say that a hub is silent, a real one would find
        when it goes on; nobody outside can tell the difference. Does nothing where it stands still already."""
        if self.is_suspended:
            return
        self.is_suspended = True
        self.source_faults.close()
        for route in self.routes.values():
            route.suspend()
        self._touched("suspended")

    def resume(self) -> None:
        """The machine goes on, if it stood still."""
        if not self.is_suspended:
            return
        self.is_suspended = False
        self.source_faults.open()
        for route in self.routes.values():
            route.resume()
        self._touched("resumed")

    def skew(self, seconds: float) -> None:
        """Set this cluster's clock so many seconds ahead of everybody else's; negative: behind. Between two starts
        only: a clock that jumps forward while an agent runs is a suspend, and none goes back.

        Raises RuntimeError while an agent runs."""
        if self.is_running:
            raise RuntimeError(f"the agent of {self.name} runs; skew its clock before its start, or after stop or kill")
        self.clock_offset = seconds
        self._touched("skewed", seconds=seconds)

    def slow_sources(self, seconds: float) -> None:
        """Every collect of this cluster's sources takes so much longer; 0: no longer."""
        self.source_faults.slowness = seconds
        self._touched("sources_slow", seconds=seconds)

    def fail_sources(self, error: Exception | None) -> None:
        """Every collect of this cluster's sources raises `error`; None: no longer."""
        self.source_faults.failure = error
        self._touched("sources_fail" if error is not None else "sources_work")

    def _must_turn(self, what: str) -> None:
        if self.is_suspended:
            raise RuntimeError(f"the machine of {self.name} stands still; nothing is {what} there before resume()")

    def _touched(self, event: str, **details: object) -> None:
        self.touched_at = trio.current_time()
        self.note(event, **details)

    # What it knows.

    def carried(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """By hub, what its connections have carried: see `Route.carried`."""
        return {name: route.carried() for name, route in self.routes.items()}

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
