"""The figures of a run in docs/benchmarks.md: a table for each benchmark, between two marks. The text around them is
written by people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.children import BenchmarkError
from benchmarks.measure import Figure

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN = "<!-- figures: written by `python -m benchmarks --docs` -->"
END = "<!-- end of figures -->"


def rewrite(machine: Mapping[str, Any], results: Mapping[str, Sequence[Figure]]) -> None:
    """Put the figures into the page, in the place of the last ones. Raises BenchmarkError where a mark is missing."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchmarkError(f"{PAGE.name} has not both marks, {BEGIN} and {END}: put them where the figures belong")
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        f"{machine['cores']} cores ({machine['processor']}), {machine['system'].partition(' ')[0]}, Python "
        f"{machine['python']}; load {machine['load']:.1f} at the start and {machine['load_at_end']:.1f} at the end.",
        f"{packages}.",
    ]
    for name, figures in results.items():
        lines += ["", f"### {name}", "", "| what | figure | beside |", "| --- | ---: | --- |"]
        lines += [f"| {figure.what} | {figure.shown} | {figure.shown_beside} |" for figure in figures]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")
