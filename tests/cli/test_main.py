"""The command line as a whole: options, exit codes, and how a failure is told."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from tests.cli.conftest import Call
from tests.process.running import COMMAND, environment, run_all
from trio_federation.cli.main import COMMANDS, commands
from trio_federation.errors import ConfigurationError, FederationError, Unavailable

GOOD = Path(__file__).resolve().parents[2] / "config" / "quickstart" / "west.toml"


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"trio-federation {version('trio-federation')}\n", [])


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["check", "-h"], *([name, "--help"] for name in COMMANDS)])
def test_help(arguments: list[str], call: Call) -> None:
    ended = call(*arguments)
    assert (ended.code, ended.lines) == (0, [])
    assert ended.output.startswith("Usage: trio-federation ")
    assert max(len(line) for line in ended.output.splitlines()) <= 80


def test_help_names_every_command(call: Call) -> None:
    text = call("--help").output
    for name, summary in COMMANDS.items():
        assert f"\n  {name.ljust(max(map(len, COMMANDS)))}  {summary}\n" in text
    assert "run" in COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name: str) -> None:
    with click.Context(commands) as context:
        found, command, rest = commands.resolve_command(context, [name, "a"])
    assert (found, rest) == (name, ["a"])
    assert command is not None
    assert command.name == name
    assert command.callback is not None


#: packages that take their time to be imported, and that only some of the commands need
SLOW = {
    "google.protobuf",
    "grpclib",
    "httpx",
    "hypercorn",
    "prometheus_client",
    "rich",
    "starlette",
    "trio_asyncio",
    "trio_federation.agent",
    "trio_federation.config",
}
_LIST_MODULES = """
import json, sys
from trio_federation.cli import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def imported(*arguments: str, **variables: str) -> set[str]:
    """Which of the slow ones a process has imported by its end."""
    ended = subprocess.run(
        [sys.executable, "-c", _LIST_MODULES, *arguments],
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout != ""
    return SLOW & set(json.loads(ended.stderr))


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_nothing_slow_is_imported_to_tell_the_version_or_to_help(argument: str) -> None:
    assert imported(argument) == set()


def test_nothing_slow_is_imported_to_complete_a_command() -> None:
    line = {"COMP_WORDS": "trio-federation st", "COMP_CWORD": "1"}
    assert imported(_TRIO_FEDERATION_COMPLETE="bash_complete", **line) == set()


def test_a_command_imports_what_it_needs_and_no_more() -> None:
    """So these tests would see what they are about."""
    assert {"grpclib", "hypercorn", "google.protobuf", "trio_federation.agent"} <= imported("run", "--help")
    assert imported("status", "--help") <= {"prometheus_client", "rich", "trio_federation.config"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "Usage: trio-federation"),
        (["checks"], "No such command 'checks'. Did you mean 'check'?"),
        (["--colour"], "No such option '--colour'"),
        (["check"], "Missing argument 'CONFIG'"),
        (["check", "a", "b"], "unexpected extra argument"),
        (["run", "--now", "a"], "No such option '--now'"),
        (["demo", "--seconds", "soon"], "'soon' is not a valid float"),
        (["demo", "--seconds", "0.5"], "0.5 is not in the range x>=1"),
        (["demo", "--seconds", "nan"], "--seconds: give a number of seconds that ends"),
        (["demo", "--seconds", "inf"], "--seconds: give a number of seconds that ends"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, call: Call) -> None:
    ended = call(*arguments)
    assert (ended.code, ended.output) == (2, "")
    assert words in "\n".join(ended.lines)
    assert "Traceback" not in "\n".join(ended.lines)


def failing(error: BaseException) -> click.Command:
    def fail() -> None:
        raise error

    return click.Command("fail", callback=fail)


@pytest.mark.parametrize(
    "error, code, lines",
    [
        (FederationError("the port is taken"), 1, ["the port is taken"]),
        (Unavailable("gone", peer="hub-a"), 1, ["hub-a: gone"]),
        (ConfigurationError(["one: bad", "two: bad"]), 2, ["one: bad", "two: bad"]),
        (ExceptionGroup("", [FederationError("one"), ExceptionGroup("", [FederationError("two")])]), 1, ["one", "two"]),
        (ExceptionGroup("", [FederationError("one"), ConfigurationError(["two: bad"])]), 2, ["one", "two: bad"]),
        (KeyboardInterrupt(), 1, ["interrupted"]),
        (BaseExceptionGroup("", [KeyboardInterrupt(), FederationError("one")]), 1, ["interrupted", "one"]),
        (click.ClickException("no"), 2, ["Error: no"]),
    ],
)
def test_failures_that_are_known(
    error: BaseException, code: int, lines: list[str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(commands.commands, "fail", failing(error))
    ended = call("fail")
    assert (ended.code, ended.output) == (code, "")
    assert [line for line in ended.lines if line] == lines


@pytest.mark.parametrize("before, traceback", [(["--verbose", "--verbose"], True), ([], False)])
def test_verbose_is_an_option_of_the_whole(
    before: list[str], traceback: bool, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere before the command; what stands behind it is the command's own."""
    fail = failing(FederationError("no"))
    fail.params = [click.Option(["--verbose"], is_flag=True, expose_value=False)]
    monkeypatch.setitem(commands.commands, "fail", fail)
    ended = call(*before, "fail", "--verbose")
    assert ended.code == 1
    assert ended.lines[-1] == "no"
    assert ("Traceback (most recent call last):" in ended.lines) == traceback


def test_tracebacks_on_request(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    error = FederationError("cannot listen")
    error.__cause__ = OSError("address in use")
    monkeypatch.setitem(commands.commands, "fail", failing(error))
    ended = call("--verbose", "fail")
    assert ended.code == 1
    assert "OSError: address in use" in ended.lines
    assert "Traceback (most recent call last):" in ended.lines
    assert ended.lines[-1] == "cannot listen"


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), ExceptionGroup("", [FederationError("known"), ValueError("a bug")])]
)
def test_a_bug_is_never_taken_for_a_known_failure(
    error: Exception, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python then ends the process with code 1 and the traceback; tests/process shows that."""
    monkeypatch.setitem(commands.commands, "fail", failing(error))
    with pytest.raises(type(error)) as raised:
        call("fail")
    assert raised.value is error


def test_an_interrupt_is_traced_on_request(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(commands.commands, "fail", failing(KeyboardInterrupt("from here")))
    ended = call("--verbose", "fail")
    assert (ended.code, ended.lines[-1]) == (1, "interrupted")
    assert "KeyboardInterrupt: from here" in ended.lines


def test_an_error_of_the_system_from_elsewhere_is_a_bug(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody should be told that it was the output."""
    monkeypatch.setitem(commands.commands, "fail", failing(OSError(errno.ENOSPC, "no space")))
    with pytest.raises(OSError, match="no space"):
        call("fail")


def in_shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What comes of a line of the shell in which $1 is the command."""
    return subprocess.run(
        ["/bin/sh", "-c", line, "sh", COMMAND],
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )


FULL = "the output cannot be written: no space left on device; send it somewhere else\n"
CLOSED = "standard output is closed, so nothing can be shown; send it somewhere\n"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments, code, said",
    [
        ("plugins >/dev/full", 1, FULL),
        ("plugins --json >/dev/full", 1, FULL),
        (f"check {GOOD} >/dev/full", 1, FULL),
        ("--version >/dev/full", 1, FULL),
        ("demo --seconds 1 >/dev/full", 1, FULL),
        ("plugins >&-", 1, CLOSED),
        ("plugins --json >&-", 1, CLOSED),
        (f"check {GOOD} >&-", 1, CLOSED),
        ("bogus 2>/dev/full", 2, ""),
        ("check bogus 2>/dev/full", 2, ""),
        ("check bogus 2>&-", 2, ""),
    ],
)
def test_an_output_that_takes_nothing(arguments: str, code: int, said: str, unbuffered: str) -> None:
    """One line, where it can be said, and no complaint of Python's at the end."""
    ended = in_shell(f'"$1" {arguments}', PYTHONUNBUFFERED=unbuffered)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", said)


async def test_as_a_process(tmp_path: Path) -> None:
    """The installed command, as a shell sees it."""
    bad = tmp_path / "bad.toml"
    bad.write_text("[hub]\nadress = 1\n")
    ended = await run_all(version=[COMMAND, "--version"], verbose=[COMMAND, "--verbose", "check", bad])
    assert {name: each.process.returncode for name, each in ended.items()} == {"version": 0, "verbose": 2}
    assert ended["version"].output == f"trio-federation {version('trio-federation')}\n"
    assert ended["version"].lines == []
    assert ended["verbose"].output == ""
    assert ended["verbose"].lines[0].startswith("Traceback")
    assert ended["verbose"].lines[-1].startswith(f"{bad}: [hub] ")
