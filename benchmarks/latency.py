"""How long a change takes from one cluster's source to another cluster's Registry, over loopback: two agents and a hub,
each in a process of its own, with their real code."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from benchmarks.children import Child, running_module
from benchmarks.hubs import agent_config, grpcio_hub, our_hub, peers_of
from benchmarks.latency_agent import POOLS
from benchmarks.measure import Figure, compared, percentile, records_of
from trio_federation.reporter import DEBOUNCE

SIZES = (1, 50, 1_000)
#: Changes that are measured for each size: with the reporter's debounce, and without it.
ROUNDS = 100
FAST_ROUNDS = 200
QUICK_ROUNDS = 2
#: Seconds at most between the arrival of a change and the next, drawn by lot, so that changes do not follow resyncs.
PAUSE = 0.05


def run(*, quick: bool = False) -> list[Figure]:
    """Milliseconds from the source's push to the end of the remote `Registry.apply`."""
    figures = []
    print("  with the debounce", file=sys.stderr)
    debounced = _through_agents(QUICK_ROUNDS if quick else ROUNDS)
    print("  without the debounce", file=sys.stderr)
    fast = _through_agents(QUICK_ROUNDS if quick else FAST_ROUNDS, "--debounce", "0")
    print("  grpcio", file=sys.stderr)
    bare = _through_grpcio(QUICK_ROUNDS if quick else FAST_ROUNDS)
    for percent in (50, 99):
        for size in SIZES:
            value = 1000 * percentile(debounced[size], percent)
            beside = f"debounce {1000 * DEBOUNCE:g} ms; p{percent} of {len(debounced[size])} changes"
            figures.append(Figure(f"{records_of(size)}, p{percent}", value, "ms", beside, value / (1000 * DEBOUNCE)))
    for percent in (50, 99):
        for size in SIZES:
            value = 1000 * percentile(fast[size], percent)
            other = 1000 * percentile(bare[size], percent)
            figures.append(
                compared(f"{records_of(size)}, debounce set to 0, p{percent}", value, "ms", other, "bare grpcio")
            )
    return figures


def _through_agents(rounds: int, *options: str) -> dict[int, list[float]]:
    """Seconds of every change, by the number of records in it."""
    generator = random.Random(0)
    took: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, our_hub() as hub:

        def agent(cluster_id: str, pools: int) -> str:
            path = Path(folder, f"{cluster_id}.toml")
            path.write_text(agent_config(cluster_id, hub.port, f'type = "benchmark"\npools = {pools}'))
            return str(path)

        with (
            running_module("latency_agent", agent("there", 0), name="the watching agent") as watching,
            running_module("latency_agent", agent("here", POOLS), *options, name="the reporting agent") as reporting,
        ):
            for child in (watching, reporting):
                child.hear(ready=True)
            # A first one goes through when both are connected.
            generation = 1
            _change(reporting, watching, generation, POOLS, 0.0)
            for size in SIZES:
                took[size] = []
                for number in range(rounds + 3):
                    generation += 1
                    seconds = _change(reporting, watching, generation, size, generator.uniform(0, PAUSE))
                    if number >= 3:  # the first ones warm up
                        took[size].append(seconds)
    return took


def _change(reporting: Child, watching: Child, generation: int, records: int, pause: float) -> float:
    """Seconds of one change."""
    reporting.tell(generation=generation, records=records, pause=pause)
    pushed_at: float = reporting.hear(pushed=generation)["at"]
    arrived_at: float = watching.hear(arrived=generation, records=records)["at"]
    return arrived_at - pushed_at


def _through_grpcio(rounds: int) -> dict[int, list[float]]:
    """The same messages from a grpcio client over a hub on grpcio.aio to a grpcio client, without agents."""
    with grpcio_hub("each") as hub, peers_of(hub, 1) as peers:
        peers.send(POOLS, 3)
        return {size: peers.send(size, rounds) for size in SIZES}
