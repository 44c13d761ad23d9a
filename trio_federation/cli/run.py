"""`trio-federation run`: runs a configuration until it is told to stop."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial

import click
import trio

from trio_federation import logs, process
from trio_federation.cli.memory import forbid_core_dumps
from trio_federation.cli.signals import signals_cancel, signals_end
from trio_federation.clock import BootClock
from trio_federation.config import Config, load
from trio_federation.errors import FederationError
from trio_federation.plugins import PluginManager


@click.command()
@click.argument("config", type=click.Path())
def run(config: str) -> None:
    """Run the agent, the hub, or both, that the file CONFIG sets up.

    Ends with exit code 0 on SIGTERM or SIGINT, after withdrawing what the agent has reported."""
    # From the first moment: a signal that comes while plugins and files are read ends well, too.
    with signals_end():
        forbid_core_dumps()
        plugins = PluginManager.load()
        loaded = load(config, os.environ, plugins.faults_of_the_file)
        logs.configure(loaded.log)
        try:
            trio.run(partial(run_until_signal, loaded, plugins), clock=BootClock())
        except (KeyboardInterrupt, BaseExceptionGroup) as error:
            if not _only_interrupts(error):
                raise
            # Ctrl-C is a signal that is taken care of.
            text = "ended by a KeyboardInterrupt that no signal has brought, but a plugin, for instance"
            raise FederationError(f"{text}; `trio-federation --verbose run` shows from where") from error
        _drop_unwritten()


def _drop_unwritten() -> None:
    """Forget what a plugin has printed and no disk has taken: Python would try again at the very end, and make an exit
    code of its own of that."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _only_interrupts(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_only_interrupts, error.exceptions))
    return isinstance(error, KeyboardInterrupt)


async def run_until_signal(config: Config, plugins: PluginManager) -> None:
    """Run a process until SIGTERM or SIGINT arrives."""
    scope = trio.CancelScope()

    def told(name: str) -> None:
        process.log.info("stopping", signal=name)

    async with signals_cancel(scope, told, ends_process=True):
        with scope:
            await process.run(config, plugins)
