"""What a real API server makes of config/kubernetes: it takes all of it without a warning, admits the pods, gives each
service account its rights and no others, and keeps SandboxEnvs as their definition says. What the manifests say by
themselves is looked at in tests/kubernetes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiserver.build import Programs
from tests.apiserver.cluster import SETTLE_WITHIN, ApiServer, ServerError, ServiceAccount, looked, started

FOLDER = Path(__file__).resolve().parents[2] / "config" / "kubernetes"
NAMESPACE = "trio-federation"
CRD = "sandboxenvs.agents.navix.sh"
SANDBOXENVS = "/apis/agents.navix.sh/v1alpha1/namespaces/team-a/sandboxenvs"

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
READ = {
    "sandboxenvs": RESOURCES[:1],
    "warmpools": RESOURCES[2:4],
    "sandboxsets": RESOURCES[4:5],
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
    again = apply(server, "overlays/with-hub").splitlines()
    assert len(again) == 14
    assert [line for line in again if not line.endswith(" unchanged")] == []


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
    return [{"apiGroups": [group], "resources": [name], "verbs": ["list", "watch"]} for group, name in READ[what]]


def agent_of(server: ApiServer, namespace: str = NAMESPACE) -> ServiceAccount:
    return ServiceAccount(server, namespace, "trio-federation-agent")


@pytest.mark.parametrize("what", READ)
def test_an_agent_may_read_its_pools_everywhere_and_nothing_else(server: ApiServer, what: str) -> None:
    apply(server, "agent")
    apply(server, f"rbac/all-namespaces/{what}")
    try:
        agent = agent_of(server)
        server.wait_until_allowed(agent, rules(what), everywhere=True)
        wanted = {(verb, group, resource) for verb in ("list", "watch") for group, resource in READ[what]}
        assert allowed(server, agent, "") == allowed(server, agent, "team-a") == wanted
        assert allowed(server, ServiceAccount(server, NAMESPACE, "trio-federation-hub"), "") == set()
        assert allowed(server, agent_of(server, "team-a"), "team-a") == set(), "the name alone is nobody"
    finally:
        server.kubectl("delete", "-k", FOLDER / f"rbac/all-namespaces/{what}")


def test_an_agent_of_listed_namespaces_may_read_these_and_no_others(server: ApiServer) -> None:
    apply(server, "overlays/listed-namespaces")
    try:
        agent = agent_of(server)
        for namespace in ("team-a", "team-b"):
            # In the namespace where the pools are, not in that of the account.
            there = ServiceAccount(server, namespace, "trio-federation-agent")
            for verb in ("list", "watch"):
                wait(server, agent, verb, namespace)
            assert allowed(server, agent, namespace) == {
                (verb, "agents.navix.sh", "sandboxenvs") for verb in ("list", "watch")
            }
            assert allowed(server, there, namespace) == set()
        for namespace in ("", "team-c", NAMESPACE):
            assert allowed(server, agent, namespace) == set()
    finally:
        for name in ("team-a", "team-b"):
            server.kubectl("delete", "-k", FOLDER / "overlays/listed-namespaces" / name)


def wait(server: ApiServer, account: ServiceAccount, verb: str, namespace: str) -> None:
    """Until a RoleBinding has reached the part of the server that decides."""
    assert looked(lambda: server.allows(account, verb, "agents.navix.sh", "sandboxenvs", namespace), SETTLE_WITHIN)


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


# SandboxEnvs.


def test_kubectl_shows_what_this_cluster_has(server: ApiServer) -> None:
    lines = server.kubectl("get", "sbe", "--namespace=team-a").splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["NAME", "IDLE", "RUNNING", "DESIRED"],
        ["browser", "3", "1", "4"],
        ["python", "0", "9", "9"],
    ]


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
