"""The API server that other tests trust in: it is real, says no where it has to, pages, sends bookmarks, forgets what
was compacted, keeps its data through restarts, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.apiserver.build import Programs
from tests.apiserver.cluster import ApiServer, Program, ServerError, StartError, StartServer, free_port, looked

Json = dict[str, Any]
READ = ["get", "list", "watch"]
CRD = """\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: kettles.tests.example}
spec:
  group: tests.example
  scope: Namespaced
  names: {plural: kettles, singular: kettle, kind: Kettle, listKind: KettleList}
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema: {type: object, properties: {spec: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
"""


def configmaps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def create(server: ApiServer, namespace: str, *names: str) -> str:
    """Make ConfigMaps. Returns the resource version of the last one."""
    version = ""
    for name in names:
        made = server.call("POST", configmaps(namespace), {"metadata": {"name": name}, "data": {"a": "b"}})
        version = made["metadata"]["resourceVersion"]
    return version


@contextmanager
def watch(client: httpx.Client, path: str, **parameters: str | int | bool) -> Iterator[Iterator[Json]]:
    """The events of a watch, until the server ends it. Raises ServerError where it is refused."""
    with client.stream("GET", path, params={"watch": True, **parameters}) as answer:
        if answer.is_error:
            raise ServerError(answer.read().decode(), answer.status_code)
        yield map(json.loads, answer.iter_lines())


def code_of_watch(server: ApiServer, path: str, version: str) -> int | None:
    """The status that a watch from this version ends with; it may come as the answer or inside of it."""
    try:
        with watch(server.admin, path, resourceVersion=version, timeoutSeconds=1) as events:
            return next((event["object"]["code"] for event in events if event["type"] == "ERROR"), None)
    except ServerError as error:
        return error.code


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# What runs


def test_the_programs_are_of_the_version_that_is_pinned(api_server: ApiServer, apiserver_programs: Programs) -> None:
    version = apiserver_programs.version
    said = subprocess.run([apiserver_programs.kube_apiserver, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"Kubernetes {version}\n"
    both = json.loads(api_server.kubectl("version", "--output=json"))
    assert (both["clientVersion"]["gitVersion"], both["serverVersion"]["gitVersion"]) == (version, version)
    major, minor, _ = version.removeprefix("v").split(".")
    answer = api_server.call("GET", "/version")
    assert (answer["gitVersion"], answer["major"], answer["minor"]) == (version, major, minor)


def test_kubectl_reads_what_it_has_written(api_server: ApiServer, namespace: str) -> None:
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"key": "ü"}}
    api_server.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(document))
    assert api_server.kubectl("get", "configmap", "a", "-n", namespace, "-o", "jsonpath={.data.key}") == "ü"


def test_kubectl_that_fails_says_why(api_server: ApiServer, namespace: str) -> None:
    with pytest.raises(ServerError, match=r'^kubectl get configmap absent .*configmaps "absent" not found'):
        api_server.kubectl("get", "configmap", "absent", "-n", namespace)


def test_nobody_else_is_trusted(api_server: ApiServer, tmp_path: Path) -> None:
    with httpx.Client(base_url=api_server.url, trust_env=False) as client, pytest.raises(httpx.ConnectError):
        client.get("/readyz")
    stranger = api_server.tls()
    for name in ("localhost", "127.0.0.1", "api.test"):
        with httpx.Client(verify=stranger, trust_env=False) as client:
            # Where the name that is to be checked differs from the address, httpx takes it like this.
            answer = client.get(f"{api_server.url}/readyz", extensions={"sni_hostname": name})
        assert answer.status_code == 200
    with httpx.Client(verify=stranger, trust_env=False) as client, pytest.raises(httpx.ConnectError):
        client.get(f"{api_server.url}/readyz", extensions={"sni_hostname": "elsewhere.test"})


# Who may do what


def test_a_service_account_may_do_what_it_was_given_and_nothing_else(api_server: ApiServer, namespace: str) -> None:
    other = api_server.namespace()
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": READ}]
    able = api_server.service_account(namespace, "able", rules=rules)
    unable = api_server.service_account(namespace, "unable")
    everywhere = api_server.service_account(namespace, "everywhere", cluster_rules=rules)
    paths = [configmaps(namespace), configmaps(other), "/api/v1/configmaps", f"/api/v1/namespaces/{namespace}/secrets"]

    def answers(token: str) -> list[int]:
        with api_server.client(token) as client:
            return [client.get(path).status_code for path in paths]

    assert answers(able.token().value) == [200, 403, 403, 403]
    assert answers(unable.token().value) == [403, 403, 403, 403]
    assert answers(everywhere.token().value) == [200, 200, 200, 403]
    assert answers("made-up") == [401, 401, 401, 401]
    assert api_server.allows(able, "list", "", "configmaps", namespace)
    assert not api_server.allows(able, "delete", "", "configmaps", namespace)
    assert not api_server.allows(able, "list", "", "configmaps")
    api_server.delete_namespace(other)


def test_rights_that_never_come_are_not_waited_for_without_end(
    api_server: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = api_server.service_account(namespace, "agent")
    monkeypatch.setattr("tests.apiserver.cluster.SETTLE_WITHIN", 0.2)
    with pytest.raises(ServerError, match=rf"^{account.username} may not list pods of '', against "):
        api_server.wait_until_allowed(account, [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}])


def test_kubeconfigs_of_a_service_account_are_its_own(api_server: ApiServer, namespace: str, tmp_path: Path) -> None:
    account = api_server.service_account(namespace, "agent")
    token = account.token()
    file = tmp_path / "token"
    file.write_text(token.value)
    for kubeconfig in (account.kubeconfig(token), account.kubeconfig(file)):
        assert kubeconfig.stat().st_mode & 0o077 == 0
        name = api_server.kubectl("auth", "whoami", "-o", "jsonpath={.status.userInfo.username}", kubeconfig=kubeconfig)
        assert name == account.username == f"system:serviceaccount:{namespace}:agent"
    assert token.value not in repr(token)


def test_a_revoked_token_is_void_and_its_watch_goes_on(api_server: ApiServer, namespace: str) -> None:
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": READ}]
    account = api_server.service_account(namespace, "agent", rules=rules)
    first, second = account.token(), account.token()
    path = configmaps(namespace)
    with api_server.client(first) as client, watch(client, path) as events, api_server.client(second) as other:
        account.revoke(first)
        assert looked(lambda: client.get(path).status_code == 401, 20)
        create(api_server, namespace, "a")
        assert next(events)["object"]["metadata"]["name"] == "a"
        assert other.get(path).status_code == 200


# How it lists and watches


def test_lists_come_in_pages(api_server: ApiServer, namespace: str) -> None:
    names = ["a", "b", "c", "d", "e"]
    create(api_server, namespace, *names)
    pages: list[list[str]] = []
    versions = set()
    token = ""
    while token or not pages:
        page = api_server.call("GET", configmaps(namespace), params={"limit": 2, "continue": token})
        pages.append([each["metadata"]["name"] for each in page["items"]])
        versions.add(page["metadata"]["resourceVersion"])
        token = page["metadata"].get("continue", "")
        # What comes in between belongs to no page.
        create(api_server, namespace, f"z{len(pages)}")
    assert pages == [["a", "b"], ["c", "d"], ["e"]]
    assert len(versions) == 1


def test_a_watch_gets_bookmarks_and_ends_in_time(api_server: ApiServer, namespace: str) -> None:
    version = create(api_server, namespace, "a")
    create(api_server, namespace, "b")
    with watch(
        api_server.admin, configmaps(namespace), resourceVersion=version, allowWatchBookmarks=True, timeoutSeconds=4
    ) as events:
        assert next(events)["object"]["metadata"]["name"] == "b"
        # The server sends one two seconds before the end, if there is something newer than what the watch has seen.
        newer = create(api_server, "default", f"of-{namespace}")
        bookmarks = list(events)
    assert {(each["type"], each["object"]["kind"]) for each in bookmarks} == {("BOOKMARK", "ConfigMap")}
    assert int(bookmarks[-1]["object"]["metadata"]["resourceVersion"]) >= int(newer)


def test_a_watch_can_begin_with_what_there_is(api_server: ApiServer, namespace: str) -> None:
    create(api_server, namespace, "a", "b")
    with watch(
        api_server.admin,
        configmaps(namespace),
        sendInitialEvents=True,
        resourceVersionMatch="NotOlderThan",
        allowWatchBookmarks=True,
        timeoutSeconds=5,
    ) as events:
        seen = [next(events) for _ in range(3)]
    assert [event["type"] for event in seen] == ["ADDED", "ADDED", "BOOKMARK"]
    assert seen[2]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


# What it forgets, and what it keeps


def test_what_was_compacted_away_is_too_old(own_api_server: StartServer) -> None:
    server = own_api_server(watch_cache=False)
    path = configmaps("default")
    version = create(server, "default", "a", "b", "c")
    create(server, "default", "d")
    token = server.call("GET", path, params={"limit": 1})["metadata"]["continue"]

    def answers() -> tuple[int, int | None]:
        page = server.admin.get(path, params={"limit": 1, "continue": token})
        return page.status_code, code_of_watch(server, path, version)

    assert answers() == (200, None)
    create(server, "default", "e")
    assert answers() == (200, None)
    assert server.compact() > int(version)
    assert answers() == (410, 410)


@pytest.mark.soak
def test_the_watch_cache_forgets_later_than_the_store(api_server: ApiServer, namespace: str) -> None:
    create(api_server, namespace, "a", "b", "c")
    token = api_server.call("GET", configmaps(namespace), params={"limit": 1})["metadata"]["continue"]
    create(api_server, namespace, "d")
    api_server.compact()

    def answer() -> int:
        return api_server.admin.get(configmaps(namespace), params={"limit": 1, "continue": token}).status_code

    assert answer() == 200
    assert looked(lambda: answer() == 410, 30)


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_new_start_keeps_the_data_and_the_address(how: str, own_api_server: StartServer) -> None:
    server = own_api_server()
    url, pid = server.url, server.program.pid
    version = create(server, "default", "a")
    create(server, "default", "b")
    account = server.service_account("default", "agent")
    kept, revoked = account.token(), account.token()
    with server.client(revoked) as client:
        assert client.get(configmaps("default")).status_code == 403
    account.revoke(revoked)
    if how == "restart":
        server.restart()
    else:
        server.kill()
        assert not server.program.running
        with pytest.raises(httpx.ConnectError):
            server.admin.get("/readyz")
        server.start()
    assert server.url == url
    assert server.program.pid != pid
    assert not alive(pid)
    items = server.call("GET", configmaps("default"))["items"]
    assert {"a", "b"} <= {each["metadata"]["name"] for each in items}
    # The server remembers no events of its former life.
    assert code_of_watch(server, configmaps("default"), version) == 410
    for token, status in ((kept, 403), (revoked, 401)):
        with server.client(token) as client:
            assert client.get(configmaps("default")).status_code == status


def test_a_paused_server_is_silent_and_goes_on_afterwards(own_api_server: StartServer) -> None:
    server = own_api_server()
    server.pause()
    with pytest.raises(httpx.TimeoutException):
        server.admin.get("/readyz", timeout=0.5)
    server.resume()
    assert server.admin.get("/readyz").status_code == 200
    server.pause()
    server.stop()
    assert not server.program.running


def test_a_port_that_is_taken_is_given_up(own_api_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = own_api_server()
    ports = iter([taken.port, free_port()])
    monkeypatch.setattr("tests.apiserver.cluster.free_port", lambda: next(ports))
    other = own_api_server()
    assert other.port != taken.port
    assert other.call("GET", configmaps("default"))["items"] == []
    assert next(ports, None) is None


# What it leaves behind


def test_a_start_that_fails_says_what_the_program_said_and_leaves_nothing(own_api_server: StartServer) -> None:
    with pytest.raises(StartError, match=r"kube-apiserver has ended; its log, \S+, ends with:\n(?s:.*)--no-such-flag"):
        own_api_server(arguments=["--no-such-flag"])


def test_after_the_end_there_are_no_processes_and_no_data(apiserver_programs: Programs, tmp_path: Path) -> None:
    server = ApiServer(apiserver_programs, tmp_path)
    try:
        server.start()
        pids = [server.program.pid, server.etcd.pid]
        assert all(map(alive, pids))
        assert server.program.memory() > server.etcd.memory() > 1_000_000
        server.pause()
    finally:
        server.close()
    assert not any(map(alive, pids))
    assert not (tmp_path / "etcd").exists()
    assert (tmp_path / "kube-apiserver.log").stat().st_size > 0
    server.close()


def test_who_is_killed_takes_the_programs_along(tmp_path: Path) -> None:
    script = f"""
import sys, threading
from pathlib import Path
from tests.apiserver.cluster import Program, looked
programs = [Program(name, Path({str(tmp_path)!r}) / name) for name in ("a", "b")]
def start(program):
    program.start(["/bin/sleep", "600"])
    # Whoever dies before it is what it shall become is noticed in another way.
    assert looked(lambda: Path(f"/proc/{{program.pid}}/comm").read_text() == "sleep\\n", 10)
# Started by a thread that is over soon: that must not be what they live by.
for program in programs:
    thread = threading.Thread(target=start, args=[program])
    thread.start()
    thread.join()
print(*(program.pid for program in programs), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = list(map(int, owner.stdout.readline().split()))
        assert len(pids) == 2
        assert all(map(alive, pids))
        owner.send_signal(signal.SIGKILL)
        assert looked(lambda: not any(map(alive, pids)), 10)


def test_a_program_that_ignores_being_asked_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.apiserver.cluster.STOP_WITHIN", 0.2)
    program = Program("deaf", tmp_path / "log")
    program.start(["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"])
    assert looked(lambda: "ready" in program.log_end(), 10)
    pid = program.pid
    program.stop()
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="deaf is not running"):
        os.kill(program.pid, signal.SIGKILL)


def test_a_deleted_namespace_is_gone_with_all_that_it_held(api_server: ApiServer, tmp_path: Path) -> None:
    definitions = tmp_path / "crd.yaml"
    definitions.write_text(CRD)
    assert api_server.create_crds([definitions]) == ["kettles.tests.example"]
    name = api_server.namespace()
    create(api_server, name, "a")
    rules = [{"apiGroups": ["tests.example"], "resources": ["kettles"], "verbs": READ}]
    api_server.service_account(name, "agent", rules=rules, cluster_rules=rules)
    kettle = {"apiVersion": "tests.example/v1", "kind": "Kettle", "metadata": {"name": "a"}, "spec": {"litres": 2}}
    api_server.call("POST", f"/apis/tests.example/v1/namespaces/{name}/kettles", kettle)
    api_server.delete_namespace(name)
    with pytest.raises(ServerError) as refused:
        api_server.call("GET", f"/api/v1/namespaces/{name}")
    assert refused.value.code == 404
    for path in (configmaps(name), f"/apis/tests.example/v1/namespaces/{name}/kettles"):
        assert api_server.call("GET", path)["items"] == []
    for kind in ("clusterroles", "clusterrolebindings"):
        found = api_server.call("GET", f"/apis/rbac.authorization.k8s.io/v1/{kind}")["items"]
        assert not [each for each in found if each["metadata"]["name"].startswith(name)]


@pytest.mark.parametrize("webhooks", [True, False])
def test_definitions_of_other_projects_are_served(
    webhooks: bool, shared: Path, api_server: ApiServer, namespace: str
) -> None:
    paths = sorted((shared / "data" / "crds").glob("*.yaml"))
    names = api_server.create_crds(paths, webhooks=webhooks)
    assert len(names) == len(paths) > 0
    group = "extensions.agents.x-k8s.io"
    pool = {
        "apiVersion": f"{group}/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"name": "warm", "namespace": namespace},
        "spec": {"replicas": 2, "sandboxTemplateRef": {"name": "python"}},
    }
    api_server.kubectl("create", "-f", "-", input=json.dumps(pool))
    # The version that is stored needs no conversion; the other one does.
    (stored,) = api_server.call("GET", f"/apis/{group}/v1beta1/namespaces/{namespace}/sandboxwarmpools")["items"]
    assert stored["spec"]["replicas"] == 2
    older = api_server.admin.get(f"/apis/{group}/v1alpha1/namespaces/{namespace}/sandboxwarmpools")
    assert older.status_code == (500 if webhooks else 200)
