"""docs/operations.md says what agents are told after a wrong step. That its steps are right is in
tests/process/test_walk.py."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID

from trio_federation.credentials import CertificateName, DenyList, make_token
from trio_federation.errors import AlreadyExists, RpcError, Unavailable
from trio_federation.identity import Trusted, call_metadata, identify
from trio_federation.retry import LONGEST
from trio_federation.rpc import accept_tls, client_tls, server_tls, tcp_dialer
from trio_federation.sessions import Sessions
from trio_federation.tls import broken_by

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"
TEXT = PAGE.read_text(encoding="utf-8")

SECRET, NEW_SECRET = "5" * 64, "6" * 64
SAN = CertificateName.parse("DNS:{cluster}.agents.example")
#: the names of two certificates that are not for west
EAST = (("DNS", "east.agents.example"),)
ODD = (("DNS", "west.example"),)


def told(what: str) -> tuple[str, str]:
    """The status, and what the agent is told, of the row of the table that begins like this."""
    [row] = [line for line in TEXT.splitlines() if line.startswith(f"| {what}")]
    _, status, error, _ = (cell.strip() for cell in row.strip("|").split(" | "))
    return status, re.sub(r"^`+ ?| ?`+$", "", error)


@pytest.mark.parametrize(
    "what, credential, names, trusted",
    [
        ("an agent has a token, and", make_token(SECRET, "west"), (), Trusted(("shared",), (SECRET,))),
        ("an agent has the shared secret", SECRET, (), Trusted(("token",), (NEW_SECRET,))),
        ("a token was made from", make_token(SECRET, "west"), (), Trusted(("token",), (NEW_SECRET,))),
        ("an agent that is not ours", make_token(SECRET, "east"), (), Trusted(("token",), (SECRET,))),
        (
            "a token, or a cluster, is denied",
            make_token(SECRET, "west"),
            (),
            Trusted(("token",), (SECRET,), DenyList(tokens=frozenset([("west", 1)]))),
        ),
        (
            "both of them name another",
            make_token(SECRET, "east"),
            EAST,
            Trusted(("token", "certificate"), (SECRET,), cluster_san=SAN),
        ),
        (
            "the hub takes a token and a certificate together",
            None,
            (("DNS", "west.agents.example"),),
            Trusted(("token+certificate",), (SECRET,), cluster_san=SAN),
        ),
    ],
)
def test_refused_calls_are_told_what_the_page_says(
    what: str, credential: str | None, names: tuple[tuple[str, str], ...], trusted: Trusted
) -> None:
    with pytest.raises(RpcError) as refused:
        identify(dict(call_metadata("west", "0a", credential)), names, trusted)
    assert (refused.value.status, refused.value.message) == told(what)


@pytest.mark.parametrize("what, names", [("a certificate has no name", ODD), ("a certificate names another", EAST)])
@pytest.mark.parametrize("credential", [None, SECRET, make_token(SECRET, "west"), make_token(NEW_SECRET, "west")])
def test_certificates_are_told_of_whatever_is_sent_besides(
    what: str, names: tuple[tuple[str, str], ...], credential: str | None
) -> None:
    """An agent goes on to send its secret or token when only certificates count."""
    with pytest.raises(RpcError) as refused:
        identify(
            dict(call_metadata("west", "0a", credential)), names, Trusted(("certificate",), (SECRET,), cluster_san=SAN)
        )
    assert (refused.value.status, refused.value.message) == told(what)


def test_two_that_report_for_one_cluster_are_told_what_the_page_says() -> None:
    sessions = Sessions(silence_limit=15.0)
    sessions.open("west", "0a", "10.0.0.7:40312", lambda: 100.0, 100.0)
    with pytest.raises(AlreadyExists) as refused:
        sessions.open("west", "0b", "10.0.0.8:40312", lambda: 100.0, 100.0)
    assert (refused.value.status, refused.value.message) == told("two agents, or two clusters")


class Authority(trustme.CA):
    """An authority, with what it issues as files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir()
        self._folder = folder
        self.file = str(folder / "ca.crt")
        self.cert_pem.write_to_path(self.file)

    def files(self, name: str, not_after: datetime | None = None) -> str:
        """A certificate and its key, in one file; its path. `not_after`: when it has run out, if long ago."""
        path = str(self._folder / f"{name}{len(list(self._folder.iterdir()))}.pem")
        began = None if not_after is None else not_after - timedelta(days=9)
        issued = self.issue_cert(name, not_before=began, not_after=not_after)
        issued.private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def server_files(self, name: str) -> str:
        """The same of one that is for servers only."""
        like = x509.load_pem_x509_certificate(self.issue_cert(name).cert_chain_pems[0].bytes())
        key = ec.generate_private_key(ec.SECP256R1())
        authority = load_pem_private_key(self.private_key_pem.bytes(), None)
        assert isinstance(authority, ec.EllipticCurvePrivateKey)
        builder = x509.CertificateBuilder(
            issuer_name=like.issuer,
            subject_name=like.subject,
            public_key=key.public_key(),
            serial_number=like.serial_number,
            not_valid_before=like.not_valid_before_utc,
            not_valid_after=like.not_valid_after_utc,
        )
        for extension in like.extensions:
            if extension.oid not in (ExtensionOID.EXTENDED_KEY_USAGE, ExtensionOID.SUBJECT_KEY_IDENTIFIER):
                builder = builder.add_extension(extension.value, extension.critical)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        path = self._folder / f"{name}-server.pem"
        path.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            + builder.sign(authority, SHA256()).public_bytes(Encoding.PEM)
        )
        return str(path)


async def error_of(hubs: Authority, trusted: Authority, agents: Authority, certificate: str | None) -> str:
    """What becomes of an agent that trusts an authority, and comes with a certificate to a hub that wants one."""
    hub_file = hubs.files("localhost")
    hub = server_tls(cert_file=hub_file, key_file=hub_file, client_ca_file=agents.file)
    agent = client_tls(ca_file=trusted.file, cert_file=certificate, key_file=certificate)
    errors: list[str] = []

    async def accept(stream: trio.SocketStream) -> None:
        with pytest.raises(Unavailable):
            await accept_tls(stream, hub, "agent")

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, accept, [listener])
        port = listener.socket.getsockname()[1]
        try:
            stream = await tcp_dialer("127.0.0.1", port, tls=agent, server_name="localhost")()
            # Under TLS 1.3 a client hears of it with the first answer.
            await stream.receive_some()
        except Unavailable as error:
            errors.append(error.message)
        except trio.BrokenResourceError as error:
            errors.append(broken_by(error))
            await trio.aclose_forcefully(stream)
        nursery.cancel_scope.cancel()
    [found] = errors
    return found


async def test_connections_that_do_not_come_about_are_told_what_the_page_says(tmp_path: Path) -> None:
    hubs, agents, others = (Authority(tmp_path / name) for name in ("hubs", "agents", "others"))
    good, bad = agents.files("west.agents.example"), others.files("west.agents.example")
    nothing = "none, no connection"
    assert told("an agent has no certificate") == (nothing, await error_of(hubs, hubs, agents, None))
    expired = agents.files("west.agents.example", datetime(2020, 1, 1, tzinfo=UTC))
    server = agents.server_files("west.agents.example")
    assert told("a certificate has run out") == (nothing, await error_of(hubs, hubs, agents, expired))
    assert told("a certificate is for another use") == (nothing, await error_of(hubs, hubs, agents, server))
    assert told("a certificate is from an authority") == (nothing, await error_of(hubs, hubs, agents, bad))
    assert told("the hub's certificate is from") == (nothing, await error_of(hubs, others, agents, good))


def test_an_agent_tries_again_as_soon_as_the_page_says() -> None:
    assert LONGEST == 10.0
    assert "tries again, after ten seconds at\nmost" in TEXT
