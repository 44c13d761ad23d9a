"""Loops of their own for plugins: what is said across, what a block costs, and how they end. Real threads under a real
clock, since no simulated clock reaches into another thread; nothing waits for time where it can wait for an event."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import trio

from trio_federation import isolation
from trio_federation.clock import BootClock
from trio_federation.isolation import Line, on_own_loop, on_this_loop

#: seconds after which a test is lost
PATIENCE = 20.0


class Heard:
    """Keeps what a watch is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.changed = trio.Event()

    def _hear(self, event: str) -> None:
        self.events.append(event)
        self.changed.set()
        self.changed = trio.Event()

    def blocked(self, seconds: float) -> None:
        self._hear("blocked")

    def turns_again(self) -> None:
        self._hear("turns again")

    def failed(self, what: str, error: str, next_try: float | None = None) -> None:
        self._hear(f"failed: {what}")

    def abandoned(self) -> None:
        self._hear("abandoned")

    async def until(self, event: str) -> None:
        """Until it has been told this."""
        while event not in self.events:
            await self.changed.wait()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impatient supervision."""
    monkeypatch.setattr(isolation, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(isolation, "BLOCKED_AFTER", 0.1)
    monkeypatch.setattr(isolation, "END_DEADLINE", 0.3)


async def test_it_is_another_thread_and_another_loop_with_the_same_time() -> None:
    """What runs there shares nothing with the agent's loop but the clock."""
    seen: dict[str, object] = {}

    async def body(line: Line) -> None:
        seen["thread"] = threading.current_thread()
        seen["token"] = trio.lowlevel.current_trio_token()
        seen["time"] = trio.current_time()

    began = BootClock().current_time()
    with trio.fail_after(PATIENCE):
        await on_own_loop("plugin x", BootClock, body, Heard())
    thread = seen["thread"]
    assert isinstance(thread, threading.Thread)
    assert thread is not threading.current_thread()
    assert thread.daemon, "or a plugin that cannot be stopped would keep the process from ending"
    assert seen["token"] is not trio.lowlevel.current_trio_token()
    assert isinstance(seen["time"], float)
    assert began <= seen["time"] <= BootClock().current_time()


@pytest.mark.parametrize("own", [True, False])
async def test_what_is_told_arrives_in_order_and_before_what_is_asked(own: bool) -> None:
    """All of it on the agent's loop."""
    agents = threading.current_thread()
    order: list[object] = []

    def hear(what: object) -> None:
        assert threading.current_thread() is agents
        order.append(what)

    async def double(number: int) -> int:
        hear(f"asked {number}")
        await trio.lowlevel.checkpoint()
        return 2 * number

    async def body(line: Line) -> None:
        for number in range(50):
            line.tell(hear, number)
        line.tell(hear, await line.ask(double, 21))
        line.tell(hear, await line.ask(double, 4))

    with trio.fail_after(PATIENCE):
        if own:
            await on_own_loop("plugin", BootClock, body, Heard())
        else:
            await on_this_loop(body, Heard())
    assert order == [*range(50), "asked 21", 42, "asked 4", 8]


async def test_a_question_that_is_given_up_is_given_up_on_the_other_side_too() -> None:
    """A deadline in the plugin's loop leaves no task behind on the agent's."""
    ended = trio.Event()
    outcome: list[str] = []

    async def never() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async def body(line: Line) -> None:
        with trio.move_on_after(0.05) as scope:
            await line.ask(never)
        outcome.append("given up" if scope.cancelled_caught else "answered")
        await line.ask(ended.wait)

    with trio.fail_after(PATIENCE):
        await on_own_loop("plugin", BootClock, body, Heard())
    assert outcome == ["given up"]


async def test_a_question_that_is_given_up_at_once_is_given_up_on_the_other_side_too() -> None:
    """Also before anybody there has begun to answer."""
    ended = trio.Event()

    async def never() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async def body(line: Line) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await line.ask(never)
        await line.ask(ended.wait)

    with trio.fail_after(PATIENCE):
        await on_own_loop("plugin", BootClock, body, Heard())


async def test_what_breaks_there_breaks_here() -> None:
    """A fault of ours is nobody's to hide."""

    async def body(line: Line) -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError("a fault of ours")

    with trio.fail_after(PATIENCE), pytest.raises(ExceptionGroup) as caught:
        await on_own_loop("plugin", BootClock, body, Heard())
    assert caught.group_contains(ZeroDivisionError, match="a fault of ours")


async def test_what_breaks_here_ends_the_loop_there() -> None:
    """An error in what is asked is the agent's own, and ends both."""
    closed = threading.Event()

    async def broken() -> None:
        raise ZeroDivisionError("ours")

    async def body(line: Line) -> None:
        try:
            await line.ask(broken)
        finally:
            closed.set()

    with trio.fail_after(PATIENCE), pytest.raises(ExceptionGroup) as caught:
        await on_own_loop("plugin", BootClock, body, Heard())
    assert caught.group_contains(ZeroDivisionError)
    assert closed.is_set()


@pytest.mark.parametrize("yields", range(6))
async def test_cancelled_at_any_time_it_ends_in_order(yields: int) -> None:
    """Also before its thread or its loop has started; what the body has to close is closed."""
    began, closed = threading.Event(), threading.Event()

    async def body(line: Line) -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)
            closed.set()

    watch = Heard()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(on_own_loop, "plugin", BootClock, body, watch)
            for _ in range(yields):
                await trio.lowlevel.checkpoint()
            if yields == 5:
                while not began.is_set():
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert closed.is_set() is began.is_set()
    assert watch.events == []


async def test_a_blocking_call_holds_nobody_else_and_is_noticed(quick: None) -> None:
    """C42: "heartbeats on time despite the block". It is told when it begins and when it ends, once each."""
    release = threading.Event()
    beats = 0
    hundred = trio.Event()

    async def body(line: Line) -> None:
        await trio.lowlevel.checkpoint()
        release.wait()  # as a synchronous client would
        await trio.sleep_forever()

    async def heart() -> None:
        nonlocal beats
        while True:
            beats += watch.events == ["blocked"]
            if beats == 100:
                hundred.set()
            await trio.sleep(0.001)

    watch = Heard()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heart)
            nursery.start_soon(on_own_loop, "plugin", BootClock, body, watch)
            await watch.until("blocked")
            await hundred.wait()
            assert watch.events == ["blocked"]
            release.set()
            await watch.until("turns again")
            nursery.cancel_scope.cancel()
    assert watch.events == ["blocked", "turns again"]


async def test_one_that_does_not_end_is_left_to_itself(quick: None) -> None:
    """Within the deadline; and what it says when it comes to itself, long after, reaches nobody and breaks nothing."""
    release, blocked, over = threading.Event(), threading.Event(), threading.Event()
    said: list[str] = []

    async def asked() -> None:
        said.append("asked")

    async def body(line: Line) -> None:
        blocked.set()
        release.wait()
        line.tell(said.append, "told")
        try:
            with trio.CancelScope(shield=True), trio.move_on_after(0.05):
                await line.ask(asked)
        finally:
            over.set()

    watch = Heard()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(on_own_loop, "plugin", BootClock, body, watch)
            await trio.to_thread.run_sync(blocked.wait)
            nursery.cancel_scope.cancel()
        assert watch.events[-1] == "abandoned"
        release.set()
        await trio.to_thread.run_sync(over.wait)
        for _ in range(10):
            await trio.sleep(0.01)
    assert said == []


def test_one_that_outlives_the_agents_loop_breaks_nothing(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent's loop is gone when the plugin comes to itself: its thread ends, and says nothing on standard error."""
    release, blocked = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    async def body(line: Line) -> None:
        threads.append(threading.current_thread())
        blocked.set()
        release.wait()
        line.tell(print, "never heard")
        await line.ask(trio.lowlevel.checkpoint)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(on_own_loop, "plugin", BootClock, body, Heard())
            await trio.to_thread.run_sync(blocked.wait)
            nursery.cancel_scope.cancel()

    trio.run(main)
    release.set()
    _until(lambda: threads[0].name != "plugin" or not threads[0].is_alive())
    assert capsys.readouterr() == ("", "")


def _until(condition: Callable[[], bool]) -> None:
    """Wait, without Trio."""
    tick = threading.Event()
    for _ in range(2000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never came")
