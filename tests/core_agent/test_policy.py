"""What clusters may say and see, against models that are slow and plain: a recursive matcher of patterns, and a batch
that is judged change by change from what was held before; and with the real table behind it, which no history that a
cluster makes up may fill beyond its bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trio_federation.policy
from trio_federation.capacity import INT32_MAX, Capacity, Change, Identity, Origin, Withdrawal
from trio_federation.config import PolicySettings
from trio_federation.outbox import newest
from trio_federation.policy import ANSWERS_KEPT, REASONS, Policies, Policy
from trio_federation.samples import SampleTable

#: Few letters, so that patterns and names meet; one of them in two cases, and one that expressions take for any.
half_patterns = st.text("aA.*", min_size=1, max_size=7)
patterns = st.builds("{}/{}".format, half_patterns, half_patterns)
names = st.text("aA.b/", min_size=1, max_size=7)

env_patterns = st.lists(st.sampled_from(("*/*", "ns/*", "*/env", "ns/env", "n*/e*2", "other/x")), max_size=3).map(tuple)
origins = st.none() | st.builds(Origin, st.sampled_from(("a1", "b2")), st.integers(1, 9), st.just(0.0))
records = st.builds(
    lambda namespace, env, pool, group, idle, running, observed_at, origin: Capacity(
        "west", namespace, env, pool, group, idle=idle, running=running, observed_at=observed_at, origin=origin
    ),
    st.sampled_from(("ns", "n2")),
    st.sampled_from(("env", "env2")),
    st.sampled_from(("", "p1", "p2")),
    st.sampled_from(("", "g")),
    st.integers(0, 6) | st.just(INT32_MAX),
    st.integers(0, 3),
    st.floats(0, 9),
    origins,
)
changes = records | st.builds(lambda record: Withdrawal(record.identity, record.origin), records)
pools = st.sampled_from(("p1", "p2", "p3", "p4"))
pool_records = st.builds(lambda pool: Capacity("west", "ns", "env", pool), pools)
pool_changes = pool_records | st.builds(lambda record: Withdrawal(record.identity), pool_records)
policies = st.builds(
    lambda report, see, max_records, max_idle: PolicySettings(
        clusters=("west",), report=report, see=see, max_records=max_records, max_idle=max_idle
    ),
    env_patterns,
    env_patterns,
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 5),
)


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits a name, by trying every length for every *."""
    if not pattern:
        return not name
    if pattern[0] != "*":
        return name[:1] == pattern[0] and fits(pattern[1:], name[1:])
    return fits(pattern[1:], name) or (bool(name) and name[0] != "/" and fits(pattern, name[1:]))


@contextmanager
def little_memory(least: int, for_each: int) -> Iterator[None]:
    """Policies that are made inside remember so few withdrawals that it matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio_federation.policy, "LEAST_REMEMBERED", least)
        patch.setattr(trio_federation.policy, "REMEMBERED_FOR_EACH", for_each)
        yield


def allows(wanted: tuple[str, ...], change: Change) -> bool:
    """Whether one of some patterns fits a change's env."""
    _, namespace, env, *_ = change.identity
    return any(fits(pattern, f"{namespace}/{env}") for pattern in wanted)


def everything_of(change: Change) -> tuple[object, ...]:
    """A change with its origin, which is no part of a record's equality."""
    return (change, change.origin)


@given(st.lists(patterns, max_size=3), st.lists(st.tuples(names, names), min_size=1, max_size=8))
@example(["*a*a*/*"], [("aba", "a"), ("/aa", "a"), ("a/a", "a"), ("aa/", "a")])
@example(["a/*"], [("A", "a"), ("aa", "a"), ("a", "a")])
@example(["a.b/*"], [("aab", "a"), ("a.b", "a")])
@example(["a/a"], [("a", "A"), ("A", "a"), ("a", "a"), ("a", "aa")])
def test_a_pattern_means_what_it_says(wanted: list[str], asked: list[tuple[str, str]]) -> None:
    """* is any run of characters but the slash, and all the rest itself, case included; asked again it is the same."""
    policy = Policy(PolicySettings(clusters=("west",), report=tuple(wanted), see=tuple(reversed(wanted))))
    for namespace, env in asked * 2:
        # No real name has a slash, which is why "*/*" is everything without a look.
        expected = policy.reports_all or any(fits(pattern, f"{namespace}/{env}") for pattern in wanted)
        assert policy.may_report(namespace, env) is expected
        assert policy.may_see(namespace, env) is expected
    assert policy.reports_all is policy.sees_all is any(set(pattern) == {"*", "/"} for pattern in wanted)


def test_no_pattern_holds_up_the_hub() -> None:
    """A name that comes from a peer meets each * of a pattern once. If all combinations were tried, this would not end
    in anybody's lifetime."""
    policy = Policy(PolicySettings(clusters=("west",), report=("*a" * 40 + "*b/*",)))
    assert not policy.may_report("a" * 253, "env")
    assert policy.may_report("a" * 253 + "b", "env")


def test_ever_new_names_leave_nothing_behind() -> None:
    """A peer may send more names than are remembered; the answers stay right, and the memory bounded."""
    policy = Policy(PolicySettings(clusters=("west",), report=("ns/*7",), see=("ns/*8",)))
    most = 0
    for number in range(2 * ANSWERS_KEPT + 10):
        assert policy.may_report("ns", f"env-{number}") is (number % 10 == 7)
        assert policy.may_see("ns", f"env-{number}") is (number % 10 == 8)
        most = max(most, len(policy._report), len(policy._see))
    assert most == ANSWERS_KEPT


def test_where_everything_is_allowed_nothing_is_remembered() -> None:
    policy = Policy(PolicySettings(clusters=("west",), max_records=1))
    assert policy.may_report("ns", "env")
    assert policy.may_see("ns", "env")
    policy.admit([Capacity("west", "ns", "env", "p1")], 0, lambda _identity: False)
    assert len(policy._report) == len(policy._see) == 0


@given(
    policies,
    st.lists(changes, max_size=15),
    st.lists(records, max_size=8),
    st.lists(records, max_size=4),
    st.integers(0, 6),
    st.integers(0, 2),
)
def test_a_batch_is_judged_by_what_it_says(
    table: PolicySettings,
    batch: list[Change],
    before: list[Capacity],
    withdrawn: list[Capacity],
    least: int,
    for_each: int,
) -> None:
    """Every change for itself: may it be said, is there room after all that was let in before it, can it be remembered
    when it goes, and how much idle of it counts. Nothing else of it changes, and neither does the order."""
    held = {record.identity for record in before}
    remembered = {record.identity for record in withdrawn} - held
    given_batch = list(batch)

    with little_memory(least, for_each):
        policy = Policy(table)
    now_held = frozenset(held)
    admitted, breaches = policy.admit(
        batch, len(held), now_held.__contains__, len(remembered), frozenset(remembered).__contains__
    )

    expected: list[tuple[object, ...]] = []
    broken: dict[str, list[Capacity]] = {}
    limited = table.max_records is not None
    # Each withdrawal that is remembered takes its place for good, as far as one batch goes.
    places = max(for_each * (table.max_records or 0), least) - len(remembered)
    for change in batch:
        if not allows(table.report, change):
            if isinstance(change, Capacity):
                broken.setdefault("env_not_allowed", []).append(change)
            continue
        if isinstance(change, Withdrawal):
            if change.identity in held:
                places -= 1  # it is always let in, and makes room
                held.discard(change.identity)
            elif change.identity not in remembered:
                if limited and places <= 0:
                    broken.setdefault("too_many_records", []).append(Capacity(*change.identity))
                    continue
                places -= 1
            remembered.add(change.identity)
            expected.append(everything_of(change))
            continue
        if (
            table.max_records is not None
            and change.identity not in held
            and (len(held) >= table.max_records or places <= 0)
        ):
            broken.setdefault("too_many_records", []).append(change)
            continue
        held.add(change.identity)
        idle = change.idle
        if table.max_idle is not None and idle > table.max_idle:
            broken.setdefault("idle_cut", []).append(change)
            idle = table.max_idle
        cut = Capacity(
            change.cluster_id,
            change.namespace,
            change.env_name,
            change.member_pool,
            change.scaling_group,
            idle=idle,
            running=change.running,
            observed_at=change.observed_at,
        )
        expected.append((cut, change.origin))
    assert [everything_of(change) for change in admitted] == expected
    assert batch == given_batch
    assert {reason: breach.count for reason, breach in breaches.items()} == {
        reason: len(found) for reason, found in broken.items()
    }
    for reason, breach in breaches.items():
        first = broken[reason][0]
        assert reason in REASONS
        assert f"{first.namespace}/{first.env_name}" in breach.detail
        assert "\n" not in breach.detail


@given(st.integers(0, 4), st.lists(pool_changes, min_size=1, max_size=12), st.sets(pools))
def test_room_is_taken_once_and_made_by_withdrawals(most: int, batch: list[Change], held: set[str]) -> None:
    """Where records are about as many as may be: the pools that are held after each step, by name."""
    policy = Policy(PolicySettings(clusters=("west",), max_records=most))
    before, expected = frozenset(held), []
    admitted, breaches = policy.admit(batch, len(held), lambda identity: identity[3] in before)
    for change in batch:
        pool = change.identity[3]
        if isinstance(change, Withdrawal):
            held.discard(pool)
        elif pool in held or len(held) < most:
            held.add(pool)
        else:
            continue
        expected.append(change)
    assert admitted == expected
    assert sum(breach.count for breach in breaches.values()) == len(batch) - len(expected)


def test_what_is_remembered_already_is_withdrawn_again_for_nothing() -> None:
    """Where no more can be remembered: a withdrawal that is repeated, and one of a record that is held, are let in; one
    of what nobody knows, and a new record, which will be withdrawn one day, are not."""
    with little_memory(3, 0):
        policy = Policy(PolicySettings(clusters=("west",), max_records=5))
    new, known = Capacity("west", "ns", "env", "p3"), Capacity("west", "ns", "env", "held")
    unknown, repeated, of_known = (
        Withdrawal(Capacity("west", "ns", "env", pool).identity) for pool in ("p2", "gone", "held")
    )
    batch: list[Change] = [unknown, repeated, repeated, known, of_known, of_known, unknown, new]
    admitted, breaches = policy.admit(
        batch, 1, lambda identity: identity[3] == "held", 3, lambda identity: identity[3] == "gone"
    )
    assert admitted == [repeated, repeated, known, of_known, of_known]
    assert breaches == {
        "too_many_records": (3, "ns/env/p2 is one too many: 5 records are kept of it, and 3 withdrawals remembered"),
    }
    # One of what is held takes a place that is left, so that there is none for another one.
    assert policy.admit([of_known, unknown], 1, lambda identity: identity[3] == "held", 2).changes == [of_known]
    # Without a limit for records there is none for what is remembered.
    with little_memory(3, 0):
        policy = Policy(PolicySettings(clusters=("west",), max_idle=5))
    assert policy.admit(batch, 1, lambda _identity: False, 99).changes == batch


def test_a_breach_names_the_first_record_and_the_rule() -> None:
    """One line that says which record it was, and what it broke."""
    table = PolicySettings(clusters=("west",), report=("team-a/*",), max_records=2, max_idle=50)
    batch = [
        Capacity("west", "team-b", "python", "p1"),
        Capacity("west", "team-c", "python", "p1"),
        Capacity("west", "team-a", "python", "p1", idle=INT32_MAX),
        Capacity("west", "team-a", "python", "p2", idle=50),
        Capacity("west", "team-a", "python", "", "large"),
        Capacity("west", "team-a", "python"),
    ]
    admitted, breaches = Policy(table).admit(batch, 0, lambda _identity: False)
    assert admitted == [Capacity("west", "team-a", "python", "p1", idle=50), batch[3]]
    assert breaches == {
        "env_not_allowed": (2, "team-b/python is not among what it may report"),
        "idle_cut": (1, "team-a/python/p1 claims 2147483647 idle, of which 50 count"),
        "too_many_records": (
            2,
            "team-a/python/large is one too many: 2 records are kept of it, and 1000 withdrawals remembered",
        ),
    }


def test_a_cut_record_is_otherwise_the_same() -> None:
    """Every field of it, also those that make no difference to equality."""
    origin = Origin("a1", 7, 3.0)
    record = Capacity(
        "west",
        "ns",
        "env",
        "p1",
        "group",
        idle=INT32_MAX,
        running=1,
        pending=2,
        desired=3,
        autoscaling_enabled=True,
        capacity=4,
        saturated_for=5.0,
        state="Saturated",
        observed_at=6.0,
        origin=origin,
    )
    policy = Policy(PolicySettings(clusters=("west",), max_idle=9))
    [cut] = policy.admit([record], 0, lambda _identity: False).changes
    assert isinstance(cut, Capacity)
    assert cut.origin is origin
    assert (record.idle, cut.idle) == (INT32_MAX, 9)
    for field in Capacity.__slots__:
        assert field == "idle" or getattr(cut, field) == getattr(record, field)


@given(st.lists(changes), st.integers(0, 9))
def test_where_nothing_is_restricted_nothing_is_touched(batch: list[Change], held: int) -> None:
    """The same list, without a look at it; another kind of sequence comes as a list."""
    policy = Policies([]).of("west")
    assert policy.unrestricted
    assert policy.admit(batch, held, lambda _identity: pytest.fail("asked")).changes is batch
    assert policy.admit(tuple(batch), held, lambda _identity: pytest.fail("asked")) == (batch, {})


@pytest.mark.parametrize("restriction", [{"report": ("ns/*",)}, {"max_records": 0}, {"max_idle": 0}])
def test_each_rule_for_reports_is_a_restriction(restriction: dict[str, object]) -> None:
    """A rule that a quick way passed by would be none."""
    policy = Policy(PolicySettings(clusters=("west",), **restriction))  # type: ignore[arg-type]
    assert not policy.unrestricted
    admitted = policy.admit([record := Capacity("west", "n2", "env", "p1", idle=1)], 0, lambda _identity: False)
    assert admitted.changes != [record]
    assert len(admitted.breaches) == 1


@given(policies, st.lists(st.lists(changes, max_size=6), max_size=8), st.integers(0, 4), st.integers(0, 1))
def test_no_history_fills_more_than_the_room_there_is(
    table: PolicySettings, batches: list[list[Change]], least: int, for_each: int
) -> None:
    """A cluster makes up seqs, instances and withdrawals as it likes: the hub's table never holds more of it than it
    may, nothing that it may not report, and no idle above the highest; nor does it remember more withdrawals than it
    may, but for those of the records that were there when that was full."""
    with little_memory(least, for_each):
        policy = Policy(table)
    store = SampleTable(ttl=60.0)
    for now, batch in enumerate(batches, 10):
        for step in policy.steps(batch):
            admitted = policy.admit(step, len(store), store.holds, store.held()["tombstones"], store.remembers)
            store.apply(admitted.changes, now)
            found = store.held_records()
            if table.max_records is not None:
                most = max(for_each * table.max_records, least) + table.max_records
                assert store.held()["tombstones"] <= most
            assert table.max_records is None or len(found) <= table.max_records
            assert all(allows(table.report, record) for record in found)
            assert table.max_idle is None or all(record.idle <= table.max_idle for record in found)


def test_a_withdrawal_that_does_not_count_makes_no_room() -> None:
    """One with an old seq is no news to the table, which goes on holding the record."""
    policy, store = Policy(PolicySettings(clusters=("west",), max_records=1)), SampleTable(ttl=60.0)
    origin = Origin("a1", 5, 0.0)
    kept = Capacity("west", "ns", "env", "p1", observed_at=1.0, origin=origin)
    store.apply([kept], 1.0)
    late = Withdrawal(kept.identity, origin._replace(seq=4))
    other = Capacity("west", "ns", "env", "p2", observed_at=1.0, origin=origin)
    breaches: list[str] = []
    for step in policy.steps([late, other]):
        held = {record.identity for record in store.held_records()}
        admitted = policy.admit(step, len(held), held.__contains__)
        store.apply(admitted.changes, 1.0)
        breaches += admitted.breaches
    assert store.held_records() == [kept]
    assert breaches == ["too_many_records"]


@given(st.lists(changes), st.none() | st.integers(0, 5))
def test_steps_are_the_batch_in_parts(batch: list[Change], max_records: int | None) -> None:
    """All of it, in order; where records are limited, no record behind a withdrawal, and no part for nothing."""
    steps = list(Policy(PolicySettings(clusters=("west",), max_records=max_records)).steps(batch))
    assert [change for step in steps for change in step] == batch
    if max_records is None or not any(isinstance(change, Withdrawal) for change in batch[:-1]):
        assert steps[0] is batch
        return
    shapes = ["".join("w" if isinstance(change, Withdrawal) else "r" for change in step) for step in steps]
    assert not any("wr" in shape for shape in shapes)
    assert all(one[-1] + other[0] == "wr" for one, other in pairwise(shapes))


@given(policies, st.lists(changes))
def test_what_may_be_seen_is_what_is_left(table: PolicySettings, batch: list[Change]) -> None:
    """Records and withdrawals of the envs that may be seen, in their order; all of it is the same object."""
    policy = Policy(table)
    by_identity = newest(batch)
    visible = policy.visible(by_identity)
    assert list(visible.items()) == [item for item in by_identity.items() if allows(table.see, item[1])]
    assert all(visible[identity] is by_identity[identity] for identity in visible)
    assert policy.sees_all is ("*/*" in table.see)
    assert (visible is by_identity) is policy.sees_all


def test_no_pattern_allows_nothing() -> None:
    """An empty list is a list, and not the default."""
    policy = Policy(PolicySettings(clusters=("west",), report=(), see=()))
    record = Capacity("west", "ns", "env", "p1")
    by_identity: dict[Identity, Change] = {record.identity: record}
    assert policy.visible(by_identity) == {}
    assert policy.admit([record], 0, lambda _identity: True).changes == []


def test_a_cluster_has_the_table_that_names_it() -> None:
    """Else the one for all others, else none. Nothing makes one name of two cases."""
    tables = [
        PolicySettings(clusters=("east", "west"), max_idle=1),
        PolicySettings(clusters=("*",), max_idle=2),
        PolicySettings(clusters=("north",), max_idle=3),
    ]
    policies = Policies(tables)
    assert policies.of("east") is policies.of("west")
    found = {name: policies.of(name).max_idle for name in ("east", "west", "north", "south", "East", "*", "")}
    assert found == {"east": 1, "west": 1, "north": 3, "south": 2, "East": 2, "*": 2, "": 2}
    assert policies.of("South") is policies.of("south")

    without = Policies(tables[::2])
    assert without.of("south") is without.of("East")
    assert without.of("south").unrestricted
    assert without.of("south").sees_all


@given(st.permutations(("east", "west", "*", "north")), st.integers(0, 4))
def test_the_order_of_tables_is_no_matter(order: list[str], split: int) -> None:
    """Where the table for all others stands says nothing about who the others are."""
    tables = [
        PolicySettings(clusters=tuple(part), max_records=number)
        for number, part in enumerate((order[:split], order[split:]))
    ]
    policies = Policies(tables)
    for cluster in ("east", "west", "north", "elsewhere"):
        name = cluster if cluster in order else "*"
        assert policies.of(cluster).max_records == (0 if name in order[:split] else 1)
