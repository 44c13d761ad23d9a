"""The child of the kubernetes_status benchmark: writes the status of SandboxEnvs on an API server in one of several
ways, all by server-side apply, with the same configurations, and says what that took. `ours` is the sink of the plugin
with all that is below it, which also makes the configurations, decodes the answers, and follows the envs by list and
watch; `official` the official Kubernetes client for Python, one write after the other; `httpx` the HTTP library, which
sends prepared bytes and leaves the answers as they are, one after the other, and `httpx4` the same from four threads.

    python -m benchmarks.kubernetes_writers WAY KUBECONFIG NAMESPACE ENVS CLUSTERS

It is told the number of a round, in which every env gets other counts than it had, and answers with seconds and CPU
seconds. Also here: the fleet whose envs these are."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog
import trio

from benchmarks.children import listen, say
from benchmarks.kubernetes_readers import GROUP, PLURAL, VERSION, cpu_seconds, http_client
from trio_federation import Capacity
from trio_federation.testing import sink_context
from trio_federation_kubernetes.client import Answer
from trio_federation_kubernetes.connection import Api
from trio_federation_kubernetes.opening import Opening
from trio_federation_kubernetes.options import StatusOptions
from trio_federation_kubernetes.ownership import FIELD_MANAGER
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.segments import ALL_FIELDS, body, segments
from trio_federation_kubernetes.sink import KubernetesStatusSink

#: pools of an env in each of the other clusters
POOLS = 2
#: Seconds in which a whole fleet is stamped anew, cluster by cluster: how often agents report everything.
RESYNC_INTERVAL = 10.0
#: What the official client and the HTTP library write before they are measured, so that there is a connection.
FIRST_WRITES = 5
AT_A_TIME = 4
#: Unix seconds, for what was known at 0.
SOME_MOMENT = 1.8e9
APPLY = "application/apply-patch+yaml"
PARAMETERS = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}


def counts(envs: int, clusters: int, number: int) -> list[int]:
    """How many are idle in each pool of a fleet, in the order of its snapshot. Of two numbers that differ by less than
    seven, all counts differ."""
    return [(env + cluster + number) % 7 for cluster in range(clusters) for env in range(envs) for _ in range(POOLS)]


def fleet(namespace: str, envs: int, clusters: int, idle: Iterable[int], now: float) -> list[Capacity]:
    """What so many other clusters have of so many envs, as a snapshot, all of it true within the last RESYNC_INTERVAL
    seconds before `now`. `idle`: as `counts` gives them."""
    names = [f"env-{env:05}" for env in range(envs)]
    pools = [(f"pool-{pool}", f"group-{pool}") for pool in range(POOLS)]
    places = itertools.product([f"cluster-{cluster:02}" for cluster in range(clusters)], names, pools)
    times = [now - RESYNC_INTERVAL * cluster / clusters for cluster in range(clusters) for _ in range(envs * POOLS)]
    return [
        Capacity(
            cluster,
            namespace,
            name,
            pool,
            group,
            idle=count,
            running=10,
            desired=12,
            autoscaling_enabled=True,
            capacity=5,
            state="Active",
            observed_at=observed_at,
        )
        for (cluster, name, (pool, group)), count, observed_at in zip(places, idle, times, strict=True)
    ]


def configurations(snapshot: Iterable[Capacity]) -> Iterator[tuple[str, bytes]]:
    """What the sink would apply to each env, with the env's name."""
    found: dict[Key, list[Capacity]] = {}
    for record in snapshot:
        found.setdefault((record.namespace, record.env_name), []).append(record)
    for key, records in found.items():
        yield key[1], body(key, segments(records), ALL_FIELDS, SOME_MOMENT, summary=True)


class Place(NamedTuple):
    """Where there is something to write."""

    kubeconfig: Path
    namespace: str
    #: how many there are, and in how many other clusters
    envs: int
    clusters: int

    def fleet(self, number: int, now: float = 0.0) -> list[Capacity]:
        """What is to be seen after the round of that number."""
        return fleet(self.namespace, self.envs, self.clusters, counts(self.envs, self.clusters, number), now)


class Way(Protocol):
    """One way to write."""

    def prepare(self, number: int) -> None:
        """Make ready what the next round needs."""

    def write(self) -> None:
        """Write it."""


class Plain:
    """The HTTP library, from so many threads."""

    def __init__(self, place: Place, threads: int) -> None:
        self.client = http_client(place.kubeconfig)
        self.place = place
        self.root = SANDBOXENVS.path(place.namespace)
        self.threads = ThreadPoolExecutor(threads)
        self.bodies: list[tuple[str, bytes]] = []

    def prepare(self, number: int) -> None:
        """Make the bytes, and connect."""
        self.bodies = list(configurations(self.place.fleet(number + 1)))[:FIRST_WRITES]
        self.write()
        self.bodies = list(configurations(self.place.fleet(number)))

    def write(self) -> None:
        """Send them."""

        def apply(name: str, content: bytes) -> None:
            self.client.patch(
                f"{self.root}/{name}/status", params=PARAMETERS, content=content, headers={"Content-Type": APPLY}
            ).raise_for_status()

        for _ in self.threads.map(apply, *zip(*self.bodies, strict=True)):
            pass


class Official:
    """The official client, one write after the other."""

    def __init__(self, place: Place) -> None:
        # Here, as its thousands of modules are no matter of the other ways.
        from kubernetes import client, config

        config.load_kube_config(str(place.kubeconfig))
        self.api = client.CustomObjectsApi()
        self.place = place
        self.bodies: list[tuple[str, Any]] = []

    def prepare(self, number: int) -> None:
        """Make the objects, and connect."""
        self.bodies = self._objects(number + 1)[:FIRST_WRITES]
        self.write()
        self.bodies = self._objects(number)

    def _objects(self, number: int) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in configurations(self.place.fleet(number))]

    def write(self) -> None:
        """Apply them."""
        for name, applied in self.bodies:
            self.api.patch_namespaced_custom_object_status(
                GROUP, VERSION, self.place.namespace, PLURAL, name, applied,
                field_manager=FIELD_MANAGER, field_validation="Strict", _content_type=APPLY,
            )  # fmt: skip


class Counting:
    """An Api that counts what is written and what watches bring, and that writes only while its gate is open.
    `awaited`: how many of each there will be."""

    def __init__(self, awaited: int) -> None:
        #: when the last one was written, on `time.perf_counter`
        self.last_at = 0.0
        self._awaited = awaited
        self._api: Api
        self.close()

    def close(self) -> None:
        """Close the gate, and count from nothing."""
        self.gate = trio.Event()
        #: as many writes wait at the gate as there may be at a time
        self.crowded = trio.Event()
        self.done = trio.Event()
        self._waiting = self._written = self._events = 0

    def _count(self) -> None:
        if min(self._written, self._events) >= self._awaited:
            self.done.set()

    @asynccontextmanager
    async def over(self, opened: AbstractAsyncContextManager[Api]) -> AsyncIterator[Api]:
        """Itself, on top of another one."""
        async with opened as self._api:
            yield self

    @property
    def server_clock_offset(self) -> float | None:
        """As below."""
        return self._api.server_clock_offset

    async def get(self, path: str, params: Mapping[str, str], *, deadline: float = 10.0) -> Answer:
        """As below."""
        return await self._api.get(path, params, deadline=deadline)

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        """As below, once the gate is open."""
        self._waiting += 1
        if self._waiting == AT_A_TIME:
            self.crowded.set()
        await self.gate.wait()
        answer = await self._api.apply(path, params, body, deadline=deadline)
        self._written += 1
        self.last_at = time.perf_counter()
        self._count()
        return answer

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """As below."""
        async with self._api.stream(path, params, deadline=deadline) as chunks:
            yield self._counted(chunks)

    async def _counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            yield chunk
            self._events += chunk.count(b"\n")
            self._count()


async def run_sink(place: Place) -> None:
    """Our sink, as fast as the server lets it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    options = StatusOptions(
        kubeconfig=str(place.kubeconfig),
        namespaces=(place.namespace,),
        refresh_interval="600s",
        env_interval="100ms",
        writes_per_second=1000,
    )
    context = sink_context()
    counting = Counting(place.envs)
    opening = Opening(options, context)
    sink = KubernetesStatusSink(options, context, connect=lambda: counting.over(opening.connect()))

    async def write(number: int) -> dict[str, float]:
        """One round. It is not part of it how the sink comes to know of the envs and of the schema, nor what `update()`
        takes, which depends on how often an agent has news."""
        counting.close()
        await sink.update(place.fleet(number, context.clock()))
        await counting.crowded.wait()
        gc.collect()
        began, used = time.perf_counter(), cpu_seconds()
        counting.gate.set()
        await counting.done.wait()
        return {"seconds": counting.last_at - began, "cpu": cpu_seconds() - used}

    async with trio.open_nursery() as nursery:
        await nursery.start(sink.run)
        say(ready=True)
        while True:
            message = await trio.to_thread.run_sync(listen)
            say(done=True, **await write(message["round"]))


def main() -> None:
    """Do what is told until nothing more is."""
    way, kubeconfig, namespace, envs, clusters = sys.argv[1:]
    place = Place(Path(kubeconfig), namespace, int(envs), int(clusters))
    if way == "ours":
        trio.run(run_sink, place)
        return
    makers: dict[str, Callable[[], Way]] = {
        "official": lambda: Official(place),
        "httpx": lambda: Plain(place, 1),
        "httpx4": lambda: Plain(place, AT_A_TIME),
    }
    writer = makers[way]()
    say(ready=True)
    while message := listen():
        writer.prepare(message["round"])
        gc.collect()
        began, used = time.perf_counter(), cpu_seconds()
        writer.write()
        say(done=True, seconds=time.perf_counter() - began, cpu=cpu_seconds() - used)


if __name__ == "__main__":
    main()
