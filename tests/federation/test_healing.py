"""Moments at which things are easily lost or made younger than they are: a freeze, a stop between two connections, a
takeover between instances of one age, a return after the grace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.simulation import member, simulated_federation
from trio_federation.capacity import Capacity
from trio_federation.hookspecs import CapacitySource
from trio_federation.plugins import plugins_failure


async def test_bytes_that_waited_through_a_freeze_are_not_believed(autojump_clock: MockClock) -> None:
    """C31: what came in before an hour's freeze claims an age from before it."""
    async with simulated_federation("west", "east") as fed:
        fed["west"].source.set(member("west", idle=3))
        await trio.sleep(12.0)
        fed["east"].routes["hub-0"].hold(to_hub=False, to_cluster=True)
        await trio.sleep(11.0)  # a resync travels, and waits
        await fed["west"].kill()
        autojump_clock.jump(3600.0)
        assert fed["east"].idle("west") == []
        fed["east"].routes["hub-0"].release()
        await trio.testing.wait_all_tasks_blocked()
        assert fed["east"].idle("west") == []


async def test_an_agent_that_stops_between_two_connections_says_goodbye(autojump_clock: MockClock) -> None:
    """semantics.md, "Wire": "What is withdrawn: every record at a clean shutdown", also while a link is down for the
    moment."""
    async with simulated_federation("west", "east") as fed:
        fed["west"].source.set(member("west", idle=3))
        await fed.settle()
        assert fed["east"].idle("west") == [3]
        fed["west"].routes["hub-0"].cut()
        await trio.sleep(0.001)
        await fed["west"].stop()
        await trio.sleep(0.1)
        assert fed["east"].idle("west") == []


@pytest.mark.parametrize("gap, longest", [(1.0, 7.3), (4.0, 7.3), (6.0, 2.1), (20.0, 2.1)])
@pytest.mark.parametrize("seed", range(5))
async def test_how_long_a_takeover_hides_a_cluster(
    gap: float, longest: float, seed: int, autojump_clock: MockClock
) -> None:
    """The takeover is one retry, after at most 2 s. Instances that started within 5 s of each other cannot be told
    apart, so there it takes until the newer one's sources were asked again and that is told: a report interval more."""
    async with simulated_federation("west", "east", start=False, seed=seed) as fed:
        await fed["east"].start()
        fed["west"].source.set(member("west", idle=3))
        old = await fed["west"].start()
        await trio.sleep(gap)
        await fed["west"].start()
        await trio.sleep(3.0)
        await old.stop()
        hidden = 0.0
        for _ in range(300):
            await trio.sleep(0.1)
            hidden += 0.1 if fed["east"].idle("west") == [] else 0.0
        assert hidden <= longest
        assert fed["east"].idle("west") == [3]


async def test_who_came_during_an_absence_is_told_of_a_return(autojump_clock: MockClock) -> None:
    """semantics.md, "Hub": after the grace newcomers are not shown a vanished reporter's records; when it is back they
    are, although its source has nothing newer to say."""
    async with simulated_federation("west", "north", start=False) as fed:
        await fed["west"].start()
        fed["west"].source.set(member("west", idle=3))
        await trio.sleep(10.0)
        fed["west"].source.failure = OSError("no API server")
        fed.partition("west")
        await trio.sleep(11.5)
        await fed["north"].start()
        await trio.sleep(0.5)
        assert fed["north"].idle("west") == []
        fed.heal("west")
        await trio.sleep(6.0)
        assert fed["north"].idle("west") == [3]


async def test_a_source_that_cannot_be_stopped_does_not_hold_up_the_goodbye(autojump_clock: MockClock) -> None:
    """Hung calls in threads are like that. What it says after the stop is not taken in any more."""

    class Shielded(CapacitySource):
        async def collect(self) -> Sequence[Capacity]:
            with trio.CancelScope(shield=True):
                await trio.sleep(60.0)
            return [member("west", "late")]

    async with simulated_federation("west", "east", start=False) as fed, trio.open_nursery() as nursery:
        fed["west"].more_sources["shielded"] = Shielded()
        fed["west"].source.set(member("west", idle=3))
        await fed["east"].start()
        await fed["west"].start()
        await trio.sleep(3.0)
        assert fed["east"].idle("west") == [3]
        nursery.start_soon(fed["west"].stop)
        await trio.sleep(2.0)
        assert fed["east"].idle("west") == []
        await trio.sleep(60.0)
        assert fed["east"].idle("west") == []


async def test_a_failure_that_comes_along_with_a_cancellation_gives_way_to_it() -> None:
    """A plugin that fails while it is cancelled must not turn a clean end into a crash."""

    async def cancelled_and_failing() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise OSError("close failed")

    with trio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(BaseExceptionGroup) as caught:
            await cancelled_and_failing()
        plugins_failure(caught.value)
    assert scope.cancelled_caught


def test_a_failure_beside_an_interrupt_is_raised_as_it_is() -> None:
    """KeyboardInterrupt is never a plugin's failure, and not dropped either."""
    error = BaseExceptionGroup("both", [OSError("failed"), KeyboardInterrupt()])
    with pytest.raises(BaseExceptionGroup) as caught:
        plugins_failure(error)
    assert caught.value is error
