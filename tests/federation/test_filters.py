"""What others are told of a cluster's records where filters decide that: never more than the filters allow, on any wire
and by any way, while the cluster itself goes by the whole truth. A hub that keeps every message shows what was said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import ListSink, counted, lines
from tests.simulation import PushingSource, ScriptedHub, ScriptedSource, member, sampled, simulated_federation
from trio_federation.capacity import Capacity, Identity, Origin, Withdrawal
from trio_federation.hookspecs import CapacityFilter
from trio_federation.pb.sandbox.sync.v1 import EnvCapacity
from trio_federation.reporter import DEBOUNCE
from trio_federation.rpc import IncomingReport, IncomingWatch
from trio_federation.wire import WITHDRAWN_AGE_MS

FAILURES = "trio_federation_filter_failures_total"
WITHHELD = "trio_federation_filter_withheld_records_total"
SOURCE_FAILURES = "trio_federation_source_failures_total"

Report = Callable[[Capacity], Any]


class Rule(CapacityFilter):
    """A filter that is a function, and keeps what it was asked."""

    def __init__(self, rule: Report) -> None:
        self.rule = rule
        self.asked: list[Capacity] = []

    def report(self, record: Capacity) -> Capacity | None:
        """What the function says."""
        self.asked.append(record)
        answer: Capacity | None = self.rule(record)
        return answer


def public(record: Capacity) -> Capacity | None:
    """Nobody else may know of a pool whose owner calls it Private."""
    return None if record.state == "Private" else record


def without_pending(record: Capacity) -> Capacity:
    """Nobody else may know how many requests wait."""
    return replace(record, pending=0)


class Spy:
    """A hub that tells nobody anything, and keeps everything that it is told."""

    def __init__(self) -> None:
        self.items: list[EnvCapacity] = []
        self.reports = 0
        self.hub = ScriptedHub("spy", self._report, self._watch)

    async def _report(self, call: IncomingReport) -> None:
        self.reports += 1
        await call.accept()
        while (message := await call.receive()) is not None:
            self.items += message.items
        await call.answer()

    async def _watch(self, call: IncomingWatch) -> None:
        await call.request()
        await trio.sleep_forever()

    def pools(self) -> set[str]:
        """Every pool that was ever mentioned, be it to withdraw it."""
        return {item.member_pool for item in self.items}

    def withdrawn(self) -> list[str]:
        """Every pool that was withdrawn, in order."""
        return [item.member_pool for item in self.items if item.observed_for_ms >= WITHDRAWN_AGE_MS]


def told(logs: Sequence[EventDict]) -> list[tuple[str, object]]:
    """What people are told of the source and its filters: each line's event and what it is about."""
    return [
        (line["event"], line.get("what"))
        for line in logs
        if line["log_level"] in ("info", "warning") and line["event"].startswith(("source_", "filter_"))
    ]


# --- what others may know --------------------------------------------------------------------------------------------


async def test_others_see_what_a_filter_makes_of_a_record_and_oneself_the_record(autojump_clock: MockClock) -> None:
    """hookspecs.py, "CapacityFilter": "It stands between the sources and the hubs: the agent's own registry, and so its
    own placements, always have the whole truth"; and so have the own sinks."""

    def modest(record: Capacity) -> Capacity:
        return replace(record, pending=0, idle=record.idle - 1, scaling_group="", state="")

    spy = Spy()
    async with simulated_federation("west", "east", scripted_hubs=[spy.hub], start=False) as fed:
        fed["east"].filters["modest"] = Rule(modest)
        sink = fed["east"].sinks["list"] = ListSink()
        fed["east"].source.set(member("east", idle=1, pending=7, scaling_group="gpu", state="Active"))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(4.0)
        (own,) = fed["east"].known("east")
        (seen,) = fed["west"].known("east")
        assert own == replace(seen, pending=7, idle=1, scaling_group="gpu", state="Active", observed_at=own.observed_at)
        assert fed["east"].router.place("ns", "env").local
        assert fed["west"].registry.best_foreign_member("ns", "env") is None
        assert sink.snapshots[-1] == [own]
        assert {(item.idle, item.pending, item.scaling_group) for item in spy.items} == {(0, 0, "")}


@pytest.mark.parametrize("how", ["collected", "pushed"])
async def test_what_is_withheld_is_never_on_any_wire(how: str, autojump_clock: MockClock) -> None:
    """Not in a report, a resync, a snapshot after a reconnect or a restart of a hub, and not in a withdrawal, neither
    when it comes to its end nor when the agent does; and yet the cluster itself uses it."""
    spy = Spy()
    async with simulated_federation("west", "east", hubs=1, scripted_hubs=[spy.hub], start=False) as fed:
        rule = fed["east"].filters["public"] = Rule(public)
        source = fed["east"].more_sources["source"] = PushingSource()
        for cluster in fed.clusters.values():
            await cluster.start()
        for idle in range(1, 6):
            secret = member("east", "secret", idle=idle, state="Private")
            other = member("east", "other", idle=10 * idle)
            if how == "pushed":
                source.push(secret, other)
            source.set(secret, other)
            await trio.sleep(10.5)
            assert fed["east"].idle("east") == [10 * idle, idle]
            assert fed["east"].registry.local_idle("ns", "env") == 11 * idle
            assert fed["west"].idle("east") == [10 * idle]
            if idle == 2:
                fed["east"].routes["hub-0"].cut()
                fed["east"].routes["spy"].cut()
            if idle == 3:
                await fed.restart_hub(0)
        source.set()
        source.push(Withdrawal(member("east", "secret").identity))
        await trio.sleep(10.5)
        assert fed["east"].known("east") == fed["west"].known("east") == []
        source.set(member("east", "secret", idle=9, state="Private"), member("east", "other", idle=9))
        await trio.sleep(10.5)
        assert fed["west"].idle("east") == [9]
        await fed["east"].stop()
        assert fed["west"].known("east") == []
        assert spy.reports >= 2
        assert spy.pools() == {"other"}
        assert spy.withdrawn()[-1] == "other"
        assert {record.member_pool for record in rule.asked} == {"secret", "other"}


@pytest.mark.parametrize("how", ["collected", "pushed"])
async def test_what_becomes_private_is_withdrawn_at_once_and_what_becomes_public_appears_at_once(
    how: str, autojump_clock: MockClock
) -> None:
    """hookspecs.py, "report": "None, so that nobody else is told, and whoever was told before is told that it is
    gone"; nothing waits for a TTL or a resync."""
    spy = Spy()
    async with simulated_federation("west", "east", scripted_hubs=[spy.hub], start=False) as fed:
        fed["east"].filters["public"] = Rule(public)
        source = fed["east"].more_sources["source"] = PushingSource()
        source.live = how == "collected"
        fed["east"].source.set(member("east", "other", idle=5))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(3.0)
        for idle, state in enumerate(["Active", "Private", "Active", "Private", "Private", "Active"]):
            record = member("east", "pool", idle=idle, state=state)
            if how == "pushed":
                source.push(record)
            else:
                source.set(record)
                await trio.sleep(10.0 - trio.current_time() % 10.0)  # until just after it was asked
            await trio.sleep(0.001)
            assert fed["east"].idle("east") == [5, idle]
            await trio.sleep(DEBOUNCE + 0.001)
            assert fed["west"].idle("east") == ([5, idle] if state == "Active" else [5])
            await trio.sleep(1.0)
        assert {item.idle for item in spy.items if item.member_pool == "pool"} == {0, 2, 5}
        # It was withdrawn twice, and each time once more with every resync until the next word on it.
        assert set(spy.withdrawn()) == {"pool"}


async def test_a_withdrawal_of_what_became_private_reaches_who_was_away(autojump_clock: MockClock) -> None:
    """A hub that was not connected when it was said hears it when it comes back, and drops what it has."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].filters["public"] = Rule(public)
        fed["east"].source.set(member("east", idle=1))
        for cluster in fed.clusters.values():
            await cluster.start()
        await fed.settle()
        assert fed["west"].idle("east") == [1]
        fed.partition("east")
        fed["east"].source.set(member("east", idle=1, state="Private"))
        await trio.sleep(8.0)
        assert fed["west"].idle("east") == [1]
        fed.heal("east")
        await trio.sleep(10.5)
        assert fed["west"].known("east") == []
        assert fed["east"].idle("east") == [1]


async def test_a_clean_stop_withdraws_what_was_told_and_nothing_else(autojump_clock: MockClock) -> None:
    """Who was never told of a record is not told that it has gone."""
    spy = Spy()
    async with simulated_federation("east", hubs=0, scripted_hubs=[spy.hub], start=False) as fed:
        fed["east"].filters["public"] = Rule(public)
        fed["east"].source.set(
            member("east", "a", idle=1), member("east", "b", state="Private"), member("east", "c", idle=3)
        )
        await fed["east"].start()
        await fed.settle()
        spy.items.clear()
        await fed["east"].stop()
        assert sorted(spy.withdrawn()) == ["a", "c"]
        assert spy.pools() == {"a", "c"}


# --- filters that fail -----------------------------------------------------------------------------------------------


def _raise(error: BaseException) -> None:
    raise error


def _rename(**names: str) -> Report:
    return lambda record: replace(record, **names)  # type: ignore[arg-type]


#: what a filter does with one record, and what is said of it
BAD_REPORTS: dict[str, tuple[Report, str]] = {
    "raises": (lambda record: _raise(ValueError("no such policy")), "ValueError: no such policy"),
    "exits": (lambda record: _raise(SystemExit(2)), "SystemExit: 2"),
    "another cluster": (_rename(cluster_id="west"), "it made west/ns/env/bad of it"),
    "another pool": (_rename(member_pool="good"), "it made east/ns/env/good of it"),
    "another env": (_rename(env_name="other"), "must keep who a record is of"),
    "another namespace": (_rename(namespace="other"), "must keep who a record is of"),
    "an aggregate of it": (_rename(member_pool=""), "must keep who a record is of"),
    "True": (lambda record: True, "answered with a bool"),
    "a list": (lambda record: [record], "answered with a list"),
    "a dict": (lambda record: {"idle": 1}, "answered with a dict"),
    "a withdrawal": (lambda record: Withdrawal(record.identity), "answered with a Withdrawal"),
    "a negative count": (lambda record: replace(record, idle=-1), "no valid record: idle -1"),
    "a huge count": (lambda record: replace(record, running=2**31), "no valid record: running"),
    "a bad group": (lambda record: replace(record, scaling_group="a::b"), "no valid record: scaling_group"),
    "a name that is none": (lambda record: replace(record, member_pool=7), "no valid record: member_pool 7"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("how", ["collected", "pushed"])
@pytest.mark.parametrize("bad, said", BAD_REPORTS.values(), ids=BAD_REPORTS)
async def test_a_filter_that_fails_on_one_record_lets_it_age_and_costs_no_other_anything(
    bad: Report, said: str, how: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """hookspecs.py, "report": "Where this raises, or answers with anything else, the record is not reported: what
    others were told before ages out. That is logged and counted under the filter's name, and costs no other record
    anything"."""
    spy = Spy()
    failing = False

    def rule(record: Capacity) -> Any:
        return bad(record) if failing and record.member_pool in ("bad", "never") else record

    async with simulated_federation("west", "east", scripted_hubs=[spy.hub], start=False) as fed:
        fed["east"].filters["policy"] = Rule(rule)
        source = fed["east"].more_sources["source"] = PushingSource()
        if how == "collected":
            source.changes = lambda: None  # type: ignore[method-assign, assignment, return-value]
        source.live = how == "collected"

        async def say(*records: Capacity) -> None:
            """Have the source say this soon."""
            source.set(*records)
            if how == "pushed":
                source.push(*records)
            await trio.sleep(5.0)

        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.5)
        await say(member("east", "bad", idle=1), member("east", "good", idle=2))
        last_told = trio.current_time()
        assert fed["west"].idle("east") == [1, 2]
        logs.clear()
        failing = True
        while trio.current_time() < last_told + 50.0:
            now = trio.current_time()
            await say(
                member("east", "bad", idle=7), member("east", "good", idle=int(now)), member("east", "never", idle=8)
            )
            assert fed["east"].idle("east") == [7, int(now), 8]
            age = trio.current_time() - last_told
            if age <= 24.0:
                assert fed["west"].idle("east") == [1, int(now)]
            if age >= 30.1:
                assert fed["west"].idle("east") == [int(now)]
        agent = fed["east"].agent
        assert counted(agent, FAILURES, filter="policy") == pytest.approx(20, abs=3)
        assert counted(agent, SOURCE_FAILURES) == 0
        assert [line for line in told(logs) if line[0] == "filter_failed"] == [("filter_failed", "filter policy")]
        first = lines(logs, "filter_failed")[0]
        assert (first["source"], first["filter"], first["log_level"]) == ("source", "policy", "warning")
        assert first["error"].startswith("ns/env/bad: ")
        assert said in first["error"]
        assert first["error"].endswith(" (and 1 more)")
        assert "never" not in spy.pools()
        assert {item.idle for item in spy.items if item.member_pool == "bad"} == {1}
        if how == "collected":
            (shown,) = [each for each in agent.health()["sources"] if each["name"] == "source"]
            assert (shown["state"], shown["last_error"]["what"]) == ("failing", "filter policy")
        failing = False
        await say(member("east", "bad", idle=9), member("east", "good", idle=2))
        assert 9 in fed["west"].idle("east")
        if how == "collected":
            assert told(logs)[-1] == ("source_works", "filter policy")


async def test_a_push_on_which_a_filter_does_not_fail_mends_nothing(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It says nothing of the record on which the filter fails with every collect: that would be two lines each time."""
    bad = member("east", "bad")
    async with simulated_federation("east", start=False) as fed:
        fed["east"].filters["odd"] = Rule(lambda record: record if record.member_pool == "good" else _raise(KeyError()))
        source = fed["east"].more_sources["push"] = PushingSource()
        source.set(bad)
        await fed["east"].start()
        for idle in range(60):
            source.push(member("east", "good", idle=idle))
            source.set(bad, member("east", "good", idle=idle))
            await trio.sleep(1.0)
        assert counted(fed["east"].agent, FAILURES, filter="odd") >= 6
        assert told(logs) == [("filter_failed", "filter odd")]
        source.set(member("east", "good", idle=1))
        await trio.sleep(10.0)
        assert told(logs) == [("filter_failed", "filter odd"), ("source_works", "filter odd")]


async def test_of_two_records_of_one_pool_the_filter_decides_on_the_one_that_counts(autojump_clock: MockClock) -> None:
    """The first, of those that were collected, also where the filter fails on it: what is said of the second, which is
    dropped, is said to nobody."""

    def rule(record: Capacity) -> Capacity:
        if record.idle == 1:
            raise ValueError("not this one")
        return record

    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].filters["odd"] = Rule(rule)
        fed["east"].source.set(member("east", idle=1), member("east", idle=2), member("east", "p2", idle=3))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.5)
        assert all(await sampled(20.0, lambda: fed["west"].idle("east") == [3]))
        assert fed["east"].idle("east") == [1, 3]


@pytest.mark.parametrize("order", [[1, 2], [2, 1], [1, 2, 1]])
async def test_of_several_words_on_one_pool_in_a_push_the_filter_decides_on_the_last(
    order: list[int], autojump_clock: MockClock
) -> None:
    """Here 1 is private."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].filters["even"] = Rule(lambda record: None if record.idle == 1 else record)
        source = fed["east"].more_sources["push"] = PushingSource()
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(1.0)
        source.push(*[member("east", idle=idle) for idle in order])
        await trio.sleep(0.5)
        assert fed["east"].idle("east") == order[-1:]
        assert fed["west"].idle("east") == [idle for idle in order[-1:] if idle != 1]


# --- ages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [-1e6, -20.0, 0.0, 20.0, 1e6, None])
async def test_a_filter_cannot_change_when_a_record_was_true(by: float | None, autojump_clock: MockClock) -> None:
    """hookspecs.py, "report": "observed_at and origin are the agent's to say, whatever the answer has there": an old
    record cannot be made fresh, nor a fresh one old, and no place in the history can be forged."""

    def forge(record: Capacity) -> Capacity:
        stamp = None if by is None else (record.observed_at or trio.current_time()) + by
        return replace(record, observed_at=stamp, origin=Origin("ff", 2**40, 1e9), idle=3)

    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].filters["forge"] = Rule(forge)
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(5.5)
        old = replace(member("east", "old", idle=1), observed_at=trio.current_time() - 10.0)
        fed["east"].source.set(old, member("east", "stamped", idle=2), frozen=True)
        for _ in range(40):
            await trio.sleep(1.0)
            own = {record.member_pool: record.observed_at for record in fed["east"].known("east")}
            seen = {record.member_pool: record.observed_at for record in fed["west"].known("east")}
            for pool in own.keys() & seen.keys():
                # An unchanged record is told again with the next resync, and not before.
                assert own[pool] - 10.0 - DEBOUNCE <= seen[pool] <= own[pool] + 0.002  # type: ignore[operator]
            assert ("old" in own) == (trio.current_time() <= 25.5 and own != {})
            if trio.current_time() > 25.6:
                assert "old" not in seen
            for record in fed["east"].known("east"):
                assert record.origin is not None
                assert record.origin.instance == fed["east"].agent.instance
            for record in fed["west"].known("east"):
                assert record.origin is not None
                assert (record.origin.instance, record.origin.seq < 100) == (fed["east"].agent.instance, True)
        assert fed["west"].idle("east") == [3]


async def test_unchanged_records_cost_a_hub_nothing_but_the_resync(autojump_clock: MockClock) -> None:
    """What counts as a change is what others are told: a value that a filter hides may change as often as it likes."""
    spy = Spy()
    async with simulated_federation("east", hubs=0, scripted_hubs=[spy.hub], start=False) as fed:
        fed["east"].filters["hides"] = Rule(without_pending)
        source = fed["east"].more_sources["push"] = PushingSource()
        source.live = False
        await fed["east"].start()
        await trio.sleep(1.0)
        source.push(member("east", idle=1))
        await trio.sleep(1.0)
        spy.items.clear()
        for number in range(100):
            source.push(member("east", idle=1, pending=number))
            await trio.sleep(0.3)
        assert [record.pending for record in fed["east"].known("east")] == [99]
        assert len(spy.items) <= 3  # the resyncs of 30 s
        source.push(member("east", idle=2, pending=100))
        await trio.sleep(0.3)
        assert [(item.idle, item.pending) for item in spy.items[-1:]] == [(2, 0)]


# --- several filters, several sources --------------------------------------------------------------------------------


async def test_filters_are_asked_in_their_order_and_the_first_none_counts(autojump_clock: MockClock) -> None:
    """Each gets what the one before it has made of a record; what is withheld is asked of nobody else, and counted
    under the name of the one that withheld it."""
    first = Rule(lambda record: replace(record, idle=record.idle + 1))
    second = Rule(lambda record: None if record.idle == 3 else replace(record, idle=record.idle * 10))
    third = Rule(lambda record: None if record.idle == 50 else record)
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].filters.update(first=first, second=second, third=third)
        fed["east"].source.set(*[member("east", f"p{idle}", idle=idle) for idle in (1, 2, 3, 4)])
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.5)
        assert fed["west"].idle("east") == [20, 40]
        assert fed["east"].idle("east") == [1, 2, 3, 4]
        assert [record.idle for record in first.asked] == [1, 2, 3, 4]
        assert [record.idle for record in second.asked] == [2, 3, 4, 5]
        assert [record.idle for record in third.asked] == [20, 40, 50]
        agent = fed["east"].agent
        assert [counted(agent, WITHHELD, filter=name) for name in ("first", "second", "third")] == [0, 1, 1]
        await trio.sleep(5.0)
        assert [counted(agent, WITHHELD, filter=name) for name in ("first", "second", "third")] == [0, 2, 2]
        assert counted(agent, FAILURES) == 0


async def test_a_later_filter_sees_nothing_of_what_an_earlier_one_failed_on(autojump_clock: MockClock) -> None:
    """Nobody knows what it would have made of it."""
    first = Rule(lambda record: record if record.idle == 1 else _raise(ValueError("odd")))
    second = Rule(lambda record: record)
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].filters.update(first=first, second=second)
        fed["east"].source.set(member("east", "p1", idle=1), member("east", "p2", idle=2))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(20.0)
        assert fed["west"].idle("east") == [1]
        assert {record.idle for record in second.asked} == {1}
        assert counted(fed["east"].agent, FAILURES, filter="first") == 4
        assert counted(fed["east"].agent, FAILURES, filter="second") == 0


async def test_filters_hold_for_every_source_and_are_asked_only_about_valid_records(autojump_clock: MockClock) -> None:
    """hookspecs.py, "report": "`record` is valid": garbage is dropped before anybody has to be afraid of it."""
    garbage: list[Any] = [None, "p1", replace(member("east", "neg"), idle=-1), member("east", "Bad")]
    asked: list[Identity] = []

    def rule(record: Capacity) -> Capacity | None:
        asked.append(record.identity)
        return public(record)

    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].filters["public"] = Rule(rule)
        other = fed["east"].more_sources["other"] = ScriptedSource()
        pushing = fed["east"].more_sources["pushing"] = PushingSource()
        one = [member("east", "a", idle=1), member("east", "b", state="Private"), *garbage]
        another = [member("east", "c", idle=3), member("east", "d", state="Private"), *garbage]
        fed["east"].source.collect = lambda: answer(one)  # type: ignore[method-assign]
        other.collect = lambda: answer(another)  # type: ignore[method-assign]
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.5)
        pushing.push(member("east", "e", idle=5), member("east", "f", state="Private"), *garbage)
        await trio.sleep(0.5)
        assert fed["west"].idle("east") == [1, 3, 5]
        assert len(fed["east"].known("east")) == 6
        assert {identity[3] for identity in asked} == {"a", "b", "c", "d", "e", "f"}


async def answer(records: Sequence[Capacity]) -> Sequence[Capacity]:
    """A collect that answers so."""
    await trio.lowlevel.checkpoint()
    return records
