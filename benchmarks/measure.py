"""What a benchmark measures with, and what it hands back: times, percentiles, and the lines of its table. Processes are
`children.py`'s business, and what is measured each benchmark's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table. `value` is in `unit`; `beside`: what it is to be judged by, in words; `ratio`: how many
    times that it is, where that can be said in one number."""

    what: str
    value: float
    unit: str
    beside: str = ""
    ratio: float | None = None

    @property
    def shown(self) -> str:
        """For people: three digits and the unit."""
        return f"{shown(self.value)} {self.unit}"

    @property
    def shown_beside(self) -> str:
        """For people: the ratio and what it is to."""
        return self.beside if self.ratio is None else f"{shown(self.ratio, 2)}x: {self.beside}"


def compared(what: str, value: float, unit: str, other: float, name: str) -> Figure:
    """A figure beside another one in the same unit."""
    return Figure(what, value, unit, f"{name} {shown(other)} {unit}", value / other if other else None)


def shown(value: float, digits: int = 3) -> str:
    """A number with that many digits, and all those before the point."""
    if value == 0:
        return "0"
    after = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, after)}f}"


def records_of(number: int) -> str:
    """ "1 record", "1,000 records"."""
    return f"{number:,} record{'' if number == 1 else 's'}"


def seconds(function: Callable[[], object], *, repeat: int = 5, number: int = 1) -> float:
    """Seconds of one call: the best of `repeat` rounds of `number` calls each, so that what else the machine does
    counts least."""
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        for _ in range(number):
            function()
        best = min(best, (time.perf_counter() - began) / number)
    return best


def each(function: Callable[[_T], object], arguments: Iterable[_T]) -> list[float]:
    """Seconds of every single call, in their order. Reading the clock is part of them: some 50 ns."""
    clock = time.perf_counter
    took = []
    for argument in arguments:
        began = clock()
        function(argument)
        took.append(clock() - began)
    return took


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that `percent` of them do not exceed. Raises ValueError where there are none."""
    if not values:
        raise ValueError("no values, no percentile")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    """The 50th percentile, which is one of the values."""
    return percentile(values, 50)


def resident_bytes(pid: int | str = "self") -> int:
    """Bytes of memory that a process holds now, shared libraries included: RSS, as Linux counts it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no VmRSS: the process has ended")
