"""The two calls, and what becomes of them: messages, metadata, ends, refusals. Every failure leaves the room as an
error of ours that names the peer, and stays with its own call."""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NoReturn

import grpclib.server
import pytest
import structlog.testing
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from h2.events import (
    DataReceived,
    PingAckReceived,
    ResponseReceived,
    StreamReset,
    TrailersReceived,
)
from trio.testing import MockClock

from tests.rpc.harness import (
    AGENT,
    HUB,
    REPORT_PATH,
    WATCH_PATH,
    Watched,
    broadcast_of,
    framed,
    hang,
    headers_of,
    joined,
    joined_to_raw_client,
    joined_to_raw_server,
    new_link,
    nothing_left,
    number_of,
    report_method,
    report_of,
    send_one,
    serve_methods,
    take_reports,
    watch_method,
)
from trio_federation.errors import (
    AlreadyExists,
    InvalidArgument,
    PermissionDenied,
    ProtocolViolation,
    ResourceExhausted,
    RpcError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from trio_federation.pb.sandbox.sync.v1 import ReportFederationRequest, WatchFederationRequest
from trio_federation.rpc import (
    ConnectionSettings,
    FederationServer,
    HubConnection,
    IncomingReport,
    IncomingWatch,
    ReportCall,
    WatchCall,
)
from trio_federation.rpc.transport import CONNECTION_WINDOW

#: what each of gRPC's statuses, and there is no other, is to us
STATUSES: dict[Status, type[RpcError]] = {
    Status.CANCELLED: Unavailable,
    Status.UNKNOWN: ProtocolViolation,
    Status.INVALID_ARGUMENT: InvalidArgument,
    Status.DEADLINE_EXCEEDED: Unavailable,
    Status.NOT_FOUND: ProtocolViolation,
    Status.ALREADY_EXISTS: AlreadyExists,
    Status.PERMISSION_DENIED: PermissionDenied,
    Status.RESOURCE_EXHAUSTED: ResourceExhausted,
    Status.FAILED_PRECONDITION: ProtocolViolation,
    Status.ABORTED: Unavailable,
    Status.OUT_OF_RANGE: ProtocolViolation,
    Status.UNIMPLEMENTED: Unimplemented,
    Status.INTERNAL: ProtocolViolation,
    Status.UNAVAILABLE: Unavailable,
    Status.DATA_LOSS: ProtocolViolation,
    Status.UNAUTHENTICATED: Unauthenticated,
}
REFUSALS = [
    Unavailable,
    Unauthenticated,
    PermissionDenied,
    InvalidArgument,
    AlreadyExists,
    Unimplemented,
    ResourceExhausted,
]


async def use_report(connection: HubConnection) -> None:
    async with connection.report() as call:
        await call.send(report_of(1))
        await call.end()
        await call.wait_answered()


async def use_watch(connection: HubConnection) -> None:
    async with connection.watch(WatchFederationRequest()) as call:
        await receive_for_ever(call)


async def receive_for_ever(call: WatchCall) -> NoReturn:
    while True:
        await call.receive()


async def send_for_ever(call: ReportCall) -> NoReturn:
    while True:
        await call.send(report_of(1))
        await trio.sleep(0.1)


USES = pytest.mark.parametrize("use", [use_report, use_watch])


def assert_names_the_hub(error: RpcError) -> None:
    """One line, which names the peer."""
    assert error.peer == HUB
    assert str(error) == f"{HUB}: {error.message}"
    assert "\n" not in str(error)
    assert error.message


# --- what works ------------------------------------------------------------------------------------------------------


async def test_a_report_arrives_in_order_and_is_answered_at_its_end(autojump_clock: MockClock) -> None:
    received: list[int] = []

    async def take(call: IncomingReport) -> None:
        assert call.peer == AGENT
        while (message := await call.receive()) is not None:
            received.append(number_of(message))
        received.append(-1)
        await call.answer()

    async with joined(report=take) as pair, pair.connection.report() as call:
        for number in range(100):
            await call.send(report_of(number))
        await call.end()
        await call.wait_answered()
        assert received == [*range(100), -1]


async def test_a_watch_carries_its_request_and_its_broadcasts(autojump_clock: MockClock) -> None:
    requests: list[WatchFederationRequest] = []

    async def send(call: IncomingWatch) -> None:
        requests.append(await call.request())
        for number in range(100):
            await call.send(broadcast_of(number))

    async with joined(watch=send) as pair:
        for spare in (True, False):
            async with pair.connection.watch(WatchFederationRequest(spare_own_cluster=spare)) as call:
                assert [number_of(await call.receive()) for _ in range(100)] == list(range(100))
                with pytest.raises(Unavailable, match="the hub ended the watch") as caught:
                    await call.receive()
                assert_names_the_hub(caught.value)
        assert [request.spare_own_cluster for request in requests] == [True, False]


async def test_metadata_reach_the_handler(autojump_clock: MockClock) -> None:
    found: list[dict[str, str]] = []

    async def look(call: IncomingReport) -> None:
        found.append(dict(call.metadata))
        await call.answer()

    metadata = [
        ("authorization", "Bearer one"),
        ("authorization", "Bearer two"),
        ("x-federation-cluster", "west"),
        ("x-quoted", "100 % of it: =?"),
    ]
    async with joined(report=look, metadata=metadata) as pair:
        await use_report(pair.connection)
    # The first of a repeated one counts.
    assert found == [{"authorization": "Bearer one", "x-federation-cluster": "west", "x-quoted": "100 % of it: =?"}]


async def test_binary_metadata_are_left_out(autojump_clock: MockClock) -> None:
    found: list[dict[str, str]] = []

    async def look(call: IncomingReport) -> None:
        found.append(dict(call.metadata))
        await call.answer()

    async with joined_to_raw_client(report=look) as (peer, _):
        await peer.request(REPORT_PATH, end=True, headers=[("x-trace-bin", "AAEC"), ("x-plain", "text")])
        await peer.wait_for(TrailersReceived)
    assert found == [{"x-plain": "text"}]


async def test_a_call_is_accepted_before_there_is_anything_to_send(autojump_clock: MockClock) -> None:
    may_accept = trio.Event()

    async def accept(call: IncomingReport | IncomingWatch) -> None:
        await may_accept.wait()
        await call.accept()
        await trio.sleep_forever()

    async with joined(report=accept, watch=accept) as pair, AsyncExitStack() as calls:
        report = await calls.enter_async_context(pair.connection.report())
        watch = await calls.enter_async_context(pair.connection.watch(WatchFederationRequest()))
        for call in (report, watch):
            with trio.move_on_after(60) as scope:
                await call.wait_accepted()
            assert scope.cancelled_caught
        may_accept.set()
        for call in (report, watch):
            await call.wait_accepted()
            await call.wait_accepted()


async def test_many_calls_on_one_connection_do_not_mix(autojump_clock: MockClock) -> None:
    async def count_from(call: IncomingWatch) -> None:
        start = 1000 if (await call.request()).spare_own_cluster else 0
        for number in range(start, start + 50):
            await call.send(broadcast_of(number))
        await trio.sleep_forever()

    async with joined(watch=count_from) as pair, trio.open_nursery() as nursery:

        async def watch(spare: bool) -> None:
            async with pair.connection.watch(WatchFederationRequest(spare_own_cluster=spare)) as call:
                start = 1000 if spare else 0
                assert [number_of(await call.receive()) for _ in range(50)] == list(range(start, start + 50))

        for number in range(20):
            nursery.start_soon(watch, number % 2 == 0)


# --- refusals --------------------------------------------------------------------------------------------------------


@USES
@pytest.mark.parametrize(
    "status", [status for status in Status if status is not Status.OK], ids=lambda status: status.name
)
async def test_every_status_is_an_error_of_ours(
    autojump_clock: MockClock, status: Status, use: Callable[[HubConnection], Awaitable[None]]
) -> None:
    async def refuse(stream: grpclib.server.Stream[object, object]) -> None:
        raise GRPCError(status, "so it is")

    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        methods = {REPORT_PATH: report_method(refuse), WATCH_PATH: watch_method(refuse)}
        nursery.start_soon(serve_methods, link.server, methods)
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        with pytest.raises(RpcError) as caught:
            await use(connection)
        assert type(caught.value) is STATUSES[status]
        assert_names_the_hub(caught.value)
        assert "so it is" in caught.value.message
        cause = caught.value.__cause__
        assert isinstance(cause, GRPCError)
        assert cause.status is status
        await connection.aclose()


@USES
@pytest.mark.parametrize("accepted", [False, True], ids=["at once", "accepted"])
@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_handlers_error_reaches_the_caller(
    autojump_clock: MockClock, kind: type[RpcError], accepted: bool, use: Callable[[HubConnection], Awaitable[None]]
) -> None:
    async def refuse(call: IncomingReport | IncomingWatch) -> None:
        if accepted:
            await call.accept()
            await trio.sleep(1)
        raise kind("not for you: 100 % „sicher“")

    async with joined(report=refuse, watch=refuse) as pair:
        with pytest.raises(kind) as caught:
            await use(pair.connection)
        assert type(caught.value) is kind
        assert caught.value.message == "not for you: 100 % „sicher“"
        assert_names_the_hub(caught.value)
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("accepted", [False, True], ids=["at once", "accepted"])
async def test_a_refusal_is_seen_while_sending(autojump_clock: MockClock, accepted: bool) -> None:
    async def refuse(call: IncomingReport) -> None:
        if accepted:
            await call.accept()
        await call.receive()
        raise AlreadyExists("another one reports")

    async with joined(report=refuse) as pair, pair.connection.report() as call:
        with pytest.raises(AlreadyExists, match="another one reports") as caught:
            await send_for_ever(call)
        assert_names_the_hub(caught.value)
        # And it stays so, whatever is tried next.
        with pytest.raises(AlreadyExists):
            await call.send(report_of(0))
        with pytest.raises(AlreadyExists):
            await call.end()
        with pytest.raises(AlreadyExists):
            await call.wait_answered()


async def test_a_refusal_is_seen_by_a_sender_who_waits_for_room(autojump_clock: MockClock) -> None:
    async def refuse(call: IncomingReport) -> None:
        await trio.sleep(5)
        raise AlreadyExists("another one reports")

    async with joined(report=refuse) as pair, pair.connection.report() as call:
        began = trio.current_time()
        with pytest.raises(AlreadyExists):
            await call.send(report_of(1, padding=2**20))
        assert trio.current_time() - began == pytest.approx(5)


@pytest.mark.parametrize("resets", [False, True], ids=["no reset", "reset"])
async def test_a_refusal_after_the_acceptance_of_a_report_is_seen(autojump_clock: MockClock, resets: bool) -> None:
    """Not every server resets a stream that it has refused."""
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id)
        await call.wait_accepted()
        await peer.send_trailers(stream_id, Status.ALREADY_EXISTS.value, "another one reports")
        if resets:
            peer.h2.reset_stream(stream_id, error_code=0)
            await peer.flush()
        with pytest.raises(AlreadyExists, match="another one reports"):
            await call.wait_answered()
        with pytest.raises(AlreadyExists, match="another one reports"):
            await send_for_ever(call)


async def test_an_older_server_has_no_watch(autojump_clock: MockClock) -> None:
    async def report(stream: grpclib.server.Stream[ReportFederationRequest, object]) -> None:
        async for _ in stream:
            pass
        raise GRPCError(Status.UNAVAILABLE, "the end of this test")

    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        nursery.start_soon(serve_methods, link.server, {REPORT_PATH: report_method(report)})
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        async with connection.report() as call:
            await call.send(report_of(1))
            with pytest.raises(Unimplemented) as caught:
                await use_watch(connection)
            assert_names_the_hub(caught.value)
            # The report does not care.
            await call.send(report_of(2))
            await call.end()
            with pytest.raises(Unavailable, match="the end of this test"):
                await call.wait_answered()
        await connection.aclose()


async def test_an_unexpected_error_in_a_handler_is_its_calls_alone(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(call: IncomingReport) -> None:
        await call.receive()
        raise ZeroDivisionError("a fault of ours")

    async with joined(report=fail) as pair:
        async with pair.connection.watch(WatchFederationRequest()) as watch:
            assert number_of(await watch.receive()) == 1
            for _ in range(3):
                with pytest.raises(ProtocolViolation, match="UNKNOWN") as caught:
                    await use_report(pair.connection)
                assert_names_the_hub(caught.value)
                # The peer is not told what is in our code.
                assert "a fault of ours" not in str(caught.value)
            # The call that was open before goes on, and so do new ones.
            with trio.move_on_after(60) as scope:
                await watch.receive()
            assert scope.cancelled_caught
        async with pair.connection.watch(WatchFederationRequest()) as watch:
            assert number_of(await watch.receive()) == 1
        assert not pair.server_ended.is_set()
    assert "ZeroDivisionError: a fault of ours" in caplog.text


async def test_an_error_after_the_call_was_cancelled_is_logged_and_is_nobody_elses(autojump_clock: MockClock) -> None:
    async def fail_late(call: IncomingReport) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ZeroDivisionError("while ending")

    with structlog.testing.capture_logs() as logs:
        async with joined(report=fail_late) as pair:
            async with pair.connection.report() as call:
                await call.send(report_of(1))
                await trio.sleep(1)
            await trio.sleep(1)
            async with pair.connection.watch(WatchFederationRequest()) as watch:
                assert number_of(await watch.receive()) == 1
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["handler_failed_late"]


async def test_a_handler_that_answers_nothing_is_an_error_to_the_caller(autojump_clock: MockClock) -> None:
    async def forget(call: IncomingReport) -> None:
        await call.receive()

    async with joined(report=forget) as pair:
        with pytest.raises(ProtocolViolation, match="UNKNOWN"):
            await use_report(pair.connection)


# --- peers that do not speak gRPC well -------------------------------------------------------------------------------


@USES
@pytest.mark.parametrize(
    "status, kind",
    [
        ("401", Unauthenticated),
        ("403", PermissionDenied),
        ("404", Unimplemented),
        ("503", Unavailable),
        ("500", RpcError),
    ],
)
async def test_an_http_status_is_understood(
    autojump_clock: MockClock, status: str, kind: type[RpcError], use: Callable[[HubConnection], Awaitable[None]]
) -> None:
    """What a proxy answers in the hub's place."""
    async with joined_to_raw_server() as (connection, peer), trio.open_nursery() as nursery:

        async def answer() -> None:
            await peer.respond(await peer.wait_called(), (":status", status), ("content-type", "text/html"), end=True)

        nursery.start_soon(answer)
        with pytest.raises(kind, match=status) as caught:
            await use(connection)
        assert_names_the_hub(caught.value)


async def test_headers_without_an_http_status_are_told(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        peer.h2.send_headers(stream_id, [("content-type", "application/grpc")])
        await peer.flush()
        with pytest.raises(ProtocolViolation, match=":status") as caught:
            await call.wait_accepted()
        assert_names_the_hub(caught.value)


async def test_another_content_type_is_told(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id, ("content-type", "text/html"))
        with pytest.raises(ProtocolViolation, match="content-type"):
            await call.wait_accepted()


@pytest.mark.parametrize("message", [False, True], ids=["at once", "after a message"])
async def test_a_watch_that_ends_without_a_status_is_an_error(autojump_clock: MockClock, message: bool) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.watch(WatchFederationRequest()) as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id, end=not message)
        if message:
            await peer.send_data(stream_id, framed(broadcast_of(1)), end=True)
            assert number_of(await call.receive()) == 1
        began = trio.current_time()
        with pytest.raises(ProtocolViolation, match="status") as caught:
            await call.receive()
        assert_names_the_hub(caught.value)
        assert trio.current_time() == began


async def test_a_report_that_ends_without_a_status_is_an_error(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        await call.end()
        await peer.respond(stream_id)
        await peer.send_data(stream_id, struct.pack("!?I", False, 0), end=True)
        began = trio.current_time()
        with pytest.raises(ProtocolViolation):
            await call.wait_answered()
        assert trio.current_time() == began


async def test_a_message_that_breaks_off_is_an_error(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.watch(WatchFederationRequest()) as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id)
        await peer.send_data(stream_id, framed(broadcast_of(1))[:-1], end=True)
        with pytest.raises(ProtocolViolation, match="too early"):
            await call.receive()


async def test_a_status_message_is_made_one_line(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        await peer.respond(
            stream_id, ("grpc-status", "14"), ("grpc-message", "one%0Atwo%0D%1B[31mthree" + "x" * 5000), end=True
        )
        with pytest.raises(Unavailable) as caught:
            await call.wait_answered()
        assert_names_the_hub(caught.value)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
        assert "one two" in str(caught.value)


async def test_a_status_that_does_not_exist_is_told(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.report() as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id, ("grpc-status", "4711"), end=True)
        with pytest.raises(ProtocolViolation, match="4711"):
            await call.wait_answered()


async def test_bytes_that_are_no_message_end_only_their_call(autojump_clock: MockClock) -> None:
    nonsense = struct.pack("!?I", False, 3) + b"\xff\xff\xff"

    async with joined_to_raw_client(report=take_reports, watch=send_one) as (peer, ended):
        await peer.request(REPORT_PATH, nonsense)
        headers = headers_of(await peer.wait_for(ResponseReceived))
        assert headers["grpc-status"] == str(Status.INTERNAL.value)
        assert "ReportFederationRequest" in headers["grpc-message"]
        await peer.request(WATCH_PATH, framed(WatchFederationRequest()), end=True)
        await peer.wait_for(DataReceived)
        assert not ended.is_set()

    async with joined_to_raw_server() as (connection, peer), connection.watch(WatchFederationRequest()) as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id)
        await peer.send_data(stream_id, nonsense)
        with pytest.raises(ProtocolViolation, match="FederationBroadcast") as caught:
            await call.receive()
        assert_names_the_hub(caught.value)


async def test_empty_frames_are_nothing(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer), connection.watch(WatchFederationRequest()) as call:
        stream_id = await peer.wait_called()
        await peer.respond(stream_id)
        data = framed(broadcast_of(7))
        for piece in (b"", data[:3], b"", data[3:9], b"", data[9:], b""):
            await peer.send_data(stream_id, piece)
            await trio.sleep(1)
        assert number_of(await call.receive()) == 7


async def test_a_caller_whose_headers_cannot_be_read_does_not_wait(autojump_clock: MockClock) -> None:
    async with joined_to_raw_client() as (peer, ended):
        stream_id = await peer.request(REPORT_PATH, headers=[("x-trace-bin", "A")])
        with trio.fail_after(1):
            reset = await peer.wait_for(StreamReset)
        assert reset.stream_id == stream_id
        assert not ended.is_set()


async def test_a_callers_deadline_is_kept(autojump_clock: MockClock) -> None:
    """Other clients set one; ours does not."""
    async with joined_to_raw_client(report=hang) as (peer, _):
        began = trio.current_time()
        await peer.request(REPORT_PATH, headers=[("grpc-timeout", "3S")])
        response = await peer.wait_for(ResponseReceived)
        assert headers_of(response)["grpc-status"] == str(Status.DEADLINE_EXCEEDED.value)
        assert trio.current_time() - began == pytest.approx(3, abs=0.01)


# --- what a call may leave behind ------------------------------------------------------------------------------------


async def test_calls_that_are_refused_unread_cost_the_others_no_window(autojump_clock: MockClock) -> None:
    """More unread bytes than the connection's window holds, call after call, beside one that goes on."""

    async def refuse(call: IncomingReport) -> None:
        if call.metadata.get("x-healthy") != "yes":
            raise AlreadyExists("unread")
        await take_reports(call)

    async with joined_to_raw_client(report=refuse) as (peer, _):
        healthy = await peer.request(REPORT_PATH, framed(report_of(1)), headers=[("x-healthy", "yes")])
        unread = framed(report_of(1, padding=60_000))
        for _ in range(CONNECTION_WINDOW // len(unread) + 10):
            await peer.request(REPORT_PATH, unread)
            response = await peer.wait_for(ResponseReceived)
            assert headers_of(response)["grpc-status"] == str(Status.ALREADY_EXISTS.value)
        await peer.send_data(healthy, framed(report_of(2)), end=True)
        trailers = await peer.wait_for(TrailersReceived)
        assert (trailers.stream_id, headers_of(trailers)["grpc-status"]) == (healthy, "0")


async def test_calls_that_are_reset_at_once_cost_the_others_no_window(autojump_clock: MockClock) -> None:
    """Opened, filled and reset in one go: their handlers never come to run."""
    report = Watched(take_reports)
    async with joined_to_raw_client(report=report) as (peer, _):
        unread = framed(report_of(1, padding=60_000))
        for number in range(CONNECTION_WINDOW // len(unread) + 10):
            await peer.request(REPORT_PATH, unread, reset=True)
            # So that what the server gives back can arrive, if it does.
            peer.h2.ping(number.to_bytes(8, "big"))
            await peer.flush()
            await peer.wait_for(PingAckReceived)
        assert not report.started.is_set()
        await peer.request(REPORT_PATH, framed(report_of(2)), end=True)
        trailers = await peer.wait_for(TrailersReceived)
        assert headers_of(trailers)["grpc-status"] == "0"


@USES
async def test_a_call_on_a_connection_that_has_ended_tells_why(
    autojump_clock: MockClock, use: Callable[[HubConnection], Awaitable[None]]
) -> None:
    async with joined(report=hang, watch=hang) as pair:
        pair.link.cut()
        await pair.connection.wait_closed()
        with pytest.raises(Unavailable, match="the link is cut") as caught:
            await use(pair.connection)
        assert_names_the_hub(caught.value)
        assert caught.value.__cause__ is not None


async def test_whoever_waits_for_the_transport_is_told_that_the_connection_has_ended(autojump_clock: MockClock) -> None:
    """While a peer reads nothing: to open a call, to end one and to send on one, bytes have to be written."""
    told: list[str] = []

    async def expect_unavailable(name: str, function: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(Unavailable, match="the link is cut"):
            await function()
        told.append(name)

    wide = ConnectionSettings(stream_window=4 * 2**20)
    async with joined(report=hang, server=wide) as pair, AsyncExitStack() as calls:
        first = await calls.enter_async_context(pair.connection.report())
        second = await calls.enter_async_context(pair.connection.report())
        await trio.testing.wait_all_tasks_blocked()
        pair.link.hold(to_server=True, to_client=False)

        async def send() -> None:
            await first.send(report_of(1, padding=2**20))

        async def open_another() -> None:
            async with pair.connection.report():
                raise AssertionError("there is no room to open a call")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_unavailable, "send", send)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(expect_unavailable, "end", second.end)
            nursery.start_soon(expect_unavailable, "open", open_another)
            await trio.testing.wait_all_tasks_blocked()
            assert told == []
            began = trio.current_time()
            pair.link.cut()
        assert sorted(told) == ["end", "open", "send"]
        assert trio.current_time() == began


async def test_a_message_of_another_type_is_a_programming_error(autojump_clock: MockClock) -> None:
    async with joined() as pair, pair.connection.report() as call:
        with pytest.raises(TypeError, match="ReportFederationRequest"):
            await call.send(broadcast_of(1))  # type: ignore[arg-type]


async def test_one_server_serves_many_connections(autojump_clock: MockClock) -> None:
    server = FederationServer(take_reports, send_one)
    async with nothing_left(), trio.open_nursery() as nursery:
        links = [new_link() for _ in range(3)]
        for link in links:
            nursery.start_soon(server.serve, link.server)
        connections = [await HubConnection.open(nursery, link.client, peer=HUB) for link in links]
        for connection in connections:
            await use_report(connection)
        links[0].cut()
        await connections[0].wait_closed()
        for connection in connections[1:]:
            await use_report(connection)
            await connection.aclose()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
