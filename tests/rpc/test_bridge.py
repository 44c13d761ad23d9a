"""The bridge between Trio and asyncio: one loop, whatever is nested, and nothing that asyncio code tells nobody can end
the process."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import structlog.testing
import trio
import trio.testing
import trio_asyncio
from trio.testing import MockClock

from tests.rpc.harness import HUB, joined, new_link, number_of, report_of, send_one, take_reports
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import FederationServer, HubConnection, bridge, open_bridge


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_a_bridge_in_a_bridge_is_the_same_bridge(autojump_clock: MockClock) -> None:
    assert trio_asyncio.current_loop.get() is None
    async with open_bridge():
        outer = trio_asyncio.current_loop.get()
        async with open_bridge():
            assert trio_asyncio.current_loop.get() is outer
            assert await bridge.run(give(1)) == 1
        # Leaving the inner one closes nothing.
        assert await bridge.run(give(2)) == 2
        assert trio_asyncio.current_loop.get() is outer
    assert trio_asyncio.current_loop.get() is None


async def test_a_hub_and_an_agent_may_share_a_bridge(autojump_clock: MockClock) -> None:
    link = new_link()
    async with open_bridge(), trio.open_nursery() as nursery:

        async def serve() -> None:
            async with open_bridge():
                await FederationServer(take_reports, send_one).serve(link.server)

        nursery.start_soon(serve)
        async with open_bridge():
            connection = await HubConnection.open(nursery, link.client, peer=HUB)
            async with connection.watch(WatchFederationRequest()) as call:
                assert number_of(await call.receive()) == 1
            await connection.aclose()


async def test_bridges_one_after_the_other_are_new(autojump_clock: MockClock) -> None:
    for number in range(3):
        async with open_bridge():
            assert await bridge.run(give(number)) == number


async def test_without_a_bridge_there_is_a_clear_error() -> None:
    coroutine = give(1)
    with pytest.raises(RuntimeError, match="open_bridge"):
        await bridge.run(coroutine)
    # It was closed, so that nothing warns that it was never awaited.
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


async def test_results_and_errors_come_through(autojump_clock: MockClock) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("inside")

    async with open_bridge():
        assert await bridge.run(give(7)) == 7
        with pytest.raises(ZeroDivisionError, match="inside"):
            await bridge.run(fail())


async def test_asyncios_time_is_trios(autojump_clock: MockClock) -> None:
    async with open_bridge():
        began = trio.current_time()
        await bridge.run(asyncio.sleep(3600))
        assert trio.current_time() == pytest.approx(began + 3600)


async def test_a_cancelled_coroutine_is_waited_for(autojump_clock: MockClock) -> None:
    events: list[str] = []

    async def end_slowly() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            events.append("cancelled")
            await asyncio.sleep(1)
            events.append("ended")
            raise

    async with open_bridge():
        with trio.move_on_after(1) as scope:
            await bridge.run(end_slowly())
        assert scope.cancelled_caught
        assert events == ["cancelled", "ended"]


async def test_a_coroutine_that_is_cancelled_from_the_start_never_begins(autojump_clock: MockClock) -> None:
    begun: list[bool] = []

    async def begin() -> None:
        begun.append(True)

    async with open_bridge():
        with trio.CancelScope() as scope:
            scope.cancel()
            await bridge.run(begin())
        assert scope.cancelled_caught
    assert begun == []


async def test_what_asyncio_code_can_tell_nobody_is_logged(autojump_clock: MockClock) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in a callback")

    async def fail_unheard() -> None:
        raise ZeroDivisionError("in a task")

    with structlog.testing.capture_logs() as logs:
        async with joined() as pair:
            loop = trio_asyncio.current_loop.get()
            loop.call_soon(fail)
            await trio.testing.wait_all_tasks_blocked()
            task = loop.create_task(fail_unheard())
            await trio.testing.wait_all_tasks_blocked()
            del task
            await trio.sleep(1)
            # The connection that was there goes on.
            async with pair.connection.report() as call:
                await call.send(report_of(1))
                await call.end()
                await call.wait_answered()
    strays = [entry for entry in logs if entry["event"] == "stray_asyncio_error"]
    assert [str(entry["exc_info"]) for entry in strays] == ["in a callback", "in a task"]
    assert all(entry["log_level"] == "error" and entry["message"] for entry in strays)
