"""What this cluster's own sources say: the truth that an agent reports. Keeps every source's records apart, stamps them
with the agent's instance and the next sequence number, and tells what has changed, what is gone and what was refused.
Pure: no I/O and no tasks; when to ask a source and when to tell a hub is decided in `agent.py` and `reporter.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from trio_federation.capacity import Capacity, Change, Fault, Identity, Origin, Withdrawal, fault

#: Two moments until which a member is saturated are the same moment when they differ by less (seconds): sources tell it
#: as a rest of time, which they measure anew with every report.
_SAME_MOMENT = 1.0


@dataclass(slots=True)
class Update:
    """What one step of one source came to."""

    #: every sample and withdrawal of the step, stamped: what the agent's own registry takes in
    samples: list[Change] = field(default_factory=list)
    #: those of them that say something new, which hubs are told at once; the others go out with the next resync
    news: list[Change] = field(default_factory=list)
    #: records that were refused
    refused: list[Fault] = field(default_factory=list)


class LocalTruth:
    """Every record of this cluster, by source.

    `instance`: this process's random id, lower-case hexadecimal. `started_at`: seconds on the agent's clock.
    `ttl`: a record that no source has vouched for in so many seconds is not reported any more.
    `remember`: seconds for which a withdrawal is repeated to hubs that may have missed it: one hub TTL."""

    def __init__(
        self, cluster_id: str, *, instance: str, started_at: float, ttl: float = 30.0, remember: float = 60.0
    ) -> None:
        self.cluster_id = cluster_id
        self.instance = instance
        self.started_at = started_at
        self.ttl = ttl
        self.remember = remember
        self._seq = 0
        self._records: dict[str, dict[Identity, Capacity]] = {}
        self._owners: dict[Identity, str] = {}
        self._gone: dict[Identity, tuple[Withdrawal, float]] = {}

    def collected(self, source: str, records: Iterable[Capacity], observed_at: float, now: float) -> Update:
        """A source has told its whole truth, which was true at `observed_at`: what it no longer has is withdrawn."""
        update = Update()
        origin = self._next()
        held = self._records.setdefault(source, {})
        seen: set[Identity] = set()
        for record in records:
            taken = self._take(source, record, observed_at, now, origin, seen, update)
            if taken is not None:
                seen.add(taken)
        for identity in [identity for identity in held if identity not in seen]:
            self._drop(source, identity, origin, now, update)
        return update

    def pushed(self, source: str, changes: Sequence[Change], now: float) -> Update:
        """A source has told what has changed, and nothing of the rest."""
        update = Update()
        origin = self._next()
        for change in changes:
            if isinstance(change, Withdrawal):
                if self._owners.get(change.identity) == source:
                    self._drop(source, change.identity, origin, now, update)
            elif isinstance(change, Capacity):
                self._take(source, change, now, now, origin, set(), update)
            else:
                update.refused.append(Fault("type", f"{type(change).__name__} is neither a Capacity nor a Withdrawal"))
        return update

    def everything(self, now: float) -> list[Change]:
        """All that a hub has to know: every record that still counts, and every withdrawal that it may have missed."""
        self._gone = {identity: kept for identity, kept in self._gone.items() if kept[1] >= now}
        changes: list[Change] = [withdrawal for withdrawal, _ in self._gone.values()]
        changes += [
            record
            for records in self._records.values()
            for record in records.values()
            if record.observed_at is not None and now - record.observed_at <= self.ttl
        ]
        return changes

    def withdrawn(self, now: float) -> list[Change]:
        """The end: every record is withdrawn, for good. What was withdrawn before is said once more."""
        update = Update()
        origin = self._next()
        for source, records in self._records.items():
            for identity in list(records):
                self._drop(source, identity, origin, now, update)
        return [withdrawal for withdrawal, until in self._gone.values() if until >= now]

    def __len__(self) -> int:
        return len(self._owners)

    def _next(self) -> Origin:
        self._seq += 1
        return Origin(self.instance, self._seq, self.started_at)

    def _take(
        self,
        source: str,
        record: Capacity,
        observed_at: float,
        now: float,
        origin: Origin,
        seen: set[Identity],
        update: Update,
    ) -> Identity | None:
        bad = self._fault(source, record, seen)
        if bad is not None:
            update.refused.append(bad)
            return None
        stamp = min(record.observed_at if record.observed_at is not None else observed_at, now)
        record = replace(record, observed_at=stamp, origin=origin)
        identity = record.identity
        known = self._records.setdefault(source, {}).get(identity)
        self._records[source][identity] = record
        self._owners[identity] = source
        self._gone.pop(identity, None)
        update.samples.append(record)
        if known is None or not same_value(known, record):
            update.news.append(record)
        return identity

    def _fault(self, source: str, record: object, seen: set[Identity]) -> Fault | None:
        if not isinstance(record, Capacity):
            return Fault("type", f"{type(record).__name__} is not a Capacity")
        if (bad := fault(record)) is not None:
            return bad
        if record.cluster_id != self.cluster_id:
            return Fault("foreign", f"cluster_id {record.cluster_id!r} is not the agent's own, {self.cluster_id!r}")
        name = "/".join(record.identity[1:])
        if record.identity in seen:
            return Fault("duplicate", f"{name} stands there twice")
        if (owner := self._owners.get(record.identity, source)) != source:
            return Fault("duplicate", f"{name} is reported by {owner} already")
        return None

    def _drop(self, source: str, identity: Identity, origin: Origin, now: float, update: Update) -> None:
        del self._records[source][identity]
        del self._owners[identity]
        withdrawal = Withdrawal(identity, origin)
        self._gone[identity] = (withdrawal, now + self.remember)
        update.samples.append(withdrawal)
        update.news.append(withdrawal)


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
        and (one.saturated_for > 0) == (other.saturated_for > 0)
        and (one.saturated_for == 0 or abs(_saturated_until(one) - _saturated_until(other)) < _SAME_MOMENT)
    )


def _saturated_until(record: Capacity) -> float:
    return (record.observed_at or 0.0) + record.saturated_for
