"""What `Router.place` costs with reservations present: against the members of an env, and against the records of all
the others. Each size is measured in a process of its own. Part of `placement.py`."""

from __future__ import annotations

import argparse
import gc
import random
import time

from benchmarks.children import running_module, say
from benchmarks.measure import Figure, median, percentile
from trio_federation.capacity import Capacity
from trio_federation.clock import boot_time
from trio_federation.registry import Registry
from trio_federation.router import Router

#: (records, members per env), of which the first is what the rest is compared with
SIZES = ((100_000, 20), (1_000, 20), (100_000, 5), (100_000, 100), (1_000, 5), (1_000, 100))
QUICK_SIZES = ((10_000, 20), (1_000, 20), (10_000, 5))
#: Envs that are asked for, one call each, drawn by lot.
QUERIES = 2_000
#: So often, of which the least counts, so that what else the machine does counts least.
ROUNDS = 5
#: Reservations that stand in each of these envs before.
RESERVED = 3
#: Microseconds that 99 of 100 placements should not exceed.
GOAL = 100.0
#: Seconds: longer than it takes, so that neither records nor reservations run out.
TTL = 3600.0
NAMESPACE = "agents"


def figures(*, quick: bool = False) -> list[Figure]:
    """Microseconds of a placement that reserves."""
    found: list[Figure] = []
    first: float | None = None
    for records, members in QUICK_SIZES if quick else SIZES:
        with running_module("placement_cost", records, members, name="the process that places") as child:
            costs = child.hear()
        first = costs["median"] if first is None else first
        found.append(
            Figure(
                f"place, {records:,} records, {members} per env",
                costs["median"],
                "µs",
                f"the first; p99 {costs['p99']:.0f} µs, goal {GOAL:g} µs; of CPU {costs['CPU']:.0f} µs and "
                f"{costs['CPU, p99']:.0f} µs",
                costs["median"] / first,
            )
        )
    return found


# --- in the child ----------------------------------------------------------------------------------------------------


def measure(records: int, members: int) -> dict[str, float]:
    """Microseconds of a placement in envs of so many members, of which nothing is idle at home."""
    chance = random.Random(records + members)
    envs = max(1, records // members)
    registry = Registry("cluster-0", ttl=TTL, clock=boot_time)
    for cluster in range(members):
        registry.upsert(
            Capacity(
                f"cluster-{cluster}",
                NAMESPACE,
                f"env-{env}",
                f"pool-{cluster}",
                idle=0 if cluster == 0 else chance.randint(RESERVED + 2, 20),
                running=chance.randrange(100),
                desired=10,
                autoscaling_enabled=True,
                capacity=chance.randrange(50),
                state="Active",
                observed_at=boot_time(),
            )
            for env in range(envs)
        )
    router = Router(registry, reservation_ttl=TTL, random=random.Random(records))
    asked = [f"env-{number}" for number in chance.sample(range(envs), min(envs, QUERIES))]
    for name in asked:
        for _ in range(RESERVED):
            router.place(NAMESPACE, name)
    # In small registries an env comes up more than once; what is reserved of it grows, and with it nothing else.
    rounds = [_round(router, [chance.choice(asked) for _ in range(QUERIES)]) for _ in range(ROUNDS)]
    assert router.reserved() >= RESERVED * len(asked) + QUERIES * ROUNDS
    return {what: min(each[what] for each in rounds) for what in rounds[0]}


def _round(router: Router, names: list[str]) -> dict[str, float]:
    took, cpu = [], []
    gc.collect()
    for name in names:
        began, cpu_began = time.perf_counter(), time.thread_time()
        router.place(NAMESPACE, name)
        cpu.append(time.thread_time() - cpu_began)
        took.append(time.perf_counter() - began)
    return {
        "median": median(took) * 1e6,
        "p99": percentile(took, 99) * 1e6,
        "CPU": median(cpu) * 1e6,
        "CPU, p99": percentile(cpu, 99) * 1e6,
    }


def main() -> None:
    """Measure one size, in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=int)
    parser.add_argument("members", type=int)
    arguments = parser.parse_args()
    say(**measure(arguments.records, arguments.members))


if __name__ == "__main__":
    main()
