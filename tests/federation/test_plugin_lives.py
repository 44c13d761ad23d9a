"""How an agent lives with its sources: made, run, asked, listened to, closed and made anew, whatever goes wrong with
them; what the log, the metrics and `/readyz` say meanwhile; and, where each has a thread of its own, what it costs the
others that one of them blocks. What is made of the records is in `test_sources.py`; filters and sinks have files of
their own."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted, lines
from tests.simulation import (
    SECRET,
    PushingSource,
    ScriptedSource,
    Simulation,
    always,
    member,
    sampled,
    simulated_federation,
)
from trio_federation import isolation
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity, Change
from trio_federation.clock import boot_time
from trio_federation.config import Federation
from trio_federation.health import LONGEST_SUMMARY, SUMMARY_AFTER
from trio_federation.hookspecs import CapacityFilter, CapacitySink, CapacitySource
from trio_federation.retry import LONGEST, STABLE
from trio_federation.sources import CLOSE_DEADLINE, LONGEST_REMAKE

FAILURES = "trio_federation_source_failures_total"
LIVE = "trio_federation_source_live"
DROPPED = "trio_federation_records_dropped_total"
#: seconds of real time after which a test with threads is lost
PATIENCE = 30.0

Run = Callable[[trio.TaskStatus[None]], Awaitable[None]]
Makers = Mapping[str, Callable[[], CapacitySource]]


class Source(PushingSource):
    """A source whose `run()` does what the test says; it pushes only where it is told to."""

    def __init__(self, run: Run | None = None, *, pushes: bool = False) -> None:
        super().__init__()
        self._script = run
        self._pushes = pushes

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """What it was told to do, or what every source does."""
        if self._script is None:
            await super().run(task_status=task_status)
        else:
            await self._script(task_status)

    def changes(self) -> AsyncIterator[Sequence[Change]]:
        """What is pushed. Not async, so that None can be the answer."""
        return super().changes() if self._pushes else None  # type: ignore[return-value]


class Maker:
    """What makes a source anew each time that it is asked to, and keeps what it has made."""

    def __init__(self, make: Callable[[], ScriptedSource]) -> None:
        self.make = make
        #: raised instead while it is set
        self.failure: BaseException | None = None
        #: when it was asked
        self.asked: list[float] = []
        self.made: list[ScriptedSource] = []

    def __call__(self) -> CapacitySource:
        self.asked.append(trio.current_time())
        if self.failure is not None:
            raise self.failure
        made = self.make()
        self.made.append(made)
        return made


def having(*records: Capacity) -> ScriptedSource:
    """A source that has these records."""
    source = ScriptedSource()
    source.set(*records)
    return source


GOOD = member("east", "good", idle=1)


def good() -> ScriptedSource:
    """A source that nothing is wrong with."""
    return having(GOOD)


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    """An agent that runs, and at the end is stopped cleanly, and has ended."""
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        yield agent
        nursery.cancel_scope.cancel()


def alone(
    sources: Makers,
    *,
    sinks: Mapping[str, Callable[[], CapacitySink]] | None = None,
    filters: Mapping[str, Callable[[], CapacityFilter]] | None = None,
    settings: Federation | None = None,
) -> Agent:
    """An agent of cluster east without a hub."""
    return Agent(
        "east",
        settings or Federation(),
        sources=sources,
        sinks=sinks,
        filters=filters,
        generator=random.Random(0),
    )


def in_federation(fed: Simulation, sources: Makers, **more: Any) -> Agent:
    """An agent of cluster east in a simulated federation; unlike those of `fed`, it may be made of anything."""
    cluster = fed.clusters["east"] if "east" in fed.clusters else fed.add("east")
    owner = object()
    given: dict[str, Any] = {
        "hubs": {name: route.dialer(owner) for name, route in cluster.routes.items()},
        "credential": SECRET,
        "generator": fed.generator("east"),
    }
    return Agent("east", **({"settings": fed.settings} | given | more), sources=sources)


def shown(agent: Agent, name: str) -> dict[str, Any]:
    """What `/readyz` has of a source or a sink."""
    health = agent.health()
    (found,) = [each for each in [*health["sources"], *health["sinks"]] if each["name"] == name]
    return dict(found)


def told(logs: Sequence[EventDict], **fields: object) -> list[tuple[str, object]]:
    """What people are told of the sources: each line's event, and what it is about, of the lines with these fields."""
    return [
        (line["event"], line.get("what"))
        for line in logs
        if line["log_level"] in ("info", "warning")
        and line["event"].startswith(("source_", "filter_", "close_", "plugin_"))
        and fields.items() <= line.items()
    ]


async def kept_cancelled() -> trio.Cancelled:
    """A Cancelled of a scope that is long over, as a cache of outcomes may keep one."""
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            kept = error  # and not let through, which is the fault
    return kept


# --- being made ------------------------------------------------------------------------------------------------------

CREATE_FAILURES: dict[str, BaseException] = {
    "an error": OSError("no such cluster"),
    "an import that fails": ModuleNotFoundError("No module named 'missing'"),
    "an exit": SystemExit(3),
    "a group": ExceptionGroup("several", [OSError("one"), ValueError("other")]),
    "an exit in a group": BaseExceptionGroup("several", [SystemExit(3), ValueError("other")]),
    "a panic": type("Panic", (BaseException,), {})("in an extension"),
}


@pytest.mark.parametrize("failure", CREATE_FAILURES.values(), ids=CREATE_FAILURES)
async def test_one_that_cannot_be_made_is_tried_again_ever_more_slowly(
    failure: BaseException, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Each delay is between half of its bound and the whole of it, and the bound doubles from one second up to a
    minute; the other sources are as punctual as ever; once it can be made it works, and a line says so."""
    async with simulated_federation("west") as fed:
        bad = Maker(lambda: having(member("east", "mended", idle=2)))
        bad.failure = failure
        async with running(in_federation(fed, {"bad": bad, "good": good})) as agent:
            await trio.sleep(0.5)
            assert all(await sampled(299.5, lambda: fed["west"].idle("east") == [1]))
            gaps = [later - before for before, later in pairwise(bad.asked)]
            assert len(gaps) >= 8
            for number, gap in enumerate(gaps):
                bound = min(LONGEST_REMAKE, 2.0**number)
                assert bound / 2 <= gap <= bound
            assert counted(agent, FAILURES, source="bad", kind="create") == len(bad.asked)
            assert counted(agent, FAILURES, source="bad") == len(bad.asked)
            assert counted(agent, FAILURES, source="good") == 0
            assert (counted(agent, LIVE, source="bad"), counted(agent, LIVE, source="good")) == (0, 1)
            assert told(logs) == [("source_failed", "create")]
            line = lines(logs, "source_failed")[0]
            assert (line["source"], line["log_level"]) == ("bad", "warning")
            assert type(failure).__name__ in line["error"]
            assert (shown(agent, "bad")["state"], shown(agent, "good")["state"]) == ("failing", "live")
            assert agent.health()["why_not"] == [f"bad has not told yet what it has: {line['error']}"]
            logs.clear()
            bad.failure = None
            await trio.sleep(LONGEST_REMAKE + 1.0)
            assert len(bad.made) == 1
            assert fed["west"].idle("east") == [1, 2]
            assert told(logs) == [("source_works", "create")]
            assert lines(logs, "source_works")[0]["failures_before"] == len(bad.asked) - 1
            assert (shown(agent, "bad")["state"], counted(agent, LIVE, source="bad")) == ("live", 1)
            assert agent.health()["why_not"] == []
        assert bad.made[0].closed == 1


async def test_one_whose_filter_cannot_be_made_tells_others_nothing(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Without it nobody knows what others may know, so nothing is reported; what the cluster has itself is known all
    the same. It is made as soon as it can be."""

    class Open(CapacityFilter):
        def report(self, record: Capacity) -> Capacity | None:
            return record

    class FilterMaker:
        failing = True

        def __call__(self) -> CapacityFilter:
            if self.failing:
                raise PermissionError("the policy cannot be read")
            return Open()

    source, make_filter = Maker(good), FilterMaker()
    async with simulated_federation("west") as fed:
        async with running(in_federation(fed, {"good": source}, filters={"policy": make_filter})) as agent:
            await trio.sleep(100.0)
            assert agent.registry.local_idle("ns", "env") == 1
            assert fed["west"].known("east") == []
            (failed,) = [line for line in lines(logs, "filter_failed") if line["log_level"] == "warning"]
            assert failed["filter"] == "policy"
            assert "the policy cannot be read" in failed["error"]
            make_filter.failing = False
            await trio.sleep(6.0)
            assert fed["west"].idle("east") == [1]
            assert len(source.made) == 1
        assert source.made[0].closed == 1


# --- running ---------------------------------------------------------------------------------------------------------


async def _raises_before_it_starts(status: trio.TaskStatus[None]) -> None:
    await trio.sleep(0.5)
    raise OSError("no connection")


async def _raises_after_a_while(status: trio.TaskStatus[None]) -> None:
    status.started()
    await trio.sleep(7.0)
    raise OSError("no connection")


async def _returns(status: trio.TaskStatus[None]) -> None:
    status.started()
    await trio.sleep(0.5)


async def _returns_before_it_starts(status: trio.TaskStatus[None]) -> None:
    await trio.sleep(0.5)


async def _never_starts(status: trio.TaskStatus[None]) -> None:
    await trio.sleep_forever()


async def _starts_twice(status: trio.TaskStatus[None]) -> None:
    status.started()
    status.started()
    await trio.sleep_forever()


async def _exits(status: trio.TaskStatus[None]) -> None:
    status.started()
    await trio.sleep(0.5)
    raise SystemExit(1)


async def _raises_what_its_own_tasks_raised(status: trio.TaskStatus[None]) -> None:
    async def fail() -> None:
        try:
            await trio.sleep(0.5)
        finally:
            raise OSError("no connection")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        nursery.start_soon(fail)
        status.started()


async def _raises_a_kept_cancelled(status: trio.TaskStatus[None]) -> None:
    status.started()
    await trio.sleep(0.5)
    raise await kept_cancelled()


async def _raises_a_kept_cancelled_before_it_starts(status: trio.TaskStatus[None]) -> None:
    raise await kept_cancelled()


async def _raises_a_group_with_a_kept_cancelled(status: trio.TaskStatus[None]) -> None:
    status.started()
    await trio.sleep(0.5)
    raise BaseExceptionGroup("of its own", [OSError("no connection"), await kept_cancelled()])


#: how run() fails, how many seconds after it was called, and what is said of it
RUN_FAILURES: dict[str, tuple[Run, float, str]] = {
    "raises before it starts": (_raises_before_it_starts, 0.5, "OSError: no connection"),
    "raises after a while": (_raises_after_a_while, 7.0, "OSError: no connection"),
    "returns": (_returns, 0.5, "go on until it is cancelled"),
    "returns before it starts": (_returns_before_it_starts, 0.5, "go on until it is cancelled"),
    "never starts": (_never_starts, 15.0, "has not started within 15 s"),
    "starts twice": (_starts_twice, 0.0, "RuntimeError"),
    "exits": (_exits, 0.5, "SystemExit: 1"),
    "raises a group": (_raises_what_its_own_tasks_raised, 0.5, "OSError: no connection"),
    "raises a kept Cancelled": (_raises_a_kept_cancelled, 0.5, "Cancelled"),
    "raises a kept Cancelled before it starts": (_raises_a_kept_cancelled_before_it_starts, 0.0, "Cancelled"),
    "raises a group with a kept Cancelled": (_raises_a_group_with_a_kept_cancelled, 0.5, "OSError: no connection"),
}


@pytest.mark.parametrize("run, lasts, said", RUN_FAILURES.values(), ids=RUN_FAILURES)
async def test_one_whose_run_fails_is_closed_and_made_anew(
    run: Run, lasts: float, said: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """hookspecs.py, "run": "What is raised here, a return before the agent cancels it, and a start that takes longer
    than half of ttl, are failures of the whole object: it is closed, and after a backoff a new one is made"."""
    async with simulated_federation("west") as fed:
        bad = Maker(lambda: Source(run))
        async with running(in_federation(fed, {"bad": bad, "good": good})) as agent:
            await trio.sleep(0.5)
            assert all(await sampled(199.5, lambda: fed["west"].idle("east") == [1]))
            assert [source.closed for source in bad.made[:-1]] == [1] * (len(bad.made) - 1)
            assert bad.made[-1].closed <= 1
            lives = [later - before for before, later in pairwise(bad.asked)]
            assert len(lives) >= 5
            for number, seconds in enumerate(lives):
                bound = min(LONGEST_REMAKE, 2.0**number)
                assert bound / 2 <= seconds - lasts <= bound + 0.001
            ended = sum(source.closed for source in bad.made)
            assert counted(agent, FAILURES, source="bad", kind="run") == ended
            assert counted(agent, FAILURES, source="bad") == ended
            assert counted(agent, FAILURES, source="good") == 0
            failed = lines(logs, "source_failed")
            assert {(line["source"], line["what"]) for line in failed} == {("bad", "run")}
            assert all(said in line["error"] for line in failed)
            bad.make = lambda: having(member("east", "mended", idle=2))
            await trio.sleep(LONGEST_REMAKE + 16.0)
            assert fed["west"].idle("east") == [1, 2]
            # One that works for a while, time and again, is told once, too.
            assert told(logs) == [("source_failed", "run"), ("source_works", "run")]
            assert shown(agent, "bad")["state"] == "live"
        assert [source.closed for source in bad.made] == [1] * len(bad.made)


@pytest.mark.parametrize("run", ["never starts", "raises before it starts", "returns before it starts"])
async def test_nothing_is_asked_of_one_that_has_not_started(run: str, autojump_clock: MockClock) -> None:
    """hookspecs.py, "run": "Call task_status.started() when the rest may be used: nothing else is called before"."""
    bad = Maker(lambda: Source(RUN_FAILURES[run][0], pushes=True))
    async with running(alone({"bad": bad})):
        await trio.sleep(100.0)
    assert len(bad.made) >= 4
    assert [source.collects for source in bad.made] == [0] * len(bad.made)


async def test_what_is_known_of_one_that_fails_stays_until_it_is_too_old(autojump_clock: MockClock) -> None:
    """Its records are as true as they were: they age, here and elsewhere, and are withdrawn by nobody."""
    async with simulated_federation("west") as fed:
        bad = Maker(lambda: Source(_raises_after_a_while))
        first = bad.make()
        first.set(member("east", "bad", idle=2))
        bad.make = lambda: first
        async with running(in_federation(fed, {"bad": bad, "good": good})) as agent:
            await trio.sleep(6.9)
            bad.failure = OSError("gone for good")
            assert first.collects == 2  # at 0 s and at 5 s
            history = await sampled(
                40.0,
                lambda: (
                    trio.current_time(),
                    [record.idle for record in agent.registry.snapshot()],
                    fed["west"].idle("east"),
                ),
            )
            for now, own, seen in history:
                assert own == ([2, 1] if now <= 35.0 else [1])
                assert seen == own or 35.0 <= now <= 35.1


async def test_one_that_has_worked_for_long_is_made_anew_at_once(autojump_clock: MockClock) -> None:
    """A minute without a failure, and the next one is the first again."""
    lasts = 0.5

    async def run(status: trio.TaskStatus[None]) -> None:
        status.started()
        await trio.sleep(lasts)

    bad = Maker(lambda: Source(run))
    async with running(alone({"bad": bad})):
        await trio.sleep(150.0)
        lasts = STABLE
        await trio.sleep(250.0)
    gaps = [later - before for before, later in pairwise(bad.asked)]
    assert max(gaps) > 32.0
    assert [gap for gap in gaps if gap > STABLE][-1] <= STABLE + 1.0


# --- being closed ----------------------------------------------------------------------------------------------------


class HangingClose(Source):
    """Does not let go."""

    async def aclose(self) -> None:
        """Hang."""
        await super().aclose()
        await trio.sleep_forever()


class RaisingClose(Source):
    """Fails to let go."""

    async def aclose(self) -> None:
        """Fail."""
        await super().aclose()
        raise SystemExit(3)


class CancelledClose(Source):
    """Raises what it should not have kept."""

    async def aclose(self) -> None:
        """Raise it."""
        await super().aclose()
        raise await kept_cancelled()


CLOSES: dict[str, tuple[type[Source], float, str]] = {
    "hangs": (HangingClose, CLOSE_DEADLINE, "not done within 1 s"),
    "exits": (RaisingClose, 0.0, "SystemExit: 3"),
    "raises a kept Cancelled": (CancelledClose, 0.0, "Cancelled"),
}


@pytest.mark.parametrize("kind, takes, said", CLOSES.values(), ids=CLOSES)
async def test_one_that_does_not_let_go_is_given_up(
    kind: type[Source], takes: float, said: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """hookspecs.py, "aclose": "The last call, made once, also after a failure […]; there is a deadline of one second".
    It costs no other source anything, and the next one is made all the same."""
    async with simulated_federation("west") as fed:
        bad = Maker(lambda: kind(_returns))
        async with running(in_federation(fed, {"bad": bad, "good": good})) as agent:
            await trio.sleep(0.5)
            assert all(await sampled(29.5, lambda: fed["west"].idle("east") == [1]))
            lives = [later - before for before, later in pairwise(bad.asked)]
            assert len(lives) >= 3
            for number, seconds in enumerate(lives):
                assert 0.5 + takes + 2**number / 2 <= seconds <= 0.5 + takes + 2**number
            assert counted(agent, FAILURES, source="bad", kind="run") == sum(source.closed for source in bad.made)
            closes = lines(logs, "close_failed")
            assert {line["plugin"] for line in closes} == {"bad"}
            assert all(said in line["error"] for line in closes)
            bad.make = lambda: kind()
            await trio.sleep(LONGEST_REMAKE)
            assert bad.made[-1].closed == 0
            began = trio.current_time()
        assert trio.current_time() - began <= takes + 0.2
        assert fed["west"].known("east") == []
        assert [source.closed for source in bad.made] == [1] * len(bad.made)


async def test_one_is_given_the_time_to_let_go(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """Also when the agent stops: what has to be awaited to let go is not cut off by the stop itself."""
    let_go: list[float] = []

    class Slow(Source):
        async def aclose(self) -> None:
            await super().aclose()
            await trio.sleep(0.9 * CLOSE_DEADLINE)
            let_go.append(trio.current_time())

    maker = Maker(Slow)
    async with running(alone({"slow": maker})):
        await trio.sleep(1.0)
    assert let_go == [pytest.approx(1.0 + 0.9 * CLOSE_DEADLINE)]
    assert told(logs) == []


# --- being asked -----------------------------------------------------------------------------------------------------


class Asked(ScriptedSource):
    """Notes when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    async def collect(self) -> Sequence[Capacity]:
        """Answer like any."""
        self.times.append(trio.current_time())
        return await super().collect()


@pytest.mark.parametrize("interval", [0.2, 5.0, 14.0])
async def test_a_collect_that_fails_is_tried_again_ever_more_slowly(interval: float, autojump_clock: MockClock) -> None:
    """The bound of the delay begins at the report interval and doubles up to ten seconds, or to the report interval
    where that is longer; each delay is at least half of it. After one success everything is as it was."""
    source = Asked()
    source.failure = OSError("no API server")
    async with running(alone({"bad": lambda: source}, settings=Federation(report_interval=interval))) as agent:
        for _ in range(2):
            source.failure = OSError("no API server")
            await trio.sleep(interval)
            assert counted(agent, FAILURES, source="bad", kind="collect") > 0
            source.times.clear()
            await trio.sleep(200.0)
            gaps = [later - before for before, later in pairwise(source.times)]
            bounds = [min(max(LONGEST, interval), interval * 2.0**number) for number in range(len(gaps) + 2)]
            for number, gap in enumerate(gaps):
                # the first of them was forgotten with its begin, which may be one or two tries ago
                assert bounds[number] / 2 <= gap <= bounds[number + 2]
            assert all(max(LONGEST, interval) / 2 <= gap <= max(LONGEST, interval) for gap in gaps[8:])
            source.failure = None
            await trio.sleep(max(LONGEST, interval))
            source.times.clear()
            await trio.sleep(interval * 6)
            assert [later - before for before, later in pairwise(source.times)] == [pytest.approx(interval)] * 5


@pytest.mark.parametrize("where", ["collect", "run", "aclose"])
async def test_one_that_does_not_let_itself_be_cancelled_does_not_pass_for_one_that_works(
    where: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Nothing can be done about it, but that it is told and counted, and shown for as long as it goes on; and that it
    costs no other source anything."""

    held: list[str] = []

    async def hold_on(here: str) -> None:
        if here == where and not held:
            held.append(here)
            with trio.CancelScope(shield=True):  # the fault
                await trio.sleep(60.0)

    class Deaf(ScriptedSource):
        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            await hold_on("run")
            task_status.started()
            if where == "aclose":
                await trio.sleep(1.0)
                return
            await trio.sleep_forever()

        async def collect(self) -> Sequence[Capacity]:
            await hold_on("collect")
            return await super().collect()

        async def aclose(self) -> None:
            await super().aclose()
            await hold_on("aclose")

    maker = Maker(Deaf)
    told_at = {"collect": 15.0 + CLOSE_DEADLINE, "run": 15.0 + CLOSE_DEADLINE, "aclose": 1.0}[where]
    what = "run" if where == "aclose" else where
    async with running(alone({"deaf": maker, "good": good})) as agent:
        await trio.sleep(told_at - 0.1)
        assert told(logs) == []
        await trio.sleep(0.2)
        assert told(logs) == [("source_failed", what)]
        for _ in range(8):
            await trio.sleep(5.0)
            assert shown(agent, "deaf")["state"] == "failing"
            assert shown(agent, "good")["last_success"] <= 5.0
        assert told(logs) == [("source_failed", what)]
        assert counted(agent, FAILURES, source="deaf", kind=what) == 1
        assert counted(agent, FAILURES) == 1
        if where != "aclose":
            assert "does not let itself be cancelled" in lines(logs, "source_failed")[0]["error"]
            await trio.sleep(60.0)
            assert shown(agent, "deaf")["state"] == "live"
            assert told(logs)[-1] == ("source_works", what)
        else:
            await trio.sleep(60.0)
            assert len(maker.made) >= 2


async def answer_of(records: object) -> Any:
    """A collect that answers so."""
    await trio.lowlevel.checkpoint()
    return records


def _breaking_off() -> Iterator[Capacity]:
    yield member("east", "bad", idle=9)
    raise OSError("the connection broke")


ANSWERS: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (lambda: None, "collect() returned a NoneType; it should be a list of Capacity"),
    "a number": (lambda: 7, "collect() returned a int; it should be a list of Capacity"),
    "one record": (lambda: member("east", "bad"), "collect() returned a Capacity; it should be a list of Capacity"),
    "an iterator that breaks off": (_breaking_off, "OSError: the connection broke"),
}


@pytest.mark.parametrize("answer, said", ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_that_is_no_list_is_a_failure_and_withdraws_nothing(
    answer: Callable[[], object], said: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """hookspecs.py, "collect": "a failed collect withdraws nothing"; also where half of an answer came."""
    source = having(member("east", "kept", idle=2))
    async with running(alone({"bad": lambda: source})) as agent:
        await trio.sleep(4.0)
        source.collect = lambda: answer_of(answer())  # type: ignore[method-assign]
        await trio.sleep(20.0)
        assert [record.member_pool for record in agent.registry.snapshot()] == ["kept"]
        assert told(logs) == [("source_failed", "collect")]
        assert said in lines(logs, "source_failed")[0]["error"]
        assert counted(agent, FAILURES, source="bad", kind="collect") >= 2
        assert counted(agent, DROPPED) == 0


async def test_methods_that_are_async_by_mistake_are_told_and_leave_no_warning(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """A coroutine would pass for a yes; and one that nobody awaits makes Python warn, time and again."""

    async def yes() -> bool:
        return True

    async def nothing() -> None:
        return None

    for name, method, said in (
        ("is_live", yes, "is_live() returned a coroutine; make it a plain function"),
        ("changes", nothing, "changes() is a coroutine; write it as an async generator"),
    ):
        source = having(member("east", idle=2))
        setattr(source, name, method)
        logs.clear()
        async with running(alone({"bad": always(source)})):
            await trio.sleep(20.0)
        gc.collect()
        assert said in lines(logs, "source_failed")[0]["error"]


async def test_an_answer_may_be_anything_that_can_be_iterated_over(autojump_clock: MockClock) -> None:
    """Also once only."""
    source = ScriptedSource()
    records = [member("east", "a", idle=1), member("east", "b", idle=2)]
    source.collect = lambda: answer_of(iter(records))  # type: ignore[method-assign]
    async with running(alone({"odd": lambda: source})) as agent:
        await trio.sleep(1.0)
        assert [record.idle for record in agent.registry.snapshot()] == [1, 2]
        assert shown(agent, "odd")["records"] == 2


# --- pushing ---------------------------------------------------------------------------------------------------------


class Pushing(ScriptedSource):
    """Pushes what a function yields, anew each time."""

    def __init__(self, pushed: Callable[[], AsyncIterator[Any]]) -> None:
        super().__init__()
        self.pushed = pushed
        #: when it was asked for its changes
        self.began: list[float] = []

    def changes(self) -> AsyncIterator[Sequence[Change]]:
        """What the function yields."""
        self.began.append(trio.current_time())
        return self.pushed()


async def _push_and_raise() -> AsyncIterator[Any]:
    yield [member("east", "pushed", idle=3)]
    raise OSError("410 Gone")


async def _push_and_end() -> AsyncIterator[Any]:
    yield [member("east", "pushed", idle=3)]


async def _push_and_exit() -> AsyncIterator[Any]:
    yield [member("east", "pushed", idle=3)]
    raise SystemExit(1)


async def _push_nothing() -> AsyncIterator[Any]:
    yield [member("east", "pushed", idle=3)]
    yield None
    await trio.sleep_forever()


async def _push_one_record() -> AsyncIterator[Any]:
    yield [member("east", "pushed", idle=3)]
    yield member("east", "other")
    await trio.sleep_forever()


async def _push_a_kept_cancelled() -> AsyncIterator[Any]:
    yield [member("east", "pushed", idle=3)]
    raise await kept_cancelled()


PUSH_FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (_push_and_raise, "OSError: 410 Gone"),
    "ends": (_push_and_end, "it stopped pushing changes"),
    "exits": (_push_and_exit, "SystemExit: 1"),
    "pushes None": (_push_nothing, "changes() yielded a NoneType; it should be a list"),
    "pushes one record": (_push_one_record, "changes() yielded a Capacity; it should be a list"),
    "raises a kept Cancelled": (_push_a_kept_cancelled, "Cancelled"),
    "is a list": (lambda: [[member("east", "pushed", idle=3)]], "TypeError"),
    "is a number": (lambda: 7, "TypeError"),
}


@pytest.mark.parametrize("pushed, said", PUSH_FAILURES.values(), ids=PUSH_FAILURES)
async def test_pushing_that_fails_is_begun_again_and_the_source_polled(
    pushed: Callable[[], Any], said: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """hookspecs.py, "changes": "Called again, after a backoff, when the iterator has raised or ended; meanwhile the
    source is polled"; and it is no reason to make it anew."""
    source = Pushing(pushed)
    maker = Maker(lambda: source)
    source.set(GOOD, member("east", "pushed", idle=0))
    async with (
        simulated_federation("west") as fed,
        running(in_federation(fed, {"bad": maker, "good": lambda: having(member("east", "x"))})) as agent,
    ):
        await trio.sleep(60.3)
        assert 1 in fed["west"].idle("east")
        assert len(maker.made) == 1
        assert 10 <= source.collects <= 13  # as one that does not push
        gaps = [later - before for before, later in pairwise(source.began)]
        assert 5 <= len(gaps) <= 24
        assert all(2.5 <= gap <= LONGEST for gap in gaps)
        assert counted(agent, FAILURES, source="bad", kind="push") == len(source.began)
        assert counted(agent, FAILURES, source="bad") == len(source.began)
        failed = lines(logs, "source_failed")
        assert {(line["source"], line["what"]) for line in failed} == {("bad", "push")}
        assert all(said in line["error"] for line in failed)
        assert counted(agent, FAILURES, source="good") == 0


@pytest.mark.parametrize(
    "batch, reason, count", [("p1", "type", 2), ([1, 2], "type", 2), ([None], "type", 1), ({"p1": 1}, "type", 1)]
)
async def test_garbage_that_is_pushed_is_dropped_and_pushing_goes_on(
    batch: object, reason: str, count: int, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The iterator is not to blame for what can be dropped: what comes after it is taken."""

    async def pushed() -> AsyncIterator[Any]:
        await trio.sleep(1.0)
        yield batch
        yield [member("east", "pushed", idle=3)]
        await trio.sleep_forever()

    async with running(alone({"bad": lambda: Pushing(pushed)})) as agent:
        await trio.sleep(3.0)
        assert [record.idle for record in agent.registry.snapshot()] == [3]
        assert counted(agent, DROPPED, origin="source:bad", reason=reason) == count
        assert told(logs) == []
        assert len(lines(logs, "record_dropped")) == 1


async def test_a_source_that_pushes_again_works_also_where_there_is_nothing_to_push(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """In a quiet cluster no change comes for hours. That must not look like a failure that goes on for hours."""
    broken = True

    async def pushed() -> AsyncIterator[Any]:
        if broken:
            raise OSError("410 Gone")
        await trio.sleep_forever()
        yield []

    async with running(alone({"quiet": lambda: Pushing(pushed)})) as agent:
        await trio.sleep(60.0)
        assert shown(agent, "quiet")["state"] == "failing"
        assert told(logs) == [("source_failed", "push")]
        broken = False
        await trio.sleep(LONGEST + 15.0 + 10.0)  # a backoff, half a TTL, and the next resync
        assert shown(agent, "quiet")["state"] == "live"
        assert counted(agent, LIVE, source="quiet") == 1
        assert told(logs) == [("source_failed", "push"), ("source_works", "push")]
        broken = True  # which nobody has noticed yet: it is the same iterator
        await trio.sleep(600.0)
        assert len(told(logs)) == 2


async def test_a_source_that_gives_up_pushing_for_polling_works(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Its last failure to push was the last word on that."""
    source = Pushing(_push_and_raise)
    async with running(alone({"changed": lambda: source})) as agent:
        await trio.sleep(1.0)
        assert shown(agent, "changed")["state"] == "failing"
        source.pushed = lambda: None  # type: ignore[assignment, return-value]
        await trio.sleep(10.0)
        assert shown(agent, "changed")["state"] == "live"
        assert told(logs) == [("source_failed", "push"), ("source_works", "push")]
        collects = source.collects
        await trio.sleep(50.0)
        assert source.collects == collects + 10


async def test_an_iterator_is_closed_whenever_it_is_left(autojump_clock: MockClock) -> None:
    """In the task that used it: what it holds is not left to the garbage collector."""
    closed: list[str] = []

    async def pushed() -> AsyncIterator[Any]:
        try:
            yield [member("east", "pushed")]
            yield None
        finally:
            closed.append(trio.lowlevel.current_task().name)

    async with running(alone({"bad": lambda: Pushing(pushed)})):
        await trio.sleep(0.5)
        assert len(closed) == 1
        await trio.sleep(20.0)
        before = len(closed)
        assert before >= 3
    assert len(closed) == before
    assert all(name.endswith("take_pushed") for name in closed)


async def test_an_iterator_that_swallows_its_cancellation_holds_nobody_up(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It ends all the same, in time, and the source is closed."""

    async def pushed() -> AsyncIterator[Any]:
        try:
            await trio.sleep(0.5)
            yield [member("east", "pushed", idle=3)]
            await trio.sleep_forever()
        except BaseException:  # the fault
            await trio.lowlevel.cancel_shielded_checkpoint()
        yield [member("east", "pushed", idle=4)]

    source = Pushing(pushed)
    async with running(alone({"deaf": lambda: source})) as agent:
        await trio.sleep(1.0)
        assert [record.idle for record in agent.registry.snapshot()] == [3]
        began = trio.current_time()
    assert trio.current_time() - began <= CLOSE_DEADLINE
    assert source.closed == 1


async def test_what_is_pushed_while_a_collect_runs_stands(autojump_clock: MockClock) -> None:
    """And the next collect counts again."""
    source = Source(pushes=True)
    source.set(member("east", idle=1))
    async with running(alone({"both": lambda: source})) as agent:
        await trio.sleep(1.0)
        source.slowness = 4.0
        await trio.sleep(10.0)  # the resync at 10 s is under way until 14 s
        source.push(member("east", idle=2), member("east", "p2", idle=3))
        seen = await sampled(8.0, lambda: [record.idle for record in agent.registry.snapshot()])
        assert all(idle == [2, 3] for idle in seen[1:])
        await trio.sleep(6.0)
        assert [record.idle for record in agent.registry.snapshot()] == [1]


# --- what is no plugin's failure -------------------------------------------------------------------------------------


class _Interrupted(ScriptedSource):
    """Raises KeyboardInterrupt in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self.set(member("east"))
        if where == "create":
            raise KeyboardInterrupt

    def _may_raise(self, where: str) -> None:
        if where == self._where:
            raise KeyboardInterrupt
        if where in self._where:
            raise BaseExceptionGroup("of its own", [OSError("one"), KeyboardInterrupt()])

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._may_raise("run before it starts")
        task_status.started()
        await trio.sleep(0.3)
        if self._where == "aclose":
            return
        self._may_raise("run")
        await trio.sleep_forever()

    async def collect(self) -> Sequence[Capacity]:
        self._may_raise("collect")
        return await super().collect()

    def is_live(self) -> bool:
        self._may_raise("is_live")
        return True

    def changes(self) -> AsyncIterator[Sequence[Change]] | None:
        self._may_raise("changes")
        return self._iterate() if "iterator" in self._where else None

    async def _iterate(self) -> AsyncIterator[Sequence[Change]]:
        self._may_raise("iterator")
        yield []

    async def aclose(self) -> None:
        await super().aclose()
        self._may_raise("aclose")


class _InterruptedFilter(CapacityFilter):
    def report(self, record: Capacity) -> Capacity | None:
        raise KeyboardInterrupt


class _InterruptedSink(CapacitySink):
    async def update(self, snapshot: Sequence[Capacity]) -> None:
        await trio.lowlevel.checkpoint()
        raise KeyboardInterrupt


INTERRUPTED = (
    *("create", "run before it starts", "run", "collect", "is_live", "changes", "iterator", "aclose"),
    *("a group in collect", "a group in run", "filter", "sink"),
)


@pytest.mark.parametrize("where", INTERRUPTED)
async def test_an_interrupt_in_a_plugin_ends_the_agent(
    where: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It is a person's wish, wherever Python happens to raise it: never a failure of the plugin, and never tried again.
    The agent ends with it, in order."""
    source = Maker(lambda: _Interrupted(where))
    agent = alone(
        {"bad": source},
        filters={"filter": _InterruptedFilter} if where == "filter" else {},
        sinks={"sink": _InterruptedSink} if where == "sink" else {},
    )
    with trio.fail_after(10.0), pytest.raises(BaseExceptionGroup) as caught:
        await agent.run()
    assert caught.group_contains(KeyboardInterrupt)
    assert agent.ended.is_set()
    before = 1 if where == "aclose" else 0  # what it is closed for
    assert told(logs) == [("source_failed", "run")] * before
    assert counted(agent, FAILURES) == before
    assert [made.closed for made in source.made] == ([] if where == "create" else [1])


class _Stuck(ScriptedSource):
    """Waits for ever in one of its methods, and fails on its way down where it is told to."""

    def __init__(self, where: str, failing: bool) -> None:
        super().__init__()
        self._where = where
        self._failing = failing
        self.reached = False

    async def _wait(self, where: str) -> None:
        if where == self._where:
            self.reached = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                try:
                    await trio.sleep_forever()
                finally:
                    if self._failing:
                        raise OSError("what a cancellation has broken")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._wait("run before it starts")
        task_status.started()
        await self._wait("run")
        await trio.sleep_forever()

    async def collect(self) -> Sequence[Capacity]:
        await self._wait("collect")
        return await super().collect()

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        await self._wait("changes")
        yield []
        await trio.sleep_forever()


@pytest.mark.parametrize("failing", [False, True], ids=["well", "with a failure on its way down"])
@pytest.mark.parametrize("where", ["run before it starts", "run", "collect", "changes"])
async def test_a_cancellation_goes_through(
    where: str, failing: bool, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Nothing is told or counted or tried again when the agent stops; the source is closed, and everything has ended
    at once."""
    source = Maker(lambda: _Stuck(where, failing))
    async with running(alone({"stuck": source})) as agent:
        await trio.sleep(1.0)
        (made,) = source.made
        assert isinstance(made, _Stuck)
        assert made.reached
        began = trio.current_time()
    assert trio.current_time() == began
    assert made.closed == 1
    assert told(logs) == []
    assert counted(agent, FAILURES) == 0


async def test_a_collect_that_fails_when_it_is_given_up_is_told_with_what_it_raised(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The deadline's own cancellation is the agent's, and no old one."""
    source = Maker(lambda: _Stuck("collect", True))
    async with running(alone({"stuck": source})):
        await trio.sleep(16.0)
    assert told(logs) == [("source_failed", "collect")]
    (line,) = lines(logs, "source_failed")
    assert "OSError: what a cancellation has broken" in line["error"]
    assert "Cancelled" not in line["error"]
    assert len(source.made) == 1


@pytest.mark.parametrize("where", ["collect", "is_live", "filter", "create"])
async def test_a_kept_cancelled_is_a_failure_like_any(
    where: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """One that is kept, by a cache of outcomes for instance, and raised again when nothing is cancelled, asks nobody to
    stop: the agent and the others go on, and it is told as what it is."""
    old = await kept_cancelled()

    class Keeping(ScriptedSource):
        async def collect(self) -> Sequence[Capacity]:
            if where == "collect":
                raise old
            return [member("east", "bad")]

        def is_live(self) -> bool:
            if where == "is_live":
                raise old
            return True

    class KeepingFilter(CapacityFilter):
        def report(self, record: Capacity) -> Capacity | None:
            if where == "filter":
                raise old
            return record

    bad = Maker(Keeping)
    bad.failure = old if where == "create" else None
    async with simulated_federation("west") as fed:
        agent = in_federation(fed, {"bad": bad, "good": good}, filters={"keeping": KeepingFilter})
        async with running(agent):
            await trio.sleep(100.0)
            assert fed["west"].idle("east") == ([] if where == "filter" else [1])
            failed = lines(logs, "filter_failed" if where == "filter" else "source_failed")
            assert failed != []
            assert all("old Cancelled" in line["error"] for line in failed)
            assert shown(agent, "good")["last_success"] <= 5.0
            assert shown(agent, "bad")["state"] == "failing"


# --- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["collect", "push", "create", "run"])
async def test_a_failure_that_lasts_for_hours_is_summed_up_ever_more_rarely(
    where: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """One warning when it begins, then summaries after 10, 30 and 70 minutes, and after that every hour, with how many
    there were and for how long; and one line when it is over."""
    broken = True

    async def run(status: trio.TaskStatus[None]) -> None:
        if broken and where == "run":
            raise OSError("broken")
        status.started()
        await trio.sleep_forever()

    async def pushed() -> AsyncIterator[Any]:
        if broken and where == "push":
            raise OSError("broken")
        yield []
        await trio.sleep_forever()

    class Broken(Source):
        def changes(self) -> AsyncIterator[Sequence[Change]]:
            return pushed()

    bad = Maker(lambda: Broken(run))
    bad.failure = OSError("broken") if where == "create" else None
    async with running(alone({"bad": bad})) as agent:
        if where == "collect":
            await trio.sleep(0.1)
            bad.made[0].failure = OSError("broken")
            await trio.sleep(10.0)
        began = trio.current_time()
        await trio.sleep(3.4 * 3600.0)
        warned = [line for line in lines(logs, "source_failed") if line["log_level"] == "warning"]
        assert {line["what"] for line in warned} == {where}
        first, *summaries = warned
        assert "failures" not in first
        assert "for_seconds" not in first
        minutes = [line["for_seconds"] / 60.0 for line in summaries]
        # Each comes with the first failure that is late enough, and so a little later than it might.
        late = (LONGEST_REMAKE if where in ("create", "run") else LONGEST) / 60.0
        assert len(minutes) == 5
        for number, (minute, wanted) in enumerate(zip(minutes, [10, 30, 70, 130, 190], strict=True), start=1):
            assert wanted <= minute <= wanted + number * late
        failures = [line["failures"] for line in summaries]
        assert failures == sorted(set(failures))
        assert failures[-1] <= counted(agent, FAILURES, source="bad", kind=where)
        every = [line for line in lines(logs, "source_failed") if line["what"] == where]
        assert len(every) == counted(agent, FAILURES, source="bad", kind=where)
        assert (SUMMARY_AFTER, LONGEST_SUMMARY) == (600.0, 3600.0)
        assert trio.current_time() - began >= 3.4 * 3600.0
        logs.clear()
        broken, bad.failure = False, None
        for made in bad.made:
            made.failure = None
        await trio.sleep(LONGEST_REMAKE + 30.0)
        assert told(logs) == [("source_works", where)]
        assert lines(logs, "source_works")[0]["failures_before"] == len(every)


async def test_readyz_says_how_each_source_is_and_was(autojump_clock: MockClock) -> None:
    """State, since when, last success, last error, next try, failures and records, at every stage; relative to now."""

    async def run(status: trio.TaskStatus[None]) -> None:
        await trio.sleep(1.0)
        status.started()
        await dying.wait()
        raise OSError("the connection broke")

    dying = trio.Event()
    source = Source(run, pushes=True)
    source.set(member("east", idle=1), member("east", "p2"))
    maker = Maker(lambda: source)
    maker.failure = OSError("no permission")
    agent = alone({"s": maker})

    def is_now(state: str, since: float, **more: object) -> None:
        """That it is shown so now."""
        found = shown(agent, "s")
        assert found["state"] == state
        assert found["since"] == pytest.approx(since, abs=0.002)
        assert {key: found[key] for key in more} == more

    is_now("starting", 0.0, last_success=None, last_error=None, next_try=None, failures=0, records=0)
    async with running(agent):
        await trio.sleep(0.25)
        error = {"what": "create", "text": "OSError: no permission", "age": 0.25}
        is_now("failing", 0.25, last_success=None, last_error=error, failures=1)
        next_try = shown(agent, "s")["next_try"]
        assert 0.25 <= next_try <= 0.75
        maker.failure = None
        await trio.sleep(next_try)
        began = trio.current_time()
        await trio.sleep(0.5)
        # It was made, and has not started yet.
        is_now("failing", trio.current_time(), last_success=None, next_try=0.0, failures=1)
        await trio.sleep(1.0)
        is_now("live", 0.5, last_success=0.5, failures=1, records=2)
        assert trio.current_time() - began == pytest.approx(1.5)
        assert shown(agent, "s")["last_error"]["what"] == "create"  # the last there was, however long ago
        # It pushes, so the next try is the next resync.
        await trio.sleep(6.5)
        is_now("live", 7.0, last_success=7.0)
        assert shown(agent, "s")["next_try"] == pytest.approx(3.0, abs=0.01)
        source.live = False
        await trio.sleep(4.0)
        is_now("not_live", 1.0, last_success=11.0, failures=1, records=2)
        # Not the next resync: once it can vouch for what it has, each second counts.
        assert shown(agent, "s")["next_try"] == pytest.approx(1.0, abs=0.01)
        assert shown(agent, "s")["last_error"]["what"] == "live"
        source.live = True
        await trio.sleep(2.0)
        is_now("live", 1.0, last_success=1.0)
        source.failure = OSError("no API server")
        await trio.sleep(9.5)
        is_now("failing", 0.5, last_success=10.5, failures=2)
        assert shown(agent, "s")["last_error"] == {"what": "collect", "text": "OSError: no API server", "age": 0.5}
        source.failure = None
        await trio.sleep(10.0)
        dying.set()
        await trio.sleep(0.25)
        is_now("failing", 0.25, failures=3)
        assert shown(agent, "s")["last_error"]["text"] == "OSError: the connection broke"
        assert 0.25 <= shown(agent, "s")["next_try"] <= 60.0
        assert agent.health()["why_not"] == []
    assert agent.health()["why_not"] == ["it has stopped"]


# --- with threads of their own ---------------------------------------------------------------------------------------
#
# Real threads under a real clock, since no simulated clock reaches into another thread. Who waits for something looks
# for it again and again, and nothing is asserted of how long it took.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impatient supervision."""
    monkeypatch.setattr(isolation, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(isolation, "BLOCKED_AFTER", 0.5)  # and yet no busy machine is taken for a blocked plugin
    monkeypatch.setattr(isolation, "END_DEADLINE", 0.3)


async def until(condition: Callable[[], bool]) -> None:
    """Until it is true."""
    with trio.move_on_after(PATIENCE):
        while True:
            if condition():
                return
            await trio.sleep(0.005)
    raise AssertionError("it never came")


class Counting(CapacitySource):
    """Has one more idle with every collect."""

    def __init__(self) -> None:
        self.collects = 0

    async def collect(self) -> Sequence[Capacity]:
        """One more."""
        self.collects += 1
        await trio.lowlevel.checkpoint()
        return [member("east", "counting", idle=self.collects)]


class Blocking(CapacitySource):
    """Blocks its thread in one of its methods, as a synchronous client does, until it is released."""

    def __init__(self, where: str, release: threading.Event) -> None:
        self.where = where
        self._release = release
        self.closed = threading.Event()
        self.block("create")

    def block(self, where: str) -> None:
        """Block, if this is the place."""
        if where == self.where:
            self._release.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Block before or after it has started."""
        self.block("run before it starts")
        task_status.started()
        self.block("run")
        await trio.sleep_forever()

    async def collect(self) -> Sequence[Capacity]:
        """Block."""
        self.block("collect")
        await trio.lowlevel.checkpoint()
        return [member("east", "blocking", idle=7)]

    def is_live(self) -> bool:
        """Block."""
        self.block("is_live")
        return True

    def changes(self) -> AsyncIterator[Sequence[Change]] | None:
        """Block when asked, or when iterated over."""
        self.block("changes")
        return self._iterate() if self.where == "iterator" else None

    async def _iterate(self) -> AsyncIterator[Sequence[Change]]:
        self.block("iterator")
        yield []
        await trio.sleep_forever()

    async def aclose(self) -> None:
        """Note it."""
        self.closed.set()


class BlockingFilter(CapacityFilter):
    """Blocks on the records of the blocking source."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def report(self, record: Capacity) -> Capacity | None:
        """Block, and let everything through."""
        if record.member_pool == "blocking":
            self._release.wait()
        return record


def isolated(fed: Simulation, sources: Makers, **more: Any) -> Agent:
    """An agent of cluster east with a thread for each of its plugins, and little patience."""
    settings = msgspec.structs.replace(fed.settings, report_interval=0.05)
    return in_federation(fed, sources, settings=settings, isolated=True, clock=boot_time, **more)


BLOCKS = ("create", "run before it starts", "run", "collect", "is_live", "changes", "iterator", "filter")


@pytest.mark.slow
@pytest.mark.parametrize("where", BLOCKS)
async def test_one_that_blocks_holds_nobody_else_up(where: str, quick: None, logs: list[EventDict]) -> None:
    """C42: the others' records keep coming, here and elsewhere; it is told once, counted, and shown; when it comes to
    itself it works, which is told once; and a stop is as clean as any."""
    release = threading.Event()
    made: list[Blocking] = []

    def make() -> CapacitySource:
        made.append(Blocking(where, release))
        return made[-1]

    filters = {"filter": lambda: BlockingFilter(release)} if where == "filter" else {}
    async with simulated_federation("west") as fed:
        async with running(isolated(fed, {"blocking": make, "counting": Counting}, filters=filters)) as agent:
            await until(lambda: lines(logs, "source_failed") != [])
            assert shown(agent, "blocking")["state"] == "blocked"
            error = shown(agent, "blocking")["last_error"]
            assert error["what"] == "blocked"
            assert "a call in it blocks" in error["text"]
            assert counted(agent, LIVE, source="blocking") == 0

            def idle() -> int:
                return next(iter(fed["west"].idle("east")), 0)

            for _ in range(3):  # each of them a report, and a hub's relay, that nobody holds up
                seen = idle()
                await until(lambda seen=seen: idle() > seen)  # type: ignore[misc]
            assert agent.registry.local_idle("ns", "env") >= idle()
            assert told(logs, source="blocking") == [("source_failed", "blocked")]
            assert counted(agent, FAILURES, source="blocking", kind="blocked") == 1
            assert counted(agent, FAILURES, source="blocking") == 1

            release.set()
            await until(lambda: shown(agent, "blocking")["state"] == "live")
            await until(lambda: 7 in fed["west"].idle("east"))
            assert told(logs, source="blocking") == [("source_failed", "blocked"), ("source_works", "blocked")]
            assert counted(agent, LIVE, source="blocking") == 1
        assert [source.closed.is_set() for source in made] == [True]
        await until(lambda: fed["west"].known("east") == [])
        assert len(told(logs, source="blocking")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["create", "collect"])
async def test_a_stop_does_not_wait_for_one_that_blocks(where: str, quick: None, logs: list[EventDict]) -> None:
    """It is left to itself, with a line; the others are closed, and what all of them had is withdrawn elsewhere at
    once: the records of the one that blocks, too."""
    release = threading.Event()
    closed = threading.Event()
    blocking: list[Blocking] = []

    class Closing(Counting):
        async def aclose(self) -> None:
            closed.set()

    def make() -> CapacitySource:
        blocking.append(Blocking("create" if where == "create" else "nowhere", release))
        return blocking[-1]

    try:
        async with simulated_federation("west") as fed:
            with trio.fail_after(PATIENCE):
                async with running(isolated(fed, {"blocking": make, "counting": Closing})):
                    await until(lambda: len(fed["west"].known("east")) == (1 if where == "create" else 2))
                    for source in blocking:
                        source.where = "collect"  # from its next one on
                    await until(lambda: lines(logs, "source_failed") != [])
            assert not release.is_set()
            assert closed.is_set()
            await until(lambda: fed["west"].known("east") == [])
            assert told(logs, source="blocking") == [("source_failed", "blocked"), ("plugin_abandoned", None)]
    finally:
        release.set()


@pytest.mark.slow
async def test_what_one_says_after_it_was_left_to_itself_is_not_heard(quick: None, logs: list[EventDict]) -> None:
    """Its agent has withdrawn everything. A collect that comes to its end long after changes nothing, neither there nor
    in another agent of the same process, and neither does that it is closed in the end."""
    release = threading.Event()
    blocking = Blocking("collect", release)
    async with simulated_federation("west") as fed:
        async with running(isolated(fed, {"blocking": lambda: blocking})) as agent:
            await until(lambda: lines(logs, "source_failed") != [])
        logs.clear()
        release.set()
        await until(blocking.closed.is_set)
        assert (agent.registry.snapshot(), fed["west"].known("east"), told(logs)) == ([], [], [])


@pytest.mark.slow
async def test_sources_with_threads_live_and_die_as_without(quick: None, logs: list[EventDict]) -> None:
    """Failures, remakes and their lines are the same; each life is in the source's own thread, never in the agent's."""
    threads: set[threading.Thread] = set()
    broken = True

    class Flaky(Counting):
        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            threads.add(threading.current_thread())
            if broken:
                raise SystemExit(1)
            await super().run(task_status=task_status)

        async def collect(self) -> Sequence[Capacity]:
            threads.add(threading.current_thread())
            return [member("east", "flaky", idle=1)]

    async with (
        simulated_federation("west") as fed,
        running(isolated(fed, {"flaky": Flaky, "counting": Counting})) as agent,
    ):
        await until(lambda: counted(agent, FAILURES, source="flaky", kind="run") == 1)
        assert shown(agent, "flaky")["state"] == "failing"
        broken = False
        await until(lambda: "flaky" in [record.member_pool for record in fed["west"].known("east")])
        assert told(logs, source="flaky") == [("source_failed", "run"), ("source_works", "run")]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


@pytest.mark.slow
@pytest.mark.parametrize("where", ["run", "collect", "filter"])
async def test_an_interrupt_in_a_thread_ends_the_agent(where: str, quick: None, logs: list[EventDict]) -> None:
    """Also there it is nobody's failure; it comes out where the agent was run."""
    source = Maker(lambda: _Interrupted(where))
    async with simulated_federation("west") as fed:
        agent = isolated(
            fed, {"bad": source, "good": Counting}, filters={"filter": _InterruptedFilter} if where == "filter" else {}
        )
        with trio.fail_after(PATIENCE), pytest.raises(BaseExceptionGroup) as caught:
            await agent.run()
        assert caught.group_contains(KeyboardInterrupt)
        assert told(logs, source="bad") == []
        assert [made.closed for made in source.made] == [1]
