"""The sources of the fixtures plugin do what every source must: files that change, vanish and are half-written, each
kind of scripted load, and scripts with outages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from trio_federation import Capacity, CapacitySource, SourceContext
from trio_federation.testing import ConformanceReport, Rule, check_capacity_source
from trio_federation_fixtures.options import FixtureOptions
from trio_federation_fixtures.source import create_source

HOUR = 3600.0


def sources(**options: Any) -> Callable[[SourceContext], CapacitySource]:
    """What makes sources with these options, as they stand in a table."""
    checked = msgspec.convert(options, FixtureOptions)
    return lambda context: create_source(checked, context)


def assert_all_checked(report: ConformanceReport, *but: Rule) -> None:
    assert set(report.not_checked) == {Rule.AGREEMENT, *but}  # the fixtures do not push
    assert set(report.checked) == set(Rule) - {Rule.AGREEMENT, *but}


# --- records from a file


class File:
    """A file of records that can be rewritten and spoilt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.idle = {"a": 3, "b": 0, "c": 5}
        self.write()

    def write(self) -> None:
        rows = [
            {"namespace": "agents", "env_name": "browser", "member_pool": pool, "idle": idle, "saturated_for": 2.5}
            for pool, idle in self.idle.items()
        ]
        if self.path.suffix == ".json":
            self.path.write_text(json.dumps({"record": rows}), encoding="utf-8")
        else:
            lines = [
                f"{key} = {json.dumps(value)}" for row in rows for key, value in (("[record]", None), *row.items())
            ]
            text = "\n".join(lines).replace("[record] = null", "[[record]]")
            self.path.write_text(text + "\n", encoding="utf-8")

    def change(self) -> None:
        self.idle["a"] += 1
        self.write()

    def remove(self) -> Capacity:
        del self.idle["b"]
        self.write()
        return Capacity("west", "agents", "browser", "b")

    @contextmanager
    def missing(self) -> Iterator[None]:
        self.path.unlink()
        yield
        self.write()

    @contextmanager
    def half_written(self) -> Iterator[None]:
        content = self.path.read_bytes()
        self.path.write_bytes(content[: len(content) // 2] + b"=")
        yield
        self.write()

    @contextmanager
    def emptied(self) -> Iterator[None]:
        self.path.write_bytes(b"")
        yield
        self.write()

    @contextmanager
    def a_folder(self) -> Iterator[None]:
        self.path.unlink()
        self.path.mkdir()
        yield
        self.path.rmdir()
        self.write()


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("broken", [File.missing, File.half_written, File.emptied, File.a_folder])
async def test_a_file(autojump_clock: MockClock, tmp_path: Path, suffix: str, broken: Callable[[File], Any]) -> None:
    file = File(tmp_path / f"capacity.{suffix}")
    report = await check_capacity_source(
        sources(path=f"capacity.{suffix}"),
        base_dir=tmp_path,
        change=file.change,
        remove=file.remove,
        breaks=lambda: broken(file),
    )
    assert_all_checked(report)


# --- scripted load

MEMBER = {"namespace": "agents", "env_name": "browser", "member_pool": "a", "size": 4}
GROWING = {"autoscaling": True, "ceiling": 9, "growth_delay": "2s"}
SHAPES = {
    "nothing": [],
    "constant": [{"shape": "constant", "level": 2}],
    "ramp": [{"shape": "ramp", "first": 0, "last": 9, "begin": "5s", "length": "1m"}],
    "wave": [{"shape": "wave", "low": 1, "high": 7, "period": "15s", "phase": "3s"}],
    "burst": [{"shape": "burst", "height": 3, "every": "6s", "length": "4s"}],
    "all": [
        {"shape": "constant", "level": 0.5},
        {"shape": "ramp", "first": 4, "last": 0, "length": "30s"},
        {"shape": "wave", "high": 5, "period": "7s"},
        {"shape": "burst", "height": 1, "every": "2s", "length": "1s"},
    ],
}


@pytest.mark.parametrize("growing", [{}, GROWING], ids=["fixed", "growing"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_scripted_load(autojump_clock: MockClock, shape: str, growing: dict[str, Any]) -> None:
    member = {**MEMBER, **growing, "load": SHAPES[shape]}
    report = await check_capacity_source(sources(seed="s", member=[member, {**member, "member_pool": "b"}]))
    assert_all_checked(report, Rule.CHANGE, Rule.FAILURE, Rule.RECOVERY, Rule.REMOVAL)


async def test_a_scenario_with_outages(autojump_clock: MockClock, tmp_path: Path) -> None:
    """Time does to a script what people do to a file. An hour after its start the source fails, for an hour; after
    three hours one of its pools is gone."""
    scenario = {
        "seed": 7,
        "member": [
            {**MEMBER, "load": [{"shape": "ramp", "first": 0, "last": 4, "begin": "0s", "length": "10h"}]},
            {**MEMBER, "member_pool": "b", "outage": [{"begin": "3h", "end": "99h"}]},
        ],
        "outage": [{"begin": "1h", "end": "2h"}],
    }
    (tmp_path / "scenario.json").write_text(json.dumps(scenario), encoding="utf-8")

    @contextmanager
    def breaks() -> Iterator[None]:
        autojump_clock.jump(HOUR)
        yield
        autojump_clock.jump(HOUR)

    def remove() -> Capacity:
        autojump_clock.jump(3 * HOUR)
        return Capacity("west", "agents", "browser", "b")

    report = await check_capacity_source(
        sources(scenario="scenario.json"),
        base_dir=tmp_path,
        change=lambda: autojump_clock.jump(2.5 * HOUR),
        remove=remove,
        breaks=breaks,
    )
    assert_all_checked(report)


async def test_in_real_time(tmp_path: Path) -> None:
    file = File(tmp_path / "capacity.toml")
    report = await check_capacity_source(
        sources(path="capacity.toml"), base_dir=tmp_path, change=file.change, remove=file.remove, breaks=file.missing
    )
    assert_all_checked(report, Rule.DETERMINISTIC)
    assert not isinstance(trio.lowlevel.current_clock(), MockClock)
