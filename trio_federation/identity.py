"""Who makes a call: the metadata that go with every call, and whether its credential covers the cluster that it claims
to be. Pure. Today there is one kind of credential, the shared secret, with which an id is claimed and not proven;
others become further checks here."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import NamedTuple

from trio_federation.capacity import is_label
from trio_federation.errors import InvalidArgument, Unauthenticated
from trio_federation.wire import is_instance

CREDENTIAL_KEY = "authorization"
CLUSTER_KEY = "x-federation-cluster"
INSTANCE_KEY = "x-federation-instance"

_SCHEME = "bearer "


class Caller(NamedTuple):
    """Whose call it is."""

    cluster_id: str
    #: the agent process, or None where the peer does not say
    instance: str | None


def call_metadata(cluster_id: str, instance: str, credential: str | None) -> list[tuple[str, str]]:
    """The metadata that an agent sends with each call."""
    metadata = [(CLUSTER_KEY, cluster_id), (INSTANCE_KEY, instance)]
    if credential is not None:
        metadata.append((CREDENTIAL_KEY, f"Bearer {credential}"))
    return metadata


def authenticate(metadata: Mapping[str, str], secret: str) -> Caller:
    """Check a call's credential against the hub's shared secret, then what it says of itself.

    Raises Unauthenticated for a missing or wrong credential, InvalidArgument for a bad id; never tells what was sent as
    a credential."""
    credential = metadata.get(CREDENTIAL_KEY, "")
    if credential[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated(
            f"no credential: set the agent's [federation] secret to the hub's [hub] secret; on the wire it is "
            f"{CREDENTIAL_KEY} metadata of the form 'Bearer CREDENTIAL'"
        )
    if not hmac.compare_digest(credential[len(_SCHEME) :].encode(), secret.encode()):
        raise Unauthenticated("wrong credential: compare the agent's [federation] secret with the hub's [hub] secret")
    cluster_id = metadata.get(CLUSTER_KEY, "")
    if not is_label(cluster_id):
        raise InvalidArgument(
            f"{CLUSTER_KEY} {cluster_id[:80]!r} is not a cluster id, that is, a lower-case RFC 1123 label (≤ 63)"
        )
    instance = metadata.get(INSTANCE_KEY)
    if instance is not None and not is_instance(instance):
        raise InvalidArgument(f"{INSTANCE_KEY} {instance[:80]!r} is not 1 to 64 lower-case hexadecimal digits")
    return Caller(cluster_id, instance)
