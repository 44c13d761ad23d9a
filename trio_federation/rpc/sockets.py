"""Where gRPC's streams come from in production: TCP and TLS, outgoing and incoming. Every wait has a deadline, and
every failure is one line that names the other side. TLS itself is `tls.py`; when certificates are read again is
`reload.py`, whom one stands for is `identity.py`."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import trio

from trio_federation.errors import FederationError, TlsFailed, Unavailable
from trio_federation.tls import (
    HandshakeFailed,
    HandshakeTooSlow,
    client_context,
    reason_of,
    server_context,
    shake_hands,
)

#: Opens a stream to one hub. Raises Unavailable.
Dialer: TypeAlias = Callable[[], Awaitable[trio.abc.Stream]]

#: Seconds for a TCP connection, and again for a TLS handshake.
CONNECT_DEADLINE = 5.0
HANDSHAKE_DEADLINE = 5.0
#: ALPN's name for what gRPC speaks.
_HTTP2 = "h2"


def tcp_dialer(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None,
    server_name: str | None = None,
    deadline: float = CONNECT_DEADLINE,
) -> Dialer:
    """A dialer for `host`:`port`, with TLS where a context is given; a function is asked for one at every dial.
    `server_name`: the name that the hub's certificate must be for, where it is not `host`. `deadline`: seconds for a
    TCP connection, and again for a TLS handshake, at most the usual ones."""
    connect_within, shake_within = min(CONNECT_DEADLINE, deadline), min(HANDSHAKE_DEADLINE, deadline)
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def dial() -> trio.abc.Stream:
        try:
            with trio.fail_after(connect_within):
                stream = await trio.open_tcp_stream(host, port)
        except trio.TooSlowError as error:
            raise Unavailable(f"no connection within {connect_within:g} s", peer=shown) from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that the resolver cannot even be asked for
            raise Unavailable(f"cannot connect: {reason_of(error)}", peer=shown) from error
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
        return await _handshake(over_tls, shown, shake_within)

    return dial


async def accept_tls(stream: trio.abc.Stream, tls: ssl.SSLContext, peer: str) -> trio.SSLStream[trio.abc.Stream]:
    """Do the server's half of a TLS handshake. Raises Unavailable, with the stream closed and the peer told why."""
    over_tls = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    return await _handshake(over_tls, peer, HANDSHAKE_DEADLINE)


async def _handshake(
    stream: trio.SSLStream[trio.abc.Stream], peer: str, within: float
) -> trio.SSLStream[trio.abc.Stream]:
    try:
        await shake_hands(stream, within=within)
    except HandshakeTooSlow as error:
        raise Unavailable(str(error), peer=peer) from error
    except HandshakeFailed as error:
        raise TlsFailed(str(error), peer=peer) from error
    if stream.selected_alpn_protocol() != _HTTP2:
        await trio.aclose_forcefully(stream)
        raise Unavailable("the other side does not speak HTTP/2 over TLS (no ALPN h2): not a gRPC endpoint?", peer=peer)
    return stream


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen for TCP connections; port 0 takes a free one. Raises FederationError where that cannot be."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise FederationError(
            f"hub: cannot listen on {shown}: {reason_of(error)}; choose another [hub] bind"
        ) from error


def client_tls(*, ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """The TLS side of an agent: verifies the hub against `ca_file`, or the system's authorities without one.

    Raises ConfigurationError, with a line for each fault, where files cannot be used."""
    return client_context("federation.tls", ca_file=ca_file, cert_file=cert_file, key_file=key_file, protocols=[_HTTP2])


def server_tls(
    *,
    cert_file: str,
    key_file: str,
    client_ca_file: str | None,
    client_certificates: Literal["required", "optional"] = "required",
) -> ssl.SSLContext:
    """The TLS side of a hub. With `client_ca_file` clients are asked for a certificate of that authority; they may come
    without one where it is optional, but not with another one. TLS is 1.3 then.

    Raises ConfigurationError, with a line for each fault, where files cannot be used."""
    context = server_context(
        "hub.tls", cert_file=cert_file, key_file=key_file, client_ca_file=client_ca_file, protocols=[_HTTP2]
    )
    if client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED if client_certificates == "required" else ssl.CERT_OPTIONAL
        # A session that is resumed goes on with a certificate that nobody verifies again, although it may have run out
        # since. TLS 1.3 resumes by tickets only, and there are none; 1.2 would also do it without, and shows client
        # certificates to whoever listens.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context
