"""The `trio-federation` command: its subcommands, and how a failure ends it. Exit codes: 0 ok, 1 failed at run time, 2
bad usage or configuration. What a subcommand does, and what it takes to do it, is imported when it is called for and
not before: `--help`, `--version` and the completion of a shell have no time for servers and streams."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import NoReturn

import click

from trio_federation.cli.signals import signals_end
from trio_federation.errors import ConfigurationError, FederationError

FAILED = 1
BAD_USAGE = 2
#: Groups in groups that a traceback shows.
_DEEPEST = 100

#: Every command, which is `trio_federation.cli.NAME.NAME`, and a few words about it: as many as completion shows, at
#: most 45 characters.
COMMANDS = {
    "check": "Validate a configuration and show it.",
    "completion": "Print what makes a shell complete words.",
    "demo": "Watch three clusters share their capacity.",
    "place": "Show where a create would go, and why.",
    "plugins": "Show the plugins, and what failed to load.",
    "run": "Run an agent, a hub, or both.",
    "status": "Show how an agent is, and what it knows.",
    "token": "Print the token of one cluster.",
}


class _Later(click.Command):
    """Stands for a command, with its name and summary, where commands are listed."""

    def load(self) -> click.Command:
        """The command itself."""
        # A process that is told to end before it has begun to run anything has nothing to undo.
        with signals_end() if self.name == "run" else nullcontext():
            command = getattr(importlib.import_module(f"trio_federation.cli.{self.name}"), str(self.name))
        assert isinstance(command, click.Command)
        return command


class _Commands(click.Group):
    """A group that imports a command when it is called, or when its options are completed."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _Later) else command, rest


@dataclass(slots=True)
class _Options:
    """What stands before the command."""

    verbose: bool = False


@click.group(
    cls=_Commands,
    commands=[_Later(name, help=summary) for name, summary in COMMANDS.items()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="trio-federation", message="%(prog)s %(version)s")
@click.option("--verbose", is_flag=True, help="Show tracebacks with errors.")
@click.pass_obj
def commands(options: _Options, verbose: bool) -> None:
    """Share the runtime capacity of sandbox pools between Kubernetes clusters."""
    options.verbose = verbose


def main() -> None:
    """The entry point: runs the command line and ends the process with its exit code."""
    options = _Options()
    try:
        code = commands.main(prog_name="trio-federation", standalone_mode=False, obj=options)
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        known = _known(error)
        if known is None:
            sys.excepthook = _tell_whole
            raise  # a fault of ours: its traceback is what is needed
        _end(error if options.verbose else None, known)
    sys.exit(code if isinstance(code, int) else 0)


def _tell_whole(_kind: type[BaseException], error: BaseException, _trace: object) -> None:
    """Print a traceback, with all that is in it: Python itself leaves out what is deep in groups, and nurseries in
    nurseries make deep ones."""
    for line in traceback.TracebackException.from_exception(error, max_group_depth=_DEEPEST).format():
        print(line, file=sys.stderr, end="")


def _end(traced: BaseException | None, known: list[Exception]) -> NoReturn:
    """Tell of failures and end the process with the exit code that they make."""
    with suppress(OSError):  # where nobody can be told, there is the exit code
        if traced is not None:
            _tell_whole(type(traced), traced, traced.__traceback__)
        for failure in known:
            if isinstance(failure, click.ClickException):
                failure.show()
            else:
                click.echo(str(failure), err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            # What could not be written is still there, and would be tried again, and complained of, at the very end.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    bad_usage = any(isinstance(failure, ConfigurationError | click.ClickException) for failure in known)
    sys.exit(BAD_USAGE if bad_usage else FAILED)


def _known(error: BaseException) -> list[Exception] | None:
    """The failures that `error` consists of, each of which tells a person what is wrong; None where there is anything
    else in it."""
    if isinstance(error, FederationError | click.ClickException):
        return [error]
    if isinstance(error, KeyboardInterrupt | click.exceptions.Abort):
        return [FederationError("interrupted")]
    if isinstance(error, OSError) and _is_about_output(error):
        reason = (error.strerror or str(error)).lower()
        return [FederationError(f"the output cannot be written: {reason}; send it somewhere else")]
    if not isinstance(error, BaseExceptionGroup):
        return None
    found: list[Exception] = []
    for member in error.exceptions:
        inner = _known(member)
        if inner is None:
            return None
        found += inner
    return found


def _is_about_output(error: OSError) -> bool:
    """Whether it comes from a write to standard output or standard error: click and rich, with which all is written
    that is for people, do nothing else with the operating system."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals["__name__"].partition(".")[0] in ("click", "rich")
