"""What is shown of the placement benchmark: several seeds as one, the tables of the page, and the plots."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import placement_page
from benchmarks.measure import Figure
from benchmarks.placement import PlacementFigure, summary
from benchmarks.placement_fleet import Counts
from benchmarks.placement_policies import POLICIES
from benchmarks.placement_shapes import SHAPES
from scripts import placement_plots

MACHINE = {"cores": 2, "processor": "some", "system": "Linux 6", "python": "3.11", "load": 0.5, "load_at_end": 1.5}


def counts(avoidable: int, *, forwarded: int = 200, room: float = 0.4) -> Counts:
    return Counts(
        creates=1000,
        local=1000 - forwarded - 10,
        forwarded=forwarded,
        misplaced=avoidable + 2,
        avoidable=avoidable,
        parked=10,
        parked_with_room=4,
        room_least=room,
        room_mean=0.6,
        wait_mean=0.25,
        wait_p99=2.0,
    )


def figures() -> list[Figure]:
    found: list[Figure] = []
    for shape in SHAPES:
        for interval in (1.0, 5.0, 15.0):
            details = {name: summary([counts(place), counts(place + 2)]) for place, name in enumerate(POLICIES)}
            found.append(
                PlacementFigure(f"{shape}, {interval:g} s", 0.5, "%", "", None, shape, interval, None, details)
            )
    for load in (0.4, 0.9):
        details = {name: summary([counts(place)]) for place, name in enumerate(POLICIES[:-1])}
        found.append(PlacementFigure("load", 0.5, "%", "", None, "load", 5.0, load, details))
    for records in (1_000, 100_000):
        for members in (5, 20, 100):
            found.append(Figure(f"place, {records:,} records, {members} per env", 30.0 + members, "µs", "p99 80 µs"))
    return found


def test_seeds_are_counted_together_and_not_averaged() -> None:
    together = summary([counts(1, forwarded=100, room=0.5), counts(6, forwarded=300, room=0.3)])
    assert together["avoidable"] == pytest.approx(100 * 7 / 400)
    assert together["forwarded"] == pytest.approx(100 * 400 / 2000)
    assert (together["avoidable_least"], together["avoidable_most"]) == pytest.approx((1.0, 2.0))
    assert together["room_least"] == pytest.approx(30.0)
    assert together["seeds"] == 2
    assert summary([Counts()])["avoidable"] == 0.0


def test_the_page_gets_its_tables_between_the_marks_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "placement.md"
    page.write_text(f"before\n\n{placement_page.BEGIN}\nold\n{placement_page.END}\n\nafter\n", encoding="utf-8")
    monkeypatch.setattr(placement_page, "PAGE", page)
    placement_page.rewrite(MACHINE, figures())
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n\n{placement_page.BEGIN}\n\n### ")
    assert text.endswith(f"{placement_page.END}\n\nafter\n")
    assert "old" not in text
    assert "| steady | 5 s | 0.50 (0.00 to 1.00) | 1.00 (0.50 to 1.50) |" in text
    assert "| steady | ours | 79.00 | 20.00 | 0.10 | 0.20 | 1.00 | 0.40 |" in text
    assert "| place, 1,000 records, 5 per env | 35.0 µs | p99 80 µs |" in text
    widths = {
        line.count("|") for block in text.split("\n\n") for line in block.splitlines() if line.startswith("| steady")
    }
    assert len(widths) == 3
    placement_page.rewrite(MACHINE, figures())
    assert page.read_text(encoding="utf-8") == text


def test_the_real_page_has_both_marks() -> None:
    text = placement_page.PAGE.read_text(encoding="utf-8")
    assert text.count(placement_page.BEGIN) == text.count(placement_page.END) == 1
    shown = set(re.findall(r"\]\(placement/(\w+)\.svg\)", text))
    assert shown == set(placement_plots.PLOTS) == {path.stem for path in placement_plots.FOLDER.glob("*.svg")}


@pytest.mark.slow
def test_the_same_figures_are_the_same_plots_to_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "figures.json"
    document = {"figures": {"placement": [asdict(figure) for figure in figures()]}}
    source.write_text(json.dumps(document), encoding="utf-8")
    for folder in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["placement_plots.py", str(source), "--folder", str(tmp_path / folder)])
        assert placement_plots.main() == 0
    drawn = sorted((tmp_path / "one").iterdir())
    assert [path.stem for path in drawn] == sorted(placement_plots.PLOTS)
    for path in drawn:
        data = path.read_bytes()
        assert data == (tmp_path / "two" / path.name).read_bytes()
        root = ElementTree.fromstring(data)  # noqa: S314 - ours
        assert root[0].tag.endswith("title")
        assert root[0].text
        # Nothing is loaded from anywhere, and no day and no version is named.
        assert not re.findall(rb'href="(?!#)', data)
        assert b"dc:date" not in data
        assert b"matplotlib v" not in data.lower()


def test_without_figures_of_placement_there_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "figures.json"
    source.write_text('{"figures": {"core": []}}', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["placement_plots.py", str(source)])
    assert placement_plots.main() == 1
    assert "has no figures of `placement`" in capsys.readouterr().err
