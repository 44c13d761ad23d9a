"""How a command ends when it is told to: SIGTERM, and the SIGINT of Ctrl-C, cancel a scope, and what is inside of it
ends in its own order."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def signals_cancel(scope: trio.CancelScope, told: Callable[[str], object] | None = None) -> AsyncIterator[None]:
    """While the block runs, the first SIGTERM or SIGINT cancels `scope`; `told` gets its name. More of them change
    nothing: everything ends within seconds by itself, and an impatient second Ctrl-C must not cost the exit code.

    The block goes on after `scope`, so that it can say what came of it."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_first, signals, scope, told)
            yield
            nursery.cancel_scope.cancel()


async def _cancel_at_first(
    signals: AsyncIterator[int], scope: trio.CancelScope, told: Callable[[str], object] | None
) -> None:
    async for received in signals:
        if told is not None and not scope.cancel_called:
            told(signal.Signals(received).name)
        scope.cancel()
