"""TLS, for every socket of a process: contexts from the PEM files that a table of the configuration names, handshakes
that tell the peer why they fail, what a certificate says, and what went wrong, in words. What is spoken over it is in
`rpc/` and `admin/`; when files are read again is `reload.py`, and when certificates run out is `certificates.py`."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Sequence
from typing import Any, NoReturn

import trio

from trio_federation.errors import ConfigurationError, FederationError

#: Seconds that a peer gets to take the word of why its handshake was refused, and to hang up.
REFUSAL_DEADLINE = 1.0
#: Bytes of a refused peer that are read, and thrown away, until then.
_MOST_DRAINED = 256 * 1024

#: The kinds of names in a certificate that Python hands over as they stand there, byte for byte. Others it renders as
#: text of its own, in which two different names may look the same.
_EXACT_NAMES = ("DNS", "URI")


class HandshakeFailed(FederationError):
    """A handshake that came to nothing; the text says why. The stream is closed."""


class HandshakeTooSlow(HandshakeFailed):
    """It was not complete in time."""


# --- contexts --------------------------------------------------------------------------------------------------------


def server_context(
    table: str, *, cert_file: str, key_file: str, protocols: Sequence[str], client_ca_file: str | None = None
) -> ssl.SSLContext:
    """The side that is dialled: TLS 1.2 or later, with the certificate that stands in `[table]`, and these `protocols`
    (ALPN), the best one first. `client_ca_file` is whose client certificates would be believed; clients are not asked
    for any yet.

    Raises ConfigurationError, with a line for each fault, where files cannot be used."""
    authorities = ("client_ca_file", client_ca_file) if client_ca_file is not None else None
    return _context(ssl.Purpose.CLIENT_AUTH, table, authorities, (cert_file, key_file), protocols)


def client_context(
    table: str, *, ca_file: str | None, cert_file: str | None, key_file: str | None, protocols: Sequence[str]
) -> ssl.SSLContext:
    """The side that dials: as `server_context`. Verifies the server, and its name, against `ca_file`, or the system's
    authorities without one; shows a certificate where `cert_file` and `key_file` name one."""
    authorities = ("ca_file", ca_file) if ca_file is not None else None
    pair = (cert_file, key_file or cert_file) if cert_file is not None else None
    return _context(ssl.Purpose.SERVER_AUTH, table, authorities, pair, protocols)


def _context(
    purpose: ssl.Purpose,
    table: str,
    authorities: tuple[str, str] | None,
    pair: tuple[str, str] | None,
    protocols: Sequence[str],
) -> ssl.SSLContext:
    """`authorities`: key and file."""
    faults: list[str] = []
    causes: list[Exception] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # to look at the pair all the same, where there is no other
    try:
        # Told of a file, it leaves the system's authorities out.
        context = ssl.create_default_context(purpose, cafile=authorities[1] if authorities is not None else None)
        if authorities is not None and not context.cert_store_stats()["x509"]:
            raise ValueError("no certificate found")  # but lists of revoked ones
    except (OSError, ValueError) as error:
        what = " ".join(authorities) if authorities is not None else "the authorities of the system"
        reason = _reason_of_certificates(error)
        faults.append(f"[{table}] {what}: {reason}; name a PEM file with the certificates of authorities")
        causes.append(error)
    if pair is not None:
        try:
            context.load_cert_chain(*pair, password=_no_passphrase)
        except (OSError, ValueError) as error:
            faults.append(f"[{table}] {_fault_of_pair(*pair, error)}")
            causes.append(error)
    if faults:
        raise ConfigurationError(faults) from causes[0]
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # HTTP/2 forbids it, and Trio's streams do not expect it.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(protocols))
    return context


class _Encrypted(ValueError):
    pass


def _no_passphrase() -> NoReturn:
    """Asked for where a key is encrypted. Without it, OpenSSL would ask on the terminal, and wait."""
    raise _Encrypted("the key is encrypted; store it without a passphrase, readable by this process only")


def _fault_of_pair(cert_file: str, key_file: str, error: Exception) -> str:
    """What is wrong with a certificate and its key, which could not be loaded: OpenSSL does not say with which."""
    if isinstance(error, _Encrypted):
        return f"key_file {key_file}: {error}"
    advice = "name a certificate and its own private key, both as PEM"
    for key, file in (("cert_file", cert_file), ("key_file", key_file)):
        try:
            open(file, "rb").close()
        except (OSError, ValueError) as fault:
            return f"{key} {file}: {reason_of(fault)}; {advice}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert_file)
    except (OSError, ValueError) as fault:
        return f"cert_file {cert_file}: {_reason_of_certificates(fault)}; {advice}"
    if isinstance(error, ssl.SSLError) and not _name_of(error):  # "PEM lib", whatever it was
        return f"key_file {key_file}: no private key found that can be read; {advice}"
    # A key of another kind displaces the certificate, which is then missed.
    other_kind = isinstance(error, ssl.SSLError) and _name_of(error) == "NO_CERTIFICATE_ASSIGNED"
    reason = "key type mismatch" if other_kind else reason_of(error)
    return f"cert_file {cert_file}, key_file {key_file}: {reason}; {advice}"


def _reason_of_certificates(error: Exception) -> str:
    """Why a file of certificates could not be loaded."""
    if not isinstance(error, ssl.SSLError):
        return reason_of(error)
    if _name_of(error) == "NO_CERTIFICATE_OR_CRL_FOUND":
        return "no certificate found"
    return reason_of(error) if _name_of(error) else "holds a damaged certificate"


# --- handshakes ------------------------------------------------------------------------------------------------------


async def shake_hands(stream: trio.SSLStream[Any], *, within: float) -> None:
    """Do this side's half of a handshake, in at most `within` seconds.

    Raises HandshakeTooSlow, or HandshakeFailed, with the peer told why, for which it gets `REFUSAL_DEADLINE` more. The
    stream is closed after every error."""
    try:
        with trio.fail_after(within):
            await stream.do_handshake()
    except trio.TooSlowError as error:
        await trio.aclose_forcefully(stream)
        raise HandshakeTooSlow(f"no TLS handshake within {within:g} s") from error
    except trio.ClosedResourceError as error:
        raise HandshakeFailed("closed by this side during the TLS handshake") from error
    except trio.BrokenResourceError as error:
        await _refuse(stream)
        raise HandshakeFailed(f"TLS failed: {reason_of(error.__cause__ or error)}") from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


async def _refuse(stream: trio.SSLStream[Any]) -> None:
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


# --- errors in words -------------------------------------------------------------------------------------------------


def broken_by(error: BaseException) -> str:
    """What has broken a connection that was open, in a line for people: of TLS, what the other side says or what is
    wrong, as under TLS 1.3 a client hears only after its handshake that the server refuses it."""
    cause = error.__cause__ or error
    kind = "TLS failed" if isinstance(cause, ssl.SSLError) else "the connection broke"
    return f"{kind}: {reason_of(cause)}"


def reason_of(error: BaseException) -> str:
    """What went wrong with a file, a socket or TLS, in one line, without Python's wrapping and the places in OpenSSL's
    source. Happy eyeballs reports a group of failures, of which the first tells enough."""
    if isinstance(error, BaseExceptionGroup):
        return reason_of(error.exceptions[0])
    if isinstance(error.__cause__, OSError | BaseExceptionGroup):
        return reason_of(error.__cause__)
    if isinstance(error, ssl.SSLError):
        return _reason_of_tls(error)
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno).lower()  # Trio puts the address in front, which the line has already
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _reason_of_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError):
        return "the other side hung up"
    name = _name_of(error)
    # What the other side has said begins with the version of TLS that brought it up, as in
    # SSLV3_ALERT_CERTIFICATE_EXPIRED.
    _, by_peer, alert = name.partition("_ALERT_")
    if alert == "CERTIFICATE_REQUIRED":
        # Only servers demand one, and a process dials no others than hubs.
        return "the other side demands a certificate, and got none; set [federation.tls] cert_file and key_file"
    if by_peer and ("CERTIFICATE" in alert or alert == "UNKNOWN_CA"):
        return f"the other side does not accept the certificate of this side: {_words(alert)}"
    if by_peer:
        return f"the other side refuses: {_words(alert)}"
    return _words(name) or re.sub(r" \(_ssl\.c:\d+\)$", "", error.strerror or "") or type(error).__name__


def _name_of(error: ssl.SSLError) -> str:
    """OpenSSL's own name for it, for instance PEER_DID_NOT_RETURN_A_CERTIFICATE; "" for those that have none, which
    Python makes by itself, or OpenSSL for whatever was wrong with PEM."""
    return getattr(error, "reason", None) or ""


def _words(name: str) -> str:
    return name.lower().replace("_", " ").replace("unknown ca", "unknown authority")
