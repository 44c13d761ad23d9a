"""The record that everything here is about: how much room one pool of one env in one cluster has, its names and ranges,
and how records add up. Pure: no I/O, no clock, no state beyond the names already found valid. Which of two records is
newer is decided in `samples.py`, how a record travels in `wire.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

#: Two moments until which a member is saturated are the same moment when they differ by less (seconds): sources tell it
#: as a rest of time, which they measure anew with every report.
_SAME_MOMENT = 1.0

#: (cluster_id, namespace, env_name, member_pool); an aggregate row, whose pool is "", adds its scaling_group.
Identity: TypeAlias = tuple[str, str, str, str] | tuple[str, str, str, str, str]


class Origin(NamedTuple):
    """Where a sample stands in the history of the agent that took it (semantics.md, "Wire")."""

    #: the agent process: a random hexadecimal id, new with every start
    instance: str
    #: position in that instance's history; a higher one is newer, whatever the ages say
    seq: int
    #: when the instance started, in seconds on the local clock (at receipt: now - uptime)
    started_at: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room in one member pool (or, with member_pool "", in one scaling group or a whole env) of one cluster.

    Counts are numbers of sandboxes. Nothing is checked here, so that a bad record can be named and counted where it
    enters; `fault()` checks. Fields and their meaning: semantics.md, "Capacity: one record"."""

    cluster_id: str
    namespace: str
    env_name: str
    member_pool: str = ""
    scaling_group: str = ""
    idle: int = field(default=0, kw_only=True)
    running: int = field(default=0, kw_only=True)
    pending: int = field(default=0, kw_only=True)
    desired: int = field(default=0, kw_only=True)
    autoscaling_enabled: bool = field(default=False, kw_only=True)
    #: scale-up headroom, meaningful only with autoscaling_enabled: -1 no ceiling, 0 at the ceiling, else that much room
    capacity: int = field(default=0, kw_only=True)
    #: seconds, counted from observed_at, for which scale-up was known to fail; 0 = not saturated
    saturated_for: float = field(default=0.0, kw_only=True)
    #: what the owner says of the member (Active, Saturated, Missing, Inconsistent); "" = not said. For people.
    state: str = field(default="", kw_only=True)
    #: seconds on the local clock at which the value was last known to be true; None = to be stamped by the agent
    observed_at: float | None = field(default=None, kw_only=True)
    #: no part of equality: two equal values are equal whoever took them
    origin: Origin | None = field(default=None, kw_only=True, compare=False)

    @property
    def can_grow(self) -> bool:
        """Whether its own autoscaler may add to it; a saturation that passes by itself is the router's business."""
        return self.autoscaling_enabled and self.capacity != 0

    @property
    def schedulable(self) -> bool:
        """Whether a create could be served: a sandbox is idle now, or one can be added."""
        return self.idle > 0 or (self.autoscaling_enabled and self.capacity != 0)

    @property
    def identity(self) -> Identity:
        """What makes it the same record: a member's four names, an aggregate row's with its group."""
        if self.member_pool:
            return (self.cluster_id, self.namespace, self.env_name, self.member_pool)
        return (self.cluster_id, self.namespace, self.env_name, "", self.scaling_group)

    @property
    def sort_key(self) -> tuple[str, str, str, str, str]:
        """The order of snapshots: cluster, namespace, env, pool, group."""
        return (self.cluster_id, self.namespace, self.env_name, self.member_pool, self.scaling_group)


class _Filled:
    """A Capacity that is filled, from which on it is one and cannot be changed any more.

    A frozen dataclass fills itself past its own lock, which takes 1.9 µs, against 0.3 µs for this; where tens of
    thousands of records come in, that is a fifth of all work."""

    __slots__ = (
        "autoscaling_enabled",
        "capacity",
        "cluster_id",
        "desired",
        "env_name",
        "idle",
        "member_pool",
        "namespace",
        "observed_at",
        "origin",
        "pending",
        "running",
        "saturated_for",
        "scaling_group",
        "state",
    )

    def __init__(
        self,
        cluster_id: str,
        namespace: str,
        env_name: str,
        member_pool: str,
        scaling_group: str,
        idle: int,
        running: int,
        pending: int,
        desired: int,
        autoscaling_enabled: bool,
        capacity: int,
        saturated_for: float,
        state: str,
        observed_at: float | None,
        origin: Origin | None,
    ) -> None:
        self.cluster_id = cluster_id
        self.namespace = namespace
        self.env_name = env_name
        self.member_pool = member_pool
        self.scaling_group = scaling_group
        self.idle = idle
        self.running = running
        self.pending = pending
        self.desired = desired
        self.autoscaling_enabled = autoscaling_enabled
        self.capacity = capacity
        self.saturated_for = saturated_for
        self.state = state
        self.observed_at = observed_at
        self.origin = origin
        # Python takes this for two classes with the same slots.
        self.__class__ = Capacity  # type: ignore[assignment]


#: Makes a Capacity of all its fields, in their order: the quick way for those who make many.
filled = cast(
    Callable[
        [str, str, str, str, str, int, int, int, int, bool, int, float, str, float | None, Origin | None], Capacity
    ],
    _Filled,
)


def stamped(record: Capacity, observed_at: float | None, origin: Origin | None) -> Capacity:
    """The same value, observed then, with that place in its agent's history."""
    return filled(
        record.cluster_id,
        record.namespace,
        record.env_name,
        record.member_pool,
        record.scaling_group,
        record.idle,
        record.running,
        record.pending,
        record.desired,
        record.autoscaling_enabled,
        record.capacity,
        record.saturated_for,
        record.state,
        observed_at,
        origin,
    )


class Withdrawal(NamedTuple):
    """Word that an identity is gone, with its place in the agent's history (None: from a peer that sends none)."""

    identity: Identity
    origin: Origin | None = None


#: One step in what is known: a new value of a record, or its end.
Change: TypeAlias = Capacity | Withdrawal


class Fault(NamedTuple):
    """Why a record was refused: `reason` is a field's name, fit for a metric's label; `detail` a line for people."""

    reason: str
    detail: str


_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")

#: Names of one kind that are kept; when there would be more, the keeping begins anew.
_NAMES_KEPT = 65536


class _Names(dict[str, str | None]):
    """The good names of one kind: for a name its value is the name, and for what is none None.

    Names repeat from record to record and from report to report, so each is matched once, and all records that come in
    share one string, which takes less memory and is quicker to compare. Only good names are kept, and no more than
    _NAMES_KEPT, so a peer that sends ever new, or ever longer ones, cannot make this grow."""

    def __init__(self, longest: int, is_good: Callable[[str], object]) -> None:
        super().__init__()
        self._longest = longest
        self._is_good = is_good

    def __missing__(self, name: str) -> str | None:
        if len(name) > self._longest or not self._is_good(name):
            return None
        if len(self) >= _NAMES_KEPT:
            self.clear()
        self[name] = name
        return name


def _is_good_group(name: str) -> bool:
    return name.isprintable() and "::" not in name and "//" not in name


# To be asked with a str, and nothing that only looks like one.
LABELS = _Names(63, _LABEL.fullmatch)
SUBDOMAINS = _Names(253, _SUBDOMAIN.fullmatch)
GROUPS = _Names(63, _is_good_group)
STATES = _Names(63, str.isprintable)


def _is_in(names: _Names, name: object) -> bool:
    # A subclass of str may pass, as an enum's member does, but not one that no dict finds by its text.
    return isinstance(name, str) and type(name).__hash__ is str.__hash__ and names[str.__str__(name)] is not None


def is_label(name: object) -> bool:
    """Whether `name` is a lower-case RFC 1123 label of at most 63 characters: a cluster id or a namespace."""
    return _is_in(LABELS, name)


def is_subdomain(name: object) -> bool:
    """Whether `name` is a lower-case RFC 1123 subdomain of at most 253 characters: an env or a pool."""
    return _is_in(SUBDOMAINS, name)


def is_group(name: object) -> bool:
    """Whether `name` can be a scaling group: "" or up to 63 printable characters that cannot break a target or a path.

    str.isprintable() refuses control characters, line and paragraph separators and lone surrogates."""
    return _is_in(GROUPS, name)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= INT32_MAX


def _is_seconds(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def fault(record: Capacity) -> Fault | None:
    """Why a record breaks a name or a range of semantics.md, or None where it is good. Never raises for a bad value."""
    if _is_plainly_good(record):
        return None
    bad = _name_fault(record)
    if bad is None:
        bad = _value_fault(record)
        if bad is not None:  # whose names are good, so that they tell which one it is
            bad = Fault(bad.reason, f"{bad.detail} (in {'/'.join(record.identity)})")
    return bad


def _is_plainly_good(record: Capacity) -> bool:
    """Whether a record is good, and holds only what nearly all of them do, which is quick to see: 0.7 µs instead of
    2.2. Where it is not, it may be good all the same."""
    pool = record.member_pool
    return (
        type(record.cluster_id)
        is type(record.namespace)
        is type(record.env_name)
        is type(pool)
        is type(record.scaling_group)
        is type(record.state)
        is str
        and LABELS[record.cluster_id] is not None
        and LABELS[record.namespace] is not None
        and SUBDOMAINS[record.env_name] is not None
        and (pool == "" or SUBDOMAINS[pool] is not None)
        and GROUPS[record.scaling_group] is not None
        and STATES[record.state] is not None
        and type(record.idle)
        is type(record.running)
        is type(record.pending)
        is type(record.desired)
        is type(record.capacity)
        is int
        and 0 <= record.idle <= INT32_MAX
        and 0 <= record.running <= INT32_MAX
        and 0 <= record.pending <= INT32_MAX
        and 0 <= record.desired <= INT32_MAX
        and -1 <= record.capacity <= INT32_MAX
        and type(record.autoscaling_enabled) is bool
        and type(record.saturated_for) is float
        and 0.0 <= record.saturated_for <= INT32_MAX
        and (record.observed_at is None or (type(record.observed_at) is float and math.isfinite(record.observed_at)))
        and (record.origin is None or type(record.origin) is Origin)
    )


def _name_fault(record: Capacity) -> Fault | None:
    if not is_label(record.cluster_id):
        return Fault("cluster_id", _not_a("cluster_id", record.cluster_id, "a lower-case RFC 1123 label (≤ 63)"))
    if not is_label(record.namespace):
        return Fault("namespace", _not_a("namespace", record.namespace, "a lower-case RFC 1123 label (≤ 63)"))
    if not is_subdomain(record.env_name):
        return Fault("env_name", _not_a("env_name", record.env_name, "a lower-case RFC 1123 subdomain (≤ 253)"))
    if record.member_pool != "" and not is_subdomain(record.member_pool):
        return Fault(
            "member_pool", _not_a("member_pool", record.member_pool, "a lower-case RFC 1123 subdomain (≤ 253)")
        )
    if not is_group(record.scaling_group):
        text = "at most 63 printable characters without '::' and '//'"
        return Fault("scaling_group", _not_a("scaling_group", record.scaling_group, text))
    return None


def _value_fault(record: Capacity) -> Fault | None:
    for name in ("idle", "running", "pending", "desired"):
        if not _is_count(value := getattr(record, name), 0):
            return Fault(name, _not_a(name, value, f"a whole number from 0 to {INT32_MAX}"))
    if not _is_count(record.capacity, -1):
        return Fault("capacity", _not_a("capacity", record.capacity, f"a whole number from -1 to {INT32_MAX}"))
    if not isinstance(record.autoscaling_enabled, bool):
        return Fault("autoscaling_enabled", _not_a("autoscaling_enabled", record.autoscaling_enabled, "true or false"))
    if not _is_seconds(record.saturated_for) or not 0 <= record.saturated_for <= INT32_MAX:
        return Fault("saturated_for", _not_a("saturated_for", record.saturated_for, f"seconds from 0 to {INT32_MAX}"))
    if not _is_in(STATES, record.state):
        return Fault("state", _not_a("state", record.state, "at most 63 printable characters"))
    if record.observed_at is not None and not _is_seconds(record.observed_at):
        return Fault("observed_at", _not_a("observed_at", record.observed_at, "seconds on the local clock"))
    if record.origin is not None and not isinstance(record.origin, Origin):
        return Fault("origin", _not_a("origin", record.origin, "an Origin"))
    return None


def identity_fault(identity: object) -> Fault | None:
    """Why something is not the identity of a record, or None where it is."""
    if not isinstance(identity, tuple) or len(identity) not in (4, 5):
        wanted = "(cluster_id, namespace, env_name, member_pool), or five names for an aggregate row"
        return Fault("identity", _not_a("identity", identity, wanted))
    cluster_id, namespace, env_name, member_pool = identity[:4]
    if (len(identity) == 5) != (member_pool == ""):
        wanted = "that of a member, with four names, or of an aggregate row, with no pool but a scaling_group"
        return Fault("identity", _not_a("identity", identity, wanted))
    return fault(Capacity(cluster_id, namespace, env_name, member_pool, *identity[4:]))


def change_fault(change: object) -> Fault | None:
    """Why something is not a change that can be taken in, or None where it is."""
    if isinstance(change, Capacity):
        return fault(change)
    if isinstance(change, Withdrawal):
        return identity_fault(change.identity)
    return Fault("type", f"{type(change).__name__} is neither a Capacity nor a Withdrawal")


def _not_a(name: str, value: object, wanted: str) -> str:
    try:
        shown = repr(value)
    except Exception:  # what a plugin hands over need not even be able to show itself, and Python limits long numbers
        shown = f"of type {type(value).__name__}"
    if len(shown) > 80:
        shown = shown[:79] + "…"
    return f"{name} {shown} is not {wanted}"


def rollup(records: Iterable[Capacity]) -> list[Capacity]:
    """Aggregate rows: per cluster and env one for each non-empty scaling group, and one, group "", for the whole env.

    Members shadow aggregate rows of the same cluster and env. Without members, group rows stay as they are, and the
    whole env is its own row or, where there is none, the sum of the group rows. Sums may pass int32. Sorted like
    a snapshot. Source of the rules: semantics.md, "Capacity: one record"."""
    envs: dict[tuple[str, str, str], list[Capacity]] = {}
    for record in records:
        envs.setdefault((record.cluster_id, record.namespace, record.env_name), []).append(record)
    rows: list[Capacity] = []
    for found in envs.values():
        members = [record for record in found if record.member_pool]
        whole = None if members else next((record for record in found if not record.scaling_group), None)
        parts = members or [record for record in found if record.scaling_group]
        groups: dict[str, list[Capacity]] = {}
        for record in parts:
            if record.scaling_group:
                groups.setdefault(record.scaling_group, []).append(record)
        rows.extend(_sum(group, of) for group, of in groups.items())
        rows.append(_sum("", [whole] if whole is not None else parts))
    rows.sort(key=lambda row: row.sort_key)
    return rows


def _sum(group: str, records: list[Capacity]) -> Capacity:
    first = records[0]
    growing = [record for record in records if record.autoscaling_enabled]
    return Capacity(
        first.cluster_id,
        first.namespace,
        first.env_name,
        "",
        group,
        idle=sum(record.idle for record in records),
        running=sum(record.running for record in records),
        pending=sum(record.pending for record in records),
        desired=sum(record.desired for record in records),
        autoscaling_enabled=bool(growing),
        capacity=-1 if any(record.capacity == -1 for record in growing) else sum(record.capacity for record in growing),
        saturated_for=min((record.saturated_for for record in growing), default=0.0),
        observed_at=min((record.observed_at for record in records if record.observed_at is not None), default=None),
    )


def same_value(one: Capacity, other: Capacity) -> bool:
    """Whether two samples of one identity say the same, whenever they were taken. A rest of saturation that has shrunk
    by the time that passed says the same."""
    return (
        one.idle == other.idle
        and one.running == other.running
        and one.pending == other.pending
        and one.desired == other.desired
        and one.capacity == other.capacity
        and one.autoscaling_enabled == other.autoscaling_enabled
        and one.state == other.state
        and one.scaling_group == other.scaling_group
        and (
            one.saturated_for == other.saturated_for == 0
            or (
                one.saturated_for > 0 < other.saturated_for
                and abs(_saturated_until(one) - _saturated_until(other)) < _SAME_MOMENT
            )
        )
    )


def _saturated_until(record: Capacity) -> float:
    return (record.observed_at or 0.0) + record.saturated_for
