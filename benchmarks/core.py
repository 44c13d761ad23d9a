"""What the registry and the router cost, at growing sizes: a query should not depend on the size of the registry."""

from __future__ import annotations

import random

from benchmarks.measure import Figure, seconds
from trio_federation.capacity import Capacity
from trio_federation.registry import Registry
from trio_federation.router import Router

CLUSTERS = 20
SIZES = (1_000, 10_000, 100_000)


def run() -> list[Figure]:
    """Microseconds per call; 20 clusters per env."""
    figures = []
    base: dict[str, float] = {}
    for size in SIZES:
        registry = Registry("cluster-0", clock=lambda: 0.0)
        generator = random.Random(size)
        envs = size // CLUSTERS
        records = [
            Capacity(
                f"cluster-{cluster}", "agents", f"env-{env}", "pool", idle=0 if cluster == 0 else generator.randrange(9)
            )
            for env in range(envs)
            for cluster in range(CLUSTERS)
        ]
        upsert = seconds(lambda: registry.upsert(records), repeat=3) / size * 1e6  # noqa: B023 - called before the next round
        router = Router(registry, random=random.Random(0))
        names = [f"env-{generator.randrange(envs)}" for _ in range(500)]

        def best() -> None:
            for name in names:  # noqa: B023
                registry.best_foreign_member("agents", name)  # noqa: B023

        def place() -> None:
            for name in names:  # noqa: B023
                router.place("agents", name)  # noqa: B023

        costs = {
            "upsert, per record": upsert,
            "best_foreign_member": seconds(best) / len(names) * 1e6,
            "place": seconds(place) / len(names) * 1e6,
            "snapshot, per record": seconds(registry.snapshot, repeat=3) / size * 1e6,
        }
        for what, cost in costs.items():
            base.setdefault(what, cost)
            beside = f"{cost / base[what]:.2f}x of {SIZES[0]:,} records" if size != SIZES[0] else ""
            figures.append(Figure(f"{what}, {size:,} records", cost, "µs", beside))
    return figures
