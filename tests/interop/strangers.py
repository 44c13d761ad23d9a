"""What the tests of identity, policy and limits share: a hub of ours on a real socket, calls of grpcio that are told by
their outcome, what a watch has shown so far, and certificates that the openssl command makes. The worker itself is in
`peers.py`."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import trio

from tests.federation.helpers import counted
from tests.interop.peers import PATIENCE, LogWatch, Refused, Report, Schema, Watch, Worker, record
from trio_federation.config import HubSettings, HubTls
from trio_federation.hub import Hub, trusted_by
from trio_federation.identity import Trusted
from trio_federation.keyring import certificates_are_optional
from trio_federation.rpc import open_listeners, server_tls

Code = grpc.StatusCode

#: The hub's secret, and the one that takes its place. No word of any message is in them.
MASTER, NEXT_MASTER = "k7Qv-w3Zx-1f9e", "r2Jd-m8Tb-6c4a"
#: instances of agents
ONE, OTHER = "0a" * 16, "0b" * 16
#: 2**40: the age, in milliseconds, of what is withdrawn
WITHDRAWN = 2**40
#: Seconds between two looks at something that tells nobody when it changes.
LOOK_INTERVAL = 0.005


class Host:
    """A hub of ours that runs, and what its log says."""

    def __init__(self, hub: Hub, port: int, logs: LogWatch) -> None:
        self.hub = hub
        self.port = port
        self.logs = logs

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series that the hub exports, without the common prefix of its name; 0 without it."""
        return counted(self.hub, f"trio_federation_hub_{name}", **labels)

    def told(self, event: str) -> list[dict[str, Any]]:
        """The entries of one kind, without their times and addresses."""
        return [
            {key: value for key, value in entry.items() if key not in ("at", "peer", "level", "event")}
            for entry in self.logs.of(event)
        ]

    @property
    def idle(self) -> dict[tuple[str, str], int]:
        """What a newcomer would be told that may see all: idle by cluster and pool."""
        return {(each.cluster_id, each.member_pool): each.idle for each in self.hub.snapshot()}

    @property
    def credentials(self) -> Mapping[str, str]:
        """What has proven the clusters that report now."""
        found: Mapping[str, str] = self.hub.health()["credentials"]
        return found

    @property
    def held(self) -> Mapping[str, int]:
        """What the hub keeps of its peers for the sake of limits."""
        return self.hub._limiter.held()


@asynccontextmanager
async def running_hub(logs: LogWatch, settings: HubSettings, *, trusted: Trusted | None = None) -> AsyncIterator[Host]:
    """A hub with these settings. Nothing of the secrets that it has known is in its log, nor any fault of ours."""
    hub = Hub(settings, trusted=trusted)
    listeners = await open_listeners("127.0.0.1", 0)
    context = _context(settings, settings.tls) if settings.tls is not None else None
    async with trio.open_nursery() as nursery:
        await nursery.start(hub.run, listeners, (lambda: context) if context is not None else None)
        yield Host(hub, listeners[0].socket.getsockname()[1], logs)
        nursery.cancel_scope.cancel()
    text = repr(logs.entries)
    assert MASTER not in text
    assert NEXT_MASTER not in text
    assert [entry for entry in logs.entries if entry["level"] in ("error", "exception", "critical")] == []


def _context(settings: HubSettings, tls: HubTls) -> ssl.SSLContext:
    """The hub's side of TLS, as a whole process would set it up."""
    return server_tls(
        cert_file=tls.cert_file,
        key_file=tls.key_file,
        client_ca_file=tls.client_ca_file,
        client_certificates="optional" if certificates_are_optional(settings) else "required",
    )


def trust(settings: HubSettings, **changes: Any) -> Trusted:
    """What a hub with these settings takes for proof, but for some of it."""
    before = trusted_by(settings)
    values = {name: getattr(before, name) for name in ("accept", "secrets", "denied", "cluster_san")}
    return Trusted(**(values | changes))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so that tells nobody when it becomes so."""
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await trio.sleep(LOOK_INTERVAL)


# --- calls -----------------------------------------------------------------------------------------------------------


async def outcome(call: Awaitable[Any]) -> Refused | None:
    """How a call ends that may end well, or go on: None then."""
    try:
        await call
    except Refused as refused:
        return refused
    return None


async def refusal(call: Awaitable[Any]) -> Refused:
    """How a call ends that does not end well."""
    with pytest.raises(Refused) as caught:
        await call
    return caught.value


async def refusals(worker: Worker, cluster: str = "west") -> list[Refused]:
    """How a worker's report and watch are refused."""
    report = worker.report(worker.schema.report(record(cluster, idle=666)))
    watch = worker.watch()
    return [await refusal(report.answer()), await refusal(ended(watch))]


async def codes(worker: Worker, cluster: str = "west") -> set[grpc.StatusCode]:
    """The statuses with which a worker's report and watch are refused."""
    return {each.code for each in await refusals(worker, cluster)}


async def ended(watch: Watch) -> None:
    """Read a watch to its end. Raises Refused."""
    while True:
        await watch.next()


class Seen:
    """What a watch has shown so far."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        #: idle of what is there now, by cluster and env/pool
        self.idle: dict[tuple[str, str], int] = {}
        #: everything that was ever named, also what was withdrawn
        self.named: set[tuple[str, str]] = set()
        #: the greatest age, in milliseconds, that each was ever shown with while it was there
        self.oldest: dict[tuple[str, str], int] = {}

    async def take(self) -> Any:
        """Take in the next broadcast; itself. Raises Refused."""
        broadcast = await self.watch.next()
        for item in broadcast.items:
            name = (item.cluster_id, f"{item.env_name}/{item.member_pool}")
            self.named.add(name)
            if item.observed_for_ms >= WITHDRAWN:
                self.idle.pop(name, None)
            else:
                self.idle[name] = item.idle
                self.oldest[name] = max(item.observed_for_ms, self.oldest.get(name, 0))
        return broadcast

    async def until(self, wanted: Callable[[dict[tuple[str, str], int]], bool]) -> None:
        """Take in broadcasts until what is there now is as wanted. Raises Refused."""
        while not wanted(self.idle):
            await self.take()

    async def shows(self, cluster: str, idle: int, pool: str = "p1", env: str = "env") -> None:
        """Wait until a record is there with this idle. Raises Refused."""
        await self.until(lambda seen: seen.get((cluster, f"{env}/{pool}")) == idle)


class Steady:
    """A cluster that reports, and is watched by itself, to show that all goes on. `begin`: its first idle, which must
    be none that the hub has been told of this cluster before."""

    def __init__(self, worker: Worker, cluster: str, *, begin: int = 1) -> None:
        self.cluster = cluster
        #: what it has said last
        self.idle = begin
        self._schema: Schema = worker.schema
        self.report: Report = worker.report(self._schema.report(record(cluster, idle=begin)))
        self.seen = Seen(worker.watch())

    async def goes_on(self) -> None:
        """One more value, on the same streams as ever, comes through. Raises Refused."""
        self.idle += 1
        self.report.send(self._schema.report(record(self.cluster, idle=self.idle)))
        await self.seen.shows(self.cluster, self.idle)


# --- certificates ----------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """The files of a certificate, with those that lead to its authority, and of its key."""

    cert_file: Path
    key_file: Path

    def credentials(self, authority: bytes) -> grpc.ChannelCredentials:
        """What a client has that has this certificate and trusts an authority."""
        return grpc.ssl_channel_credentials(authority, self.key_file.read_bytes(), self.cert_file.read_bytes())


_CONFIG = """
[ca]
default_ca = default
[default]
dir = .
database = index.txt
new_certs_dir = .
serial = serial.txt
certificate = ca.pem
private_key = ca.key
default_md = sha256
policy = anything
unique_subject = no
[anything]
commonName = optional
[req]
distinguished_name = nothing
[nothing]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""


class Authority:
    """A certificate authority of the openssl command, in a folder of its own. Every one has the same name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "ca.cnf").write_text(_CONFIG)
        (folder / "index.txt").touch()
        (folder / "serial.txt").write_text("1000\n")
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650"),
            *("-config", "ca.cnf", "-extensions", "authority", "-subj", "/CN=fleet authority"),
            *("-keyout", "ca.key", "-out", "ca.pem"),
        )
        #: where its own certificate is
        self.file = folder / "ca.pem"

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self.file.read_bytes()

    def issue(
        self,
        name: str,
        *sans: str,
        begins: str = "20200101000000Z",
        ends: str = "20991231235959Z",
        usage: str = "clientAuth",
        subject: str = "an agent",
    ) -> Pair:
        """A certificate with these names, as openssl writes them: "DNS:west.agents.example". `begins`, `ends`: in UTC;
        `usage`: "clientAuth" or "serverAuth"."""
        extensions = [f"extendedKeyUsage = {usage}", "basicConstraints = CA:FALSE"]
        if sans:
            extensions.append(f"subjectAltName = {', '.join(sans)}")
        (self.folder / f"{name}.ext").write_text("\n".join(extensions))
        self._openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-config", "ca.cnf"),
            *("-subj", f"/CN={subject}", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        self._openssl(
            *("ca", "-batch", "-notext", "-config", "ca.cnf", "-extfile", f"{name}.ext"),
            *("-startdate", begins, "-enddate", ends, "-in", f"{name}.csr", "-out", f"{name}.crt"),
        )
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def issue_itself(self, name: str, *sans: str) -> Pair:
        """A certificate with these names that nobody has signed but its own key."""
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-config", "ca.cnf"),
            *("-addext", f"subjectAltName = {', '.join(sans)}", "-addext", "extendedKeyUsage = clientAuth"),
            *("-subj", "/CN=an agent", "-keyout", f"{name}.key", "-out", f"{name}.crt"),
        )
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        try:
            subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"openssl {' '.join(arguments)}: {error.stderr}") from error


def clusters_named(cluster: str, *more: str) -> Sequence[str]:
    """The names of a certificate for some clusters, in the form that the tests' hubs have configured."""
    return [f"DNS:{each}.agents.example" for each in (cluster, *more)]
