"""One env whose status shows the view of the fleet: what should stand there, what was written last, what the API server
has shown since, and so whether there is something to write, and whether somebody else takes away what we write. Pure:
`now` is an argument. What the view looks like is `segments.py`, whose turn it is among many envs `mirror.py`.

After each write the answer shows what our entries look like then. What is seen of the object later is held against
that: by its resourceVersion an older state is known from a newer one, and our own write from somebody else's. Entries
that were changed or removed meanwhile are a disturbance. What is seen while a write is under way waits for its answer,
which may come before or after the event that it causes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trio_federation import Capacity
from trio_federation_kubernetes.ownership import FIELD_MANAGER, Conflict, ManagedFields, Owners, suspect
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.segments import (
    Entry,
    Env,
    Member,
    Segment,
    content,
    difference,
    empty_segment,
    entries,
    has_summary,
    items_of,
    name_of,
    segments,
    told,
)

#: Seconds within which a second disturbance is one too many.
DISTURBANCE_WINDOW = 60.0
#: Seconds for which an env is left alone then, and an entry for which there was a conflict.
LEAVE_ALONE = 600.0
#: Seconds by which the end of a saturation may move before that counts as a change: it is told as a rest of time, in
#: whole seconds, and added to an age.
SAME_MOMENT = 5.0
#: manager, operation and subresource of what we apply
_US = (FIELD_MANAGER, "Apply", "status")
#: States of an object that may wait for the answer to a write; of more, the oldest are not looked at.
_MOST_HELD = 32


class Write(NamedTuple):
    """A write that is under way: the env's entries are to be these, and no others."""

    key: Key
    #: seconds on the clock
    began: float
    #: which life of the object it is for: one that was deleted may be there again
    life: int
    shown: Mapping[str, Segment]
    #: whether the summary is part of it
    summary: bool


class Plan(NamedTuple):
    """That there is something to write."""

    #: by how much what is shown differs, as `segments.difference` says; 0: in ages alone
    weight: int
    #: not before this moment, on the clock
    earliest: float


class Disturbance(NamedTuple):
    """Somebody has removed or changed entries of ours."""

    clusters: tuple[str, ...]
    #: the field manager that has most likely done so; "" where nothing tells
    party: str
    #: whether it was one too many
    stops: bool


class _State(NamedTuple):
    """Our entries in one state of the object."""

    version: int
    text: str
    #: when something was last applied as us, as the server writes it; None where nothing of it is left
    applied_at: object
    #: as `segments.told` makes them
    entries: dict[str, Entry]


class _Left(NamedTuple):
    """An entry that was left to somebody else, as there was a conflict about it."""

    owner: str
    since: float
    #: how it was seen last; None where it was not
    entry: Entry | None
    #: whether it was ours until then
    taken: bool


class MirroredEnv:
    """One env; there may be an object of it in this cluster, and records of it from others.

    `own`: the local cluster, whose entry is no concern of ours."""

    def __init__(self, key: Key, own: str) -> None:
        self.key = key
        self._own = own
        self.records: Sequence[Capacity] = ()
        #: whether a write is under way
        self.writing = False
        #: rises when the object is deleted
        self.life = 0
        self._segments: dict[str, Segment] | None = None
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of an object."""
        #: whether the object is there
        self.present = False
        #: until when it is left alone, and the field manager because of which; None: it is not
        self.stopped: tuple[float, str] | None = None
        #: tells it from another one of the same name; None where it cannot be read
        self._uid: str | None = None
        #: entries that belong to somebody else, and to whom
        self.others: dict[str, tuple[str, ...]] = {}
        #: no write before then, as the last ones have failed so often
        self.retry_at = -math.inf
        self.failures = 0
        #: the contents that were written last; as a new process finds them, those that are ours
        self._applied: dict[str, Entry] = {}
        #: those of them that this process has found, and not written
        self._found: frozenset[str] = frozenset()
        self._stamps: dict[str, float] = {}
        self._until: dict[str, dict[str, float]] = {}
        #: whether anything in the object is ours
        self._holds = False
        #: when the last write was answered, so that a slow server does not get the next one too soon; and when its ages
        #: were last known to be as young as they can be
        self._written_at = self._refreshed_at = -math.inf
        #: the states after our writes, the oldest first; older ones than the last that was seen do not matter
        self._states: list[_State] = []
        #: whether a write of ours may have been done, or be done yet, of which there was no answer
        self._unsure = False
        self._held: list[Env] = []
        self._disturbed: list[float] = []
        self._left: dict[str, _Left] = {}
        #: until when the summary is left to somebody else, and to whom
        self._no_summary = -math.inf, ""
        #: refusals of what was written, in a row, and until when nothing is shown because of them
        self.refusals = 0
        self._hidden_until = -math.inf
        #: until when the last entry of ours stays, as an empty one: the server did not let it be taken away
        self._stuck_until = -math.inf
        #: whether the object is not ours to write any more, and what was written is to be taken back
        self._leaving = False

    # --- what should be there

    def want(self, records: Sequence[Capacity]) -> bool:
        """What other clusters have of it. Returns whether that is any news."""
        if records == self.records:
            return False
        self.records = records
        self._segments = None
        return True

    def wanted(self, now: float) -> Mapping[str, Segment]:
        """What should stand in its status now."""
        found: Mapping[str, Segment] = {}
        if not (self._leaving or now < self._hidden_until or (self.stopped is not None and now < self.stopped[0])):
            if self._segments is None:
                self._segments = segments(self.records)
            found = self._segments
            if self.others or self._left:
                found = {cluster: segment for cluster, segment in found.items() if self._is_ours(cluster, now)}
        if not found and self._applied and now < self._stuck_until:
            stays = min(self._applied)
            return {stays: empty_segment(stays)}
        return found

    def _is_ours(self, cluster: str, now: float) -> bool:
        """Whether an entry of this cluster may be written."""
        left = self._left.get(cluster)
        if left is not None:
            return now >= left.since + LEAVE_ALONE
        return cluster not in self.others

    @property
    def is_refused(self) -> bool:
        """Whether there is something to show that the server does not take."""
        return self.refusals > 0 and bool(self.records)

    @property
    def leaving(self) -> bool:
        """Whether what was written is to be taken back from an object that is not seen any more, if it is there."""
        return self._leaving

    def left_to_others(self) -> dict[str, tuple[str, ...]]:
        """The entries that there would be if they were not somebody else's, with their owners."""
        if not self.others and not self._left:
            return {}
        known = {record.cluster_id for record in self.records}
        found = {cluster: owner for cluster, owner in self.others.items() if cluster in known}
        return found | {cluster: (left.owner,) for cluster, left in self._left.items() if cluster in known}

    def summary_owner(self, now: float) -> str | None:
        """Whose the summary is, where it is left to somebody else; "" where that is not known."""
        until, owner = self._no_summary
        return owner if now < until and self.records else None

    def plan(self, now: float, *, refresh_interval: float, env_interval: float, keep_until: float) -> Plan | None:
        """What there is to do; None for nothing. A plan for later may have to be made again then. `keep_until`: until
        then, entries that were found there are not taken away: what they rest on may not have come yet. A time of being
        left alone that is over ends here."""
        if not (self.present or self._leaving) or self.writing:
            return None
        if self.stopped is not None and now >= self.stopped[0]:
            self.stopped = None
            self._disturbed.clear()
        wanted = self.wanted(now)
        weight = difference(wanted, self._applied) + self._moved(wanted)
        if weight == 0 and self._holds and not wanted:
            weight = 1  # the summary alone
        if weight:
            earliest = max(self.retry_at, self._written_at + env_interval)
            return Plan(weight, earliest if self._found <= wanted.keys() else max(earliest, keep_until))
        if any(segment.observed_at != self._stamps.get(cluster, -math.inf) for cluster, segment in wanted.items()):
            return Plan(0, max(self.retry_at, self._refreshed_at + refresh_interval))
        return None

    def _moved(self, wanted: Mapping[str, Segment]) -> int:
        """For how many entries the end of a saturation has moved."""
        return sum(
            any(abs(moment - known.get(pool, moment)) > SAME_MOMENT for pool, moment in segment.saturated_until.items())
            for cluster, segment in wanted.items()
            if segment.saturated_until and (known := self._until.get(cluster)) is not None
        )

    def next_change(self, now: float) -> float:
        """When something changes about it by itself: a time of leaving alone ends. inf: never."""
        ends = [left.since + LEAVE_ALONE for left in self._left.values()]
        ends += self._hidden_until, self._stuck_until, self._no_summary[0]
        if self.stopped is not None:
            ends.append(self.stopped[0])
        return min((end for end in ends if end > now), default=math.inf)

    # --- writing

    def begin(self, now: float) -> Write:
        """The write that is due, and now under way."""
        self.writing = True
        return Write(self.key, now, self.life, self.wanted(now), now >= self._no_summary[0])

    def written(self, write: Write, answer: Env, now: float, *, acting: bool) -> list[Disturbance]:
        """It was done, and this is the object now. Returns as `observed`."""
        self.writing = False
        self.failures = 0
        self._written_at = now
        if self._leaving and write.life == self.life:
            self._forget()
        elif self._is_another(answer):
            self._unsure = True  # it was done to one that has not been seen yet
        elif write.life == self.life:
            if any(segment.observed_at > -math.inf for segment in write.shown.values()):
                self.refusals = 0
            if self._unsure:
                self._states.clear()  # what came before this one may be ours, too
                self._unsure = False
            self._applied = {cluster: segment.content for cluster, segment in write.shown.items()}
            self._found = frozenset()
            self._stamps = {cluster: segment.observed_at for cluster, segment in write.shown.items()}
            self._until = {cluster: segment.saturated_until for cluster, segment in write.shown.items()}
            self._holds = bool(write.shown)
            self._refreshed_at = write.began
            seen = entries(answer)
            self._left = {
                cluster: left._replace(entry=told(seen[cluster]) if cluster in seen else None)
                for cluster, left in self._left.items()
                if cluster not in write.shown
            }
            version, text = _version(answer)
            ours = {cluster: told(seen[cluster]) for cluster in write.shown if cluster in seen}
            self._states.append(_State(version, text, _applied_at(answer), ours))
            del self._states[:-_MOST_HELD]  # while nothing is seen of the object but our answers
            self._note_others(answer, seen.keys(), ours)
        return self._release(now, acting=acting)

    def failed(self, write: Write, now: float, *, unsure: bool, acting: bool) -> list[Disturbance]:
        """It was not done, or (`unsure`) nobody knows. Returns as `observed`."""
        self.writing = False
        self.failures += 1
        if write.life == self.life:
            self._written_at = now
            self._unsure = self._unsure or unsure
        return self._release(now, acting=acting)

    def conflicted(self, write: Write, conflicts: Sequence[Conflict], now: float) -> None:
        """It was refused, as others own what it would change: those entries are theirs for a while."""
        if write.life != self.life:
            return
        latest = self._states[-1].entries if self._states else {}
        found = False
        for conflict in conflicts:
            if conflict.cluster is not None and conflict.cluster in write.shown:
                found = True
                left = self._left.get(conflict.cluster)
                if left is None or now >= left.since + LEAVE_ALONE:
                    entry = latest.pop(conflict.cluster, None)
                    self._left[conflict.cluster] = _Left(conflict.owner, now, entry, entry is not None)
            elif write.summary and conflict.field.startswith(".status.federation"):
                found = True
                self._no_summary = now + LEAVE_ALONE, conflict.owner
        if not found:  # about something, and there is no telling what
            self.stopped = now + LEAVE_ALONE, next((conflict.owner for conflict in conflicts), "")

    def refused(self, write: Write, now: float, pause: float) -> None:
        """What it would hold is refused. The next try comes after the pause; from the second refusal on, nothing is
        shown meanwhile, as what is there gets old. Where it is refused that nothing is shown, one entry stays for a
        while, and says nothing; where even that is, or what was written cannot be taken back, nothing is done."""
        if write.life != self.life:
            return
        if self._leaving:
            self.left()
        elif not write.shown and now >= self._stuck_until and self._applied:
            # Whoever owns the list has left it to us alone, and without us it would be no list.
            self._stuck_until = now + LEAVE_ALONE
        elif all(segment.observed_at == -math.inf for segment in write.shown.values()):
            self.retry_at = now + LEAVE_ALONE  # not even that
        else:
            self.refusals += 1
            if self.refusals == 1:
                self.retry_at = now + pause
            else:
                self._hidden_until = now + pause

    def left(self) -> None:
        """What was to be taken back from it does not matter any more: it is gone, or does not let go."""
        self._forget()

    # --- what is seen

    def gone(self, *, surely: bool = True) -> None:
        """The object was deleted, and another one may come. Where that is not sure, as it may only have gone out of
        sight, what was written is taken back."""
        self.life += 1
        unsure = self._unsure or self.writing  # what is on its way may be done to the other one
        leaving = not surely and (self._holds or self.writing)
        applied, written_at = self._applied, self._written_at
        self._forget()
        self._unsure = unsure
        if leaving:
            self._leaving, self._applied, self._holds, self._written_at = True, applied, True, written_at

    def observed(self, seen: Env, now: float, *, acting: bool) -> list[Disturbance]:
        """The object is, or was, this. `acting`: whether it is we who write; what others write as us, where it is not,
        is no disturbance. Returns what somebody has done to our entries."""
        if self._is_another(seen):
            self.gone()
        self.present = True
        self._leaving = False
        uid = seen.metadata.uid
        self._uid = uid if isinstance(uid, str) and uid else None
        if self.writing:
            self._held.append(seen)
            del self._held[:-_MOST_HELD]
        elif (disturbance := self._observe(seen, now, acting=acting)) is not None:
            return [disturbance]
        return []

    def _is_another(self, seen: Env) -> bool:
        """Whether it is not the object that is known: that was deleted, and nobody has said so."""
        uid = seen.metadata.uid
        return self._uid is not None and isinstance(uid, str) and uid not in ("", self._uid)

    def _release(self, now: float, *, acting: bool) -> list[Disturbance]:
        held, self._held = self._held, []
        return [found for seen in held if (found := self._observe(seen, now, acting=acting)) is not None]

    def _observe(self, seen: Env, now: float, *, acting: bool) -> Disturbance | None:
        version, text = _version(seen)
        if not (acting and self._states) or self._unsure:
            return self._adopt(seen, now)
        while len(self._states) > 1 and self._states[1].version <= version:
            del self._states[0]
        state = self._states[0]
        if version < state.version:
            return None  # from before all that we know
        found = entries(seen)
        latest = len(self._states) == 1  # else we have written since
        if text == state.text:
            if latest:
                self._note_others(seen, found.keys(), state.entries)
            return None
        now_told = {cluster: told(entry) for cluster, entry in found.items()}
        changed = [cluster for cluster, entry in state.entries.items() if now_told.get(cluster) != entry]
        applied_at = _applied_at(seen)
        as_us = applied_at is not None and applied_at != state.applied_at
        if as_us or changed:
            owned = Owners.of(seen.metadata.managed_fields)
            # Within the second of our own write, it is told by what nobody else owns, and is not ours all the same.
            as_us = as_us or any(
                _adds(state.entries[cluster], now_told[cluster])
                for cluster in changed
                if cluster in now_told and cluster in owned.ours and not owned.owners(cluster)
            )
            if as_us:
                changed += [cluster for cluster in now_told if cluster in owned.ours and cluster not in state.entries]
        disturbance = None
        if changed or self._again(now_told, now):
            disturbance = self._disturbance(seen, changed, now, as_us=as_us)
            for cluster in changed:
                if cluster in now_told:
                    state.entries[cluster] = now_told[cluster]
                else:
                    del state.entries[cluster]
                if latest:
                    self._stamps.pop(cluster, None)
                    if cluster in found:
                        self._applied[cluster] = content(found[cluster])
                    else:
                        self._applied.pop(cluster, None)
        self._states[0] = _State(version, text, applied_at, state.entries)
        if latest:
            self._holds = self._holds or as_us
            self._note_others(seen, found.keys(), state.entries)
        return disturbance

    def _disturbance(self, seen: Env, clusters: Sequence[str], now: float, *, as_us: bool) -> Disturbance | None:
        known = {record.cluster_id for record in self.records}
        lost = tuple(sorted(cluster for cluster in clusters if cluster in known))
        stopped = self.stopped is not None and now < self.stopped[0]
        if not as_us and (stopped or (clusters and not lost)):
            return None  # it is what we were about to do
        self._disturbed = [moment for moment in self._disturbed if now - moment < DISTURBANCE_WINDOW] + [now]
        party = FIELD_MANAGER if as_us else suspect(seen.metadata.managed_fields, clusters or tuple(self._left))
        stops = len(self._disturbed) >= 2
        if stops:
            self.stopped = now + LEAVE_ALONE, party
        return Disturbance(lost, party, stops)

    def _again(self, shown: Mapping[str, Entry], now: float) -> bool:
        """Whether an entry that was just taken from us was changed once more."""
        again = False
        for cluster, left in self._left.items():
            if left.entry != (entry := shown.get(cluster)):
                again = again or (left.taken and left.entry is not None and now - left.since < DISTURBANCE_WINDOW)
                self._left[cluster] = left._replace(entry=entry)
        return again

    def _adopt(self, seen: Env, now: float) -> Disturbance | None:
        """What is there is taken as it is. Where it was known already, and another agent has changed it as us, that is
        told as a disturbance that stops nothing."""
        version, text = _version(seen)
        if self._states and version < self._states[-1].version:
            return None  # from before all that we know
        found = entries(seen)
        applied_at = _applied_at(seen)
        owned = Owners.of(seen.metadata.managed_fields)
        ours = {cluster: entry for cluster, entry in found.items() if cluster in owned.ours}
        mine = {cluster: told(entry) for cluster, entry in ours.items()}
        changed = tuple(
            sorted(
                cluster
                for state in ([] if self._unsure or applied_at is None else self._states[-1:])
                if applied_at != state.applied_at
                for cluster in mine.keys() | state.entries.keys()
                if mine.get(cluster) != state.entries.get(cluster)
            )
        )
        self._applied = {cluster: content(entry) for cluster, entry in ours.items()}
        self._found = frozenset(ours)
        self._stamps, self._until = {}, {}
        self._holds = bool(ours) or (owned.anything_ours and has_summary(seen))
        if ours:
            self._refreshed_at = max(self._refreshed_at, now)
        self._disturbed.clear()
        self._states = [_State(version, text, applied_at, mine)]
        self._note_others(seen, found.keys(), mine)
        return Disturbance(changed, FIELD_MANAGER, False) if changed else None

    def _note_others(self, seen: Env, found: Iterable[str], ours: Mapping[str, Entry]) -> None:
        """Whose the entries are that are not ours."""
        foreign = [cluster for cluster in found if cluster not in ours and cluster != self._own]
        if foreign or self.others:
            owned = Owners.of(seen.metadata.managed_fields)
            self.others = {cluster: owned.owners(cluster) for cluster in foreign}


def _adds(before: Entry, after: Entry) -> bool:
    """Whether an entry holds anything that it did not: to take something away needs no ownership, to write does."""
    if after.last_snapshot_time not in (None, before.last_snapshot_time):
        return True
    held = {name_of(member): member for member in items_of(before.observed_members)}
    return any(
        getattr(member, field, None) not in (None, getattr(held.get(name_of(member)), field, None))
        for member in items_of(after.observed_members)
        for field in Member.__struct_fields__
    )


def _applied_at(seen: Env) -> object:
    """When something was last applied to the status as us, as the server writes it, in whole seconds. That others take
    some of it away does not change it. None where nothing of it is left."""
    fields = seen.metadata.managed_fields
    for each in fields if isinstance(fields, list) else ():
        if isinstance(each, ManagedFields) and (each.manager, each.operation, each.subresource) == _US:
            return each.time
    return None


def _version(seen: Env) -> tuple[int, str]:
    """The resourceVersion, as a number and as it stands. Versions of one resource are decimal numbers that grow; of a
    server where they are not, each is taken for a newer one."""
    text = seen.metadata.resourceVersion
    text = text if isinstance(text, str) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 32 else 0, text
