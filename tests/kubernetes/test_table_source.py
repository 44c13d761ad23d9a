"""Sources of type "crd" against an API server in memory: the table of paths is held against the resource's schema
before anything is told, and again until it is good; a server without a schema is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.kubernetes.fake_api import FakeServer
from tests.kubernetes.test_source import SLACK, TTL, agent_of, idle_of, running, shown, told, troubles
from tests.kubernetes.waiting import within
from trio_federation import SourceContext
from trio_federation.testing import source_context
from trio_federation_kubernetes.errors import KubernetesError
from trio_federation_kubernetes.opening import DOCUMENT_DEADLINE, LONGEST_SCHEMA_PAUSE
from trio_federation_kubernetes.options import CrdOptions
from trio_federation_kubernetes.resources import Resource
from trio_federation_kubernetes.source import TableSource

pytestmark = pytest.mark.usefixtures("logs")

RUNNERPOOLS = Resource("pools.example.com", "v1", "runnerpools")
OPENAPI = "/openapi/v3/apis/pools.example.com/v1"
GROUP_VERSION_KIND = {"group": "pools.example.com", "version": "v1", "kind": "RunnerPool"}
COUNT = {"type": "integer"}


def schema(**status: dict[str, Any]) -> dict[str, Any]:
    """What the server says of the resource: an object whose status has these fields."""
    pool = {
        "type": "object",
        "x-kubernetes-group-version-kind": [GROUP_VERSION_KIND],
        "properties": {
            "metadata": {"type": "object"},
            "spec": {"type": "object", "properties": {"image": {"type": "string"}}},
            "status": {"type": "object", "properties": status},
        },
    }
    paths = {
        RUNNERPOOLS.path("{namespace}"): {"get": {"x-kubernetes-group-version-kind": GROUP_VERSION_KIND}},
        RUNNERPOOLS.path(): {"get": {"x-kubernetes-group-version-kind": GROUP_VERSION_KIND}},
    }
    return {"openapi": "3.0.0", "paths": paths, "components": {"schemas": {"com.example.RunnerPool": pool}}}


def from_table(server: FakeServer, context: SourceContext, **table: Any) -> TableSource:
    """A source of type "crd"."""
    fields = {"env": "spec.image", "idle": "status.ready"} | table.pop("fields", {})
    identity = {"group": RUNNERPOOLS.group, "version": RUNNERPOOLS.version, "resource": RUNNERPOOLS.plural}
    options = msgspec.convert({**identity, "fields": fields, **table}, CrdOptions)
    return TableSource(options, context, connect=server.connect)


def put(server: FakeServer, name: str, ready: Any, namespace: str = "a", image: str = "python") -> None:
    server.put(RUNNERPOOLS, namespace, name, spec={"image": image}, status={"ready": ready})


@pytest.fixture
def server(autojump_clock: MockClock) -> FakeServer:
    """One with two pools, and a schema that has what the table names."""
    autojump_clock.jump(1000)
    server = FakeServer(RUNNERPOOLS)
    server.openapi[OPENAPI] = schema(ready=COUNT)
    put(server, "p1", 1)
    put(server, "p2", 2)
    return server


async def test_the_schema_is_looked_at_once_and_then_the_pools_are_told(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    async with agent_of(lambda context: from_table(server, context)) as agent:
        assert told(agent) == {"a/p1": 1, "a/p2": 2}
        put(server, "p1", 5)
        await trio.sleep(600)
        assert told(agent) == {"a/p1": 5, "a/p2": 2}
        assert server.counts()["openapi"] == 1
        assert [request.path for request in server.asked("openapi")] == [OPENAPI]


async def test_a_path_that_leads_nowhere_is_named_and_nothing_is_told(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict]
) -> None:
    """Else it would read as pools with nothing in them. Once the resource has the field, it is read by itself."""
    server.openapi[OPENAPI] = schema(readyCount=COUNT)
    async with agent_of(lambda context: from_table(server, context)) as agent:
        await trio.sleep(600)
        assert told(agent) == {}
        (why,) = agent.health()["why_not"]
        assert "fields.idle 'status.ready': status has no field 'ready'; did you mean \"status.readyCount\"?" in why
        assert why.endswith("correct [source.fields]")
        assert troubles(agent) == {"schema": 1}
        assert server.counts().keys() == {"openapi", "namespace"}
        assert server.counts()["namespace"] == 1
        assert server.counts()["openapi"] <= 600 / (LONGEST_SCHEMA_PAUSE / 2) + 10
        server.openapi[OPENAPI] = schema(ready=COUNT)
        await within(LONGEST_SCHEMA_PAUSE + SLACK, lambda: told(agent) == {"a/p1": 1, "a/p2": 2})
        await within(10 + SLACK, lambda: shown(agent)["state"] == "live")
        assert troubles(agent) == {}


@pytest.mark.parametrize("code", [403, 404, 406])
async def test_a_server_that_shows_nobody_a_schema_is_believed(
    autojump_clock: MockClock, server: FakeServer, code: int
) -> None:
    server.refuse(code, "openapi")
    source = from_table(server, source_context())
    async with running(source):
        assert idle_of(await source.collect()) == {"a/p1": 1, "a/p2": 2}
        assert source.troubles() == []


@pytest.mark.parametrize("document", [b"<html>", b"[]", b"{}", b'{"paths":7}', b"[" * 100_000, b"\xff"])
async def test_a_document_that_says_nothing_is_as_good_as_none(
    autojump_clock: MockClock, server: FakeServer, document: bytes
) -> None:
    server.fault("openapi", body=document)
    source = from_table(server, source_context())
    async with running(source):
        assert idle_of(await source.collect()) == {"a/p1": 1, "a/p2": 2}


Break = Callable[[FakeServer], Any]


@pytest.mark.parametrize(
    "break_it, reason",
    [
        (lambda server: server.vanish("openapi"), "unreachable"),
        (lambda server: server.hang("openapi"), "unreachable"),
        (lambda server: server.refuse(503, "openapi"), "server"),
        (lambda server: server.refuse(401, "openapi"), "unauthorized"),
    ],
    ids=["gone", "silent", "503", "401"],
)
async def test_what_keeps_the_schema_away_is_told_and_gotten_over(
    autojump_clock: MockClock, server: FakeServer, break_it: Break, reason: str
) -> None:
    """The start waits for none of it."""
    fault = break_it(server)
    source = from_table(server, source_context())
    async with running(source):
        assert trio.current_time() <= 1000 + TTL / 6 + SLACK
        await trio.sleep(600)
        (trouble,) = source.troubles()
        assert trouble.reason == reason
        assert not source.is_live()
        with pytest.raises(KubernetesError, match=r"runnerpools\.pools\.example\.com: "):
            await source.collect()
        assert len(server.requests) <= 60
        fault.end()
        await within(LONGEST_SCHEMA_PAUSE + DOCUMENT_DEADLINE + SLACK, source.is_live)
        assert idle_of(await source.collect()) == {"a/p1": 1, "a/p2": 2}
        assert source.troubles() == []


async def test_a_resource_that_is_not_there_yet_is_waited_for(autojump_clock: MockClock, server: FakeServer) -> None:
    """And its schema is looked at when it is."""
    document = server.openapi.pop(OPENAPI)
    server.uninstall(RUNNERPOOLS)
    async with agent_of(lambda context: from_table(server, context)) as agent:
        await trio.sleep(300)
        (why,) = agent.health()["why_not"]
        assert "install the CustomResourceDefinition of runnerpools.pools.example.com" in why
        assert troubles(agent) == {"not_found": 1}
        server.install(RUNNERPOOLS)
        server.openapi[OPENAPI] = schema(readyCount=COUNT)
        put(server, "p1", 1)
        await within(LONGEST_SCHEMA_PAUSE + 10 + SLACK, lambda: troubles(agent) == {"schema": 1})
        assert told(agent) == {}
        server.openapi[OPENAPI] = document
        await within(LONGEST_SCHEMA_PAUSE + SLACK, lambda: told(agent) == {"a/p1": 1})


async def test_in_namespaces_no_cluster_wide_path_is_touched(autojump_clock: MockClock, server: FakeServer) -> None:
    """Not even to find out whether there is such a resource."""
    del server.openapi[OPENAPI]
    async with agent_of(lambda context: from_table(server, context, namespaces=["a", "b"])) as agent:
        await trio.sleep(60)
        assert told(agent) == {"a/p1": 1, "a/p2": 2}
        asked = [request for request in server.requests if request.kind not in ("openapi", "namespace")]
        assert {request.namespace for request in asked} == {"a", "b"}


@pytest.mark.parametrize(
    "described, dropped",
    [(COUNT, True), ({"x-kubernetes-int-or-string": True}, False), ({"type": "string"}, False), (None, False)],
    ids=["integer", "int-or-string", "string", "no schema"],
)
async def test_a_text_is_a_count_where_the_schema_allows_texts(
    autojump_clock: MockClock, server: FakeServer, described: dict[str, Any] | None, dropped: bool
) -> None:
    if described is None:
        del server.openapi[OPENAPI]
    else:
        server.openapi[OPENAPI] = schema(ready=described)
    put(server, "p1", "10")
    async with agent_of(lambda context: from_table(server, context)) as agent:
        assert told(agent) == ({"a/p2": 2} if dropped else {"a/p1": 10, "a/p2": 2})
        assert shown(agent)["dropped"].keys() == ({"idle"} if dropped else set())


async def test_a_pool_that_two_objects_claim_counts_once_and_is_named(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """The first of them by name, whatever the order in which they came; when it goes, the other one counts."""
    fields = {"pool": "status.pool"}
    for name, ready in (("z", 3), ("b", 1), ("m", 2)):
        server.put(RUNNERPOOLS, "a", name, spec={"image": "python"}, status={"ready": ready, "pool": "shared"})
    server.delete(RUNNERPOOLS, "a", "p1")
    server.delete(RUNNERPOOLS, "a", "p2")
    server.openapi[OPENAPI] = schema(ready=COUNT, pool={"type": "string"})
    async with agent_of(lambda context: from_table(server, context, fields=fields)) as agent:
        await trio.sleep(10)
        assert told(agent) == {"a/shared": 1}
        assert shown(agent)["state"] == "partly"
        text = shown(agent)["last_error"]["text"]
        assert (
            "pool a/python/shared is claimed by a/b, which counts, and by a/m; let each object name a pool of its own"
            in text
        )
        assert troubles(agent) == {"contested": 1}
        server.delete(RUNNERPOOLS, "a", "b")
        await trio.sleep(SLACK)
        assert told(agent) == {"a/shared": 2}
        server.delete(RUNNERPOOLS, "a", "m")
        await trio.sleep(10 + SLACK)
        assert told(agent) == {"a/shared": 3}
        assert shown(agent)["state"] == "live"


async def test_an_object_that_becomes_another_pool_leaves_the_old_one(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    async with agent_of(lambda context: from_table(server, context)) as agent:
        put(server, "p1", 4, image="node")
        await trio.sleep(SLACK)
        found: Sequence[tuple[str, str, int]] = [
            (record.env_name, record.member_pool, record.idle) for record in agent.registry.snapshot()
        ]
        assert found == [("node", "p1", 4), ("python", "p2", 2)]
