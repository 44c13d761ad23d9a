"""A registry that is slow and plainly right, for tests to compare the real one with. It follows semantics.md
("Capacity", "Registry", "Wire") word by word: three plain lists, all of them read from end to end for every question,
and everything that has run out is dropped before anything else happens. No heap, no index, no lock, and no line shared
with the code under test but the records themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal

#: seconds between the starts of two instances within which nobody can say which started first
TOGETHER = 5.0

#: What a change says, with its origin, which is no part of a record's equality.
Seen = tuple[Change, Origin | None]


def seen(changes: Iterable[Change]) -> list[Seen]:
    """Changes so that `==` compares their origins too."""
    return [(change, change.origin) for change in changes]


@dataclass
class Ended:
    """An identity that was withdrawn: by whom, as far as that is known, and when that was received."""

    identity: Identity
    origin: Origin | None
    at: float


@dataclass
class Life:
    """The instance that counts as current for a cluster, and the last moment at which it is known to have lived."""

    cluster_id: str
    instance: str
    started_at: float
    last_evidence: float


class NaiveRegistry:
    """The newest fresh sample of every identity, and every question that a Registry answers. Times are seconds on one
    clock; every method that needs to know the time takes it as `now`."""

    def __init__(self, local_cluster_id: str, *, ttl: float, tombstone_ttl: float, silence_limit: float) -> None:
        self.local_cluster_id = local_cluster_id
        self.ttl = ttl
        self.tombstone_ttl = tombstone_ttl
        self.silence_limit = silence_limit
        self.samples: list[Capacity] = []
        self.ended: list[Ended] = []
        self.lives: list[Life] = []
        #: whether one instance has followed on another in the changes that are taken in
        self.followed = False
        #: withdrawals of one moment by instances that were not current
        self.refused: list[Withdrawal] = []
        self.refused_at = -1.0

    # Taking in.

    def apply(self, changes: Iterable[Change], now: float) -> list[Change]:
        """Take in changes, one after the other; returns those that were news, samples with their observed_at. Where one
        instance follows on another meanwhile, withdrawals of the same moment by those who were not current are looked
        at once more."""
        self.followed = False
        if now != self.refused_at:
            self.refused.clear()
        news = self._apply(changes, now)
        if self.followed:
            again, self.refused = self.refused, []
            news += self._apply(again, now)
        self.forget(now)
        return news

    def _apply(self, changes: Iterable[Change], now: float) -> list[Change]:
        news: list[Change] = []
        for change in changes:
            self.forget(now)
            told = self._sample(change, now) if isinstance(change, Capacity) else self._withdrawal(change, now)
            if told is not None:
                news.append(told)
        return news

    def forget(self, now: float) -> None:
        """Memory of anything ends when it runs out."""
        self.samples = [sample for sample in self.samples if now - observed(sample) <= self.ttl]
        self.ended = [ended for ended in self.ended if now - ended.at <= self.tombstone_ttl]
        self.lives = [life for life in self.lives if now - life.last_evidence <= self.ttl]

    def _sample(self, record: Capacity, now: float) -> Capacity | None:
        if record.observed_at is None or record.observed_at > now:
            record = replace(record, observed_at=now)
        if record.origin is not None and not self._listens_to(record.cluster_id, record.origin, observed(record), now):
            return None
        for ended in self.ended:
            if ended.identity == record.identity and not _was_taken_after(record, ended):
                return None
        for held in self.samples:
            if held.identity == record.identity and not _is_newer(record, held):
                return None
        self.samples = [held for held in self.samples if held.identity != record.identity]
        if now - observed(record) > self.ttl:
            # It is the last word on its identity, and that has run out. It brings nothing back.
            return None
        self.ended = [ended for ended in self.ended if ended.identity != record.identity]
        self.samples.append(record)
        return record

    def _withdrawal(self, withdrawal: Withdrawal, now: float) -> Withdrawal | None:
        identity, origin = withdrawal
        known = [held.origin for held in self.samples if held.identity == identity]
        known += [ended.origin for ended in self.ended if ended.identity == identity]
        if origin is not None:
            for other in known:
                if other is not None and other.instance == origin.instance and other.seq >= origin.seq:
                    return None  # a repetition, or older than what is known
            if not self._listens_to(identity[0], origin, None, now):
                self.refused.append(withdrawal)
                self.refused_at = now
                return None
        else:
            # It ends what was known so far, and keeps that one's place in its agent's history.
            origin = known[0] if known else None
        self.samples = [held for held in self.samples if held.identity != identity]
        self.ended = [ended for ended in self.ended if ended.identity != identity]
        if self.tombstone_ttl > 0:
            self.ended.append(Ended(identity, origin, now))
        return withdrawal

    def _listens_to(self, cluster_id: str, origin: Origin, observed_at: float | None, now: float) -> bool:
        """Whether the sender is, or becomes now, the current instance of its cluster. A withdrawal has no observed_at;
        that it came is evidence of a life, but not of a later one than that of an instance which started together."""
        newcomer = Life(cluster_id, origin.instance, origin.started_at, now if observed_at is None else observed_at)
        current = next((life for life in self.lives if life.cluster_id == cluster_id), None)
        if current is not None and current.instance == newcomer.instance:
            current.started_at = min(current.started_at, newcomer.started_at)
            current.last_evidence = max(current.last_evidence, newcomer.last_evidence)
            return True
        if current is not None:
            if newcomer.started_at < current.started_at - TOGETHER:
                return False
            together = newcomer.started_at <= current.started_at + TOGETHER
            if together and (observed_at is None or observed_at < current.last_evidence):
                return False
            if together and self._has_records(current) and now - current.last_evidence <= self.silence_limit:
                return False
            self.followed = True
        self.lives = [life for life in self.lives if life.cluster_id != cluster_id]
        self.lives.append(newcomer)
        return True

    def _has_records(self, life: Life) -> bool:
        return any(
            held.cluster_id == life.cluster_id and held.origin is not None and held.origin.instance == life.instance
            for held in self.samples
        )

    # Giving out.

    def visible(self, now: float) -> list[Capacity]:
        """Every fresh record, but for aggregate rows of an env of which the same cluster has a live member."""
        fresh = [sample for sample in self.samples if now - observed(sample) <= self.ttl]
        shown = []
        for sample in fresh:
            live_members = [other for other in fresh if other.member_pool and _same_cluster_and_env(other, sample)]
            if sample.member_pool or not live_members:
                shown.append(sample)
        return sorted(shown, key=lambda r: (r.cluster_id, r.namespace, r.env_name, r.member_pool, r.scaling_group))

    def local_idle(self, namespace: str, env_name: str, group: str, now: float) -> int:
        return sum(row.idle for row in self._local(namespace, env_name, group, now))

    def local_can_grow(self, namespace: str, env_name: str, group: str, now: float) -> bool:
        return any(
            row.autoscaling_enabled and row.capacity != 0 for row in self._local(namespace, env_name, group, now)
        )

    def _local(self, namespace: str, env_name: str, group: str, now: float) -> list[Capacity]:
        rows = [
            row
            for row in self.visible(now)
            if row.cluster_id == self.local_cluster_id and (row.namespace, row.env_name) == (namespace, env_name)
        ]
        if group:
            return [row for row in rows if row.scaling_group == group]
        if any(row.member_pool for row in rows):
            return rows
        return [row for row in rows if row.scaling_group == ""] or rows

    def foreign_members(self, namespace: str, env_name: str, now: float) -> list[Capacity]:
        return [
            row
            for row in self.visible(now)
            if row.cluster_id != self.local_cluster_id and (row.namespace, row.env_name) == (namespace, env_name)
        ]

    def best_foreign_member(self, namespace: str, env_name: str, group: str, now: float) -> tuple[str, str, int] | None:
        members = [row for row in self.foreign_members(namespace, env_name, now) if row.member_pool]
        if group:
            members = [row for row in members if row.scaling_group == group]
        members.sort(key=lambda row: (row.cluster_id, row.member_pool))
        with_idle = [row for row in members if row.idle > 0]
        if with_idle:
            most = max(row.idle for row in with_idle)
            first = next(row for row in with_idle if row.idle == most)
            return (first.cluster_id, first.member_pool, first.idle)
        growing = [row for row in members if row.autoscaling_enabled and row.capacity != 0]
        if growing:
            unlimited = [row for row in growing if row.capacity == -1]
            widest = max(row.capacity for row in growing)
            first = next(row for row in unlimited or growing if row.capacity in (-1, widest))
            return (first.cluster_id, first.member_pool, 0)
        return None

    def endings(self, now: float) -> list[float]:
        """The moments, later than `now`, at which something runs out."""
        ends = [observed(sample) + self.ttl for sample in self.samples]
        ends += [ended.at + self.tombstone_ttl for ended in self.ended]
        ends += [life.last_evidence + self.ttl for life in self.lives]
        ends += [life.last_evidence + self.silence_limit for life in self.lives]
        return sorted({end for end in ends if end > now})


def observed(record: Capacity) -> float:
    """When a stamped record was observed."""
    assert record.observed_at is not None
    return record.observed_at


def _same_cluster_and_env(one: Capacity, other: Capacity) -> bool:
    return (one.cluster_id, one.namespace, one.env_name) == (other.cluster_id, other.namespace, other.env_name)


def _is_newer(record: Capacity, held: Capacity) -> bool:
    if record.origin is None or held.origin is None:
        return observed(record) >= observed(held)
    if record.origin.instance == held.origin.instance:
        return record.origin.seq > held.origin.seq
    return True  # its sender is the current instance, and the other one is not


def _was_taken_after(record: Capacity, ended: Ended) -> bool:
    if record.origin is None or ended.origin is None:
        return observed(record) >= ended.at
    if record.origin.instance == ended.origin.instance:
        return record.origin.seq > ended.origin.seq
    if abs(record.origin.started_at - ended.origin.started_at) <= TOGETHER:
        return observed(record) >= ended.at
    return record.origin.started_at > ended.origin.started_at
