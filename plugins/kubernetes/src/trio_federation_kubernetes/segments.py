"""What the view of the fleet looks like in an env's status: what the records of other clusters come to, cluster by
cluster, in the form of the CustomResourceDefinition, and by how much two such views differ. Pure: moments become the
API server's times by an offset that is handed in. Who owns what is in a status is `ownership.py`, which fields a server
knows `schema.py`, and when something is written `mirror.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from trio_federation import Capacity
from trio_federation_kubernetes.decoding import reach
from trio_federation_kubernetes.ownership import ManagedFields
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.schema import StatusFields

_API_VERSION = f"{SANDBOXENVS.group}/{SANDBOXENVS.version}"
_KIND = "SandboxEnv"

#: what a count of the CRD holds
_LARGEST_COUNT = 2**31 - 1
#: what a moment in a content is: it counts whether there is one, and not which
_SOME_MOMENT = ""
#: the last moment that RFC 3339 can write, in Unix seconds
_LATEST = 253402300799.0


class Member(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """One pool, as an item of observedMembers. None is left out."""

    name: str | None = None
    scaling_group: str | None = None
    idle_count: int | None = None
    running_count: int | None = None
    desired_replicas: int | None = None
    pending_requests: int | None = None
    autoscaling_enabled: bool | None = None
    scale_up_headroom: int | None = None
    saturated_until: str | None = None
    state: str | None = None


class GroupSums(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The sums of one scaling group, of a cluster that knows no pools."""

    name: str | None = None
    total_idle: int | None = None
    total_running: int | None = None
    total_desired: int | None = None
    total_pending: int | None = None


_ENTRY_NAMES = {
    "cluster_id": "clusterID",
    "is_local": "isLocal",
    "last_snapshot_time": "lastSnapshotTime",
    "observed_members": "observedMembers",
    "idle_replicas": "idleReplicas",
    "running_replicas": "runningReplicas",
    "desired_replicas": "desiredReplicas",
    "scaling_groups": "scalingGroups",
}


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, rename=_ENTRY_NAMES):
    """One cluster, as an item of status.clusters. What an API server sends may hold a Misfit in any place."""

    cluster_id: str | None = None
    is_local: bool | None = None
    last_snapshot_time: str | None = None
    observed_members: list[Member] | None = None
    idle_replicas: int | None = None
    running_replicas: int | None = None
    desired_replicas: int | None = None
    scaling_groups: list[GroupSums] | None = None


class Summary(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """status.federation: the view in three numbers, for kubectl's columns, which cannot count or add."""

    clusters: int | None = None
    idle_replicas: int | None = None
    last_snapshot_time: str | None = None


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """As much of an env's status as concerns the view."""

    clusters: list[Entry] | None = None
    federation: Summary | None = None


class Metadata(msgspec.Struct, frozen=True, rename={"managed_fields": "managedFields"}):
    """What is read of an env's metadata."""

    uid: str = ""
    resourceVersion: str = ""
    managed_fields: list[ManagedFields] | None = None


class Env(msgspec.Struct, frozen=True):
    """An env, as the API server shows it."""

    metadata: Metadata = Metadata()
    status: Status | None = None


class Segment(NamedTuple):
    """What is known of an env in one other cluster."""

    #: the entry, with every moment left open: two segments with equal contents differ in ages at most
    content: Entry
    #: when all of it was last known to be true: the oldest of its records, in seconds on the agent's clock
    observed_at: float
    #: until when pools cannot grow, by pool, on the same clock; those that cannot
    saturated_until: dict[str, float]


def segments(records: Iterable[Capacity]) -> dict[str, Segment]:
    """What the records of one env come to, by cluster. They are those of other clusters, with `observed_at`, in the
    order of a snapshot."""
    found: dict[str, list[Capacity]] = {}
    for record in records:
        found.setdefault(record.cluster_id, []).append(record)
    return {cluster: _segment(cluster, own) for cluster, own in found.items()}


def _segment(cluster: str, records: Sequence[Capacity]) -> Segment:
    members: list[Member] = []
    groups: list[GroupSums] = []
    whole: Capacity | None = None
    until: dict[str, float] = {}
    observed_at = math.inf
    for record in records:
        seen = record.observed_at or 0.0
        observed_at = min(observed_at, seen)
        if record.member_pool:
            members.append(_member(record))
            if record.saturated_for > 0:
                until[record.member_pool] = seen + record.saturated_for
        elif record.scaling_group:
            groups.append(GroupSums(record.scaling_group, record.idle, record.running, record.desired, record.pending))
        else:
            whole = record
    content = Entry(
        cluster_id=cluster,
        is_local=False,
        last_snapshot_time=_SOME_MOMENT,
        observed_members=members or None,
        idle_replicas=whole.idle if whole is not None else None,
        running_replicas=whole.running if whole is not None else None,
        desired_replicas=whole.desired if whole is not None else None,
        scaling_groups=groups or None,
    )
    return Segment(content, observed_at, until)


def empty_segment(cluster: str) -> Segment:
    """Nothing but that there is an entry, where the server does not let the last one be taken away."""
    return Segment(Entry(cluster_id=cluster, is_local=False), -math.inf, {})


def _member(record: Capacity) -> Member:
    return Member(
        name=record.member_pool,
        scaling_group=record.scaling_group or None,
        idle_count=record.idle,
        running_count=record.running,
        desired_replicas=record.desired,
        pending_requests=record.pending,
        autoscaling_enabled=record.autoscaling_enabled,
        scale_up_headroom=record.capacity if record.autoscaling_enabled and record.capacity >= 0 else None,
        saturated_until=_SOME_MOMENT if record.saturated_for > 0 else None,
        state=record.state or None,
    )


def idle(entry: Entry) -> int:
    """The idle sandboxes of an env in a cluster: those of its pools; of one that knows sums only, its own sum, or else
    those of its groups, as a query for the whole env is answered."""
    if entry.observed_members is not None:
        return sum(member.idle_count or 0 for member in entry.observed_members)
    if entry.idle_replicas is not None:
        return entry.idle_replicas
    return sum(group.total_idle or 0 for group in entry.scaling_groups or ())


# --- what is written


def body(key: Key, shown: Mapping[str, Segment], fields: StatusFields, offset: float, *, summary: bool) -> bytes:
    """The configuration that is applied: these clusters, and no others. `fields`: what the server takes of it; the
    rest is left out. `offset`: add it to the agent's clock to get the server's Unix time. `summary`: whether
    status.federation is part of it.

    It is JSON, and so YAML, which is what the server reads it as: not all control characters that JSON takes are good
    for that, but names and states have none. Where nothing is shown there is no status at all: an empty one would
    leave our name beside it, or become a null that is invalid."""
    namespace, name = key
    applied: dict[str, Any] = {
        "apiVersion": _API_VERSION,
        "kind": _KIND,
        "metadata": {"name": name, "namespace": namespace},
    }
    if shown:
        # Sorted, as another order of the same entries would be a change.
        applied["status"] = {"clusters": [_entry(segment, fields, offset) for _, segment in sorted(shown.items())]}
        known = any(segment.content.last_snapshot_time is not None for segment in shown.values())
        if summary and known and fields.federation:
            youngest = max(segment.observed_at for segment in shown.values())
            total = min(sum(idle(segment.content) for segment in shown.values()), _LARGEST_COUNT)
            applied["status"]["federation"] = Summary(len(shown), total, moment(youngest + offset))
    return msgspec.json.encode(applied)


def _entry(segment: Segment, fields: StatusFields, offset: float) -> Any:
    entry = segment.content
    if entry.last_snapshot_time is not None:
        entry = replace(entry, last_snapshot_time=moment(segment.observed_at + offset))
    if until := segment.saturated_until:
        members = entry.observed_members or []
        entry = replace(
            entry,
            observed_members=[
                replace(member, saturated_until=moment(until[member.name] + offset)) if member.name in until else member
                for member in members
            ],
        )
    if fields.entry >= _ALL_ENTRY_FIELDS and fields.member >= _ALL_MEMBER_FIELDS:
        return entry
    known = msgspec.to_builtins(entry)
    for member in known.get("observedMembers", ()):
        for name in member.keys() - fields.member:
            del member[name]
    return {name: value for name, value in known.items() if name in fields.entry or name == _ENTRY_NAMES["cluster_id"]}


_ALL_ENTRY_FIELDS = frozenset(Entry.__struct_encode_fields__) - {_ENTRY_NAMES["cluster_id"]}
_ALL_MEMBER_FIELDS = frozenset(Member.__struct_encode_fields__)
#: what a schema like that of config/kubernetes/crd has: everything
ALL_FIELDS = StatusFields(True, _ALL_ENTRY_FIELDS, _ALL_MEMBER_FIELDS)


def moment(unix_seconds: float) -> str:
    """A moment as RFC 3339 writes it, in whole seconds, as Kubernetes does. Never later than it was; one that no
    calendar has becomes the nearest that one does."""
    return _second(int(min(max(unix_seconds, 0.0), _LATEST)))


@lru_cache(4096)  # a fleet's ages are within minutes
def _second(unix_second: int) -> str:
    return datetime.fromtimestamp(unix_second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- what is there


def entries(env: Env) -> dict[str, Entry]:
    """What stands in status.clusters, by cluster; what cannot be read as an entry is left out."""
    found = reach(env, "status", "clusters")
    if not isinstance(found, list):
        return {}
    return {
        entry.cluster_id: entry
        for entry in found
        if isinstance(entry, Entry) and isinstance(entry.cluster_id, str) and entry.cluster_id
    }


def has_summary(env: Env) -> bool:
    """Whether there is anything in status.federation."""
    return reach(env, "status", "federation") is not None


def content(entry: Entry) -> Entry:
    """The same with every moment left open, as in `Segment.content`, and in that order."""
    members = entry.observed_members
    if isinstance(members, list):
        members = sorted(
            (
                replace(member, saturated_until=_SOME_MOMENT)
                if isinstance(member, Member) and member.saturated_until is not None
                else member
                for member in members
            ),
            key=name_of,
        )
    return replace(
        entry,
        last_snapshot_time=None if entry.last_snapshot_time is None else _SOME_MOMENT,
        observed_members=members or None,
        scaling_groups=sorted(groups, key=name_of) or None
        if isinstance(groups := entry.scaling_groups, list)
        else groups,
    )


def told(entry: Entry) -> Entry:
    """What an entry says, in a fixed order, as far as every writer of it knows the fields. Controllers that write the
    status as a type of their own lose the fields that the type has not, and often those that are 0 or false, which
    means the same as absent; they mean nothing by it."""
    members = entry.observed_members
    if isinstance(members, list):
        members = sorted((_told(member) if isinstance(member, Member) else member for member in members), key=name_of)
    return replace(
        entry,
        is_local=entry.is_local or None,
        observed_members=members or None,
        idle_replicas=None,
        running_replicas=None,
        desired_replicas=None,
        scaling_groups=None,
    )


def _told(member: Member) -> Member:
    return replace(
        member,
        scaling_group=member.scaling_group or None,
        idle_count=member.idle_count or None,
        running_count=member.running_count or None,
        desired_replicas=member.desired_replicas or None,
        pending_requests=member.pending_requests or None,
        autoscaling_enabled=member.autoscaling_enabled or None,
        state=member.state or None,
    )


def name_of(item: object) -> str:
    """The name of an item of a list, or "" where none can be read."""
    name = getattr(item, "name", None)
    return name if isinstance(name, str) else ""


# --- how much it differs


def difference(wanted: Mapping[str, Segment], shown: Mapping[str, Entry]) -> int:
    """By how many sandboxes two views differ, ages apart; 0 where they are equal. What else differs about a pool, or an
    entry that one of them lacks, counts as one. `shown`: contents, as `content` makes them."""
    total = 0
    for cluster, segment in wanted.items():
        if segment.content != (other := shown.get(cluster)):
            total += _entry_difference(segment.content, other)
    for cluster, entry in shown.items():
        if cluster not in wanted:
            total += _entry_difference(entry, None)
    return total


def _entry_difference(one: Entry, other: Entry | None) -> int:
    """At least 1, for entries that are not equal."""
    total = 1
    mine, theirs = _pools(one), _pools(other)
    for name in mine.keys() | theirs.keys():
        if (a := mine.get(name)) != (b := theirs.get(name)):
            total += 1 + sum(abs(x - y) for x, y in zip(_counts(a), _counts(b), strict=True))
    return total


def _pools(entry: Entry | None) -> dict[str, Member | GroupSums]:
    if entry is None:
        return {}
    items = (*items_of(entry.observed_members), *items_of(entry.scaling_groups))
    if not items:  # all that is known are sums of the whole env
        items = (GroupSums("", entry.idle_replicas, entry.running_replicas, entry.desired_replicas),)
    return {f"{type(item).__name__} {name_of(item)}": item for item in items if isinstance(item, Member | GroupSums)}


def items_of(value: object) -> Sequence[Any]:
    """The items of what should be a list, whatever it is."""
    return value if isinstance(value, list) else ()


def _counts(item: Member | GroupSums | None) -> tuple[int, int, int, int]:
    if isinstance(item, Member):
        counts = item.idle_count, item.running_count, item.desired_replicas, item.pending_requests
    elif isinstance(item, GroupSums):
        counts = item.total_idle, item.total_running, item.total_desired, item.total_pending
    else:
        counts = 0, 0, 0, 0
    first, second, third, fourth = (count if isinstance(count, int) else 0 for count in counts)
    return first, second, third, fourth
