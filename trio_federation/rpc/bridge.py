"""Where asyncio code runs: one trio-asyncio loop for each agent or hub, and the way from a Trio task into it. Nothing
here knows gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import structlog
import trio
import trio_asyncio
from trio_asyncio._base import TrioAsyncioExit

_T = TypeVar("_T")

#: Callbacks that run one after the other before Trio's other tasks have their turn.
_AT_ONCE = 64

log = structlog.get_logger("trio_federation.rpc")


@asynccontextmanager
async def open_bridge() -> AsyncIterator[None]:
    """Inside the block, this room's calls and servers can be used. A bridge inside a bridge is the same bridge.

    A SystemExit or KeyboardInterrupt that asyncio code raises cancels the block, and leaves it, in a group, once what
    is inside has ended in its own order."""
    if trio_asyncio.current_loop.get() is not None:
        yield
        return
    async with trio.open_nursery() as nursery, trio_asyncio.open_loop() as loop:

        def interrupted(error: BaseException) -> None:
            nursery.start_soon(_raise, error)

        _keep_turning(loop, interrupted)
        # trio-asyncio's own handler raises what asyncio code could tell to nobody, and so ends the whole process. Here
        # every call has somebody who waits for it, so what ends up in this handler concerns at most one connection.
        loop.set_exception_handler(partial(_stray_error, interrupted))
        # The loop is in the midst of its first turn, which is still its own.
        await run(asyncio.sleep(0))
        yield


async def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run an asyncio coroutine to its end; cancelling the Trio task cancels it and waits for it. Raises what it
    raises."""
    loop = trio_asyncio.current_loop.get()
    if loop is None:
        coroutine.close()
        raise RuntimeError("gRPC calls need an open_bridge() around them")
    result: _T = await loop.run_aio_coroutine(coroutine)
    return result


def _keep_turning(loop: Any, interrupted: Callable[[BaseException], None]) -> None:
    """Have a loop turn on after a SystemExit or KeyboardInterrupt, which `interrupted` is told of; and run in each of
    Trio's rounds all callbacks that wait, up to _AT_ONCE, and not one: a round lasts as long as all tasks together have
    to do in it, and a message takes several callbacks.

    Left to themselves, these end trio-asyncio's loop on the spot. Whoever waits for asyncio code then waits for ever,
    also to be cancelled, because a cancellation is a callback like any other; and the process does not end."""
    turn = loop._main_loop_one

    # A Ctrl-C is left to Trio, which raises it in its main task, and not in the middle of asyncio's book-keeping.
    @trio.lowlevel.enable_ki_protection
    async def turn_on(no_wait: bool = False) -> None:
        try:
            await turn(no_wait)
            if not no_wait:
                with suppress(trio.WouldBlock):
                    for _ in range(min(_AT_ONCE, loop._q_recv.statistics().current_buffer_used)):
                        await turn(True)
        except TrioAsyncioExit:  # a kind of SystemExit, by which trio-asyncio stops the loop
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            interrupted(error)

    loop._main_loop_one = turn_on


async def _raise(error: BaseException) -> None:
    raise error


def _stray_error(interrupted: Callable[[BaseException], None], _loop: object, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, ExceptionGroup):
        interrupted(error)  # in a group, these are no less than alone
    else:
        log.error("stray_asyncio_error", message=context.get("message"), exc_info=error)
