"""What a sink says that keeps it from showing everything: where people find it, when it is asked, and that it costs
neither what the sink is told nor anybody else anything."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted, lines
from tests.simulation import ScriptedSource, always, member
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity
from trio_federation.clock import boot_time
from trio_federation.config import Federation
from trio_federation.health import SUMMARY_AFTER
from trio_federation.hookspecs import CapacitySink, Trouble
from trio_federation.sinks import DEADLINE, LONGEST_RETRY, LOOK_INTERVAL, REFRESH_INTERVAL

FAILURES = "trio_federation_sink_failures_total"
TROUBLE = "trio_federation_sink_trouble"
#: seconds of real time after which a test with threads is lost
PATIENCE = 30.0

FORBIDDEN = Trouble("forbidden", "may not patch status:\n grant it")
STATUS_HAS_NO_KEYS = Trouble("schema", "status.clusters is no map list")


def contested(party: str, env: str = "agents/python") -> Trouble:
    """Somebody undoes what the sink does."""
    return Trouble("contested", f"{party} takes entries away from {env}", party)


class TroubledSink(CapacitySink):
    """Says what the test tells it to, and keeps what it is told."""

    def __init__(self) -> None:
        self.said: Any = ()
        #: raised by every troubles() while it is set
        self.mute: BaseException | None = None
        #: when it was asked
        self.asked: list[float] = []
        self.told: list[list[int]] = []
        #: how many seconds it takes to take a snapshot
        self.slowness = 0.0
        #: raised by every update while it is set
        self.failure: BaseException | None = None
        #: ends run()
        self.broken = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on until it breaks."""
        task_status.started()
        await self.broken.wait()

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Keep the idle counts."""
        await trio.sleep(self.slowness)
        if self.failure is not None:
            raise self.failure
        self.told.append([record.idle for record in snapshot])

    def troubles(self) -> Sequence[Trouble]:
        """What `said` was set to."""
        self.asked.append(trio.current_time())
        if self.mute is not None:
            raise self.mute
        said: Sequence[Trouble] = self.said
        return said


@asynccontextmanager
async def running(sinks: Mapping[str, Callable[[], CapacitySink]], source: ScriptedSource) -> AsyncIterator[Agent]:
    """A single agent with these sinks, and a source with one record."""
    source.set(member("east", idle=1))
    agent = Agent("east", Federation(), sources={"set": always(source)}, sinks=sinks, generator=random.Random(0))
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(LOOK_INTERVAL + 0.5)
        yield agent
        nursery.cancel_scope.cancel()


@pytest.fixture
def sink() -> TroubledSink:
    return TroubledSink()


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource()


@pytest.fixture
async def agent(autojump_clock: MockClock, sink: TroubledSink, source: ScriptedSource) -> AsyncIterator[Agent]:
    async with running({"sink": always(sink)}, source) as running_agent:
        yield running_agent


def shown(agent: Agent, name: str = "sink") -> dict[str, Any]:
    """What `/readyz` has of a sink."""
    (found,) = [each for each in agent.health()["sinks"] if each["name"] == name]
    return dict(found)


def exported(agent: Agent) -> dict[tuple[str, str], float]:
    """The gauge, by reason and party."""
    return {
        (sample.labels["reason"], sample.labels["party"]): sample.value
        for family in agent.metrics.registry.collect()
        for sample in family.samples
        if sample.name == TROUBLE
    }


def told(logs: Sequence[EventDict]) -> list[tuple[str, str]]:
    """What people are told of the sinks: each line's event, and what it is about."""
    return [
        (line["event"], line["what"])
        for line in logs
        if line["log_level"] in ("info", "warning") and line["event"].startswith("sink_")
    ]


# --- where it shows --------------------------------------------------------------------------------------------------


async def test_what_troubles_a_sink_shows_within_a_second_until_it_is_over(
    agent: Agent, sink: TroubledSink, logs: list[EventDict], autojump_clock: MockClock
) -> None:
    """In its state, in the error, as metrics, and in one line of the log for the beginning and one for the end."""
    assert shown(agent)["state"] == "working"
    assert exported(agent) == {}
    sink.said = [FORBIDDEN, contested("cluster-controller"), contested("cluster-controller", "agents/node")]
    await trio.sleep(LOOK_INTERVAL)
    state = shown(agent)
    assert (state["state"], state["failures"], state["next_try"]) == ("partly", 0, None)
    assert state["last_error"]["what"] == "trouble"
    assert state["last_error"]["text"] == (
        "may not patch status: grant it; cluster-controller takes entries away from agents/python; "
        "cluster-controller takes entries away from agents/node"
    )
    assert exported(agent) == {("forbidden", ""): 1, ("contested", "cluster-controller"): 1}
    await trio.sleep(60.0)
    (line,) = [line for line in lines(logs, "sink_trouble") if line["log_level"] == "warning"]
    assert line["sink"] == "sink"
    assert line["error"] == state["last_error"]["text"]
    assert (line["reasons"], line["parties"]) == (["contested", "forbidden"], ["cluster-controller"])
    # One of them is over: that is no news for the log.
    sink.said = sink.said[1:]
    await trio.sleep(LOOK_INTERVAL)
    assert exported(agent) == {("forbidden", ""): 0, ("contested", "cluster-controller"): 1}
    assert shown(agent)["state"] == "partly"
    sink.said = ()
    await trio.sleep(LOOK_INTERVAL)
    assert exported(agent) == {("forbidden", ""): 0, ("contested", "cluster-controller"): 0}
    assert shown(agent)["state"] == "working"
    assert told(logs) == [("sink_trouble", "trouble")] * 2 + [("sink_works", "trouble")]
    assert counted(agent, FAILURES) == 0
    await trio.sleep(60.0)
    assert len(told(logs)) == 3


async def test_a_line_where_a_new_kind_appears_and_a_summary_where_it_stays(
    agent: Agent, sink: TroubledSink, logs: list[EventDict], autojump_clock: MockClock
) -> None:
    """A kind is what is wrong and who is involved; the words and the order in which it is told are not."""
    kinds = [
        [FORBIDDEN],
        [FORBIDDEN, STATUS_HAS_NO_KEYS],
        [contested("rival")],
        [contested("other-rival")],
        [contested("rival"), contested("other-rival")],
    ]
    for number, kind in enumerate(kinds, start=1):
        sink.said = kind
        await trio.sleep(5.0)
        assert len(told(logs)) == number
    for known in (
        [STATUS_HAS_NO_KEYS, FORBIDDEN],
        [contested("rival", "other/env")],
        [contested("other-rival"), contested("rival"), contested("rival", "other/env")],
    ):
        sink.said = known
        await trio.sleep(5.0)
    assert told(logs) == [("sink_trouble", "trouble")] * len(kinds)
    assert "parties" not in lines(logs, "sink_trouble")[0]
    await trio.sleep(40 * SUMMARY_AFTER)
    sums = [line for line in lines(logs, "sink_trouble") if "for_seconds" in line]
    assert sums != []
    assert len(told(logs)) == len(kinds) + len(sums)
    assert len(sums) <= 10


async def test_what_comes_and_goes_is_told_once(
    agent: Agent, sink: TroubledSink, logs: list[EventDict], autojump_clock: MockClock
) -> None:
    """The same damping as for a source's troubles."""
    for _ in range(25):
        sink.said = [contested("rival")]
        await trio.sleep(10.0)
        sink.said = ()
        await trio.sleep(10.0)
    assert told(logs) == [("sink_trouble", "trouble"), ("sink_works", "trouble")]


async def test_names_without_end_are_neither_lines_nor_series_without_end(
    agent: Agent, sink: TroubledSink, logs: list[EventDict], autojump_clock: MockClock
) -> None:
    """A plugin says that there are few of them; where that is wrong, the twenty-first and all after it are "other"."""
    for number in range(100):
        sink.said = [contested(f"manager-{number}")]
        await trio.sleep(LOOK_INTERVAL)
    assert len(told(logs)) == 21
    values = exported(agent)
    assert len(values) == 21
    assert [each for each, value in values.items() if value] == [("contested", "other")]
    sink.said = [contested("manager-3"), Trouble("forbidden", "x", "manager-99")]
    await trio.sleep(LOOK_INTERVAL)
    now = [each for each, value in exported(agent).items() if value]
    assert now == [("contested", "manager-3"), ("forbidden", "manager-99")]
    assert shown(agent)["last_error"]["text"] == "manager-3 takes entries away from agents/python; x"


async def test_a_party_is_one_line_that_can_be_written(
    agent: Agent, sink: TroubledSink, autojump_clock: MockClock
) -> None:
    sink.said = [Trouble("contested", "a\udc80\x1b[31m\nb", " kube\nctl\t-edit \ud800\x07" + "x" * 300)]
    await trio.sleep(LOOK_INTERVAL)
    ((_, party),) = exported(agent)
    assert len(party) == 100
    assert party.startswith("kube ctl -edit \ufffd\ufffdxxx")
    assert shown(agent)["last_error"]["text"] == "a\ufffd\ufffd[31m b"
    assert b"kube ctl" in b"".join([chunk async for chunk in agent.exposition()])


# --- when it is asked ------------------------------------------------------------------------------------------------


async def test_it_is_asked_each_second_whatever_else_goes_on(
    agent: Agent, sink: TroubledSink, source: ScriptedSource, autojump_clock: MockClock
) -> None:
    """While nothing changes, while it is being told, and while it cannot be told."""

    def assert_each_second() -> None:
        asked = [when for when in sink.asked if when > began]
        assert len(asked) >= 25
        assert all(after - before == pytest.approx(LOOK_INTERVAL) for before, after in pairwise(asked))

    began = trio.current_time()
    await trio.sleep(30.0)
    assert_each_second()
    began, sink.slowness = trio.current_time(), DEADLINE - 1.0
    source.set(member("east", idle=2))
    await trio.sleep(30.0)
    assert_each_second()
    began, sink.failure = trio.current_time(), OSError("no")
    await trio.sleep(60.0)
    assert_each_second()


async def test_it_is_asked_while_there_is_nothing_to_tell(autojump_clock: MockClock, sink: TroubledSink) -> None:
    """A right that is missing is known before there is anything to write."""
    sink.said = [FORBIDDEN]
    agent = Agent("east", Federation(), sinks={"sink": always(sink)}, generator=random.Random(0))
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(0.1)
        assert shown(agent)["state"] == "partly"
        assert sink.told == []
        sink.said = ()
        await trio.sleep(LOOK_INTERVAL)
        assert shown(agent)["state"] == "starting"
        nursery.cancel_scope.cancel()


async def test_a_sink_in_trouble_is_told_as_ever(
    agent: Agent, sink: TroubledSink, source: ScriptedSource, autojump_clock: MockClock
) -> None:
    sink.said = [FORBIDDEN]
    for idle in range(2, 10):
        source.set(member("east", idle=idle))
        await trio.sleep(5.0 + LOOK_INTERVAL)
        assert sink.told[-1] == [idle]
        assert shown(agent)["state"] == "partly"
    assert shown(agent)["last_success"] <= REFRESH_INTERVAL + LOOK_INTERVAL


async def test_what_has_failed_is_shown_before_what_is_in_the_way(
    agent: Agent, sink: TroubledSink, source: ScriptedSource, logs: list[EventDict], autojump_clock: MockClock
) -> None:
    """An update that fails, in the middle of a trouble, or before it: both are told, and each ends by itself."""
    sink.said, sink.failure = [FORBIDDEN], OSError("409 Conflict")
    await trio.sleep(LONGEST_RETRY)
    for _ in range(30):
        state = shown(agent)
        assert (state["state"], state["last_error"]["what"]) == ("failing", "update")
        assert 0.0 <= state["next_try"] <= LONGEST_RETRY
        await trio.sleep(1.0)
    assert exported(agent) == {("forbidden", ""): 1}
    sink.failure = None
    await trio.sleep(LONGEST_RETRY)
    state = shown(agent)
    assert (state["state"], state["last_error"]["what"]) == ("partly", "trouble")
    sink.failure, sink.said = OSError("409 Conflict"), ()
    source.set(member("east", idle=2))
    await trio.sleep(5.0 + LOOK_INTERVAL)
    assert shown(agent)["state"] == "failing"
    sink.failure = None
    await trio.sleep(LONGEST_RETRY)
    assert shown(agent)["state"] == "working"
    assert sorted(told(logs)[:2]) == [("sink_failed", "update"), ("sink_trouble", "trouble")]
    assert sorted(told(logs)[2:4]) == [("sink_works", "trouble"), ("sink_works", "update")]


async def test_a_trouble_lasts_until_a_new_life_of_the_sink_is_free_of_it(
    agent: Agent, sink: TroubledSink, logs: list[EventDict], autojump_clock: MockClock
) -> None:
    """Nobody has said before that it is over."""
    sink.said = [FORBIDDEN]
    await trio.sleep(LOOK_INTERVAL)
    sink.broken.set()
    await trio.sleep(0.1)
    assert shown(agent)["state"] == "failing"
    assert exported(agent) == {("forbidden", ""): 1}
    sink.broken, sink.said = trio.Event(), ()
    await trio.sleep(REFRESH_INTERVAL)
    assert shown(agent)["state"] == "working"
    assert exported(agent) == {("forbidden", ""): 0}
    works = [line["what"] for line in lines(logs, "sink_works")]
    assert sorted(works) == ["run", "trouble"]


# --- sinks that do not say it right ----------------------------------------------------------------------------------


async def of_a_coroutine() -> Sequence[Trouble]:
    """What an author writes who takes every method for an async one."""
    return ()


NONSENSE: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (lambda: None, "troubles() returned a NoneType"),
    "words": (lambda: ["forbidden"], "troubles() returned a list"),
    "a coroutine": (of_a_coroutine, "troubles() returned a coroutine; make it a plain function"),
    "a sentence": (lambda: [Trouble("Not a word", "x")], "the reason 'Not a word'"),
    "a party that is no name": (lambda: [Trouble("contested", "x", None)], "the party None"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("said, fault", NONSENSE.values(), ids=NONSENSE)
async def test_troubles_that_are_none_are_a_failure_of_the_sink(
    said: Callable[[], object],
    fault: str,
    agent: Agent,
    sink: TroubledSink,
    source: ScriptedSource,
    logs: list[EventDict],
    autojump_clock: MockClock,
) -> None:
    """Told once, counted, and asked again after a backoff; it is told as ever."""

    class Nonsense:
        def __call__(self) -> object:
            sink.asked.append(trio.current_time())
            return said()

    sink.troubles = Nonsense()  # type: ignore[method-assign,assignment]
    before = len(sink.asked)
    source.set(member("east", idle=7))
    await trio.sleep(100.0)
    assert sink.told[-1] == [7]
    assert shown(agent)["state"] == "failing"
    assert fault in shown(agent)["last_error"]["text"]
    assert told(logs) == [("sink_failed", "troubles")]
    asked = sink.asked[before:]
    for number, (earlier, later) in enumerate(pairwise(asked)):
        assert min(LONGEST_RETRY, 2.0**number) / 2 <= later - earlier <= min(LONGEST_RETRY, 2.0**number)
    assert counted(agent, FAILURES, kind="troubles") == len(asked) == counted(agent, FAILURES)
    del sink.troubles
    await trio.sleep(LONGEST_RETRY)
    assert shown(agent)["state"] == "working"
    assert told(logs) == [("sink_failed", "troubles"), ("sink_works", "troubles")]


async def test_a_sink_that_raises_when_asked_is_as_troubled_as_it_said_last(
    agent: Agent, sink: TroubledSink, logs: list[EventDict], autojump_clock: MockClock
) -> None:
    """It costs the sink nothing but that, and no other sink anything."""
    sink.said = [contested("rival")]
    await trio.sleep(LOOK_INTERVAL)
    sink.mute = SystemExit("enough")
    await trio.sleep(20.0)
    assert shown(agent)["state"] == "failing"
    assert shown(agent)["last_error"]["what"] == "troubles"
    assert exported(agent) == {("contested", "rival"): 1}
    sink.mute = None
    await trio.sleep(LONGEST_RETRY)
    assert shown(agent)["state"] == "partly"
    assert told(logs) == [("sink_trouble", "trouble"), ("sink_failed", "troubles"), ("sink_works", "troubles")]
    # After one answer the delays start small again.
    sink.mute = SystemExit("enough")
    began = trio.current_time()
    await trio.sleep(8.0)
    assert len([when for when in sink.asked if when > began]) >= 4


async def test_when_it_is_told_next_is_shown_whatever_it_says(
    agent: Agent, sink: TroubledSink, source: ScriptedSource, autojump_clock: MockClock
) -> None:
    """The next try of what has failed is that of the telling, also where it cannot be asked either."""
    sink.failure, sink.mute = OSError("409 Conflict"), RuntimeError("no words")
    source.set(member("east", idle=2))
    await trio.sleep(60.0)
    for _ in range(30):
        assert 0.0 <= shown(agent)["next_try"] <= LONGEST_RETRY
        await trio.sleep(1.0)


async def test_an_interrupt_while_it_is_asked_ends_the_agent(autojump_clock: MockClock, sink: TroubledSink) -> None:
    """It is a person's wish, and nobody's failure."""
    sink.mute = KeyboardInterrupt()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running({"sink": always(sink)}, ScriptedSource()):
            await trio.sleep(5.0)
    assert caught.group_contains(KeyboardInterrupt)


async def test_a_sink_in_a_thread_says_it_from_there(logs: list[EventDict]) -> None:
    """As in a running agent: it is asked on its own loop, and what it says is noted on the agent's."""
    threads: set[int] = set()

    class InThread(CapacitySink):
        def __init__(self) -> None:
            self.said: Sequence[Trouble] = [contested("rival")]

        async def update(self, snapshot: Sequence[Capacity]) -> None:
            """Take it."""

        def troubles(self) -> Sequence[Trouble]:
            threads.add(threading.get_ident())
            return self.said

    made: list[InThread] = []

    def make() -> CapacitySink:
        made.append(InThread())
        return made[-1]

    async def until(so: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE):
            while True:
                if so():
                    return
                await trio.sleep(0.01)

    agent = Agent("east", Federation(), sinks={"sink": make}, isolated=True, clock=boot_time)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await until(lambda: exported(agent) == {("contested", "rival"): 1})
        assert threading.get_ident() not in threads
        made[0].said = ()
        await until(lambda: exported(agent) == {("contested", "rival"): 0})
        assert told(logs) == [("sink_trouble", "trouble"), ("sink_works", "trouble")]
        nursery.cancel_scope.cancel()
