"""What `/readyz` says of sources and sinks is true when it says so, and stays true when the whole process is frozen for
a while, as by SIGSTOP or with a machine that sleeps: then clocks go on, and deadlines that are apart are over at
once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import lines
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity
from trio_federation.config import Federation
from trio_federation.hookspecs import CapacitySink, CapacitySource
from trio_federation.isolation import Body
from trio_federation.sources import LONGEST_REMAKE, Batch, Pushed, SourceRunner

POOL = Capacity("west", "ns", "env", "p1", idle=1)


def make_agent(source: CapacitySource, **more: Any) -> Agent:
    """An agent of one source, without a hub."""
    return Agent("west", Federation(), sources={"s": lambda: source}, generator=random.Random(0), **more)


class Source(CapacitySource):
    """Has one pool, or none, after so many seconds."""

    def __init__(self, seconds: float = 0.0, *records: Capacity) -> None:
        self._seconds = seconds
        self._records = records

    async def collect(self) -> Sequence[Capacity]:
        """Take that long."""
        await trio.sleep(self._seconds)
        return self._records


@pytest.mark.parametrize("pushes", [False, True])
async def test_a_source_that_has_worked_has_its_records_in_the_registry(
    pushes: bool, autojump_clock: MockClock
) -> None:
    """Whoever waits for `/readyz` and asks for a placement then gets one. Here its batch waits for its turn."""

    class Pushing(Source):
        async def changes(self) -> AsyncIterator[Sequence[Capacity]]:
            await trio.sleep(1.0)
            yield [POOL]
            await trio.sleep_forever()

    agent = make_agent(Pushing(0.5) if pushes else Source(0.5, POOL))
    (body,) = [body for _, body, _ in agent._plugins]
    account = agent.source_accounts["s"]
    free, waiting = trio.Event(), trio.Event()

    async def deliver(batch: Batch) -> None:
        if isinstance(batch, Pushed) is pushes:
            waiting.set()
            await free.wait()
        await agent._to_intake.send(batch)

    runner_of(body).deliver = deliver
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await waiting.wait()
        before = account.health.last_success
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        assert account.health.last_success == before
        assert (agent.health()["why_not"] == []) is pushes
        await trio.sleep(1.0)
        free.set()
        await trio.testing.wait_all_tasks_blocked()
        assert account.health.last_success == trio.current_time()
        assert agent.registry.records("ns", "env") != []
        nursery.cancel_scope.cancel()


def runner_of(body: Body) -> SourceRunner:
    """Whose life this is."""
    runner = getattr(body, "__self__", None)
    assert isinstance(runner, SourceRunner)
    return runner


async def test_what_was_pushed_before_a_freeze_is_as_old_as_the_freeze(autojump_clock: MockClock) -> None:
    """The batch is on its way to the agent when the process is frozen for an hour: what it says is an hour old then,
    and counts for nothing."""

    class Pushing(CapacitySource):
        collects = 0

        async def collect(self) -> Sequence[Capacity]:
            await trio.lowlevel.checkpoint()
            self.collects += 1
            if self.collects > 1:
                raise OSError("the API is away")
            return []

        async def changes(self) -> AsyncIterator[Sequence[Capacity]]:
            await trio.sleep(2.0)
            yield [POOL]
            await trio.sleep_forever()

    agent = make_agent(Pushing())
    (body,) = [body for _, body, _ in agent._plugins]

    async def deliver(batch: Batch) -> None:
        if isinstance(batch, Pushed):
            autojump_clock.jump(3600.0)
        await agent._to_intake.send(batch)

    runner_of(body).deliver = deliver
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(2.5)
        assert trio.current_time() > 3600.0
        await trio.testing.wait_all_tasks_blocked()
        assert agent.source_accounts["s"].records == 1
        assert agent.registry.records("ns", "env") == []
        nursery.cancel_scope.cancel()


async def test_a_source_that_was_frozen_is_not_taken_for_one_that_cannot_be_cancelled(
    autojump_clock: MockClock,
) -> None:
    """Its deadline, and the moment until which it gets to heed that, are over at once. Trio takes what is due at once
    in no particular order, so that this is tried often."""
    for _ in range(30):
        agent = make_agent(Source(10.0, POOL))
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            await trio.sleep(3.0)
            autojump_clock.jump(20.0)
            await trio.sleep(0.0)
            await trio.testing.wait_all_tasks_blocked()
            (shown,) = agent.health()["sources"]
            assert shown["failures"] == 1
            assert shown["last_error"]["text"] == "no answer within 15 s"
            nursery.cancel_scope.cancel()


async def test_a_sink_that_could_be_made_at_last_is_not_failing_while_there_is_nothing_to_tell(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Its failure is over when it runs, although nothing was told yet."""
    asked = 0

    class Sink(CapacitySink):
        def __init__(self) -> None:
            nonlocal asked
            asked += 1
            if asked <= 2:
                raise OSError("not yet")

        async def update(self, snapshot: Sequence[Capacity]) -> None:
            raise AssertionError("there is nothing to tell")

    agent = make_agent(Source(), sinks={"k": Sink})
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(0.1)
        assert agent.health()["sinks"][0]["state"] == "failing"
        await trio.sleep(2 * LONGEST_REMAKE)
        (shown,) = agent.health()["sinks"]
        nursery.cancel_scope.cancel()
    assert asked == 3
    assert (shown["state"], shown["next_try"], shown["failures"]) == ("starting", None, 2)
    assert [(line["what"], line["failures_before"]) for line in lines(logs, "sink_works")] == [("create", 2)]
