"""A reporter and many watchers on grpcio.aio, in a process of their own: the same for every hub that is measured.

Told {"records", "batches"}, it reports so many batches of so many records. Each batch goes out when every watcher has
all of the one before, so that nothing is conflated and every delivery is counted. It answers with how many records
and messages have arrived, and how long each batch took, in seconds, until the last watcher had all of it."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import grpc.aio

from benchmarks.children import listen, say
from benchmarks.messages import (
    NO_LIMITS,
    SERVICE,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
    metadata,
    to_bytes,
)

INSTANCE = f"{1:032x}"


def _report(records: int, batch: int) -> Any:
    """The `batch`th report of this process."""
    message = ReportFederationRequest()
    for number in range(records):
        message.items.add(
            cluster_id="reporter",
            namespace="agents",
            env_name=f"env-{number // 4}",
            member_pool=f"pool-{number}",
            scaling_group="cpu",
            idle=(number + batch) % 9,
            running=batch % 100,
            desired=10,
            capacity=5,
            autoscaling_enabled=True,
            state="Active",
            seq=batch,
        )
    message.origins.add(cluster_id="reporter", instance=INSTANCE, uptime_ms=int(time.monotonic() * 1000))
    return message


class Peers:
    """A reporter and `watchers` watchers of the hub at a port of loopback, each with a connection of its own."""

    def __init__(self, port: int, watchers: int) -> None:
        self._address = f"127.0.0.1:{port}"
        self._watchers = watchers
        self._watching = 0
        self._batch = 0
        self._wanted = 0
        self._arrived = 0
        self._messages = 0
        self._all = asyncio.Event()

    def _channel(self) -> Any:
        return grpc.aio.insecure_channel(self._address, [*NO_LIMITS, ("grpc.use_local_subchannel_pool", 1)])

    async def _watch(self, number: int) -> None:
        call = self._channel().unary_stream(f"/{SERVICE}/WatchFederation", to_bytes, FederationBroadcast.FromString)
        request = WatchFederationRequest(spare_own_cluster=True)
        first = True
        async for message in call(request, metadata=metadata(f"watcher-{number}", f"{number + 2:032x}")):
            if first:  # what the hub knew before: nothing
                first = False
                self._watching += 1
                if self._watching == self._watchers:
                    self._all.set()
                continue
            self._messages += 1
            self._arrived += len(message.items)
            if self._arrived >= self._wanted:
                self._all.set()

    async def run(self) -> None:
        """Do what the benchmark asks for, until this process is ended."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._watchers):
                tasks.create_task(self._watch(number))
            await self._all.wait()
            call = self._channel().stream_unary(
                f"/{SERVICE}/ReportFederation", to_bytes, ReportFederationResponse.FromString
            )
            report = call(metadata=metadata("reporter", INSTANCE))
            say(ready=True)
            while True:
                asked = await asyncio.to_thread(listen)
                say(done=True, **await self._send(report, asked["records"], asked["batches"]))

    async def _send(self, report: Any, records: int, batches: int) -> dict[str, Any]:
        messages = []
        for _ in range(batches):
            self._batch += 1
            messages.append(_report(records, self._batch))
        self._arrived = self._messages = self._wanted = 0
        took = []
        for message in messages:
            self._all.clear()
            self._wanted += records * self._watchers
            began = time.perf_counter()
            await report.write(message)
            await self._all.wait()
            took.append(time.perf_counter() - began)
        return {"records": self._arrived, "messages": self._messages, "took": took}


def main() -> None:
    """Run the peers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("watchers", type=int)
    arguments = parser.parse_args()
    asyncio.run(_run(arguments.port, arguments.watchers))


async def _run(port: int, watchers: int) -> None:
    await Peers(port, watchers).run()


if __name__ == "__main__":
    main()
