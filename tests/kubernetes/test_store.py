"""The store against a naive recount: whatever is listed and applied, in whatever order, what it holds is what the
objects say, and what it has said of it, taken together, comes to the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_federation import Capacity, Identity
from trio_federation_kubernetes.decoding import Decoder
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.resources import Key, Resource, Row
from trio_federation_kubernetes.store import Contested, Store

OWNERS, HELPERS = 0, 1


class Owner(NamedTuple):
    """What an owner says of its pools, in its order; nothing keeps two of them from having one name."""

    pools: tuple[tuple[str, int], ...] = ()
    saturated_until: float | None = None


class Helper(NamedTuple):
    """Adds one to what runs in every pool of an owner in its namespace."""

    of: str


def said_by(key: Key, owner: Owner, running: int) -> tuple[Row, ...]:
    return tuple(
        Row(Capacity("west", key[0], "env", pool, idle=idle, running=running), owner.saturated_until)
        for pool, idle in owner.pools
    )


class _Nothing(msgspec.Struct):
    """What would be decoded, if anything were."""


class ToyMapper:
    """Owners, and helpers that change their rows."""

    def __init__(self) -> None:
        decoder = Decoder(_Nothing)
        self.watched: tuple[Watched, ...] = (
            Watched(Resource("toys", "v1", "owners"), decoder),
            Watched(Resource("toys", "v1", "helpers"), decoder),
        )
        self._owners: dict[Key, Owner] = {}
        self._helpers: dict[Key, Helper] = {}

    def take(self, index: int, key: Key, object: Any | None) -> Iterable[Key]:
        changed: list[Key] = []
        if index == OWNERS:
            if object is None:
                self._owners.pop(key, None)
            else:
                self._owners[key] = object
            return [key]
        before = self._helpers.pop(key, None)
        if object is not None:
            self._helpers[key] = object
        for helper in (before, object):
            if helper is not None:
                changed.append((key[0], helper.of))
        return changed

    def rows(self, owner: Key) -> Sequence[Row]:
        found = self._owners.get(owner)
        if found is None:
            return ()
        running = sum(1 for key, helper in self._helpers.items() if (key[0], helper.of) == owner)
        return said_by(owner, found, running)


namespaces = st.sampled_from(["a", "b", "c"])
names = st.sampled_from(["x", "y", "z"])
pools = st.lists(st.tuples(st.sampled_from(["p", "q", "r"]), st.integers(0, 2)), max_size=3).map(tuple)
owners = st.builds(Owner, pools, st.sampled_from([None, None, 5.0, 6.0]))
helpers = st.builds(Helper, names)
indexes = st.sampled_from([OWNERS, OWNERS, HELPERS])


def value_of(index: int) -> st.SearchStrategy[Any]:
    return owners if index == OWNERS else helpers


class StoreMachine(RuleBasedStateMachine):
    """A store, the objects that it was told of, and who was told what."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(ToyMapper())
        self.objects: list[dict[Key, Any]] = [{}, {}]
        #: what whoever follows the changes holds
        self.held: dict[Identity, Row] = {}
        #: what has changed and was not said
        self.pending: set[Identity] = set()

    # The naive recount.

    def claims(self) -> dict[Identity, dict[Key, Row]]:
        """Who claims which pool; of two rows of one owner the first."""
        claims: dict[Identity, dict[Key, Row]] = {}
        for key, owner in self.objects[OWNERS].items():
            running = sum(1 for at, helper in self.objects[HELPERS].items() if (at[0], helper.of) == key)
            for row in said_by(key, owner, running):
                claims.setdefault(row.record.identity, {}).setdefault(key, row)
        return claims

    def truth(self) -> dict[Identity, Row]:
        return {identity: claimed[min(claimed)] for identity, claimed in self.claims().items()}

    def does(self, act: Callable[[], None]) -> None:
        """What happens, and what it changes."""
        before = self.truth()
        act()
        after = self.truth()
        self.pending |= {each for each in before.keys() | after.keys() if before.get(each) != after.get(each)}

    # What happens.

    @rule(data=st.data(), index=indexes, namespace=namespaces, name=names)
    def applies(self, data: st.DataObject, index: int, namespace: str, name: str) -> None:
        value = data.draw(st.none() | value_of(index))

        def act() -> None:
            if value is None:
                self.objects[index].pop((namespace, name), None)
            else:
                self.objects[index][namespace, name] = value
            self.store.apply(index, (namespace, name), value)

        self.does(act)

    @rule(data=st.data(), index=indexes, namespace=st.none() | namespaces)
    def replaces(self, data: st.DataObject, index: int, namespace: str | None) -> None:
        keys = st.tuples(namespaces if namespace is None else st.just(namespace), names)
        content = data.draw(st.dictionaries(keys, value_of(index), max_size=6))

        def act() -> None:
            others = {key: value for key, value in self.objects[index].items() if namespace not in (None, key[0])}
            self.objects[index] = others | content
            self.store.replace(index, namespace, content)

        self.does(act)

    @rule(index=indexes, namespace=st.none() | namespaces)
    def lists_again(self, index: int, namespace: str | None) -> None:
        """What a list brings when nothing has happened."""
        before = self.store.has_changes()
        content = {key: value for key, value in self.objects[index].items() if namespace in (None, key[0])}
        self.store.replace(index, namespace, content)
        assert self.store.has_changes() == before

    @rule(index=indexes)
    def echoes(self, index: int) -> None:
        """What a watch brings when somebody has written something that we do not read."""
        before = self.store.has_changes()
        for key, value in self.objects[index].items():
            self.store.apply(index, key, value)
        assert self.store.has_changes() == before

    @rule(most=st.integers(1, 4), known=st.sets(namespaces))
    def says(self, most: int, known: set[str]) -> None:
        said = self.store.changes(most, known.__contains__)
        truth = self.truth()
        assert len(said) == len(dict(said)) <= most
        for identity, row in said:
            # That something is gone is known, whatever else is not.
            assert row is None or identity[1] in known
            # It may be what was said before: a pool whose object was renamed has changed for a moment.
            assert row == truth.get(identity)
            self.pending.discard(identity)
            if row is None:
                self.held.pop(identity, None)
            else:
                self.held[identity] = row
        assert len(said) == most or not [each for each in self.pending if each[1] in known or each not in truth]

    @precondition(lambda self: self.pending)
    @rule()
    def says_everything(self) -> None:
        self.says(10**6, {"a", "b", "c"})
        assert self.held == self.truth()
        assert not self.store.has_changes()

    # What is so at every moment.

    @invariant()
    def holds_the_truth(self) -> None:
        truth = self.truth()
        assert {row.record.identity: row for row in self.store.rows()} == truth
        assert len(list(self.store.rows())) == len(self.store) == len(truth)

    @invariant()
    def owes_what_it_has_not_said(self) -> None:
        truth = self.truth()
        owed = {
            identity for identity in truth.keys() | self.held.keys() if truth.get(identity) != self.held.get(identity)
        }
        assert owed <= self.pending
        assert self.store.has_changes() or not self.pending

    @invariant()
    def names_who_is_left_out(self) -> None:
        expected = [
            Contested(identity, *sorted(claimed)[:2]) for identity, claimed in self.claims().items() if len(claimed) > 1
        ]
        assert sorted(self.store.contested()) == sorted(expected)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30)


def row(pool: str, idle: int = 0) -> Row:
    return Row(Capacity("west", "a", "env", pool, idle=idle))


def test_an_owner_that_many_objects_change_is_asked_once_per_list() -> None:
    """Or ten thousand claims on one pool would cost ten thousand counts."""

    class Counting(ToyMapper):
        asked = 0

        def rows(self, owner: Key) -> Sequence[Row]:
            self.asked += 1
            return super().rows(owner)

    mapper = Counting()
    store = Store(mapper)
    store.apply(OWNERS, ("a", "x"), Owner((("p", 1),)))
    mapper.asked = 0
    store.replace(HELPERS, None, {("a", f"h{number}"): Helper("x") for number in range(100)})
    assert mapper.asked == 1
    assert [row.record.running for row in store.rows()] == [100]


@given(st.permutations(["x", "y", "z"]))
def test_of_several_objects_that_claim_a_pool_the_first_by_name_counts(order: list[str]) -> None:
    """Whatever the order in which they have come, or gone."""
    store = Store(ToyMapper())
    idle = {"x": 1, "y": 2, "z": 3}
    for name in order:
        store.apply(OWNERS, ("a", name), Owner((("p", idle[name]),)))
    assert [row.record.idle for row in store.rows()] == [1]
    assert [(each.counts[1], each.does_not[1]) for each in store.contested()] == [("x", "y")]
    there = set(order)
    for name in order:
        store.apply(OWNERS, ("a", name), None)
        there.discard(name)
        assert [row.record.idle for row in store.rows()] == [idle[name] for name in sorted(there)[:1]]
    assert store.contested() == []


def test_what_has_changed_is_said_in_its_order() -> None:
    """Once, as it is now, at most so much at once, and what is not known in the end waits without holding up others."""
    store = Store(ToyMapper())
    for pool in ("p", "q", "r"):
        store.apply(OWNERS, ("a", f"of-{pool}"), Owner(((pool, 1),)))
        store.apply(OWNERS, ("b", f"of-{pool}"), Owner(((pool, 1),)))
    store.apply(OWNERS, ("a", "of-p"), Owner((("p", 2),)))
    said = [store.changes(2, lambda namespace: namespace == "a") for _ in range(3)]
    assert [[found and (found.record.member_pool, found.record.idle) for _, found in each] for each in said] == [
        [("p", 2), ("q", 1)],
        [("r", 1)],
        [],
    ]
    assert [identity[3] for identity, _ in store.changes(9, lambda _: True)] == ["p", "q", "r"]


def test_what_came_and_went_before_it_was_said_is_withdrawn_all_the_same() -> None:
    """A collect may have told it in between. That also ends what would else be kept of a namespace that is never known,
    where objects come and go."""
    store = Store(ToyMapper())
    store.apply(OWNERS, ("a", "x"), Owner((("p", 1),)))
    store.apply(OWNERS, ("a", "x"), None)
    assert store.changes(10, lambda _: False) == [(row("p").record.identity, None)]
    assert not store.has_changes()


def test_a_namespace_that_changes_all_the_time_keeps_no_other_one_waiting() -> None:
    store = Store(ToyMapper())
    store.apply(OWNERS, ("a", "x"), Owner(tuple((f"p{number}", 0) for number in range(10))))
    store.apply(OWNERS, ("b", "x"), Owner((("p", 0),)))
    said = [store.changes(3, lambda _: True)]
    for idle in range(1, 3):
        store.apply(OWNERS, ("a", "x"), Owner(tuple((f"p{number}", idle) for number in range(10))))
        said.append(store.changes(3, lambda _: True))
    assert "b" in {identity[1] for batch in said for identity, _ in batch}


def test_a_list_may_be_taken_in_step_by_step() -> None:
    """However many objects are in it, others have their turn; in the end it comes to the same."""
    content = {("a", f"x{number}"): Owner(((f"p{number}", number),)) for number in range(5000)}
    whole, stepwise = Store(ToyMapper()), Store(ToyMapper())
    for store in (whole, stepwise):
        store.replace(OWNERS, None, {("a", f"old{number}"): Owner(((f"o{number}", 0),)) for number in range(3000)})
    whole.replace(OWNERS, None, content)
    steps = sum(1 for _ in stepwise.replacing(OWNERS, None, content))
    assert steps >= 10
    assert list(stepwise.rows()) == list(whole.rows())
    assert len(stepwise) == 5000


@pytest.mark.parametrize("namespace", [None, "a"])
def test_an_empty_list_takes_everything_in_its_scope(namespace: str | None) -> None:
    """And nothing beyond it."""
    store = Store(ToyMapper())
    for where in ("a", "b"):
        store.apply(OWNERS, (where, "x"), Owner((("p", 1),)))
    store.replace(OWNERS, namespace, {})
    assert [row.record.namespace for row in store.rows()] == ([] if namespace is None else ["b"])
    store.replace(OWNERS, "never-seen", {})
    assert len(store) == (0 if namespace is None else 1)
