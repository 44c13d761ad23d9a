"""Who speaks for a cluster: one live reporter at a time, how another takes over, and that a restart does not make its
cluster invisible."""

from __future__ import annotations

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted, item, lines, report
from tests.simulation import Simulation, member, sampled, simulated_federation
from trio_federation.errors import AlreadyExists, InvalidArgument
from trio_federation.pb.sandbox.sync.v1 import ReportFederationRequest
from trio_federation.rpc import MemoryLink
from trio_federation.wire import WITHDRAWN_AGE_MS


async def until_told(fed: Simulation, name: str, of: str, idle: int, *, within: float) -> float:
    """How many seconds it takes until one cluster is told such a value of another, which must be no more than that."""
    for number, seen in enumerate(await sampled(within, lambda: fed[name].idle(of))):
        if idle in seen:
            return number * 0.1
    raise AssertionError(f"{name} was not told of {of} with idle {idle} within {within} s")


# --- two of them -----------------------------------------------------------------------------------------------------


async def test_a_second_agent_of_a_cluster_is_refused_with_the_name(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """C33: "two agents of different clusters report east", right: "the second is refused with a clear status, the first
    steady"; semantics.md, "Hub": "refused with ALREADY_EXISTS and a message naming the id"."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        rival = fed.add("rival", cluster_id="east")
        rival.source.set(member("east", idle=99), member("east", "p2", idle=99))
        await rival.start()
        assert all(await sampled(120.0, lambda: fed["west"].idle("east") == [3]))
        refusal = lines(logs, "hub_failed")
        assert [(line["call"], line["log_level"]) for line in refusal[:1]] == [("report", "warning")]
        assert "'east'" in refusal[0]["error"]
        # Told once, tried every one to two seconds.
        assert [line["log_level"] for line in refusal[1:]] == ["debug"] * (len(refusal) - 1)
        assert 60 <= len(refusal) <= 120
        # It watches all the same, and its own truth is its own.
        assert rival.agent.links[0].watcher.watching
        assert rival.registry.local_idle("ns", "env") == 198


async def test_another_instance_takes_over_from_one_that_is_silent(autojump_clock: MockClock) -> None:
    """semantics.md, "Hub": "it takes over once the first has been silent for the silence limit" (15 s): not before, and
    at the next of its tries, which are 1 to 2 s apart."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(10.5)
        fed.black_hole("east")  # its last words were those of 10.2 s at the latest
        rival = fed.add("rival", cluster_id="east")
        rival.source.set(member("east", idle=7))
        await rival.start()
        assert all(await sampled(14.0, lambda: fed["west"].idle("east") == [3]))
        await until_told(fed, "west", "east", 7, within=3.0)
        # What the first one comes back with is refused now, and its end changes nothing.
        fed["east"].routes["hub-0"].release()
        fed["east"].source.set(member("east", idle=4))
        assert all(await sampled(60.0, lambda: fed["west"].idle("east") == [7]))
        await fed["east"].stop()
        assert all(await sampled(60.0, lambda: fed["west"].idle("east") == [7]))


async def test_a_rebuilt_cluster_is_accepted(autojump_clock: MockClock) -> None:
    """C33: "a rebuilt east after expiry", right: "rebuilt one accepted", and nothing of the old one is left."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3), member("east", "p2", idle=3))
        await fed.settle()
        await fed["east"].kill()
        await trio.sleep(61.0)
        assert fed["west"].known("east") == []
        rebuilt = fed.add("rebuilt", cluster_id="east")
        rebuilt.source.set(member("east", idle=1))
        await rebuilt.start()
        await trio.sleep(0.3)
        assert fed["west"].idle("east") == [1]


@pytest.mark.parametrize("cluster_id", ["East", "EAST", "east.example", "-east"])
async def test_there_is_one_spelling_of_a_cluster_id(cluster_id: str, autojump_clock: MockClock) -> None:
    """C33: "then East", right: "one case rule everywhere": what is no lower-case label is refused, not folded."""
    async with (
        simulated_federation("west", "east") as fed,
        fed.connection(cluster_id) as connection,
        connection.report() as call,
    ):
        with pytest.raises(InvalidArgument, match="x-federation-cluster"):
            await call.wait_answered()
        assert fed["west"].known("east") == []


# --- peers that are not ours -----------------------------------------------------------------------------------------


async def test_a_worker_that_knows_no_origins_is_served_all_the_same(autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": an existing worker sends none of the fields from 100 up, and no instance: of its samples
    the one with the newer observation counts, and it may come back at once after it was cut off."""
    async with simulated_federation("west") as fed:
        for idle, age_ms, known in [(1, 0, 1), (2, 0, 2), (9, 20_000, 2), (3, 0, 3)]:
            async with fed.connection("east") as connection, connection.report() as call:
                await call.send(ReportFederationRequest(items=[item(idle=idle, age_ms=age_ms)]))
                await trio.sleep(0.1)
                assert fed["west"].idle("east") == [known]
            await trio.sleep(1.0)
        async with fed.connection("east") as connection, connection.report() as call:
            await call.send(ReportFederationRequest(items=[item(age_ms=WITHDRAWN_AGE_MS)]))
            await trio.sleep(0.1)
            assert fed["west"].known("east") == []
            await trio.sleep(1.0)
            await call.send(ReportFederationRequest(items=[item(idle=4)]))
            await trio.sleep(0.1)
            assert fed["west"].idle("east") == [4]


async def test_a_bad_record_costs_itself_and_no_other(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """semantics.md, "Capacity": what breaks a name or a range is dropped, counted by reason, and told once for each
    cluster and reason; the rest of its message goes on, and its call, too."""
    async with simulated_federation("west") as fed, fed.connection("east") as connection:
        bad = [item("Bad Name"), item("p2", idle=-1), item("p3", idle=-5), item("x" * 300), item("p4", age_ms=-7)]
        async with connection.report() as call:
            for idle in (1, 2, 3):
                await call.send(ReportFederationRequest(items=[*bad, item(idle=idle)]))
                await trio.sleep(0.1)
                assert fed["west"].idle("east") == [idle, 0]  # a negative age counts as none, and is no fault
        hub = fed.hubs[0].hub
        for reason, count in (("member_pool", 6.0), ("idle", 6.0)):
            dropped = counted(hub, "trio_federation_records_dropped_total", origin="cluster:east", reason=reason)
            assert dropped == count
        assert sorted(line["reason"] for line in lines(logs, "record_dropped")) == ["idle", "member_pool"]


# --- one that reconnects ---------------------------------------------------------------------------------------------


async def test_the_same_instance_replaces_its_own_older_session_at_once(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Hub": "The same instance reconnecting replaces its own older session at once; late data and the
    late end of a replaced session change nothing"."""
    async with simulated_federation("west") as fed, trio.open_nursery() as nursery:
        old_link = MemoryLink(client="east (old)")
        ended = trio.Event()

        async def old_session() -> None:
            async with fed.connection("east", instance="aa", link=old_link) as connection, connection.report() as call:
                await report(call, 1, 1)
                await trio.sleep(1.0)
                old_link.hold(to_server=True, to_client=False)
                await report(call, 2, 2)
                with pytest.raises(AlreadyExists, match="'east'"):
                    await call.wait_answered()
                await trio.sleep(2.0)
            ended.set()

        nursery.start_soon(old_session)
        await trio.sleep(0.5)
        assert fed["west"].idle("east") == [1]
        await trio.sleep(1.5)
        async with fed.connection("east", instance="aa") as connection, connection.report() as call:
            began = trio.current_time()
            await call.wait_accepted()
            await report(call, 3, 3)
            await trio.sleep(0.1)
            assert trio.current_time() - began <= 0.2
            assert fed["west"].idle("east") == [3]
            old_link.hold(to_server=False, to_client=False)
            await ended.wait()
            # Neither the late words of the old session nor its end count: newcomers are told, and for good.
            assert all(await sampled(12.0, lambda: fed["west"].idle("east") == [3]))
            await fed.add("north").start()
            await trio.sleep(0.1)
            assert fed["north"].idle("east") == [3]
        await trio.sleep(0.1)
        left = [line["replaced"] for line in lines(logs, "reporter_left") if line["cluster"] == "east"]
        assert left == [True, False]


async def test_late_words_of_an_older_process_are_ignored(autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": "one that started later (now - uptime) replaces it, and late data of the replaced one is
    ignored", here through a second hub that was slow to pass them on."""
    async with (
        simulated_federation("west", hubs=2) as fed,
        fed.connection("east", hub=0, instance="aa") as first,
        fed.connection("east", hub=1, instance="aa") as second,
        first.report() as old,
        second.report() as slow,
    ):
        await report(old, 1, 1, uptime=60.0)
        await report(slow, 1, 1, uptime=60.0)
        await trio.sleep(0.5)
        await old.end()
        await old.wait_answered()
        async with fed.connection("east", hub=0, instance="bb") as third, third.report() as new:
            await report(new, 5, 1, instance="bb", uptime=1.0)
            await trio.sleep(0.5)
            assert fed["west"].idle("east") == [5]
            # Also when the newer one says nothing for a while: its silence makes the older one no newer.
            for seq, pause in ((99, 0.5), (100, 20.0)):
                await trio.sleep(pause)
                await report(slow, 2, seq, uptime=62.0 + pause)
                await trio.sleep(0.5)
                assert fed["west"].idle("east") == [5]


# --- rolling restarts ------------------------------------------------------------------------------------------------


def longest_gap(history: list[bool], *, step: float = 0.1) -> float:
    """The longest time, in seconds, for which it was not so."""
    longest = gap = 0
    for seen in history:
        gap = 0 if seen else gap + 1
        longest = max(longest, gap)
    return longest * step


@pytest.mark.parametrize("hubs", [1, 2])
async def test_stop_then_start_is_a_gap_of_no_more_than_the_takeover(hubs: int, autojump_clock: MockClock) -> None:
    """A rolling restart, the old process first: the new one is let in at once after a clean stop."""
    async with simulated_federation("west", "east", hubs=hubs) as fed, trio.open_nursery() as nursery:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()

        async def restarts() -> None:
            for _ in range(3):
                await fed["east"].stop()
                await fed["east"].start()
                await trio.sleep(20.0)

        nursery.start_soon(restarts)
        history = await sampled(60.0, lambda: fed["west"].idle("east") == [3], step=0.1)
        assert longest_gap(history) <= 2.0
        assert history[-1]


@pytest.mark.parametrize("hubs", [1, 2])
async def test_start_before_stop_is_a_gap_of_no_more_than_the_takeover(hubs: int, autojump_clock: MockClock) -> None:
    """A rolling restart, the new process first: it is refused while the old one reports, tries every 1–2 s, and is in
    no later than 2 s after the old one's clean stop."""
    async with simulated_federation("west", "east", hubs=hubs) as fed, trio.open_nursery() as nursery:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()

        async def restarts() -> None:
            for overlap in (0.3, 7.0, 21.0):
                old = fed["east"].process
                await fed["east"].start()
                await trio.sleep(overlap)
                await old.stop()
                await trio.sleep(20.0)

        nursery.start_soon(restarts)
        history = await sampled(88.0, lambda: fed["west"].idle("east") == [3], step=0.1)
        assert longest_gap(history) <= 2.1
        assert history[-1]


async def test_a_killed_agents_successor_reports_after_the_silence_limit(autojump_clock: MockClock) -> None:
    """The old process can say nothing any more, so its place is kept for the silence limit; what it said last is still
    shown meanwhile, and the cluster is never invisible."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(10.5)
        await fed["east"].kill()
        fed["east"].source.set(member("east", idle=4))
        await fed["east"].start()
        history = await sampled(17.5, lambda: fed["west"].idle("east"))
        assert all(history)
        assert history[140] == [3]
        assert history[-1] == [4]
        assert all(await sampled(60.0, lambda: fed["west"].idle("east") == [4]))


async def test_a_process_that_died_young_is_succeeded_as_well(autojump_clock: MockClock) -> None:
    """Starts within 5 s of each other cannot be told apart, and "keep the current one until it has been silent for the
    silence limit": a crash loop delays the news, and loses none."""
    async with simulated_federation("west", "east", hubs=2) as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(1.0)
        for idle in (4, 5, 6):
            await fed["east"].kill()
            fed["east"].source.set(member("east", idle=idle))
            await fed["east"].start()
            await trio.sleep(1.0)
        history = await sampled(25.0, lambda: fed["west"].idle("east"))
        assert all(history)
        assert history[-1] == [6]
