"""Kubeconfig files and service accounts: what they come to, held against a naive model of the rules, and against
kubectl itself where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kubernetes.kubeconfig_files import (
    CERTIFICATE,
    FILES,
    KEY,
    KUBECTL,
    OTHER_CERTIFICATE,
    config,
    encoded,
    needs_kubectl,
    write,
)
from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.credentials import ExecPlugin, NoCredential, TokenFile, question
from trio_federation_kubernetes.errors import KubeconfigError
from trio_federation_kubernetes.kubeconfig import Kubeconfig, find, in_cluster, merge, read

NOWHERE = Path("/nonexistent/serviceaccount")
EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "plugin", "interactiveMode": "Never"}


def no_clock() -> float:
    return 0.0


def found(
    kubeconfig: Path | None = None,
    context: str | None = None,
    environment: Mapping[str, str] | None = None,
    service_account: Path = NOWHERE,
) -> Access:
    return find(kubeconfig, context, environment or {}, clock=no_clock, wall=no_clock, service_account=service_account)


def fault(*args: Any, **kwargs: Any) -> str:
    """The text of the error; it is one line."""
    with pytest.raises(KubeconfigError) as caught:
        found(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- Merging.


def naive(files: list[dict[str, Any]], kind: str, name: str) -> tuple[int, dict[str, Any]] | None:
    """Which file an entry is from, and what it is: the rule as a person would say it."""
    for index, content in enumerate(files):
        for entry in content.get(kind) or []:
            if entry["name"] == name:
                return index, entry[kind[:-1]] or {}
    return None


def plain(value: Any) -> dict[str, Any]:
    """An entry as in the file, without what is empty."""
    said = {name: getattr(value, name) for name in value.__struct_fields__}
    names = dict(zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True))
    result = {}
    for name, one in said.items():
        if one not in (None, "", False, []):
            result[names[name]] = (
                [plain(item) if hasattr(item, "__struct_fields__") else item for item in one]
                if isinstance(one, list)
                else plain(one)
                if hasattr(one, "__struct_fields__")
                else one
            )
    return result


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_empty(one) for key, one in value.items() if one not in (None, "", False, [])}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


@given(st.lists(FILES, min_size=1, max_size=4))
def test_the_first_file_that_has_an_entry_has_all_of_it(files: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write(Path(folder) / f"{index}", content) for index, content in enumerate(files)]
        merged = merge([one for one in map(read, paths) if one is not None])
    contexts = [content.get("current-context") for content in files]
    assert merged.current_context == next(filter(None, contexts), "")
    for kind in ("clusters", "users", "contexts"):
        entries: Mapping[str, Any] = getattr(merged, kind)
        assert set(entries) == {entry["name"] for content in files for entry in content.get(kind) or []}
        for name, entry in entries.items():
            expected = naive(files, kind, name)
            assert expected is not None
            assert entry.file == paths[expected[0]]
            assert plain(entry.value) == without_empty(expected[1])


def kubectl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    assert KUBECTL is not None
    return subprocess.run(
        [KUBECTL, *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_kubectl
@pytest.mark.slow
@settings(max_examples=25)
@given(files=st.lists(FILES, min_size=1, max_size=3), block=st.booleans())
def test_merging_is_that_of_kubectl(files: list[dict[str, Any]], block: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        paths = []
        for index, content in enumerate(files):
            # In the block style of YAML as well as in JSON, and nothing at all where nothing is said.
            text = yaml.safe_dump(content, allow_unicode=True) if block else json.dumps(content)
            paths.append(write(Path(root) / f"folder{index}" / "config", text if content else ""))
        variable = "::".join(map(str, [*paths, Path(root) / "missing", paths[0]]))
        answer = kubectl("config", "view", "--merge", "--raw", "-o", "json", KUBECONFIG=variable)
        assert answer.returncode == 0, answer.stderr
        shown = json.loads(answer.stdout)
        merged = merge([one for one in map(read, paths) if one is not None])
    assert merged.current_context == shown["current-context"]
    for kind in ("clusters", "users", "contexts"):
        entries: Mapping[str, Any] = getattr(merged, kind)
        expected = {entry["name"]: without_empty(entry[kind[:-1]]) for entry in shown[kind] or []}
        assert {name: plain(entry.value) for name, entry in entries.items()} == expected


def test_several_files_with_empty_and_missing_parts(tmp_path: Path) -> None:
    first = config(name="x")
    second = config(
        name="x", cluster={"server": "https://other.test", "certificate-authority-data": encoded(CERTIFICATE)}
    )
    second["current-context"] = "y"
    a, b = write(tmp_path / "a", first), write(tmp_path / "b", second)
    access = found(environment={"KUBECONFIG": f"{a}::{b}:{tmp_path / 'missing'}"})
    assert (access.server, access.ca) == ("https://west.test:6443", None)
    assert access.name == f"context x of {a}"


# --- Paths and data.


def test_paths_are_from_the_folder_of_the_file_that_names_them(tmp_path: Path) -> None:
    for name, content in (
        ("one/ca", CERTIFICATE),
        ("two/ca", OTHER_CERTIFICATE),
        ("two/key", KEY),
        ("two/c", CERTIFICATE),
    ):
        write(tmp_path / name, content)
    one = write(tmp_path / "one" / "config", {"clusters": config(cluster={"certificate-authority": "ca"})["clusters"]})
    two = write(
        tmp_path / "two" / "config",
        config(cluster={"certificate-authority": "ca"}, user={"client-certificate": "../two/c", "client-key": "./key"}),
    )
    access = found(environment={"KUBECONFIG": f"{one}:{two}"})
    assert access.ca == CERTIFICATE
    assert access.client_certificate == (CERTIFICATE, KEY)
    # A file that is a link is where the link is, not where it leads.
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "config").symlink_to(one)
    write(tmp_path / "three" / "ca", OTHER_CERTIFICATE)
    assert found(environment={"KUBECONFIG": f"{tmp_path}/three/config:{two}"}).ca == OTHER_CERTIFICATE


@needs_kubectl
def test_paths_are_those_of_kubectl(tmp_path: Path) -> None:
    """Made flat by kubectl, a kubeconfig has the content of the files in place of their paths."""
    places = {"a": "ca", "b": "./ca", "c": "../two/ca", "d": str(tmp_path / "two" / "ca"), "e": "deep/../../ca"}
    for folder in ("one", "two", "."):
        write(tmp_path / folder / "ca", CERTIFICATE.replace(b"QUJD", encoded(folder.encode()).encode()))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "config").symlink_to(
        write(
            tmp_path / "one" / "config",
            {
                "clusters": [
                    {"name": name, "cluster": {"server": "https://x", "certificate-authority": place}}
                    for name, place in places.items()
                ],
                "contexts": [{"name": name, "context": {"cluster": name}} for name in places],
            },
        )
    )
    write(tmp_path / "link" / "ca", OTHER_CERTIFICATE)
    for file in (tmp_path / "one" / "config", tmp_path / "link" / "config"):
        answer = kubectl("config", "view", "--flatten", "--raw", "-o", "json", KUBECONFIG=str(file))
        assert answer.returncode == 0, answer.stderr
        for cluster in json.loads(answer.stdout)["clusters"]:
            ca = found(file, cluster["name"]).ca
            assert ca is not None
            assert encoded(ca) == cluster["cluster"]["certificate-authority-data"]


def test_relative_files_work_from_anywhere_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "config", config(user={"exec": {**EXEC, "command": "bin/plugin"}}))
    monkeypatch.chdir(tmp_path)
    credential = found(Path("config")).credential
    assert isinstance(credential, ExecPlugin)
    assert str(tmp_path / "bin" / "plugin") in repr(credential)


def test_data_beats_the_path(tmp_path: Path) -> None:
    said = config(
        cluster={"certificate-authority": "missing", "certificate-authority-data": encoded(CERTIFICATE)},
        user={
            "client-certificate": "missing",
            "client-certificate-data": encoded(OTHER_CERTIFICATE),
            "client-key": "missing",
            "client-key-data": encoded(KEY),
        },
    )
    access = found(write(tmp_path / "config", said))
    assert access.ca == CERTIFICATE
    assert access.client_certificate == (OTHER_CERTIFICATE, KEY)


@pytest.mark.parametrize("bad", ["Y!", "YWJ j", "YW", "YWJ==", "YWJj=", "YWJj====", "=", "é", "-_8="])
def test_bad_base64_names_the_file_and_the_key(tmp_path: Path, bad: str) -> None:
    file = write(tmp_path / "config", config(name="x", cluster={"certificate-authority-data": bad}))
    assert fault(file).startswith(f"{file}: clusters[x].certificate-authority-data: not base64")
    # In any file and any entry, as in kubectl, which does not get so far as to choose one.
    for key in ("client-certificate-data", "client-key-data"):
        other = write(tmp_path / "other", {"users": [{"name": "x", "user": {key: bad}}]})
        good = write(tmp_path / "good", config(name="x"))
        assert fault(environment={"KUBECONFIG": f"{good}:{other}"}).startswith(f"{other}: users[x].{key}: not base64")


def test_base64_may_be_broken_into_lines(tmp_path: Path) -> None:
    text = encoded(CERTIFICATE)
    broken = f"{text[:10]}\n{text[10:20]}\r\n{text[20:]}\n"
    assert found(write(tmp_path / "c", config(cluster={"certificate-authority-data": broken}))).ca == CERTIFICATE


@pytest.mark.parametrize(
    "cluster, user, expected",
    [
        ({"certificate-authority": "missing"}, {}, "clusters[west].certificate-authority: {}/missing cannot be read"),
        ({"certificate-authority": "."}, {}, "clusters[west].certificate-authority: {} cannot be read"),
        ({"certificate-authority-data": "YQ=="}, {}, "clusters[west].certificate-authority-data: has no certificate"),
        (
            {"certificate-authority": "x", "insecure-skip-tls-verify": True},
            {},
            "clusters[west]: has both a certificate-authority and insecure-skip-tls-verify",
        ),
        (
            {"certificate-authority-data": encoded(CERTIFICATE), "insecure-skip-tls-verify": True},
            {},
            "clusters[west]: has both a certificate-authority and insecure-skip-tls-verify",
        ),
        ({}, {"client-certificate": "x"}, "users[west]: has a client-certificate without a client-key"),
        (
            {},
            {"client-certificate-data": encoded(CERTIFICATE), "client-key-data": encoded(CERTIFICATE)},
            "users[west].client-key-data: has no private key",
        ),
        ({"server": ""}, {}, "clusters[west].server: is not there"),
        ({"server": None}, {}, "clusters[west].server: is not there"),
        ({"server": "ftp://x"}, {}, "clusters[west].server: is neither https nor http"),
        ({"server": "https://ana:hunter2@x"}, {}, "clusters[west].server: has a user name or password in it"),
        ({"server": "https://fd00::1:6443"}, {}, "clusters[west].server: is no address; one of IPv6"),
        ({"server": "https://[fd00::1"}, {}, "clusters[west].server: is no address; one of IPv6"),
        ({"server": "https://x:66000"}, {}, "clusters[west].server: is no address"),
        ({"server": "https://:443"}, {}, "clusters[west].server: names no host"),
        ({"server": "https://x y"}, {}, "clusters[west].server: has characters"),
        ({"server": "https://x\n"}, {}, "clusters[west].server: has characters"),
        ({"server": "x:6443"}, {"token": "hunter2"}, "clusters[west].server: has no scheme"),
        ({"server": "x", "insecure-skip-tls-verify": True}, {}, "clusters[west].server: has no scheme"),
        ({"server": "x/prefix"}, {}, "clusters[west].server: has a path and no scheme"),
        ({"proxy-url": "ftp://hunter2@x"}, {}, "clusters[west].proxy-url: is none of http://, https:// and socks5://"),
        ({"proxy-url": "http://"}, {}, "clusters[west].proxy-url: names no host"),
        ({"proxy-url": "http://a:hunter2@[x"}, {}, "clusters[west].proxy-url: is no address"),
        ({}, {"auth-provider": {"name": "gcp"}}, "users[west].auth-provider: is not supported; use an exec plugin"),
        ({}, {"as": "root"}, "users[west].as: is not supported"),
        ({}, {"as-groups": ["system:masters"]}, "users[west].as-groups: is not supported"),
        ({}, {"as-uid": "1"}, "users[west].as-uid: is not supported"),
        ({}, {"as-user-extra": {"a": ["b"]}}, "users[west].as-user-extra: is not supported"),
        ({}, {"token": "t", "username": "u"}, "users[west]: has both a token and a user name"),
        ({}, {"tokenFile": "t", "username": "u"}, "users[west]: has both a token and a user name"),
        ({}, {"token": "hunter2\n"}, "users[west].token: the token has characters that cannot be sent"),
        ({}, {"token": "hunter2é"}, "users[west].token: the token has characters that cannot be sent"),
        ({}, {"username": "hunter2:x"}, "users[west].username: a user name with a colon cannot be sent"),
        ({}, {"exec": {**EXEC, "command": None}}, "users[west].exec.command: is not there"),
        ({}, {"exec": {**EXEC, "apiVersion": None}}, "users[west].exec.apiVersion: is neither"),
        (
            {},
            {"exec": {**EXEC, "apiVersion": "client.authentication.k8s.io/v1alpha1"}},
            "users[west].exec.apiVersion: is neither",
        ),
        ({}, {"exec": {**EXEC, "interactiveMode": "Always"}}, "users[west].exec.interactiveMode: is Always"),
        ({}, {"exec": {**EXEC, "interactiveMode": None}}, "users[west].exec.interactiveMode: must be Never or"),
        ({}, {"exec": {**EXEC, "env": [{"value": "hunter2"}]}}, "users[west].exec.env: has a variable without a name"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], expected: str
) -> None:
    file = write(tmp_path / "config", config(cluster=cluster, user=user))
    text = fault(file)
    assert text.startswith(f"{file}: {expected.format(tmp_path)}")
    assert "hunter2" not in text


# --- Choosing.


def test_names_that_are_not_there(tmp_path: Path) -> None:
    file = write(tmp_path / "config", config())
    assert fault(file, "wset") == (
        f"{file}: the option \"context\" names 'wset', which is not there; did you mean 'west'? There is: 'west'"
    )
    said = config()
    said["current-context"] = "nothing like it"
    write(file, said)
    assert fault(file) == f"{file}: current-context is 'nothing like it', which is not there. There is: 'west'"
    assert found(file, "west").server == "https://west.test:6443"
    write(file, config(context={"cluster": "West"}))
    assert fault(file).startswith(f"{file}: contexts[west].cluster is 'West', which is not there; did you mean 'west'?")
    write(file, config(context={"user": "ana"}))
    assert fault(file).startswith(f"{file}: contexts[west].user is 'ana', which is not there. There is: 'west'")
    write(file, config(context={"cluster": None}))
    assert fault(file).startswith(f"{file}: contexts[west] names no cluster; name one. There is: 'west'")
    del said["current-context"]
    write(file, said)
    assert fault(file).startswith(f"{file}: no context is current; ")
    write(file, "")
    assert fault(file).endswith("There is none at all")
    write(file, {"contexts": [{"name": f"c{index:02}"} for index in range(30)]})
    assert fault(file).endswith("'c08', 'c09' and 20 more")


def test_a_context_without_a_user_is_anonymous(tmp_path: Path) -> None:
    access = found(write(tmp_path / "config", config(context={"user": None}, user={"token": "t"})))
    assert isinstance(access.credential, NoCredential)


@pytest.mark.parametrize("namespace", ["A", "a/b", "-a", "a" * 64, "a.b"])
def test_a_namespace_that_cannot_be_one(tmp_path: Path, namespace: str) -> None:
    file = write(tmp_path / "config", config(context={"namespace": namespace}))
    assert fault(file).startswith(f"{file}: contexts[west].namespace: is no name of a namespace")


@pytest.mark.parametrize(
    "server, expected",
    [
        ("https://10.0.0.1:6443", "https://10.0.0.1:6443"),
        ("https://10.0.0.1:6443/", "https://10.0.0.1:6443"),
        ("https://x/k8s/clusters/c-1//", "https://x/k8s/clusters/c-1"),
        ("https://x/a?b#c", "https://x/a"),
        ("https://[fd00::1]:6443", "https://[fd00::1]:6443"),
        ("https://[fd00::1]", "https://[fd00::1]"),
        ("http://localhost:8080", "http://localhost:8080"),
        ("localhost:8080", "http://localhost:8080"),
        ("10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("10.0.0.1/", "http://10.0.0.1"),
        ("[fd00::1]:8080", "http://[fd00::1]:8080"),
    ],
)
def test_addresses(tmp_path: Path, server: str, expected: str) -> None:
    assert found(write(tmp_path / "config", config(cluster={"server": server}))).server == expected


def test_all_that_a_cluster_and_a_context_can_say(tmp_path: Path) -> None:
    cluster = {"tls-server-name": "api.test", "proxy-url": "socks5://proxy:1", "insecure-skip-tls-verify": True}
    access = found(write(tmp_path / "config", config(cluster=cluster, context={"namespace": "team-a"})))
    assert (access.server_name, access.proxy, access.verify, access.ca) == ("api.test", "socks5://proxy:1", False, None)
    assert access.namespace == "team-a"
    plain = found(write(tmp_path / "config", config()))
    assert (plain.server_name, plain.proxy, plain.verify, plain.ca) == (None, None, True, None)
    assert plain.namespace == "default"


@pytest.mark.parametrize(
    "user, expected",
    [
        ({}, None),
        ({"token": "abc"}, "Bearer abc"),
        ({"tokenFile": "token"}, "Bearer from-file"),
        ({"token": "abc", "tokenFile": "token"}, "Bearer from-file"),
        ({"token": "abc", "tokenFile": "missing"}, "Bearer abc"),
        ({"username": "ana", "password": "ü:"}, "Basic YW5hOsO8Og=="),
        ({"username": "ana"}, "Basic YW5hOg=="),
        # Who has something else runs no plugin.
        ({"token": "abc", "exec": EXEC}, "Bearer abc"),
        ({"username": "ana", "exec": EXEC}, "Basic YW5hOg=="),
        (
            {"client-certificate-data": encoded(CERTIFICATE), "client-key-data": encoded(KEY), "exec": EXEC},
            None,
        ),
        # A key alone means nothing.
        ({"client-key-data": encoded(KEY)}, None),
    ],
)
async def test_which_credential_counts(tmp_path: Path, user: dict[str, Any], expected: str | None) -> None:
    write(tmp_path / "token", "from-file\n")
    access = found(write(tmp_path / "config", config(user=user)))
    assert await access.credential.authorization() == expected
    assert await access.credential.client_certificate() is None


@pytest.mark.parametrize(
    "user",
    [
        {"token": "t"},
        {"tokenFile": "token"},
        {"username": "u"},
        {"exec": EXEC},
        {"client-certificate": "c", "client-key": "k"},
    ],
)
async def test_no_credential_goes_over_plain_http(tmp_path: Path, user: dict[str, Any]) -> None:
    access = found(write(tmp_path / "config", config(cluster={"server": "http://x"}, user=user)))
    assert await access.credential.authorization() is None
    assert access.client_certificate is None
    assert access.name.endswith("(plain http: no credential is sent)")


# --- Where it is looked for.


def service_account(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {"token": b"pod\n", "ca.crt": CERTIFICATE, "namespace": b"pods\n", **files}.items():
        if content:
            (folder / name).write_bytes(content)
    return folder


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


async def test_a_pod(tmp_path: Path) -> None:
    access = found(environment=POD, service_account=service_account(tmp_path / "account"))
    assert access.server == "https://10.96.0.1:443"
    assert access.name == "the pod's service account"
    assert access.namespace == "pods"
    assert (access.ca, access.verify) == (CERTIFICATE, True)
    assert await access.credential.authorization() == "Bearer pod"


def test_a_pod_of_ipv6(tmp_path: Path) -> None:
    environment = {**POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}
    assert found(environment=environment, service_account=service_account(tmp_path)).server == "https://[fd00::1]:443"


def test_files_that_a_pod_may_lack(tmp_path: Path) -> None:
    account = service_account(tmp_path, **{"ca.crt": b"", "namespace": b""})
    access = found(environment=POD, service_account=account)
    assert (access.ca, access.verify, access.namespace) == (None, True, "default")
    assert access.name == f"the pod's service account (without {account}/ca.crt: the system's certificates)"
    assert found(environment={**POD, "POD_NAMESPACE": "mine"}, service_account=account).namespace == "mine"
    (account / "ca.crt").write_bytes(b"nothing")
    assert fault(environment=POD, service_account=account) == f"{account}/ca.crt: has no certificate in PEM"
    (account / "ca.crt").unlink()
    (account / "namespace").write_bytes(b"\xff")
    assert fault(environment=POD, service_account=account).startswith(f"{account}/namespace: is not UTF-8")
    (account / "namespace").write_bytes(b"a/b")
    assert fault(environment=POD, service_account=account).startswith("the pod's namespace: is no name")


def test_a_service_host_that_cannot_be_one(tmp_path: Path) -> None:
    for host, port in (("x y", "443"), ("x", "http"), ("x", "99999")):
        environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        text = fault(environment=environment, service_account=service_account(tmp_path))
        assert text.startswith("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT: ")


def test_no_pod() -> None:
    with pytest.raises(KubeconfigError, match="no pod with a service account: KUBERNETES_SERVICE_PORT is not set"):
        in_cluster({"KUBERNETES_SERVICE_HOST": "x"}, clock=no_clock)


def test_the_order_of_looking(tmp_path: Path) -> None:
    account = service_account(tmp_path / "account")
    home = write(tmp_path / "home" / ".kube" / "config", config(cluster={"server": "https://home"}))
    variable = write(tmp_path / "variable", config(cluster={"server": "https://variable"}))
    option = write(tmp_path / "option", config(cluster={"server": "https://option"}))
    everything = {**POD, "KUBECONFIG": str(variable), "HOME": str(home.parent.parent)}

    def server(kubeconfig: Path | None, context: str | None, *without: str) -> str:
        environment = {name: value for name, value in everything.items() if name not in without}
        return found(kubeconfig, context, environment, account).server

    assert server(option, None) == "https://option"
    assert server(option, "west") == "https://option"
    assert server(None, None) == "https://10.96.0.1:443"
    assert server(None, "west") == "https://variable"
    assert server(None, None, "KUBERNETES_SERVICE_HOST") == "https://variable"
    assert server(None, None, "KUBERNETES_SERVICE_PORT", "KUBECONFIG") == "https://home"
    (account / "token").unlink()
    assert server(None, None) == "https://variable"


def test_nothing_is_found(tmp_path: Path) -> None:
    assert fault(environment={"HOME": str(tmp_path)}) == (
        "no API server is known: this is no pod with a service account (KUBERNETES_SERVICE_HOST is not set); "
        f"KUBECONFIG is not set; there is no {tmp_path}/.kube/config; run in a pod with a service account, or set the "
        'option "kubeconfig" or the variable KUBECONFIG to a file that is there'
    )
    assert "HOME is not set" in fault()
    assert f"(there is no {NOWHERE}/token)" in fault(environment=POD)
    # As in kubectl, the home folder does not stand in for files that are missing.
    write(tmp_path / ".kube" / "config", config())
    text = fault(environment={"HOME": str(tmp_path), "KUBECONFIG": f"{tmp_path}/a::{tmp_path}/b"})
    assert f"KUBECONFIG names no file that is there ({tmp_path}/a, {tmp_path}/b)" in text
    assert "(it is empty)" in fault(environment={"HOME": str(tmp_path), "KUBECONFIG": ":"})
    # And a context is for a file.
    assert "pod with a service account (" not in fault(None, "west", POD)


def test_the_file_of_the_option_must_be_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert fault(missing, environment={"KUBECONFIG": str(write(tmp_path / "there", config()))}).startswith(
        f"{missing}: there is no such file"
    )
    assert fault(tmp_path).startswith(f"{tmp_path}: cannot be read (Is a directory)")
    below = write(tmp_path / "file", "") / "below"
    assert fault(environment={"KUBECONFIG": str(below)}).startswith(f"{below}: cannot be read (Not a directory)")


# --- YAML.


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n# only a comment\n",
        b"null",
        b"users: null\nclusters:\ncontexts: ~\n",
        b"---\n---\ncurrent-context: x",
        b"kind: Config",
        b"{}",
        b"Current-Context: x\nfuture: {y: [1]}",
    ],
)
def test_files_that_say_nothing(tmp_path: Path, content: bytes) -> None:
    kubeconfig = read(write(tmp_path / "config", content))
    assert kubeconfig == Kubeconfig((tmp_path / "config",))


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfcurrent-context: x",
        b'{"current-context":\t"x",\n\t"users":\tnull}',
        b"current-context:\tx\t\n",
        b"current-context: y\ncurrent-context: x\n",
        b"current-context: x\n---\n]]]",
        b"a: &a {current-context: x}\n<<: *a\n",
        b"current-context: !strange x",
        b"current-context: 'x'\r\nusers: []\r\n",
    ],
)
def test_odd_files(tmp_path: Path, content: bytes) -> None:
    kubeconfig = read(write(tmp_path / "config", content))
    assert kubeconfig is not None
    assert kubeconfig.current_context == "x"


@pytest.mark.parametrize(
    "content, expected",
    [
        ("users: [{name: a, user: {token: 12345}}]", "users[a].token: expected `str`, got `int`; put it in quotes"),
        ("users: [{name: a, user: {token: yes}}]", "users[a].token: expected `str`, got `bool`; put it in quotes"),
        ("users: [{name: a, user: {exec: {args: [1.5]}}}]", "users[a].exec.args[0]: expected `str`, got `float`"),
        ("users: [{name: 5}]", "users[0].name: expected `str`, got `int`; put it in quotes"),
        ("users: [x]", "users[0]: expected `object`, got `str`"),
        ("contexts: {}", "contexts: expected `array`, got `object`"),
        (
            "clusters: [{name: a, cluster: {insecure-skip-tls-verify: 'true'}}]",
            "clusters[a].insecure-skip-tls-verify: ",
        ),
        ("contexts: [{name: a}, {name: a}]", "contexts[a] is there twice"),
        ("clusters: [{name: a}, {name: b}, {name: a}]", "clusters[a] is there twice"),
        ("users: [null, null]", "users[] is there twice"),
        ("users:\n\t- name: hunter2", "is no YAML in line 2: "),
        ("current-context: 'hunter2", "is no YAML in line 1: "),
        ("a: b\ntoken: hunter2: x", "is no YAML in line 2: "),
        ("? [hunter2]\n: x", "is no YAML in line 1: found a key that is no text"),
        ("a: *hunter", "is no YAML in line 1: found undefined alias"),
        ("a: !!bool hunter2", "is no YAML in line 1: found a !!bool that is none"),
        ("a: hunter2\x07", "is no YAML: character 11 is one that YAML does not allow"),
        ("hunter2", "is no kubeconfig, as there are no keys in it"),
        ("[]", "is no kubeconfig, as there are no keys in it"),
        ("kind: Pod\napiVersion: v1", "is no kubeconfig, as its kind and apiVersion are not Config and v1"),
        ("apiVersion: v2", "is no kubeconfig, as its kind and apiVersion are not Config and v1"),
        (b"\xff\xfea\x00", "is not UTF-8 (byte 1)"),
        (b"a: b\nc: \xe9", "is not UTF-8 (byte 9)"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str | bytes, expected: str) -> None:
    file = write(tmp_path / "config", content)
    text = fault(file)
    assert text.startswith(f"{file}: {expected}")
    assert "hunter2" not in text


BOMB = "a0: &a0 [{}]\n".format(",".join(["x"] * 10)) + "".join(
    f"a{index}: &a{index} [{','.join([f'*a{index - 1}'] * 10)}]\n" for index in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {k: x}\n" + "".join(
    f"a{index}: &a{index} {{<<: [{','.join([f'*a{index - 1}'] * 10)}]}}\n" for index in range(1, 12)
)


@pytest.mark.parametrize(
    "content, expected",
    [
        (BOMB, "has more than 1000000 values, aliases written out"),
        (MERGE_BOMB, "has more than 1000000 values, aliases written out"),
        ("a: &a [*a]", "an alias in line 1 stands for what it is in"),
        ("a: &a\n  b: {c: *a}", "an alias in line 2 stands for what it is in"),
        ("a: " + "[" * 100 + "]" * 100, "has more than 64 levels"),
        # What this is stopped by depends on the library.
        ("[" * 100_000, ""),
        ("x" * (8 * 1024 * 1024 + 1), "has more than 8388608 bytes"),
    ],
)
def test_files_that_would_cost_too_much(tmp_path: Path, content: str, expected: str) -> None:
    file = write(tmp_path / "config", content)
    assert fault(file).startswith(f"{file}: {expected}")


def test_aliases_are_for_use(tmp_path: Path) -> None:
    text = """
current-context: a
contexts: [{name: a, context: {cluster: a}}, {name: b, context: {cluster: b}}]
clusters:
- name: a
  cluster: &base {server: https://a, proxy-url: http://p:1}
- name: b
  cluster: {<<: *base, server: https://b}
"""
    access = found(write(tmp_path / "config", text), "b")
    assert (access.server, access.proxy) == ("https://b", "http://p:1")


#: plain words of YAML that begin like something else than text
WORDS = (
    "0 1 -1 +1 00 01 08 0x1F 0x 0o17 0b11 -0b11 +0b11 0b12 1_000 _1 1__0 12:30:45 190:20:30.15 1e3 1e+3 1.5 1. .5 .5e3",
    ". .. +.5 .iNf -.nan 1e 0.0.0.0 10.0.0.1 1.2.3 2001-01-01 2001-01-01T00:00:00Z y Y n N yes Yes YES yEs no on off",
    "On OFF true True TRUE tRue false null Null NULL nULL ~ ~~ << = -- -a +a 99999999999999999999 1e400 0777 -0777",
    "0xFFFFFFFFFFFFFFFF 0xFFFFFFFFFFFFFFFFF -9223372036854775808 -9223372036854775809 18446744073709551616 +0x1f 0_7",
    "0X1f 0B1 0O7 1_0.5 a1 é fd00::1 ::1 1,5 +.inf.",
)


def kind(value: object) -> object:
    """What a value is, where numbers are all alike: Go writes 1.0 as 1."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else (type(value), value)


@needs_kubectl
def test_plain_words_are_what_kubectl_takes_them_for(tmp_path: Path) -> None:
    """A token of digits is a number and an error, one like a date is text: kubectl's reader and ours must agree on
    each. An extension is where kubectl shows values as they are."""
    words = " ".join(WORDS).split()
    lines = "".join(f"        w{index}: {word}\n" for index, word in enumerate(words))
    text = f"clusters:\n- name: a\n  cluster:\n    extensions:\n    - name: e\n      extension:\n{lines}"
    file = write(tmp_path / "config", text)
    answer = kubectl("config", "view", "--raw", "-o", "json", KUBECONFIG=str(file))
    assert answer.returncode == 0, answer.stderr
    theirs = json.loads(answer.stdout)["clusters"][0]["cluster"]["extensions"][0]["extension"]
    kubeconfig = read(file)
    assert kubeconfig is not None
    extension = (kubeconfig.clusters["a"].value.extensions or [None])[0]
    assert extension is not None
    named = {word: (extension.extension[f"w{index}"], theirs[f"w{index}"]) for index, word in enumerate(words)}
    assert {word: pair for word, pair in named.items() if kind(pair[0]) != kind(pair[1])} == {}


# --- Plugins.


PLUGIN = """#!/bin/sh
printf %s "$KUBERNETES_EXEC_INFO" > "$(dirname "$0")/info"
echo '{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{"token":"t"}}'
"""


@needs_kubectl
@pytest.mark.parametrize("told", [True, False])
def test_a_plugin_is_told_what_kubectl_tells_it(tmp_path: Path, told: bool) -> None:
    write(tmp_path / "ca", trustme.CA().cert_pem.bytes())
    plugin = write(tmp_path / "plugin", PLUGIN)
    plugin.chmod(0o755)
    extension = {"audience": "<b>", "n": 1, "f": 1.5, "z": None, "list": [True]}
    said = config(
        cluster={
            "server": "https://127.0.0.1:1/prefix/",
            "tls-server-name": "api.test",
            "proxy-url": "http://127.0.0.1:2",
            "certificate-authority": "ca",
            "disable-compression": True,
            "extensions": [
                {"name": "other", "extension": {}},
                {"name": "client.authentication.k8s.io/exec", "extension": extension},
            ],
        },
        user={"exec": {**EXEC, "command": "./plugin", "provideClusterInfo": told}},
    )
    file = write(tmp_path / "config", said)
    # Nobody listens there, which is all the same: the plugin comes first.
    kubectl("get", "--raw", "/version", KUBECONFIG=str(file))
    credential = found(file).credential
    assert isinstance(credential, ExecPlugin)
    assert json.loads(question(credential.plugin)) == json.loads((tmp_path / "info").read_text())


def test_what_a_plugin_is_given(tmp_path: Path) -> None:
    said = {
        **EXEC,
        "args": ["get", None, "token"],
        "env": [{"name": "A", "value": "1"}, {"name": "PATH", "value": "/b"}, {"name": "EMPTY"}],
        "installHint": "install it",
    }
    file = write(tmp_path / "config", config(user={"exec": said}))
    credential = found(file, environment={"PATH": "/a", "HOME": "/h"}).credential
    assert isinstance(credential, ExecPlugin)
    plugin = credential.plugin
    assert (plugin.place, plugin.command) == (f"{file}: users[west].exec", "plugin")
    assert plugin.arguments == ("get", "", "token")
    assert plugin.environment == {"PATH": "/b", "HOME": "/h", "A": "1", "EMPTY": ""}
    assert plugin.install_hint == "install it"
    # Older plugins need not say whether they ask anything.
    old = {**EXEC, "apiVersion": "client.authentication.k8s.io/v1beta1", "interactiveMode": None}
    assert isinstance(found(write(file, config(user={"exec": old}))).credential, ExecPlugin)


# --- Secrets.


@pytest.mark.parametrize(
    "user",
    [
        {"token": "hunter2"},
        {"token": "hunter2", "tokenFile": "x"},
        {"username": "ana", "password": "hunter2"},
        {"client-certificate-data": encoded(CERTIFICATE), "client-key-data": encoded(KEY + b"hunter2")},
        {"exec": {**EXEC, "args": ["hunter2"], "env": [{"name": "A", "value": "hunter2"}]}},
    ],
)
def test_no_secret_shows_itself(tmp_path: Path, user: dict[str, Any]) -> None:
    file = write(tmp_path / "config", config(cluster={"proxy-url": "http://ana:hunter2@proxy"}, user=user))
    kubeconfig = read(file)
    assert kubeconfig is not None
    access = found(file)
    shown = f"{access!r} {access.credential!r} {kubeconfig!r} {kubeconfig.users!r} {kubeconfig.clusters!r}"
    assert "hunter2" not in shown
    assert encoded(KEY + b"hunter2") not in shown


def test_a_token_file_need_not_be_there_yet(tmp_path: Path) -> None:
    access = found(write(tmp_path / "config", config(user={"tokenFile": "later"})))
    assert isinstance(access.credential, TokenFile)
