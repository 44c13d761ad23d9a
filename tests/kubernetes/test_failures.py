"""What is said of a connection that broke: the cause that says most, wherever in the chain it stands, on one line."""

from __future__ import annotations

import ssl
from itertools import pairwise

import pytest

from trio_federation_kubernetes.failures import why


class Outer(Exception):
    """Stands for what the HTTP library makes of errors."""


def chained(*errors: BaseException, as_cause: bool = True) -> BaseException:
    """The first error, with the others below it."""
    for above, below in pairwise(errors):
        if as_cause:
            above.__cause__ = below
        else:
            above.__context__ = below
    return errors[0]


def untrusted(code: int, message: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.verify_code, error.verify_message = code, message
    return error


@pytest.mark.parametrize("as_cause", [True, False])
def test_the_innermost_error_says_it(as_cause: bool) -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    assert (
        why(chained(Outer("all failed"), OSError(5, "Input/output error"), refused, as_cause=as_cause), "s")
        == "Connection refused (s)"
    )
    in_a_group = chained(Outer(), ExceptionGroup("", [refused]), as_cause=as_cause)
    assert why(in_a_group, "s") == "Connection refused (s)"


@pytest.mark.parametrize(
    "code, hint", [(62, "tls-server-name"), (64, "tls-server-name"), (10, "clock is wrong"), (20, "certificate-auth")]
)
def test_a_certificate_that_is_not_trusted_comes_before_all_else(code: int, hint: str) -> None:
    said = why(chained(Outer(), untrusted(code, "is\nbad"), OSError(5, "Input/output error")), "s")
    assert said.startswith("the certificate is not trusted: is bad; ")
    assert hint in said


def test_the_words_of_tls_are_made_readable() -> None:
    error = ssl.SSLError(1, "[SSL] whatever")
    error.reason = "WRONG_VERSION_NUMBER"
    assert why(chained(Outer(), error), "TLS handshake") == "TLS failed: wrong version number (TLS handshake)"


def test_what_says_nothing_is_named_by_its_type() -> None:
    assert why(Outer(), "s") == "Outer (s)"
    assert why(chained(Outer(), ValueError("a\nb")), "s") == "a b (s)"


def test_errors_that_go_round_in_a_ring_have_an_end() -> None:
    one, other = Outer(), Outer()
    one.__context__, other.__context__ = other, one
    assert why(one, "s") == "Outer (s)"
