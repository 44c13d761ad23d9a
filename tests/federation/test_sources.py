"""What agents make of their sources: polled and pushing, slow, hanging, failing and talking nonsense, each alone in its
trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import ListSink, counted, lines
from tests.simulation import PushingSource, ScriptedSource, member, sampled, simulated_federation
from trio_federation.capacity import Capacity, Change, Withdrawal
from trio_federation.hookspecs import CapacitySink, CapacitySource
from trio_federation.reporter import DEBOUNCE

FAILURES = "trio_federation_source_failures_total"
DROPPED = "trio_federation_records_dropped_total"

# --- sources that push -----------------------------------------------------------------------------------------------


async def test_what_is_pushed_is_there_within_the_debounce(autojump_clock: MockClock) -> None:
    """semantics.md, "Agent": "changes as they happen (debounced 200 ms […])", changes and withdrawals alike."""
    async with simulated_federation("west", "east", start=False) as fed:
        source = fed["east"].more_sources["push"] = PushingSource()
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(3.3)
        steps: list[tuple[Change, list[int]]] = [
            (member("east", idle=1), [1]),
            (member("east", "p2", idle=2), [1, 2]),
            (member("east", idle=3), [3, 2]),
            (Withdrawal(member("east").identity), [2]),
        ]
        for change, idle in steps:
            source.push(change)
            await trio.sleep(0.001)
            assert fed["east"].idle("east") == idle
            await trio.sleep(DEBOUNCE)
            assert fed["west"].idle("east") == idle


async def test_a_pushing_source_is_asked_for_everything_at_every_resync(autojump_clock: MockClock) -> None:
    """semantics.md, "Time": a pushing source's evidence is "the latest event […] for it, or the latest resync at which
    the source said it is live"; so its records stay fresh while nothing happens."""
    async with simulated_federation("west", "east", start=False) as fed:
        source = fed["east"].more_sources["push"] = PushingSource()
        source.set(member("east", idle=1))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.1)
        history = await sampled(95.0, lambda: (fed["west"].idle("east"), max(fed["west"].ages("east"), default=99.0)))
        assert all(idle == [1] for idle, _ in history[5:])
        assert max(age for _, age in history[5:]) <= 20.0 + DEBOUNCE
        assert source.collects == 10


async def test_a_source_that_is_not_live_ages_out_alone(autojump_clock: MockClock) -> None:
    """semantics.md, "Time": "A source without evidence for ttl/2 is not live: its records are no longer refreshed, and
    age out"; and when it is live again, so are they."""
    async with simulated_federation("west", "east", start=False) as fed:
        source = fed["east"].more_sources["push"] = PushingSource()
        source.set(member("east", "pushed", idle=1))
        fed["east"].source.set(member("east", "polled", idle=2))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(10.5)
        source.live = False
        history = await sampled(
            45.0, lambda: (trio.current_time(), fed["east"].idle("east"), fed["west"].idle("east")), step=0.25
        )
        for now, own, seen in history:
            assert own == ([2, 1] if now <= 40.0 else [2])
            assert seen == own or 30.0 <= now <= 40.0  # a resync of 10.0 or of just before it
        assert source.collects == 2
        assert counted(fed["east"].agent, FAILURES, source="push") == 0.0
        source.live = True
        await trio.sleep(4.6 + DEBOUNCE)  # until just after the resync at 60 s
        assert fed["east"].idle("east") == fed["west"].idle("east") == [2, 1]


async def test_a_burst_loses_no_final_state(autojump_clock: MockClock) -> None:
    """Channels are bounded, and a source that pushes faster than the agent takes waits: the last word of a thousand
    batches is the one that counts, everywhere, in a few messages."""
    async with simulated_federation("west", "east", start=False) as fed:
        source = fed["east"].more_sources["push"] = PushingSource()
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(1.0)
        for number in range(1000):
            source.push(member("east", f"p{number % 7}", idle=number), member("east", "last", idle=number))
        for pool in range(3):
            source.push(Withdrawal(member("east", f"p{pool}").identity))
        await trio.sleep(DEBOUNCE + 0.001)
        last_of_each = [max(number for number in range(1000) if number % 7 == pool) for pool in range(7)]
        assert fed["west"].idle("east") == [999, *last_of_each[3:]]
        assert fed["west"].known("east") == fed["east"].known("east")


async def test_a_source_that_stops_pushing_is_asked_again(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """A watch that ends or breaks is the source's failure, counted under its name, and is begun again after a report
    interval at most, since it worked meanwhile."""

    class Ending(ScriptedSource):
        begun = 0

        async def changes(self) -> AsyncIterator[Sequence[Change]]:
            self.begun += 1
            yield [member("east", idle=self.begun)]
            if self.begun % 2:
                raise OSError("410 Gone")

    async with simulated_federation("west", "east", start=False) as fed:
        source = Ending()
        fed["east"].more_sources["ending"] = source
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(14.9)
        assert 3 <= source.begun <= 6  # each time after half of the report interval to the whole of it
        assert counted(fed["east"].agent, FAILURES, source="ending") == source.begun
        failed = lines(logs, "source_failed")
        assert {line["source"] for line in failed} == {"ending"}
        assert "410 Gone" in failed[0]["error"]


# --- sources that are slow, or hang ----------------------------------------------------------------------------------


async def test_the_stamp_of_a_slow_collect_is_its_start(autojump_clock: MockClock) -> None:
    """semantics.md, "Time": "for a polled source, the start of the collect()"."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].source.slowness = 4.0
        fed["east"].source.set(member("east", idle=1))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(3.9)
        assert fed["east"].known("east") == []
        await trio.sleep(0.5)
        assert fed["east"].ages("east") == fed["west"].ages("east") == [pytest.approx(4.4, abs=0.002)]


async def test_calls_of_a_source_never_overlap(autojump_clock: MockClock) -> None:
    """A collect that takes longer than the report interval is followed by the next, not overtaken by it."""

    class Counting(ScriptedSource):
        running = 0
        most = 0

        async def collect(self) -> Sequence[Capacity]:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                return await super().collect()
            finally:
                self.running -= 1

    async with simulated_federation("east", start=False) as fed:
        source = Counting()
        source.slowness = 7.0
        fed["east"].more_sources["slow"] = source
        await fed["east"].start()
        await trio.sleep(100.0)
        assert source.most == 1
        assert source.collects == 15  # one every seven seconds


async def test_a_collect_that_hangs_is_given_up(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """Each collect has a deadline, half a TTL; meanwhile and afterwards the other sources are as punctual as ever."""
    async with simulated_federation("west", "east", start=False) as fed:
        source = fed["east"].more_sources["hanging"] = ScriptedSource()
        source.slowness = 1e6
        fed["east"].source.set(member("east", idle=1))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.5)
        history = await sampled(60.0, lambda: max(fed["east"].ages("east"), default=99.0))
        assert max(history) <= 5.1
        assert counted(fed["east"].agent, FAILURES, source="hanging") == 3.0
        assert counted(fed["east"].agent, FAILURES, source="set") == 0.0
        told = lines(logs, "source_failed")
        assert [line["log_level"] for line in told] == ["warning", "debug", "debug"]
        assert "15 s" in told[0]["error"]
        source.slowness = 0.0
        source.set(member("east", "p2", idle=2))
        await trio.sleep(20.0)
        assert fed["west"].idle("east") == [1, 2]
        assert [line["source"] for line in lines(logs, "source_works")] == ["hanging"]


# --- sources that fail -----------------------------------------------------------------------------------------------


class RaisingChanges(ScriptedSource):
    """Fails when it is asked for its changes, before there is anything to iterate over."""

    def changes(self) -> AsyncIterator[Sequence[Change]]:
        """Fail."""
        raise OSError("no watch today")


class RaisingLiveness(PushingSource):
    """Fails when it is asked whether it is live."""

    def is_live(self) -> bool:
        """Fail."""
        raise OSError("who knows")


class RaisingClose(ScriptedSource):
    """Fails when it is closed."""

    async def aclose(self) -> None:
        """Fail."""
        await trio.lowlevel.checkpoint()
        raise SystemExit(3)


class Failing(ScriptedSource):
    """Fails at every collect."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure


BAD_SOURCES: dict[str, CapacitySource] = {
    "error": Failing(OSError("no API server")),
    "exit": Failing(SystemExit(1)),
    "group": Failing(ExceptionGroup("of its own nursery", [OSError("one"), OSError("other")])),
    "exit in a group": Failing(BaseExceptionGroup("of its own nursery", [SystemExit(1), OSError("other")])),
    "changes": RaisingChanges(),
    "liveness": RaisingLiveness(),
    "close": RaisingClose(),
}


@pytest.mark.parametrize("bad", BAD_SOURCES.values(), ids=BAD_SOURCES)
async def test_a_failing_source_costs_no_other_anything(
    bad: CapacitySource, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """hookspecs.py, "CapacitySource": "Anything raised is logged and counted under the source's name, costs no other
    source anything, and is tried again"; a plugin may end itself, never the agent."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].more_sources["bad"] = bad
        fed["east"].source.set(member("east", idle=1))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.5)
        assert all(await sampled(30.0, lambda: fed["west"].idle("east") == [1]))
        if not isinstance(bad, RaisingClose):
            assert counted(fed["east"].agent, FAILURES, source="bad") >= 3.0
            warned = [line for line in lines(logs, "source_failed") if line["log_level"] == "warning"]
            assert {line["source"] for line in warned} == {"bad"}
        assert counted(fed["east"].agent, FAILURES, source="set") == 0.0
        await fed["east"].stop()
        assert fed["west"].known("east") == []


async def test_a_source_of_its_own_haste_is_not_taken_for_one_that_hangs(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """A source may have deadlines of its own; what the log says must be what happened."""

    class Hasty(ScriptedSource):
        async def collect(self) -> Sequence[Capacity]:
            with trio.fail_after(1.0):
                await trio.sleep_forever()

    async with simulated_federation("east", start=False) as fed:
        fed["east"].more_sources["hasty"] = Hasty()
        await fed["east"].start()
        await trio.sleep(2.0)
        assert "15 s" not in lines(logs, "source_failed")[0]["error"]


async def test_a_source_that_speaks_again_in_time_leaves_no_gap(autojump_clock: MockClock) -> None:
    """An observation that says nothing new is left to the next resync; but where the last one is so old that it may run
    out before that, it must be told at once, or a cluster that is well would vanish from the others for seconds."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=1))
        await trio.sleep(10.5)
        fed["east"].source.failure = OSError("no API server")
        await trio.sleep(3.0)
        fed["east"].routes["hub-0"].cut()  # from now on it resyncs at 13.5 s, 23.5 s, …
        await trio.sleep(18.5)
        fed["east"].source.failure = None  # so that it is observed at 35 s, and runs out at 40 s where nobody is told
        assert all(await sampled(20.0, lambda: fed["west"].idle("east") == [1]))


# --- sources that talk nonsense --------------------------------------------------------------------------------------

GOOD = member("east", "good", idle=1)
NONSENSE: list[tuple[str, object]] = [
    ("type", None),
    ("type", "p1"),
    ("type", {"idle": 1}),
    ("idle", member("east", "bad", idle=-1)),
    ("idle", member("east", "bad", idle=2**31)),
    ("idle", replace(GOOD, member_pool="bad", idle=True)),
    ("idle", replace(GOOD, member_pool="bad", idle=1.5)),  # type: ignore[arg-type]
    ("capacity", member("east", "bad", capacity=-2)),
    ("saturated_for", member("east", "bad", saturated_for=float("nan"))),
    ("saturated_for", member("east", "bad", saturated_for=10**400)),
    ("observed_at", member("east", "bad", observed_at=float("inf"))),
    ("observed_at", member("east", "bad", observed_at=-(10**400))),
    ("member_pool", member("east", "Bad")),
    ("member_pool", replace(GOOD, member_pool=["bad"])),  # type: ignore[arg-type]
    ("env_name", member("east", "bad", env="-")),
    ("namespace", member("east", "bad", namespace="a.b")),
    ("scaling_group", member("east", "bad", scaling_group="a::b")),
    ("state", member("east", "bad", state="two\nlines")),
    ("cluster_id", member("East", "bad")),
    ("foreign", member("west", "bad", idle=1)),
    ("duplicate", replace(GOOD, idle=2)),
]


@pytest.mark.parametrize("how", ["collected", "pushed"])
@pytest.mark.parametrize("reason,record", NONSENSE, ids=[f"{reason}-{n}" for n, (reason, _) in enumerate(NONSENSE)])
async def test_nonsense_is_dropped_and_counted_and_the_rest_goes_on(
    how: str, reason: str, record: object, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Capacity": "A record that breaks a name or a range is dropped, counted by reason in a metric, and
    logged once per source and reason; the rest of its batch goes on"."""
    if how == "pushed" and reason == "duplicate":
        return  # a second word on the same pool is a change, when it is pushed
    async with simulated_federation("west", "east", start=False) as fed:
        source = fed["east"].more_sources["odd"] = PushingSource()
        batch: list[Capacity] = [GOOD, record, member("east", "other", idle=3)]  # type: ignore[list-item]
        for cluster in fed.clusters.values():
            await cluster.start()
        if how == "collected":
            source.collect = lambda: collected(batch)  # type: ignore[method-assign]
            await trio.sleep(25.0)
        else:
            source.live = False
            for _ in range(3):
                source.push(*batch)
                await trio.sleep(1.0)
        assert fed["west"].idle("east") == [1, 3]
        count = counted(fed["east"].agent, DROPPED, origin="source:odd", reason=reason)
        assert count >= 2.0
        told = lines(logs, "record_dropped")
        assert [(line["origin"], line["reason"], line["log_level"]) for line in told] == [
            ("source:odd", reason, "warning")
        ]


async def collected(batch: Sequence[Capacity]) -> Sequence[Capacity]:
    """A collect that answers so."""
    await trio.lowlevel.checkpoint()
    return batch


async def test_two_sources_of_one_pool_do_not_flap(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """The first one that names a pool has it; the other's record is dropped and counted, its own pools are not."""
    async with simulated_federation("west", "east", start=False) as fed:
        other = fed["east"].more_sources["other"] = ScriptedSource()
        other.slowness = 0.5
        fed["east"].source.set(member("east", idle=1))
        other.set(member("east", idle=9), member("east", "p2", idle=2))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(1.0)
        assert all(await sampled(30.0, lambda: fed["west"].idle("east") == [1, 2]))
        assert counted(fed["east"].agent, DROPPED, origin="source:other", reason="duplicate") == 7.0
        assert len(lines(logs, "record_dropped")) == 1
        assert "set" in lines(logs, "record_dropped")[0]["detail"]
        fed["east"].source.set()
        await trio.sleep(10.5)
        assert fed["west"].idle("east") == [9, 2]


# --- sinks -----------------------------------------------------------------------------------------------------------


async def test_a_failing_or_hanging_sink_costs_no_other_anything(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Agent": "no failure of one hub, source or sink stops the others"."""

    class Hanging(CapacitySink):
        async def update(self, snapshot: Sequence[Capacity]) -> None:
            await trio.sleep_forever()

    class Raising(CapacitySink):
        async def update(self, snapshot: Sequence[Capacity]) -> None:
            await trio.lowlevel.checkpoint()
            raise SystemExit(1)

    async with simulated_federation("west", "east", start=False) as fed:
        good = ListSink()
        fed["west"].sinks.update(hanging=Hanging(), raising=Raising(), good=good)
        for cluster in fed.clusters.values():
            await cluster.start()
        for idle in (1, 2, 3):
            fed["east"].source.set(member("east", idle=idle))
            await trio.sleep(6.5)
            assert [record.idle for record in good.snapshots[-1]] == [idle]
        assert {line["sink"] for line in lines(logs, "sink_failed")} == {"raising", "hanging"}
