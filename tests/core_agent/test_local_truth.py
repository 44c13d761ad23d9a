"""What a cluster's own sources say, against a model of each source's last words: whatever two sources say in whatever
order, the agent's registry, a hub that hears of every change, one that only hears the resync and one that hears the end
agree with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal, same_value
from trio_federation.local import SLICE, LocalTruth, Update
from trio_federation.samples import SampleTable

TTL = 30.0
REMEMBER = 60.0
INSTANCE = "ab12"
STARTED = 1.0

#: good and bad alike: a foreign cluster, names and ranges that break a rule, and what is no record at all
good = st.builds(
    lambda pool, group, idle, observed_at: Capacity(
        "west", "ns", "env", pool, group, idle=idle, observed_at=observed_at
    ),
    st.sampled_from(("", "p1", "p2", "p3")),
    st.sampled_from(("", "gpu")),
    st.integers(0, 3),
    st.sampled_from((None, None, None, 0.0, 1e9)),
)
bad = st.sampled_from(
    (
        Capacity("east", "ns", "env", "p1", idle=1),
        Capacity("west", "NS", "env", "p1", idle=1),
        Capacity("west", "ns", "env", "p1", idle=-1),
        Capacity("west", "ns", "env", "p2", idle=2**31),
        Capacity("west", "ns", "env", "p3", "a::b"),
        None,
        "p1",
        {"cluster_id": "west"},
    )
)
batches = st.lists(good | good | good | bad, max_size=6)
#: one word on each identity; more than one has a test of its own
pushes = st.lists(
    st.tuples(good | good | good | bad, st.booleans()),
    max_size=6,
    unique_by=lambda word: word[0].identity if isinstance(word[0], Capacity) else None,
)
sources = st.sampled_from(("kubernetes", "file"))


def is_good(record: object) -> bool:
    """Whether it is one of ours and breaks no rule; `bad` above has no other."""
    return (
        isinstance(record, Capacity)
        and record.cluster_id == "west"
        and record.namespace == "ns"
        and (0 <= record.idle < 2**31 and "::" not in record.scaling_group)
    )


class LocalTruthMachine(RuleBasedStateMachine):
    """Two sources that collect and push, and time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.truth = LocalTruth("west", instance=INSTANCE, started_at=STARTED, ttl=TTL, remember=REMEMBER)
        #: what the model holds: the owner and the last good words on every identity
        self.said: dict[Identity, tuple[str, Capacity]] = {}
        self.registry = SampleTable(ttl=TTL, tombstone_ttl=REMEMBER)
        #: when each source pushed last: a collect that began before that has a test of its own
        self.pushed_at = dict.fromkeys(("kubernetes", "file"), 0.0)
        #: a hub that hears of every change; its TTL is endless so that only changes count
        self.hub = SampleTable(ttl=1e12, tombstone_ttl=REMEMBER)
        self.seq = 0

    @rule(source=sources, batch=batches, took=st.sampled_from((0.0, 2.0)))
    def collect(self, source: str, batch: list[Capacity], took: float) -> None:
        """semantics.md, "Wire": "What is withdrawn: […] an identity that is missing from a successful collect or list,
        at once"."""
        began = max(self.now - took, self.pushed_at[source])
        refused = 0
        seen: set[Identity] = set()
        for record in batch:
            if self._is_taken(source, record) and record.identity not in seen:
                seen.add(record.identity)
                self._say(source, record, began)
            else:
                refused += 1
        gone = [identity for identity, (owner, _) in self.said.items() if owner == source and identity not in seen]
        for identity in gone:
            del self.said[identity]
        update = self.truth.collected(source, batch, began, self.now)
        self._check(update, refused, gone)

    @rule(source=sources, words=pushes)
    def push(self, source: str, words: list[tuple[Capacity, bool]]) -> None:
        """A pushed batch changes what it names, and nothing else."""
        self.pushed_at[source] = self.now
        changes: list[Change] = []
        refused = 0
        gone = []
        for record, withdrawn in words:
            if withdrawn and is_good(record):
                changes.append(Withdrawal(record.identity))
                if self.said.get(record.identity, ("", record))[0] == source:
                    gone.append(record.identity)
                    del self.said[record.identity]
                continue
            changes.append(record)
            if self._is_taken(source, record):
                self._say(source, record, self.now)
            else:
                refused += 1
        self._check(self.truth.pushed(source, changes, self.now), refused, gone)

    @rule(seconds=st.sampled_from((0.5, 5.0, TTL, REMEMBER)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def _is_taken(self, source: str, record: Capacity) -> bool:
        """The first source that names an identity has it, for as long as what it said of it counts."""
        if not is_good(record):
            return False
        owner, held = self.said.get(record.identity, (source, record))
        return owner == source or self.now - (held.observed_at or 0.0) > TTL

    def _say(self, source: str, record: Capacity, observed_at: float) -> None:
        stamp = record.observed_at if record.observed_at is not None else observed_at
        self.said[record.identity] = (source, replace(record, observed_at=min(stamp, self.now)))

    def _check(self, update: Update, refused: int, gone: list[Identity]) -> None:
        assert len(update.refused) == refused
        assert sorted(change.identity for change in update.samples if isinstance(change, Withdrawal)) == sorted(gone)
        for change in update.samples:
            assert change.origin is not None
            assert change.origin[0::2] == (INSTANCE, STARTED)
            assert change.origin.seq > self.seq
        self.seq = max((change.origin.seq for change in update.samples if change.origin), default=self.seq)
        assert all(change in update.samples for change in update.news)
        self.registry.apply(update.samples, self.now)
        self.hub.apply(update.news, self.now)

    def _fresh(self) -> dict[Identity, Capacity]:
        return {
            identity: record
            for identity, (_, record) in self.said.items()
            if record.observed_at is not None and self.now - record.observed_at <= TTL
        }

    def _held(self, table: SampleTable) -> dict[Identity, Capacity]:
        return {record.identity: record for record in table.fresh(self.now)}

    @invariant()
    def the_registry_has_exactly_what_counts(self) -> None:
        """semantics.md, "Agent": "local records enter the agent's own Registry directly"."""
        assert self._held(self.registry) == self._fresh()

    @invariant()
    def a_hub_that_hears_of_changes_has_every_value(self) -> None:
        """What is left out of the news says nothing new, whenever it was observed."""
        held = self._held(self.hub)
        assert set(self._fresh()) <= set(held) <= set(self.said)
        for identity, record in self._fresh().items():
            assert same_value(held[identity], record)

    @invariant()
    def a_resync_tells_everything(self) -> None:
        """A hub that missed every word so far, one that missed some, and one that missed none end up the same."""
        everything = self.truth.everything(self.now)
        new = SampleTable(ttl=TTL)
        new.apply(everything, self.now)
        assert self._held(new) == self._fresh()
        assert {change.identity for change in everything if isinstance(change, Withdrawal)}.isdisjoint(self.said)

    @invariant()
    def the_end_withdraws_everything(self) -> None:
        """semantics.md, "Wire": "every record at a clean shutdown"."""
        ending = LocalTruth("west", instance=INSTANCE, started_at=STARTED, ttl=TTL, remember=REMEMBER)
        for source in ("kubernetes", "file"):
            ending.collected(source, [r for owner, r in self.said.values() if owner == source], self.now, self.now)
        table = SampleTable(ttl=TTL)
        table.apply(ending.everything(self.now), self.now)
        last = ending.withdrawn(self.now)
        assert sorted(change.identity for change in last) == sorted(self.said)
        assert all(isinstance(change, Withdrawal) for change in last)
        table.apply(last, self.now)
        assert len(table) == len(ending) == 0


TestLocalTruth = LocalTruthMachine.TestCase


def truth(*records: Capacity, now: float = 0.0) -> LocalTruth:
    """The truth of one source that has collected these records."""
    made = LocalTruth("west", instance=INSTANCE, started_at=0.0, ttl=TTL, remember=REMEMBER)
    made.collected("file", records, now, now)
    return made


def reasons(update: Update) -> list[str]:
    """Why records were refused."""
    return [fault.reason for fault in update.refused]


def test_one_bad_record_never_costs_its_batch() -> None:
    """semantics.md, "Capacity": "A record that breaks a name or a range is dropped, counted by reason […]; the rest of
    its batch goes on"."""
    batch: list[object] = [
        Capacity("west", "ns", "env", "p1", idle=1),
        None,
        Capacity("west", "ns", "env", "p2", idle=-1),
        Capacity("west", "ns", "env", "p1", idle=7),
        Capacity("east", "ns", "env", "p3", idle=1),
        Capacity("west", "ns", "env", "p4", idle=4),
    ]
    made = truth()
    update = made.collected("file", batch, 0.0, 0.0)  # type: ignore[arg-type]
    assert reasons(update) == ["type", "idle", "duplicate", "foreign"]
    assert [change.identity[3] for change in update.samples] == ["p1", "p4"]
    assert len(made) == 2


@pytest.mark.parametrize("identity", [None, "p1", 7, [], ["west", "ns", "env", "p1"], {}, (), ("west",)])
def test_one_bad_withdrawal_never_costs_its_batch(identity: object) -> None:
    """A plugin may hand over anything; what is no identity withdraws nothing, and costs nothing else."""
    made = truth(Capacity("west", "ns", "env", "p1"))
    bad = Withdrawal(identity)  # type: ignore[arg-type]
    update = made.pushed("file", [bad, Capacity("west", "ns", "env", "p2", idle=2)], 1.0)
    assert [change.identity[3] for change in update.samples] == ["p2"]
    assert len(made) == 2


def test_a_record_of_two_sources_belongs_to_the_first() -> None:
    """Two sources that contradict each other must not make a record flap; the second takes over when the first lets
    go."""
    record = Capacity("west", "ns", "env", "p1", idle=1)
    other = replace(record, idle=5)
    made = truth(record)
    for now in (1.0, 2.0):
        refused = made.collected("kubernetes", [other], now, now)
        assert reasons(refused) == ["duplicate"]
        assert "file" in refused.refused[0].detail
        assert refused.samples == []
    let_go = made.collected("file", [], 3.0, 3.0)
    assert [type(change) for change in let_go.samples] == [Withdrawal]
    taken = made.collected("kubernetes", [other], 4.0, 4.0)
    assert [change.idle for change in taken.news if isinstance(change, Capacity)] == [5]


def test_one_source_withdraws_nothing_of_another() -> None:
    """Each source's list is the whole truth about its own records only."""
    made = truth(Capacity("west", "ns", "env", "p1"))
    made.collected("kubernetes", [Capacity("west", "ns", "env", "p2")], 1.0, 1.0)
    assert made.collected("file", [], 2.0, 2.0).samples != []
    assert made.pushed("file", [Withdrawal(("west", "ns", "env", "p2"))], 3.0).samples == []
    assert len(made) == 1


def test_what_nobody_vouches_for_is_not_reported_any_more() -> None:
    """semantics.md, "Time": "A source without evidence […] is not live: its records are no longer refreshed, and age
    out"."""
    made = truth(Capacity("west", "ns", "env", "p1"), now=10.0)
    assert len(made.everything(10.0 + TTL)) == 1
    assert made.everything(10.5 + TTL) == []


@pytest.mark.parametrize(
    "words",
    [
        [Capacity("west", "ns", "env", "p1", idle=1), Capacity("west", "ns", "env", "p1", idle=2)],
        [Capacity("west", "ns", "env", "p1", idle=1), Withdrawal(("west", "ns", "env", "p1"))],
        [Withdrawal(("west", "ns", "env", "p1")), Capacity("west", "ns", "env", "p1", idle=2)],
    ],
    ids=["changes twice", "comes and goes", "goes and comes"],
)
def test_the_last_word_of_a_pushed_batch_counts(words: list[Change]) -> None:
    """A source that gathers its events into batches may have several for one pool. Whoever hears of the batch, by word
    or by resync, ends with the last: "an equal seq changes nothing", so two of them must not have the same."""
    made = truth(Capacity("west", "ns", "env", "p1", idle=7))
    by_word, by_resync = SampleTable(ttl=TTL), SampleTable(ttl=TTL)
    for table in (by_word, by_resync):
        table.apply(made.everything(0.0), 0.0)
    by_word.apply(made.pushed("file", words, 1.0).news, 1.0)
    by_resync.apply(made.everything(1.0), 1.0)
    last = [words[-1].idle] if isinstance(words[-1], Capacity) else []
    assert [record.idle for record in by_word.fresh(1.0)] == last
    assert [record.idle for record in by_resync.fresh(1.0)] == last


@pytest.mark.parametrize("pushed", ["a new pool", "another value", "a withdrawal"])
def test_a_collect_does_not_undo_what_was_pushed_while_it_ran(pushed: str) -> None:
    """A collect tells what was true when it began. What a source has pushed since then is newer, although the collect's
    answer comes in later: it must not be taken back until the next one."""
    record = Capacity("west", "ns", "env", "p1", idle=1)
    made = truth(*([] if pushed == "a new pool" else [record]), now=0.0)
    answer = [] if pushed == "a new pool" else [record]  # as things stood at 10 s, when the collect began
    change = Withdrawal(record.identity) if pushed == "a withdrawal" else replace(record, idle=2)
    registry = SampleTable(ttl=TTL)
    for update in (
        made.pushed("file", [change], 11.0),
        made.collected("file", answer, 10.0, 12.0),
    ):
        registry.apply(update.samples, 12.0)
    assert [known.idle for known in registry.fresh(12.0)] == ([] if pushed == "a withdrawal" else [2])
    # The next one began after the push, and counts in full.
    registry.apply(made.collected("file", [replace(record, idle=3)], 15.0, 16.0).samples, 16.0)
    assert [known.idle for known in registry.fresh(16.0)] == [3]


def test_a_large_collect_is_taken_in_steps_that_come_to_the_same() -> None:
    """So that a source with a great many pools holds up nobody: no step is larger than SLICE, new records and
    withdrawals alike."""
    first = [Capacity("west", "ns", f"env-{number}", "p", idle=number) for number in range(3 * SLICE + 10)]
    second = [replace(record, idle=7) for record in first[: SLICE + 5]]
    at_once, in_steps = truth(now=0.0), truth(now=0.0)
    for moment, records in ((1.0, first), (2.0, second), (3.0, [])):
        whole = at_once.collected("file", records, moment, moment)
        steps = list(in_steps.collecting("file", records, moment, moment))
        assert len(steps) > 1
        assert max(len(step.samples) for step in steps) == SLICE
        assert [sample for step in steps for sample in step.samples] == whole.samples
        assert [sample for step in steps for sample in step.news] == whole.news
    assert len(in_steps) == 0


def test_a_record_that_had_nearly_run_out_is_news() -> None:
    """Hubs hear of unchanged records with the next resync only; one that may run out before that they must hear of at
    once: no later than after half a TTL, which is the longest that a resync interval can be."""
    record = Capacity("west", "ns", "env", "p1", idle=1)
    made = truth(record, now=0.0)
    assert made.collected("file", [record], 5.0, 5.0).news == []
    assert made.collected("file", [record], 5.0 + TTL / 2, 5.0 + TTL / 2).news == []
    for age in (TTL / 2 + 0.5, TTL, TTL + 5.0):
        again = truth(record, now=0.0)
        assert len(again.collected("file", [record], age, age).news) == 1


def test_a_withdrawal_is_repeated_for_one_hub_ttl() -> None:
    """A hub that was away when it was said hears it with the next resync; semantics.md, "Wire": "leaves a tombstone for
    one hub TTL"."""
    made = truth(Capacity("west", "ns", "env", "p1"))
    made.collected("file", [], 1.0, 1.0)
    assert made.everything(1.0 + REMEMBER) == [Withdrawal(("west", "ns", "env", "p1"), Origin(INSTANCE, 2, 0.0))]
    assert made.everything(1.5 + REMEMBER) == []


def test_a_pool_that_comes_back_is_not_withdrawn_by_the_next_resync() -> None:
    """The latest word counts."""
    record = Capacity("west", "ns", "env", "p1", idle=1)
    made = truth(record)
    made.collected("file", [], 1.0, 1.0)
    made.collected("file", [record], 2.0, 2.0)
    assert [type(change) for change in made.everything(2.0)] == [Capacity]
    assert [change.identity for change in made.withdrawn(3.0)] == [record.identity]


# --- what says something new -----------------------------------------------------------------------------------------

values = st.builds(
    Capacity,
    st.just("west"),
    st.just("ns"),
    st.just("env"),
    st.just("p1"),
    st.sampled_from(("", "gpu")),
    idle=st.integers(0, 1),
    running=st.integers(0, 1),
    pending=st.integers(0, 1),
    desired=st.integers(0, 1),
    autoscaling_enabled=st.booleans(),
    capacity=st.integers(-1, 1),
    saturated_for=st.sampled_from((0.0, 5.0, 60.0)),
    state=st.sampled_from(("", "Active")),
    observed_at=st.sampled_from((0.0, 1.0, 55.0)),
)


@given(values, values)
def test_two_samples_say_the_same_or_not_whoever_came_first(one: Capacity, other: Capacity) -> None:
    """A value that differs in anything but the moment of its observation is news."""
    assert same_value(one, one)
    assert same_value(one, other) is same_value(other, one)
    same = replace(one, observed_at=0.0, saturated_for=0.0) == replace(other, observed_at=0.0, saturated_for=0.0)
    if not same:
        assert not same_value(one, other)
    elif one.saturated_for == other.saturated_for == 0:
        assert same_value(one, other)


@pytest.mark.parametrize(
    "later,rest,same", [(5.0, 55.0, True), (5.0, 54.5, True), (5.0, 60.0, False), (5.0, 0.0, False)]
)
def test_a_saturation_that_runs_down_is_no_news(later: float, rest: float, same: bool) -> None:
    """A source tells it as a rest of time, which is less with every report; only another end is something new."""
    one = Capacity("west", "ns", "env", "p1", saturated_for=60.0, observed_at=100.0)
    assert same_value(one, replace(one, observed_at=100.0 + later, saturated_for=rest)) is same


@given(st.lists(st.lists(good, max_size=4), max_size=5))
def test_unchanged_records_are_no_news(collects: list[Sequence[Capacity]]) -> None:
    """Steady state costs a hub nothing but the resync."""
    made = truth()
    for now, records in enumerate(collects):
        made.collected("file", records, float(now), float(now))
        again = made.collected("file", records, now + 0.5, now + 0.5)
        assert again.news == []
