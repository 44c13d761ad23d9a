"""From when on what one agent says has to be known to another: how long connecting, taking over and saying goodbye take
in a simulated federation, argued from the settings and from what was done to its network, its hubs and its agents. For
the invariants; what is known, and whether that is right, is decided there (`invariants.py`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from trio_federation.agent import PLUGINS_DEADLINE
from trio_federation.reporter import DEBOUNCE
from trio_federation.retry import FIRST, LONGEST, TAKEOVER
from trio_federation.samples import START_TOLERANCE
from trio_federation.testing.clusters import SECRET

if TYPE_CHECKING:
    from trio_federation.testing.clusters import AgentProcess, SimulatedCluster
    from trio_federation.testing.hubs import SimulatedHub
    from trio_federation.testing.network import Route
    from trio_federation.testing.simulation import Simulation

#: Seconds that calls need beyond the waits that are counted; on virtual time they take none.
SPARE = 0.05


class Ways:
    """The ways between the agents of a federation. All moments are Trio's time, and infinite for never.

    `healing`: seconds in which a connection that broke, or could not be made, is made again once nothing is in its way.
    By default the longest backoff: a connection fails at once, and is tried again after that at the latest."""

    def __init__(self, federation: Simulation, *, healing: float = LONGEST) -> None:
        self._federation = federation
        self._healing = healing

    def ready_at(self, of: AgentProcess, observer: AgentProcess) -> float:
        """From when everything that an agent has said is known to another one, but for the news: on the way over the
        hub that is the first to be ready. A reporter that connects tells everything at once, and so does a hub to a
        watcher that connects."""
        if of.cluster.credential != SECRET or observer.cluster.credential != SECRET:
            return math.inf
        let_in = self._let_in(of, observer)
        return min((self._over(hub, of, observer, let_in) for hub in self._federation.hubs), default=math.inf)

    def transit(self, of: AgentProcess, observer: AgentProcess) -> float:
        """Seconds that news are on the way at the most, over whichever hub."""
        hubs = [hub.name for hub in self._federation.hubs if hub.is_up]
        there = [of.cluster.routes[hub].longest_transit + observer.cluster.routes[hub].longest_transit for hub in hubs]
        return max(there, default=0.0)

    def excess(self, of: AgentProcess, observer: AgentProcess) -> float:
        """Seconds by which what one agent says may look older to another one than it is, at the most, over whichever
        hub: who does not know how long the opening of a connection took counts it as age for a while. Each side knows
        from when on it was heard by the other, but not when that was sent."""
        federation = self._federation
        # A sample keeps the age with which it was taken first, whatever connection it comes over after that.
        since = trio.current_time() - federation.settings.ttl - federation.hub_settings.ttl
        there = (
            of.cluster.routes[hub.name].first_word("to_cluster", since=since)
            + observer.cluster.routes[hub.name].first_word("to_hub", since=since)
            for hub in federation.hubs
        )
        return max(there, default=0.0)

    def goodbye_heard_at(self, of: AgentProcess, observer: AgentProcess) -> float:
        """By when an agent has heard that another one, which has stopped cleanly, is gone; infinite where there was no
        way to tell it, so that nobody need know before the TTL is over."""
        best, let_in = math.inf, self._let_in(of, observer)
        for hub in self._federation.hubs:
            from_cluster, to_observer = of.cluster.routes[hub.name], observer.cluster.routes[hub.name]
            if not (hub.is_up and from_cluster.healthy and to_observer.healthy):
                continue
            could_speak_from = max(self._connected_at(of, hub), let_in) + _to_connect(from_cluster)
            if could_speak_from + SPARE < of.stopping_at:
                # What is being gathered when it stops is sent first.
                told_at = of.stopping_at + PLUGINS_DEADLINE + DEBOUNCE + from_cluster.longest_transit
                listens_from = self._connected_at(observer, hub) + _to_connect(to_observer)
                best = min(best, max(listens_from, told_at + to_observer.longest_transit) + SPARE)
        return best

    def _over(self, hub: SimulatedHub, of: AgentProcess, observer: AgentProcess, let_in: float) -> float:
        from_cluster, to_observer = of.cluster.routes[hub.name], observer.cluster.routes[hub.name]
        if not (hub.is_up and from_cluster.healthy and to_observer.healthy):
            return math.inf
        connected_at = max(self._connected_at(of, hub), self._connected_at(observer, hub), let_in)
        return connected_at + _to_connect(from_cluster) + _to_connect(to_observer) + SPARE

    def _connected_at(self, process: AgentProcess, hub: SimulatedHub) -> float:
        """By when an agent has connected to a hub, but for the time that the network takes: at its start, or so long
        after what kept it from that, or has broken the connection."""
        route = process.cluster.routes[hub.name]
        disturbed_at = max(route.touched_at, route.dial_lost_until, hub.touched_at)
        if disturbed_at < process.began_at:
            return process.began_at
        # In the moment of its start it can have failed once.
        return disturbed_at + (FIRST if disturbed_at == process.began_at else self._healing)

    def _let_in(self, process: AgentProcess, observer: AgentProcess) -> float:
        """By when the hubs and the registry of `observer` take the word of an agent: at its start, or once those before
        it are given up."""
        federation = self._federation
        settings = federation.settings
        silence = max(settings.silence_limit, federation.hub_settings.silence_limit)
        let_in = process.began_at
        for cluster in _of(federation, process.cluster.cluster_id):
            takes = max((_to_connect(route) for route in cluster.routes.values()), default=0.0)
            for other in cluster.processes:
                if other is process or other.is_running:
                    continue
                # Who started together with it cannot be told from it by age: registries give it up by themselves, or
                # take the word only for what was true after its goodbye; either way with the next resync.
                together = abs(process.began_at - other.began_at) <= START_TOLERANCE + takes
                if self._parted_well(other) and (not together or self._listened(observer, other.stopping_at)):
                    # Started beside it, it was refused, and tries again soon after the other one has gone.
                    beside = process.began_at < other.ended_at
                    let_in_at = other.ended_at + TAKEOVER[1] if beside else process.began_at
                    let_in = max(let_in, let_in_at + (settings.report_interval + DEBOUNCE if together else 0.0))
                else:
                    given_up_at = self._last_heard_at(other) + silence
                    retried_after = settings.resync_interval + DEBOUNCE if together else TAKEOVER[1]
                    let_in = max(let_in, given_up_at + retried_after)
        return let_in

    def _last_heard_at(self, process: AgentProcess) -> float:
        """By when a hub has read the last bytes of an agent that has ended. Those of one that was killed are lost, and
        those of one that stopped are on their way, or held until somebody lets them go."""
        if process.was_killed:
            return process.ended_at
        routes = process.cluster.routes.values()
        return max(process.ended_at, *(route.touched_at + 2 * route.longest_transit for route in routes))

    def _listened(self, observer: AgentProcess, moment: float) -> bool:
        """Whether an agent was connected to every hub that is up, at that moment, and since then; or came later, so
        that it has nothing from before."""
        return observer.began_at > moment or all(
            observer.cluster.routes[hub.name].healthy and self._connected_at(observer, hub) < moment
            for hub in self._federation.hubs
            if hub.is_up
        )

    def _parted_well(self, process: AgentProcess) -> bool:
        """Whether an agent has stopped cleanly, and could tell every hub that is up."""
        return not process.was_killed and all(
            process.cluster.routes[hub.name].healthy and self._connected_at(process, hub) < process.stopping_at
            for hub in self._federation.hubs
            if hub.is_up
        )


def speaker_of(federation: Simulation, cluster_id: str) -> AgentProcess | None:
    """The one agent process that speaks for a cluster, or has done so last; None where there was none, or there are
    several at once, so that nobody can say what is true."""
    processes = processes_of(federation, cluster_id)
    running = [process for process in processes if process.is_running]
    if len(running) > 1 or not processes:
        return None
    latest = max(processes, key=lambda process: process.began_at)
    return latest if not running or running[0] is latest else None


def processes_of(federation: Simulation, cluster_id: str) -> list[AgentProcess]:
    """Every agent process that speaks for a cluster, or has done so."""
    return [process for cluster in _of(federation, cluster_id) for process in cluster.processes]


def _of(federation: Simulation, cluster_id: str) -> list[SimulatedCluster]:
    return [cluster for cluster in federation.clusters.values() if cluster.cluster_id == cluster_id]


def _to_connect(route: Route) -> float:
    """Seconds that the network takes to connect and make a call: to dial, there and back, to hear from the hub, to
    call, and to answer."""
    return 5 * route.longest_transit
