"""Shapes of load, each a fleet and the creates that arrive at it: who has too little where, and when. What happens then
is the engine's business (`placement_fleet.py`)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.placement_fleet import ClusterPlan, PoolPlan

#: seconds for which creates arrive
LENGTH = 240.0
CLUSTERS = 20
POOLS = 2
START_UP = 20.0
LIFETIME = 60.0


class Shape(NamedTuple):
    """A name, what it is for people, and how to make one."""

    name: str
    about: str
    make: Callable[[int, random.Random], tuple[ClusterPlan, ...]]


def _pools(chance: random.Random, least: int = 4, most: int = 16, *, spare: int = 60) -> tuple[PoolPlan, ...]:
    return tuple(PoolPlan(warm, warm + spare) for warm in (chance.randint(least, most) for _ in range(POOLS)))


def sustained(pools: tuple[PoolPlan, ...], start_up: float) -> float:
    """Creates per second that a cluster can serve for ever without anybody waiting: as many as it adds."""
    return sum(pool.warm for pool in pools) / (start_up + 1.0)


def _loaded(
    pools: tuple[PoolPlan, ...],
    load: Callable[[float], float],
    most: float,
    *,
    start_up: float = START_UP,
    failing: tuple[tuple[float, float], ...] = (),
) -> ClusterPlan:
    """A cluster whose load is given as a multiple of what it can sustain."""
    own = sustained(pools, start_up)
    return ClusterPlan(pools, lambda at: own * load(at), own * most, start_up, LIFETIME, failing)


def _steady(clusters: int, chance: random.Random) -> tuple[ClusterPlan, ...]:
    busy = set(chance.sample(range(clusters), max(1, clusters * 3 // 10)))
    return tuple(
        _loaded(_pools(chance), lambda at, load=load: load, load)  # type: ignore[misc]
        for load in (1.3 if number in busy else 0.15 for number in range(clusters))
    )


def _moving_bursts(clusters: int, chance: random.Random) -> tuple[ClusterPlan, ...]:
    return _bursting(clusters, chance, high=3.0, low=0.2)


def _bursting(
    clusters: int, chance: random.Random, *, high: float, low: float, start_up: float = START_UP, size: int = 1,
    every: float = 20.0, failing: bool = False,
) -> tuple[ClusterPlan, ...]:  # fmt: skip
    """Two clusters at a time have a burst, and then the next two."""
    order = list(range(clusters))
    chance.shuffle(order)
    plans = []
    for number in range(clusters):
        place = order[number]

        def load(at: float, place: int = place) -> float:
            return high if place // 2 == int(at / every) % max(1, clusters // 2) else low

        fails = ((60.0, 180.0),) if failing and number % 4 == 0 else ()
        plans.append(_loaded(_pools(chance, 4 * size, 16 * size), load, high, start_up=start_up, failing=fails))
    return tuple(plans)


def _flash_crowd(clusters: int, chance: random.Random) -> tuple[ClusterPlan, ...]:
    hit = chance.sample(range(clusters), max(2, clusters // 2))
    begins = {number: 40.0 if place % 2 else 170.0 for place, number in enumerate(hit)}
    plans = []
    for number in range(clusters):
        since = begins.get(number, math.inf)

        def crowd(at: float, since: float = since) -> float:
            return 0.2 if at < since else 0.2 + 2.3 * math.exp((since - at) / 40)

        plans.append(_loaded(_pools(chance), crowd, 2.5))
    return tuple(plans)


def _diurnal(clusters: int, chance: random.Random) -> tuple[ClusterPlan, ...]:
    plans = []
    for number in range(clusters):
        phase = number % 3 / 3

        def load(at: float, phase: float = phase) -> float:
            return max(0.05, 0.4 + 0.8 * math.sin(2 * math.pi * (at / LENGTH + phase)))

        plans.append(_loaded(_pools(chance), load, 1.2))
    return tuple(plans)


def _one_dry(clusters: int, chance: random.Random) -> tuple[ClusterPlan, ...]:
    dry = ClusterPlan(tuple(PoolPlan(0, 0) for _ in range(POOLS)), lambda at: 3.0, 3.0)
    loads = [chance.uniform(0.1, 0.6) for _ in range(clusters - 1)]
    return (dry, *(_loaded(_pools(chance), lambda at, load=load: load, load) for load in loads))  # type: ignore[misc]


def _slow(clusters: int, chance: random.Random) -> tuple[ClusterPlan, ...]:
    return _bursting(clusters, chance, high=4.5, low=0.2, start_up=90.0, size=2, every=40.0, failing=True)


def _half_at_once(clusters: int, chance: random.Random) -> tuple[ClusterPlan, ...]:
    hit = set(chance.sample(range(clusters), clusters // 2))

    def surge(at: float) -> float:
        return 1.3 if 60 <= at % 120 < 100 else 0.2

    return tuple(
        _loaded(_pools(chance, 2, 20), surge if number in hit else lambda at: 0.1, 1.3) for number in range(clusters)
    )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("steady", "three in ten have a third more than they can sustain, all the time", _steady),
        Shape("moving bursts", "two clusters at a time have three times what they can sustain", _moving_bursts),
        Shape("flash crowd", "a quarter get two and a half times that, all at once; it ebbs away; twice", _flash_crowd),
        Shape("diurnal", "three regions, each with its day, at whose noon they have too little", _diurnal),
        Shape("one dry cluster", "one has no sandboxes, cannot grow, and gets 3 creates a second", _one_dry),
        Shape("slow autoscaler", "bursts, and sandboxes that take 90 s; a quarter adds none for two minutes", _slow),
        Shape("half at once", "half of the fleet has too little for 40 s, the others pools of 2 to 20", _half_at_once),
    )
}


def loaded(clusters: int, chance: random.Random, load: float) -> tuple[ClusterPlan, ...]:
    """Like "steady", for a fleet that has so much of what it can sustain as a whole."""
    busy = set(chance.sample(range(clusters), max(1, clusters * 3 // 10)))
    share = len(busy) / clusters
    high = 1.3 if load <= 0.7 else 1.3 + (load - 0.7) * 2
    low = max(0.0, (load - share * high) / (1 - share))
    return tuple(
        _loaded(_pools(chance), lambda at, own=own: own, own)  # type: ignore[misc]
        for own in (high if number in busy else low for number in range(clusters))
    )


def plans(name: str, *, seed: int, clusters: int = CLUSTERS) -> tuple[ClusterPlan, ...]:
    """The fleet of that shape."""
    return SHAPES[name].make(clusters, random.Random(f"{seed} shape {name}"))
