"""Whom we trust to be the API server, and how we show who we are: the TLS contexts of one `Access`. Everything is
verified, unless the kubeconfig itself says insecure-skip-tls-verify. No connection is made here; who makes them is
`client.py`."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.errors import KubeconfigError
from trio_federation_kubernetes.failures import tls_words


def ssl_context(access: Access, client_certificate: tuple[bytes, bytes] | None = None) -> ssl.SSLContext:
    """The context for connections to the API server, TLS 1.2 and later, with `access.server_name` as the name that is
    sent and checked, whatever name a connection is made with.

    `client_certificate` is what an exec plugin gave, chain and key as PEM; as in kubectl, the kubeconfig's own comes
    first. Raises KubeconfigError where a certificate, the key or the server name cannot be used."""
    context = _context(access, access.server_name or None)
    if access.ca is None:
        _trust_system(context)
    else:
        _trust(context, access)
    certificate = access.client_certificate or client_certificate
    if certificate is not None:
        _identify(context, access, *certificate)
    return context


def proxy_ssl_context(access: Access) -> ssl.SSLContext:
    """The context for connections to an https proxy, which is checked under its own name.

    It may descend from the kubeconfig's certificates, which are all that kubectl accepts here, or from those of the
    system, as bought certificates do. A client certificate is for the API server, and not shown. Raises
    KubeconfigError where the kubeconfig's certificates cannot be used."""
    context = _context(access, None)
    _trust_system(context)
    if access.ca is not None:
        _trust(context, access)
    return context


class _NamedContext(ssl.SSLContext):
    """A context that connects under one name. The HTTP library has a way to name the server for direct connections, but
    none for those through a proxy's tunnel; they all come through here."""

    name: str | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        name = server_hostname if self.name is None else self.name
        return super().wrap_bio(incoming, outgoing, server_side, name, session)


def _context(access: Access, name: str | None) -> ssl.SSLContext:
    # The protocol of clients asks for a certificate and checks the name, before anything is set here.
    context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # As in Go, whose checks kubectl's users know: a name has to be among the alternative names, the common name alone
    # counts for nothing, and whatever stands in the list of trusted certificates is trusted, be it an intermediate one.
    context.hostname_checks_common_name = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not access.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.name = name
    if name is not None:
        try:
            context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=name)
        except (ValueError, TypeError) as error:  # a UnicodeError is a ValueError; for a zero in it, it is a TypeError
            raise KubeconfigError(f"{access.name}: tls-server-name {name!r} is no name, and no address") from error
    return context


def _trust_system(context: ssl.SSLContext) -> None:
    # The system's own store, not one that comes with a Python package: it is where operators put their company's
    # authority, where kubectl looks, and what the system's updates keep fresh. SSL_CERT_FILE moves it, as for kubectl.
    if context.verify_mode != ssl.CERT_NONE:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)


def _trust(context: ssl.SSLContext, access: Access) -> None:
    assert access.ca is not None
    try:
        # Files of certificates often have comments, in any script; the certificates themselves are ASCII.
        context.load_verify_locations(cadata=access.ca.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise KubeconfigError(
            f"{access.name}: certificate-authority holds no readable PEM certificates ({tls_words(error)})"
        ) from error


def _identify(context: ssl.SSLContext, access: Access, chain: bytes, key: bytes) -> None:
    try:
        # Loaded twice, to tell a bad certificate from a bad key; into a context that is thrown away, as nothing that
        # shows who we are may add to whom we trust.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=chain.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise KubeconfigError(
            f"{access.name}: client-certificate is no readable PEM certificate ({tls_words(error)})"
        ) from error

    def refuse() -> NoReturn:
        # Without this, the TLS library would ask whoever sits at the terminal.
        raise KubeconfigError(f"{access.name}: client-key is encrypted with a password; store it without one")

    try:
        with _as_file(chain) as chain_path, _as_file(key) as key_path:
            context.load_cert_chain(chain_path, key_path, refuse)
    except ssl.SSLError as error:
        fault = (
            "does not belong to client-certificate"
            if error.reason == "KEY_VALUES_MISMATCH"
            else f"is no readable PEM key ({tls_words(error)})"
        )
        raise KubeconfigError(f"{access.name}: client-key {fault}") from error
    except OSError as error:
        raise KubeconfigError(
            f"{access.name}: the client certificate cannot be handed to the TLS library: {error.strerror or error}; "
            "it needs /proc, or a folder for temporary files"
        ) from error


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path with this content, for the one function of the TLS library that takes nothing else. On Linux it is memory
    that no other process has a name for, so it also works where every file system is read-only."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
        path = f"/proc/self/fd/{descriptor}"
        try:
            if os.path.exists(path):
                _write(descriptor, content)
                yield path
                return
        finally:
            os.close(descriptor)
    # made with mode 0600, and gone when the block ends
    with tempfile.NamedTemporaryFile(prefix="trio-federation-") as file:
        file.write(content)
        file.flush()
        yield file.name


def _write(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
