"""What it costs to show the fleet in the status of SandboxEnvs: writes to a real API server, beside the official client
and bare HTTP; an hour of a fleet, beside writing every env every 10 seconds; and being told of a snapshot."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import structlog
import trio
from trio.testing import MockClock

from benchmarks.children import BenchmarkError, cpu_seconds, running_module
from benchmarks.kubernetes import api_server, make_envs
from benchmarks.kubernetes_writers import AT_A_TIME, POOLS, RESYNC_INTERVAL, configurations, counts, fleet
from benchmarks.measure import Figure, compared, seconds, shown
from tests.apiserver.cluster import ApiServer
from tests.kubernetes.fake_api import FakeServer, described, sandboxenvs
from trio_federation import Capacity
from trio_federation.testing import sink_context
from trio_federation_kubernetes.client import Answer
from trio_federation_kubernetes.errors import ApiError
from trio_federation_kubernetes.options import StatusOptions
from trio_federation_kubernetes.ownership import FIELD_MANAGER
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.sink import KubernetesStatusSink

ENVS, QUICK_ENVS = 500, 20
CLUSTERS, QUICK_CLUSTERS = 20, 5
#: seconds of virtual time
HOUR = 3600.0
LENGTHS, QUICK_LENGTHS = (HOUR, HOUR / 3), (300.0, 300.0)
#: seconds until every env has been written twice
SETTLED = 120.0
#: The fleet that changes: so many of its envs, drawn by lot, each so many seconds.
CHANGING = 0.05
CHANGE_INTERVAL = 5.0
#: what is naive: to write every env so often, in seconds
NAIVE_INTERVAL = 10.0
RECORDS = (10_000, 100_000)
QUICK_RECORDS = (2_000,)
CHANGED = 0.01
#: how often each kind of snapshot is told; the best counts
TELLINGS = 4
#: seconds in which everything is written that there is to write, when up to a thousand may be each second
QUIET = 15.0
NAMESPACE = "agents"
#: Seconds in which an answer comes.
LATENCY = 0.02
#: what the way of writing is called that stands beside the sink
BESIDE = {
    "httpx4": f"bare httpx, {AT_A_TIME} at a time",
    "official": "the official client, one at a time",
    "httpx": "bare httpx, one at a time",
}
WAYS = ("ours", *BESIDE)
#: how things are called that are asked of an API server
KINDS = ("apply", "list", "watch", "probe", "openapi")


def run(*, quick: bool = False) -> list[Figure]:
    """Writes per second and CPU per write; requests and CPU per hour; CPU per record that is told."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    envs, clusters = (QUICK_ENVS, QUICK_CLUSTERS) if quick else (ENVS, CLUSTERS)
    figures = []
    with api_server(quick=quick) as server:
        if server is not None:
            figures += _writes(server, envs, clusters, turns=1 if quick else 2)
    figures += _hours(envs, clusters, QUICK_LENGTHS if quick else LENGTHS)
    for records in QUICK_RECORDS if quick else RECORDS:
        print(f"  {records:,} records", file=sys.stderr)
        figures += trio.run(_told, records, clusters, clock=MockClock(autojump_threshold=0))
    return figures


# --- writes to a real server


def _writes(server: ApiServer, envs: int, clusters: int, *, turns: int) -> list[Figure]:
    namespace = make_envs(server, "written", envs)
    found: dict[str, dict[str, float]] = {}
    # One after the other: two that write under the same name would fight. Each leaves other counts than the one before.
    # The first time, there is nothing to be overwritten.
    for number, way in enumerate(("httpx4", *turns * WAYS)):
        print(f"  writes: {way}", file=sys.stderr)
        arguments = (way, str(server.kubeconfig), namespace, envs, clusters)
        with running_module("kubernetes_writers", *arguments, name=f"the writer {way}") as writer:
            writer.hear(ready=True)
            before = _used_by(server)
            writer.tell(round=2 * number)
            took = writer.hear(done=True) | {"server": _used_by(server) - before}
        if number:
            found[way] = {what: min(took[what], found.get(way, took)[what]) for what in ("seconds", "cpu", "server")}
    ours = found["ours"]
    of_what = f"{clusters} clusters of {POOLS} pools"

    def milliseconds(what: str, key: str, way: str) -> Figure:
        mine, theirs = (1e3 * found[each][key] / envs for each in ("ours", way))
        return compared(f"{what}, {of_what}", mine, "ms", theirs, BESIDE[way])

    return [
        *(
            compared(f"writes per second, {of_what}", envs / ours["seconds"], "/s", envs / found[way]["seconds"], name)
            for way, name in BESIDE.items()
        ),
        milliseconds("CPU per write", "cpu", "official"),
        milliseconds("CPU per write", "cpu", "httpx"),
        milliseconds("API server and etcd, CPU per write", "server", "httpx4"),
    ]


def _used_by(server: ApiServer) -> float:
    """Seconds of CPU that the API server and its store have used so far."""
    return cpu_seconds(server.program.pid) + cpu_seconds(server.etcd.pid)


# --- an hour of a fleet


class Aside:
    """Seconds of CPU that went into what is not measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is done in here is not measured."""
        began = time.process_time()
        yield
        self.seconds += time.process_time() - began


class Server:
    """As much of an API server as the sink needs, in memory, and cheap: each env is as it was applied last, with the
    local cluster's entry before it. It keeps no history, and what it says of owners was found out once. `FakeServer`,
    which knows better, takes longer for a write than the sink does."""

    server_clock_offset = 1.8e9

    def __init__(self, envs: int, clusters: int, aside: Aside) -> None:
        self.counts: Counter[str] = Counter()
        self._aside = aside
        self._root = SANDBOXENVS.path()
        self._version = 1000
        self._metadata, self._local = _example(clusters)
        names = [f"env-{number:05}" for number in range(envs)]
        self._objects = {name: self._object(name, b"") for name in names}
        self._events: list[bytes] = []
        self._news = trio.Event()
        self._openapi = json.dumps(described(sandboxenvs())).encode()

    def _object(self, name: str, applied: bytes) -> bytes:
        """An env as bytes, with what was applied to it: the items of the list of clusters, and what comes after."""
        self._version += 1
        owners = self._metadata if applied else b"[]"
        return (
            b'{"apiVersion":"agents.navix.sh/v1alpha1","kind":"SandboxEnv","metadata":{"name":"%b","namespace":"%b",'
            b'"resourceVersion":"%d","managedFields":%b},"spec":{},"status":{"clusters":[%b%b}}'
        ) % (name.encode(), NAMESPACE.encode(), self._version, owners, self._local, applied or b"]")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Server]:
        """The way to it."""
        await trio.lowlevel.checkpoint()
        yield self

    async def get(self, path: str, params: Mapping[str, str], *, deadline: float = 10.0) -> Answer:
        """The schema, or the first page of a list, of which there must be no other."""
        await trio.sleep(LATENCY)
        with self._aside.counted():
            if path.startswith("/openapi/"):
                self.counts["openapi"] += 1
                return Answer(self._openapi, None)
            if path != self._root:
                raise ApiError(f"the benchmark's server has no {path}", code=404)
            limit = int(params["limit"])
            self.counts["probe" if limit == 1 else "list"] += 1
            found = itertools.islice(self._objects.values(), limit)
            return Answer(
                b'{"metadata":{"resourceVersion":"%d"},"items":[%b]}' % (self._version, b",".join(found)), None
            )

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        """A write, and the event of it."""
        await trio.sleep(LATENCY)
        with self._aside.counted():
            self.counts["apply"] += 1
            _, _, applied = body.partition(b'"status":{"clusters":[')
            name = path.split("/")[-2]
            self._objects[name] = found = self._object(name, b"," + applied[:-2] if applied else b"")
            self._events.append(b'{"type":"MODIFIED","object":%b}\n' % found)
            self._news.set()
        return Answer(found, None)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A watch; it ends when it should."""
        self.counts["watch"] += 1
        await trio.sleep(LATENCY)
        yield self._told(trio.current_time() + float(params["timeoutSeconds"]))

    async def _told(self, until: float) -> AsyncIterator[bytes]:
        while trio.current_time() < until:
            if self._events:
                events, self._events = self._events, []
                yield b"".join(events)
                continue
            self._news = trio.Event()
            with trio.move_on_at(until):
                await self._news.wait()


def _example(clusters: int) -> tuple[bytes, bytes]:
    """The managedFields of an env that was applied, and the local cluster's entry in it, as JSON."""
    server = FakeServer(SANDBOXENVS)
    pools = [{"name": f"pool-{pool}", "idleCount": 1, "runningCount": 10, "desiredReplicas": 11} for pool in (0, 1, 2)]
    entry = {"clusterID": "west", "isLocal": True, "observedMembers": pools}
    server.put(SANDBOXENVS, NAMESPACE, "env", status={"idleReplicas": 3, "clusters": [entry]})
    ((_, configuration),) = configurations(fleet(NAMESPACE, 1, clusters, counts(1, clusters, 0), 0.0))
    applied = json.loads(configuration)
    server.apply_as(SANDBOXENVS, NAMESPACE, "env", applied, FIELD_MANAGER)
    owners = server.get(SANDBOXENVS, NAMESPACE, "env")["metadata"]["managedFields"]
    return _compact(owners), _compact(entry)


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _hours(envs: int, clusters: int, lengths: Sequence[float]) -> list[Figure]:
    figures = []
    for length, what, share in zip(
        lengths,
        ("a steady fleet", f"a fleet of which {CHANGING:.0%} change every {CHANGE_INTERVAL:g} s"),
        (0.0, CHANGING),
        strict=True,
    ):
        print(f"  {length / 60:g} minutes of {what}", file=sys.stderr)
        asked, used, told = trio.run(_live, envs, clusters, length, share, clock=MockClock(autojump_threshold=0))
        if asked.keys() - KINDS or not asked["apply"]:
            raise BenchmarkError(f"the sink has asked for {dict(asked)}, which is not what it is to do")
        of_an_hour = HOUR / length
        naive = envs * HOUR / NAIVE_INTERVAL
        parts = ", ".join(f"{asked[kind] * of_an_hour:,.0f} {kind}" for kind in KINDS if asked[kind])
        requests = asked.total() * of_an_hour
        beside = f"every env every {NAIVE_INTERVAL:g} s {naive:,.0f} /h; {parts}"
        figures += [
            Figure(f"{what}: requests", requests, "/h", beside, requests / naive),
            Figure(
                f"{what}: CPU without HTTP", used * of_an_hour, "s/h", f"of it update() {shown(told * of_an_hour)} s/h"
            ),
        ]
    return figures


async def _live(envs: int, clusters: int, length: float, share: float) -> tuple[Counter[str], float, float]:
    """What is asked for in so many seconds, the CPU seconds that all of it takes, and those of `update()`."""
    aside, random = Aside(), Random(0)
    server = Server(envs, clusters, aside)
    sink = KubernetesStatusSink(StatusOptions(), sink_context(), connect=server.connect)
    idle = counts(envs, clusters, 0)
    records: list[Capacity] = []
    stamped_at, told = -math.inf, 0.0

    async def live(seconds_of_it: float) -> None:
        nonlocal records, stamped_at, told
        end = trio.current_time() + seconds_of_it
        while (now := trio.current_time()) < end:
            with aside.counted():
                changed = []
                if share:
                    for env in random.sample(range(envs), round(share * envs)):
                        place = (random.randrange(clusters) * envs + env) * POOLS
                        idle[place] = (idle[place] + 1) % 7
                        changed.append(place)
                if now >= stamped_at + RESYNC_INTERVAL:
                    records, stamped_at = fleet(NAMESPACE, envs, clusters, idle, now), now
                else:
                    for place in changed:
                        records[place] = replace(records[place], idle=idle[place], observed_at=now)
                snapshot = list(records)
            began, before = time.process_time(), aside.seconds
            await sink.update(snapshot)
            told += time.process_time() - began - (aside.seconds - before)
            await trio.sleep_until(now + (CHANGE_INTERVAL if share else RESYNC_INTERVAL))

    async with trio.open_nursery() as nursery:
        await nursery.start(sink.run)
        await live(SETTLED)
        server.counts.clear()
        gc.collect()
        began, aside.seconds, told = time.process_time(), 0.0, 0.0
        await live(length)
        used = time.process_time() - began - aside.seconds
        nursery.cancel_scope.cancel()
    _check(sink)
    return server.counts, used, told


def _check(sink: KubernetesStatusSink) -> None:
    if troubles := sink.troubles():
        raise BenchmarkError(f"the sink could not do its work: {troubles}")


# --- being told of a snapshot


async def _told(count: int, clusters: int) -> list[Figure]:
    """Microseconds per record of `update()`; all envs are there, and show the snapshot before."""
    envs = count // (clusters * POOLS)
    server = Server(envs, clusters, Aside())
    options = StatusOptions(page_size=envs, writes_per_second=1000)
    sink = KubernetesStatusSink(options, sink_context(), connect=server.connect)
    idle, random = counts(envs, clusters, 0), Random(0)
    took: dict[str, list[float]] = {}

    async def tell(what: str, snapshot: list[Capacity]) -> None:
        gc.collect()
        began = time.process_time()
        await sink.update(snapshot)
        took.setdefault(what, []).append(1e6 * (time.process_time() - began) / count)

    async with trio.open_nursery() as nursery:
        await nursery.start(sink.run)
        await trio.sleep(QUIET)
        records = fleet(NAMESPACE, envs, clusters, idle, trio.current_time())
        await tell("all of it new", list(records))
        await trio.sleep(QUIET)
        for _ in range(TELLINGS):
            await tell("nothing new", list(records))
            records = fleet(NAMESPACE, envs, clusters, idle, trio.current_time())
            await tell("ages new", list(records))
            for place in random.sample(range(count), round(CHANGED * count)):
                idle[place] += 1
                records[place] = replace(records[place], idle=idle[place])
            await tell(f"{CHANGED:.0%} of the records changed", list(records))
            await trio.sleep(QUIET)
        nursery.cancel_scope.cancel()
    _check(sink)
    if server.counts["apply"] < envs:
        raise BenchmarkError(f"the sink has written {server.counts['apply']} times, for {envs} envs")
    floor = 1e6 * seconds(lambda: _by_env(records)) / count
    return [
        compared(f"update(), per record, {what}, {count:,}", min(found), "µs", floor, "a list for each env in a dict")
        for what, found in took.items()
    ]


def _by_env(records: Iterable[Capacity]) -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for record in records:
        found.setdefault((record.namespace, record.env_name), []).append(record)
    return found
