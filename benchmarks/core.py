"""What the registry and the router cost, at growing sizes: a query should not depend on the size of the registry.

Each size is measured in a process of its own, so that none inherits another's heap. Records are like those that a
watcher makes: with origins of their own, and strings as `wire.py` gives them, 20 clusters per env, in batches of 1,000
that come cluster by cluster."""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.children import running_module, say
from benchmarks.measure import Figure, compared, each, median, percentile, resident_bytes, seconds, shown
from trio_federation.capacity import Capacity, Identity, Origin
from trio_federation.clock import boot_time
from trio_federation.registry import Registry
from trio_federation.router import Router
from trio_federation.wire import broadcast_messages, changes_of, decode, encode

CLUSTERS = 20
SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 10_000)
#: Records that come at once: as many as a message of ours carries.
BATCH = 1_000
#: Envs that are asked for, one call each, drawn by lot.
QUERIES = 2_000
#: Microseconds of a query at the median that we want to stay under.
GOAL = 20.0
#: Seconds: longer than the benchmark, which is not about expiry.
TTL = 3600.0
LOCAL = "cluster-0"
#: In letters: joined anew for each record.
NAMESPACE = tuple("agents")
STATE = tuple("Active")


def run(*, quick: bool = False) -> list[Figure]:
    """Microseconds per record and per query, bytes per record, and how they grow with the size."""
    figures = []
    first: dict[str, float] = {}
    for size in QUICK_SIZES if quick else SIZES:
        print(f"  {size:,} records", file=sys.stderr)
        costs = _child("times", size)
        held, plain = _child("registry", size)["bytes"], _child("dict", size)["bytes"]

        figures += [
            compared(f"insert, per record, {size:,}", costs["insert"], "µs", costs["dict insert"], "dict"),
            compared(f"refresh, per record, {size:,}", costs["refresh"], "µs", costs["dict refresh"], "dict"),
        ]
        for what, floor in (
            ("best_foreign_member", f"; max() of a list {shown(costs['max of a list'])} µs"),
            ("place", ""),
        ):
            base = first.setdefault(what, costs[what])
            beside = f"{SIZES[0]:,} records; goal {GOAL:g} µs; p99 {shown(costs[f'{what}, p99'])} µs{floor}"
            figures.append(Figure(f"{what}, {size:,}", costs[what], "µs", beside, costs[what] / base))
        figures += [
            compared(f"snapshot, per record, {size:,}", costs["snapshot"], "µs", costs["dict sorted"], "sorted dict"),
            compared(f"memory, per record, {size:,}", held, "B", plain, "dict"),
            compared(f"garbage collection, {size:,}", costs["collection"], "ms", costs["dict collection"], "dict"),
        ]
    return figures


def _child(what: str, size: int) -> dict[str, float]:
    with running_module("core", what, size, name=f"the process that measures {size:,} records") as child:
        costs: dict[str, float] = child.hear()
    return costs


# --- in the child ----------------------------------------------------------------------------------------------------


def _wire_shares_strings() -> bool:
    """Whether records that come over the wire share strings of equal text, instead of having one each."""

    def decoded() -> Capacity:
        (message,) = broadcast_messages([Capacity("cluster", "agents", "env", "pool")], 0.0)
        (change,) = changes_of(decode(encode(message), type(message)), 0.0).changes
        assert isinstance(change, Capacity)
        return change

    return decoded().env_name is decoded().env_name


def _batches(size: int, seq: int) -> Iterator[list[Capacity]]:
    """`size` records, observed now, as the `seq`th batch of each cluster brings them."""
    shared: Callable[[str], str] = sys.intern if _wire_shares_strings() else str
    generator = random.Random(size)
    batch: list[Capacity] = []
    for cluster in range(CLUSTERS):
        started_at = boot_time() - 1000.0
        for env in range(size // CLUSTERS):
            batch.append(
                Capacity(
                    shared(f"cluster-{cluster}"),
                    shared("".join(NAMESPACE)),
                    shared(f"env-{env}"),
                    shared(f"pool-{cluster}"),
                    idle=0 if cluster == 0 else generator.randrange(9),
                    running=generator.randrange(100),
                    desired=10,
                    state=shared("".join(STATE)),
                    observed_at=boot_time(),
                    origin=Origin(f"{cluster:032x}", seq, started_at),
                )
            )
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def _measure_times(size: int) -> dict[str, float]:
    generator = random.Random(size)
    names = [f"env-{generator.randrange(size // CLUSTERS)}" for _ in range(QUERIES)]
    return _times_of_registry(size, names) | _times_of_dict(size, names)


def _times_of_registry(size: int, names: list[str]) -> dict[str, float]:
    registry = Registry(LOCAL, ttl=TTL, clock=boot_time)
    router = Router(registry)
    costs = {
        # Only the call itself counts, batch by batch; making the records is the wire's business.
        "insert": median(each(registry.upsert, _batches(size, 1))) / min(size, BATCH) * 1e6,
        "refresh": median(each(registry.upsert, _batches(size, 2))) / min(size, BATCH) * 1e6,
    }
    assert len(registry) == size
    namespace = "".join(NAMESPACE)
    queries = {
        "best_foreign_member": each(lambda name: registry.best_foreign_member(namespace, name), names),
        "place": each(lambda name: router.place(namespace, name, reserve=False), names),
    }
    for what, took in queries.items():
        costs[what] = median(took) * 1e6
        costs[f"{what}, p99"] = percentile(took, 99) * 1e6
    costs["snapshot"] = seconds(registry.snapshot, repeat=3) / size * 1e6
    gc.collect()
    costs["collection"] = 1000 * seconds(gc.collect, repeat=3)
    return costs


def _times_of_dict(size: int, names: list[str]) -> dict[str, float]:
    """The least that anybody could do: the same records in a dict, and, for the query, a list for each env."""
    plain: dict[Identity, Capacity] = {}

    def take_in(batch: list[Capacity]) -> None:
        for record in batch:
            plain[record.identity] = record

    costs = {
        "dict insert": median(each(take_in, _batches(size, 1))) / min(size, BATCH) * 1e6,
        "dict refresh": median(each(take_in, _batches(size, 2))) / min(size, BATCH) * 1e6,
        "dict sorted": seconds(lambda: sorted(plain.values(), key=lambda record: record.sort_key), repeat=3)
        / size
        * 1e6,
    }
    gc.collect()
    costs["dict collection"] = 1000 * seconds(gc.collect, repeat=3)
    lists: dict[str, list[Capacity]] = {}
    for record in plain.values():
        lists.setdefault(record.env_name, []).append(record)

    def best(name: str) -> Capacity | None:
        foreign = [record for record in lists[name] if record.cluster_id != LOCAL and record.idle > 0]
        return max(foreign, key=lambda record: record.idle, default=None)

    costs["max of a list"] = median(each(best, names)) * 1e6
    return costs


def _measure_memory(size: int, kind: str) -> dict[str, float]:
    """Bytes per record, by the growth of the whole process: records, their strings, the index, the allocator's rest."""
    registry = Registry(LOCAL, ttl=TTL, clock=boot_time)
    plain: dict[Identity, Capacity] = {}
    gc.collect()
    before = resident_bytes()
    for batch in _batches(size, 1):
        if kind == "registry":
            registry.upsert(batch)
        else:
            plain.update((record.identity, record) for record in batch)
    gc.collect()
    grown = resident_bytes() - before
    assert len(plain) + len(registry) == size
    return {"bytes": grown / size}


def main() -> None:
    """Measure one size, in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["times", "registry", "dict"])
    parser.add_argument("size", type=int)
    arguments = parser.parse_args()
    began = time.perf_counter()
    if arguments.what == "times":
        costs = _measure_times(arguments.size)
    else:
        costs = _measure_memory(arguments.size, arguments.what)
    say(**costs, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
