"""Clusters that see each other, as their users and operators see it: real API servers, real processes of
`trio-federation`, kubectl, and the manifests. What comes, how soon it goes, what an agent says and does while its API
server is not well, what it says of bad values and bad options, and that it keeps its secrets.

How a source reads is looked at from inside in `test_reading.py` and `test_faults.py`; here, only what is served, logged
and printed counts."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.apiserver.agents import (
    ONLY_PUSHED,
    SANDBOXENVS,
    SECRET,
    WATCHFUL,
    Asking,
    Json,
    account_of,
    apply,
    apply_samples,
    ask,
    create,
    delete,
    end,
    have_env,
    kubeconfig_of,
    own_pool,
    patch_status,
    run_agent,
    series,
    source,
    token_of,
    two_clusters,
)
from tests.apiserver.build import Programs
from tests.apiserver.cluster import ApiServer, StartServer
from tests.apiserver.following import do
from tests.process.running import Program, hub_file, start

#: Seconds for what is pushed, from a kubectl that has ended to the other cluster's agent. It takes about a
#: quarter of one on a machine that is not busy; without a push, it would take two minutes (see ONLY_PUSHED).
SOON = 10.0
#: Seconds within which a metrics scrape, or a probe, has to be answered, whatever hangs.
ANSWERED_WITHIN = 1.0
#: Seconds within which an agent has to end.
ENDED_WITHIN = 5.0

SANDBOXENVS_CRD = "sandboxenvs.agents.navix.sh"
READ_ENVS = [{"apiGroups": ["agents.navix.sh"], "resources": ["sandboxenvs"], "verbs": ["list", "watch"]}]
WARM_POOLS = "sandboxwarmpools.v1beta1.extensions.agents.x-k8s.io"
CLAIMS = "sandboxclaims.v1beta1.extensions.agents.x-k8s.io"
SANDBOX_SETS = "sandboxsets.v1alpha1.agents.kruise.io"


@pytest.fixture(scope="module")
def clusters(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ApiServer]]:
    """Two clusters, "west" and "east", as docs/kubernetes.md leaves them."""
    with two_clusters(apiserver_programs, tmp_path_factory, READ_ENVS) as servers:
        yield servers


@pytest.fixture
def places(clusters: dict[str, ApiServer]) -> Iterator[Callable[[], str]]:
    """Makes namespaces of "west", which are gone afterwards with all that is in them."""
    server = clusters["west"]
    names: list[str] = []

    def make() -> str:
        names.append(server.namespace("place"))
        return names[-1]

    yield make
    for name in names:
        server.delete_namespace(name)


@pytest.fixture
async def hub(nursery: trio.Nursery, tmp_path: Path) -> Program:
    """A hub that runs."""
    return await (await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))).started()


# Two clusters.


async def test_two_clusters_see_each_other(
    clusters: dict[str, ApiServer],
    hub: Program,
    nursery: trio.Nursery,
    tmp_path: Path,
) -> None:
    """From the samples to a create that goes elsewhere. What changes is pushed all the way: nothing is asked for anew,
    and nothing expires, for two minutes."""
    west_server, east_server = clusters["west"], clusters["east"]
    running = {
        name: await run_agent(
            nursery,
            tmp_path / f"{name}.toml",
            name,
            source("kubernetes", kubeconfig=await do(kubeconfig_of, server)),
            hub=hub,
            settings=ONLY_PUSHED,
        )
        for name, server in clusters.items()
    }
    west, east = running["west"], running["east"]
    python, browser = ("team-a", "python"), ("team-a", "browser")
    everything = {
        ("west", *python, "small"): 0,
        ("west", *python, "large"): 0,
        ("east", *python, "small"): 5,
        ("west", *browser, ""): 3,
        ("west", *browser, "gpu"): 1,
        ("east", *browser, ""): 2,
    }
    for agent in running.values():
        assert await agent.until_pools(lambda pools: len(pools) == len(everything)) == everything
        assert (await agent.until_ready())["mode"] == "federated"

    async def soon(agent: Asking, cluster: str, idle: int | None) -> None:
        small = (cluster, *python, "small")
        await agent.until_pools(lambda pools: pools.get(small) == idle, within=SOON)

    # Creates stay where something is idle.
    def set_idle(server: ApiServer, idle: int) -> None:
        member = "/status/clusters/0/observedMembers/0"
        patch = json.dumps(
            [
                {"op": "test", "path": f"{member}/name", "value": "small"},
                {"op": "replace", "path": f"{member}/idleCount", "value": idle},
            ]
        )
        server.kubectl("patch", "sbe", "python", "-n", "team-a", "--subresource=status", "--type=json", "-p", patch)

    await do(set_idle, west_server, 2)
    await soon(west, "west", idle=2)
    placed = await ask(nursery, west, "place", *python)
    assert (placed["local"], placed["target"]) == (True, None)

    # It runs dry.
    await do(set_idle, west_server, 0)
    await soon(west, "west", idle=0)
    placed = await ask(nursery, west, "place", *python)
    assert (placed["local"], placed["target"]) == (False, "east::small")

    # What the other one has is told with everything that is known of it.
    told = await ask(nursery, west, "status", "--namespace", "team-a")
    assert told["readiness"]["ready"]
    assert [(part["name"], part["state"]) for part in told["readiness"]["sources"]] == [
        ("source[0]:kubernetes", "live")
    ]
    (row,) = [
        each for each in told["capacity"]["records"] if each["cluster_id"] == "east" and each["env_name"] == "python"
    ]
    assert {name: row[name] for name in ("member_pool", "scaling_group", "idle", "running", "desired", "capacity")} == {
        "member_pool": "small",
        "scaling_group": "cpu",
        "idle": 5,
        "running": 2,
        "desired": 7,
        "capacity": 12,
    }
    assert (row["state"], row["autoscaling_enabled"]) == ("Active", True)

    # A change there is seen here, and an env that is deleted there is gone here, long before anything could expire.
    await do(set_idle, east_server, 8)
    await soon(west, "east", idle=8)
    await do(delete, east_server, SANDBOXENVS, *python)
    await soon(west, "east", idle=None)
    placed = await ask(nursery, west, "place", *python)
    assert placed["target"] is None
    assert placed["candidates"] == []
    # Nor does what is gone keep it from coming again.
    await do(apply_samples, east_server, "east")
    await soon(west, "east", idle=5)
    assert await east.pools() == await west.pools() == everything

    await end(*[agent.program for agent in running.values()], hub)
    for agent in running.values():
        (listed,) = agent.program.events("kubernetes_listed")
        assert listed["objects"] == 2


def warm_pool(namespace: str, name: str, replicas: int) -> Json:
    """A pool of python."""
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": "python"}},
    }


def claim(namespace: str, name: str, pool: str) -> Json:
    """A claim on a pool, which has no sandbox yet."""
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxClaim",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"warmPoolRef": {"name": pool}},
    }


def sandbox_set(namespace: str, name: str, replicas: int) -> Json:
    """A set of python."""
    return {
        "apiVersion": "agents.kruise.io/v1alpha1",
        "kind": "SandboxSet",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"replicas": replicas, "templateRef": {"name": "python"}},
    }


async def test_pools_of_all_three_kinds_reach_a_cluster_that_has_none(
    clusters: dict[str, ApiServer],
    places: Callable[[], str],
    shared: Path,
    hub: Program,
    nursery: trio.Nursery,
    tmp_path: Path,
) -> None:
    """One agent with a source for each kind, each with the rights that the manifests give in one namespace; another
    one without any source."""
    server = clusters["west"]
    place = await do(places)
    await do(server.create_crds, sorted((shared / "data" / "crds").glob("*.yaml")))
    for what in ("sandboxenvs", "warmpools", "sandboxsets"):
        await do(apply, server, f"rbac/one-namespace/{what}", "--namespace", place)
    kubeconfig = await do(kubeconfig_of, server)
    sources = [
        source(kind, kubeconfig=kubeconfig, namespaces=[place]) for kind in ("kubernetes", "warmpool", "sandboxset")
    ]
    near = await run_agent(nursery, tmp_path / "west.toml", "west", *sources, hub=hub, settings=WATCHFUL)
    far = await run_agent(nursery, tmp_path / "far.toml", "far", hub=hub, settings=ONLY_PUSHED)

    async def seen(**wanted: tuple[int, int, int, int]) -> None:
        """Until the far agent knows these pools of python and no others: idle, running, pending, desired of each."""

        def counts(records: list[Json]) -> Json:
            return {
                each["member_pool"]: tuple(each[name] for name in ("idle", "running", "pending", "desired"))
                for each in records
                if (each["cluster_id"], each["namespace"], each["env_name"]) == ("west", place, "python")
            }

        await far.until_records(lambda records: counts(records) == wanted and len(records) == len(wanted), within=SOON)

    await near.until_ready()
    await seen()
    await have_env(server, "west", place, "python", member=4)
    await do(create, server, warm_pool(place, "warm", 6), sandbox_set(place, "set", 9))
    await do(patch_status, server, WARM_POOLS, place, "warm", {"readyReplicas": 5})
    sets_status = {"observedGeneration": 1, "replicas": 7, "availableReplicas": 7, "updateRevision": "1"}
    sets_status |= {"updatedReplicas": 7, "updatedAvailableReplicas": 7}
    await do(patch_status, server, SANDBOX_SETS, place, "set", sets_status)
    await seen(member=(4, 0, 0, 4), warm=(5, 0, 0, 6), set=(7, 0, 0, 9))

    # Two claims, one of which gets a sandbox.
    await do(create, server, claim(place, "one", "warm"), claim(place, "two", "warm"))
    await seen(member=(4, 0, 0, 4), warm=(5, 0, 2, 6), set=(7, 0, 0, 9))
    await do(patch_status, server, CLAIMS, place, "one", {"sandbox": {"name": "s-1"}})
    await seen(member=(4, 0, 0, 4), warm=(5, 1, 1, 6), set=(7, 0, 0, 9))

    # Each goes by itself.
    await do(delete, server, CLAIMS, place, "two")
    await do(delete, server, SANDBOX_SETS, place, "set")
    await seen(member=(4, 0, 0, 4), warm=(5, 1, 0, 6))
    await do(delete, server, SANDBOXENVS, place, "python")
    await seen(warm=(5, 1, 0, 6))
    await do(delete, server, WARM_POOLS, place, "warm")
    await seen()
    await end(near.program, far.program, hub)


# Days on which the API server is not well.

#: what an agent in trouble has besides, and what the other cluster has
OWN, FAR = ("west", "team-a", "own", "own"), ("far", "team-a", "far", "own")
#: what is to be read, once nothing is in the way
POOL = ("west", "team-a", "python", "member")
TROUBLED = "source[0]:kubernetes"


async def two_agents(
    nursery: trio.Nursery, tmp_path: Path, hub: Program, *sources: str, settings: str = WATCHFUL
) -> tuple[Asking, Asking]:
    """An agent of "west" with these sources, and one that works besides; and the agent of "far", without an API server.
    They know each other's pools."""
    far = await run_agent(
        nursery, tmp_path / "far.toml", "far", own_pool(tmp_path / "far-pool.toml", "far", 2), hub=hub
    )
    own = own_pool(tmp_path / "own-pool.toml", "own", 1)
    west = await run_agent(nursery, tmp_path / "west.toml", "west", *sources, own, hub=hub, settings=settings)
    for agent in (west, far):
        await agent.until_pools(lambda pools: {OWN, FAR} <= pools.keys())
    return west, far


async def assert_in_the_way(west: Asking, far: Asking, reason: str, *words: str) -> None:
    """Wait until this, and nothing else, is in the way of the first source of "west". Everything says so in these
    words; what it would have to say is unknown to all, which is not the same as nothing; and all else works."""
    found = await west.until_trouble(TROUBLED, reason)
    assert series(found, "trio_federation_source_live", source=TROUBLED) == 0
    assert not series(found, "trio_federation_source_records", source=TROUBLED)
    assert series(found, "trio_federation_source_live", source="source[1]:fixtures") == 1
    told = await west.readiness()
    assert not told["ready"]
    (why,) = told["why_not"]
    assert why.startswith(f"{TROUBLED} has not told yet what it has: ")
    (part, other) = told["sources"]
    assert (part["name"], part["state"], other["state"]) == (TROUBLED, "not_live", "live")
    for word in words:
        assert word in why
        assert word in part["last_error"]["text"]
    (hub_part,) = told["hubs"]
    assert hub_part["state"] == "connected"
    for agent in (west, far):
        assert await agent.pools() == {OWN: 1, FAR: 2}
    # Told once, as it is, not at each try.
    (line,) = [
        each
        for each in west.program.events("source_not_live", level="warning")
        if all(w in each["error"] for w in words)
    ]
    assert line["source"] == TROUBLED


async def assert_it_has_recovered(west: Asking, far: Asking) -> None:
    """Wait until nothing is in the way, and see that everybody knows what there is."""
    for agent in (west, far):
        await agent.until_pools(lambda pools: pools == {OWN: 1, FAR: 2, POOL: 7})
    await west.until_ready()
    # This is counted when the source is asked for everything, the next time.
    await west.until_metrics(lambda found: series(found, "trio_federation_source_records", source=TROUBLED) == 1)
    found = await west.until_trouble(TROUBLED)
    assert series(found, "trio_federation_source_live", source=TROUBLED) == 1


async def test_a_server_that_is_down_and_a_definition_that_is_missing_are_waited_for(
    own_api_server: StartServer, hub: Program, nursery: trio.Nursery, tmp_path: Path
) -> None:
    server = await do(own_api_server)
    await do(apply, server, "overlays/agent-only")
    await do(server.kubectl, "create", "namespace", "team-a")
    kubeconfig = await do(kubeconfig_of, server)
    await do(server.stop)
    west, far = await two_agents(nursery, tmp_path, hub, source("kubernetes", kubeconfig=kubeconfig))
    await assert_in_the_way(west, far, "unreachable", SANDBOXENVS_CRD, server.url, "Connection refused")
    await do(server.start)
    advice = f"install the CustomResourceDefinition of {SANDBOXENVS_CRD}, or take the source out"
    await assert_in_the_way(west, far, "not_found", SANDBOXENVS_CRD, "404", advice)
    await do(apply, server, "crd")
    await do(server.wait_for_crd, SANDBOXENVS_CRD)
    await have_env(server, "west", "team-a", "python", member=7)
    await assert_it_has_recovered(west, far)
    await end(west.program, far.program, hub)


async def test_a_kubeconfig_and_rights_that_are_missing_are_waited_for(
    own_api_server: StartServer, hub: Program, nursery: trio.Nursery, tmp_path: Path
) -> None:
    server = await do(own_api_server)
    await do(apply, server, "crd")
    await do(server.wait_for_crd, SANDBOXENVS_CRD)
    await do(apply, server, "namespace")
    await do(apply, server, "agent")
    await do(server.kubectl, "create", "namespace", "team-a")
    await have_env(server, "west", "team-a", "python", member=7)
    later = tmp_path / "later.kubeconfig"
    table = source("kubernetes", kubeconfig=later, namespaces=["team-a"])
    west, far = await two_agents(nursery, tmp_path, hub, table)
    await assert_in_the_way(west, far, "kubeconfig", f"{later}: there is no such file")
    (await do(kubeconfig_of, server)).rename(later)
    advice = f"grant its user list and watch on {SANDBOXENVS_CRD}; config/kubernetes/rbac has the roles"
    await assert_in_the_way(
        west, far, "forbidden", f"{SANDBOXENVS_CRD} in team-a", "403", account_of(server).username, advice
    )
    shown = await start(nursery, "status", "--url", f"http://127.0.0.1:{west.program.admin_port}")
    assert await shown.ended() == 0
    assert shown.output.startswith("not ready\n")
    assert advice in shown.output
    await do(apply, server, "rbac/one-namespace/sandboxenvs", "--namespace", "team-a")
    await assert_it_has_recovered(west, far)
    await end(west.program, far.program, hub)


async def test_a_server_that_falls_silent_holds_up_nobody(
    own_api_server: StartServer, hub: Program, nursery: trio.Nursery, tmp_path: Path
) -> None:
    """An agent that has just lost it, and one that has noticed: both answer, and both can be stopped."""
    server = await do(own_api_server)
    await do(apply, server, "crd")
    await do(server.wait_for_crd, SANDBOXENVS_CRD)
    await do(apply, server, "overlays/agent-only")
    await do(server.wait_until_allowed, account_of(server), READ_ENVS, everywhere=True)
    # Two clusters are pretended here on one server, which a hub that knew of it would not allow.
    await do(server.kubectl, "delete", "clusterrolebinding", "trio-federation-cluster-uid")
    await do(server.kubectl, "create", "namespace", "team-a")
    await have_env(server, "west", "team-a", "python", member=7)
    table = source("kubernetes", kubeconfig=await do(kubeconfig_of, server))
    west, far = await two_agents(nursery, tmp_path, hub, table)
    await assert_it_has_recovered(west, far)
    # Another cluster, as far as the hub is concerned, on the same server.
    second = await run_agent(nursery, tmp_path / "second.toml", "second", table, hub=hub, settings=WATCHFUL)
    await far.until_pools(lambda pools: ("second", *POOL[1:]) in pools)
    await second.until_ready()

    async def assert_answers(agent: Asking) -> None:
        for path in ("/metrics", "/readyz", "/healthz"):
            seconds, answer = await agent.quickest(path)
            assert answer.status_code == 200, "one that was ready stays so"
            assert seconds < ANSWERED_WITHIN

    async def assert_ends(agent: Asking, *pools: tuple[str, str, str, str]) -> None:
        """It is stopped, and what it has told is withdrawn: nobody keeps it until it expires."""
        assert set(pools) <= (await far.pools()).keys()
        began = trio.current_time()
        assert await agent.program.stop() == 0
        assert trio.current_time() - began < ENDED_WITHIN
        await far.until_pools(lambda known: known.keys().isdisjoint(pools), within=SOON)
        assert (await hub.event("reporter_left", cluster=pools[0][0]))["said_goodbye"]
        agent.program.assert_only_logged()

    server.program.pause()
    try:
        await assert_answers(second)
        await assert_ends(second, ("second", *POOL[1:]))
        found = await west.until_trouble(TROUBLED, "unreachable")
        await assert_answers(west)
        assert series(found, "trio_federation_source_live", source="source[1]:fixtures") == 1
        assert server.url in (await west.readiness())["sources"][0]["last_error"]["text"]
        # What it has had from there is unknown to it when it is older than its TTL; what it has besides is not.
        await west.until_pools(lambda pools: POOL not in pools and OWN in pools)
        await assert_ends(west, POOL, OWN)
    finally:
        server.program.resume()
    await end(far.program, hub)


# Bad values.

RUNNER_POOLS = "runnerpools.v1.pools.example"
RUNNER_POOLS_CRD = """\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: runnerpools.pools.example}
spec:
  group: pools.example
  scope: Namespaced
  names: {plural: runnerpools, singular: runnerpool, kind: RunnerPool, listKind: RunnerPoolList}
  versions:
    - name: v1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          properties: {status: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"""


async def test_a_bad_value_costs_its_pool_and_nothing_else(
    clusters: dict[str, ApiServer],
    places: Callable[[], str],
    hub: Program,
    nursery: trio.Nursery,
    tmp_path: Path,
) -> None:
    server = clusters["west"]
    place = await do(places)
    definition = tmp_path / "runnerpools.yaml"
    definition.write_text(RUNNER_POOLS_CRD)
    await do(server.create_crds, [definition])
    rules = [{"apiGroups": ["pools.example"], "resources": ["runnerpools"], "verbs": ["list", "watch"]}]
    account = await do(server.service_account, place, "reader", rules=rules)
    kubeconfig = await do(account.kubeconfig, await do(account.token))

    async def have(name: str, idle: object) -> None:
        metadata = {"namespace": place, "name": name}
        pool = {"apiVersion": "pools.example/v1", "kind": "RunnerPool", "metadata": metadata}
        await do(create, server, pool)
        await do(patch_status, server, RUNNER_POOLS, place, name, {"free": idle})

    def pools(**idle: int) -> dict[tuple[str, str, str, str], int]:
        return {("west", place, name, name): count for name, count in idle.items()}

    bad = {"quantity": "500m", "percent": "10%", "negative": -1, "half": 1.5, "huge": 2**40, "yes": True, "list": [1]}
    await have("good", 3)
    for name, value in bad.items():
        await have(name, value)
    table = source(
        "crd",
        kubeconfig=kubeconfig,
        namespaces=[place],
        group="pools.example",
        version="v1",
        resource="runnerpools",
        fields={"idle": "status.free"},
    )
    west = await run_agent(nursery, tmp_path / "west.toml", "west", table, hub=hub, settings=WATCHFUL)
    far = await run_agent(nursery, tmp_path / "far.toml", "far", hub=hub)
    for agent in (west, far):
        await agent.until_pools(lambda found: found == pools(good=3))
    await west.until_ready()

    # It is counted each time; the log has the first.
    dropped = {"name": "trio_federation_records_dropped_total", "origin": "source:source[0]:crd", "reason": "idle"}
    await west.until_metrics(lambda found: (series(found, **dropped) or 0) >= 3 * len(bad))
    (line,) = west.program.events("record_dropped")
    assert (line["level"], line["origin"], line["reason"]) == ("warning", "source:source[0]:crd", "idle")
    (part,) = (await west.readiness())["sources"]
    assert part["state"] == "live"
    assert part["dropped"].keys() == {"idle"}

    # Others come and change as before; a pool goes where its value goes bad, and comes with a good one.
    await have("later", 5)
    await do(patch_status, server, RUNNER_POOLS, place, "quantity", {"free": 4})
    await far.until_pools(lambda found: found == pools(good=3, later=5, quantity=4), within=SOON)
    await do(patch_status, server, RUNNER_POOLS, place, "good", {"free": "500m"})
    await far.until_pools(lambda found: found == pools(later=5, quantity=4), within=SOON)
    assert len(west.program.events("record_dropped")) == 1
    await end(west.program, far.program, hub)


# Secrets.

#: characters of a secret in a row that would give it away
TRACE = 12


def traces(secret: str) -> set[str]:
    """All that may not be seen of a secret: any part of it, as it is and in base64."""
    encoded = base64.b64encode(secret.encode()).decode()
    return {text[start : start + TRACE] for text in (secret, encoded) for start in range(len(text) - TRACE + 1)}


def assert_silent(text: str, secrets: dict[str, str], where: str) -> None:
    """That a text holds no part of any of these."""
    parts = {text[start : start + TRACE] for start in range(len(text) - TRACE + 1)}
    for name, secret in secrets.items():
        if seen := parts & traces(secret):
            at = text.index(sorted(seen)[0])
            raise AssertionError(f"{where} gives away {name}: {text[max(0, at - 200) : at + 200]}")


def test_the_search_finds_secrets() -> None:
    secret = "a-token-of-many-characters"
    for text in (f"x{secret}y", f"x{secret[5:18]}y", base64.b64encode(secret.encode()).decode()):
        with pytest.raises(AssertionError, match="somewhere gives away the token"):
            assert_silent(f"before {text} after", {"the token": secret}, "somewhere")
    assert_silent(f"nothing of {secret[: TRACE - 1]}", {"the token": secret}, "somewhere")


def private_key(pem: str) -> str:
    """What is secret in a PEM file with certificates besides."""
    return pem.partition("PRIVATE KEY-----\n")[2].partition("-----END ")[0]


async def test_no_secret_of_a_kubeconfig_appears_anywhere(
    clusters: dict[str, ApiServer],
    places: Callable[[], str],
    hub: Program,
    nursery: trio.Nursery,
    tmp_path: Path,
) -> None:
    """An agent with a source for each way in which one signs a request: good ones, ones that the API server refuses,
    and ones that cannot be used."""
    server = clusters["west"]
    four = [await do(places) for _ in range(4)]
    for place in four:
        await have_env(server, "west", place, "python", member=1)
    token = await do(token_of, server)
    by_key = json.loads(server.kubeconfig.read_text())["users"][0]["user"]
    secrets = {
        "a token": token,
        "a key": private_key(server.admin_file.read_text()),
        "key data": by_key["client-key-data"],
        "the hub's secret": SECRET,
        "a wrong token": "wrong-token-4Tq9ZxLw7sPd",
        "a password": "password-2hNc8VbRk5mY",
        "what a plugin is told": "argument-6jXe3UoFa9gD",
        "what a plugin complains of": "complaint-1rBw7KzQi4vS",
        "a password for a proxy": "proxys-5yGt2HpMl8cJ",
        "an unusable key": "unusable-9uWf6EsTn3kA",
        "a token in a broken file": "broken-3oDv8RqXb1zC",
        "a password in an address": "address-7lPm4SxUg2hV",
    }

    def plugin(name: str, *lines: str) -> dict[str, Any]:
        path = tmp_path / name
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)
        variables = [{"name": "WORD", "value": secrets["what a plugin is told"]}]
        exec_ = {"command": str(path), "args": [secrets["what a plugin is told"]], "env": variables}
        return {"exec": exec_ | {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}}

    def written(name: str, user: Json, **cluster: str) -> Path:
        """Write a kubeconfig; the keys of `cluster` have "_" for "-"."""
        path = server.write_kubeconfig(f"secrets-{name}", user)
        document = json.loads(path.read_text())
        document["clusters"][0]["cluster"] |= {key.replace("_", "-"): value for key, value in cluster.items()}
        path.write_text(json.dumps(document))
        return path

    reply = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token}}
    (tmp_path / "token").write_text(token)
    complaint = f"echo {secrets['what a plugin complains of']}"
    basic = {"username": "ana", "password": secrets["a password"]}
    in_address = f"https://ana:{secrets['a password in an address']}@127.0.0.1:{server.port}"
    unusable = "\n".join(["-----BEGIN PRIVATE KEY-----", secrets["an unusable key"], "-----END PRIVATE KEY-----\n"])
    bad_key = {"client-key-data": base64.b64encode(unusable.encode()).decode()}
    broken = tmp_path / "broken.kubeconfig"
    broken.write_text(f"users:\n- name: ana\n  user: {{token: {secrets['a token in a broken file']}, : [}}\n")
    proxy = f"http://ana:{secrets['a password for a proxy']}@127.0.0.1:1"
    good = {
        "token": written("token", {"token": token}),
        "token file": written("token-file", {"tokenFile": str(tmp_path / "token")}),
        "key": server.kubeconfig,
        "plugin": written("plugin", plugin("good", f"echo '{json.dumps(reply)}'", f"{complaint} >&2")),
    }
    #: with the reason for which each is in trouble; API servers of today take no passwords, and whoever shows one for
    #: a stranger
    bad = {
        "wrong token": (written("wrong", {"token": secrets["a wrong token"]}), "unauthorized"),
        "basic": (written("basic", basic), "forbidden"),
        "plugin that fails": (written("fails", plugin("bad", f"{complaint} >&2", complaint, "exit 1")), "credential"),
        "plugin that babbles": (written("babbles", plugin("babbling", complaint)), "credential"),
        "proxy": (written("proxy", {"token": token}, proxy_url=proxy), "unreachable"),
        "unusable key": (written("unusable", {**by_key, **bad_key}), "kubeconfig"),
        "broken file": (broken, "kubeconfig"),
        "address": (written("address", {"token": token}, server=in_address), "kubeconfig"),
    }
    paths = [*good.values(), *[path for path, _ in bad.values()]]
    tables = [
        source("kubernetes", kubeconfig=path, namespaces=[(four * 4)[number]]) for number, path in enumerate(paths)
    ]
    west = await run_agent(nursery, tmp_path / "west.toml", "west", *tables, hub=hub, settings=WATCHFUL)
    await west.until_pools(lambda pools: len(pools) == len(four))
    for number, (_, reason) in enumerate(bad.values(), len(good)):
        await west.until_trouble(f"source[{number}]:kubernetes", reason)
    # How the server is reached is told once, however often the file is read again.
    unusable_key = f"source[{len(good) + list(bad).index('unusable key')}]:kubernetes"
    await west.program.event("kubernetes_failed", number=3, source=unusable_key)
    assert len(west.program.events("kubernetes_connects", source=unusable_key)) == 1
    asked = [
        await start(nursery, "--verbose", *command, "--url", f"http://127.0.0.1:{west.program.admin_port}")
        for command in (["status"], ["place", four[0], "python"])
    ]
    asked.append(await start(nursery, "--verbose", "check", tmp_path / "west.toml"))
    for each in asked:
        assert await each.ended() == 0
    for agent in (west, Asking(hub)):
        arguments = await trio.Path(f"/proc/{agent.program.process.pid}/cmdline").read_text(encoding="utf-8")
        assert_silent(arguments, secrets, "the arguments")
        for path in ("/metrics", "/readyz"):
            _, answer = await agent.quickest(path, tries=1)
            assert_silent(f"{answer.headers}\n{answer.text}", secrets, path)
    assert_silent(json.dumps(await west.records()), secrets, "/v1/capacity")
    await end(west.program, hub)
    for program in (west.program, hub, *asked):
        said = "\n".join([program.output, *program.lines])
        assert len(said) > 100
        assert_silent(said, secrets, program.name)


# What is installed, and what may be configured.


async def test_check_tells_every_fault_of_every_type(nursery: trio.Nursery, tmp_path: Path) -> None:
    runner_pools = {"group": "pools.example", "version": "v1", "resource": "runnerpools"}
    idle = {"idle": "status.free"}
    tables = [
        source("kubernetes", label_selector="team in (blue"),
        source("kubernetes", namespaces=["team-a", "team-b", "team-a"]),
        source("kubernetes", namespace="team-a"),
        source("warmpool", claim=False, page_size=0),
        source("sandboxset", namespaces=[], kubeconfig=5),
        source("sandboxset", namespaces=["Team_A"]),
        source("crd", **runner_pools, fields={**idle, "runing": "status.busy"}),
        source("crd", **{**runner_pools, "resource": "RunnerPools"}, fields={"env": "metadata.name"}),
        source("crd", **runner_pools, fields={**idle, "env": "spec..name"}),
        source("crd", **runner_pools, fields={**idle, "desired": "status.pools[*].size"}),
        source("kubernets"),
        # And one with nothing to say against it.
        source("warmpool", claims=False, namespaces=["team-a"], label_selector="team in (blue), !old", page_size=1),
    ]
    path = tmp_path / "west.toml"
    path.write_text(f'cluster_id = "west"\n{"".join(tables)}')
    checked = await start(nursery, "check", path)
    assert await checked.ended() == 2
    assert checked.output == ""
    assert [line.removeprefix(f"{path}: ") for line in checked.lines] == [
        'source[0]: label_selector \'team in (blue\': position 14: expected "," or ")", got the end',
        "source[1]: namespaces[2] 'team-a' is there twice, first as [0]",
        'source[2].namespace: unknown key; did you mean "namespaces"?',
        'source[3].claim: unknown key; did you mean "claims"?',
        "source[3].page_size: expected a whole number from 1 to 10000",
        "source[4].namespaces: expected a list with at least one namespace; leave it out to read all of them",
        "source[4].kubeconfig: expected the path of a kubeconfig, got a whole number",
        "source[5]: namespaces[0] 'Team_A' is no lower-case RFC 1123 label (at most 63 characters), so it cannot be a "
        "namespace",
        'source[6].fields.runing: unknown key; did you mean "running"?',
        'source[7].resource: expected the lower-case plural of a resource without its group, such as "runnerpools"',
        "source[7].fields.idle: is missing; the table needs it",
        "source[8].fields: env 'spec..name', position 6: a search (\"..\") is not possible; write the whole path to "
        "the one value",
        "source[9].fields: desired 'status.pools[*].size', position 14: a wildcard (\"[*]\") is not possible; a path "
        "names one value",
        "source[10].type: no source type 'kubernets' is installed; did you mean \"kubernetes\"?",
    ]


async def test_the_plugin_is_listed_with_its_four_types(nursery: trio.Nursery) -> None:
    listed = await start(nursery, "plugins", "--json")
    assert await listed.ended() == 0
    (plugin,) = [each for each in json.loads(listed.output)["plugins"] if each["name"] == "kubernetes"]
    assert [each["name"] for each in plugin["sources"]] == ["crd", "kubernetes", "sandboxset", "warmpool"]
    package = "trio-federation-kubernetes"
    assert (plugin["package"], plugin["version"], plugin["failures"]) == (package, version(package), [])
