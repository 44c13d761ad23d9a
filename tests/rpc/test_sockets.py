"""TCP and TLS, over real sockets of this machine: who is let in, who is not, and what people are told. Deadlines are
tested over in-memory links, where time is virtual."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme
from trio.testing import MockClock

from tests.rpc.harness import new_link, number_of, report_of, send_one, take_reports
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
from trio_federation.rpc.sockets import CONNECT_DEADLINE, HANDSHAKE_DEADLINE

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

    def issue(self, *names: str) -> tuple[str, str]:
        """A certificate for these names: the paths of its chain and of its key."""
        issued = self._authority.issue_cert(*names)
        chain, key = self._folder / f"{names[0]}.pem", self._folder / f"{names[0]}.key"
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

    def __post_init__(self) -> None:
        self.hub = self.ours.issue(LOCALHOST, "::1", "localhost")
        self.named = self.ours.issue("hub.test")
        self.agent = self.ours.issue("west.test")
        self.stranger = self.strangers.issue("west.test")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return Authorities(Files(tmp_path_factory.mktemp("ours")), Files(tmp_path_factory.mktemp("strangers")))


def hub_context(certificate: tuple[str, str], client_ca: str | None = None) -> ssl.SSLContext:
    return server_tls(cert_file=certificate[0], key_file=certificate[1], client_ca_file=client_ca)


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


@asynccontextmanager
async def served(tls: ssl.SSLContext | None = None, host: str = LOCALHOST) -> AsyncIterator[Served]:
    listeners = await open_listeners(host, 0)
    refused: list[Unavailable] = []
    callers: list[str] = []

    async def report(call: IncomingReport) -> None:
        callers.append(call.peer)
        await take_reports(call)

    server = FederationServer(report, send_one)

    async def accept(stream: trio.SocketStream) -> None:
        peer = peer_name(stream)
        accepted: trio.abc.Stream = stream
        if tls is not None:
            try:
                accepted = await accept_tls(stream, tls, peer)
            except Unavailable as error:
                refused.append(error)
                return
        await server.serve(accepted)

    with trio.fail_after(SOON):
        async with open_bridge(), trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, accept, listeners)
            yield Served(listeners[0].socket.getsockname()[1], refused, callers)
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
        assert len(server.refused) == 2
        assert "peer did not return a certificate" in str(server.refused[0])
        assert "certificate not accepted" in str(server.refused[1])


async def test_a_hub_that_asks_for_none_takes_one_that_is_offered(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub)) as server:
        await use(tcp_dialer(LOCALHOST, server.port, tls=agent_context(authorities.ours.ca, authorities.agent)))


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
        assert ["ALPN" in str(error) for error in server.refused] == [True]


async def test_a_plain_client_of_a_tls_hub_is_refused(authorities: Authorities) -> None:
    async with served(hub_context(authorities.hub)) as server:
        told = await refusal_of(tcp_dialer(LOCALHOST, server.port))
        assert told.startswith("hub: the ")
        assert len(server.refused) == 1
        assert "TLS failed: " in str(server.refused[0])
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


def test_files_that_cannot_be_used_are_named(authorities: Authorities, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    (tmp_path / "nonsense.pem").write_text("nonsense")
    nonsense = str(tmp_path / "nonsense.pem")
    certificate, key = authorities.hub
    other_key = authorities.agent[1]
    for ca_file, cert_file, key_file in [
        (missing, None, None),
        (nonsense, None, None),
        (None, missing, key),
        (None, certificate, missing),
        (None, nonsense, key),
        (None, certificate, other_key),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            client_tls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)
        [fault] = caught.value.faults
        assert fault.startswith("[federation.tls]: ")
        assert all(file in fault for file in (ca_file, cert_file, key_file) if file)
        assert caught.value.__cause__ is not None
        if cert_file is None or key_file is None:
            continue
        with pytest.raises(ConfigurationError) as caught:
            server_tls(cert_file=cert_file, key_file=key_file, client_ca_file=ca_file)
        [fault] = caught.value.faults
        assert fault.startswith("[hub.tls]: ")


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
