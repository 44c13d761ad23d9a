"""Many agents with their real code in one process, for `faults.py`, which restarts their hub: it tells when each of
them has dialled, and when all are connected again.

Each shows one record and is shown none, so that what is measured is how they come back, and not how fast one process
takes in what a whole fleet says. They are told of each other's names, which they would know otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import trio

from benchmarks.children import BenchmarkError, listen, say
from benchmarks.messages import SECRET
from trio_federation import Capacity, CapacitySource, Registry
from trio_federation.agent import Agent
from trio_federation.clock import BootClock, boot_time
from trio_federation.config import Federation
from trio_federation.rpc import tcp_dialer

#: Seconds. Nothing but coming back is to happen meanwhile.
_RARELY = 600.0
_LOOK = 0.02


class _Source(CapacitySource):
    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id

    async def collect(self) -> Sequence[Capacity]:
        return [Capacity(self._cluster_id, "agents", "env", "pool", idle=1, desired=10, state="Active")]


async def _run(port: int, agents: int) -> None:
    if not hasattr(Registry, "clusters"):
        raise BenchmarkError("a Registry has no clusters() any more: this benchmark has to be adapted")
    everybody = {f"cluster-{number}" for number in range(agents)}
    Registry.clusters = lambda _registry: everybody  # type: ignore[method-assign, assignment]
    #: who, and when
    dialled: list[tuple[int, float]] = []
    dial = tcp_dialer("127.0.0.1", port)

    async def dial_and_tell(number: int) -> trio.abc.Stream:
        dialled.append((number, boot_time()))
        return await dial()

    settings = Federation(ttl=3 * _RARELY, report_interval=_RARELY, resync_interval=_RARELY)

    made = []
    for number in range(agents):
        name = f"cluster-{number}"
        made.append(
            Agent(
                name,
                settings,
                sources={"source": partial(_Source, name)},
                hubs={"hub": partial(dial_and_tell, number)},
                credential=SECRET,
            )
        )
    links = [agent.links[0] for agent in made]

    async def wait(connected: bool) -> None:
        while sum(each.health.state == "connected" for each in links) != (agents if connected else 0):  # noqa: ASYNC110 - asked for
            await trio.sleep(_LOOK)

    async with trio.open_nursery() as nursery:
        for agent in made:
            await nursery.start(agent.run)
        await wait(True)
        say(ready=True)
        while True:
            await trio.to_thread.run_sync(listen, abandon_on_cancel=True)
            dialled.clear()
            say(watching=True)
            await wait(False)
            await wait(True)
            say(done=True, at=boot_time(), dialled=dialled)


def main() -> None:
    """Run agents of the hub at a port of loopback, until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("agents", type=int)
    arguments = parser.parse_args()
    trio.run(_run, arguments.port, arguments.agents, clock=BootClock())


if __name__ == "__main__":
    main()
