"""How a command ends when it is told to: SIGTERM, and the SIGINT of Ctrl-C, cancel a scope, and what is inside of it
ends in its own order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import trio

#: Seconds from the signal until the process ends whatever it is doing: more than the deadlines of a good end add up to,
#: and within the 5 s that it is allowed.
LAST_RESORT = 4.7


@asynccontextmanager
async def signals_cancel(
    scope: trio.CancelScope, told: Callable[[str], object] | None = None, *, ends_process: bool = False
) -> AsyncIterator[None]:
    """While the block runs, the first SIGTERM or SIGINT cancels `scope`; `told` gets its name. More of them change
    nothing: everything ends within seconds by itself, and an impatient second Ctrl-C must not cost the exit code.

    The block goes on after `scope`, so that it can say what came of it. A process that has not ended after LAST_RESORT
    is ended all the same; with `ends_process` also one that has left the block and does not come to its end."""
    last_resort = threading.Timer(LAST_RESORT, _end_now)
    last_resort.daemon = True

    async def cancel_at_first() -> None:
        async for received in signals:
            if scope.cancel_called:
                continue
            if told is not None:
                told(signal.Signals(received).name)
            scope.cancel()

    def handle(before: Any, number: int, frame: object) -> None:
        # Here and not in a task: Trio's thread may be held by a write to a log that nobody reads, where Python still
        # calls handlers.
        if not last_resort.is_alive() and not scope.cancel_called:
            with suppress(RuntimeError):
                last_resort.start()
        before(number, frame)

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, partial(handle, signal.getsignal(number)))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_at_first)
                yield
                nursery.cancel_scope.cancel()
        finally:
            # Else it is not called off: the interpreter itself may wait, for the threads of a plugin.
            if not ends_process:
                last_resort.cancel()


def _end_now() -> None:
    """The end of a process that holds on to a plugin which does not let itself be stopped. A thread's work, because the
    plugin may be holding Trio's."""
    text = f"not ended {LAST_RESORT:g} s after the signal: a plugin does not let itself be stopped\n".encode()
    # Past Python's buffer, whose lock may be held, and in a thread, as there may be nobody who reads, or nothing to
    # write to.
    told = threading.Thread(target=_write, args=(text,), daemon=True)
    told.start()
    told.join(0.1)
    os._exit(0)


def _write(text: bytes) -> None:
    with suppress(OSError):
        os.write(2, text)
