"""Where plugins run: on a Trio loop of their own, in a thread of their own, so that a blocking call in one of them
holds neither the agent's loop nor another plugin; or, in simulations, on the loop that is there. What runs there, and
what is done about a plugin that blocks, is decided by the caller.

A thread is no wall: a plugin that computes shares the processor, one that never lets go of the interpreter in C code
stops everything, and one that ends the process ends it. What it buys is the failure that happens in practice: a
synchronous call that waits."""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import trio

_T = TypeVar("_T")

#: Seconds between two looks at whether a loop still turns.
LOOK_INTERVAL = 1.0
#: Seconds without a turn after which a loop counts as blocked.
BLOCKED_AFTER = 2.0
#: Seconds after which a loop that still is blocked is told of once more: whoever is told sums up.
BLOCKED_AGAIN = 60.0
#: Seconds that a cancelled loop gets to end before its thread is left to itself.
END_DEADLINE = 2.5


class Line(Protocol):
    """From where a plugin runs to the agent's loop."""

    def tell(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have a synchronous function called on the agent's loop, soon, and in the order of the telling."""

    async def ask(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Have an async function run on the agent's loop, after all that was told before; returns what it returns."""


#: What runs where a plugin runs, until it is cancelled.
Body: TypeAlias = Callable[[Line], Awaitable[None]]


class Watch(Protocol):
    """Who hears of a loop that is blocked; called on the agent's loop."""

    def blocked(self, seconds: float) -> None:
        """It has not turned for so long, and may never do so again. Called now and then for as long as that lasts."""

    def turns_again(self) -> None:
        """It turns again."""

    def failed(self, what: str, error: str, next_try: float | None = None) -> None:
        """Something of it has failed; `what` "run": its whole loop has broken, and a new one begins at `next_try`."""

    def abandoned(self) -> None:
        """It did not end in time, and is left to itself."""


class _SameLoop:
    def tell(self, function: Callable[..., object], *arguments: Any) -> None:
        function(*arguments)

    async def ask(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        return await function(*arguments)


async def on_this_loop(body: Body, watch: Watch) -> None:
    """Run `body` here, where nobody could notice that it blocks."""
    await body(_SameLoop())


class _Gone(Exception):
    """Nobody listens on the agent's side any more."""


class _OwnLoop:
    """One loop in a thread. What is named `_agent…` belongs to the agent's loop, the rest to the loop's own."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._agent_token = trio.lowlevel.current_trio_token()
        self._agent_nursery = nursery
        self._listening = True
        self._stopping = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope: trio.CancelScope | None = None

    async def main(self, body: Body) -> None:
        """What the loop runs."""
        self._scope = trio.CancelScope()
        self._token = trio.lowlevel.current_trio_token()
        if self._stopping:  # asked for before there was anybody to ask
            self._scope.cancel()
        with self._scope:
            await body(self)

    # Called on the loop itself: the `Line`.

    def tell(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(_Gone):
            self._send(function, *arguments)

    async def ask(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        answered = trio.Event()
        answers: list[_T] = []
        asking = trio.CancelScope()  # used on the agent's loop

        def answer(value: _T) -> None:
            answers.append(value)
            answered.set()

        async def run() -> None:
            with asking:
                value = await function(*arguments)
                self._reply(answer, value)

        try:
            self._send(self._agent_nursery.start_soon, run)
            await answered.wait()
        except _Gone:
            await trio.sleep_forever()  # until the end, which is on its way
        except BaseException:
            self.tell(asking.cancel)  # which may come before `run` has begun
            raise
        return answers[0]

    def _send(self, function: Callable[..., object], *arguments: Any) -> None:
        def call() -> None:
            if self._listening:
                function(*arguments)

        try:
            self._agent_token.run_sync_soon(call)
        except trio.RunFinishedError:
            raise _Gone from None

    # Called on the agent's loop.

    def _reply(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Have a function called on the loop, soon; whether there still is one, which there is not before it starts."""
        if self._token is None:
            return False
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            return False
        return True

    def stop(self) -> None:
        """Cancel what runs on the loop."""
        self._stopping = True
        if self._scope is not None:
            self._reply(self._scope.cancel)

    def stop_listening(self) -> None:
        """What is said from now on is not heard."""
        self._listening = False

    async def watch(self, watch: Watch) -> None:
        """Tell `watch` when the loop does not turn."""
        while True:
            await trio.sleep(LOOK_INTERVAL)
            turned = trio.Event()
            if not self._reply(self.tell, turned.set):
                continue
            # In two halves, of which a freeze of the whole process can take only one.
            for _ in range(2):
                with trio.move_on_after(BLOCKED_AFTER / 2):
                    await turned.wait()
            if not turned.is_set():
                began = trio.current_time() - BLOCKED_AFTER
                watch.blocked(BLOCKED_AFTER)
                while not turned.is_set():
                    with trio.move_on_after(BLOCKED_AGAIN):
                        await turned.wait()
                        break
                    watch.blocked(trio.current_time() - began)
                watch.turns_again()


async def on_own_loop(name: str, clock: Callable[[], trio.abc.Clock], body: Body, watch: Watch) -> None:
    """Run `body` on a Trio loop of its own in a thread called `name`, which reads `clock()`.

    When this is cancelled, so is `body`; a loop that has not ended END_DEADLINE later is left to itself, in a thread
    that keeps no process from ending. What `body` raises comes out here, in a group."""
    async with trio.open_nursery() as nursery:
        loop = _OwnLoop(nursery)
        ended = trio.Event()
        patience = trio.CancelScope(shield=True)

        async def in_thread() -> None:
            try:
                with patience:
                    await trio.to_thread.run_sync(
                        # Nothing of the agent's context: trio-asyncio would find the agent's loop in it.
                        partial(contextvars.Context().run, partial(trio.run, loop.main, body, clock=clock())),
                        thread_name=name,
                        abandon_on_cancel=True,
                        limiter=trio.CapacityLimiter(1),
                    )
            finally:
                ended.set()

        nursery.start_soon(in_thread)
        nursery.start_soon(loop.watch, watch)
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                loop.stop()
                with trio.move_on_after(END_DEADLINE, shield=True):
                    await ended.wait()
                if not ended.is_set():
                    loop.stop_listening()
                    watch.abandoned()
                    patience.cancel()
            nursery.cancel_scope.cancel()
