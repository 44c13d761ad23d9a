"""What the tests of the conformance suite ask about: a world with pools that sources read, and sources that read it
rightly, in each of the ways that a source may work. The wrong ones are made from them, where they are used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import trio

from trio_federation import Capacity, CapacitySource, Change, SourceContext, Withdrawal


class Unreachable(Exception):
    """The world cannot be read now."""


class World:
    """Pools with a number of idle sandboxes each, that can be read, changed, followed and cut off."""

    def __init__(self) -> None:
        self.pools = {"a": 3, "b": 0, "c": 5}
        self.reachable = True
        #: set, and replaced, at each change
        self.changed = trio.Event()

    def read(self) -> dict[str, int]:
        """What there is now."""
        if not self.reachable:
            raise Unreachable("nobody answers")
        return dict(self.pools)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    # What is handed to the suite.

    def change(self) -> None:
        """One more is idle."""
        self.pools["a"] += 1
        self._tell()

    def remove(self) -> Capacity:
        """A pool vanishes."""
        del self.pools["b"]
        self._tell()
        return record("b", 0)

    @contextmanager
    def breaks(self) -> Iterator[None]:
        """Nothing can be read for a while."""
        self.reachable = False
        self._tell()
        try:
            yield
        finally:
            self.reachable = True
            self._tell()


def record(pool: str, idle: int, cluster_id: str = "west") -> Capacity:
    """What a right source says of a pool."""
    return Capacity(cluster_id, "agents", "python", pool, idle=idle, autoscaling_enabled=True, capacity=10)


class Polled(CapacitySource):
    """Reads the world at each collect, which takes a moment."""

    def __init__(self, world: World, context: SourceContext) -> None:
        self.world = world
        self.context = context

    async def collect(self) -> Sequence[Capacity]:
        await trio.lowlevel.checkpoint()
        pools = self.world.read()
        await trio.sleep(0.01)
        return [record(pool, idle, self.context.cluster_id) for pool, idle in pools.items()]


class Immediate(Polled):
    """Has no checkpoint at all, as it reads a small local file for instance."""

    async def collect(self) -> Sequence[Capacity]:
        return [record(pool, idle, self.context.cluster_id) for pool, idle in self.world.read().items()]


class Threaded(Polled):
    """Reads in a worker thread, which takes real time."""

    async def collect(self) -> Sequence[Capacity]:
        pools = await trio.to_thread.run_sync(self.world.read)
        return [record(pool, idle, self.context.cluster_id) for pool, idle in pools.items()]


class Parallel(Polled):
    """Reads each pool in a task of its own, and puts them together in the order of their coming."""

    async def collect(self) -> Sequence[Capacity]:
        found: list[Capacity] = []

        async def read(pool: str) -> None:
            await trio.sleep(self.context.random.random() / 10)
            found.append(record(pool, self.world.read()[pool], self.context.cluster_id))

        try:
            async with trio.open_nursery() as nursery:
                for pool in self.world.read():
                    nursery.start_soon(read, pool)
        except* Unreachable:
            raise Unreachable("nobody answers") from None
        return found


class Refreshing(Polled):
    """Reads in the background, every few seconds, and says when that was."""

    def __init__(self, world: World, context: SourceContext) -> None:
        super().__init__(world, context)
        self.known: list[Capacity] | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._refresh)
            task_status.started()

    async def _refresh(self, *, task_status: trio.TaskStatus[None]) -> None:
        while True:
            self.known = None
            with suppress(Unreachable):
                pools = await trio.to_thread.run_sync(self.world.read)
                now = self.context.clock()
                self.known = [
                    replace(record(pool, idle, self.context.cluster_id), observed_at=now)
                    for pool, idle in pools.items()
                ]
            with suppress(RuntimeError):  # called twice
                task_status.started()
            await trio.sleep(3.0)

    async def collect(self) -> Sequence[Capacity]:
        await trio.lowlevel.checkpoint()
        if self.known is None:
            raise Unreachable("it could not be read lately")
        return self.known


class Cleaning(Polled):
    """Has something to do when it is cancelled, which takes a moment and is shielded for that."""

    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        finally:
            with trio.move_on_after(0.5, shield=True):
                await trio.sleep(0.1)


class Pushing(Polled):
    """Pushes each change as it happens."""

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        known = self.world.read()
        while True:
            await self.world.changed.wait()
            pools = self.world.read()
            yield self.news(known, pools)
            known = pools

    def news(self, known: dict[str, int], pools: dict[str, int]) -> list[Change]:
        """What has changed."""
        cluster = self.context.cluster_id
        found: list[Change] = [record(pool, idle, cluster) for pool, idle in pools.items() if known.get(pool) != idle]
        return found + [Withdrawal(record(pool, 0, cluster).identity) for pool in known if pool not in pools]


class Cached(Pushing):
    """Follows the world in run(), keeps what it has heard, and vouches for it for some seconds after it lost touch."""

    def __init__(self, world: World, context: SourceContext) -> None:
        super().__init__(world, context)
        self.known: dict[str, int] = {}
        self.heard_at = 0.0
        self.more = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, task_status)

    async def _listen(self, task_status: trio.TaskStatus[None]) -> None:
        started = False
        while True:
            with suppress(Unreachable):
                self.known = self.world.read()
                self.heard_at = self.context.clock()
                self.more.set()
                self.more = trio.Event()
                if not started:
                    started = True
                    task_status.started()
            with trio.move_on_after(2.0):
                await self.world.changed.wait()

    async def collect(self) -> Sequence[Capacity]:
        await trio.lowlevel.checkpoint()
        return [
            replace(record(pool, idle, self.context.cluster_id), observed_at=self.heard_at)
            for pool, idle in self.known.items()
        ]

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        known = self.known
        while True:
            await self.more.wait()
            yield self.news(known, self.known)
            known = self.known

    def is_live(self) -> bool:
        return self.context.clock() - self.heard_at < 8.0


class Failing(Polled):
    """Gives up altogether when the world cannot be read, and counts on being made anew."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.world.read()
        task_status.started()
        while True:
            await self.world.changed.wait()
            self.world.read()


RIGHT: list[type[Polled]] = [
    Polled,
    Immediate,
    Threaded,
    Parallel,
    Refreshing,
    Cleaning,
    Pushing,
    Cached,
    Failing,
]
