"""How records end: withdrawn at once and everywhere when their agent stops or their pool is gone, by age when nobody
says so, and in no other way."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.federation.helpers import item
from tests.simulation import member, sampled, simulated_federation
from trio_federation.pb.sandbox.sync.v1 import ReportFederationRequest

# --- a clean stop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hubs", [1, 2])
async def test_a_clean_stop_withdraws_everywhere_within_one_round_trip(hubs: int, autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": "What is withdrawn: every record at a clean shutdown". The links take no time here."""
    async with simulated_federation("west", "east", "north", hubs=hubs) as fed:
        fed["east"].source.set(member("east", idle=3), member("east", "p2", idle=2))
        fed["north"].source.set(member("north", idle=1))
        await fed.settle()
        assert fed["west"].idle("east") == fed["north"].idle("east") == [3, 2]
        began = trio.current_time()
        await fed["east"].stop()
        assert trio.current_time() - began <= 0.2
        assert fed["west"].known("east") == fed["north"].known("east") == []
        assert [record.cluster_id for hub in fed.hubs for record in hub.hub.snapshot()] == ["north"] * hubs
        # And it stays so, for those who come later too.
        late = fed.add("south")
        await late.start()
        assert await sampled(70.0, lambda: (fed["west"].known("east"), late.known("east")), step=1.0) == [([], [])] * 71
        assert fed["west"].idle("north") == late.idle("north") == [1]


@pytest.mark.parametrize("held", ["on the way to the hub", "on the way from the hub"])
async def test_a_slower_hubs_old_copy_does_not_come_back(held: str, autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": a withdrawal "leaves a tombstone for one hub TTL, so that a slower hub's older copy cannot
    bring the record back"."""
    async with simulated_federation("west", "east", hubs=2) as fed:
        await fed.settle()
        slow = fed["east" if held == "on the way to the hub" else "west"].routes["hub-1"]
        slow.hold()
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        assert fed["west"].idle("east") == [3]
        began = trio.current_time()
        await fed["east"].stop()
        assert trio.current_time() - began <= 5.0
        assert fed["west"].known("east") == []
        slow.release()
        assert not any(await sampled(60.0, lambda: fed["west"].known("east"), step=0.25))
        assert [hub.hub.snapshot() for hub in fed.hubs] == [[], []]


async def test_a_withdrawal_that_a_watcher_missed_is_told_when_it_comes_back(autojump_clock: MockClock) -> None:
    """A cluster that was cut off when another one stopped must not send creates there for the rest of the TTL. The
    grace limits for how long newcomers are shown the records of a reporter that "vanishes without withdrawing"; it does
    not make a withdrawal unsaid."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed.partition("west")
        await fed["east"].stop()
        await trio.sleep(12.0)
        assert fed["west"].idle("east") == [3]
        fed.heal("west")
        seen = await sampled(10.0, lambda: (fed["west"].agent.links[0].watcher.watching, fed["west"].known("east")))
        assert seen[-1][0]
        assert [known for watching, known in seen if watching and known] == []


async def test_a_slower_hubs_old_copy_is_not_shown_to_a_newcomer(autojump_clock: MockClock) -> None:
    """The same for one who comes only after the stop, and hears of the withdrawal from the one hub, of the old copy
    from the other: the withdrawal counts, for as long as the slower hub can still have the copy."""
    async with simulated_federation("east", hubs=2) as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed["east"].routes["hub-1"].hold()
        await fed["east"].stop()
        await trio.sleep(9.0)
        assert [record.idle for record in fed.hubs[1].hub.snapshot()] == [3]
        late = fed.add("west")
        await late.start()
        later = fed.add("north")
        shown = await sampled(3.0, lambda: late.known("east"), step=0.5)
        await later.start()
        shown += await sampled(30.0, lambda: late.known("east") or later.known("east"), step=0.5)
        # At the very first moment only one of the two hubs may have been heard.
        assert not any(shown[1:])


async def test_the_end_of_a_stream_withdraws_nothing(autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": "The end or loss of a stream withdraws nothing", however a peer ends it."""
    async with simulated_federation("west") as fed:
        async with fed.connection("east") as connection:
            async with connection.report() as call:
                await call.send(ReportFederationRequest(items=[item(idle=3)]))
                await call.end()
                await call.wait_answered()
            assert fed["west"].idle("east") == [3]
        await trio.sleep(29.0)
        assert fed["west"].idle("east") == [3]
        await trio.sleep(1.5)
        assert fed["west"].known("east") == []


# --- an agent that vanishes ------------------------------------------------------------------------------------------


async def test_a_killed_agent_ages_out_at_the_ttl(autojump_clock: MockClock) -> None:
    """semantics.md, "Hub": "watchers that hold them let them age out"; "Registry": "Fresh means now - observed_at <=
    ttl"."""
    async with simulated_federation("west", "east", "north") as fed:
        fed["east"].source.set(member("east", idle=3))
        fed["north"].source.set(member("north", idle=1))
        await trio.sleep(11.05)
        last_true = fed["west"].known("east")[0].observed_at
        assert last_true is not None
        await fed["east"].kill()
        history = await sampled(
            35.0, lambda: (trio.current_time() - last_true, fed["west"].idle("east"), fed["north"].idle("east"))
        )
        for age, *idles in history:
            assert idles == ([[3], [3]] if age <= 30.0 else [[], []])
        assert history[0][0] < 30.0 < history[-1][0]
        assert fed["west"].idle("north") == [1]
        # Freed, and not merely hidden.
        assert fed["west"].registry.statistics().records == 1


async def test_newcomers_are_shown_a_vanished_agents_records_for_the_grace(autojump_clock: MockClock) -> None:
    """semantics.md, "Hub": "When a reporter vanishes without withdrawing, new watchers still get its records for the
    grace (10 s), afterwards not; watchers that hold them let them age out"."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(10.5)
        await fed["east"].kill()
        await trio.sleep(9.9)
        await fed.add("in-time").start()
        await trio.sleep(0.2)
        await fed.add("too-late").start()
        await trio.sleep(0.5)
        assert fed["in-time"].idle("east") == fed["west"].idle("east") == [3]
        assert fed["too-late"].known("east") == []
        # Nor does it come by another way, as long as the agent is gone.
        assert not any(await sampled(40.0, lambda: fed["too-late"].known("east"), step=0.5))


async def test_a_return_within_the_grace_changes_nothing(autojump_clock: MockClock) -> None:
    """semantics.md, "Hub": "a return within the grace changes nothing"."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed.partition("east")
        away = await sampled(8.0, lambda: fed["west"].idle("east"))
        fed.heal("east")
        back = await sampled(20.0, lambda: fed["west"].idle("east"))
        assert all(idle == [3] for idle in away + back)
        await fed.add("north").start()
        await trio.sleep(0.1)
        assert fed["north"].idle("east") == [3]


# --- pools that go ---------------------------------------------------------------------------------------------------


async def test_a_pool_that_is_missing_from_a_successful_collect_is_gone_at_once(autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": "an identity that is missing from a *successful* collect or list, at once"."""
    async with simulated_federation("west", "east", hubs=2) as fed:
        fed["east"].source.set(member("east", "p1", idle=1), member("east", "p2", idle=2))
        await trio.sleep(10.5)
        fed["east"].source.set(member("east", "p2", idle=2))
        await trio.sleep(4.4)
        assert fed["west"].idle("east") == [1, 2]
        await trio.sleep(0.4)  # collected at 15 s, debounced for 200 ms
        assert fed["east"].idle("east") == fed["west"].idle("east") == [2]
        assert not any(len(idle) > 1 for idle in await sampled(40.0, lambda: fed["west"].idle("east"), step=0.5))
        # And back again, as quickly.
        fed["east"].source.set(member("east", "p1", idle=5), member("east", "p2", idle=2))
        await trio.sleep(5.3)
        assert fed["west"].idle("east") == [5, 2]


async def test_a_pool_that_went_while_no_hub_was_there_is_withdrawn_afterwards(autojump_clock: MockClock) -> None:
    """The others kept it, since a restarted hub's silence removes nothing: the agent must say it once more, for as long
    as anybody may have missed it."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", "p1", idle=1), member("east", "p2", idle=2))
        await trio.sleep(10.5)
        fed.hubs[0].stop()
        fed["east"].source.set(member("east", "p2", idle=2))
        await trio.sleep(6.0)
        assert fed["west"].idle("east") == [1, 2]
        await fed.hubs[0].start()
        seen = await sampled(
            10.5,
            lambda: (
                all(fed[name].agent.links[0].reporter.reporting for name in fed.clusters),
                fed["west"].idle("east"),
            ),
        )
        assert seen[-1][0]
        first = next(number for number, (connected, _) in enumerate(seen) if connected)
        assert first * 0.1 + 16.5 < 35.0  # before it would have run out by itself
        assert {tuple(idle) for _, idle in seen[first + 1 :]} == {(2,)}


async def test_a_failed_collect_withdraws_nothing(autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": "A failed collect withdraws nothing"; and while collects keep failing, the source's records
    age out, alone."""
    async with simulated_federation("west", "east", "north") as fed:
        fed["east"].source.set(member("east", idle=3))
        fed["north"].source.set(member("north", idle=1))
        await trio.sleep(10.5)
        fed["east"].source.failure = OSError("the API server is away")
        fed["east"].source.set()
        history = await sampled(
            30.0,
            lambda: (
                trio.current_time() - 10.0,
                fed["east"].idle("east"),
                fed["west"].idle("east"),
                fed["west"].idle("north"),
                fed["east"].idle("north"),
            ),
        )
        for age, own, seen, other, others in history:
            assert own == seen == ([3] if age <= 30.0 else [])
            assert other == others == [1]
        # The next one that works is believed: the pool comes back.
        fed["east"].source.failure = None
        fed["east"].source.set(member("east", idle=4))
        await fed.settle()
        assert fed["west"].idle("east") == [4]


# --- hubs that go ----------------------------------------------------------------------------------------------------


async def test_a_restarted_hub_removes_nothing_early(autojump_clock: MockClock) -> None:
    """semantics.md, "Hub": "A restarted hub starts empty; an empty or partial snapshot never removes what an agent
    already holds"."""
    async with simulated_federation("west", "east", "north") as fed:
        fed["east"].source.set(member("east", idle=3))
        fed["north"].source.set(member("north", idle=1))
        await trio.sleep(10.55)  # so that no look falls on the very moment when a record runs out
        await fed["east"].kill()
        last_true = fed["west"].known("east")[0].observed_at
        assert last_true is not None
        fed["north"].source.failure = RuntimeError("says nothing for now")
        await fed.restart_hub(0, down_for=1.0)
        history = await sampled(
            30.0, lambda: (trio.current_time(), fed["west"].idle("east"), fed["west"].idle("north"))
        )
        for now, east, north in history:
            assert east == ([3] if now <= last_true + 30.0 else [])
            # Its last words, of 10 s, are told again to the new hub.
            assert north == ([1] if now <= 40.0 else [])
        assert fed["west"].agent.links[0].watcher.watching


async def test_a_hub_that_is_down_for_longer_costs_only_what_is_foreign(autojump_clock: MockClock) -> None:
    """semantics.md, "Agent": "A lost hub never makes a cluster with local room send work away"; what comes back after
    it is complete."""
    async with simulated_federation("west", "east") as fed:
        fed["west"].source.set(member("west", idle=2))
        fed["east"].source.set(member("east", idle=9))
        await fed.settle()
        fed.hubs[0].stop()
        for _ in range(60):
            await trio.sleep(1.0)
            assert fed["west"].router.place("ns", "env", reserve=False).local
            assert fed["west"].idle("west") == [2]
        assert fed["west"].known("east") == []
        await fed.hubs[0].start()
        await trio.sleep(10.5)  # the longest delay between two tries, and a bit
        assert fed["west"].idle("east") == [9]
        assert fed["east"].idle("west") == [2]
