"""The process's one clock. Rules take a `Clock`, a function that returns seconds, and never read time in another way.
`BootClock` makes Trio itself run on the clock that goes on counting while the machine is suspended, so that in a
running agent Trio's timers and the ages of records agree; under tests both follow Trio's MockClock. The wall clock is
here, too, for certificates and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

import trio

#: Seconds since some fixed moment of this process's choosing; only differences mean anything.
Clock: TypeAlias = Callable[[], float]

#: How long Trio may sleep before `BootClock` looks at the time again. While a machine is suspended the kernel's timers
#: stand still although boot time goes on, so a sleep that spans a suspend ends late by up to this many seconds.
LONGEST_SLEEP = 1.0


@runtime_checkable
class HasCurrentTime(Protocol):
    """Anything with a `current_time()`, such as Trio's own clocks and `trio.testing.MockClock`."""

    def current_time(self) -> float: ...


if hasattr(time, "CLOCK_BOOTTIME"):

    def boot_time() -> float:
        """Seconds since boot, suspended time included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # pragma: no cover - only where the kernel has no such clock

    def boot_time() -> float:
        """Seconds on the monotonic clock, which is the best there is on this system; it may pause during suspend."""
        return time.monotonic()


def wall_clock() -> float:
    """Seconds since 1970, in UTC, as this machine believes. It jumps when somebody sets it, so nothing is timed by it;
    but a certificate says until which date it is good, and dates are read from here."""
    return time.time()  # noqa: TID251 - the one place, for the reason above


class BootClock(trio.abc.Clock):
    """A clock for `trio.run(…, clock=BootClock())` that keeps counting while the machine is suspended."""

    def start_clock(self) -> None:
        """Nothing to start: the kernel keeps this clock."""

    def current_time(self) -> float:
        """Seconds since boot."""
        return boot_time()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """How long to sleep now for a timer due at `deadline`, at most `LONGEST_SLEEP` seconds."""
        return min(deadline - boot_time(), LONGEST_SLEEP)


def as_clock(clock: Clock | HasCurrentTime | None) -> Clock:
    """The clock to use: a function as it is, an object's `current_time`, or boot time for None.

    Raises TypeError for anything else."""
    if clock is None:
        return boot_time
    if isinstance(clock, HasCurrentTime):
        return clock.current_time
    if callable(clock):
        return clock
    raise TypeError(f"a clock is a function that returns seconds or has a current_time(), not {clock!r}")


def trio_clock() -> Clock:
    """The clock of the running Trio loop, as a function that may be called from any thread.

    Raises RuntimeError outside of Trio."""
    return trio.lowlevel.current_clock().current_time
