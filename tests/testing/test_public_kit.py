"""The public names of the test kit: imported when they are asked for, the same ones that type checkers see, all of
them, and each told of on its page."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trio_federation.testing as kit
from trio_federation.testing import invariants
from trio_federation.testing.invariants import Invariant, InvariantBroken

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"

#: by name, the module that the imports for type checkers take it from
HOMES = {
    alias.name: str(node.module)
    for branch in ast.parse(Path(inspect.getfile(kit)).read_text(encoding="utf-8")).body
    if isinstance(branch, ast.If)
    for node in branch.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
#: the rooms whose names docs/plugins.md tells of; docs/testing.md tells of the rest
OF_PLUGINS = {"conformance", "contexts", "rules"}


def test_each_name_is_what_type_checkers_take_it_for() -> None:
    """One object, wherever it is asked for."""
    assert set(HOMES) == set(kit.__all__)
    for name, home in HOMES.items():
        assert getattr(kit, name) is getattr(importlib.import_module(home), name)
        assert getattr(kit, name) is vars(kit)[name], "it is looked up once"


def test_all_of_them_come_with_a_star_and_show_in_dir() -> None:
    """As of any package."""
    names: dict[str, object] = {}
    exec("from trio_federation.testing import *", names)  # noqa: S102 - our own text
    assert set(kit.__all__) <= set(names)
    assert set(kit.__all__) <= set(dir(kit))
    capitals = [name for name in kit.__all__ if name.isupper()]
    classes = [name for name in kit.__all__ if name[0].isupper() and name not in capitals]
    functions = [name for name in kit.__all__ if name.islower()]
    assert kit.__all__ == sorted(capitals) + sorted(classes) + sorted(functions)


def test_another_name_is_an_attribute_error() -> None:
    """Which is what `hasattr` and `from … import` build on."""
    with pytest.raises(AttributeError, match="no attribute 'simulated_confederation'"):
        kit.simulated_confederation  # type: ignore[attr-defined]  # noqa: B018 - asking is what is tested
    with pytest.raises(ImportError, match="simulated_confederation"):
        exec("from trio_federation.testing import simulated_confederation")  # noqa: S102


def test_every_name_is_told_of() -> None:
    """In docs/plugins.md what is for plugins alone, in docs/testing.md everything else."""
    for name, home in HOMES.items():
        page = "plugins.md" if home.rpartition(".")[2] in OF_PLUGINS else "testing.md"
        code = re.findall(r"`([^`\n]+)`", (DOCS / page).read_text(encoding="utf-8"))
        assert any(re.search(rf"\b{name}\b", each) for each in code), f"docs/{page} does not name {name}"


def test_every_checker_is_public() -> None:
    """Each class of `invariants.py` that is an Invariant, and the error."""
    classes = {
        name
        for name, each in vars(invariants).items()
        if inspect.isclass(each) and issubclass(each, Invariant | InvariantBroken) and name[0] != "_"
    }
    assert classes <= set(kit.__all__)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """A new interpreter, since this one has it all. The plugin for pytest may cost other people's runs nothing."""
    code = (
        "import sys, pytest; before = set(sys.modules); import trio_federation.testing.pytest_plugin; "
        "print(sorted(set(sys.modules) - before - sys.stdlib_module_names)); "
        "from trio_federation.testing import member; print('trio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, needed = done.stdout.splitlines()
    assert ast.literal_eval(imported) == [
        "trio_federation",
        "trio_federation.testing",
        "trio_federation.testing.pytest_plugin",
    ]
    assert needed == "True"
