"""What a SandboxEnv comes to: which fields of it are read, and the rows that they make, for its members in this cluster
or, where it has observed none, for its scaling groups and the whole. Pure, and without a clock: a moment until which a
pool is saturated stays a moment.

A value that does not fit (`Misfit`) goes into the record as it is, so that the agent's own check drops that record,
counts it and tells of it. Where a whole part of an object cannot be read, a record that stands for the part is spoilt
in the same way. Values that have no meaning beside others, such as the headroom of a pool that does not autoscale, are
not looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, cast

import msgspec

from trio_federation import Capacity
from trio_federation_kubernetes.decoding import Decoder, Misfit, reach
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.resources import Key, Resource, Row

SANDBOXENVS = Resource("agents.navix.sh", "v1alpha1", "sandboxenvs")

#: an RFC 3339 time; one without an offset from UTC does not fit
Time = Annotated[datetime, msgspec.Meta(tz=True)]


# No cycle can lead through any of these, and while ten thousands of them are made, looking for one takes as long as the
# rest: hence `gc=False`.


class MemberConfig(msgspec.Struct, frozen=True, gc=False):
    """How a member is to be: spec.clusters[].members[].config."""

    scalingGroup: str | None = None


class Member(msgspec.Struct, frozen=True, gc=False):
    """A member as it is to be: spec.clusters[].members[]."""

    name: str | None = None
    config: MemberConfig | None = None
    #: where older objects have it
    scalingGroup: str | None = None


class Cluster(msgspec.Struct, frozen=True, gc=False):
    """What one cluster is to have: spec.clusters[]."""

    clusterID: str | None = None
    members: list[Member] | None = None


class Spec(msgspec.Struct, frozen=True, gc=False):
    """What is wanted."""

    clusters: list[Cluster] | None = None


class ObservedMember(msgspec.Struct, frozen=True, gc=False):
    """A member as it is: status.clusters[].observedMembers[]."""

    name: str | None = None
    idleCount: int | None = None
    runningCount: int | None = None
    desiredReplicas: int | None = None
    pendingRequests: int | None = None
    scalingGroup: str | None = None
    autoscalingEnabled: bool | None = None
    scaleUpHeadroom: int | None = None
    saturatedUntil: Time | None = None
    state: str | None = None


class ObservedCluster(msgspec.Struct, frozen=True, gc=False):
    """What one cluster has: status.clusters[]."""

    isLocal: bool | None = None
    observedMembers: list[ObservedMember] | None = None


class ScalingGroup(msgspec.Struct, frozen=True, gc=False):
    """The sums over one group: status.scalingGroups[]."""

    name: str | None = None
    totalIdle: int | None = None
    totalRunning: int | None = None
    totalDesired: int | None = None
    totalPending: int | None = None


class Status(msgspec.Struct, frozen=True, gc=False):
    """What there is."""

    clusters: list[ObservedCluster] | None = None
    scalingGroups: list[ScalingGroup] | None = None
    idleReplicas: int | None = None
    runningReplicas: int | None = None
    desiredReplicas: int | None = None


class SandboxEnv(msgspec.Struct, frozen=True, gc=False):
    """What is read of a SandboxEnv."""

    spec: Spec | None = None
    status: Status | None = None


class SandboxEnvMapper:
    """The rows of SandboxEnvs; see `mapping.Mapper`."""

    def __init__(self, cluster_id: str) -> None:
        self.watched: tuple[Watched, ...] = (Watched(SANDBOXENVS, Decoder(SandboxEnv)),)
        self._cluster_id = cluster_id
        # Not the objects: their lists of other clusters' members would weigh more than our rows.
        self._rows: dict[Key, Sequence[Row]] = {}

    def take(self, index: int, key: Key, object: SandboxEnv | None) -> Sequence[Key]:
        """A SandboxEnv is now this, or is gone. It owns its rows, so its own key is what may have changed."""
        if object is None:
            return (key,) if self._rows.pop(key, None) is not None else ()
        self._rows[key] = tuple(_rows(self._cluster_id, key, object))
        return (key,)

    def rows(self, owner: Key) -> Sequence[Row]:
        """The rows of one SandboxEnv, in the order of its status."""
        return self._rows.get(owner, ())


#: what an owner says of a member that is not there, or not as it should be: nothing can be had from it
_OUT_OF_ORDER = frozenset({"Missing", "Inconsistent"})


def _rows(cluster_id: str, key: Key, env: SandboxEnv) -> Iterator[Row]:
    status = Status() if env.status is None else env.status
    if isinstance(status, Misfit):
        yield _spoilt(cluster_id, key, "status", status)
        return
    wanted: _Groups | None = None
    known = False  # whether members have been observed, be it that they cannot be read
    for cluster in _elements(status.clusters):
        local = reach(cluster, "isLocal")
        if isinstance(local, Misfit):
            # Where not even the list can be read, nobody knows whether there are members. No sums in their stead: they
            # would show room by a status that makes no sense.
            known = known or isinstance(status.clusters, Misfit)
            yield _spoilt(cluster_id, key, "status.clusters", local)
        elif local:
            # Several segments may say that they are local. The members of all of them are reported; a name that comes
            # twice is one record twice, of which only one can count.
            for member in _elements(cluster.observedMembers):
                known = True
                if isinstance(member, Misfit):
                    yield _spoilt(cluster_id, key, "status.clusters[].observedMembers", member)
                    continue
                if not member.scalingGroup and wanted is None:
                    wanted = _Groups(cluster_id, env)
                yield _member(cluster_id, key, member, wanted)
    if not known:
        yield from _sums(cluster_id, key, status)


def _member(cluster_id: str, key: Key, member: ObservedMember, wanted: _Groups | None) -> Row:
    if not member.name:  # "" would make it an aggregate row
        return _spoilt(cluster_id, key, "status.clusters[].observedMembers[].name", Misfit("which is missing"))
    idle = member.idleCount or 0
    autoscaling = False if member.autoscalingEnabled is None else member.autoscalingEnabled
    headroom = 0
    if isinstance(member.state, str) and member.state in _OUT_OF_ORDER:
        idle, autoscaling = 0, False
    if autoscaling:
        headroom = -1 if member.scaleUpHeadroom is None else member.scaleUpHeadroom
    group = member.scalingGroup or (wanted.of(member.name) if wanted is not None else "")
    until: object = member.saturatedUntil
    return Row(
        Capacity(
            cluster_id,
            key[0],
            key[1],
            _shared(member.name),
            _shared(group),
            idle=idle,
            running=member.runningCount or 0,
            pending=member.pendingRequests or 0,
            desired=member.desiredReplicas or 0,
            autoscaling_enabled=autoscaling,
            capacity=headroom,
            saturated_for=cast(Any, until) if isinstance(until, Misfit) else 0.0,
            state=_state(member.state),
        ),
        until.timestamp() if isinstance(until, datetime) else None,
    )


class _Groups:
    """The groups that a spec puts this cluster's members in."""

    def __init__(self, cluster_id: str, env: SandboxEnv) -> None:
        self._named: dict[str, str] = {}
        #: in which group a member is that is not named: none, or, where a part cannot be read that might name it, that
        self._else: str = ""
        for cluster in _elements(reach(env, "spec", "clusters")):
            whose = reach(cluster, "clusterID")
            if isinstance(whose, Misfit):
                self._else = cast(str, whose)
            elif whose == cluster_id:
                for member in _elements(reach(cluster, "members")):
                    self._add(member)

    def of(self, name: str) -> str:
        """The group of the member of that name."""
        return self._named.get(name, self._else)

    def _add(self, member: object) -> None:
        name = reach(member, "name")
        if isinstance(name, Misfit):
            self._else = cast(str, name)
        elif name and not self._named.get(name):
            self._named[name] = reach(member, "config", "scalingGroup") or reach(member, "scalingGroup") or ""


def _sums(cluster_id: str, key: Key, status: Status) -> Iterator[Row]:
    """The rows of an env that has observed no member in this cluster. They say nothing of growth, so promise none."""
    for group in _elements(status.scalingGroups):
        if isinstance(group, Misfit):
            yield _spoilt(cluster_id, key, "status.scalingGroups", group)
        elif not group.name:  # "" would make it the row of the whole env
            yield _spoilt(cluster_id, key, "status.scalingGroups[].name", Misfit("which is missing"))
        else:
            yield Row(
                Capacity(
                    cluster_id,
                    key[0],
                    key[1],
                    "",
                    _shared(group.name),
                    idle=group.totalIdle or 0,
                    running=group.totalRunning or 0,
                    pending=group.totalPending or 0,
                    desired=group.totalDesired or 0,
                )
            )
    # The whole env's pending requests are the sum of its local members', of whom there are none here.
    yield Row(
        Capacity(
            cluster_id,
            key[0],
            key[1],
            idle=status.idleReplicas or 0,
            running=status.runningReplicas or 0,
            pending=0,
            desired=status.desiredReplicas or 0,
        )
    )


def _elements(values: Any) -> Sequence[Any]:
    """The elements of a list, each of which may be a Misfit; of a list that is one itself, that alone."""
    return (values,) if isinstance(values, Misfit) else values or ()


def _spoilt(cluster_id: str, key: Key, where: str, what: Misfit) -> Row:
    """A record that the agent drops, counts and shows, in place of what a part of an object would have said."""
    return Row(Capacity(cluster_id, key[0], key[1], cast(Any, Misfit(f"{where}: {what.text}"))))


def _state(state: str | None) -> str:
    """What the owner says, known or not, for people to read. A text that does not go on one line is left out: nothing
    depends on it, so it does not cost the pool."""
    if isinstance(state, str):
        return _shared(state) if len(state) <= 63 and state.isprintable() else ""
    return state or ""


def _shared(text: str) -> str:
    """The one copy of a text that many objects have."""
    return sys.intern(text) if type(text) is str else text
