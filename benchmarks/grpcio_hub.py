"""A hub like ours, as small as it can be, on grpcio.aio: what ours is judged by.

It checks the credential, stamps the caller's cluster id, keeps the newest record per identity with its moment of
observation, gives a new watcher everything, and passes every report on with ages as of the sending, with origins. It
leaves out what has nothing to do with passing on: it checks no names and ranges, forgets nothing, and knows neither
withdrawals, instances, takeovers nor signs of life.

There are two ways of passing on. "each": what waits for a watcher is conflated by identity, and a message is made for
each watcher from what waits for it. "shared": one message is made for each report, and all watchers get the same
bytes, which are not conflated."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio

from benchmarks.children import say
from benchmarks.messages import (
    NO_LIMITS,
    SECRET,
    SERVICE,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
    to_bytes,
)

Identity = tuple[str, ...]


class _Known:
    """A record or an origin, and the moment that its age or uptime counts from, in milliseconds."""

    __slots__ = ("message", "since")

    def __init__(self, message: Any, since: int) -> None:
        self.message = message
        self.since = since


class _Watcher:
    """What waits for one watcher: `changes` in the way "each", `messages` in the way "shared"."""

    def __init__(self) -> None:
        self.changes: dict[Identity, _Known] = {}
        self.messages: list[bytes] = []
        self.something = asyncio.Event()


def _now() -> int:
    return time.monotonic_ns() // 1_000_000


class Hub:
    """`shared`: whether all watchers get the same bytes."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._records: dict[Identity, _Known] = {}
        self._origins: dict[str, _Known] = {}
        self._watchers: dict[_Watcher, None] = {}

    async def _caller(self, context: Any) -> str:
        metadata = dict(context.invocation_metadata())
        if metadata.get("authorization") != f"Bearer {SECRET}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no credential")
        return str(metadata["x-federation-cluster"])

    async def report(self, messages: AsyncIterator[Any], context: Any) -> Any:
        """ReportFederation."""
        cluster_id = await self._caller(context)
        async for message in messages:
            self._take(message, cluster_id)
        return ReportFederationResponse()

    def _take(self, message: Any, cluster_id: str) -> None:
        now = _now()
        for origin in message.origins:
            origin.cluster_id = cluster_id
            self._origins[cluster_id] = _Known(origin, now - origin.uptime_ms)
        news: dict[Identity, _Known] = {}
        for item in message.items:
            item.cluster_id = cluster_id
            identity = (cluster_id, item.namespace, item.env_name, item.member_pool, item.scaling_group)
            known = self._records.get(identity)
            if known is None or item.seq > known.message.seq:
                news[identity] = self._records[identity] = _Known(item, now - item.observed_for_ms)
        if self._shared:
            data = to_bytes(self._broadcast(news.values()))
            for watcher in self._watchers:
                watcher.messages.append(data)
                watcher.something.set()
        else:
            for watcher in self._watchers:
                watcher.changes.update(news)
                watcher.something.set()

    def _broadcast(self, records: Iterable[_Known]) -> Any:
        now = _now()
        broadcast = FederationBroadcast()
        clusters: dict[str, None] = {}
        for known in records:
            item = broadcast.items.add()
            item.CopyFrom(known.message)
            item.observed_for_ms = now - known.since
            clusters[item.cluster_id] = None
        for cluster_id in clusters:
            if (origin := self._origins.get(cluster_id)) is not None:
                added = broadcast.origins.add()
                added.CopyFrom(origin.message)
                added.uptime_ms = now - origin.since
        return broadcast

    async def watch(self, request: Any, context: Any) -> None:
        """WatchFederation."""
        await self._caller(context)
        watcher = _Watcher()
        self._watchers[watcher] = None
        try:
            await context.write(self._broadcast(self._records.values()))
            while True:
                await watcher.something.wait()
                watcher.something.clear()
                if self._shared:
                    waiting, watcher.messages = watcher.messages, []
                    for data in waiting:
                        await context.write(data)
                else:
                    changes, watcher.changes = watcher.changes, {}
                    await context.write(self._broadcast(changes.values()))
        finally:
            del self._watchers[watcher]


async def serve(*, shared: bool) -> None:
    """Serve on a free port of loopback, and say which, until this process is ended."""
    hub = Hub(shared=shared)
    server = grpc.aio.server(options=NO_LIMITS)
    methods = {
        "ReportFederation": grpc.stream_unary_rpc_method_handler(
            hub.report, ReportFederationRequest.FromString, to_bytes
        ),
        "WatchFederation": grpc.unary_stream_rpc_method_handler(hub.watch, WatchFederationRequest.FromString, to_bytes),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(port=port)
    await server.wait_for_termination()


def main() -> None:
    """Run the hub."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["each", "shared"])
    arguments = parser.parse_args()
    asyncio.run(serve(shared=arguments.way == "shared"))


if __name__ == "__main__":
    main()
