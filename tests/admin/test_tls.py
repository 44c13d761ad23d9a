"""The admin interface over TLS, on real sockets: what is spoken, which certificate counts, and that no client can hold
it up before, during or after its handshake."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import trio
import trio.testing
import trustme
from cryptography.hazmat.primitives import serialization
from structlog.typing import EventDict

from tests.admin.conftest import Connect, ServeAdmin
from tests.admin.helpers import BIG, REQUEST, Placements, answers, is_reset, read_to_end
from trio_federation.admin import admin_app, admin_tls, serve_http
from trio_federation.admin.server import IDLE_TIMEOUT, REQUEST_TIMEOUT
from trio_federation.errors import ConfigurationError
from trio_federation.registry import Registry
from trio_federation.tls import REFUSAL_DEADLINE

TOKEN = "the-token-of-the-admin-interface"


class Files(NamedTuple):
    """A certificate for this machine, and its key."""

    cert_file: str
    key_file: str

    @property
    def tls(self) -> ssl.SSLContext:
        """What the server makes of them."""
        return admin_tls(self.cert_file, self.key_file)


def issue(authority: trustme.CA, folder: Path) -> Files:
    """Write a certificate for 127.0.0.1 and localhost, and its key, into a folder."""
    issued = authority.issue_cert("127.0.0.1", "localhost")
    folder.mkdir(exist_ok=True)
    files = Files(str(folder / "tls.crt"), str(folder / "tls.key"))
    Path(files.cert_file).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(files.key_file)
    return files


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issue(authority, tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """A client's side that trusts the authority and nobody else."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@asynccontextmanager
async def open_client(trusting: ssl.SSLContext, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(verify=trusting, trust_env=False, timeout=5, **options) as client:
        yield client


async def still_answers(trusting: ssl.SSLContext, port: int) -> None:
    """Fails where the server no longer answers others."""
    async with open_client(trusting) as client:
        assert (await client.get(f"https://127.0.0.1:{port}/metrics")).text == "up 1\n"


async def pass_time(clock: trio.testing.MockClock, seconds: float, trusting: ssl.SSLContext, port: int) -> None:
    """Moves the clock ahead, once the server has taken notice of every connection there is."""
    await still_answers(trusting, port)
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(seconds)


async def lines(logs: list[EventDict], count: int) -> None:
    """Waits until so many were logged: a client may know first that it was refused."""
    with trio.fail_after(5):
        while len(logs) < count:
            await trio.lowlevel.checkpoint()


def quiet(logs: list[EventDict], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was told of failed connections, which must all be for whoever looks for it, and without a traceback."""
    assert {(line["event"], line["log_level"], line["server"]) for line in logs} <= {
        ("http_connection_failed", "debug", "admin")
    }
    assert [line for line in logs if "exc_info" in line] == []
    assert not caplog.records
    return [line["error"] for line in logs]


# What is spoken.


@pytest.mark.parametrize("http2, version", [(False, "HTTP/1.1"), (True, "HTTP/2")])
async def test_both_kinds_of_http(
    nursery: trio.Nursery, files: Files, trusting: ssl.SSLContext, http2: bool, version: str
) -> None:
    """To the end, with the token and a placement; the application knows that it is https."""
    placements = Placements(Registry("west", ttl=30.0, clock=lambda: 100.0))
    inner = admin_app(placements.answers, host="127.0.0.1", token=lambda: TOKEN)
    schemes = set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        schemes.add(scope["scheme"])
        await inner(scope, receive, send)

    tls = files.tls
    port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin", tls=lambda: tls))
    async with open_client(trusting, http1=not http2, http2=http2) as client:
        for host in ("127.0.0.1", "localhost"):
            url = f"https://{host}:{port}"
            response = await client.get(f"{url}/metrics")
            assert (response.text, response.http_version) == ("up 1\n", version)
            assert (await client.get(f"{url}/v1/capacity")).status_code == 401
            headers = {"authorization": f"Bearer {TOKEN}", "origin": url}
            response = await client.post(f"{url}/v1/place", json={"namespace": "a", "env": "b"}, headers=headers)
            assert (response.status_code, response.http_version) == (200, version)
    assert schemes == {"https"}
    assert placements.reserved == 2


@pytest.mark.parametrize("http2", [False, True])
async def test_who_is_refused_reads_why(
    serve_admin: ServeAdmin, files: Files, trusting: ssl.SSLContext, logs: list[EventDict], http2: bool
) -> None:
    """And the connection goes on, although the body comes after the answer could be given."""
    tls = files.tls
    port = await serve_admin(answers(), token=lambda: TOKEN, tls=lambda: tls)
    place, good = f"https://127.0.0.1:{port}/v1/place", {"authorization": f"Bearer {TOKEN}"}
    body = b'"' + b"x" * 60_000 + b'"'
    connections = set()
    async with open_client(trusting, http1=not http2, http2=http2) as client:
        for headers, status in (
            ({}, 401),
            (good | {"origin": "https://evil.example"}, 403),
            (good | {"content-type": "text/plain"}, 415),
            (good | {"content-type": "application/json"}, 400),
        ):
            for method in ("POST", "POST", "HEAD" if status == 401 else "POST"):
                async with client.stream(method, place, content=body, headers=headers) as response:
                    stream = response.extensions["network_stream"]
                    connections.add(stream.get_extra_info("client_addr"))
                    await response.aread()
                assert response.status_code == status
    assert logs == []
    if http2:
        assert len(connections) == 1


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_kinds_of_tls(
    serve_admin: ServeAdmin, files: Files, authority: trustme.CA, version: ssl.TLSVersion
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.minimum_version = context.maximum_version = version
    tls = files.tls
    await still_answers(context, await serve_admin(answers(), tls=lambda: tls))


def test_nothing_older_is_spoken(files: Files) -> None:
    assert files.tls.minimum_version == ssl.TLSVersion.TLSv1_2
    assert files.tls.verify_mode == ssl.CERT_NONE  # of clients


@pytest.mark.parametrize("protocols, chosen", [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), ([], None)])
async def test_what_is_agreed_on(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    authority: trustme.CA,
    protocols: list[str],
    chosen: str | None,
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(protocols)
    tls = files.tls
    raw = await connect(await serve_admin(answers(), tls=lambda: tls))
    stream = trio.SSLStream(raw, context, server_hostname="localhost", https_compatible=True)
    with trio.fail_after(5):
        await stream.do_handshake()
        assert stream.selected_alpn_protocol() == chosen
        if chosen != "h2":
            await stream.send_all(REQUEST)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


async def test_a_large_answer_comes_whole(serve_admin: ServeAdmin, files: Files, trusting: ssl.SSLContext) -> None:
    tls = files.tls
    body = bytes(range(256)) * (2**20 // 256)
    port = await serve_admin(answers(lambda: body), tls=lambda: tls)
    for options in ({"http2": False}, {"http1": False, "http2": True}):
        async with open_client(trusting, **options) as client:
            assert (await client.get(f"https://127.0.0.1:{port}/metrics")).content == body


async def test_the_certificate_of_the_moment_counts_for_who_comes_now(
    serve_admin: ServeAdmin, files: Files, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    """And those who are there stay."""
    other = trustme.CA()
    contexts = [files.tls]
    port = await serve_admin(answers(), tls=lambda: contexts[-1])
    trusting_other = ssl.create_default_context()
    other.configure_trust(trusting_other)
    url = f"https://127.0.0.1:{port}/healthz"
    limits = httpx.Limits(max_keepalive_connections=1, max_connections=1)
    async with open_client(trusting, limits=limits) as before:
        assert (await before.get(url)).text == "ok"
        contexts.append(issue(other, tmp_path).tls)
        assert (await before.get(url)).text == "ok"
        await still_answers(trusting_other, port)
        with pytest.raises(httpx.ConnectError):
            await still_answers(trusting, port)


# Clients that never come to an end.


async def client_hello(trusting: ssl.SSLContext) -> bytes:
    """The first words of a handshake."""
    outgoing = ssl.MemoryBIO()
    spoken = trusting.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        spoken.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 1.0], ids=["nothing", "a few bytes", "half", "and no answer to ours"])
async def test_a_handshake_that_stalls_ends_with_its_time(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    clock: trio.testing.MockClock,
    logs: list[EventDict],
    caplog: pytest.LogCaptureFixture,
    part: float,
) -> None:
    hello = await client_hello(trusting)
    tls = files.tls
    port = await serve_admin(answers(), tls=lambda: tls)
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        stalled = await connect(port, hello[: int(part * len(hello))])
        await pass_time(clock, IDLE_TIMEOUT, trusting, port)
        await read_to_end(stalled, within=REQUEST_TIMEOUT - IDLE_TIMEOUT - 1)
        await still_answers(trusting, port)
    assert quiet(logs, caplog) == [f"no TLS handshake within {IDLE_TIMEOUT:g} s"]


async def test_a_handshake_that_drips_ends_with_its_time(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    clock: trio.testing.MockClock,
) -> None:
    hello = await client_hello(trusting)
    tls = files.tls
    port = await serve_admin(answers(), tls=lambda: tls)
    stream = await connect(port)
    for byte in hello[:10]:
        with suppress(trio.BrokenResourceError):  # on a slow machine the end comes before the last byte
            await stream.send_all(bytes([byte]))
        await pass_time(clock, IDLE_TIMEOUT / 10, trusting, port)
    await read_to_end(stream, within=REQUEST_TIMEOUT - IDLE_TIMEOUT - 1)


async def test_stalled_handshakes_make_room(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    logs: list[EventDict],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tls = files.tls
    port = await serve_admin(answers(), tls=lambda: tls, max_connections=3)
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        stalled = [await connect(port) for _ in range(3)]
        await still_answers(trusting, port)
        assert await read_to_end(stalled[0]) == b""
    assert len(quiet(logs, caplog)) == 1


async def test_a_client_that_asks_for_nothing_after_its_handshake_is_closed(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    clock: trio.testing.MockClock,
    logs: list[EventDict],
) -> None:
    tls = files.tls
    port = await serve_admin(answers(), tls=lambda: tls)
    raw = await connect(port)
    stream = trio.SSLStream(raw, trusting, server_hostname="localhost", https_compatible=True)
    await stream.do_handshake()
    await pass_time(clock, IDLE_TIMEOUT, trusting, port)
    with trio.fail_after(REQUEST_TIMEOUT - IDLE_TIMEOUT - 1):
        assert await stream.receive_some() == b""
    assert logs == []


async def test_an_answer_that_nobody_reads_ends_with_its_time(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    clock: trio.testing.MockClock,
) -> None:
    tls = files.tls
    begun = trio.Event()

    def exposition() -> bytes:
        begun.set()
        return b"x" * BIG

    port = await serve_admin(answers(exposition), tls=lambda: tls)
    raw = await connect(port)
    stream = trio.SSLStream(raw, trusting, server_hostname="localhost", https_compatible=True)
    with trio.fail_after(5):
        await stream.send_all(REQUEST)
        assert (await stream.receive_some(5)) == b"HTTP/"
        await begun.wait()
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(REQUEST_TIMEOUT)
    await is_reset(raw)


async def test_cancelling_ends_at_once_whatever_the_clients_do(
    connect: Connect, files: Files, trusting: ssl.SSLContext
) -> None:
    hello = await client_hello(trusting)
    tls = files.tls
    clients = []
    async with trio.open_nursery() as nursery:
        app = admin_app(answers(lambda: b"x" * BIG), host="127.0.0.1")
        port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin", tls=lambda: tls))
        for begun in (b"", hello[:20], hello):
            clients.append(await connect(port, begun))
        for words in (b"", REQUEST):
            raw = await connect(port)
            stream = trio.SSLStream(raw, trusting, server_hostname="localhost", https_compatible=True)
            await stream.do_handshake()
            await stream.send_all(words)
            clients.append(raw)
        await stream.receive_some(1)
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began < 2
    for each in clients:
        assert len(await read_to_end(each)) < BIG


# Clients that fail.


@pytest.mark.parametrize(
    "rubbish",
    [
        REQUEST,
        bytes(range(256)) * 8,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\xff\xff" + b"\0" * 100,
    ],
)
async def test_what_is_no_handshake_ends_its_own_connection_only(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    logs: list[EventDict],
    caplog: pytest.LogCaptureFixture,
    rubbish: bytes,
) -> None:
    tls = files.tls
    port = await serve_admin(answers(), tls=lambda: tls)
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        stream = await connect(port, rubbish)
        heard = await read_to_end(stream)
        await still_answers(trusting, port)
        await stream.aclose()
        await lines(logs, 1)
    if rubbish.startswith(b"\x16\x03"):  # OpenSSL speaks to those only that try to speak TLS
        assert heard.startswith(b"\x15\x03"), "an alert"
    assert b"HTTP" not in heard
    (error,) = quiet(logs, caplog)
    assert error.startswith("TLS failed: ")
    assert error.isprintable()


def shake_hands(port: int) -> None:
    """A client that trusts nobody, and says so: Trio's streams only hang up."""
    context = ssl.create_default_context(cadata=trustme.CA().cert_pem.bytes().decode())
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as stream,
        context.wrap_socket(stream, server_hostname="localhost"),
    ):
        pass


async def test_clients_that_leave_or_do_not_trust_are_no_warning(
    serve_admin: ServeAdmin,
    files: Files,
    trusting: ssl.SSLContext,
    logs: list[EventDict],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tls = files.tls
    hello = await client_hello(trusting)
    port = await serve_admin(answers(), tls=lambda: tls)
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        for begun in (b"", hello[:20], hello):
            leaving = await trio.open_tcp_stream("127.0.0.1", port)
            await leaving.send_all(begun)
            await leaving.aclose()
        with pytest.raises(ssl.SSLCertVerificationError):
            await trio.to_thread.run_sync(shake_hands, port)
        await still_answers(trusting, port)
        await lines(logs, 4)
    errors = quiet(logs, caplog)
    assert len(errors) == 4
    assert errors.count("TLS failed: the other side hung up") == 3
    assert "TLS failed: the other side does not accept the certificate of this side: unknown authority" in errors


async def test_a_client_hears_why_it_is_refused(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    authority: trustme.CA,
    logs: list[EventDict],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From TLS itself, so that its user need not guess why the connection ends."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")  # not with the key of this certificate
    tls = files.tls
    port = await serve_admin(answers(), tls=lambda: tls)
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        stream = trio.SSLStream(await connect(port), context, server_hostname="localhost", https_compatible=True)
        with trio.fail_after(5), pytest.raises(trio.BrokenResourceError) as caught:
            await stream.do_handshake()
        assert isinstance(caught.value.__cause__, ssl.SSLError)
        assert "ALERT_HANDSHAKE_FAILURE" in caught.value.__cause__.reason
        await trio.aclose_forcefully(stream)
        await still_answers(trusting, port)
        await lines(logs, 1)
    assert quiet(logs, caplog) == ["TLS failed: no shared cipher"]


async def test_a_refused_client_that_stays_is_closed(
    serve_admin: ServeAdmin,
    connect: Connect,
    files: Files,
    trusting: ssl.SSLContext,
    clock: trio.testing.MockClock,
    logs: list[EventDict],
) -> None:
    tls = files.tls
    port = await serve_admin(answers(), tls=lambda: tls)
    stream = await connect(port, b"\x16\x03\x01\0\x05hello")
    assert await read_to_end(stream)
    await pass_time(clock, REFUSAL_DEADLINE, trusting, port)
    await lines(logs, 1)

    async def send_on() -> None:
        while True:
            await stream.send_all(b"more")

    with trio.fail_after(5), pytest.raises(trio.BrokenResourceError):
        await send_on()


async def test_a_context_that_cannot_be_made_ends_that_connection_only(
    serve_admin: ServeAdmin, connect: Connect, files: Files, trusting: ssl.SSLContext, logs: list[EventDict]
) -> None:
    made: list[ssl.SSLContext] = []
    port = await serve_admin(answers(), tls=lambda: made[0])
    assert await read_to_end(await connect(port)) == b""
    made.append(files.tls)
    await still_answers(trusting, port)
    assert [(line["event"], line["log_level"]) for line in logs] == [("http_connection_failed", "warning")]


# The files.


def fault(cert_file: str, key_file: str) -> str:
    """The one line with which they are refused."""
    with pytest.raises(ConfigurationError) as caught:
        admin_tls(cert_file, key_file)
    (line,) = caught.value.faults
    assert line.isprintable()
    return line


def test_files_that_cannot_be_used(files: Files, authority: trustme.CA, tmp_path: Path) -> None:
    """In the words that every table has for it, with the name of this one."""
    advice = "; name a certificate and its own private key, both as PEM"
    gone = str(tmp_path / "gone")
    assert fault(gone, files.key_file) == f"[admin.tls] cert_file {gone}: no such file or directory{advice}"
    assert fault(files.cert_file, gone) == f"[admin.tls] key_file {gone}: no such file or directory{advice}"
    other = issue(authority, tmp_path / "other")
    assert fault(files.cert_file, other.key_file) == (
        f"[admin.tls] cert_file {files.cert_file}, key_file {other.key_file}: key values mismatch{advice}"
    )


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL would ask on the terminal, and wait."""
    key = serialization.load_pem_private_key(Path(files.key_file).read_bytes(), None)
    encrypted = tmp_path / "tls.key"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"words"),
        )
    )
    line = fault(files.cert_file, str(encrypted))
    assert line == (
        f"[admin.tls] key_file {encrypted}: the key is encrypted; store it without a passphrase, readable by this "
        "process only"
    )
