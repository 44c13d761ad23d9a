"""A real Kubernetes API server for tests: etcd and kube-apiserver as child processes, with RBAC, service accounts and
certificates as in a cluster, and what tests do to them: objects, accounts, tokens, compaction, pauses, restarts,
deaths. How the programs are built is said in `tests.apiserver.build`, and which fixtures hand a server out in the
`conftest.py` beside.

Everything here is synchronous; a test that runs under Trio and has other tasks to care for calls it in a thread. There
are no controllers and no nodes: pods never run, nothing is collected when its owner goes, and a deleted namespace only
empties through `ApiServer.delete_namespace`."""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import httpx
import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.apiserver.build import Programs

Json: TypeAlias = dict[str, Any]
#: a rule of a Role or ClusterRole: {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
Rule: TypeAlias = Mapping[str, Sequence[str]]

#: seconds that a program has until it is ready, and that the API server has until what it was told is in effect; ten
#: times what a busy machine needs
START_WITHIN = 60.0
SETTLE_WITHIN = 30.0
#: seconds that a program has to end by itself before it is killed
STOP_WITHIN = 10.0
#: seconds between two looks at something that takes a moment
LOOK_EVERY = 0.05
#: where etcd keeps the revision that the API server's own compactor has last compacted to
COMPACTED_TO = b"compact_rev_key"
#: written on objects that are of no namespace, for the namespace that they go with
OWNER_LABEL = "trio-federation.test/namespace"
#: what a namespace of tests may hold besides custom objects, by path
NAMESPACED = (
    "api/v1/{}/configmaps",
    "api/v1/{}/secrets",
    "api/v1/{}/serviceaccounts",
    "api/v1/{}/pods",
    "apis/rbac.authorization.k8s.io/v1/{}/rolebindings",
    "apis/rbac.authorization.k8s.io/v1/{}/roles",
)
RBAC = "/apis/rbac.authorization.k8s.io/v1"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

# Turns into the program that it is to start, after having asked the kernel to kill it when the process of the tests
# dies, however it dies. That is the death of the thread that starts it, so all of them are started by one that stays.
LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_starter = ThreadPoolExecutor(1, thread_name_prefix="starter of programs for tests")
_numbers = itertools.count(1)


class StartError(Exception):
    """A program has not become ready. The message holds the end of its log."""


class ServerError(Exception):
    """The API server, or kubectl, says no."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        #: the HTTP status; None where kubectl says it
        self.code = code


class Program:
    """One child process, which can be started again after it has ended, with what it says appended to a file."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str | Path]) -> None:
        """Start `command`, whose first element is a path, in a session of its own."""
        assert not self.running
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]

        def start() -> subprocess.Popen[bytes]:
            with self.log.open("ab") as log:
                return subprocess.Popen(
                    [*launcher, *command],
                    cwd=self.log.parent,
                    # Nothing of the machine's settings: no proxies, no tuning of Go's runtime.
                    env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.log.parent)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

        self._process = _starter.submit(start).result()

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended; also while it is paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Raises RuntimeError where it is not running."""
        if self._process is None or not self.running:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    def memory(self) -> int:
        """Bytes of memory that it has in use (its resident set)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))

    def pause(self) -> None:
        """Stop it where it stands: its sockets stay open, and nothing answers. Returns when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, paused or not. Does nothing where it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it as an operator would, with SIGTERM; where that takes more than STOP_WITHIN, kill it."""
        if self._process is not None and self.running:
            self._process.terminate()
            self.resume()
            try:
                self._process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                self.kill()

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, or so many seconds. Says whether it has ended."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log_end(self, lines: int = 15) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a service account, bound to a Secret of its own: without the Secret it is void."""

    value: str = field(repr=False)
    #: name of the Secret
    secret: str


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """A service account of `server`, whoever made it."""

    server: ApiServer = field(repr=False)
    namespace: str
    name: str

    @property
    def username(self) -> str:
        """As whom it is known to RBAC."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    def token(self, seconds: int = 3600) -> Token:
        """A new token, good for so many seconds; the API server gives none for less than 600.

        For one that ends sooner, see `revoke`."""
        secret = f"{self.name}-token-{next(_numbers)}"
        made = self.server.call(
            "POST", f"/api/v1/namespaces/{self.namespace}/secrets", {"metadata": {"name": secret}, "type": "Opaque"}
        )
        bound = {"kind": "Secret", "apiVersion": "v1", "name": secret, "uid": made["metadata"]["uid"]}
        answer = self.server.call(
            "POST",
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{self.name}/token",
            {"spec": {"expirationSeconds": seconds, "boundObjectRef": bound}},
        )
        return Token(answer["status"]["token"], secret)

    def revoke(self, token: Token) -> None:
        """Make `token` void, as if it had expired, by deleting the Secret that it is bound to.

        Requests are answered 401 from then on, if the API server has not seen the token in the last ten seconds: so
        long it remembers whom it let in. A watch that is open stays open. With `ApiServer.restart`, both end now."""
        self.server.call("DELETE", f"/api/v1/namespaces/{self.namespace}/secrets/{token.secret}")

    def kubeconfig(self, token: Token | Path, namespace: str | None = None) -> Path:
        """A new kubeconfig file that names this token, or (as `tokenFile`) a file that holds one.

        Its context is in `namespace`, or else in the account's own."""
        user = {"tokenFile": str(token)} if isinstance(token, Path) else {"token": token.value}
        return self.server.write_kubeconfig(f"{self.name}-{next(_numbers)}", user, namespace or self.namespace)


class ApiServer:
    """etcd and kube-apiserver, with files in one folder.

    `start` starts what is not running, also after `stop` and `kill`: on the same address, with the same certificates
    and the same data, so clients may go on. `close` ends everything and deletes the data; the logs stay.
    `program` and `etcd` are the two processes, to be paused, say."""

    def __init__(
        self, programs: Programs, folder: Path, *, watch_cache: bool = True, arguments: Sequence[str] = ()
    ) -> None:
        """A server that is not started yet.

        Without `watch_cache`, the API server asks etcd for each list and each watch, so what was compacted is gone at
        once, and there are no bookmarks. `arguments` are further ones of kube-apiserver, and win over those here."""
        self.programs = programs
        self.folder = folder.absolute()
        self.program = Program("kube-apiserver", self.folder / "kube-apiserver.log")
        self.etcd = Program("etcd", self.folder / "etcd.log")
        self.authority = trustme.CA()
        self._arguments = [f"--watch-cache={str(watch_cache).lower()}", *arguments]
        # Paths of sockets are limited to about a hundred characters, and the folders of tests have long names.
        self._sockets = Path(tempfile.mkdtemp(prefix="apiserver-"))
        self._etcd_client = httpx.Client(
            base_url="http://etcd", transport=httpx.HTTPTransport(uds=str(self._sockets / "etcd")), trust_env=False
        )
        self._port: int | None = None
        self._admin: httpx.Client | None = None
        self._write_certificates()

    # The processes

    def start(self) -> None:
        """Start what is not running, and wait until the API server says that it is ready.

        Raises StartError with the end of the log of what has failed."""
        if not self.etcd.running:
            self._start_etcd()
        if self.program.running:
            return
        if self._port is not None:
            # Whoever takes this port in between is only passing: it is none that the kernel gives out by itself.
            until = time.monotonic() + START_WITHIN
            while not self._start_program(self._port):
                if time.monotonic() > until:
                    raise self._failure(self.program, f"found port {self._port} taken")
            return
        for _ in range(20):
            self._port = free_port()
            if self._start_program(self._port):
                key = embedded("client-certificate", self.admin_file) | embedded("client-key", self.admin_file)
                self.write_kubeconfig("admin", key)
                return
        self._port = None
        raise self._failure(self.program, "found every port taken")

    def stop(self) -> None:
        """End the API server as an operator would; etcd stays. See `start`."""
        self.program.stop()

    def kill(self) -> None:
        """End the API server at once, as a crash would; etcd stays. See `start`."""
        self.program.kill()

    def restart(self) -> None:
        """`stop` and `start`. The server's memory of past events is lost with it: who watches from an older version
        than that of its last list is told 410."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Make the API server fall silent: connections stay open, new ones are not answered. See `resume`."""
        self.program.pause()

    def resume(self) -> None:
        """Let the API server go on after `pause`."""
        self.program.resume()

    def close(self) -> None:
        """End both processes, and delete the data."""
        self.program.kill()
        self.etcd.kill()
        if self._admin is not None:
            self._admin.close()
        self._etcd_client.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)

    def _start_etcd(self) -> None:
        for name in ("etcd", "peers"):
            (self._sockets / name).unlink(missing_ok=True)
        # Nobody follows these addresses, as there are no other members, but they must look like some.
        advertised = "http://127.0.0.1:1"
        self.etcd.start(
            [
                self.programs.etcd,
                "--name=tests",
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls=unix://{self._sockets / 'etcd'}",
                f"--advertise-client-urls={advertised}",
                f"--listen-peer-urls=unix://{self._sockets / 'peers'}",
                f"--initial-advertise-peer-urls={advertised}",
                f"--initial-cluster=tests={advertised}",
                # What the kernel has in hand survives the death of a process, which is all that tests do to it.
                "--unsafe-no-fsync",
                "--log-level=warn",
            ]
        )

        def healthy() -> bool:
            if self.etcd.wait(0):
                raise self._failure(self.etcd, "has ended")
            # The HTTP client would leave a socket behind where nobody listens yet.
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self._sockets / "etcd"))
                except OSError:
                    return False
            answer = self._etcd_client.get("/health")
            return answer.is_success and answer.json()["health"] == "true"

        if not looked(healthy, START_WITHIN):
            raise self._failure(self.etcd, f"has not become ready in {START_WITHIN:.0f} s")

    def _start_program(self, port: int) -> bool:
        """Start kube-apiserver on this port and wait until it is ready. Says whether the port was free."""
        said_before = self.program.log.stat().st_size if self.program.log.exists() else 0
        self.program.start(
            [
                self.programs.kube_apiserver,
                f"--etcd-servers=unix://{self._sockets / 'etcd'}",
                f"--secure-port={port}",
                "--bind-address=127.0.0.1",
                # An address of documentation: it must not be that of this machine alone, and nobody is told of it.
                "--advertise-address=192.0.2.1",
                "--endpoint-reconciler-type=none",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--tls-cert-file=server.pem",
                "--tls-private-key-file=server.pem",
                "--client-ca-file=authority.pem",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-account-key-file=accounts.pem",
                "--service-account-signing-key-file=accounts.pem",
                # Would wait for the default account of each namespace, which a controller makes.
                "--disable-admission-plugins=ServiceAccount",
                # Tests compact when they want it. (With 0, the watch cache would take no notice of it.)
                "--etcd-compaction-interval=24h",
                # Nobody reads these metrics.
                "--etcd-count-metric-poll-period=0",
                "--etcd-db-metric-poll-interval=0",
                "--profiling=false",
                *self._arguments,
            ]
        )
        if self._admin is not None:
            self._admin.close()
        self._admin = self.client()

        def ready() -> bool | None:
            if self.program.wait(0):
                with self.program.log.open("rb") as log:
                    log.seek(said_before)
                    if b"address already in use" in log.read():
                        return True
                raise self._failure(self.program, "has ended")
            try:
                answer = self.admin.get("/readyz", timeout=5)
            except httpx.TransportError:
                return False
            if answer.status_code in (401, 403):
                raise self._failure(self.program, f"says {answer.status_code} to its own administrator")
            return answer.is_success

        try:
            if not looked(ready, START_WITHIN):
                raise self._failure(self.program, f"has not become ready in {START_WITHIN:.0f} s")
        except BaseException:
            self.program.kill()
            raise
        return self.program.running

    def _failure(self, program: Program, what: str) -> StartError:
        return StartError(f"{program.name} {what}; its log, {program.log}, ends with:\n{program.log_end()}")

    # How to reach it

    @property
    def port(self) -> int:
        """Raises RuntimeError before the first start."""
        if self._port is None:
            raise RuntimeError("the API server has no port before it is started")
        return self._port

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def authority_file(self) -> Path:
        """The certificate that vouches for the server, which is good for 127.0.0.1, ::1, localhost and api.test."""
        return self.folder / "authority.pem"

    @property
    def admin_file(self) -> Path:
        """Certificate and key, in one file, of somebody who may do everything."""
        return self.folder / "admin.pem"

    @property
    def kubeconfig(self) -> Path:
        """The file for somebody who may do everything, with all that is secret inside."""
        return self.folder / "admin.kubeconfig"

    @property
    def admin(self) -> httpx.Client:
        """May do everything."""
        if self._admin is None:
            raise RuntimeError("the API server has no client before it is started")
        return self._admin

    def tls(self, certificate: Path | None = None) -> ssl.SSLContext:
        """Trusts the server and nobody else; shows it `certificate` (a file with its key inside) where given."""
        context = ssl.create_default_context(cafile=self.authority_file)
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context

    def client(self, token: Token | str | None = None, timeout: float = 30.0) -> httpx.Client:
        """A client that may do what this token's owner may; without a token, everything. To be closed."""
        value = token.value if isinstance(token, Token) else token
        return httpx.Client(
            base_url=self.url,
            headers={} if value is None else {"Authorization": f"Bearer {value}"},
            verify=self.tls(self.admin_file if value is None else None),
            timeout=timeout,
            trust_env=False,
        )

    def call(
        self, method: str, path: str, body: object = None, params: Mapping[str, str | int | bool] | None = None
    ) -> Json:
        """One request as somebody who may do everything; returns the object that is answered.

        Raises ServerError with the status and what the server says."""
        answer = self.admin.request(method, path, json=body, params=params)
        if answer.is_error:
            raise ServerError(f"{method} {path}: {answer.status_code}: {answer.text}", answer.status_code)
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def kubectl(self, *arguments: str | Path, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """What kubectl prints, run as somebody who may do everything, or with another kubeconfig.

        Raises ServerError with what it complains of where it fails."""
        command: list[str | Path] = [self.programs.kubectl, "--kubeconfig", kubeconfig or self.kubeconfig]
        done = subprocess.run(
            [*command, "--cache-dir", self.folder / "kubectl-cache", *arguments],
            cwd=self.folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.folder)},
            # Nothing to read is nothing to wait for.
            input=input or "",
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise ServerError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def write_kubeconfig(self, name: str, user: Mapping[str, object], namespace: str = "default") -> Path:
        """The file NAME.kubeconfig for this server, with `user` as it stands under "users" in such files."""
        cluster = {"server": self.url} | embedded("certificate-authority", self.authority_file)
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": name, "user": dict(user)}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name, "namespace": namespace}}],
            "current-context": "tests",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.touch(0o600)
        # JSON is YAML.
        path.write_text(json.dumps(document, indent=2))
        return path

    def _write_certificates(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.authority.cert_pem.write_to_path(self.authority_file)
        own = self.authority.issue_cert("127.0.0.1", "::1", "localhost", "api.test")
        admin = self.authority.issue_cert("admin", common_name="admin", organization_name="system:masters")
        for certificate, path in ((own, self.folder / "server.pem"), (admin, self.admin_file)):
            path.touch(0o600)
            certificate.private_key_and_cert_chain_pem.write_to_path(path)
        accounts = self.folder / "accounts.pem"
        accounts.touch(0o600)
        accounts.write_bytes(
            ec.generate_private_key(ec.SECP256R1()).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )

    # What is in it

    def namespace(self, prefix: str = "test") -> str:
        """Make a new namespace, PREFIX-NUMBER, and return its name."""
        name = f"{prefix}-{next(_numbers)}"
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace with all that is in it, and what was given to its service accounts elsewhere."""
        for kind in ("clusterrolebindings", "clusterroles"):
            self.call("DELETE", f"{RBAC}/{kind}", params={"labelSelector": f"{OWNER_LABEL}={name}"})
        paths = [*NAMESPACED]
        for crd in self.call("GET", CRDS)["items"]:
            spec = crd["spec"]
            if spec["scope"] == "Namespaced":
                stored = next(version["name"] for version in spec["versions"] if version["storage"])
                paths.append(f"apis/{spec['group']}/{stored}/{{}}/{spec['names']['plural']}")
        for path in paths:
            self.call("DELETE", "/" + path.format(f"namespaces/{name}"), params={"gracePeriodSeconds": 0})
        # In a cluster a controller does this, when it has found the namespace empty.
        self.call("DELETE", f"/api/v1/namespaces/{name}")
        self.call(
            "PUT", f"/api/v1/namespaces/{name}/finalize", {"metadata": {"name": name}, "spec": {"finalizers": []}}
        )

    def service_account(
        self, namespace: str, name: str, *, rules: Sequence[Rule] = (), cluster_rules: Sequence[Rule] = ()
    ) -> ServiceAccount:
        """Make a service account that may do what `rules` say in its namespace, and `cluster_rules` everywhere, and
        nothing else. Returns when the API server grants them."""
        account = ServiceAccount(self, namespace, name)
        self.call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        if rules:
            self._grant("Role", f"{RBAC}/namespaces/{namespace}", {"name": name}, account, rules)
        if cluster_rules:
            owned = {"name": f"{namespace}-{name}", "labels": {OWNER_LABEL: namespace}}
            self._grant("ClusterRole", RBAC, owned, account, cluster_rules)
        self.wait_until_allowed(account, rules)
        self.wait_until_allowed(account, cluster_rules, everywhere=True)
        return account

    def _grant(self, kind: str, root: str, metadata: Json, account: ServiceAccount, rules: Sequence[Rule]) -> None:
        self.call("POST", f"{root}/{kind.lower()}s", {"metadata": metadata, "rules": rules})
        subject = {"kind": "ServiceAccount", "name": account.name, "namespace": account.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": metadata["name"]}
        self.call(
            "POST", f"{root}/{kind.lower()}bindings", {"metadata": metadata, "subjects": [subject], "roleRef": role}
        )

    def allows(
        self, account: ServiceAccount, verb: str, group: str, resource: str, namespace: str = "", name: str = ""
    ) -> bool:
        """Whether the API server lets `account` do this: `resource` a plural, or "plural/subresource"; `namespace` ""
        means all of them."""
        plural, _, subresource = resource.partition("/")
        asked = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "name": name}
        # Part of what it is allowed comes with the groups that every service account is in.
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.namespace}", "system:authenticated"]
        spec = {
            "user": account.username,
            "groups": groups,
            "resourceAttributes": asked | {"namespace": namespace},
        }
        answer = self.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
        return bool(answer["status"]["allowed"])

    def wait_until_allowed(self, account: ServiceAccount, rules: Sequence[Rule], *, everywhere: bool = False) -> None:
        """Wait until the API server lets `account` do what `rules` say, in its namespace or in all: roles take a moment
        to reach the part of it that decides. Raises ServerError where it never does."""
        namespace = "" if everywhere else account.namespace
        for rule in rules:
            for verb, group, resource, name in itertools.product(
                rule["verbs"], rule.get("apiGroups", ()), rule.get("resources", ()), rule.get("resourceNames", ("",))
            ):
                allowed = partial(self.allows, account, verb, group, resource, namespace, name)
                if not looked(allowed, SETTLE_WITHIN):
                    raise ServerError(f"{account.username} may not {verb} {resource} of {group!r}, against {rule}")

    def create_crds(self, paths: Iterable[Path], *, webhooks: bool = True) -> list[str]:
        """Install the CustomResourceDefinitions in these YAML files, or bring them up to date, and wait until they are
        served and described. Returns their names.

        They are taken as they are, also where versions are converted by a webhook, which belongs to a controller that
        does not run here: nothing asks it as long as objects are written and read in the version that they are stored
        in, and else the answer is 500, as in a cluster whose controller is down. Without `webhooks`, a conversion
        changes nothing but the name of the version, so that all of them can be read."""
        names = []
        for path in paths:
            for definition in yaml.safe_load_all(path.read_text("utf-8")):
                if definition is None or definition["kind"] != "CustomResourceDefinition":
                    continue
                if not webhooks:
                    definition["spec"]["conversion"] = {"strategy": "None"}
                text = json.dumps(definition)
                self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)
                names.append(definition["metadata"]["name"])
        for name in names:
            self.wait_for_crd(name)
        return names

    def wait_for_crd(self, name: str) -> None:
        """Wait until the CustomResourceDefinition `name` is served, and described for OpenAPI, in all versions that can
        be read. Raises ServerError where that does not happen."""

        def served() -> bool:
            definition = self.call("GET", f"{CRDS}/{name}")
            conditions = {each["type"]: each["status"] for each in definition["status"]["conditions"] or ()}
            spec = definition["spec"]
            return conditions.get("Established") == "True" and all(
                self.admin.get(f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}?limit=1").is_success
                and f'"kind":"{spec["names"]["kind"]}"' in self._description(spec["group"], version["name"])
                for version in spec["versions"]
                # Objects in other versions than the stored one may want a webhook.
                if version["served"] and (version["storage"] or spec["conversion"]["strategy"] == "None")
            )

        if not looked(served, SETTLE_WITHIN):
            raise ServerError(f"{name} is not served: {self.call('GET', f'{CRDS}/{name}').get('status')}")

    def _description(self, group: str, version: str) -> str:
        answer = self.admin.get(f"/openapi/v3/apis/{group}/{version}")
        return answer.text if answer.is_success else ""

    # The store

    def revision(self) -> int:
        """The store's revision: what the resourceVersion of a list is, as a number, if it is taken now."""
        return int(self._ask_etcd("range", {"key": coded(COMPACTED_TO)})["header"]["revision"])

    def compact(self) -> int:
        """Make the store forget all revisions before the present one, which is returned, just as the API server does
        every five minutes by itself elsewhere.

        Without `watch_cache`, who lists on with an older token, or watches from an older version, is told 410 from then
        on. The cache remembers more: tokens for up to twenty seconds, events until a `restart`. A watch that is open
        goes on in any case."""
        revision = self.revision()
        # The API server follows this key, and forgets with the store.
        self._ask_etcd("put", {"key": coded(COMPACTED_TO), "value": coded(str(revision).encode())})
        self._ask_etcd("compaction", {"revision": str(revision), "physical": True})
        return revision

    def _ask_etcd(self, method: str, body: Json) -> Json:
        answer = self._etcd_client.post(f"/v3/kv/{method}", json=body, timeout=60)
        if answer.is_error:
            raise ServerError(f"etcd, {method}: {answer.status_code}: {answer.text}", answer.status_code)
        found = answer.json()
        assert isinstance(found, dict)
        return found


class StartServer(Protocol):
    """Starts a server of the caller's own; what the parameters mean is said at `ApiServer`."""

    def __call__(self, *, watch_cache: bool = True, arguments: Sequence[str] = ()) -> ApiServer: ...


@contextmanager
def started(server: ApiServer) -> Iterator[ApiServer]:
    """`server`, started, and closed at the end."""
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def audited(programs: Programs, folder: Path, policy: str) -> Iterator[ApiServer]:
    """A server that notes in audit.log of its folder who does what, by this policy."""
    (folder / "audit.yaml").write_text(policy)
    arguments = ["--audit-policy-file=audit.yaml", "--audit-log-path=audit.log"]
    with started(ApiServer(programs, folder, arguments=arguments)) as server:
        yield server


def looked(is_so: Callable[[], bool | None], within: float) -> bool:
    """Look again and again until `is_so`, or so many seconds have passed. Says whether it is so."""
    until = time.monotonic() + within
    while not is_so():
        if time.monotonic() > until:
            return False
        # Nobody sets it: a pause, in a module that no simulated time reaches.
        threading.Event().wait(LOOK_EVERY)
    return True


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that the kernel does not hand out by itself: else, while a server
    is down, a client of it could be given the server's own port, and be connected to itself."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(min(20000, lowest - 1000), lowest) if lowest > 3000 else range(20000, 60000)
    while True:
        port = random.SystemRandom().choice(ports)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def coded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def embedded(field_name: str, path: Path) -> dict[str, str]:
    """What a kubeconfig says in place of a path: the file itself, under "FIELD-data"."""
    return {f"{field_name}-data": coded(path.read_bytes())}
