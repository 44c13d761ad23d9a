"""Records become messages and records again: every field, ages, withdrawals, origins, stamping, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation import wire
from trio_federation.capacity import INT32_MAX, UINT64_MAX, Capacity, Change, Fault, Origin, Withdrawal, fault
from trio_federation.pb.sandbox.sync.v1 import ClusterOrigin, EnvCapacity, FederationBroadcast, ReportFederationRequest

NOW = 5000.0
ORIGIN = Origin("0f0f", 7, NOW - 60)
RECORD = Capacity("west", "default", "python", "pool-a", observed_at=NOW, origin=ORIGIN)
AGGREGATE = Capacity("west", "default", "python", "", "gpu", idle=2, observed_at=NOW)

labels = st.text("az09", min_size=1, max_size=8) | st.sampled_from(["0", "a-b", "x" * 63])
subdomains = labels | st.tuples(labels, labels).map(".".join) | st.just(".".join(["x" * 63] * 3 + ["x" * 61]))
words = st.text(st.characters(categories=["L", "N", "P", "S"], include_characters=" "), max_size=10) | st.just(
    "🦀" * 63
)
groups = words.filter(lambda text: "::" not in text and "//" not in text)
counts = st.integers(0, INT32_MAX)
clocks = st.floats(0, 1e8)
ages = st.floats(0, 1e6)
origins = st.builds(Origin, st.text("0123456789abcdef", min_size=1, max_size=64), st.integers(1, UINT64_MAX), clocks)
capacities = st.builds(
    Capacity,
    labels,
    labels,
    subdomains,
    st.just("") | subdomains,
    groups,
    idle=counts,
    running=counts,
    pending=counts,
    desired=counts,
    autoscaling_enabled=st.booleans(),
    capacity=st.integers(-1, INT32_MAX),
    saturated_for=st.floats(0, INT32_MAX),
    state=words,
    observed_at=st.none() | clocks,
    origin=st.none() | origins,
)


def travel(
    changes: list[Change], sent: float = NOW, received: float = NOW, cluster_id: str | None = None
) -> list[Change]:
    """What arrives of changes that are sent as bytes at one moment and read at another, each on a clock of its own."""
    arrived: list[Change] = []
    for message in wire.broadcast_messages(changes, sent):
        read = wire.decode(wire.encode(message), FederationBroadcast)
        found = wire.changes_of(read, received, cluster_id)
        assert found.refused == []
        arrived += found.changes
    return arrived


def only(changes: list[Change]) -> Capacity:
    (change,) = changes
    assert isinstance(change, Capacity)
    return change


def age_of(record: Capacity, now: float) -> float:
    assert record.observed_at is not None
    return now - record.observed_at


# --- records ---------------------------------------------------------------------------------------------------------


@given(capacities, clocks, clocks)
def test_a_record_arrives_as_it_was_sent(record: Capacity, sent: float, received: float) -> None:
    assert fault(record) is None
    arrived = only(travel([record], sent, received))
    assert replace(arrived, saturated_for=0.0, observed_at=None) == replace(record, saturated_for=0.0, observed_at=None)
    assert arrived.saturated_for == math.ceil(record.saturated_for)

    age = max(0.0, sent - record.observed_at) if record.observed_at is not None else 0.0
    assert age - 0.001 - 1e-6 < age_of(arrived, received) < age + 1e-6

    if record.origin is None:
        assert arrived.origin is None
    else:
        assert arrived.origin is not None
        assert (arrived.origin.instance, arrived.origin.seq) == (record.origin.instance, record.origin.seq)
        uptime = max(0.0, sent - record.origin.started_at)
        assert uptime - 0.001 - 1e-6 < received - arrived.origin.started_at < uptime + 1e-6


@pytest.mark.parametrize("messages", [wire.report_messages, wire.broadcast_messages])
def test_the_fields_of_a_message(messages: Any) -> None:
    record = Capacity(
        "west",
        "default",
        "python",
        "pool-a",
        "gpu",
        idle=1,
        running=2,
        pending=3,
        desired=4,
        autoscaling_enabled=True,
        capacity=-1,
        saturated_for=29.01,
        state="Active",
        observed_at=NOW - 1.5,
        origin=ORIGIN,
    )
    (message,) = messages([record], NOW)
    assert type(message) is {"report_messages": ReportFederationRequest}.get(messages.__name__, FederationBroadcast)
    assert message.items == [
        EnvCapacity(
            cluster_id="west",
            namespace="default",
            env_name="python",
            scaling_group="gpu",
            idle=1,
            running=2,
            pending=3,
            desired=4,
            capacity=-1,
            saturated_for=30,
            observed_for_ms=1500,
            member_pool="pool-a",
            autoscaling_enabled=True,
            state="Active",
            seq=7,
        )
    ]
    assert message.origins == [ClusterOrigin(cluster_id="west", instance="0f0f", uptime_ms=60_000)]


@pytest.mark.parametrize("messages", [wire.report_messages, wire.broadcast_messages])
def test_no_changes_make_no_message(messages: Any) -> None:
    assert list(messages([], NOW)) == []
    assert list(messages(iter(()), NOW)) == []


def test_an_empty_message_says_nothing() -> None:
    for message in (ReportFederationRequest(), FederationBroadcast()):
        assert wire.changes_of(message, NOW) == wire.Received([], [])
        assert wire.changes_of(message, NOW, "west") == wire.Received([], [])


def test_a_sum_beyond_int32_is_not_sent() -> None:
    """Rollups may pass int32, are made where they are shown and never travel; if one did, it would not be cut short."""
    (message,) = wire.broadcast_messages([replace(RECORD, idle=INT32_MAX + 1)], NOW)
    with pytest.raises(ValueError, match="out of range"):
        wire.encode(message)


# --- ages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "age, milliseconds",
    [
        (0, 0),
        (-5, 0),
        (0.0004, 0),
        (0.9999, 999),
        (1.9994, 1999),
        (30, 30_000),
        (2**40 / 1000, 2**40 - 1),
        (1e18, 2**40 - 1),
        (1e308, 2**40 - 1),
    ],
)
def test_ages_are_whole_milliseconds_rounded_down(age: float, milliseconds: int) -> None:
    origin = Origin("0f", 1, -age)
    (message,) = wire.report_messages([replace(RECORD, observed_at=-age, origin=origin)], 0.0)
    assert message.items[0].observed_for_ms == milliseconds
    assert message.origins[0].uptime_ms == milliseconds


def test_a_record_without_a_stamp_is_new() -> None:
    (message,) = wire.report_messages([replace(RECORD, observed_at=None)], NOW)
    assert message.items[0].observed_for_ms == 0


def test_ages_of_received_records() -> None:
    item = EnvCapacity(cluster_id="west", namespace="default", env_name="python")
    for milliseconds, age in ((0, 0.0), (-1, 0.0), (-(2**63), 0.0), (1500, 1.5), (2**40 - 1, (2**40 - 1) / 1000)):
        item.observed_for_ms = milliseconds
        assert only(wire.changes_of(FederationBroadcast(items=[item]), NOW).changes).observed_at == NOW - age


@given(st.data(), ages, st.lists(st.tuples(clocks, st.floats(0, 1000)), min_size=1, max_size=6))
def test_ages_add_up_from_hub_to_hub_and_never_shrink(
    data: st.DataObject, age: float, hubs: list[tuple[float, float]]
) -> None:
    """Each hub has a clock of its own, receives at one moment and sends on after a while: what is lost is less than a
    millisecond each time it is rounded, and nothing where it was not kept."""
    now = data.draw(clocks)
    record = replace(RECORD, observed_at=now - age, origin=Origin("0f", 1, now - age))
    (message,) = wire.broadcast_messages([record], now)
    total, last, last_uptime = age, message.items[0].observed_for_ms, message.origins[0].uptime_ms
    for received, dwell in hubs:
        arrived = only(wire.changes_of(message, received).changes)
        (message,) = wire.broadcast_messages([arrived], received + dwell)
        milliseconds, uptime = message.items[0].observed_for_ms, message.origins[0].uptime_ms
        assert last + dwell * 1000 - 1 < milliseconds + 0.01
        assert last_uptime + dwell * 1000 - 1 < uptime + 0.01
        assert milliseconds >= last
        assert uptime >= last_uptime
        if dwell == 0:
            assert (milliseconds, uptime) == (last, last_uptime)
        total, last, last_uptime = total + dwell, milliseconds, uptime
    assert total * 1000 - (1 + len(hubs)) - 0.01 < last < total * 1000 + 0.01


# --- withdrawals -----------------------------------------------------------------------------------------------------

withdrawals = st.builds(lambda record, origin: Withdrawal(record.identity, origin), capacities, st.none() | origins)


@given(withdrawals, clocks, clocks)
def test_a_withdrawal_arrives_as_one(withdrawal: Withdrawal, sent: float, received: float) -> None:
    (arrived,) = travel([withdrawal], sent, received)
    assert isinstance(arrived, Withdrawal)
    assert arrived.identity == withdrawal.identity
    assert (arrived.origin is None) == (withdrawal.origin is None)
    if arrived.origin is not None and withdrawal.origin is not None:
        assert arrived.origin[:2] == withdrawal.origin[:2]


def test_a_withdrawal_on_the_wire_has_nothing_to_schedule() -> None:
    (message,) = wire.report_messages([Withdrawal(RECORD.identity, ORIGIN), Withdrawal(AGGREGATE.identity)], NOW)
    names = {"cluster_id": "west", "namespace": "default", "env_name": "python", "observed_for_ms": 2**40}
    assert message.items == [
        EnvCapacity(**names, member_pool="pool-a", seq=7),  # type: ignore[arg-type]
        EnvCapacity(**names, scaling_group="gpu"),  # type: ignore[arg-type]
    ]
    assert message.origins == [ClusterOrigin(cluster_id="west", instance="0f0f", uptime_ms=60_000)]


@pytest.mark.parametrize("age", [2**40, 2**40 + 1, 2**63 - 1])
def test_any_age_from_the_limit_on_is_a_withdrawal(age: int) -> None:
    item = EnvCapacity(
        cluster_id="west", namespace="default", env_name="python", member_pool="pool-a", observed_for_ms=age, seq=3
    )
    item.idle, item.capacity, item.state = -4, -9, "\n"
    row = ClusterOrigin(cluster_id="west", instance="0f0f", uptime_ms=60_000)
    found = wire.changes_of(FederationBroadcast(items=[item], origins=[row]), NOW)
    assert found == wire.Received([Withdrawal(RECORD.identity, Origin("0f0f", 3, NOW - 60))], [])


def test_an_aged_record_is_no_withdrawal() -> None:
    """However old it is, a record that a hub passes on stays below the limit, and stays a record at the next one."""
    ancient = replace(RECORD, observed_at=NOW - 2.0**50)
    arrived = only(travel([only(travel([ancient]))]))
    assert age_of(arrived, NOW) == pytest.approx((2**40 - 1) / 1000)


def test_a_withdrawal_with_a_bad_name_is_refused() -> None:
    item = EnvCapacity(cluster_id="west", namespace="Default", env_name="python", observed_for_ms=2**40)
    found = wire.changes_of(FederationBroadcast(items=[item]), NOW)
    assert found.changes == []
    assert [wrong.reason for wrong in found.refused] == ["namespace"]


# --- origins ---------------------------------------------------------------------------------------------------------


def test_an_origin_needs_a_row_and_a_seq() -> None:
    names = {"namespace": "default", "env_name": "python"}
    items = [
        EnvCapacity(cluster_id="west", member_pool="said", seq=4, **names),  # type: ignore[arg-type]
        EnvCapacity(cluster_id="west", member_pool="no-seq", **names),  # type: ignore[arg-type]
        EnvCapacity(cluster_id="east", member_pool="no-row", seq=4, **names),  # type: ignore[arg-type]
    ]
    rows = [ClusterOrigin(cluster_id="west", instance="0f", uptime_ms=2500), ClusterOrigin("south", "1f", 1)]
    found = wire.changes_of(FederationBroadcast(items=items, origins=rows), NOW)
    assert found.refused == []
    assert [change.origin for change in found.changes] == [Origin("0f", 4, NOW - 2.5), None, None]


def test_a_record_without_origin_has_no_seq_and_no_row() -> None:
    changes: list[Change] = [replace(RECORD, origin=None), replace(AGGREGATE, origin=Origin("0f", 0, NOW))]
    (message,) = wire.report_messages(changes, NOW)
    assert [item.seq for item in message.items] == [0, 0]
    assert message.origins == []


def test_a_message_names_each_instance_once_with_its_longest_uptime() -> None:
    """A start is guessed anew from each batch, and a batch that was long on its way makes it too late."""
    changes: list[Change] = [
        replace(RECORD, member_pool=f"pool-{number}", origin=Origin("0f", number, started))
        for number, started in ((1, NOW - 59), (2, NOW - 60), (3, NOW - 58))
    ]
    changes.append(Withdrawal(("east", "default", "python", "pool-a"), Origin("0f", 1, NOW + 1)))
    (message,) = wire.broadcast_messages(changes, NOW)
    assert message.origins == [ClusterOrigin("west", "0f", 60_000), ClusterOrigin("east", "0f", 0)]
    assert [item.seq for item in message.items] == [1, 2, 3, 1]


def test_a_negative_uptime_counts_as_none() -> None:
    row = ClusterOrigin(cluster_id="west", instance="0f", uptime_ms=-5)
    item = EnvCapacity(cluster_id="west", namespace="default", env_name="python", seq=1)
    found = wire.changes_of(FederationBroadcast(items=[item], origins=[row]), NOW)
    assert only(found.changes).origin == Origin("0f", 1, NOW)


BAD_INSTANCES = ["", "0F", "0g", "0" * 65, "0f\n", "0x1", " 0f", "\u0660f", "0-f"]


@pytest.mark.parametrize("instance", BAD_INSTANCES)
def test_a_bad_instance_is_refused_and_its_records_go_on(instance: str) -> None:
    rows = [ClusterOrigin("west", instance, 5), ClusterOrigin("east", "0f", 5)]
    items = [EnvCapacity(cluster_id=name, namespace="default", env_name="python", seq=1) for name in ("west", "east")]
    found = wire.changes_of(ReportFederationRequest(items=items, origins=rows), NOW)
    assert [change.origin for change in found.changes] == [None, Origin("0f", 1, NOW - 0.005)]
    (wrong,) = found.refused
    assert wrong.reason == "instance"
    assert "west" in wrong.detail
    assert len(wrong.detail.splitlines()) == 1
    assert not wire.is_instance(instance)


@pytest.mark.parametrize("instance", ["0", "f", "0123456789abcdef", "a" * 64])
def test_good_instances(instance: str) -> None:
    assert wire.is_instance(instance)


def test_what_is_no_text_is_no_instance() -> None:
    assert not wire.is_instance(None)
    assert not wire.is_instance(b"0f")


def test_a_bad_cluster_in_an_origin_is_refused() -> None:
    found = wire.changes_of(FederationBroadcast(origins=[ClusterOrigin("West" * 100, "0f", 5)]), NOW)
    assert [wrong.reason for wrong in found.refused] == ["cluster_id"]
    assert len(found.refused[0].detail) < 200


@pytest.mark.parametrize("cluster_id", [None, "west"])
def test_a_second_instance_of_a_cluster_is_refused(cluster_id: str | None) -> None:
    claimed = "west" if cluster_id is None else "east"
    rows = [ClusterOrigin("west", "0f", 9000), ClusterOrigin(claimed, "1f", 8000), ClusterOrigin("west", "0f", 7000)]
    item = EnvCapacity(cluster_id="west", namespace="default", env_name="python", seq=1)
    found = wire.changes_of(ReportFederationRequest(items=[item], origins=rows), NOW, cluster_id)
    assert only(found.changes).origin == Origin("0f", 1, NOW - 9)
    assert [wrong.reason for wrong in found.refused] == ["instance"]
    assert "0f" in found.refused[0].detail
    assert "1f" in found.refused[0].detail


# --- stamping --------------------------------------------------------------------------------------------------------


@given(st.lists(capacities, max_size=3), labels)
def test_the_identity_of_the_call_is_stamped_over_everything(records: list[Capacity], cluster_id: str) -> None:
    origin = Origin("0f", 1, NOW)
    changes: list[Change] = [replace(record, origin=origin) for record in records]
    changes += [Withdrawal(record.identity, origin) for record in records]
    arrived = travel(changes, cluster_id=cluster_id)
    assert [change.identity for change in arrived] == [(cluster_id, *change.identity[1:]) for change in changes]
    assert all(change.origin == origin for change in arrived)


@pytest.mark.parametrize("claim", ["", "East", "a" * 1000, "east"])
def test_a_stamp_makes_good_what_a_record_claims(claim: str) -> None:
    items = [EnvCapacity(cluster_id=claim, namespace="default", env_name="python", seq=3)]
    rows = [ClusterOrigin(claim, "0f", 0)]
    found = wire.changes_of(ReportFederationRequest(items=items, origins=rows), NOW, "west")
    assert found.refused == []
    assert only(found.changes).cluster_id == "west"
    assert only(found.changes).origin == Origin("0f", 3, NOW)


def test_a_bad_stamp_refuses_everything_and_raises_nothing() -> None:
    items = [EnvCapacity(cluster_id="west", namespace="default", env_name="python")]
    rows = [ClusterOrigin("west", "0f", 0)]
    found = wire.changes_of(ReportFederationRequest(items=items, origins=rows), NOW, "")
    assert found.changes == []
    assert [wrong.reason for wrong in found.refused] == ["cluster_id", "cluster_id"]


# --- refused ---------------------------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[str, Any]] = [
    ("cluster_id", ""),
    ("cluster_id", "West"),
    ("cluster_id", "a" * 64),
    ("cluster_id", "a.b"),
    ("namespace", ""),
    ("namespace", "-a"),
    ("env_name", ""),
    ("env_name", "a..b"),
    ("env_name", "a" * 254),
    ("member_pool", "a_b"),
    ("member_pool", "a" * 254),
    ("scaling_group", "a::b"),
    ("scaling_group", "a//b"),
    ("scaling_group", "a\x00"),
    ("scaling_group", "a\u2028b"),
    ("scaling_group", "a" * 64),
    ("idle", -1),
    ("running", -1),
    ("pending", -1),
    ("desired", -(2**31)),
    ("capacity", -2),
    ("saturated_for", -1),
    ("state", "a\nb"),
    ("state", "a" * 64),
]


@pytest.mark.parametrize("name, value", BAD_FIELDS)
def test_a_bad_record_is_refused_by_reason_and_the_rest_goes_on(name: str, value: Any) -> None:
    pools = ["pool-a", "pool-b", "pool-c"]
    good: dict[str, Any] = {"cluster_id": "west", "namespace": "default", "env_name": "python"}
    items = [EnvCapacity(**{**good, "member_pool": pool}) for pool in pools]
    items[1] = EnvCapacity(**{**good, "member_pool": "pool-b", name: value})
    data = wire.encode(ReportFederationRequest(items=items))
    found = wire.changes_of(wire.decode(data, ReportFederationRequest), NOW)
    assert [change.identity[3] for change in found.changes] == ["pool-a", "pool-c"]
    (wrong,) = found.refused
    assert wrong.reason == name
    assert isinstance(wrong, Fault)
    assert name in wrong.detail


items_of_any_kind = st.builds(
    EnvCapacity,
    *[st.text(max_size=5) | labels] * 4,
    *[st.integers(-(2**31), INT32_MAX)] * 6,
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=5) | labels,
    st.booleans(),
    st.text(max_size=5),
    st.integers(0, UINT64_MAX),
)
rows_of_any_kind = st.builds(
    ClusterOrigin, st.text(max_size=5) | labels, st.text(max_size=5) | labels, st.integers(-(2**63), 2**63 - 1)
)


@given(
    st.lists(items_of_any_kind, max_size=5), st.lists(rows_of_any_kind, max_size=3), clocks, st.none() | st.just("west")
)
def test_whatever_arrives_is_a_valid_change_or_refused(
    items: list[EnvCapacity], rows: list[ClusterOrigin], now: float, cluster_id: str | None
) -> None:
    found = wire.changes_of(FederationBroadcast(items=items, origins=rows), now, cluster_id)
    assert len(items) <= len(found.changes) + len(found.refused) <= len(items) + len(rows)
    for change in found.changes:
        if isinstance(change, Capacity):
            assert fault(change) is None
            assert age_of(change, now) >= 0
        if cluster_id is not None:
            assert change.identity[0] == cluster_id
        if change.origin is not None:
            assert wire.is_instance(change.origin.instance)
            assert change.origin.started_at <= now
    # whatever was accepted can be passed on
    for message in wire.broadcast_messages(found.changes, now):
        assert wire.encode(message)
