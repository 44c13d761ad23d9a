"""Peers that behave, while others do not: a reporter and watchers of ours, over real sockets. What is reported has to
be with every watcher before the next is."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from tests.hostile.peers import PATIENCE, SECRET
from trio_federation.capacity import Capacity
from trio_federation.identity import CLUSTER_KEY, INSTANCE_KEY
from trio_federation.pb.sandbox.sync.v1 import EnvCapacity, ReportFederationRequest, WatchFederationRequest
from trio_federation.rpc import HubConnection, ReportCall, WatchCall, open_bridge, tcp_dialer
from trio_federation.wire import changes_of

WATCHERS = ("east", "north", "south")
#: records in each report, and seconds between two: together some 300 kB a second for each watcher
RECORDS = 100
PACE = 0.08


#: for names of reporters: what one has left behind is nothing that another says
_numbers = itertools.count()


def load(cluster: str, number: int) -> ReportFederationRequest:
    """A report that is told from others by its number."""
    return ReportFederationRequest(
        items=[
            EnvCapacity(
                cluster_id=cluster,
                namespace="n" * 60,
                env_name="e" * 60,
                member_pool=f"pool-{pool:03}-{'x' * 40}",
                scaling_group="g" * 40,
                idle=number,
                seq=number,
            )
            for pool in range(RECORDS)
        ]
    )


class Honest:
    """A cluster that reports, and those who watch."""

    def __init__(self, cluster: str, report: ReportCall, watches: Sequence[WatchCall]) -> None:
        self._cluster = cluster
        self._report = report
        self._watches = watches
        self._number = 0
        #: seconds that each report took to all watchers
        self.delays: list[float] = []

    async def tell(self) -> None:
        """Report once; every watcher gets it, all of it, and nothing else of this cluster."""
        self._number += 1
        began = trio.current_time()
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                for watch in self._watches:
                    nursery.start_soon(self._hear, watch)
                await self._report.send(load(self._cluster, self._number))
        self.delays.append(trio.current_time() - began)

    async def _hear(self, watch: WatchCall) -> None:
        heard: list[int] = []
        while len(heard) < RECORDS:
            changes = changes_of(await watch.receive(), trio.current_time()).changes
            heard += [
                change.idle for change in changes if isinstance(change, Capacity) and change.cluster_id == self._cluster
            ]
        assert heard == [self._number] * RECORDS

    @asynccontextmanager
    async def meanwhile(self) -> AsyncIterator[None]:
        """Report during the block, and once after it."""
        async with trio.open_nursery() as nursery:
            over = trio.Event()

            async def report() -> None:
                while not over.is_set():
                    await self.tell()
                    with trio.move_on_after(PACE):
                        await over.wait()

            nursery.start_soon(report)
            yield
            over.set()
        await self.tell()


@asynccontextmanager
async def honest_peers(port: int) -> AsyncIterator[Honest]:
    """They come, and have told each other something; on leaving they go, and are let go well."""
    cluster = f"west-{next(_numbers)}"
    async with open_bridge(), trio.open_nursery() as nursery, AsyncExitStack() as stack:

        async def connect(name: str) -> HubConnection:
            metadata = [("authorization", f"Bearer {SECRET}"), (CLUSTER_KEY, name), (INSTANCE_KEY, "0a" * 16)]
            stream = await tcp_dialer("127.0.0.1", port)()
            connection = await HubConnection.open(nursery, stream, peer="hub", metadata=metadata)
            stack.push_async_callback(connection.aclose)
            return connection

        watches = []
        for name in WATCHERS:
            connection = await connect(name)
            watches.append(await stack.enter_async_context(connection.watch(WatchFederationRequest())))
            await watches[-1].receive()
        reporting = await connect(cluster)
        report = await stack.enter_async_context(reporting.report())
        honest = Honest(cluster, report, watches)
        await honest.tell()
        yield honest
        await report.end()
        with trio.fail_after(PATIENCE):
            await report.wait_answered()
