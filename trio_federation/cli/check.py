"""`trio-federation check`: tells whether a configuration can be used, and what is wrong with it."""

from __future__ import annotations

import os

import click
from rich.console import Console
from rich.table import Table

from trio_federation import process
from trio_federation.config import describe, load
from trio_federation.errors import ConfigurationError
from trio_federation.plugins import PluginManager


@click.command()
@click.argument("config", type=click.Path())
def check(config: str) -> None:
    """Validate the file CONFIG and show what it comes to; nothing is started.

    Every fault is listed, with the key and what to do about it; exit code 2 if there is one."""
    plugins = PluginManager.load()
    loaded = load(config, os.environ, plugins.faults)
    if found := process.faults(loaded, plugins):
        raise ConfigurationError(found)
    table = Table("key", "value", title=f"{config} is good", title_justify="left")
    for key, value in describe(loaded):
        table.add_row(key, value)
    # What stands in the file is shown as it is: "[fe80::1]:7443" would pass for markup.
    Console(markup=False, emoji=False, highlight=False).print(table)
    for warning in loaded.warnings:
        click.echo(f"note: {warning}", err=True)
