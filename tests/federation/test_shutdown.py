"""How an agent ends: in order, soon, and whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import structlog
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.simulation import ScriptedHub, ScriptedSource, Simulation, member, sampled, simulated_federation
from trio_federation.capacity import Capacity
from trio_federation.hookspecs import CapacitySink
from trio_federation.rpc import IncomingReport, IncomingWatch

#: seconds within which an agent ends in any case
AT_MOST = 5.0


class TellingSource(ScriptedSource):
    """Logs when it is closed, to be found among the other lines in their order."""

    async def aclose(self) -> None:
        """Log it."""
        structlog.get_logger("test").info("source_closed")
        await trio.lowlevel.checkpoint()


class HangingSource(ScriptedSource):
    """Never answers and never lets go."""

    async def collect(self) -> Sequence[Capacity]:
        """Hang."""
        await trio.sleep_forever()

    async def aclose(self) -> None:
        """Hang."""
        await trio.sleep_forever()


class HangingSink(CapacitySink):
    """Never takes anything and never lets go."""

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Hang."""
        await trio.sleep_forever()

    async def aclose(self) -> None:
        """Hang."""
        await trio.sleep_forever()


async def seconds_to_stop(fed: Simulation, name: str) -> float:
    """How long a clean stop takes."""
    began = trio.current_time()
    await fed[name].stop()
    return trio.current_time() - began


async def test_an_agent_ends_in_order(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """architecture.md, "Principles": "cancelling the root ends everything in order: stop sources, withdraw, close
    streams"."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].more_sources["telling"] = TellingSource()
        fed["east"].source.set(member("east", idle=3))
        await fed["west"].start()
        await fed["east"].start()
        await trio.sleep(0.5)
        logs.clear()
        collects = fed["east"].source.collects
        assert await seconds_to_stop(fed, "east") == 0.0
        await trio.sleep(60.0)
        events = [line["event"] for line in logs if line.get("cluster", "east") == line.get("peer", "east") == "east"]
        assert [event for event in events if event != "watcher_left"] == [
            "source_closed",
            "reporter_left",
            "connection_ended",
        ]
        assert [line["said_goodbye"] for line in logs if line["event"] == "reporter_left"] == [True]
        assert (fed["east"].source.collects, fed["east"].source.closed) == (collects, 1)


@pytest.mark.parametrize("held", ["to the hub", "both ways"])
@pytest.mark.parametrize("full", [False, True])
async def test_an_agent_ends_while_the_hub_does_not_read(held: str, full: bool, autojump_clock: MockClock) -> None:
    """A hub that has stalled, noticed or not, with little or much on its way, does not keep an agent from ending."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(10.5)
        fed["east"].routes["hub-0"].hold(to_cluster=held == "both ways")
        if full:
            # More than all windows and buffers on the way take, so that the reporter waits in the midst of it.
            fed["east"].source.set(*(member("east", f"{'pool' * 30}-{number}", idle=1) for number in range(6000)))
        await trio.sleep(5.5)
        assert await seconds_to_stop(fed, "east") <= AT_MOST
        # The hub could not be told, so the others keep what they have for its TTL and no longer.
        assert fed["west"].idle("east") == [3]
        fed["east"].routes["hub-0"].cut()
        await trio.sleep(30.0)
        assert fed["west"].known("east") == []


async def test_a_hub_that_does_not_read_does_not_delay_the_others(autojump_clock: MockClock) -> None:
    """Every hub is told at the same time."""
    async with simulated_federation("west", "east", hubs=3) as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed["east"].routes["hub-0"].hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fed["east"].stop)
            await trio.sleep(0.1)
            assert fed["west"].known("east") == []
            assert fed.hubs[1].hub.snapshot() == fed.hubs[2].hub.snapshot() == []
            began = trio.current_time()
        assert trio.current_time() - began <= AT_MOST


async def test_an_agent_ends_though_everything_hangs(autojump_clock: MockClock) -> None:
    """Sources, sinks, one hub that never reads, one that accepts and never speaks, one that cannot be reached: each has
    its deadline, and they do not add up."""

    async def hang(call: IncomingReport | IncomingWatch) -> None:
        await trio.sleep_forever()

    mute = ScriptedHub("mute", hang, hang)
    async with simulated_federation("west", "east", hubs=2, scripted_hubs=[mute], start=False) as fed:
        east = fed["east"]
        for number in range(3):
            east.more_sources[f"hanging-{number}"] = HangingSource()
            east.sinks[f"hanging-{number}"] = HangingSink()
        east.source.set(member("east", idle=3))
        east.routes["hub-1"].partition(silently=True)
        await fed["west"].start()
        await east.start()
        await fed.settle()
        assert fed["west"].idle("east") == [3]
        east.routes["hub-0"].hold()
        assert await seconds_to_stop(fed, "east") <= AT_MOST


async def test_an_agent_without_a_connection_ends_at_once(autojump_clock: MockClock) -> None:
    """Between two tries nobody listens, so nobody is waited for."""
    async with simulated_federation("east") as fed:
        await fed.settle()
        fed.hubs[0].stop()
        for seconds in (0.0, 0.1, 3.3, 30.0):
            await trio.sleep(seconds)
            assert await seconds_to_stop(fed, "east") == 0.0
            await fed["east"].start()


async def test_an_agent_that_is_refused_ends_at_once(autojump_clock: MockClock) -> None:
    """The second agent of a cluster has nothing to withdraw, and withdraws nothing of the first."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        rival = fed.add("rival", cluster_id="east")
        rival.source.set(member("east", idle=9))
        await rival.start()
        await fed.settle()
        assert await seconds_to_stop(fed, "rival") == 0.0
        assert all(await sampled(60.0, lambda: fed["west"].idle("east") == [3]))


async def test_an_agent_can_be_stopped_at_any_moment(autojump_clock: MockClock) -> None:
    """Also in the midst of dialling, of its first report, of a debounce; and nothing of it is left at the hub."""
    async with simulated_federation("west", "east", start=False) as fed:
        await fed["west"].start()
        fed["east"].source.slowness = 0.05
        for number in range(40):
            fed["east"].source.set(member("east", idle=number + 1))
            await fed["east"].start()
            for _ in range(number % 10):
                await trio.lowlevel.checkpoint()
            await trio.sleep(number * 0.01)
            assert await seconds_to_stop(fed, "east") <= 0.3
            await trio.sleep(0.01)
            assert fed["west"].known("east") == []
        assert fed.hubs[0].hub.snapshot() == []


async def test_a_dial_that_hangs_holds_nothing_up(autojump_clock: MockClock) -> None:
    """Neither the other hubs, nor the end."""
    async with simulated_federation("west", "east", hubs=2, start=False) as fed:
        fed["east"].source.set(member("east", idle=3))
        fed["east"].routes["hub-0"].partition(silently=True)
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(0.5)
        assert fed["west"].idle("east") == [3]
        assert fed["east"].routes["hub-0"].dialled == 1
        assert await seconds_to_stop(fed, "east") == 0.0
        assert fed["west"].known("east") == []
