"""How the benchmarks measure: the best of several runs, so that what else the machine does counts least."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table. `value` is in `unit`; `beside`: what it is to be judged by, in words."""

    what: str
    value: float
    unit: str
    beside: str = ""

    @property
    def shown(self) -> str:
        """For people: three digits and the unit."""
        return f"{self.value:.3g} {self.unit}" if self.value < 1000 else f"{self.value:,.0f} {self.unit}"


def seconds(function: Callable[[], object], *, repeat: int = 5, number: int = 1) -> float:
    """Seconds of one call: the best of `repeat` rounds of `number` calls each."""
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        for _ in range(number):
            function()
        best = min(best, (time.perf_counter() - began) / number)
    return best
