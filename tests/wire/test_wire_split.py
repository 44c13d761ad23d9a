"""Many changes are split over messages: none too large, none with two instances of one cluster, no change lost or moved
past another of its identity."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation import wire
from trio_federation.capacity import INT32_MAX, UINT64_MAX, Capacity, Change, Identity, Origin, Withdrawal, fault
from trio_federation.pb.sandbox.sync.v1 import FederationBroadcast

NOW = 5000.0
#: as many bytes as a valid record and its origin can take up
LARGEST = Capacity(
    "c" * 63,
    "n" * 63,
    ".".join(["e" * 63] * 3 + ["e" * 61]),
    ".".join(["p" * 63] * 3 + ["p" * 61]),
    "🦀" * 63,
    idle=INT32_MAX,
    running=INT32_MAX,
    pending=INT32_MAX,
    desired=INT32_MAX,
    autoscaling_enabled=True,
    capacity=-1,
    saturated_for=INT32_MAX,
    state="🦀" * 63,
    observed_at=-1e18,
    origin=Origin("f" * 64, UINT64_MAX, -1e18),
)
#: a limit under which any record fits, and no second one of the largest
LEAST_LIMIT = 1600


def change_of(number: int, cluster: str, pool: str, instance: str, gone: bool, text: str) -> Change:
    """A change that carries its number: in its idle count, or, where it has none, in its seq."""
    origin = Origin(instance, number + 1, NOW) if instance else None
    if gone and origin is not None:
        return Withdrawal((cluster, "default", "python", pool), origin)
    return Capacity(cluster, "default", "python", pool, text, idle=number, state=text, observed_at=NOW, origin=origin)


def number_of(change: Change) -> int:
    if isinstance(change, Capacity):
        return change.idle
    assert change.origin is not None
    return change.origin.seq - 1


def histories() -> st.SearchStrategy[list[Change]]:
    step = st.tuples(
        st.sampled_from(["east", "west"]),
        st.sampled_from(["pool-a", "pool-b", "pool-c", "pool-d"]),
        st.sampled_from(["", "0a", "0b", "0c"]),
        st.booleans(),
        st.sampled_from(["", "🦀" * 63]),
    )
    return st.lists(step, max_size=40).map(lambda steps: [change_of(number, *it) for number, it in enumerate(steps)])


def read(messages: Sequence[FederationBroadcast]) -> list[list[Change]]:
    """The changes in each message, after a passage through bytes. Two instances of a cluster would be refused."""
    found = [wire.changes_of(wire.decode(wire.encode(message), FederationBroadcast), NOW) for message in messages]
    assert [it.refused for it in found] == [[]] * len(messages)
    return [it.changes for it in found]


def numbers_by_identity(changes: Sequence[Change]) -> dict[Identity, list[int]]:
    found: dict[Identity, list[int]] = defaultdict(list)
    for change in changes:
        found[change.identity].append(number_of(change))
    return found


@given(histories(), st.sampled_from([LEAST_LIMIT, 3000, 10_000, wire.MAX_SEND]))
def test_messages_keep_to_size_instance_and_order(changes: list[Change], limit: int) -> None:
    messages = list(wire.broadcast_messages(changes, NOW, limit=limit))
    for message in messages:
        assert message.items, "no message is sent for nothing"
        assert len(wire.encode(message)) <= limit
        assert len({row.cluster_id for row in message.origins}) == len(message.origins)
    arrived = read(messages)
    for found in arrived:
        assert [number_of(change) for change in found] == sorted(number_of(change) for change in found)
    everything = [change for found in arrived for change in found]
    assert numbers_by_identity(everything) == numbers_by_identity(changes)
    in_order = sorted(everything, key=number_of)
    assert in_order == changes
    assert [change.origin for change in in_order] == [change.origin for change in changes]


@given(histories())
def test_without_mixed_instances_the_order_is_the_one_given(changes: list[Change]) -> None:
    steady = [
        change._replace(origin=Origin("0a", number + 1, NOW))
        if isinstance(change, Withdrawal)
        else replace(change, origin=Origin("0a", number + 1, NOW))
        for number, change in enumerate(changes)
    ]
    arrived = read(list(wire.broadcast_messages(steady, NOW, limit=3000)))
    assert [change for found in arrived for change in found] == steady


@pytest.mark.parametrize("messages", [wire.report_messages, wire.broadcast_messages])
def test_the_largest_records_stay_below_the_limit(messages: type) -> None:
    assert fault(LARGEST) is None
    (alone,) = messages([LARGEST], NOW, limit=LEAST_LIMIT)
    assert LEAST_LIMIT / 2 < len(wire.encode(alone)) <= LEAST_LIMIT
    assert len(list(messages([LARGEST] * 3, NOW, limit=LEAST_LIMIT))) == 3


@pytest.mark.parametrize("messages", [wire.report_messages, wire.broadcast_messages])
def test_a_large_snapshot_is_split_at_3_mib(messages: type) -> None:
    assert wire.MAX_SEND == 3 * 2**20
    sent = [replace(LARGEST, member_pool=f"pool-{number}") for number in range(5000)]
    sizes = [len(wire.encode(message)) for message in messages(sent, NOW)]
    assert len(sizes) == 2
    assert max(sizes) <= wire.MAX_SEND
    assert max(sizes) > wire.MAX_SEND * 0.7


def test_common_records_fill_messages_well() -> None:
    sent = [
        Capacity("west", "default", "python", f"pool-{number}", observed_at=NOW, origin=Origin("0a" * 8, 7, NOW))
        for number in range(2000)
    ]
    limit = 2**16
    sizes = [len(wire.encode(message)) for message in wire.broadcast_messages(sent, NOW, limit=limit)]
    assert sum(sizes) > 60_000
    assert max(sizes) <= limit
    assert min(sizes[:-1]) > limit / 8, "the bound on a record's size is not absurd"


def test_a_record_beyond_the_limit_goes_alone() -> None:
    sent: list[Change] = [change_of(number, "west", "pool-a", "0a", False, "") for number in range(3)]
    arrived = read(list(wire.broadcast_messages(sent, NOW, limit=1)))
    assert arrived == [[change] for change in sent]


def mixed(instances: Sequence[str], count: int) -> list[Change]:
    return [
        change_of(number, "west", f"pool-{number}", instance, False, "")
        for number, instance in zip(range(count), itertools.cycle(instances), strict=False)
    ]


def test_mixed_instances_need_one_message_each() -> None:
    """As in a hub's snapshot, in the order of names, while the records of a restarted agent replace the former's."""
    sent = mixed(["0a", "0b"], 1000)
    first, second = read(list(wire.broadcast_messages(sent, NOW)))
    assert first == sent[::2]
    assert second == sent[1::2]


def test_records_without_an_instance_join_any_message() -> None:
    sent = mixed(["0a", ""], 10)
    (found,) = read(list(wire.broadcast_messages(sent, NOW)))
    assert found == sent


def test_clusters_do_not_divide_each_other() -> None:
    sent = [change_of(number, f"c{number % 7}", "pool-a", f"0{number % 7}", False, "") for number in range(70)]
    (message,) = wire.broadcast_messages(sent, NOW)
    assert len(message.origins) == 7


def test_an_identity_that_goes_back_and_forth_keeps_its_order() -> None:
    sent = [
        change_of(number, "west", "pool-a", instance, False, "") for number, instance in enumerate(["0a", "0b"] * 3)
    ]
    arrived = read(list(wire.broadcast_messages(sent, NOW)))
    assert arrived == [[change] for change in sent]


def test_as_many_instances_as_records() -> None:
    sent = mixed([f"{number:04x}" for number in range(1000)], 1000)
    assert read(list(wire.broadcast_messages(sent, NOW))) == [[change] for change in sent]


def test_messages_are_made_as_they_are_asked_for() -> None:
    endless = (change_of(number, "west", f"pool-{number}", "0a", False, "") for number in itertools.count())
    messages = wire.broadcast_messages(endless, NOW, limit=LEAST_LIMIT)
    first, second = next(messages), next(messages)
    assert second.items[0].idle == len(first.items)
