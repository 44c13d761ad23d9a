"""`trio-federation run`: runs a configuration until it is told to stop."""

from __future__ import annotations

import os
import signal
from functools import partial

import click
import trio

from trio_federation import logs, process
from trio_federation.clock import BootClock
from trio_federation.config import Config, load
from trio_federation.plugins import PluginManager


@click.command()
@click.argument("config", type=click.Path())
def run(config: str) -> None:
    """Run the agent, the hub, or both, that the file CONFIG sets up.

    Ends with exit code 0 on SIGTERM or SIGINT, after withdrawing what the agent has reported."""
    loaded = load(config, os.environ)
    logs.configure(loaded.log)
    trio.run(partial(run_until_signal, loaded, PluginManager.load()), clock=BootClock())


async def run_until_signal(config: Config, plugins: PluginManager) -> None:
    """Run a process until SIGTERM or SIGINT arrives."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(process.run, config, plugins))
            async for received in signals:
                process.log.info("stopping", signal=signal.Signals(received).name)
                nursery.cancel_scope.cancel()
                break
