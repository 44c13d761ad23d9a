"""The events that the code logs are those that are documented: every call is found in the code's own syntax trees and
held against `trio_federation.events`, name, level and keys, both ways."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import trio_federation
from trio_federation.events import EVENTS, Event

ROOT = Path(trio_federation.__file__).parent
LEVELS = ("debug", "info", "warning", "error")
#: the events that are decided on in one place and logged in another: the function's name, and where the event stands
#: among its arguments
TELLERS = {"_tell_of_callers": 0, "tell_failure": 2, "_tell": 0, "tell": 0}


class Call(NamedTuple):
    where: str
    #: "" where it is decided at run time
    level: str
    event: str
    keys: frozenset[str]


def documented() -> dict[str, Event]:
    return {name: event for events in EVENTS.values() for name, event in events.items()}


def _strings(node: ast.expr, function: ast.AST) -> list[str]:
    """The strings that an expression can be: a constant, a choice of two, or a local name that was given one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [*_strings(node.body, function), *_strings(node.orelse, function)]
    if isinstance(node, ast.Name):
        return [
            text
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and any(isinstance(t, ast.Name) and t.id == node.id for t in each.targets)
            for text in _strings(each.value, function)
        ]
    return []


def _calls(path: Path) -> Iterator[Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            level, position = "", None
            if isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if re.fullmatch(r"(.*\.)?(log|logger)", owner) and node.func.attr in (*LEVELS, "exception"):
                    level, position = node.func.attr.replace("exception", "error"), 0
                elif node.func.attr in TELLERS and owner == "self":
                    position = TELLERS[node.func.attr]
            elif isinstance(node.func, ast.Name) and node.func.id in TELLERS:
                position = TELLERS[node.func.id]
            if position is None or len(node.args) <= position:
                continue
            keys = {keyword.arg for keyword in node.keywords if keyword.arg not in (None, "exc_info", "counts", "kind")}
            for event in _strings(node.args[position], function):
                yield Call(f"{path.name}:{node.lineno}", level, event, frozenset(filter(None, keys)))


def logged() -> list[Call]:
    # What is generated logs nothing, and the test kit writes to logs of its own.
    rooms = [path for path in sorted(ROOT.rglob("*.py")) if not {"pb", "testing"} & set(path.relative_to(ROOT).parts)]
    return [call for path in rooms for call in _calls(path)]


def test_every_event_in_the_code_is_documented_and_every_documented_one_is_there() -> None:
    """By name."""
    assert {call.event for call in logged()} == set(documented())


def test_names_are_words_for_programs() -> None:
    """So that they can be searched for, and alerted on."""
    for name, event in documented().items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert event.level in LEVELS
        assert event.meaning.endswith(".")
        assert event.advice.endswith(".") or not event.advice


def test_levels_and_keys_are_as_documented() -> None:
    """A call says nothing that is not named, and leaves nothing out that is said to be always there. Where an event is
    logged in several ways, each has a part."""
    seen: dict[str, set[str]] = {}
    for call in logged():
        event = documented()[call.event]
        assert call.level in ("", "debug", event.level), call
        named = {key.rstrip("?") for key in event.keys}
        assert call.keys <= named, call
        seen.setdefault(call.event, set()).update(call.keys)
    # Those that are told through another function have their keys from there.
    indirect = {
        "source_failed",
        "source_not_live",
        "source_trouble",
        "filter_failed",
        "sink_failed",
        "sink_trouble",
        "hub_failed",
        "hub_is_older",
    }
    for name, keys in seen.items():
        if name not in indirect:
            assert {key for key in documented()[name].keys if not key.endswith("?")} <= keys, name


def test_the_search_finds_what_it_should(tmp_path: Path) -> None:
    """A call that nobody documented would be found, in each of the forms that are used."""
    source = tmp_path / "x.py"
    source.write_text(
        "def f(ok):\n"
        "    event = 'first'\n"
        "    if ok:\n"
        "        event = 'second'\n"
        "    tell_failure(log, noted, event, {})\n"
        "    log.warning('third', key=1)\n"
        "    self.log.info('fourth' if ok else 'fifth')\n"
        "    tell('sixth')\n"
        "    self._tell('seventh', 'x')\n"
        "    log.exception('eighth')\n"
    )
    assert [call.event for call in sorted(_calls(source))] != []
    assert {call.event for call in _calls(source)} == {
        "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth",
    }  # fmt: skip
