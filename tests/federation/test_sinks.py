"""What an agent tells its sinks, and when; and how it lives with sinks that are slow, hang, fail, block or end."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import ListSink, counted, lines
from tests.simulation import ScriptedSource, always, member, simulated_federation
from trio_federation import isolation, sinks
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity, Change, Withdrawal
from trio_federation.clock import boot_time
from trio_federation.config import Federation
from trio_federation.hookspecs import CapacitySink
from trio_federation.registry import Registry
from trio_federation.retry import STABLE
from trio_federation.sinks import DEADLINE, LONGEST_RETRY, LOOK_INTERVAL, REFRESH_INTERVAL
from trio_federation.sources import LONGEST_REMAKE

FAILURES = "trio_federation_sink_failures_total"
SECONDS = "trio_federation_sink_update_duration_seconds_count"
#: seconds of real time after which a test with threads is lost
PATIENCE = 30.0


class Sink(CapacitySink):
    """Keeps what it is told, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[float, list[int]]] = []
        #: how many seconds it takes to take a snapshot
        self.slowness = 0.0
        #: raised by every update while it is set
        self.failure: BaseException | None = None
        #: when it was told, also where it failed
        self.tried: list[float] = []
        self.closed = 0

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Keep the idle counts."""
        self.tried.append(trio.current_time())
        await trio.sleep(self.slowness)
        if self.failure is not None:
            raise self.failure
        self.told.append((trio.current_time(), [record.idle for record in snapshot]))

    async def aclose(self) -> None:
        """Count it."""
        await trio.lowlevel.checkpoint()
        self.closed += 1

    @property
    def last(self) -> list[int]:
        """What it was told last."""
        return self.told[-1][1]

    @property
    def times(self) -> list[float]:
        """When it was told."""
        return [when for when, _ in self.told]


class Maker:
    """What makes a sink anew each time that it is asked to, and keeps what it has made."""

    def __init__(self, make: Callable[[], Sink] = Sink) -> None:
        self.make = make
        #: raised instead while it is set
        self.failure: BaseException | None = None
        self.asked: list[float] = []
        self.made: list[Sink] = []

    def __call__(self) -> CapacitySink:
        self.asked.append(trio.current_time())
        if self.failure is not None:
            raise self.failure
        self.made.append(self.make())
        return self.made[-1]


@asynccontextmanager
async def running(
    sinks: Mapping[str, Callable[[], CapacitySink]], source: ScriptedSource | None = None, **more: Any
) -> AsyncIterator[Agent]:
    """A single agent with these sinks and one source; stopped cleanly at the end."""
    sources = {"set": always(source)} if source is not None else {}
    agent = Agent("east", Federation(), sources=sources, sinks=sinks, generator=random.Random(0), **more)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        yield agent
        nursery.cancel_scope.cancel()


def shown(agent: Agent, name: str) -> dict[str, Any]:
    """What `/readyz` has of a sink."""
    (found,) = [each for each in agent.health()["sinks"] if each["name"] == name]
    return dict(found)


def told(logs: Sequence[EventDict], **fields: object) -> list[tuple[str, object]]:
    """What people are told of the sinks: each line's event, and what it is about, of the lines with these fields."""
    return [
        (line["event"], line.get("what"))
        for line in logs
        if line["log_level"] in ("info", "warning")
        and line["event"].startswith(("sink_", "close_", "plugin_"))
        and fields.items() <= line.items()
    ]


# --- when it is told -------------------------------------------------------------------------------------------------


async def test_a_sink_is_told_nothing_while_there_is_nothing(autojump_clock: MockClock) -> None:
    """And everything as soon as there is something."""
    sink, source = Sink(), ScriptedSource()
    async with running({"sink": always(sink)}, source) as agent:
        await trio.sleep(60.0)
        assert sink.told == []
        assert shown(agent, "sink")["state"] == "starting"
        source.set(member("east", idle=1))
        await trio.sleep(5.0 + LOOK_INTERVAL)
        assert sink.last == [1]
        assert shown(agent, "sink")["state"] == "working"


async def test_a_sink_that_starts_is_told_what_is_known(autojump_clock: MockClock) -> None:
    """Within a moment."""
    maker, source = Maker(), ScriptedSource()
    source.set(member("east", idle=1))
    maker.failure = OSError("not yet")
    async with running({"sink": maker}, source):
        await trio.sleep(20.0)
        maker.failure = None
        await trio.sleep(LONGEST_REMAKE)
        (sink,) = maker.made
        assert sink.times[0] == maker.asked[-1]
        assert sink.told[0][1] == [1]


async def test_a_sink_is_told_of_each_change_of_a_value_and_of_ages_now_and_then(autojump_clock: MockClock) -> None:
    """A change within LOOK_INTERVAL; where only ages have moved, every REFRESH_INTERVAL, and not more often."""
    sink, source = Sink(), ScriptedSource()
    source.set(member("east", idle=0))
    async with running({"sink": always(sink)}, source):
        for idle in range(1, 6):
            await trio.sleep_until(5.0 * idle - 0.001)
            source.set(member("east", idle=idle))
            await trio.sleep_until(5.0 * idle + LOOK_INTERVAL + 0.001)
            assert sink.last == [idle]
        sink.told.clear()
        await trio.sleep(305.0)
        assert {tuple(idle) for _, idle in sink.told} == {(5,)}
        gaps = [later - before for before, later in pairwise(sink.times)]
        # A look is at whole seconds after the last telling, and collects come every five: so it is at most this late.
        assert all(REFRESH_INTERVAL <= gap <= REFRESH_INTERVAL + LOOK_INTERVAL for gap in gaps)
        assert len(gaps) >= 26


async def test_a_sink_is_not_told_again_where_not_even_ages_have_changed(autojump_clock: MockClock) -> None:
    """Records that are frozen at their source say the same until they are too old."""
    sink, source = Sink(), ScriptedSource()
    source.set(member("east", idle=1, observed_at=0.0), frozen=True)
    async with running({"sink": always(sink)}, source):
        await trio.sleep(29.0)
        assert [idle for _, idle in sink.told] == [[1]]
        await trio.sleep(3.0)
        assert [idle for _, idle in sink.told] == [[1], []]


async def test_a_sink_is_told_when_records_run_out_of_which_nobody_says_a_word(autojump_clock: MockClock) -> None:
    """A cluster that falls silent disappears, also from where a sink mirrors it, within a moment of its TTL."""
    async with simulated_federation("west", "east", start=False) as fed:
        sink = fed["west"].sinks["sink"] = Sink()
        fed["east"].source.set(member("east", idle=7), member("east", "p2", idle=8))
        fed["west"].source.set(member("west", idle=1))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(12.0)
        assert sink.last == [7, 8, 1]
        heard = max(record.observed_at or 0.0 for record in fed["west"].known("east"))
        fed.black_hole("east")
        await trio.sleep(heard + 30.0 - trio.current_time())
        assert sink.last == [7, 8, 1]
        await trio.sleep(LOOK_INTERVAL + 0.002)
        assert sink.last == [1]
        fed["west"].source.set()
        await trio.sleep(5.0 + LOOK_INTERVAL)
        assert sink.last == []


async def test_what_changes_while_a_sink_is_told_is_conflated_into_the_next_telling(autojump_clock: MockClock) -> None:
    """hookspecs.py, "update": "calls never overlap, and snapshots that come up while one is being taken are skipped for
    the newest"."""

    class Overlapping(Sink):
        running = 0

        async def update(self, snapshot: Sequence[Capacity]) -> None:
            self.running += 1
            assert self.running == 1
            await super().update(snapshot)
            self.running -= 1

    sink, source = Overlapping(), ScriptedSource()
    sink.slowness = 9.0
    async with running({"sink": always(sink)}, source) as agent:
        for idle in range(1, 41):
            source.set(member("east", idle=idle))
            await trio.sleep(5.0)
        await trio.sleep(2 * 9.0 + REFRESH_INTERVAL)
        assert sink.last == [40]
        assert 200.0 / (9.0 + 5.0) <= len(sink.told) <= 230.0 / 9.0
        assert [idle for _, idle in sink.told] == sorted(idle for _, idle in sink.told)
        assert counted(agent, FAILURES) == 0
        assert counted(agent, SECONDS, sink="sink") == len(sink.told)


async def test_what_a_sink_does_to_its_snapshot_is_its_own_business(autojump_clock: MockClock) -> None:
    """Not what the agent goes by, and not what another sink is told."""

    class Emptying(Sink):
        async def update(self, snapshot: Sequence[Capacity]) -> None:
            await super().update(snapshot)
            assert isinstance(snapshot, list)
            snapshot.clear()  # where it fails, that is counted

    emptying, other, source = Emptying(), Sink(), ScriptedSource()
    source.set(member("east", idle=1))
    async with running({"emptying": always(emptying), "other": always(other)}, source) as agent:
        await trio.sleep(20.0)
        assert (emptying.last, other.last) == ([1], [1])
        assert len(agent.registry) == 1
        source.set()
        await trio.sleep(6.0)
        assert (emptying.last, other.last) == ([], [])
        assert counted(agent, FAILURES) == 0


# --- sinks that fail -------------------------------------------------------------------------------------------------

UPDATE_FAILURES: dict[str, BaseException] = {
    "an error": OSError("409 Conflict"),
    "an exit": SystemExit(1),
    "a group": ExceptionGroup("of its own", [OSError("one"), OSError("other")]),
    "an exit in a group": BaseExceptionGroup("of its own", [SystemExit(1)]),
}


@pytest.mark.parametrize("failure", UPDATE_FAILURES.values(), ids=UPDATE_FAILURES)
async def test_an_update_that_fails_is_tried_again_ever_more_slowly_with_the_newest_snapshot(
    failure: BaseException, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Each delay is between half of its bound and the whole of it, and the bound doubles from one second up to thirty.
    It is told once, summed up while it goes on, and its end is told once."""
    bad, fine, source = Sink(), Sink(), ScriptedSource()
    bad.failure = failure
    source.set(member("east", idle=0))
    async with running({"bad": always(bad), "fine": always(fine)}, source) as agent:
        for idle in range(1, 61):
            source.set(member("east", idle=idle))
            await trio.sleep(5.0 + LOOK_INTERVAL)
            assert fine.last == [idle]
        gaps = [later - before for before, later in pairwise(bad.tried)]
        assert len(gaps) >= 12
        for number, gap in enumerate(gaps):
            bound = min(LONGEST_RETRY, 2.0**number)
            assert bound / 2 <= gap <= bound
        assert counted(agent, FAILURES, sink="bad", kind="update") == len(bad.tried)
        assert counted(agent, FAILURES) == len(bad.tried)
        assert counted(agent, SECONDS, sink="bad") == 0
        assert told(logs) == [("sink_failed", "update")]
        (first, *_) = lines(logs, "sink_failed")
        assert (first["sink"], first["log_level"]) == ("bad", "warning")
        assert type(failure).__name__ in first["error"]
        found = shown(agent, "bad")
        assert (found["state"], found["last_success"], found["failures"]) == ("failing", None, len(bad.tried))
        assert found["last_error"]["what"] == "update"
        assert 0.0 <= found["next_try"] <= LONGEST_RETRY
        logs.clear()
        bad.failure = None
        await trio.sleep(LONGEST_RETRY)
        assert bad.last == [60]
        assert shown(agent, "bad")["state"] == "working"
        assert told(logs) == [("sink_works", "update")]
        assert lines(logs, "sink_works")[0]["failures_before"] == counted(agent, FAILURES)
        # After one success the delays start small again.
        bad.failure = failure
        source.set(member("east", idle=0))
        await trio.sleep(8.0)
        assert len([when for when in bad.tried if when > trio.current_time() - 8.0]) >= 2
        source.set(member("east", idle=99))
        bad.failure = None
        await trio.sleep(8.0)
        assert bad.last == [99]


async def test_a_sink_that_hangs_is_given_up_and_told_again(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """Ten seconds for one snapshot."""
    sink, source = Sink(), ScriptedSource()
    sink.slowness = 1e6
    source.set(member("east", idle=1))
    async with running({"sink": always(sink)}, source) as agent:
        await trio.sleep(100.0)
        gaps = [later - before - DEADLINE for before, later in pairwise(sink.tried)]
        for number, gap in enumerate(gaps):
            assert min(LONGEST_RETRY, 2.0**number) / 2 <= gap <= min(LONGEST_RETRY, 2.0**number)
        assert told(logs) == [("sink_failed", "update")]
        assert "not done within 10 s" in lines(logs, "sink_failed")[0]["error"]
        sink.slowness = 0.0
        source.set(member("east", idle=2))
        await trio.sleep(DEADLINE + LONGEST_RETRY)
        assert sink.last == [2]
        assert shown(agent, "sink")["state"] == "working"


async def test_a_sink_that_does_not_let_itself_be_cancelled_does_not_pass_for_one_that_works(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Nothing can be done about it, but that it is told, counted and shown."""

    class Deaf(Sink):
        async def update(self, snapshot: Sequence[Capacity]) -> None:
            if not self.tried:
                self.tried.append(trio.current_time())
                with trio.CancelScope(shield=True):  # the fault
                    await trio.sleep(60.0)
            await super().update(snapshot)

    sink, source = Deaf(), ScriptedSource()
    source.set(member("east", idle=1))
    async with running({"sink": always(sink)}, source) as agent:
        await trio.sleep(DEADLINE + LOOK_INTERVAL + 1.1)
        for _ in range(9):
            assert told(logs) == [("sink_failed", "update")]
            assert "does not let itself be cancelled" in lines(logs, "sink_failed")[0]["error"]
            assert shown(agent, "sink")["state"] == "failing"
            assert counted(agent, FAILURES, sink="sink", kind="update") == 1
            await trio.sleep(5.0)
        await trio.sleep(20.0)
        assert sink.last == [1]
        assert told(logs) == [("sink_failed", "update"), ("sink_works", "update")]


@pytest.mark.parametrize("what", ["update", "run"])
async def test_a_sink_is_told_that_nothing_is_left_whatever_became_of_it_meanwhile(
    what: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """What it mirrors may have been mirrored already by an update that failed in its middle, or by the sink before it.
    While it failed everything has gone; so it must be told of nothing, which at a start would not be worth a word."""
    broken = trio.Event()

    class Breaking(Sink):
        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            await broken.wait()
            if what == "run" and len(maker.made) == 1:
                raise OSError("no connection")
            await trio.sleep_forever()

        async def update(self, snapshot: Sequence[Capacity]) -> None:
            await super().update(snapshot)
            if what == "update" and len(self.told) == 1:
                raise OSError("half of it is written")

    maker, source = Maker(Breaking), ScriptedSource()
    source.set(member("east", idle=1))
    async with running({"sink": maker}, source) as agent:
        await trio.sleep(LOOK_INTERVAL + 0.2)
        assert [idle for _, idle in maker.made[0].told] == [[1]]
        source.set()
        agent.registry.withdraw([member("east").identity])
        broken.set()
        await trio.sleep(30.0)
        assert maker.made[-1].last == []
        assert shown(agent, "sink")["state"] == "working"
        assert told(logs) == [("sink_failed", what), ("sink_works", what)]


CREATE_FAILURES: dict[str, BaseException] = {
    "an error": OSError("no permission"),
    "an import that fails": ImportError("cannot import name 'x'"),
    "an exit": SystemExit(3),
    "a group": BaseExceptionGroup("several", [SystemExit(3), OSError("one")]),
}


@pytest.mark.parametrize("failure", CREATE_FAILURES.values(), ids=CREATE_FAILURES)
async def test_a_sink_that_cannot_be_made_is_tried_again_ever_more_slowly(
    failure: BaseException, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """As a source is."""
    bad, fine, source = Maker(), Sink(), ScriptedSource()
    bad.failure = failure
    source.set(member("east", idle=1))
    async with running({"bad": bad, "fine": always(fine)}, source) as agent:
        await trio.sleep(300.0)
        gaps = [later - before for before, later in pairwise(bad.asked)]
        assert len(gaps) >= 8
        for number, gap in enumerate(gaps):
            assert min(LONGEST_REMAKE, 2.0**number) / 2 <= gap <= min(LONGEST_REMAKE, 2.0**number)
        assert len(fine.told) >= 25
        assert counted(agent, FAILURES, sink="bad", kind="create") == len(bad.asked)
        assert counted(agent, FAILURES) == len(bad.asked)
        assert told(logs) == [("sink_failed", "create")]
        assert shown(agent, "bad")["state"] == "failing"
        assert agent.health()["why_not"] == []  # what a sink mirrors is nothing that an agent needs
        logs.clear()
        bad.failure = None
        await trio.sleep(LONGEST_REMAKE)
        assert bad.made[0].last == [1]
        assert told(logs) == [("sink_works", "create")]
        assert shown(agent, "bad")["state"] == "working"
    assert bad.made[0].closed == 1


class Returning(Sink):
    """Its run() returns."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Return after a while."""
        task_status.started()
        await trio.sleep(1.5)


class Raising(Sink):
    """Its run() raises."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Raise after a while."""
        task_status.started()
        await trio.sleep(1.5)
        raise SystemExit(1)


class NeverStarting(Sink):
    """Its run() never says that it has started."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hang."""
        await trio.sleep_forever()


RUN_FAILURES: dict[str, tuple[type[Sink], float, str]] = {
    "returns": (Returning, 1.5, "go on until it is cancelled"),
    "raises": (Raising, 1.5, "SystemExit: 1"),
    "never starts": (NeverStarting, 15.0, "has not started within 15 s"),
}


@pytest.mark.parametrize("kind, lasts, said", RUN_FAILURES.values(), ids=RUN_FAILURES)
async def test_a_sink_whose_run_fails_is_closed_and_made_anew(
    kind: type[Sink], lasts: float, said: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """As a source is; each new one is told everything, and none before it has started."""
    bad, fine, source = Maker(kind), Sink(), ScriptedSource()
    source.set(member("east", idle=1))
    async with running({"bad": bad, "fine": always(fine)}, source) as agent:
        await trio.sleep(200.0)
        lives = [later - before for before, later in pairwise(bad.asked)]
        assert len(lives) >= 5
        for number, seconds in enumerate(lives):
            bound = min(LONGEST_REMAKE, 2.0**number)
            assert bound / 2 <= seconds - lasts <= bound + 0.001
        ended = sum(sink.closed for sink in bad.made)
        assert [sink.closed for sink in bad.made[:-1]] == [1] * (len(bad.made) - 1)
        assert counted(agent, FAILURES, sink="bad", kind="run") == ended
        assert counted(agent, FAILURES) == ended
        assert said in lines(logs, "sink_failed")[0]["error"]
        assert all([idle for _, idle in sink.told] == ([] if kind is NeverStarting else [[1]]) for sink in bad.made)
        assert len(fine.told) >= 17
    assert [sink.closed for sink in bad.made] == [1] * len(bad.made)


async def test_a_sink_that_has_worked_for_long_is_made_anew_at_once(autojump_clock: MockClock) -> None:
    """A minute without a failure, and the next one is the first again."""
    lasts = 0.5

    class Ending(Sink):
        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            await trio.sleep(lasts)

    maker = Maker(Ending)
    async with running({"sink": maker}):
        await trio.sleep(150.0)
        lasts = STABLE
        await trio.sleep(250.0)
    gaps = [later - before for before, later in pairwise(maker.asked)]
    assert max(gaps) > 32.0
    assert [gap for gap in gaps if gap > STABLE][-1] <= STABLE + 1.0


async def test_a_cancellation_goes_through_an_update(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """A stop in its middle is no failure of it."""
    sink, source = Sink(), ScriptedSource()
    sink.slowness = 5.0
    source.set(member("east", idle=1))
    async with running({"sink": always(sink)}, source) as agent:
        await trio.sleep(2.0)
        began = trio.current_time()
    assert trio.current_time() == began
    assert (sink.closed, len(sink.tried), sink.told) == (1, 1, [])
    assert told(logs) == []
    assert counted(agent, FAILURES) == 0


async def test_a_kept_cancelled_is_a_failure_like_any(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """One of a cancellation that is over asks nobody to stop."""
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            kept = error
    bad, fine, source = Sink(), Sink(), ScriptedSource()
    bad.failure = kept
    source.set(member("east", idle=1))
    async with running({"bad": always(bad), "fine": always(fine)}, source) as agent:
        await trio.sleep(60.0)
        assert len(fine.told) >= 5
        assert told(logs) == [("sink_failed", "update")]
        assert "old Cancelled" in lines(logs, "sink_failed")[0]["error"]
        bad.failure = None
        await trio.sleep(LONGEST_RETRY)
        assert shown(agent, "bad")["state"] == "working"


@pytest.mark.parametrize("where", ["create", "run", "update", "aclose"])
async def test_an_interrupt_in_a_sink_ends_the_agent(
    where: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It is a person's wish, and nobody's failure."""

    class Interrupted(Sink):
        def __init__(self) -> None:
            super().__init__()
            if where == "create":
                raise KeyboardInterrupt
            self.failure = KeyboardInterrupt() if where == "update" else None

        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            await trio.sleep(0.5)
            if where == "run":
                raise KeyboardInterrupt
            if where == "aclose":
                return
            await trio.sleep_forever()

        async def aclose(self) -> None:
            await super().aclose()
            if where == "aclose":
                raise KeyboardInterrupt

    source = ScriptedSource()
    source.set(member("east", idle=1))
    maker = Maker(Interrupted)
    with trio.fail_after(10.0), pytest.raises(BaseExceptionGroup) as caught:
        async with running({"sink": maker}, source):
            await trio.sleep_forever()
    assert caught.group_contains(KeyboardInterrupt)
    assert told(logs) == [("sink_failed", "run")] * (where == "aclose")  # what it is closed for
    assert [sink.closed for sink in maker.made] == ([] if where == "create" else [1])


# --- a sink that blocks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["create", "run", "update"])
async def test_a_sink_that_blocks_holds_nobody_else_up(
    where: str, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """Real threads under a real clock: the other sink is told meanwhile, the agent's loop turns, the block is told
    once, counted and shown; and when it is over the sink is told what it has missed. A stop during a second block does
    not wait for it."""
    monkeypatch.setattr(isolation, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(isolation, "BLOCKED_AFTER", 0.5)
    monkeypatch.setattr(isolation, "END_DEADLINE", 0.3)
    monkeypatch.setattr(sinks, "LOOK_INTERVAL", 0.01)
    release = threading.Event()
    again = threading.Event()
    blocked_again = threading.Event()

    class Blocking(ListSink):
        def __init__(self) -> None:
            super().__init__()
            self._block("create")

        def _block(self, here: str) -> None:
            if here == where:
                release.wait()

        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            self._block("run")
            await super().run(task_status=task_status)

        async def update(self, snapshot: Sequence[Capacity]) -> None:
            self._block("update")
            await super().update(snapshot)
            if again.is_set():
                blocked_again.set()
                never.wait()

    never = threading.Event()
    made: list[Blocking] = []
    fine = ListSink()

    def make() -> CapacitySink:
        made.append(Blocking())
        return made[-1]

    async def until(condition: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE):
            while True:
                if condition():
                    return
                await trio.sleep(0.005)

    agent = Agent(
        "east",
        Federation(),
        sinks={"blocking": make, "fine": always(fine)},
        isolated=True,
        clock=boot_time,
        generator=random.Random(0),
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            agent.registry.upsert([member("west", idle=1)])
            await until(lambda: lines(logs, "sink_failed") != [])
            assert shown(agent, "blocking")["state"] == "blocked"
            assert "a call in it blocks" in shown(agent, "blocking")["last_error"]["text"]
            for idle in (2, 3, 4):
                agent.registry.upsert([member("west", idle=idle)])
                await until(lambda idle=idle: [r.idle for r in fine.snapshots[-1]] == [idle])  # type: ignore[misc]
            assert told(logs, sink="blocking") == [("sink_failed", "blocked")]
            assert counted(agent, FAILURES, sink="blocking", kind="blocked") == 1
            assert [each.snapshots for each in made] in ([], [[]])
            release.set()
            await until(lambda: bool(made and made[0].snapshots) and [r.idle for r in made[0].snapshots[-1]] == [4])
            await until(lambda: shown(agent, "blocking")["state"] == "working")
            assert told(logs, sink="blocking") == [("sink_failed", "blocked"), ("sink_works", "blocked")]
            again.set()
            agent.registry.upsert([member("west", idle=5)])
            await until(blocked_again.is_set)
            nursery.cancel_scope.cancel()
        assert not never.is_set()
        assert told(logs, sink="blocking")[-1] == ("plugin_abandoned", None)
    finally:
        release.set()
        never.set()


# --- what counts as a change -----------------------------------------------------------------------------------------

TTL = 30.0

samples = st.builds(
    lambda cluster, pool, idle, saturated_for, age: (
        Capacity(cluster, "ns", "env", pool, idle=idle, saturated_for=saturated_for),
        age,
    ),
    st.sampled_from(("west", "east")),
    st.sampled_from(("p1", "p2")),
    st.integers(0, 1),
    st.sampled_from((0.0, 0.0, 60.0)),
    st.sampled_from((0.0, 0.0, 5.0, 40.0)),
)
steps = st.lists(
    st.one_of(
        samples,
        st.tuples(st.sampled_from(("west", "east")), st.sampled_from(("p1", "p2"))),
        st.sampled_from((0.5, 10.0, 29.5, 31.0)),
    ),
    max_size=30,
)


def says_the_same(one: Sequence[Capacity], other: Sequence[Capacity]) -> bool:
    """Whether two snapshots differ in nothing but ages. A saturation counts by its end, where a second is nothing."""

    def value(record: Capacity) -> Capacity:
        return replace(record, observed_at=0.0, saturated_for=float(record.saturated_for > 0))

    def end(record: Capacity) -> float:
        return record.saturated_for and record.saturated_for + (record.observed_at or 0.0)

    return [value(record) for record in one] == [value(record) for record in other] and all(
        abs(end(before) - end(after)) < 1.0 for before, after in zip(one, other, strict=True)
    )


def version_of(registry: Registry) -> int:
    """The version, once everything is freed that has run out, as a sink asks for it."""
    while not registry.free(1):
        pass
    return registry.version()


@given(steps)
def test_the_version_changes_with_the_values_of_a_snapshot_and_only_with_them(history: list[object]) -> None:
    """A sample, a withdrawal, or time that passes: each changes the version if and only if it changes what a snapshot
    says, ages aside. So a sink that looks at the version misses nothing, and is not told for nothing."""
    now = 1000.0
    registry = Registry("west", ttl=TTL, clock=lambda: now)
    version, said = version_of(registry), registry.snapshot()
    for step in history:
        if isinstance(step, float):
            now += step
        else:
            change: Change
            assert isinstance(step, tuple)
            if isinstance(step[0], Capacity):
                record, age = step
                change = replace(record, observed_at=now - age)
            else:
                change = Withdrawal((step[0], "ns", "env", step[1]))
            registry.apply([change])
        now_said = registry.snapshot()
        assert (version_of(registry) == version) is says_the_same(said, now_said)
        assert version_of(registry) == version_of(registry)
        version, said = version_of(registry), now_said


@given(steps, st.lists(st.integers(0, 1), min_size=30, max_size=30))
def test_the_version_misses_no_change_of_rows_that_shadow_each_other(history: list[object], kinds: list[int]) -> None:
    """Members hide the aggregate rows of their env, which come to light when the last of them has gone, by a word or
    without one. What is hidden may change the version for nothing, but nothing that shows changes without it."""
    now = 1000.0
    registry = Registry("west", ttl=TTL, clock=lambda: now)
    version, said = version_of(registry), registry.snapshot()
    for step, kind in zip(history, kinds, strict=False):
        if isinstance(step, float):
            now += step
        else:
            assert isinstance(step, tuple)
            if isinstance(step[0], Capacity):
                record, age = step
                pool = record.member_pool if kind else ""
                group = "" if kind else record.member_pool
                registry.apply(
                    [Capacity(record.cluster_id, "ns", "env", pool, group, idle=record.idle, observed_at=now - age)]
                )
            else:
                cluster, pool = step
                registry.withdraw([(cluster, "ns", "env", pool)] if kind else [(cluster, "ns", "env", "", pool)])
        now_said = registry.snapshot()
        if not says_the_same(said, now_said):
            assert version_of(registry) != version
        version, said = version_of(registry), now_said
