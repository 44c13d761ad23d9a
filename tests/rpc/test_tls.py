"""TLS apart from what is spoken over it: contexts and the faults of files, and handshakes that fail, in memory and on
virtual time. Who is let in, over real sockets, is tested with the rooms that ask for it."""

from __future__ import annotations

import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import trustme
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from trio_federation.errors import ConfigurationError
from trio_federation.tls import (
    REFUSAL_DEADLINE,
    HandshakeFailed,
    HandshakeTooSlow,
    broken_by,
    client_context,
    reason_of,
    server_context,
    shake_hands,
)

PAIR = "; name a certificate and its own private key, both as PEM"
AUTHORITIES = "; name a PEM file with the certificates of authorities"


def openssl(*command: str) -> None:
    done = subprocess.run(["openssl", *command], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are good, by what they are, and files that are not."""
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority"))
    stranger.cert_pem.write_to_path(str(folder / "stranger"))
    for name in ("one", "other"):
        issued = authority.issue_cert(f"{name}.test")
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.crt"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    certificate, key = ((folder / name).read_text() for name in ("one.crt", "one.key"))
    (folder / "combined").write_text(key + certificate)
    (folder / "damaged.crt").write_text(certificate[:200] + certificate[210:])
    (folder / "half damaged.crt").write_text(certificate + certificate[:200] + certificate[210:])
    (folder / "cut.key").write_text(key[: len(key) // 2])
    (folder / "empty").write_text("")
    (folder / "text").write_text("secret words")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    path = str(folder / "one.key")
    openssl("pkey", "-in", path, "-aes256", "-passout", "pass:x", "-out", str(folder / "encrypted.key"))
    openssl("pkey", "-in", path, "-pubout", "-out", str(folder / "public.key"))
    openssl("genrsa", "-out", str(folder / "rsa.key"), "2048")
    openssl("pkey", "-in", path, "-outform", "DER", "-out", str(folder / "der.key"))
    openssl("x509", "-in", str(folder / "one.crt"), "-outform", "DER", "-out", str(folder / "der.crt"))
    (folder / "index").write_text("")
    lists = "[ca]\ndefault_ca=a\n[a]\ndatabase={0}/index\ndefault_md=sha256\ndefault_crl_days=1\n"
    (folder / "config").write_text(lists.format(folder))
    (folder / "authority.key").write_bytes(authority.private_key_pem.bytes())
    signed = ["-keyfile", str(folder / "authority.key"), "-cert", str(folder / "authority")]
    openssl("ca", "-gencrl", "-config", str(folder / "config"), *signed, "-out", str(folder / "revoked"))
    return folder


def server(folder: Path, certificate: str = "one.crt", key: str = "one.key", ca: str | None = None) -> ssl.SSLContext:
    return server_context(
        "some.tls",
        cert_file=str(folder / certificate),
        key_file=str(folder / key),
        client_ca_file=str(folder / ca) if ca is not None else None,
        protocols=["h2"],
    )


def client(
    folder: Path, ca: str | None = "authority", certificate: str | None = None, key: str | None = None
) -> ssl.SSLContext:
    ca_file, cert_file, key_file = (str(folder / name) if name is not None else None for name in (ca, certificate, key))
    return client_context("any.tls", ca_file=ca_file, cert_file=cert_file, key_file=key_file, protocols=["h2"])


# --- contexts --------------------------------------------------------------------------------------------------------


def test_contexts_are_strict(folder: Path) -> None:
    both = [server(folder, ca="authority"), client(folder)]
    for context in both:
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.options & ssl.OP_NO_RENEGOTIATION
    assert both[0].verify_mode is ssl.CERT_NONE
    assert both[1].verify_mode is ssl.CERT_REQUIRED
    assert both[1].check_hostname


def test_authorities_are_those_of_the_file_only(folder: Path) -> None:
    """Those of the system would let strangers in."""
    for context in (server(folder, ca="authority"), client(folder)):
        assert len(context.get_ca_certs()) == 1
    assert server(folder).get_ca_certs() == []


def test_both_of_a_pair_may_be_one_file(folder: Path) -> None:
    server(folder, "combined", "combined")
    client(folder, certificate="combined", key="combined")
    client(folder, certificate="combined")


@pytest.mark.parametrize(
    "certificate, key, fault",
    [
        ("one.crt", "other.key", "cert_file {}/one.crt, key_file {}/other.key: key values mismatch" + PAIR),
        ("one.crt", "rsa.key", "cert_file {}/one.crt, key_file {}/rsa.key: key type mismatch" + PAIR),
        ("gone", "one.key", "cert_file {}/gone: no such file or directory" + PAIR),
        ("gone", "text", "cert_file {}/gone: no such file or directory" + PAIR),
        ("folder", "one.key", "cert_file {}/folder: is a directory" + PAIR),
        *((name, "one.key", f"cert_file {{}}/{name}: no certificate found{PAIR}") for name in ("empty", "text")),
        *((name, "one.key", f"cert_file {{}}/{name}: no certificate found{PAIR}") for name in ("binary", "one.key")),
        ("der.crt", "one.key", f"cert_file {{}}/der.crt: no certificate found{PAIR}"),
        ("damaged.crt", "one.key", f"cert_file {{}}/damaged.crt: holds a damaged certificate{PAIR}"),
        ("half damaged.crt", "one.key", f"cert_file {{}}/half damaged.crt: holds a damaged certificate{PAIR}"),
        ("one.crt", "gone", "key_file {}/gone: no such file or directory" + PAIR),
        ("one.crt", "folder", "key_file {}/folder: is a directory" + PAIR),
        *(
            ("one.crt", name, f"key_file {{}}/{name}: no private key found that can be read{PAIR}")
            for name in ("empty", "text", "binary", "one.crt", "cut.key", "public.key", "der.key")
        ),
        (
            "one.crt",
            "encrypted.key",
            "key_file {}/encrypted.key: the key is encrypted; store it without a passphrase, readable by this process "
            "only",
        ),
    ],
)
def test_a_pair_that_cannot_be_used(folder: Path, certificate: str, key: str, fault: str) -> None:
    """On both sides: which of the files it is, why, and what to do."""
    expected = fault.replace("{}", str(folder))
    with pytest.raises(ConfigurationError) as caught:
        server(folder, certificate, key)
    assert caught.value.faults == [f"[some.tls] {expected}"]
    assert caught.value.__cause__ is not None
    with pytest.raises(ConfigurationError) as caught:
        client(folder, None, certificate, key)
    assert caught.value.faults == [f"[any.tls] {expected}"]


@pytest.mark.parametrize(
    "ca, why",
    [
        ("gone", "no such file or directory"),
        ("folder", "is a directory"),
        *((name, "no certificate found") for name in ("empty", "text", "binary", "one.key", "der.crt", "revoked")),
        *((name, "holds a damaged certificate") for name in ("damaged.crt", "half damaged.crt")),
    ],
)
def test_authorities_that_cannot_be_used(folder: Path, ca: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        server(folder, ca=ca)
    assert caught.value.faults == [f"[some.tls] client_ca_file {folder / ca}: {why}{AUTHORITIES}"]
    assert caught.value.__cause__ is not None
    with pytest.raises(ConfigurationError) as caught:
        client(folder, ca)
    assert caught.value.faults == [f"[any.tls] ca_file {folder / ca}: {why}{AUTHORITIES}"]


def test_every_fault_is_told_at_once(folder: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        client(folder, "text", "one.crt", "other.key")
    assert [re.findall(r"\S+_file", fault) for fault in caught.value.faults] == [["ca_file"], ["cert_file", "key_file"]]


# --- handshakes ------------------------------------------------------------------------------------------------------


def streams(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[trio.SSLStream[trio.abc.Stream], ...]:
    left, right = trio.testing.memory_stream_pair()
    return (
        trio.SSLStream(left, client, server_hostname="one.test", https_compatible=True),
        trio.SSLStream(right, server, server_side=True, https_compatible=True),
    )


async def refused(stream: trio.SSLStream[Any], words: str) -> None:
    with pytest.raises(HandshakeFailed) as caught:
        await shake_hands(stream, within=5)
    assert str(caught.value) == words
    with pytest.raises(trio.ClosedResourceError):
        await stream.transport_stream.send_all(b"x")


async def test_a_client_tells_why_it_does_not_want_the_server(folder: Path, autojump_clock: MockClock) -> None:
    ours, theirs = streams(client(folder, "stranger"), server(folder))
    began = trio.current_time()
    why = "certificate not accepted: unable to get local issuer certificate"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refused, ours, f"TLS failed: {why}")
        nursery.start_soon(
            refused,
            theirs,
            "TLS failed: the other side does not accept the certificate of this side: unknown authority",
        )
    assert trio.current_time() == began, "nobody waited for who had hung up"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_tells_why_it_does_not_want_the_client(
    folder: Path, autojump_clock: MockClock, version: ssl.TLSVersion
) -> None:
    asking, asked = server(folder, ca="authority"), client(folder)
    asking.verify_mode = ssl.CERT_REQUIRED
    asking.maximum_version = version
    ours, theirs = streams(asked, asking)
    heard: list[str] = []

    async def dial() -> None:
        try:
            await shake_hands(ours, within=5)
            await ours.receive_some()  # under 1.3 it is let in until it reads
        except HandshakeFailed as error:
            heard.append(str(error))
        except trio.BrokenResourceError as error:
            heard.append(broken_by(error))
        await trio.aclose_forcefully(ours)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        nursery.start_soon(refused, theirs, "TLS failed: peer did not return a certificate")
    assert heard[0].startswith("TLS failed: the other side ")
    if version is ssl.TLSVersion.TLSv1_3:
        assert heard == [
            "TLS failed: the other side demands a certificate, and got none; set [federation.tls] cert_file and "
            "key_file"
        ]


@given(data=st.binary(min_size=5, max_size=300).filter(lambda data: data[0] != 22))
def test_what_is_no_handshake_is_refused_in_one_line(folder: Path, data: bytes) -> None:
    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        stream = trio.SSLStream(theirs, server(folder), server_side=True, https_compatible=True)
        await ours.send_all(data)
        await ours.send_eof()
        with pytest.raises(HandshakeFailed) as caught:
            await shake_hands(stream, within=5)
        assert re.fullmatch("TLS failed: [a-z0-9 ]+", str(caught.value))
        assert caught.value.__cause__ is not None

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_peer_that_takes_no_word_is_not_waited_for(folder: Path, autojump_clock: MockClock) -> None:
    """It neither reads nor hangs up; the alert itself cannot be sent."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    stream = trio.SSLStream(theirs, server(folder), server_side=True, https_compatible=True)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.send_all, b"\x16\x03\x01\0\x05hello")
        with pytest.raises(HandshakeFailed, match="TLS failed: "):
            await shake_hands(stream, within=5)
        assert trio.current_time() == began + REFUSAL_DEADLINE
        nursery.cancel_scope.cancel()


async def test_a_handshake_has_its_time(folder: Path, autojump_clock: MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    stream = trio.SSLStream(theirs, server(folder), server_side=True, https_compatible=True)
    began = trio.current_time()
    with pytest.raises(HandshakeTooSlow) as caught:
        await shake_hands(stream, within=7)
    assert trio.current_time() == began + 7
    assert str(caught.value) == "no TLS handshake within 7 s"
    assert await ours.receive_some() == b"", "closed"


async def test_a_handshake_whose_stream_is_closed_or_that_is_cancelled(folder: Path, autojump_clock: MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    stream = trio.SSLStream(theirs, server(folder), server_side=True, https_compatible=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refused, stream, "closed by this side during the TLS handshake")
        await trio.testing.wait_all_tasks_blocked()
        await theirs.aclose()
    ours, theirs = trio.testing.memory_stream_pair()
    stream = trio.SSLStream(theirs, server(folder), server_side=True, https_compatible=True)
    with trio.move_on_after(1) as scope:
        await shake_hands(stream, within=7)
    assert scope.cancelled_caught
    assert await ours.receive_some() == b"", "closed"


# --- errors in words -------------------------------------------------------------------------------------------------


def test_what_breaks_a_connection_is_one_line() -> None:
    def broken(cause: BaseException | None) -> str:
        error = trio.BrokenResourceError()
        error.__cause__ = cause
        return broken_by(error)

    def tls(reason: str) -> ssl.SSLError:
        error = ssl.SSLError(1, f"[SSL: {reason}] some words (_ssl.c:1)")
        error.reason = reason
        return error

    assert broken(None) == "the connection broke: BrokenResourceError"
    assert broken(ConnectionResetError(104, "reset")) == "the connection broke: connection reset by peer"
    refused = "TLS failed: the other side does not accept the certificate of this side"
    assert broken(tls("SSLV3_ALERT_CERTIFICATE_EXPIRED")) == f"{refused}: certificate expired"
    assert broken(tls("SSLV3_ALERT_BAD_CERTIFICATE")) == f"{refused}: bad certificate"
    assert broken(tls("TLSV1_ALERT_UNKNOWN_CA")) == f"{refused}: unknown authority"
    assert broken(tls("TLSV13_ALERT_CERTIFICATE_REQUIRED")) == (
        "TLS failed: the other side demands a certificate, and got none; set [federation.tls] cert_file and key_file"
    )
    assert broken(tls("SSLV3_ALERT_HANDSHAKE_FAILURE")) == "TLS failed: the other side refuses: handshake failure"
    assert broken(tls("DECRYPTION_FAILED_OR_BAD_RECORD_MAC")) == ("TLS failed: decryption failed or bad record mac")
    assert broken(ssl.SSLError(1, "unheard of")) == "TLS failed: unheard of"
    assert broken(ssl.SSLError(1, "[SSL] PEM lib (_ssl.c:3926)")) == "TLS failed: [SSL] PEM lib"
    assert broken(ssl.SSLEOFError(8, "EOF occurred in violation of protocol")) == "TLS failed: the other side hung up"


def test_of_a_group_of_failures_the_first_is_told() -> None:
    """As happy eyeballs reports them."""
    error = OSError("all attempts failed")
    error.__cause__ = ExceptionGroup("each", [ConnectionRefusedError(111, "to ::1"), TimeoutError()])
    assert reason_of(error) == "connection refused"
    assert reason_of(PermissionError(13, "Permission denied", "some file")) == "permission denied"
    assert reason_of(ValueError("words")) == "words"
    assert reason_of(ValueError()) == "ValueError"
