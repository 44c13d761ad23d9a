"""Where streams come from in production: TCP and TLS, outgoing and incoming. Every wait has a deadline, and every
failure is one line that names the other side."""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from trio_federation.errors import ConfigurationError, FederationError, Unavailable

#: Opens a stream to one hub. Raises Unavailable.
Dialer: TypeAlias = Callable[[], Awaitable[trio.abc.Stream]]

#: Seconds for a TCP connection, and again for a TLS handshake.
CONNECT_DEADLINE = 5.0
HANDSHAKE_DEADLINE = 5.0


def tcp_dialer(host: str, port: int, *, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> Dialer:
    """A dialer for `host`:`port`, with TLS where a context is given. `server_name`: the name that the hub's certificate
    must be for, where it is not `host`."""
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
            over_tls = trio.SSLStream(stream, tls, server_hostname=name, https_compatible=True)
        except ValueError as error:
            await trio.aclose_forcefully(stream)
            raise Unavailable(f"TLS failed: {name!r} is no name that a certificate can be for", peer=shown) from error
        return await _handshake(over_tls, shown)

    return dial


async def accept_tls(stream: trio.abc.Stream, tls: ssl.SSLContext, peer: str) -> trio.SSLStream[trio.abc.Stream]:
    """Do the server's half of a TLS handshake. Raises Unavailable, with the stream closed."""
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
        await trio.aclose_forcefully(stream)
        raise Unavailable(f"TLS failed: {_reason(error.__cause__ or error)}", peer=peer) from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


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
            context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            [f"[federation.tls]: {_tls_files(ca_file, cert_file, key_file)}: {_reason(error)}"]
        ) from error
    return _for_grpc(context)


def server_tls(*, cert_file: str, key_file: str, client_ca_file: str | None) -> ssl.SSLContext:
    """The TLS side of a hub; with `client_ca_file` every client needs a certificate of that authority.

    Raises ConfigurationError where a file cannot be used."""
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca_file)
        context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            [f"[hub.tls]: {_tls_files(client_ca_file, cert_file, key_file)}: {_reason(error)}"]
        ) from error
    if client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return _for_grpc(context)


def _for_grpc(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    return context


def _tls_files(*files: str | None) -> str:
    return ", ".join(file for file in files if file)


def _reason(error: BaseException) -> str:
    """What went wrong, without Python's wrapping: happy eyeballs reports a group of failures, of which the first tells
    enough."""
    if isinstance(error, BaseExceptionGroup):
        return _reason(error.exceptions[0])
    if isinstance(error.__cause__, OSError | BaseExceptionGroup):
        return _reason(error.__cause__)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno).lower()  # Trio puts the address in front, which the line has already
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
