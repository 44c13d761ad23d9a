"""Bytes that are no message, values that no message can hold, and the codec that grpclib is handed."""

from __future__ import annotations

from typing import Any

import pytest
from betterproto2 import Message
from google.protobuf.message import DecodeError
from grpclib.encoding.base import CodecBase
from hypothesis import given
from hypothesis import strategies as st

from trio_federation import wire
from trio_federation.errors import ProtocolViolation, ResourceExhausted
from trio_federation.pb.sandbox.sync.v1 import (
    ClusterOrigin,
    EnvCapacity,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
)
from trio_federation.rpc.codec import FederationCodec

MESSAGES: list[type[Message]] = [
    ClusterOrigin,
    EnvCapacity,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
]
RECORD = EnvCapacity(cluster_id="west", namespace="default", env_name="python", idle=3, state="Active", seq=7)
BROADCAST = FederationBroadcast(items=[RECORD, RECORD], origins=[ClusterOrigin("west", "0f", 60_000)])

#: bytes that are no message of any type
BROKEN = {
    "end within a tag": "80",
    "end within a varint": "0880",
    "varint of eleven bytes": "08" + "80" * 10 + "01",
    "end within fixed32": "0d0102",
    "end within fixed64": "0901020304",
    "length beyond the end": "0a05 0a01",
    "length beyond 2 GiB": "0affffffff0f",
    "wire type 6": "0e",
    "wire type 7": "0f",
    "end of no group": "d40f",
    "group without end": "d30f 0801",
    "group with another's end": "d30f dc0f",
}
#: items that are broken inside a message that is not
BROKEN_ITEMS = {
    **BROKEN,
    "field number 0": "0001",
    "name that is not UTF-8": "0a01ff",
    "name that is half a character": "0a02c3",
    "name that is half a surrogate pair": "0a03eda080",
    "name in overlong UTF-8": "0a02c080",
    "addition that is not UTF-8": "a20601ff",
}


@pytest.mark.parametrize("message_type", MESSAGES)
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_bytes_are_a_protocol_violation(kind: str, message_type: type[Message]) -> None:
    with pytest.raises(
        ProtocolViolation, match=rf"bytes that should be a {message_type.__name__} are not valid"
    ) as got:
        wire.decode(bytes.fromhex(BROKEN[kind]), message_type)
    assert isinstance(got.value.__cause__, DecodeError)
    assert len(str(got.value).splitlines()) == 1


@pytest.mark.parametrize("field", ["0a", "a206"])
@pytest.mark.parametrize("kind", BROKEN_ITEMS)
def test_broken_parts_are_a_protocol_violation(kind: str, field: str) -> None:
    item = bytes.fromhex(BROKEN_ITEMS[kind])
    if (field, kind) == ("a206", "addition that is not UTF-8"):
        item = bytes.fromhex("1201ff")  # an origin has no such field; its instance is text too
    data = bytes.fromhex("0a03 0a0178") + bytes.fromhex(field) + bytes([len(item)]) + item
    for message_type in (ReportFederationRequest, FederationBroadcast):
        with pytest.raises(ProtocolViolation, match=message_type.__name__) as got:
            wire.decode(data, message_type)
        assert isinstance(got.value.__cause__, DecodeError)


def test_every_cut_is_read_or_refused() -> None:
    """Also where a message ends early between two fields, as then nothing can tell."""
    data = wire.encode(BROADCAST)
    whole = 0
    for end in range(len(data)):
        try:
            found = wire.decode(data[:end], FederationBroadcast)
        except ProtocolViolation:
            continue
        whole += 1
        assert found.items == BROADCAST.items[: len(found.items)]
    assert whole == 3, "nothing, one record, two records"


@given(st.binary(max_size=60), st.sampled_from(MESSAGES))
def test_random_bytes_raise_nothing_else(data: bytes, message_type: type[Message]) -> None:
    check_read_or_refused(data, message_type)


def fields_of_any_kind() -> st.SearchStrategy[bytes]:
    """Bytes with the form of fields, of any number and type, nested: they get further than random ones."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    numbers = st.sampled_from([*range(1, 15), 100, 101, 250])
    varints = st.integers(0, 2**64 - 1).map(varint)

    def field(content: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        return st.one_of(
            st.builds(lambda number, value: varint(number << 3) + value, numbers, varints),
            st.builds(
                lambda number, value: varint(number << 3 | 1) + value, numbers, st.binary(min_size=8, max_size=8)
            ),
            st.builds(lambda number, value: varint(number << 3 | 2) + varint(len(value)) + value, numbers, content),
            st.builds(
                lambda number, value: varint(number << 3 | 5) + value, numbers, st.binary(min_size=4, max_size=4)
            ),
        )

    texts = st.text(max_size=5).map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=5)
    items = st.lists(field(texts), max_size=5).map(b"".join)
    return st.lists(field(items | texts), max_size=5).map(b"".join)


@given(fields_of_any_kind(), st.sampled_from(MESSAGES))
def test_fields_of_any_kind_raise_nothing_else(data: bytes, message_type: type[Message]) -> None:
    check_read_or_refused(data, message_type)


@given(st.data())
def test_damaged_messages_raise_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(wire.encode(BROADCAST))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    check_read_or_refused(bytes(whole), FederationBroadcast)


def check_read_or_refused(data: bytes, message_type: type[Message]) -> None:
    try:
        message = wire.decode(data, message_type)
    except ProtocolViolation:
        return
    encoded = wire.encode(message)
    again = wire.decode(encoded, message_type)
    assert again == message
    assert wire.encode(again) == encoded
    if isinstance(message, ReportFederationRequest | FederationBroadcast):
        found = wire.changes_of(message, 5000.0)
        for sent in wire.broadcast_messages(found.changes, 5000.0):
            assert wire.encode(sent)


def test_a_deep_group_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        wire.decode(b"\xd3\x0f" * 100_000 + b"\xd4\x0f" * 100_000, FederationBroadcast)


def test_many_unknown_fields_cost_no_more_than_bytes() -> None:
    """They are taken in one piece; taken one by one they would add up to 3 MiB of copies for each of a million."""
    extra = bytes.fromhex("d00f01") * 2**20
    for message_type in MESSAGES:
        message = wire.decode(extra, message_type)
        assert message._unknown_fields == extra
        assert wire.encode(message) == extra


@pytest.mark.parametrize(
    "field, value, error",
    [
        ("idle", 2**31, ValueError),
        ("capacity", -(2**31) - 1, ValueError),
        ("observed_for_ms", 2**63, ValueError),
        ("seq", -1, ValueError),
        ("seq", 2**64, ValueError),
        ("idle", "3", TypeError),
        ("idle", 0.5, (TypeError, ValueError)),
        ("env_name", 3, TypeError),
        ("env_name", "\ud800", ValueError),
        ("_unknown_fields", b"\x80", ValueError),
    ],
)
def test_a_value_that_does_not_fit_is_not_encoded(field: str, value: Any, error: type[Exception]) -> None:
    item = EnvCapacity(cluster_id="west")
    setattr(item, field, value)
    for message in (item, FederationBroadcast(items=[item])):
        if (field, message) == ("_unknown_fields", item):
            continue  # its own come last and are only copied
        with pytest.raises(error):
            wire.encode(message)


class Stranger(Message):
    """A message that sync.proto has not."""


def test_other_messages_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Stranger is no message of sync\.proto"):
        wire.encode(Stranger())
    with pytest.raises(TypeError, match=r"Stranger is no message of sync\.proto"):
        wire.decode(b"", Stranger)


def test_limits_are_those_of_the_design() -> None:
    assert (wire.MAX_SEND, wire.MAX_RECEIVE, wire.WITHDRAWN_AGE_MS) == (3 * 2**20, 16 * 2**20, 2**40)


# --- the codec -------------------------------------------------------------------------------------------------------


def test_the_codec_is_one_of_grpclibs() -> None:
    codec = FederationCodec()
    assert isinstance(codec, CodecBase)
    assert codec.__content_subtype__ == "proto"


@pytest.mark.parametrize(
    "message", [BROADCAST, ReportFederationResponse(), WatchFederationRequest(spare_own_cluster=True)]
)
def test_the_codec_goes_both_ways(message: Message) -> None:
    codec = FederationCodec()
    data = codec.encode(message, type(message))
    assert data == bytes(message)
    assert codec.decode(data, type(message)) == message


def test_the_codec_sends_what_the_call_declares_and_nothing_else() -> None:
    codec = FederationCodec()
    with pytest.raises(TypeError, match="this call sends ReportFederationRequest, not FederationBroadcast"):
        codec.encode(BROADCAST, ReportFederationRequest)
    with pytest.raises(TypeError, match="not NoneType"):
        codec.encode(None, ReportFederationRequest)


def test_the_codec_names_the_message_that_is_broken() -> None:
    with pytest.raises(ProtocolViolation, match=r"1 bytes .* WatchFederationRequest .* sandbox\.sync\.v1"):
        FederationCodec().decode(b"\x80", WatchFederationRequest)


@pytest.mark.parametrize("tag", ["0a", "a206"], ids=["items", "origins"])
def test_a_message_with_too_many_records_is_refused(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty record costs its sender two bytes, and would cost us an object."""
    monkeypatch.setattr(wire, "MAX_RECORDS", 5)
    empty = bytes.fromhex(tag) + b"\0"
    wire.decode(empty * 5, FederationBroadcast)
    with pytest.raises(ResourceExhausted, match=r"a message with 6 (items|origins) is too large, at most 5 are taken"):
        wire.decode(empty * 6, FederationBroadcast)
