"""What one delivery costs a hub: CPU of its whole process, for batches of 1, 50 and 1,000 records to 20 and 100
watchers, beside the same hub on grpcio.aio. A delivery is one batch at one watcher."""

from __future__ import annotations

import sys

from benchmarks.hubs import HUBS, peers_of
from benchmarks.measure import Figure, records_of, shown

WATCHERS = (20, 100)
#: Batches by the number of records in each, with 20 watchers; with more watchers there are so many fewer.
BATCHES = {1: 400, 50: 200, 1_000: 20}
QUICK_WATCHERS = (5,)
QUICK_BATCHES = {1: 4, 1_000: 2}


def run(*, quick: bool = False) -> list[Figure]:
    """Microseconds of CPU per delivery."""
    figures = []
    for watchers in QUICK_WATCHERS if quick else WATCHERS:
        costs: dict[tuple[str, int], float] = {}
        for name, start in HUBS.items():
            print(f"  {name}, {watchers} watchers", file=sys.stderr)
            with start() as hub, peers_of(hub, watchers) as peers:
                for records, batches in (QUICK_BATCHES if quick else BATCHES).items():
                    measured = max(2, batches * 20 // max(20, watchers))
                    peers.send(records, max(1, measured // 4))  # to warm up
                    before = hub.child.cpu_seconds()
                    peers.send(records, measured)
                    used = hub.child.cpu_seconds() - before
                    costs[name, records] = used / (measured * watchers) * 1e6
        for records in QUICK_BATCHES if quick else BATCHES:
            for name in HUBS:
                cost = costs[name, records]
                what = f"{records_of(records)} × {watchers}: {name}"
                if name == "ours":
                    theirs, shared = costs["grpcio", records], costs["grpcio, shared bytes", records]
                    beside = f"grpcio; {shown(cost / shared, 2)}x: shared bytes"
                    figures.append(Figure(what, cost, "µs", beside, cost / theirs))
                else:
                    figures.append(Figure(what, cost, "µs"))
    return figures
