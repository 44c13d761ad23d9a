"""Who makes a call: which metadata are let in, and that a refusal gives nothing away."""

from __future__ import annotations

import hmac
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trio_federation import identity
from trio_federation.errors import InvalidArgument, RpcError, Unauthenticated
from trio_federation.identity import Caller, authenticate, call_metadata

SECRET = "correct horse battery staple"
#: what a header may carry: printable ASCII, no blank at an end; see config's rule for secrets
secrets = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=40)
labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
instances = st.from_regex(r"[0-9a-f]{1,64}", fullmatch=True)


def metadata_of(cluster_id: str = "east", instance: str = "ab12", credential: str | None = SECRET) -> dict[str, str]:
    """The metadata of one call, as the hub sees them."""
    return dict(call_metadata(cluster_id, instance, credential))


@given(labels, instances, secrets)
def test_an_agent_is_let_in_with_the_hubs_secret(cluster_id: str, instance: str, secret: str) -> None:
    """semantics.md, "Wire": "Call metadata: `authorization: Bearer CREDENTIAL`, `x-federation-cluster: ID`,
    `x-federation-instance: HEX`"."""
    metadata = metadata_of(cluster_id, instance, secret)
    assert metadata == {
        "authorization": f"Bearer {secret}",
        "x-federation-cluster": cluster_id,
        "x-federation-instance": instance,
    }
    assert authenticate(metadata, secret) == Caller(cluster_id, instance)


@given(st.text(), secrets)
def test_any_other_credential_is_unauthenticated(sent: str, secret: str) -> None:
    """semantics.md, "Wire": "Missing or wrong credentials: UNAUTHENTICATED". What was sent is not repeated."""
    assume(sent != secret)
    with pytest.raises(Unauthenticated) as caught:
        authenticate({**metadata_of(), "authorization": f"Bearer {sent}"}, secret)
    shown = f"{caught.value} {caught.value!r}"
    assert len(sent) < 12 or sent not in shown
    assert len(secret) < 12 or secret not in shown


@pytest.mark.parametrize(
    "header",
    [None, "", SECRET, "Bearer", f"Basic {SECRET}", f"Bearer  {SECRET}", f"Bearer {SECRET} ", f"Bearer{SECRET}"],
)
def test_a_credential_of_another_form_is_unauthenticated(header: str | None) -> None:
    """Only `Bearer CREDENTIAL` counts, with the credential to the letter."""
    metadata = metadata_of(credential=None)
    if header is not None:
        metadata["authorization"] = header
    with pytest.raises(Unauthenticated) as caught:
        authenticate(metadata, SECRET)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_matched_in_any_case(scheme: str) -> None:
    """As in HTTP (RFC 9110, 11.1), which a peer's library may rely on."""
    metadata = {**metadata_of(), "authorization": f"{scheme} {SECRET}"}
    assert authenticate(metadata, SECRET) == Caller("east", "ab12")


@given(st.text(max_size=70) | st.text("ab1-A._", max_size=70))
def test_an_id_that_is_no_label_is_an_invalid_argument(cluster_id: str) -> None:
    """semantics.md, "Wire": "an invalid id: INVALID_ARGUMENT"; the ids are lower-case RFC 1123 labels (≤ 63)."""
    if re.fullmatch("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", cluster_id):
        assert authenticate(metadata_of(cluster_id), SECRET).cluster_id == cluster_id
    else:
        with pytest.raises(InvalidArgument) as caught:
            authenticate(metadata_of(cluster_id), SECRET)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "cluster_id", ["", "East", "EAST", "east.west", "east_1", "-east", "east-", "öst", "e" * 64, "east\n"]
)
def test_ids_that_people_try(cluster_id: str) -> None:
    """One case rule everywhere: "East" is no other spelling of "east", it is refused."""
    with pytest.raises(InvalidArgument, match="x-federation-cluster"):
        authenticate(metadata_of(cluster_id), SECRET)


@pytest.mark.parametrize("instance", ["", "AB", "xyz", "0x1f", "a" * 65, "ab 12", "ab\n"])
def test_an_instance_that_is_no_hexadecimal_number_is_an_invalid_argument(instance: str) -> None:
    """1 to 64 lower-case hexadecimal digits, or none at all: an older peer sends none."""
    with pytest.raises(InvalidArgument, match="x-federation-instance"):
        authenticate(metadata_of(instance=instance), SECRET)


def test_a_peer_need_not_name_an_instance() -> None:
    """semantics.md, "Wire": our own additions are optional."""
    metadata = metadata_of()
    del metadata["x-federation-instance"]
    assert authenticate(metadata, SECRET) == Caller("east", None)


def test_the_credential_is_checked_before_anything_else_is_told() -> None:
    """A stranger learns nothing about ids."""
    with pytest.raises(Unauthenticated):
        authenticate(metadata_of("NOT AN ID", "NOT HEX", "wrong"), SECRET)


@pytest.mark.parametrize("sent", ["wrong", SECRET[:-1], SECRET, "é" * 20])
def test_secrets_are_compared_in_constant_time(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may find the secret out by how long a refusal takes: it is compared as a whole, by the library's function
    for it, and in no other way."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    class Watched:
        @staticmethod
        def compare_digest(one: bytes, other: bytes) -> bool:
            compared.append((one, other))
            return real(one, other)

    monkeypatch.setattr(identity, "hmac", Watched)
    if sent == SECRET:
        authenticate(metadata_of(credential=sent), SECRET)
    else:
        with pytest.raises(RpcError):
            authenticate(metadata_of(credential=sent), SECRET)
    assert compared == [(sent.encode(), SECRET.encode())]


def test_without_a_credential_no_credential_is_sent() -> None:
    """Where a client certificate proves the cluster there is no header for it."""
    assert "authorization" not in dict(call_metadata("east", "ab12", None))
