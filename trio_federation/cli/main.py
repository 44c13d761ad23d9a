"""The `trio-federation` command: its subcommands, and how a failure ends it. Exit codes: 0 ok, 1 failed at run time, 2
bad usage or configuration."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import version

import click

from trio_federation.cli.check import check
from trio_federation.cli.demo import demo
from trio_federation.cli.run import run
from trio_federation.errors import ConfigurationError, FederationError

FAILED = 1
BAD_USAGE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("trio-federation"), message="%(prog)s %(version)s")
@click.option("--verbose", is_flag=True, help="Show tracebacks with errors.")
def commands(verbose: bool) -> None:
    """Share the runtime capacity of sandbox pools between Kubernetes clusters."""


commands.add_command(run)
commands.add_command(demo)
commands.add_command(check)


def main() -> None:
    """The entry point: runs the command line and ends the process with its exit code."""
    verbose = "--verbose" in sys.argv[1:2]
    try:
        code = commands.main(prog_name="trio-federation", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(BAD_USAGE)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(FAILED)
    except (FederationError, BaseExceptionGroup) as error:
        known = _known(error)
        if known is None:
            raise  # a fault of ours: its traceback is what is needed
        if verbose:
            traceback.print_exception(error)
        for failure in known:
            click.echo(str(failure), err=True)
        sys.exit(BAD_USAGE if any(isinstance(failure, ConfigurationError) for failure in known) else FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def _known(error: BaseException) -> list[FederationError] | None:
    """The errors of ours that `error` consists of, or None where there is anything else in it."""
    if isinstance(error, FederationError):
        return [error]
    if not isinstance(error, BaseExceptionGroup):
        return None
    found: list[FederationError] = []
    for member in error.exceptions:
        inner = _known(member)
        if inner is None:
            return None
        found += inner
    return found
