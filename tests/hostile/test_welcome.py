"""Peers at full speed that no defence may cut off: grpcio's client and ours, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import trio

from tests.hostile.peers import PATIENCE, REPORT_PATH, WATCH_PATH
from trio_federation.errors import Unauthenticated
from trio_federation.pb.sandbox.sync.v1 import EnvCapacity, FederationBroadcast, WatchFederationRequest
from trio_federation.rpc import (
    Cut,
    FederationServer,
    HubConnection,
    IncomingReport,
    IncomingWatch,
    open_bridge,
    open_listeners,
    tcp_dialer,
)

#: broadcasts of one record, and calls that are refused: in both cases several times what the budget of a connection
#: holds if nothing is earned
BROADCASTS = 1500
CALLS = 1000
BROADCAST = FederationBroadcast(items=[EnvCapacity(cluster_id="west", namespace="ns", env_name="env", idle=1)])


class Server:
    """A hub's side of the protocol, that sends what it has as fast as it can, and refuses whoever reports."""

    def __init__(self) -> None:
        self.port = 0
        #: how many connections there were, and which of them were cut off
        self.connections = 0
        self.cuts: list[tuple[Cut, str]] = []

    async def watch(self, call: IncomingWatch) -> None:
        """Send many small broadcasts."""
        await call.request()
        for _ in range(BROADCASTS):
            await call.send(BROADCAST)

    async def report(self, _: IncomingReport) -> None:
        """Refuse it before anything is read."""
        raise Unauthenticated("not here")


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """A server on a socket. Nobody is cut off."""
    server = Server()
    service = FederationServer(
        server.report, server.watch, cut=lambda _peer, cut, reason: server.cuts.append((cut, reason))
    )
    listeners = await open_listeners("127.0.0.1", 0)
    server.port = listeners[0].socket.getsockname()[1]

    async def serve(stream: trio.SocketStream) -> None:
        server.connections += 1
        await service.serve(stream)

    async with open_bridge(), trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        with trio.fail_after(PATIENCE):
            yield server
        nursery.cancel_scope.cancel()
    assert server.cuts == []
    assert server.connections == 1


def grpcio_watches(port: int) -> int:
    """How many broadcasts a watch of grpcio's gets."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return sum(1 for _ in channel.unary_stream(WATCH_PATH)(b"", timeout=PATIENCE))


def grpcio_calls(port: int) -> set[grpc.StatusCode]:
    """How calls of grpcio's end, fifty at once on one channel, each with a message on its way when it is refused."""
    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        report = channel.stream_unary(REPORT_PATH)
        for _ in range(CALLS // 50):
            futures = [report.future(iter([b"", b""]), timeout=PATIENCE) for _ in range(50)]
            codes |= {future.code() for future in futures}
    return codes


async def test_a_watch_of_grpcio_at_full_speed() -> None:
    async with serving() as server:
        assert await trio.to_thread.run_sync(partial(grpcio_watches, server.port)) == BROADCASTS


async def test_calls_of_grpcio_that_come_and_go_at_full_speed() -> None:
    async with serving() as server:
        codes = await trio.to_thread.run_sync(partial(grpcio_calls, server.port))
        assert codes == {grpc.StatusCode.UNAUTHENTICATED}


async def test_our_own_client_at_full_speed() -> None:
    async with serving() as server, trio.open_nursery() as nursery:
        stream = await tcp_dialer("127.0.0.1", server.port)()
        connection = await HubConnection.open(nursery, stream, peer="hub")
        async with connection.watch(WatchFederationRequest()) as call:
            for _ in range(BROADCASTS):
                assert len((await call.receive()).items) == 1
        refused = 0
        for _ in range(CALLS // 5):
            async with connection.report() as report:
                try:
                    await report.wait_answered()
                except Unauthenticated:
                    refused += 1
        assert refused == CALLS // 5
        await connection.aclose()
