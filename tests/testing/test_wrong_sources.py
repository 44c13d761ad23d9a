"""Each rule of the conformance suite, broken by small wrong sources that keep all the others, is found broken."""

from __future__ import annotations

import asyncio
import ctypes
import datetime
import os
import random
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import pytest
import trio
from trio.testing import MockClock

from tests.testing.worlds import Cached, Parallel, Polled, Pushing, Unreachable, World, record
from trio_federation import Capacity, CapacitySource, Change, SourceContext, Withdrawal
from trio_federation.testing import ConformanceError, Rule, check_capacity_source, watching

#: What is wrong, by the rule that it breaks: sources, and a part of what is said of each.
WRONG: list[tuple[Rule, str, type[Polled]]] = []


def breaks(rule: Rule, said: str) -> Callable[[type[Polled]], type[Polled]]:
    """Marks a source as one that breaks a rule."""

    def mark(kind: type[Polled]) -> type[Polled]:
        WRONG.append((rule, said, kind))
        return kind

    return mark


async def check(kind: Callable[[World, SourceContext], CapacitySource]) -> None:
    """Check sources of a kind, with everything that can be given."""
    world = World()
    await check_capacity_source(
        lambda context: kind(world, context), change=world.change, remove=world.remove, breaks=world.breaks
    )


# --- start


@breaks(Rule.START, "run() has returned while the source was in use")
class NeverRuns(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.lowlevel.checkpoint()


@breaks(Rule.START, "run() has returned while the source was in use")
class StopsRunning(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep(3)


@breaks(Rule.START, "run() raises Unreachable: at first")
class FailsToStart(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.lowlevel.checkpoint()
        raise Unreachable("at first")


@breaks(Rule.START, "run() raises Unreachable: later")
class FailsLater(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep(3)
        raise Unreachable("later")


@breaks(Rule.START, "run() has not called task_status.started() within 15 s")
class NeverSaysSo(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.sleep_forever()


@breaks(Rule.START, "run() has not called task_status.started() within 15 s")
class StartsLate(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.sleep(16)
        task_status.started()
        await trio.sleep_forever()


@breaks(Rule.START, "run() raises RuntimeError: called 'started' twice")
class StartsTwice(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.lowlevel.checkpoint()
        task_status.started()


@breaks(Rule.START, "run() has returned None; define it with async def")
class RunsSynchronously(Polled):
    def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[override]
        task_status.started()


# --- live


@breaks(Rule.LIVE, "is_live() has returned an object of type coroutine")
class LivesAsynchronously(Polled):
    async def is_live(self) -> bool:  # type: ignore[override]
        return True


@breaks(Rule.LIVE, "is_live() has returned None")
class LivesVaguely(Polled):
    def is_live(self) -> bool:
        return None  # type: ignore[return-value]


@breaks(Rule.LIVE, "is_live() is False 15 s after the start")
class NeverLives(Polled):
    def is_live(self) -> bool:
        return False


@breaks(Rule.LIVE, "is_live() raises AttributeError")
class LivesOnlyLater(Polled):
    last: float

    def is_live(self) -> bool:
        return self.context.clock() - self.last < 10


# --- answer


@breaks(Rule.ANSWER, "collect() has returned []; define it with async def")
class CollectsSynchronously(Polled):
    def collect(self) -> Sequence[Capacity]:  # type: ignore[override]
        return []


@breaks(Rule.ANSWER, "define it with async def, and without a yield in it")
class Yields(Polled):
    async def collect(self) -> AsyncIterator[Capacity]:  # type: ignore[override]
        yield record("a", 3)


@breaks(Rule.ANSWER, "collect() has returned None")
class ForgetsToReturn(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return None  # type: ignore[return-value]


@breaks(Rule.ANSWER, "collect() has returned an object of type generator")
class ReturnsAGenerator(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return (each for each in await super().collect())  # type: ignore[return-value]


@breaks(Rule.ANSWER, "collect() has returned a dict among its records")
class ReturnsDicts(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return [*await super().collect(), {"namespace": "agents"}]  # type: ignore[list-item]


@breaks(Rule.ANSWER, "cluster_uid() has returned 'two words'")
class NamesNoUid(Polled):
    def cluster_uid(self) -> str | None:
        return "two words"


@breaks(Rule.ANSWER, "collect() has not ended within 15 s")
class Hangs(Polled):
    async def collect(self) -> Sequence[Capacity]:
        await trio.sleep_forever()


@breaks(Rule.ANSWER, "collect() has not ended within 15 s")
class TakesItsTime(Polled):
    async def collect(self) -> Sequence[Capacity]:
        await trio.sleep(15.5)
        return await super().collect()


@breaks(Rule.ANSWER, "collect() has not ended within 15 s")
class WaitsInRounds(Polled):
    async def collect(self) -> Sequence[Capacity]:
        while True:  # noqa: ASYNC110
            await trio.sleep(0.5)


@breaks(Rule.ANSWER, "collect() raises Unreachable: never")
class Raises(Polled):
    async def collect(self) -> Sequence[Capacity]:
        raise Unreachable("never")


@breaks(Rule.ANSWER, "collect() raises Unreachable: once is enough")
class AnswersOnce(Polled):
    answered = False

    async def collect(self) -> Sequence[Capacity]:
        if self.answered:
            raise Unreachable("once is enough")
        self.answered = True
        return await super().collect()


@breaks(Rule.ANSWER, "collect() raises SystemExit: 3")
class Exits(Polled):
    async def collect(self) -> Sequence[Capacity]:
        raise SystemExit(3)


@breaks(Rule.ANSWER, "collect() raises TypeError: trio.run received unrecognized yield message")
class BelongsElsewhere(Polled):
    async def collect(self) -> Sequence[Capacity]:
        loop = asyncio.SelectorEventLoop()  # by name: trio-asyncio, where it is loaded, answers new_event_loop itself
        try:
            await loop.create_future()
        finally:
            loop.close()
        return []


# --- records


@breaks(Rule.RECORD, "collect() has a record that would be dropped: env_name 'Python 3' is not")
class NamesBadly(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return [replace(each, env_name="Python 3") for each in await super().collect()]


@breaks(Rule.RECORD, "collect() has a record that would be dropped: idle -1 is not")
class CountsBelowNothing(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return [replace(each, idle=each.idle - 1) for each in await super().collect()]


@breaks(Rule.RECORD, "collect() has a record of cluster 'east' instead of 'west'")
class SpeaksForOthers(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return [*await super().collect(), record("a", 3, "east")]


@breaks(Rule.UNIQUE, "collect() has returned 2 records of agents/python/a")
class RepeatsItself(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return [*await super().collect(), record("a", 9)]


class Stamping(Polled):
    def stamp(self) -> float:
        raise NotImplementedError

    async def collect(self) -> Sequence[Capacity]:
        return [replace(each, observed_at=self.stamp()) for each in await super().collect()]


@breaks(Rule.OBSERVED, "1 s in the future")
class KnowsTheFuture(Stamping):
    def stamp(self) -> float:
        return self.context.clock() + 1.0


@breaks(Rule.OBSERVED, "s ago, when 30 s are a TTL")
class StampsWithNothing(Stamping):
    def stamp(self) -> float:
        return 0.0


@breaks(Rule.OBSERVED, "s in the future")
class StampsWithTheDate(Stamping):
    def stamp(self) -> float:
        return os.stat(__file__).st_mtime


# --- beside each other


@breaks(Rule.BESIDE, "collect() raises RuntimeError: one at a time")
class CannotShare(Polled):
    busy: ClassVar[list[object]] = []

    async def collect(self) -> Sequence[Capacity]:
        if self.busy:
            raise RuntimeError("one at a time")
        self.busy.append(self)
        try:
            return await super().collect()
        finally:
            self.busy.clear()


@breaks(Rule.BESIDE, "collect() has not ended within 15 s")
class WaitsForTheOther(Polled):
    users: ClassVar[set[object]] = set()

    async def collect(self) -> Sequence[Capacity]:
        self.users.add(self)
        try:
            await trio.sleep(0.1)
            if len(self.users) > 1:
                await trio.sleep(20)
            return await super().collect()
        finally:
            self.users.discard(self)


@breaks(Rule.DETERMINISTIC, "asked at the same moment, 0 s after they were made, one source says idle")
class SaysAnything(Polled):
    async def collect(self) -> Sequence[Capacity]:
        return [replace(each, idle=int.from_bytes(os.urandom(3))) for each in await super().collect()]


@breaks(Rule.DETERMINISTIC, "one source says that there is")
class AlternatesPools(Polled):
    calls: ClassVar[Iterator[int]] = iter(range(10**6))

    async def collect(self) -> Sequence[Capacity]:
        found = await super().collect()
        return [*found, record(f"pool-{next(self.calls) % 2}", 1)]


@breaks(Rule.DETERMINISTIC, "one source says observed_at ")
class StampsAtRandom(Stamping):
    ages: ClassVar[Iterator[int]] = iter(range(10**6))

    def stamp(self) -> float:
        return self.context.clock() - next(self.ages) % 7


# --- the loop, the clock and the dice


@breaks(Rule.BLOCKING, "collect() calls time.sleep(), in tests.testing.test_wrong_sources, line ")
class Sleeps(Polled):
    async def collect(self) -> Sequence[Capacity]:
        time.sleep(0.001)  # noqa: ASYNC251, TID251
        return await super().collect()


@breaks(Rule.BLOCKING, "collect() calls connect() of a blocking socket, in tests.testing.test_wrong_sources")
class Connects(Polled):
    async def collect(self) -> Sequence[Capacity]:
        with socket.socket() as connection, suppress(OSError):
            connection.connect(("127.0.0.1", 1))
        return await super().collect()


@breaks(Rule.BLOCKING, "run() calls subprocess.run()")
class StartsProcesses(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        subprocess.run(["true"], check=True)  # noqa: ASYNC221
        await super().run(task_status=task_status)


@breaks(Rule.BLOCKING, "collect() calls time.sleep()")
class SleepsInATask(Parallel):
    async def collect(self) -> Sequence[Capacity]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sleep)
        return await super().collect()

    async def sleep(self) -> None:
        await trio.lowlevel.checkpoint()
        time.sleep(0.001)  # noqa: ASYNC251, TID251


@breaks(Rule.BLOCKING, "is_live() calls time.sleep()")
class SleepsWhileLive(Polled):
    def is_live(self) -> bool:
        time.sleep(0.001)  # noqa: TID251
        return True


@breaks(Rule.CLOCK, "collect() calls time.time(), in tests.testing.test_wrong_sources, line ")
class ReadsTheTime(Polled):
    async def collect(self) -> Sequence[Capacity]:
        time.time()  # noqa: TID251
        return await super().collect()


@breaks(Rule.CLOCK, "collect() calls time.monotonic()")
class ReadsAnotherClock(Polled):
    async def collect(self) -> Sequence[Capacity]:
        found = await super().collect()
        time.monotonic()
        return found


@breaks(Rule.CLOCK, "run() calls datetime.now()")
class ReadsTheDate(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        datetime.datetime.now(datetime.UTC)  # noqa: TID251
        await super().run(task_status=task_status)


@breaks(Rule.RANDOM, "collect() calls random.random()")
class Draws(Polled):
    async def collect(self) -> Sequence[Capacity]:
        random.random()  # noqa: TID251
        return await super().collect()


@breaks(Rule.RANDOM, "collect() calls random.shuffle()")
class Shuffles(Polled):
    async def collect(self) -> Sequence[Capacity]:
        found = list(await super().collect())
        random.shuffle(found)  # noqa: TID251
        return found


# --- cancellation


@breaks(Rule.CANCELLATION, "collect() was cancelled, and goes on or returns as if it was not")
class CatchesEverything(Polled):
    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        except Unreachable:
            raise
        except:  # noqa: E722
            return []


@breaks(Rule.CANCELLATION, "collect() was cancelled, and raises RuntimeError: no answer instead of Trio's Cancelled")
class TranslatesEverything(Polled):
    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        except BaseException as error:
            raise RuntimeError("no answer") from error


@breaks(Rule.CANCELLATION, "collect() was cancelled, and goes on or returns as if it was not")
class TriesAgain(Polled):
    async def collect(self) -> Sequence[Capacity]:
        while True:
            try:
                return await super().collect()
            except Unreachable:
                raise
            except BaseException:  # noqa: S112
                continue


@breaks(Rule.CANCELLATION, "collect() was cancelled, and goes on or returns as if it was not")
class TriesAgainInScopes(Polled):
    async def collect(self) -> Sequence[Capacity]:
        while True:
            with trio.CancelScope():
                try:
                    return await super().collect()
                except Unreachable:
                    raise
                except BaseException:  # noqa: S112
                    continue


@breaks(Rule.CANCELLATION, "collect() has not ended within a second of being cancelled")
class CleansUpForLong(Polled):
    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(2)
            raise


@breaks(Rule.CANCELLATION, "collect() has not ended within a second of being cancelled")
class CleansUpForEver(Polled):
    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()
            raise


@breaks(Rule.CANCELLATION, "run() was cancelled, and goes on or returns as if it was not")
class RunsToAnEnd(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await super().run(task_status=task_status)
        except trio.Cancelled:
            return


@breaks(Rule.CANCELLATION, "run() was cancelled, and goes on or returns as if it was not")
class RunsTasksToAnEnd(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                task_status.started()
        except BaseException:  # noqa: S110
            pass


@breaks(Rule.CANCELLATION, "run() was cancelled, and raises Unreachable: gone instead of Trio's Cancelled")
class RunsIntoAnError(Polled):
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await super().run(task_status=task_status)
        finally:
            raise Unreachable("gone")


@breaks(Rule.CANCELLATION, "changes() was cancelled, and goes on or returns as if it was not")
class PushesOn(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        try:
            async for batch in super().changes():
                yield batch
        except Unreachable:
            raise
        except BaseException:
            return


@breaks(Rule.AFTERWARDS, "collect() has not ended within 15 s")
class KeepsTheLock(Polled):
    def __init__(self, world: World, context: SourceContext) -> None:
        super().__init__(world, context)
        self.lock = trio.Semaphore(1)

    async def collect(self) -> Sequence[Capacity]:
        await self.lock.acquire()
        try:
            found = await super().collect()
        except Exception:
            self.lock.release()
            raise
        self.lock.release()
        return found


@breaks(Rule.AFTERWARDS, "collect() has returned 2 records of agents/python/a")
class KeepsHalfOfIt(Polled):
    def __init__(self, world: World, context: SourceContext) -> None:
        super().__init__(world, context)
        self.found: list[Capacity] = []

    async def collect(self) -> Sequence[Capacity]:
        try:
            self.found += [record(pool, idle) for pool, idle in self.world.read().items()]
            await trio.sleep(0.1)
            found, self.found = self.found, []
        except Exception:
            self.found = []
            raise
        return found


@breaks(Rule.AFTERWARDS, "the next one says that there is no agents/python/a, but a source that was left in peace")
class ForgetsWhatItOwes(Polled):
    asked = False

    async def collect(self) -> Sequence[Capacity]:
        if self.asked:
            self.asked = False
            return []
        self.asked = True
        await trio.sleep(0.1)
        self.asked = False
        return await super().collect()


@breaks(Rule.AFTERWARDS, "the next one says idle 4 of agents/python/a, but a source that was left in peace idle 3")
class CountsCalls(Polled):
    under_way = 0

    async def collect(self) -> Sequence[Capacity]:
        found = [record(pool, idle + self.under_way) for pool, idle in self.world.read().items()]
        self.under_way += 1
        await trio.sleep(0.1)
        self.under_way -= 1
        return found


# --- changes


@breaks(Rule.CHANGES, "changes() has returned an object of type coroutine")
class ChangesAsynchronously(Polled):
    async def changes(self) -> AsyncIterator[Sequence[Change]] | None:  # type: ignore[override]
        return None


@breaks(Rule.CHANGES, "changes() has returned []")
class ChangesAtOnce(Polled):
    def changes(self) -> AsyncIterator[Sequence[Change]] | None:
        return []  # type: ignore[return-value]


@breaks(Rule.CHANGES, "changes() raises Unreachable: not yet")
class CannotPush(Polled):
    def changes(self) -> AsyncIterator[Sequence[Change]] | None:
        raise Unreachable("not yet")


@breaks(Rule.CHANGES, "what changes() returned has ended while the source was in use")
class PushesNothing(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        nothing: list[list[Change]] = []
        for batch in nothing:
            yield batch


@breaks(Rule.CHANGES, "what changes() returned has ended while the source was in use")
class PushesOnce(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        known = self.world.read()
        await self.world.changed.wait()
        yield self.news(known, self.world.read())


@breaks(Rule.CHANGES, "changes() raises Unreachable: tired")
class TiresOfPushing(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        yield []
        await trio.sleep(3)
        raise Unreachable("tired")


@breaks(Rule.CHANGES, "changes() has pushed an object of type Capacity")
class PushesRecords(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        while True:
            await self.world.changed.wait()
            yield record("a", self.world.read()["a"])  # type: ignore[misc]


@breaks(Rule.CHANGES, "changes() has pushed [('west', 'agents', 'python', 'b')]")
class PushesNames(Pushing):
    def news(self, known: dict[str, int], pools: dict[str, int]) -> list[Change]:
        return [
            each.identity if isinstance(each, Withdrawal) else each  # type: ignore[misc]
            for each in super().news(known, pools)
        ]


@breaks(Rule.CHANGES, "changes() raises RuntimeError: once only")
class PushesOneOfThem(Pushing):
    begun = 0

    def changes(self) -> AsyncIterator[Sequence[Change]]:
        self.begun += 1
        if self.begun > 1:
            raise RuntimeError("once only")
        return super().changes()


@breaks(Rule.CHANGES, "changes() is None at one time, and an iterator at another")
class PushesAtTimes(Pushing):
    begun = 0

    def changes(self) -> AsyncIterator[Sequence[Change]] | None:  # type: ignore[override]
        self.begun += 1
        return super().changes() if self.begun == 1 else None


class SlowToClose:
    """An iterator that takes its time to be closed, once it was used."""

    def __init__(self, inner: AsyncGenerator[Sequence[Change]]) -> None:
        self.inner = inner
        self.used = False

    def __aiter__(self) -> AsyncIterator[Sequence[Change]]:
        self.used = True
        return self.inner

    async def aclose(self) -> None:
        await self.inner.aclose()
        if self.used:
            await trio.sleep(2)


@breaks(Rule.CHANGES, "aclose() of what changes() returned has not ended within a second")
class NeverStopsPushing(Pushing):
    def changes(self) -> AsyncIterator[Sequence[Change]]:
        return SlowToClose(super().changes())  # type: ignore[return-value, arg-type]


@breaks(Rule.RECORD, "changes() has a record of cluster 'east' instead of 'west'")
class PushesForOthers(Pushing):
    def news(self, known: dict[str, int], pools: dict[str, int]) -> list[Change]:
        return [record("a", 3, "east")]


@breaks(Rule.RECORD, "changes() has a record that would be dropped: member_pool 'B!' is not")
class WithdrawsBadly(Pushing):
    def news(self, known: dict[str, int], pools: dict[str, int]) -> list[Change]:
        return [Withdrawal(("west", "agents", "python", "B!"))]


@breaks(Rule.AGREEMENT, "what changes() has pushed comes to idle 1000 of agents/python/a, but collect() says idle")
class PushesNonsense(Pushing):
    def news(self, known: dict[str, int], pools: dict[str, int]) -> list[Change]:
        return [replace(each, idle=1000) if isinstance(each, Capacity) else each for each in super().news(known, pools)]


@breaks(Rule.AGREEMENT, "of agents/python/a, but changes() has pushed nothing")
class KeepsItToItself(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        async for batch in super().changes():
            del batch
            yield []


@breaks(
    Rule.AGREEMENT, "after remove(), collect() says that there is no agents/python/b, but changes() has pushed nothing"
)
class NeverWithdraws(Pushing):
    def news(self, known: dict[str, int], pools: dict[str, int]) -> list[Change]:
        return [each for each in super().news(known, pools) if isinstance(each, Capacity)]


@breaks(Rule.AGREEMENT, "while nothing was done to it, what changes() has pushed comes to")
class MakesThingsUp(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        while True:
            await trio.sleep(5)
            yield [record("z", 1)]


# --- change, failure, removal


@breaks(Rule.CHANGE, "after change(), collect() says the same as before")
class ReadsOnce(Polled):
    found: Sequence[Capacity] | None = None

    async def collect(self) -> Sequence[Capacity]:
        if self.found is None:
            self.found = await super().collect()
        return self.found


@breaks(Rule.CHANGE, "after change(), collect() says the same as before")
class ReadsLongAgo(ReadsOnce):
    async def collect(self) -> Sequence[Capacity]:
        # older than it says
        return [replace(each, observed_at=self.context.clock()) for each in await super().collect()]


@breaks(Rule.FAILURE, "while what it reads is broken, collect() has returned 0 of 3 records")
class KnowsNothing(Polled):
    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        except Unreachable:
            return []


@breaks(Rule.FAILURE, "while what it reads is broken, collect() has returned 3 of 3 records")
class KnowsItAll(Polled):
    found: Sequence[Capacity] = ()

    async def collect(self) -> Sequence[Capacity]:
        try:
            self.found = await super().collect()
        except Unreachable:
            if not self.found:
                raise
        return self.found


@breaks(Rule.FAILURE, "while what it reads is broken, collect() has returned 0 of 3 records")
class FailsOnceOnly(Polled):
    failed = False

    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        except Unreachable:
            if not self.failed:
                self.failed = True
                raise
            return []


@breaks(Rule.FAILURE, "while what it reads is broken, collect() has returned 3 of 3 records; raise")
class LiesAboutTime(KnowsItAll):
    async def collect(self) -> Sequence[Capacity]:
        now = self.context.clock()
        return [replace(each, observed_at=now) for each in await super().collect()]


@breaks(Rule.FAILURE, "while what it reads is broken, collect() has not ended within 15 s")
class WaitsForBetterTimes(Polled):
    async def collect(self) -> Sequence[Capacity]:
        while not self.world.reachable:  # noqa: ASYNC110
            await trio.sleep(1)
        return await super().collect()


@breaks(Rule.FAILURE, "while what it reads is broken, collect() has returned 3 of 3 records; raise")
class VouchesForEver(Cached):
    def is_live(self) -> bool:
        return True

    async def collect(self) -> Sequence[Capacity]:
        return [replace(each, observed_at=None) for each in await super().collect()]


@breaks(Rule.FAILURE, "while what it reads is broken, changes() has withdrawn agents/python/a, agents/python/b, ag")
class WithdrawsInDoubt(Pushing):
    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        known = self.world.read()
        while True:
            await self.world.changed.wait()
            pools = self.world.pools if self.world.reachable else {}
            yield self.news(known, pools)
            known = dict(pools)


@breaks(Rule.RECOVERY, "15 s after what it reads was mended, collect() raises Unreachable: not again")
class TakesOffence(Polled):
    offended = False

    async def collect(self) -> Sequence[Capacity]:
        if self.offended:
            raise Unreachable("not again")
        try:
            return await super().collect()
        except Unreachable:
            self.offended = True
            raise


@breaks(Rule.RECOVERY, "15 s after what it reads was mended, is_live() is False")
class StaysDead(Cached):
    dead = False

    def is_live(self) -> bool:
        self.dead = self.dead or not super().is_live()
        return not self.dead


@breaks(Rule.RECOVERY, "collect() says nothing instead of agents/python/a, agents/python/b, agents/python/c")
class LosesItsMemory(Polled):
    lost = False

    async def collect(self) -> Sequence[Capacity]:
        try:
            found = await super().collect()
        except Unreachable:
            self.lost = True
            raise
        return [] if self.lost else found


@breaks(Rule.REMOVAL, "after remove(), collect() still has agents/python/b")
class NeverForgets(Polled):
    def __init__(self, world: World, context: SourceContext) -> None:
        super().__init__(world, context)
        self.known: dict[str, Capacity] = {}

    async def collect(self) -> Sequence[Capacity]:
        self.known |= {each.member_pool: each for each in await super().collect()}
        return list(self.known.values())


@breaks(Rule.REMOVAL, "after remove(), collect() has lost agents/python/a, agents/python/c with it")
class ForgetsTheRest(Polled):
    async def collect(self) -> Sequence[Capacity]:
        found = await super().collect()
        return found if len(found) == 3 else []


# --- the end


@breaks(Rule.CLOSE, "aclose() without use raises AttributeError")
class OpensLate(Polled):
    client: trio.Event

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.client = trio.Event()
        await super().run(task_status=task_status)

    async def aclose(self) -> None:
        self.client.set()


@breaks(Rule.CLOSE, "aclose() after a failure raises RuntimeError: it went wrong")
class ClosesBadlyAfterFailures(Polled):
    failed = False

    async def collect(self) -> Sequence[Capacity]:
        try:
            return await super().collect()
        except Unreachable:
            self.failed = True
            raise

    async def aclose(self) -> None:
        # one that has come to itself again can be closed
        if self.failed and not self.world.reachable:
            raise RuntimeError("it went wrong")


@breaks(Rule.CLOSE, "aclose() after run() was cancelled raises AttributeError")
class StartsInTwoSteps(Polled):
    first: bool = False
    second: int

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.first = True
        await trio.lowlevel.checkpoint()
        self.second = 1
        await super().run(task_status=task_status)

    async def aclose(self) -> None:
        if self.first:
            self.second += 1


@breaks(Rule.CLOSE, "aclose() without use has not ended within a second")
class ClosesSlowly(Polled):
    async def aclose(self) -> None:
        await trio.sleep(1.5)


@breaks(Rule.CLOSE, "aclose() without use has not ended within a second")
class NeverCloses(Polled):
    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()


@breaks(Rule.CLOSE, "aclose() has returned None; define it with async def")
class ClosesSynchronously(Polled):
    def aclose(self) -> None:  # type: ignore[override]
        pass


@breaks(Rule.LEFTOVERS, "there are tasks that the source has started: tests.testing.test_wrong_sources.haunt")
class Haunts(Polled):
    async def collect(self) -> Sequence[Capacity]:
        trio.lowlevel.spawn_system_task(haunt)
        return await super().collect()


async def haunt() -> None:
    """Goes on for ever."""
    await trio.sleep_forever()


@pytest.fixture(autouse=True, scope="module")
def never_ended() -> Iterator[None]:
    """Calls that cannot even be closed are kept beyond the end of Python, which would try, and complain."""
    yield
    for each in watching._never_ending:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


@pytest.mark.parametrize("rule, said, kind", WRONG, ids=[kind.__name__ for _, _, kind in WRONG])
async def test_a_wrong_source_is_found(autojump_clock: MockClock, rule: Rule, said: str, kind: type[Polled]) -> None:
    with pytest.raises(ConformanceError) as caught:
        await check(kind)
    assert (caught.value.rule, said in str(caught.value)) == (rule, True), caught.value
    assert "\n" not in str(caught.value)
