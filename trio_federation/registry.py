"""One cluster's view of the federation: the newest fresh record of every member, and the questions a router asks of it.
Pure apart from a lock: no I/O and no tasks; time comes from the clock it was given. Which of two samples is newer, and
what runs out when, is `samples.py`; where a create should go, less what was placed already, is `router.py`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop
from typing import NamedTuple

from trio_federation.capacity import Capacity, Change, Fault, Identity, Withdrawal, change_fault, fault, same_value
from trio_federation.clock import Clock, HasCurrentTime, as_clock
from trio_federation.samples import SampleTable

# A query frees at most so many expired records on its way, so that its own cost stays that of its env's members. Every
# record is pushed once, and every call frees more than one, so nothing piles up.
_FREED_PER_QUERY = 8
# The same for what has no hurry: under half a millisecond.
FREED_PER_STEP = 128


class ForeignMember(NamedTuple):
    """The pool of another cluster that was found best for a create."""

    cluster_id: str
    member_pool: str
    #: sandboxes ready there; 0 when it was chosen because it can grow
    idle: int

    @property
    def target(self) -> str:
        """What a create is pinned to: `<cluster>::<pool>`."""
        return f"{self.cluster_id}::{self.member_pool}"


class RegistryStatistics(NamedTuple):
    """What a registry holds and has refused, at one moment."""

    #: fresh records that queries can see
    visible: int
    #: fresh records, shadowed aggregate rows included
    records: int
    #: withdrawn identities still remembered
    tombstones: int
    #: clusters with a known current instance
    instances: int
    #: records refused since the start, by reason (see `capacity.fault`)
    refused: dict[str, int]


class RegistryHeld(NamedTuple):
    """How much memory is in use, counted without looking at what it is used for."""

    #: records, those included that are shadowed, or have run out and are not freed yet
    records: int
    #: withdrawn identities still remembered
    tombstones: int
    #: clusters with a known current instance
    instances: int


class _Segment:
    """What one cluster says of one env."""

    __slots__ = ("aggregates", "members")

    def __init__(self) -> None:
        #: by member_pool, where its record stands in the env's rows
        self.members: dict[str, int] = {}
        #: by scaling_group
        self.aggregates: dict[str, Capacity] = {}


class _Env:
    """What all clusters say of one env.

    Member records stand side by side in one list, whoever's they are: a query goes through them without a detour by
    cluster, which in a large registry costs more than all the rest, as none of it is in the processor's caches."""

    __slots__ = ("aggregates", "clusters", "rows")

    def __init__(self) -> None:
        #: the member records, in no particular order
        self.rows: list[Capacity] = []
        self.clusters: dict[str, _Segment] = {}
        #: how many aggregate rows there are
        self.aggregates = 0

    def add(self, record: Capacity) -> None:
        segment = self.clusters.get(record.cluster_id)
        if segment is None:
            segment = self.clusters[record.cluster_id] = _Segment()
        if record.member_pool:
            segment.members[record.member_pool] = len(self.rows)
            self.rows.append(record)
        else:
            segment.aggregates[record.scaling_group] = record
            self.aggregates += 1

    def replace(self, record: Capacity) -> None:
        segment = self.clusters[record.cluster_id]
        if record.member_pool:
            self.rows[segment.members[record.member_pool]] = record
        else:
            segment.aggregates[record.scaling_group] = record

    def remove(self, record: Capacity) -> None:
        segment = self.clusters[record.cluster_id]
        if record.member_pool:
            gap = segment.members.pop(record.member_pool)
            last = self.rows.pop()
            if gap < len(self.rows):  # the last one fills the gap
                self.rows[gap] = last
                self.clusters[last.cluster_id].members[last.member_pool] = gap
        else:
            del segment.aggregates[record.scaling_group]
            self.aggregates -= 1
        if not segment.members and not segment.aggregates:
            del self.clusters[record.cluster_id]

    def visible(self, now: float, ttl: float) -> list[Capacity]:
        """The fresh records: of each cluster its members, or, while it has no live one, its aggregate rows."""
        found = [record for record in self.rows if now - _observed_at(record) <= ttl]
        if self.aggregates:
            with_members = {record.cluster_id for record in found}
            found += [
                record
                for cluster_id, segment in self.clusters.items()
                if cluster_id not in with_members
                for record in segment.aggregates.values()
                if now - _observed_at(record) <= ttl
            ]
        return found


class _IndexedTable(SampleTable):
    """The samples, and where the records of one env are found."""

    def __init__(self, *, ttl: float, tombstone_ttl: float, silence_limit: float) -> None:
        super().__init__(ttl=ttl, tombstone_ttl=tombstone_ttl, silence_limit=silence_limit)
        #: by (namespace, env_name)
        self.envs: dict[tuple[str, str], _Env] = {}
        #: counts the changes of what queries answer; a sample that only says again what is known is none
        self.version = 0

    def record_added(self, record: Capacity) -> None:
        self.version += 1
        self.envs.setdefault((record.namespace, record.env_name), _Env()).add(record)

    def record_replaced(self, old: Capacity, new: Capacity) -> None:
        self.version += not same_value(old, new)
        self.envs[new.namespace, new.env_name].replace(new)

    def record_removed(self, record: Capacity) -> None:
        self.version += 1
        name = (record.namespace, record.env_name)
        env = self.envs[name]
        env.remove(record)
        if not env.clusters:
            del self.envs[name]


class Registry:
    """One cluster's view of the federation (semantics.md, "Registry: one cluster's view").

    `local_cluster_id`: the cluster whose records are local, a lower-case RFC 1123 label.
    `ttl`: seconds for which a record counts after it was observed.
    `clock`: a function that returns seconds, an object with `current_time()` such as trio's MockClock, or None for
    the time since boot.
    `tombstone_ttl`, `silence_limit`: seconds, see `SampleTable`.
    Safe to call from any task and from worker threads. Raises ValueError for a bad cluster id or time."""

    def __init__(
        self,
        local_cluster_id: str,
        ttl: float = 30.0,
        clock: Clock | HasCurrentTime | None = None,
        *,
        tombstone_ttl: float = 60.0,
        silence_limit: float = 15.0,
    ) -> None:
        if (bad := fault(Capacity(local_cluster_id, "any", "any"))) is not None:
            raise ValueError(f"local {bad.detail}")
        self.local_cluster_id = local_cluster_id
        self._clock = as_clock(clock)
        self._table = _IndexedTable(ttl=ttl, tombstone_ttl=tombstone_ttl, silence_limit=silence_limit)
        self._refused: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def ttl(self) -> float:
        """Seconds for which a record counts after it was observed."""
        return self._table.ttl

    def now(self) -> float:
        """The registry's own time, in seconds: what `observed_at` is measured on."""
        return self._clock()

    def version(self) -> int:
        """A number that is another one after every change of what `snapshot` returns, ages aside. What has run out
        counts once it is freed, of which nobody else tells: `free` first."""
        with self._lock:
            return self._table.version

    def free(self, limit: int = FREED_PER_STEP) -> bool:
        """Free what has run out, looking at no more than `limit` entries, so that nobody waits for long who needs the
        registry meanwhile. Returns whether nothing is left to be freed."""
        with self._lock:
            return self._table.expire(self._clock(), limit)

    def set_clock(self, clock: Clock | HasCurrentTime | None) -> None:
        """Read time from another clock from now on. Records keep the stamps that they have."""
        with self._lock:
            self._clock = as_clock(clock)

    # Taking in.

    def upsert(self, records: Iterable[Capacity]) -> list[Fault]:
        """Take in samples. One that is older than what is known changes nothing; one that breaks a name or a range is
        refused and counted, and the rest goes on. Returns why records were refused, in their order."""
        return self.apply(records)

    def withdraw(self, identities: Iterable[Identity | Withdrawal]) -> None:
        """Remove at once, and remember for `tombstone_ttl`, so that an older copy does not bring a record back. What is
        no identity is refused and counted."""
        self.apply(item if isinstance(item, Withdrawal) else Withdrawal(item) for item in identities)

    def apply(self, changes: Iterable[Change]) -> list[Fault]:
        """Take in samples and withdrawals in one step, in their order; returns as `upsert` does."""
        faults: list[Fault] = []
        good: list[Change] = []
        for change in changes:
            if (bad := change_fault(change)) is not None:
                faults.append(bad)
            else:
                good.append(change)
        self.apply_checked(good)
        if faults:
            with self._lock:
                self._refused.update(bad.reason for bad in faults)
        return faults

    def apply_checked(self, changes: Sequence[Change]) -> None:
        """Take in changes in which `capacity.change_fault` has found, or would find, no fault: those that
        `wire.changes_of` and `LocalTruth` hand out. To check each of them again would take as long as all the rest."""
        with self._lock:
            self._table.apply(changes, self._clock())

    # Queries: each costs time in the members of its one env.

    def records(self, namespace: str, env_name: str) -> list[Capacity]:
        """Every fresh, unshadowed record of one env, local and foreign, in no particular order."""
        with self._lock:
            now = self._clock()
            self._table.expire(now, _FREED_PER_QUERY)
            env = self._table.envs.get((namespace, env_name))
            return [] if env is None else env.visible(now, self._table.ttl)

    def local_idle(self, namespace: str, env_name: str, group: str = "") -> int:
        """Sandboxes ready in this cluster, in the whole env or in one scaling group."""
        return sum(record.idle for record in self._local(namespace, env_name, group))

    def local_can_grow(self, namespace: str, env_name: str, group: str = "") -> bool:
        """Whether any member of this cluster, in the whole env or in one scaling group, can grow."""
        return any(record.can_grow for record in self._local(namespace, env_name, group))

    def best_foreign_member(self, namespace: str, env_name: str, group: str = "") -> ForeignMember | None:
        """The other cluster's pool that a create fits best, or None where none is schedulable.

        Idle beats growth; more idle, or more headroom (-1 is most), beats less; ties go to the first cluster and pool
        by name. A non-empty group matches equal groups only. Placements made meanwhile are the Router's business."""
        best: Capacity | None = None
        best_rank: tuple[float, float, str, str] | None = None
        for record in self.records(namespace, env_name):
            if record.cluster_id == self.local_cluster_id or not record.member_pool or not record.schedulable:
                continue
            if group and record.scaling_group != group:
                continue
            headroom = 0.0 if record.idle else (float("inf") if record.capacity == -1 else record.capacity)
            rank = (-record.idle, -headroom, record.cluster_id, record.member_pool)
            if best_rank is None or rank < best_rank:
                best, best_rank = record, rank
        return None if best is None else ForeignMember(best.cluster_id, best.member_pool, best.idle)

    def foreign_members(self, namespace: str, env_name: str) -> list[Capacity]:
        """Every fresh, unshadowed record that other clusters have of the env, by cluster, pool and group."""
        found = [r for r in self.records(namespace, env_name) if r.cluster_id != self.local_cluster_id]
        found.sort(key=lambda record: record.sort_key)
        return found

    def snapshot(self) -> list[Capacity]:
        """Every fresh, unshadowed record, by cluster, namespace, env, pool and group."""
        with self._lock:
            now = self._clock()
            self._table.expire(now)
            ttl = self._table.ttl
            found = [record for env in self._table.envs.values() for record in env.visible(now, ttl)]
        found.sort(key=lambda record: record.sort_key)
        return found

    def by_env(self) -> Iterator[list[Capacity]]:
        """Every fresh, unshadowed record, as one list for each env that has any, by namespace and env; a list is in no
        particular order.

        Each env is looked up when its turn comes, in one step, so that a caller may do other things between two of
        them: an env is never seen half updated, but the next one may be newer than this one. Envs that come up after
        the first step are left out, and so are those that are gone when their turn comes. No step looks at the records
        of more than one env, and the first only makes a heap of the envs' names."""
        with self._lock:
            envs = list(self._table.envs)
        # A heap gives the names in their order one by one, where sorting them all would hold up whoever waits.
        heapify(envs)
        while envs:
            if records := self.records(*heappop(envs)):
                yield records

    def held(self) -> RegistryHeld:
        """What is kept now, without looking for what has run out: the same cost whatever the size."""
        with self._lock:
            held = self._table.held()
        return RegistryHeld(held["records"], held["tombstones"], held["instances"])

    def clusters(self) -> set[str]:
        """The clusters with a known current instance, the local one among them, without looking for what has run
        out."""
        with self._lock:
            return self._table.clusters()

    def __len__(self) -> int:
        """The number of records that `snapshot` would return."""
        return self.statistics().visible

    def statistics(self) -> RegistryStatistics:
        """What is held now, after freeing what has run out."""
        with self._lock:
            now = self._clock()
            self._table.expire(now)
            held = self._table.held()
            visible = sum(len(env.visible(now, self._table.ttl)) for env in self._table.envs.values())
            return RegistryStatistics(
                visible, held["records"], held["tombstones"], held["instances"], dict(sorted(self._refused.items()))
            )

    def __repr__(self) -> str:
        return f"<Registry of {self.local_cluster_id}: {len(self)} records>"

    def _local(self, namespace: str, env_name: str, group: str) -> list[Capacity]:
        found = [r for r in self.records(namespace, env_name) if r.cluster_id == self.local_cluster_id]
        return in_group(found, group)


def in_group(records: list[Capacity], group: str) -> list[Capacity]:
    """Those of one cluster's unshadowed records of one env that a question about `group` is answered from.

    A non-empty group: its members, or its aggregate row. Group "": every member; with aggregate rows only, the
    whole-env row, or, where there is none, the group rows."""
    if group:
        return [record for record in records if record.scaling_group == group]
    whole = [record for record in records if not record.member_pool and not record.scaling_group]
    return whole or records


def _observed_at(record: Capacity) -> float:
    assert record.observed_at is not None  # the table stamps every record that it takes in
    return record.observed_at
