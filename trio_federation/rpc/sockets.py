"""Where streams come from in production: TCP and TLS, outgoing and incoming; and what a peer's certificate says. Every
wait has a deadline, and every failure is one line that names the other side. When certificates are read again is
`reload.py`, whom one stands for is `identity.py`."""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NoReturn, TypeAlias

import trio

from trio_federation.errors import ConfigurationError, FederationError, TlsFailed, Unavailable

#: Opens a stream to one hub. Raises Unavailable.
Dialer: TypeAlias = Callable[[], Awaitable[trio.abc.Stream]]

#: Seconds for a TCP connection, and again for a TLS handshake.
CONNECT_DEADLINE = 5.0
HANDSHAKE_DEADLINE = 5.0
#: Seconds that a peer gets to take the word of why its handshake was refused, and to hang up.
REFUSAL_DEADLINE = 1.0
#: Bytes of a refused peer that are read, and thrown away, until then.
_MOST_DRAINED = 256 * 1024

#: The kinds of names in a certificate that Python hands over as they stand there, byte for byte. Others it renders as
#: text of its own, in which two different names may look the same.
_EXACT_NAMES = ("DNS", "URI")


def tcp_dialer(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None,
    server_name: str | None = None,
) -> Dialer:
    """A dialer for `host`:`port`, with TLS where a context is given; a function is asked for one at every dial.
    `server_name`: the name that the hub's certificate must be for, where it is not `host`."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def dial() -> trio.abc.Stream:
        try:
            with trio.fail_after(CONNECT_DEADLINE):
                stream = await trio.open_tcp_stream(host, port)
        except trio.TooSlowError as error:
            raise Unavailable(f"no connection within {CONNECT_DEADLINE:g} s", peer=shown) from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that the resolver cannot even be asked for
            raise Unavailable(f"cannot connect: {_reason(error)}", peer=shown) from error
        if tls is None:
            return stream
        name = server_name or host
        over_tls: trio.SSLStream[trio.abc.Stream]
        try:
            context = tls if isinstance(tls, ssl.SSLContext) else tls()
            over_tls = trio.SSLStream(stream, context, server_hostname=name, https_compatible=True)
        except ValueError as error:
            await trio.aclose_forcefully(stream)
            raise TlsFailed(f"TLS failed: {name!r} is no name that a certificate can be for", peer=shown) from error
        return await _handshake(over_tls, shown)

    return dial


async def accept_tls(stream: trio.abc.Stream, tls: ssl.SSLContext, peer: str) -> trio.SSLStream[trio.abc.Stream]:
    """Do the server's half of a TLS handshake. Raises Unavailable, with the stream closed and the peer told why."""
    return await _handshake(trio.SSLStream(stream, tls, server_side=True, https_compatible=True), peer)


async def _handshake(stream: trio.SSLStream[trio.abc.Stream], peer: str) -> trio.SSLStream[trio.abc.Stream]:
    try:
        with trio.fail_after(HANDSHAKE_DEADLINE):
            await stream.do_handshake()
        if stream.selected_alpn_protocol() != "h2":
            raise Unavailable(
                "the other side does not speak HTTP/2 over TLS (no ALPN h2): not a gRPC endpoint?", peer=peer
            )
    except trio.TooSlowError as error:
        await trio.aclose_forcefully(stream)
        raise Unavailable(f"no TLS handshake within {HANDSHAKE_DEADLINE:g} s", peer=peer) from error
    except trio.BrokenResourceError as error:
        await _refuse(stream)
        raise TlsFailed(f"TLS failed: {_reason(error.__cause__ or error)}", peer=peer) from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def _refuse(stream: trio.SSLStream[trio.abc.Stream]) -> None:
    """Close a stream whose handshake has failed. OpenSSL has written an alert that says why, and Trio does not send it;
    without it the peer would know no more than that somebody hung up, and a client under TLS 1.3, which is done with
    the handshake by then, not even that it was about certificates."""
    inner = stream.transport_stream
    try:
        with trio.move_on_after(REFUSAL_DEADLINE):
            if alert := stream._outgoing.read():
                await inner.send_all(alert)
                if isinstance(inner, trio.abc.HalfCloseableStream):
                    await inner.send_eof()
                    # To close with something unread is to reset, and that may overtake the alert.
                    drained = 0
                    while drained < _MOST_DRAINED and (data := await inner.receive_some()):
                        drained += len(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the peer did not wait for it
    finally:
        await trio.aclose_forcefully(stream)


def certificate_names(stream: trio.abc.Stream) -> tuple[tuple[str, str], ...]:
    """The DNS and URI names (kind, value) in the verified client certificate of a server's TLS stream, in its order and
    exactly as they stand there; () where there is no such certificate. Other kinds of names are left out.

    A stream that wraps another one is looked through, by its `transport_stream`, down to the outermost TLS. A
    certificate with a name that is no text names nothing. Raises trio.NeedHandshakeError before the handshake."""
    inner: Any = stream
    while inner is not None and not isinstance(inner, trio.SSLStream):
        inner = getattr(inner, "transport_stream", None)
    if inner is None or not inner.server_side:
        return ()
    try:
        # {} for one that was not verified, None where there is none.
        certificate = inner.getpeercert() or {}
    except ValueError:
        return ()  # not UTF-8
    names = certificate.get("subjectAltName", ())
    return tuple((kind, value) for kind, value in names if kind in _EXACT_NAMES)


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen for TCP connections; port 0 takes a free one. Raises FederationError where that cannot be."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise FederationError(f"hub: cannot listen on {shown}: {_reason(error)}; choose another [hub] bind") from error


def client_tls(*, ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """The TLS side of an agent: verifies the hub against `ca_file`, or the system's authorities without one.

    Raises ConfigurationError where a file cannot be used."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            [f"[federation.tls]: {_tls_files(ca_file, cert_file, key_file)}: {_reason(error)}"]
        ) from error
    return _for_grpc(context)


def server_tls(
    *,
    cert_file: str,
    key_file: str,
    client_ca_file: str | None,
    client_certificates: Literal["required", "optional"] = "required",
) -> ssl.SSLContext:
    """The TLS side of a hub. With `client_ca_file` clients are asked for a certificate of that authority; they may come
    without one where it is optional, but not with another one. TLS is 1.3 then.

    Raises ConfigurationError where a file cannot be used."""
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca_file)
        context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            [f"[hub.tls]: {_tls_files(client_ca_file, cert_file, key_file)}: {_reason(error)}"]
        ) from error
    _for_grpc(context)
    if client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED if client_certificates == "required" else ssl.CERT_OPTIONAL
        # A session that is resumed goes on with a certificate that nobody verifies again, although it may have run out
        # since. TLS 1.3 resumes by tickets only, and there are none; 1.2 would also do it without, and shows client
        # certificates to whoever listens.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context


def _no_passphrase() -> NoReturn:
    """Asked for where a key is encrypted. Without it, OpenSSL would ask on the terminal, and wait."""
    raise ValueError("the key is encrypted; store it without a passphrase, readable by this process only")


def _for_grpc(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # HTTP/2 forbids it, and Trio's streams do not expect it
    context.set_alpn_protocols(["h2"])
    return context


def _tls_files(*files: str | None) -> str:
    return ", ".join(file for file in files if file)


def broken_by(error: BaseException) -> str:
    """What has broken a connection that was open, in a line for people: of TLS, what the other side says or what is
    wrong, as under TLS 1.3 a client hears only after its handshake that the server refuses it."""
    cause = error.__cause__ or error
    kind = "TLS failed" if isinstance(cause, ssl.SSLError) else "the connection broke"
    return f"{kind}: {_reason(cause)}"


def _reason(error: BaseException) -> str:
    """What went wrong, without Python's wrapping: happy eyeballs reports a group of failures, of which the first tells
    enough."""
    if isinstance(error, BaseExceptionGroup):
        return _reason(error.exceptions[0])
    if isinstance(error.__cause__, OSError | BaseExceptionGroup):
        return _reason(error.__cause__)
    if isinstance(error, ssl.SSLError):
        return _tls_reason(error)
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno).lower()  # Trio puts the address in front, which the line has already
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    # OpenSSL's own name for it, for instance PEER_DID_NOT_RETURN_A_CERTIFICATE; what the other side has said begins
    # with the version of TLS that brought it up, as in SSLV3_ALERT_CERTIFICATE_EXPIRED.
    name: str = getattr(error, "reason", None) or ""  # one that Python makes by itself has none
    _, by_peer, alert = name.partition("_ALERT_")
    if isinstance(error, ssl.SSLEOFError):
        return "the other side hung up"
    if alert == "CERTIFICATE_REQUIRED":
        return "the other side demands a certificate, and got none; set [federation.tls] cert_file and key_file"
    if by_peer and ("CERTIFICATE" in alert or alert == "UNKNOWN_CA"):
        return f"the other side does not accept the certificate of this side: {_words(alert)}"
    if by_peer:
        return f"the other side refuses: {_words(alert)}"
    return _words(name) or error.strerror or type(error).__name__


def _words(name: str) -> str:
    return name.lower().replace("_", " ").replace("unknown ca", "unknown authority")
