"""`trio-federation plugins`: what is installed, what it offers, and what failed to load and why. Plugins are found and
loaded by the manager, as in `run`; nothing that they offer is made or started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

import click

from trio_federation.cli.tables import Column, Line, Row, Section, paragraph, show, show_json, table
from trio_federation.plugins import PluginInfo, PluginManager

#: the kinds of types that a plugin can offer: how one of them is called, and all of them
_KINDS = {"source": "sources", "sink": "sinks", "filter": "filters", "backplane": "backplanes"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """Show the plugins that are installed: what they offer, and what failed to load.

    Exit code 1 if anything failed to load; `run` then goes on with the rest."""
    # Plugins are other people's code, which may print while it is imported.
    with redirect_stdout(sys.stderr):
        manager = PluginManager.load()
    if as_json:
        show_json(as_object(manager))
    else:
        show(lambda width: plugin_lines(manager, width))
    ctx.exit(1 if manager.failures else 0)


def _offers(manager: PluginManager, plugin: PluginInfo) -> Iterator[tuple[str, str, str]]:
    """What a plugin offers that can be used: its kind, its name and what it says of itself."""
    summaries: dict[str, Mapping[str, Any]] = {
        "source": manager.source_types,
        "sink": manager.sink_types,
        "filter": manager.filter_types,
        "backplane": manager.backplane_types,
    }
    for kind, plural in _KINDS.items():
        for name in getattr(plugin, plural):
            # A summary may be anything, as its author was free to say what he liked.
            yield kind, name, str(summaries[kind][name].summary)


def as_object(manager: PluginManager) -> dict[str, Any]:
    """What `--json` prints."""
    found = []
    for plugin in manager.plugins:
        offers = list(_offers(manager, plugin))
        entry: dict[str, Any] = {"name": plugin.name, "package": plugin.distribution, "version": plugin.version}
        for kind, plural in _KINDS.items():
            entry[plural] = [{"name": name, "summary": text} for each, name, text in offers if each == kind]
        found.append(entry | {"failures": list(plugin.failures)})
    return {"plugins": found, "failures": [str(failure) for failure in manager.failures]}


_OFFERS = (Column("", least=9), Column("", least=12), Column("", least=24, folds=True))


def plugin_lines(manager: PluginManager, width: int | None) -> Iterator[Line]:
    """The lines about all plugins: for each its package, what it offers, and what is wrong with it."""
    if not manager.plugins:
        yield from paragraph(
            "no plugin is installed; capacity comes from one: pip install trio-federation-fixtures", width
        )
    for number, plugin in enumerate(manager.plugins):
        if number:
            yield []
        package = f"{plugin.distribution} {plugin.version}".strip()
        yield from paragraph(f"{plugin.name} ({package})" if package else plugin.name, width, style="bold")
        rows = [Row(offer, {0: "dim"}) for offer in _offers(manager, plugin)]
        yield from table(_OFFERS, [Section("", rows)], width, indent=2)
        for failure in plugin.failures:
            yield from paragraph(failure, width, style="red", indent=2, first="failed: ")
        if not rows and not plugin.failures:
            yield from paragraph("offers nothing", width, indent=2)
    if failures := manager.failures:
        yield []
        yield [(f"failed to load: {len(failures)}", "bold red")]
