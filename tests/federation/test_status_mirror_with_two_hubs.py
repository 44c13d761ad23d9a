"""Two hubs may each take another one of two agents of a cluster, after one of them was restarted, and for good. Neither
agent is the reporter then, or both are; but one of them has written what others have, and goes on."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.federation.test_status_mirror import ClusterServer, Mirrored
from tests.kubernetes.waiting import within
from tests.simulation import simulated_federation

TTL = 30.0
SOON = 7.0


@pytest.mark.slow
async def test_one_agent_goes_on_where_each_has_a_hub_of_its_own(autojump_clock: MockClock) -> None:
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with simulated_federation("west", "east", hubs=2, start=False) as fed:
        first = Mirrored(fed["west"], west)
        Mirrored(fed["east"], east)
        for cluster in list(fed.clusters.values()):
            await cluster.start()
        await within(SOON, lambda: west.foreign() == {"east": {"own": 7}})
        second = Mirrored(fed.add("second", cluster_id="west"), west)
        await second.cluster.start()
        for number in range(20):  # until it is the first at a hub that comes back
            fed.hubs[1].stop()
            await trio.sleep(5.0 + number)
            await fed.hubs[1].start()
            await trio.sleep(45.0)
            if first.cluster.is_reporter() is None:
                break
        assert (first.cluster.is_reporter(), second.cluster.is_reporter()) == (None, None)
        for idle in (0, 3, 8):
            east.has("env", idle)
            await within(SOON, lambda idle=idle: west.foreign() == {"east": {"own": idle}})  # type: ignore[misc]
            await trio.sleep(300.0)
        assert second.sent == []
        await fed["east"].stop()
        await within(TTL + SOON, lambda: west.foreign() == {})
        assert first.sink.troubles() == second.sink.troubles() == []
