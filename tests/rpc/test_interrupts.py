"""What ends a program, ends it also where asyncio code raises it; and an error or a cancellation at the worst moment of
such code is no reason to wait for ever. What could hang beyond the reach of a cancellation runs in a process of its
own, which then is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
import trio_asyncio
from trio.testing import MockClock

from tests.rpc.harness import HUB, new_link, report_of, send_one, take_reports
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import FederationServer, HubConnection, IncomingReport, bridge, open_bridge
from trio_federation.rpc.codec import FederationCodec

#: Seconds after which a process that has not ended hangs.
PATIENCE = 60.0
ROOT = Path(__file__).resolve().parents[2]

INTERRUPTS: dict[str, type[BaseException]] = {"exit": SystemExit, "ctrl-c": KeyboardInterrupt}


class Scene:
    """A client joined to a server, with a call that waits for an answer; and what raises the interrupt."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.connection: HubConnection
        self.loop: Any = None

    def fail(self, *_: object) -> NoReturn:
        raise self.error("from inside")

    async def fail_later(self) -> NoReturn:
        await asyncio.sleep(0)
        self.fail()

    async def fail_at_once(self) -> NoReturn:
        self.fail()

    async def wait_for_an_answer(self, *, padding: int = 0) -> None:
        async with self.connection.report() as call:
            await call.send(report_of(1, padding=padding))
            await call.wait_answered()

    async def watch(self) -> None:
        async with self.connection.watch(WatchFederationRequest()) as call:
            await call.receive()


# Where it can come from.


async def in_a_coroutine(scene: Scene) -> None:
    await bridge.run(scene.fail_later())


async def at_the_start_of_a_coroutine(scene: Scene) -> None:
    await bridge.run(scene.fail_at_once())


async def in_a_callback(scene: Scene) -> None:
    scene.loop.call_soon(scene.fail)


async def in_a_callback_of_time(scene: Scene) -> None:
    scene.loop.call_later(0.01, scene.fail)


async def in_a_group_in_a_callback(scene: Scene) -> None:
    def fail() -> None:
        raise BaseExceptionGroup("", [ValueError("beside it"), scene.error("from inside")])

    scene.loop.call_soon(fail)


async def in_a_task_that_nobody_waits_for(scene: Scene) -> None:
    scene.loop.create_task(scene.fail_later())


async def in_the_callback_of_a_task(scene: Scene) -> None:
    scene.loop.create_task(asyncio.sleep(0)).add_done_callback(scene.fail)


async def in_the_codec_that_encodes(scene: Scene) -> None:
    FederationCodec.encode = scene.fail  # type: ignore[method-assign, assignment]
    await scene.wait_for_an_answer()


async def in_the_codec_that_decodes(scene: Scene) -> None:
    FederationCodec.decode = scene.fail  # type: ignore[method-assign, assignment]
    await scene.wait_for_an_answer()


async def in_the_protocol(scene: Scene) -> None:
    scene.connection.transport.protocol.processor.process = scene.fail  # type: ignore[method-assign, assignment]
    await scene.watch()


async def in_the_protocol_that_has_to_wait(scene: Scene) -> None:
    scene.connection.transport.protocol.pause_writing = scene.fail  # type: ignore[method-assign]
    await scene.wait_for_an_answer(padding=2**20)


async def in_a_handler(scene: Scene) -> None:
    """Its first message tells the server's handler to raise it."""
    async with scene.connection.report() as call:
        await call.send(report_of(666))
        await call.wait_answered()


async def in_the_tick_of_a_cancellation(scene: Scene) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.wait_for_an_answer)
        await trio.sleep(0.01)
        scene.loop.call_soon(scene.fail)
        nursery.cancel_scope.cancel()


async def while_a_cancellation_is_obeyed(scene: Scene) -> None:
    async def end() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            scene.fail()

    with trio.move_on_after(0.01):
        await bridge.run(end())


PLACES = (
    in_a_coroutine,
    at_the_start_of_a_coroutine,
    in_a_callback,
    in_a_callback_of_time,
    in_a_group_in_a_callback,
    in_a_task_that_nobody_waits_for,
    in_the_callback_of_a_task,
    in_the_codec_that_encodes,
    in_the_codec_that_decodes,
    in_the_protocol,
    in_the_protocol_that_has_to_wait,
    in_a_handler,
    in_the_tick_of_a_cancellation,
    while_a_cancellation_is_obeyed,
)


async def run_scene(place: Callable[[Scene], Awaitable[None]], error: type[BaseException]) -> None:
    """Have an interrupt raised at a place, while others wait for calls."""
    scene = Scene(error)

    async def report(call: IncomingReport) -> None:
        first = await call.receive()
        if first is not None and first.items[0].idle == 666:
            scene.fail()
        await trio.sleep_forever()

    with trio.fail_after(PATIENCE / 4):
        async with open_bridge(), trio.open_nursery() as nursery:
            link = new_link()
            scene.loop = trio_asyncio.current_loop.get()
            nursery.start_soon(FederationServer(report, send_one).serve, link.server)
            scene.connection = await HubConnection.open(nursery, link.client, peer=HUB)
            nursery.start_soon(scene.wait_for_an_answer)
            await trio.sleep(0.01)
            await place(scene)
            await trio.sleep_forever()


def leaves(error: BaseException) -> list[BaseException]:
    """What a group consists of, in the end."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


def say(text: str) -> None:
    """To who has started this process."""
    sys.stdout.write(text)
    sys.stdout.flush()


def interrupt_everywhere(kind: str) -> None:
    """What the process does: one run after the other, and a line of what has come out of each."""
    encode, decode = FederationCodec.encode, FederationCodec.decode
    for place in PLACES:
        say(f"{place.__name__}: ")
        came: list[BaseException] = []
        try:
            trio.run(run_scene, place, INTERRUPTS[kind])
        except BaseException as error:
            came = leaves(error)
        say(" ".join(sorted({type(each).__name__ for each in came})) + "\n")
        FederationCodec.encode, FederationCodec.decode = encode, decode  # type: ignore[method-assign]


def run_here(function: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a function of this file in a process, to its end."""
    program = (
        "import sys; from trio_federation.config import Log; from trio_federation.logs import configure;"
        f"from tests.rpc.test_interrupts import {function} as run;"
        "configure(Log(level='warning', format='json')); run(*sys.argv[1:])"
    )
    try:
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as hung:
        raise AssertionError(f"it hangs; it has said {hung.stdout!r}") from None


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTERRUPTS)
def test_an_interrupt_leaves_asyncio_code_wherever_it_is_raised(kind: str) -> None:
    """And everything else ends, as after any cancellation: what comes out beside it are calls that have lost their
    connection, and what came with it."""
    ended = run_here("interrupt_everywhere", kind)
    assert ended.returncode == 0, ended.stderr
    came = {place: set(rest.split()) for place, _, rest in (line.partition(":") for line in ended.stdout.splitlines())}
    assert list(came) == [place.__name__ for place in PLACES]
    beside = {"in_a_group_in_a_callback": {"ValueError"}}
    for place, names in came.items():
        assert INTERRUPTS[kind].__name__ in names, place
        assert names - {INTERRUPTS[kind].__name__, "Unavailable"} <= beside.get(place, set()), place


def end_with(kind: str) -> None:
    """A program that an interrupt ends."""
    trio.run(run_scene, in_a_callback, INTERRUPTS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTERRUPTS)
def test_it_ends_the_process_with_its_traceback(kind: str) -> None:
    ended = run_here("end_with", kind)
    assert ended.returncode == 1
    assert f"{INTERRUPTS[kind].__name__}: from inside" in ended.stderr


def end_at_once(kind: str) -> None:
    """A program that is ended by the first thing that its bridge does, while somebody waits for asyncio code."""

    def fail() -> NoReturn:
        raise INTERRUPTS[kind]("from inside")

    async def run() -> None:
        async with open_bridge():
            loop = trio_asyncio.current_loop.get()
            assert loop is not None
            loop.call_soon(fail)
            await bridge.run(asyncio.sleep(PATIENCE))

    trio.run(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTERRUPTS)
def test_the_first_callback_of_a_bridge_is_no_exception(kind: str) -> None:
    ended = run_here("end_at_once", kind)
    assert ended.returncode == 1
    assert f"{INTERRUPTS[kind].__name__}: from inside" in ended.stderr


def press_ctrl_c() -> None:
    """Run after run of busy calls, each ended by a Ctrl-C at another moment of it."""

    async def call_for_ever(connection: HubConnection) -> None:
        while True:
            async with connection.report() as call:
                await call.send(report_of(1, padding=5000))
                await call.end()
                await call.wait_answered()

    async def busy(number: int) -> None:
        async with open_bridge(), trio.open_nursery() as nursery:
            link = new_link()
            nursery.start_soon(FederationServer(take_reports, send_one).serve, link.server)
            connection = await HubConnection.open(nursery, link.client, peer=HUB)
            for _ in range(3):
                nursery.start_soon(call_for_ever, connection)
            threading.Timer(0.02 + 0.003 * number, os.kill, (os.getpid(), signal.SIGINT)).start()

    for number in range(20):
        try:
            trio.run(busy, number)
        except BaseException as error:
            came = {type(each).__name__ for each in leaves(error)}
            if came - {"Unavailable"} != {"KeyboardInterrupt"}:
                traceback.print_exception(error)
            say(" ".join(sorted(came)) + "\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_program_that_is_busy_with_calls() -> None:
    """Also where Python notices it in the middle of asyncio's own code."""
    ended = run_here("press_ctrl_c")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert len(lines) == 20
    assert all("KeyboardInterrupt" in line for line in lines)


# Errors and cancellations.


@pytest.mark.parametrize("ticks", range(6))
async def test_a_cancellation_before_asyncio_has_picked_a_coroutine_up(autojump_clock: MockClock, ticks: int) -> None:
    """Or just after: it ends at once, has begun or not, and is not left to warn that nobody has awaited it."""
    steps: list[str] = []

    async def wait() -> None:
        steps.append("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            steps.append("ended")

    async with open_bridge():
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bridge.run, wait())
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert trio.current_time() == began
        assert steps in ([], ["begun", "ended"])


@pytest.mark.parametrize("first", ["outcome", "cancellation"])
@pytest.mark.parametrize("outcome", ["error", "result"])
@pytest.mark.parametrize("ticks", range(4))
async def test_an_outcome_and_a_cancellation_in_the_same_tick(
    autojump_clock: MockClock, outcome: str, first: str, ticks: int
) -> None:
    """Or some ticks apart. Either is right: a coroutine that ends, and a scope that is cancelled; nothing hangs, and no
    error of asyncio's own comes out."""
    came: list[str] = []
    async with open_bridge():
        loop: Any = trio_asyncio.current_loop.get()
        waited_for: asyncio.Future[int] = loop.create_future()

        async def wait() -> int:
            return await waited_for

        async def run() -> None:
            try:
                came.append(f"result {await bridge.run(wait())}")
            except ZeroDivisionError:
                came.append("error")
            except trio.Cancelled:
                came.append("cancelled")
                raise

        def end() -> None:
            if waited_for.done():
                return
            if outcome == "error":
                waited_for.set_exception(ZeroDivisionError())
            else:
                waited_for.set_result(7)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            steps = [end, nursery.cancel_scope.cancel]
            for step in steps if first == "outcome" else reversed(steps):
                step()
                for _ in range(ticks):
                    with trio.CancelScope(shield=True):
                        await trio.lowlevel.checkpoint()
    expected = {"error": "error", "result": "result 7"}[outcome]
    assert came in ([expected], ["cancelled"])
