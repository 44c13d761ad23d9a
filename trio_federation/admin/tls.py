"""The server's side of TLS for the HTTP side: what [admin.tls] makes. TLS itself is in the room `trio_federation.tls`;
when the files are read again is `keyring.py` and `reload.py`, and what is spoken over it is in `server.py`."""

from __future__ import annotations

import ssl

from trio_federation.tls import server_context


def admin_tls(cert_file: str, key_file: str) -> ssl.SSLContext:
    """The server's side of TLS, from the two PEM files of [admin.tls]: version 1.2 or later, HTTP/2 or HTTP/1.1.

    Raises ConfigurationError, with one line that names what cannot be used and says what to do. Reads files, and never
    asks a terminal for the passphrase of a key."""
    return server_context("admin.tls", cert_file=cert_file, key_file=key_file, protocols=["h2", "http/1.1"])
