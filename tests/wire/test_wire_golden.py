"""Ours, betterproto2, betterproto 2.0.0b7 and protoc's own classes agree on bytes and values, both ways; and the bytes
are those of the literals here, so that a number that changes in the .proto file fails a test."""

from __future__ import annotations

from typing import Any

import betterproto2
import pytest
from google.protobuf import descriptor_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.conftest import Peer
from trio_federation.pb.sandbox.sync import v1

INT32_LIMITS = (-(2**31), 2**31 - 1)
INT64_LIMITS = (-(2**63), 2**63 - 1)
UINT64_MAX = 2**64 - 1
COUNTS = ("idle", "running", "pending", "desired", "capacity", "saturated_for")
NAMES = ("cluster_id", "namespace", "env_name", "scaling_group", "member_pool", "state")
CARRIERS = ("ReportFederationRequest", "FederationBroadcast")

TYPICAL = {
    "cluster_id": "west",
    "namespace": "default",
    "env_name": "python",
    "scaling_group": "gpu",
    "idle": 3,
    "running": 300,
    "pending": 1,
    "desired": 5,
    "capacity": -1,
    "saturated_for": 30,
    "observed_for_ms": 1500,
    "member_pool": "pool-a",
    "autoscaling_enabled": True,
    "state": "Active",
    "seq": 7,
}
ZERO: dict[str, Any] = {
    **dict.fromkeys(NAMES, ""),
    **dict.fromkeys((*COUNTS, "observed_for_ms", "seq"), 0),
    "autoscaling_enabled": False,
}
NEGATIVE = {**TYPICAL, **dict.fromkeys(COUNTS, -1), "observed_for_ms": -1}
LEAST = {**ZERO, **dict.fromkeys(COUNTS, INT32_LIMITS[0]), "observed_for_ms": INT64_LIMITS[0]}
MOST = {
    **dict.fromkeys(NAMES, "n" * 253),
    **dict.fromkeys(COUNTS, INT32_LIMITS[1]),
    "observed_for_ms": INT64_LIMITS[1],
    "autoscaling_enabled": True,
    "seq": UINT64_MAX,
}
FOREIGN_WORDS = dict.fromkeys(NAMES, "zażółć 漢字 🦀 \u2028\x00")
ORIGINS = [
    {"cluster_id": "west", "instance": "0f" * 8, "uptime_ms": 86_400_000},
    {"cluster_id": "", "instance": "", "uptime_ms": 0},
    {"cluster_id": "z" * 63, "instance": "a" * 64, "uptime_ms": INT64_LIMITS[1]},
    {"cluster_id": "past", "instance": "b", "uptime_ms": INT64_LIMITS[0]},
]
WITHDRAWN = {"cluster_id": "west", "namespace": "default", "env_name": "python", "member_pool": "pool-a"}

CARRIED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one zero": {"items": [ZERO]},
    "zeros and an empty origin": {"items": [ZERO, {}, ZERO], "origins": [{}]},
    "typical": {"items": [TYPICAL], "origins": ORIGINS[:1]},
    "negative": {"items": [NEGATIVE]},
    "least": {"items": [LEAST]},
    "most": {"items": [MOST]},
    "foreign words": {"items": [FOREIGN_WORDS]},
    "withdrawal": {"items": [{**WITHDRAWN, "observed_for_ms": 2**40, "seq": 8}]},
    "origins alone": {"origins": ORIGINS},
    "times alone": {"sent_us": 1, "opened_us": 2},
    "times": {"items": [TYPICAL], "origins": ORIGINS[:1], "sent_us": 3_600_000_000, "opened_us": UINT64_MAX},
    "many": {"items": [{**TYPICAL, "member_pool": f"pool-{n}", "seq": n} for n in range(100)], "origins": ORIGINS},
}
VECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{carrier}: {name}": (carrier, values) for carrier in CARRIERS for name, values in CARRIED.items()},
    "ReportFederationResponse": ("ReportFederationResponse", {}),
    "WatchFederationRequest: no": ("WatchFederationRequest", {}),
    "WatchFederationRequest: false": ("WatchFederationRequest", {"spare_own_cluster": False}),
    "WatchFederationRequest: true": ("WatchFederationRequest", {"spare_own_cluster": True}),
    "WatchFederationRequest: beats": ("WatchFederationRequest", {"spare_own_cluster": True, "beat_ms": 2**32 - 1}),
    "FederationBroadcast: clusters": ("FederationBroadcast", {"sent_us": 1, "opened_us": 2, "clusters": 2**32 - 1}),
    "FederationBroadcast: a thousand": ("FederationBroadcast", {"items": [{**TYPICAL, "seq": n} for n in range(1000)]}),
    "EnvCapacity": ("EnvCapacity", TYPICAL),
    "EnvCapacity: least": ("EnvCapacity", LEAST),
    "EnvCapacity: nothing": ("EnvCapacity", {}),
    "ClusterOrigin": ("ClusterOrigin", ORIGINS[0]),
}


def with_zeros(message_name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a message with every field named that sync.proto gives it."""
    if message_name in CARRIERS:
        return {
            "items": [with_zeros("EnvCapacity", item) for item in values.get("items", [])],
            "origins": [with_zeros("ClusterOrigin", row) for row in values.get("origins", [])],
            "sent_us": values.get("sent_us", 0),
            "opened_us": values.get("opened_us", 0),
            **({"clusters": values.get("clusters", 0)} if message_name == "FederationBroadcast" else {}),
        }
    zeros = {
        "EnvCapacity": ZERO,
        "ClusterOrigin": {"cluster_id": "", "instance": "", "uptime_ms": 0},
        "WatchFederationRequest": {"spare_own_cluster": False, "beat_ms": 0},
        "ReportFederationResponse": {},
    }
    return {**zeros[message_name], **values}


def assert_agreement(peers: list[Peer], message_name: str, values: dict[str, Any]) -> None:
    encoded = {peer.name: peer.encode(peer.build(message_name, values)) for peer in peers}
    data = encoded["trio_federation"]
    assert encoded == dict.fromkeys(encoded, data)
    wanted = with_zeros(message_name, values)
    for peer in peers:
        message = peer.decode(message_name, data)
        assert peer.values(message) == wanted
        assert peer.encode(message) == data


@pytest.mark.parametrize("vector", VECTORS)
def test_all_agree_on_bytes_and_values(peers: list[Peer], vector: str) -> None:
    assert_agreement(peers, *VECTORS[vector])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
items = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, texts),
        **dict.fromkeys(COUNTS, st.integers(*INT32_LIMITS)),
        "observed_for_ms": st.integers(*INT64_LIMITS),
        "autoscaling_enabled": st.booleans(),
        "seq": st.integers(0, UINT64_MAX),
    },
)
rows = st.fixed_dictionaries(
    {}, optional={"cluster_id": texts, "instance": texts, "uptime_ms": st.integers(*INT64_LIMITS)}
)
times = st.fixed_dictionaries(
    {}, optional={"sent_us": st.integers(0, UINT64_MAX), "opened_us": st.integers(0, UINT64_MAX)}
)


@given(st.sampled_from(CARRIERS), st.lists(items, max_size=4), st.lists(rows, max_size=2), times)
def test_all_agree_on_any_message(
    peers: list[Peer],
    carrier: str,
    drawn: list[dict[str, Any]],
    origins: list[dict[str, Any]],
    own_time: dict[str, int],
) -> None:
    assert_agreement(peers, carrier, {"items": drawn, "origins": origins, **own_time})


def test_decoded_messages_are_what_betterproto2_would_have_made(betterproto2_alone: Peer, ours: Peer) -> None:
    data = ours.encode(ours.build("FederationBroadcast", {"items": [TYPICAL, {}], "origins": ORIGINS}))
    found, wanted = ours.decode("FederationBroadcast", data), betterproto2_alone.decode("FederationBroadcast", data)
    assert found == wanted
    assert vars(found) == vars(wanted)
    for ours_part, their_part in zip([*found.items, *found.origins], [*wanted.items, *wanted.origins], strict=True):
        assert type(ours_part) is type(their_part)
        assert vars(ours_part) == vars(their_part)
        assert {name: type(value) for name, value in vars(ours_part).items()} == {
            name: type(value) for name, value in vars(their_part).items()
        }


def test_classes_of_the_default_descriptor_pool_are_not_ours(protobuf: Peer) -> None:
    theirs = protobuf.module.EnvCapacity.DESCRIPTOR
    assert theirs.file.pool is descriptor_pool.Default()
    assert v1.EnvCapacity.DESCRIPTOR is not theirs
    assert v1.EnvCapacity.DESCRIPTOR.file.pool is not descriptor_pool.Default()


# --- frozen bytes ----------------------------------------------------------------------------------------------------

#: the tag of each field, as its first bytes on the wire: number * 8 + wire type, as a varint
TAGS = {
    ("EnvCapacity", "cluster_id"): "0a",
    ("EnvCapacity", "namespace"): "12",
    ("EnvCapacity", "env_name"): "1a",
    ("EnvCapacity", "scaling_group"): "22",
    ("EnvCapacity", "idle"): "28",
    ("EnvCapacity", "running"): "30",
    ("EnvCapacity", "pending"): "38",
    ("EnvCapacity", "desired"): "40",
    ("EnvCapacity", "capacity"): "48",
    ("EnvCapacity", "saturated_for"): "50",
    ("EnvCapacity", "observed_for_ms"): "58",
    ("EnvCapacity", "member_pool"): "62",
    ("EnvCapacity", "autoscaling_enabled"): "68",
    ("EnvCapacity", "state"): "a206",
    ("EnvCapacity", "seq"): "a806",
    ("ClusterOrigin", "cluster_id"): "0a",
    ("ClusterOrigin", "instance"): "12",
    ("ClusterOrigin", "uptime_ms"): "18",
    ("ReportFederationRequest", "items"): "0a",
    ("ReportFederationRequest", "origins"): "a206",
    ("ReportFederationRequest", "sent_us"): "a806",
    ("ReportFederationRequest", "opened_us"): "b006",
    ("FederationBroadcast", "items"): "0a",
    ("FederationBroadcast", "origins"): "a206",
    ("FederationBroadcast", "sent_us"): "a806",
    ("FederationBroadcast", "opened_us"): "b006",
    ("FederationBroadcast", "clusters"): "b806",
    ("WatchFederationRequest", "spare_own_cluster"): "a006",
    ("WatchFederationRequest", "beat_ms"): "a806",
}


def test_the_table_of_tags_names_every_field(ours: Peer) -> None:
    messages = [getattr(v1, name) for name in v1.__all__]
    messages = [message for message in messages if issubclass(message, betterproto2.Message)]
    assert {(type(it).__name__, name) for it in (message() for message in messages) for name in ours.values(it)} == set(
        TAGS
    )


@pytest.mark.parametrize("message_name, field", TAGS)
def test_each_field_has_its_tag(ours: Peer, message_name: str, field: str) -> None:
    examples = {"items": [{}], "origins": [{}], "autoscaling_enabled": True, "spare_own_cluster": True}
    value: Any = examples.get(field, "x" if field in (*NAMES, "instance") else 1)
    tail = {"items": "00", "origins": "00"}.get(field, "0178" if value == "x" else "01")
    assert ours.encode(ours.build(message_name, {field: value})).hex() == TAGS[message_name, field] + tail


#: whole messages: type, fields, and the bytes, with one field of a record per line where it helps the eye
GOLDEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a report": (
        "ReportFederationRequest",
        {"items": [TYPICAL], "origins": ORIGINS[:1]},
        """
        0a 4b
           0a 04 77657374  12 07 64656661756c74  1a 06 707974686f6e  22 03 677075
           28 03  30 ac02  38 01  40 05  48 ffffffffffffffffff01  50 1e  58 dc0b
           62 06 706f6f6c2d61  68 01  a206 06 416374697665  a806 07
        a206 1d
           0a 04 77657374  12 10 30663066306630663066306630663066  18 80b89929
        """,
    ),
    "a withdrawal": (
        "FederationBroadcast",
        {"items": [{**WITHDRAWN, "observed_for_ms": 2**40, "seq": 8}]},
        """
        0a 29
           0a 04 77657374  12 07 64656661756c74  1a 06 707974686f6e
           58 808080808020  62 06 706f6f6c2d61  a806 08
        """,
    ),
    "a record of a peer that knows no additions": (
        "FederationBroadcast",
        {
            "items": [
                {**WITHDRAWN, "idle": 2, "capacity": -1, "autoscaling_enabled": True, "observed_for_ms": 2**40 - 1}
            ]
        },
        """
        0a 35
           0a 04 77657374  12 07 64656661756c74  1a 06 707974686f6e
           28 02  48 ffffffffffffffffff01  58 ffffffffff1f  62 06 706f6f6c2d61  68 01
        """,
    ),
    "the least counts": (
        "EnvCapacity",
        {**dict.fromkeys(COUNTS, INT32_LIMITS[0]), "observed_for_ms": -1, "seq": UINT64_MAX},
        """
        28 80808080f8ffffffff01  30 80808080f8ffffffff01  38 80808080f8ffffffff01
        40 80808080f8ffffffff01  48 80808080f8ffffffff01  50 80808080f8ffffffff01
        58 ffffffffffffffffff01  a806 ffffffffffffffffff01
        """,
    ),
    "a watch": ("WatchFederationRequest", {"spare_own_cluster": True}, "a006 01"),
    "a response": ("ReportFederationResponse", {}, ""),
}


@pytest.mark.parametrize("vector", GOLDEN)
def test_bytes_are_frozen(peers: list[Peer], vector: str) -> None:
    message_name, values, text = GOLDEN[vector]
    data = bytes.fromhex(text)
    for peer in peers:
        assert peer.encode(peer.build(message_name, values)).hex() == data.hex()
        found = peer.values(peer.decode(message_name, data))
        assert found == with_zeros(message_name, values)


# --- unknown fields --------------------------------------------------------------------------------------------------

#: a field that no message of ours has, in each wire type, and what a newer peer could have added
UNKNOWN = {
    "varint": "d00f 01",
    "negative varint": "d00f ffffffffffffffffff01",
    "longer varint than needed": "d00f 8100",
    "fixed64": "d10f 0102030405060708",
    "bytes": "d20f 03 616263",
    "no bytes": "d20f 00",
    "bytes that look like a record": "d20f 06 0a0477657374",
    "group": "d30f d00f 05 d40f",
    "fixed32": "d50f 01020304",
    "several": "d00f 01 d20f 01 61 d00f 02 d50f 01020304",
    "highest number": "f8ffffff0f 01",
}


def around(data: bytes, extra: bytes, place: str) -> bytes:
    return {"before": extra + data, "after": data + extra, "both": extra + data + extra}[place]


def carrier_with(item: bytes, origin: bytes) -> bytes:
    """A message with the encoded record twice, so that records with and without extras can differ, and one origin."""
    plain = bytes.fromhex("0a03 0a0178")
    return b"\x0a" + bytes([len(item)]) + item + plain + b"\xa2\x06" + bytes([len(origin)]) + origin


@pytest.mark.parametrize("place", ["before", "after", "both"])
@pytest.mark.parametrize("level", ["message", "item", "origin", "all"])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_fields_are_kept_at_every_level(peers: list[Peer], kind: str, level: str, place: str) -> None:
    extra = bytes.fromhex(UNKNOWN[kind])
    item, origin = bytes.fromhex("0a0477657374 2803"), bytes.fromhex("0a0477657374 12020f0f")
    known = carrier_with(item, origin)
    if level in ("item", "all"):
        item = around(item, extra, place)
    if level in ("origin", "all"):
        origin = around(origin, extra, place)
    data = carrier_with(item, origin)
    if level in ("message", "all"):
        data = around(data, extra, place)

    ours, betterproto2_alone, *_ = peers
    wanted = ours.values(ours.decode("FederationBroadcast", known))
    assert wanted["items"][0]["idle"] == 3
    encoded = set()
    for peer in peers:
        message = peer.decode("FederationBroadcast", data)
        assert peer.values(message) == wanted
        encoded.add(peer.encode(message))
    assert len(encoded) == 1, "all send the unknown fields on, after the known ones of their message"
    assert len(encoded.pop()) == len(data), "whole"
    assert_same_unknown_fields(
        ours.decode("FederationBroadcast", data), betterproto2_alone.decode("FederationBroadcast", data)
    )


def assert_same_unknown_fields(found: Any, wanted: Any) -> None:
    assert found._unknown_fields == wanted._unknown_fields
    for name in ("items", "origins"):
        parts, wanted_parts = getattr(found, name), getattr(wanted, name)
        assert [it._unknown_fields for it in parts] == [it._unknown_fields for it in wanted_parts]


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize(
    "message_name, known",
    [("WatchFederationRequest", "a00601"), ("ReportFederationResponse", ""), ("ClusterOrigin", "1805")],
)
def test_unknown_fields_of_plain_messages_are_kept(peers: list[Peer], message_name: str, known: str, kind: str) -> None:
    data = bytes.fromhex(UNKNOWN[kind] + known)
    wanted = peers[0].values(peers[0].decode(message_name, bytes.fromhex(known)))
    for peer in peers:
        message = peer.decode(message_name, data)
        assert peer.values(message) == wanted
        assert peer.encode(message) == bytes.fromhex(known + UNKNOWN[kind])


extras = st.lists(st.sampled_from(sorted(UNKNOWN)), max_size=3).map(
    lambda kinds: bytes.fromhex("".join(UNKNOWN[k] for k in kinds))
)


@settings(max_examples=50)
@given(
    st.sampled_from(CARRIERS),
    st.lists(st.tuples(items, extras), max_size=4),
    st.lists(st.tuples(rows, extras), max_size=2),
    extras,
)
def test_all_agree_on_any_unknown_fields(
    peers: list[Peer],
    carrier: str,
    drawn: list[tuple[dict[str, Any], bytes]],
    origins: list[tuple[dict[str, Any], bytes]],
    extra: bytes,
) -> None:
    ours, betterproto2_alone, *others = peers
    values = {"items": [item for item, _ in drawn], "origins": [row for row, _ in origins]}
    message = ours.build(carrier, values)
    for part, (_, kept) in zip([*message.items, *message.origins], [*drawn, *origins], strict=True):
        part._unknown_fields = kept
    message._unknown_fields = extra
    data = ours.encode(message)
    assert data == betterproto2_alone.encode(message)
    found = ours.decode(carrier, data)
    assert_same_unknown_fields(found, message)
    assert found == message
    for peer in others:
        assert peer.encode(peer.decode(carrier, data)) == data


@pytest.mark.parametrize(
    "kind, item",
    {
        "a name that is a number": "0801 1a0178",
        "a name that is fixed32": "0d01020304 1a0178",
        "a count that is bytes": "2a020102 1a0178",
        "a count that is fixed64": "290102030405060708 1a0178",
        "a switch that is bytes": "6a0101 1a0178",
        "a seq that is fixed64": "a9060102030405060708 1a0178",
    }.items(),
)
def test_known_numbers_of_another_type_count_as_unknown(ours: Peer, protobuf: Peer, kind: str, item: str) -> None:
    """betterproto2 alone would put a value of the wrong type into the field; protobuf's rule is the safe one."""
    data = b"\x0a" + bytes([len(bytes.fromhex(item))]) + bytes.fromhex(item)
    message = ours.decode("FederationBroadcast", data)
    assert ours.values(message)["items"] == [{**ZERO, "env_name": "x"}], kind
    assert message.items[0]._unknown_fields == bytes.fromhex(item)[:-3]
    assert ours.encode(message) == protobuf.encode(protobuf.decode("FederationBroadcast", data))


#: other forms in which a peer may write fields that are known: bytes, what they mean, which of them are unknown fields
OTHER_FORMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fields in another order": ("1a0179 2803 0a0178", {"cluster_id": "x", "env_name": "y", "idle": 3}, ""),
    "a field twice": ("0a0178 0a0179", {"cluster_id": "y"}, ""),
    "zeros written out": ("0a00 2800 5800 6800 a80600", {}, ""),
    "longer varint than needed": ("28838000", {"idle": 3}, ""),
    "true that is not 1": ("6802", {"autoscaling_enabled": True}, ""),
    "more bits than int32 has": ("288380808010", {"idle": 3}, ""),
    "negative int32 in five bytes": ("28ffffffff0f", {"idle": -1}, ""),
    "negative int32 in five bytes, and as many unknown ones as it saves": (
        "28ffffffff0f d20f026161",
        {"idle": -1},
        "d20f026161",
    ),
}


@pytest.mark.parametrize("kind", OTHER_FORMS)
def test_other_forms_of_known_fields_are_read(peers: list[Peer], kind: str) -> None:
    text, wanted, unknown = OTHER_FORMS[kind]
    item = bytes.fromhex(text)
    for peer in peers:
        message = peer.decode("FederationBroadcast", b"\x0a" + bytes([len(item)]) + item)
        assert peer.values(message)["items"] == [{**ZERO, **wanted}]
        again = peer.decode("EnvCapacity", peer.encode(message)[2:])
        assert peer.values(again) == {**ZERO, **wanted}
    message = peers[0].decode("FederationBroadcast", b"\x0a" + bytes([len(item)]) + item)
    assert message.items[0]._unknown_fields == bytes.fromhex(unknown)
    assert len({peer.encode(peer.decode("EnvCapacity", item)) for peer in peers}) == 1


def test_nothing_falls_back_to_the_slow_way(monkeypatch: pytest.MonkeyPatch, ours: Peer) -> None:
    """However a peer fills a message, betterproto2's own parser and serialiser, which are tens of times slower, stay
    unused: 16 MiB would hold a hub up for a minute."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("betterproto2's own code was called")

    for name in ("load", "parse", "FromString", "dump", "__bytes__", "SerializeToString"):
        monkeypatch.setattr(betterproto2.Message, name, refuse)
    item = bytes.fromhex("0a09 0a0477657374 d00f01")
    for data in (item * 3, item * 3 + bytes.fromhex("d00f01" * 3), bytes.fromhex("0a09 d00f01 0a0477657374")):
        message = ours.decode("FederationBroadcast", data)
        assert message.items[0].cluster_id == "west"
        assert message.items[0]._unknown_fields == bytes.fromhex("d00f01")
        assert len(ours.encode(message)) == len(data)
