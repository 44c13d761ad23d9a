"""One agent with its real code, in a process of its own, for `latency.py`: everything that `trio-federation run` puts
together, with a source that pushes what the benchmark asks for, and a Registry that tells when it has taken it in.

Moments are seconds since boot, which every process of a machine reads from the same clock."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

import msgspec
import trio

from benchmarks.children import BenchmarkError, listen, say
from trio_federation import Capacity, CapacitySource, SourceContext, SourceType, hookimpl, logs, process, reporter
from trio_federation.capacity import Change
from trio_federation.clock import BootClock, boot_time
from trio_federation.config import load
from trio_federation.plugins import PluginManager
from trio_federation.registry import Registry

#: Records that the reporting cluster has; a change concerns some or all of them.
POOLS = 1_000


class Options(msgspec.Struct):
    """What the benchmark's source can be told in its table."""

    pools: int = 0


class PushedSource(CapacitySource):
    """A source whose changes come from the benchmark: {"generation", "records", "pause"}, where so many records get
    the number of the generation as what is running in them, after a pause in seconds."""

    def __init__(self, options: Options, context: SourceContext) -> None:
        self._cluster_id = context.cluster_id
        self._records = {number: self._record(number, 0) for number in range(options.pools)}

    def _record(self, number: int, generation: int) -> Capacity:
        return Capacity(
            self._cluster_id, "agents", f"env-{number // 4}", f"pool-{number}", idle=number % 9, running=generation,
            desired=10, state="Active",
        )  # fmt: skip

    async def collect(self) -> Sequence[Capacity]:
        return list(self._records.values())

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        while True:
            asked = await trio.to_thread.run_sync(listen, abandon_on_cancel=True)
            await trio.sleep(asked["pause"])
            changed = {number: self._record(number, asked["generation"]) for number in range(asked["records"])}
            self._records.update(changed)
            say(pushed=asked["generation"], at=boot_time())
            yield list(changed.values())


@hookimpl
def capacity_sources() -> list[SourceType[Options]]:
    """The hook: this module is the plugin."""
    return [SourceType("benchmark", Options, PushedSource)]


def _tell_arrivals(registry: Registry) -> None:
    """Let a registry say when it has taken in records of other clusters: how many, so far, of their generation."""
    # What the agent feeds it has been checked already.
    apply = registry.apply_checked
    seen: dict[int, set[object]] = {}

    def apply_and_tell(changes: Iterable[Change]) -> None:
        changes = list(changes)
        apply(changes)
        at = boot_time()
        arrived = [
            change
            for change in changes
            if isinstance(change, Capacity) and change.cluster_id != registry.local_cluster_id and change.running
        ]
        for record in arrived:
            seen.setdefault(record.running, set()).add(record.identity)
        for generation in sorted({record.running for record in arrived}):
            say(arrived=generation, records=len(seen[generation]), at=at)

    registry.apply_checked = apply_and_tell  # type: ignore[method-assign]


async def _run(path: str) -> None:
    plugins = PluginManager()
    plugins.register(__import__(__name__, fromlist=["capacity_sources"]), "benchmark")
    config = load(path, {}, plugins.faults)
    logs.configure(config.log)
    async with trio.open_nursery() as nursery:
        running = await nursery.start(partial(process.run, config, plugins))
        assert running.agent is not None
        _tell_arrivals(running.agent.registry)
        say(ready=True)


def main() -> None:
    """Run an agent until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--debounce", type=float, help="seconds, in the place of the reporter's own")
    arguments = parser.parse_args()
    if arguments.debounce is not None:
        if not hasattr(reporter, "DEBOUNCE"):
            raise BenchmarkError("trio_federation.reporter has no DEBOUNCE any more: this benchmark has to be adapted")
        reporter.DEBOUNCE = arguments.debounce
    trio.run(_run, arguments.config, clock=BootClock())


if __name__ == "__main__":
    main()
