"""A sink that is run as an agent runs it, against a real API server, and looked at all the time: what it writes, what
its troubles are, and what stands in the envs then. Also the others that write to the same envs: the controller that
owns them, and rivals. What is right is mostly up to the tests; what must never be written is checked here, whatever the
test (see `Mirror`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec
import trio

from tests.apiserver.cluster import ServerError
from tests.apiserver.following import LOOK_EVERY, PATIENCE, Asked, Envs, Json, Record, do
from trio_federation import Capacity, SinkContext, Trouble
from trio_federation.capacity import fault
from trio_federation.testing import sink_context
from trio_federation_kubernetes import SINK_TYPES
from trio_federation_kubernetes.sink import KubernetesStatusSink

#: as the sink is known to the API server
MANAGER = "trio-federation"
#: what every write says of itself: not forced, and refused where a field is unknown
PARAMETERS = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
#: the cluster of the API server
OWN = "west"

#: cluster to pool to how many are idle there
Foreign: TypeAlias = dict[str, dict[str, int]]


class Written(Envs):
    """The SandboxEnvs of one namespace, which several write to. Everything takes a moment: see `do`."""

    def make(self, *names: str, idle: int | None = 2, **metadata: object) -> None:
        """Make some, of which the controller says so many are idle in the pool "own", or (None) nothing yet."""

        def make(name: str) -> None:
            found = {"name": name, **metadata}
            body = {"apiVersion": "agents.navix.sh/v1alpha1", "kind": "SandboxEnv", "metadata": found, "spec": {}}
            self.server.call("POST", self.root, body, {"fieldManager": "owner"})
            if idle is not None:
                self.merge(name, {"idleReplicas": idle, "clusters": [local(idle)]})

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(make, names))

    def get(self, name: str) -> Json:
        """One of them, as it is now."""
        return self.server.call("GET", f"{self.root}/{name}")

    def all(self) -> list[Json]:
        """All of them, as they are now."""
        found: list[Json] = self.server.call("GET", self.root)["items"]
        return found

    def merge(self, name: str, status: Json, manager: str = "controller") -> Json:
        """Merge this into a status, as most controllers do: lists are replaced. The env as it is then."""
        return self._patch(name, {"status": status}, "application/merge-patch+json", {"fieldManager": manager})

    def apply(self, name: str, status: Json, manager: str, *, force: bool = False) -> Json:
        """Apply this as a status. The env as it is then. Raises ServerError, with 409 where it is somebody else's."""
        parameters = {"fieldManager": manager} | ({"force": "true"} if force else {})
        body = {
            "apiVersion": "agents.navix.sh/v1alpha1",
            "kind": "SandboxEnv",
            "metadata": {"name": name, "namespace": self.namespace},
            "status": status,
        }
        return self._patch(name, body, "application/apply-patch+yaml", parameters)

    def _patch(self, name: str, body: Json, kind: str, parameters: Mapping[str, str]) -> Json:
        path = f"{self.root}/{name}/status"
        headers = {"Content-Type": kind}
        answer = self.server.admin.patch(path, params=parameters, content=json.dumps(body).encode(), headers=headers)
        if answer.is_error:
            raise ServerError(f"{path}: {answer.text}", answer.status_code)
        found: Json = answer.json()
        return found

    def foreign(self, name: str) -> Foreign:
        """What is idle elsewhere by what one of them says."""
        return foreign(self.get(name))


def local(idle: int, seen: str = "2026-01-01T00:00:00Z") -> Json:
    """The local entry of an env: the pool "own", seen at that time with so many idle."""
    member = {"name": "own", "idleCount": idle, "runningCount": 1, "desiredReplicas": idle + 1}
    return {"clusterID": OWN, "isLocal": True, "lastSnapshotTime": seen, "observedMembers": [member]}


def strange(cluster: str, idle: int, **more: object) -> Json:
    """An entry of another cluster that somebody else writes: the pool "theirs", with so many idle."""
    return {
        "clusterID": cluster,
        "isLocal": False,
        "observedMembers": [{"name": "theirs", "idleCount": idle}],
        **more,
    }


def entries(env: Json) -> dict[str, Json]:
    """What stands in status.clusters, by cluster, each of which must be there once."""
    listed = env.get("status", {}).get("clusters", [])
    found = {entry["clusterID"]: entry for entry in listed}
    assert len(found) == len(listed), listed
    return found


def foreign(env: Json) -> Foreign:
    """What is idle elsewhere by what an env says."""
    return {
        cluster: {member["name"]: member["idleCount"] for member in entry.get("observedMembers", ())}
        for cluster, entry in entries(env).items()
        if not entry.get("isLocal")
    }


def summary(env: Json) -> tuple[int, int] | None:
    """How many clusters and how many idle sandboxes stand in status.federation; None where it is not there."""
    found = env.get("status", {}).get("federation")
    return None if found is None else (found["clusters"], found["idleReplicas"])


def managed(env: Json, *managers: str) -> str:
    """What the server has noted of what these managers own, byte for byte; of all others than the sink by default."""
    kept = [
        each
        for each in env["metadata"].get("managedFields", ())
        if (each["manager"] in managers if managers else each["manager"] != MANAGER)
    ]
    return json.dumps(sorted(kept, key=lambda each: (each["manager"], each["operation"])), sort_keys=True)


def owned(env: Json, manager: str = MANAGER) -> set[str]:
    """The fields that a manager owns, as paths: "clusters/east/isLocal". A "." at the end is the thing itself."""
    found: set[str] = set()
    for each in env["metadata"].get("managedFields", ()):
        if each["manager"] == manager:
            assert each["subresource"] == "status"
            assert each["fieldsV1"].keys() <= {"f:status"}
            found |= _leaves(each["fieldsV1"]["f:status"])
    return found


def _leaves(fields: Json, path: str = "") -> set[str]:
    found = set()
    for name, below in fields.items():
        if name.startswith("k:"):
            (name,) = json.loads(name[2:]).values()
        step = path + name.removeprefix("f:")
        found |= _leaves(below, f"{step}/") if below else {step}
    return found


def values(env: Json, manager: str) -> dict[str, object]:
    """What stands in the fields of a status that a manager owns, by their paths as in `owned`; things themselves left
    out."""
    found = {}
    for path in owned(env, manager):
        at: Any = env["status"]
        if path.endswith("."):
            continue
        for step in path.split("/"):
            if isinstance(at, list):
                at = next(each for each in at if step in (each.get("clusterID"), each.get("name")))
            else:
                at = at[step]
        found[path] = at
    return found


def pool(env: str, cluster: str, name: str = "p", idle: int = 0, **more: Any) -> Capacity:
    """What a cluster has of an env in one of its pools. The namespace, and when it was known, are added by who shows
    it."""
    return Capacity(cluster, "", env, name, idle=idle, **more)


class Mirror:
    """What is known of a sink that runs.

    Checked with each request, and raised as AssertionError where it is not so:
    - It lists, watches, asks for the schema, and applies, and nothing else.
    - What it applies goes to the status of an env, under the sink's name, unforced, and strictly checked.
    - It holds nothing but entries of other clusters, each once, and the summary; nothing in it is empty.
    - After a write that was done, the same env is not written again before the interval of the options is over."""

    def __init__(self, sink: KubernetesStatusSink, record: Record, context: SinkContext, namespace: str) -> None:
        self.sink = sink
        self.record = record
        self.context = context
        self.namespace = namespace
        #: seconds
        self.env_interval = 0.0
        self.troubles: Sequence[Trouble] = ()
        #: the reasons that its troubles have had
        self.ever: set[str] = set()
        #: awaited before each write; what it raises is what the sink gets
        self.before: Callable[[Asked], Awaitable[None]] | None = None
        #: set after each look
        self._looked = trio.Event()
        #: writes of envs that are there no more
        self._forgotten: set[Asked] = set()
        record.before = self._before

    def __str__(self) -> str:
        asked = "\n  ".join(str(each) for each in self.record.asked[-12:])
        return f"troubles: {list(self.troubles)}, now: {trio.current_time():.2f}; asked for:\n  {asked}"

    # What it is told.

    def stamped(self, *records: Capacity) -> list[Capacity]:
        """Records with the namespace of the test, known now where they do not say."""
        now = self.context.clock()
        found = [
            replace(
                each,
                namespace=each.namespace or self.namespace,
                observed_at=now if each.observed_at is None else each.observed_at,
            )
            for each in records
        ]
        assert not (faults := list(filter(None, map(fault, found)))), faults
        return sorted(found, key=lambda record: record.sort_key)

    async def show(self, *records: Capacity) -> None:
        """Tell it that these records, and no others, are all that is known."""
        with trio.fail_after(PATIENCE):
            await self.sink.update(self.stamped(*records))

    def forget(self, env: str) -> None:
        """An env was deleted: what comes under its name is another one, which may be written at once."""
        self._forgotten.update(self.writes(env))

    # What it does.

    def writes(self, env: str | None = None) -> list[Asked]:
        """What it has written, or tried to, to one env or to all."""
        return [each for each in self.record.of("apply") if env is None or env_of(each) == env]

    def written(self, env: str | None = None) -> list[Asked]:
        """What has worked of that."""
        return [each for each in self.writes(env) if each.answered]

    def reasons(self) -> list[str]:
        """Why it does not show everything."""
        return [trouble.reason for trouble in self.troubles]

    async def until(self, is_so: Callable[[], object], within: float = PATIENCE) -> None:
        """Wait until `is_so`. Raises AssertionError after so many seconds."""
        with trio.move_on_after(within):
            while not is_so():
                await self._looked.wait()
            return
        raise AssertionError(f"not so within {within:g} s: {self}")

    async def until_env(
        self, envs: Written, name: str, is_so: Callable[[Json], object], within: float = PATIENCE
    ) -> Json:
        """Wait until an env is so; the env. Raises AssertionError after so many seconds."""
        found: Json = {}
        with trio.move_on_after(within):
            while True:
                found = await do(envs.get, name)
                if is_so(found):
                    return found
                await trio.sleep(LOOK_EVERY)
        raise AssertionError(f"{name} is not so within {within:g} s, but {found.get('status')}; {self}")

    async def until_shown(self, envs: Written, name: str, wanted: Foreign, within: float = PATIENCE) -> Json:
        """Wait until an env says that so many are idle elsewhere, and has a summary of it; the env."""
        idle = sum(count for pools in wanted.values() for count in pools.values())
        told = (len(wanted), idle) if wanted else None
        return await self.until_env(
            envs, name, lambda env: foreign(env) == wanted and summary(env) == told, within=within
        )

    async def until_quiet(self, seconds: float = 0.5) -> None:
        """Wait until it has not written anything for so long."""
        with trio.fail_after(PATIENCE):
            count = -1
            while count != len(self.writes()):
                count = len(self.writes())
                await trio.sleep(seconds)

    async def look(self) -> NoReturn:
        """Ask for its troubles again and again, as an agent does, and more often."""
        while True:
            self.troubles = self.sink.troubles()
            self.ever.update(self.reasons())
            self._looked.set()
            self._looked = trio.Event()
            await trio.sleep(LOOK_EVERY)

    async def _before(self, asked: Asked) -> None:
        assert asked.kind in ("list", "page", "watch", "probe", "schema", "apply"), asked
        if asked.kind != "apply":
            return
        assert dict(asked.params) == PARAMETERS
        body = json.loads(asked.body)
        env = env_of(asked)
        check_body(body)
        assert asked.path.endswith(f"/namespaces/{body['metadata']['namespace']}/sandboxenvs/{env}/status")
        for each in reversed(self.writes(env)):
            if each is not asked and each.path == asked.path and each.answered and each not in self._forgotten:
                pause = asked.at - each.at
                assert pause >= self.env_interval - 0.005, f"{pause:.3f} s between two writes of {env}"
                break
        if self.before is not None:
            await self.before(asked)


def env_of(asked: Asked) -> str:
    """The name of the env that is written."""
    return asked.path.split("/")[-2]


def check_body(body: Json) -> None:
    """See that what is applied is what the sink may apply."""
    assert body.keys() - {"status"} == {"apiVersion", "kind", "metadata"}, body
    assert (body["apiVersion"], body["kind"]) == ("agents.navix.sh/v1alpha1", "SandboxEnv")
    assert body["metadata"].keys() == {"name", "namespace"}, body
    if "status" not in body:
        return
    assert body["status"].keys() <= {"clusters", "federation"}
    assert not _empty(body["status"]), body
    names = [entry["clusterID"] for entry in body["status"]["clusters"]]
    # Another order would be another list.
    assert names == sorted(set(names))
    assert OWN not in names
    assert all(entry["isLocal"] is False for entry in body["status"]["clusters"])


def _empty(value: object) -> bool:
    """Whether there is an empty object or list in it, or null."""
    if isinstance(value, dict):
        return not value or any(map(_empty, value.values()))
    if isinstance(value, list):
        return not value or any(map(_empty, value))
    return value is None


@asynccontextmanager
async def mirroring(
    envs: Written,
    kubeconfig: Path | None = None,
    *,
    ttl: float = 120.0,
    is_reporter: Callable[[], bool | None] = lambda: True,
    env_interval: float = 0.1,
    **options: object,
) -> AsyncIterator[Mirror]:
    """A sink for the envs of a namespace, with these options, which runs until the block ends. Where nothing else is
    said, it may write without much of a pause.

    `kubeconfig`: by default that of somebody who may do everything. `ttl` in seconds."""
    context = sink_context(ttl=ttl, cluster_id=OWN, is_reporter=is_reporter)
    table = {
        "kubeconfig": str(kubeconfig or envs.server.kubeconfig),
        "namespaces": [envs.namespace],
        "writes_per_second": 1000,
        "env_interval": f"{env_interval * 1000:.0f}ms",
        **options,
    }
    (offered,) = SINK_TYPES
    assert offered.name == "kubernetes-status"
    sink = offered.create(msgspec.convert(table, offered.options), context)
    assert isinstance(sink, KubernetesStatusSink)
    record = Record()
    connect = sink._connect
    sink._connect = lambda: record.over(connect())
    mirror = Mirror(sink, record, context, envs.namespace)
    mirror.env_interval = env_interval
    async with trio.open_nursery() as nursery:
        await nursery.start(sink.run)
        nursery.start_soon(mirror.look)
        yield mirror
        nursery.cancel_scope.cancel()
    await sink.aclose()
