"""What a SandboxWarmPool of the Kubernetes project agent-sandbox comes to: which fields of it and of the claims on it
are read, and the one row that they make. Pure. A claim's change costs the same however many claims there are: each is
remembered by where it counts, and each pool has its counts.

A value that does not fit (`Misfit`) goes into the record as it is, so that the agent's own check drops that record.
Claims are not records: one that cannot be read counts nowhere, and costs its pool nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from trio_federation import Capacity
from trio_federation_kubernetes.decoding import Decoder, Misfit, reach
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.resources import Key, Resource, Row

_GROUP = "extensions.agents.x-k8s.io"
SANDBOXWARMPOOLS = Resource(_GROUP, "v1beta1", "sandboxwarmpools")
SANDBOXCLAIMS = Resource(_GROUP, "v1beta1", "sandboxclaims")

_POOLS, _CLAIMS = 0, 1


class Reference(msgspec.Struct, frozen=True, gc=False):
    """Names another object of the same namespace."""

    name: str | None = None


class PoolSpec(msgspec.Struct, frozen=True, gc=False):
    """What is wanted of a pool."""

    replicas: int | None = None
    sandboxTemplateRef: Reference | None = None


class PoolStatus(msgspec.Struct, frozen=True, gc=False):
    """What there is of a pool."""

    readyReplicas: int | None = None


class SandboxWarmPool(msgspec.Struct, frozen=True, gc=False):
    """What is read of a SandboxWarmPool."""

    spec: PoolSpec | None = None
    status: PoolStatus | None = None


class Condition(msgspec.Struct, frozen=True, gc=False):
    """One aspect of what has become of a claim."""

    type: str | None = None
    status: str | None = None
    reason: str | None = None


class ClaimMetadata(msgspec.Struct, frozen=True, gc=False):
    """What is read of a claim's metadata."""

    deletionTimestamp: str | None = None


class ClaimSpec(msgspec.Struct, frozen=True, gc=False):
    """What a claim asks for."""

    warmPoolRef: Reference | None = None


class ClaimStatus(msgspec.Struct, frozen=True, gc=False):
    """What a claim has got."""

    sandbox: Reference | None = None
    conditions: list[Condition] | None = None


class SandboxClaim(msgspec.Struct, frozen=True, gc=False):
    """What is read of a SandboxClaim."""

    metadata: ClaimMetadata | None = None
    spec: ClaimSpec | None = None
    status: ClaimStatus | None = None


class _Place(NamedTuple):
    """Where a claim counts."""

    #: (namespace, name) of a pool, whether there is one or not
    pool: Key
    #: a sandbox is its own; else it waits for one
    bound: bool


class WarmPoolMapper:
    """The rows of SandboxWarmPools; see `mapping.Mapper`.

    With `claims` False, SandboxClaims are not read, for where that right is not given: nothing is then known to run or
    to wait."""

    def __init__(self, cluster_id: str, *, claims: bool = True) -> None:
        pools = Watched(SANDBOXWARMPOOLS, Decoder(SandboxWarmPool))
        self.watched: tuple[Watched, ...] = (
            (pools, Watched(SANDBOXCLAIMS, Decoder(SandboxClaim))) if claims else (pools,)
        )
        self._cluster_id = cluster_id
        self._pools: dict[Key, SandboxWarmPool] = {}
        #: of the claims that count
        self._places: dict[Key, _Place] = {}
        #: how many claims count in a place, where any do; also for pools that are not there, or not yet
        self._counts: dict[_Place, int] = {}

    def take(self, index: int, key: Key, object: SandboxWarmPool | SandboxClaim | None) -> Sequence[Key]:
        """A pool or a claim is now this, or is gone. Returns the pools whose row may have changed: for a claim, the one
        that it counted for and the one that it counts for now."""
        if index == _POOLS:
            assert not isinstance(object, SandboxClaim)
            return self._take_pool(key, object)
        assert not isinstance(object, SandboxWarmPool)
        return self._take_claim(key, object)

    def rows(self, owner: Key) -> Sequence[Row]:
        """The one row of a pool."""
        pool = self._pools.get(owner)
        if pool is None:
            return ()
        namespace, name = owner
        desired = reach(pool, "spec", "replicas")
        return (
            Row(
                Capacity(
                    self._cluster_id,
                    namespace,
                    reach(pool, "spec", "sandboxTemplateRef", "name") or "",  # which the agent refuses
                    name,
                    idle=reach(pool, "status", "readyReplicas") or 0,
                    running=self._counts.get(_Place(owner, True), 0),
                    pending=self._counts.get(_Place(owner, False), 0),
                    desired=1 if desired is None else desired,  # so the schema
                )
            ),
        )

    def _take_pool(self, key: Key, pool: SandboxWarmPool | None) -> Sequence[Key]:
        if pool is None:
            return (key,) if self._pools.pop(key, None) is not None else ()
        self._pools[key] = pool
        return (key,)

    def _take_claim(self, key: Key, claim: SandboxClaim | None) -> Sequence[Key]:
        before = self._places.pop(key, None)
        after = None if claim is None else _place(key[0], claim)
        if after is not None:
            self._places[key] = after
        if after == before:
            return ()
        changed = []
        for place, step in ((before, -1), (after, 1)):
            if place is not None:
                count = self._counts.get(place, 0) + step
                if count:
                    self._counts[place] = count
                else:
                    del self._counts[place]
                if place.pool in self._pools and place.pool not in changed:
                    changed.append(place.pool)
        return changed


#: Reasons for which a claim is not Ready and never will be. Those that the claim's controller lets pass are not among
#: them: a missing pool or template, a sandbox that is not ready yet.
_EXPIRED = frozenset({"ClaimExpired", "SandboxExpired"})
_REFUSED = frozenset({"InvalidMetadata", "EnvVarsInjectionRejected", "VolumeClaimTemplatesError"})


def _place(namespace: str, claim: SandboxClaim) -> _Place | None:
    """Where a claim counts, if it does.

    It is bound while its status names its sandbox, and else waits for one, until it has ended. It has ended

    - when it is being deleted: its controller does nothing for it any more, and nobody works in its sandbox, which goes
      with it (with the policy DeleteForeground the claim stays until then);
    - when it has expired, by its own shutdownTime or its sandbox's: with the policy Retain the claim stays, its sandbox
      is removed, and the name of that may stand there for a while;
    - when it is Finished: the sandbox's pod has succeeded or failed, and will not start again. The claim stays for its
      ttlSecondsAfterFinished, or for ever.

    One that its controller refuses, because it asks for what the template forbids, waits for nothing either, unless it
    has a sandbox from before."""
    pool = reach(claim, "spec", "warmPoolRef", "name")
    sandbox = reach(claim, "status", "sandbox", "name")
    if not pool or isinstance(pool, Misfit) or isinstance(sandbox, Misfit):
        return None
    if reach(claim, "metadata", "deletionTimestamp") is not None:
        return None
    ends = _EXPIRED if sandbox else _EXPIRED | _REFUSED
    conditions = reach(claim, "status", "conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        if isinstance(condition, Misfit):
            continue
        if condition.type == "Finished" and condition.status == "True":
            return None
        if condition.type == "Ready" and condition.status == "False" and condition.reason in ends:
            return None
    return _Place((namespace, pool), bool(sandbox))
