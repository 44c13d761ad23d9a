"""The child of the kubernetes benchmark: reads SandboxEnvs from an API server in one of three ways, `ours` (an informer
of the plugin with all that is below it), `json` (the HTTP library, json.loads, and dicts), or `official` (the official
Kubernetes client for Python), and says what that took. All of them end with one row for each member pool.

    python -m benchmarks.kubernetes_readers WAY KUBECONFIG NAMESPACE

It is told "list", or "watch" with a number of events, and answers with seconds, CPU seconds and bytes."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import ssl
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog
import trio
import yaml

from benchmarks.children import listen, say
from benchmarks.measure import resident_bytes
from trio_federation_kubernetes.client import ApiClient
from trio_federation_kubernetes.informer import Informer
from trio_federation_kubernetes.kubeconfig import find
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper
from trio_federation_kubernetes.store import Store

PAGE = 500
GROUP, VERSION, PLURAL = "agents.navix.sh", "v1alpha1", "sandboxenvs"


def cpu_seconds() -> float:
    """Seconds of CPU that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_bytes() -> int:
    """The most memory that this process ever held since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def reset_peak() -> None:
    """Let the peak begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


class CountingStore(Store):
    """Tells when it has taken so many events."""

    awaited = 0
    taken = trio.Event()

    def apply(self, index: int, key: Key, value: Any | None) -> None:
        """One event."""
        super().apply(index, key, value)
        self.awaited -= 1
        if self.awaited == 0:
            self.taken.set()


class ToldClient(ApiClient):
    """Tells when a watch is open."""

    opened = trio.Event()

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str] | None = None, *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """As in the client."""
        async with super().stream(path, params, deadline=deadline) as chunks:
            self.opened.set()
            yield chunks


class Ours:
    """The plugin's own rooms, up to its store."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.access = find(kubeconfig, None, os.environ, clock=time.monotonic, wall=time.monotonic)
        self.namespace = namespace
        self.store: CountingStore | None = None

    def list(self) -> int:
        """How many rows there are."""
        trio.run(self._run, 0, lambda: None)
        assert self.store is not None
        return len(self.store)

    def watch(self, events: int, opened: Callable[[], None]) -> None:
        """Take so many events."""
        trio.run(self._run, events, opened)

    async def _run(self, events: int, opened: Callable[[], None]) -> None:
        mapper = SandboxEnvMapper("west")
        self.store = store = CountingStore(mapper)
        async with ToldClient(self.access, clock=trio.current_time, environment={}) as client:
            informer = Informer(
                client, store, mapper.watched[0],
                index=0, namespace=self.namespace, label_selector="", page_size=PAGE, ttl=30.0,
                clock=trio.current_time, random=random.Random(0), log=structlog.get_logger(), changed=lambda: None,
            )  # fmt: skip
            client.opened = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(informer.run)
                await informer.settled.wait()
                if informer.error is not None:
                    raise informer.error
                if events:
                    store.awaited, store.taken = events, trio.Event()
                    await client.opened.wait()
                    opened()
                    while not store.taken.is_set():
                        store.changes(10_000, lambda _: True)
                        await trio.sleep(0.2)
                nursery.cancel_scope.cancel()


def rows_of(env: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What somebody would write who reads objects as dicts: the rows of one SandboxEnv."""
    for cluster in env.get("status", {}).get("clusters") or ():
        if cluster.get("isLocal"):
            for member in cluster.get("observedMembers") or ():
                yield {
                    "namespace": env["metadata"]["namespace"],
                    "env": env["metadata"]["name"],
                    "pool": member["name"],
                    "group": member.get("scalingGroup", ""),
                    "idle": member.get("idleCount", 0),
                    "running": member.get("runningCount", 0),
                    "pending": member.get("pendingRequests", 0),
                    "desired": member.get("desiredReplicas", 0),
                }


class Dicts:
    """What the ways have in common that keep dicts."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.version = ""

    def take(self, kind: str, env: dict[str, Any]) -> None:
        """One event."""
        key = env["metadata"]["namespace"], env["metadata"]["name"]
        if kind == "DELETED":
            self.rows.pop(key, None)
        else:
            self.rows[key] = list(rows_of(env))

    def count(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.rows.values()))


def http_client(kubeconfig: Path) -> httpx.Client:
    """The HTTP library's own client for the API server, and the certificate, that a kubeconfig holds."""
    document = yaml.safe_load(kubeconfig.read_text())
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    context = ssl.create_default_context(cadata=b64decode(cluster["certificate-authority-data"]).decode())
    with tempfile.NamedTemporaryFile() as file:
        file.write(b64decode(user["client-certificate-data"]) + b64decode(user["client-key-data"]))
        file.flush()
        context.load_cert_chain(file.name)
    return httpx.Client(base_url=cluster["server"], verify=context, timeout=60, trust_env=False)


class Json(Dicts):
    """The HTTP library, json.loads and dicts."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        super().__init__()
        self.client = http_client(kubeconfig)
        self.path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"

    def list(self) -> int:
        """How many rows there are."""
        self.rows = {}
        token = ""
        while True:
            params = {"limit": str(PAGE)} | ({"continue": token} if token else {})
            page = json.loads(self.client.get(self.path, params=params).content)
            for env in page["items"]:
                self.take("ADDED", env)
            token = page["metadata"].get("continue", "")
            if not token:
                self.version = page["metadata"]["resourceVersion"]
                return self.count()

    def watch(self, events: int, opened: Callable[[], None]) -> None:
        """Take so many events."""
        params = {"watch": "1", "resourceVersion": self.version, "allowWatchBookmarks": "true"}
        with self.client.stream("GET", self.path, params=params) as response:
            opened()
            for line in response.iter_lines():
                event = json.loads(line)
                if event["type"] != "BOOKMARK":
                    self.take(event["type"], event["object"])
                    events -= 1
                if events <= 0:
                    return


class Official(Dicts):
    """The official client, as its examples use it for custom objects."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        super().__init__()
        # Here, as its thousands of modules are no matter of the other ways.
        from kubernetes import client, config, watch

        config.load_kube_config(str(kubeconfig))
        self.api = client.CustomObjectsApi()
        self.watches = watch.Watch()
        self.namespace = namespace

    def list(self) -> int:
        """How many rows there are."""
        self.rows = {}
        token = ""
        while True:
            more = {"_continue": token} if token else {}
            page = self.api.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, limit=PAGE, **more)
            for env in page["items"]:
                self.take("ADDED", env)
            token = page["metadata"].get("continue", "")
            if not token:
                self.version = page["metadata"]["resourceVersion"]
                return self.count()

    def watch(self, events: int, opened: Callable[[], None]) -> None:
        """Take so many events."""
        opened()
        stream = self.watches.stream(
            self.api.list_namespaced_custom_object,
            GROUP, VERSION, self.namespace, PLURAL,
            resource_version=self.version,
        )  # fmt: skip
        for event in stream:
            self.take(event["type"], event["object"])
            events -= 1
            if events <= 0:
                return


WAYS: dict[str, Callable[[Path, str], Ours | Json | Official]] = {"ours": Ours, "json": Json, "official": Official}


class Begun:
    """Remembers what was used when something began, and says that it did."""

    used = 0.0

    def now(self) -> None:
        """It begins."""
        self.used = cpu_seconds()
        say(opened=True)


def main() -> None:
    """Do what is told until nothing more is."""
    way, kubeconfig, namespace = sys.argv[1:]
    reader = WAYS[way](Path(kubeconfig), namespace)
    gc.collect()
    say(ready=True)
    while message := listen():
        gc.collect()
        reset_peak()
        before = resident_bytes()
        if message["do"] == "list":
            began, used = time.perf_counter(), cpu_seconds()
            rows = reader.list()
            took, used = time.perf_counter() - began, cpu_seconds() - used
            peak = peak_bytes() - before
            gc.collect()
            say(done=True, rows=rows, seconds=took, cpu=used, peak=peak, kept=resident_bytes() - before)
        else:
            begun = Begun()
            reader.watch(message["events"], begun.now)
            say(done=True, cpu=cpu_seconds() - begun.used)


if __name__ == "__main__":
    main()
