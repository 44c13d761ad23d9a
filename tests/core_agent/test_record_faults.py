"""Whatever a source hands over as a record, saying what is wrong with it never raises, and takes in nothing that could
raise later; and when what was pushed is held to have been true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation.capacity import Capacity, Identity, Withdrawal, fault
from trio_federation.local import LocalTruth, record_fault

TTL = 30.0


class Pod(Capacity):
    """A record made of something else; no copy of it can be made."""

    def __init__(self, pod: str) -> None:
        super().__init__("west", "ns", "env", pod)


class Plain(Capacity):
    """A subclass that changes nothing."""


class Lazy(Capacity):
    """Asks somebody who has gone."""

    @property
    def identity(self) -> Any:
        """Nobody answers."""
        raise OSError("gone")


class Posing:
    """Says that it is a record."""

    __class__ = Capacity  # type: ignore[assignment]


def unfilled(**values: object) -> Capacity:
    """A record that was never filled in, or with these values only."""
    record = Capacity.__new__(Capacity)
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


class Incomparable(int):
    """A number that does not let itself be compared."""

    def __le__(self, other: object) -> bool:
        raise ArithmeticError("no")

    __ge__ = __lt__ = __gt__ = __le__


WRONG = [
    Pod("p1"),
    Plain("west", "ns", "env", "p1"),
    Lazy("west", "ns", "env", "p1"),
    Posing(),
    unfilled(),
    unfilled(cluster_id="west", namespace="ns"),
    Capacity("west", "ns", "env", "p1", idle=Incomparable(1)),
    None,
    "p1",
]


@pytest.mark.parametrize("wrong", WRONG, ids=[type(each).__name__ + str(n) for n, each in enumerate(WRONG)])
@pytest.mark.parametrize("pushed", [False, True])
def test_what_is_no_record_is_refused_and_costs_the_others_nothing(wrong: Any, pushed: bool) -> None:
    good = Capacity("west", "ns", "env", "good", idle=1)
    truth = LocalTruth("west", instance="ab", started_at=0.0, ttl=TTL)
    bad = record_fault(wrong)
    assert bad is not None
    assert bad.reason == "type"
    records = [wrong, good]
    update = truth.pushed("s", records, 1.0) if pushed else truth.collected("s", records, 1.0, 1.0)
    assert [each.reason for each in update.refused] == ["type"]
    assert [each.identity for each in update.samples] == [good.identity]


#: what may stand in a record's place for anything
ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(object())


@given(st.dictionaries(st.sampled_from(list(Capacity.__dataclass_fields__)), ANYTHING))
def test_a_record_of_anything_is_judged(values: dict[str, Any]) -> None:
    """As `fault` does, where every value is there."""
    whole = replace(Capacity("west", "ns", "env", "p1"), **values)
    assert record_fault(whole) == fault(whole)
    partly = record_fault(unfilled(**values))
    assert (partly is None) <= (values.keys() == Capacity.__dataclass_fields__.keys())


def test_what_was_pushed_is_as_old_as_the_push() -> None:
    """And not as the moment when it was taken in, which may be much later."""
    truth = LocalTruth("west", instance="ab", started_at=0.0, ttl=TTL)
    pool = Capacity("west", "ns", "env", "p1", idle=1)
    (sample,) = truth.pushed("s", [pool], 110.0, observed_at=100.0).samples
    assert isinstance(sample, Capacity)
    assert sample.observed_at == 100.0
    # One that has a stamp of its own keeps it.
    (sample,) = truth.pushed("s", [replace(pool, observed_at=99.0)], 110.0, observed_at=100.0).samples
    assert isinstance(sample, Capacity)
    assert sample.observed_at == 99.0


@pytest.mark.parametrize("asked_at, expected", [(99.0, 1), (105.0, 2)])
def test_a_collect_that_began_after_a_push_is_newer(asked_at: float, expected: int) -> None:
    """Also where it began before the push was taken in."""
    truth = LocalTruth("west", instance="ab", started_at=0.0, ttl=TTL)
    pool = Capacity("west", "ns", "env", "p1")
    truth.pushed("s", [replace(pool, idle=1)], 110.0, observed_at=100.0)
    truth.collected("s", [replace(pool, idle=2)], asked_at, 111.0)
    assert [each.idle for each in truth.everything(112.0) if isinstance(each, Capacity)] == [expected]


def test_a_withdrawal_that_cannot_be_read_is_refused_like_any_garbage() -> None:
    """Of a class of its own, or never filled in; the rest of the batch is taken."""

    class Trap(Withdrawal):
        @property
        def identity(self) -> Identity:
            raise RuntimeError("a trap")

    truth = LocalTruth("west", instance="ab12", started_at=0.0)
    kept = Capacity("west", "ns", "env", "p1", idle=1)
    identity = ("west", "ns", "env", "p2")
    for garbage in (Trap(identity), Withdrawal(7), Withdrawal(("west",))):  # type: ignore[arg-type]
        update = truth.pushed("source", [garbage, kept], 1.0)
        assert len(update.refused) == 1
        assert len(update.samples) == 1
