"""Where creates go in a simulated fleet: what `Router.place` sends astray, beside other policies on the same seeds, and
what a placement costs.

Fleets run on virtual time, in as many processes as there are cores (`placement_fleet.py`); the same seed gives the same
counts on every machine. What the figures mean is in docs/placement.md."""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from benchmarks import placement_cost
from benchmarks.measure import Figure
from benchmarks.placement_fleet import Counts, Engine
from benchmarks.placement_policies import ALL_KNOWING, OURS, POLICIES, policy
from benchmarks.placement_shapes import CLUSTERS, LENGTH, SHAPES, loaded, plans

INTERVALS = (1.0, 5.0, 15.0)
SEEDS = (1, 2, 3, 4)
#: For the loads of a whole fleet, as shares of what it can sustain.
LOADS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LOADS_INTERVAL = 5.0
LOADS_SEEDS = (1, 2)
#: Percent of the creates that were forwarded.
GOAL = 0.5

QUICK_LENGTH = 60.0
QUICK_CLUSTERS = 10


class Run(NamedTuple):
    """What one run is to simulate. `load`: None for the shape of that name."""

    shape: str
    interval: float
    policy: str
    seed: int
    length: float
    clusters: int
    load: float | None = None


@dataclass(frozen=True, slots=True)
class PlacementFigure(Figure):
    """A figure of ours, with everything that was counted behind it, by policy (`summary`)."""

    shape: str = ""
    #: seconds between reports
    interval: float = 0.0
    load: float | None = None
    details: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def run(*, quick: bool = False) -> list[Figure]:
    """Percent of the forwarded creates that ours misplaced avoidably, beside others; microseconds of a placement."""
    shapes = tuple(_runs(quick))
    print(f"  {len(shapes)} runs of fleets", file=sys.stderr)
    counted = dict(zip(shapes, _counted(shapes), strict=True))
    grouped: dict[tuple[str, float, float | None], dict[str, list[Counts]]] = {}
    for each, counts in counted.items():
        of_policy = grouped.setdefault((each.shape, each.interval, each.load), {})
        of_policy.setdefault(each.policy, []).append(counts)
    figures: list[Figure] = []
    for (shape, interval, load), found in grouped.items():
        # It looks at no reports.
        found.setdefault(ALL_KNOWING, grouped.get((shape, INTERVALS[-1], load), {}).get(ALL_KNOWING, []))
        details = {name: summary(found[name]) for name in POLICIES if found.get(name)}
        what = (
            f"{shape}, {interval:g} s"
            if load is None
            else f"fleet at {load:.0%} of what it can sustain, {interval:g} s"
        )
        figures.append(
            PlacementFigure(
                what, details[OURS]["avoidable"], "%", _beside(details), None, shape, interval, load, details
            )
        )
    print("  what a placement costs", file=sys.stderr)
    return figures + placement_cost.figures(quick=quick)


def _runs(quick: bool) -> Iterator[Run]:
    length, clusters = (QUICK_LENGTH, QUICK_CLUSTERS) if quick else (LENGTH, CLUSTERS)
    for shape in SHAPES:
        for interval in (LOADS_INTERVAL,) if quick else INTERVALS:
            for name in POLICIES:
                if name == ALL_KNOWING and interval != INTERVALS[-1]:
                    continue
                for seed in SEEDS[:1] if quick else SEEDS:
                    yield Run(shape, interval, name, seed, length, clusters)
    for load in () if quick else LOADS:
        for name in POLICIES:
            for seed in LOADS_SEEDS if name != ALL_KNOWING else ():
                yield Run("load", LOADS_INTERVAL, name, seed, length, clusters, load)


def _counted(runs: Sequence[Run]) -> list[Counts]:
    # Longest first would be quicker by a moment; in this order the results are.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(simulate, runs, chunksize=4))


def simulate(run: Run) -> Counts:
    """What came of one run."""
    if run.load is None:
        fleet = plans(run.shape, seed=run.seed, clusters=run.clusters)
    else:
        fleet = loaded(run.clusters, random.Random(f"{run.seed} load"), run.load)
    engine = Engine(
        fleet,
        policy(run.policy, run.interval),
        interval=run.interval,
        length=run.length,
        seed=f"{run.seed} {run.shape}",
    )
    return engine.run()


def summary(found: Sequence[Counts]) -> dict[str, float]:
    """The counts of several seeds as one. Shares are percent of all creates; `misplaced`, `avoidable`, `foreseeable`
    and `to_grow` are percent of those that were forwarded. `least` and `most` are those of one seed."""
    total = {name: sum(getattr(counts, name) for counts in found) for name in asdict(found[0])}
    creates, forwarded = max(1, total["creates"]), max(1, total["forwarded"])
    by_seed = [100 * counts.avoidable / max(1, counts.forwarded) for counts in found]
    shares = {
        name: 100 * total[name] / creates
        for name in ("local", "forwarded", "parked", "parked_with_room", "unlucky", "waited")
    }
    shares |= {name: 100 * total[name] / forwarded for name in ("misplaced", "avoidable", "foreseeable", "to_grow")}
    return shares | {
        "creates": total["creates"],
        "forwarded_creates": total["forwarded"],
        "avoidable_least": min(by_seed),
        "avoidable_most": max(by_seed),
        "avoidable_spread": statistics.stdev(by_seed) if len(by_seed) > 1 else 0.0,
        "room_least": 100 * min(counts.room_least for counts in found),
        "room_mean": 100 * total["room_mean"] / len(found),
        "wait_mean": total["wait_mean"] / len(found),
        "wait_p99": max(counts.wait_p99 for counts in found),
        "seeds": len(found),
    }


def _beside(details: Mapping[str, Mapping[str, float]]) -> str:
    others = ", ".join(f"{name} {found['avoidable']:.2f}" for name, found in details.items() if name != OURS)
    ours = details[OURS]
    return (
        f"{others}; goal {GOAL:g} where there is room: {ours['room_least']:.0f} % idle at least; "
        f"seeds {ours['avoidable_least']:.2f} to {ours['avoidable_most']:.2f}"
    )
