"""What proves a cluster: the form of a token and how one is derived from the hub's secret, where a client certificate
names its cluster, which credentials are denied. Pure, and only about the credentials themselves; whether a call's are
enough is `identity.py`, where the files with them come from `config.py` and `reload.py`."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trio_federation.capacity import is_label

#: What every token begins with, and no secret may: so one is never taken for the other.
TOKEN_PREFIX = "tf1."  # noqa: S105 - the beginning of all of them, and no token
#: The largest serial; small enough for a person to count up, and for any program to hold.
MAX_SERIAL = 2**31 - 1
#: Bytes that stand before what is authenticated, so that a MAC made for anything else, or for a later form of token, is
#: never the MAC of a token of this one.
_CONTEXT = b"trio-federation token 1"

_TOKEN = re.compile(r"tf1\.([-a-z0-9]{1,63})\.([1-9][0-9]{0,9})\.([0-9a-f]{64})")
_SERIAL = re.compile("[1-9][0-9]{0,9}")
#: As much of a token as gives it away, also of one that is broken.
_IN_A_TEXT = re.compile(r"(tf1\.[^.\s]{0,63}\.[^.\s]{0,10}\.)[0-9a-z]{8,}", re.IGNORECASE)
#: A label of a DNS name, in lower case; a client certificate names its cluster by one, or by the end of one.
_DNS_LABEL = "[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?"
_BEFORE_IN_DNS = re.compile(rf"({_DNS_LABEL}\.)*([a-z0-9_][-a-z0-9_]{{0,61}}-)?")
_AFTER_IN_DNS = re.compile(rf"(\.{_DNS_LABEL})+")
_BEFORE_IN_URI = re.compile(r"[a-z][a-z0-9+.-]*:.+")

# None of the classes here is a tuple: what formats or serialises one would show a MAC, or take one value for several.


class Token:
    """A token that has the form of one; `valid_for` tells whether it is one of a hub's.

    `serial`: from 1; which of the tokens that a cluster was given one after the other. `mac`: HMAC-SHA-256 over the
    context, the cluster id and the serial, in lower-case hexadecimal digits; not shown, and of no kind that a
    serialiser takes for a record, as whoever has the whole token can use it."""

    __slots__ = ("cluster_id", "mac", "serial")

    def __init__(self, cluster_id: str, serial: int, mac: str) -> None:
        self.cluster_id = cluster_id
        self.serial = serial
        self.mac = mac

    def __repr__(self) -> str:
        return f"Token(cluster_id={self.cluster_id!r}, serial={self.serial})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Token):
            return NotImplemented
        same = (self.cluster_id, self.serial) == (other.cluster_id, other.serial)
        return hmac.compare_digest(self.mac, other.mac) and same

    def __hash__(self) -> int:
        return hash((self.cluster_id, self.serial))

    def valid_for(self, secrets: Iterable[str]) -> bool:
        """Whether it was derived from one of these. Takes the same time whichever it is, and if it is none. From an
        empty secret, anybody could derive one, so that none counts."""
        found = False
        for secret in secrets:
            found |= hmac.compare_digest(self.mac, _mac(secret, self.cluster_id, self.serial)) and secret != ""
        return found


def make_token(secret: str, cluster_id: str, serial: int = 1) -> str:
    """The token of one cluster: `tf1.CLUSTER.SERIAL.MAC`.

    Raises ValueError for a cluster id that is none, a serial that is not from 1 to `MAX_SERIAL`, or a secret that is
    empty or itself a token. Its text shows no secret, and no token."""
    if looks_like_token(cluster_id):
        raise ValueError("the cluster id is a whole token; write only the id that stands in it, after the first dot")
    if not is_label(cluster_id):
        raise ValueError(
            f"{cluster_id[:80]!r} is not a cluster id; use at most 63 lower-case letters, digits and inner hyphens "
            "(an RFC 1123 label)"
        )
    if not 1 <= serial <= MAX_SERIAL:
        raise ValueError(f"the serial is not from 1 to {MAX_SERIAL}")
    if not secret:
        raise ValueError("the secret is empty; tokens are made from the hub's secret")
    if looks_like_token(secret):
        raise ValueError("the secret is itself a token; tokens are made from the hub's secret")
    return f"{TOKEN_PREFIX}{cluster_id}.{serial}.{_mac(secret, cluster_id, serial)}"


def read_token(text: str) -> Token | None:
    """What a text says as a token; None where it does not have the form of one. Each token has one spelling only, so
    that one that is denied cannot be written in another way."""
    match = _TOKEN.fullmatch(text)
    if match is None or not is_label(match[1]) or int(match[2]) > MAX_SERIAL:
        return None
    return Token(match[1], int(match[2]), match[3])


def read_serial(text: str) -> int | None:
    """The serial that a text says, in the one spelling that a token has it in; None where it says none."""
    if _SERIAL.fullmatch(text) is None or int(text) > MAX_SERIAL:
        return None
    return int(text)


def looks_like_token(text: str) -> bool:
    """Whether a text is meant as a token, well-formed or not, and so never as a shared secret."""
    return text.startswith(TOKEN_PREFIX)


def without_macs(text: str) -> str:
    """A text from outside that is to be shown: what stands in it like the MAC of a token is left out, as somebody may
    have put a token where it does not belong."""
    return _IN_A_TEXT.sub(r"\1***", text)


def _mac(secret: str, cluster_id: str, serial: int) -> str:
    message = b"\0".join((_CONTEXT, cluster_id.encode(), str(serial).encode()))
    return hmac.new(_bytes(secret), message, hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    # Every text, also one of half a surrogate pair: the error about it would hold the text.
    return text.encode("utf-8", "surrogatepass")


def same_secret(sent: str, secrets: Iterable[str]) -> bool:
    """Whether a shared secret is one of these; takes the same time whichever it is, and if it is none. An empty one is
    the same as none."""
    found = False
    for secret in secrets:
        found |= hmac.compare_digest(_bytes(sent), _bytes(secret)) and secret != ""
    return found


@dataclass(frozen=True, slots=True)
class CertificateName:
    """Where a client certificate names its cluster: a subject alternative name of one kind, of which a part is the id.
    Written like `DNS:{cluster}.agents.example` or `URI:spiffe://fleet.example/cluster/{cluster}`."""

    #: "DNS" or "URI", as OpenSSL calls them
    kind: str
    #: what stands before the id, and after it
    before: str
    after: str

    @classmethod
    def parse(cls, text: str) -> CertificateName:
        """Read the written form. Raises ValueError with the rest of a line of a fault."""
        kind, colon, form = text.partition(":")
        before, placeholder, after = form.partition("{cluster}")
        if not colon or kind not in ("DNS", "URI") or not placeholder or re.search("[{}]", before + after):
            raise ValueError(
                'names no place for the cluster id; write it like "DNS:{cluster}.agents.example" or '
                '"URI:spiffe://fleet.example/cluster/{cluster}"'
            )
        if not form.isascii() or not form.isprintable() or " " in form or "*" in form:
            raise ValueError("holds what no certificate's name can; use printable ASCII without blanks and '*'")
        if kind == "DNS" and _BEFORE_IN_DNS.fullmatch(before) is None:
            raise ValueError("is no form of a DNS name; use lower case, and the id as a label, or after a hyphen")
        if kind == "DNS" and not after.startswith("."):
            raise ValueError(
                "leaves the domain open, so that a name made for something else would do; let a dot follow {cluster}"
            )
        if kind == "DNS" and _AFTER_IN_DNS.fullmatch(after) is None:
            raise ValueError("is no form of a DNS name; let a domain in lower case follow {cluster}")
        if kind == "URI" and _BEFORE_IN_URI.fullmatch(before) is None:
            raise ValueError("is no form of a URI; begin with a scheme, such as spiffe://")
        return cls(kind, before, after)

    def cluster_ids(self, names: Iterable[tuple[str, str]]) -> frozenset[str]:
        """The ids that a certificate with these names (kind, value) stands for. Case counts: ids are lower-case."""
        found = (
            value[len(self.before) : len(value) - len(self.after)]
            for kind, value in names
            if kind == self.kind and value.startswith(self.before) and value.endswith(self.after)
        )
        # Where what stands around the id overlaps, nothing is left for one.
        return frozenset(each for each in found if is_label(each))

    def __str__(self) -> str:
        return f"{self.kind}:{self.before}{{cluster}}{self.after}"


@dataclass(frozen=True, slots=True)
class DenyList:
    """Clusters, and tokens of clusters, that are not let in whatever they prove."""

    clusters: frozenset[str] = frozenset()
    tokens: frozenset[tuple[str, int]] = frozenset()

    def denies(self, cluster_id: str, serial: int | None = None) -> bool:
        """Whether a cluster is denied, or its token with this serial, where it is one that proves it."""
        return cluster_id in self.clusters or (serial is not None and (cluster_id, serial) in self.tokens)

    def __len__(self) -> int:
        return len(self.clusters) + len(self.tokens)


#: The deny list of a hub that denies nobody.
NOBODY = DenyList()


def read_deny_list(text: str) -> tuple[DenyList, Sequence[str]]:
    """A deny list as it stands in a file: CLUSTER, or CLUSTER.SERIAL, a line each; blank lines, and what follows a "#",
    do not count. Returns it with the faults of lines that cannot be read, which deny nothing. A fault names the line,
    and shows nothing of it: what was pasted there may be a token or a secret."""
    clusters: set[str] = set()
    tokens: set[tuple[str, int]] = set()
    faults = []
    # Not splitlines, which ends lines where no editor does: the numbers are for people.
    for number, line in enumerate(re.split("\r\n|\n|\r", text), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        cluster_id, dot, number_of_token = entry.partition(".")
        serial = read_serial(number_of_token)
        if is_label(cluster_id) and not dot:
            clusters.add(cluster_id)
        elif is_label(cluster_id) and serial is not None:
            tokens.add((cluster_id, serial))
        elif looks_like_token(entry):
            faults.append(f"line {number} holds a whole token; keep CLUSTER.SERIAL of it")
        else:
            faults.append(f"line {number} is neither CLUSTER nor CLUSTER.SERIAL; correct it, or begin it with #")
    return DenyList(frozenset(clusters), frozenset(tokens)), faults
