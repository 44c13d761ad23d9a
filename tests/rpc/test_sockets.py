"""TCP and TLS, over real sockets of this machine: who is let in, who is not, and what people are told. Deadlines are
tested over in-memory links, where time is virtual."""

from __future__ import annotations

import datetime
import re
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
import pytest
import trio
import trio.testing
import trustme
from trio.testing import MockClock

from tests.rpc.harness import new_link, number_of, report_of, send_one, take_reports
from trio_federation.clock import wall_clock
from trio_federation.errors import ConfigurationError, FederationError, RpcError, Unavailable
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import (
    ConnectionSettings,
    FederationServer,
    HubConnection,
    IncomingReport,
    accept_tls,
    client_tls,
    open_bridge,
    open_listeners,
    peer_name,
    server_tls,
    tcp_dialer,
)
from trio_federation.rpc.sockets import (
    CONNECT_DEADLINE,
    HANDSHAKE_DEADLINE,
)
from trio_federation.tls import REFUSAL_DEADLINE, certificate_names

LOCALHOST = "127.0.0.1"
#: Seconds of real time within which anything on this machine has happened.
SOON = 10


class Files:
    """An authority and what it has signed, in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "ca.pem")
        self.ca = str(folder / "ca.pem")

    def issue(self, *names: str, days: tuple[int, int] = (-1, 1)) -> tuple[str, str]:
        """A certificate for these names: the paths of its chain and of its key. `days`: from when to when it is good,
        from now."""
        now = datetime.datetime.fromtimestamp(wall_clock(), datetime.UTC)
        began, ends = (now + datetime.timedelta(days=day) for day in days)
        issued = self._authority.issue_cert(*names, not_before=began, not_after=ends)
        number = len(list(self._folder.iterdir()))
        chain, key = self._folder / f"{number}.pem", self._folder / f"{number}.key"
        for blob in issued.cert_chain_pems:
            blob.write_to_path(chain, append=True)
        issued.private_key_pem.write_to_path(key)
        return str(chain), str(key)


@dataclass
class Authorities:
    """Ours, and a stranger's. Certificates are for the loopback address unless they say something else."""

    ours: Files
    strangers: Files
    hub: tuple[str, str] = field(init=False)
    named: tuple[str, str] = field(init=False)
    agent: tuple[str, str] = field(init=False)
    stranger: tuple[str, str] = field(init=False)
    expired: tuple[str, str] = field(init=False)
    early: tuple[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.hub = self.ours.issue(LOCALHOST, "::1", "localhost")
        self.named = self.ours.issue("hub.test")
        self.agent = self.ours.issue("west.test")
        self.stranger = self.strangers.issue("west.test")
        self.expired = self.ours.issue("west.test", LOCALHOST, days=(-9, -1))
        self.early = self.ours.issue("west.test", LOCALHOST, days=(1, 9))


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return Authorities(Files(tmp_path_factory.mktemp("ours")), Files(tmp_path_factory.mktemp("strangers")))


def hub_context(
    certificate: tuple[str, str],
    client_ca: str | None = None,
    client_certificates: Literal["required", "optional"] = "required",
) -> ssl.SSLContext:
    return server_tls(
        cert_file=certificate[0],
        key_file=certificate[1],
        client_ca_file=client_ca,
        client_certificates=client_certificates,
    )


def agent_context(ca: str, certificate: tuple[str, str] | None = None) -> ssl.SSLContext:
    cert_file, key_file = certificate or (None, None)
    return client_tls(ca_file=ca, cert_file=cert_file, key_file=key_file)


@dataclass
class Served:
    """A server on a port of this machine."""

    port: int
    #: the handshakes that failed
    refused: list[Unavailable]
    #: the callers, as their calls name them
    callers: list[str]
    #: the names in the certificates of those that were let in
    names: list[tuple[tuple[str, str], ...]]

    async def refusals(self, count: int) -> list[str]:
        """What the handshakes failed of, of which there are to be so many: a peer may know of it first."""
        while len(self.refused) < count:
            await trio.lowlevel.checkpoint()
        assert len(self.refused) == count
        return [str(error).removeprefix(f"{error.peer}: ") for error in self.refused]


@asynccontextmanager
async def served(
    tls: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None, host: str = LOCALHOST
) -> AsyncIterator[Served]:
    listeners = await open_listeners(host, 0)
    refused: list[Unavailable] = []
    callers: list[str] = []
    names: list[tuple[tuple[str, str], ...]] = []

    async def report(call: IncomingReport) -> None:
        callers.append(call.peer)
        await take_reports(call)

    server = FederationServer(report, send_one)

    async def accept(stream: trio.SocketStream) -> None:
        peer = peer_name(stream)
        accepted: trio.abc.Stream = stream
        if tls is not None:
            try:
                context = tls if isinstance(tls, ssl.SSLContext) else tls()
                accepted = await accept_tls(stream, context, peer)
            except Unavailable as error:
                refused.append(error)
                return
        names.append(certificate_names(accepted))
        await server.serve(accepted)

    with trio.fail_after(SOON):
        async with open_bridge(), trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, accept, listeners)
            yield Served(listeners[0].socket.getsockname()[1], refused, callers, names)
            nursery.cancel_scope.cancel()


async def use(dial: Callable[[], Awaitable[trio.abc.Stream]], peer: str = "hub") -> None:
    """Dial, and make both calls."""
    stream = await dial()
    async with trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, stream, peer=peer)
        try:
            async with connection.report() as report, connection.watch(WatchFederationRequest()) as watch:
                await report.send(report_of(1, padding=200_000))
                assert number_of(await watch.receive()) == 1
                await report.end()
                await report.wait_answered()
        finally:
            await connection.aclose()


async def refusal_of(dial: Callable[[], Awaitable[trio.abc.Stream]]) -> str:
    """The one line that somebody is told who dials and calls in vain."""
    with pytest.RaisesGroup(RpcError, allow_unwrapped=True, flatten_subgroups=True) as caught:
        await use(dial)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Unavailable)
    assert str(error).isprintable()
    assert str(error) == f"{error.peer}: {error.message}"
    assert error.__cause__ is not None
    return str(error)


# --- plain text ------------------------------------------------------------------------------------------------------


async def test_plain_text_over_loopback() -> None:
    async with served() as server:
        await use(tcp_dialer(LOCALHOST, server.port))
        await use(tcp_dialer("localhost", server.port))
        assert [caller.rpartition(":")[0] for caller in server.callers] == [LOCALHOST] * 2


async def test_ipv6_over_loopback(authorities: Authorities) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        # A machine without IPv6 says so in one line.
        with pytest.raises(FederationError, match=r"^hub: cannot listen on \[::1\]:0: "):
            await open_listeners("::1", 0)
        return
    async with served(host="::1") as server:
        await use(tcp_dialer("::1", server.port))
        assert [caller.rpartition(":")[0] for caller in server.callers] == ["[::1]"]
    async with served(hub_context(authorities.hub), host="::1") as server:
        await use(tcp_dialer("::1", server.port, tls=agent_context(authorities.ours.ca)))


async def test_a_refused_connection_is_one_line() -> None:
    [listener] = await open_listeners(LOCALHOST, 0)
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(Unavailable) as caught:
        await tcp_dialer(LOCALHOST, port)()
    assert str(caught.value) == f"{LOCALHOST}:{port}: cannot connect: connection refused"
    assert isinstance(caught.value.__cause__, OSError)


class Resolver(trio.abc.HostnameResolver):
    """Names lead where the test says, without a word to any server."""

    def __init__(self, answer: Sequence[str] | socket.gaierror) -> None:
        self._answer = answer

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # type: ignore[no-untyped-def]
        if isinstance(self._answer, socket.gaierror):
            raise self._answer
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)) for address in self._answer
        ]

    async def getnameinfo(self, sockaddr, flags):  # type: ignore[no-untyped-def]
        raise NotImplementedError


async def test_a_name_that_does_not_resolve_is_one_line() -> None:
    trio.socket.set_custom_hostname_resolver(Resolver(socket.gaierror(socket.EAI_NONAME, "Name or service not known")))
    with pytest.raises(Unavailable) as caught:
        await tcp_dialer("hub.example", 7443)()
    assert str(caught.value) == "hub.example:7443: cannot connect: name or service not known"
    assert isinstance(caught.value.__cause__, OSError)


async def test_a_name_with_several_addresses_is_one_line() -> None:
    [listener] = await open_listeners(LOCALHOST, 0)
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    trio.socket.set_custom_hostname_resolver(Resolver([LOCALHOST, "127.0.0.2"]))
    with pytest.raises(Unavailable) as caught:
        await tcp_dialer("hub.example", port)()
    assert str(caught.value) == f"hub.example:{port}: cannot connect: connection refused"


@pytest.mark.parametrize(
    "host", ["hub..example", "x" * 64 + ".example", "xn--a.example", "hub example", "\udcff.example"]
)
async def test_a_name_that_cannot_be_one_is_no_more_than_unavailable(host: str) -> None:
    """Nothing looks at names before they are dialled but the configuration, and it does not know every rule."""
    trio.socket.set_custom_hostname_resolver(Resolver(socket.gaierror(socket.EAI_NONAME, "Name or service not known")))
    with pytest.raises(Unavailable, match="cannot connect") as caught:
        await tcp_dialer(host, 7443)()
    assert caught.value.__cause__ is not None


async def test_a_connection_that_is_reset_is_noticed_by_both_sides() -> None:
    async with served() as server, trio.open_nursery() as nursery:
        stream = await tcp_dialer(LOCALHOST, server.port)()
        assert isinstance(stream, trio.SocketStream)
        connection = await HubConnection.open(nursery, stream, peer="hub")
        async with connection.report() as call:
            await call.send(report_of(1))
            raw = await trio.open_tcp_stream(LOCALHOST, server.port)
            # Closed with a reset, by asking not to linger.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await raw.aclose()
            # It does not concern the one that was there.
            await call.end()
            await call.wait_answered()
        async with connection.report() as call:
            await trio.aclose_forcefully(stream)
            with pytest.raises(Unavailable):
                await call.wait_answered()
        await connection.wait_closed()


async def test_a_port_that_is_taken_is_told() -> None:
    [listener] = await open_listeners(LOCALHOST, 0)
    port = listener.socket.getsockname()[1]
    with pytest.raises(FederationError) as caught:
        await open_listeners(LOCALHOST, port)
    assert str(caught.value).startswith(f"hub: cannot listen on {LOCALHOST}:{port}: ")
    assert str(caught.value).endswith("; choose another [hub] bind")
    assert isinstance(caught.value.__cause__, OSError)
    await listener.aclose()


async def test_a_stream_that_is_gone_has_a_name_too() -> None:
    async with served() as server:
        stream = await tcp_dialer(LOCALHOST, server.port)()
        assert peer_name(stream) == f"{LOCALHOST}:{server.port}"
        await stream.aclose()
        assert peer_name(stream) == "a peer that is gone"


# --- TLS -------------------------------------------------------------------------------------------------------------


async def test_tls_is_verified_against_the_authority(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub)) as server:
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca)))
        await use(tcp_dialer("localhost", server.port, tls=agent_context(authorities.ours.ca)))
        assert [caller.rpartition(":")[0] for caller in server.callers] == [LOCALHOST] * 2
        assert server.refused == []


async def test_a_hub_of_another_authority_is_refused(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub)) as server:
        told = await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.strangers.ca)))
        assert told.startswith(f"{LOCALHOST}:{server.port}: TLS failed: certificate not accepted: ")
        assert "issuer" in told
        assert server.callers == []


async def test_the_systems_authorities_do_not_know_ours(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub)) as server:
        context = client_tls(ca_file=None, cert_file=None, key_file=None)
        told = await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=context))
        assert "certificate not accepted" in told


async def test_a_hub_of_another_name_is_refused(authorities: Authorities) -> None:
    async with served(hub_context(authorities.named)) as server:
        told = await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca)))
        assert told.startswith(f"{LOCALHOST}:{server.port}: TLS failed: certificate not accepted: ")
        assert LOCALHOST in told.partition("accepted")[2]


async def test_the_name_to_verify_can_be_given(authorities: Authorities) -> None:
    context = agent_context(authorities.ours.ca)
    async with served(hub_context(authorities.named)) as server:
        await use(tcp_dialer(LOCALHOST, server.port, tls=context, server_name="hub.test"))
        told = await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=context, server_name="other.test"))
        assert "other.test" in told


@pytest.mark.parametrize("name", ["hub..test", "x" * 64, ".test", "\udcff"])
async def test_a_name_that_cannot_be_verified_is_no_more_than_unavailable(authorities: Authorities, name: str) -> None:
    context = agent_context(authorities.ours.ca)
    async with served(hub_context(authorities.named)) as server:
        with pytest.raises(Unavailable, match="TLS failed") as caught:
            await tcp_dialer(LOCALHOST, server.port, tls=context, server_name=name)()
        assert caught.value.__cause__ is not None


async def test_a_hub_can_ask_for_certificates(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub, client_ca=authorities.ours.ca)) as server:
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca, authorities.agent)))
        assert len(server.callers) == 1
        for certificate in (None, authorities.stranger):
            await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca, certificate)))
        assert len(server.callers) == 1
        told = await server.refusals(2)
        assert told[0] == "TLS failed: peer did not return a certificate"
        assert "certificate not accepted" in told[1]


async def test_a_hub_that_asks_for_none_takes_one_that_is_offered(authorities: Authorities) -> None:
    """And does not look at it, as nobody has verified it."""
    async with served(hub_context(authorities.hub)) as server:
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca, authorities.agent)))
        assert server.names == [()]


async def test_certificates_can_be_optional(authorities: Authorities) -> None:
    """Who has none comes in without; who has one that is not good does not."""
    context = hub_context(authorities.hub, authorities.ours.ca, "optional")
    async with served(context) as server:
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca)))
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca, authorities.agent)))
        assert server.names == [(), (("DNS", "west.test"),)]
        for certificate in (authorities.stranger, authorities.expired, authorities.early):
            await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca, certificate)))
        assert len(await server.refusals(3)) == 3
        assert len(server.names) == 2


@pytest.mark.parametrize(
    "which, hub_says, alert",
    [
        (None, "peer did not return a certificate", "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
        ("stranger", "certificate not accepted: unable to get local issuer certificate", "TLSV1_ALERT_UNKNOWN_CA"),
        ("expired", "certificate not accepted: certificate has expired", "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
        ("early", "certificate not accepted: certificate is not yet valid", "SSLV3_ALERT_BAD_CERTIFICATE"),
    ],
)
async def test_an_agent_hears_why_its_certificate_is_refused(
    authorities: Authorities, which: str | None, hub_says: str, alert: str
) -> None:
    """Its own handshake is done by then: what the hub says about it comes with the first bytes that are read."""
    certificate = None if which is None else getattr(authorities, which)
    async with served(hub_context(authorities.hub, authorities.ours.ca)) as server:
        stream = await tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca, certificate))()
        # More than the hub will read: it must not reset the connection before it has spoken.
        with suppress(trio.BrokenResourceError):
            await stream.send_all(bytes(100_000))
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.receive_some()
        await trio.aclose_forcefully(stream)
        assert isinstance(caught.value.__cause__, ssl.SSLError)
        assert caught.value.__cause__.reason == alert
        assert server.names == []
        assert await server.refusals(1) == [f"TLS failed: {hub_says}"]


@pytest.mark.parametrize("which, told", [("expired", "expired"), ("early", "not yet valid")])
async def test_a_hub_at_the_wrong_time_is_refused(authorities: Authorities, which: str, told: str) -> None:
    async with served(hub_context(getattr(authorities, which))) as server:
        line = await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca)))
        assert line.startswith(f"{LOCALHOST}:{server.port}: TLS failed: certificate not accepted: ")
        assert told in line
        assert server.names == []


async def test_a_hub_hears_why_an_agent_refuses_it(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub)) as server:
        await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.strangers.ca)))
        assert await server.refusals(1) == [
            "TLS failed: the other side does not accept the certificate of this side: unknown authority"
        ]


async def test_contexts_can_change_between_two_connections(authorities: Authorities) -> None:
    """Both sides move to another authority; what was connected before goes on carrying bytes meanwhile."""
    new = authorities.strangers
    new_hub, new_agent = new.issue(LOCALHOST), new.issue("east.test")
    hub, agent = (
        hub_context(authorities.hub, authorities.ours.ca),
        agent_context(authorities.ours.ca, authorities.agent),
    )
    asked = 0

    def current_agent() -> ssl.SSLContext:
        nonlocal asked
        asked += 1
        return agent

    async with served(lambda: hub) as server, trio.open_nursery() as nursery:
        dial = tcp_dialer(LOCALHOST, server.port, tls=current_agent)
        assert asked == 0
        connection = await HubConnection.open(nursery, await dial(), peer="hub")
        async with connection.report() as report, connection.watch(WatchFederationRequest()) as watch:
            await report.send(report_of(1))
            assert number_of(await watch.receive()) == 1
            hub = hub_context(new_hub, new.ca)
            # The agent does not know the new authority yet.
            assert "certificate not accepted" in await refusal_of(dial)
            agent = agent_context(new.ca, new_agent)
            await use(dial)
            assert asked == 3
            assert server.names == [(("DNS", "west.test"),), (("DNS", "east.test"),)]
            await report.send(report_of(2, padding=200_000))
            await report.end()
            await report.wait_answered()
        await connection.aclose()


def openssl(*command: str) -> str:
    done = subprocess.run(["openssl", *command], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Openssl:
    """An authority that the openssl command keeps in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = str(folder / "ca.pem")
        made = ["-x509", *NEW_KEY, "-keyout", str(folder / "ca.key"), "-out", self.ca]
        openssl("req", *made, "-days", "2", "-subj", "/CN=authority")

    def issue(self, name: str, extensions: str) -> tuple[str, str]:
        """A certificate with these lines of an extension section."""
        paths = [str(self._folder / f"{name}.{suffix}") for suffix in ("pem", "key", "csr", "cnf")]
        chain, key, request, section = paths
        Path(section).write_text(extensions)
        made = [*NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}"]
        openssl("req", *made)
        signed = ["-req", "-in", request, "-CA", self.ca, "-CAkey", str(self._folder / "ca.key"), "-CAcreateserial"]
        openssl("x509", *signed, "-days", "1", "-extfile", section, "-out", chain)
        return chain, key


@pytest.fixture(scope="module")
def by_openssl(tmp_path_factory: pytest.TempPathFactory) -> Openssl:
    return Openssl(tmp_path_factory.mktemp("openssl"))


def der(tag: int, data: bytes) -> bytes:
    """One value of ASN.1, in DER."""
    size = len(data)
    return bytes([tag]) + (bytes([size]) if size < 128 else bytes([0x82, size >> 8, size & 255])) + data


def names_section(*names: bytes) -> str:
    return f"subjectAltName=DER:{der(0x30, b''.join(names)).hex(':')}\n"


def dns(value: bytes) -> bytes:
    return der(0x82, value)


def uri(value: bytes) -> bytes:
    return der(0x86, value)


#: an XMPP address, which is a name of a form of its own
OTHER = der(0xA0, bytes.fromhex("06082b06010505070805") + der(0xA0, der(0x0C, b"DNS:west.test\nURI:a")))
NAMED_DIRECTORY = der(
    0xA4, der(0x30, der(0x31, der(0x30, bytes.fromhex("0603550403") + der(0x0C, b"\nDNS:west.test"))))
)


@pytest.mark.parametrize(
    "names, found",
    [
        ([dns(b"west.test"), uri(b"spiffe://a/west")], [("DNS", "west.test"), ("URI", "spiffe://a/west")]),
        # As they stand there: nothing is cut off, split, folded or trimmed.
        ([dns(b"west.test\0.evil.test")], [("DNS", "west.test\0.evil.test")]),
        ([uri(b"spiffe://a/west\0/b")], [("URI", "spiffe://a/west\0/b")]),
        ([dns(b"a\nDNS:west.test"), uri(b"a:b\r\nURI:c:d")], [("DNS", "a\nDNS:west.test"), ("URI", "a:b\r\nURI:c:d")]),
        ([dns(b"a, DNS:west.test")], [("DNS", "a, DNS:west.test")]),
        ([dns(b"WEST.test"), dns(b" west.test ")], [("DNS", "WEST.test"), ("DNS", " west.test ")]),
        ([dns(b""), uri(b"")], [("DNS", ""), ("URI", "")]),
        ([dns("wést.test".encode())], [("DNS", "wést.test")]),
        ([dns(b"x" * 5000)], [("DNS", "x" * 5000)]),
        # No text: nothing of such a certificate counts.
        ([dns(b"west.test"), dns(b"w\xe9st.test")], []),
        # Names of other forms, whatever they look like.
        ([OTHER, dns(b"west.test")], [("DNS", "west.test")]),
        ([NAMED_DIRECTORY], []),
        ([der(0x81, b"DNS:west.test"), der(0x81, b"\nDNS:west.test")], []),
        ([der(0x87, bytes([127, 0, 0, 1])), der(0x87, b"abc"), der(0x88, bytes.fromhex("2b060105"))], []),
        ([der(0xA3, der(0x30, b"")), der(0xA5, der(0xA1, der(0x0C, b"DNS:west.test")))], []),
    ],
)  # fmt: skip
async def test_names_are_those_of_the_certificate(
    by_openssl: Openssl, names: list[bytes], found: list[tuple[str, str]], tmp_path: Path
) -> None:
    certificate = by_openssl.issue("west", names_section(*names))
    hub = by_openssl.issue("hub", f"subjectAltName=IP:{LOCALHOST}\n")
    async with served(hub_context(hub, by_openssl.ca)) as server:
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(by_openssl.ca, certificate)))
        assert server.names == [tuple(found)]


async def test_a_certificate_without_names_or_for_another_use(by_openssl: Openssl) -> None:
    """The common name is no name, and a certificate that is for servers only lets no client in."""
    hub = by_openssl.issue("hub", f"subjectAltName=IP:{LOCALHOST}\nextendedKeyUsage=serverAuth\n")
    async with served(hub_context(hub, by_openssl.ca)) as server:
        bare = by_openssl.issue("bare", "basicConstraints=CA:FALSE\n")
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(by_openssl.ca, bare)))
        assert server.names == [()]
        await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(by_openssl.ca, hub)))
        # "unsuitable", or "unsupported", certificate purpose, by OpenSSL's version
        assert "certificate not accepted: un" in (await server.refusals(1))[0]
        assert server.names == [()]


class Wrapper(trio.abc.Stream):
    """A stream that passes everything on, for instance to count it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.transport_stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.transport_stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.transport_stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self.transport_stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self.transport_stream.aclose()


async def test_names_are_found_below_what_wraps_them_and_nowhere_else(authorities: Authorities) -> None:
    left, right = trio.testing.memory_stream_pair()
    assert certificate_names(left) == ()
    hub = hub_context(authorities.named, authorities.ours.ca)
    client = trio.SSLStream(left, agent_context(authorities.ours.ca, authorities.agent), server_hostname="hub.test")
    server = trio.SSLStream(right, hub, server_side=True)
    with pytest.raises(trio.NeedHandshakeError):
        certificate_names(server)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.do_handshake)
        nursery.start_soon(server.do_handshake)

    assert certificate_names(server) == (("DNS", "west.test"),)
    assert certificate_names(Wrapper(server)) == (("DNS", "west.test"),)
    assert certificate_names(Wrapper(client)) == ()
    assert certificate_names(client) == (), "the name of a hub is no client's"


def s_client(port: int, ca: str, *options: str) -> subprocess.Popen[bytes]:
    command = ["openssl", "s_client", "-connect", f"{LOCALHOST}:{port}", "-CAfile", ca, "-alpn", "h2", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


async def talk(process: subprocess.Popen[bytes]) -> str:
    """All that openssl says; it is told to quit once it has been let in."""
    output, _ = await trio.to_thread.run_sync(lambda: process.communicate(b"Q\n", timeout=SOON))
    return output.decode(errors="replace")


async def test_openssl_is_told_what_agents_are(authorities: Authorities) -> None:
    """The alerts reach a client that is none of ours; and nothing can be resumed, with a certificate that nobody would
    verify again."""
    async with served(hub_context(authorities.hub, authorities.ours.ca)) as server:

        async def said(*options: str) -> str:
            return await talk(s_client(server.port, authorities.ours.ca, "-ign_eof", *options))

        assert "alert certificate required" in await said()
        chain, key = authorities.expired
        assert "alert certificate expired" in await said("-cert", chain, "-key", key)
        assert re.search("alert protocol version|no protocols available", await said("-tls1_2"))
        assert server.names == []


async def test_grpcio_is_let_in_with_its_certificate(authorities: Authorities) -> None:
    """A client of another make gets through the same handshake."""

    def connect(port: int) -> None:
        ca, chain, key = (Path(file).read_bytes() for file in (authorities.ours.ca, *authorities.agent))
        credentials = grpc.ssl_channel_credentials(ca, key, chain)
        with grpc.secure_channel(f"{LOCALHOST}:{port}", credentials) as channel:
            grpc.channel_ready_future(channel).result(timeout=SOON)

    async with served(hub_context(authorities.hub, authorities.ours.ca)) as server:
        await trio.to_thread.run_sync(connect, server.port)
        assert server.names == [(("DNS", "west.test"),)]
        assert server.refused == []


async def test_sessions_are_not_resumed_where_certificates_are_verified(authorities: Authorities) -> None:
    context = agent_context(authorities.ours.ca, authorities.agent)
    async with served(hub_context(authorities.hub, authorities.ours.ca)) as server:
        stream = await tcp_dialer(LOCALHOST, server.port, tls=context)()
        assert isinstance(stream, trio.SSLStream)
        assert await stream.receive_some()  # whatever came with the handshake has come by now
        assert stream.version() == "TLSv1.3"
        assert not stream.session.has_ticket
        await trio.aclose_forcefully(stream)


async def test_a_hub_without_alpn_is_told_apart(authorities: Authorities) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authorities.hub)
    listeners = await open_listeners(LOCALHOST, 0)

    async def serve(stream: trio.SocketStream) -> None:
        over_tls = trio.SSLStream(stream, context, server_side=True)
        with suppress(trio.BrokenResourceError):
            assert await over_tls.receive_some() == b""
        await trio.aclose_forcefully(over_tls)

    with trio.fail_after(SOON):
        async with open_bridge(), trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, listeners)
            port = listeners[0].socket.getsockname()[1]
            with pytest.raises(Unavailable) as caught:
                await tcp_dialer(LOCALHOST, port, tls=agent_context(authorities.ours.ca))()
            assert str(caught.value) == (
                f"{LOCALHOST}:{port}: the other side does not speak HTTP/2 over TLS (no ALPN h2): not a gRPC endpoint?"
            )
            nursery.cancel_scope.cancel()


async def test_a_client_without_alpn_is_told_apart(authorities: Authorities) -> None:
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=authorities.ours.ca)
    async with served(hub_context(authorities.hub)) as server:
        stream = trio.SSLStream(await trio.open_tcp_stream(LOCALHOST, server.port), context, server_hostname=LOCALHOST)
        with suppress(trio.BrokenResourceError):
            assert await stream.receive_some() == b""
        await trio.aclose_forcefully(stream)
        assert ["ALPN" in told for told in await server.refusals(1)] == [True]


async def test_a_plain_client_of_a_tls_hub_is_refused(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub)) as server:
        told = await refusal_of(tcp_dialer(LOCALHOST, server.port))
        assert told.startswith("hub: the ")
        assert (await server.refusals(1))[0].startswith("TLS failed: ")
        # Others are not concerned.
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca)))


async def test_a_tls_client_of_a_plain_hub_is_refused(authorities: Authorities) -> None:
    async with served() as server:
        told = await refusal_of(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca)))
        assert told.startswith(f"{LOCALHOST}:{server.port}: TLS failed: ")
        await use(tcp_dialer(LOCALHOST, server.port))


async def test_old_versions_of_tls_are_refused(authorities: Authorities) -> None:
    contexts = [hub_context(authorities.hub), agent_context(authorities.ours.ca)]
    assert [context.minimum_version for context in contexts] == [ssl.TLSVersion.TLSv1_2] * 2
    assert contexts[1].verify_mode is ssl.CERT_REQUIRED
    assert contexts[1].check_hostname


def test_files_that_cannot_be_used_are_named(authorities: Authorities) -> None:
    """By the table that they stand in; each fault in its own line."""
    certificate, key = authorities.hub
    other_key = authorities.agent[1]
    pair = f"cert_file {certificate}, key_file {other_key}: key values mismatch; name a certificate and its own private"
    no_authorities = "no certificate found; name a PEM file with the certificates of authorities"
    with pytest.raises(ConfigurationError) as caught:
        client_tls(ca_file=key, cert_file=certificate, key_file=other_key)
    assert caught.value.faults == [
        f"[federation.tls] ca_file {key}: {no_authorities}",
        f"[federation.tls] {pair} key, both as PEM",
    ]
    with pytest.raises(ConfigurationError) as caught:
        server_tls(cert_file=certificate, key_file=other_key, client_ca_file=key)
    assert caught.value.faults == [
        f"[hub.tls] client_ca_file {key}: {no_authorities}",
        f"[hub.tls] {pair} key, both as PEM",
    ]


# --- deadlines, on virtual time --------------------------------------------------------------------------------------


async def test_a_client_that_does_not_shake_hands_is_given_up(
    authorities: Authorities, autojump_clock: MockClock
) -> None:
    link = new_link()
    began = trio.current_time()
    with pytest.raises(Unavailable) as caught:
        await accept_tls(link.server, hub_context(authorities.hub), "1.2.3.4:5")
    assert trio.current_time() == began + HANDSHAKE_DEADLINE
    assert str(caught.value) == "1.2.3.4:5: no TLS handshake within 5 s"
    assert await link.client.receive_some() == b""


async def test_a_hub_that_does_not_shake_hands_is_given_up(
    authorities: Authorities, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = new_link()

    async def open_link(host: str, port: int) -> trio.abc.Stream:
        assert (host, port) == ("hub.test", 7443)
        return link.client

    monkeypatch.setattr(trio, "open_tcp_stream", open_link)
    began = trio.current_time()
    with pytest.raises(Unavailable) as caught:
        await tcp_dialer("hub.test", 7443, tls=agent_context(authorities.ours.ca))()
    assert trio.current_time() == began + HANDSHAKE_DEADLINE
    assert str(caught.value) == "hub.test:7443: no TLS handshake within 5 s"
    # It said hello, and closed.
    assert await link.server.receive_some()
    assert await link.server.receive_some() == b""


async def test_a_refused_client_that_does_not_hang_up_is_not_waited_for(
    authorities: Authorities, autojump_clock: MockClock
) -> None:
    """It is told at once all the same."""
    link = new_link()
    began = trio.current_time()
    await link.client.send_all(b"\x16\x03\x01\0\x05hello")

    async def accept() -> None:
        with pytest.raises(Unavailable, match="TLS failed: "):
            await accept_tls(link.server, hub_context(authorities.hub), "1.2.3.4:5")
        assert trio.current_time() == began + REFUSAL_DEADLINE

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        assert (await link.client.receive_some()).startswith(b"\x15\x03"), "an alert"
        assert await link.client.receive_some() == b""
        assert trio.current_time() == began


async def test_a_handshake_that_is_cancelled_closes_its_stream(
    authorities: Authorities, autojump_clock: MockClock
) -> None:
    link = new_link()
    with trio.move_on_after(1) as scope:
        await accept_tls(link.server, hub_context(authorities.hub), "1.2.3.4:5")
    assert scope.cancelled_caught
    assert await link.client.receive_some() == b""


async def test_an_address_that_does_not_answer_is_given_up(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(host: str, port: int) -> trio.abc.Stream:
        await trio.sleep_forever()

    monkeypatch.setattr(trio, "open_tcp_stream", hang)
    began = trio.current_time()
    with pytest.raises(Unavailable) as caught:
        await tcp_dialer("2001:db8::1", 7443)()
    assert trio.current_time() == began + CONNECT_DEADLINE
    assert str(caught.value) == "[2001:db8::1]:7443: no connection within 5 s"


async def test_silence_behind_tls_is_silence(authorities: Authorities, autojump_clock: MockClock) -> None:
    """The whole stack over TLS in memory, with a black hole in it."""
    link = new_link()
    context = agent_context(authorities.ours.ca)
    async with open_bridge(), trio.open_nursery() as nursery:

        async def serve() -> None:
            stream = await accept_tls(link.server, hub_context(authorities.named), "agent")
            assert peer_name(stream) == link.server.name
            await FederationServer(take_reports, send_one).serve(stream)

        nursery.start_soon(serve)
        stream = trio.SSLStream(link.client, context, server_hostname="hub.test", https_compatible=True)
        connection = await HubConnection.open(nursery, stream, peer="hub", settings=ConnectionSettings())
        async with connection.watch(WatchFederationRequest()) as call:
            assert number_of(await call.receive()) == 1
            await trio.testing.wait_all_tasks_blocked()
            last = connection.transport.last_received
            link.hold(to_server=True, to_client=True)
            with pytest.raises(Unavailable, match="silent for 15 s"):
                await call.receive()
            assert trio.current_time() == last + 15
