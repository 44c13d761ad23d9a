"""The figures of a run in docs/placement.md: tables between two marks. The text around them is written by people, and
the plots are `scripts/placement_plots.py`'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.children import BenchmarkError
from benchmarks.measure import Figure
from benchmarks.placement import PlacementFigure
from benchmarks.placement_policies import OURS, POLICIES
from benchmarks.placement_shapes import SHAPES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "placement.md"
BEGIN = "<!-- figures: written by `python -m benchmarks placement --docs` -->"
END = "<!-- end of figures -->"


def rewrite(machine: Mapping[str, Any], figures: Sequence[Figure]) -> None:
    """Put the figures into the page, in the place of the last ones. Raises BenchmarkError where a mark is missing."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchmarkError(f"{PAGE.name} has not both marks, {BEGIN} and {END}: put them where the figures belong")
    PAGE.write_text(
        f"{before}{BEGIN}\n\n" + "\n".join(tables(machine, figures)) + f"\n\n{END}{after}", encoding="utf-8"
    )


def tables(machine: Mapping[str, Any], figures: Sequence[Figure]) -> Iterator[str]:
    """The lines between the marks."""
    counted = [figure for figure in figures if isinstance(figure, PlacementFigure)]
    shapes = [figure for figure in counted if figure.load is None]
    loads = [figure for figure in counted if figure.load is not None]
    seeds = max((int(figure.details[OURS]["seeds"]) for figure in shapes), default=0)

    yield "### Avoidably misplaced"
    yield ""
    yield f"Percent of the creates that were forwarded, {seeds} seeds together; in brackets the lowest and the highest."
    yield ""
    yield from _table(
        ("load", "reports", *POLICIES),
        (
            (figure.shape, f"{figure.interval:g} s", *(_with_range(figure.details.get(name)) for name in POLICIES))
            for figure in shapes
        ),
    )
    intervals = sorted({figure.interval for figure in shapes})
    middle = intervals[len(intervals) // 2] if intervals else 0.0
    yield ""
    yield f"### What came of all creates, reports every {middle:g} s"
    yield ""
    yield "Percent of all creates; the wait in seconds, from the arrival until there is a sandbox."
    yield ""
    yield from _table(
        ("load", "policy", "local", "forwarded", "misplaced avoidably", "misplaced, no room", "parked",
         "parked, though there was room", "waited for one to be added", "wait", "p99"),
        (
            (figure.shape if name == OURS else "", name, *_shares(figure.details[name]))
            for figure in shapes
            if figure.interval == middle
            for name in POLICIES
            if name in figure.details
        ),
    )  # fmt: skip
    yield ""
    yield "### The shapes"
    yield ""
    yield "Room: idle and not promised, percent of all that autoscalers keep ready, at its lowest and on average."
    yield ""
    yield from _table(
        ("load", "what it is", "creates", "forwarded", "room, lowest", "room, average"),
        (
            (
                figure.shape,
                SHAPES[figure.shape].about,
                f"{figure.details[OURS]['creates']:,.0f}",
                f"{figure.details[OURS]['forwarded_creates']:,.0f}",
                f"{figure.details[OURS]['room_least']:.0f}",
                f"{figure.details[OURS]['room_mean']:.0f}",
            )
            for figure in shapes
            if figure.interval == middle
        ),
    )
    if loads:
        yield ""
        yield f"### Avoidably misplaced, by the load of the whole fleet, reports every {loads[0].interval:g} s"
        yield ""
        names = [name for name in POLICIES if name in loads[0].details]
        yield from _table(
            ("load, percent of what it can sustain", "room, lowest", "room, average", *names),
            (
                (
                    f"{100 * (figure.load or 0):.0f}",
                    f"{figure.details[OURS]['room_least']:.0f}",
                    f"{figure.details[OURS]['room_mean']:.0f}",
                    *(_with_range(figure.details.get(name)) for name in names),
                )
                for figure in loads
            ),
        )
    yield ""
    yield "### What a placement costs"
    yield ""
    yield (
        f"{machine['cores']} cores ({machine['processor']}), {machine['system'].partition(' ')[0]}, Python "
        f"{machine['python']}; load {machine['load']:.1f} at the start and {machine['load_at_end']:.1f} at the end."
    )
    yield ""
    yield from _table(
        ("what", "figure", "beside"),
        ((figure.what, figure.shown, figure.shown_beside) for figure in figures if figure not in counted),
    )


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _with_range(of_policy: Mapping[str, float] | None) -> str:
    if of_policy is None:
        return ""
    return f"{of_policy['avoidable']:.2f} ({of_policy['avoidable_least']:.2f} to {of_policy['avoidable_most']:.2f})"


def _shares(of_policy: Mapping[str, float]) -> tuple[str, ...]:
    wrong = of_policy["forwarded"] * of_policy["misplaced"] / 100
    avoidable = of_policy["forwarded"] * of_policy["avoidable"] / 100
    shares = (
        of_policy["local"], of_policy["forwarded"], avoidable, wrong - avoidable, of_policy["parked"],
        of_policy["parked_with_room"], of_policy["waited"],
    )  # fmt: skip
    waits = (of_policy["wait_mean"], of_policy["wait_p99"])
    return tuple(f"{abs(share):.2f}" for share in (*shares, *waits))
