"""TLS for the HTTP side: what its certificate's files make, and the server's half of a handshake. When the files are
read again is `process.py`'s business; what is spoken over the stream is in `server.py`."""

from __future__ import annotations

import ssl
from typing import NoReturn

import trio

from trio_federation.errors import ConfigurationError, FederationError


class HandshakeFailed(FederationError):
    """A client that went away, or failed, before anything was encrypted; the text says why."""


def admin_tls(cert_file: str, key_file: str) -> ssl.SSLContext:
    """The server's side of TLS, from the two PEM files of [admin.tls]: version 1.2 or later, HTTP/2 or HTTP/1.1.

    Raises ConfigurationError, with one line that names both files, where they cannot be used. Reads files, and never
    asks a terminal for the password of a key."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            [
                f"[admin.tls]: cert_file {cert_file}, key_file {key_file}: {_reason(error)}; name a certificate and "
                "its own private key, both as PEM"
            ]
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # Trio's streams do not expect one, and every one costs us, not them
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def accept_tls(
    stream: trio.SocketStream, context: ssl.SSLContext, *, within: float
) -> trio.SSLStream[trio.SocketStream]:
    """Do the server's half of a handshake, in at most `within` seconds.

    Raises HandshakeFailed, after which the caller closes `stream`. The stream that is returned is closed without a word
    of TLS, which a client that reads nothing could hold up: HTTP says itself where an answer ends."""
    encrypted = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
    with trio.move_on_after(within):
        try:
            await encrypted.do_handshake()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise HandshakeFailed(f"TLS handshake: {_reason(error.__cause__ or error)}") from error
        return encrypted
    raise HandshakeFailed(f"TLS handshake: not complete within {within:g} s")


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted; store it without a password, readable by this process only")


def _reason(error: BaseException) -> str:
    """OpenSSL's own words, without the place in its source."""
    if isinstance(error, ssl.SSLError):
        # No reason is given, for instance, for a file without any PEM in it.
        return error.reason.replace("_", " ").lower() if error.reason else "not what OpenSSL can read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or "the client went away"
