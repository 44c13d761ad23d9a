"""docs/testing.md can be followed word for word, and says of the test kit what the code says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from scripts.follow_docs import (
    Command,
    Program,
    WriteFile,
    beginners_environment,
    follow,
    read_page,
    with_installed,
)
from trio_federation import CapacitySource
from trio_federation.testing import (
    EventLog,
    Invariant,
    PushingSource,
    Route,
    ScriptedSource,
    SimulatedCluster,
    SimulatedHub,
    Simulation,
    invariants,
    pytest_plugin,
    simulated_federation,
)

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "testing.md"
TEXT = PAGE.read_text(encoding="utf-8")
#: what stands there as code, in a line or in a block
CODE = "\n".join([*re.findall(r"^```\w+\n(.*?)^```", TEXT, re.M | re.S), *re.findall(r"(?<!`)`([^`\n]+)`", TEXT)])

#: what only the parts of a simulation ask of each other
INNER = {
    EventLog: {"listening"},
    Simulation: {"every_hub", "keep_looking", "tell_carried"},
    SimulatedCluster: {"carried", "filter_makers", "has_filters", "is_reporter", "sink_makers", "source_makers"},
    Route: {"carried", "dialer", "first_word", "longest_wait", "tell_carried"},
}


def section(title: str) -> str:
    """What stands below a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found is not None, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, row by row, without their headings."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    headings = [number - 1 for number, row in enumerate(found) if set("".join(row)) <= set("-| ")]
    return [row for number, row in enumerate(found) if number not in headings and number - 1 not in headings]


@pytest.mark.slow
def test_it_can_be_followed(tmp_path: Path) -> None:
    """Every block of it: in an empty folder, with what is installed here, without a network."""
    tools, folder = tmp_path / "tools", tmp_path / "empty"
    tools.mkdir()
    folder.mkdir()
    follow(TEXT, folder, with_installed(beginners_environment(tools), tools), alone=True)


def test_it_has_the_three_tests_and_runs_them() -> None:
    """So that following it cannot succeed because there is nothing to follow."""
    steps = read_page(TEXT)
    written = {step.name: step.text for step in steps if isinstance(step, WriteFile)}
    for name, words in (
        ("test_spill_over.py", '== ["east::spare"]'),
        ("test_hub_outage.py", "fed.hubs[0].stop()"),
        ("test_shelf.py", "check_capacity_source("),
    ):
        assert "async def test_" in written[name]
        assert words in written[name]
    assert "use_source(" in written["test_shelf.py"]
    runs = [step for step in steps if isinstance(step, Command) and step.text == "pytest"]
    assert [re.findall(r"\b\d+ \w+", run.answer[-1]) for run in runs] == [["4 passed"]]
    assert len([step for step in steps if isinstance(step, Program)]) == 3


@pytest.mark.parametrize(
    "kind",
    [Simulation, SimulatedCluster, SimulatedHub, Route, ScriptedSource, PushingSource, EventLog, Invariant],
    ids=lambda kind: kind.__name__,
)
def test_it_names_everything_that_can_be_called_or_asked(kind: type) -> None:
    """But for what every source has, which is told of in docs/plugins.md."""
    names = {
        name
        for name, each in inspect.getmembers(kind)
        if name[0] != "_" and (inspect.isfunction(each) or isinstance(each, property))
    }
    if issubclass(kind, CapacitySource):
        names -= set(dir(CapacitySource))
    inner = INNER.get(kind, set())
    assert names
    assert inner <= names
    assert {name for name in names - inner if not re.search(rf"\b{name}\b", CODE)} == set()


def test_it_names_every_argument_with_its_default() -> None:
    told: dict[str, str] = {}
    for row in rows(section("Making a federation")):
        if len(row) == 3:
            told |= zip(re.findall(r"`(\w+)`", row[0]), row[2].split("; ")[0].split(", "), strict=True)
    parameters = list(inspect.signature(simulated_federation).parameters.values())[1:]
    assert sorted(told) == sorted(each.name for each in parameters)
    for each in parameters:
        shown = str(each.default).removesuffix(".0") if each.default != () else "none"
        assert told[each.name] == shown, each.name


def test_it_has_every_fixture_and_option_of_the_plugin() -> None:
    fixtures = [row[0].strip("`") for row in rows(section("When a test fails"))]
    definitions = {name for name, each in vars(pytest_plugin).items() if type(each) is type(pytest_plugin.federation)}
    assert sorted(fixtures) == sorted(definitions) == ["federation", "federation_seed"]
    assert "`--federation-seed`" in TEXT


def test_it_has_every_invariant() -> None:
    checkers = {
        name
        for name, each in vars(invariants).items()
        if inspect.isclass(each) and issubclass(each, Invariant) and each is not Invariant and name[0] != "_"
    }
    assert {row[0].strip("`") for row in rows(section("What must always hold"))} == checkers
