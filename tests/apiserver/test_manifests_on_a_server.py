"""What a real API server makes of config/kubernetes: it takes all of it without a warning, admits the pods, gives each
service account its rights and no others, and keeps SandboxEnvs as their definition says. What the manifests say by
themselves is looked at in tests/kubernetes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiserver.build import Programs
from tests.apiserver.cluster import (
    SETTLE_WITHIN,
    ApiServer,
    ServerError,
    ServiceAccount,
    looked,
    started,
)
from tests.apiserver.following import do, following
from trio_federation_kubernetes.resources import Resource, Row
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS as SANDBOXENVS_RESOURCE
from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper
from trio_federation_kubernetes.schema import StatusVerdict, check_status

FOLDER = Path(__file__).resolve().parents[2] / "config" / "kubernetes"
PAGE = FOLDER.parents[1] / "docs" / "kubernetes.md"
NAMESPACE = "trio-federation"
CRD = "sandboxenvs.agents.navix.sh"
SANDBOXENVS = "/apis/agents.navix.sh/v1alpha1/namespaces/team-a/sandboxenvs"

#: as whom the view of other clusters is written
MANAGER = "trio-federation"

#: what somebody might try, of what there is in a cluster with all three kinds of pools
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RESOURCES = (
    ("agents.navix.sh", "sandboxenvs"),
    ("agents.navix.sh", "sandboxenvs/status"),
    ("extensions.agents.x-k8s.io", "sandboxwarmpools"),
    ("extensions.agents.x-k8s.io", "sandboxclaims"),
    ("agents.kruise.io", "sandboxsets"),
    ("", "pods"),
    ("", "secrets"),
    ("", "configmaps"),
    ("", "namespaces"),
)
#: by the folder of rbac: verbs, and resources
RIGHTS = {
    "sandboxenvs": (("list", "watch"), RESOURCES[:1]),
    "sandboxenvs-status": (("patch",), RESOURCES[1:2]),
    "warmpools": (("list", "watch"), RESOURCES[2:4]),
    "sandboxsets": (("list", "watch"), RESOURCES[4:5]),
}
#: what the overlays give
READ_AND_WRITTEN = {
    ("list", "agents.navix.sh", "sandboxenvs"),
    ("watch", "agents.navix.sh", "sandboxenvs"),
    ("patch", "agents.navix.sh", "sandboxenvs/status"),
}


@pytest.fixture(scope="module")
def server(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server of this file's own, as the manifests bring namespaces and roles of fixed names; with the definition of
    SandboxEnv, and all namespaces."""
    with started(ApiServer(apiserver_programs, tmp_path_factory.mktemp("manifests"))) as found:
        apply(found, "crd")
        found.wait_for_crd(CRD)
        apply(found, "namespace")
        for name in ("team-a", "team-b", "team-c"):
            found.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        apply(found, "samples")
        status(found, "-f", FOLDER / "samples/status-west.yaml", manager="sample")
        yield found


def apply(server: ApiServer, name: str, *options: str) -> str:
    """`kubectl apply -k` of a folder. What the server warns of is an error."""
    return server.kubectl("apply", "--warnings-as-errors", "--validate=strict", "-k", FOLDER / name, *options)


def status(server: ApiServer, *what: str | Path, manager: str, input: str | None = None) -> str:
    """Apply a status as docs/kubernetes.md does."""
    options = ("--server-side", "--subresource=status", f"--field-manager={manager}")
    return server.kubectl("apply", *options, *what, input=input)


BUILDS = sorted(
    path.parent.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("kustomization.yaml")
    if "kind: Kustomization" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", BUILDS)
def test_the_server_takes_all_of_it(server: ApiServer, name: str) -> None:
    # A Role by itself is of the namespace that is named where it is taken in.
    options = ["--namespace=team-a"] if name.startswith("rbac/one-namespace/") else []
    assert "server dry run" in apply(server, name, "--dry-run=server", *options)


def test_applied_again_nothing_changes(server: ApiServer) -> None:
    apply(server, "overlays/with-hub")
    try:
        again = apply(server, "overlays/with-hub").splitlines()
        assert len(again) == 18
        assert [line for line in again if not line.endswith(" unchanged")] == []
    finally:
        # Tests of one right alone come below.
        for what in ("all-namespaces/sandboxenvs", "all-namespaces/sandboxenvs-status", "cluster-uid"):
            server.kubectl("delete", "-k", FOLDER / f"rbac/{what}")


# Pods.


def pods(server: ApiServer) -> Iterator[dict[str, Any]]:
    """A pod of each Deployment."""
    for name in ("agent", "hub"):
        for each in yaml.safe_load_all(server.kubectl("kustomize", FOLDER / name)):
            if each["kind"] == "Deployment":
                yield {"metadata": {"name": name}, "spec": each["spec"]["template"]["spec"]}


def create_pod(server: ApiServer, pod: dict[str, Any]) -> None:
    server.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod, params={"dryRun": "All"})


def test_pods_are_admitted_where_only_hardened_ones_are(server: ApiServer) -> None:
    found = list(pods(server))
    assert len(found) == 2
    for pod in found:
        create_pod(server, pod)
        del pod["spec"]["containers"][0]["securityContext"]["capabilities"]
        with pytest.raises(ServerError, match="violates PodSecurity") as refused:
            create_pod(server, pod)
        assert refused.value.code == 403


# Rights.


def allowed(server: ApiServer, account: ServiceAccount, namespace: str) -> set[tuple[str, str, str]]:
    """Verb, group and resource of all that an account may do in a namespace, or ("") in all of them."""
    return {
        (verb, group, resource)
        for verb, (group, resource) in itertools.product(VERBS, RESOURCES)
        if server.allows(account, verb, group, resource, namespace)
    }


def rules(what: str) -> list[dict[str, list[str]]]:
    verbs, resources = RIGHTS[what]
    return [{"apiGroups": [group], "resources": [name], "verbs": list(verbs)} for group, name in resources]


def agent_of(server: ApiServer, namespace: str = NAMESPACE) -> ServiceAccount:
    return ServiceAccount(server, namespace, "trio-federation-agent")


@pytest.mark.parametrize("what", RIGHTS)
def test_an_agent_may_do_what_a_folder_says_everywhere_and_nothing_else(server: ApiServer, what: str) -> None:
    apply(server, "agent")
    apply(server, f"rbac/all-namespaces/{what}")
    try:
        agent = agent_of(server)
        server.wait_until_allowed(agent, rules(what), everywhere=True)
        verbs, resources = RIGHTS[what]
        wanted = {(verb, group, resource) for verb in verbs for group, resource in resources}
        assert allowed(server, agent, "") == allowed(server, agent, "team-a") == wanted
        assert allowed(server, ServiceAccount(server, NAMESPACE, "trio-federation-hub"), "") == set()
        assert allowed(server, agent_of(server, "team-a"), "team-a") == set(), "the name alone is nobody"
    finally:
        server.kubectl("delete", "-k", FOLDER / f"rbac/all-namespaces/{what}")


def test_an_agent_of_listed_namespaces_may_read_and_write_there_and_nowhere_else(server: ApiServer) -> None:
    apply(server, "overlays/listed-namespaces")
    try:
        agent = agent_of(server)
        for namespace in ("team-a", "team-b"):
            # In the namespace where the pools are, not in that of the account.
            there = ServiceAccount(server, namespace, "trio-federation-agent")
            for verb, group, resource in READ_AND_WRITTEN:
                wait(server, agent, verb, group, resource, namespace)
            assert allowed(server, agent, namespace) == READ_AND_WRITTEN
            assert allowed(server, there, namespace) == set()
        for namespace in ("", "team-c", NAMESPACE):
            assert allowed(server, agent, namespace) == set()
    finally:
        for name in ("team-a", "team-b"):
            server.kubectl("delete", "-k", FOLDER / "overlays/listed-namespaces" / name)


def wait(server: ApiServer, account: ServiceAccount, verb: str, group: str, resource: str, namespace: str) -> None:
    """Until a RoleBinding has reached the part of the server that decides."""
    assert looked(lambda: server.allows(account, verb, group, resource, namespace), SETTLE_WITHIN)


def test_a_token_of_the_agents_account_lists(server: ApiServer) -> None:
    apply(server, "overlays/agent-only")
    agent = agent_of(server)
    server.wait_until_allowed(agent, rules("sandboxenvs"), everywhere=True)
    kubeconfig = agent.kubeconfig(agent.token())
    assert server.kubectl("get", "sbe", "--all-namespaces", "-o", "name", kubeconfig=kubeconfig).split() == [
        "sandboxenv.agents.navix.sh/browser",
        "sandboxenv.agents.navix.sh/python",
    ]
    with pytest.raises(ServerError, match="cannot get resource"):
        server.kubectl("get", "sbe", "python", "--namespace=team-a", kubeconfig=kubeconfig)


UID_RIGHT = {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": ["kube-system"], "verbs": ["get"]}


async def test_the_agents_account_knows_the_cluster_where_it_may(server: ApiServer) -> None:
    """With the overlay's account, a source tells the UID that the server itself shows. Without the right it tells all
    else, and has no trouble; the right lets nothing else be read."""
    await do(apply, server, "overlays/agent-only")
    agent = agent_of(server)
    await do(lambda: server.wait_until_allowed(agent, [*rules("sandboxenvs"), UID_RIGHT], everywhere=True))
    kubeconfig = await do(lambda: agent.kubeconfig(agent.token()))
    envs = {("team-a", "browser", ""), ("team-a", "python", "small"), ("team-a", "python", "large")}
    uid = (await do(server.call, "GET", "/api/v1/namespaces/kube-system"))["metadata"]["uid"]
    assert re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uid)
    async with following("kubernetes", kubeconfig) as follower:
        await follower.until(lambda: follower.source.cluster_uid() == uid)
        await follower.until(lambda: (follower.says() or {}).keys() == envs)
        assert len(follower.record.of("uid")) == 1
    for path in ("/api/v1/namespaces/team-a", "/api/v1/namespaces", "/api/v1/namespaces/kube-system/configmaps"):
        with server.client(agent.token()) as client:
            assert client.get(path).status_code == 403, path

    await do(server.kubectl, "delete", "-k", FOLDER / "rbac/cluster-uid")
    gone = await do(lambda: looked(lambda: not may_know(server, agent), SETTLE_WITHIN))
    assert gone
    async with following("kubernetes", kubeconfig) as follower:
        await follower.until(lambda: any(asked.over for asked in follower.record.of("uid")))
        await follower.until(lambda: (follower.says() or {}).keys() == envs)
        (asked,) = follower.record.of("uid")
        assert 'cannot get resource "namespaces"' in str(asked.error)
        assert follower.source.cluster_uid() is None
        assert (follower.live, follower.troubles) == (True, [])


def may_know(server: ApiServer, account: ServiceAccount) -> bool:
    """Whether the account may read the one object that has the UID."""
    return server.allows(account, "get", "", "namespaces", "", "kube-system")


def test_a_token_of_the_agents_account_writes_a_status_and_nothing_else(server: ApiServer) -> None:
    apply(server, "overlays/agent-only")
    agent = agent_of(server)
    server.wait_until_allowed(agent, rules("sandboxenvs-status"), everywhere=True)
    body = json.dumps(env("python", metadata={"name": "python", "namespace": "team-a"}, status=foreign()))
    with server.client(agent.token()) as client:

        def answer(path: str, manager: str = MANAGER, body: str = body) -> int:
            content = {"Content-Type": "application/apply-patch+yaml"}
            options = {"fieldManager": manager, "fieldValidation": "Strict"}
            return client.patch(path, content=body, headers=content, params=options).status_code

        try:
            assert answer(f"{SANDBOXENVS}/python/status") == 200
            assert answer(f"{SANDBOXENVS}/python") == 403
            assert client.put(f"{SANDBOXENVS}/python/status", content=body).status_code == 403
            assert client.get(f"{SANDBOXENVS}/python").status_code == 403
            # An env that is not there is not made by the way.
            gone = json.dumps(env("gone", metadata={"name": "gone", "namespace": "team-a"}, status=foreign()))
            assert answer(f"{SANDBOXENVS}/gone/status", body=gone) == 404
        finally:
            foreign_view(server, {})


# SandboxEnvs.


def foreign() -> dict[str, Any]:
    """A view of two other clusters, one of which knows sums only."""
    return {
        "clusters": [
            {
                "clusterID": "east",
                "isLocal": False,
                "lastSnapshotTime": "2020-01-01T00:00:00Z",
                "observedMembers": [
                    {
                        "name": "small",
                        "scalingGroup": "cpu",
                        "idleCount": 5,
                        "runningCount": 2,
                        "desiredReplicas": 7,
                        "pendingRequests": 0,
                        "autoscalingEnabled": True,
                        "scaleUpHeadroom": 12,
                        "saturatedUntil": "2020-01-02T03:04:05Z",
                        "state": "Active",
                    }
                ],
            },
            {
                "clusterID": "north",
                "isLocal": False,
                "lastSnapshotTime": "2010-01-01T00:00:00Z",
                "idleReplicas": 2,
                "runningReplicas": 1,
                "desiredReplicas": 3,
                "scalingGroups": [
                    {"name": "gpu", "totalIdle": 2, "totalRunning": 1, "totalDesired": 3, "totalPending": 0}
                ],
            },
        ],
        "federation": {"clusters": 2, "idleReplicas": 7, "lastSnapshotTime": "2020-01-01T00:00:00Z"},
    }


def foreign_view(server: ApiServer, state: dict[str, Any]) -> None:
    """Write it into the status of python; an empty one takes it away."""
    named = {"name": "python", "namespace": "team-a"}
    status(server, "-f", "-", manager=MANAGER, input=json.dumps(env("python", metadata=named, status=state)))


def columns(told: str) -> list[dict[str, str]]:
    """What kubectl prints in columns: by the heads, where each begins, since what is not there is left blank."""
    head, *lines = told.splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    bounds = list(zip(starts, [*starts[1:], None], strict=True))
    return [{head[begin:end].strip(): line[begin:end].strip() for begin, end in bounds} for line in lines]


def test_kubectl_shows_what_is_here_and_what_is_elsewhere(server: ApiServer) -> None:
    def shown(*options: str) -> list[dict[str, str]]:
        return columns(server.kubectl("get", "sbe", "--namespace=team-a", *options))

    browser, python = shown()
    names = ["NAME", "CLUSTERS", "IDLE", "FOREIGN-IDLE", "FOREIGN-AGE", "AGE"]
    assert list(browser) == names
    assert list(browser.values())[:-1] == ["browser", "", "3", "", ""]
    assert list(python.values())[:-1] == ["python", "", "0", "", ""]
    foreign_view(server, foreign())
    try:
        browser, python = shown("-o", "wide")
        assert list(python) == [*names[:-1], "RUNNING", "DESIRED", "AGE"]
        age = python.pop("FOREIGN-AGE")
        assert re.fullmatch("[0-9]+y([0-9]+d)?", age)
        assert list(python.values())[:-1] == ["python", "2", "0", "7", "9", "9"]
        assert list(browser.values())[:-1] == ["browser", "", "3", "", "", "1", "4"]
    finally:
        foreign_view(server, {})
    assert list(shown()[1].values())[:-1] == ["python", "", "0", "", ""]


def test_what_was_written_is_taken_out_by_hand_as_the_page_says(server: ApiServer) -> None:
    (nothing,) = re.findall(
        r"--field-manager=trio-federation -f - <<EOF\n    (.+)\n    EOF\n", PAGE.read_text(encoding="utf-8")
    )
    before = server.call("GET", f"{SANDBOXENVS}/python")
    foreign_view(server, foreign())
    status(server, "-f", "-", manager="trio-federation", input=nothing)
    after = server.call("GET", f"{SANDBOXENVS}/python")
    assert after["status"] == before["status"]
    others = [each for each in before["metadata"]["managedFields"] if each["manager"] != MANAGER]
    assert after["metadata"]["managedFields"] == others


def test_kubectl_describes_a_view_of_other_clusters(server: ApiServer) -> None:
    foreign_view(server, foreign())
    try:
        told = server.kubectl("describe", "sbe", "python", "--namespace=team-a")
    finally:
        foreign_view(server, {})
    lines = [" ".join(line.split()) for line in told.splitlines()]
    for line in ("Cluster ID: east", "Is Local: false", "Idle Count: 5", "Total Idle: 2", "Federation:", "Clusters: 2"):
        assert line in lines
    # What belongs to no other cluster is as it was.
    assert "Cluster ID: west" in lines
    assert "Is Local: true" in lines


def test_a_view_of_other_clusters_is_nothing_that_this_cluster_has(server: ApiServer) -> None:
    def rows() -> list[Row]:
        mapper = SandboxEnvMapper("west")
        found: list[Row] = []
        for key, each in mapper.watched[0].decoder.page(server.admin.get(SANDBOXENVS).content).objects:
            mapper.take(0, key, each)
            found += mapper.rows(key)
        return found

    before = rows()
    assert [(row.record.env_name, row.record.member_pool) for row in before] == [
        ("browser", ""),
        ("browser", ""),
        ("python", "small"),
        ("python", "large"),
    ]
    foreign_view(server, foreign())
    try:
        assert rows() == before
    finally:
        foreign_view(server, {})


def test_kubectl_explains_the_fields(server: ApiServer) -> None:
    told = server.kubectl("explain", "sandboxenv.status.clusters.observedMembers")
    for name in ("idleCount", "scaleUpHeadroom", "saturatedUntil", "-required-"):
        assert name in told


def env(name: str, **parts: object) -> dict[str, object]:
    return {"apiVersion": "agents.navix.sh/v1alpha1", "kind": "SandboxEnv", "metadata": {"name": name}} | parts


def test_each_segment_has_an_owner(server: ApiServer) -> None:
    """Somebody else adds the segment of another cluster, and takes it away by saying no more of it; the first one, and
    who owns it, stay as they are."""

    def segments() -> list[dict[str, Any]]:
        found = server.call("GET", f"{SANDBOXENVS}/python")["status"]["clusters"]
        assert isinstance(found, list)
        return found

    def mirror(state: object) -> None:
        named = {"name": "python", "namespace": "team-a"}
        status(server, "-f", "-", manager="mirror", input=json.dumps(env("python", metadata=named, status=state)))

    (west,) = segments()
    assert west["clusterID"] == "west"
    time = "2030-01-02T03:04:05.678901Z"
    east = {"clusterID": "east", "isLocal": False, "lastSnapshotTime": time, "observedMembers": [{"name": "a"}]}
    mirror({"clusters": [east]})
    assert segments() == [west, east]
    managed = server.call("GET", f"{SANDBOXENVS}/python")["metadata"]["managedFields"]
    owned = {each["manager"]: each["fieldsV1"].get("f:status", {}).get("f:clusters", {}).keys() for each in managed}
    assert owned["sample"] == {'k:{"clusterID":"west"}'}
    assert owned["mirror"] == {'k:{"clusterID":"east"}'}
    mirror({})
    assert segments() == [west]


# What a server says of its schema.


def verdict(server: ApiServer, resource: Resource) -> StatusVerdict:
    found = check_status(server.call("GET", f"/openapi/v3/apis/{resource.group}/{resource.version}"), resource)
    assert found is not None
    return found


def defined(server: ApiServer, group: str, adapt: Callable[[dict[str, Any]], None]) -> Resource:
    """SandboxEnvs of another group, whose version in the definition is adapted."""
    definition = yaml.safe_load((FOLDER / "crd" / "sandboxenvs.yaml").read_text(encoding="utf-8"))
    resource = Resource(group, "v1alpha1", "sandboxenvs")
    definition["metadata"]["name"] = str(resource)
    definition["spec"]["group"] = group
    del definition["spec"]["names"]["shortNames"]
    (version,) = definition["spec"]["versions"]
    adapt(version)
    server.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(definition))
    server.wait_for_crd(str(resource))
    return resource


def applied(server: ApiServer, resource: Resource, state: object, manager: str = MANAGER) -> tuple[int, dict[str, Any]]:
    """The answer to an apply of the status of its python."""
    body = {
        "apiVersion": f"{resource.group}/{resource.version}",
        "kind": "SandboxEnv",
        "metadata": {"name": "python", "namespace": "team-a"},
        "status": state,
    }
    answer = server.admin.patch(
        f"{resource.path('team-a')}/python/status",
        content=json.dumps(body),
        headers={"Content-Type": "application/apply-patch+yaml"},
        params={"fieldManager": manager, "fieldValidation": "Strict"},
    )
    return answer.status_code, answer.json()


def made(server: ApiServer, resource: Resource) -> None:
    body = env("python") | {"apiVersion": f"{resource.group}/{resource.version}"}
    server.call("POST", resource.path("team-a"), body)


def test_the_schema_says_that_a_view_of_other_clusters_may_be_written(server: ApiServer) -> None:
    document = server.call("GET", "/openapi/v3/apis/agents.navix.sh/v1alpha1")
    (schema,) = [each for name, each in document["components"]["schemas"].items() if name.endswith(".SandboxEnv")]
    clusters = schema["properties"]["status"]["properties"]["clusters"]
    members = clusters["items"]["properties"]["observedMembers"]
    for each, key in ((clusters, "clusterID"), (members, "name")):
        assert (each["x-kubernetes-list-type"], each["x-kubernetes-list-map-keys"]) == ("map", [key])
    found = verdict(server, SANDBOXENVS_RESOURCE)
    assert found.faults == ()
    assert found.fields.federation
    for segment in foreign()["clusters"]:
        assert segment.keys() <= found.fields.entry | {"clusterID"}
        for each in segment.get("observedMembers", ()):
            assert each.keys() <= found.fields.member
    status_code, answer = applied(server, SANDBOXENVS_RESOURCE, foreign())
    try:
        assert (status_code, answer["status"]["federation"]["clusters"]) == (200, 2)
    finally:
        foreign_view(server, {})


def test_a_schema_without_keys_is_a_fault_since_one_writer_would_replace_the_other(server: ApiServer) -> None:
    def adapt(version: dict[str, Any]) -> None:
        clusters = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["clusters"]
        for each in (clusters, clusters["items"]["properties"]["observedMembers"]):
            del each["x-kubernetes-list-type"], each["x-kubernetes-list-map-keys"]

    resource = defined(server, "unkeyed.example.com", adapt)
    assert [line.partition(" so ")[0] for line in verdict(server, resource).faults] == [
        "status.clusters is a list without keys,",
        "status.clusters[].observedMembers is a list without keys,",
    ]
    made(server, resource)
    local = {"clusters": [{"clusterID": "west", "isLocal": True}]}
    assert applied(server, resource, local, manager="owner")[0] == 200
    code, answer = applied(server, resource, {"clusters": foreign()["clusters"]})
    assert (code, [cause["field"] for cause in answer["details"]["causes"]]) == (409, [".status.clusters"])


def test_a_schema_without_a_status_subresource_is_a_fault(server: ApiServer) -> None:
    def adapt(version: dict[str, Any]) -> None:
        del version["subresources"]

    resource = defined(server, "whole.example.com", adapt)
    (fault,) = verdict(server, resource).faults
    assert fault.startswith("sandboxenvs.whole.example.com has no status subresource")
    made(server, resource)
    assert server.admin.patch(f"{resource.path('team-a')}/python/status").status_code == 404


def test_a_server_takes_what_its_schema_is_said_to_have_and_nothing_else(server: ApiServer) -> None:
    """An older definition, of which nothing is kept that it does not name."""

    def close(value: object) -> None:
        if isinstance(value, dict):
            value.pop("x-kubernetes-preserve-unknown-fields", None)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            close(each)

    def adapt(version: dict[str, Any]) -> None:
        close(version)
        version["additionalPrinterColumns"] = []
        state = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        entry = state["clusters"]["items"]["properties"]
        member = entry["observedMembers"]["items"]["properties"]
        del state["federation"], entry["scalingGroups"], entry["runningReplicas"], member["saturatedUntil"]

    resource = defined(server, "closed.example.com", adapt)
    faults, fields = verdict(server, resource)
    assert (faults, fields.federation) == ((), False)
    made(server, resource)
    whole = foreign()
    for name in ("clusters", "federation"):
        code, answer = applied(server, resource, {name: whole[name]})
        assert (code, "field not declared in schema" in answer["message"]) == (500, True)
    known = [
        {name: value for name, value in segment.items() if name in fields.entry | {"clusterID"}}
        for segment in whole["clusters"]
    ]
    for segment in known:
        if "observedMembers" in segment:
            segment["observedMembers"] = [
                {name: value for name, value in each.items() if name in fields.member}
                for each in segment["observedMembers"]
            ]
    code, answer = applied(server, resource, {"clusters": known})
    assert (code, answer["status"]["clusters"]) == (200, known)
    assert known[0]["observedMembers"][0].keys() == foreign()["clusters"][0]["observedMembers"][0].keys() - {
        "saturatedUntil"
    }
    assert known[1].keys() == {"clusterID", "isLocal", "lastSnapshotTime", "idleReplicas", "desiredReplicas"}


# What is kept, taken and refused.


def test_what_others_keep_in_an_env_survives(server: ApiServer) -> None:
    spec = {
        "template": {"containers": [{"image": "x"}]},
        "clusters": [
            {"clusterID": "west", "weight": 1, "members": [{"name": "a", "replicas": 3, "config": {"min": 1}}]}
        ],
    }
    server.call("POST", SANDBOXENVS, env("kept", spec=spec))
    try:
        state = {
            "phase": "Ready",
            "scalingGroups": [{"name": "cpu", "totalIdle": 1, "mode": "fast"}],
            "clusters": [
                {
                    "clusterID": "west",
                    "isLocal": True,
                    "idleZeroSince": "never",
                    "observedMembers": [{"name": "a", "idleCount": 1, "effectiveResources": {"limits": {"cpu": "1"}}}],
                }
            ],
        }
        server.call("PUT", f"{SANDBOXENVS}/kept/status", with_version(server, "kept", state))
        found = server.call("GET", f"{SANDBOXENVS}/kept")
        assert (found["spec"], found["status"]) == (spec, state)
    finally:
        server.call("DELETE", f"{SANDBOXENVS}/kept")


def with_version(server: ApiServer, name: str, state: object) -> dict[str, Any]:
    """An env as it is, with another status."""
    return {**server.call("GET", f"{SANDBOXENVS}/{name}"), "status": state}


def member(**fields: object) -> dict[str, object]:
    return {"clusters": [{"clusterID": "west", "isLocal": True, "observedMembers": [{"name": "a", **fields}]}]}


@pytest.mark.parametrize(
    "state",
    [
        member(idleCount=2**31 - 1, scaleUpHeadroom=-1, autoscalingEnabled=True),
        member(saturatedUntil="2030-01-02T03:04:05.678901Z", state="Whatever"),
        {"clusters": [{"clusterID": "east", "isLocal": False, "lastSnapshotTime": "2030-01-02T03:04:05+02:00"}]},
        {"clusters": []},
        {"idleReplicas": 0},
        {"federation": {"clusters": 0, "idleReplicas": 2**31 - 1, "lastSnapshotTime": "2030-01-02T03:04:05Z", "x": 1}},
        {"clusters": [{"clusterID": "east", "isLocal": False, "idleReplicas": 1, "scalingGroups": [{"name": "gpu"}]}]},
    ],
)
def test_good_values_are_taken(server: ApiServer, state: object) -> None:
    server.call("POST", SANDBOXENVS, env("good"))
    try:
        server.call("PUT", f"{SANDBOXENVS}/good/status", with_version(server, "good", state))
        assert server.call("GET", f"{SANDBOXENVS}/good")["status"] == state
    finally:
        server.call("DELETE", f"{SANDBOXENVS}/good")


@pytest.mark.parametrize(
    "state",
    [
        {"idleReplicas": -1},
        {"idleReplicas": "1"},
        member(idleCount=2**31),
        member(idleCount=1.5),
        member(scaleUpHeadroom=-2),
        member(saturatedUntil="soon"),
        member(name=""),
        {"clusters": [{"isLocal": True}]},
        {"clusters": [{"clusterID": "west"}, {"clusterID": "west"}]},
        {"scalingGroups": [{"totalIdle": 1}]},
        {"federation": {"clusters": -1}},
        {"federation": {"idleReplicas": 2**31}},
        {"federation": {"lastSnapshotTime": "now"}},
        {"clusters": [{"clusterID": "east", "idleReplicas": -1}]},
        {"clusters": [{"clusterID": "east", "scalingGroups": [{"name": "a"}, {"name": "a"}]}]},
    ],
)
def test_bad_values_are_refused(server: ApiServer, state: object) -> None:
    server.call("POST", SANDBOXENVS, env("bad"))
    try:
        with pytest.raises(ServerError) as refused:
            server.call("PUT", f"{SANDBOXENVS}/bad/status", with_version(server, "bad", state))
        assert refused.value.code == 422
    finally:
        server.call("DELETE", f"{SANDBOXENVS}/bad")


def test_the_status_is_a_subresource(server: ApiServer) -> None:
    """Whoever writes the spec cannot write the status by the way."""
    server.call("POST", SANDBOXENVS, env("apart", status={"idleReplicas": 7}))
    try:
        assert "status" not in server.call("GET", f"{SANDBOXENVS}/apart")
    finally:
        server.call("DELETE", f"{SANDBOXENVS}/apart")
