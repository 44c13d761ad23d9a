"""The sources of the fixtures plugin: files that change, break and come back, scripts on the agent's clock, options,
and the README's word."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

import trio_federation
import trio_federation_fixtures
from tests.plugins.helpers import SetClock, make_context
from trio_federation import Capacity, CapacitySource, SourceContext
from trio_federation.capacity import fault
from trio_federation.config import PluginTable
from trio_federation.errors import ConfigurationError, PluginError
from trio_federation.plugins import PluginManager
from trio_federation_fixtures import options as option_tables
from trio_federation_fixtures.options import FixtureOptions, seconds
from trio_federation_fixtures.source import LARGEST_FILE, FixtureError, Record, create_source

PLUGIN = Path(__file__).resolve().parent.parent.parent / "plugins" / "fixtures"
README = (PLUGIN / "README.md").read_text(encoding="utf-8")

GOOD = '[[record]]\nnamespace = "agents"\nenv_name = "browser"\nmember_pool = "a"\nidle = 4\n'
MEMBER = {"namespace": "agents", "env_name": "browser", "member_pool": "a", "size": 4}


@pytest.fixture
def manager() -> PluginManager:
    found = PluginManager()
    found.register(trio_federation_fixtures, "fixtures")
    return found


def reading(context: SourceContext, name: str = "capacity.toml") -> CapacitySource:
    return create_source(FixtureOptions(path=name), context)


def write(context: SourceContext, content: str | bytes, name: str = "capacity.toml") -> Path:
    path = context.base_dir / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- records from a file


async def test_every_field_of_a_record(context: SourceContext) -> None:
    wanted = {
        "namespace": "agents",
        "env_name": "python-3-12",
        "member_pool": "west-a",
        "scaling_group": "gpu",
        "idle": 1,
        "running": 2,
        "pending": 3,
        "desired": 4,
        "autoscaling_enabled": True,
        "capacity": -1,
        "saturated_for": 2.5,
        "state": "Active",
    }
    record = Capacity("west", **wanted)  # type: ignore[arg-type]
    write(context, "[[record]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in wanted.items()))
    assert await reading(context).collect() == [record]
    write(context, json.dumps({"record": [wanted]}), "capacity.json")
    assert await reading(context, "capacity.json").collect() == [record]
    # a record may say all of Capacity but what is the agent's to say
    of_capacity = set(Capacity.__dataclass_fields__) - {"cluster_id", "observed_at", "origin"}
    assert set(Record.__struct_fields__) == set(wanted) == of_capacity


async def test_defaults_are_those_of_capacity(context: SourceContext) -> None:
    write(context, '[[record]]\nnamespace = "agents"\nenv_name = "browser"\n')
    assert await reading(context).collect() == [Capacity("west", "agents", "browser")]


async def test_a_change_is_seen_even_with_the_same_time_and_size(context: SourceContext) -> None:
    path = write(context, GOOD)
    status = path.stat()
    source = reading(context)
    assert [record.idle for record in await source.collect()] == [4]
    with path.open("r+b") as file:
        file.write(GOOD.replace("idle = 4", "idle = 7").encode())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_mtime_ns, path.stat().st_size, path.stat().st_ino) == (
        status.st_mtime_ns,
        status.st_size,
        status.st_ino,
    )
    assert [record.idle for record in await source.collect()] == [7]


async def test_a_replaced_file_is_seen(context: SourceContext) -> None:
    path = write(context, GOOD)
    source = reading(context)
    assert len(await source.collect()) == 1
    write(context, "record = []\n", "new.toml").replace(path)
    assert await source.collect() == []


async def test_an_unchanged_file_is_parsed_once(context: SourceContext) -> None:
    write(context, GOOD)
    source = reading(context)
    with capture_logs() as logs:
        first = await source.collect()
        second = await source.collect()
    assert first == second
    assert [line["records"] for line in logs] == [1]
    # what one caller does to its list is no business of the next
    assert isinstance(first, list)
    first.clear()
    assert len(await source.collect()) == 1


async def test_it_fails_while_the_file_is_wrong_and_goes_on_when_it_is_good(context: SourceContext) -> None:
    source = reading(context)
    path = context.base_dir / "capacity.toml"
    with pytest.raises(FixtureError, match=re.escape(f"{path}: cannot be read: No such file or directory")):
        await source.collect()
    write(context, GOOD)
    assert [record.idle for record in await source.collect()] == [4]
    for _ in range(2):
        write(context, GOOD[:-3])
        with pytest.raises(FixtureError, match="not valid TOML"):
            await source.collect()
    path.unlink()
    with pytest.raises(FixtureError, match="cannot be read"):
        await source.collect()
    write(context, GOOD.replace("4", "5"))
    assert [record.idle for record in await source.collect()] == [5]
    # the very version that was there before is taken back, too
    write(context, "half = ")
    with pytest.raises(FixtureError):
        await source.collect()
    write(context, GOOD.replace("4", "5"))
    assert [record.idle for record in await source.collect()] == [5]


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("x.toml", b"", "top level: object missing required field record"),
        ("x.json", b"{}", "top level: object missing required field record"),
        ("x.json", b"[]", "top level: expected object, got array"),
        ("x.toml", b"record = [\n  {namespace = 1\n", "not valid TOML: "),
        ("x.toml", b"a = 1\nb = = 2\n", "(at line 2, column 5)"),
        ("x.json", b'{"record":\n [}', "not valid JSON: Expecting value: line 2 column 3 (char 13)"),
        ("x.json", b"", "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ("x.json", b'{"record": [], "x": NaN}', "not valid JSON: NaN is not JSON"),
        ("x.json", b"[" * 100_000, "not valid JSON: "),
        ("x.toml", b"a = " + b"[" * 100_000, "not valid TOML: "),
        ("x.toml", b"a = " + b"9" * 10_000, "not valid TOML: "),
        ("x.toml", b'a = "\xff"', "not valid TOML: 'utf-8' codec can't decode byte 0xff in position 5"),
        ("x.toml", b"record = 3", "record: expected array, got int"),
        ("x.toml", b"record = [3]", "record[0]: expected object, got int"),
        ("x.toml", b"record = []\nrecords = []", "top level: object contains unknown field records"),
        ("x.toml", GOOD.replace("4", '"4"').encode(), "record[0].idle: expected int, got str"),
        ("x.toml", GOOD.replace("4", "4.5").encode(), "record[0].idle: expected int, got float"),
        ("x.toml", GOOD.replace("4", "true").encode(), "record[0].idle: expected int, got bool"),
        ("x.toml", GOOD.replace("idle", "free").encode(), "record[0]: object contains unknown field free"),
        ("x.toml", GOOD.replace("idle = 4", 'cluster_id = "east"').encode(), "unknown field cluster_id"),
        ("x.toml", GOOD.replace("idle = 4", "observed_at = 1.0").encode(), "unknown field observed_at"),
        (
            "x.toml",
            (GOOD + '[[record]]\nenv_name = "b"\n').encode(),
            "record[1]: object missing required field namespace",
        ),
        ("x.toml", (GOOD + GOOD).encode(), "record[1]: agents/browser/a is there twice; leave one of them"),
    ],
)
async def test_what_is_wrong_is_told_with_file_place_and_key(
    context: SourceContext, name: str, content: bytes, told: str
) -> None:
    path = write(context, content, name)
    with pytest.raises(FixtureError) as caught:
        await reading(context, name).collect()
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_aggregate_rows_of_one_env_differ_by_group(context: SourceContext) -> None:
    row = '[[record]]\nnamespace = "agents"\nenv_name = "browser"\nscaling_group = "{}"\n'
    write(context, row.format("") + row.format("gpu"))
    assert [record.scaling_group for record in await reading(context).collect()] == ["", "gpu"]
    write(context, row.format("gpu") + row.format("gpu"))
    with pytest.raises(FixtureError, match="agents/browser/gpu is there twice"):
        await reading(context).collect()


async def test_names_and_ranges_are_left_to_the_agent(context: SourceContext) -> None:
    write(context, GOOD.replace("4", "-4") + GOOD.replace('"a"', '"b"') + GOOD.replace('"a"', '"C C"'))
    records = await reading(context).collect()
    assert [reason.reason if (reason := fault(record)) else None for record in records] == ["idle", None, "member_pool"]


async def test_a_byte_order_mark_is_skipped(context: SourceContext) -> None:
    write(context, b"\xef\xbb\xbf" + GOOD.encode())
    assert len(await reading(context).collect()) == 1
    write(context, b'\xef\xbb\xbf{"record": []}', "capacity.json")
    assert await reading(context, "capacity.json").collect() == []


async def test_what_is_no_file_is_refused_without_waiting(context: SourceContext) -> None:
    os.mkfifo(context.base_dir / "pipe.toml")
    (context.base_dir / "folder.toml").mkdir()
    for name in ("pipe.toml", "folder.toml"):
        with pytest.raises(FixtureError, match=f"{name}: not a file"):
            await reading(context, name).collect()


async def test_a_huge_file_is_refused_unread(context: SourceContext) -> None:
    with write(context, GOOD).open("r+b") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(FixtureError, match=f"{LARGEST_FILE + 1} bytes are more than the {LARGEST_FILE} that are read"):
        await reading(context).collect()


async def test_an_absolute_path_stays_as_it_is(
    context: SourceContext, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "capacity.toml"
    elsewhere.write_text(GOOD, encoding="utf-8")
    assert len(await reading(context, str(elsewhere)).collect()) == 1


@given(content=st.binary(max_size=60), suffix=st.sampled_from(["toml", "json"]))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    context = make_context(SetClock(0.0), folder)
    write(context, content, f"any.{suffix}")
    source = reading(context, f"any.{suffix}")
    records: Sequence[Capacity] = []
    with contextlib.suppress(FixtureError):
        records = trio.run(source.collect)
    assert records == []


# --- scripts


def scripted(context: SourceContext, **more: Any) -> CapacitySource:
    return create_source(msgspec.convert({"member": [MEMBER], **more}, FixtureOptions), context)


async def test_time_counts_from_when_the_source_is_made(context: SourceContext, clock: SetClock) -> None:
    ramp = {"shape": "ramp", "first": 0, "last": 4, "begin": "2s", "length": "4s"}
    source = scripted(context, member=[{**MEMBER, "load": [ramp]}])
    told = []
    for elapsed in (0, 2, 4, 6, 8):
        clock.now = 1024.0 + elapsed
        (record,) = await source.collect()
        told.append((record.idle, record.running))
        assert record.observed_at is None
    assert told == [(4, 0), (4, 0), (2, 2), (0, 4), (0, 4)]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12).map(sorted),
    st.sets(st.integers(0, 11), min_size=1),
    st.integers(0, 2**20),
)
def test_what_is_reported_does_not_depend_on_when_it_was_asked_before(
    eighths: list[int], chosen: set[int], start: int
) -> None:
    load = [
        {"shape": "wave", "high": 9, "period": "7s"},
        {"shape": "burst", "height": 3, "every": "2s", "length": "3s"},
    ]
    member = {**MEMBER, "autoscaling": True, "ceiling": 12, "growth_delay": "1s", "load": load}
    member["outage"] = [{"begin": "5s", "end": "6s", "every": "9s"}]
    options = msgspec.convert({"seed": 5, "member": [member]}, FixtureOptions)

    async def story(start: float, times: list[int]) -> dict[int, list[Capacity]]:
        clock = SetClock(start)
        source = create_source(options, make_context(clock, Path()))
        told = {}
        for time in times:
            clock.now = start + time / 8
            told[time] = list(await source.collect())
        return told

    every = trio.run(story, 0.0, eighths)
    some = trio.run(story, float(start), [time for index, time in enumerate(eighths) if index in chosen])
    assert some == {time: every[time] for time in some}


async def test_an_outage_of_the_source(context: SourceContext, clock: SetClock) -> None:
    source = scripted(context, outage=[{"begin": "2s", "end": "4s"}])
    assert len(await source.collect()) == 1
    clock.now += 2
    with pytest.raises(FixtureError, match=re.escape("source[0]:fixtures: scripted outage, 2.0 s after the start")):
        await source.collect()
    clock.now += 2
    assert len(await source.collect()) == 1


async def test_it_runs_on_a_simulated_clock(autojump_clock: trio.testing.MockClock, tmp_path: Path) -> None:
    source = scripted(
        make_context(trio.current_time, tmp_path), member=[{**MEMBER, "outage": [{"begin": "10m", "end": "1h"}]}]
    )
    told = []
    for _ in range(4):
        told.append(len(await source.collect()))
        await trio.sleep(20 * 60)
    assert told == [1, 0, 0, 1]


async def test_a_scenario_file(context: SourceContext, clock: SetClock) -> None:
    bursts = [{"shape": "burst", "height": 2, "every": "1s", "length": "1s"}]
    text = 'seed = "x"\n[[member]]\nnamespace = "agents"\nenv_name = "browser"\nmember_pool = "a"\nsize = 4\n'
    text += 'load = [{ shape = "burst", height = 2, every = "1s", length = "1s" }]\n'
    write(context, text, "scenario.toml")
    source = create_source(FixtureOptions(scenario="scenario.toml"), context)
    same, other = (scripted(context, seed=seed, member=[{**MEMBER, "load": bursts}]) for seed in ("x", "y"))
    stories: list[list[object]] = [[], [], []]
    for _ in range(20):
        clock.now += 1
        for story, each in zip(stories, (source, same, other), strict=True):
            story.append(await each.collect())
    assert stories[0] == stories[1] != stories[2]
    document = {"member": [MEMBER], "outage": [{"begin": "0s", "end": "1s"}]}
    write(context, json.dumps(document), "scenario.json")
    source = create_source(FixtureOptions(scenario="scenario.json"), context)
    with pytest.raises(FixtureError, match="scripted outage"):
        await source.collect()


@pytest.mark.parametrize(
    "text, told",
    [
        ("seed = 1\n", "top level: object missing required field member"),
        ("member = []\n", "member: expected array of length >= 1"),
        ('[[member]]\nnamespace = "a"\nenv_name = "b"\nsize = "4"\n', "member[0].size: expected int, got str"),
        ('path = "x.toml"\n', "unknown field path"),
        ("half = ", "not valid TOML"),
    ],
)
def test_a_wrong_scenario_file_is_told_when_the_source_is_made(
    manager: PluginManager, tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "scenario.toml").write_text(text, encoding="utf-8")
    table = PluginTable("fixtures", {"scenario": "scenario.toml"}, "source[0]")
    with pytest.raises(PluginError) as caught:
        manager.create_source(table, "west", lambda: 0.0, Random(0), tmp_path)
    assert str(caught.value).startswith("source[0]: plugin 'fixtures' cannot make its 'fixtures': FixtureError: ")
    assert str(tmp_path / "scenario.toml") in str(caught.value)
    assert told in str(caught.value)


def test_a_scenario_file_that_is_not_there(manager: PluginManager, tmp_path: Path) -> None:
    table = PluginTable("fixtures", {"scenario": "scenario.toml"}, "source[0]")
    with pytest.raises(PluginError, match="No such file or directory"):
        manager.create_source(table, "west", lambda: 0.0, Random(0), tmp_path)


# --- options

SUBDOMAIN = "a lower-case RFC 1123 subdomain (at most 253 characters)"
DURATION = 'a duration in ms, s, m or h, such as "5s"'


@pytest.mark.parametrize(
    "options, faults",
    [
        ({}, ["source[0]: give one of path, scenario and member tables; there is none"]),
        ({"path": ""}, ["source[0]: give one of path, scenario and member tables; there is none"]),
        (
            {"path": "a.toml", "scenario": "b.toml"},
            ["source[0]: give one of path, scenario and member tables; there is path and scenario"],
        ),
        (
            {"path": "a.toml", "seed": 0},
            ["source[0]: seed and outage go with member tables, not with path; write them into the file"],
        ),
        (
            {"scenario": "a.toml", "outage": [{"begin": "1s", "end": "2s"}]},
            ["source[0]: seed and outage go with member tables, not with scenario; write them into the file"],
        ),
        ({"path": "a.txt"}, ["source[0]: path 'a.txt' ends in neither .toml nor .json"]),
        ({"scenario": "a"}, ["source[0]: scenario 'a' ends in neither .toml nor .json"]),
        ({"pth": "a.toml"}, ['source[0].pth: unknown key; did you mean "path"?']),
        (
            {"path": 1, "seed": 1.5},
            [
                "source[0].path: expected a string, got a whole number",
                "source[0].seed: expected a whole number or a string, got a number",
            ],
        ),
        (
            {"member": [MEMBER, {**MEMBER, "size": 1}]},
            ["source[0]: member[1] has the names of member[0]: agents, browser, a"],
        ),
        (
            {"member": [{**MEMBER, "namespace": "A"}]},
            ["source[0].member[0].namespace: expected a lower-case RFC 1123 label (at most 63 characters)"],
        ),
        (
            {"member": [{**MEMBER, "env_name": ""}]},
            ["source[0].member[0].env_name: expected a lower-case RFC 1123 subdomain (at most 253 characters)"],
        ),
        (
            {"member": [{**MEMBER, "member_pool": "a\n"}]},
            [f'source[0].member[0].member_pool: expected {SUBDOMAIN} or ""'],
        ),
        (
            {"member": [{**MEMBER, "scaling_group": "a::b"}]},
            ['source[0].member[0].scaling_group: expected at most 63 printable ASCII characters without "::" and "//"'],
        ),
        ({"member": [{**MEMBER, "size": -1}]}, ["source[0].member[0].size: expected a whole number >= 0"]),
        (
            {"member": [{**MEMBER, "ceiling": 5}]},
            ["source[0].member[0]: ceiling means nothing without autoscaling = true"],
        ),
        (
            {"member": [{**MEMBER, "autoscaling": True, "ceiling": 3}]},
            ["source[0].member[0]: ceiling 3 is below size 4"],
        ),
        (
            {"member": [{**MEMBER, "growth_delay": 5}]},
            [f"source[0].member[0].growth_delay: expected {DURATION}, got a whole number"],
        ),
    ],
)
def test_faults_of_the_options(manager: PluginManager, options: dict[str, Any], faults: list[str]) -> None:
    assert manager.source_faults(PluginTable("fixtures", options, "source[0]")) == faults
    with pytest.raises(ConfigurationError):
        manager.create_source(PluginTable("fixtures", options, "source[0]"), "west", lambda: 0.0, Random(0), Path())


@pytest.mark.parametrize(
    "shape, faults",
    [
        ({"shape": "constant", "level": 3}, []),
        ({"shape": "constant", "level": -1}, [".level: expected a number >= 0.0"]),
        ({"shape": "constant", "level": float("nan")}, [".level: expected a number >= 0.0"]),
        ({"shape": "constant", "level": float("inf")}, [".level: expected a number <= 1000000.0"]),
        ({"shape": "wave", "high": 3, "low": 4, "period": "1s"}, [": low 4 is above high 3"]),
        ({"shape": "wave", "high": 3, "period": "0s"}, [": period must be longer than nothing"]),
        ({"shape": "burst", "height": 1, "every": "0ms", "length": "1s"}, [": every must be longer than nothing"]),
        (
            {"shape": "burst", "height": 1, "every": "1s", "length": "101s"},
            [": length 101s is more than 100 times every 1s"],
        ),
        (
            {"shape": "ramp", "firstt": 1, "last": 2},
            [
                '.firstt: unknown key; did you mean "first"?',
                ".first: is missing; the table needs it",
                ".length: is missing; the table needs it",
            ],
        ),
        ({"shape": "wav"}, ['.shape: is none of burst, constant, ramp, wave; did you mean "wave"?']),
        ({"level": 3}, [".shape: is missing; write one of burst, constant, ramp, wave"]),
    ],
)
def test_faults_of_a_shape(manager: PluginManager, shape: dict[str, Any], faults: list[str]) -> None:
    table = PluginTable("fixtures", {"member": [{**MEMBER, "load": [shape]}]}, "source[0]")
    assert manager.source_faults(table) == [f"source[0].member[0].load[0]{each}" for each in faults]


@pytest.mark.parametrize(
    "outage, told",
    [
        ({"begin": "2s", "end": "2s"}, "end 2s is not after begin 2s"),
        ({"begin": "2s", "end": "5s", "every": "2s"}, "every 2s is shorter than the outage itself"),
    ],
)
def test_faults_of_an_outage(manager: PluginManager, outage: dict[str, Any], told: str) -> None:
    table = PluginTable("fixtures", {"member": [MEMBER], "outage": [outage]}, "source[0]")
    assert manager.source_faults(table) == [f"source[0].outage[0]: {told}"]


@pytest.mark.parametrize(
    "text, value", [("200ms", 0.2), ("5s", 5.0), ("1.5s", 1.5), ("1m", 60.0), ("1h", 3600.0), ("0s", 0.0)]
)
def test_durations(text: str, value: float) -> None:
    assert msgspec.convert(text, option_tables.Duration) == text
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "-1s", "1e3s", "5S", "1.s", "٣s", "5s\n", "5sm", 5])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, option_tables.Duration)


# --- the plugin as a package


def test_only_the_public_contract_is_used() -> None:
    used = set()
    for path in sorted((PLUGIN / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names if alias.name.startswith("trio_federation")}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                if node.module == "trio_federation":
                    used |= {f"trio_federation.{alias.name}" for alias in node.names}
                else:
                    assert not str(node.module).startswith("trio_federation.")
    assert used == {
        f"trio_federation.{name}" for name in ("Capacity", "CapacitySource", "SourceContext", "SourceType", "hookimpl")
    }
    assert {name.partition(".")[2] for name in used} <= set(trio_federation.__all__)


def test_the_readme_names_every_key() -> None:
    tables: list[type[msgspec.Struct]] = [Record]
    for each in vars(option_tables).values():
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and not each.__name__.startswith("_"):
            tables.append(each)
    assert len(tables) == 9
    keys = {key for table in tables for key in table.__struct_fields__}
    assert {key for key in keys if f"`{key}`" not in README and f"`[[{key}]]`" not in README} == set()
    tags = {table.__struct_config__.tag for table in tables} - {None}
    assert tags == {"constant", "ramp", "wave", "burst"}
    assert {tag for tag in tags if f'`"{tag}"`' not in README} == set()


def example() -> dict[str, Any]:
    """The options of the README's last example."""
    text = README.partition("## Three clusters that run dry in turn")[2]
    document = tomllib.loads("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
    (table,) = document["source"]
    assert table.pop("type") == "fixtures"
    return dict(table)


def test_the_readmes_example_runs_three_clusters_dry_in_turn(manager: PluginManager) -> None:
    clock = SetClock(500.0)
    sources = {}
    for cluster_id, phase in (("west", "0s"), ("east", "5s"), ("north", "10s")):
        options = example()
        options["member"][0]["load"][0]["phase"] = phase
        table = PluginTable("fixtures", options, "source[0]")
        sources[cluster_id] = manager.create_source(table, cluster_id, clock, Random(0), Path())
    dry: list[set[str]] = []
    browsers = set()
    for quarter in range(4 * 20):
        clock.now = 500.0 + quarter / 4
        found = {cluster_id: trio.run(source.collect) for cluster_id, source in sources.items()}
        dry.append({cluster_id for cluster_id, records in found.items() if not records[0].idle})
        browsers |= {record.state for records in found.values() for record in records if record.env_name == "browser"}
    # each cluster is dry alone in the middle of its turn, for about 5 s of every 15, and never are all of them
    turns = [(2.5, "east"), (7.5, "west"), (12.5, "north"), (17.5, "east")]
    assert [dry[round(4 * second)] for second, _ in turns] == [{cluster_id} for _, cluster_id in turns]
    assert all(len(clusters) < 3 for clusters in dry)
    for cluster_id in sources:
        assert 18 <= sum(cluster_id in clusters for clusters in dry[: 4 * 15]) <= 22
    assert browsers == {"Active", "Saturated"}
