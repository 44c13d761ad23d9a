"""Why something broke, in one line for people that says what to do next: from what sockets and the TLS library have
raised, wherever in a chain of errors that stands. What an API server itself says is `status.py`'s business."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from trio_federation_kubernetes.texts import one_line

#: the faults of a certificate, by OpenSSL's numbers, that say that it is for somebody else, and that its time is wrong
_OTHER_NAME = (62, 64)
_OTHER_TIME = (9, 10)


def why(error: BaseException, step: str) -> str:
    """What has gone wrong. `step`: what was going on, such as "TLS handshake"."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _why_untrusted(cause)
    for cause in reversed(causes):
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {tls_words(cause)} ({step})"
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror} ({step})"
    said = next((text for cause in causes if (text := one_line(str(cause)))), type(error).__name__)
    return f"{said} ({step})"


def tls_words(error: Exception) -> str:
    """The TLS library's own words: "no start line", "bad base64 decode"."""
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error)


def _why_untrusted(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _OTHER_NAME:
        hint = "check the server's address, or name in tls-server-name whom its certificate is for"
    elif error.verify_code in _OTHER_TIME:
        hint = "it has to be renewed, or this machine's clock is wrong"
    else:
        hint = "check certificate-authority, and that nothing else answers at this address"
    return f"the certificate is not trusted: {one_line(error.verify_message)}; {hint}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those below it. Contexts count, too: the HTTP library drops the causes of its own."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
