"""Whether an agent knows that it is the one that reports for its cluster, through everything that hubs and networks do:
two that both believe it would both do what only one may."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from tests.federation.helpers import take_everything
from tests.simulation import ScriptedHub, SimulatedCluster, member, sampled, simulated_federation
from trio_federation.agent import Agent
from trio_federation.config import Federation
from trio_federation.errors import Unimplemented
from trio_federation.retry import TAKEOVER
from trio_federation.rpc import IncomingReport, IncomingWatch

#: seconds in which an agent that is let in knows it
SOON = 0.3


async def rival_of(cluster: SimulatedCluster) -> SimulatedCluster:
    """A second agent of the same cluster, started."""
    rival = cluster.simulation.add("rival", cluster_id=cluster.cluster_id)
    rival.source.set(member(cluster.cluster_id, idle=9))
    await rival.start()
    return rival


async def test_an_agent_without_hubs_is_the_only_one(autojump_clock: MockClock) -> None:
    """There is nobody who could know of another."""
    agent = Agent("east", Federation(), generator=random.Random(0))
    async with trio.open_nursery() as nursery:
        assert agent.standing.is_reporter() is True
        await nursery.start(agent.run)
        await trio.sleep(60.0)
        assert agent.standing.is_reporter() is True
        nursery.cancel_scope.cancel()


async def test_of_two_agents_one_is_the_reporter_and_the_other_follows(autojump_clock: MockClock) -> None:
    """The second knows that it is not, for as long as it tries; and that it is, as soon as it is let in."""
    async with simulated_federation("east") as fed:
        east = fed["east"]
        assert east.is_reporter() is None
        await trio.sleep(SOON)
        assert east.is_reporter() is True
        rival = await rival_of(east)
        assert rival.is_reporter() is None
        await trio.sleep(SOON)
        both = await sampled(60.0, lambda: (east.is_reporter(), rival.is_reporter()), step=0.05)
        assert set(both) == {(True, False)}
        first = east.process.agent.standing
        await east.stop()
        assert first.is_reporter() is None
        told = await sampled(TAKEOVER[1] + SOON, rival.is_reporter, step=0.05)
        assert (told[0], told[-1]) == (False, True)
        assert None not in told
        # The other way round: what comes back finds the place taken.
        await east.start()
        await trio.sleep(SOON)
        assert set(await sampled(30.0, lambda: (east.is_reporter(), rival.is_reporter()))) == {(False, True)}


async def test_a_hub_that_is_gone_says_nothing(autojump_clock: MockClock) -> None:
    """Neither to who was accepted nor to who was refused, until it is back."""
    async with simulated_federation("east") as fed:
        await trio.sleep(SOON)
        rival = await rival_of(fed["east"])
        await trio.sleep(SOON)
        agents = (fed["east"], rival)
        assert [agent.is_reporter() for agent in agents] == [True, False]
        fed.hubs[0].stop()
        await trio.sleep(SOON)
        assert set(await sampled(60.0, lambda: [agent.is_reporter() for agent in agents] == [None, None])) == {True}
        await fed.hubs[0].start()
        await trio.sleep(20.0)
        assert {agent.is_reporter() for agent in agents} == {True, False}


@pytest.mark.parametrize("held", [{"to_cluster": False}, {"to_hub": False}, {}], ids=["to hub", "to cluster", "both"])
async def test_who_was_refused_is_not_the_reporter_because_the_hub_has_fallen_silent(
    held: dict[str, bool], autojump_clock: MockClock
) -> None:
    """A call that nobody objects to, as nobody hears of it, is not an accepted one. After the silence limit the hub is
    lost, and nothing is known."""
    async with simulated_federation("east") as fed:
        await trio.sleep(SOON)
        rival = await rival_of(fed["east"])
        await trio.sleep(5.0)
        rival.routes["hub-0"].hold(**held)
        told = await sampled(60.0, rival.is_reporter)
        assert set(told) == {False, None}
        assert told == sorted(told, key=lambda answer: answer is None), "first refused, then lost"
        assert fed["east"].is_reporter() is True
        rival.routes["hub-0"].release()
        await trio.sleep(30.0)
        assert rival.is_reporter() is False


async def test_hubs_that_differ_say_nothing(autojump_clock: MockClock) -> None:
    """And one hub that takes our reports is enough to go on, while the other is away."""
    async with simulated_federation("east", hubs=2) as fed:
        east = fed["east"]
        await trio.sleep(SOON)
        east.routes["hub-1"].partition()
        assert set(await sampled(20.0, east.is_reporter)) == {True}
        rival = fed.add("rival", cluster_id="east")
        rival.routes["hub-0"].partition()
        await rival.start()
        await trio.sleep(TAKEOVER[1] + SOON)
        # Nobody can know better: each has a hub of its own.
        assert (east.is_reporter(), rival.is_reporter()) == (True, True)
        east.routes["hub-1"].heal()
        await trio.sleep(15.0)
        assert (east.is_reporter(), rival.is_reporter()) == (None, True)
        await rival.stop()
        await trio.sleep(TAKEOVER[1] + SOON)
        assert east.is_reporter() is True


async def silent_watch(call: IncomingWatch) -> None:
    """A hub's watch call that never tells anything."""
    await trio.sleep_forever()


async def test_a_hub_that_never_says_that_it_accepts_counts_once_it_has_not_objected(autojump_clock: MockClock) -> None:
    """As other implementations may; for so long that it would have closed the connection if it had not heard us."""

    async def report(call: IncomingReport) -> None:
        while await call.receive() is not None:
            pass

    async with simulated_federation(
        "east", hubs=0, scripted_hubs=[ScriptedHub("other", report, silent_watch)], start=False
    ) as fed:
        await fed["east"].start()
        told = await sampled(30.0, fed["east"].is_reporter)
        assert set(told[:150]) == {None}
        assert told[-1] is True
        assert told == sorted(told, key=lambda answer: answer is True)


async def test_a_hub_that_takes_its_time_counts_from_its_word(autojump_clock: MockClock) -> None:
    """Not later than it says so, although the call has long passed for one that works."""

    async def report(call: IncomingReport) -> None:
        await trio.sleep(5.0)
        await take_everything(call)

    async with simulated_federation("east", hubs=0, scripted_hubs=[ScriptedHub("slow", report, silent_watch)]) as fed:
        assert set(await sampled(4.9, fed["east"].is_reporter)) == {None}
        assert set((await sampled(30.0, fed["east"].is_reporter))[3:]) == {True}


async def test_an_older_hub_knows_of_no_reporter(autojump_clock: MockClock) -> None:
    """One without the call: nobody says that there is another, nor that there is none."""

    async def report(call: IncomingReport) -> None:
        raise Unimplemented("unknown method")

    hub = ScriptedHub("older", report, silent_watch)
    async with simulated_federation("east", hubs=0, scripted_hubs=[hub]) as fed:
        assert set(await sampled(30.0, fed["east"].is_reporter)) == {None}


async def test_what_becomes_of_a_watch_says_nothing_of_the_reports(autojump_clock: MockClock) -> None:
    """It is a call of its own, and tried again by itself."""
    watches: list[float] = []

    async def watch(call: IncomingWatch) -> None:
        watches.append(trio.current_time())
        await call.accept()
        await trio.sleep(1.0)

    hub = ScriptedHub("moody", take_everything, watch)
    async with simulated_federation("east", hubs=0, scripted_hubs=[hub]) as fed:
        await trio.sleep(SOON)
        assert set(await sampled(60.0, fed["east"].is_reporter, step=0.01)) == {True}
        assert len(watches) > 5


async def test_a_report_that_the_hub_ends_counts_no_longer(autojump_clock: MockClock) -> None:
    """While its connection is as good as ever."""
    ended: list[float] = []

    async def report(call: IncomingReport) -> None:
        if len(ended) < 5:
            await call.accept()
            await trio.sleep(3.0)
            ended.append(trio.current_time())
            await call.answer()
        else:
            await take_everything(call)

    hub = ScriptedHub("moody", report, silent_watch)
    async with simulated_federation("east", hubs=0, scripted_hubs=[hub]) as fed:
        told = {trio.current_time(): fed["east"].is_reporter()}
        for _ in range(8000):
            await trio.sleep(0.01)
            told[trio.current_time()] = fed["east"].is_reporter()
        assert len(ended) == 5
        for moment in ended:
            after = [answer for when, answer in told.items() if moment < when <= moment + 0.02]
            assert None in after
        assert list(told.values())[-1] is True
        assert False not in told.values()
        assert fed["east"].routes["moody"].dialled == 1
