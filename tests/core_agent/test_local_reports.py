"""What an agent tells of its own cluster where it is decided record by record what others may know: against a model of
the last decision on every identity. A hub that hears of every change, one that hears a resync now and then, one that
hears a single one and one that hears the end agree with the model; the agent's own registry has the whole truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal, same_value
from trio_federation.local import LocalTruth, Reports, Update
from trio_federation.samples import SampleTable

TTL = 30.0
REMEMBER = 60.0
INSTANCE = "ab12"
STARTED = 1.0
SOURCES = ("kubernetes", "file")

#: what can be decided on one record: others may know all of it, or part of it, or nothing; or nobody could decide
DECISIONS = ("all", "part", "nothing", "undecided")
#: what a filter may claim of a record's time and place, which is not its to say
CLAIMS = ((None, None), (-5.0, Origin("ff", 10**6, 1e9)), (1e9, Origin(INSTANCE, 10**6, STARTED)))

records = st.builds(
    lambda pool, idle, secret, observed_at: Capacity(
        "west", "ns", "env", pool, idle=idle, pending=secret, observed_at=observed_at
    ),
    st.sampled_from(("", "p1", "p2", "p3")),
    st.integers(0, 2),
    # whatever is not for everybody to know has this
    st.integers(1, 2),
    # stamped by the agent, at a moment that is yet to come, or, where it is negative, so long ago
    st.sampled_from((None, None, None, 1e9, -4.0)),
)
bad = st.sampled_from((None, Capacity("east", "ns", "env", "p1"), Capacity("west", "ns", "env", "p1", idle=-1)))
words = st.lists(
    st.tuples(records | records | records | bad, st.sampled_from(DECISIONS), st.sampled_from(CLAIMS), st.booleans()),
    max_size=5,
)
Word = tuple[Capacity | None, str, tuple[float | None, Origin | None], bool]


def is_good(record: object) -> bool:
    """Whether it is one of ours and breaks no rule; `bad` above has no other."""
    return isinstance(record, Capacity) and record.cluster_id == "west" and record.idle >= 0


class ReportsMachine(RuleBasedStateMachine):
    """Two sources that collect and push, filters that decide anew each time, and time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.truth = LocalTruth("west", instance=INSTANCE, started_at=STARTED, ttl=TTL, remember=REMEMBER)
        #: the model: who said what last, and what others may know of that
        self.said: dict[Identity, tuple[str, Capacity]] = {}
        self.public: dict[Identity, Capacity] = {}
        #: every identity that anybody may ever have heard of
        self.ever_public: set[Identity] = set()
        #: by source: when it pushed which identity, and when its last collect came in
        self.pushed_at: dict[str, dict[Identity, float]] = {source: {} for source in SOURCES}
        self.collected_at = dict.fromkeys(SOURCES, 0.0)
        self.seq = 0
        self.registry = SampleTable(ttl=TTL, tombstone_ttl=REMEMBER)
        #: hears of every change; its TTL is endless, so that only changes count
        self.hub = SampleTable(ttl=1e12, tombstone_ttl=REMEMBER)
        #: hears a resync now and then, and all changes in between, or none of them
        self.resynced = SampleTable(ttl=TTL, tombstone_ttl=REMEMBER)
        self.deaf = SampleTable(ttl=TTL, tombstone_ttl=REMEMBER)

    @rule(source=st.sampled_from(SOURCES), batch=words, took=st.sampled_from((0.0, 2.0)), filtered=st.booleans())
    def collect(self, source: str, batch: list[Word], took: float, filtered: bool) -> None:
        """The whole truth of one source; the first word on an identity counts."""
        batch = self._stamped(batch)
        began = max(self.now - took, self.collected_at[source])
        self.collected_at[source] = self.now
        stands = {identity for identity, at in self.pushed_at[source].items() if at > began}
        first: dict[Identity, Word] = {}
        for word in batch:
            if word[0] is not None and self._is_taken(source, word[0]):
                first.setdefault(word[0].identity, word)
        said: list[Any] = [word[0] for word in batch]
        update = self.truth.collected(source, said, began, self.now, self._reports(first, filtered))
        for identity, word in first.items():
            if identity not in stands:
                self._say(source, word, began, filtered)
        for identity, (owner, _) in list(self.said.items()):
            if owner == source and identity not in first and identity not in stands:
                self._unsay(identity)
        self._check(update)

    @rule(source=st.sampled_from(SOURCES), batch=words, filtered=st.booleans())
    def push(self, source: str, batch: list[Word], filtered: bool) -> None:
        """What has changed; the last word on an identity counts, be it that it is gone."""
        batch = self._stamped(batch)
        changes: list[Any] = []
        last: dict[Identity, tuple[Word, bool]] = {}
        for word in batch:
            record, _, _, gone = word
            if gone and record is not None and is_good(record):
                changes.append(Withdrawal(record.identity))
                last[record.identity] = (word, True)
            else:
                changes.append(record)
                if record is not None and self._is_taken(source, record):
                    last[record.identity] = (word, False)
        decided = {identity: word for identity, (word, gone) in last.items() if not gone}
        update = self.truth.pushed(source, changes, self.now, self._reports(decided, filtered))
        for identity, (word, gone) in last.items():
            self.pushed_at[source][identity] = self.now
            if not gone:
                self._say(source, word, self.now, filtered)
            elif self.said.get(identity, ("", None))[0] == source:
                self._unsay(identity)
        self._check(update)

    @rule(seconds=st.sampled_from((0.5, 5.0, TTL / 2, TTL, REMEMBER)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule()
    def resync(self) -> None:
        """Hubs hear everything, and then know what others may know, and nothing else."""
        for table in (self.resynced, self.deaf):
            table.apply(self.truth.everything(self.now), self.now)
            assert self._held(table) == self._fresh_public()

    # The model.

    def _stamped(self, batch: list[Word]) -> list[Word]:
        """With stamps that lie in the past, and before nothing that was said: no source takes back that it was sure."""
        found: list[Word] = []
        for record, decision, claim, gone in batch:
            if record is not None and record.observed_at == -4.0:
                known = self.said[record.identity][1].observed_at if record.identity in self.said else None
                record = replace(record, observed_at=max(self.now - 4.0, known or 0.0))
            found.append((record, decision, claim, gone))
        return found

    def _is_taken(self, source: str, record: Capacity) -> bool:
        """The first source that names an identity has it, for as long as what it said of it counts."""
        if not is_good(record):
            return False
        owner, held = self.said.get(record.identity, (source, record))
        return owner == source or not self._is_fresh(held)

    def _reports(self, decided: dict[Identity, Word], filtered: bool) -> Reports | None:
        """What the filters have decided; None where there are none. What they claim of time and place is nonsense."""
        if not filtered:
            return None
        reports: dict[Identity, Capacity | None] = {}
        for identity, (record, decision, (observed_at, origin), _) in decided.items():
            assert record is not None
            if decision == "nothing":
                reports[identity] = None
            elif decision != "undecided":
                reports[identity] = replace(_public_part(record, decision), observed_at=observed_at, origin=origin)
        return reports

    def _say(self, source: str, word: Word, observed_at: float, filtered: bool) -> None:
        record, decision, _, _ = word
        assert record is not None
        stamp = min(record.observed_at if record.observed_at is not None else observed_at, self.now)
        record = replace(record, observed_at=stamp)
        self.said[record.identity] = (source, record)
        if not filtered:
            decision = "all"
        if decision == "nothing":
            self.public.pop(record.identity, None)
        elif decision != "undecided":
            self.public[record.identity] = _public_part(record, decision)
            self.ever_public.add(record.identity)

    def _unsay(self, identity: Identity) -> None:
        del self.said[identity]
        self.public.pop(identity, None)

    def _is_fresh(self, record: Capacity) -> bool:
        return record.observed_at is not None and self.now - record.observed_at <= TTL

    def _fresh_public(self) -> dict[Identity, Capacity]:
        return {identity: record for identity, record in self.public.items() if self._is_fresh(record)}

    def _held(self, table: SampleTable) -> dict[Identity, Capacity]:
        return {record.identity: record for record in table.fresh(self.now)}

    # What must hold.

    def _check(self, update: Update) -> None:
        """One step has one new place in the history, later than all before, for what is kept and what is told alike."""
        places = {change.origin for change in (*update.samples, *update.news)}
        for place in places:
            assert place is not None
            assert place[0::2] == (INSTANCE, STARTED)
            assert place.seq > self.seq
        assert len(places) <= 1
        self.seq = max([self.seq, *(place.seq for place in places if place)])
        for change in update.news:
            self._may_be_told(change)
        assert len({change.identity for change in update.news}) == len(update.news)
        self.registry.apply(update.samples, self.now)
        self.hub.apply(update.news, self.now)
        self.resynced.apply(update.news, self.now)

    def _may_be_told(self, change: Change) -> None:
        if isinstance(change, Withdrawal):
            assert change.identity in self.ever_public
            assert change.identity not in self.public
        else:
            assert change == self.public[change.identity]

    @invariant()
    def oneself_knows_everything(self) -> None:
        """hookspecs.py, "CapacityFilter": "the agent's own registry […] always [has] the whole truth"."""
        assert self._held(self.registry) == {
            identity: record for identity, (_, record) in self.said.items() if self._is_fresh(record)
        }

    @invariant()
    def a_hub_that_hears_of_changes_has_what_others_may_know(self) -> None:
        """Every value, and no record that it may not have."""
        held = self._held(self.hub)
        fresh = self._fresh_public()
        assert set(fresh) <= set(held) <= set(self.public)
        for identity, record in fresh.items():
            assert same_value(held[identity], record)

    @invariant()
    def a_resync_tells_what_others_may_know(self) -> None:
        """Whoever hears it first, and once only; and it never says more than it may."""
        everything = self.truth.everything(self.now)
        for change in everything:
            self._may_be_told(change)
        new = SampleTable(ttl=TTL)
        new.apply(everything, self.now)
        assert self._held(new) == self._fresh_public()

    def teardown(self) -> None:
        """semantics.md, "Wire": "every record at a clean shutdown"; of what nobody was told, nobody is told the end."""
        last = self.truth.withdrawn(self.now)
        identities = {change.identity for change in last}
        assert all(isinstance(change, Withdrawal) for change in last)
        assert set(self.public) <= identities <= self.ever_public
        for table in (self.hub, self.resynced, self.deaf):
            table.apply(last, self.now)
            assert list(table.fresh(self.now)) == []


def _public_part(record: Capacity, decision: str) -> Capacity:
    return replace(record, pending=0) if decision == "part" else record


TestReports = pytest.mark.slow(ReportsMachine.TestCase)


# --- single decisions ------------------------------------------------------------------------------------------------

RECORD = Capacity("west", "ns", "env", "p1", idle=1, pending=7)


def truth() -> LocalTruth:
    """A truth that nobody has told anything yet."""
    return LocalTruth("west", instance=INSTANCE, started_at=0.0, ttl=TTL, remember=REMEMBER)


def told(made: LocalTruth, records: Sequence[Capacity], now: float, *, reports: Reports | None) -> list[Change]:
    """What hubs are told at once when a source collects these records."""
    return made.collected("file", records, now, now, reports).news


def test_what_is_released_is_told_at_once_and_what_is_withheld_withdrawn_at_once() -> None:
    """Each is a step of its own, later than the one before."""
    made = truth()
    nothing: Reports = {RECORD.identity: None}
    assert told(made, [RECORD], 1.0, reports=nothing) == []
    assert told(made, [RECORD], 2.0, reports={RECORD.identity: RECORD}) == [replace(RECORD, observed_at=2.0)]
    assert told(made, [RECORD], 3.0, reports=nothing) == [Withdrawal(RECORD.identity, Origin(INSTANCE, 3, 0.0))]
    assert told(made, [RECORD], 4.0, reports=nothing) == []
    assert told(made, [RECORD], 5.0, reports=None) == [replace(RECORD, observed_at=5.0)]


def test_a_change_of_what_is_hidden_is_no_news() -> None:
    """Steady state, as far as others can see it, costs a hub nothing but the resync."""
    made = truth()
    for number in range(10):
        record = replace(RECORD, pending=number)
        news = told(made, [record], float(number), reports={record.identity: replace(record, pending=0)})
        assert len(news) == (number == 0)
    assert made.everything(9.0) == [replace(RECORD, pending=0, observed_at=9.0)]


def test_what_could_not_be_decided_keeps_its_age() -> None:
    """Others keep what they know, and it gets no younger by being told again."""
    made = truth()
    told(made, [RECORD], 1.0, reports={RECORD.identity: RECORD})
    for now in (11.0, 21.0, 31.0):
        assert told(made, [replace(RECORD, idle=5)], now, reports={}) == []
        assert made.everything(now) == [replace(RECORD, observed_at=1.0)]
    assert told(made, [replace(RECORD, idle=5)], 31.5, reports={}) == []
    assert made.everything(31.5) == []


def test_what_could_not_be_decided_and_is_gone_is_withdrawn() -> None:
    """That it is gone is no secret, where it was told before; where it was not, it is."""
    made = truth()
    other = replace(RECORD, member_pool="p2")
    told(made, [RECORD], 1.0, reports=None)
    told(made, [RECORD, other], 2.0, reports={})
    assert told(made, [], 3.0, reports={}) == [Withdrawal(RECORD.identity, Origin(INSTANCE, 3, 0.0))]


@pytest.mark.parametrize("decision", [None, RECORD])
def test_a_pool_that_another_source_takes_over_is_reported_as_is_decided_then(decision: Capacity | None) -> None:
    """Who has it now says what is true of it; the filters say what others may know."""
    made = truth()
    made.collected("kubernetes", [RECORD], 0.0, 0.0)
    late = TTL + 1.0
    update = made.collected("file", [replace(RECORD, idle=2)], late, late, {RECORD.identity: decision})
    assert [change.idle for change in update.samples if isinstance(change, Capacity)] == [2]
    if decision is None:
        assert update.news == [Withdrawal(RECORD.identity, Origin(INSTANCE, 2, 0.0))]
        assert made.everything(late) == update.news
    else:
        assert update.news == made.everything(late) == [replace(RECORD, observed_at=late)]
