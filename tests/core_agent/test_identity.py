"""Who makes a call: which credentials are enough for which cluster, against a model that asks one question after the
other, and that a refusal gives nothing away. What a credential itself is made of is looked at in `test_credentials.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from trio_federation import credentials
from trio_federation.credentials import CertificateName, DenyList
from trio_federation.errors import InvalidArgument, PermissionDenied, RpcError, Unauthenticated
from trio_federation.identity import (
    Caller,
    OwnIdentity,
    Part,
    Trusted,
    call_metadata,
    denied_error,
    identify,
    is_denied,
    is_uid,
    mixed_up,
)

SECRET = "correct horse battery staple"
NEXT_SECRET = "another horse, and more staples"
ELSEWHERE = "the secret of some other hub"
SAN = CertificateName.parse("DNS:{cluster}.agents.example")
WAYS = ("shared", "token", "certificate", "shared+certificate", "token+certificate")
#: what a header may carry: printable ASCII, no blank at an end, and no token; see config's rule for secrets
secrets = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=40).filter(
    lambda text: not text.startswith("tf1.")
)
labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
instances = st.from_regex(r"[0-9a-f]{1,64}", fullmatch=True)
uids = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)


def token_of(cluster_id: str, serial: int = 1, secret: str = SECRET) -> str:
    """`tf1.CLUSTER.SERIAL.MAC`, in this file's own words."""
    message = f"trio-federation token 1\0{cluster_id}\0{serial}"
    return f"tf1.{cluster_id}.{serial}.{hmac.digest(secret.encode(), message.encode(), hashlib.sha256).hex()}"


def metadata_of(cluster_id: str = "east", instance: str = "ab12", credential: str | None = SECRET) -> dict[str, str]:
    """The metadata of one call, as the hub sees them."""
    return dict(call_metadata(cluster_id, instance, credential))


def trusting(*accept: str, secrets: tuple[str, ...] = (SECRET,), denied: DenyList | None = None) -> Trusted:
    """What a hub takes for proof."""
    return Trusted(accept, secrets, denied if denied is not None else DenyList(), SAN)


def names_for(*cluster_ids: str) -> list[tuple[str, str]]:
    """The names of a certificate that is good for these."""
    return [("DNS", f"{cluster_id}.agents.example") for cluster_id in cluster_ids]


SHARED = trusting("shared")


# --- everything together, against a model ----------------------------------------------------------------------------


@dataclass
class Text:
    """What is sent as a credential, and what it was made from."""

    text: str | None
    #: of a token that was made as it should be: for whom, which, and from which secret
    token: tuple[str, int, str] | None = None


good_tokens = st.builds(
    lambda cluster_id, serial, secret: Text(token_of(cluster_id, serial, secret), (cluster_id, serial, secret)),
    st.sampled_from(("east", "west")),
    st.integers(1, 3),
    st.sampled_from((SECRET, NEXT_SECRET, ELSEWHERE)),
)


def mangled(sent: Text, how: int, at: int) -> Text:
    """A token of which one thing was changed after it was made."""
    assert sent.text is not None
    assert sent.token is not None
    prefix, cluster_id, serial, mac = sent.text.split(".")
    other_id, other_serial = {"east": "west", "west": "east"}[cluster_id], int(serial) % 3 + 1
    at %= 64
    return Text(
        (
            f"{prefix}.{other_id}.{serial}.{mac}",
            f"{prefix}.{cluster_id}.{other_serial}.{mac}",
            f"{prefix}.{cluster_id}.0{serial}.{mac}",
            f"{prefix}.{cluster_id.upper()}.{serial}.{mac}",
            f"{prefix}.{cluster_id}.{serial}.{mac[:at]}{'0' if mac[at] != '0' else '1'}{mac[at + 1 :]}",
            f"{prefix}.{cluster_id}.{serial}.{mac[:at]}",
            f"{sent.text}.",
            f" {sent.text}",
            f"TF1{sent.text[3:]}",
            mac,
        )[how]
    )


texts = st.one_of(
    good_tokens,
    st.just(Text(SECRET)),
    st.sampled_from((SECRET, NEXT_SECRET, ELSEWHERE, SECRET.upper(), SECRET[:-1], "", "tf1.", None)).map(Text),
    st.text(max_size=20).map(Text),
    st.builds(mangled, good_tokens, st.integers(0, 9), st.integers(0, 63)),
)
names = st.just(names_for("east")) | st.lists(
    st.sampled_from(
        (
            *names_for("east", "west", "north"),
            ("DNS", "East.agents.example"),
            ("DNS", "east.agents.example.org"),
            ("DNS", "agents.example"),
            ("URI", "east.agents.example"),
        )
    ),
    max_size=3,
)
deny_lists = st.just(DenyList()) | st.builds(
    DenyList,
    st.frozensets(st.sampled_from(("east", "west")), max_size=2),
    st.frozensets(st.tuples(st.sampled_from(("east", "west")), st.integers(1, 3)), max_size=3),
)


@given(
    accept=st.permutations(WAYS).flatmap(lambda ways: st.integers(1, 5).map(lambda count: ways[:count])),
    secrets=st.sampled_from(((SECRET,), (SECRET, NEXT_SECRET), (NEXT_SECRET, SECRET), ("", SECRET), ())),
    denied=deny_lists,
    sent=texts,
    names=names,
    # As they should be, mostly: one that is not hides all that is looked at later.
    cluster_id=st.sampled_from(("east",) * 6 + ("west",) * 3 + ("East", "", "e_1")),
    instance=st.sampled_from(("ab12",) * 4 + (None, "AB")),
    uid=st.sampled_from((None,) * 4 + ("0b1c-77",) * 4 + ("no uid",)),
)
@settings(max_examples=200)
@example(["token"], (SECRET,), DenyList(), Text(token_of("east"), ("east", 1, SECRET)), [], "east", None, None)
@example(["shared+certificate"], (SECRET,), DenyList(), Text(SECRET), names_for("east"), "west", None, None)
def test_a_call_is_whose_credentials_say_so(
    accept: list[str],
    secrets: tuple[str, ...],
    denied: DenyList,
    sent: Text,
    names: list[tuple[str, str]],
    cluster_id: str,
    instance: str | None,
    uid: str | None,
) -> None:
    """No credential, nonsense, or a wrong one: UNAUTHENTICATED. An id that is none: INVALID_ARGUMENT. A good one, but
    for another cluster, or denied: PERMISSION_DENIED. Else the caller, and what has proven it."""
    metadata = {"x-federation-cluster": cluster_id}
    if instance is not None:
        metadata["x-federation-instance"] = instance
    if uid is not None:
        metadata["x-federation-uid"] = uid
    if sent.text is not None:
        metadata["authorization"] = f"Bearer {sent.text}"
    trusted = Trusted(accept, secrets, denied, SAN)

    # For each kind of credential that is there and good, the ids that it is for.
    good_for: dict[str, set[str]] = {}
    if sent.text and sent.text in secrets:
        good_for["shared"] = {"east", "west", "East", "", "e_1"}
    if sent.token is not None and sent.token[2] in secrets:
        good_for["token"] = {sent.token[0]}
    in_certificate = {each for each in ("east", "west", "north") if ("DNS", f"{each}.agents.example") in names}
    if in_certificate:
        good_for["certificate"] = in_certificate
    proven = [way for way in accept if all(part in good_for for part in way.split("+"))]
    covering = [way for way in proven if all(cluster_id in good_for[part] for part in way.split("+"))]
    serials = {way: sent.token[1] if sent.token is not None and "token" in way else None for way in covering}
    let_in = [
        way for way in covering if cluster_id not in denied.clusters and (cluster_id, serials[way]) not in denied.tokens
    ]
    expected: type[RpcError] | Caller
    if not proven:
        expected = Unauthenticated
    elif cluster_id not in ("east", "west") or instance == "AB" or uid == "no uid":
        expected = InvalidArgument
    elif not let_in:
        expected = PermissionDenied
    else:
        expected = Caller(cluster_id, instance, uid, let_in[0], serials[let_in[0]])
    event("let in" if isinstance(expected, Caller) else expected.__name__)

    if isinstance(expected, Caller):
        assert identify(metadata, names, trusted) == expected
        assert not is_denied(expected, denied)
    else:
        with pytest.raises(expected) as caught:
            identify(metadata, names, trusted)
        shown_nowhere(caught.value, sent.text, trusted)
        assert re.fullmatch("[^\n]{10,600}", str(caught.value))


def shown_nowhere(error: BaseException, sent: str | None, trusted: Trusted) -> None:
    """No text of a credential, and no part of one that proves anything, is in an error or in what is printed of it."""
    shown = f"{error} {error!r} {error.args!r} {''.join(traceback.format_exception(error))} {trusted!r}"
    texts = [text for text in (sent, *trusted.secrets) if text is not None]
    for text in (*texts, *(text.rpartition(".")[2] for text in texts)):
        assert len(text) < 12 or text not in shown


# --- the secret ------------------------------------------------------------------------------------------------------


@given(labels, instances, secrets, st.none() | uids)
def test_an_agent_is_let_in_with_the_hubs_secret(cluster_id: str, instance: str, secret: str, uid: str | None) -> None:
    """semantics.md, "Wire": "Call metadata: `authorization: Bearer CREDENTIAL`, `x-federation-cluster: ID`,
    `x-federation-instance: HEX`"; the uid is optional."""
    metadata = dict(call_metadata(cluster_id, instance, secret, uid))
    assert metadata == {
        "authorization": f"Bearer {secret}",
        "x-federation-cluster": cluster_id,
        "x-federation-instance": instance,
    } | ({"x-federation-uid": uid} if uid is not None else {})
    caller = identify(metadata, (), trusting("shared", secrets=(secret,)))
    assert caller == Caller(cluster_id, instance, uid, "shared", None)
    assert caller.credential == "shared"


@given(st.text(), secrets)
def test_any_other_credential_is_unauthenticated(sent: str, secret: str) -> None:
    """semantics.md, "Wire": "Missing or wrong credentials: UNAUTHENTICATED". What was sent is not repeated."""
    assume(sent != secret)
    trusted = trusting("shared", secrets=(secret,))
    with pytest.raises(Unauthenticated) as caught:
        identify({**metadata_of(), "authorization": f"Bearer {sent}"}, (), trusted)
    shown_nowhere(caught.value, sent, trusted)


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
        identify(metadata, (), SHARED)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_matched_in_any_case(scheme: str) -> None:
    """As in HTTP (RFC 9110, 11.1), which a peer's library may rely on."""
    metadata = {**metadata_of(), "authorization": f"{scheme} {SECRET}"}
    assert identify(metadata, (), SHARED).cluster_id == "east"


@pytest.mark.parametrize("accept", ["shared", "token"])
def test_two_secrets_count_at_once(accept: str) -> None:
    """While one is replaced by the other, agents with either of them, or with tokens made from either, are let in."""
    both = trusting(accept, secrets=(SECRET, NEXT_SECRET))
    for secret in (SECRET, NEXT_SECRET):
        credential = secret if accept == "shared" else token_of("east", 1, secret)
        assert identify(metadata_of(credential=credential), (), both).cluster_id == "east"
        other = SECRET if secret == NEXT_SECRET else NEXT_SECRET
        with pytest.raises(Unauthenticated):
            identify(metadata_of(credential=credential), (), trusting(accept, secrets=(other,)))


# --- a token is no secret, a secret is no token ----------------------------------------------------------------------


def test_a_secret_in_the_form_of_a_token_is_never_compared_with_one() -> None:
    """A text is one or the other by how it begins. A hub whose secret were a token would else take that token for the
    secret, from whoever was given it."""
    token = token_of("west")
    trusted = trusting("shared", secrets=(token,))
    with pytest.raises(Unauthenticated, match="takes no tokens"):
        identify(metadata_of(credential=token), (), trusted)


@pytest.mark.parametrize(
    "accept, credential, words",
    [
        (("shared",), token_of("east"), "takes no tokens; give the agent the hub's secret"),
        (("token",), SECRET, "takes no shared secret; give the agent its token"),
        (("certificate",), SECRET, "takes no shared secret; give the agent a client certificate"),
        (("certificate", "token"), None, "a client certificate in [federation.tls], or its token"),
        (("shared",), "wrong", "compare the agent's [federation] secret with the hub's"),
        (("token",), token_of("east", 1, ELSEWHERE), "wrong token: it was not made from this hub's secret"),
        (("token+certificate",), token_of("east"), "its token alone is not enough: give the agent"),
    ],
)
def test_a_refusal_says_what_to_give_the_agent(accept: tuple[str, ...], credential: str | None, words: str) -> None:
    """One line that says what to do next."""
    with pytest.raises(Unauthenticated, match=re.escape(words)):
        identify(metadata_of(credential=credential), (), trusting(*accept))


@given(
    accept=st.lists(st.sampled_from(WAYS), min_size=1, max_size=3, unique=True),
    sent=texts,
    secrets=st.sampled_from(((SECRET,), (SECRET, NEXT_SECRET), ("", NEXT_SECRET))),
)
def test_who_mixes_them_up_is_told_of_and_nobody_else(accept: list[str], sent: Text, secrets: tuple[str, ...]) -> None:
    """ "Shared mode never takes a token for the secret, or the reverse, and warns"."""
    metadata = metadata_of(credential=None)
    if sent.text is not None:
        metadata["authorization"] = f"Bearer {sent.text}"
    parts = {part for way in accept for part in way.split("+")}
    text = sent.text or ""
    expected = None
    if text.startswith("tf1.") and "shared" in parts and "token" not in parts:
        expected = "an agent has a token"
    elif text and text in secrets and "shared" not in parts:
        expected = "an agent has the hub's own secret"
    told = mixed_up(metadata, Trusted(accept, secrets))
    assert (told or "").startswith(expected or "")
    assert (told is None) is (expected is None)
    assert len(text) < 12 or text not in (told or "")


# --- ids -------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=70) | st.text("ab1-A._", max_size=70))
def test_an_id_that_is_no_label_is_an_invalid_argument(cluster_id: str) -> None:
    """semantics.md, "Wire": "an invalid id: INVALID_ARGUMENT"; the ids are lower-case RFC 1123 labels (≤ 63)."""
    if re.fullmatch("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", cluster_id):
        assert identify(metadata_of(cluster_id), (), SHARED).cluster_id == cluster_id
    else:
        with pytest.raises(InvalidArgument) as caught:
            identify(metadata_of(cluster_id), (), SHARED)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "cluster_id", ["", "East", "EAST", "east.west", "east_1", "-east", "east-", "öst", "e" * 64, "east\n"]
)
@pytest.mark.parametrize("way", WAYS)
def test_ids_that_people_try(cluster_id: str, way: str) -> None:
    """One case rule everywhere: "East" is no other spelling of "east", it is refused, whatever proves it."""
    credential = token_of("east") if "token" in way else SECRET if "shared" in way else None
    with pytest.raises(InvalidArgument, match="x-federation-cluster"):
        identify(metadata_of(cluster_id, credential=credential), names_for("east"), trusting(way))


@pytest.mark.parametrize("instance", ["", "AB", "xyz", "0x1f", "a" * 65, "ab 12", "ab\n"])
def test_an_instance_that_is_no_hexadecimal_number_is_an_invalid_argument(instance: str) -> None:
    """1 to 64 lower-case hexadecimal digits, or none at all: an older peer sends none."""
    with pytest.raises(InvalidArgument, match="x-federation-instance"):
        identify(metadata_of(instance=instance), (), SHARED)


@given(st.text(max_size=140) | uids)
@example("a" * 128)
@example("a" * 129)
@example("0b1c\n")
@example("")
def test_a_uid_is_short_and_plain(uid: str) -> None:
    """1 to 128 letters, digits, and any of ". _ : -"."""
    good = 1 <= len(uid) <= 128 and all(each.isascii() and (each.isalnum() or each in "._:-") for each in uid)
    assert is_uid(uid) is good
    metadata = {**metadata_of(), "x-federation-uid": uid}
    if good:
        assert identify(metadata, (), SHARED).uid == uid
    else:
        with pytest.raises(InvalidArgument, match="x-federation-uid") as caught:
            identify(metadata, (), SHARED)
        assert len(str(caught.value)) < 1000


def test_a_peer_need_not_name_an_instance_or_a_uid() -> None:
    """semantics.md, "Wire": our own additions are optional."""
    metadata = metadata_of()
    del metadata["x-federation-instance"]
    assert identify(metadata, (), SHARED) == Caller("east", None, None)


@pytest.mark.parametrize("accept", ["shared", "token", "certificate", "token+certificate"])
def test_the_credential_is_checked_before_anything_else_is_told(accept: str) -> None:
    """A stranger learns nothing about ids, or about who is denied."""
    metadata = {**metadata_of("NOT AN ID", "NOT HEX", "wrong"), "x-federation-uid": "NO UID"}
    with pytest.raises(Unauthenticated):
        identify(metadata, (), trusting(accept))
    denied = DenyList(frozenset({"east"}), frozenset({("east", 1)}))
    for credential in ("wrong", token_of("east", 1, ELSEWHERE), None):
        with pytest.raises(Unauthenticated):
            identify(metadata_of(credential=credential), (), trusting(accept, denied=denied))


# --- for whom --------------------------------------------------------------------------------------------------------


def test_what_a_credential_is_for_is_told_whoever_has_it() -> None:
    """It is good, so its holder may know; of a certificate with many names not all of them."""
    token, certificate = metadata_of("west", credential=token_of("east")), metadata_of("west", credential=None)
    many = names_for("d", "c", "b", "a")
    of_token, of_many = "its token is for 'east'", "its certificate is for 'a', 'b', 'c' and 1 more"
    for metadata, names, accept, told in (
        (token, [], ("token",), of_token),
        (certificate, many, ("certificate",), of_many),
        (token, many, ("token+certificate",), f"{of_token} and {of_many}"),
        (token, many, ("certificate", "token"), f"{of_token} and {of_many}"),
        # Of what does not count nothing is said.
        (token, many, ("token",), of_token),
        (token, names_for("north"), ("certificate",), "its certificate is for 'north'"),
        (token, names_for("west"), ("token+certificate",), f"{of_token} and its certificate is for 'west'"),
    ):
        with pytest.raises(PermissionDenied) as caught:
            identify(metadata, names, trusting(*accept))
        assert str(caught.value) == f"the call claims to be 'west', and {told}"


@pytest.mark.parametrize("sent", [SECRET, ELSEWHERE, token_of("east"), token_of("east", 1, ELSEWHERE), None])
@pytest.mark.parametrize(
    "accept", [("certificate",), ("token+certificate",), ("shared+certificate",), ("token", "certificate")]
)
def test_a_certificate_that_names_no_cluster_is_told_as_such_whatever_else_is_sent(
    accept: tuple[str, ...], sent: str | None
) -> None:
    """What is wrong with the certificate has to be put right in any case. Where another credential is good and enough,
    the call is let in."""
    metadata, names = metadata_of(credential=sent), [("DNS", "east.example"), ("URI", "spiffe://fleet.example/east")]
    if "token" in accept and sent == token_of("east"):
        assert identify(metadata, names, trusting(*accept)) == Caller("east", "ab12", None, "token", 1)
        return
    with pytest.raises(Unauthenticated) as caught:
        identify(metadata, names, trusting(*accept))
    assert str(caught.value) == (
        "the client certificate names no cluster: none of its names is like DNS:{cluster}.agents.example"
    )


@pytest.mark.parametrize("way", WAYS)
def test_an_id_that_is_missing_is_told_as_missing(way: str) -> None:
    """And not as one that is badly spelt."""
    metadata = metadata_of("", credential=token_of("east") if "token" in way else SECRET if "shared" in way else None)
    for absent in (metadata, {key: value for key, value in metadata.items() if key != "x-federation-cluster"}):
        with pytest.raises(InvalidArgument) as caught:
            identify(absent, names_for("east"), trusting(way))
        assert str(caught.value) == "x-federation-cluster is missing: the call does not say which cluster's it is"


def test_parts_that_are_needed_together_have_to_agree() -> None:
    """A token of east does not become one of west beside a certificate of west."""
    both, either = trusting("token+certificate"), trusting("token", "certificate")
    for claimed in ("east", "west"):
        metadata = metadata_of(claimed, credential=token_of("east"))
        with pytest.raises(PermissionDenied):
            identify(metadata, names_for("west"), both)
        assert identify(metadata, names_for("west"), either).way == ("token" if claimed == "east" else "certificate")
    assert identify(metadata_of(credential=token_of("east")), names_for("east"), both).way == "token+certificate"


def test_without_a_name_for_clusters_a_certificate_proves_none() -> None:
    """A hub that was not told where the id stands in a certificate finds none anywhere."""
    with pytest.raises(Unauthenticated):
        identify(metadata_of(credential=None), names_for("east"), Trusted(("certificate",), (SECRET,)))


@pytest.mark.parametrize(
    "caller, shown",
    [
        (Caller("east", None), "shared"),
        (Caller("east", None, None, "token", 3), "token 3"),
        (Caller("east", None, None, "token+certificate", 12), "token 12+certificate"),
        (Caller("east", None, None, "certificate"), "certificate"),
        (Caller("east", None, None, "shared+certificate"), "shared+certificate"),
    ],
)
def test_what_has_proven_a_caller_is_told_without_the_proof(caller: Caller, shown: str) -> None:
    assert caller.credential == shown


# --- who is denied ---------------------------------------------------------------------------------------------------


def test_a_denied_token_is_no_good_and_a_newer_one_is() -> None:
    """CLUSTER.SERIAL names one token; another proof of that cluster, at the same hub, counts all the same."""
    denied = DenyList(frozenset(), frozenset({("east", 1)}))
    trusted = trusting("token", "certificate", denied=denied)
    with pytest.raises(PermissionDenied, match="token 1 of cluster 'east' is on this hub's deny list") as caught:
        identify(metadata_of(credential=token_of("east", 1)), (), trusted)
    assert str(caught.value) == str(denied_error(Caller("east", None, None, "token", 1), denied))
    assert identify(metadata_of(credential=token_of("east", 2)), (), trusted).serial == 2
    assert identify(metadata_of(credential=token_of("east", 1)), names_for("east"), trusted).way == "certificate"
    assert identify(metadata_of("west", credential=token_of("west", 1)), (), trusted).cluster_id == "west"


@pytest.mark.parametrize("way", WAYS)
def test_a_denied_cluster_is_not_let_in_whatever_it_proves(way: str) -> None:
    credential = token_of("east", 7) if "token" in way else SECRET if "shared" in way else None
    metadata = metadata_of(credential=credential)
    assert identify(metadata, names_for("east"), trusting(way)).cluster_id == "east"
    with pytest.raises(PermissionDenied, match="cluster 'east' is on this hub's deny list"):
        identify(metadata, names_for("east"), trusting(way, denied=DenyList(frozenset({"east"}))))


# --- what nobody may find out ----------------------------------------------------------------------------------------


class Guarded(str):
    """A secret that must not be compared in the ordinary way, which stops at the first difference. Whether there is one
    at all may be asked."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if other != "":
            pytest.fail("a secret was compared with ==")
        return len(self) == 0

    def __ne__(self, other: object) -> bool:
        return not self == other


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | bytes, str | bytes]]:
    """What is handed to the library's comparison that takes the same time whatever differs, which does its work."""
    found: list[tuple[str | bytes, str | bytes]] = []
    real = hmac

    class Watched:
        new = staticmethod(real.new)

        @staticmethod
        def compare_digest(one: str | bytes, other: str | bytes) -> bool:
            found.append((one, other))
            return real.compare_digest(one, other)  # type: ignore[arg-type]

    monkeypatch.setattr(credentials, "hmac", Watched)
    return found


def refused_or_not(metadata: Mapping[str, str], trusted: Trusted) -> None:
    """Only what is done on the way counts."""
    with contextlib.suppress(RpcError):
        identify(metadata, (), trusted)


@pytest.mark.parametrize("sent", ["wrong", SECRET[:-1], SECRET, NEXT_SECRET, "é" * 20, "\udc80"])
def test_secrets_are_compared_in_constant_time(sent: str, compared: list[tuple[str | bytes, str | bytes]]) -> None:
    """Nobody may find a secret out by how long a refusal takes: each is compared as a whole, by the library's function
    for it and in no other way, and all of them, whichever is the right one."""
    trusted = trusting("shared", secrets=(Guarded(SECRET), Guarded(NEXT_SECRET)))
    refused_or_not(metadata_of(credential=sent), trusted)
    text = sent.encode("utf-8", "surrogatepass")
    assert compared == [(text, SECRET.encode()), (text, NEXT_SECRET.encode())]


@pytest.mark.parametrize("secret", [SECRET, NEXT_SECRET, ELSEWHERE])
@pytest.mark.parametrize("claimed", ["east", "west"])
def test_tokens_are_compared_in_constant_time(
    secret: str, claimed: str, compared: list[tuple[str | bytes, str | bytes]]
) -> None:
    """The same for a token's MAC: two texts of one length, for each of the secrets."""
    token = token_of("east", 3, secret)
    trusted = trusting("token", secrets=(Guarded(SECRET), Guarded(NEXT_SECRET)))
    refused_or_not(metadata_of(claimed, credential=token), trusted)
    assert [one for one, _ in compared] == [token[-64:]] * 2
    assert [other for _, other in compared] == [token_of("east", 3, each)[-64:] for each in (SECRET, NEXT_SECRET)]


def representations(trusted: Trusted, caller: Caller, own: OwnIdentity) -> Iterator[str]:
    """What logs, debuggers and traces may print."""
    for each in (trusted, caller, own):
        yield repr(each)
        yield str(each)


def test_nothing_here_shows_a_credential_when_it_is_printed() -> None:
    token = token_of("east")
    trusted = trusting("shared", "token", secrets=(SECRET, NEXT_SECRET))
    caller = identify(metadata_of(credential=token), (), trusted)
    for shown in representations(trusted, caller, OwnIdentity("east", "ab12", lambda: token)):
        for secret in (SECRET, NEXT_SECRET, token, token[-64:]):
            assert secret not in shown


@pytest.mark.parametrize("first, second", list(combinations(Part, 2)))
def test_what_a_hub_takes_is_read_from_its_ways(first: Part, second: Part) -> None:
    """Each part of each way, and no other."""
    alone, together, apart = Trusted((first,)), Trusted((f"{first}+{second}",)), Trusted((first, second))
    assert [alone.takes(part) for part in Part] == [part is first for part in Part]
    for trusted in (together, apart):
        assert [trusted.takes(part) for part in Part] == [part in (first, second) for part in Part]


# --- the agent's side ------------------------------------------------------------------------------------------------


def test_without_a_credential_no_credential_is_sent() -> None:
    """Where a client certificate proves the cluster there is no header for it."""
    assert "authorization" not in dict(call_metadata("east", "ab12", None))


def test_an_agent_says_what_holds_when_it_calls() -> None:
    """A credential or a uid that has changed counts from the next call on; of the uid those are told who asked to be,
    once for each change."""
    held: list[str | None] = ["first"]
    own = OwnIdentity("east", "ab12", lambda: held[-1])
    told: list[str | None] = []
    own.changed.append(lambda: told.append(own.uid))

    def said() -> Sequence[str | None]:
        metadata = dict(own.metadata())
        return [metadata.get(key) for key in ("authorization", "x-federation-uid")]

    assert said() == ["Bearer first", None]
    own.uid = "0b1c"
    held.append("second")
    assert said() == ["Bearer second", "0b1c"]
    own.uid = "0b1c"
    own.uid = "77aa"
    held.append(None)
    assert said() == [None, "77aa"]
    assert told == ["0b1c", "77aa"]
