"""Limits: the size of a message, checked at its prefix before anything of it is read, compression, and how much may
wait for a peer that does not read."""

from __future__ import annotations

import struct
from typing import NoReturn

import pytest
import trio
import trio.testing
from grpclib.const import Status
from h2.events import DataReceived, ResponseReceived, StreamReset, TrailersReceived
from trio.testing import MockClock

from tests.rpc.harness import (
    HUB,
    REPORT_PATH,
    Pair,
    RawPeer,
    broadcast_of,
    framed,
    headers_of,
    joined,
    joined_to_raw_client,
    joined_to_raw_server,
    new_link,
    number_of,
    padded_to,
    report_of,
    unknown_field,
)
from trio_federation import wire
from trio_federation.errors import ProtocolViolation, ResourceExhausted
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import ConnectionSettings, IncomingReport, IncomingWatch, ReportCall
from trio_federation.rpc.transport import HIGH_WATER
from trio_federation.wire import MAX_RECEIVE

GIB = 2**30
LIMIT = 100_000
LIMITED = ConnectionSettings(max_message=LIMIT)


def prefix(size: int, *, compressed: int = 0) -> bytes:
    """gRPC's prefix of a message of `size` bytes."""
    return struct.pack("!BI", compressed, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 129, 130, 131, 132, 133, 16_385, 16_390])
def test_padding_takes_up_what_it_should(size: int) -> None:
    """Of the helper, since the tests at the limits stand on it."""
    try:
        encoded = unknown_field(size)
    except ValueError:
        # Too little for a tag and a length, or where a length would have to be a byte longer than it is.
        assert size in (1, 2, 131)
    else:
        assert len(encoded) == size


def test_the_limit_is_16_mib() -> None:
    assert ConnectionSettings().max_message == MAX_RECEIVE == 16 * 2**20


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1, 10 * LIMIT])
async def test_a_report_is_taken_up_to_the_limit(autojump_clock: MockClock, size: int) -> None:
    sizes: list[int] = []

    async def measure(call: IncomingReport) -> None:
        while (message := await call.receive()) is not None:
            sizes.append(len(wire.encode(message.decoded())))
        await call.answer()

    async with joined(report=measure, server=LIMITED) as pair, pair.connection.watch(WatchFederationRequest()) as watch:
        assert number_of(await watch.receive()) == 1
        if size == LIMIT:
            await report_once(pair, size)
            assert sizes == [LIMIT]
        else:
            with pytest.raises(ResourceExhausted, match=f"{size} bytes is too large, at most {LIMIT} are taken"):
                await report_once(pair, size)
            assert sizes == []
        # Other calls, before and after, are not concerned.
        await report_once(pair, LIMIT)
        assert sizes[-1] == LIMIT


async def report_once(pair: Pair, size: int) -> None:
    async with pair.connection.report() as call:
        await call.send(padded_to(report_of(1), size))
        await call.end()
        await call.wait_answered()


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1, 10 * LIMIT])
async def test_a_broadcast_is_taken_up_to_the_limit(autojump_clock: MockClock, size: int) -> None:
    async def send(call: IncomingWatch) -> None:
        await call.send(padded_to(broadcast_of(1), size))
        await call.send(broadcast_of(2))
        await trio.sleep_forever()

    async with joined(watch=send, client=LIMITED) as pair, pair.connection.report() as report:
        await report.send(report_of(1))
        async with pair.connection.watch(WatchFederationRequest()) as call:
            if size == LIMIT:
                assert len(wire.encode((await call.receive()).decoded())) == LIMIT
                assert number_of(await call.receive()) == 2
            else:
                with pytest.raises(ResourceExhausted, match=f"{HUB}: a message of {size} bytes is too large"):
                    await call.receive()
        await report.end()
        await report.wait_answered()


async def test_16_mib_are_taken_in_both_directions(autojump_clock: MockClock) -> None:
    async def measure(call: IncomingReport) -> None:
        message = await call.receive()
        assert message is not None
        assert len(message.decoded()._unknown_fields) > MAX_RECEIVE - 100
        await call.answer()

    async def send(call: IncomingWatch) -> None:
        await call.send(padded_to(broadcast_of(1), MAX_RECEIVE))
        await trio.sleep_forever()

    wide = ConnectionSettings(stream_window=4 * 2**20)
    async with joined(measure, send, client=wide, server=wide, link=new_link(capacity=2**20)) as pair:
        await report_once(pair, MAX_RECEIVE)
        async with pair.connection.watch(WatchFederationRequest()) as call:
            message = await call.receive()
            assert len(message.decoded()._unknown_fields) > MAX_RECEIVE - 100


async def test_a_gibibyte_is_refused_by_the_server_at_its_prefix(autojump_clock: MockClock) -> None:
    """Nothing of the message is ever sent."""
    async with joined_to_raw_client() as (peer, ended):
        other = await peer.request(REPORT_PATH, framed(report_of(1)))
        stream_id = await peer.request(REPORT_PATH, prefix(GIB))
        began = trio.current_time()
        response = await peer.wait_for(ResponseReceived)
        assert trio.current_time() == began
        headers = headers_of(response)
        assert response.stream_id == stream_id
        assert headers["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
        assert headers["grpc-message"] == f"a message of {GIB} bytes is too large, at most {MAX_RECEIVE} are taken"
        await peer.send_data(other, b"", end=True)
        trailers = await peer.wait_for(TrailersReceived)
        assert (trailers.stream_id, headers_of(trailers)["grpc-status"]) == (other, "0")
        assert not ended.is_set()


async def test_a_gibibyte_is_refused_by_the_client_at_its_prefix(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as report:
        await peer.wait_called()
        async with connection.watch(WatchFederationRequest()) as call:
            stream_id = await peer.wait_called()
            await peer.respond(stream_id)
            await peer.send_data(stream_id, prefix(GIB))
            began = trio.current_time()
            with pytest.raises(ResourceExhausted, match=f"a message of {GIB} bytes is too large") as caught:
                await call.receive()
            assert caught.value.peer == HUB
            assert trio.current_time() == began
        assert (await peer.wait_for(StreamReset)).stream_id == stream_id
        await report.send(report_of(1))
        assert (await peer.wait_for(DataReceived)).data == framed(report_of(1))


async def test_a_response_of_a_gibibyte_is_refused(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id)
        await peer.send_data(stream_id, prefix(GIB))
        with pytest.raises(ResourceExhausted):
            await call.wait_answered()


@pytest.mark.parametrize("flag", [1, 2, 255])
async def test_a_compressed_message_is_refused(autojump_clock: MockClock, flag: int) -> None:
    """It was not agreed on, and what it holds is not known before it is unpacked."""
    async with joined_to_raw_client() as (peer, ended):
        await peer.request(REPORT_PATH, prefix(3, compressed=flag) + b"abc")
        headers = headers_of(await peer.wait_for(ResponseReceived))
        assert headers["grpc-status"] == str(Status.INTERNAL.value)
        assert "compressed" in headers["grpc-message"]
        assert not ended.is_set()
    async with joined_to_raw_server() as (connection, peer), connection.watch(WatchFederationRequest()) as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id)
        await peer.send_data(stream_id, prefix(3, compressed=flag) + b"abc")
        with pytest.raises(ProtocolViolation, match="compressed"):
            await call.receive()


async def test_a_message_in_pieces_of_a_byte_is_a_message(autojump_clock: MockClock) -> None:
    received: list[int] = []

    async def take(call: IncomingReport) -> None:
        while (message := await call.receive()) is not None:
            received.append(number_of(message))
        await call.answer()

    async with joined_to_raw_client(report=take) as (peer, _):
        stream_id = await peer.request(REPORT_PATH)
        for byte in framed(report_of(1)) + framed(report_of(2)):
            await peer.send_data(stream_id, bytes([byte]))
            await trio.sleep(0.1)
        await peer.send_data(stream_id, b"", end=True)
        await peer.wait_for(TrailersReceived)
    assert received == [1, 2]


async def test_an_empty_message_is_a_message(autojump_clock: MockClock) -> None:
    received: list[int] = []

    async def take(call: IncomingReport) -> None:
        while (message := await call.receive()) is not None:
            received.append(len(message.items))
        await call.answer()

    async with joined_to_raw_client(report=take) as (peer, _):
        await peer.request(REPORT_PATH, prefix(0) * 3, end=True)
        await peer.wait_for(TrailersReceived)
    assert received == [0, 0, 0]


# --- what waits for a peer that does not read ------------------------------------------------------------------------

MESSAGE = 10_000


async def test_a_watcher_that_does_not_read_makes_the_sender_wait(autojump_clock: MockClock) -> None:
    """After about the window, which is all that is in flight then; nothing is queued behind it."""
    sent: list[int] = []

    async def send_for_ever(call: IncomingWatch) -> NoReturn:
        while True:
            await call.send(padded_to(broadcast_of(len(sent)), MESSAGE))
            sent.append(MESSAGE)

    async with joined(watch=send_for_ever) as pair, pair.connection.watch(WatchFederationRequest()) as call:
        await trio.sleep(60)
        window = ConnectionSettings().stream_window
        assert window - 2 * MESSAGE <= sum(sent) <= window
        # And it loses nothing of it.
        for number in range(50):
            assert number_of(await call.receive()) == number
        await trio.sleep(60)
        assert len(sent) * MESSAGE <= 50 * MESSAGE + window


async def test_a_link_that_takes_nothing_makes_the_sender_wait(autojump_clock: MockClock) -> None:
    """However wide the windows are: what waits for it is the transport's buffer, and that is bounded."""
    wide = ConnectionSettings(stream_window=4 * 2**20)
    sent: list[int] = []

    async def send(call: ReportCall) -> None:
        while True:
            await call.send(padded_to(report_of(len(sent)), MESSAGE))
            sent.append(MESSAGE)

    async def end_late(call: IncomingReport) -> None:
        await call.receive()
        await trio.sleep_forever()

    link = new_link(capacity=1000)
    async with joined(report=end_late, server=wide, link=link) as pair, pair.connection.report() as call:
        await trio.testing.wait_all_tasks_blocked()
        link.hold(to_server=True, to_client=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, call)
            await trio.sleep(10)
            # A buffer up to where senders are stopped, and another that is being written.
            assert HIGH_WATER - 2 * MESSAGE <= sum(sent) <= 2 * HIGH_WATER + 2 * MESSAGE
            before = len(sent)
            await trio.sleep(1)
            assert len(sent) == before
            link.hold(to_server=False, to_client=False)
            await trio.sleep(1)
            assert len(sent) > before
            nursery.cancel_scope.cancel()


async def test_a_peer_that_gives_nothing_back_is_waited_for(autojump_clock: MockClock) -> None:
    """A reader whose windows stay shut, with the connection alive, is slow, not dead."""
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        peer.acknowledge = False
        await peer.wait_called()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_on, peer)
            with trio.move_on_after(600) as scope:
                await call.send(report_of(1, padding=2**20))
            assert scope.cancelled_caught
            assert not connection.transport.closed.is_set()
            nursery.cancel_scope.cancel()


async def read_on(peer: RawPeer) -> None:
    while await peer.read_some():
        pass


async def test_one_call_that_does_not_read_costs_the_others_nothing(autojump_clock: MockClock) -> None:
    async def send_for_ever(call: IncomingWatch) -> NoReturn:
        number = 0
        while True:
            await call.send(padded_to(broadcast_of(number), MESSAGE))
            number += 1

    async with joined(watch=send_for_ever) as pair, pair.connection.watch(WatchFederationRequest()):
        await trio.sleep(1)
        async with pair.connection.watch(WatchFederationRequest()) as reader:
            began = trio.current_time()
            for number in range(100):
                assert number_of(await reader.receive()) == number
            assert trio.current_time() == began
