"""`trio-federation run`: runs a configuration until it is told to stop."""

from __future__ import annotations

import os
from functools import partial

import click
import trio

from trio_federation import logs, process
from trio_federation.cli.signals import signals_cancel
from trio_federation.clock import BootClock
from trio_federation.config import Config, load
from trio_federation.plugins import PluginManager


@click.command()
@click.argument("config", type=click.Path())
def run(config: str) -> None:
    """Run the agent, the hub, or both, that the file CONFIG sets up.

    Ends with exit code 0 on SIGTERM or SIGINT, after withdrawing what the agent has reported."""
    plugins = PluginManager.load()
    loaded = load(config, os.environ, plugins.faults)
    logs.configure(loaded.log)
    trio.run(partial(run_until_signal, loaded, plugins), clock=BootClock())


async def run_until_signal(config: Config, plugins: PluginManager) -> None:
    """Run a process until SIGTERM or SIGINT arrives."""
    scope = trio.CancelScope()
    async with signals_cancel(scope, lambda name: process.log.info("stopping", signal=name)):
        with scope:
            await process.run(config, plugins)
