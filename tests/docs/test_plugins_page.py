"""docs/plugins.md can be followed word for word, and says of the contract what the code says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import trio_federation
from scripts.follow_docs import (
    Command,
    Program,
    WriteFile,
    beginners_environment,
    follow,
    read_page,
    with_installed,
)
from trio_federation import CapacitySource, hookspecs, testing
from trio_federation.events import EVENTS
from trio_federation.testing import RULES, Rule, contexts, rules

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "plugins.md"
TEXT = PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    """What stands below a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found is not None, title
    return found[1]


@pytest.mark.slow
def test_it_can_be_followed(tmp_path: Path) -> None:
    """Every block of it: in an empty folder, with what is installed here, without a network."""
    tools, folder = tmp_path / "tools", tmp_path / "empty"
    tools.mkdir()
    folder.mkdir()
    follow(TEXT, folder, with_installed(beginners_environment(tools), tools), alone=True)


def test_it_has_blocks_of_every_kind() -> None:
    steps = read_page(TEXT)
    assert {type(step) for step in steps} == {WriteFile, Command, Program}
    assert len([step for step in steps if isinstance(step, Program)]) == 3
    typed = [step.text.split()[:2] for step in steps if isinstance(step, Command)]
    for command in ("plugins", "check", "run", "status", "place"):
        assert ["trio-federation", command] in typed


def test_it_has_every_rule_in_its_order() -> None:
    rows = re.findall(r"^\| `([a-z]+)` \| (.*) \|$", section("Checking a source"), re.M)
    assert rows == [(rule.value, text) for rule, text in RULES.items()]
    assert [name for name, _ in rows] == list(Rule)


def test_it_names_every_argument_of_the_check_and_every_helper() -> None:
    told = section("Checking a source")
    for name in list(inspect.signature(testing.check_capacity_source).parameters)[1:]:
        assert f"`{name}=" in told
    # docs/testing.md tells of the rest.
    names = [name for name in testing.__all__ if hasattr(contexts, name) or hasattr(rules, name)]
    assert len(names) == 7
    for name in ("check_capacity_source", *names):
        assert f"`{name}" in told or f" {name}(" in told


def test_it_names_every_hook_and_its_type() -> None:
    told = section("What a plugin is")
    hooks = [name for name, each in vars(hookspecs).items() if hasattr(each, "trio_federation_spec")]
    assert len(hooks) == 4
    for name in hooks:
        assert f"`{name}`" in told
    for name in trio_federation.__all__:
        if name.endswith("Type"):
            assert f"`{name}`" in told


def test_it_tells_the_whole_life_of_a_source() -> None:
    rows = re.findall(r"^\| `([a-z_]+)(?:\(\))?` \|", section("The life of a source"), re.M)
    methods = {name for name, each in inspect.getmembers(CapacitySource, inspect.isfunction) if name[0] != "_"}
    assert set(rows) == methods | {"create"}


def test_the_events_that_it_names_are_logged() -> None:
    events = {name for part in EVENTS.values() for name in part}
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", section("When a plugin fails"))) - {
        "plugin_failures",
        "report_interval",
        "trio_federation_plugin_failures",
    }
    assert {"source_failed", "sink_failed", "filter_failed", "plugin_failed"} <= named
    assert named <= events
