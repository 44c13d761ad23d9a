"""The package's public names: imported when they are asked for, the same ones that type checkers see, and all of
them."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import trio_federation

#: by name, the module that the imports for type checkers take it from
HOMES = {
    alias.name: node.module
    for branch in ast.parse(Path(inspect.getfile(trio_federation)).read_text(encoding="utf-8")).body
    if isinstance(branch, ast.If)
    for node in branch.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}


def test_each_name_is_what_type_checkers_take_it_for() -> None:
    """One object, wherever it is asked for."""
    assert set(HOMES) == set(trio_federation.__all__)
    for name, home in HOMES.items():
        expected = (
            importlib.import_module("trio_federation.hookspecs")
            if name == "hookspecs"
            else getattr(importlib.import_module(str(home)), name)
        )
        assert getattr(trio_federation, name) is expected


def test_all_of_them_come_with_a_star_and_show_in_dir() -> None:
    """As of any package."""
    names: dict[str, object] = {}
    exec("from trio_federation import *", names)  # noqa: S102 - our own text
    assert set(trio_federation.__all__) <= set(names)
    assert set(trio_federation.__all__) <= set(dir(trio_federation))
    assert trio_federation.__all__ == sorted(trio_federation.__all__)


def test_another_name_is_an_attribute_error() -> None:
    """Which is what `hasattr` and `from … import` build on."""
    with pytest.raises(AttributeError, match="no attribute 'Capasity'"):
        trio_federation.Capasity  # type: ignore[attr-defined]  # noqa: B018 - asking is what is tested
    with pytest.raises(ImportError, match="Capasity"):
        exec("from trio_federation import Capasity")  # noqa: S102


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """A new interpreter, since this one has it all."""
    code = (
        "import sys, trio_federation; before = set(sys.modules); "
        "print([m for m in ('trio', 'msgspec', 'prometheus_client', 'pluggy') if m in before]); "
        "from trio_federation import publish_metrics; print('prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]
