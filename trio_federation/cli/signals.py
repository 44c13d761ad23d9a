"""How a command ends when it is told to: SIGTERM, and the SIGINT of Ctrl-C, cancel a scope, and what is inside of it
ends in its own order; before there is anything to end, they end the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import trio

#: Seconds from the signal until the process ends whatever it is doing: more than the deadlines of a good end add up to,
#: and within the 5 s that it is allowed.
LAST_RESORT = 4.7

#: What asks a command to end.
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def signals_end() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT end the process at once, with exit code 0, unless somebody else takes
    them: for the time in which nothing was done yet that would have to be undone."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    for number in SIGNALS:
        signal.signal(number, _end_at_once)
    try:
        yield
    finally:
        for number, handler in before:
            # Who has left something else there wants it to stay.
            if signal.getsignal(number) is _end_at_once:
                signal.signal(number, handler)


@asynccontextmanager
async def signals_cancel(
    scope: trio.CancelScope, told: Callable[[str], object] | None = None, *, ends_process: bool = False
) -> AsyncIterator[None]:
    """While the block runs, the first SIGTERM or SIGINT cancels `scope`; `told` gets its name. More of them change
    nothing: everything ends within seconds by itself, and an impatient second Ctrl-C must not cost the exit code.

    The block goes on after `scope`, so that it can say what came of it. A process that has not ended after LAST_RESORT
    is ended all the same; with `ends_process` also one that has left the block and does not come to its end."""
    import trio  # not above: `signals_end` is for the time in which things like this are imported

    last_resort = _LastResort()

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
        last_resort.begin()
        before(number, frame)

    try:
        with trio.open_signal_receiver(*SIGNALS) as signals:
            for number in SIGNALS:
                signal.signal(number, partial(handle, signal.getsignal(number)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_at_first)
                yield
                nursery.cancel_scope.cancel()
    finally:
        # The interpreter itself may wait, for the threads of a plugin: then it is still wanted, and a second Ctrl-C
        # still must not cost the exit code.
        if ends_process and last_resort.has_begun:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        else:
            last_resort.call_off()


class _LastResort:
    """Ends the process LAST_RESORT after `begin`, which a signal handler can call: it starts no thread then, and takes
    no lock that the code which it interrupts may hold."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waits = threading.Lock()
        self._waits.acquire()
        self._called_off = threading.Event()
        threading.Thread(target=self._wait, name="last resort", daemon=True).start()

    def begin(self) -> None:
        """From now on there are so many seconds left. Later calls change nothing."""
        self.has_begun = True
        self._go_on()

    def call_off(self) -> None:
        """The process goes on."""
        self._called_off.set()
        self._go_on()

    def _go_on(self) -> None:
        with suppress(RuntimeError):  # it does already
            self._waits.release()

    def _wait(self) -> None:
        self._waits.acquire()
        if not self._called_off.wait(LAST_RESORT):
            _end_now()


def _end_now() -> NoReturn:
    """The end of a process that holds on to a plugin which does not let itself be stopped. A thread's work, because the
    plugin may be holding Trio's."""
    try:
        text = f"not ended {LAST_RESORT:g} s after the signal: a plugin does not let itself be stopped\n".encode()
        # In a thread, as there may be nobody who reads.
        told = threading.Thread(target=_write, args=(text,), daemon=True)
        told.start()
        told.join(0.1)
    finally:
        os._exit(0)


def _write(text: bytes) -> None:
    # There may be nothing to write to, and the descriptor of standard error be something else's, a connection's for
    # instance.
    with suppress(OSError, ValueError, AttributeError):
        # Past Python's buffer, whose lock may be held.
        os.write(sys.stderr.fileno(), text)


def _end_at_once(_number: int, _frame: object) -> NoReturn:
    os._exit(0)
