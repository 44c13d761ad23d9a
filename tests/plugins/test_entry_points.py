"""Plugins as packages: found through the metadata of what is installed, and kept apart from their first import on.
Whatever is wrong with one is told with its name, its package and what to do, and in no order but that of the names."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_federation.config import PluginTable
from trio_federation.plugins import PluginManager

ROOT = Path(__file__).resolve().parent.parent.parent

#: what plugins of all sorts are made of; NAME is the source type that they offer
PARTS = """
from collections.abc import Sequence
import msgspec
from trio_federation import Capacity, CapacitySource, SinkType, SourceType, hookimpl

class Options(msgspec.Struct):
    pass

class Source(CapacitySource):
    async def collect(self) -> Sequence[Capacity]:
        return []

TYPE = SourceType("NAME", Options, lambda options, context: Source())
"""

#: a good plugin
GOOD = (
    PARTS
    + """
@hookimpl
def capacity_sources():
    return [TYPE]
"""
)


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


def module_of(name: str) -> str:
    return f"plugin_{name.replace('-', '_')}"


def install(
    folder: Path, name: str, code: str, *, version: str = "1.0", entry_points: str | None = None, type_: str = ""
) -> None:
    """Lay out a package as an installer does: its module, named `plugin_…`, and its metadata."""
    module = module_of(name)
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


IMPORT = "cannot be imported; mend or uninstall it"
UNFIT = "does not fit the plugin contract"
HOOK = "hook capacity_sources failed; mend or uninstall it"


@dataclass(frozen=True)
class Broken:
    """One way for a package to be wrong, and what has to be told about it."""

    code: str
    told: str
    #: what its entry points say, in the place of "bad = plugin_bad"
    entry_points: str = "bad = plugin_bad"
    #: what it offers nevertheless
    kept: tuple[str, ...] = ()


def offering(expression: str, more: str = "") -> str:
    """A plugin whose hook returns this, which may use PARTS and what is defined in `more`."""
    return f"{PARTS}\n{more}\n@hookimpl\ndef capacity_sources():\n    return {expression}\n"


BROKEN = {
    # the import
    "import-error": Broken("import plugin_x", f"{IMPORT}: ModuleNotFoundError: No module named 'plugin_x'"),
    "no-such-name": Broken(
        "from trio_federation import Capacty", f"{IMPORT}: ImportError: cannot import name 'Capacty'"
    ),
    "syntax": Broken("def broken(:", f"{IMPORT}: SyntaxError: invalid syntax (plugin_bad.py, line 1)"),
    "encoding": Broken("# coding: klingon", f"{IMPORT}: SyntaxError: "),
    "exit-code": Broken("raise SystemExit(1)", f"{IMPORT}: SystemExit: 1"),
    "exit": Broken("import sys\nsys.exit('no licence')", f"{IMPORT}: SystemExit: no licence"),
    "error": Broken("1 / 0", f"{IMPORT}: ZeroDivisionError: division by zero"),
    "recursion": Broken("def f(): f()\nf()", f"{IMPORT}: RecursionError: maximum recursion depth exceeded"),
    "memory": Broken("raise MemoryError", f"{IMPORT}: MemoryError"),
    "own-base": Broken("class Panic(BaseException): pass\nraise Panic('in C')", f"{IMPORT}: Panic: in C"),
    "group": Broken(
        "raise ExceptionGroup('several', [ValueError('one'), KeyError('two')])",
        f"{IMPORT}: ExceptionGroup: several (2 sub-exceptions): ValueError: one, KeyError: 'two'",
    ),
    "exit-in-group": Broken(
        "raise BaseExceptionGroup('several', [SystemExit(3)])",
        f"{IMPORT}: BaseExceptionGroup: several (1 sub-exception): SystemExit: 3",
    ),
    "warning-as-error": Broken("import warnings\nwarnings.warn('it is old')", f"{IMPORT}: UserWarning: it is old"),
    # what the entry point names
    "no-such-attribute": Broken(
        GOOD,
        f"{IMPORT}: its entry point says 'plugin_bad:there.not_there', and there is no 'there'; correct the entry "
        "point, and install it again",
        "bad = plugin_bad:there.not_there",
    ),
    "none": Broken(
        "nothing = None", f"{UNFIT}; mend or uninstall it: the entry point names None", "bad = plugin_bad:nothing"
    ),
    "class": Broken(
        PARTS + "class Plugin:\n    @hookimpl\n    def capacity_sources(self):\n        return []",
        f"{UNFIT}: the entry point names the class Plugin; let it name an object of that class",
        "bad = plugin_bad:Plugin",
    ),
    # the hooks
    "no-hook": Broken("", f"{UNFIT}; mend or uninstall it: nothing in it is marked with hookimpl; the hooks are "),
    "misspelt": Broken(
        GOOD + "@hookimpl\ndef capacity_sink():\n    return []",
        f"{UNFIT}: there is no hook 'capacity_sink'; did you mean \"capacity_sinks\"?",
        kept=("bad",),
    ),
    "argument": Broken(
        PARTS + "@hookimpl\ndef capacity_sources(config):\n    return []",
        f"{UNFIT}: hook capacity_sources has no argument 'config'; the arguments that it has: none",
    ),
    "unmarked": Broken(
        GOOD.replace("@hookimpl", ""), f"{UNFIT}: capacity_sources is not marked; put @hookimpl above the function"
    ),
    "raising": Broken(offering("1 / 0"), f"{HOOK}: ZeroDivisionError: division by zero"),
    "exiting": Broken(offering("__import__('sys').exit('no licence')"), f"{HOOK}: SystemExit: no licence"),
    "half-way": Broken(
        PARTS + "@hookimpl\ndef capacity_sources():\n    yield TYPE\n    raise OSError('gone')",
        f"{HOOK}: OSError: gone",
        kept=("bad",),
    ),
    "async": Broken(
        PARTS + "@hookimpl\nasync def capacity_sources():\n    return [TYPE]",
        f"{HOOK}: it is async; make it a plain function that returns a list",
    ),
    "none-returned": Broken(
        offering("None"), f"{HOOK}: it returned None; return a list of SourceType, an empty one for none"
    ),
    "no-list": Broken(offering("TYPE"), f"{HOOK}: it returned SourceType("),
    # the types
    "no-type": Broken(offering("[TYPE, 7]"), "hook capacity_sources: 7 is no SourceType; leave it out", kept=("bad",)),
    "wrong-kind": Broken(offering("[SinkType('x', Options, Source)]"), "hook capacity_sources: SinkType(", kept=()),
    "no-label": Broken(
        offering("[SourceType('A_b', Options, Source)]"),
        "hook capacity_sources: the type name 'A_b' is no lower-case RFC 1123 label; give another",
    ),
    "no-struct": Broken(
        offering("[SourceType('bad', dict, Source)]"),
        "hook capacity_sources: the options of type 'bad' are <class 'dict'>; give a subclass of msgspec.Struct",
    ),
    "no-annotation": Broken(
        offering("[SourceType('bad', Odd, Source)]", "class Odd(msgspec.Struct):\n    path: 'Gone'\n"),
        "hook capacity_sources: the options of type 'bad' cannot be read from a table; mend Odd: NameError: name "
        "'Gone' is not defined",
    ),
    "twice": Broken(
        offering("[TYPE, TYPE]"),
        "source type 'bad' is refused: plugin 'bad' of bad 0.1 offers it 2 times; mend or uninstall it",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_told_and_the_others_are_loaded(folders: list[Path], name: str) -> None:
    broken = BROKEN[name]
    install(folders[0], "alpha", GOOD)
    install(folders[0], "bad", broken.code, version="0.1", entry_points=f"[trio_federation]\n{broken.entry_points}\n")
    install(folders[1], "omega", GOOD)
    manager = PluginManager.load()
    assert list(manager.source_types) == sorted({"alpha", "omega", *broken.kept})
    (failure,) = manager.failures
    assert (failure.name, failure.package) == ("bad", "bad 0.1")
    assert str(failure).startswith(f"plugin 'bad' of bad 0.1: {broken.told}")
    assert "\n" not in str(failure)
    assert {each.name: (each.sources, each.failures) for each in manager.plugins} == {
        "alpha": (("alpha",), ()),
        "bad": (broken.kept, (failure.error,)),
        "omega": (("omega",), ()),
    }
    # whoever asks for it is told why it is not there, and whoever asks for another is not in its way
    if not broken.kept:
        (fault,) = manager.source_faults(PluginTable("bad", {}, "source[0]"))
        assert broken.told in fault or "is refused" in fault
        assert "bad 0.1" in fault
    assert manager.source_faults(PluginTable("alpha", {}, "source[0]")) == []


@pytest.fixture(scope="module")
def all_broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package for each kind of failure, three that clash, and two good ones with one plugin name."""
    folder = tmp_path_factory.mktemp("site")
    for name, broken in BROKEN.items():
        code = broken.code.replace("plugin_bad", module_of(name))
        text = broken.entry_points.replace("plugin_bad", module_of(name))
        install(folder, name, code, entry_points=f"[trio_federation]\n{text}\n")
    for name in ("clash-a", "clash-b", "clash-c"):
        install(folder, name, GOOD, type_="shared")
    install(folder, "unreadable", GOOD, entry_points="[trio_federation]\nno equals sign\n")
    for name in ("good-a", "good-b"):
        install(folder, name, GOOD, entry_points=f"[trio_federation]\nsame = {module_of(name)}\n")
    return folder


def unload() -> None:
    """Forget the plugins' modules, so that they are imported again."""
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[name]


def load_in_order(folder: Path, order: Random | None) -> tuple[list[str], object, list[str], list[str]]:
    """Everything that a manager tells when the packages of a folder are found in some order."""
    distributions = sorted(importlib.metadata.distributions(path=[str(folder)]), key=lambda each: each.metadata["Name"])
    if order is not None:
        order.shuffle(distributions)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(importlib.metadata, "distributions", lambda: iter(distributions))
        manager = PluginManager.load()
    unload()
    asked_for = manager.source_faults(PluginTable("shared", {}, "source[0]"))
    return [str(failure) for failure in manager.failures], manager.plugins, list(manager.source_types), asked_for


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_the_order_of_packages_never_shows(all_broken: Path, order: Random) -> None:
    told = load_in_order(all_broken, order)
    assert told == load_in_order(all_broken, None)
    failures, _, types, _ = told
    # every broken package is there, and every one of the three that clash names all of them
    assert len(failures) == len(BROKEN) + 3 + 1
    assert [name for name in BROKEN if not any(f" of {name} 1.0: " in line for line in failures)] == []
    clash = "plugins 'clash-a' of clash-a 1.0 and 'clash-b' of clash-b 1.0 and 'clash-c' of clash-c 1.0 offer it"
    assert len([line for line in failures if clash in line]) == 3
    assert types == sorted(["good-a", "good-b", *(name for name, broken in BROKEN.items() if broken.kept)])


@pytest.fixture
def raise_at_import(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Installs a plugin that raises the given error itself when it is imported, and one that does so in its hook."""

    def arrange(error: BaseException) -> None:
        errors = ModuleType("plugin_errors")
        vars(errors)["error"] = error
        monkeypatch.setitem(sys.modules, "plugin_errors", errors)
        install(folders[0], "stopped", "from plugin_errors import error\nraise error")

    return arrange


STOPS = [
    KeyboardInterrupt(),
    GeneratorExit(),
    BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()]),
    BaseExceptionGroup("", [SystemExit(), BaseExceptionGroup("", [GeneratorExit()])]),
]


@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_a_wish_to_stop_during_an_import_comes_out(
    raise_at_import: Callable[[BaseException], None], stop: BaseException
) -> None:
    raise_at_import(stop)
    with pytest.raises(type(stop)) as caught:
        PluginManager.load()
    assert caught.value is stop


async def cancelled() -> trio.Cancelled:
    """A cancellation, as Trio raises it."""
    caught: list[trio.Cancelled] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            caught.append(error)
            raise
    return caught[0]


@pytest.mark.parametrize("grouped", [False, True])
async def test_cancelled_during_an_import_comes_out(
    raise_at_import: Callable[[BaseException], None], grouped: bool
) -> None:
    error = await cancelled()
    stop = BaseExceptionGroup("", [ValueError(), error]) if grouped else error
    raise_at_import(stop)
    with pytest.raises(type(stop)) as caught:
        PluginManager.load()
    assert caught.value is stop


@pytest.mark.parametrize("value", ["not a module", "plugin_odd:", "plugin_odd;x"])
def test_an_entry_point_that_names_no_module(folders: list[Path], value: str) -> None:
    install(folders[0], "good", GOOD)
    install(folders[0], "odd", GOOD, entry_points=f"[trio_federation]\nodd = {value}\n")
    manager = PluginManager.load()
    assert list(manager.source_types) == ["good"]
    (failure,) = manager.failures
    assert str(failure).startswith("plugin 'odd' of odd 1.0: ")
    # later versions of Python do not even read such an entry point
    ours = f"{IMPORT}: its entry point says {value!r}, which names no module; write MODULE or MODULE:OBJECT"
    assert failure.error == ours or failure.error.startswith("its entry points cannot be read; mend or uninstall it: ")


def test_a_warning_at_import_costs_nothing(folders: list[Path]) -> None:
    install(folders[0], "old", "import warnings\nwarnings.warn('it is old', DeprecationWarning)\n" + GOOD)
    with pytest.warns(DeprecationWarning, match="it is old"):
        manager = PluginManager.load()
    assert list(manager.source_types) == ["old"]
    assert manager.failures == ()


def test_what_a_plugin_makes_of_warnings_is_its_own_affair(folders: list[Path]) -> None:
    install(folders[0], "ant", "import warnings\nwarnings.simplefilter('error')\n" + GOOD)
    install(folders[0], "bee", "import warnings\nwarnings.warn('it is old')\n" + GOOD)
    with pytest.warns(UserWarning, match="it is old") as warned:
        manager = load_and_warn()
    assert list(manager.source_types) == ["ant", "bee"]
    assert [str(each.message) for each in warned] == ["it is old", "it is old as well"]


def load_and_warn() -> PluginManager:
    manager = PluginManager.load()
    warnings.warn("it is old as well", stacklevel=1)
    return manager


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


def test_one_package_with_one_type_under_two_names_is_to_be_mended(folders: list[Path]) -> None:
    install(folders[0], "good", GOOD)
    text = "[trio_federation]\nfirst = plugin_double\nsecond = plugin_double\n"
    install(folders[0], "double", GOOD, version="1.1", entry_points=text)
    manager = PluginManager.load()
    assert list(manager.source_types) == ["good"]
    clash = "plugins 'first' of double 1.1 and 'second' of double 1.1 offer it; mend or uninstall the package"
    assert set(failures().values()) == {f"source type 'double' is refused: {clash}"}


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
