"""`trio-federation check`: tells whether a configuration can be used, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import click

from trio_federation import process
from trio_federation.cli.tables import Column, Line, Row, Section, paragraph, show, table, visible
from trio_federation.config import Config, describe, load, read_next_secret_file
from trio_federation.credentials import without_macs
from trio_federation.errors import ConfigurationError
from trio_federation.plugins import PluginManager


@click.command()
@click.argument("config", type=click.Path())
def check(config: str) -> None:
    """Validate the file CONFIG and show what it comes to; nothing is started.

    Every fault is listed, with the key and what to do about it; exit code 2 if there is one. Into a pipe or a file
    nothing is shortened."""
    plugins = PluginManager.load()
    loaded = load(config, os.environ, plugins.faults)
    if found := process.faults(loaded, plugins.faults):
        raise ConfigurationError(found)
    described = describe(loaded)
    show(lambda width: described_lines(config, described, width))
    for note in (*loaded.warnings, *_missing_files(loaded)):
        click.echo(f"note: {visible(note)}", err=True)


def _missing_files(config: Config) -> Iterator[str]:
    """What is no fault, as it is meant to come and go while a hub runs, and yet may be a path that is misspelt."""
    path = config.hub.next_secret_file if config.hub is not None else None
    with suppress(ValueError):  # a file that cannot be used is a fault; this one has become so since it was loaded
        if path is not None and read_next_secret_file(path) is None:
            what = "is empty" if os.path.exists(path) else "is not there"
            shown = repr(without_macs(path))
            yield f"{config.path}: [hub] next_secret_file: {shown} {what}, so there is no second secret now"


_SETTINGS = (Column("key"), Column("value", least=16, folds=True))


def described_lines(config: str, described: Sequence[tuple[str, str]], width: int | None) -> Iterator[Line]:
    """The lines about a configuration that is good."""
    yield from paragraph(f"{config} is good", width, style="bold green")
    yield []
    yield from table(_SETTINGS, [Section("", [Row(each) for each in described])], width)
