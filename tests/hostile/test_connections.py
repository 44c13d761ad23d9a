"""What one bad peer can make a connection hold or do, with nothing but the connection: buffers, tables, windows and
frame sizes. Links in memory, and virtual time."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, StreamEnded, TrailersReceived
from h2.settings import SettingCodes
from hpack import Decoder
from hyperframe.frame import DataFrame, PingFrame, RstStreamFrame, WindowUpdateFrame
from trio.testing import MockClock

from tests.hostile.peers import NOTHING
from tests.rpc.harness import (
    REPORT_PATH,
    WATCH_PATH,
    RawPeer,
    broadcast_of,
    framed,
    hang,
    joined_to_raw_client,
    joined_to_raw_server,
    new_link,
    padded_to,
    report_of,
    take_reports,
)
from trio_federation.errors import Unauthenticated, Unavailable
from trio_federation.rpc import ConnectionSettings, Cut, IncomingReport, IncomingWatch
from trio_federation.rpc.floods import FIRST
from trio_federation.rpc.transport import (
    CONNECTION_WINDOW,
    HEADERS_AT_ONCE,
    HIGH_WATER,
    MAX_STREAMS,
    MOST_WAITING,
    READ_SIZE,
    WRITE_SIZE,
    Http2Connection,
    _Protocol,
)
from trio_federation.wire import MAX_RECEIVE

LIMIT = ConnectionSettings().silence_limit


async def watch_in_pieces(call: IncomingWatch) -> None:
    """Send a thousand large broadcasts, as fast as they are taken."""
    await call.request()
    message = padded_to(broadcast_of(1), 60_000)
    for _ in range(1000):
        await call.send(message)
    await trio.sleep_forever()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Http2Connection]:
    """Every connection of ours that is made."""
    made: list[Http2Connection] = []
    init = Http2Connection.__init__

    def remember(self: Http2Connection, *args: object, **keywords: object) -> None:
        init(self, *args, **keywords)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Http2Connection, "__init__", remember)
    return made


async def give_windows(peer: RawPeer, *, stream_window: int = 2**24, frame_size: int = 2**14) -> None:
    """Take anything, at once, as far as windows go."""
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: stream_window, SettingCodes.MAX_FRAME_SIZE: frame_size})
    peer.h2.increment_flow_control_window(2**30)
    await peer.flush()


async def test_many_calls_of_one_slow_reader_do_not_fill_the_memory(
    autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    """A hundred watches on one connection, as of a proxy, that is read slowly: they wait for each other as one would,
    and a reader that is merely slow is no reader that does not read."""
    async with joined_to_raw_client(watch=watch_in_pieces) as (peer, ended):
        await give_windows(peer)
        await peer.read_some()
        for _ in range(100):
            await peer.request(WATCH_PATH, framed(report_of(0)), end=True)
        most = 0
        with trio.move_on_after(12):
            while True:
                await trio.sleep(0.1)
                most = max(most, connections[0]._waiting_size)
                assert await peer.read_some(), connections[0].ended
        assert not ended.is_set(), connections[0].ended
        # One frame more than the mark; and the headers of a hundred calls.
        assert HIGH_WATER < most < 2 * HIGH_WATER


@pytest.mark.parametrize("frame_size", [2**14, 2**24 - 1])
async def test_a_peer_that_takes_large_frames_gets_what_is_large(
    frame_size: int, autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    """The frame size that a peer offers is an offer: a message that would fill this side's buffer in one frame is sent
    in pieces, and its peer is not taken for one that does not read."""
    message = padded_to(report_of(1), 2 * MOST_WAITING)
    async with (
        joined_to_raw_server() as (connection, peer),
        connection.report() as call,
        trio.open_nursery() as nursery,
    ):
        await give_windows(peer, frame_size=frame_size)
        while connection.transport.protocol.h2.remote_settings.max_frame_size != frame_size:
            await peer.read_some()
        nursery.start_soon(call.send, message)
        size = 0
        while size < 2 * MOST_WAITING:
            size += len((await peer.wait_for(DataReceived)).data or b"")
            assert connections[0]._waiting_size <= 2 * HIGH_WATER
        assert connections[0].ended == ""


async def test_a_table_of_any_size_is_not_kept(autojump_clock: MockClock, connections: list[Http2Connection]) -> None:
    """HTTP/2 lets a peer say how much of the headers that it is sent may be remembered, up to 4 GiB: an offer, and the
    words of thousands of refusals are not kept."""
    number = 0

    async def refuse(call: IncomingReport) -> None:
        nonlocal number
        number += 1
        raise Unauthenticated(f"refusal number {number}: " + "x" * 200)

    async with joined_to_raw_client(report=refuse) as (peer, _):
        peer.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 2**32 - 1})
        await peer.flush()
        for _ in range(300):
            await peer.request(REPORT_PATH, end=True)
            await peer.wait_for(StreamEnded)
        encoder = connections[0].protocol.h2.encoder
        assert number == 300
        assert encoder.header_table._current_size <= 4096
        assert encoder.header_table_size <= 4096


async def test_a_message_in_pieces_takes_up_what_it_holds(
    autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    """Not hundreds of bytes for each, both while it is read and while nobody reads."""
    pieces = 4000

    async def read_nothing(_: IncomingWatch) -> None:
        await trio.sleep_forever()

    async with joined_to_raw_client(watch=read_nothing) as (peer, _):
        await give_windows(peer)
        report = await peer.request(REPORT_PATH, struct.pack("!?I", False, MAX_RECEIVE))
        watch = await peer.request(WATCH_PATH)
        await trio.testing.wait_all_tasks_blocked()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for stream_id in (report, watch):
                piece = DataFrame(stream_id, b"x").serialize()
                for _ in range(pieces // 1000):
                    await peer.stream.send_all(piece * 1000)
                    await trio.sleep(1)
            assert connections[0].ended == ""
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held < 8 * 2 * pieces


# --- much at once, on virtual time -----------------------------------------------------------------------------------


class Begun:
    """Counts the reports that are begun. `report`: what is done with each; by default nothing, for ever."""

    def __init__(self, report: Callable[[IncomingReport], Awaitable[None]] | None = None) -> None:
        self.count = 0
        self._report = report

    async def report(self, call: IncomingReport) -> None:
        """Serve one."""
        self.count += 1
        if self._report is None:
            await trio.sleep_forever()
        else:
            await self._report(call)


def many_calls(peer: RawPeer, number: int) -> bytes:
    """The bytes of so many calls, each with headers that have to be unpacked anew."""
    for _ in range(number):
        stream_id = peer.h2.get_next_available_stream_id()
        # More may be opened than the other side allows, which is what h2 would say.
        peer.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 10_000
        peer.h2.remote_settings.acknowledge()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", REPORT_PATH), (":authority", "h")]
        peer.h2.send_headers(stream_id, [*headers, ("content-type", "application/grpc"), ("te", "trailers")])
    return peer.h2.data_to_send()


async def test_calls_that_come_at_once_are_begun_in_parts(
    autojump_clock: MockClock, connections: list[Http2Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that others have their turn between two of them; of the bytes nothing is lost or changed."""
    parts: list[tuple[int, bytes]] = []
    begun = Begun()
    real = _Protocol.data_received

    def data_received(self: _Protocol, data: bytes) -> None:
        parts.append((begun.count, data))
        real(self, data)

    async with joined_to_raw_client(report=begun.report) as (peer, _):
        await peer.read_some()
        await trio.sleep(1)
        monkeypatch.setattr(_Protocol, "data_received", data_received)
        data = many_calls(peer, 4 * HEADERS_AT_ONCE)
        await peer.stream.send_all(data)
        await trio.sleep(1)
        assert b"".join(part for _, part in parts) == data
        assert len(parts) == 4
        assert begun.count == 4 * HEADERS_AT_ONCE
        # Those of one part have begun before the last one is read.
        assert parts[-1][0] > 0


async def test_a_flood_that_comes_in_one_piece_is_not_read(
    autojump_clock: MockClock, connections: list[Http2Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacking the headers of hundreds of calls takes tens of milliseconds, in which nobody else has a turn."""
    unpacked = 0
    real = Decoder.decode

    def decode(self: Decoder, *args: Any, **options: Any) -> Any:
        nonlocal unpacked
        unpacked += 1
        return real(self, *args, **options)

    async with joined_to_raw_client(link=new_link(capacity=1 << 20)) as (peer, ended):
        await peer.read_some()
        data = many_calls(peer, int(FIRST) + 10)
        assert len(data) < READ_SIZE
        monkeypatch.setattr(Decoder, "decode", decode)
        await peer.stream.send_all(data)
        goodbye = await peer.wait_for(ConnectionTerminated)
        assert goodbye.error_code == ErrorCodes.ENHANCE_YOUR_CALM
        await ended.wait()
        assert connections[0].cut is Cut.FLOOD
        assert unpacked == 0


async def test_more_calls_than_may_be_open_are_not_begun(
    autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    """Where they come in one piece none of them is; those that are open already count."""
    begun = Begun()
    async with joined_to_raw_client(report=begun.report) as (peer, ended):
        await peer.read_some()
        await peer.stream.send_all(many_calls(peer, 30))
        await trio.sleep(1)
        await peer.stream.send_all(many_calls(peer, MAX_STREAMS - 30))
        await trio.sleep(1)
        assert begun.count == MAX_STREAMS
        await peer.stream.send_all(b"".join(RstStreamFrame(number, error_code=8).serialize() for number in (1, 3)))
        await peer.stream.send_all(many_calls(peer, 2))
        await trio.sleep(1)
        assert begun.count == MAX_STREAMS + 2
        assert not ended.is_set()
        resets = b"".join(RstStreamFrame(number, error_code=8).serialize() for number in range(5, 45, 2))
        await peer.stream.send_all(resets + many_calls(peer, 40))
        await ended.wait()
        assert connections[0].cut is Cut.PROTOCOL
        assert "TooManyStreamsError: more than 100 calls would be open" in connections[0].ended
        assert begun.count == MAX_STREAMS + 2


async def test_a_call_that_is_given_up_in_the_same_moment_is_not_begun(
    autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    """Nor does it keep any of the window: several times as much as the connection's comes in such calls."""
    begun = Begun(take_reports)
    size = 50_000
    async with joined_to_raw_client(report=begun.report, link=new_link(capacity=1 << 20)) as (peer, ended):
        await peer.read_some()
        for _ in range(2 * CONNECTION_WINDOW // size):
            await peer.request(REPORT_PATH, bytes(size), reset=True)
            await trio.sleep(1)
            with trio.move_on_after(0.001):
                await peer.read_some()
        assert begun.count == 0
        await peer.request(REPORT_PATH, framed(report_of(1)), end=True)
        await peer.wait_for(TrailersReceived)
        assert begun.count == 1
        assert not ended.is_set()


# --- peers that take nothing, on virtual time ------------------------------------------------------------------------

_Behaviour = Callable[[RawPeer], Awaitable[None]]


async def sends_pings(peer: RawPeer) -> None:
    """Read nothing, and be as alive as can be."""
    while True:
        await peer.stream.send_all(PingFrame(0, b"12345678").serialize())
        await trio.sleep(1)


async def reads_a_byte_a_second(peer: RawPeer) -> None:
    """And be alive."""
    while True:
        await peer.stream.send_all(PingFrame(0, b"12345678").serialize())
        assert await peer.stream.receive_some(1)
        await trio.sleep(1)


async def does_nothing(_: RawPeer) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize(
    "behaviour, cuts",
    [
        (sends_pings, (Cut.STALLED,)),
        (reads_a_byte_a_second, (Cut.STALLED,)),
        (does_nothing, (Cut.SILENT, Cut.STALLED)),  # in the same moment
    ],
)
async def test_a_watcher_that_takes_nothing_is_cut_off_at_the_silence_limit(
    behaviour: _Behaviour, cuts: tuple[Cut, ...], autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    async with joined_to_raw_client(watch=watch_in_pieces) as (peer, ended), trio.open_nursery() as nursery:
        await give_windows(peer)
        await peer.read_some()
        await peer.request(WATCH_PATH, framed(report_of(0)), end=True)
        began = trio.current_time()

        async def behave() -> None:
            with suppress(trio.BrokenResourceError, AssertionError):
                await behaviour(peer)

        nursery.start_soon(behave)
        await trio.testing.wait_all_tasks_blocked()
        assert connections[0]._paused
        with trio.fail_after(LIMIT + 1):
            await ended.wait()
        assert trio.current_time() >= began + LIMIT
        assert connections[0].cut in cuts
        assert connections[0]._waiting_size < 3 * HIGH_WATER
        nursery.cancel_scope.cancel()


async def test_a_reader_that_is_slow_is_not_cut_off(
    autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    """A little more than the least that has to be taken within the silence limit, for minutes."""
    async with joined_to_raw_client(watch=watch_in_pieces) as (peer, ended):
        await give_windows(peer)
        await peer.read_some()
        await peer.request(WATCH_PATH, framed(report_of(0)), end=True)
        for _ in range(60):
            await peer.stream.send_all(PingFrame(0, b"12345678").serialize())
            assert await peer.stream.receive_some(WRITE_SIZE // 2)
            await trio.sleep(LIMIT / 3)
        assert not ended.is_set()


# --- calls that come and go ------------------------------------------------------------------------------------------


async def test_calls_that_are_answered_may_come_and_go_at_any_rate(
    autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    """More in no time at all than the budget of a connection holds, each refused before its message is read, and
    reset by a caller that has heard."""

    async def refuse(_: IncomingReport) -> None:
        raise Unauthenticated("no")

    async with joined_to_raw_client(report=refuse) as (peer, ended):
        for _ in range(500):
            stream_id = await peer.request(REPORT_PATH, framed(report_of(0)))
            await peer.wait_for(StreamEnded)
            await peer.stream.send_all(RstStreamFrame(stream_id, error_code=ErrorCodes.CANCEL).serialize())
            await peer.stream.send_all(WindowUpdateFrame(0, 1).serialize())
        assert not ended.is_set()


async def test_calls_that_are_reset_at_once_are_a_flood(
    autojump_clock: MockClock, connections: list[Http2Connection]
) -> None:
    async with joined_to_raw_client(report=hang) as (peer, ended):
        with suppress(trio.BrokenResourceError):
            for _ in range(2000):
                await peer.request(REPORT_PATH, reset=True)
                await trio.testing.wait_all_tasks_blocked()
            raise AssertionError("nobody has ended it")
        with trio.fail_after(2):
            await ended.wait()
        assert connections[0].cut is Cut.FLOOD
        assert "RST_STREAM" in connections[0].ended or "HEADERS" in connections[0].ended


@pytest.mark.parametrize("kind", NOTHING)
async def test_a_hub_that_floods_an_agent_is_left(kind: str, autojump_clock: MockClock) -> None:
    """The rule is the same for both sides."""
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        await peer.respond(await peer.wait_called())
        with suppress(trio.BrokenResourceError):
            for _ in range(50):
                await peer.stream.send_all(NOTHING[kind] * 100)
        with trio.fail_after(2):
            error = await connection.wait_closed()
        assert "carry nothing" in str(error)
        with pytest.raises(Unavailable, match="carry nothing"):
            await call.wait_answered()
        assert connection.transport.cut is Cut.FLOOD
