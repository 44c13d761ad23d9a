"""Sources of plugins/kubernetes read from a real API server that is well: paged lists, watches, bookmarks, selectors, a
server's clock and schema, the resources of other projects; under churn, and as the conformance suite wants it. What
happens when the server is not well is `test_faults.py`."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio

from tests.apiserver.cluster import ApiServer
from tests.apiserver.following import (
    SANDBOXENVS_CRD,
    TTL,
    Envs,
    Follower,
    Json,
    bare,
    do,
    following,
    kubeconfig_via,
    made,
    observed,
    patch_status,
    relayed,
    server_time,
    truth,
)
from trio_federation import CapacitySource, Identity, SourceContext
from trio_federation.capacity import change_fault
from trio_federation.testing import Rule, check_capacity_source
from trio_federation_kubernetes import reflector
from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper

WARM = "extensions.agents.x-k8s.io/v1beta1"
KRUISE = "agents.kruise.io/v1alpha1"


@pytest.fixture(scope="module")
def server(api_server: ApiServer) -> ApiServer:
    """The shared server, with SandboxEnvs."""
    api_server.create_crds([SANDBOXENVS_CRD])
    return api_server


@pytest.fixture
def envs(server: ApiServer, namespace: str) -> Envs:
    """SandboxEnvs of this test alone."""
    return Envs(server, namespace)


@pytest.fixture(scope="module")
def strangers(server: ApiServer, shared: Path) -> ApiServer:
    """The shared server, with the resources of other projects."""
    server.create_crds(sorted((shared / "data" / "crds").glob("*.yaml")))
    return server


# What comes


async def test_what_is_there_comes_in_pages_and_what_happens_as_it_happens(envs: Envs) -> None:
    for number in range(7):
        await do(envs.create, f"e{number}", {"p": number})
    async with following("kubernetes", envs.server.kubeconfig, namespaces=[envs.namespace], page_size=3) as follower:
        await follower.until_it_says({(envs.namespace, f"e{number}", "p"): number for number in range(7)})
        await do(envs.observe, "e1", {"p": 10, "q": 11})
        await do(envs.create, "new", {"p": 12})
        await do(envs.delete, "e2", "e3", "e4", "e5", "e6")
        follower.deleted |= {(envs.namespace, f"e{number}") for number in range(2, 7)}
        wanted = {("e0", "p"): 0, ("e1", "p"): 10, ("e1", "q"): 11, ("new", "p"): 12}
        await follower.until_it_says({(envs.namespace, *place): idle for place, idle in wanted.items()})
        assert follower.live
        assert not follower.troubles
        assert (follower.record.lists, len(follower.record.of("page"))) == (1, 2)


async def test_all_namespaces_are_read_with_one_watch(envs: Envs) -> None:
    other = Envs(envs.server, await do(envs.server.namespace))
    # What others leave on the shared server does not count here.
    async with following("kubernetes", envs.server.kubeconfig, label_selector=f"of={envs.namespace}") as follower:
        for number, each in enumerate((envs, other)):
            await do(each.create, "same", {"p": number}, labels={"of": envs.namespace})
        await follower.until_it_says({(envs.namespace, "same", "p"): 0, (other.namespace, "same", "p"): 1})
        paths = {asked.path for asked in follower.record.asked if asked.kind != "uid"}
        assert paths == {"/apis/agents.navix.sh/v1alpha1/sandboxenvs"}
        assert len(follower.record.of("watch")) == 1
        await do(envs.server.delete_namespace, other.namespace)
        await follower.until_it_says({(envs.namespace, "same", "p"): 0})


async def test_a_label_selector_selects(envs: Envs) -> None:
    await do(envs.create, "blue", {"p": 1}, labels={"team": "blue"})
    await do(envs.create, "red", {"p": 2}, labels={"team": "red"})
    await do(envs.create, "none", {"p": 3})
    async with following(
        "kubernetes", envs.server.kubeconfig, namespaces=[envs.namespace], label_selector="team in (blue, green)"
    ) as follower:
        await follower.until_it_says({(envs.namespace, "blue", "p"): 1})
        await do(envs.label, "red", team="green")
        await follower.until_it_says({(envs.namespace, "blue", "p"): 1, (envs.namespace, "red", "p"): 2})
        await do(envs.label, "blue", team="grey")
        await do(envs.observe, "blue", {"p": 4})
        await follower.until_it_says({(envs.namespace, "red", "p"): 2})
        # It was not deleted, and so may be there again.
        await do(envs.label, "blue", team="blue")
        await follower.until_it_says({(envs.namespace, "blue", "p"): 4, (envs.namespace, "red", "p"): 2})
        assert follower.record.lists == 1


async def test_any_text_travels(envs: Envs) -> None:
    """Line separators of Unicode are none of the protocol's, and long objects come in many chunks."""
    text = "é\u2028\u0085\u2029☃\\n\"'" * 9000
    async with following("kubernetes", envs.server.kubeconfig, namespaces=[envs.namespace]) as follower:
        await do(envs.create, "a", {"p": 1}, annotations={"text": text})
        await do(envs.create, "b", {"p": 2})
        await follower.until_it_says({(envs.namespace, "a", "p"): 1, (envs.namespace, "b", "p"): 2})
        assert len(follower.record.of("watch")) == 1


async def test_a_saturated_pool_is_so_by_the_clock_of_the_server(envs: Envs) -> None:
    """The source's own clock begins anywhere, and both of them go on."""
    until = await do(server_time, envs.server) + timedelta(seconds=500)
    await do(envs.create, "e", {})
    await do(envs.observe, "e", {"p": 0}, saturatedUntil=until.isoformat(), autoscalingEnabled=True)
    async with following(
        "kubernetes",
        envs.server.kubeconfig,
        namespaces=[envs.namespace],
        clock=lambda: trio.current_time() - 1e6,
    ) as follower:
        await follower.until_it_says({(envs.namespace, "e", "p"): 0})
        assert follower.collected is not None
        (record,) = follower.collected.values()
        assert record.autoscaling_enabled
        rest = (until - await do(server_time, envs.server)).total_seconds()
        # Headers have whole seconds, and a busy machine takes its time between the two.
        assert rest - 2 <= record.saturated_for <= rest + 10
        await do(envs.observe, "e", {"p": 1}, saturatedUntil=(until - timedelta(seconds=1000)).isoformat())
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        (record,) = follower.collected.values()
        assert record.saturated_for == 0


# How a watch goes on


async def test_bookmarks_move_a_quiet_watch_and_a_watch_that_ends_is_taken_up_again(
    envs: Envs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server sends a bookmark every minute, and one shortly before it ends a watch.
    monkeypatch.setattr(reflector, "WATCH_TIMEOUT", (3, 3))
    await do(envs.create, "e", {"p": 1})
    async with following("kubernetes", envs.server.kubeconfig, namespaces=[envs.namespace]) as follower:
        record = follower.record
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        elsewhere = Envs(envs.server, await do(envs.server.namespace))

        def moved() -> bool:
            """Whether a watch that has brought nothing but bookmarks has led to one from another version."""
            watches = record.of("watch")
            return any(
                before.bookmarks and set(before.events) == {"BOOKMARK"} and after.version != before.version
                for before, after in itertools.pairwise(watches)
            )

        # The server's version moves on with every object, whose ever it is.
        await do(elsewhere.create, "other", {"p": 1})
        await follower.until(moved)
        await do(envs.observe, "e", {"p": 2})
        await follower.until_it_says({(envs.namespace, "e", "p"): 2})
        await follower.until(lambda: len(record.of("watch")) >= 3)
        for before, after in itertools.pairwise(record.of("watch")):
            assert before.error is None
            if before.bookmarks and before.events["BOOKMARK"] == before.events.total():
                assert after.version == before.bookmarks[-1]
        assert record.lists == 1
        assert follower.longest_gap < TTL / 2
        assert not follower.withdrawn
        await do(envs.server.delete_namespace, elsewhere.namespace)


# Under churn


class Churn:
    """Creates, changes and deletes SandboxEnvs of one namespace, without a pause, in several threads."""

    WRITERS = 4

    def __init__(self, envs: Envs, deleted: set[tuple[str, str]]) -> None:
        self.envs = envs
        #: what was deleted is noted here
        self.deleted = deleted
        #: how many requests have changed something
        self.writes = 0
        self._alive: list[list[str]] = [[] for _ in range(self.WRITERS)]
        self._numbers = itertools.count()
        self._over = threading.Event()

    async def create(self, count: int) -> None:
        """Create so many envs."""
        parts = [len(range(part, count, self.WRITERS)) for part in range(self.WRITERS)]

        def work(part: int, client: httpx.Client) -> None:
            for _ in range(parts[part]):
                self._create(part, client)

        await self._each(work)

    async def run(self, seconds: float) -> None:
        """Go on for so long, with about as many envs as there were."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._each, self._churn)
            try:
                await trio.sleep(seconds)
            finally:
                self._over.set()

    async def _each(self, work: Callable[[int, httpx.Client], object]) -> None:
        def run(part: int) -> None:
            with self.envs.server.client() as client:
                work(part, client)

        async with trio.open_nursery() as nursery:
            for part in range(self.WRITERS):
                nursery.start_soon(trio.to_thread.run_sync, run, part)

    def _churn(self, part: int, client: httpx.Client) -> None:
        random = Random(part)
        alive = self._alive[part]
        target = len(alive)
        while not self._over.is_set():
            if random.random() < 0.7:
                self._observe(random, client, random.choice(alive))
            elif random.random() * 2 * target > len(alive):
                self._create(part, client)
            else:
                self._delete(client, alive.pop(random.randrange(len(alive))))

    def _create(self, part: int, client: httpx.Client) -> None:
        name = f"env-{next(self._numbers)}"
        body = {"apiVersion": "agents.navix.sh/v1alpha1", "kind": "SandboxEnv", "metadata": {"name": name}, "spec": {}}
        self._done(client.post(self.envs.root, json=body))
        self._alive[part].append(name)

    def _observe(self, random: Random, client: httpx.Client, name: str) -> None:
        idle = {f"p{number}": random.randrange(100) for number in range(random.randint(0, 3))}
        self._done(
            client.patch(
                f"{self.envs.root}/{name}/status",
                json={"status": observed(idle)},
                headers={"Content-Type": "application/merge-patch+json"},
            )
        )

    def _delete(self, client: httpx.Client, name: str) -> None:
        self._done(client.delete(f"{self.envs.root}/{name}"))
        self.deleted.add((self.envs.namespace, name))

    def _done(self, answer: httpx.Response) -> None:
        assert answer.is_success, answer.text
        self.writes += 1


@pytest.mark.parametrize(
    "count, seconds", [(2_000, 20.0), pytest.param(10_000, 60.0, marks=pytest.mark.soak)], ids=["2000", "10000"]
)
async def test_after_churn_everything_is_as_a_fresh_list_has_it(
    count: int, seconds: float, envs: Envs, record_property: Callable[[str, object], None]
) -> None:
    deleted: set[tuple[str, str]] = set()
    churn = Churn(envs, deleted)
    await churn.create(count)
    async with following("kubernetes", envs.server.kubeconfig, namespaces=[envs.namespace], page_size=150) as follower:
        follower.deleted = deleted
        await follower.until(lambda: len(follower.pushed) == count)
        record = follower.record
        assert (record.lists, len(record.of("page"))) == (1, -(-count // 150) - 1)
        writes_before = churn.writes
        await churn.run(seconds)
        wanted = await do(truth, envs.server, SandboxEnvMapper("west"), envs.namespace)

        def settled() -> bool:
            return follower.collected is not None and wanted == follower.pushed == _bare(follower)

        await follower.until(settled, within=60)
        events = sum((asked.events for asked in record.of("watch")), start=record.of("watch")[0].events.__class__())
        record_property("writes", churn.writes - writes_before)
        record_property("events", dict(events))
        # It was busy, and every kind of change has come.
        assert churn.writes - writes_before > 20 * seconds
        assert min(events["ADDED"], events["MODIFIED"], events["DELETED"]) > seconds
        assert len(deleted) > seconds
        # Nothing but a version that is gone makes it list again, and nothing has made it go dark.
        assert record.lists == 1 + record.gone
        assert follower.longest_gap < TTL / 2
        assert not follower.troubles


def _bare(follower: Follower) -> dict[Identity, Any]:
    assert follower.collected is not None
    return {identity: bare(each) for identity, each in follower.collected.items()}


# The resources of other projects


def make(server: ApiServer, api_version: str, kind: str, plural: str, namespace: str, name: str, spec: Json) -> str:
    """Make an object. Returns its path."""
    root = f"/apis/{api_version}/namespaces/{namespace}/{plural}"
    server.call("POST", root, {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec})
    return f"{root}/{name}"


def warm_pool(server: ApiServer, namespace: str, name: str, ready: int, **spec: object) -> str:
    """Make a SandboxWarmPool with so many sandboxes ready. Returns its path."""
    spec = {"sandboxTemplateRef": {"name": "python"}, **spec}
    path = make(server, WARM, "SandboxWarmPool", "sandboxwarmpools", namespace, name, spec)
    patch_status(server, path, {"readyReplicas": ready})
    return path


def claim(server: ApiServer, namespace: str, name: str, pool: str) -> str:
    """Make a SandboxClaim on a warm pool. Returns its path."""
    spec = {"warmPoolRef": {"name": pool}}
    return make(server, WARM, "SandboxClaim", "sandboxclaims", namespace, name, spec)


def sandbox_set(server: ApiServer, namespace: str, name: str, available: int, replicas: int) -> str:
    """Make a SandboxSet with so many sandboxes available. Returns its path."""
    spec = {"replicas": replicas, "templateRef": {"name": "python"}}
    path = make(server, KRUISE, "SandboxSet", "sandboxsets", namespace, name, spec)
    status = {"availableReplicas": available, "replicas": available, "observedGeneration": 1, "updateRevision": "1"}
    patch_status(server, path, status | {"updatedReplicas": available, "updatedAvailableReplicas": available})
    return path


async def test_warm_pools_are_read_with_the_claims_on_them(strangers: ApiServer, namespace: str) -> None:
    await do(warm_pool, strangers, namespace, "a", 4, replicas=5)
    await do(warm_pool, strangers, namespace, "b", 2)
    bound = await do(claim, strangers, namespace, "bound", "a")
    await do(patch_status, strangers, bound, {"sandbox": {"name": "s-1"}})
    async with following("warmpool", strangers.kubeconfig, namespaces=[namespace]) as follower:

        def counts() -> dict[str, tuple[int, int, int, int]]:
            return {
                each.member_pool: (each.idle, each.running, each.pending, each.desired)
                for each in (follower.collected or {}).values()
                if (each.namespace, each.env_name) == (namespace, "python")
            }

        def pushed() -> dict[str, tuple[int, int, int, int]]:
            return {
                each.member_pool: (each.idle, each.running, each.pending, each.desired)
                for each in follower.pushed.values()
            }

        await follower.until(lambda: counts() == pushed() == {"a": (4, 1, 0, 5), "b": (2, 0, 0, 1)})
        waiting = await do(claim, strangers, namespace, "waiting", "a")
        await follower.until(lambda: counts() == pushed() == {"a": (4, 1, 1, 5), "b": (2, 0, 0, 1)})
        await do(patch_status, strangers, waiting, {"sandbox": {"name": "s-2"}})
        await do(strangers.call, "DELETE", bound)
        await follower.until(lambda: counts() == pushed() == {"a": (4, 1, 0, 5), "b": (2, 0, 0, 1)})
        await do(strangers.call, "DELETE", f"/apis/{WARM}/namespaces/{namespace}/sandboxwarmpools/b")
        await follower.until(lambda: counts() == pushed() == {"a": (4, 1, 0, 5)})
        assert follower.record.lists == 2


async def test_sandbox_sets_are_read(strangers: ApiServer, namespace: str) -> None:
    path = await do(sandbox_set, strangers, namespace, "s", 3, 4)
    async with following("sandboxset", strangers.kubeconfig, namespaces=[namespace]) as follower:
        await follower.until_it_says({(namespace, "python", "s"): 3})
        (record,) = follower.pushed.values()
        assert record.desired == 4
        await do(patch_status, strangers, path, {"availableReplicas": 0})
        await follower.until_it_says({(namespace, "python", "s"): 0})
        await do(strangers.call, "DELETE", path)
        await follower.until_it_says({})


# Any resource, by a table of paths


class RunnerPools:
    """A resource of one test alone, whose status has a count that may be a text."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path) -> None:
        self.server = server
        self.namespace = namespace
        self.group = f"{namespace}.example"
        self.name = f"runnerpools.{self.group}"
        self._file = folder / "definition.yaml"

    @property
    def options(self) -> Json:
        """Those of a source that reads them as they are defined at first."""
        resource: Json = {"group": self.group, "version": "v1", "resource": "runnerpools"}
        fields = {"env": "spec.image", "idle": "status.free", "running": "status.busy", "desired": "spec.size"}
        return {**resource, "fields": fields, "namespaces": [self.namespace]}

    def define(self, free: str = "free") -> None:
        """Define the resource, or define it anew. `free`: how the count is called."""
        count = {"x-kubernetes-int-or-string": True, "nullable": True}
        properties = {
            "spec": {"type": "object", "properties": {"image": {"type": "string"}, "size": {"type": "integer"}}},
            "status": {"type": "object", "properties": {free: count, "busy": {"type": "integer"}}},
        }
        version = {
            "name": "v1",
            "served": True,
            "storage": True,
            "subresources": {"status": {}},
            "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
        }
        definition = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": self.name},
            "spec": {
                "group": self.group,
                "scope": "Namespaced",
                "names": {"plural": "runnerpools", "singular": "runnerpool", "kind": "RunnerPool"},
                "versions": [version],
            },
        }
        self._file.write_text(json.dumps(definition))
        self.server.create_crds([self._file])

    def make(self, name: str, status: Json) -> str:
        """Make one. Returns its path."""
        spec = {"image": f"image-{name}", "size": 9}
        path = make(self.server, f"{self.group}/v1", "RunnerPool", "runnerpools", self.namespace, name, spec)
        patch_status(self.server, path, status)
        return path


@pytest.fixture
def pools(server: ApiServer, namespace: str, tmp_path: Path) -> RunnerPools:
    """A resource of this test alone, which is not defined yet."""
    return RunnerPools(server, namespace, tmp_path)


async def test_counts_may_be_texts_where_the_schema_lets_them_and_a_bad_one_costs_its_pool_alone(
    pools: RunnerPools,
) -> None:
    await do(pools.define)
    for name, free in {"number": 3, "text": "4", "percent": "10%", "quantity": "500m", "null": None}.items():
        await do(pools.make, name, {"free": free, "busy": 1})
    await do(pools.make, "absent", {})
    bad = ["image-percent", "image-quantity"]
    async with following("crd", pools.server.kubeconfig, spoilt=bad, **pools.options) as follower:

        def good() -> dict[str, tuple[int, int, int]]:
            found = (follower.collected or {}).values()
            return {
                each.member_pool: (each.idle, each.running, each.desired)
                for each in found
                if change_fault(each) is None
            }

        wanted = {"number": (3, 1, 9), "text": (4, 1, 9), "null": (0, 1, 9), "absent": (0, 0, 9)}
        await follower.until(lambda: good() == wanted)
        assert follower.collected is not None
        faults = {each.member_pool: change_fault(each) for each in follower.collected.values()}
        assert {pool: fault.reason for pool, fault in faults.items() if fault is not None} == {
            "percent": "idle",
            "quantity": "idle",
        }
        path = f"/apis/{pools.group}/v1/namespaces/{pools.namespace}/runnerpools/percent"
        await do(patch_status, pools.server, path, {"free": "10"})
        await follower.until(lambda: good() == wanted | {"percent": (10, 1, 9)})
        assert not follower.troubles


async def test_a_path_that_the_schema_does_not_have_is_told_until_the_definition_has_it(pools: RunnerPools) -> None:
    await do(pools.define, "freed")
    path = await do(pools.make, "a", {"freed": 3})
    async with following("crd", pools.server.kubeconfig, **pools.options) as follower:
        await follower.until(lambda: follower.reasons() == ["schema"])
        (trouble,) = follower.troubles
        assert trouble.detail == (
            f"{pools.name}: fields.idle 'status.free': status has no field 'free'; "
            'did you mean "status.freed"?; correct [source.fields]'
        )
        # Nothing is known, and nothing was asked for.
        assert not follower.live
        assert follower.collected is None
        assert {asked.kind for asked in follower.record.asked} == {"schema", "uid"}
        await do(pools.define)
        await do(patch_status, pools.server, path, {"free": 5})
        await follower.until_it_says({(pools.namespace, "image-a", "a"): 5})
        assert not follower.troubles


async def test_a_resource_of_the_server_itself_can_be_read(server: ApiServer, namespace: str) -> None:
    """Its schemas are put together from others, and its counts are in a group of the server's own."""
    fields = {"idle": "status.readyReplicas", "desired": "spec.replicas"}
    options: Json = {"group": "apps", "version": "v1", "resource": "replicasets", "namespaces": [namespace]}
    labels = {"app": "a"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "none"}]}}
    spec = {"replicas": 3, "selector": {"matchLabels": labels}, "template": pod}
    path = await do(make, server, "apps/v1", "ReplicaSet", "replicasets", namespace, "r", spec)
    await do(patch_status, server, path, {"replicas": 2, "readyReplicas": 2})
    async with following("crd", server.kubeconfig, fields=fields, **options) as follower:
        await follower.until_it_says({(namespace, "r", "r"): 2})
        (record,) = follower.pushed.values()
        assert record.desired == 3
    await do(server.call, "DELETE", path)
    wrong = {**fields, "idle": "status.readyReplica"}
    async with following("crd", server.kubeconfig, fields=wrong, **options) as follower:
        await follower.until(lambda: follower.reasons() == ["schema"])
        assert 'did you mean "status.readyReplicas"?' in follower.troubles[0].detail


# What every source must do


class Subject:
    """Objects of one type of source, for the conformance suite: how they are made, changed and removed."""

    def __init__(self, kind: str, server: ApiServer, namespace: str, pools: RunnerPools) -> None:
        self.kind = kind
        self.server = server
        self.namespace = namespace
        self.options: Json = {"namespaces": [namespace]}
        self.paths: list[str] = []
        self._numbers = itertools.count(10)
        match kind:
            case "kubernetes":
                envs = Envs(server, namespace)
                for name in ("a", "b"):
                    envs.create(name, {"p": 1, "q": 2})
                    self.paths.append(f"{envs.root}/{name}")
            case "warmpool":
                self.paths = [warm_pool(server, namespace, name, 1) for name in ("a", "b")]
                claim(server, namespace, "c", "a")
            case "sandboxset":
                self.paths = [sandbox_set(server, namespace, name, 1, 2) for name in ("a", "b")]
            case "crd":
                pools.define()
                self.options = pools.options
                self.paths = [pools.make(name, {"free": 1}) for name in ("a", "b")]

    def change(self) -> None:
        """Another count of the first object."""
        count = next(self._numbers)
        status: dict[str, Json] = {
            "kubernetes": observed({"p": count, "q": 2}),
            "warmpool": {"readyReplicas": count},
            "sandboxset": {"availableReplicas": count},
            "crd": {"free": count},
        }
        patch_status(self.server, self.paths[0], status[self.kind])

    def remove(self) -> None:
        """The last object is gone."""
        self.server.call("DELETE", self.paths.pop())


@pytest.mark.parametrize("kind", ["kubernetes", "warmpool", "sandboxset", "crd"])
async def test_every_type_does_what_an_agent_relies_on(
    kind: str, server: ApiServer, namespace: str, pools: RunnerPools, request: pytest.FixtureRequest
) -> None:
    if kind in ("warmpool", "sandboxset"):
        request.getfixturevalue("strangers")
    subject = await do(Subject, kind, server, namespace, pools)
    async with relayed(server) as relay:
        kubeconfig = kubeconfig_via(relay.port, server.kubeconfig)

        @contextmanager
        def breaks() -> Iterator[None]:
            relay.cut()
            yield
            relay.mend()

        def make_source(context: SourceContext) -> CapacitySource:
            source, _ = made(kind, kubeconfig, replace(context, ttl=TTL), **copy.deepcopy(subject.options))
            return source

        report = await check_capacity_source(
            make_source,
            change=subject.change,
            remove=subject.remove,
            # How a break is dealt with is the same for all that do not look at a schema.
            breaks=breaks if kind in ("kubernetes", "crd") else None,
            deadline=20.0,
        )
    broken = {Rule.FAILURE, Rule.RECOVERY} if kind in ("warmpool", "sandboxset") else set()
    # The one needs simulated time.
    assert set(Rule) - set(report.checked) == {Rule.DETERMINISTIC} | broken
