"""Plugins as packages: found through the metadata of what is installed, and kept apart from their first import on."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trio_federation.config import PluginTable
from trio_federation.plugins import PluginManager

ROOT = Path(__file__).resolve().parent.parent.parent

#: a good plugin; NAME is the source type that it offers
GOOD = """
from collections.abc import Sequence
import msgspec
from trio_federation import Capacity, CapacitySource, SourceType, hookimpl

class Options(msgspec.Struct):
    pass

class Source(CapacitySource):
    async def collect(self) -> Sequence[Capacity]:
        return []

@hookimpl
def capacity_sources():
    return [SourceType("NAME", Options, lambda options, context: Source())]
"""

Install = Callable[..., None]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two empty folders at the front of sys.path, and no installed package besides what is put into them."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    elsewhere = [entry for entry in sys.path if "site-packages" not in entry and entry]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *elsewhere])
    before = set(sys.modules)
    yield folders
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


def install(
    folder: Path, name: str, code: str, *, version: str = "1.0", entry_points: str | None = None, type_: str = ""
) -> None:
    """Lay out a package as an installer does: its module, named `plugin_…`, and its metadata."""
    module = f"plugin_{name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(code.replace("NAME", type_ or name), encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    text = entry_points if entry_points is not None else f"[trio_federation]\n{name} = {module}\n"
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    importlib.invalidate_caches()


def failures() -> dict[str, str]:
    """The failures, by "plugin of package version"."""
    return {f"{each.name} of {each.package}": each.error for each in PluginManager.load().failures}


def test_nothing_is_loaded_before_it_is_asked_for(folders: list[Path]) -> None:
    install(folders[0], "bomb", "raise SystemExit('imported')")
    manager = PluginManager()
    assert manager.plugins == ()
    assert "plugin_bomb" not in sys.modules


def test_importing_the_package_loads_no_plugin() -> None:
    code = "import sys, trio_federation.plugins; print('trio_federation_fixtures' in sys.modules)"
    path = [str(ROOT), str(ROOT / "plugins/fixtures/src")]
    told = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "False\n"


def test_a_plugin_is_found_with_its_package_and_version(folders: list[Path]) -> None:
    install(folders[1], "good-one", GOOD, version="2.3")
    manager = PluginManager.load()
    (found,) = manager.plugins
    assert (found.name, found.distribution, found.version) == ("good-one", "good-one", "2.3")
    assert (found.sources, found.sinks, found.failures) == (("good-one",), (), ())
    assert list(manager.source_types) == ["good-one"]


def test_the_fixtures_are_found_through_the_entry_point_of_their_project(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "plugins/fixtures/pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["trio_federation"].items()]
    install(
        folders[0],
        project["name"],
        "",
        version=project["version"],
        entry_points="\n".join(["[trio_federation]", *lines]),
    )
    # not syspath_prepend, which puts back the path that it found, and that is already a changed one
    monkeypatch.setattr(sys, "path", [str(ROOT / "plugins/fixtures/src"), *sys.path])
    manager = PluginManager.load()
    assert manager.failures == ()
    assert [(each.distribution, each.sources) for each in manager.plugins] == [(project["name"], ("fixtures",))]
    assert manager.source_faults(PluginTable("fixtures", {"path": "x.toml"}, "source[0]")) == []


@pytest.mark.parametrize(
    "code, told",
    [
        ("import plugin_that_is_not_there", "ModuleNotFoundError: No module named 'plugin_that_is_not_there'"),
        ("from trio_federation import Capacty", "ImportError: cannot import name 'Capacty' from 'trio_federation'"),
        ("def broken(:", "SyntaxError: invalid syntax (plugin_bad.py, line 1)"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import sys\nsys.exit('no licence')", "SystemExit: no licence"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("class Panic(BaseException): pass\nraise Panic('in an extension')", "Panic: in an extension"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_told_and_the_others_are_loaded(
    folders: list[Path], code: str, told: str
) -> None:
    install(folders[0], "alpha", GOOD)
    install(folders[0], "bad", code, version="0.1")
    install(folders[0], "omega", GOOD)
    manager = PluginManager.load()
    assert list(manager.source_types) == ["alpha", "omega"]
    (failure,) = manager.failures
    assert str(failure).startswith(f"plugin 'bad' of bad 0.1: cannot be imported; mend or uninstall it: {told}")
    (fault,) = manager.source_faults(PluginTable("bad", {}, "source[0]"))
    assert told in fault
    assert "bad 0.1" in fault


def test_keyboard_interrupt_during_an_import_comes_out(folders: list[Path]) -> None:
    install(folders[0], "stopped", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginManager.load()


def test_an_entry_point_that_names_nothing(folders: list[Path]) -> None:
    install(folders[0], "good", GOOD)
    install(folders[0], "gone", "", entry_points="[trio_federation]\ngone = plugin_gone:not_there\n")
    install(folders[0], "odd", "", entry_points="[trio_federation]\nodd = not a module\n")
    manager = PluginManager.load()
    assert list(manager.source_types) == ["good"]
    told = failures()
    assert list(told) == ["gone of gone 1.0", "odd of odd 1.0"]
    assert "AttributeError: module 'plugin_gone' has no attribute 'not_there'" in told["gone of gone 1.0"]


def test_a_class_and_an_object_can_be_plugins(folders: list[Path]) -> None:
    code = GOOD + "\nclass Plugin:\n    @hookimpl\n    def capacity_sources(self):\n        return capacity_sources()\n"
    entry_points = "[trio_federation]\nplugin = plugin_objects:made\n"
    install(folders[0], "objects", code + "\nmade = Plugin()\n", entry_points=entry_points)
    assert list(PluginManager.load().source_types) == ["objects"]


def test_packages_of_others_are_left_alone(folders: list[Path]) -> None:
    install(
        folders[0], "stranger", "raise RuntimeError", entry_points="[console_scripts]\nrun = plugin_stranger:main\n"
    )
    install(folders[0], "broken-stranger", "raise RuntimeError", entry_points="[console_scripts]\nno equals sign\n")
    install(folders[0], "good", GOOD)
    assert [each.name for each in PluginManager.load().plugins] == ["good"]


def test_unreadable_entry_points_are_told_and_the_others_are_loaded(folders: list[Path]) -> None:
    install(folders[0], "good", GOOD)
    install(folders[0], "broken", "", entry_points="[trio_federation]\nno equals sign\n")
    manager = PluginManager.load()
    assert list(manager.source_types) == ["good"]
    (failure,) = manager.failures
    assert str(failure).startswith(
        "plugin 'broken' of broken 1.0: its entry points cannot be read; mend or uninstall it: "
    )


def test_packages_without_metadata_are_named_by_their_folder(folders: list[Path]) -> None:
    for name, code in (("nameless", "1 / 0"), ("unnamed", GOOD)):
        install(folders[0], name, code)
        (folders[0] / f"{name}-1.0.dist-info" / "METADATA").unlink()
    install(folders[1], "good", GOOD)
    assert list(PluginManager.load().source_types) == ["good", "unnamed"]
    assert list(failures()) == [f"nameless of (unnamed package in {folders[0]})"]


def test_of_two_installations_of_a_package_the_first_one_counts(folders: list[Path]) -> None:
    install(folders[1], "twice.installed", GOOD, version="2.0", type_="second")
    install(folders[0], "Twice-Installed", GOOD, version="1.0", type_="first")
    manager = PluginManager.load()
    assert list(manager.source_types) == ["first"]
    assert [each.version for each in manager.plugins] == ["1.0"]


def test_two_packages_with_one_type_are_both_refused_whatever_the_order_of_the_path(folders: list[Path]) -> None:
    install(folders[0], "one", GOOD, version="1.1", type_="shared")
    install(folders[1], "two", GOOD, version="2.2", type_="shared")
    rest = sys.path[2:]
    told = []
    for order in itertools.permutations(folders):
        sys.path[:] = [*map(str, order), *rest]
        manager = PluginManager.load()
        assert manager.source_types == {}
        told.append([str(each) for each in manager.failures])
    clash = (
        "source type 'shared' is refused: plugins 'one' of one 1.1 and 'two' of two 2.2 offer it; uninstall all but one"
    )
    assert told == [[f"plugin 'one' of one 1.1: {clash}", f"plugin 'two' of two 2.2: {clash}"]] * 2


def test_the_order_of_imports_is_that_of_the_names_and_not_of_the_path(folders: list[Path]) -> None:
    install(folders[0], "zebra", GOOD)
    install(folders[1], "ant", GOOD)
    PluginManager.load()
    assert [name for name in sys.modules if name.startswith("plugin_")] == ["plugin_ant", "plugin_zebra"]


def test_two_packages_with_one_plugin_name_are_both_loaded(folders: list[Path]) -> None:
    for name in ("one", "two"):
        install(folders[0], name, GOOD, entry_points=f"[trio_federation]\nsame = plugin_{name}\n")
    assert list(PluginManager.load().source_types) == ["one", "two"]


def test_managers_do_not_know_of_each_other(folders: list[Path]) -> None:
    install(folders[0], "good", GOOD)
    first, second = PluginManager.load(), PluginManager.load()
    assert list(first.source_types) == list(second.source_types) == ["good"]
    assert first.failures == second.failures == ()
