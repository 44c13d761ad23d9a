"""An hour of a whole federation on virtual time: real agents, a real hub, the real gRPC stack over memory."""

from __future__ import annotations

import logging
import sys
import time
from typing import NamedTuple

import structlog
import trio
from trio.testing import MockClock

from benchmarks.measure import Figure
from trio_federation.testing.records import member
from trio_federation.testing.simulation import simulated_federation

HOUR = 3600.0


class Size(NamedTuple):
    """A federation, the seconds of it that are simulated in a quick run, and the goal in seconds for the hour."""

    clusters: int
    pools: int
    quick: float
    goal: float | None = None
    #: whether the event log is kept, as it is unless a test says otherwise
    events: bool = True


SIZES = (Size(3, 1, 300.0), Size(3, 20, 300.0), Size(5, 20, 120.0, 10.0), Size(50, 20, 15.0, 180.0, events=False))


#: Virtual seconds in which everything connects and hears everything, which comes once and not every second.
START = 2.0


async def _run_for(length: float, clusters: int, pools: int, events: bool) -> float:
    """Returns the seconds of real time that what came after the start took."""
    names = [f"cluster-{number}" for number in range(clusters)]
    async with simulated_federation(*names, events=events) as federation:
        for name in names:
            federation[name].source.set(*[member(name, f"pool-{number}", idle=number) for number in range(pools)])
        await trio.sleep(START)
        began = time.perf_counter()
        await trio.sleep(length - START)
        return time.perf_counter() - began


def run(*, quick: bool = False) -> list[Figure]:
    """Seconds of real time per virtual hour. What was shorter is told as an hour, and says so."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures = []
    for clusters, pools, quick_length, goal, events in SIZES:
        length = quick_length if quick else HOUR
        name = f"{clusters} clusters with {pools} pool{'' if pools == 1 else 's'} each"
        print(f"  {name}, {length:g} s", file=sys.stderr)
        began = time.perf_counter()
        after_start = trio.run(_run_for, length, clusters, pools, events, clock=MockClock(autojump_threshold=0))
        took = time.perf_counter() - began
        # Start and end come once, however long it goes on between them.
        hour = took + after_start * (HOUR - length) / (length - START)
        beside = [f"{HOUR / hour:,.0f} times real time"]
        if length != HOUR:
            beside.append(f"told from {length:g} s of it")
        if goal is not None:
            beside.append(f"goal {goal:g} s")
        if not events:
            beside.append("without an event log")
        figures.append(Figure(f"an hour of {name}", hour, "s", "; ".join(beside)))
    return figures
