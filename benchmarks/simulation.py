"""An hour of a whole federation on virtual time: real agents, a real hub, the real gRPC stack over memory."""

from __future__ import annotations

import logging

import structlog
import trio
from trio.testing import MockClock

from benchmarks.measure import Figure, seconds
from tests.simulation import member, simulated_federation

HOUR = 3600.0
QUICK = 300.0
CLUSTERS = ("west", "east", "north")


async def _run_for(length: float, pools: int) -> None:
    async with simulated_federation(*CLUSTERS) as federation:
        for cluster in CLUSTERS:
            federation[cluster].source.set(*[member(cluster, f"pool-{number}", idle=number) for number in range(pools)])
        await trio.sleep(length)


def run(*, quick: bool = False) -> list[Figure]:
    """Seconds of real time per virtual hour."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    length = QUICK if quick else HOUR
    figures = []
    for pools in (1, 20):
        took = seconds(lambda: trio.run(_run_for, length, pools, clock=MockClock(autojump_threshold=0)), repeat=1)  # noqa: B023
        what = f"{length / 60:g} minutes of 3 clusters with {pools} pool{'' if pools == 1 else 's'} each"
        figures.append(Figure(what, took, "s", f"{length / took:,.0f} times real time"))
    return figures
