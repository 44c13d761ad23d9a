"""The API server in memory, written to: what comes of applies, patches and edits, who owns what then, and when answers
and events come. That all of it is what a real one does is shown in tests/apiserver/test_fake_apply_is_true.py."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.kubernetes import fake_apply
from tests.kubernetes.fake_api import FakeServer, env_body, pool, sandboxenvs
from tests.kubernetes.fake_apply import Json, Refused
from trio_federation_kubernetes.connection import Api
from trio_federation_kubernetes.errors import ApiError, Cause, UnreachableError
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.schema import check

LIST = SANDBOXENVS.path()
STATUS = f"{SANDBOXENVS.path('team')}/env/status"
PARAMS = {"fieldManager": "us", "fieldValidation": "Strict"}
DOCUMENT = "/openapi/v3/apis/agents.navix.sh/v1alpha1"
NOW = "2030-01-02T03:04:05Z"
LATER = "2030-01-02T03:05:05Z"
SCHEMA = sandboxenvs()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def cluster(name: str, idle: int = 1) -> Json:
    return {"clusterID": name, "isLocal": False, "observedMembers": [{"name": "a", "idleCount": idle}]}


def body(*clusters: Json, **status: object) -> Json:
    metadata = {"name": "env", "namespace": "team"}
    said = {"clusters": list(clusters), **status}
    return {"apiVersion": "agents.navix.sh/v1alpha1", "kind": "SandboxEnv", "metadata": metadata, "status": said}


def env(**status: object) -> Json:
    """As it is before anybody owns anything."""
    found = body()
    return found | {"status": status} if status else {name: found[name] for name in found if name != "status"}


# Pure.

clusters = st.lists(
    st.builds(cluster, st.sampled_from(["east", "north", "south"]), st.integers(0, 2)),
    max_size=3,
    unique_by=lambda each: str(each["clusterID"]),
)
managers = st.sampled_from(["us", "ops"])
Write = Callable[[Json], Json]


def _apply(said: list[Json], manager: str, force: bool) -> Write:
    return lambda found: fake_apply.apply(SCHEMA, found, body(*said), manager, now=NOW, force=force)


def _patch(said: list[Json] | None, manager: str) -> Write:
    patch = {"status": {"clusters": said}}
    return lambda found: fake_apply.merge_patch(SCHEMA, found, patch, manager, now=NOW)


writes = st.one_of(
    st.builds(_apply, clusters, managers, st.booleans()), st.builds(_patch, st.none() | clusters, managers)
)


def after(found: Json, script: list[Write]) -> Json:
    """What becomes of it, without what is refused."""
    for write in script:
        before, was = found, copy.deepcopy(found)
        try:
            found = write(found)
        except Refused:
            continue
        finally:
            assert before == was, "what was there has been touched"
    return found


@given(st.lists(writes, max_size=6), clusters.filter(bool), st.booleans())
def test_applied_again_nothing_changes(script: list[Write], said: list[Json], force: bool) -> None:
    write = _apply(said, "us", force)
    found = after(env(), script)
    try:
        once = write(found)
    except Refused:
        return
    assert write(once) is once


@given(st.lists(writes, max_size=8))
def test_owners_own_what_is_there(script: list[Write]) -> None:
    found = after(env(idleReplicas=1), script)
    there = fake_apply.owners_of(
        fake_apply.update(SCHEMA, env(), found, "all", now=NOW, created=True)  # who adds it all owns it all
    )
    for owner, owned in fake_apply.owners_of(found).items():
        assert owned.paths
        assert all(owned.paths <= all_of_it.paths for all_of_it in there.values()), owner


@given(st.lists(writes, max_size=6))
def test_the_form_of_fields_can_be_read_back(script: list[Write]) -> None:
    for entry in after(env(), script)["metadata"].get("managedFields", ()):
        (owned,) = fake_apply.owners_of({"metadata": {"managedFields": [entry]}}).values()
        assert fake_apply.fields(owned.paths) == entry["fieldsV1"]


@given(st.lists(writes, max_size=6), st.integers(0, 2))
def test_what_nobody_else_says_comes_and_goes_without_a_trace(script: list[Write], idle: int) -> None:
    found = after(env(clusters=[{"clusterID": "west"}], idleReplicas=1), script)
    mine = [each for each in found["status"].get("clusters", ()) if each["clusterID"] != "far"]
    with_it = fake_apply.apply(SCHEMA, found, body(cluster("far", idle)), "far", now=NOW)
    assert with_it["status"]["clusters"] == [*mine, cluster("far", idle)]
    owners = fake_apply.owners_of(found) or fake_apply.owners_of(after(found, [_apply([], "nobody", False)]))
    if not mine and any(("f:status", "f:clusters") in owned.paths for owned in owners.values()):
        # Somebody owns a list in which nothing would be left.
        with pytest.raises(Refused, match=r"status\.clusters: Invalid value: ") as refused:
            fake_apply.apply(SCHEMA, with_it, {}, "far", now=NOW)
        assert refused.value.code == 422
        return
    without = fake_apply.apply(SCHEMA, with_it, {}, "far", now=NOW)
    # An empty list that nobody owns is lost.
    assert without["status"] == {name: value for name, value in found["status"].items() if value != []}
    assert {owner: owned.paths for owner, owned in fake_apply.owners_of(without).items()} == {
        owner: owned.paths for owner, owned in owners.items() if owner.name != "nobody"
    }


def test_fields_are_owned_in_the_form_of_fields_v1() -> None:
    found = fake_apply.apply(SCHEMA, env(), body(cluster("east")), "us", now=NOW)
    member: Json = {".": {}, "f:name": {}, "f:idleCount": {}}
    entry = {".": {}, "f:clusterID": {}, "f:isLocal": {}, "f:observedMembers": {'k:{"name":"a"}': member}}
    assert found["metadata"]["managedFields"] == [
        {
            "manager": "us",
            "operation": "Apply",
            "apiVersion": "agents.navix.sh/v1alpha1",
            "time": NOW,
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:status": {"f:clusters": {'k:{"clusterID":"east"}': entry}}},
            "subresource": "status",
        }
    ]


def test_a_conflict_names_each_field_and_its_owner() -> None:
    found = fake_apply.apply(SCHEMA, env(), body(cluster("east")), "ops", now=NOW)
    found = fake_apply.merge_patch(SCHEMA, found, {"status": {"idleReplicas": 3}}, "cron", now=LATER)
    with pytest.raises(Refused) as refused:
        fake_apply.apply(SCHEMA, found, body(cluster("east", 2), idleReplicas=4), "us", now=LATER)
    error = refused.value
    owners = ('"cron" with subresource "status" using agents.navix.sh/v1alpha1', '"ops" with subresource "status"')
    paths = (".status.idleReplicas", '.status.clusters[clusterID="east"].observedMembers[name="a"].idleCount')
    assert (error.code, error.reason) == (409, "Conflict")
    assert error.causes == tuple(
        Cause("FieldManagerConflict", path, f"conflict with {owner}") for path, owner in zip(paths, owners, strict=True)
    )
    assert error.message == (
        f"Apply failed with 2 conflicts: conflicts with {owners[0]}:\n- {paths[0]}\n"
        f"conflicts with {owners[1]}:\n- {paths[1]}"
    )
    found = fake_apply.apply(SCHEMA, found, body(cluster("east", 2), idleReplicas=4), "us", now=LATER, force=True)
    assert found["status"] == {"clusters": [cluster("east", 2)], "idleReplicas": 4}


def test_times_say_when_somebody_has_last_changed_something() -> None:
    def times() -> dict[str, str | None]:
        return {owner.name: owned.time for owner, owned in fake_apply.owners_of(found).items()}

    found = fake_apply.apply(SCHEMA, env(), body(cluster("east"), cluster("north")), "us", now=NOW)
    found = fake_apply.apply(SCHEMA, found, body(cluster("east")), "ops", now=LATER)
    assert times() == {"us": NOW, "ops": None}, "who says what is there already has changed nothing"
    found = fake_apply.apply(SCHEMA, found, body(cluster("north")), "us", now=LATER)
    assert times() == {"us": NOW, "ops": None}, "nor who leaves it to others"
    found = fake_apply.apply(SCHEMA, found, body(cluster("north", 2)), "us", now=LATER)
    assert times() == {"us": LATER, "ops": None}
    found = fake_apply.merge_patch(SCHEMA, found, {"status": {"idleReplicas": 1, "phase": "x"}}, "cron", now=NOW)
    found = fake_apply.merge_patch(SCHEMA, found, {"status": {"phase": None}}, "cron", now=LATER)
    assert times() == {"us": LATER, "ops": None, "cron": NOW}, "nor who only takes something away"
    found = fake_apply.merge_patch(SCHEMA, found, {"status": {"idleReplicas": 2}}, "cron", now=LATER)
    assert times() == {"us": LATER, "ops": None, "cron": LATER}


# The server.


@pytest.fixture
def server() -> FakeServer:
    found = FakeServer(SANDBOXENVS, latency=1.0, echo_first=False, numeric_versions=True)
    found.put(SANDBOXENVS, "team", "env", **env_body(pool()))
    return found


class Watcher:
    """A watch, and what it has told: when, the type, and the object."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str, Json]] = []

    def versions(self) -> list[str]:
        return [found["metadata"]["resourceVersion"] for _, _, found in self.told]


@asynccontextmanager
async def watching(server: FakeServer, client: Api) -> AsyncIterator[Watcher]:
    watcher = Watcher()

    async def follow() -> None:
        params = {"watch": "true", "resourceVersion": server.version()}
        async with client.stream(LIST, params, deadline=1000) as chunks:
            async for chunk in chunks:
                for line in chunk.splitlines():
                    event = json.loads(line)
                    watcher.told.append((trio.current_time(), event["type"], event["object"]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.sleep(2)
        yield watcher
        nursery.cancel_scope.cancel()


async def write(client: Api, said: Json, **params: str) -> Json:
    answer = await client.apply(STATUS, PARAMS | params, json.dumps(said).encode())
    found: Json = json.loads(answer.body)
    return found


async def test_a_write_is_answered_with_what_is_there_then(server: FakeServer, autojump_clock: MockClock) -> None:
    async with server.connect() as client:
        found = await write(client, body(cluster("east")))
        assert trio.current_time() == 1.0
        assert found == server.get(SANDBOXENVS, "team", "env")
        assert found["status"]["clusters"] == [*env_body(pool())["status"]["clusters"], cluster("east")]
        assert found["metadata"]["resourceVersion"] == server.version()
        assert client.server_clock_offset == server.wall_offset
        before = server.version()
        assert await write(client, body(cluster("east"))) == found
        assert server.version() == before, "nothing has changed"
        listed = json.loads((await client.get(LIST, {})).body)
        assert listed["items"] == [found]
    (first, second) = server.asked("apply")
    assert (first.name, first.namespace, first.plural) == ("env", "team", "sandboxenvs")
    assert json.loads(first.body) == json.loads(second.body) == body(cluster("east"))


async def test_the_controller_owns_what_it_has_put(server: FakeServer, autojump_clock: MockClock) -> None:
    def owners() -> dict[tuple[str, str], Any]:
        entries = server.get(SANDBOXENVS, "team", "env")["metadata"]["managedFields"]
        return {(each["manager"], each.get("subresource", "")): each["fieldsV1"] for each in entries}

    assert owners()["controller", ""] == {"f:spec": {".": {}, "f:clusters": {}}}
    server.apply_as(SANDBOXENVS, "team", "env", body(cluster("east")), "us")
    local = {"clusterID": "west", "isLocal": True, "observedMembers": []}

    def edit(status: Json) -> None:
        status["clusters"][0] = local

    server.edit(SANDBOXENVS, "team", "env", edit)
    assert server.get(SANDBOXENVS, "team", "env")["status"]["clusters"] == [local, cluster("east")]
    assert owners()["us", "status"]["f:status"]["f:clusters"].keys() == {'k:{"clusterID":"east"}'}
    server.put(SANDBOXENVS, "team", "env", **env_body(pool()))
    assert owners().keys() == {("controller", ""), ("controller", "status")}
    server.put(SANDBOXENVS, "team", "old", manager="", **env_body(pool()))
    assert "managedFields" not in server.get(SANDBOXENVS, "team", "old")["metadata"]


@pytest.mark.parametrize("first", ["answer", "echo"])
async def test_which_comes_first_can_be_chosen(server: FakeServer, first: str, autojump_clock: MockClock) -> None:
    server.echo_first = first == "echo"
    async with server.connect() as client, watching(server, client) as watcher:
        began = trio.current_time()
        found = await write(client, body(cluster("east")))
        answered = trio.current_time() - began
        assert watcher.versions() == ([found["metadata"]["resourceVersion"]] if server.echo_first else [])
        await trio.sleep(3)
        ((told, kind, echo),) = watcher.told
        assert (kind, echo) == ("MODIFIED", found)
        assert (told - began, answered) == ((1.0, 2.0) if server.echo_first else (2.0, 1.0))


async def test_by_seed_now_one_comes_first_and_now_the_other(server: FakeServer, autojump_clock: MockClock) -> None:
    server.echo_first = None
    seen = set()
    async with server.connect() as client, watching(server, client) as watcher:
        for number in range(20):
            found = await write(client, body(cluster("east", number)))
            seen.add(found["metadata"]["resourceVersion"] in watcher.versions())
            await trio.sleep(3)
            assert watcher.versions()[-1] == found["metadata"]["resourceVersion"]
    assert seen == {True, False}


async def test_events_can_be_held_back(server: FakeServer, autojump_clock: MockClock) -> None:
    """And no bookmark tells meanwhile that they have been told."""
    server.bookmark_interval = 5.0
    async with server.connect() as client, watching(server, client) as watcher:
        began = server.version()
        with server.holding_events():
            found = await write(client, body(cluster("east")))
            server.merge_patch(SANDBOXENVS, "team", "env", {"status": {"idleReplicas": 3}})
            await trio.sleep(8)
            assert {kind for _, kind, _ in watcher.told} == {"BOOKMARK"}
            assert set(watcher.versions()) == {began}
            watcher.told.clear()
        await trio.sleep(1)
        assert [kind for _, kind, _ in watcher.told[:2]] == ["MODIFIED", "MODIFIED"]
        assert watcher.versions()[:2] == [found["metadata"]["resourceVersion"], server.version()]


async def test_rivals_are_refused_as_anybody(server: FakeServer, autojump_clock: MockClock) -> None:
    async with server.connect() as client:
        await write(client, body(cluster("east")))
        attempts: list[Callable[[], None]] = [
            lambda: server.apply_as(SANDBOXENVS, "team", "env", body(cluster("east", 2))),
            lambda: server.edit(SANDBOXENVS, "team", "env", lambda status: status.update(idleReplicas=-1)),
            lambda: server.merge_patch(SANDBOXENVS, "team", "none", {"status": {}}),
        ]
        for refused in attempts:
            before = server.version()
            with pytest.raises(ApiError) as error:
                refused()
            assert error.value.code in (404, 409, 422)
            assert server.version() == before
        server.apply_as(SANDBOXENVS, "team", "env", body(cluster("east", 2)), force=True)
        with pytest.raises(
            ApiError, match=r"^PATCH .*/env/status: 409 Conflict: Apply failed with 1 conflict"
        ) as error:
            await write(client, body(cluster("east")))
        assert error.value.status_reason == "Conflict"
        assert [cause.reason for cause in error.value.causes] == ["FieldManagerConflict"]
        assert server.patches == [body(cluster("east"))] * 2, "what is refused has been asked for"
        await write(client, body(cluster("east")), force="true")
    assert server.get(SANDBOXENVS, "team", "env")["status"]["clusters"][1] == cluster("east")


async def test_a_rival_patches_the_whole_list(server: FakeServer, autojump_clock: MockClock) -> None:
    server.apply_as(SANDBOXENVS, "team", "env", body(cluster("east")), "us")
    server.merge_patch(SANDBOXENVS, "team", "env", {"status": {"clusters": [cluster("north")]}})
    found = server.get(SANDBOXENVS, "team", "env")
    assert found["status"]["clusters"] == [cluster("north")]
    assert "us" not in {each["manager"] for each in found["metadata"]["managedFields"]}


async def test_a_write_meets_faults_as_any_request(server: FakeServer, autojump_clock: MockClock) -> None:
    async with server.connect() as client:
        before = server.version()
        server.refuse(429, "apply", times=1, name="other", retry_after=7)
        server.refuse(429, "apply", times=1, name="env", retry_after=7)
        with pytest.raises(ApiError, match=r"^PATCH ") as error:
            await write(client, body(cluster("east")))
        assert error.value.retry_after == 7
        server.vanish("apply", times=1)
        with pytest.raises(UnreachableError):
            await write(client, body(cluster("east")))
        server.hang("apply", times=1)
        began = trio.current_time()
        with pytest.raises(UnreachableError, match="no answer within 10 s"):
            await write(client, body(cluster("east")))
        assert trio.current_time() == began + 10
        server.black_hole = True
        with pytest.raises(UnreachableError):
            await write(client, body(cluster("east")))
        server.black_hole = False
        assert server.version() == before
        assert len(server.patches) == 4
        assert server.counts() == {"apply": 4}


@pytest.mark.parametrize("fault", ["vanish", "hang"])
async def test_an_answer_can_be_lost(server: FakeServer, fault: str, autojump_clock: MockClock) -> None:
    getattr(server, fault)("apply", times=1, done=True)
    async with server.connect() as client:
        with pytest.raises(UnreachableError):
            await write(client, body(cluster("east")))
    assert server.get(SANDBOXENVS, "team", "env")["status"]["clusters"][1] == cluster("east")


async def test_what_is_not_there_cannot_be_written_to(server: FakeServer, autojump_clock: MockClock) -> None:
    async with server.connect() as client:
        server.delete(SANDBOXENVS, "team", "env")
        with pytest.raises(ApiError, match=r'404 NotFound: sandboxenvs\.agents\.navix\.sh "env" not found'):
            await write(client, body(cluster("east")))
        server.uninstall(SANDBOXENVS)
        with pytest.raises(ApiError, match="404 NotFound: the server could not find the requested resource"):
            await write(client, body(cluster("east")))
        server.install(SANDBOXENVS)
        server.put(SANDBOXENVS, "team", "env")
        server.define(sandboxenvs(subresource=False))
        with pytest.raises(ApiError, match="404 NotFound: the server could not find the requested resource"):
            await write(client, body(cluster("east")))
        server.define(sandboxenvs())
        await write(client, body(cluster("east")))


@pytest.mark.parametrize("numeric", [True, False])
def test_versions_are_numbers_that_grow_or_words(numeric: bool) -> None:
    server = FakeServer(SANDBOXENVS, numeric_versions=numeric)
    versions = [server.version()]
    for number in range(20):
        server.put(SANDBOXENVS, "team", f"env-{number % 7}")
        versions.append(server.version())
    if numeric:
        numbers = [int(version) for version in versions]
        assert numbers == sorted(set(numbers))
    else:
        assert versions != sorted(versions)


def test_it_can_say_what_it_knows_of_sandboxenvs() -> None:
    server = FakeServer(SANDBOXENVS)
    assert server.openapi == {}
    server.define(sandboxenvs())
    document = server.openapi[DOCUMENT]
    verdict = check(document, SANDBOXENVS, {})
    assert verdict is not None
    assert verdict.faults == ()
    assert f"{SANDBOXENVS.path('{namespace}')}/{{name}}/status" in document["paths"]


def test_a_list_without_keys_is_one_value() -> None:
    server = FakeServer(SANDBOXENVS)
    server.define(sandboxenvs(keyed=False))
    server.put(SANDBOXENVS, "team", "env", **env_body(pool()))
    with pytest.raises(ApiError) as error:
        server.apply_as(SANDBOXENVS, "team", "env", body(cluster("east")), "us")
    (cause,) = error.value.causes
    assert cause.field == ".status.clusters"
