"""1,000 records to bytes and back: our codec beside betterproto2 alone and protobuf's runtime alone, and the short ways
of a watcher and of a hub, which make no messages in between."""

from __future__ import annotations

from google.protobuf.message_factory import GetMessageClass

from benchmarks.measure import Figure, seconds
from trio_federation.capacity import Capacity, Origin
from trio_federation.pb.sandbox.sync.v1 import FederationBroadcast
from trio_federation.wire import BroadcastEncoder, ReceivedBroadcast, broadcast_messages, changes_of, decode, encode

RECORDS = 1000


def run(*, quick: bool = False) -> list[Figure]:
    """Milliseconds per message of 1,000 records."""
    many, few = (2, 1) if quick else (20, 5)
    origin = Origin("0123456789abcdef0123456789abcdef", 7, 0.0)
    records = [
        Capacity(
            f"cluster-{number % 20}", "agents", "python-3-12", f"pool-{number}", "cpu", idle=3, running=5, desired=8,
            autoscaling_enabled=True, capacity=12, state="Active", observed_at=1.0, origin=origin,
        )
        for number in range(RECORDS)
    ]  # fmt: skip
    (message,) = broadcast_messages(records, 2.0)
    data = encode(message)
    raw_class = GetMessageClass(FederationBroadcast.DESCRIPTOR)
    raw = raw_class.FromString(data)

    decode_ours = 1000 * seconds(lambda: decode(data, FederationBroadcast), repeat=many)
    decode_theirs = 1000 * seconds(lambda: FederationBroadcast.parse(data), repeat=few)
    decode_raw = 1000 * seconds(lambda: raw_class.FromString(data), repeat=many)
    encode_ours = 1000 * seconds(lambda: encode(message), repeat=many)
    encode_theirs = 1000 * seconds(lambda: bytes(message), repeat=few)
    encode_raw = 1000 * seconds(raw.SerializeToString, repeat=many)
    to_changes = 1000 * seconds(lambda: changes_of(message, 2.0), repeat=many)
    to_message = 1000 * seconds(lambda: list(broadcast_messages(records, 2.0)), repeat=many)
    encoder = BroadcastEncoder()
    received = 1000 * seconds(lambda: changes_of(ReceivedBroadcast(data), 2.0), repeat=many)
    relayed = 1000 * seconds(lambda: list(BroadcastEncoder().messages(records, 2.0)), repeat=many)
    relayed_again = 1000 * seconds(lambda: list(encoder.messages(records, 2.0)), repeat=many)
    by_messages, from_records = decode_ours + to_changes, to_message + encode_ours
    return [
        Figure("bytes per record", len(data) / RECORDS, "B"),
        Figure(
            "decode: bytes to betterproto2 messages",
            decode_ours,
            "ms",
            f"betterproto2 alone {decode_theirs:.3g} ms ({decode_theirs / decode_ours:.0f}x), "
            f"protobuf without our messages {decode_raw:.2g} ms",
        ),
        Figure(
            "encode: betterproto2 messages to bytes",
            encode_ours,
            "ms",
            f"betterproto2 alone {encode_theirs:.3g} ms ({encode_theirs / encode_ours:.0f}x), "
            f"protobuf from its own messages {encode_raw:.2g} ms",
        ),
        Figure("messages to checked records", to_changes, "ms"),
        Figure("records to messages", to_message, "ms"),
        Figure(
            "bytes to checked records, as a watcher does",
            received,
            "ms",
            f"by way of messages {by_messages:.2g} ms ({by_messages / received:.1f}x)",
        ),
        Figure(
            "records to bytes, as a hub does for its first watcher",
            relayed,
            "ms",
            f"by way of messages {from_records:.2g} ms ({from_records / relayed:.1f}x); for every further one in the "
            f"same millisecond {relayed_again:.2g} ms ({from_records / relayed_again:.0f}x)",
        ),
    ]
