"""A hub that forbids pings, at a moment when no call runs: both were refused and wait for their next try."""

from __future__ import annotations

import random

import trio
from h2.errors import ErrorCodes
from trio.testing import MockClock

from tests.interop.peers import LogWatch
from tests.rpc.harness import RawPeer, new_link
from tests.simulation import ScriptedSource, always, member
from trio_federation.agent import Agent
from trio_federation.config import Federation


async def test_a_hub_that_forbids_pings_while_no_call_runs(logs: LogWatch, autojump_clock: MockClock) -> None:
    link = new_link()

    async def dial() -> trio.abc.Stream:
        return link.client

    source = ScriptedSource()
    source.set(member("west"))
    agent = Agent("west", Federation(), sources={"set": always(source)}, hubs={"hub": dial}, generator=random.Random(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agent.run)
        peer = RawPeer(link.server, client_side=False)
        await peer.start()
        for _ in range(2):
            await peer.respond(await peer.wait_called(), ("grpc-status", "12"), end=True)
        await logs.wait_for("hub_is_older", 2)
        peer.h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        await peer.flush()
        told = await logs.wait_for("hub_forbids_pings")
        assert told["keepalive"] == 10
        nursery.cancel_scope.cancel()
