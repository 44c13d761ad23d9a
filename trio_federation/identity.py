"""Who makes a call: the metadata that go with every call, and whether its credentials are enough for the cluster that
it claims to be. Pure. What a credential looks like is `credentials.py`; what the caller may say then, `policy.py`.

A hub names the ways in which a cluster may prove itself (`[hub] accept`). Each is one kind of credential, or two that
are needed together. The shared secret proves no id: with it alone, an id is claimed. A token is good for the cluster in
it, a certificate for the clusters that it names. A text is a token or a shared secret by its form, never both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from trio_federation.capacity import is_label
from trio_federation.credentials import (
    NOBODY,
    CertificateName,
    DenyList,
    Token,
    looks_like_token,
    read_token,
    same_secret,
    without_macs,
)
from trio_federation.errors import InvalidArgument, PermissionDenied, RpcError, Unauthenticated
from trio_federation.wire import is_instance

CREDENTIAL_KEY = "authorization"
CLUSTER_KEY = "x-federation-cluster"
INSTANCE_KEY = "x-federation-instance"
UID_KEY = "x-federation-uid"

_SCHEME = "bearer "
_UID = re.compile("[A-Za-z0-9._:-]{1,128}")


class Part(StrEnum):
    """A kind of credential."""

    SHARED = "shared"
    TOKEN = "token"  # noqa: S105 - a kind, and no token
    CERTIFICATE = "certificate"


class Caller(NamedTuple):
    """Whose call it is."""

    cluster_id: str
    #: the agent process, or None where the peer does not say
    instance: str | None
    #: what tells the cluster from every other, whatever it is called, or None where the peer does not say
    uid: str | None = None
    #: what has proven it, as `[hub] accept` has it: "token", "token+certificate"
    way: str = "shared"
    #: the serial of the token that is part of that
    serial: int | None = None

    @property
    def credential(self) -> str:
        """What has proven it, for people: "token 3", "certificate"."""
        return self.way if self.serial is None else self.way.replace("token", f"token {self.serial}")


class Trusted:
    """What a hub takes for proof. Replaced as a whole when any of it changes, and of no kind that a serialiser takes
    for a record, as it holds secrets.

    `accept`: the ways of `[hub] accept`, each "shared", "token", "certificate", or two of these with "+" between.
    `secrets`: the hub's, all of which count; more than one while it is being replaced. `cluster_san`: where a
    certificate names its cluster."""

    __slots__ = ("accept", "cluster_san", "denied", "secrets")

    def __init__(
        self,
        accept: Sequence[str] = ("shared",),
        secrets: tuple[str, ...] = (),
        denied: DenyList = NOBODY,
        cluster_san: CertificateName | None = None,
    ) -> None:
        self.accept = accept
        self.secrets = secrets
        self.denied = denied
        self.cluster_san = cluster_san

    def __repr__(self) -> str:
        return f"Trusted(accept={list(self.accept)!r}, {len(self.secrets)} secrets, {len(self.denied)} denied)"

    def takes(self, part: Part) -> bool:
        """Whether some way that is accepted has this part."""
        return any(part in way.split("+") for way in self.accept)


def is_uid(text: str) -> bool:
    """Whether a text can be the UID of a cluster: 1 to 128 letters, digits, and any of ". _ : -"."""
    return _UID.fullmatch(text) is not None


def call_metadata(
    cluster_id: str, instance: str, credential: str | None, uid: str | None = None
) -> list[tuple[str, str]]:
    """The metadata that an agent sends with each call."""
    metadata = [(CLUSTER_KEY, cluster_id), (INSTANCE_KEY, instance)]
    if uid is not None:
        metadata.append((UID_KEY, uid))
    if credential is not None:
        metadata.append((CREDENTIAL_KEY, f"Bearer {credential}"))
    return metadata


class OwnIdentity:
    """What one agent says of itself with each call, which may change while it runs.

    `credential`: the shared secret or the cluster's token, asked at each call; None where a client certificate proves
    the cluster. `renewals`: how often the credential, or the certificate, was replaced so far; what a hub has refused
    on a connection may do with the next one then. `changed` is called when the uid becomes another one."""

    def __init__(
        self,
        cluster_id: str,
        instance: str,
        credential: Callable[[], str | None],
        renewals: Callable[[], int] = lambda: 0,
    ) -> None:
        self.cluster_id = cluster_id
        self.instance = instance
        self.renewals = renewals
        self.changed: list[Callable[[], None]] = []
        self._credential = credential
        self._uid: str | None = None

    @property
    def uid(self) -> str | None:
        """What tells the cluster from every other; None as long as it is not known."""
        return self._uid

    @uid.setter
    def uid(self, uid: str) -> None:
        if uid != self._uid:
            self._uid = uid
            for tell in self.changed:
                tell()

    def metadata(self) -> list[tuple[str, str]]:
        """The metadata of a call that is made now."""
        return call_metadata(self.cluster_id, self.instance, self._credential(), self._uid)


class Presented(NamedTuple):
    """What a call presents that proves something: each part only where it is good."""

    shared: bool
    token: Token | None
    #: the clusters that the certificate names
    certificate: frozenset[str]

    def has(self, part: Part) -> bool:
        """Whether a part is there."""
        if part is Part.SHARED:
            return self.shared
        return self.token is not None if part is Part.TOKEN else bool(self.certificate)

    def covers(self, part: Part, cluster_id: str) -> bool:
        """Whether a part that is there is good for a cluster."""
        if part is Part.TOKEN:
            return self.token is not None and self.token.cluster_id == cluster_id
        return part is Part.SHARED or cluster_id in self.certificate


def identify(metadata: Mapping[str, str], names: Sequence[tuple[str, str]], trusted: Trusted) -> Caller:
    """Say who makes a call.

    `names`: the subject alternative names (kind, value) of its connection's client certificate, which TLS has verified.
    Raises Unauthenticated where no way that is accepted is proven, InvalidArgument for an id that is none,
    PermissionDenied where what is proven is another cluster, or one that is denied. Never tells what was sent as a
    credential."""
    presented, wrong = _read(metadata, names, trusted)
    proven = [way for way in trusted.accept if all(presented.has(Part(part)) for part in way.split("+"))]
    if not proven:
        raise Unauthenticated(wrong or _missing(presented, trusted))
    cluster_id = metadata.get(CLUSTER_KEY, "")
    if not is_label(cluster_id):
        if not cluster_id:
            raise InvalidArgument(f"{CLUSTER_KEY} is missing: the call does not say which cluster's it is")
        raise InvalidArgument(
            f"{CLUSTER_KEY} {_quoted(cluster_id)} is not a cluster id, that is, a lower-case RFC 1123 label (≤ 63)"
        )
    instance = metadata.get(INSTANCE_KEY)
    if instance is not None and not is_instance(instance):
        raise InvalidArgument(f"{INSTANCE_KEY} {_quoted(instance)} is not 1 to 64 lower-case hexadecimal digits")
    uid = metadata.get(UID_KEY)
    if uid is not None and not is_uid(uid):
        raise InvalidArgument(f'{UID_KEY} {_quoted(uid)} is not 1 to 128 letters, digits, and any of ". _ : -"')
    covering = [way for way in proven if all(presented.covers(Part(part), cluster_id) for part in way.split("+"))]
    if not covering:
        raise PermissionDenied(f"the call claims to be {cluster_id!r}, and {_proven(presented, proven)}")
    callers = [_caller(way, cluster_id, instance, uid, presented) for way in covering]
    for caller in callers:
        if not is_denied(caller, trusted.denied):
            return caller
    raise denied_error(callers[0], trusted.denied)


def is_denied(caller: Caller, denied: DenyList) -> bool:
    """Whether a caller is on the deny list, by its id or by the token that has proven it."""
    return denied.denies(caller.cluster_id, caller.serial)


def denied_error(caller: Caller, denied: DenyList) -> RpcError:
    """What a caller is told that is on the deny list."""
    if denied.denies(caller.cluster_id):
        return PermissionDenied(f"cluster {caller.cluster_id!r} is on this hub's deny list")
    return PermissionDenied(
        f"token {caller.serial} of cluster {caller.cluster_id!r} is on this hub's deny list; give the agent a newer one"
    )


def mixed_up(metadata: Mapping[str, str], trusted: Trusted) -> str | None:
    """What a hub's operator should know of a call, refused or let in: that it has sent the one kind of text where only
    the other counts. None where it has not."""
    text = _credential(metadata)
    if text is None:
        return None
    if looks_like_token(text) and not trusted.takes(Part.TOKEN) and trusted.takes(Part.SHARED):
        return "an agent has a token, and this hub takes the shared secret only: see [hub] accept"
    if same_secret(text, trusted.secrets) and not trusted.takes(Part.SHARED):
        return "an agent has the hub's own secret, with which it could make any token: give it a token of its own"
    return None


def _read(
    metadata: Mapping[str, str], names: Sequence[tuple[str, str]], trusted: Trusted
) -> tuple[Presented, str | None]:
    """What a call presents, and what is wrong with what it presents that is no good."""
    shared, token, wrong = False, None, None
    text = _credential(metadata)
    # Looked at by its form alone: a secret is never tried as a token, nor a token as a secret.
    if text is not None and looks_like_token(text):
        found = read_token(text)
        if not trusted.takes(Part.TOKEN):
            wrong = f"this hub takes no tokens; give the agent {_wanted(trusted.accept)}"
        elif found is not None and found.valid_for(trusted.secrets):
            token = found
        else:
            wrong = (
                "wrong token: it was not made from this hub's secret, or not copied whole; make it anew with "
                "`trio-federation token`"
            )
    elif text is not None:
        if trusted.takes(Part.SHARED):
            shared = same_secret(text, trusted.secrets)
            wrong = (
                None
                if shared
                else "wrong credential: compare the agent's [federation] secret with the hub's [hub] secret"
            )
        else:
            wrong = f"this hub takes no shared secret; give the agent {_wanted(trusted.accept)}"
    certificate: frozenset[str] = frozenset()
    if trusted.cluster_san is not None and trusted.takes(Part.CERTIFICATE):
        certificate = trusted.cluster_san.cluster_ids(names)
        if names and not certificate:
            # More than that another credential does not count: where it does, it is looked at all the same.
            wrong = f"the client certificate names no cluster: none of its names is like {trusted.cluster_san}"
    return Presented(shared, token, certificate), wrong


def _credential(metadata: Mapping[str, str]) -> str | None:
    header = metadata.get(CREDENTIAL_KEY, "")
    return header[len(_SCHEME) :] if header[: len(_SCHEME)].lower() == _SCHEME else None


def _quoted(text: str) -> str:
    """What a call has sent in another place than its credential, which may be one all the same."""
    return repr(without_macs(text)[:80])


def _missing(presented: Presented, trusted: Trusted) -> str:
    """What is told a call that presents too little, none of it wrong."""
    there = [part for part in Part if presented.has(part)]
    wanted = _wanted(trusted.accept)
    if there:
        return f"its {' and '.join(there)} alone is not enough: give the agent {wanted}"
    header = f"; on the wire it is {CREDENTIAL_KEY} metadata of the form 'Bearer CREDENTIAL'"
    return f"no credential: give the agent {wanted}{header if trusted.accept != ('certificate',) else ''}"


_WORDS = {
    Part.SHARED: "the hub's secret as [federation] secret",
    Part.TOKEN: "its token as [federation] secret",
    Part.CERTIFICATE: "a client certificate in [federation.tls]",
}


def _wanted(accept: Iterable[str]) -> str:
    return ", or ".join(" and ".join(_WORDS[Part(part)] for part in way.split("+")) for way in accept)


def _proven(presented: Presented, proven: Iterable[str]) -> str:
    """Whom a call's credentials are for, of the ways that it has proven, in words."""
    parts = {part for way in proven for part in way.split("+")}
    words = []
    if Part.TOKEN in parts and presented.token is not None:
        words.append(f"its token is for {presented.token.cluster_id!r}")
    if Part.CERTIFICATE in parts:
        words.append(f"its certificate is for {_shown(sorted(presented.certificate))}")
    return " and ".join(words)


def _shown(ids: Iterable[str]) -> str:
    names = list(dict.fromkeys(ids))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _caller(way: str, cluster_id: str, instance: str | None, uid: str | None, presented: Presented) -> Caller:
    serial = presented.token.serial if Part.TOKEN in way.split("+") and presented.token is not None else None
    return Caller(cluster_id, instance, uid, way, serial)
