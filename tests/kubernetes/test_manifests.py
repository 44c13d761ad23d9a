"""What config/kubernetes says, after kustomize: everything is hardened, everything that is named exists, the rights are
the fewest, and the configurations in it are good. What a real API server says of it is asked in tests/apiserver."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trustme
import yaml

from tests.apiserver.build import NoToolchain, programs, required
from tests.cli.conftest import Call, call, logs_as_before  # noqa: F401 - fixtures
from trio_federation_kubernetes import cluster_uid
from trio_federation_kubernetes.errors import (
    ApiError,
    KubernetesError,
)
from trio_federation_kubernetes.mapping import Mapper
from trio_federation_kubernetes.options import CrdOptions, Fields, StatusOptions, WarmPoolOptions
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS, SandboxEnvMapper
from trio_federation_kubernetes.sandboxset import SandboxSetMapper
from trio_federation_kubernetes.warmpool import WarmPoolMapper

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "config" / "kubernetes"
PAGE = ROOT / "docs" / "kubernetes.md"

Manifest: TypeAlias = dict[str, Any]

#: every folder that can be built by itself, as it is named below config/kubernetes
BUILDS = sorted(
    path.parent.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("kustomization.yaml")
    if "kind: Kustomization" in path.read_text(encoding="utf-8")
)
OVERLAYS = [name for name in BUILDS if re.fullmatch("overlays/[^/]+", name)]
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())

NAMESPACE = "trio-federation"
AGENT, HUB = "trio-federation-agent", "trio-federation-hub"
#: what whoever runs this makes, and docs/kubernetes.md says how: the secrets, and their keys
SECRETS = {"trio-federation": {"secret", "ca.crt"}, "trio-federation-hub-tls": {"tls.crt", "tls.key"}}
#: what each kind of source reads: API group and resources, by the folder below rbac/SCOPE
READ = {
    "sandboxenvs": ("agents.navix.sh", ["sandboxenvs"]),
    "warmpools": ("extensions.agents.x-k8s.io", ["sandboxwarmpools", "sandboxclaims"]),
    "sandboxsets": ("agents.kruise.io", ["sandboxsets"]),
}
#: what a sink writes, in the same way
WRITTEN = {"sandboxenvs-status": ("agents.navix.sh", ["sandboxenvs/status"])}
#: all folders, with the verbs that each gives
RIGHTS = {
    **{what: (group, resources, ["list", "watch"]) for what, (group, resources) in READ.items()},
    **{what: (group, resources, ["patch"]) for what, (group, resources) in WRITTEN.items()},
}
SCOPES = {"all-namespaces": "ClusterRole", "one-namespace": "Role"}
#: what rbac/cluster-uid gives
CLUSTER_UID = {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": ["kube-system"], "verbs": ["get"]}


@functools.cache
def kubectl() -> str:
    """The path of kubectl: the one on the PATH, else the one that is built for the tests against an API server."""
    if (found := shutil.which("kubectl")) is not None:
        return found
    try:
        return str(programs(os.environ, print).kubectl)
    except NoToolchain as error:
        if required(os.environ):
            raise
        pytest.skip(f"kustomize needs kubectl, and there is none on the PATH; {error}")


def kustomize(folder: Path) -> list[Manifest]:
    """What a folder comes to."""
    built = subprocess.run(
        [kubectl(), "kustomize", str(folder)], capture_output=True, check=False, encoding="utf-8", timeout=60
    )
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return list(yaml.safe_load_all(built.stdout))


@functools.cache
def build(name: str) -> Sequence[Manifest]:
    """The same of a folder below config/kubernetes, asked once."""
    return kustomize(FOLDER / name)


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """The objects of a kind, by name, where names are different."""
    found = [each for each in manifests if each["kind"] == kind]
    by_name = {str(each["metadata"]["name"]): each for each in found}
    assert len(by_name) == len(found)
    return by_name


def only(manifests: Sequence[Manifest], kind: str) -> Manifest:
    """The one object of a kind."""
    (found,) = [each for each in manifests if each["kind"] == kind]
    return found


def deployments(names: Sequence[str] = tuple(BUILDS)) -> Iterator[tuple[str, Manifest]]:
    """Every Deployment of every build, with the build's name."""
    for name in names:
        for each in of_kind(build(name), "Deployment").values():
            yield name, each


def pod_of(deployment: Manifest) -> Manifest:
    """The spec of its pods."""
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


def container_of(deployment: Manifest) -> Manifest:
    """Their one container."""
    (found,) = pod_of(deployment)["containers"]
    return dict(found)


def ports_of(deployment: Manifest) -> dict[str, int]:
    """The container's ports, by name."""
    return {each["name"]: each["containerPort"] for each in container_of(deployment)["ports"]}


def selects(selector: dict[str, str], deployment: Manifest) -> bool:
    """Whether labels choose the pods of a Deployment."""
    labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return selector.items() <= labels.items()


def configuration(manifests: Sequence[Manifest], deployment: Manifest) -> tuple[str, str]:
    """The file that the container is started with, by name, and its text in the ConfigMap that is mounted there."""
    container = container_of(deployment)
    command, path = container["args"]
    assert command == "run"
    folder, _, file = path.rpartition("/")
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == folder]
    (volume,) = [each for each in pod_of(deployment)["volumes"] if each["name"] == mount["name"]]
    return file, of_kind(manifests, "ConfigMap")[volume["configMap"]["name"]]["data"][file]


# Builds.


@pytest.mark.parametrize("name", BUILDS)
def test_every_folder_builds(name: str) -> None:
    assert build(name)


def test_every_folder_is_tested() -> None:
    assert {"agent", "hub", "crd", "namespace", "samples", "overlays/with-hub"} <= set(BUILDS)
    assert len(OVERLAYS) == 3
    assert COMPONENTS == ["podmonitor"]


def test_every_manifest_is_built() -> None:
    """No file lies around that no kustomization takes in; but for the status of samples, which is applied by itself."""
    listed = set()
    for path in FOLDER.rglob("kustomization.yaml"):
        parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
        generated = [file for each in parsed.get("configMapGenerator", ()) for file in each["files"]]
        listed |= {(path.parent / each).resolve() for each in [*parsed.get("resources", ()), *generated]}
    there = {path.resolve() for pattern in ("*.yaml", "*.toml") for path in FOLDER.rglob(pattern)}
    left = {path.name for path in there - listed if path.name != "kustomization.yaml"}
    assert left == {"status-west.yaml", "status-east.yaml"}
    assert {path for path in listed if path.is_file()} <= there


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_can_take_in_the_component_that_it_offers(name: str, tmp_path: Path) -> None:
    copy = shutil.copytree(FOLDER, tmp_path / "kubernetes")
    path = copy / name / "kustomization.yaml"
    text, count = re.subn(
        r"^# (components:)\n# (  - \S+)\n", r"\1\n\2\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert count == 1
    text, count = re.subn(r"^# (images:)\n# (.*)\n# (.*)\n", r"\1\n\2\n\3\n", text, flags=re.MULTILINE)
    assert count == 1
    path.write_text(text, encoding="utf-8")
    manifests = kustomize(copy / name)
    monitor = only(manifests, "PodMonitor")
    assert monitor["metadata"]["namespace"] == NAMESPACE
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["path"], endpoint["honorLabels"]) == ("/metrics", True)
    found = of_kind(manifests, "Deployment").values()
    for each in found:
        assert selects(monitor["spec"]["selector"]["matchLabels"], each)
        assert endpoint["port"] in ports_of(each)
        assert container_of(each)["image"] == f"images.example/trio-federation:{version()}"
    assert len(found) == len(of_kind(build(name), "Deployment"))


# Pods.


def test_there_are_pods_to_look_at() -> None:
    found = [(name, each["metadata"]["name"]) for name, each in deployments()]
    assert ("agent", AGENT) in found
    assert ("hub", HUB) in found
    assert len(found) == 6


def test_pods_are_hardened() -> None:
    for name, deployment in deployments():
        pod = pod_of(deployment)
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }, name
        assert pod["automountServiceAccountToken"] is False
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers", "hostUsers"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            assert all(mount["readOnly"] is True for mount in container["volumeMounts"])
        for volume in pod["volumes"]:
            assert not volume.keys() & {"hostPath", "persistentVolumeClaim"}
            for kind in ("secret", "projected"):
                if kind in volume:
                    assert volume[kind]["defaultMode"] == 0o440, "a secret is read by its group at most"


def test_the_namespace_refuses_pods_that_are_not() -> None:
    labels = only(build("namespace"), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_everything_is_in_the_namespace() -> None:
    for name in ("agent", "hub", *OVERLAYS):
        for each in build(name):
            if each["kind"] in ("Namespace", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
                continue
            assert each["metadata"]["namespace"] == NAMESPACE, (name, each["kind"])
    for name in OVERLAYS:
        assert only(build(name), "Namespace")["metadata"]["name"] == NAMESPACE


def test_there_is_one_agent_at_a_time() -> None:
    for _, deployment in deployments():
        strategy = deployment["spec"]["strategy"]["type"]
        assert strategy == ("Recreate" if deployment["metadata"]["name"] == AGENT else "RollingUpdate")
        assert deployment["spec"]["replicas"] == 1


def test_probes_ask_where_it_is_answered() -> None:
    for name, deployment in deployments():
        container = container_of(deployment)
        for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}
        _, text = configuration(build(name), deployment)
        host, _, port = tomllib.loads(text)["metrics"]["bind"].rpartition(":")
        assert (host, int(port)) == ("0.0.0.0", ports_of(deployment)["metrics"])


def test_time_to_end_is_longer_than_what_it_takes() -> None:
    for _, deployment in deployments():
        assert 5 < pod_of(deployment)["terminationGracePeriodSeconds"] <= 30


def version() -> str:
    """Of this project."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def test_the_image_is_that_of_this_version() -> None:
    for name, deployment in deployments():
        assert container_of(deployment)["image"] == f"trio-federation:{version()}", name


def test_the_containerfile_fits() -> None:
    lines = (FOLDER / "Containerfile").read_text(encoding="utf-8").splitlines()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert f'ENTRYPOINT ["{next(iter(scripts))}"]' in lines
    assert "USER 65532:65532" in lines
    assert f"trio-federation:{version()}" in "\n".join(lines)
    assert (ROOT / "constraints.txt").is_file()


# What is named exists.


def test_configurations_and_secrets_are_there() -> None:
    for name, deployment in deployments():
        manifests = build(name)
        for volume in pod_of(deployment)["volumes"]:
            match volume:
                case {"configMap": source}:
                    assert source["name"] in of_kind(manifests, "ConfigMap"), (name, source)
                case {"secret": source}:
                    keys = SECRETS[source["secretName"]]
                    assert {each["key"] for each in source.get("items", ())} <= keys, (name, source)
                case {"projected": source}:
                    # what every cluster has in every namespace
                    names = [each["configMap"]["name"] for each in source["sources"] if "configMap" in each]
                    assert names == ["kube-root-ca.crt"]
                case _:
                    pytest.fail(f"{name}: no rule for {volume}")


def test_every_volume_is_mounted_and_every_mount_is_a_volume() -> None:
    for name, deployment in deployments():
        mounted = [mount["name"] for mount in container_of(deployment)["volumeMounts"]]
        assert sorted(mounted) == sorted(volume["name"] for volume in pod_of(deployment)["volumes"]), name


def files_of(deployment: Manifest) -> set[str]:
    """The files that come from secrets, by their path in the container."""
    volumes = {volume["name"]: volume for volume in pod_of(deployment)["volumes"]}
    found = set()
    for mount in container_of(deployment)["volumeMounts"]:
        match volumes[mount["name"]]:
            case {"secret": {"items": items}}:
                found |= {f"{mount['mountPath']}/{item['path']}" for item in items}
            case {"secret": {"secretName": secret}}:
                found |= {f"{mount['mountPath']}/{key}" for key in SECRETS[secret]}
    return found


def test_files_that_a_configuration_names_are_mounted() -> None:
    for name, deployment in deployments():
        _, text = configuration(build(name), deployment)
        assert set(re.findall(r'_file = "(.*)"', text)) == files_of(deployment), name


def test_service_accounts_are_there_and_of_use() -> None:
    for name, deployment in deployments():
        account = of_kind(build(name), "ServiceAccount")[pod_of(deployment)["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is False


def test_an_agents_token_lives_for_an_hour_and_is_where_clients_look() -> None:
    for name, deployment in deployments():
        projected = [volume for volume in pod_of(deployment)["volumes"] if "projected" in volume]
        if deployment["metadata"]["name"] == HUB:
            assert projected == [], f"{name}: a hub has no token"
            continue
        (volume,) = projected
        (mount,) = [each for each in container_of(deployment)["volumeMounts"] if each["name"] == volume["name"]]
        assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
        token, authority, namespace = volume["projected"]["sources"]
        # 3607 would be the number that servers take for "as long as ever", and extend to a year
        assert token == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
        assert authority["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        (item,) = namespace["downwardAPI"]["items"]
        # With its version, else the server adds it, and each `kubectl apply` finds a change.
        assert item == {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}


def test_selectors_choose_the_pods_of_one_deployment() -> None:
    seen = set()
    for name in BUILDS:
        found = of_kind(build(name), "Deployment")
        for each in build(name):
            kind, own = each["kind"], each["metadata"]["name"]
            match kind:
                case "Service":
                    selector, suffix = each["spec"]["selector"], "-metrics"
                case "NetworkPolicy":
                    selector, suffix = each["spec"]["podSelector"]["matchLabels"], ""
                case "Deployment":
                    selector, suffix = each["spec"]["selector"]["matchLabels"], ""
                case _:
                    continue
            chosen = [other for other, deployment in found.items() if selects(selector, deployment)]
            assert chosen == [own.removesuffix(suffix)], (name, kind, own)
            seen.add((kind, own))
    assert len(seen) == 7


def test_ports_are_there() -> None:
    services: dict[str, dict[str, int]] = {}
    for name in BUILDS:
        for service in of_kind(build(name), "Service").values():
            (deployment,) = [
                each
                for each in of_kind(build(name), "Deployment").values()
                if selects(service["spec"]["selector"], each)
            ]
            ports = ports_of(deployment)
            for port in service["spec"]["ports"]:
                assert ports[port["targetPort"]] == port["port"]
            services[service["metadata"]["name"]] = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert services == {
        "trio-federation-agent-metrics": {"metrics": 9464},
        "trio-federation-hub": {"grpc": 7443},
        "trio-federation-hub-metrics": {"metrics": 9464},
    }


def test_only_the_hubs_own_service_opens_to_the_outside() -> None:
    opened = set()
    for name in BUILDS:
        for service in of_kind(build(name), "Service").values():
            if service["spec"].get("type", "ClusterIP") != "ClusterIP":
                opened.add((name, service["metadata"]["name"]))
    assert opened == {("overlays/with-hub", HUB)}


def test_network_policies_let_through_what_is_needed_and_nothing_else() -> None:
    seen = set()
    for name, deployment in deployments():
        own = deployment["metadata"]["name"]
        policy = of_kind(build(name), "NetworkPolicy")[own]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        allowed = []
        for rule in policy["ingress"]:
            numbers = [ports_of(deployment)[port["port"]] for port in rule["ports"]]
            assert {port["protocol"] for port in rule["ports"]} == {"TCP"}
            allowed += [(number, rule.get("from", "anybody")) for number in numbers]
        pods: list[Manifest] = [{"namespaceSelector": {}}]
        if own == HUB:
            assert allowed == [(7443, "anybody"), (9464, pods)]
            assert "egress" not in policy, (
                "nothing is let out; an empty list would look changed at each `kubectl apply`"
            )
        else:
            assert allowed == [(9464, pods)]
            leaving = [(port["protocol"], port["port"]) for rule in policy["egress"] for port in rule["ports"]]
            assert leaving == [("UDP", 53), ("TCP", 53), ("TCP", 443), ("TCP", 6443), ("TCP", 7443)]
            assert all(rule.keys() == {"ports"} for rule in policy["egress"])
        seen.add(own)
    assert seen == {AGENT, HUB}


# Rights.


@pytest.mark.parametrize("scope", SCOPES)
def test_there_are_rights_for_each_kind_of_source_and_of_sink(scope: str) -> None:
    assert {path.name for path in (FOLDER / "rbac" / scope).iterdir()} == RIGHTS.keys()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("what", RIGHTS)
def test_rights_are_the_fewest(what: str, scope: str) -> None:
    manifests = build(f"rbac/{scope}/{what}")
    assert [each["kind"] for each in manifests] == [SCOPES[scope], f"{SCOPES[scope]}Binding"]
    role, binding = manifests
    group, resources, verbs = RIGHTS[what]
    assert role["rules"] == [{"apiGroups": [group], "resources": resources, "verbs": verbs}]
    check_role(role, binding, what)


def check_role(role: Manifest, binding: Manifest, what: str) -> None:
    """It is bound to the agent alone, has a name of its own, and grows by nothing."""
    assert role["metadata"]["name"] == f"trio-federation-{what}"
    assert "aggregationRule" not in role
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": role["kind"],
        "name": role["metadata"]["name"],
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": AGENT, "namespace": NAMESPACE}]
    assert "namespace" not in role["metadata"]


def test_the_right_to_know_the_cluster_is_for_one_object() -> None:
    manifests = build("rbac/cluster-uid")
    assert [each["kind"] for each in manifests] == ["ClusterRole", "ClusterRoleBinding"]
    role, binding = manifests
    assert role["rules"] == [CLUSTER_UID]
    check_role(role, binding, "cluster-uid")
    (name,) = CLUSTER_UID["resourceNames"]
    assert f"/api/v1/namespaces/{name}" == cluster_uid.PATH


def test_rights_are_for_what_is_read_and_written() -> None:
    mappers: dict[str, Mapper] = {
        "sandboxenvs": SandboxEnvMapper("west"),
        "warmpools": WarmPoolMapper("west"),
        "sandboxsets": SandboxSetMapper("west"),
    }
    for what, mapper in mappers.items():
        read = [(watched.resource.group, watched.resource.plural) for watched in mapper.watched]
        group, resources = READ[what]
        assert read == [(group, each) for each in resources]
    assert mappers.keys() == READ.keys()
    for group, resources in WRITTEN.values():
        assert [(group, each) for each in resources] == [(SANDBOXENVS.group, f"{SANDBOXENVS.plural}/status")]


def test_nothing_else_gives_rights() -> None:
    """Each overlay has the rights of one kind of source and one of sink, for the agent alone; and but for the one of
    listed namespaces, which stays within them, the right to know the cluster."""
    for name in BUILDS:
        for each in build(name):
            if each["kind"].endswith("Binding"):
                assert [subject["name"] for subject in each["subjects"]] == [AGENT], name
    for name in OVERLAYS:
        given: list[Manifest] = []
        for each in build(name):
            if each["kind"] in ("Role", "ClusterRole"):
                given += [rule for rule in each["rules"] if rule not in given]
        wanted: list[Manifest] = [
            {"apiGroups": ["agents.navix.sh"], "resources": ["sandboxenvs"], "verbs": ["list", "watch"]},
            {"apiGroups": ["agents.navix.sh"], "resources": ["sandboxenvs/status"], "verbs": ["patch"]},
            *([] if name == "overlays/listed-namespaces" else [CLUSTER_UID]),
        ]
        assert sorted(given, key=str) == sorted(wanted, key=str), name
    for name in ("agent", "hub"):
        assert not any("Role" in each["kind"] for each in build(name))


def test_an_agent_writes_what_it_reads_where_it_may() -> None:
    """A sink goes with its rights, and chooses the envs that its source chooses."""
    for name, deployment in deployments():
        if deployment["metadata"]["name"] != AGENT:
            continue
        _, text = configuration(build(name), deployment)
        settings = tomllib.loads(text)
        sinks = settings.get("sink", [])
        given = [
            resource
            for each in build(name)
            if each["kind"] in ("Role", "ClusterRole")
            for rule in each["rules"]
            for resource in rule["resources"]
            if "patch" in rule["verbs"]
        ]
        if name not in OVERLAYS:
            assert (sinks, given) == ([], []), name
            continue
        (source,), (sink,) = settings["source"], sinks
        assert (source.pop("type"), sink.pop("type")) == ("kubernetes", "kubernetes-status")
        assert sink == source, name
        assert set(given) == {"sandboxenvs/status"}


def test_listed_namespaces_are_the_same_in_all_places() -> None:
    manifests = build("overlays/listed-namespaces")
    _, text = configuration(manifests, only(manifests, "Deployment"))
    settings = tomllib.loads(text)
    (source,), (sink,) = settings["source"], settings["sink"]
    assert source["namespaces"] == sink["namespaces"] == ["team-a", "team-b"]
    for kind in ("Role", "RoleBinding"):
        for right in ("sandboxenvs", "sandboxenvs-status"):
            there = [
                each["metadata"]["namespace"]
                for each in manifests
                if (each["kind"], each["metadata"]["name"]) == (kind, f"trio-federation-{right}")
            ]
            assert there == source["namespaces"]
    assert not any(each["kind"].startswith("ClusterRole") for each in manifests)
    for each in manifests:
        if each["kind"] == "RoleBinding":
            assert each["subjects"][0]["namespace"] == NAMESPACE, "the account stays where it is"


# Configurations.


@pytest.mark.parametrize("name", ["agent", "hub", *OVERLAYS])
def test_configurations_are_good(name: str, tmp_path: Path, call: Call) -> None:  # noqa: F811 - the fixture
    """With the secrets in place."""
    authority = trustme.CA()
    own = authority.issue_cert("hub.example")
    content = {
        "secret": b"not much of a secret\n",
        "ca.crt": authority.cert_pem.bytes(),
        "tls.crt": b"".join(each.bytes() for each in own.cert_chain_pems),
        "tls.key": own.private_key_pem.bytes(),
    }
    found = list(deployments([name]))
    assert found
    for index, (_, deployment) in enumerate(found):
        root = tmp_path / str(index)
        for file in files_of(deployment):
            path = root / file.removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content[path.name])
        file, text = configuration(build(name), deployment)
        (root / file).write_text(text.replace('"/run/secrets/', f'"{root}/run/secrets/'), encoding="utf-8")
        ended = call("check", root / file)
        # One secret for all agents is what these files are about, and a hub says so.
        notes = [line for line in ended.lines if "[hub] accept" not in line]
        assert (ended.code, notes) == (0, [])


def test_an_agent_finds_the_hub_of_its_own_cluster() -> None:
    for name in ("agent", "overlays/with-hub"):
        manifests = build(name)
        _, text = configuration(manifests, of_kind(manifests, "Deployment")[AGENT])
        service = of_kind(build("hub"), "Service")[HUB]
        (port,) = service["spec"]["ports"]
        (hub,) = tomllib.loads(text)["federation"]["hubs"]
        assert hub == f"{HUB}.{service['metadata']['namespace']}.svc:{port['port']}"


def test_a_hub_listens_where_it_is_asked() -> None:
    for name, deployment in deployments():
        if deployment["metadata"]["name"] == HUB:
            _, text = configuration(build(name), deployment)
            assert tomllib.loads(text)["hub"]["bind"] == f"0.0.0.0:{ports_of(deployment)['grpc']}"


def test_nobody_serves_people_beyond_the_pod() -> None:
    for name, deployment in deployments():
        _, text = configuration(build(name), deployment)
        settings = tomllib.loads(text)
        assert "admin" not in settings, "the default is loopback"
        assert settings.get("federation", {}).get("insecure", False) is False
        assert settings.get("hub", {}).get("insecure", False) is False


def test_the_two_clusters_are_two() -> None:
    """with-hub and agent-only are the two clusters of docs/kubernetes.md."""
    ids = []
    for name in ("overlays/with-hub", "overlays/agent-only"):
        _, text = configuration(build(name), of_kind(build(name), "Deployment")[AGENT])
        ids.append(tomllib.loads(text)["cluster_id"])
    assert ids == ["west", "east"]


def test_the_page_makes_every_secret() -> None:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    made = [line for line in text.splitlines() if re.search(r"kubectl .*create secret ", line)]
    for secret, keys in SECRETS.items():
        lines = [line for line in made if re.search(rf"create secret \w+ {secret}(?= )", line)]
        assert lines, secret
        for line in lines:
            given = set(re.findall(r"--from-file=([\w.]+)=", line))
            given |= {f"tls.{'crt' if option == 'cert' else 'key'}" for option in re.findall(r"--(cert|key)=", line)}
            assert given == keys


def test_the_page_applies_what_there_is() -> None:
    applied = set(re.findall(r"(?<=config/kubernetes/)[a-z/-]+(?=[\s`])", PAGE.read_text(encoding="utf-8")))
    assert {"crd", "namespace", "overlays/with-hub", "overlays/agent-only"} <= applied


def test_the_page_configures_what_there_is(tmp_path: Path, call: Call) -> None:  # noqa: F811 - the fixture
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        (tmp_path / "agent.toml").write_text(f'cluster_id = "west"\n{example}', encoding="utf-8")
        ended = call("check", tmp_path / "agent.toml")
        assert (ended.code, ended.lines) == (0, [])


def test_the_page_has_every_option() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for options in (WarmPoolOptions, CrdOptions, StatusOptions, Fields):
        for name in options.__struct_fields__:
            assert re.search(rf"^\| (`\w+`, )*`{name}`[ ,].*\|$", text, re.MULTILINE), name


def test_the_page_has_every_reason_for_trouble() -> None:
    shown = re.findall(
        r"^\| `([a-z_]+)` \| ", PAGE.read_text(encoding="utf-8").partition("| `reason` |")[2], re.MULTILINE
    )
    codes = [401, 403, 404, 410, 429, 500, 422]
    answers = [ApiError("", code=code).reason for code in codes]
    others = [error.reason for error in KubernetesError.__subclasses__() if error is not ApiError]
    assert len(others) == 4
    rooms = [ROOT / "plugins/kubernetes/src/trio_federation_kubernetes" / name for name in ("mirror.py", "sink.py")]
    sinks = {
        reason for room in rooms for reason in re.findall(r'Trouble\(\s*"([a-z_]+)"', room.read_text(encoding="utf-8"))
    }
    assert len(sinks) == 7
    # the second table begins like the first
    assert sorted(shown) == sorted([*answers, *others, "schema", "contested", "reason", *sinks])


# The definition of SandboxEnv.


def crd() -> Manifest:
    return only(build("crd"), "CustomResourceDefinition")


def schema() -> Manifest:
    (version,) = crd()["spec"]["versions"]
    found: Manifest = version["schema"]["openAPIV3Schema"]
    return found


def at(path: str) -> Manifest:
    """What the schema says of a field: names joined by dots, items of a list without a sign of their own."""
    found = schema()
    for name in path.split("."):
        if found["type"] == "array":
            found = found["items"]
        found = found["properties"][name]
    return found


def test_names_are_those_of_the_resource() -> None:
    spec = crd()["spec"]
    assert crd()["metadata"]["name"] == "sandboxenvs.agents.navix.sh"
    assert (spec["group"], spec["scope"]) == ("agents.navix.sh", "Namespaced")
    assert spec["names"] == {
        "kind": "SandboxEnv",
        "listKind": "SandboxEnvList",
        "plural": "sandboxenvs",
        "singular": "sandboxenv",
        "shortNames": ["sbe"],
    }
    (version,) = spec["versions"]
    assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
    assert version["subresources"] == {"status": {}}


def test_columns_show_what_is_here_and_what_is_elsewhere() -> None:
    (version,) = crd()["spec"]["versions"]
    columns = {each["name"]: each for each in version["additionalPrinterColumns"]}
    assert {name: (each["jsonPath"], each["type"]) for name, each in columns.items()} == {
        "Clusters": (".status.federation.clusters", "integer"),
        "Idle": (".status.idleReplicas", "integer"),
        "Foreign-Idle": (".status.federation.idleReplicas", "integer"),
        "Foreign-Age": (".status.federation.lastSnapshotTime", "date"),
        "Running": (".status.runningReplicas", "integer"),
        "Desired": (".status.desiredReplicas", "integer"),
        "Age": (".metadata.creationTimestamp", "date"),
    }
    assert list(columns) == ["Clusters", "Idle", "Foreign-Idle", "Foreign-Age", "Running", "Desired", "Age"]
    assert [name for name, each in columns.items() if each.get("priority", 0)] == ["Running", "Desired"]
    for each in columns.values():
        assert re.fullmatch(r"[A-Z].*\.", each["description"])
        if (path := each["jsonPath"].removeprefix(".")).startswith("status."):
            found = at(path)
            assert (found["type"], found["format"]) in (("integer", "int32"), ("string", "date-time"))
            assert (found["format"] == "date-time") == (each["type"] == "date")


ENTRY = "status.clusters"
MEMBER = f"{ENTRY}.observedMembers"


@pytest.mark.parametrize(
    "path",
    [
        *(f"{MEMBER}.{name}" for name in ("idleCount", "runningCount", "desiredReplicas", "pendingRequests")),
        *(f"status.scalingGroups.total{name}" for name in ("Idle", "Running", "Desired", "Pending")),
        *(f"{ENTRY}.scalingGroups.total{name}" for name in ("Idle", "Running", "Desired", "Pending")),
        *(f"{whole}.{name}Replicas" for whole in ("status", ENTRY) for name in ("idle", "running", "desired")),
        "status.federation.clusters",
        "status.federation.idleReplicas",
    ],
)
def test_counts_are_counts(path: str) -> None:
    found = {key: value for key, value in at(path).items() if key != "description"}
    assert found == {"type": "integer", "format": "int32", "minimum": 0}


def test_headroom_may_have_no_ceiling() -> None:
    found = at(f"{MEMBER}.scaleUpHeadroom")
    assert (found["type"], found["format"], found["minimum"]) == ("integer", "int32", -1)


@pytest.mark.parametrize(
    "path, kind, form",
    [
        ("spec.clusters.clusterID", "string", None),
        ("spec.clusters.members.name", "string", None),
        ("spec.clusters.members.scalingGroup", "string", None),
        ("spec.clusters.members.config.scalingGroup", "string", None),
        ("status.clusters.clusterID", "string", None),
        ("status.clusters.isLocal", "boolean", None),
        ("status.clusters.lastSnapshotTime", "string", "date-time"),
        (f"{MEMBER}.name", "string", None),
        (f"{MEMBER}.scalingGroup", "string", None),
        (f"{MEMBER}.autoscalingEnabled", "boolean", None),
        (f"{MEMBER}.saturatedUntil", "string", "date-time"),
        (f"{MEMBER}.state", "string", None),
        ("status.scalingGroups.name", "string", None),
        (f"{ENTRY}.scalingGroups.name", "string", None),
        ("status.federation", "object", None),
        ("status.federation.lastSnapshotTime", "string", "date-time"),
    ],
)
def test_other_fields_are_there(path: str, kind: str, form: str | None) -> None:
    assert (at(path)["type"], at(path).get("format")) == (kind, form)


@pytest.mark.parametrize(
    "path, key",
    [
        (ENTRY, "clusterID"),
        (MEMBER, "name"),
        ("status.scalingGroups", "name"),
        (f"{ENTRY}.scalingGroups", "name"),
    ],
)
def test_lists_have_keys(path: str, key: str) -> None:
    """So that several writers can each own their entries."""
    found = at(path)
    assert found["x-kubernetes-list-type"] == "map"
    assert found["x-kubernetes-list-map-keys"] == [key]
    assert found["items"]["required"] == [key]


def test_sums_of_a_cluster_have_the_same_form_in_its_own_status_and_elsewhere() -> None:
    def form(found: Manifest) -> Manifest:
        return {key: value for key, value in found.items() if key != "description"}

    assert form(at(f"{ENTRY}.scalingGroups")) == form(at("status.scalingGroups"))
    for name in ("idle", "running", "desired"):
        assert form(at(f"{ENTRY}.{name}Replicas")) == form(at(f"status.{name}Replicas"))


def walk(found: Manifest, path: str = "") -> Iterator[tuple[str, Manifest]]:
    """Every part of a schema, with the path to it."""
    yield path, found
    for name, each in found.get("properties", {}).items():
        yield from walk(each, f"{path}.{name}")
    if "items" in found:
        yield from walk(found["items"], f"{path}[]")


def test_what_others_keep_in_an_env_survives() -> None:
    """Each object below spec and status keeps what is not named here; nothing is a closed list of words."""
    for path, each in walk(schema()):
        if each["type"] == "object" and path.startswith((".spec", ".status")):
            assert each.get("x-kubernetes-preserve-unknown-fields") is True, path
        assert "enum" not in each, path
        assert "pattern" not in each, path


def test_every_field_is_described() -> None:
    for path, each in walk(schema()):
        if path != ".metadata":
            assert re.fullmatch(r"[A-Z].*\.", each.get("description", "")), path


# Samples.


def samples() -> list[Manifest]:
    applied = [FOLDER / "samples" / name for name in ("status-west.yaml", "status-east.yaml")]
    statuses = [each for path in applied for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return [*build("samples"), *statuses]


def test_samples_say_only_what_the_schema_has() -> None:
    def known(value: object, found: Manifest, path: str) -> None:
        kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
        assert type(value) is kinds[found["type"]], path
        if isinstance(value, dict):
            for name, each in value.items():
                known(each, found["properties"][name], f"{path}.{name}")
        if isinstance(value, list):
            for each in value:
                known(each, found["items"], f"{path}[]")

    for each in samples():
        assert (each["apiVersion"], each["kind"]) == ("agents.navix.sh/v1alpha1", "SandboxEnv")
        for part in ("spec", "status"):
            if part in each:
                known(each[part], at(part), part)


def test_samples_have_a_status_for_what_there_is() -> None:
    """A status is applied to an env that has to exist already, and in a cluster that the other files speak of."""
    envs = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in build("samples")}
    for each in samples():
        assert (each["metadata"]["namespace"], each["metadata"]["name"]) in envs
        for segment in each.get("status", {}).get("clusters", ()):
            assert segment["isLocal"] is True
            assert segment["clusterID"] in ("west", "east")
