"""What this cluster's own sources say: the truth that an agent reports. Keeps every source's records apart, stamps them
with the agent's instance and the next sequence number, and tells what has changed, what is gone and what was refused.
Pure: no I/O and no tasks; when to ask a source and when to tell a hub is decided in `agent.py` and `reporter.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from trio_federation.capacity import (
    Capacity,
    Change,
    Fault,
    Identity,
    Origin,
    Withdrawal,
    change_fault,
    fault,
    same_value,
    stamped,
)

#: What others may know, where that is decided record by record: by identity the record to be told, or None where
#: nothing is; for an identity that is missing it could not be decided. The whole is None where others may know
#: everything.
Reports: TypeAlias = Mapping[Identity, Capacity | None]


#: Records that are taken in one step: some 20 ms of work.
SLICE = 1000


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
        #: what hubs are told, which filters may have changed or withheld
        self._told: dict[Identity, Capacity] = {}
        self._gone: dict[Identity, tuple[Withdrawal, float]] = {}
        #: by source: when it last pushed a word on an identity, as long as a collect under way may not know of it
        self._pushed: dict[str, dict[Identity, float]] = {}

    def collected(
        self,
        source: str,
        records: Iterable[Capacity],
        observed_at: float,
        now: float,
        reports: Reports | None = None,
        *,
        unknown: Collection[str] = (),
    ) -> Update:
        """A source has told its whole truth, which was true at `observed_at`: what it no longer has is withdrawn, but
        for what is in `unknown` namespaces, of which it has said nothing. What it has pushed since then is newer, and
        stands. `reports`: what others may know of it."""
        whole = Update()
        for part in self.collecting(source, records, observed_at, now, reports, unknown=unknown):
            whole.samples += part.samples
            whole.news += part.news
            whole.refused += part.refused
        return whole

    def collecting(
        self,
        source: str,
        records: Iterable[Capacity],
        observed_at: float,
        now: float,
        reports: Reports | None = None,
        *,
        unknown: Collection[str] = (),
    ) -> Iterator[Update]:
        """Like `collected`, in steps of at most SLICE records each, between which others may have their turn. It is to
        be gone through to its end before anything else is told of this source."""
        update = Update()
        origin = self._next()
        self._forget_gone(now)
        held = self._records.setdefault(source, {})
        pushed = {identity: at for identity, at in self._pushed.get(source, {}).items() if at > observed_at}
        self._pushed[source] = pushed
        seen: set[Identity] = set()
        for record in records:
            if (bad := self._fault(source, record, seen, now)) is not None:
                update.refused.append(bad)
                continue
            identity = record.identity
            seen.add(identity)
            if identity not in pushed:
                self._take(source, record, observed_at, now, origin, reports, update)
            if len(update.samples) >= SLICE:
                yield update
                update = Update()
        for identity in [identity for identity in held if identity not in seen and identity not in pushed]:
            if identity[1] in unknown:
                continue
            self._drop(source, identity, origin, now, update)
            if len(update.samples) >= SLICE:
                yield update
                update = Update()
        yield update

    def pushed(
        self,
        source: str,
        changes: Sequence[Change],
        now: float,
        reports: Reports | None = None,
        *,
        observed_at: float | None = None,
    ) -> Update:
        """A source has told what has changed, and nothing of the rest. `reports`: what others may know of it."""
        update = Update()
        observed_at = now if observed_at is None else observed_at
        origin = self._next()
        self._forget_gone(now)
        # A batch has one place in the history, so of several words on one identity only the last can be said.
        last: dict[Identity, Change] = {}
        for change in changes:
            bad = withdrawal_fault(change) if type(change) is Withdrawal else self._fault(source, change, (), now)
            if bad is not None:
                update.refused.append(bad)
            else:
                last[change.identity] = change
        pushed = self._pushed.setdefault(source, {})
        self._records.setdefault(source, {})
        for identity, change in last.items():
            if isinstance(change, Capacity):
                self._take(source, change, observed_at, now, origin, reports, update)
            elif self._owners.get(identity) == source:
                self._drop(source, identity, origin, now, update)
            pushed[identity] = observed_at
        if len(pushed) > 2 * len(self._records[source]) + 64:
            # No collect takes so long, so none that is under way needs the older ones; collects may be failing, though.
            self._pushed[source] = {identity: at for identity, at in pushed.items() if at >= now - self.ttl}
        return update

    def everything(self, now: float) -> list[Change]:
        """All that a hub has to know: every record that still counts, and every withdrawal that it may have missed."""
        self._forget_gone(now)
        changes: list[Change] = [withdrawal for withdrawal, _ in self._gone.values()]
        changes += [record for record in self._told.values() if self._counts(record, now)]
        return changes

    def withdrawn(self, now: float) -> list[Change]:
        """The end: every record is withdrawn, for good. What was withdrawn before is said once more."""
        update = Update()
        origin = self._next()
        for source, records in self._records.items():
            for identity in list(records):
                self._drop(source, identity, origin, now, update)
        return [withdrawal for withdrawal, until in self._gone.values() if until >= now]

    def count(self, source: str) -> int:
        """How many records of a source are held."""
        return len(self._records.get(source, ()))

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
        reports: Reports | None,
        update: Update,
    ) -> None:
        stamp = min(record.observed_at if record.observed_at is not None else observed_at, now)
        record = stamped(record, stamp, origin)
        identity = record.identity
        owner = self._owners.get(identity, source)
        if owner != source:  # which has not vouched for it for a TTL, and so has lost it
            del self._records[owner][identity]
        self._records.setdefault(source, {})[identity] = record
        self._owners[identity] = source
        update.samples.append(record)
        if reports is None:
            self._tell(record, now, update)
        elif identity in reports:
            report = reports[identity]
            if report is None:
                self._untell(identity, origin, now, update)
            else:
                # When it was true, and where it stands in our history, is not a filter's to say.
                self._tell(stamped(report, stamp, origin), now, update)
        # else nobody knows what others may know: they keep what they were told before, until it is too old

    def _tell(self, record: Capacity, now: float, update: Update) -> None:
        identity = record.identity
        known = self._told.get(identity)
        self._told[identity] = record
        self._gone.pop(identity, None)
        if known is None or not same_value(known, record) or self._was_silent(known, now):
            update.news.append(record)

    def _untell(self, identity: Identity, origin: Origin, now: float, update: Update) -> None:
        if self._told.pop(identity, None) is not None:
            withdrawal = Withdrawal(identity, origin)
            self._gone[identity] = (withdrawal, now + self.remember)  # at the end, since `_tell` takes an entry away
            update.news.append(withdrawal)

    def _was_silent(self, known: Capacity, now: float) -> bool:
        """Whether nobody vouched for a record for so long that its source did not count as live: others may have lost
        it, or soon will, and should not have to wait for the next resync to hear of it again."""
        return known.observed_at is None or now - known.observed_at > self.ttl / 2

    def _fault(self, source: str, record: object, seen: Collection[Identity], now: float) -> Fault | None:
        if (bad := record_fault(record)) is not None:
            return bad
        assert isinstance(record, Capacity)
        if record.cluster_id != self.cluster_id:
            return Fault("foreign", f"cluster_id {record.cluster_id!r} is not the agent's own, {self.cluster_id!r}")
        identity = record.identity
        if identity in seen:
            return Fault("duplicate", f"{'/'.join(identity[1:])} stands there twice")
        owner = self._owners.get(identity, source)
        if owner != source and self._counts(self._records[owner][identity], now):
            return Fault("duplicate", f"{'/'.join(identity[1:])} is reported by {owner} already")
        return None

    def _counts(self, record: Capacity, now: float) -> bool:
        return record.observed_at is not None and now - record.observed_at <= self.ttl

    def _forget_gone(self, now: float) -> None:
        """Forget withdrawals that every hub has had time to hear of. They stand in the order of their coming."""
        while self._gone and (first := next(iter(self._gone))) and self._gone[first][1] < now:
            del self._gone[first]

    def _drop(self, source: str, identity: Identity, origin: Origin, now: float, update: Update) -> None:
        del self._records[source][identity]
        del self._owners[identity]
        update.samples.append(Withdrawal(identity, origin))
        self._untell(identity, origin, now, update)


def withdrawal_fault(withdrawal: Withdrawal) -> Fault | None:
    """Why a withdrawal that a source hands over cannot be taken in, or None where it can. Never raises."""
    try:
        return change_fault(withdrawal)
    except Exception as error:
        return Fault("identity", f"a Withdrawal that cannot be read: {type(error).__name__}")


def record_fault(record: object) -> Fault | None:
    """Why what a source hands over as a record is none that can be taken in, or None where it is. Never raises."""
    if type(record) is not Capacity:  # a subclass may be, and do, anything
        return Fault("type", f"{type(record).__name__} is not a Capacity")
    try:
        return fault(record)
    except Exception as error:  # one that was never filled in, or holds something that cannot be compared
        return Fault("type", f"a Capacity that cannot be read: {type(error).__name__}")
