"""Peers that do not speak HTTP/2, or speak it wrongly: only their own connection ends, with a reason, and neither
`serve` nor a client's connection ever raises because of them."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache

import pytest
import structlog.testing
import trio
import trio.testing
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, ResponseReceived
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.rpc.harness import (
    HUB,
    REPORT_PATH,
    WATCH_PATH,
    Watched,
    broadcast_of,
    framed,
    headers_of,
    joined_to_raw_client,
    joined_to_raw_server,
    new_link,
    nothing_left,
    number_of,
    report_of,
    send_one,
    take_reports,
)
from trio_federation.errors import RpcError, Unavailable
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import FederationServer, HubConnection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Each example is a hub and a client, so there are fewer than elsewhere, in every profile.
EXAMPLES = settings(max_examples=settings().max_examples * 2 // 5)

#: header blocks, made once and each with an encoder of its own, so that they mean the same in any order
REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", REPORT_PATH),
    (":authority", HUB),
    ("te", "trailers"),  # codespell:ignore te
    ("content-type", "application/grpc"),
]
RESPONSE = [(":status", "200"), ("content-type", "application/grpc")]


def packed(headers: list[tuple[str, str]]) -> bytes:
    """A header block."""
    block: bytes = Encoder().encode(headers)
    return block


def frame(kind: type[Frame], stream_id: int, *, flags: tuple[str, ...] = (), **fields: object) -> bytes:
    """A frame's bytes."""
    made = kind(stream_id, flags=flags, **fields)
    encoded: bytes = made.serialize()
    return encoded


SETTINGS = frame(SettingsFrame, 0)


# --- random input ----------------------------------------------------------------------------------------------------

stream_ids = st.integers(0, 6)
blocks = st.one_of(
    st.sampled_from(
        [
            packed(REQUEST),
            packed(RESPONSE),
            packed([("grpc-status", "0")]),
            packed([("grpc-status", "16"), ("grpc-message", "%")]),
            packed(REQUEST[1:]),
            packed([(":status", "100")]),
            packed([(":status", "nonsense")]),
            packed([("x-bin", "not base64!")]),
            packed([("é", "ü")]),
            b"",
        ]
    ),
    st.binary(max_size=40),
)
bodies = st.one_of(
    st.sampled_from(
        [framed(report_of(1)), framed(broadcast_of(1)), b"\0\0\0\0\0", b"\0\xff\xff\xff\xff", b"\1\0\0\0\0"]
    ),
    st.binary(max_size=40),
)
any_frames = st.one_of(
    st.builds(
        lambda stream_id, data, flags: frame(HeadersFrame, stream_id, data=data, flags=tuple(flags)),
        st.integers(1, 6),
        blocks,
        st.sets(st.sampled_from(["END_HEADERS", "END_STREAM"])),
    ),
    st.builds(
        lambda stream_id, data, flags: frame(DataFrame, stream_id, data=data, flags=tuple(flags)),
        st.integers(1, 6),
        bodies,
        st.sets(st.sampled_from(["END_STREAM"])),
    ),
    st.builds(
        lambda stream_id, data: frame(ContinuationFrame, stream_id, data=data, flags=("END_HEADERS",)),
        st.integers(1, 6),
        blocks,
    ),
    st.builds(
        lambda stream_id, code: frame(RstStreamFrame, stream_id, error_code=code),
        st.integers(1, 6),
        st.integers(0, 2**32 - 1),
    ),
    st.builds(
        lambda values: frame(SettingsFrame, 0, settings=values),
        st.dictionaries(st.integers(0, 9), st.integers(0, 2**32 - 1), max_size=3),
    ),
    st.just(frame(SettingsFrame, 0, flags=("ACK",))),
    st.builds(
        lambda stream_id, step: frame(WindowUpdateFrame, stream_id, window_increment=step),
        stream_ids,
        st.integers(1, 2**31 - 1),
    ),
    st.builds(
        lambda data, flags: frame(PingFrame, 0, opaque_data=data, flags=tuple(flags)),
        st.binary(min_size=8, max_size=8),
        st.sets(st.just("ACK")),
    ),
    st.builds(
        lambda code, last, data: frame(GoAwayFrame, 0, error_code=code, last_stream_id=last, additional_data=data),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**31 - 1),
        st.binary(max_size=10),
    ),
    st.builds(
        lambda stream_id, depends: frame(PriorityFrame, stream_id, depends_on=depends, stream_weight=1),
        st.integers(1, 6),
        stream_ids,
    ),
    st.builds(
        lambda stream_id, promised, data: frame(
            PushPromiseFrame, stream_id, promised_stream_id=promised, data=data, flags=("END_HEADERS",)
        ),
        st.integers(1, 6),
        st.sampled_from([2, 4, 6]),
        blocks,
    ),
    # A frame of any kind, known or not, with anything in it.
    st.builds(
        lambda kind, flags, stream_id, body: (
            struct.pack("!I", len(body))[1:] + struct.pack("!BBI", kind, flags, stream_id) + body
        ),
        st.integers(0, 255),
        st.integers(0, 255),
        stream_ids,
        st.binary(max_size=20),
    ),
)
sequences = st.lists(any_frames, max_size=12).map(b"".join)


@cache
def a_good_conversation(*, client_side: bool) -> bytes:
    """What one side of a good connection says: a report and a watch."""
    recorded = bytearray()

    async def main() -> None:
        link = new_link()
        sender = link.client if client_side else link.server
        send_all = sender.send_all

        async def send_and_record(data: bytes | bytearray | memoryview) -> None:
            recorded.extend(data)
            await send_all(data)

        sender.send_all = send_and_record  # type: ignore[method-assign]
        async with nothing_left(), trio.open_nursery() as nursery:
            nursery.start_soon(FederationServer(take_reports, send_one).serve, link.server)
            connection = await HubConnection.open(nursery, link.client, peer=HUB)
            await report_and_watch(connection)
            await connection.aclose()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(recorded) > 100
    return bytes(recorded)


async def report_and_watch(connection: HubConnection) -> None:
    async with connection.report() as report, connection.watch(WatchFederationRequest()) as watch:
        await report.send(report_of(1))
        assert number_of(await watch.receive()) == 1
        await report.end()
        await report.wait_answered()


def feed_server(data: bytes) -> None:
    """Give a server these bytes, and then nothing more; meanwhile and afterwards another connection of it has to
    work."""

    async def main() -> None:
        server = FederationServer(Watched(take_reports), Watched(send_one))
        link, other = new_link(), new_link()
        async with nothing_left(), trio.open_nursery() as nursery:
            nursery.start_soon(server.serve, other.server)
            connection = await HubConnection.open(nursery, other.client, peer=HUB)
            async with trio.open_nursery() as serving:
                serving.start_soon(server.serve, link.server)
                serving.start_soon(swallow, link.client)
                with suppress(trio.BrokenResourceError):
                    await link.client.send_all(data)
                await report_and_watch(connection)
                await trio.sleep(1)
                await link.client.send_eof()
            await report_and_watch(connection)
            await connection.aclose()

    with structlog.testing.capture_logs() as logs:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert [entry for entry in logs if entry["event"] in ("stray_asyncio_error", "handler_failed_late")] == []


def feed_client(data: bytes) -> None:
    """Give a client with two open calls these bytes, and then nothing more. The calls end with an error of ours, or, if
    that was a good answer, well."""

    async def main() -> None:
        link = new_link()
        async with nothing_left(), trio.open_nursery() as nursery:
            connection = await HubConnection.open(nursery, link.client, peer=HUB)
            nursery.start_soon(swallow, link.server)
            nursery.start_soon(use_until_error, connection)
            await trio.sleep(1)
            with suppress(trio.BrokenResourceError):
                await link.server.send_all(data)
            await trio.sleep(1)
            await link.server.send_eof()
            with trio.fail_after(2):
                await connection.wait_closed()

    with structlog.testing.capture_logs() as logs:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert [entry for entry in logs if entry["event"] == "stray_asyncio_error"] == []


async def use_until_error(connection: HubConnection) -> None:
    async def report() -> None:
        async with connection.report() as call:
            await call.send(report_of(1))
            await call.wait_answered()

    async def watch() -> None:
        async with connection.watch(WatchFederationRequest()) as call:
            while True:
                await call.receive()

    async def until_error(use: Callable[[], Awaitable[None]]) -> None:
        text = ""
        with suppress(RpcError):
            try:
                await use()
            except RpcError as error:
                text = str(error)
                raise
        assert text.isprintable()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_error, report)
        nursery.start_soon(until_error, watch)


async def swallow(stream: trio.abc.ReceiveStream) -> None:
    """Read everything, so that nobody waits for us."""
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


@EXAMPLES
@given(st.binary(max_size=300))
def test_any_bytes_end_only_their_connection(data: bytes) -> None:
    feed_server(data)
    feed_client(data)


@EXAMPLES
@given(sequences)
@example(frame(HeadersFrame, 2, data=packed(REQUEST), flags=("END_HEADERS",)))
@example(frame(HeadersFrame, 1, data=packed([("é", "ü")]), flags=("END_HEADERS",)))
def test_any_frames_into_a_server_end_only_their_connection(data: bytes) -> None:
    feed_server(PREFACE + SETTINGS + data)


@EXAMPLES
@given(sequences)
@example(frame(HeadersFrame, 2, data=packed(REQUEST), flags=("END_HEADERS",)))
@example(frame(HeadersFrame, 1, data=packed([]), flags=("END_HEADERS",)))
@example(frame(PushPromiseFrame, 1, promised_stream_id=2, data=packed(REQUEST), flags=("END_HEADERS",)))
def test_any_frames_into_a_client_end_only_its_connection(data: bytes) -> None:
    feed_client(SETTINGS + data)


@EXAMPLES
@given(st.data())
def test_a_damaged_conversation_ends_only_its_connection(data: st.DataObject) -> None:
    for feed, client_side in ((feed_server, True), (feed_client, False)):
        good = bytearray(a_good_conversation(client_side=client_side))
        for position in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4)):
            good[position] = data.draw(st.integers(0, 255))
        feed(bytes(good[: data.draw(st.integers(0, len(good)))]))


def test_an_undamaged_conversation_is_a_good_one() -> None:
    """Or the tests above would only look at the first frame."""
    feed_server(a_good_conversation(client_side=True))
    feed_client(a_good_conversation(client_side=False))


# --- what people get wrong -------------------------------------------------------------------------------------------


async def test_an_http_1_client_is_refused(autojump_clock: MockClock) -> None:
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        nursery.start_soon(FederationServer(take_reports, send_one).serve, link.server)
        await link.client.send_all(b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
        with trio.fail_after(1):
            await swallow(link.client)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"HTTP/1.0 200 OK\r\nServer: some"])
async def test_an_http_1_server_is_named_as_such(autojump_clock: MockClock, answer: bytes) -> None:
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        async with connection.report() as call:
            await link.server.send_all(answer)
            with pytest.raises(Unavailable) as caught:
                await call.wait_answered()
            assert str(caught.value) == f"{HUB}: the other side speaks HTTP/1: not a gRPC endpoint?"


async def test_nonsense_is_told_with_its_reason(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        await peer.stream.send_all(frame(DataFrame, 1, data=b"unasked"))
        with pytest.raises(Unavailable, match=f"^{HUB}: the peer broke HTTP/2: ") as caught:
            await call.wait_answered()
        assert caught.value.__cause__ is not None


async def test_a_peer_that_breaks_http_2_is_told_so(autojump_clock: MockClock) -> None:
    async with joined_to_raw_client() as (peer, ended):
        await peer.read_some()
        await peer.stream.send_all(frame(SettingsFrame, 0, settings={2: 7}))
        assert (await peer.wait_for(ConnectionTerminated)).error_code == ErrorCodes.PROTOCOL_ERROR
        assert not await peer.read_some()
        await ended.wait()


async def test_a_frame_that_is_too_long_is_refused_at_its_header(autojump_clock: MockClock) -> None:
    """h2 alone would wait for all of it: up to 16 MiB, from anybody."""
    async with joined_to_raw_client() as (peer, ended):
        await peer.stream.send_all(struct.pack("!I", 2**24 - 1)[1:] + b"\0\0\0\0\0\1")
        with trio.fail_after(0.1):
            await ended.wait()


async def test_headers_that_grow_without_end_are_cut_off(autojump_clock: MockClock) -> None:
    async with joined_to_raw_client() as (peer, ended):
        block = packed([*REQUEST, *((f"x-{number}", "v" * 100) for number in range(1000))])
        await peer.stream.send_all(frame(HeadersFrame, 1, data=block[:16_000]))
        for start in range(16_000, len(block), 16_000):
            rest = start + 16_000 >= len(block)
            piece = frame(
                ContinuationFrame, 1, data=block[start : start + 16_000], flags=("END_HEADERS",) if rest else ()
            )
            try:
                await peer.stream.send_all(piece)
            except trio.BrokenResourceError:
                break
        with trio.fail_after(2):
            await ended.wait()


async def test_a_small_block_that_unpacks_to_much_is_cut_off(autojump_clock: MockClock) -> None:
    """One big entry of the compression table, named again and again."""
    encoder = Encoder()
    first = encoder.encode([*REQUEST, ("x-big", "v" * 3000)])
    again = encoder.encode([("x-big", "v" * 3000)])
    assert len(again) < 5
    async with joined_to_raw_client() as (peer, ended):
        await peer.stream.send_all(frame(HeadersFrame, 1, data=first + again * 100, flags=("END_HEADERS",)))
        with trio.fail_after(2):
            await ended.wait()


async def test_too_many_calls_at_once_end_their_connection(autojump_clock: MockClock) -> None:
    server = FederationServer(take_reports, send_one)
    link, other = new_link(), new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, other.server)
        connection = await HubConnection.open(nursery, other.client, peer=HUB)
        async with trio.open_nursery() as serving:
            serving.start_soon(server.serve, link.server)
            serving.start_soon(swallow, link.client)
            block = packed(REQUEST)
            calls = (frame(HeadersFrame, 2 * number + 1, data=block, flags=("END_HEADERS",)) for number in range(102))
            await link.client.send_all(PREFACE + SETTINGS + b"".join(calls))
        await report_and_watch(connection)
        await connection.aclose()


async def test_frames_of_a_kind_that_nobody_knows_are_skipped(autojump_clock: MockClock) -> None:
    async with joined_to_raw_client() as (peer, _):
        await peer.stream.send_all(b"\0\0\x03\xfa\xff\0\0\0\0abc")
        # ALTSVC, which servers send, and PRIORITY_UPDATE.
        await peer.stream.send_all(b"\0\0\x05\x0a\0\0\0\0\0\0\x01ax=")
        await peer.stream.send_all(b"\0\0\x05\x10\0\0\0\0\0\0\0\0\x01u")
        await peer.request(WATCH_PATH, b"\0\0\0\0\0", end=True)
        await peer.wait_for(ResponseReceived)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({":path": "/sandbox.sync.v1.FederationService/Unknown"}, {":status": "200", "grpc-status": "12"}),
        ({":path": "/"}, {":status": "200", "grpc-status": "12"}),
        ({"content-type": "application/json"}, {":status": "415"}),
        ({":method": "GET"}, {":status": "405"}),
        ({"te": "gzip"}, {":status": "400"}),  # codespell:ignore te
        ({"grpc-timeout": "soon"}, {":status": "200", "grpc-status": "2"}),
        ({"content-type": "application/grpc+proto"}, {":status": "200", "content-type": "application/grpc+proto"}),
    ],
)
async def test_requests_that_are_not_for_us_are_answered(
    autojump_clock: MockClock, change: dict[str, str], expected: dict[str, str]
) -> None:
    async with joined_to_raw_client() as (peer, ended):
        stream_id = peer.h2.get_next_available_stream_id()
        peer.h2.send_headers(stream_id, list({**dict(REQUEST), **change}.items()))
        peer.h2.end_stream(stream_id)
        await peer.flush()
        headers = headers_of(await peer.wait_for(ResponseReceived))
        assert {name: headers.get(name) for name in expected} == expected
        assert not ended.is_set()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """grpclib logs what such peers do with a traceback each."""
    caplog.set_level("CRITICAL", logger="grpclib")
