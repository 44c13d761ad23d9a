"""A hub or an agent with its real code, in a process of its own, for `faults.py`: everything that `trio-federation run`
puts together, and a task that says all the time what it knows. An agent's source tells what the time is, so that
everybody can judge each record that they read without being told what was true.

Moments are seconds since boot, which every process of a machine reads from the same clock. What goes wrong is done
elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import trio

from benchmarks.children import BenchmarkError, say
from trio_federation import Capacity, CapacitySource, Change, SourceContext, SourceType, hookimpl, logs, process, retry
from trio_federation.agent import Agent
from trio_federation.clock import BootClock, boot_time
from trio_federation.config import load
from trio_federation.hub import Hub
from trio_federation.plugins import PluginManager

#: Records of each cluster. All of them say the same.
POOLS = 5
#: Seconds for which what a source says is true.
STEP = 0.1
#: Seconds between two looks at what is known.
LOOK = 0.025
#: Seconds by which a record may be younger than it says: a source reads the clock, and is asked for it a moment later.
SLACK = 0.1
#: Seconds that a connection has to work until delays start small again, in the place of a minute: here one fault
#: follows another, and each is to be seen by itself.
STABLE = 0.3


def step_at(moment: float) -> int:
    """What is true in every cluster at a moment."""
    return int(moment / STEP)


class Options(msgspec.Struct):
    """What the source can be told in its table: nothing."""


class ClockSource(CapacitySource):
    """A source whose truth is the time, in steps."""

    def __init__(self, _options: Options, context: SourceContext) -> None:
        self._cluster_id = context.cluster_id

    async def collect(self) -> Sequence[Capacity]:
        step = step_at(boot_time())
        return [
            Capacity(self._cluster_id, "agents", "env", f"pool-{number}", idle=1, running=step, state="Active")
            for number in range(POOLS)
        ]

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        while True:
            now = boot_time()
            await trio.sleep((step_at(now) + 1) * STEP - now)
            yield await self.collect()


@hookimpl
def capacity_sources() -> list[SourceType[Options]]:
    """The hook: this module is the plugin."""
    return [SourceType("clock", Options, ClockSource)]


def judged(records: Iterable[Capacity], own: str, now: float, ttl: float) -> dict[str, Any]:
    """What an agent, in the cluster `own`, shows of the others at `now`. "seen": of each of them the number of records
    and the oldest step in them. "judged", "false": records that were read, and of them those that claim to have been
    observed when something else was true already, or are older than `ttl`. "younger": seconds by which one claimed that
    at most."""
    seen: dict[str, list[int]] = {}
    read = false = 0
    younger = 0.0
    for record in records:
        if record.cluster_id == own:
            continue
        assert record.observed_at is not None
        read += 1
        by = record.observed_at - (record.running + 1) * STEP
        younger = max(younger, by)
        false += by > SLACK or now - record.observed_at > ttl + SLACK
        known = seen.setdefault(record.cluster_id, [0, record.running])
        known[0] += 1
        known[1] = min(known[1], record.running)
    return {"seen": seen, "judged": read, "false": false, "younger": younger}


def _agent_knows(agent: Agent) -> dict[str, Any]:
    registry = agent.registry
    health = agent.links[0].health
    shown = judged(registry.snapshot(), registry.local_cluster_id, registry.now(), agent.settings.ttl)
    return shown | {"state": health.state, "failures": health.failures}


def _hub_knows(hub: Hub) -> dict[str, Any]:
    """Whose report calls are open, by cluster, and from where."""
    return {"reporting": {session.cluster_id: session.peer for session in hub._reports}}


async def _run(path: str) -> None:
    if not hasattr(retry, "STABLE"):
        raise BenchmarkError("trio_federation.retry has no STABLE any more: this benchmark has to be adapted")
    retry.STABLE = STABLE
    plugins = PluginManager()
    plugins.register(__import__(__name__, fromlist=["capacity_sources"]), "benchmark")
    config = load(path, {}, plugins.faults)
    logs.configure(config.log)
    async with trio.open_nursery() as nursery:
        running = await nursery.start(partial(process.run, config, plugins))
        say(ready=True, at=boot_time(), ports=running.hub_ports)
        while True:
            knows = _agent_knows(running.agent) if running.agent is not None else _hub_knows(running.hub)
            say(look=True, at=boot_time(), **knows)
            await trio.sleep(LOOK)


def main() -> None:
    """Run what a configuration asks for, until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    trio.run(_run, parser.parse_args().config, clock=BootClock())


if __name__ == "__main__":
    main()
