"""Connections that fall silent, break or are told goodbye: noticed when they should be, to the second, by both sides,
and told in one line. Idle ones live on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
import trio.testing
from grpclib.const import Status
from h2.errors import ErrorCodes
from h2.events import DataReceived, PingAckReceived, PingReceived, StreamEnded
from hyperframe.frame import GoAwayFrame
from trio.testing import MockClock

from tests.rpc.harness import (
    AGENT,
    HUB,
    REPORT_PATH,
    RawPeer,
    Watched,
    broadcast_of,
    framed,
    hang,
    joined,
    joined_to_raw_client,
    joined_to_raw_server,
    new_link,
    nothing_left,
    number_of,
    report_of,
    take_reports,
)
from trio_federation.errors import AlreadyExists, RpcError, TooManyPings, Unavailable
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import (
    ConnectionSettings,
    FederationServer,
    HubConnection,
    IncomingReport,
    IncomingWatch,
    ReportCall,
    WatchCall,
    transport,
)
from trio_federation.rpc.transport import CLOSE_DEADLINE, HIGH_WATER

SETTINGS = [
    ConnectionSettings(),
    ConnectionSettings(keepalive=4, silence_limit=15),
    ConnectionSettings(keepalive=0.1, silence_limit=0.35),
    ConnectionSettings(keepalive=330, silence_limit=1000),
]


async def failure_of(step: Callable[[], Awaitable[object]]) -> tuple[RpcError, float]:
    """The error that a step fails with, and trio's time at which it did."""
    with pytest.raises(RpcError) as caught:
        await step()
    return caught.value, trio.current_time()


@asynccontextmanager
async def two_calls() -> AsyncIterator[tuple[RawPeer, HubConnection, ReportCall, WatchCall]]:
    """A client with a report and a watch on one connection to a bare peer."""
    async with (
        joined_to_raw_server() as (connection, peer),
        connection.report() as report,
        connection.watch(WatchFederationRequest()) as watch,
    ):
        yield peer, connection, report, watch


# --- silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"{settings.keepalive}/{settings.silence_limit}")
async def test_a_black_hole_is_noticed_at_the_limit_by_both_sides(
    autojump_clock: MockClock, settings: ConnectionSettings
) -> None:
    handler = Watched(take_reports)
    async with joined(report=handler, client=settings, server=settings) as pair, pair.connection.report() as call:
        for number in range(10):
            await call.send(report_of(number))
            await trio.sleep(settings.keepalive / 3)
        await trio.testing.wait_all_tasks_blocked()
        pair.link.hold(to_server=True, to_client=True)
        last = pair.connection.transport.last_received
        error, noticed_at = await failure_of(call.wait_answered)
        assert noticed_at == last + settings.silence_limit
        assert type(error) is Unavailable
        assert str(error) == f"{HUB}: silent for {settings.silence_limit:g} s"
        await pair.server_ended.wait()
        # Its last sign of life was at most a round of pings before ours.
        assert trio.current_time() - noticed_at <= settings.keepalive
        assert handler.outcomes == [trio.Cancelled]


async def test_a_server_notices_a_silent_client_at_the_limit(autojump_clock: MockClock) -> None:
    calls: list[IncomingReport] = []

    async def keep(call: IncomingReport) -> None:
        calls.append(call)
        await take_reports(call)

    async with joined(report=keep) as pair, pair.connection.report() as call:
        await call.send(report_of(1))
        await trio.sleep(12)
        pair.link.hold(to_server=True, to_client=False)
        last = calls[0].last_received
        assert last > trio.current_time() - 6
        await pair.server_ended.wait()
        assert trio.current_time() == last + ConnectionSettings().silence_limit


async def test_a_direction_that_is_silent_is_noticed_even_if_the_other_is_not(autojump_clock: MockClock) -> None:
    """The hub's answers are lost; ours arrive."""
    async with joined() as pair, pair.connection.report() as call:
        await call.send(report_of(1))
        await trio.testing.wait_all_tasks_blocked()
        last = pair.connection.transport.last_received
        pair.link.hold(to_server=False, to_client=True)

        async with trio.open_nursery() as nursery:

            async def go_on_sending() -> None:
                while True:
                    await call.send(report_of(1))
                    await trio.sleep(0.7)

            nursery.start_soon(failure_of, go_on_sending)
            error, noticed_at = await failure_of(call.wait_answered)
        assert (str(error), noticed_at) == (f"{HUB}: silent for 15 s", last + 15)


async def test_a_hole_that_closes_in_time_costs_nothing(autojump_clock: MockClock) -> None:
    async with joined() as pair, pair.connection.report() as call:
        for _ in range(10):
            pair.link.hold(to_server=True, to_client=True)
            await trio.sleep(13)
            await call.send(report_of(1))
            pair.link.hold(to_server=False, to_client=False)
            await trio.sleep(1)
        await call.end()
        await call.wait_answered()


async def test_bytes_that_outlived_the_limit_are_not_taken(autojump_clock: MockClock) -> None:
    """After a suspend of the machine what waits in the buffers is as old as the suspend was long."""
    async with joined() as pair, pair.connection.watch(WatchFederationRequest()) as call:
        pair.link.hold(to_server=False, to_client=True)
        await trio.testing.wait_all_tasks_blocked()
        # The broadcast is on its way when time jumps.
        pair.link.hold(to_server=False, to_client=False)
        autojump_clock.jump(3600)
        error, _ = await failure_of(call.receive)
        assert str(error) == f"{HUB}: silent for 15 s"


async def test_pings_keep_an_idle_connection_alive_for_an_hour(autojump_clock: MockClock) -> None:
    async def send_hourly(call: IncomingWatch) -> None:
        await call.accept()
        await trio.sleep(3600)
        await call.send(broadcast_of(1))

    async with joined(watch=send_hourly) as pair, pair.connection.watch(WatchFederationRequest()) as call:
        began = trio.current_time()
        assert number_of(await call.receive()) == 1
        assert trio.current_time() == began + 3600
        # Both sides ask; more often than the keepalive says there is nothing to be asked.
        assert pair.connection.transport.last_received >= trio.current_time() - 5


async def test_pings_are_sent_only_into_silence(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer):
        began = trio.current_time()
        for _ in range(100):
            await trio.sleep(4)
            peer.h2.ping(b"from hub")
            await peer.flush()
        with trio.move_on_at(began + 400) as scope:
            await peer.wait_for(PingReceived)
        assert scope.cancelled_caught
        await peer.wait_for(PingReceived)
        assert trio.current_time() == began + 405
        assert not connection.transport.closed.is_set()


async def test_the_pings_of_a_peer_are_answered(autojump_clock: MockClock) -> None:
    async with joined_to_raw_client() as (peer, _):
        peer.h2.ping(b"question")
        await peer.flush()
        assert (await peer.wait_for(PingAckReceived)).ping_data == b"question"


async def test_a_peer_that_accepts_and_says_nothing_is_given_up_at_the_limit(autojump_clock: MockClock) -> None:
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        began = trio.current_time()
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        async with connection.report() as report, connection.watch(WatchFederationRequest()) as watch:
            for step in (report.wait_accepted, watch.receive, partial(report.send, report_of(1))):
                error, noticed_at = await failure_of(step)
                assert (str(error), noticed_at) == (f"{HUB}: silent for 15 s", began + 15)
        await connection.wait_closed()


async def test_a_client_that_connects_and_says_nothing_is_given_up_at_the_limit(autojump_clock: MockClock) -> None:
    link = new_link()
    async with nothing_left():
        began = trio.current_time()
        await FederationServer(take_reports, hang).serve(link.server)
        assert trio.current_time() == began + 15
        # It was told who speaks here, and then that this was the end of it.
        assert await link.client.receive_some()
        assert await link.client.receive_some() == b""


async def test_a_connection_that_ends_while_bytes_wait_is_closed_within_the_deadline(autojump_clock: MockClock) -> None:
    """Whoever closes gives the peer a moment to take what is queued, and no more."""
    wide = ConnectionSettings(stream_window=4 * 2**20)
    async with joined(report=hang, server=wide) as pair, trio.open_nursery() as nursery:
        pair.link.hold(to_server=True, to_client=False)
        nursery.start_soon(send_too_much, pair.connection)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await pair.connection.aclose()
        assert trio.current_time() == began
        await pair.connection.wait_closed()
        assert trio.current_time() == began + CLOSE_DEADLINE


async def send_too_much(connection: HubConnection) -> None:
    async with connection.report() as call:
        with pytest.raises(Unavailable):
            await call.send(report_of(1, padding=8 * 2**20))


async def test_what_is_queued_at_the_end_still_arrives(autojump_clock: MockClock) -> None:
    link = new_link(capacity=1000)
    async with joined_to_raw_server(link=link) as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        link.hold(to_server=True, to_client=False)
        expected = b"".join(framed(report_of(number, padding=500)) for number in range(50))
        for number in range(50):
            await call.send(report_of(number, padding=500))
        await call.end()
        await connection.aclose()
        await trio.sleep(CLOSE_DEADLINE / 2)
        link.hold(to_server=False, to_client=False)
        received = b""
        while len(received) < len(expected):
            received += (await peer.wait_for(DataReceived)).data
        assert received == expected
        assert (await peer.wait_for(StreamEnded)).stream_id == stream_id
        assert not await peer.read_some()


# --- goodbyes, resets, breaks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, data, kind, text",
    [
        (ErrorCodes.NO_ERROR, None, Unavailable, "the peer said goodbye (NO_ERROR)"),
        (ErrorCodes.NO_ERROR, b"restart\r\nsoon", Unavailable, "the peer said goodbye (NO_ERROR: restart soon)"),
        (ErrorCodes.INTERNAL_ERROR, b"\xff", Unavailable, "the peer said goodbye (INTERNAL_ERROR: \ufffd)"),
        (
            ErrorCodes.ENHANCE_YOUR_CALM,
            b"too_many_pings",
            TooManyPings,
            "the peer said goodbye (ENHANCE_YOUR_CALM: too_many_pings)",
        ),
        (0x4711, None, Unavailable, "the peer said goodbye (code 18193)"),
    ],
)
async def test_a_goodbye_ends_every_call_and_is_told(
    autojump_clock: MockClock, code: int, data: bytes | None, kind: type[RpcError], text: str
) -> None:
    async with two_calls() as (peer, connection, report, watch):
        await peer.wait_called()
        watched = await peer.wait_called()
        began = trio.current_time()
        await peer.respond(watched)
        # What comes in the same read is still used, or given back, without a complaint.
        peer.h2.send_data(watched, framed(broadcast_of(1)))
        peer.h2.close_connection(error_code=code, additional_data=data)
        await peer.flush()
        await connection.wait_closed()
        for step in (report.wait_answered, report.end, watch.receive, partial(report.send, report_of(1))):
            error, noticed_at = await failure_of(step)
            assert type(error) is kind
            assert (str(error), noticed_at) == (f"{HUB}: {text}", began)


@pytest.mark.parametrize("gap", [0.0, 0.5], ids=["in the same read", "later"])
async def test_a_goodbye_before_the_ends_of_calls(autojump_clock: MockClock, gap: float) -> None:
    """Servers say goodbye, and then end the calls that they have, which is their good right."""
    async with two_calls() as (peer, connection, report, watch):
        reported = await peer.wait_called()
        watched = await peer.wait_called()
        await peer.respond(watched)
        await peer.send_data(watched, framed(broadcast_of(1)))
        assert number_of(await watch.receive()) == 1
        code = ErrorCodes.ENHANCE_YOUR_CALM
        goodbye = GoAwayFrame(0, error_code=code, additional_data=b"too_many_pings").serialize()
        peer.h2.send_headers(watched, [("grpc-status", str(Status.UNAVAILABLE.value))], end_stream=True)
        peer.h2.send_headers(reported, [(":status", "200"), ("grpc-status", "14")], end_stream=True)
        ends = peer.h2.data_to_send()
        if gap:
            await peer.stream.send_all(goodbye)
            await trio.sleep(gap)
            with suppress(trio.BrokenResourceError):
                await peer.stream.send_all(ends)
        else:
            await peer.stream.send_all(goodbye + ends)
        error = await connection.wait_closed()
        assert str(error) == f"{HUB}: the peer said goodbye (ENHANCE_YOUR_CALM: too_many_pings)"
        assert type(error) is TooManyPings
        for step in (report.wait_answered, watch.receive):
            told, _ = await failure_of(step)
            assert (type(told), str(told)) == (TooManyPings, str(error))


async def test_what_came_before_a_goodbye_counts(autojump_clock: MockClock) -> None:
    """A refusal, even in the same read."""
    async with two_calls() as (peer, connection, report, _):
        reported = await peer.wait_called()
        await peer.wait_called()
        peer.h2.send_headers(
            reported,
            [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "6"), ("grpc-message", "taken")],
            end_stream=True,
        )
        peer.h2.close_connection()
        await peer.flush()
        assert type(await connection.wait_closed()) is Unavailable
        error, _ = await failure_of(report.wait_answered)
        assert (type(error), error.message) == (AlreadyExists, "taken")


async def test_a_goodbye_right_after_the_data_of_a_call_that_was_given_up(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer):
        async with connection.watch(WatchFederationRequest()):
            stream_id = await peer.wait_called()
            await peer.respond(stream_id)
        peer.h2.send_data(stream_id, framed(broadcast_of(1)))
        peer.h2.close_connection(error_code=ErrorCodes.ENHANCE_YOUR_CALM)
        await peer.flush()
        await connection.wait_closed()
        assert connection.transport.ended == "the peer said goodbye (ENHANCE_YOUR_CALM)"
        assert connection.transport.too_many_pings


async def test_a_goodbye_while_a_ping_is_due_and_nothing_can_be_written(autojump_clock: MockClock) -> None:
    """The connection has a second to write what it has; what becomes due meanwhile must not break it."""
    link = new_link(capacity=1000)
    settings = ConnectionSettings(keepalive=0.2, silence_limit=15)
    async with joined_to_raw_server(client=settings, link=link) as (connection, peer), connection.report() as call:
        await peer.wait_called()
        link.hold(to_server=True, to_client=False)
        for _ in range(20):
            await call.send(report_of(1, padding=500))
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        peer.h2.close_connection()
        await peer.flush()
        await connection.wait_closed()
        assert trio.current_time() == began + CLOSE_DEADLINE
        assert connection.transport.ended == "the peer said goodbye (NO_ERROR)"


async def test_a_breach_of_the_protocol_while_a_ping_is_due_and_nothing_can_be_written(
    autojump_clock: MockClock,
) -> None:
    """As above, but it is us who said goodbye, and h2 takes nothing after that."""
    link = new_link(capacity=1000)
    settings = ConnectionSettings(keepalive=0.2, silence_limit=15)
    async with joined_to_raw_server(client=settings, link=link) as (connection, peer), connection.report() as call:
        await peer.wait_called()
        link.hold(to_server=True, to_client=False)
        for _ in range(20):
            await call.send(report_of(1, padding=500))
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await peer.stream.send_all(bytes(9))
        await connection.wait_closed()
        assert trio.current_time() == began + CLOSE_DEADLINE
        assert connection.transport.ended.startswith("the peer broke HTTP/2: ")


async def test_a_server_that_is_told_goodbye_ends(autojump_clock: MockClock) -> None:
    handler = Watched(hang)
    async with joined_to_raw_client(report=handler) as (peer, ended):
        await peer.request(REPORT_PATH)
        await handler.started.wait()
        peer.h2.close_connection()
        await peer.flush()
        with trio.fail_after(0.1):
            await ended.wait()
        assert handler.outcomes == [trio.Cancelled]


@pytest.mark.parametrize("code", [ErrorCodes.NO_ERROR, ErrorCodes.CANCEL, ErrorCodes.REFUSED_STREAM, 0x4711])
async def test_a_reset_ends_only_its_own_call(autojump_clock: MockClock, code: int) -> None:
    async with two_calls() as (peer, _, report, watch):
        reported = await peer.wait_called()
        watched = await peer.wait_called()
        peer.h2.reset_stream(reported, error_code=code)
        await peer.flush()
        error, _ = await failure_of(report.wait_answered)
        assert type(error) is Unavailable
        assert str(error).startswith(f"{HUB}: the call was cut off: ")
        error, _ = await failure_of(partial(report.send, report_of(1)))
        assert type(error) is Unavailable
        await peer.respond(watched)
        await peer.send_data(watched, framed(broadcast_of(1)))
        assert number_of(await watch.receive()) == 1


async def test_a_reset_by_the_client_ends_only_its_own_handler(autojump_clock: MockClock) -> None:
    first, second = Watched(hang), Watched(hang)
    handlers = [first, second]

    async def hand_out(call: IncomingReport) -> None:
        await handlers.pop(0)(call)

    async with joined_to_raw_client(report=hand_out) as (peer, ended):
        stream_id = await peer.request(REPORT_PATH)
        await first.started.wait()
        await peer.request(REPORT_PATH)
        await second.started.wait()
        peer.h2.reset_stream(stream_id, error_code=ErrorCodes.CANCEL)
        await peer.flush()
        with trio.fail_after(0.1):
            await first.ended.wait()
        assert first.outcomes == [trio.Cancelled]
        await trio.sleep(1)
        assert second.outcomes == []
        assert not ended.is_set()


async def test_a_broken_connection_is_noticed_at_once_by_both_sides(autojump_clock: MockClock) -> None:
    handler = Watched(hang)
    async with joined(report=handler, watch=handler) as pair:
        async with pair.connection.report() as report, pair.connection.watch(WatchFederationRequest()) as watch:
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
            pair.link.cut()
            for step in (report.wait_answered, watch.receive):
                error, noticed_at = await failure_of(step)
                assert (str(error), noticed_at) == (f"{HUB}: the connection broke: the link is cut", began)
            await pair.server_ended.wait()
            assert trio.current_time() == began
        assert handler.outcomes == [trio.Cancelled] * 2


async def test_a_peer_that_closes_half_has_closed(autojump_clock: MockClock) -> None:
    """HTTP/2 knows no half-open connections: who says no more cannot answer, nor give back windows."""
    handler = Watched(hang)
    async with joined(report=handler) as pair, pair.connection.report() as call:
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await pair.link.server.send_eof()
        error, noticed_at = await failure_of(call.wait_answered)
        assert (str(error), noticed_at) == (f"{HUB}: the peer closed the connection", began)
        # The server sees the close that follows.
        await pair.server_ended.wait()
        assert trio.current_time() == began

    handler = Watched(hang)
    link = new_link()
    async with joined_to_raw_client(report=handler, link=link) as (peer, ended):
        await peer.request(REPORT_PATH)
        await handler.started.wait()
        await link.client.send_eof()
        with trio.fail_after(0.1):
            await ended.wait()
        assert handler.outcomes == [trio.Cancelled]


async def test_a_flood_of_pings_without_a_reader_ends_its_connection(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers pile up, for somebody who will never read them."""
    monkeypatch.setattr(transport, "MOST_WAITING", 4 * HIGH_WATER)
    link = new_link()
    async with joined_to_raw_client(link=link) as (peer, ended):
        await peer.read_some()
        ping = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
        sent = 0
        while not ended.is_set():
            sent += len(ping) * 100
            await link.client.send_all(ping * 100)
            await trio.testing.wait_all_tasks_blocked()
            assert sent < 10 * HIGH_WATER


async def test_the_transport_tells_whom_it_is_connected_to(autojump_clock: MockClock) -> None:
    names: list[object] = []

    async def look(call: IncomingReport) -> None:
        names.append(call.peer)
        await call.answer()

    async with joined(report=look) as pair:
        assert pair.connection.transport.get_extra_info("peername") == HUB
        assert pair.connection.transport.get_extra_info("sslcontext", "nothing") == "nothing"
        async with pair.connection.report() as call:
            await call.wait_accepted()
    assert names == [AGENT]
