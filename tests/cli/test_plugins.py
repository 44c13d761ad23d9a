"""`trio-federation plugins`: what is installed, what it offers, and what failed to load and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.cli.conftest import Call
from trio_federation import BackplaneType, FilterType, SinkType, SourceType, hookimpl
from trio_federation.cli.plugins import plugin_lines
from trio_federation.cli.tables import plain
from trio_federation.plugins import PluginManager

#: Loads the plugins that a test wants instead of those that are installed.
Installed = Callable[..., PluginManager]


class Options(msgspec.Struct):
    pass


def never(*_: object) -> Any:
    raise AssertionError("nothing is made to be listed")


def offering(**hooks: list[Any]) -> object:
    """A plugin whose hooks answer with these."""

    def hook(answer: list[Any]) -> Callable[[], list[Any]]:
        return hookimpl(lambda: answer)

    return SimpleNamespace(**{name: hook(answer) for name, answer in hooks.items()})


EVERYTHING = offering(
    capacity_sources=[SourceType("b", Options, never, "comes second"), SourceType("a", Options, never, "comes first")],
    capacity_sinks=[SinkType("a", Options, never)],
    capacity_filters=[FilterType("less", Options, never, "tells less")],
    hub_backplanes=[BackplaneType("wire", Options, never, "between hubs")],
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    def install(**plugins: object) -> PluginManager:
        manager = PluginManager()
        for name, plugin in plugins.items():
            manager.register(plugin, name)
        monkeypatch.setattr(PluginManager, "load", classmethod(lambda cls: manager))
        return manager

    return install


def install(folder: Path, name: str, code: str) -> None:
    """Lay out a package with one plugin, as an installer does."""
    (folder / f"plugin_{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trio_federation]\n{name} = plugin_{name}\n")


def test_what_is_installed(call: Call) -> None:
    """In this environment: the plugins of this repository."""
    ended = call("plugins")
    assert (ended.code, ended.lines) == (0, [])
    shown = [part.splitlines() for part in ended.output.split("\n\n")]
    plugins = json.loads(call("plugins", "--json").output)["plugins"]
    types = {plugin["name"]: [source["name"] for source in plugin["sources"]] for plugin in plugins}
    assert types == {"fixtures": ["fixtures"], "kubernetes": ["crd", "kubernetes", "sandboxset", "warmpool"]}
    sinks = {plugin["name"]: [sink["name"] for sink in plugin["sinks"]] for plugin in plugins}
    assert sinks == {"fixtures": [], "kubernetes": ["kubernetes-status"]}
    for plugin, (title, *offers) in zip(plugins, shown, strict=True):
        assert plugin["package"] == f"trio-federation-{plugin['name']}"
        assert title.startswith(f"{plugin['name']} ({plugin['package']} ")
        wanted = [
            (kind, offer["name"], offer["summary"]) for kind in ("source", "sink") for offer in plugin[f"{kind}s"]
        ]
        assert [tuple(offer.split(maxsplit=2)) for offer in offers] == wanted


def test_everything_that_a_plugin_can_offer(installed: Installed, call: Call) -> None:
    installed(everything=EVERYTHING, nothing=offering(capacity_sinks=[]))
    assert call("plugins") == (
        0,
        "everything\n"
        "  source     a     comes first\n"
        "  source     b     comes second\n"
        "  sink       a\n"
        "  filter     less  tells less\n"
        "  backplane  wire  between hubs\n"
        "\n"
        "nothing\n"
        "  offers nothing\n",
        [],
    )
    ended = call("plugins", "--json")
    assert (ended.code, ended.lines) == (0, [])
    everything, nothing = json.loads(ended.output)["plugins"]
    assert everything == {
        "name": "everything",
        "package": "",
        "version": "",
        "sources": [{"name": "a", "summary": "comes first"}, {"name": "b", "summary": "comes second"}],
        "sinks": [{"name": "a", "summary": ""}],
        "filters": [{"name": "less", "summary": "tells less"}],
        "backplanes": [{"name": "wire", "summary": "between hubs"}],
        "failures": [],
    }
    assert nothing["failures"] == nothing["sources"] == nothing["backplanes"] == []


def test_none(installed: Installed, call: Call) -> None:
    installed()
    ended = call("plugins")
    assert (ended.code, ended.lines) == (0, [])
    assert ended.output.startswith("no plugin is installed; ")
    assert json.loads(call("plugins", "--json").output) == {"plugins": [], "failures": []}


def test_failures_are_told_and_cost_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """From packages, as they are installed; and what a plugin prints while it is imported spoils nothing."""
    install(tmp_path, "gone", "print('look at me')\nraise SystemExit('[red]no\\x1b[31m')")
    install(tmp_path, "odd", "from trio_federation import hookimpl\n@hookimpl\ndef capacity_source(): return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        ended = call("plugins")
        as_json = call("plugins", "--json")
    finally:
        for name in {"plugin_gone", "plugin_odd"} - before:
            sys.modules.pop(name, None)
    assert ended.code == 1
    assert ended.lines == ["look at me"]
    lines = ended.output.splitlines()
    gone = lines.index("gone (gone 1.0)")
    assert lines[gone + 1].startswith("  failed: cannot be imported; mend or uninstall it: SystemExit: [red]no")
    assert "\x1b" not in ended.output
    odd = lines.index("odd (odd 1.0)")
    assert "capacity_source" in lines[odd + 1]
    assert lines[-1] == "failed to load: 2"
    assert as_json.code == 1
    shown = json.loads(as_json.output)
    assert [each.partition(":")[0] for each in shown["failures"]] == [
        "plugin 'gone' of gone 1.0",
        "plugin 'odd' of odd 1.0",
    ]
    by_name = {each["name"]: each for each in shown["plugins"]}
    assert [len(by_name[name]["failures"]) for name in ("fixtures", "gone", "odd")] == [0, 1, 1]


def test_types_that_clash_are_not_offered(installed: Installed, call: Call) -> None:
    same = [offering(capacity_sources=[SourceType("same", Options, never, "summary")]) for _ in range(2)]
    installed(one=same[0], two=same[1])
    ended = call("plugins")
    assert ended.code == 1
    assert "summary" not in ended.output
    assert ended.output.count("source type 'same' is refused") == 2
    assert ended.output.endswith("failed to load: 2\n")


def test_help_tells_of_the_exit_code(call: Call) -> None:
    assert "Exit code 1 if anything failed to load" in " ".join(call("plugins", "--help").output.split())


summaries = st.text(max_size=200)


@given(st.lists(summaries, min_size=1, max_size=3), st.text("abc-", max_size=60), st.text(max_size=80))
def test_it_fits(found: list[str], name: str, plugin: str) -> None:
    manager = PluginManager()
    types = [SourceType(f"a{name}{number}", Options, never, summary) for number, summary in enumerate(found)]
    manager.register(offering(capacity_sources=types), plugin)
    manager.register(offering(no_such_hook=[]), plugin)
    lines = [plain(line) for line in plugin_lines(manager, 80)]
    assert [line for line in lines if cell_len(line) > 80] == []
    assert any("failed: " in line for line in lines)
    shown = "".join(lines).replace(" ", "")
    for each in manager.source_types:
        assert each in shown or "…" in shown
