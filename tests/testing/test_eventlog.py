"""The event log: what a line looks like, what never stands in one, what is heard of structlog and by whom else, and
what is written down of an agent's sources, its registry and its placements."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import pytest
import structlog
import structlog.testing
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from trio_federation import Capacity, Withdrawal
from trio_federation.config import Secret
from trio_federation.registry import Registry
from trio_federation.rpc import MemoryLink
from trio_federation.testing import member, simulated_federation
from trio_federation.testing.clusters import SECRET
from trio_federation.testing.eventlog import AgentNotes, EventLog
from trio_federation.testing.network import tell_carried

log = structlog.get_logger("tests")


class Moment:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """What it was set to."""
        return self.now


@pytest.fixture
def moment() -> Moment:
    """The time of `events`."""
    return Moment()


@pytest.fixture
def events(moment: Moment) -> EventLog:
    """An event log."""
    return EventLog(moment, secrets=["s3cret"])


@contextmanager
def wrapper_class(wrapper: type[Any]) -> Iterator[None]:
    """Inside, structlog logs with this class."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=wrapper)
    try:
        yield
    finally:
        structlog.configure(wrapper_class=before)


# --- lines -----------------------------------------------------------------------------------------------------------


def test_a_line(events: EventLog, moment: Moment) -> None:
    """The time, the node, the event, and details that can be told apart."""
    moment.now = 12.5
    events.note("west", "started", instance="af01", seconds=0.1 + 0.2, none=None, why="it was time", empty="")
    events.of("west~hub-0")("cut")
    assert events.lines == [
        "   12.500000 west started instance=af01 seconds=0.3 none=None why='it was time' empty=''",
        "   12.500000 west~hub-0 cut",
    ]
    assert events.text() == "".join(f"{line}\n" for line in events.lines)


class Unspeakable:
    """Nobody can show it."""

    def __repr__(self) -> str:
        raise ValueError("no")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.builds(object) | st.builds(Unspeakable),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.builds(ValueError, inner) | st.frozensets(st.text())
    ),
    max_leaves=8,
)


@given(value=ANYTHING)
def test_whatever_is_noted_is_one_line(value: object) -> None:
    """Without an address, and without the secret, however deep it sits; nothing that is noted raises."""
    events = EventLog(lambda: 0.0, secrets=["s3cret"])
    events.note("west", "event", value=value, more=f"a s3cret {value!s}" if isinstance(value, str) else "")
    (line,) = events.lines
    assert line.splitlines() == [line]
    assert " at 0x" not in line
    assert "s3cret" not in line


def test_sets_are_shown_in_an_order(events: EventLog) -> None:
    """Theirs is another one in every process."""
    events.note("west", "event", names=frozenset({"b", "c", "a"}), deeper=[{"x": {"z", "y"}}])
    assert events.lines == ["    0.000000 west event names=[a,b,c] deeper=[{x:[y,z]}]"]


def test_secrets_hide_themselves_and_are_hidden(events: EventLog) -> None:
    """Those of a type that does, and those that are plain texts."""
    events.note("west", "event", secret=Secret("other"), told="Bearer s3cret")
    assert "other" not in events.lines[0]
    assert "s3cret" not in events.lines[0]
    assert "***" in events.lines[0]


def test_the_digest_tells_texts_apart(moment: Moment) -> None:
    """Of two runs it is the same when every byte of their logs is."""
    logs = [EventLog(moment) for _ in range(3)]
    for each in logs:
        each.note("west", "event", value=1)
    logs[2].note("west", "event", value=2)
    assert logs[0].digest() == logs[1].digest() != logs[2].digest()


def test_views(events: EventLog, moment: Moment) -> None:
    """From a moment on, of a node with its part of the network, and the last lines."""
    for second, node in enumerate(["west", "hub-0", "west~hub-0", "east~hub-0", "west-2"]):
        moment.now = float(second)
        events.note(node, "event")
    assert [line.split()[1] for line in events.about("west")] == ["west", "west~hub-0"]
    assert [line.split()[1] for line in events.about("hub-0")] == ["hub-0", "west~hub-0", "east~hub-0"]
    assert events.since(3.0) == events.tail(2) == events.lines[3:]
    assert events.since(0.0) == events.tail(99) == events.lines
    assert events.since(9.0) == events.tail(0) == []


def test_nothing_is_noted_where_it_is_off(moment: Moment) -> None:
    """And nothing is done about structlog."""
    events = EventLog(moment, on=False)
    before = structlog.get_config()
    with events.listening():
        events.note("west", "event", value=Unspeakable())
        log.info("event")
        assert structlog.get_config() == before
    assert events.lines == []


# --- what is heard of structlog --------------------------------------------------------------------------------------


def test_what_is_logged_is_heard_and_goes_on(events: EventLog) -> None:
    """By whoever captures it, around or inside, and with the node that is bound."""
    with structlog.testing.capture_logs() as around, events.listening():
        log.info("first", key="value")
        with structlog.testing.capture_logs() as inside, structlog.contextvars.bound_contextvars(node="west"):
            log.bind(more=1).warning("second")
    log.info("third")
    assert events.lines == [
        "    0.000000 test first key=value",
        "    0.000000 west second more=1 level=warning",
    ]
    assert around == [{"event": "first", "key": "value", "log_level": "info"}]
    assert inside == [{"event": "second", "more": 1, "log_level": "warning"}]


@pytest.mark.parametrize(
    "wrapper", [structlog.make_filtering_bound_logger(logging.ERROR), structlog.stdlib.BoundLogger]
)
def test_the_level_is_no_matter(events: EventLog, wrapper: type[Any]) -> None:
    """The log is the same however the process logs, and what it does not want it does not get."""
    with structlog.testing.capture_logs() as captured, wrapper_class(wrapper), events.listening():
        log.debug("quiet")
        log.error("loud")
    assert [line.split(maxsplit=1)[1] for line in events.lines] == ["test quiet", "test loud level=error"]
    quiet = [] if wrapper is not structlog.stdlib.BoundLogger else ["quiet"]
    assert [line["event"] for line in captured] == [*quiet, "loud"]


def test_no_traceback_is_noted(events: EventLog) -> None:
    """Only of what type an exception was; local variables and paths are no part of a run."""
    with structlog.testing.capture_logs(), events.listening():
        try:
            raise ValueError("with s3cret")
        except ValueError as error:
            log.exception("failed")
            log.error("failed", exc_info=error)
        log.info("stack", stack_info=True)
    assert [line.split(maxsplit=1)[1] for line in events.lines] == [
        "test failed level=error exception=ValueError",
        "test failed level=error exception=ValueError",
        "test stack",
    ]


def test_structlog_is_as_it_was_afterwards(events: EventLog, moment: Moment) -> None:
    """Also after two at a time that end in whatever order; a set-up that somebody makes meanwhile stays."""
    other = EventLog(moment)
    before = structlog.get_config()["wrapper_class"]
    with events.listening():
        second = other.listening()
        second.__enter__()
    second.__exit__(None, None, None)
    assert structlog.get_config()["wrapper_class"] is before
    mine = structlog.make_filtering_bound_logger(logging.ERROR)
    with wrapper_class(before):
        with events.listening():
            structlog.configure(wrapper_class=mine)
        assert structlog.get_config()["wrapper_class"] is mine


def test_what_others_log_is_not_heard(events: EventLog) -> None:
    """Neither outside, nor in threads, whose moment is anybody's guess, nor in what outlives the run."""
    with structlog.testing.capture_logs() as captured:
        with events.listening():
            thread = threading.Thread(target=log.info, args=("in a thread",))
            thread.start()
            thread.join()
            left_behind = copy_context()
        left_behind.run(log.info, "afterwards")
    assert [line["event"] for line in captured] == ["in a thread", "afterwards"]
    assert events.lines == []


async def test_a_thread_with_the_context_has_no_time(autojump_clock: MockClock) -> None:
    """It is not heard, and is not disturbed."""
    events = EventLog(trio.current_time)
    with structlog.testing.capture_logs() as captured, events.listening():
        await trio.to_thread.run_sync(log.info, "in a thread")
    assert [line["event"] for line in captured] == ["in a thread"]
    assert events.lines == []


# --- what is written down of an agent --------------------------------------------------------------------------------


@pytest.fixture
def notes(events: EventLog) -> AgentNotes:
    """Those of west."""
    return AgentNotes(events, "west", lambda: {"hub-0": [(1, 2, 3, 4)], "hub-1": []})


def told(events: EventLog) -> str:
    """The last line, without its time and what the connections have carried."""
    return events.lines[-1].split(maxsplit=1)[1].replace(" wire=hub-0:1/00000002/3/00000004", "")


def test_what_a_source_says_is_told_by_its_differences(events: EventLog, notes: AgentNotes) -> None:
    """New, changed, gone, and how much is the same."""
    one, other = member("west", "p1", idle=3), member("west", "p2", state="Active", running=1)
    notes.said("set", [one, other], whole=True)
    assert told(events) == (
        "west said source=set records=2 new=west/ns/env/p1(idle:3),west/ns/env/p2(idle:0;running:1;Active) told=0/0"
    )
    notes.said("set", [one, other], whole=True)
    assert told(events) == "west said source=set records=2 told=0/0"
    notes.said("set", [member("west", "p1", idle=4, autoscaling_enabled=True, capacity=-1)], whole=True)
    assert told(events) == (
        "west said source=set records=1 changed=west/ns/env/p1(idle:4;capacity:-1;grows) gone=west/ns/env/p2 told=0/0"
    )
    notes.said("set", [Withdrawal(one.identity), other], whole=False)
    assert told(events) == (
        "west said source=set records=2 new=west/ns/env/p2(idle:0;running:1;Active) gone=west/ns/env/p1 told=0/0"
    )
    assert events.lines[-1].endswith("wire=hub-0:1/00000002/3/00000004")


def test_of_many_records_some_are_shown_and_all_are_told_apart(events: EventLog, notes: AgentNotes) -> None:
    """A line stays short, and a difference in what it leaves out still shows."""
    many = [member("west", f"p{number}", idle=number) for number in range(100)]
    lines = []
    for last in (1, 2):
        AgentNotes(events, "west", dict).said("set", [*many, member("west", "last", idle=last)], whole=True)
        lines.append(events.lines[-1])
    assert ",+97/" in lines[0]
    assert len(lines[0]) < 250
    assert lines[0] != lines[1]


@pytest.mark.parametrize(
    "records",
    [
        [None, 7, "west"],
        [Capacity([], {}, None, 3)],  # type: ignore[arg-type]
        [Capacity("west", "ns", "env", "p", idle=Unspeakable(), saturated_for="x")] * 2,  # type: ignore[arg-type]
    ],
)
def test_a_source_may_say_anything(events: EventLog, notes: AgentNotes, records: Sequence[object]) -> None:
    """It is the agent's to refuse that."""
    for whole in (True, False, True):
        notes.said("set", records, whole=whole)
        assert f"records={len(records)}" in told(events)


def test_what_a_registry_takes_in_is_told_where_it_is_news(events: EventLog, notes: AgentNotes, moment: Moment) -> None:
    """Refreshes are only counted; what was late is no news; what runs out is gone."""
    registry = Registry("west", ttl=30.0, clock=moment)

    def take(*changes: Capacity | Withdrawal) -> str:
        before = len(events.lines)
        registry.apply(changes)
        notes.took(registry, changes)
        return told(events) if len(events.lines) > before else ""

    assert take(member("east", idle=3, observed_at=0.0)) == "west took new=east/ns/env/p1(idle:3)"
    moment.now = 5.0
    assert take(member("east", idle=3, observed_at=5.0)) == ""
    assert take(member("east", idle=9, observed_at=1.0)) == ""
    assert take(member("east", idle=4, observed_at=5.0)) == "west took changed=east/ns/env/p1(idle:4)"
    notes.said("set", [], whole=True)
    assert told(events) == "west said source=set told=4/4"
    moment.now = 40.0
    assert take() == "west took gone=east/ns/env/p1"
    assert take(member("south", observed_at=40.0)) == "west took new=south/ns/env/p1(idle:0)"
    assert take(Withdrawal(member("south").identity)) == "west took gone=south/ns/env/p1"


# --- what a federation notes -----------------------------------------------------------------------------------------


async def test_one_byte_on_the_wire_makes_a_difference(events: EventLog, moment: Moment) -> None:
    """Of as many bytes, in either direction."""
    for sent, answered in ((b"abc", b"x"), (b"xyz", b"x"), (b"abc", b"y")):
        link = MemoryLink()
        await link.client.send_all(sent)
        await link.server.send_all(answered)
        tell_carried(link, events.of("west~hub-0"))
    assert len(set(events.lines)) == 3
    assert all(" to_hub=3/" in line and " to_cluster=1/" in line for line in events.lines)


async def test_a_federation_notes_what_happens(autojump_clock: MockClock) -> None:
    """Lives, dials, connections and their end with what they have carried, words of sources, news of registries,
    placements and outcomes, and what agents and hubs log, each under the node that it is about."""
    with structlog.testing.capture_logs() as captured:
        async with simulated_federation("west", "east") as fed:
            fed["east"].source.set(member("east", idle=3))
            await fed.settle()
            placement = fed["west"].router.place("ns", "env")
            fed["west"].router.report_outcome(placement.id, "served")
            fed["west"].router.place("ns", "env", reserve=False)
            fed.cut("east")
            async with fed.connection("north"):
                await trio.sleep(1.0)
            await fed["east"].stop()
    lines = [line.split(maxsplit=1)[1] for line in fed.log.lines]
    for wanted in (
        "hub-0 started",
        "hub-0 reporter_came cluster=east",
        "hub-0 connection_ended peer=east",
        "west~hub-0 dialled number=1",
        "west~hub-0 connected",
        "west hub_works hub=hub-0 call=report",
        "east said source=set records=1 new=east/ns/env/p1(idle:3)",
        "west took new=east/ns/env/p1(idle:3)",
        f"west placed id={placement.id} env=ns/env target=east::p1 rule=foreign_idle reason=",
        f"west outcome id={placement.id} outcome=served",
        "east~hub-0 carried to_hub=",
        "east~hub-0 cut",
        "east hub_failed hub=hub-0",
        "north~hub-0 connected by=test",
        ("north~hub-0 closed to_hub=", "north~hub-0 carried to_hub="),  # the hub's end is closed in the same moment
        "east stopping",
        "hub-0 stopped",
        "west~hub-0 carried to_hub=",
    ):
        assert any(line.startswith(wanted) for line in lines), wanted
    assert len([line for line in lines if " placed " in line]) == 1
    assert SECRET not in fed.log.text()
    assert {"reporter_came", "hub_works", "placed"} <= {line["event"] for line in captured}
    assert not [line for line in lines if line.startswith("test ")]


async def test_without_events_the_run_is_the_same(autojump_clock: MockClock) -> None:
    """Nothing is noted, nothing is heard, and nothing else is different."""
    carried = []
    for events in (True, False):
        async with simulated_federation("west", "east", hubs=2, seed=3, events=events) as fed:
            fed["east"].source.set(member("east", idle=3))
            fed.delay("west", 0.1, jitter=0.5)
            await trio.sleep(20.0)
            fed.cut("west")
            await fed.settle()
            carried.append((fed["west"].carried(), fed["east"].carried(), fed["west"].agent.instance))
        assert bool(fed.log.lines) == events
    assert carried[0] == carried[1]
