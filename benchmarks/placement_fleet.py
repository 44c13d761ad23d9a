"""A fleet of clusters on virtual time: pools whose truth is known exactly, reports of it that come late, creates that
are placed, travel and arrive. A discrete-event simulation: one heap of events, seeded generators, no tasks, no network.
Every cluster has a real `Registry` on the engine's clock. How a create is placed is a policy's business
(`placement_policies.py`), how much load there is where a shape's (`placement_shapes.py`)."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from trio_federation.capacity import Capacity
from trio_federation.registry import Registry

NAMESPACE = "agents"
ENV = "browser"

#: Seconds from one collect to its arrival in another cluster's registry, at least and at most: two legs and a hub.
REPORT_LATENCY = (0.05, 0.1)
#: Seconds at the source between an observation and its sending, which is the age that a report tells.
REPORT_AGE = 0.005
#: Seconds between two pushes of a cluster's own records into its own registry, at least.
LOCAL_DEBOUNCE = 0.2
#: Seconds that a forwarded create takes until it arrives, and its answer until the origin knows, at least and at most.
TRIP = (0.1, 0.5)
ANSWER = (0.02, 0.06)
#: Seconds between two looks of an autoscaler at its pools.
RECONCILE = 1.0
#: By how much start-up times vary, as a share of them.
START_UP_SPREAD = 0.2
#: Seconds that an owner says scale-up will go on to fail, at most: it does not know for longer.
LONGEST_SATURATION = 30.0


# --- what a fleet is -------------------------------------------------------------------------------------------------


class PoolPlan(NamedTuple):
    """A pool: how many sandboxes its autoscaler keeps idle, and how many it may have in all. It begins with `warm`
    idle ones."""

    warm: int
    ceiling: int


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster, and the creates that arrive at it."""

    pools: tuple[PoolPlan, ...]
    #: creates per second at a moment, in seconds from the beginning
    rate: Callable[[float], float]
    #: what `rate` never exceeds
    most: float
    #: seconds from the decision to add a sandbox until it is idle
    start_up: float = 20.0
    #: seconds that a sandbox is in use, on average (exponentially distributed)
    lifetime: float = 60.0
    #: spans (from, until) in which nothing can be added, and its owner says so
    failing: tuple[tuple[float, float], ...] = ()


class Decision(NamedTuple):
    """Where a policy wants a create to go."""

    #: `<cluster>::<pool>`; None for the cluster that it arrived at
    target: str | None
    #: whether it is expected to be served at once, as there is one idle
    idle: bool
    #: what the policy needs to know its own decision again
    id: str = ""
    #: at home, the pool to take it from; "" for the one with the most
    pool: str = ""


class Policy(Protocol):
    """What places the creates of one cluster."""

    def place(self, not_these: Sequence[str], not_here: bool) -> Decision:
        """`not_these`: the pools that the create was turned away from. `not_here`: it found nothing idle at home."""
        ...

    def outcome(self, decision: Decision, outcome: str) -> None:
        """What came of it: "served" or "empty"."""
        ...


class Truth(Protocol):
    """What nobody in a fleet can know, and an engine does."""

    def unpromised(self) -> list[tuple[str, int]]:
        """Of every pool its target, and how many are idle there and not promised to a create under way."""
        ...


#: (the cluster's registry, a generator of its own, the truth) → its policy. Only what stands for the limit of what is
#: possible looks at the truth.
PolicyMaker = Callable[[Registry, random.Random, Truth], Policy]


# --- what came of it -------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What came of the creates of one run. A create is one of `local`, `forwarded` and `parked`, by what was done first
    that could be done."""

    creates: int = 0
    #: served at once in the cluster that it arrived at
    local: int = 0
    #: sent to another cluster
    forwarded: int = 0
    #: of these, those sent to a pool that had none idle, to have one added there
    to_grow: int = 0
    #: of those forwarded, those that found none idle when they arrived first
    misplaced: int = 0
    #: of these, those for which another pool had one idle at that moment that was not promised to a create under way
    avoidable: int = 0
    #: of these, those for which that was so when they were sent, too
    foreseeable: int = 0
    #: of those `avoidable`, those that were sent to have one added
    avoidable_to_grow: int = 0
    #: waited for a sandbox in the cluster that they arrived at, from the beginning
    parked: int = 0
    #: of these, those for which another cluster had one idle at that moment that was not promised
    parked_with_room: int = 0
    #: found nothing on their second way either, or were kept at home after the first
    unlucky: int = 0
    #: whatever it was for, had to wait for a sandbox to be added or to come free
    waited: int = 0
    #: still under way or waiting at the end
    unserved: int = 0
    #: how much of all that autoscalers keep ready was idle and not promised, looked at every second: least and average
    room_least: float = 1.0
    room_mean: float = 0.0
    #: seconds until a create had its sandbox, of those that waited to the end the time so far
    wait_mean: float = 0.0
    wait_p99: float = 0.0


class _Create:
    __slots__ = (
        "answer",
        "arrived_at",
        "decision",
        "lifetime",
        "origin",
        "room",
        "served_at",
        "tried",
        "trips",
    )

    def __init__(self, origin: _Cluster, arrived_at: float, lifetime: float, trips: tuple[float, float], answer: float):
        self.origin = origin
        self.arrived_at = arrived_at
        self.lifetime = lifetime
        self.trips = trips
        self.answer = answer
        self.decision = Decision(None, False)
        #: pools that it was turned away from
        self.tried: list[str] = []
        #: whether there was room elsewhere when it was sent
        self.room = False
        self.served_at = -1.0


class Pool:
    """The truth about one pool."""

    __slots__ = ("ceiling", "cluster", "ended", "idle", "name", "promised", "running", "started", "starting", "warm")

    def __init__(self, cluster: _Cluster, name: str, plan: PoolPlan) -> None:
        self.cluster = cluster
        self.name = name
        self.warm, self.ceiling = plan
        self.idle = plan.warm
        self.running = 0
        self.starting = 0
        #: creates under way to it
        self.promised = 0
        #: sandboxes that have ever been idle, and that have ended
        self.started = plan.warm
        self.ended = 0

    @property
    def target(self) -> str:
        """`<cluster>::<pool>`."""
        return f"{self.cluster.id}::{self.name}"

    @property
    def room(self) -> int:
        """How many more may be added."""
        return max(0, self.ceiling - self.idle - self.running - self.starting)


class _Cluster:
    def __init__(self, number: int, plan: ClusterPlan, clock: Callable[[], float], seed: str) -> None:
        self.id = f"c{number:02d}"
        self.plan = plan
        self.registry = Registry(self.id, clock=clock)
        self.pools = [Pool(self, f"p{place}", of) for place, of in enumerate(plan.pools, 1)]
        self.waiting: deque[_Create] = deque()
        self.random = random.Random(f"{seed} {self.id}")
        self.pushed_at = -math.inf
        self.push_due = False

    @property
    def idle(self) -> int:
        """Sandboxes ready."""
        return sum([pool.idle for pool in self.pools])

    def saturated_for(self, now: float) -> float:
        """Seconds for which its owner knows that nothing can be added."""
        return next((min(LONGEST_SATURATION, to - now) for since, to in self.plan.failing if since <= now < to), 0.0)


@dataclass(order=True)
class _Arrival:
    at: float
    cluster: int
    lifetime: float = field(compare=False)
    trips: tuple[float, float] = field(compare=False)
    answer: float = field(compare=False)


def arrivals(plans: Sequence[ClusterPlan], length: float, seed: str) -> list[_Arrival]:
    """The creates of a run, in their order, with everything about them that chance decides. The same for every policy
    and every report interval."""
    found = []
    for number, plan in enumerate(plans):
        chance = random.Random(f"{seed} arrivals {number}")
        at = 0.0
        while plan.most > 0:
            at += chance.expovariate(plan.most)
            if at >= length:
                break
            lifetime, trips = chance.expovariate(1 / plan.lifetime), (chance.uniform(*TRIP), chance.uniform(*TRIP))
            answer = chance.uniform(*ANSWER)
            if chance.random() * plan.most < plan.rate(at):
                found.append(_Arrival(at, number, lifetime, trips, answer))
    return sorted(found)


# --- the engine ------------------------------------------------------------------------------------------------------


class Engine:
    """One run: a fleet, a report interval in seconds, a policy, a seed, and how many seconds creates arrive. The same
    arguments give the same counts, in every process."""

    def __init__(
        self, plans: Sequence[ClusterPlan], policy: PolicyMaker, *, interval: float, length: float, seed: str
    ) -> None:
        self.now = 0.0
        self.length = length
        self.interval = interval
        self.counts = Counts()
        self.clusters = [_Cluster(number, plan, lambda: self.now, seed) for number, plan in enumerate(plans)]
        self.pools = {pool.target: pool for cluster in self.clusters for pool in cluster.pools}
        self.policies = {
            cluster.id: policy(cluster.registry, random.Random(f"{seed} policy {cluster.id}"), self)
            for cluster in self.clusters
        }
        #: every create that has arrived, for the waits at the end
        self.creates: list[_Create] = []
        #: creates that were turned away, and whose origin has not heard of it yet
        self.coming_back = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        for arrival in arrivals(plans, length, seed):
            self.at(arrival.at, self._arrive, arrival)
        everything = [record for cluster in self.clusters for record in self._records(cluster, 0.0)]
        network = random.Random(f"{seed} network")
        for cluster in self.clusters:
            cluster.registry.apply(everything)
            cluster.pushed_at = 0.0
            self.at(network.uniform(0, interval), self._report, cluster, network)
            self.at(network.uniform(0, RECONCILE), self._reconcile, cluster)
        self._warm = sum(pool.warm for pool in self.pools.values())
        self._looks = 0
        self.at(0.0, self._look)

    def run(self) -> Counts:
        """All of it, once."""
        while self._events and self._events[0][0] <= self.length:
            self.step()
        self.now = self.length
        counts = self.counts
        waits = sorted(
            (self.length if each.served_at < 0 else each.served_at) - each.arrived_at for each in self.creates
        )
        counts.room_mean /= max(1, self._looks)
        counts.unserved = sum(each.served_at < 0 for each in self.creates)
        if waits:
            counts.wait_mean = sum(waits) / len(waits)
            counts.wait_p99 = waits[max(0, math.ceil(len(waits) * 0.99) - 1)]
        return counts

    def step(self) -> None:
        """What happens next."""
        self.now, _, happens, arguments = heappop(self._events)
        happens(*arguments)

    def unpromised(self) -> list[tuple[str, int]]:
        """Of every pool its target, and how many are idle there and not promised to a create under way."""
        return [(target, pool.idle - pool.promised) for target, pool in self.pools.items()]

    def at(self, at: float, happens: Callable[..., None], *arguments: Any) -> None:
        """Let something happen at a moment. What is due at the same moment happens in the order of these calls."""
        self._number += 1
        heappush(self._events, (at, self._number, happens, arguments))

    def _look(self) -> None:
        room = sum(max(0, idle) for _, idle in self.unpromised()) / self._warm if self._warm else 0.0
        self._looks += 1
        self.counts.room_least = min(self.counts.room_least, room)
        self.counts.room_mean += room
        self.at(self.now + 1.0, self._look)

    def room_but_in(self, pool: Pool | None, cluster: _Cluster | None = None) -> bool:
        """Whether a pool other than this one, or one of another cluster, has one idle that nobody is promised."""
        return any(
            each.idle > each.promised and each is not pool and each.cluster is not cluster
            for each in self.pools.values()
        )

    # What is known.

    def _records(self, cluster: _Cluster, observed_at: float) -> list[Capacity]:
        saturated_for = cluster.saturated_for(self.now)
        return [
            Capacity(
                cluster.id,
                NAMESPACE,
                ENV,
                pool.name,
                idle=pool.idle,
                running=pool.running,
                pending=len(cluster.waiting) if place == 0 else 0,
                desired=pool.warm,
                autoscaling_enabled=True,
                capacity=pool.room,
                saturated_for=saturated_for,
                observed_at=observed_at,
            )
            for place, pool in enumerate(cluster.pools)
        ]

    def _report(self, cluster: _Cluster, network: random.Random) -> None:
        self._push(cluster)
        taken = self._records(cluster, self.now)
        for other in self.clusters:
            if other is not cluster:
                self.at(self.now + REPORT_AGE + network.uniform(*REPORT_LATENCY), self._deliver, other, taken)
        self.at(self.now + self.interval, self._report, cluster, network)

    def _deliver(self, cluster: _Cluster, taken: list[Capacity]) -> None:
        # The time on the wire is nobody's to know: a receiver takes now, less the age at the sending.
        observed_at = self.now - REPORT_AGE
        cluster.registry.apply(
            [
                Capacity(
                    record.cluster_id,
                    NAMESPACE,
                    ENV,
                    record.member_pool,
                    idle=record.idle,
                    running=record.running,
                    pending=record.pending,
                    desired=record.desired,
                    autoscaling_enabled=True,
                    capacity=record.capacity,
                    saturated_for=record.saturated_for,
                    observed_at=observed_at,
                )
                for record in taken
            ]
        )

    def _changed(self, cluster: _Cluster) -> None:
        if not cluster.push_due:
            cluster.push_due = True
            self.at(max(self.now, cluster.pushed_at + LOCAL_DEBOUNCE), self._push_due, cluster)

    def _push_due(self, cluster: _Cluster) -> None:
        cluster.push_due = False
        self._push(cluster)

    def _push(self, cluster: _Cluster) -> None:
        cluster.pushed_at = self.now
        cluster.registry.apply(self._records(cluster, self.now))

    # What happens to creates.

    def _arrive(self, arrival: _Arrival) -> None:
        self.counts.creates += 1
        cluster = self.clusters[arrival.cluster]
        create = _Create(cluster, self.now, arrival.lifetime, arrival.trips, arrival.answer)
        self.creates.append(create)
        self._decide(create)
        if create.decision.target is not None:
            self.counts.forwarded += 1
            self.counts.to_grow += not create.decision.idle
            self._send(create, create.trips[0])
        elif cluster.idle:
            self.counts.local += 1
            self._serve_in(create, cluster, create.decision.pool)
        else:
            self.counts.parked += 1
            self.counts.parked_with_room += self.room_but_in(None, cluster)
            self._park(create, cluster)

    def _decide(self, create: _Create) -> None:
        policy = self.policies[create.origin.id]
        create.decision = policy.place(create.tried, False)
        if create.decision.target is None and create.decision.idle and not create.origin.idle:
            # It was told of one at home that is gone: the registry is up to a moment behind.
            policy.outcome(create.decision, "empty")
            create.decision = policy.place(create.tried, True)

    def _send(self, create: _Create, trip: float) -> None:
        assert create.decision.target is not None
        pool = self.pools[create.decision.target]
        create.room = self.room_but_in(pool)
        pool.promised += 1
        self.at(self.now + trip, self._come, create, pool)

    def _come(self, create: _Create, pool: Pool) -> None:
        pool.promised -= 1
        first = not create.tried
        if pool.idle:
            self._serve(create, pool)
            return
        if first:
            self.counts.misplaced += 1
            if self.room_but_in(pool):
                self.counts.avoidable += 1
                self.counts.foreseeable += create.room
                self.counts.avoidable_to_grow += not create.decision.idle
        if not create.decision.idle and pool.room and not pool.cluster.saturated_for(self.now):
            # Sent to have one added, which can be done.
            if pool.cluster.idle:
                self._serve_in(create, pool.cluster)
            else:
                self._park(create, pool.cluster)
            return
        create.tried.append(pool.target)
        if first:
            self.coming_back += 1
            self.at(self.now + create.answer, self._turned_away, create)
        else:
            self.counts.unlucky += 1
            self._answer(create, "empty")
            # Pinned to nothing any more, and forwarded enough: it is the cluster's own.
            create.decision = Decision(None, False)
            if pool.cluster.idle:
                self._serve_in(create, pool.cluster)
            else:
                self._park(create, pool.cluster)

    def _turned_away(self, create: _Create) -> None:
        """Back at its origin, with the answer that there was none idle: once more."""
        self.coming_back -= 1
        self.policies[create.origin.id].outcome(create.decision, "empty")
        self._decide(create)
        if create.decision.target is not None:
            self._send(create, create.trips[1])
        elif create.origin.idle:
            self._serve_in(create, create.origin, create.decision.pool)
        else:
            self.counts.unlucky += 1
            self._park(create, create.origin)

    def _park(self, create: _Create, cluster: _Cluster) -> None:
        self.counts.waited += 1
        cluster.waiting.append(create)
        self._changed(cluster)

    def _serve_in(self, create: _Create, cluster: _Cluster, target: str = "") -> None:
        pool = self.pools[target] if target else max(cluster.pools, key=lambda pool: pool.idle)
        self._serve(create, pool)

    def _serve(self, create: _Create, pool: Pool) -> None:
        pool.idle -= 1
        pool.running += 1
        create.served_at = self.now
        self.at(self.now + create.lifetime, self._end, pool)
        self._answer(create, "served")
        self._changed(pool.cluster)

    def _answer(self, create: _Create, outcome: str) -> None:
        """The origin hears of it: at once what happened at home, else when the answer has come. Of a create that has
        become another cluster's own it hears no more."""
        policy = self.policies[create.origin.id]
        if create.decision.target is None:
            policy.outcome(create.decision, outcome)
        else:
            self.at(self.now + create.answer, policy.outcome, create.decision, outcome)

    # What happens to sandboxes.

    def _end(self, pool: Pool) -> None:
        pool.running -= 1
        pool.ended += 1
        self._changed(pool.cluster)

    def _ready(self, pool: Pool) -> None:
        pool.starting -= 1
        pool.idle += 1
        pool.started += 1
        if pool.cluster.waiting:
            self._serve(pool.cluster.waiting.popleft(), pool)
        self._changed(pool.cluster)

    def _reconcile(self, cluster: _Cluster) -> None:
        """Add what is missing: up to `warm` idle in each pool, and one for each create that waits, in any pool."""
        self.at(self.now + RECONCILE, self._reconcile, cluster)
        if cluster.saturated_for(self.now):
            return
        missing = len(cluster.waiting) + sum(pool.warm - pool.idle - pool.starting for pool in cluster.pools)
        for pool in cluster.pools:
            missing -= self._add(pool, min(missing, pool.warm - pool.idle - pool.starting))
        for pool in cluster.pools:
            missing -= self._add(pool, missing)

    def _add(self, pool: Pool, number: int) -> int:
        number = max(0, min(number, pool.room))
        chance = pool.cluster.random
        for _ in range(number):
            took = pool.cluster.plan.start_up * chance.uniform(1 - START_UP_SPREAD, 1 + START_UP_SPREAD)
            self.at(self.now + took, self._ready, pool)
        pool.starting += number
        if number:
            self._changed(pool.cluster)
        return number
