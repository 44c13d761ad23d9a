"""What a scrape of /metrics costs, and what everybody else in the process notices of it: the time to the full answer,
and how late a task wakes meanwhile that wants to wake every millisecond. Beside it prometheus_client's own way. Without
HTTP, which is the server's affair."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import trio
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.measure import Figure, compared, median, percentile
from trio_federation.capacity import Capacity
from trio_federation.metrics import FederationMetrics, publish_metrics
from trio_federation.registry import Registry

CLUSTERS = 20
SIZES = (1_000, 10_000, 100_000)
#: Scrapes of each size, and those in prometheus_client's way, which takes more than ten seconds for the largest.
SCRAPES = 5
SCRAPES_BESIDE = {1_000: 5, 10_000: 3, 100_000: 1}
#: Seconds between two wishes to wake.
TICK = 0.001


class Scrape(NamedTuple):
    """One scrape: seconds to the full answer, its bytes, and by how many seconds each waking meanwhile was late."""

    took: float
    size: int
    late: list[float]


def run(*, quick: bool = False) -> list[Figure]:
    """Milliseconds of an answer and of the stalls; 20 clusters per env, a pool of each. `quick`: without 100,000."""
    figures = []
    for size in SIZES[:2] if quick else SIZES:
        figures += trio.run(_figures, size)
    return figures


async def _figures(size: int) -> list[Figure]:
    registry = _registry(size)
    metrics = FederationMetrics(started_at=0.0)
    plain = CollectorRegistry()

    async def ours() -> int:
        return sum([len(chunk) async for chunk in metrics.exposition(registry.by_env(), now=5.0, held=registry.held)])

    async def prometheus_clients() -> int:
        publish_metrics(registry.snapshot(), plain, now=5.0)
        return len(generate_latest(plain))

    first = await _scrape(ours)
    scrapes = [await _scrape(ours) for _ in range(SCRAPES)]
    others = [await _scrape(prometheus_clients) for _ in range(SCRAPES_BESIDE[size])]
    return _table(size, first, scrapes, others)


def _table(size: int, first: Scrape, scrapes: Sequence[Scrape], others: Sequence[Scrape]) -> list[Figure]:
    def milliseconds(what: str, of: Callable[[Sequence[Scrape]], float]) -> Figure:
        return compared(f"{what}, {size:,} records", of(scrapes) * 1e3, "ms", of(others) * 1e3, "prometheus_client")

    def answer(of: Sequence[Scrape]) -> float:
        return median([scrape.took for scrape in of])

    def longest(of: Sequence[Scrape]) -> float:
        return max(late for scrape in of for late in scrape.late)

    def near_longest(of: Sequence[Scrape]) -> float:
        return percentile([late for scrape in of for late in scrape.late], 99)

    return [
        Figure(f"size of the answer, {size:,} records", first.size / 1e6, "MB"),
        Figure(f"first answer, {size:,} records", first.took * 1e3, "ms", "goal: under 1,000 ms"),
        milliseconds("answer", answer),
        milliseconds("stall at the 99th percentile", near_longest),
        milliseconds("longest stall", longest),
    ]


async def _scrape(scrape: Callable[[], Awaitable[int]]) -> Scrape:
    """One scrape, while another task keeps waking."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK
            await trio.sleep(TICK)
            late.append(max(0.0, time.perf_counter() - due))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        await trio.sleep(20 * TICK)
        late.clear()
        began = time.perf_counter()
        size = await scrape()
        took = time.perf_counter() - began
        await trio.sleep(2 * TICK)  # the waking that was due at the end, too
        nursery.cancel_scope.cancel()
    return Scrape(took, size, late)


def _registry(size: int) -> Registry:
    """As watchers fill one: what belongs together comes from many sides, at many times."""
    generator = random.Random(size)
    registry = Registry("cluster-0", clock=lambda: 5.0)
    count = partial(generator.randrange, 200)
    records = [
        Capacity(
            *(f"cluster-{cluster}", "agents", f"env-{env}", "pool"),
            idle=count(),
            running=count(),
            desired=count(),
            autoscaling_enabled=True,
            capacity=generator.randrange(-1, 50),
            observed_at=generator.uniform(0.0, 5.0),
        )
        for env in range(size // CLUSTERS)
        for cluster in range(CLUSTERS)
    ]
    generator.shuffle(records)
    registry.upsert(records)
    return registry
