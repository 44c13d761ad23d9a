"""Honest peers of a hub, for `faults.py`: a reporter and watchers on grpcio.aio, in a process of their own. The
reporter does not wait for the watchers.

Told {"measure"}, it reports BATCH records every INTERVAL for so many seconds, and answers with the seconds that each
report took to each watcher. Where a watcher is told something newer instead, that counts. Told {"identities",
"rounds"}, it changes so many records so many times, each time when every watcher has all of the last one."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from typing import Any

import grpc.aio

from benchmarks.children import BenchmarkError, listen, say
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

REPORTER = "honest"
#: Records of each report, and seconds between them: well within a hub's limits.
BATCH = 50
INTERVAL = 0.033
#: Records of a message when many change.
_AT_ONCE = 1_000
#: Seconds after the last report for which arrivals are waited for.
_PATIENCE = 60.0
_INSTANCE = f"{1:032x}"


class _Watcher:
    """What one watcher has been told."""

    def __init__(self) -> None:
        #: number and moment of reports that it has not been told of
        self.waiting: deque[tuple[int, float]] = deque()
        self.has_begun = asyncio.Event()
        #: by identity, the number of the latest report of it
        self.latest: dict[str, int] = {}


class Peers:
    """One reporter and `watchers` watchers of the hub at a port of loopback."""

    def __init__(self, port: int, watchers: int) -> None:
        self._address = f"127.0.0.1:{port}"
        self._watchers = [_Watcher() for _ in range(watchers)]
        self._number = 0
        self._took: list[float] = []
        #: whether it is identities that count, and not times
        self._counts = False
        self._missing = 0
        self._all = asyncio.Event()

    def _channel(self) -> Any:
        return grpc.aio.insecure_channel(self._address, [*NO_LIMITS, ("grpc.use_local_subchannel_pool", 1)])

    async def _watch(self, number: int, watcher: _Watcher) -> None:
        call = self._channel().unary_stream(f"/{SERVICE}/WatchFederation", to_bytes, FederationBroadcast.FromString)
        request = WatchFederationRequest(spare_own_cluster=True)
        async for message in call(request, metadata=metadata(f"watcher-{number}", f"{number + 2:032x}")):
            watcher.has_begun.set()
            # Others may report as well, and a lot; a message says in a row whom it is about.
            if any(origin.cluster_id == REPORTER for origin in message.origins):
                self._arrived(watcher, message.items)
        raise BenchmarkError(f"the watch of watcher-{number} has ended")

    def _arrived(self, watcher: _Watcher, items: Any) -> None:
        now = time.perf_counter()
        if self._counts:
            for item in items:
                if item.running == self._number and watcher.latest.get(item.member_pool) != self._number:
                    watcher.latest[item.member_pool] = self._number
                    self._missing -= 1
            if self._missing == 0:
                self._all.set()
            return
        newest = max((item.running for item in items if item.cluster_id == REPORTER), default=0)
        while watcher.waiting and watcher.waiting[0][0] <= newest:
            self._took.append(now - watcher.waiting.popleft()[1])

    async def run(self) -> None:
        """Do what the benchmark asks for, until this process is ended."""
        async with asyncio.TaskGroup() as tasks:
            for number, watcher in enumerate(self._watchers):
                tasks.create_task(self._watch(number, watcher))
            for watcher in self._watchers:
                await watcher.has_begun.wait()
            call = self._channel().stream_unary(
                f"/{SERVICE}/ReportFederation", to_bytes, ReportFederationResponse.FromString
            )
            report = call(metadata=metadata(REPORTER, _INSTANCE))
            await report.write(self._message(range(BATCH)))
            say(ready=True)
            while True:
                asked = await asyncio.to_thread(listen)
                if "measure" in asked:
                    say(done=True, **await self._measure(report, asked["measure"]))
                else:
                    say(done=True, took=await self._change(report, asked["identities"], asked["rounds"]))

    def _message(self, numbers: range) -> Any:
        message = ReportFederationRequest()
        for number in numbers:
            message.items.add(
                cluster_id=REPORTER,
                namespace="agents",
                env_name=f"env-{number // 4}",
                member_pool=f"pool-{number}",
                idle=number % 9,
                running=self._number,
                desired=10,
                state="Active",
                seq=self._number,
            )
        message.origins.add(cluster_id=REPORTER, instance=_INSTANCE, uptime_ms=int(time.monotonic() * 1000))
        return message

    async def _measure(self, report: Any, seconds: float) -> dict[str, Any]:
        self._counts = False
        self._took = []
        end = time.perf_counter() + seconds
        reports = 0
        while (due := time.perf_counter()) < end:
            self._number += 1
            reports += 1
            message = self._message(range(BATCH))
            sent = time.perf_counter()
            for watcher in self._watchers:
                watcher.waiting.append((self._number, sent))
            await report.write(message)
            await asyncio.sleep(max(0.0, due + INTERVAL - time.perf_counter()))
        deadline = time.perf_counter() + _PATIENCE
        while any(each.waiting for each in self._watchers):
            if time.perf_counter() >= deadline:
                break
            await asyncio.sleep(0.005)
        lost = sum(len(watcher.waiting) for watcher in self._watchers)
        for watcher in self._watchers:
            watcher.waiting.clear()
        return {"took": self._took, "lost": lost, "reports": reports}

    async def _change(self, report: Any, identities: int, rounds: int) -> list[float]:
        self._counts = True
        took = []
        for _ in range(rounds):
            self._number += 1
            self._missing = identities * len(self._watchers)
            self._all.clear()
            began = time.perf_counter()
            for start in range(0, identities, _AT_ONCE):
                await report.write(self._message(range(start, min(start + _AT_ONCE, identities))))
            await self._all.wait()
            took.append(time.perf_counter() - began)
        return took


async def _run(port: int, watchers: int) -> None:
    await Peers(port, watchers).run()


def main() -> None:
    """Run the peers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("watchers", type=int)
    arguments = parser.parse_args()
    asyncio.run(_run(arguments.port, arguments.watchers))


if __name__ == "__main__":
    main()
