"""The sink "kubernetes-status" while others write what it writes, or the API server is not well: rivals, rights that
are missing, definitions that are not good enough, refusals, a server that dies or falls silent. In all of it nobody
else's data is overwritten, writes are few, the reason is told, and it all ends by itself.

All tests here share one server, which they may do with as they like as long as they leave it running, with a good
definition. What is checked besides, all the time, is said at `writing.Mirror`."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import yaml

from tests.apiserver.build import Programs
from tests.apiserver.cluster import ApiServer, Rule, ServerError, audited, looked
from tests.apiserver.following import SANDBOXENVS, SANDBOXENVS_CRD, Asked, Json, do, kubeconfig_via, relayed
from tests.apiserver.writing import (
    MANAGER,
    Written,
    entries,
    foreign,
    local,
    managed,
    mirroring,
    owned,
    pool,
    strange,
    values,
)
from trio_federation_kubernetes import mirror as mirror_module
from trio_federation_kubernetes import sink
from trio_federation_kubernetes.errors import ApiError, UnreachableError

GROUP = "agents.navix.sh"
READ: Rule = {"apiGroups": [GROUP], "resources": ["sandboxenvs"], "verbs": ["list", "watch"]}
WRITE: Rule = {"apiGroups": [GROUP], "resources": ["sandboxenvs/status"], "verbs": ["patch"]}
#: Notes who does what to SandboxEnvs, and who reads the schema.
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, resources: [{group: agents.navix.sh}]}
  - {level: Metadata, nonResourceURLs: ["*"]}
  - {level: Metadata}
"""
#: Writes of an env until somebody who takes them away has done so twice, with the one that takes the rest back.
BOUND = 4
#: how often a rival strikes, which is enough for it to be found out many times over
STRIKES = 8


@pytest.fixture(scope="module")
def server(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The server of this module, with SandboxEnvs, and a log of who does what."""
    with audited(apiserver_programs, tmp_path_factory.mktemp("written-api-server"), AUDIT_POLICY) as server:
        server.create_crds([SANDBOXENVS_CRD])
        yield server


@pytest.fixture
def envs(server: ApiServer) -> Written:
    """SandboxEnvs in a namespace of this test alone."""
    return Written(server, server.namespace())


# Rivals

#: What a rival does to an env, given how often it has done so.
Strike = Callable[[Written, int], object]


def replace_the_list(envs: Written, number: int) -> None:
    """As a controller does that knows nothing of others: its own segment is all there is."""
    envs.merge("e", {"clusters": [local(2, f"2026-01-01T00:00:{number:02}Z")]})


def remove_and_say_nothing(envs: Written, number: int) -> None:
    """What it writes is what was there: it is noted nowhere."""
    envs.merge("e", {"clusters": [local(2)]}, "sweeper")


def write_an_old_copy(envs: Written, number: int) -> None:
    """As a controller does that keeps what it has read once."""
    seen = envs.get("e")["status"]["clusters"]
    for entry in seen:
        for member in entry["observedMembers"]:
            if not entry["isLocal"]:
                member["idleCount"] = 50 + number
    envs.merge("e", {"clusters": seen})


def apply_by_force(envs: Written, number: int) -> None:
    """As somebody does who mirrors the same clusters from elsewhere."""
    envs.apply("e", {"clusters": [strange("east", 70 + number)]}, "mirror", force=True)


def apply_the_same_pool_by_force(envs: Written, number: int) -> None:
    """The same, with the pools of the sink."""
    member = {"name": "p", "idleCount": 70 + number}
    envs.apply("e", {"clusters": [strange("east", 0, observedMembers=[member])]}, "mirror", force=True)


@pytest.mark.parametrize(
    "strike, party",
    [
        (replace_the_list, "controller"),
        (remove_and_say_nothing, "controller"),
        (write_an_old_copy, "controller"),
        (apply_the_same_pool_by_force, "mirror"),
    ],
    ids=["replaces-the-list", "removes", "writes-an-old-copy", "applies-by-force"],
)
async def test_a_rival_is_left_alone_and_named(strike: Strike, party: str, envs: Written) -> None:
    """It strikes again whenever there is something of ours, or a while has passed. After the second time, nothing is
    written to that env any more; others are written as ever."""
    await do(envs.make, "e", "f")
    async with mirroring(envs) as mirror:
        records = [pool(env, cluster, idle=1) for env in "ef" for cluster in ("east", "north")]
        await mirror.show(*records)
        whole = {"east": {"p": 1}, "north": {"p": 1}}
        await mirror.until_shown(envs, "e", whole)
        await mirror.until_shown(envs, "f", whole)
        counted = None
        for number in range(STRIKES):
            await do(strike, envs, number)
            theirs = await do(envs.get, "e")
            await mirror.until_quiet(0.2)
            now = await do(envs.get, "e")
            # What the rival owns is as it has left it, where it has more than a hand in what we have made.
            before = values(theirs, party)
            kept = {
                path
                for path in before
                if not path.startswith("clusters/") or f"{_entry(path)}/." in owned(theirs, party)
            }
            after = values(now, party)
            assert after.keys() >= kept
            assert {path: before[path] for path in after} == after
            if number == STRIKES // 2:
                counted = len(mirror.writes("e"))
        assert len(mirror.writes("e")) == counted
        assert 2 <= len(mirror.writes("e")) <= BOUND
        await mirror.until(lambda: party in {trouble.party for trouble in mirror.troubles})
        assert {trouble.party for trouble in mirror.troubles} == {party}
        for trouble in mirror.troubles:
            assert f"{envs.namespace}/e" in trouble.detail
            assert party in trouble.detail
            assert f"{envs.namespace}/f" not in trouble.detail
        # Nothing was overwritten: not a single write was forced, which Mirror sees to.
        await mirror.show(*(pool(env, cluster, idle=2) for env in "ef" for cluster in ("east", "north")))
        await mirror.until_shown(envs, "f", {"east": {"p": 2}, "north": {"p": 2}})
        await mirror.until_quiet(0.5)
        assert mirror.writes("e")[counted:] == []


@pytest.mark.parametrize("every, interval", [(3.0, 1.0), pytest.param(10.0, 5.0, marks=pytest.mark.slow)])
async def test_a_controller_that_replaces_the_list_again_and_again(
    every: float, interval: float, envs: Written
) -> None:
    """Every few seconds. It is written against once, and never again; what it has is as it has left it."""
    await do(envs.make, "e")
    async with mirroring(envs, env_interval=interval) as mirror:
        await mirror.show(pool("e", "east", idle=1))
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        began = trio.current_time()
        for number in range(4):
            await trio.sleep_until(began + every * number)
            await do(replace_the_list, envs, number)
            await mirror.show(pool("e", "east", idle=number))
        await mirror.until_quiet(0.5)
        assert "contested" in mirror.reasons()
        assert {trouble.party for trouble in mirror.troubles} == {"controller"}
        # At first, after the first strike, and to let go of the summary after the second, which a write may cross.
        *shown, last = [json.loads(write.body).get("status") for write in mirror.writes("e")]
        assert 2 <= len(shown) <= 3
        assert None not in shown
        assert last is None
        env = await do(envs.get, "e")
        assert list(entries(env).values()) == [local(2, "2026-01-01T00:00:03Z")]
        assert not owned(env)


def _entry(path: str) -> str:
    """Of the path of a field in an entry, that of the entry."""
    return "/".join(path.split("/")[:2])


async def test_who_asks_first_is_told_no_and_changes_nothing(envs: Written) -> None:
    """A rival that does not force gets the conflict, and we notice nothing."""
    await do(envs.make, "e")
    async with mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1))
        before = await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        for idle in range(5):
            member = {"name": "p", "idleCount": 20 + idle}
            with pytest.raises(ServerError) as caught:
                await do(envs.apply, "e", {"clusters": [strange("east", 0, observedMembers=[member])]}, "mirror")
            assert caught.value.code == 409
        await mirror.show(pool("e", "east", idle=2))
        await mirror.until_shown(envs, "e", {"east": {"p": 2}})
        assert managed(before) == managed(await do(envs.get, "e"))
        assert len(mirror.writes()) == 2
        assert not mirror.ever


async def test_a_rival_that_strikes_once_costs_one_write(envs: Written) -> None:
    """As a controller does when it is replaced by a newer version."""
    await do(envs.make, "e")
    async with mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1))
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        await do(replace_the_list, envs, 1)
        await mirror.until(lambda: len(mirror.written()) == 2)
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        await mirror.until_quiet()
        assert len(mirror.writes()) == 2
        assert not mirror.ever


async def test_a_controller_that_keeps_what_it_finds_is_no_rival(envs: Written) -> None:
    """It reads the list, changes its own segment, and writes all of it back, again and again, while the other clusters
    change as well. Only where it writes back what is old already is that a disturbance."""
    await do(envs.make, "e")
    async with mirroring(envs, env_interval=0.3) as mirror:
        for number in range(10):
            await mirror.show(pool("e", "east", idle=number))
            await mirror.until_shown(envs, "e", {"east": {"p": number}})
            clusters = (await do(envs.get, "e"))["status"]["clusters"]
            clusters[0]["observedMembers"][0]["idleCount"] = number
            await do(envs.merge, "e", {"clusters": clusters, "idleReplicas": number})
        await mirror.until_quiet()
        assert not mirror.ever
        assert len(mirror.writes()) == 10


async def test_a_summary_that_is_somebody_elses_costs_the_entries_nothing(envs: Written) -> None:
    await do(envs.make, "e")
    await do(envs.apply, "e", {"federation": {"clusters": 9}}, "ops")
    async with mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1))
        env = await mirror.until_env(envs, "e", lambda env: foreign(env) == {"east": {"p": 1}})
        assert env["status"]["federation"]["clusters"] == 9
        await mirror.until_quiet()
        assert len(mirror.writes()) <= 3


# Who may write


def log_of(server: ApiServer, user: str) -> set[tuple[str, str]]:
    """What a user has done, by the server's own log: verb and resource, or path."""
    found = set()
    for line in (server.folder / "audit.log").read_text().splitlines():
        event = json.loads(line)
        if event["user"].get("username") == user:
            about = event.get("objectRef")
            what = event["requestURI"].partition("?")[0]
            if about is not None and "resource" in about:
                what = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            found.add((event["verb"], what))
    return found


async def test_without_the_right_it_says_so_and_goes_on_once_it_is_granted(envs: Written) -> None:
    """The rights of the source are not enough. Nothing but the one that is missing is asked for."""
    server, namespace = envs.server, envs.namespace
    await do(envs.make, "e", "f")
    account = await do(lambda: server.service_account(namespace, "agent", rules=[READ]))
    kubeconfig = await do(lambda: account.kubeconfig(account.token()))
    async with mirroring(envs, kubeconfig) as mirror:
        await mirror.show(pool("e", "east", idle=1), pool("f", "east", idle=1))
        await mirror.until(lambda: mirror.reasons() == ["forbidden"])
        (trouble,) = mirror.troubles
        assert account.username in trouble.detail
        assert "patch" in trouble.detail
        assert "sandboxenvs/status" in trouble.detail
        assert namespace in trouble.detail
        # It is asked for now and then, and not for each env.
        await trio.sleep(1)
        assert len(mirror.writes()) <= 3
        await do(_grant_writing, server, namespace, f"{namespace}:agent")
        for env in "ef":
            await mirror.until_shown(envs, env, {"east": {"p": 1}})
        await mirror.until(lambda: not mirror.troubles)
    assert await do(log_of, server, account.username) == {
        ("list", "sandboxenvs"),
        ("watch", "sandboxenvs"),
        ("patch", "sandboxenvs/status"),
        ("get", "/openapi/v3/apis/agents.navix.sh/v1alpha1"),
    }
    for verb, resource in (("patch", "sandboxenvs"), ("update", "sandboxenvs/status"), ("get", "sandboxenvs")):
        assert not await do(server.allows, account, verb, GROUP, resource, namespace)


def _grant_writing(server: ApiServer, namespace: str, account: str) -> None:
    scope = ("-n", namespace)
    server.kubectl("create", "role", "writer", *scope, "--verb=patch", f"--resource={SANDBOXENVS}/status")
    server.kubectl("create", "rolebinding", "writer", *scope, "--role=writer", f"--serviceaccount={account}")


async def test_a_forbidden_namespace_does_not_cost_the_others(envs: Written) -> None:
    other = Written(envs.server, await do(envs.server.namespace))
    await do(envs.make, "e")
    await do(other.make, "e")
    account = await do(lambda: envs.server.service_account(envs.namespace, "agent", rules=[READ, WRITE]))
    reader = f"{envs.namespace}:agent"
    scope = ("-n", other.namespace)
    await do(envs.server.kubectl, "create", "role", "reader", *scope, "--verb=list,watch", f"--resource={SANDBOXENVS}")
    await do(
        envs.server.kubectl, "create", "rolebinding", "reader", *scope, "--role=reader", f"--serviceaccount={reader}"
    )
    kubeconfig = await do(lambda: account.kubeconfig(account.token()))
    async with mirroring(envs, kubeconfig, namespaces=[other.namespace, envs.namespace]) as mirror:
        for idle in (1, 2):
            there = pool("e", "east", idle=idle)
            await mirror.show(there, replace(there, namespace=other.namespace))
            await mirror.until_shown(envs, "e", {"east": {"p": idle}})
            await mirror.until(lambda: mirror.reasons() == ["forbidden"])
            assert other.namespace in mirror.troubles[0].detail
        await do(_grant_writing, envs.server, other.namespace, reader)
        await mirror.until_shown(other, "e", {"east": {"p": 2}})
        await mirror.until(lambda: not mirror.troubles)


# Who writes


async def test_only_the_clusters_reporter_writes(envs: Written) -> None:
    """Two agents of one cluster: whoever is not the reporter leaves alone what the other one writes, and takes over
    where the other one is gone, without a write that changes nothing."""
    await do(envs.make, "e")
    reporter = "one"
    async with (
        mirroring(envs, is_reporter=lambda: reporter == "one") as one,
        mirroring(envs, is_reporter=lambda: reporter == "two") as two,
    ):
        for mirror in (one, two):
            await mirror.show(pool("e", "east", idle=1))
        await one.until_shown(envs, "e", {"east": {"p": 1}})
        await two.until_quiet()
        assert not two.writes()
        # What the second one knows counts for nothing, until it is the reporter.
        await two.show(pool("e", "east", idle=2))
        await two.until_quiet()
        assert not two.writes()
        reporter = "two"
        await two.until_shown(envs, "e", {"east": {"p": 2}})
        await one.show(pool("e", "east", idle=3))
        await one.until_quiet()
        assert len(one.writes()) == 1
        assert len(two.writes()) == 1
        assert not one.ever | two.ever


# The definition


@asynccontextmanager
async def definition(
    server: ApiServer, change: Callable[[Json], object]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The definition of SandboxEnvs with a change to its version, until the block ends, or what is handed out is
    called."""
    good = yaml.safe_load(SANDBOXENVS_CRD.read_text())

    def define(definition: Json) -> None:
        server.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=json.dumps(definition))

    def known() -> Json:
        found: Json = server.admin.get(f"/openapi/v3/apis/{GROUP}/v1alpha1").json()
        return found

    before = known()

    def change_it() -> None:
        changed = copy.deepcopy(good)
        change(changed["spec"]["versions"][0])
        define(changed)
        assert looked(lambda: known() != before, 30)

    def mend() -> None:
        define(good)
        assert looked(lambda: known() == before, 30)

    await do(change_it)
    try:
        yield lambda: do(mend)
    finally:
        with trio.CancelScope(shield=True):
            await do(mend)


def _lists(version: Json) -> tuple[Json, Json]:
    clusters = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["clusters"]
    return clusters, clusters["items"]["properties"]["observedMembers"]


def without_keys(version: Json) -> None:
    """As in a definition that was made without a thought of others."""
    for each in _lists(version):
        del each["x-kubernetes-list-type"], each["x-kubernetes-list-map-keys"]


def without_keys_of_members(version: Json) -> None:
    """Only the inner list."""
    members = _lists(version)[1]
    del members["x-kubernetes-list-type"], members["x-kubernetes-list-map-keys"]


def without_a_subresource(version: Json) -> None:
    """The status is a part of the object like others."""
    del version["subresources"]


def without_clusters(version: Json) -> None:
    """There is a status, of which nothing is said."""
    del version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["clusters"]


@pytest.mark.parametrize(
    "change, words",
    [
        (without_keys, ["status.clusters", "clusterID"]),
        (without_keys_of_members, ["observedMembers", "name"]),
        (without_a_subresource, ["subresource"]),
        (without_clusters, ["status.clusters"]),
    ],
    ids=["no-keys", "no-keys-inside", "no-subresource", "no-clusters"],
)
async def test_a_definition_that_is_not_good_enough_is_named_and_nothing_written(
    change: Callable[[Json], object], words: list[str], envs: Written
) -> None:
    await do(envs.make, "e")
    async with definition(envs.server, change) as mend:
        before = await do(envs.get, "e")
        async with mirroring(envs) as mirror:
            await mirror.show(pool("e", "east", idle=1))
            await mirror.until(lambda: mirror.reasons() == ["schema"])
            (trouble,) = mirror.troubles
            assert SANDBOXENVS in trouble.detail
            for word in words:
                assert word in trouble.detail
            assert not mirror.writes()
            assert await do(envs.get, "e") == before
            await mend()
            await mirror.until_shown(envs, "e", {"east": {"p": 1}})
            await mirror.until(lambda: not mirror.troubles)


async def test_fields_that_a_definition_does_not_have_are_left_out(envs: Written) -> None:
    """An older definition, which has no room for sums, nor for anything that it does not name."""

    def older(version: Json) -> None:
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
        clusters, members = _lists(version)
        del status["properties"]["federation"]
        for name in clusters["items"]["properties"].keys() - {
            *("clusterID", "isLocal", "lastSnapshotTime", "observedMembers")
        }:
            del clusters["items"]["properties"][name]
        del members["items"]["properties"]["pendingRequests"]
        for each in (status, clusters["items"], members["items"]):
            each.pop("x-kubernetes-preserve-unknown-fields", None)

    await do(envs.make, "e")
    async with definition(envs.server, older), mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1, pending=4), pool("e", "north", "", 5))
        env = await mirror.until_env(envs, "e", lambda env: "east" in foreign(env))
        assert foreign(env)["east"] == {"p": 1}
        assert "federation" not in env["status"]
        assert "pendingRequests" not in entries(env)["east"]["observedMembers"][0]
        await mirror.until_quiet()
        assert len(mirror.writes()) == 1
        # While a definition changes, the server asks to wait.
        assert mirror.ever <= {"throttled"}


async def test_a_definition_that_goes_bad_meanwhile_and_is_mended(
    envs: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server does not take any more is not sent again and again; what it still takes is."""
    monkeypatch.setattr(mirror_module, "FIRST_REFUSAL_PAUSE", 2.0)

    def strict(version: Json) -> None:
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
        del status["properties"]["federation"]
        del status["x-kubernetes-preserve-unknown-fields"]

    await do(envs.make, "e", "f")
    async with mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1), pool("f", "east", idle=1))
        for env in "ef":
            await mirror.until_shown(envs, env, {"east": {"p": 1}})
        async with definition(envs.server, strict):
            count = len(mirror.writes())
            await mirror.show(pool("e", "east", idle=2), pool("f", "east", idle=2))
            for env in "ef":
                await mirror.until_env(envs, env, lambda env: foreign(env) == {"east": {"p": 2}})
            assert len(mirror.writes()) - count <= 8
        await mirror.until(lambda: not mirror.troubles)


async def test_a_definition_that_comes_later(envs: Written) -> None:
    server = envs.server
    await do(server.kubectl, "delete", "crd", SANDBOXENVS, "--wait")
    async with mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1))
        await mirror.until(lambda: "not_found" in mirror.reasons())
        await do(server.create_crds, [SANDBOXENVS_CRD])
        await do(envs.make, "e")
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        await mirror.until(lambda: not mirror.troubles)


# Refusals on the way


def refusal(code: int, reason: str = "", **more: Any) -> ApiError:
    """What a server's no is to the sink."""
    return ApiError(f"somewhere: {code} {reason}", code=code, status_reason=reason, **more)


@pytest.mark.parametrize(
    "error, least",
    [
        (refusal(409, "Conflict", message="the object has been modified"), 0.0),
        (refusal(429, "TooManyRequests", retry_after=2.0), 2.0),
        (refusal(429), 0.4),
        (refusal(500, "InternalError", message="etcdserver: request timed out"), 0.4),
        (refusal(503, "ServiceUnavailable"), 0.4),
        (refusal(504, "Timeout"), 0.4),
        (UnreachableError("somewhere: the connection broke"), 0.4),
    ],
    ids=["409", "429-with-a-wait", "429", "500", "503", "504", "broken"],
)
async def test_what_is_refused_once_is_tried_again_after_a_while(error: Exception, least: float, envs: Written) -> None:
    await do(envs.make, "e")
    async with mirroring(envs) as mirror:
        refused: list[Asked] = []

        async def refuse(asked: Asked) -> None:
            if not refused:
                refused.append(asked)
                raise error

        mirror.before = refuse
        await mirror.show(pool("e", "east", idle=1))
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        first, second = mirror.writes()
        assert first is refused[0]
        assert second.at - first.at >= least
        await mirror.until(lambda: not mirror.troubles)


@pytest.mark.parametrize("code", [429, 500])
async def test_a_server_that_has_had_enough_is_asked_less_and_less(code: int, envs: Written) -> None:
    """Many envs, and every write is refused for a while."""
    names = [f"e{number:02}" for number in range(30)]
    await do(envs.make, *names)
    async with mirroring(envs) as mirror:
        refusing = True

        async def refuse(asked: Asked) -> None:
            if refusing:
                raise refusal(code)

        mirror.before = refuse
        await mirror.show(*(pool(name, "east", idle=1) for name in names))
        await mirror.until(lambda: mirror.writes())
        await trio.sleep(2)
        # Of faults that may be those of single envs, some more.
        assert len(mirror.writes()) <= (8 if code == 429 else 8 + mirror_module.FAULTS_OF_THE_SERVER)
        await mirror.until(lambda: mirror.troubles)
        refusing = False
        await mirror.until(lambda: len(mirror.written()) == len(names))
        assert all(foreign(env) == {"east": {"p": 1}} for env in await do(envs.all))
        await mirror.until(lambda: not mirror.troubles)


async def test_one_env_that_is_refused_does_not_cost_the_others(envs: Written) -> None:
    """Whatever is wrong with it; here, somebody has made its status one that the server itself finds bad."""
    await do(envs.make, "e", "f", "g")
    async with mirroring(envs) as mirror:

        async def refuse(asked: Asked) -> None:
            if asked.path.endswith("/e/status"):
                raise refusal(422, "Invalid", message="status.clusters[0]: Invalid value")

        mirror.before = refuse
        for idle in range(1, 4):
            await mirror.show(*(pool(env, "east", idle=idle) for env in "efg"))
            for env in "fg":
                await mirror.until_shown(envs, env, {"east": {"p": idle}})
        assert len(mirror.writes("e")) == 1
        assert mirror.reasons() == ["refused"]
        assert f"{envs.namespace}/e" in mirror.troubles[0].detail


async def test_an_answer_that_is_lost_is_no_rival(envs: Written) -> None:
    """The write is done, and the sink hears nothing of it: what it sees then is its own."""
    await do(envs.make, "e")
    async with mirroring(envs) as mirror:
        for idle in range(1, 3):
            lost: list[Asked] = []

            async def lose(asked: Asked, lost: list[Asked] = lost) -> None:
                if not lost:
                    lost.append(asked)
                    body = json.loads(asked.body)
                    await do(envs.apply, "e", body["status"], MANAGER)
                    raise UnreachableError("somewhere: the connection broke")

            mirror.before = lose
            await mirror.show(pool("e", "east", idle=idle))
            await mirror.until_shown(envs, "e", {"east": {"p": idle}})
            await mirror.until_quiet(0.3)
        # What is thought of the server then, is not thought of anybody else.
        assert mirror.ever <= {"unreachable"}
        assert len(mirror.writes()) <= 4


# The server dies, or falls silent


@pytest.mark.parametrize(
    "down, hurry",
    [(2.0, 1.0), (6.0, 10.0), pytest.param(60.0, 1.0, marks=pytest.mark.slow)],
    ids=["seconds", "a-minute-ten-times-as-fast", "a-minute"],
)
async def test_a_server_that_is_killed_and_comes_back(
    down: float, hurry: float, envs: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has changed meanwhile is shown then, and nothing that was old before. Pauses are shorter by
    `hurry`."""
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(mirror_module, name, getattr(mirror_module, name) / hurry)
    await do(envs.make, "e", "f")
    async with mirroring(envs, ttl=max(120.0, 3 * down), refresh_interval="600s") as mirror:
        await mirror.show(pool("e", "east", idle=1), pool("f", "east", idle=1))
        for env in "ef":
            await mirror.until_shown(envs, env, {"east": {"p": 1}})
        await do(envs.server.kill)
        killed = trio.current_time()
        await mirror.show(pool("e", "east", idle=2), pool("f", "east", idle=1))
        await mirror.until(lambda: "unreachable" in mirror.reasons())
        await trio.sleep_until(killed + down)
        await mirror.show(pool("e", "east", idle=3), pool("f", "east", idle=1))
        # At the longest every 30 s, and half a second at first.
        assert len(mirror.writes()) <= 2 + 3 + math.log2(down * hurry) + down * hurry / 15
        await do(envs.server.start)
        await mirror.until_shown(envs, "e", {"east": {"p": 3}})
        await mirror.until(lambda: not mirror.troubles)
        assert await do(envs.foreign, "f") == {"east": {"p": 1}}
        assert len(mirror.written("f")) == 1
        assert len(mirror.written("e")) == 2


async def test_a_server_that_falls_silent(envs: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are taken all the same, at once."""
    monkeypatch.setattr(sink, "WRITE_DEADLINE", 3.0)
    await do(envs.make, "e")
    async with mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1))
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        await do(envs.server.pause)
        try:
            for idle in range(2, 5):
                with trio.fail_after(1):
                    await mirror.show(pool("e", "east", idle=idle))
            await mirror.until(lambda: "unreachable" in mirror.reasons())
            with trio.fail_after(1):
                await mirror.show(pool("e", "east", idle=5))
        finally:
            await do(envs.server.resume)
        await mirror.until_shown(envs, "e", {"east": {"p": 5}})
        await mirror.until(lambda: not mirror.troubles)
        # One that was sent into the silence may have been done when it ended.
        assert mirror.ever == {"unreachable"}
        await mirror.until_quiet()
        assert await do(envs.foreign, "e") == {"east": {"p": 5}}


async def test_connections_that_break_again_and_again(envs: Written) -> None:
    names = [f"e{number:02}" for number in range(20)]
    await do(envs.make, *names)
    async with (
        relayed(envs.server) as relay,
        mirroring(envs, kubeconfig_via(relay.port, envs.server.kubeconfig), writes_per_second=20) as mirror,
    ):
        for idle in range(1, 4):
            await mirror.show(*(pool(name, "east", idle=idle) for name in names))
            count = len(mirror.written())
            await mirror.until(lambda count=count: len(mirror.written()) >= count + 5)  # type: ignore[misc]
            relay.drop()
        for name in names:
            await mirror.until_shown(envs, name, {"east": {"p": 3}})
        await mirror.until(lambda: not mirror.troubles)
        assert mirror.ever <= {"unreachable"}
