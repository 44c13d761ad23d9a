"""An hour of a whole federation on virtual time: real agents, a real hub, the real gRPC stack over memory."""

from __future__ import annotations

import logging

import structlog
import trio
from trio.testing import MockClock

from benchmarks.measure import Figure, seconds
from tests.simulation import member, simulated_federation

HOUR = 3600.0
CLUSTERS = ("west", "east", "north")


async def _hour(pools: int) -> None:
    async with simulated_federation(*CLUSTERS) as federation:
        for cluster in CLUSTERS:
            federation[cluster].source.set(*[member(cluster, f"pool-{number}", idle=number) for number in range(pools)])
        await trio.sleep(HOUR)


def run() -> list[Figure]:
    """Seconds of real time per virtual hour."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures = []
    for pools in (1, 20):
        took = seconds(lambda: trio.run(_hour, pools, clock=MockClock(autojump_threshold=0)), repeat=1)  # noqa: B023
        figures.append(
            Figure(f"an hour of 3 clusters with {pools} pools each", took, "s", f"{HOUR / took:,.0f} times real time")
        )
    return figures
