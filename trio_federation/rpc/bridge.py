"""Where asyncio code runs: one trio-asyncio loop for each agent or hub, and the way from a Trio task into it. Nothing
here knows gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog
import trio_asyncio

_T = TypeVar("_T")

log = structlog.get_logger("trio_federation.rpc")


@asynccontextmanager
async def open_bridge() -> AsyncIterator[None]:
    """Inside the block, this room's calls and servers can be used. A bridge inside a bridge is the same bridge."""
    if trio_asyncio.current_loop.get() is not None:
        yield
        return
    async with trio_asyncio.open_loop() as loop:
        # trio-asyncio's own handler raises what asyncio code could tell to nobody, and so ends the whole process. Here
        # every call has somebody who waits for it, so what ends up in this handler concerns at most one connection.
        loop.set_exception_handler(_log_stray_error)
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


def _log_stray_error(loop: object, context: dict[str, Any]) -> None:
    log.error("stray_asyncio_error", message=context.get("message"), exc_info=context.get("exception"))
