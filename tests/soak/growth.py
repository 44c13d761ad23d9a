"""Whether something grows: medians or minima of a series' thirds, and what may grow by how much. Pure: it gets numbers
and moments, and knows nothing of where they come from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high
from typing import NamedTuple


class Point(NamedTuple):
    """What was measured, and when, in seconds since the churn began."""

    at: float
    value: float


class Growth(NamedTuple):
    """A series in three parts of as many points: the median or the minimum of each."""

    first: float
    middle: float
    last: float

    @property
    def amount(self) -> float:
        """By how much it has grown from the first third to the last."""
        return self.last - self.first


def growth(points: Sequence[Point], warm_up: float, *, least: bool = False) -> Growth:
    """The medians of what was measured after `warm_up`, in seconds. Medians, so that a moment in which many are away,
    or all come back, counts no more than any other. `least`: the minima, of what is only ever too much by chance, so
    that the least that is held at any time is nearest to what has to be. Raises ValueError where a third is empty."""
    kept = [point.value for point in points if point.at >= warm_up]
    if len(kept) < 3:
        raise ValueError(f"{len(kept)} points after {warm_up:g} s are too few for three thirds")
    parts: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number, value in enumerate(kept):
        parts[number * 3 // len(kept)].append(value)
    return Growth(*(min(part) if least else median(part) for part in parts))


@dataclass
class Measured:
    """What one process has held over time."""

    #: by name, in the order of time
    series: dict[str, list[Point]] = field(default_factory=dict)
    #: how many objects there were of each type, and when
    types: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """What was measured at a moment."""
        for name, value in values.items():
            self.series.setdefault(name, []).append(Point(at, value))

    def at(self, name: str, moment: float) -> float:
        """What was measured nearest to a moment."""
        return min(self.series[name], key=lambda point: abs(point.at - moment)).value

    def grown_types(self, warm_up: float, most: int = 12) -> list[str]:
        """Of which types there were more in the last third than in the first, and how many more, the most first."""
        kept = [types for at, types in self.types if at >= warm_up]
        third = max(1, len(kept) // 3)
        first, last = kept[:third], kept[-third:]
        names = dict.fromkeys(name for each in kept for name in each)
        more = {
            name: median_high(each.get(name, 0) for each in last) - median_high(each.get(name, 0) for each in first)
            for name in names
        }
        ordered = sorted((name for name in more if more[name] > 0), key=lambda name: (-more[name], name))
        return [f"{name} +{more[name]:,}" for name in ordered[:most]]


def complaints(
    name: str, measured: Measured, *, warm_up: float, allowed: Mapping[str, float], least: Collection[str] = ()
) -> list[str]:
    """What has grown too much in a process, a line each: its series that are named in `allowed` may grow by so much
    from the first third to the last. `least`: those of which the minima count."""
    found = []
    for what, most in allowed.items():
        seen = growth(measured.series[what], warm_up, least=what in least)
        if seen.amount > most:
            shown = " → ".join(f"{value:,.0f}" for value in seen)
            found.append(f"{name}: {what} have grown by {seen.amount:,.0f}, more than {most:,.0f}: {shown}")
    if found:
        found.append(f"{name}: there are more of {', '.join(measured.grown_types(warm_up)) or 'nothing'}")
    return found
