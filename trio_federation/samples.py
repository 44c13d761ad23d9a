"""Which sample of a record is the newest, and for how long it counts: origins, tombstones, instances, time to live. The
one place with these rules (semantics.md, "Registry" and "Wire"), shared by an agent's Registry and a hub's store. Pure:
`now` is an argument, nothing here is a task or takes a lock, and what is done with the records is the caller's
business.

What has run out is freed without a scan: everything that ends on its own has one entry in a calendar, a heap of the
moments at which something has to be looked at again, each with a list of what. A record that was refreshed meanwhile is
put back when its entry comes up, so a refresh itself costs nothing here, and every record is put back at most once per
time to live. The records of a report were observed at one moment, so that they share a place in the heap."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Protocol

from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal, stamped

#: Starts of two instances closer than this (seconds) cannot be told apart: uptimes are measured by different machines
#: and delayed on their way.
START_TOLERANCE = 5.0


class _Ending(Protocol):
    """Something in the calendar: `due` is when its entry is looked at, `ends_at` when it has really run out."""

    due: float

    def ends_at(self, ttl: float) -> float: ...

    def forget(self, table: SampleTable) -> None: ...


class _Slot:
    """The newest sample of one identity. `observed_at` is always a number here."""

    __slots__ = ("due", "identity", "observed_at", "record")

    def __init__(self, identity: Identity, record: Capacity, observed_at: float) -> None:
        self.identity = identity
        self.record = record
        self.observed_at = observed_at
        self.due = -math.inf

    def ends_at(self, ttl: float) -> float:
        return self.observed_at + ttl

    def forget(self, table: SampleTable) -> None:
        if table._slots.get(self.identity) is self:
            table._remove(self)


class _Tombstone:
    """What is left of a withdrawn identity, so that a slower copy cannot bring it back."""

    __slots__ = ("due", "identity", "origin", "until", "withdrawn_at")

    def __init__(self, identity: Identity, origin: Origin | None, withdrawn_at: float, until: float) -> None:
        self.identity = identity
        self.origin = origin
        self.withdrawn_at = withdrawn_at
        self.until = until
        self.due = -math.inf

    def ends_at(self, ttl: float) -> float:
        return self.until

    def forget(self, table: SampleTable) -> None:
        if table._tombstones.get(self.identity) is self:
            table._remove_tombstone(self.identity)


class _Instance:
    """The agent process that counts as current for one cluster, and the last moment at which it is known to have
    lived."""

    __slots__ = ("cluster_id", "due", "instance", "last_evidence", "started_at")

    def __init__(self, cluster_id: str, origin: Origin, evidence: float) -> None:
        self.cluster_id = cluster_id
        self.instance = origin.instance
        self.started_at = origin.started_at
        self.last_evidence = evidence
        self.due = -math.inf

    def ends_at(self, ttl: float) -> float:
        return self.last_evidence + ttl

    def forget(self, table: SampleTable) -> None:
        if table._instances.get(self.cluster_id) is self:
            del table._instances[self.cluster_id]


class SampleTable:
    """The newest fresh sample per identity.

    `ttl`: seconds for which a record counts after it was observed (an age of exactly ttl still counts).
    `tombstone_ttl`: seconds for which a withdrawn identity is remembered, one hub TTL.
    `silence_limit`: seconds after which an instance that is not heard of may be replaced by one that started together
    with it. Every method takes `now`, seconds on one clock that does not go back."""

    def __init__(self, *, ttl: float, tombstone_ttl: float = 60.0, silence_limit: float = 15.0) -> None:
        if not (0 < ttl < math.inf and 0 <= tombstone_ttl < math.inf and 0 <= silence_limit < math.inf):
            raise ValueError("ttl must be a positive number of seconds, tombstone_ttl and silence_limit not negative")
        self.ttl = ttl
        self.tombstone_ttl = tombstone_ttl
        self.silence_limit = silence_limit
        self._slots: dict[Identity, _Slot] = {}
        self._tombstones: dict[Identity, _Tombstone] = {}
        self._instances: dict[str, _Instance] = {}
        #: how many records of one cluster and instance are held; no entry for none
        self._held: dict[tuple[str, str], int] = {}
        #: the moments at which something is due, as a heap, and what is due at each of them
        self._moments: list[float] = []
        self._due: dict[float, list[_Ending]] = {}
        self._entries = 0
        #: whether in this batch one instance has taken the place of another
        self._has_followed = False
        #: withdrawals of this moment by instances that were not current; a report may come in several batches
        self._not_admitted: list[Withdrawal] = []
        self._not_admitted_at = -math.inf
        #: the last sample in this batch that was found to come from its cluster's current instance
        self._admitted: tuple[str, Origin, float] | None = None

    # What a subclass that keeps an index of its own overrides.

    def record_added(self, record: Capacity) -> None:
        """An identity that was not held has a record now."""

    def record_replaced(self, old: Capacity, new: Capacity) -> None:
        """An identity's record gave way to a newer sample."""

    def record_removed(self, record: Capacity) -> None:
        """An identity has no record any more: withdrawn, or run out."""

    def tombstone_added(self, identity: Identity) -> None:
        """It is remembered now that an identity was withdrawn."""

    def tombstone_removed(self, identity: Identity) -> None:
        """It is not remembered any more that an identity was withdrawn."""

    # Taking in.

    def apply(self, changes: Iterable[Change], now: float) -> list[Change]:
        """Take in samples and withdrawals, in this order. Returns those that were news, with observed_at filled in:
        what a hub relays. Late, repeated and outdated ones change nothing and are left out."""
        self.expire(now)
        self._admitted = None
        self._has_followed = False
        if self._not_admitted and now != self._not_admitted_at:
            self._not_admitted.clear()
        news = [
            told
            for change in changes
            if (told := self._sample(change, now) if isinstance(change, Capacity) else self._withdrawal(change, now))
        ]
        if self._has_followed and self._not_admitted:
            # A withdrawal settles nothing about who is current; a sample that came with it, and after it, has.
            again, self._not_admitted = self._not_admitted, []
            news += filter(None, [self._withdrawal(change, now) for change in again])
        return news

    def _sample(self, record: Capacity, now: float) -> Capacity | None:
        observed_at, origin = record.observed_at, record.origin
        if observed_at is None or observed_at > now:
            observed_at = now
            record = stamped(record, now, origin)
        if origin is not None:
            # The records of a report come together, and what lets one of them in lets in the next one too.
            sender = (record.cluster_id, origin, observed_at)
            if sender != self._admitted:
                if not self._admit(record.cluster_id, origin, observed_at, now):
                    return None
                self._admitted = sender
        identity = record.identity
        tombstone = self._tombstones.get(identity) if self._tombstones else None
        if tombstone is not None and now <= tombstone.until and not _outlives(origin, observed_at, tombstone):
            return None
        slot = self._slots.get(identity)
        if slot is not None and now - slot.observed_at > self.ttl:
            self._remove(slot)
            slot = None
        if slot is not None:
            known = slot.record.origin
            if origin is None or known is None:
                same_instance, newer = origin is known, observed_at >= slot.observed_at
            else:
                # Of two instances the sender is the current one here, so what the other left behind is older.
                same_instance = origin.instance == known.instance
                newer = not same_instance or origin.seq > known.seq
            if not newer:
                return None
        if now - observed_at > self.ttl:
            # Newer than what is held, and yet too old to count: nothing is known to be true of it any more.
            if slot is not None:
                self._remove(slot)
            return None
        if tombstone is not None:
            self._remove_tombstone(identity)
        if slot is None:
            slot = self._slots[identity] = _Slot(identity, record, observed_at)
            self._count(record, 1)
            self._push(slot)
            self.record_added(record)
            return record
        old, slot.record, slot.observed_at = slot.record, record, observed_at
        if not same_instance:
            self._count(old, -1)
            self._count(record, 1)
        if observed_at + self.ttl < slot.due:
            self._push(slot)
        self.record_replaced(old, record)
        return record

    def _withdrawal(self, withdrawal: Withdrawal, now: float) -> Withdrawal | None:
        identity, origin = withdrawal
        cluster_id = identity[0]
        self._admitted = None
        slot = self._slots.get(identity)
        tombstone = self._tombstones.get(identity)
        if tombstone is not None and now > tombstone.until:
            tombstone = None
        if origin is not None:
            for known in (slot.record.origin if slot else None, tombstone.origin if tombstone else None):
                if known is not None and known.instance == origin.instance and known.seq >= origin.seq:
                    # A repetition. It must come before the next question, for it is no sign of life.
                    return None
            if not self._admit(cluster_id, origin, None, now):
                self._not_admitted.append(withdrawal)
                self._not_admitted_at = now
                return None
        if slot is not None:
            self._remove(slot)
        if self.tombstone_ttl > 0:
            # Without a place in a history of its own it ends what was known so far, and keeps that place.
            kept = origin or (slot.record.origin if slot else None) or (tombstone.origin if tombstone else None)
            if identity not in self._tombstones:
                self.tombstone_added(identity)
            tombstone = self._tombstones[identity] = _Tombstone(identity, kept, now, now + self.tombstone_ttl)
            self._push(tombstone)
        return withdrawal

    def _admit(self, cluster_id: str, origin: Origin, observed_at: float | None, now: float) -> bool:
        """Whether the sender is its cluster's current instance, or becomes it now. Evidence of life is the moment of
        observation and never the moment of receipt, so that a replay does not keep a dead instance current; a
        withdrawal, which has no observed_at, is evidence when it is news."""
        evidence = now if observed_at is None else observed_at
        current = self._instances.get(cluster_id)
        if current is not None and now - current.last_evidence > self.ttl:
            current = None
        if current is not None and current.instance == origin.instance:
            # The true start is never later than the earliest estimate: delays only make a start look later.
            current.started_at = min(current.started_at, origin.started_at)
            current.last_evidence = max(current.last_evidence, evidence)
            return True
        if current is not None:
            if origin.started_at < current.started_at - START_TOLERANCE:
                return False
            if origin.started_at <= current.started_at + START_TOLERANCE and not self._may_follow(
                current, observed_at, now
            ):
                return False
            self._has_followed = True
        current = self._instances[cluster_id] = _Instance(cluster_id, origin, evidence)
        self._push(current)
        return True

    def _may_follow(self, current: _Instance, observed_at: float | None, now: float) -> bool:
        """Whether an instance that started together with the current one, so that nobody can say which is the older,
        takes its place: when the current one has withdrawn everything, or was silent, and the other is not one that was
        heard of earlier. A withdrawal has no moment, and so settles nothing."""
        if observed_at is None or observed_at < current.last_evidence:
            return False
        silent = now - current.last_evidence > self.silence_limit
        return silent or (current.cluster_id, current.instance) not in self._held

    # Giving out.

    def __len__(self) -> int:
        return len(self._slots)

    def holds(self, identity: Identity) -> bool:
        """Whether there is a record of an identity, fresh or not freed yet."""
        return identity in self._slots

    def remembers(self, identity: Identity) -> bool:
        """Whether it is remembered that an identity was withdrawn."""
        return identity in self._tombstones

    def held_records(self) -> list[Capacity]:
        """Every record, also those that have run out and are not freed yet, in one quick step."""
        return [slot.record for slot in self._slots.values()]

    def is_fresh(self, record: Capacity, now: float) -> bool:
        """Whether a record that is or was held counts now."""
        return record.observed_at is not None and now - record.observed_at <= self.ttl

    def fresh(self, now: float) -> Iterator[Capacity]:
        """Every record that counts now, in no particular order."""
        for slot in self._slots.values():
            if now - slot.observed_at <= self.ttl:
                yield slot.record

    def withdrawals(self, now: float) -> Iterator[Withdrawal]:
        """Every withdrawal that is still remembered."""
        for tombstone in self._tombstones.values():
            if now <= tombstone.until:
                yield Withdrawal(tombstone.identity, tombstone.origin)

    def expire(self, now: float, limit: int | None = None) -> bool:
        """Free what has run out; with `limit`, look at no more than that many entries, so that a caller's own cost
        stays bounded. Returns whether that is done, and nothing more has run out."""
        left = self._entries if limit is None else limit
        while left > 0 and self._moments and (due := self._moments[0]) < now:
            items = self._due[due]
            while items and left > 0:
                left -= 1
                self._entries -= 1
                self._look_at(items.pop(), due, now)
            if not items:
                del self._due[due]
                heapq.heappop(self._moments)
        self._keep_bounded()
        return not self._moments or self._moments[0] >= now

    def clusters(self) -> set[str]:
        """The clusters whose current instance is known."""
        return set(self._instances)

    def held(self) -> dict[str, int]:
        """How many things are kept, for tests and metrics: records, tombstones, instances, entries in the calendar."""
        return {
            "records": len(self._slots),
            "tombstones": len(self._tombstones),
            "instances": len(self._instances),
            "entries": self._entries,
        }

    # Inside.

    def _look_at(self, item: _Ending, due: float, now: float) -> None:
        """An entry has come up: forget what has run out, or put it back."""
        if item.due != due:
            return
        ends_at = item.ends_at(self.ttl)
        if now - item.observed_at > self.ttl if isinstance(item, _Slot) else ends_at < now:
            item.forget(self)
        else:
            self._enter(item, ends_at if ends_at > now else math.nextafter(now, math.inf))

    def _remove_tombstone(self, identity: Identity) -> None:
        del self._tombstones[identity]
        self.tombstone_removed(identity)

    def _remove(self, slot: _Slot) -> None:
        del self._slots[slot.identity]
        self._count(slot.record, -1)
        self.record_removed(slot.record)

    def _count(self, record: Capacity, step: int) -> None:
        if record.origin is not None:
            key = (record.cluster_id, record.origin.instance)
            count = self._held.get(key, 0) + step
            if count:
                self._held[key] = count
            else:
                del self._held[key]

    def _push(self, item: _Ending) -> None:
        self._enter(item, item.ends_at(self.ttl))
        self._keep_bounded()

    def _enter(self, item: _Ending, due: float) -> None:
        item.due = due
        self._entries += 1
        items = self._due.get(due)
        if items is None:
            self._due[due] = [item]
            heapq.heappush(self._moments, due)
        else:
            items.append(item)

    def _keep_bounded(self) -> None:
        """Drop entries of what is gone already, where they are the most. Rare, and its cost is spread over the entries
        that made it necessary."""
        if self._entries <= 2 * (len(self._slots) + len(self._tombstones) + len(self._instances)) + 64:
            return
        self._due = {}
        self._entries = 0
        for kept in (self._slots, self._tombstones, self._instances):
            for item in kept.values():
                self._due.setdefault(item.due, []).append(item)
                self._entries += 1
        self._moments = list(self._due)
        heapq.heapify(self._moments)


def _outlives(origin: Origin | None, observed_at: float, tombstone: _Tombstone) -> bool:
    """Whether a sample was taken after the withdrawal, and so brings the identity back."""
    known = tombstone.origin
    if origin is None or known is None:
        return observed_at >= tombstone.withdrawn_at
    if origin.instance == known.instance:
        return origin.seq > known.seq
    if abs(origin.started_at - known.started_at) <= START_TOLERANCE:
        return observed_at >= tombstone.withdrawn_at
    return origin.started_at > known.started_at
