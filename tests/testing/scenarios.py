"""Simulated federations that are run again and again, in this process and in others, to see whether a seed makes the
same run every time; and the program that runs them: `python -m tests.testing.scenarios`. What is compared is the
business of the tests."""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import structlog
import trio

from trio_federation.capacity import Capacity
from trio_federation.errors import RpcError
from trio_federation.testing.clusters import SimulatedCluster
from trio_federation.testing.records import member
from trio_federation.testing.scripted import PushingSource
from trio_federation.testing.simulation import Simulation, run_simulated, simulated_federation

#: What is done to a federation: `do(fed, name, generator)`, with the name of one of its clusters.
Step: TypeAlias = Callable[[Simulation, str, random.Random], Awaitable[None]]


class Broken(Exception):
    """What a source that was made to fail raises."""


# Faults, each from its beginning to its end.


async def partition(fed: Simulation, name: str, generator: random.Random) -> None:
    """A cluster is cut off from one hub or from all, with or without a word."""
    hub = generator.choice([None, *range(len(fed.hubs))])
    fed.partition(name, hub=hub, silently=generator.random() < 0.5)
    await trio.sleep(generator.uniform(1.0, 25.0))
    fed.heal(name, hub=hub)


async def one_way(fed: Simulation, name: str, generator: random.Random) -> None:
    """What is said in one direction does not arrive."""
    fed.partition(name, one_way=generator.choice(["to_hub", "to_cluster"]))
    await trio.sleep(generator.uniform(1.0, 25.0))
    fed.heal(name)


async def black_hole(fed: Simulation, name: str, generator: random.Random) -> None:
    """Nothing arrives in either direction."""
    fed.black_hole(name)
    await trio.sleep(generator.uniform(1.0, 25.0))
    fed.heal(name)


async def cut(fed: Simulation, name: str, generator: random.Random) -> None:
    """Every connection breaks, of one cluster or of all."""
    for each in [name] if generator.random() < 0.5 else list(fed.clusters):
        fed.cut(each)
    await trio.sleep(generator.uniform(0.0, 5.0))


async def delay(fed: Simulation, name: str, generator: random.Random) -> None:
    """Everything takes a while, and not always the same."""
    fed.delay(name, generator.uniform(0.0, 0.5), jitter=generator.uniform(0.0, 1.0))
    await trio.sleep(generator.uniform(5.0, 30.0))
    fed.heal(name)


async def flaky(fed: Simulation, name: str, generator: random.Random) -> None:
    """Connections break now and then."""
    fed.flaky(name, every=generator.uniform(1.0, 10.0))
    await trio.sleep(generator.uniform(5.0, 30.0))
    fed.heal(name)


async def restart_hub(fed: Simulation, name: str, generator: random.Random) -> None:
    """A hub dies and comes back, or both do in the same moment."""
    numbers = [generator.randrange(len(fed.hubs))] if generator.random() < 0.7 else list(range(len(fed.hubs)))
    down_for = generator.choice([0.0, generator.uniform(0.5, 20.0)])
    async with trio.open_nursery() as nursery:
        for number in numbers:
            if fed.hubs[number].is_up:
                nursery.start_soon(_restart_hub, fed, number, down_for)


async def _restart_hub(fed: Simulation, number: int, down_for: float) -> None:
    await fed.restart_hub(number, down_for=down_for)


async def kill(fed: Simulation, name: str, generator: random.Random) -> None:
    """An agent dies without a word, and another one comes, whose clock may show another time."""
    if fed[name].is_running:
        await fed[name].kill()
        await trio.sleep(generator.uniform(0.0, 10.0))
        if not fed[name].is_running:
            fed[name].skew(generator.uniform(-100.0, 100.0))
        await fed[name].start()


async def stop(fed: Simulation, name: str, generator: random.Random) -> None:
    """An agent stops, and another one comes."""
    if fed[name].is_running:
        await fed[name].stop()
        await trio.sleep(generator.uniform(0.0, 10.0))
        await fed[name].start()


async def suspend(fed: Simulation, name: str, generator: random.Random) -> None:
    """A machine stands still for a while."""
    fed[name].suspend()
    await trio.sleep(generator.uniform(1.0, 40.0))
    fed[name].resume()


async def slow_source(fed: Simulation, name: str, generator: random.Random) -> None:
    """Sources take their time."""
    fed[name].slow_sources(generator.uniform(0.1, 8.0))
    await trio.sleep(generator.uniform(5.0, 30.0))
    fed[name].slow_sources(0.0)


async def failing_source(fed: Simulation, name: str, generator: random.Random) -> None:
    """Sources fail."""
    fed[name].fail_sources(Broken("it does not work today"))
    await trio.sleep(generator.uniform(5.0, 30.0))
    fed[name].fail_sources(None)


async def stalled_watcher(fed: Simulation, name: str, generator: random.Random) -> None:
    """Somebody watches and takes nothing in."""
    number = generator.randrange(len(fed.hubs))
    if fed.hubs[number].is_up:
        try:
            async with fed.stalled_watcher(f"stalled-{name}", hub=number):
                await trio.sleep(generator.uniform(5.0, 30.0))
        except* RpcError:
            pass  # the hub was stopped meanwhile


FAULTS: tuple[Step, ...] = (
    partition,
    one_way,
    black_hole,
    cut,
    delay,
    flaky,
    restart_hub,
    kill,
    stop,
    suspend,
    slow_source,
    failing_source,
    stalled_watcher,
)


# What goes on beside them.


def _pools(cluster: SimulatedCluster, generator: random.Random, count: int) -> list[Capacity]:
    return [
        member(
            cluster.cluster_id,
            f"pool-{number}",
            env=f"env-{number % 3}",
            idle=generator.randrange(6),
            autoscaling_enabled=generator.random() < 0.5,
            capacity=generator.choice([-1, 0, 4]),
            scaling_group=f"group-{number % 2}",
        )
        for number in range(count)
    ]


async def _load(cluster: SimulatedCluster, generator: random.Random) -> None:
    """What the sources say changes now and then, all of it or a little."""
    pushing = cluster.more_sources["push"]
    assert isinstance(pushing, PushingSource)
    pools = _pools(cluster, generator, 8)
    cluster.source.set(*pools)
    while True:
        await trio.sleep(generator.uniform(0.5, 6.0))
        number = generator.randrange(len(pools))
        pools[number] = replace(pools[number], idle=generator.randrange(6))
        # Now and then one of the pools is gone.
        cluster.source.set(*(pools if generator.random() < 0.8 else pools[1:]))
        pushing.push(member(cluster.cluster_id, "pushed", idle=generator.randrange(4)))


async def _creates(cluster: SimulatedCluster, generator: random.Random) -> None:
    """Creates are placed, and most of them say what has become of them."""
    while True:
        await trio.sleep(generator.expovariate(2.0))
        if not cluster.is_running:
            continue
        group = generator.choice(["", "", "group-0"])
        placement = cluster.router.place("ns", f"env-{generator.randrange(4)}", group, reserve=generator.random() < 0.9)
        if generator.random() < 0.7:
            await trio.sleep(generator.uniform(0.0, 1.0))
            outcome = generator.choice(["served", "served", "empty", "refused"])
            cluster.router.report_outcome(placement.id, outcome)


async def _troubles(fed: Simulation, name: str, generator: random.Random, faults: Iterator[Step]) -> None:
    """One fault after the other, in one cluster or where the fault is at home."""
    for fault in faults:
        await trio.sleep(generator.uniform(0.0, 6.0))
        await fault(fed, name, generator)


def _in_turn(faults: Sequence[Step], generator: random.Random) -> Iterator[Step]:
    """Each of them once before any comes again."""
    while True:
        yield from generator.sample(faults, len(faults))


async def everything(seed: int, *, clusters: int = 3, hubs: int = 2, seconds: float = 130.0) -> str:
    """Clusters whose load changes and that place creates, and to which everything happens that can be done to them,
    several things at a time. Returns the event log."""
    names = [f"cluster-{number}" for number in range(clusters)]
    async with simulated_federation(*names, hubs=hubs, seed=seed, start=False) as fed:
        for cluster in fed.clusters.values():
            cluster.more_sources["push"] = PushingSource()
        async with trio.open_nursery() as nursery:
            for cluster in fed.clusters.values():
                nursery.start_soon(cluster.start)
        # All clusters take from one deck, so that everything happens in two minutes.
        deck = _in_turn(FAULTS, fed.generator("faults"))
        async with trio.open_nursery() as nursery:
            for name, cluster in fed.clusters.items():
                nursery.start_soon(_load, cluster, fed.generator("load", name))
                nursery.start_soon(_creates, cluster, fed.generator("creates", name))
                nursery.start_soon(_troubles, fed, name, fed.generator("troubles", name), deck)
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
    return fed.log.text()


async def large_reports(seed: int, *, clusters: int = 2, hubs: int = 2, rounds: int = 2) -> str:
    """Reports that fill every buffer on their way, so that many tasks wait on each connection when it breaks. Returns
    the event log."""
    names = [f"cluster-{number}" for number in range(clusters)]
    async with simulated_federation(*names, hubs=hubs, seed=seed) as fed:
        generator = fed.generator("large reports")
        for _ in range(rounds):
            for name, cluster in fed.clusters.items():
                idle = generator.randrange(50)
                cluster.source.set(*[member(name, f"{'pool-' * 45}{number}", idle=idle) for number in range(1500)])
                fed.partition(name, one_way=generator.choice(["to_hub", "to_cluster"]))
            await trio.sleep(7.0)
            for name in names:
                if generator.random() < 0.5:
                    fed.cut(name)
                fed.heal(name)
            if generator.random() < 0.5:
                await fed.restart_hub(generator.randrange(hubs), down_for=generator.random())
            await trio.sleep(7.0)
    return fed.log.text()


SCENARIOS: dict[str, Callable[[int], Awaitable[str]]] = {"everything": everything, "large_reports": large_reports}


def quietly() -> None:
    """Have nothing logged from now on: the event log has it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> None:
    """Run a scenario so many times, and write the event log of each run into a file of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the files 0.log, 1.log, …")
    arguments = parser.parse_args()
    quietly()
    for number in range(arguments.repeats):
        text = run_simulated(SCENARIOS[arguments.scenario], arguments.seed, seed=arguments.seed)
        (arguments.out / f"{number}.log").write_text(text)


if __name__ == "__main__":
    main()
