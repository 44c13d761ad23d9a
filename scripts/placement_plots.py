"""Makes the plots of docs/placement.md from the figures that a benchmark has written:

    make bench ARGS="placement --json figures.json"
    .venv/bin/python scripts/placement_plots.py figures.json

The same figures give the same bytes. Each plot brings its own background, so that it can be read on a light page as
well as on a dark one. Nothing is measured and nothing is averaged here."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "placement"

#: by policy: a colour that can be told from the others in grey, too, and a marker
LOOKS = {
    "ours": ("#0b5cad", "o"),
    "ours, by share": ("#0e7490", "P"),
    "best idle": ("#c2410c", "X"),
    "weighted random": ("#8a6d00", "s"),
    "two choices": ("#7c3aed", "^"),
    "all-knowing": ("#6b7280", "d"),
}
#: below so many percent an axis of percents is linear, so that 0 has a place on it
LINEAR_BELOW = 0.5
GOAL = 0.5
TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50, 100)

STYLE: dict[str, Any] = {
    "svg.hashsalt": "placement",
    "svg.fonttype": "none",
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#1f2937",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "text.color": "#1f2937",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "font.size": 9,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}

Found = dict[str, Any]


def misplaced(figures: Sequence[Found]) -> Figure:
    """For each shape and report interval, how many percent each policy misplaced, with the range of its seeds."""
    shapes = list(dict.fromkeys(each["shape"] for each in figures if each.get("details") and each["load"] is None))
    intervals = sorted({each["interval"] for each in figures if each.get("details") and each["load"] is None})
    found = {(each["shape"], each["interval"]): each["details"] for each in figures if each.get("details")}
    drawn, panels = plt.subplots(1, len(intervals), figsize=(9.6, 4.8), sharey=True, squeeze=False)
    for panel, interval in zip(panels[0], intervals, strict=True):
        _percents(panel, "x")
        for number, name in enumerate(LOOKS):
            colour, marker = LOOKS[name]
            for row, shape in enumerate(shapes):
                of_policy = found.get((shape, interval), {}).get(name)
                if of_policy is None:
                    continue
                height = row + (number - 2.5) * 0.13
                panel.plot(
                    [of_policy["avoidable_least"], of_policy["avoidable_most"]], [height] * 2, color=colour, lw=1
                )
                label = name if row == 0 else None
                panel.plot([of_policy["avoidable"]], [height], marker, color=colour, ms=5, label=label)
        panel.set_title(f"reports every {interval:g} s", fontsize=10)
        panel.set_yticks(range(len(shapes)), shapes)
        panel.set_ylim(len(shapes) - 0.4, -0.6)
    drawn.supxlabel(
        "creates avoidably misplaced, percent of those forwarded; lines: lowest and highest seed", fontsize=9
    )
    _legend(drawn, panels[0][0])
    return drawn


def outcomes(figures: Sequence[Found]) -> Figure:
    """What came of all creates, by shape and policy, at the longest report interval, at which they differ most."""
    shown = [each for each in figures if each.get("details") and each["load"] is None]
    intervals = sorted({each["interval"] for each in shown})
    interval = intervals[-1]
    shown = [each for each in shown if each["interval"] == interval]
    drawn, panels = plt.subplots(1, len(shown), figsize=(9.6, 3.6), sharey=True, squeeze=False)
    parts = (("served at home", "#93c5fd"), ("forwarded, served there", "#0b5cad"), ("misplaced, avoidably", "#c2410c"),
             ("misplaced, no room", "#d6a37c"), ("parked", "#374151"))  # fmt: skip
    for panel, each in zip(panels[0], shown, strict=True):
        names = [name for name in LOOKS if name in each["details"]]
        bottoms = [0.0] * len(names)
        for place, (label, colour) in enumerate(parts):
            heights = [_part(each["details"][name], place) for name in names]
            panel.bar(range(len(names)), heights, 0.75, bottoms, color=colour, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        panel.set_xticks(range(len(names)), names, rotation=90)
        panel.set_title(each["shape"].replace(" ", "\n", 1), fontsize=9)
        panel.set_ylim(0, 100)
        panel.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("percent of all creates")
    drawn.supxlabel(f"reports every {interval:g} s", fontsize=9)
    _legend(drawn, panels[0][0])
    return drawn


def _part(of_policy: Found, place: int) -> float:
    went = of_policy["forwarded"]
    wrong, avoidable = went * of_policy["misplaced"] / 100, went * of_policy["avoidable"] / 100
    return float((of_policy["local"], went - wrong, avoidable, wrong - avoidable, of_policy["parked"])[place])


def load(figures: Sequence[Found]) -> Figure | None:
    """How many percent each policy misplaced as the load of the whole fleet grows; None where that was not measured."""
    shown = sorted((each for each in figures if each.get("load") is not None), key=lambda each: each["load"])
    if not shown:
        return None
    drawn, panel = plt.subplots(figsize=(7.2, 3.8))
    _percents(panel, "y")
    for name, (colour, marker) in LOOKS.items():
        points = [(100 * each["load"], each["details"][name]["avoidable"]) for each in shown if name in each["details"]]
        if points:
            panel.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=5, lw=1.2, label=name)
    panel.set_xlabel("load of the whole fleet, percent of what it can sustain")
    panel.set_ylabel("avoidably misplaced, percent of forwarded")
    _legend(drawn, panel)
    return drawn


def cost(figures: Sequence[Found]) -> Figure:
    """Microseconds of a placement against the members of its env, one line for each size of the registry."""
    points: dict[int, list[tuple[int, float, float]]] = {}
    for each in figures:
        if matched := re.fullmatch(r"place, ([\d,]+) records, (\d+) per env", each["what"]):
            p99 = float(re.findall(r"p99 ([\d.]+)", each["beside"])[0])
            points.setdefault(int(matched[1].replace(",", "")), []).append((int(matched[2]), each["value"], p99))
    drawn, panel = plt.subplots(figsize=(7.2, 3.4))
    for (records, found), colour in zip(sorted(points.items()), ("#0b5cad", "#c2410c", "#6b7280"), strict=False):
        members, medians, p99s = zip(*sorted(found), strict=True)
        panel.plot(members, medians, color=colour, marker="o", ms=5, lw=1.2, label=f"{records:,} records, median")
        panel.plot(members, p99s, color=colour, marker="_", ms=9, lw=0.8, ls=":", label=f"{records:,} records, p99")
    panel.set_ylim(0, None)
    panel.set_xlim(0, None)
    panel.set_xlabel("members of the env")
    panel.set_ylabel("microseconds of one placement")
    _legend(drawn, panel, columns=2)
    return drawn


def _percents(panel: Axes, axis: str) -> None:
    """An axis of percents on which 0 and 0.1 can be told apart as well as 20 and 50, with the goal."""
    scale, ticks, limits, line = (
        (panel.set_xscale, panel.set_xticks, panel.set_xlim, panel.axvline)
        if axis == "x"
        else (panel.set_yscale, panel.set_yticks, panel.set_ylim, panel.axhline)
    )
    scale("symlog", linthresh=LINEAR_BELOW, linscale=0.5)
    ticks(TICKS, [f"{tick:g}" for tick in TICKS], minor=False)
    ticks([], minor=True)
    limits(-0.08, 100)
    line(GOAL, color="#15803d", lw=1, ls="--", label="goal")


def _legend(drawn: Figure, panel: Axes, *, columns: int | None = None) -> None:
    handles, labels = panel.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=columns or len(labels))


PLOTS: dict[str, tuple[str, Callable[[Sequence[Found]], Figure | None]]] = {
    "misplaced": ("Creates avoidably misplaced, by shape of load, report interval and policy", misplaced),
    "outcomes": ("What came of all creates, by shape of load and policy", outcomes),
    "load": ("Creates avoidably misplaced, by the load of the whole fleet", load),
    "cost": ("What a placement costs, by the members of its env", cost),
}


def main() -> int:
    """The command line; the process's exit code."""
    parser = argparse.ArgumentParser(description="The plots of docs/placement.md.")
    parser.add_argument("figures", type=Path, help="what `python -m benchmarks placement --json` has written")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the plots go")
    arguments = parser.parse_args()
    document = json.loads(arguments.figures.read_text(encoding="utf-8"))
    figures = document["figures"].get("placement")
    if not figures:
        print(f"{arguments.figures} has no figures of `placement`: run that benchmark with --json", file=sys.stderr)
        return 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, (title, make) in PLOTS.items():
        with matplotlib.style.context(["default", STYLE]):  # whatever this machine's own settings say
            drawn = make(figures)
            if drawn is None:
                continue
            path = arguments.folder / f"{name}.svg"
            # Neither the day nor the version of what draws: the same figures are the same file.
            drawn.savefig(path, metadata={"Date": None, "Creator": None, "Title": title})
            plt.close(drawn)
            # Lines that end in spaces are how it writes; a repository has no use for them.
            text = path.read_text(encoding="utf-8")
            path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
