"""What is read and written in a quick way, for those who read and write most, says the same, byte by byte, as what is
read and written as everybody else does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.test_wire_bytes import BROADCAST, fields_of_any_kind
from tests.wire.test_wire_changes import capacities, clocks, items_of_any_kind, labels, origins, rows_of_any_kind
from tests.wire.test_wire_split import LARGEST, histories
from trio_federation import capacity, wire
from trio_federation.capacity import Capacity, Change, Origin, Withdrawal, fault
from trio_federation.errors import ProtocolViolation, ResourceExhausted
from trio_federation.pb.sandbox.sync.v1 import EnvCapacity, FederationBroadcast, ReportFederationRequest
from trio_federation.rpc.codec import FederationCodec

NOW = 5000.0
ORIGIN = Origin("0f0f", 7, NOW - 60)


def told(changes: list[Change]) -> list[Any]:
    """Everything in changes, types included, for `==`."""
    return [
        [(type(value), value) for value in (getattr(change, field.name) for field in fields(change))]
        if isinstance(change, Capacity)
        else (change, change.origin)
        for change in changes
    ]


def forget_names() -> None:
    for names in (capacity.LABELS, capacity.SUBDOMAINS, capacity.GROUPS, capacity.STATES):
        names.clear()


# --- what is received ------------------------------------------------------------------------------------------------


@given(
    st.lists(items_of_any_kind, max_size=5), st.lists(rows_of_any_kind, max_size=3), clocks, st.none() | st.just("west")
)
def test_what_is_read_without_dataclasses_says_the_same(
    items: list[EnvCapacity], rows: list[Any], now: float, cluster_id: str | None
) -> None:
    """Also once its names are known."""
    message = FederationBroadcast(items=items, origins=rows)
    data = wire.encode(message)
    forget_names()
    whole = wire.changes_of(wire.decode(data, FederationBroadcast), now, cluster_id)
    forget_names()
    for _ in range(2):
        found = wire.changes_of(wire.ReceivedBroadcast(data), now, cluster_id)
        assert told(found.changes) == told(whole.changes)
        assert found.refused == whole.refused


@given(st.lists(capacities, max_size=8), clocks)
def test_records_that_were_read_are_as_good_as_those_that_were_checked(records: list[Capacity], now: float) -> None:
    for message in wire.broadcast_messages(records, now):
        data = wire.encode(message)
        for _ in range(2):
            for change in wire.changes_of(wire.ReceivedBroadcast(data), now).changes:
                assert type(change) is Capacity
                assert fault(change) is None
                assert all(type(value) is not int for value in (change.saturated_for, change.observed_at))


def test_records_of_a_report_share_their_names_and_their_origin() -> None:
    records = [Capacity("west", "ns", "env", f"p{number}", "gpu", state="Active", observed_at=NOW) for number in (1, 2)]
    sent: list[Change] = [replace(record, origin=ORIGIN) for record in records]
    (message,) = wire.BroadcastEncoder().messages(sent, NOW)
    forget_names()
    wire.changes_of(wire.ReceivedBroadcast(message.data), NOW)
    first, second = wire.changes_of(wire.ReceivedBroadcast(message.data), NOW).changes
    assert isinstance(first, Capacity)
    assert isinstance(second, Capacity)
    assert [first, second] == sent
    for name in ("cluster_id", "namespace", "env_name", "scaling_group", "state", "origin", "observed_at"):
        assert getattr(first, name) is getattr(second, name)


def test_an_origin_is_shared_only_by_records_of_one_report() -> None:
    sent: list[Change] = [
        Capacity("west", "ns", "env", "p1", observed_at=NOW, origin=ORIGIN),
        Capacity("west", "ns", "env", "p2", observed_at=NOW - 1, origin=ORIGIN._replace(seq=8)),
        Capacity("east", "ns", "env", "p1", observed_at=NOW - 1, origin=ORIGIN._replace(seq=8, started_at=NOW - 5)),
        Capacity("north", "ns", "env", "p1", observed_at=NOW),
        Withdrawal(("east", "ns", "env", "p2"), ORIGIN._replace(seq=8, started_at=NOW - 5)),
        Capacity("west", "ns", "env", "p3", observed_at=NOW - 2, origin=ORIGIN),
    ]
    (message,) = wire.BroadcastEncoder().messages(sent, NOW)
    for _ in range(2):
        found = wire.changes_of(wire.ReceivedBroadcast(message.data), NOW)
        assert found.refused == []
        assert told(found.changes) == told(sent)


@given(st.binary(max_size=60) | fields_of_any_kind(), st.sampled_from([wire.ReceivedBroadcast, wire.ReceivedReport]))
def test_any_bytes_are_received_as_they_are_decoded(
    data: bytes, received_type: type[wire.ReceivedBroadcast | wire.ReceivedReport]
) -> None:
    message_type = FederationBroadcast if received_type is wire.ReceivedBroadcast else ReportFederationRequest
    refusal = ""
    try:
        whole: Any = wire.decode(data, message_type)
    except ProtocolViolation as error:
        refusal = str(error)
    if refusal:
        with pytest.raises(ProtocolViolation) as caught:
            received_type(data)
        assert str(caught.value) == refusal
        return
    received = received_type(data)
    assert received.decoded() == whole
    assert wire.encode(received.decoded()) == wire.encode(whole), "unknown fields are kept too"
    assert len(received.items) == len(whole.items)
    assert told(wire.changes_of(received, NOW).changes) == told(wire.changes_of(whole, NOW).changes)


def test_a_message_with_too_many_records_is_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_RECORDS", 5)
    wire.ReceivedBroadcast(b"\x0a\0" * 5)
    with pytest.raises(ResourceExhausted, match="a message with 6 items is too large, at most 5 are taken"):
        wire.ReceivedBroadcast(b"\x0a\0" * 6)


def test_the_codec_receives_what_the_call_declares() -> None:
    codec = FederationCodec()
    data = wire.encode(BROADCAST)
    received = codec.decode(data, wire.ReceivedBroadcast)
    assert type(received) is wire.ReceivedBroadcast
    assert received.decoded() == BROADCAST
    with pytest.raises(ProtocolViolation, match="1 bytes that should be a ReportFederationRequest"):
        codec.decode(b"\x80", wire.ReceivedReport)


# --- what is sent ----------------------------------------------------------------------------------------------------


def plainly(changes: list[Change], now: float) -> list[bytes]:
    return [wire.encode(message) for message in wire.broadcast_messages(changes, now)]


def sent(encoder: wire.BroadcastEncoder, changes: list[Change], now: float) -> list[bytes]:
    return [message.data for message in encoder.messages(changes, now)]


withdrawals = st.builds(
    lambda record, origin: Withdrawal(record.identity, origin), capacities, st.none() | origins | st.just(ORIGIN)
)
one_origin = st.builds(
    lambda cluster, pool, idle, age, origin: Capacity(
        cluster, "ns", "env", pool, idle=idle, observed_at=NOW - age, origin=origin
    ),
    st.sampled_from(("east", "west")) | labels,
    labels,
    st.integers(0, 3),
    st.sampled_from((0.0, 0.0004, 0.0005, 1.0)),
    # measured anew with every batch, the start of an instance may look a little earlier or later
    st.sampled_from((ORIGIN, ORIGIN._replace(started_at=NOW - 61), ORIGIN._replace(started_at=NOW - 59, seq=8))),
)
batches = st.lists(st.one_of(capacities, withdrawals, one_origin), max_size=8) | histories()


@given(st.lists(st.tuples(batches, st.sampled_from((0.0, 0.0003, 0.0009, 0.001, 1.0, -2.0))), max_size=4), st.data())
def test_messages_for_many_are_those_for_one(steps: list[tuple[list[Change], float]], data: st.DataObject) -> None:
    """Whatever went out before, and when."""
    encoder = wire.BroadcastEncoder()
    now = NOW
    before: list[Change] = []
    for batch, pause in steps:
        now += pause
        before += batch
        assert sent(encoder, batch, now) == plainly(batch, now)
        # somebody else who watches: some of the same changes, and others
        some = [change for change in before if data.draw(st.booleans())]
        assert sent(encoder, some, now) == plainly(some, now)
        assert sent(encoder, some, now + 0.0004) == plainly(some, now + 0.0004)


@pytest.mark.parametrize("starts", [(60, 61), (61, 60), (60, 62, 61), (60, 60)])
def test_of_several_starts_of_an_instance_the_earliest_is_told(starts: tuple[int, ...]) -> None:
    batch: list[Change] = [
        Capacity("west", "ns", "env", f"p{start}-{number}", observed_at=NOW, origin=Origin("0f", 7, NOW - start))
        for number, start in enumerate(starts)
    ]
    (data,) = sent(wire.BroadcastEncoder(), batch, NOW)
    assert [data] == plainly(batch, NOW)
    assert [row.uptime_ms for row in wire.ReceivedBroadcast(data).origins] == [1000 * max(starts)]


class Counted:
    """Counts the records that are encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records = 0
        self._encode = wire._encoded_item
        monkeypatch.setattr(wire, "_encoded_item", self)

    def __call__(self, change: Change, age: int) -> bytes:
        self.records += 1
        return self._encode(change, age)


def test_a_record_is_encoded_once_for_all_who_get_it_in_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    encoder = wire.BroadcastEncoder()
    changes: list[Change] = [
        Capacity("west", "ns", "env", f"p{number}", observed_at=NOW - number, origin=ORIGIN) for number in range(10)
    ]
    for left_out in range(10):
        sent(encoder, changes[:left_out] + changes[left_out + 1 :], NOW)
    assert counted.records == 10
    sent(encoder, changes, NOW + 0.0005)
    assert counted.records == 10, "they have the same ages, in whole milliseconds"
    sent(encoder, changes, NOW + 0.9)
    assert counted.records == 20


def test_what_was_encoded_is_kept_for_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = wire.BroadcastEncoder()
    for step in range(100):
        now = NOW + step * 0.01
        batch: list[Change] = [Capacity("west", "ns", "env", f"p{pool}", observed_at=now) for pool in range(5)]
        sent(encoder, batch, now)
        assert len(encoder._encoded) == 5


def test_what_is_encoded_in_one_go_fits_into_a_message() -> None:
    batch: list[Change] = [replace(LARGEST, cluster_id=f"{number:063d}") for number in range(wire.AT_ONCE)]
    (data,) = sent(wire.BroadcastEncoder(), batch, 0.0)
    assert [data] == plainly(batch, 0.0)
    assert len(data) < wire.MAX_SEND


def test_more_than_that_is_split_as_ever() -> None:
    batch: list[Change] = [replace(LARGEST, cluster_id=f"{number:063d}") for number in range(3 * wire.AT_ONCE)]
    found = sent(wire.BroadcastEncoder(), batch, 0.0)
    assert len(found) > 1
    assert found == plainly(batch, 0.0)


def test_the_codec_sends_what_is_encoded_already_where_a_broadcast_is_due() -> None:
    codec = FederationCodec()
    encoded = wire.EncodedBroadcast(wire.encode(BROADCAST))
    assert codec.encode(encoded, FederationBroadcast) == codec.encode(BROADCAST, FederationBroadcast)
    with pytest.raises(TypeError, match="this call sends ReportFederationRequest, not EncodedBroadcast"):
        codec.encode(encoded, ReportFederationRequest)
