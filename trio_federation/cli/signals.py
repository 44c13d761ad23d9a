"""How a command ends when it is told to: SIGTERM, and the SIGINT of Ctrl-C, cancel a scope, and what is inside of it
ends in its own order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

#: Seconds from the signal until the process ends whatever it is doing: more than the deadlines of a good end add up to,
#: and within the 5 s that it is allowed.
LAST_RESORT = 4.7


@asynccontextmanager
async def signals_cancel(scope: trio.CancelScope, told: Callable[[str], object] | None = None) -> AsyncIterator[None]:
    """While the block runs, the first SIGTERM or SIGINT cancels `scope`; `told` gets its name. More of them change
    nothing: everything ends within seconds by itself, and an impatient second Ctrl-C must not cost the exit code.

    The block goes on after `scope`, so that it can say what came of it. A process that has not ended after LAST_RESORT
    is ended all the same."""
    last_resort = threading.Timer(LAST_RESORT, _end_now)
    last_resort.daemon = True

    async def cancel_at_first() -> None:
        async for received in signals:
            if scope.cancel_called:
                continue
            if told is not None:
                told(signal.Signals(received).name)
            last_resort.start()
            scope.cancel()

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_at_first)
                yield
                nursery.cancel_scope.cancel()
        finally:
            last_resort.cancel()


def _end_now() -> None:
    """The end of a process that holds on to a plugin which does not let itself be stopped. A thread's work, because the
    plugin may be holding Trio's."""
    try:
        print(f"not ended {LAST_RESORT:g} s after the signal: a plugin does not let itself be stopped", file=sys.stderr)
        sys.stderr.flush()
    finally:  # also where nobody listens, and there is no standard error
        os._exit(0)
