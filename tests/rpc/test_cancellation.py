"""Trio's cancellation ends a call wherever it stands: the server's handler is cancelled, the connection goes on, and
nothing is left behind."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import structlog.testing
import trio
import trio.testing
from h2.events import ResponseReceived, StreamReset
from trio.testing import MockClock

from tests.rpc.harness import (
    HUB,
    REPORT_PATH,
    Pair,
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
    send_one,
    take_reports,
)
from trio_federation.errors import RpcError, Unavailable
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import (
    ConnectionSettings,
    FederationServer,
    HubConnection,
    IncomingReport,
    IncomingWatch,
    open_bridge,
)

#: Windows so wide that what makes a sender wait is the link.
WIDE = ConnectionSettings(stream_window=4 * 2**20)

Step = Callable[[Pair], Awaitable[None]]


# --- the stages of a call at which it can be cancelled ---------------------------------------------------------------


async def open_and_wait(pair: Pair) -> None:
    async with pair.connection.report() as call:
        await call.wait_accepted()


async def open_a_watch_and_wait(pair: Pair) -> None:
    async with pair.connection.watch(WatchFederationRequest()) as call:
        await call.wait_accepted()


async def wait_for_the_answer(pair: Pair) -> None:
    async with pair.connection.report() as call:
        await call.send(report_of(1))
        await call.end()
        await call.wait_answered()


async def send_more_than_is_taken(pair: Pair) -> None:
    async with pair.connection.report() as call:
        await call.send(report_of(1, padding=2**20))


async def only_hold_it_open(pair: Pair) -> None:
    async with pair.connection.report():
        await trio.sleep_forever()


async def receive_nothing(pair: Pair) -> None:
    async with pair.connection.watch(WatchFederationRequest()) as call:
        await call.receive()


STAGES: list[Step] = [
    open_and_wait,
    open_a_watch_and_wait,
    wait_for_the_answer,
    send_more_than_is_taken,
    only_hold_it_open,
    receive_nothing,
]


async def assert_usable(connection: HubConnection) -> None:
    """Both directions of a connection carry more than any window holds."""
    async with connection.watch(WatchFederationRequest(spare_own_cluster=True)) as call:
        with trio.fail_after(30):
            assert number_of(await call.receive()) == 4711


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_call_ends_its_handler_and_nothing_else(autojump_clock: MockClock, stage: Step) -> None:
    handler = Watched(hang)
    async with joined(report=handler, watch=partial(dispatch, handler)) as pair:
        async with pair.connection.report() as bystander:
            await bystander.send(report_of(1))
            await trio.testing.wait_all_tasks_blocked()
            handler.started = trio.Event()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stage, pair)
                    with trio.fail_after(10):
                        await handler.started.wait()
                    await trio.testing.wait_all_tasks_blocked()
                    assert handler.outcomes == []
                    began = trio.current_time()
                    scope.cancel()
            assert scope.cancelled_caught
            assert trio.current_time() == began
            with trio.fail_after(1):
                await handler.ended.wait()
            assert handler.outcomes == [trio.Cancelled]
            await assert_usable(pair.connection)
            await bystander.send(report_of(2))
        await trio.testing.wait_all_tasks_blocked()
        assert handler.outcomes == [trio.Cancelled, trio.Cancelled]


async def dispatch(handler: Watched, call: IncomingWatch) -> None:
    """`handler` for a watch that nobody has asked anything of, else what `assert_usable` needs."""
    request = await call.request()
    if request.spare_own_cluster:
        await call.send(broadcast_of(4711, padding=2**20))
    else:
        await handler(call)


async def test_a_call_is_cancelled_in_the_middle_of_a_message(autojump_clock: MockClock) -> None:
    async def send_for_ever(call: IncomingWatch) -> None:
        if (await call.request()).spare_own_cluster:
            await call.send(broadcast_of(4711, padding=2**20))
        while True:
            await call.send(broadcast_of(1, padding=2**20))

    handler = Watched(send_for_ever)
    async with joined(watch=handler) as pair:
        async with pair.connection.watch(WatchFederationRequest()) as call:
            assert number_of(await call.receive()) == 1
            pair.link.hold(to_server=False, to_client=True)
            with trio.move_on_after(3) as scope:
                await call.receive()
            assert scope.cancelled_caught
        pair.link.hold(to_server=False, to_client=False)
        with trio.fail_after(1):
            await handler.ended.wait()
        assert handler.outcomes == [trio.Cancelled]
        await assert_usable(pair.connection)


async def test_a_cancelled_receive_can_be_tried_again(autojump_clock: MockClock) -> None:
    """As long as nothing of the message has come: whoever waits with a deadline goes on with the call after it."""

    async def send_later(call: IncomingWatch) -> None:
        await call.accept()
        await trio.sleep(10)
        await call.send(broadcast_of(1))
        await trio.sleep_forever()

    async with joined(watch=send_later) as pair, pair.connection.watch(WatchFederationRequest()) as call:
        for _ in range(3):
            with trio.move_on_after(3) as scope:
                await call.receive()
            assert scope.cancelled_caught
        assert number_of(await call.receive()) == 1


async def test_a_call_is_cancelled_while_no_bytes_can_be_written(autojump_clock: MockClock) -> None:
    """The reset goes out as soon as there is room, without anybody's further doing."""
    handler = Watched(hang)
    async with joined(report=handler, server=WIDE) as pair:
        async with pair.connection.report() as call:
            await trio.testing.wait_all_tasks_blocked()
            pair.link.hold(to_server=True, to_client=False)
            with trio.move_on_after(1) as scope:
                await call.send(report_of(1, padding=2**20))
            assert scope.cancelled_caught
            # Before its headers could go out, too.
            with trio.move_on_after(1) as scope:
                async with pair.connection.report():
                    raise AssertionError("there is no room to open a call")
            assert scope.cancelled_caught
        assert len(handler.outcomes) == 0
        pair.link.hold(to_server=False, to_client=False)
        with trio.fail_after(0.1):
            await handler.ended.wait()
        assert handler.outcomes == [trio.Cancelled]
        await assert_watchable(pair.connection)


async def assert_watchable(connection: HubConnection) -> None:
    async with connection.watch(WatchFederationRequest()) as call:
        with trio.fail_after(30):
            assert number_of(await call.receive()) == 1


@pytest.mark.parametrize("stage", STAGES)
async def test_a_call_that_is_cancelled_from_the_start_never_begins(autojump_clock: MockClock, stage: Step) -> None:
    """Before asyncio has picked up anything of it."""
    handler = Watched(hang)
    async with joined(report=handler, watch=handler) as pair:
        with trio.CancelScope() as scope:
            scope.cancel()
            await stage(pair)
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert not handler.started.is_set()
        assert pair.connection.transport.protocol.processor.streams == {}


async def test_each_step_can_be_cancelled_before_asyncio_has_picked_it_up(autojump_clock: MockClock) -> None:
    async with joined(report=hang, watch=hang) as pair:
        async with AsyncExitStack() as calls:
            report = await calls.enter_async_context(pair.connection.report())
            watch = await calls.enter_async_context(pair.connection.watch(WatchFederationRequest()))
            steps: list[Callable[[], Awaitable[object]]] = [
                partial(report.send, report_of(1)),
                report.wait_accepted,
                report.wait_answered,
                watch.wait_accepted,
                watch.receive,
                report.end,
            ]
            for step in steps:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await step()
                assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def reset_in_the_same_read(pair_handler: Watched) -> AsyncIterator[None]:
    async with joined_to_raw_client(report=pair_handler) as (peer, _):
        await peer.request(REPORT_PATH, framed(report_of(1)), reset=True)
        await trio.sleep(1)
        yield
        # The server goes on.
        await peer.request(REPORT_PATH, end=True)
        await peer.wait_for(ResponseReceived)


async def test_a_call_that_comes_and_goes_in_one_read_is_never_handled(autojump_clock: MockClock) -> None:
    handler = Watched(take_reports)
    async with reset_in_the_same_read(handler):
        assert handler.outcomes == []
    assert handler.outcomes == [None]


async def test_a_cancelled_call_is_reset(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer):
        async with connection.report() as call:
            stream_id = await peer.wait_called()
            await call.send(report_of(1))
        reset = await peer.wait_for(StreamReset)
        assert reset.stream_id == stream_id


async def test_a_call_that_has_ended_is_not_reset(autojump_clock: MockClock) -> None:
    async with joined_to_raw_server() as (connection, peer):
        async with connection.report() as call:
            stream_id = await peer.wait_called()
            await call.end()
            await peer.respond(stream_id)
            await peer.send_data(stream_id, bytes(5))
            await peer.send_trailers(stream_id, 0)
            await call.wait_answered()
        with trio.move_on_after(1) as scope:
            await peer.wait_for(StreamReset)
        assert scope.cancelled_caught


# --- the server's side -----------------------------------------------------------------------------------------------


async def test_a_cancelled_server_ends_its_handlers_at_once(autojump_clock: MockClock) -> None:
    handler = Watched(hang)
    async with joined(report=handler, watch=handler) as pair, trio.open_nursery() as nursery:
        for stage in (only_hold_it_open, receive_nothing, send_more_than_is_taken):
            nursery.start_soon(expect_unavailable, stage, pair)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        pair.server_scope.cancel()
        await pair.server_ended.wait()
        assert trio.current_time() == began
        assert handler.outcomes == [trio.Cancelled] * 3
        nursery.cancel_scope.cancel()


async def expect_unavailable(stage: Step, pair: Pair) -> None:
    with pytest.raises(Unavailable):
        await stage(pair)


@pytest.mark.parametrize("how", ["the server is cancelled", "the connection breaks"])
async def test_a_handler_may_take_its_time_to_end(autojump_clock: MockClock, how: str) -> None:
    """So long as it has a deadline of its own: until then `serve` does not return, and what fails then fails alone."""

    async def end_slowly(call: IncomingReport) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(1.5, shield=True):
                await trio.sleep_forever()

    handler = Watched(end_slowly)
    async with joined(report=handler) as pair:
        async with pair.connection.report():
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
            if how == "the server is cancelled":
                pair.server_scope.cancel()
            else:
                pair.link.cut()
            await pair.server_ended.wait()
            assert trio.current_time() - began == pytest.approx(1.5)
        assert handler.outcomes == [trio.Cancelled]


async def test_a_handler_that_refuses_to_end_is_waited_for_but_not_by_the_peer(autojump_clock: MockClock) -> None:
    async def end_very_slowly(call: IncomingReport) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(60)

    async with joined(report=end_very_slowly) as pair, pair.connection.report():
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        pair.server_scope.cancel()
        await pair.connection.wait_closed()
        assert trio.current_time() == began
        await pair.server_ended.wait()
        assert trio.current_time() - began == pytest.approx(60)


async def test_handlers_end_when_their_connection_does(autojump_clock: MockClock) -> None:
    handler = Watched(hang)
    async with joined(report=handler, watch=handler) as pair:
        async with AsyncExitStack() as calls:
            for _ in range(5):
                await calls.enter_async_context(pair.connection.report())
                await calls.enter_async_context(pair.connection.watch(WatchFederationRequest()))
            await trio.testing.wait_all_tasks_blocked()
            pair.link.cut()
            await pair.server_ended.wait()
        assert handler.outcomes == [trio.Cancelled] * 10


async def test_a_handler_that_cancels_itself_ends_well(autojump_clock: MockClock) -> None:
    """As the hub's does when a newer call replaces it: what it catches is its own business."""

    async def give_up(call: IncomingReport) -> None:
        with trio.move_on_after(1):
            await call.receive()
        await call.answer()

    async with joined(report=give_up) as pair, pair.connection.report() as call:
        await call.wait_answered()


# --- together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["error", "cancellation"])
@pytest.mark.parametrize("error", ["the connection breaks", "the server resets", "the server refuses"])
@pytest.mark.parametrize("stage", STAGES)
async def test_an_error_and_a_cancellation_in_the_same_tick(
    autojump_clock: MockClock, stage: Step, error: str, first: str
) -> None:
    """Either is right; anything else, or something left, is not."""
    fail = trio.Event()

    async def end(call: IncomingReport | IncomingWatch) -> None:
        await fail.wait()
        raise Unavailable("refused")

    async with joined(report=end, watch=end) as pair:
        outcomes: list[str] = []

        async def run() -> None:
            try:
                await stage(pair)
            except RpcError as failure:
                outcomes.append(type(failure).__name__)
            except trio.Cancelled:
                outcomes.append("cancelled")
                raise

        def cause_the_error() -> None:
            if error == "the connection breaks":
                pair.link.cut()
            elif error == "the server resets":
                pair.server_scope.cancel()
            else:
                fail.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            if first == "error":
                cause_the_error()
                nursery.cancel_scope.cancel()
            else:
                nursery.cancel_scope.cancel()
                cause_the_error()
        assert outcomes in (["Unavailable"], ["cancelled"])


@pytest.mark.parametrize("ticks", range(12))
async def test_a_cancellation_on_the_heels_of_an_error(autojump_clock: MockClock, ticks: int) -> None:
    """Some scheduler ticks after it, so that every step between the frame and the caller is hit."""
    async with joined(report=hang, watch=hang) as pair:
        async with trio.open_nursery() as nursery:
            errors: list[BaseException] = []

            async def run() -> None:
                try:
                    await wait_for_the_answer(pair)
                except RpcError as error:
                    errors.append(error)

            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            pair.link.cut()
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert [type(error) for error in errors] in ([], [Unavailable])


async def test_a_nursery_that_is_cancelled_takes_its_connection_along(autojump_clock: MockClock) -> None:
    """With calls in it, and nothing that closes anything on its own."""
    handler = Watched(hang)
    server = FederationServer(handler, handler)
    link = new_link()
    async with nothing_left(), trio.open_nursery() as serving:
        serving.start_soon(server.serve, link.server)
        async with trio.open_nursery() as nursery:
            connection = await HubConnection.open(nursery, link.client, peer=HUB)
            pair = Pair(connection, link, nursery, trio.CancelScope(), trio.Event())
            for stage in STAGES:
                nursery.start_soon(stage, pair)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert connection.transport.closed.is_set()
    assert handler.outcomes == [trio.Cancelled] * len(STAGES)


async def test_a_connection_that_is_forgotten_is_no_unclosed_channel(autojump_clock: MockClock) -> None:
    """grpclib reports a channel that is collected unclosed to asyncio's handler of last resort, and warns."""
    with warnings.catch_warnings(), structlog.testing.capture_logs() as logs:
        warnings.simplefilter("error")
        async with open_bridge():
            for end in ("close", "cut", "cancel"):
                link = new_link()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(FederationServer(take_reports, send_one).serve, link.server)
                    connection = await HubConnection.open(nursery, link.client, peer=HUB)
                    await assert_watchable(connection)
                    if end == "close":
                        await connection.aclose()
                    elif end == "cut":
                        link.cut()
                    else:
                        nursery.cancel_scope.cancel()
                del connection, nursery, link
                gc.collect()
                await trio.testing.wait_all_tasks_blocked()
    assert [entry for entry in logs if entry["event"] == "stray_asyncio_error"] == []


async def test_opening_a_connection_can_be_cancelled(autojump_clock: MockClock) -> None:
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            scope.cancel()
            await HubConnection.open(nursery, link.client, peer=HUB)
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
    # The stream was the connection's from the start, and is closed.
    assert await link.server.receive_some() is not None
    with pytest.raises(trio.ClosedResourceError):
        await link.client.receive_some()
